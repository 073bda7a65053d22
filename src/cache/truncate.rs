//! Rewinding a sequence: speculative drafts that were rejected, or an engine's own undo.

use super::{Cache, SeqHandle, group_idx};
use crate::error::CacheError;
use crate::units::{BlockId, GroupIdx};

impl Cache {
    /// Rewinds a sequence to its first `len` tokens. Blocks that hold none of them go back to
    /// the sequence's promise (guaranteed admission) or to the pool, or stay with those who share
    /// them; what others share is copied before it is written again. What the prompt had behind
    /// `len` is forgotten: other tokens may follow. To the length that it has, nothing changes.
    ///
    /// A plan without windowed layers can be rewound to any length. Windowed layers keep what the
    /// window and `limits.max_rewind_tokens` ask for, in every mode alike, so a rewind further
    /// back than that is refused, except to 0.
    ///
    /// # Errors
    /// A stale or foreign handle, [`CacheError::TruncateBeyondEnd`], [`CacheError::WindowGone`].
    /// Under guaranteed admission [`CacheError::NotAdmitted`] when blocks that others share would
    /// have to be promised again and the pool has none left; a rewind of the sequence's own
    /// look-ahead never is. Nothing changes.
    pub fn truncate(&mut self, sequence: SeqHandle, len: u32) -> Result<(), CacheError> {
        self.abandon_step();
        let slot = self.seqs.check(sequence)?;
        let record = *self.seqs.record(slot);
        if len > record.len {
            return Err(CacheError::TruncateBeyondEnd { wanted: len, len: record.len });
        }
        if len == record.len {
            return Ok(());
        }
        if len > 0 {
            self.check_rewind(len, record.high_water)?;
        }
        if self.guaranteed() {
            self.check_promises(slot, len)?;
        }
        let high_water = if len == 0 { 0 } else { record.high_water };
        let old_len = record.len;
        for group in 0..self.plan.groups.len() {
            let before = self.live_in(group, slot);
            let per_block = self.plan.groups[group].layout.unit_tokens;
            if self.pool.store(group).is_some() {
                self.leave_tail(group, slot);
                self.give_back_from(group, slot, len.div_ceil(per_block));
                self.seqs.state_mut(slot, group).shared_tail = !len.is_multiple_of(per_block);
            }
            if len == 0 {
                self.seqs.state_mut(slot, group).holds_from = 0;
            }
            let after = self.live_of(group, len, high_water);
            self.live_tokens[group] = self.live_tokens[group] - before + after;
        }
        let record = self.seqs.record_mut(slot);
        record.len = len;
        record.high_water = high_water;
        record.known = record.known.min(len);
        for group in 0..self.plan.groups.len() {
            self.set_tail(group, slot, true);
        }
        self.unpublish_tail(slot, len);
        self.scrub_cut(slot, len, old_len);
        if len == 0 {
            // It begins anew: what its rings hold is counted from here.
            self.note_dirty(slot);
            self.seqs.record_mut(slot).written = 0;
        }
        self.scrub_freed();
        // A block that two had full is one that they have in part now.
        self.note_used_peak();
        Ok(())
    }

    /// Takes note that a sequence's block is cut, and out of the index where nobody else needs it
    /// there: then it can be written in place.
    fn unpublish_tail(&mut self, slot: u32, len: u32) {
        let per_block = self.plan.tokens_per_block;
        let Some(reuse) = &mut self.reuse else { return };
        let share = &mut reuse.seqs[slot as usize];
        let at = len / per_block;
        if share.published <= at {
            return;
        }
        share.published = at;
        let Some(lead) = self.lead() else { return };
        if len.is_multiple_of(per_block) {
            return;
        }
        let block = BlockId(self.entry(lead, slot, at));
        let alone = self.pool.store(lead).is_some_and(|store| store.holders(block) == 1);
        let is_leaf = self.index().is_some_and(|index| index.is_leaf(block.0));
        if alone && is_leaf {
            self.withdraw(lead, block);
        }
    }

    /// Refuses a rewind after which more would be promised than the pool has.
    fn check_promises(&self, slot: u32, len: u32) -> Result<(), CacheError> {
        let old_len = self.seqs.record(slot).len;
        for group in 0..self.plan.groups.len() {
            let Some(store) = self.pool.store(group) else { continue };
            let per_block = self.plan.groups[group].layout.unit_tokens;
            let keep = len.div_ceil(per_block);
            let state = self.seqs.state(slot, group);
            let mut wanted = 0_i64;
            let mut dropped = 0_u32;
            for (at, block) in self.held_blocks(group, slot) {
                let was_tail =
                    i32::from(!old_len.is_multiple_of(per_block) && at == old_len / per_block);
                if at >= keep {
                    dropped += 1;
                    wanted += store.debt_change(block, -1, -was_tail, 0);
                    wanted -= i64::from(store.references(block) == 1);
                } else {
                    let is_tail =
                        i32::from(!len.is_multiple_of(per_block) && at == len / per_block);
                    wanted += store.debt_change(block, 0, is_tail - was_tail, 0);
                }
            }
            let held = state.held - dropped;
            wanted += i64::from(state.quota.saturating_sub(held)) - i64::from(state.promised());
            if wanted > i64::from(store.unpromised()) {
                return Err(CacheError::NotAdmitted {
                    group: group_idx(group),
                    wanted: u64::try_from(wanted).unwrap_or(0),
                    available: u64::from(store.unpromised()),
                });
            }
        }
        Ok(())
    }

    /// Refuses a rewind to where a windowed layer has given tokens up.
    fn check_rewind(&self, len: u32, high_water: u32) -> Result<(), CacheError> {
        for (g, group) in (0..).zip(&self.plan.groups) {
            let Some(window) = group.window else { continue };
            let kept_from = self.plan.keep_from(GroupIdx(g), high_water);
            if (len + 1).saturating_sub(window) < kept_from {
                let shortest = kept_from + window - 1;
                return Err(CacheError::WindowGone { wanted: len, window, kept_from, shortest });
            }
        }
        Ok(())
    }
}
