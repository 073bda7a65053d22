//! Restoring prefixes into slots of contiguous groups, as if sequences had been released in them.
//!
//! Each chain of the file takes one slot that is free and keeps nothing, the youngest first; slots
//! that keep something are left alone. What a slot has is then as long as its groups need: whole in
//! layers without a window, and in the others the window behind the last token.

use super::buffer_of;
use super::chain::Chain;
use super::format::{Run, Span};
use super::read::{Block, Entry, Loader, Table};
use super::write::Source;
use crate::cache::Cache;
use crate::cache::prefix::{NameWords, Namespace};
use crate::error::SaveError;
use crate::plan::{GroupKind, NO_BLOCK, SAVE_SLOT_BYTES};

/// Which positions a row keeps in a group: those below the first, and from the second on.
pub(super) type Keeps<'a> = &'a dyn Fn(&Cache, usize) -> Option<(u32, u32)>;

/// What a slot will keep.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kept {
    slot: u32,
    len: u32,
    namespace: Namespace,
}

const _: () = assert!(size_of::<Kept>() as u64 <= SAVE_SLOT_BYTES && size_of::<Span>() == 4);

/// What is staged.
#[derive(Debug)]
pub(super) struct SlotStage {
    kept: Vec<Kept>,
    /// `[kept, num_groups]`
    holds_from: Vec<u32>,
    chain: Chain,
    /// Tokens of the chain. `[max_seq_len]`
    ids: Vec<u32>,
    /// Free slots, from the youngest on, that are staged or keep something.
    passed: usize,
    /// Blocks of chains that may still be looked at in vain.
    patience: usize,
}

/// Chains of full length, beside one for each slot, that are looked at in vain. A file may have as
/// many chains as blocks, and each as many blocks as the file: without an end, a file of a few MB
/// would be read for hours.
const VAIN_CHAINS: usize = 64;

impl SlotStage {
    /// Slots that are staged.
    pub(super) fn len(&self) -> u64 {
        self.kept.len() as u64
    }
}

impl Cache {
    /// Room for all slots.
    pub(super) fn slot_stage(&self, table: &Table) -> Result<SlotStage, SaveError> {
        let (slots, groups) = (self.plan.seq_slots as usize, self.plan.groups.len());
        let longest = self.plan.limits.max_seq_len.div_ceil(table.header.block_tokens) as usize + 1;
        let kept = Kept { slot: 0, len: 0, namespace: Namespace::default() };
        let mut stage = SlotStage {
            kept: buffer_of(slots, kept)?,
            holds_from: buffer_of(slots * groups, 0)?,
            chain: Chain::new(longest, groups)?,
            ids: buffer_of(self.plan.limits.max_seq_len as usize, 0)?,
            passed: 0,
            patience: (slots + VAIN_CHAINS) * longest,
        };
        stage.kept.clear();
        stage.holds_from.clear();
        Ok(stage)
    }

    /// Writes the chains of the file into slots, as long as there are any, and patience.
    pub(super) fn stage_slots(
        &mut self,
        loader: &mut Loader,
        table: &mut Table,
        stage: &mut SlotStage,
    ) -> Result<(), SaveError> {
        self.note_usable(loader, table)?;
        for leaf in 0..table.entries.len() {
            if table.entries[leaf].has_children {
                continue;
            }
            let last = table.entries[leaf].usable;
            let Some(entry) = table.entries.get_mut(last as usize) else { continue };
            // Others part from it behind what can be used.
            if std::mem::replace(&mut entry.seen, true) {
                continue;
            }
            self.follow(loader, table, last, &mut stage.chain)?;
            if !self.stage_chain(loader, table, stage)? {
                let blocks = stage.chain.entries.len();
                let Some(patience) = stage.patience.checked_sub(blocks) else { break };
                stage.patience = patience;
            }
        }
        Ok(())
    }

    /// Notes of each block up to where its chain is whole in the layers without a window, which
    /// take no other.
    fn note_usable(&self, loader: &mut Loader, table: &mut Table) -> Result<(), SaveError> {
        let any = self.contiguous(false).next().is_some();
        for at in 0..table.entries.len() {
            let entry = table.entries[at];
            let before = table.entries.get(entry.parent as usize).map_or(NO_BLOCK, |e| e.usable);
            let goes_on = entry.parent == before && entry.start < self.plan.limits.max_seq_len;
            let is_whole = goes_on && (!any || self.slots_take(&loader.head(&entry)?));
            let own = u32::try_from(at).unwrap_or(NO_BLOCK);
            table.entries[at].usable = if is_whole { own } else { before };
        }
        Ok(())
    }

    /// Whether the contiguous layers without a window have all of a block.
    fn slots_take(&self, block: &Block<'_>) -> bool {
        let windowed = |group: usize| {
            let layers = &self.plan.groups[group];
            layers.kind != GroupKind::Contiguous || layers.window.is_some()
        };
        let mut spans = self.common_spans(block).enumerate();
        spans.all(|(group, span)| windowed(group) || span == Span::WHOLE)
    }

