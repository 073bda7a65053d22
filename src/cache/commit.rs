//! A step commits: its tokens become part of their sequences, and full blocks are published.

use super::batch::Batch;
use super::{Cache, group_idx};
use crate::config::Admission;
use crate::device::BatchSeq;
use crate::error::CacheError;
use crate::plan::GroupKind;
use crate::units::LayerIdx;

impl Cache {
    /// Makes the batch's tokens part of their sequences.
    pub(super) fn commit_step(&mut self) -> Result<(), CacheError> {
        let missing = self.batch.appended.len() - self.batch.num_appended;
        if missing > 0 && !self.batch.seqs.is_empty() {
            let first = self.batch.appended.iter().position(|done| !done).unwrap_or(0);
            return Err(CacheError::StepIncomplete {
                missing: u32::try_from(missing).unwrap_or(u32::MAX),
                first: LayerIdx(u32::try_from(first).unwrap_or(u32::MAX)),
            });
        }
        let deduplicated = self.counters.blocks_deduplicated;
        self.drop_replaced();
        self.ask_for_publishing();
        let in_place = self.grow_in_place();
        for at in 0..self.batch.seqs.len() {
            let BatchSeq { slot, rows, first_position, .. } = self.batch.seqs[at];
            if !in_place || self.seqs.record(slot).len == first_position {
                self.grow(slot, rows);
            }
        }
        self.counters.nonfinite += self.batch.counts.nonfinite;
        self.counters.saturated += self.batch.counts.saturated;
        if self.plan.admission == Admission::StaticBatch && !self.batch.seqs.is_empty() {
            self.batch_closed = true;
        }
        self.batch.clear();
        self.counters.steps_committed += 1;
        // `reserve` has taken the blocks. Since then more are held only where a row has left a
        // block to others and taken a cached one.
        if self.counters.blocks_deduplicated > deduplicated {
            self.note_held_peak();
        }
        self.note_used_peak();
        self.scrub_freed();
        Ok(())
    }

    /// Tells the processor which lines the sequences that are about to publish their block will
    /// touch, so that the misses of one overlap with those of the others.
    fn ask_for_publishing(&self) {
        if !self.batch.tokens_given || self.reuse.is_none() {
            return;
        }
        for (seq, end) in self.batch.seqs.iter().zip(&self.batch.seq_lens) {
            if seq.rows == 1 && end & self.block_mask == 0 {
                let at = (end >> self.block_shift) - 1;
                self.hashes_ahead(seq.slot, at..at + 1);
            }
        }
    }

    /// Makes a step's tokens part of those sequences that get one each and do nothing else by
    /// that: no block is begun, filled, shared or left behind. Says whether there may be such.
    fn grow_in_place(&mut self) -> bool {
        let Batch { seqs, positions, .. } = &self.batch;
        if seqs.len() != positions.len() || self.batch.shared_tails || self.has_windows {
            return false;
        }
        let mut grown = 0;
        for seq in seqs {
            let record = self.seqs.record_mut(seq.slot);
            let (len, new_len) = (record.len, record.len + 1);
            if len & self.block_mask == 0 || new_len & self.block_mask == 0 || record.lookahead > 0
            {
                continue;
            }
            if self.batch.tokens_given && record.known >= len {
                record.known = record.known.max(new_len);
            }
            record.len = new_len;
            record.high_water = record.high_water.max(new_len);
            grown += 1;
        }
        self.live_tokens.iter_mut().for_each(|live| *live += grown);
        self.counters.tokens_appended += grown;
        true
    }

    /// Makes a step's tokens part of one sequence.
    fn grow(&mut self, slot: u32, rows: u32) {
        let (len, old_water) = (self.seqs.record(slot).len, self.seqs.record(slot).high_water);
        let new_len = len + rows;
        let high_water = old_water.max(new_len);
        // The last block stays the last and not full: the usual case of decoding.
        let same_tail = len & self.block_mask != 0
            && new_len & self.block_mask != 0
            && len >> self.block_shift == new_len >> self.block_shift;
        for group in 0..self.plan.groups.len() {
            // Its last block was copied if anyone else held it: it is its own now.
            self.seqs.state_mut(slot, group).shared_tail = false;
            if self.plan.groups[group].window.is_none() {
                self.live_tokens[group] += u64::from(rows);
            } else {
                let before = self.live_of(group, len, old_water);
                self.live_tokens[group] += self.live_of(group, new_len, high_water);
                self.live_tokens[group] -= before;
            }
            if !same_tail {
                self.leave_tail(group, slot);
            }
        }
        let tokens_given = self.batch.tokens_given;
        let record = self.seqs.record_mut(slot);
        if tokens_given && record.known >= len {
            record.known = record.known.max(new_len);
        }
        record.len = new_len;
        record.high_water = high_water;
        self.counters.tokens_appended += u64::from(rows);
        if !same_tail {
            for group in 0..self.plan.groups.len() {
                self.set_tail(group, slot, true);
            }
        }
        if self.reuse.is_some() && (!same_tail || self.seqs.record(slot).lookahead > 0) {
            self.publish(slot);
        }
        for group in 0..self.plan.groups.len() {
            if self.plan.groups[group].window.is_some() {
                self.leave_window(group, slot);
            }
        }
    }

    /// Gives back the blocks that have left the window of a paged group.
    fn leave_window(&mut self, group: usize, slot: u32) {
        let layers = &self.plan.groups[group];
        if layers.window.is_none() || layers.kind == GroupKind::Contiguous {
            return;
        }
        let per_block = layers.layout.unit_tokens;
        let sink_blocks = layers.layout.sink_tokens.div_ceil(per_block);
        let high_water = self.seqs.record(slot).high_water;
        let first = self.plan.keep_from(group_idx(group), high_water) / per_block;
        let from = self.seqs.state(slot, group).first.max(sink_blocks);
        for at in from..first {
            self.give_back_block(group, slot, at);
        }
        let state = self.seqs.state_mut(slot, group);
        state.first = state.first.max(first);
    }
}
