//! A second sequence with the tokens of a first.

use super::sequence::GroupState;
use super::{Cache, SeqHandle};
use crate::error::CacheError;
use crate::plan::NO_BLOCK;
use crate::units::BlockId;

impl Cache {
    /// A second sequence with the same tokens and the same limit. Blocks are shared; the first of
    /// the two that writes into the last one copies it, in the step that does. Contiguous layers
    /// are copied at once, and so are the blocks within the sequence's look-ahead, which either of
    /// the two may rewind at any time without needing room for it.
    ///
    /// Beams, several answers to one prompt and drafts are made of this, `truncate` and `release`.
    ///
    /// # Errors
    /// A stale or foreign handle, [`CacheError::NoSeqSlot`], [`CacheError::NotAdmitted`]; nothing
    /// changes.
    pub fn fork(&mut self, sequence: SeqHandle) -> Result<SeqHandle, CacheError> {
        self.abandon_step();
        let source = self.seqs.check(sequence)?;
        self.check_room_for_fork(source).inspect_err(|error| self.note_refusal(error))?;
        let record = *self.seqs.record(source);
        let no_slot = CacheError::NoSeqSlot { seq_slots: self.plan.seq_slots };
        let at = self.choose_slot(None).ok_or(no_slot)?;
        let copy = self.seqs.take_at(at, None, record.limit);
        self.begun += 1;
        let target = copy.slot;
        self.note_dirty(target);
        {
            let copy = self.seqs.record_mut(target);
            copy.begun = self.begun;
            copy.len = record.len;
            copy.high_water = record.high_water;
            copy.known = record.known;
            copy.lookahead = record.lookahead;
            copy.written = record.written;
        }
        self.share_tokens(source, target);
        for group in 0..self.plan.groups.len() {
            self.live_tokens[group] += self.live_in(group, source);
            self.share_blocks(group, source, target)?;
        }
        let copied = (0..self.plan.groups.len()).try_for_each(|group| {
            let contiguous = self.pool.store(group).is_none();
            if contiguous {
                self.copy_slot(group, source, target)
            } else {
                self.copy_unshared(group, source, target)
            }
        });
        let copied = copied
            .and_then(|()| Ok(self.pool.device.submit()?))
            .and_then(|()| self.scrub_forked_slot(target))
            .and_then(|()| self.check_scrubbed());
        if let Err(error) = copied {
            self.abandon_begun(copy, at);
            return Err(error);
        }
        self.note_shared_tails(source);
        self.counters.seqs_begun += 1;
        self.note_peaks();
        self.scrub_freed();
        Ok(copy)
    }

    /// Notes which last blocks of a sequence are now another's too.
    fn note_shared_tails(&mut self, source: u32) {
        let unshared = self.first_unshared(source);
        for group in 0..self.plan.groups.len() {
            if self.pool.store(group).is_some() {
                let state = self.seqs.state_mut(source, group);
                state.shared_tail |= unshared >= state.next;
            }
        }
    }

    /// Gives a fresh slot everything that is known of another's tokens.
    fn share_tokens(&mut self, source: u32, target: u32) {
        let record = self.seqs.record(source);
        let tokens = record.known.max(record.len) as usize;
        let Some(reuse) = &mut self.reuse else { return };
        reuse.copy_tokens(source, target, tokens);
        let mut share = reuse.seqs[source as usize];
        share.retained = 0;
        reuse.seqs[target as usize] = share;
        if let Some(index) = &mut reuse.index {
            index.add_keys(&share.keys);
        }
        if let Some(name) = reuse.names.get(source as usize).copied() {
            reuse.names[target as usize] = name;
        }
    }

    /// The first block of a row that a fork does not share: that in which the look-ahead begins.
    /// What is published is shared in any case.
    pub(super) fn first_unshared(&self, slot: u32) -> u32 {
        let record = self.seqs.record(slot);
        if record.lookahead == 0 {
            return u32::MAX;
        }
        let settled = record.len.saturating_sub(record.lookahead) >> self.block_shift;
        settled.max(self.reuse.as_ref().map_or(0, |reuse| reuse.seqs[slot as usize].published))
    }

    /// Gives a fresh slot the blocks of another's row, or copies of them from `first_unshared` on.
    /// Room has been checked.
    fn share_blocks(&mut self, group: usize, source: u32, target: u32) -> Result<(), CacheError> {
        let state = *self.seqs.state(source, group);
        if self.pool.store(group).is_none() {
            self.seqs.state_mut(target, group).holds_from = state.holds_from;
            return Ok(());
        }
        let unshared = self.first_unshared(source);
        *self.seqs.state_mut(target, group) =
            GroupState { shared_tail: unshared >= state.next, ..state };
        for at in 0..state.next {
            let block = self.entry(group, source, at);
            if block == NO_BLOCK || at >= unshared {
                continue;
            }
            if let Some(store) = self.pool.store_mut(group) {
                // Never more references than sequences and pins.
                store.add_ref(BlockId(block))?;
            }
            self.set_entry(group, target, at, block);
        }
        for at in unshared..state.next {
            if self.entry(group, source, at) != NO_BLOCK {
                let made = self.make_free(group);
                debug_assert!(made, "`check_room_for_fork` has counted it");
                let block = self.take_free(group);
                self.set_entry(group, target, at, block.map_or(NO_BLOCK, |block| block.0));
            }
        }
        self.set_tail(group, target, true);
        if let Some(store) = self.pool.store_mut(group) {
            store.promise(state.promised())?;
        }
        Ok(())
    }

    /// Copies the tokens of the blocks that a fork does not share.
    fn copy_unshared(&mut self, group: usize, source: u32, target: u32) -> Result<(), CacheError> {
        let layout = &self.plan.groups[group].layout;
        let len = self.seqs.record(source).len;
        for at in self.first_unshared(source)..self.seqs.state(source, group).next {
            let (from, to) = (self.entry(group, source, at), self.entry(group, target, at));
            let tokens = (len - at * layout.unit_tokens).min(layout.unit_tokens);
            if from != NO_BLOCK {
                let bytes = self.pool.device.queue_copy(layout, from, to, 0..tokens)?;
                self.counters.copied_bytes.0 += bytes;
            }
        }
        Ok(())
    }

    /// Copies the tokens of a contiguous group's slot to another: of each layer, kind and head the
    /// part that has ever been written.
    fn copy_slot(&mut self, group: usize, source: u32, target: u32) -> Result<(), CacheError> {
        let layout = &self.plan.groups[group].layout;
        let tokens = self.seqs.record(source).written.min(layout.unit_tokens);
        let bytes = self.pool.device.queue_copy(layout, source, target, 0..tokens)?;
        self.counters.copied_bytes.0 += bytes;
        Ok(())
    }
}
