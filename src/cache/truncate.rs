//! Rewinding a sequence: speculative drafts that were rejected, or an engine's own undo.

use super::{Cache, SeqHandle};
use crate::error::CacheError;
use crate::units::GroupIdx;

impl Cache {
    /// Rewinds a sequence to its first `len` tokens. Blocks that hold none of them go back to
    /// the sequence's promise (guaranteed admission) or to the pool.
    ///
    /// A plan without windowed layers can be rewound to any length. Windowed layers keep what the
    /// window and `limits.max_rewind_tokens` ask for, in every mode alike, so a rewind further
    /// back than that is refused, except to 0.
    ///
    /// # Errors
    /// A stale or foreign handle, [`CacheError::TruncateBeyondEnd`], [`CacheError::WindowGone`];
    /// nothing changes.
    pub fn truncate(&mut self, sequence: SeqHandle, len: u32) -> Result<(), CacheError> {
        self.abandon_step();
        let slot = self.seqs.check(sequence)?;
        let record = *self.seqs.record(slot);
        if len > record.len {
            return Err(CacheError::TruncateBeyondEnd { wanted: len, len: record.len });
        }
        if len > 0 {
            self.check_rewind(len, record.high_water)?;
        }
        let high_water = if len == 0 { 0 } else { record.high_water };
        for group in 0..self.plan.groups.len() {
            let before = self.live_in(group, slot);
            let per_block = self.plan.groups[group].layout.unit_tokens;
            if self.pool.store(group).is_some() {
                self.give_back_from(group, slot, len.div_ceil(per_block));
            }
            let after = self.live_of(group, len, high_water);
            self.live_tokens[group] = self.live_tokens[group] - before + after;
        }
        let record = self.seqs.record_mut(slot);
        record.len = len;
        record.high_water = high_water;
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
