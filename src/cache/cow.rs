//! Copy-on-write: a last block that others hold too is copied before a step writes into it.
//!
//! `reserve` turns the row's reference into a hold, so that the block stays as it is until the
//! step has committed (a cancelled step takes it back), takes another block for the row, and copies
//! exactly the row's tokens. Of several rows that end in the same block each copies but the last,
//! which writes in place if nobody else can find the block. Where the block is in the index and
//! others go on from it there, the last copies too, if there is a block to spare; if not, they go.

use super::{Cache, StepItem};
use crate::error::CacheError;
use crate::plan::{COW_BYTES, NO_BLOCK};
use crate::units::BlockId;

/// A block that a step replaces in a row by a copy.
#[derive(Clone, Copy, Debug)]
pub(super) struct Replaced {
    pub(super) group: u32,
    pub(super) slot: u32,
    pub(super) at: u32,
    /// The block that the others go on with.
    pub(super) block: u32,
}

const _: () = assert!(size_of::<Replaced>() as u64 == COW_BYTES);

impl Cache {
    /// Finds the last blocks that must be copied before a step writes, holds them, and adds the
    /// blocks for the copies to what the step wants.
    pub(super) fn hold_shared_tails<W: StepItem>(&mut self, wanted: &[W]) {
        for item in wanted {
            let slot = item.sequence().slot;
            for group in 0..self.plan.groups.len() {
                if self.seqs.state(slot, group).shared_tail {
                    self.hold_shared_tail(group, slot);
                }
            }
        }
        // What may be copied has what is left by what must be, of all rows.
        while let Some((group, slot)) = self.batch.optional.pop() {
            self.hold_tail_of_others(group as usize, slot);
        }
    }

    fn hold_shared_tail(&mut self, group: usize, slot: u32) {
        let Some((at, block)) = self.tail(group, slot) else { return };
        let Some(store) = self.pool.store(group) else { return };
        if store.holders(BlockId(block)) > 1 {
            self.hold_for_copy(group, Replaced { group: number(group), slot, at, block });
            return;
        }
        if !self.is_shareable(group, BlockId(block)) {
            self.write_in_place(group, slot, block);
            return;
        }
        let is_leaf =
            self.lead() != Some(group) || self.index().is_some_and(|index| index.is_leaf(block));
        if is_leaf {
            self.withdraw_and_write(group, slot, block);
        } else {
            self.batch.optional.push((number(group), slot));
        }
    }

    /// A last block that nobody else holds, but from which others go on in the index: a copy leaves
    /// it to them. Nothing was promised for that; without room they go.
    fn hold_tail_of_others(&mut self, group: usize, slot: u32) {
        let Some((at, block)) = self.tail(group, slot) else { return };
        if self.has_spare(group) {
            self.hold_for_copy(group, Replaced { group: number(group), slot, at, block });
        } else {
            self.withdraw_and_write(group, slot, block);
        }
    }

    /// A row's last block, if it is not full: its place in the row, and which.
    fn tail(&self, group: usize, slot: u32) -> Option<(u32, u32)> {
        let len = self.seqs.record(slot).len;
        let per_block = self.plan.groups[group].layout.unit_tokens;
        let at = len / per_block;
        (!len.is_multiple_of(per_block)).then(|| (at, self.entry(group, slot, at)))
    }

    fn hold_for_copy(&mut self, group: usize, replaced: Replaced) {
        let Some(store) = self.pool.store_mut(group) else { return };
        store.hold_tail(BlockId(replaced.block));
        self.batch.wanted[group] += 1;
        self.batch.replaced.push(replaced);
    }

    /// Nobody else holds it: taken out of the index it can be written.
    fn withdraw_and_write(&mut self, group: usize, slot: u32, block: u32) {
        self.write_in_place(group, slot, block);
        self.batch.withdrawn.push((number(group), block));
    }

    /// Whether there is a block that neither was promised nor is wanted by the step under way.
    fn has_spare(&self, group: usize) -> bool {
        let Some(store) = self.pool.store(group) else { return false };
        if self.guaranteed() {
            // What the blocks that were copied so far owed is not promised any more, and not taken
            // yet either.
            let copies = self.batch.replaced.iter().filter(|r| r.group as usize == group).count();
            store.unpromised() as usize > copies
        } else {
            u64::from(store.available()) > self.batch.wanted[group]
        }
    }

    /// A row is the only one left that holds its last block. If others of this step held it too,
    /// the longest of them writes in place and this one copies in its stead: what is written
    /// behind the longest is behind all of them, should the step be cancelled.
    fn write_in_place(&mut self, group: usize, slot: u32, block: u32) {
        let of_group =
            |replaced: &&mut Replaced| replaced.group as usize == group && replaced.block == block;
        let seqs = &self.seqs;
        let longest = self.batch.replaced.iter_mut().filter(of_group);
        let longest = longest.max_by_key(|replaced| seqs.record(replaced.slot).len);
        if let Some(other) = longest
            && seqs.record(other.slot).len > seqs.record(slot).len
        {
            // Both end in the same block, so at the same place of their rows.
            other.slot = slot;
        }
    }

