//! The rows of the block tables: what a sequence holds of each paged group.
//!
//! An entry names a block or [`NO_BLOCK`]. Whoever puts a block into a row takes a reference, out
//! of the sequence's promise where it has one; whoever takes it out gives it back.

use super::{Cache, SeqHandle, group_idx};
use crate::error::CacheError;
use crate::plan::{GroupKind, NO_BLOCK};
use crate::pool::{BlockHandle, BlockStore};
use crate::units::{BlockId, GroupIdx};

impl Cache {
    /// An entry of a block table.
    pub(super) fn entry(&self, group: usize, slot: u32, at: u32) -> u32 {
        let row = self.plan.groups[group].max_blocks_per_seq as usize;
        self.tables[group][slot as usize * row + at as usize]
    }

    pub(super) fn set_entry(&mut self, group: usize, slot: u32, at: u32, block: u32) {
        let row = self.plan.groups[group].max_blocks_per_seq as usize;
        self.tables[group][slot as usize * row + at as usize] = block;
    }

    /// Takes a block into a row; out of the sequence's promise where it has one.
    pub(super) fn take_block(&mut self, group: usize, slot: u32, at: u32) -> Option<BlockId> {
        if !self.make_free(group) {
            return None;
        }
        let store = self.pool.store_mut(group)?;
        let state = self.seqs.state_mut(slot, group);
        let promised = state.promised();
        state.held += 1;
        // First off the promise, then out of the list: never more promised than there is.
        store.unpromise(promised - state.promised());
        let block = self.take_free(group)?;
        self.set_entry(group, slot, at, block.0);
        Some(block)
    }

    /// The error for a group that has too few blocks.
    pub(super) fn exhausted(&self, group: usize, wanted: u32) -> CacheError {
        let available = self.pool.store(group).map_or(0, BlockStore::available);
        CacheError::PoolExhausted {
            group: group_idx(group),
            wanted: u64::from(wanted),
            available: u64::from(available),
        }
    }

    /// A group's block table, row by sequence slot, and the entries of a row. Entries that name
    /// no block are [`NO_BLOCK`].
    ///
    /// # Errors
    /// A group that does not exist or is contiguous.
    pub fn block_table(&self, group: GroupIdx) -> Result<(&[u32], u32), CacheError> {
        let layers = self.plan.groups.get(group.index());
        match layers.filter(|layers| layers.kind == GroupKind::Paged) {
            Some(layers) => Ok((&self.tables[group.index()], layers.max_blocks_per_seq)),
            None => Err(self.no_such_group(group, ", or is not paged")),
        }
    }

    /// A number that changes whenever a block leaves the sequence: a row of a block table that was
    /// read under another number is stale.
    ///
    /// # Errors
    /// A stale or foreign handle.
    pub fn table_version(&self, sequence: SeqHandle) -> Result<u64, CacheError> {
        Ok(self.seqs.record(self.seqs.check(sequence)?).table_version)
    }

    /// The block that holds a position of a sequence, as a handle that can be checked later.
    ///
    /// # Errors
    /// A stale or foreign handle, a group that is not paged, a position that is not held.
    pub fn block_of(
        &self,
        sequence: SeqHandle,
        group: GroupIdx,
        position: u32,
    ) -> Result<BlockHandle, CacheError> {
        let slot = self.seqs.check(sequence)?;
        let (table, row) = self.block_table(group)?;
        let layers = &self.plan.groups[group.index()];
        let at = position / layers.layout.unit_tokens;
        let entry = slot as usize * row as usize + at as usize;
        let len = self.seqs.record(slot).len;
        let block = if position < len { table[entry] } else { NO_BLOCK };
        let store = self.pool.store(group.index());
        match store.and_then(|store| store.get(BlockId(block))) {
            Some((_, _, generation)) => Ok(BlockHandle {
                cache_id: self.cache_id,
                group,
                block: BlockId(block),
                generation,
            }),
            None => Err(CacheError::NotHeld {
                layer: layers.layers[0],
                from: position,
                to: position.saturating_add(1),
                kept_from: self.plan.keep_from(group, self.seqs.record(slot).high_water),
                len,
            }),
        }
    }

