//! Restoring prefixes into the index.
//!
//! Two parts. *Staging* takes free blocks, writes their bytes and enters them into the index, the
//! youngest first; all of that is undone in the reverse order if the device or the file fails.
//! *Committing* cannot fail: the blocks become the oldest cached ones, in the file's order, and the
//! events are told. Nothing is evicted for what is restored: where no block is free, the file's
//! older blocks are dropped.

use super::format::{Header, Run};
use super::read::{Entry, Loader, Table};
use super::{buffer_of, out_of_memory};
use crate::cache::Cache;
use crate::cache::prefix::{NameWords, PrefixIndex};
use crate::cache::retention::set_class_of_attached;
use crate::cache::reuse::Reuse;
use crate::config::MAX_TOKENS_PER_BLOCK;
use crate::error::SaveError;
use crate::plan::{GroupReuse, NO_BLOCK, SAVE_BLOCK_BYTES, SAVE_NAME_BYTES};
use crate::pool::BlockState;
use crate::units::BlockId;

/// A block that is staged: of the lead group, or of a windowed one.
#[derive(Clone, Copy, Debug)]
enum Staged {
    Lead { block: u32, class: u8, duration_ms: u64, left_ms: u64 },
    Attached { windowed: usize, lead_block: u32, block: u32 },
}

const _: () = assert!(size_of::<Staged>() as u64 <= SAVE_BLOCK_BYTES);
const _: () = assert!((size_of::<NameWords>() + 2 * size_of::<u32>()) as u64 <= SAVE_NAME_BYTES);

/// No number of a namespace was asked for yet, or there was none.
const UNNAMED: u32 = u32::MAX;
const REFUSED: u32 = u32::MAX - 1;

/// What is staged so far.
#[derive(Debug)]
pub(super) struct Stage {
    staged: Vec<Staged>,
    /// The numbers of the file's namespaces here. `[names]`
    names: Vec<u32>,
    /// Those that were taken, in that order.
    taken: Vec<u32>,
    /// Blocks of the lead group that were staged, and that were there already.
    pub(super) blocks: u64,
    pub(super) present: u64,
}

/// A block to be: the blocks of the file that it consists of end with this one.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    entry: usize,
    /// Its place on the chain.
    at: u32,
    parent: u32,
}

impl Cache {
    /// Room for everything that can be staged now.
    pub(super) fn stage(&self, table: &Table) -> Result<Stage, SaveError> {
        let groups = 0..self.plan.groups.len();
        let free =
            groups.filter_map(|group| self.pool.store(group)).map(|store| store.free() as usize);
        let per_entry = table.header.block_tokens.div_ceil(self.plan.tokens_per_block) as usize;
        let can = table.entries.len() * per_entry * self.plan.groups.len();
        let room = free.sum::<usize>().min(can);
        let mut staged = Vec::new();
        staged
            .try_reserve_exact(room)
            .map_err(|_| out_of_memory(room as u64 * SAVE_BLOCK_BYTES))?;
        let mut taken = buffer_of(table.names.len(), 0)?;
        taken.clear();
        let names = buffer_of(table.names.len(), UNNAMED)?;
        Ok(Stage { staged, names, taken, blocks: 0, present: 0 })
    }

    /// Stages every block of the file that has room.
    pub(super) fn stage_blocks(
        &mut self,
        loader: &mut Loader,
        table: &mut Table,
        stage: &mut Stage,
    ) -> Result<(), SaveError> {
        let per_block = self.plan.tokens_per_block;
        for entry in 0..table.entries.len() {
            let Entry { start, tokens, parent, .. } = table.entries[entry];
            let before = table.entries.get(parent as usize).copied();
            if before.is_some_and(|before| before.dropped) {
                table.entries[entry].dropped = true;
                continue;
            }
            let mut last = before.map_or(NO_BLOCK, |before| before.block);
            let end = (start + tokens).min(self.plan.limits.max_seq_len);
            for at in start / per_block..end / per_block {
                let wanted = Wanted { entry, at, parent: last };
                match self.stage_block(loader, table, stage, wanted)? {
                    Some(block) => last = block,
                    None => {
                        table.entries[entry].dropped = true;
                        break;
                    }
                }
            }
            table.entries[entry].block = last;
        }
        Ok(())
    }

