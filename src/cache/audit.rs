//! Looking into a cache from outside: invariants, a digest of its state, its bytes.
//!
//! Nothing here is needed to serve; all of it is slow, allocates where it must, and is meant for
//! tests, for debugging and for an engine's own checks.

use super::{Cache, SeqHandle, group_idx};
use crate::device::GatherArgs;
use crate::error::{CacheError, InvariantError};
use crate::plan::{Addressing, GroupKind, Kv, NO_BLOCK, SeqView};
use crate::units::{BlockId, GroupIdx, LayerIdx};

impl Cache {
    /// Checks that everything the cache knows of itself agrees. Ends in
    /// free + active + cached + promised = total.
    ///
    /// # Errors
    /// [`InvariantError`] names the first disagreement.
    pub fn check_invariants(&self) -> Result<(), InvariantError> {
        self.check_slots()?;
        self.check_index()?;
        if let Some((group, block)) = self.find_dirty() {
            return Err(InvariantError(format!("group {group}: {block:?} is free and not zeroed")));
        }
        for group in 0..self.plan.groups.len() {
            if let Some(store) = self.pool.store(group) {
                store.check_invariants()?;
                self.check_rows(group)?;
                self.check_references(group)?;
                let counts = store.counts();
                let sum = u64::from(counts.free)
                    + u64::from(counts.active)
                    + u64::from(counts.cached)
                    + u64::from(counts.promised);
                require(sum == u64::from(counts.total), || {
                    format!("group {group}: the block counts {counts:?} do not add up")
                })?;
            }
            let live: u64 = self.live_slots().map(|slot| self.live_in(group, slot)).sum();
            require(live == self.live_tokens[group], || {
                format!("group {group}: {live} live tokens, {} counted", self.live_tokens[group])
            })?;
        }
        Ok(())
    }