    /// The references to a block, when it still is what the handle says.
    ///
    /// # Errors
    /// A stale or foreign handle.
    pub fn block_refs(&self, handle: BlockHandle) -> Result<u32, CacheError> {
        if handle.cache_id != self.cache_id {
            return Err(CacheError::ForeignHandle);
        }
        let store = self.pool.store(handle.group.index());
        match store.and_then(|store| store.get(handle.block)) {
            Some((_, refs, generation)) if generation == handle.generation && refs > 0 => Ok(refs),
            _ => Err(CacheError::StaleBlock {
                group: handle.group,
                block: handle.block.0,
                generation: handle.generation,
            }),
        }
    }

    pub(super) fn no_such_group(&self, group: GroupIdx, kind: &'static str) -> CacheError {
        CacheError::NoSuchGroup { group, num_groups: group_idx(self.plan.groups.len()).0, kind }
    }

    /// Gives back the blocks of a row from the last down to `keep`, the reverse of the order in
    /// which they were taken.
    pub(super) fn give_back_from(&mut self, group: usize, slot: u32, keep: u32) {
        let state = *self.seqs.state(slot, group);
        for at in (keep..state.next).rev() {
            self.give_back_block(group, slot, at);
        }
        let state = self.seqs.state_mut(slot, group);
        state.next = state.next.min(keep);
        state.first = state.first.min(keep);
    }

    /// Gives back one block of a row, if the row has it.
    pub(super) fn give_back_block(&mut self, group: usize, slot: u32, at: u32) {
        let block = self.entry(group, slot, at);
        if block == NO_BLOCK {
            return;
        }
        self.set_entry(group, slot, at, NO_BLOCK);
        let state = self.seqs.state_mut(slot, group);
        let promised_before = state.promised();
        state.held -= 1;
        let promised = state.promised() - promised_before;
        self.give_up(group, BlockId(block));
        if let Some(store) = self.pool.store_mut(group) {
            let kept = store.promise(promised);
            debug_assert!(kept.is_ok(), "the block that came back can be promised");
        }
        self.scrub_tail(group, at, block, self.seqs.record(slot).len);
        self.seqs.record_mut(slot).table_version += 1;
    }

    /// The blocks that a sequence holds of a group, with their places in its row.
    pub(super) fn held_blocks(
        &self,
        group: usize,
        slot: u32,
    ) -> impl Iterator<Item = (u32, BlockId)> + '_ {
        let row = self.plan.groups[group].max_blocks_per_seq as usize;
        let next = self.seqs.state(slot, group).next as usize;
        let entries = &self.tables[group][slot as usize * row..][..next];
        (0..).zip(entries).filter(|(_, block)| **block != NO_BLOCK).map(|(at, b)| (at, BlockId(*b)))
    }

    /// Notes that the last block of a row is no tail any more: it is full, or the sequence goes.
    pub(super) fn leave_tail(&mut self, group: usize, slot: u32) {
        self.set_tail(group, slot, false);
    }

    /// Notes that the last block of a row is its tail, or no more, if it is not full.
    pub(super) fn set_tail(&mut self, group: usize, slot: u32, tail: bool) {
        let len = self.seqs.record(slot).len;
        let layers = &self.plan.groups[group];
        let per_block = layers.layout.unit_tokens;
        if layers.kind == GroupKind::Contiguous || len.is_multiple_of(per_block) {
            return;
        }
        let block = self.entry(group, slot, len / per_block);
        if let Some(store) = self.pool.store_mut(group)
            && block != NO_BLOCK
        {
            store.set_tail(BlockId(block), tail);
        }
    }
}