    /// Finds or stages one block; `None` where it cannot be.
    fn stage_block(
        &mut self,
        loader: &mut Loader,
        table: &mut Table,
        stage: &mut Stage,
        wanted: Wanted,
    ) -> Result<Option<u32>, SaveError> {
        let per_block = self.plan.tokens_per_block;
        let (first, end) = (wanted.at * per_block, (wanted.at + 1) * per_block);
        let mut ids = [0_u32; MAX_TOKENS_PER_BLOCK as usize];
        let ids = &mut ids[..per_block as usize];
        let mut name = 0;
        // The last entry first: the one that was read last is used again.
        let mut entry = wanted.entry;
        loop {
            let of = table.entries[entry];
            let block = loader.block(&of, table.header.block_tokens)?;
            for position in of.start.max(first)..(of.start + of.tokens).min(end) {
                ids[(position - first) as usize] = block.id(position - of.start);
            }
            if of.start >= first && name == 0 {
                name = of.name;
            }
            if of.start <= first {
                break;
            }
            entry = of.parent as usize;
        }
        let Some(ns) = self.name_of(table, stage, name) else { return Ok(None) };
        let Some(index) = self.index() else { return Ok(None) };
        let lead = index.lead();
        let hash = index.chain(index.hash_after(wanted.parent), ids, ns);
        let block = match index.find(hash, wanted.parent, ns, ids) {
            Some(block) => {
                stage.present += 1;
                block
            }
            None => {
                if !self.is_whole(loader, table, wanted, lead)? {
                    return Ok(None);
                }
                let taken = self.take_free(lead);
                let Some(block) = taken else { return Ok(None) };
                let of = table.entries[wanted.entry];
                let head = loader.block(&of, table.header.block_tokens)?.head;
                if let Some(Reuse { index: Some(index), .. }) = &mut self.reuse {
                    index.insert(block.0, (wanted.parent, ns), ids, hash, head.class);
                }
                stage.staged.push(Staged::Lead {
                    block: block.0,
                    class: head.class,
                    duration_ms: head.duration_ms,
                    left_ms: head.left_ms,
                });
                stage.blocks += 1;
                self.write_block(loader, table, wanted, lead, block.0)?;
                block.0
            }
        };
        self.stage_attached(loader, table, stage, wanted, block)?;
        cover(table, wanted.entry, first, end);
        Ok(Some(block))
    }

    /// Stages the blocks of windowed groups that belong to a block of the lead group and are not
    /// there yet.
    fn stage_attached(
        &mut self,
        loader: &mut Loader,
        table: &Table,
        stage: &mut Stage,
        wanted: Wanted,
        lead_block: u32,
    ) -> Result<(), SaveError> {
        for windowed in 0..self.windowed_groups() {
            let Some(index) = self.index() else { return Ok(()) };
            let group = index.windowed()[windowed];
            if index.attached(windowed, lead_block) != NO_BLOCK
                || !self.is_whole(loader, table, wanted, group)?
            {
                continue;
            }
            let taken = self.take_free(group);
            let Some(block) = taken else { continue };
            if let Some(Reuse { index: Some(index), .. }) = &mut self.reuse {
                index.attach(windowed, lead_block, block.0);
            }
            stage.staged.push(Staged::Attached { windowed, lead_block, block: block.0 });
            self.write_block(loader, table, wanted, group, block.0)?;
        }
        Ok(())
    }

    /// The number here of a namespace of the file, 0 for none; `None` if there is no room for it.
    fn name_of(&mut self, table: &Table, stage: &mut Stage, name: u32) -> Option<u32> {
        let Some(at) = (name as usize).checked_sub(1) else { return Some(0) };
        let known = stage.names.get_mut(at)?;
        if *known == UNNAMED {
            let index = self.reuse.as_mut()?.index.as_mut()?;
            *known = index.take_name(&table.names[at]).unwrap_or(REFUSED);
            if *known != REFUSED {
                stage.taken.push(*known);
            }
        }
        Some(*known).filter(|known| *known != REFUSED)
    }

