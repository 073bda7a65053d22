//! A second sequence with the tokens of a first.

use super::sequence::GroupState;
use super::{Cache, SeqHandle};
use crate::error::CacheError;
use crate::plan::{Kv, NO_BLOCK, SCALE_BYTES};

impl Cache {
    /// A second sequence with the same tokens: every block and slot is copied. Its limit is the
    /// first one's.
    ///
    /// # Errors
    /// A stale or foreign handle, or as [`Cache::begin`]; nothing changes.
    pub fn fork(&mut self, sequence: SeqHandle) -> Result<SeqHandle, CacheError> {
        self.abandon_step();
        let source = self.seqs.check(sequence)?;
        let record = *self.seqs.record(source);
        self.check_room_for_fork(source)?;
        let no_slot = CacheError::NoSeqSlot { seq_slots: self.plan.seq_slots };
        let copy = self.seqs.take(None, record.limit).ok_or(no_slot)?;
        self.seqs.record_mut(copy.slot).len = record.len;
        self.seqs.record_mut(copy.slot).high_water = record.high_water;
        for group in 0..self.plan.groups.len() {
            self.live_tokens[group] += self.live_in(group, source);
        }
        let copied = (0..self.plan.groups.len())
            .try_for_each(|group| self.copy_group(group, source, copy.slot));
        if let Err(error) = copied {
            self.release(copy)?;
            return Err(error);
        }
        self.counters.seqs_begun += 1;
        self.note_peaks();
        Ok(copy)
    }

    /// Copies what `source` holds of a group to `target`, a fresh slot. Room has been checked.
    /// At every moment `target`'s state says what it holds, so that it can be released.
    fn copy_group(&mut self, group: usize, source: u32, target: u32) -> Result<(), CacheError> {
        let layout = &self.plan.groups[group].layout;
        let unit_bytes = layout.unit_bytes;
        let Some(store) = self.pool.store_mut(group) else {
            return self.copy_slot(group, source, target);
        };
        let state = *self.seqs.state(source, group);
        store.promise(state.quota)?;
        *self.seqs.state_mut(target, group) = GroupState { held: 0, next: 0, ..state };
        let row = self.plan.groups[group].max_blocks_per_seq as usize;
        for at in 0..state.next {
            self.seqs.state_mut(target, group).next = at + 1;
            let from = self.tables[group][source as usize * row + at as usize];
            if from == NO_BLOCK {
                continue;
            }
            // `check_room_for_fork` counted the blocks.
            let to = self.take_block(group, target, at).ok_or(self.exhausted(group, state.held))?;
            let layout = &self.plan.groups[group].layout;
            self.pool.device.copy(layout.unit(from), layout.unit(to.0), unit_bytes)?;
            self.counters.copied_bytes.0 += unit_bytes;
        }
        Ok(())
    }

    /// Copies the tokens of a contiguous group's slot to another: of each layer, kind and head the
    /// part that has ever been written.
    fn copy_slot(&mut self, group: usize, source: u32, target: u32) -> Result<(), CacheError> {
        let layout = &self.plan.groups[group].layout;
        let tokens = u64::from(self.seqs.record(source).high_water.min(layout.unit_tokens));
        let row_bytes = layout.row_bytes() * tokens;
        let scale_bytes = u64::from(layout.scales_per_row * SCALE_BYTES) * tokens;
        for layer in 0..layout.num_layers {
            for kv in [Kv::K, Kv::V] {
                for head in 0..layout.num_kv_heads {
                    let row = |unit| layout.row(unit, layer, kv, head, 0);
                    self.pool.device.copy(row(source), row(target), row_bytes)?;
                    let scales = |unit| layout.scales(unit, layer, kv, head, 0);
                    self.pool.device.copy(scales(source), scales(target), scale_bytes)?;
                    self.counters.copied_bytes.0 += row_bytes + scale_bytes;
                }
            }
        }
        Ok(())
    }
}