    /// Takes the last blocks out of the index that a step writes in place.
    pub(super) fn withdraw_tails(&mut self) {
        while let Some((group, block)) = self.batch.withdrawn.pop() {
            if self.lead() == Some(group as usize) {
                self.prune(group as usize, block);
            }
            self.withdraw(group as usize, BlockId(block));
        }
    }

    /// Takes a block that is held out of the index, and with a block of the lead group what is
    /// attached to it: other tokens will be in them, so their handles are stale.
    pub(super) fn withdraw(&mut self, group: usize, block: BlockId) {
        if self.lead() == Some(group) {
            for windowed in 0..self.windowed_groups() {
                let (of_group, attached) = self.attached_to(windowed, block.0);
                if let Some(store) = self.pool.store_mut(of_group) {
                    store.outdate(BlockId(attached));
                }
            }
        }
        self.forget(group, block);
        if let Some(store) = self.pool.store_mut(group) {
            store.outdate(block);
        }
        self.counters.blocks_withdrawn += 1;
    }

    /// Undoes [`Cache::hold_shared_tails`], of a step that was refused.
    pub(super) fn unhold_shared_tails(&mut self) {
        self.batch.withdrawn.clear();
        while let Some(replaced) = self.batch.replaced.pop() {
            if let Some(store) = self.pool.store_mut(replaced.group as usize) {
                store.unhold_tail(BlockId(replaced.block));
            }
        }
    }

    /// Takes the blocks for the copies of a step, and copies. There are enough.
    ///
    /// # Errors
    /// The device's; the step must be undone.
    pub(super) fn copy_shared_tails(&mut self) -> Result<(), CacheError> {
        let mut copied_bytes = 0;
        for n in 0..self.batch.replaced.len() {
            let Replaced { group, slot, at, block } = self.batch.replaced[n];
            let group = group as usize;
            // The row had one block here and has one again: what it was promised stays the same.
            let copy = self.swap_block(group, slot, at).ok_or(self.exhausted(group, 1))?;
            let layout = &self.plan.groups[group].layout;
            let tokens = self.seqs.record(slot).len % layout.unit_tokens;
            copied_bytes += self.pool.device.queue_copy(layout, block, copy.0, 0..tokens)?;
        }
        self.pool.device.submit()?;
        // Counted only now: a step that fails counts nothing.
        self.counters.copied_bytes.0 += copied_bytes;
        self.counters.cow_copies += self.batch.replaced.len() as u64;
        Ok(())
    }

    /// Takes a block for a place of a row that has one.
    fn swap_block(&mut self, group: usize, slot: u32, at: u32) -> Option<BlockId> {
        if !self.make_free(group) {
            return None;
        }
        let block = self.take_free(group)?;
        self.pool.store_mut(group)?.set_tail(block, true);
        self.set_entry(group, slot, at, block.0);
        self.seqs.record_mut(slot).table_version += 1;
        Some(block)
    }

    /// Undoes the copies of a step: the last first.
    pub(super) fn undo_copies(&mut self) {
        while let Some(Replaced { group, slot, at, block }) = self.batch.replaced.pop() {
            let group = group as usize;
            let copy = self.entry(group, slot, at);
            self.set_entry(group, slot, at, block);
            let Some(store) = self.pool.store_mut(group) else { continue };
            if copy != block && copy != NO_BLOCK {
                store.set_tail(BlockId(copy), false);
                let freed = store.drop_ref(BlockId(copy));
                debug_assert!(freed.is_ok(), "the copy is the step's own");
            }
            store.unhold_tail(BlockId(block));
            self.seqs.record_mut(slot).table_version += 1;
        }
    }

    /// Lets the blocks go that a committed step has copied.
    pub(super) fn drop_replaced(&mut self) {
        for n in 0..self.batch.replaced.len() {
            let Replaced { group, block, slot, at } = self.batch.replaced[n];
            let group = group as usize;
            let block = BlockId(block);
            let keep = self.is_shareable(group, block);
            let Some(store) = self.pool.store_mut(group) else { continue };
            let last = store.drop_hold(block, keep);
            debug_assert!(last.is_ok(), "the step has held it");
            if keep && last == Ok(true) {
                self.note_parked(group, block);
            }
            self.scrub_tail(group, at, block.0, self.seqs.record(slot).len);
        }
        self.batch.replaced.clear();
    }
}

/// A group's index in the form that the buffers keep.
fn number(group: usize) -> u32 {
    u32::try_from(group).unwrap_or(u32::MAX)
}