    /// Whether the file has a block whole, in every layer of a group.
    fn is_whole(
        &self,
        loader: &mut Loader,
        table: &Table,
        wanted: Wanted,
        group: usize,
    ) -> Result<bool, SaveError> {
        let layers = &self.plan.groups[group].layers;
        let per_block = self.plan.tokens_per_block;
        let (first, end) = (wanted.at * per_block, (wanted.at + 1) * per_block);
        let mut entry = wanted.entry;
        loop {
            let of = table.entries[entry];
            let range = of.start.max(first) - of.start..(of.start + of.tokens).min(end) - of.start;
            let block = loader.block(&of, table.header.block_tokens)?;
            if !layers.iter().all(|layer| block.span(layer.index()).covers(&range)) {
                return Ok(false);
            }
            if of.start <= first {
                return Ok(true);
            }
            entry = of.parent as usize;
        }
    }

    /// Writes K, V and scales of a group's layers into a block.
    fn write_block(
        &mut self,
        loader: &mut Loader,
        table: &Table,
        wanted: Wanted,
        group: usize,
        unit: u32,
    ) -> Result<(), SaveError> {
        let per_block = self.plan.tokens_per_block;
        let (first, end) = (wanted.at * per_block, (wanted.at + 1) * per_block);
        let mut entry = wanted.entry;
        loop {
            let of = table.entries[entry];
            let from = of.start.max(first);
            let (token, len) = (from - of.start, (of.start + of.tokens).min(end) - from);
            let block = loader.block(&of, table.header.block_tokens)?;
            let shape = block.shape();
            let Self { plan, pool, .. } = &mut *self;
            let layout = &plan.groups[group].layout;
            for (layer, _, bytes) in block.layers() {
                let place = plan.layers[layer];
                if place.group.index() != group {
                    continue;
                }
                let run = Run { unit, unit_token: from - first, token, len };
                shape.each_piece(layout, place.index, run, of.tokens, &mut |offset, range| {
                    Ok(pool.device.write(offset, &bytes[range])?)
                })?;
            }
            if of.start <= first {
                return Ok(());
            }
            entry = of.parent as usize;
        }
    }

    /// Undoes everything that was staged.
    pub(super) fn unstage(&mut self, stage: &mut Stage) {
        while let Some(staged) = stage.staged.pop() {
            let Some(Reuse { index: Some(index), .. }) = &mut self.reuse else { return };
            let (group, block) = match staged {
                Staged::Lead { block, .. } => {
                    index.remove(block);
                    (index.lead(), block)
                }
                Staged::Attached { windowed, lead_block, block } => {
                    index.detach(windowed, lead_block);
                    (index.windowed()[windowed], block)
                }
            };
            if let Some(store) = self.pool.store_mut(group) {
                let freed = store.drop_ref(BlockId(block));
                debug_assert!(freed.is_ok(), "a staged block is the stage's own");
            }
        }
        self.drop_names(stage);
    }

    fn drop_names(&mut self, stage: &mut Stage) {
        while let Some(name) = stage.taken.pop() {
            if let Some(Reuse { index: Some(index), .. }) = &mut self.reuse {
                index.drop_name(name);
            }
        }
    }