    /// Writes a chain into a slot, as far as it can be used; whether it was.
    fn stage_chain(
        &mut self,
        loader: &mut Loader,
        table: &mut Table,
        stage: &mut SlotStage,
    ) -> Result<bool, SaveError> {
        let Some(len) = self.usable_len(table, &mut stage.chain) else { return Ok(false) };
        let Some(namespace) = self.namespace_of_chain(table, &stage.chain, len) else {
            return Ok(false);
        };
        let retained =
            |slot: u32| self.reuse.as_ref().map_or(0, |reuse| reuse.seqs[slot as usize].retained);
        // Nothing is taken from the list, and no slot keeps more, before all chains are staged.
        let mut free = self.seqs.free.iter().rev().copied().enumerate().skip(stage.passed);
        let slot = free.find(|(_, slot)| retained(*slot) == 0);
        stage.passed = slot.map_or(self.seqs.free.len(), |(passed, _)| passed);
        self.read_ids(loader, table, &stage.chain, &mut stage.ids[..len as usize])?;
        // Without a free one it is still to be seen whether another slot has it.
        if self.is_kept(stage, &namespace, len) {
            cover_chain(table, &stage.chain, len);
            return Ok(false);
        }
        let Some((_, slot)) = slot else { return Ok(false) };
        stage.passed += 1;
        if let Some(reuse) = &mut self.reuse {
            // Nobody reads the row of a slot that keeps nothing.
            let ids = &stage.ids[..len as usize];
            reuse.tokens_mut(slot)[..len as usize].copy_from_slice(ids);
        }
        self.scrub_whole_slot(slot)?;
        self.note_dirty(slot);
        self.seqs.record_mut(slot).written = len;
        // From here on it is one to be cleaned if this fails.
        stage.kept.push(Kept { slot, len, namespace });
        stage.holds_from.extend_from_slice(&stage.chain.holds_from);
        self.write_chain(loader, table, &stage.chain, slot, len)?;
        cover_chain(table, &stage.chain, len);
        Ok(true)
    }

    /// Collects the blocks of a chain up to its last, and what the groups have of them.
    fn follow(
        &self,
        loader: &mut Loader,
        table: &Table,
        last: u32,
        chain: &mut Chain,
    ) -> Result<(), SaveError> {
        chain.entries.clear();
        let mut at = last;
        while let Some(entry) = table.entries.get(at as usize) {
            chain.entries.push(at);
            at = entry.parent;
        }
        chain.entries.reverse();
        chain.spans.clear();
        for at in &chain.entries {
            let block = loader.head(&table.entries[*at as usize])?;
            chain.spans.extend(self.common_spans(&block));
        }
        Ok(())
    }

    /// The namespace of a prompt that finds the first tokens of a chain.
    fn namespace_of_chain(&self, table: &Table, chain: &Chain, len: u32) -> Option<Namespace> {
        let words = |entry: &Entry| -> Option<&NameWords> {
            table.names.get((entry.name as usize).checked_sub(1)?)
        };
        let entries = chain.entries.iter().map(|at| &table.entries[*at as usize]);
        let mut named = entries.filter(|entry| entry.name != 0 && entry.start < len);
        let first = named.next()?;
        let salted = named.next_back();
        Namespace::of_words(
            words(first)?,
            match salted {
                Some(entry) => Some(words(entry)?),
                None => None,
            },
            salted.map_or(0, |entry| entry.start),
        )
    }

    /// Whether a slot, alive, released or staged, gives the first tokens of a chain already.
    fn is_kept(&self, stage: &SlotStage, namespace: &Namespace, len: u32) -> bool {
        let ids = &stage.ids[..len as usize];
        if self.find_donor(ids, namespace, len).is_some_and(|donor| donor.len == len) {
            return true;
        }
        let Some(reuse) = &self.reuse else { return false };
        stage.kept.iter().any(|kept| {
            kept.len >= len
                && kept.namespace == *namespace
                && reuse.tokens(kept.slot)[..len as usize] == *ids
        })
    }

    /// Reads the first tokens of a chain. `ids`: as many as are wanted.
    fn read_ids(
        &self,
        loader: &mut Loader,
        table: &Table,
        chain: &Chain,
        ids: &mut [u32],
    ) -> Result<(), SaveError> {
        for at in &chain.entries {
            let entry = table.entries[*at as usize];
            let block = loader.head(&entry)?;
            let out = ids.iter_mut().skip(entry.start as usize);
            for (token, id) in (0..entry.tokens).zip(out) {
                *id = block.id(token);
            }
        }
        Ok(())
    }