    /// The slots of live sequences.
    fn live_slots(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.plan.seq_slots).filter(|slot| self.seqs.record(*slot).alive)
    }

    fn check_slots(&self) -> Result<(), InvariantError> {
        let mut free = vec![false; self.plan.seq_slots as usize];
        for &slot in &self.seqs.free {
            let seen = std::mem::replace(&mut free[slot as usize], true);
            require(!seen, || format!("slot {slot} is free twice"))?;
        }
        let reserved = self.live_slots().filter(|slot| self.seqs.record(*slot).reserved).count();
        require(reserved == self.seqs.reserved() as usize, || {
            format!("{reserved} slots are reserved, {} counted", self.seqs.reserved())
        })?;
        for slot in 0..self.plan.seq_slots {
            let record = self.seqs.record(slot);
            require(record.alive != free[slot as usize], || {
                format!(
                    "slot {slot} is alive: {}, and on the free list: {}",
                    record.alive, free[slot as usize]
                )
            })?;
            // One that was restored may be as if it had been as much longer as it may rewind.
            let most = record.limit + self.plan.limits.max_rewind_tokens;
            require(record.len <= record.high_water && record.high_water <= most, || {
                format!(
                    "slot {slot}: len {}, high water {}, limit {}",
                    record.len, record.high_water, record.limit
                )
            })?;
        }
        Ok(())
    }

    /// Rows of a table against the sequences' states and the blocks' references.
    fn check_rows(&self, group: usize) -> Result<(), InvariantError> {
        let layers = &self.plan.groups[group];
        let row = layers.max_blocks_per_seq as usize;
        let per_block = layers.layout.unit_tokens;
        let sink_blocks = layers.layout.sink_tokens.div_ceil(per_block);
        for slot in 0..self.plan.seq_slots {
            let state = self.seqs.state(slot, group);
            let mut held = 0;
            for at in 0..layers.max_blocks_per_seq {
                let block = self.tables[group][slot as usize * row + at as usize];
                let in_row = at < state.next && (at < sink_blocks || at >= state.first);
                require(in_row == (block != NO_BLOCK), || {
                    format!("group {group}: entry {at} of slot {slot} is {block}, state {state:?}")
                })?;
                if block != NO_BLOCK {
                    held += 1;
                }
            }
            require(held == state.held, || {
                format!("group {group}: slot {slot} holds {held} blocks, {} counted", state.held)
            })?;
            let len = self.seqs.record(slot).len;
            let step = self.batch.seqs.iter().zip(&self.batch.seq_lens);
            let len =
                step.filter(|(seq, _)| seq.slot == slot).map(|(_, len)| *len).next().unwrap_or(len);
            require(state.next == len.div_ceil(per_block), || {
                format!("group {group}: slot {slot} has {len} tokens in {} blocks", state.next)
            })?;
            require(state.quota == 0 || state.held <= state.quota, || {
                format!("group {group}: slot {slot} holds more than it was promised: {state:?}")
            })?;
        }
        Ok(())
    }

    /// A digest of everything that later verbs depend on: sequences, rows, the order of the free
    /// lists, references, counters. Two caches with the same plan and digest behave the same.
    /// Generations of free blocks and slots, and the bytes of the pool, are left out.
    #[must_use]
    pub fn state_digest(&self) -> u64 {
        let mut digest = Digest::new();
        for slot in 0..self.plan.seq_slots {
            let record = self.seqs.record(slot);
            digest.push(u64::from(record.alive));
            digest.push(record.key.map_or(0, |key| key ^ 0x5555));
            digest.push(u64::from(record.key.is_some()));
            for number in [record.len, record.high_water, record.limit] {
                digest.push(u64::from(number));
            }
            // Left out: `written`, `table_version` and `last_step`, which a cancelled step raises
            // too.
            if record.alive {
                digest.push(u64::from(record.reserved));
                digest.push(record.begun);
                digest.push(u64::from(record.lookahead) << 32 | u64::from(record.known));
            }
            for group in 0..self.plan.groups.len() {
                let state = self.seqs.state(slot, group);
                for number in [state.first, state.next, state.held, state.quota] {
                    digest.push(u64::from(number));
                }
                digest.push(u64::from(state.shared_tail));
                digest.push(u64::from(state.holds_from));
            }
        }
        for slot in &self.seqs.free {
            digest.push(u64::from(*slot));
        }
        for (group, table) in self.tables.iter().enumerate() {
            table.iter().for_each(|entry| digest.push(u64::from(*entry)));
            digest.push(self.live_tokens[group]);
            let Some(store) = self.pool.store(group) else {
                continue;
            };
            store.free_list().chain(store.cached_list()).for_each(|b| digest.push(u64::from(b.0)));
            digest.push(u64::from(store.counts().promised));
            for block in 0..store.total() {
                digest.push(store.get(BlockId(block)).map_or(0, |(_, refs, _)| u64::from(refs)));
                let (tails, holds, pins) = store.kinds(BlockId(block));
                digest.push(u64::from(tails) << 32 | u64::from(holds) << 16 | u64::from(pins));
                digest.push(u64::from(store.class(BlockId(block))));
            }
        }
        self.digest_reuse(&mut digest);
        digest.push(self.counters.tokens_appended);
        digest.push(self.counters.seqs_begun);
        digest.push(self.counters.steps_committed);
        digest.push(self.counters.nonfinite);
        digest.push(self.counters.saturated);
        digest.value()
    }

    /// Reads K or V of some tokens of a sequence back, as f32.
    /// `out` is `[to - from, num_kv_heads, head_dim]`.
    ///
    /// # Errors
    /// A stale or foreign handle, a layer that does not exist, a wrong shape, tokens that the
    /// layer does not hold.
    pub fn export(
        &self,
        sequence: SeqHandle,
        layer: LayerIdx,
        kv: Kv,
        from: u32,
        to: u32,
        out: &mut [f32],
    ) -> Result<(), CacheError> {
        let slot = self.seqs.check(sequence)?;
        let num_layers = self.plan.geometry.num_layers;
        let place = self.plan.layers.get(layer.index()).copied();
        let place = place.ok_or(CacheError::NoSuchLayer { layer, num_layers })?;
        let group = place.group.index();
        let len = self.seqs.record(slot).len;
        let kept_from = self.plan.keep_from(place.group, self.seqs.record(slot).high_water);
        let sinks = self.plan.groups[group].layout.sink_tokens;
        let held = |position: u32| position < len && (position >= kept_from || position < sinks);
        if from > to || !(from..to).all(held) {
            return Err(CacheError::NotHeld { layer, from, to, kept_from, len });
        }
        let (heads, dim) = (self.plan.geometry.num_kv_heads, self.plan.geometry.head_dim as usize);
        let expected = (to - from) as usize * heads as usize * dim;
        if out.len() != expected {
            let shape = "[to - from, num_kv_heads, head_dim]";
            return Err(CacheError::WrongShape { what: "out", got: out.len(), expected, shape });
        }
        let static_scale = match kv {
            Kv::K => self.plan.scales_of(layer).k,
            Kv::V => self.plan.scales_of(layer).v,
        };
        let (view, layer) = (self.view(group, slot), place.index);
        let args = &mut GatherArgs { view, layer, kv, static_scale, positions: from..to, out };
        Ok(self.pool.device.gather(args)?)
    }

    /// One sequence seen through a group.
    pub(super) fn view(&self, group: usize, slot: u32) -> SeqView<'_> {
        let row = self.plan.groups[group].max_blocks_per_seq as usize;
        let start = slot as usize * row;
        let table = &self.tables[group][start..start + row];
        SeqView { layout: &self.plan.groups[group].layout, table, slot }
    }

    /// Sets every byte that no live token owns: free blocks and slots, the unused tails of blocks
    /// and slots, tokens that have left a window. With `0xFF` everything there is NaN, and a
    /// kernel that reads what it must not shows it.
    ///
    /// # Errors
    /// The device's.
    pub fn poison_unused(&mut self, byte: u8) -> Result<(), CacheError> {
        self.abandon_step();
        for group in 0..self.plan.groups.len() {
            let live = self.places_in_use(group);
            self.poison_group(group, &live, byte)?;
        }
        Ok(())
    }

    /// The token places of a group that a live sequence reads, or that a later one may find.
    /// `[units, unit_tokens]`
    pub(super) fn places_in_use(&self, group: usize) -> Vec<bool> {
        let layout = &self.plan.groups[group].layout;
        let mut live = vec![false; layout.units as usize * layout.unit_tokens as usize];
        for slot in self.live_slots() {
            let record = self.seqs.record(slot);
            let kept_from = self.plan.keep_from(group_idx(group), record.high_water);
            let view = self.view(group, slot);
            let sinks = layout.sink_tokens.min(record.len);
            for position in (0..sinks).chain(kept_from.max(sinks)..record.len) {
                let place = usize::try_from(view.token_slot(position)).unwrap_or(usize::MAX);
                live[place] = true;
            }
        }
        self.mark_shareable(group, &mut live);
        live
    }

    /// Sets the bytes of every token place of a group that is not live.
    fn poison_group(&mut self, group: usize, live: &[bool], byte: u8) -> Result<(), CacheError> {
        let layout = &self.plan.groups[group].layout;
        let device = &mut self.pool.device;
        for unit in 0..layout.units {
            let start = unit as usize * layout.unit_tokens as usize;
            let tokens = &live[start..start + layout.unit_tokens as usize];
            if tokens.iter().all(|live| !live) {
                device.fill(layout.unit(unit), layout.unit_bytes, byte)?;
                continue;
            }
            let mut at = 0;
            for run in tokens.chunk_by(|one, next| one == next) {
                let end = at + u32::try_from(run.len()).unwrap_or(u32::MAX);
                if !run[0] {
                    device.fill_tokens(layout, unit, at..end, byte)?;
                }
                at = end;
            }
        }
        Ok(())
    }

    /// Reads raw bytes of the pool, at offsets that the plan's layouts give.
    ///
    /// # Errors
    /// A range outside the pool.
    pub fn read_bytes(&self, offset: u64, out: &mut [u8]) -> Result<(), CacheError> {
        Ok(self.pool.device.read(offset, out)?)
    }

    /// The free blocks of a paged group, next to be taken first.
    ///
    /// # Errors
    /// A group that does not exist or is contiguous.
    pub fn free_blocks(&self, group: GroupIdx) -> Result<Vec<BlockId>, CacheError> {
        match self.pool.store(group.index()) {
            Some(store) => Ok(store.free_list().collect()),
            None => Err(self.no_such_group(group, ", or is not paged")),
        }
    }

    /// Whether a layer's tokens lie in blocks, in a slot, or in a ring.
    #[must_use]
    pub fn addressing(&self, layer: LayerIdx) -> Option<(GroupKind, Addressing)> {
        let place = self.plan.layers.get(layer.index())?;
        let group = &self.plan.groups[place.group.index()];
        Some((group.kind, group.layout.addressing))
    }
}

/// Turns a false condition into an error.
pub(super) fn require(holds: bool, what: impl FnOnce() -> String) -> Result<(), InvariantError> {
    if holds { Ok(()) } else { Err(InvariantError(what())) }
}

/// FNV-1a over 64-bit words, each mixed first.
pub(super) struct Digest(u64);

impl Digest {
    pub(super) const fn new() -> Self {
        Self(0xCBF2_9CE4_8422_2325)
    }

    pub(super) const fn push(&mut self, word: u64) {
        let mixed = (word ^ (word >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        self.0 = (self.0 ^ mixed).wrapping_mul(0x0100_0000_01B3).rotate_left(23);
    }

    pub(super) const fn value(&self) -> u64 {
        self.0
    }
}