    /// Makes everything that was staged cached, and tells of it.
    pub(super) fn commit_stage(&mut self, stage: &mut Stage) {
        for at in 0..stage.staged.len() {
            self.announce(stage.staged[at]);
        }
        for staged in &stage.staged {
            let Some(index) = self.index() else { return };
            let (group, block, class) = match *staged {
                Staged::Lead { block, .. } => (index.lead(), block, None),
                Staged::Attached { windowed, lead_block, block } => {
                    let class = self.pool.store(index.lead()).map(|s| s.class(BlockId(lead_block)));
                    (index.windowed()[windowed], block, class)
                }
            };
            let Some(store) = self.pool.store_mut(group) else { return };
            if let Some(class) = class {
                store.set_class(BlockId(block), class);
            }
            let parked = store.park_oldest(BlockId(block));
            debug_assert!(parked.is_ok(), "a staged block is the stage's own");
        }
        for staged in stage.staged.iter().rev() {
            let Staged::Lead { block, left_ms, .. } = *staged else { continue };
            if let Some(reuse) = &mut self.reuse {
                reuse.scout.is_cached(block);
                reuse.expiry.start_with(block, left_ms);
            }
        }
        self.counters.blocks_published += stage.blocks;
        self.drop_names(stage);
    }

    /// Tells of a staged block, and gives it and those before it their priority.
    fn announce(&mut self, staged: Staged) {
        let Some(Reuse { index: Some(index), events, expiry, .. }) = &mut self.reuse else {
            return;
        };
        match staged {
            Staged::Attached { windowed, lead_block, block } => {
                events.attached(index.windowed()[windowed], block, lead_block);
            }
            Staged::Lead { block, class, duration_ms, .. } => {
                let mut ids = [0; MAX_TOKENS_PER_BLOCK as usize];
                let ids = &mut ids[..self.plan.tokens_per_block as usize];
                index.load_tokens(block, ids);
                let (parent, ns) = (index.parent(block), index.namespace_of(block));
                events.stored(index.lead(), block, (parent, ns), ids);
                expiry.set_duration(block, duration_ms);
                let lead = index.lead();
                if let Some(store) = self.pool.store_mut(lead) {
                    store.set_class(BlockId(block), class);
                }
                self.raise_chain(parent, class);
            }
        }
    }

    /// Raises a block and those before it to a priority. Those that are cached become the youngest
    /// of it, and so must those before them that have it already.
    fn raise_chain(&mut self, block: u32, class: u8) {
        let Some(index) = self.reuse.as_ref().and_then(|reuse| reuse.index.as_ref()) else {
            return;
        };
        let (mut at, mut moved) = (block, false);
        while at != NO_BLOCK {
            let Some(store) = self.pool.store_mut(index.lead()) else { return };
            let id = BlockId(at);
            let cached = store.get(id).is_some_and(|(state, ..)| state == BlockState::Cached);
            if store.class(id) < class {
                store.set_class(id, class);
                moved |= cached;
                set_class_of_attached(index, &mut self.pool, at, class);
            } else if store.class(id) == class && cached && moved {
                store.renew(id);
            } else {
                return;
            }
            at = index.parent(at);
        }
    }

    /// Whether prefixes are restored into slots too.
    pub(super) fn restores_slots(&self) -> bool {
        self.plan.reuse.groups.contains(&GroupReuse::Donor)
    }
}

/// Notes that the tokens `first..end` of a chain are here.
fn cover(table: &mut Table, entry: usize, first: u32, end: u32) {
    let mut at = entry;
    loop {
        let of = &mut table.entries[at];
        let covered = (of.start + of.tokens).min(end) - of.start;
        of.covered = of.covered.max(u16::try_from(covered).unwrap_or(u16::MAX));
        if of.start <= first {
            return;
        }
        at = of.parent as usize;
    }
}

/// Blocks of a file that there is room for: as many as hold all tokens of the pool, or of the
/// slots.
pub(super) fn room_for_entries(cache: &Cache, header: &Header) -> usize {
    let plan = &cache.plan;
    let units = |index: &PrefixIndex| u64::from(plan.groups[index.lead()].layout.units);
    let tokens = match cache.index() {
        Some(index) => units(index) * u64::from(plan.tokens_per_block),
        None => u64::from(plan.seq_slots) * u64::from(plan.limits.max_seq_len),
    };
    // Blocks that are not full, one for each slot, are more than that.
    let entries = tokens.div_ceil(header.block_tokens.into()) + u64::from(plan.seq_slots);
    usize::try_from(entries).unwrap_or(usize::MAX)
}
