//! Counters and gauges, and the peaks that are noted on the way.
//!
//! Gauges are computed when they are asked for, from what the cache keeps anyway.

use super::{Cache, group_idx};
use crate::plan::GroupKind;
use crate::pool::{BlockState, BlockStore, GroupStats, MAX_PRIORITY, Stats};
use crate::units::{BlockId, Bytes, GroupIdx};

impl Cache {
    /// Counters and gauges.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let (active, promised, cached) = self.pool.block_bytes(&self.plan);
        Stats {
            cached_bytes: cached,
            seqs: self.seqs.alive(),
            used_bytes: self.used_bytes(),
            held_bytes: Bytes(active.0 + self.slot_bytes()),
            promised_bytes: promised,
            saves: self.saves.files(),
            saved_tokens: self.saves.tokens(),
            ..self.counters.clone()
        }
    }

    /// Blocks evicted so far, by the priority that they had. `[101]`
    #[must_use]
    pub fn evictions_by_priority(&self) -> &[u64; MAX_PRIORITY as usize + 1] {
        &self.evictions_by_priority
    }

    /// Gauges of one group; `None` for a group that the plan does not have.
    #[must_use]
    pub fn group_stats(&self, group: GroupIdx) -> Option<GroupStats> {
        let live_tokens = *self.live_tokens.get(group.index())?;
        let store = self.pool.store(group.index());
        Some(GroupStats {
            blocks: store.map(BlockStore::counts).unwrap_or_default(),
            live_tokens,
            peak_cached: store.map_or(0, BlockStore::peak_cached),
            reuse: self.plan.reuse.groups[group.index()],
        })
    }

    /// What a block is; `None` for one that does not exist.
    #[must_use]
    pub fn block_state(&self, group: GroupIdx, block: BlockId) -> Option<BlockState> {
        self.pool.store(group.index())?.get(block).map(|(state, _, _)| state)
    }

    /// Tokens of the sequence that lives in a slot; `None` for a free slot.
    #[must_use]
    pub fn slot_len(&self, slot: u32) -> Option<u32> {
        self.seqs.records.get(slot as usize).filter(|record| record.alive).map(|record| record.len)
    }

    /// Tokens of a sequence of this length that some query may still see.
    pub(super) fn live_of(&self, group: usize, len: u32, high_water: u32) -> u64 {
        let kept_from = self.plan.keep_from(group_idx(group), high_water).min(len);
        let sinks = self.plan.groups[group].layout.sink_tokens.min(kept_from);
        u64::from(len - kept_from + sinks)
    }

    pub(super) fn live_in(&self, group: usize, slot: u32) -> u64 {
        let record = self.seqs.record(slot);
        self.live_of(group, record.len, record.high_water)
    }

    /// Bytes of the slots of live sequences in contiguous groups.
    fn slot_bytes(&self) -> u64 {
        let per_seq: u64 = self
            .plan
            .groups
            .iter()
            .filter(|group| group.kind == GroupKind::Contiguous)
            .map(|group| group.layout.unit_bytes)
            .sum();
        per_seq * u64::from(self.seqs.alive())
    }

    fn used_bytes(&self) -> Bytes {
        let groups = (0..).zip(self.live_tokens.iter().zip(&self.plan.groups));
        let used = groups.map(|(g, (tokens, group))| {
            let Some(store) = self.pool.store(g) else {
                return tokens * group.bytes_per_token.get();
            };
            // Full blocks that several sequences hold are there once.
            let block_tokens = u64::from(group.layout.unit_tokens);
            let tokens = tokens.saturating_sub(u64::from(store.shared_rows()) * block_tokens);
            let held = u64::from(store.total() - store.available());
            tokens.min(held * block_tokens) * group.bytes_per_token.get()
        });
        Bytes(used.sum())
    }

    pub(super) fn note_peaks(&mut self) {
        self.note_used_peak();
        self.note_held_peak();
    }

    pub(super) fn note_used_peak(&mut self) {
        let used = self.used_bytes();
        self.counters.peak_used_bytes = self.counters.peak_used_bytes.max(used);
    }

    pub(super) fn note_held_peak(&mut self) {
        let held = Bytes(self.pool.block_bytes(&self.plan).0.0 + self.slot_bytes());
        self.counters.peak_held_bytes = self.counters.peak_held_bytes.max(held);
    }
}