    /// Writes K, V and scales of a chain's first tokens into a slot's contiguous groups.
    fn write_chain(
        &mut self,
        loader: &mut Loader,
        table: &Table,
        chain: &Chain,
        slot: u32,
        len: u32,
    ) -> Result<(), SaveError> {
        let spans = chain.spans.chunks_exact(self.plan.groups.len());
        for (at, spans) in chain.entries.iter().zip(spans) {
            let entry = table.entries[*at as usize];
            if entry.start >= len {
                break;
            }
            let limit = len - entry.start;
            let block = loader.block(&entry, table.header.block_tokens)?;
            // What was decided by was not checked again.
            let ids = (entry.start..len).zip((0..entry.tokens).map(|token| block.id(token)));
            let known = self.reuse.as_ref().map_or(&[][..], |reuse| reuse.tokens(slot));
            let same = ids.into_iter().all(|(at, id)| known.get(at as usize) == Some(&id));
            if !same || !self.common_spans(&block).eq(spans.iter().copied()) {
                return Err(SaveError::Damaged {
                    at: entry.at,
                    problem: "another block than before",
                });
            }
            self.write_row(&block, &entry, slot, limit, &|cache, group| {
                let layers = &cache.plan.groups[group];
                if layers.kind != GroupKind::Contiguous {
                    return None;
                }
                // What a ring cannot keep of them is overwritten by what follows.
                let lost = match layers.layout.ring_tokens {
                    0 => 0,
                    ring => len.saturating_sub(ring),
                };
                Some((layers.layout.sink_tokens, lost.max(chain.holds_from[group])))
            })?;
        }
        Ok(())
    }

    /// Writes a block of the file into a slot's row, as far as the slot keeps it: of the groups
    /// that `keeps` names, what lies below its first position and from its second on.
    pub(super) fn write_row(
        &mut self,
        block: &Block<'_>,
        entry: &Entry,
        slot: u32,
        limit: u32,
        keeps: Keeps<'_>,
    ) -> Result<(), SaveError> {
        let tokens = entry.tokens.min(limit);
        for (layer, span, bytes) in block.layers() {
            let place = self.plan.layers[layer];
            let group = place.group.index();
            let Some((head, from)) = keeps(self, group) else { continue };
            let kept = Span::new(entry.start, tokens, head, from);
            for part in kept.parts(&(0..tokens)) {
                for part in span.parts(&part) {
                    let mut runs = RunList::default();
                    self.each_run(group, Source::Row(slot), entry.start, part, &mut |run| {
                        runs.push(run);
                        Ok(())
                    })?;
                    let Self { plan, pool, .. } = &mut *self;
                    let layout = &plan.groups[group].layout;
                    for run in runs.iter() {
                        block.shape().each_piece(
                            layout,
                            place.index,
                            run,
                            entry.tokens,
                            &mut |offset, range| Ok(pool.device.write(offset, &bytes[range])?),
                        )?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Nothing of what was written into slots is kept.
    pub(super) fn unstage_slots(&mut self, stage: &SlotStage) {
        for kept in &stage.kept {
            self.scrub_released_slot(kept.slot);
        }
    }

    /// Makes what was written into slots be found.
    pub(super) fn commit_slots(&mut self, stage: &SlotStage) {
        let (groups, count) = (self.plan.groups.len(), stage.len());
        let Some(reuse) = &mut self.reuse else { return };
        // They were released before every other.
        for share in reuse.seqs.iter_mut().filter(|share| share.released > 0) {
            share.released += count;
        }
        reuse.releases += count;
        for (at, kept) in stage.kept.iter().enumerate() {
            let Kept { slot, len, namespace } = *kept;
            let share = &mut reuse.seqs[slot as usize];
            share.retained = len;
            share.released = count - at as u64;
            let name = &mut reuse.names[slot as usize];
            name.namespace = namespace;
            name.epoch = Some(reuse.epoch);
            for group in 0..groups {
                self.seqs.state_mut(slot, group).holds_from = stage.holds_from[at * groups + group];
            }
        }
        for kept in &stage.kept {
            self.scrub_released_slot(kept.slot);
        }
    }
}

/// The runs of a block in a row: at most one for each token.
#[derive(Debug)]
struct RunList {
    runs: [Option<Run>; crate::config::MAX_TOKENS_PER_BLOCK as usize],
    len: usize,
}

impl Default for RunList {
    fn default() -> Self {
        Self { runs: [None; crate::config::MAX_TOKENS_PER_BLOCK as usize], len: 0 }
    }
}

impl RunList {
    fn push(&mut self, run: Run) {
        if let Some(place) = self.runs.get_mut(self.len) {
            *place = Some(run);
            self.len += 1;
        }
    }

    fn iter(&self) -> impl Iterator<Item = Run> + '_ {
        self.runs.iter().flatten().copied()
    }
}

/// Notes that the first tokens of a chain are here.
fn cover_chain(table: &mut Table, chain: &Chain, len: u32) {
    for at in &chain.entries {
        let of = &mut table.entries[*at as usize];
        let covered = len.saturating_sub(of.start).min(of.tokens);
        of.covered = of.covered.max(u16::try_from(covered).unwrap_or(u16::MAX));
    }
}
