//! Zeroing what was given back, where `pool.scrub` asks for it.
//!
//! A block that comes to the free list is *dirty*. Under `"on-release"` the verb that freed it
//! zeroes it before it returns; under `"on-reuse"` whoever takes it does. (So does a block that is
//! freed and taken within one verb, and one whose zeroing the device refused.) What is cached has
//! not been given back: it is zeroed when it is evicted, or when somebody takes a part of it over.
//!
//! Tokens that end before their block or slot does, because they were rewound or their step was
//! cancelled, are zeroed at once under `"on-release"`; of a block that others hold too, what lies
//! behind the longest of them. Under `"on-reuse"` they are the same sequence's until it ends.
//!
//! A slot of contiguous groups is zeroed as far as it was ever written (`SeqRecord::dirty`), but
//! for what the next sequence takes over or what is kept for one to come. Tokens that have left a
//! window stay with their block or ring as long as the sequence holds that.

use super::{Cache, group_idx};
use crate::config::Scrub;
use crate::error::{CacheError, DeviceError};
use crate::plan::{Addressing, GroupKind, Kv, NO_BLOCK, SCALE_BYTES, SeqView};
use crate::units::{BlockId, GroupIdx};

/// Some tokens of a unit.
type Tokens = std::ops::Range<u32>;

impl Cache {
    /// Whether anything is ever zeroed.
    fn scrubs(&self) -> bool {
        self.plan.scrub != Scrub::Off
    }

    /// Whether it is zeroed as soon as it is given back.
    fn scrubs_at_once(&self) -> bool {
        self.plan.scrub == Scrub::OnRelease
    }

    /// Zeroes tokens of a unit.
    fn scrub_tokens(&mut self, group: usize, unit: u32, tokens: Tokens) -> Result<(), DeviceError> {
        if tokens.is_empty() {
            return Ok(());
        }
        let layout = &self.plan.groups[group].layout;
        let zeroed = if tokens == (0..layout.unit_tokens) {
            let bytes = layout.unit_bytes;
            self.pool.device.fill(layout.unit(unit), bytes, 0).map(|()| bytes)
        } else {
            self.pool.device.fill_tokens(layout, unit, tokens, 0)
        };
        match zeroed {
            Ok(bytes) => self.counters.scrubbed_bytes.0 += bytes,
            Err(_) => self.counters.scrub_failures += 1,
        }
        zeroed.map(|_| ())
    }

    /// At the end of a verb: zeroes the blocks that it has freed. One that the device refuses stays
    /// dirty, and whoever takes it tries again.
    pub(super) fn scrub_freed(&mut self) {
        if !self.scrubs_at_once() {
            return;
        }
        for group in 0..self.plan.groups.len() {
            let unit_tokens = self.plan.groups[group].layout.unit_tokens;
            // Dirty blocks are the first of the list: that is where freed ones go.
            let mut last = None;
            while let Some(block) = self.pool.store(group).and_then(|store| store.next_dirty(last))
            {
                if self.scrub_tokens(group, block.0, 0..unit_tokens).is_err() {
                    break;
                }
                if let Some(store) = self.pool.store_mut(group) {
                    store.set_clean(block);
                }
                last = Some(block);
            }
        }
    }

    /// Takes the first free block of a group, zeroed where it must be. `None` where there is none.
    /// What the device refuses is told by [`Cache::check_scrubbed`].
    pub(super) fn take_free(&mut self, group: usize) -> Option<BlockId> {
        let store = self.pool.store_mut(group)?;
        let (block, dirty) = store.take_dirty()?;
        if dirty && self.scrubs() {
            let unit_tokens = self.plan.groups[group].layout.unit_tokens;
            let zeroed = self.scrub_tokens(group, block.0, 0..unit_tokens);
            self.scrub_refused = self.scrub_refused.or(zeroed.err());
        }
        Some(block)
    }

    /// Whether all blocks that were taken since the last time could be zeroed.
    pub(super) fn check_scrubbed(&mut self) -> Result<(), CacheError> {
        self.scrub_refused.take().map_or(Ok(()), |error| Err(error.into()))
    }

    /// Zeroes what lies behind the tokens of a block that somebody takes over.
    pub(super) fn scrub_rest(
        &mut self,
        group: usize,
        block: u32,
        tokens: u32,
    ) -> Result<(), CacheError> {
        let unit_tokens = self.plan.groups[group].layout.unit_tokens;
        if self.scrubs() {
            Ok(self.scrub_tokens(group, block, tokens..unit_tokens)?)
        } else {
            Ok(())
        }
    }

    /// A row has left, or has cut, the block at a place of it, of which it held the tokens before
    /// `end`: zeroes those that none of the rows that still hold it has.
    pub(super) fn scrub_tail(&mut self, group: usize, at: u32, block: u32, end: u32) {
        if !self.scrubs_at_once() || block == NO_BLOCK || self.is_shareable(group, BlockId(block)) {
            return;
        }
        let Some(store) = self.pool.store(group) else { return };
        let references = store.references(BlockId(block));
        let (tails, holds, pins) = store.kinds(BlockId(block));
        // Somebody holds all of it; or nobody does: it is free, and zeroed as a whole.
        if references == 0 || references > tails + holds + pins {
            return;
        }
        let unit_tokens = self.plan.groups[group].layout.unit_tokens;
        let start = at * unit_tokens;
        // Those who share a block have it at the same place.
        let holders = (0..self.plan.seq_slots)
            .filter(|slot| self.seqs.record(*slot).alive && self.entry(group, *slot, at) == block);
        let longest = holders.map(|slot| self.seqs.record(slot).len).max();
        // Only pins are left.
        let Some(longest) = longest else { return };
        let tokens = longest.max(start) - start..end.min(start + unit_tokens).saturating_sub(start);
        // Where the device refuses, it is counted, and the tokens stay.
        let _ = self.scrub_tokens(group, block, tokens);
    }

    /// A block is not shareable any more: what lies behind the longest of those who hold a part of
    /// it was kept for others until now.
    pub(super) fn scrub_unshared(&mut self, group: usize, block: BlockId) {
        if !self.scrubs_at_once() || block.0 == NO_BLOCK {
            return;
        }
        let Some(store) = self.pool.store(group) else { return };
        let (tails, holds, pins) = store.kinds(block);
        if tails == 0 || store.references(block) > tails + holds + pins {
            return;
        }
        let unit_tokens = self.plan.groups[group].layout.unit_tokens;
        let longest = (0..self.plan.seq_slots)
            .filter_map(|slot| {
                let record = self.seqs.record(slot);
                let (at, rest) = (record.len / unit_tokens, record.len % unit_tokens);
                let is_tail = record.alive && rest > 0 && self.entry(group, slot, at) == block.0;
                is_tail.then_some(rest)
            })
            .max();
        if let Some(longest) = longest {
            // Where the device refuses, it is counted, and the tokens stay.
            let _ = self.scrub_tokens(group, block.0, longest..unit_tokens);
        }
    }

    /// Zeroes the tokens `from..to` of a sequence that it does not have any more, after it has
    /// given its blocks back.
    pub(super) fn scrub_cut(&mut self, slot: u32, from: u32, to: u32) {
        if !self.scrubs_at_once() || from >= to {
            return;
        }
        for group in 0..self.plan.groups.len() {
            let unit_tokens = self.plan.groups[group].layout.unit_tokens;
            if self.plan.groups[group].kind == GroupKind::Paged {
                if !from.is_multiple_of(unit_tokens) {
                    let at = from / unit_tokens;
                    self.scrub_tail(group, at, self.entry(group, slot, at), to);
                }
                continue;
            }
            // Where the device refuses, it is counted.
            let _ = self.scrub_positions(group, slot, from, to);
        }
    }

    /// Zeroes what the step that was undone has written behind its sequences' ends.
    pub(super) fn scrub_undone(&mut self) {
        self.scrub_refused = None;
        for at in 0..self.batch.seqs.len() {
            let (seq, end) = (self.batch.seqs[at], self.batch.seq_lens[at]);
            self.scrub_cut(seq.slot, seq.first_position, end);
        }
    }

    /// Zeroes the places of some positions of a slot.
    fn scrub_positions(
        &mut self,
        group: usize,
        slot: u32,
        from: u32,
        to: u32,
    ) -> Result<(), DeviceError> {
        let layout = self.plan.groups[group].layout.clone();
        let view = SeqView { layout: &layout, table: &[], slot };
        let mut position = from;
        while position < to {
            if layout.addressing == Addressing::Ring && position >= layout.sink_tokens {
                // What lies a ring before the end is in the same places.
                position = position.max(to.saturating_sub(layout.ring_tokens));
            }
            let run = view.run(position, to);
            let (_, token) = view.place(position);
            self.scrub_tokens(group, slot, token..token + run)?;
            position += run;
        }
        Ok(())
    }

    /// Zeroes what a slot's contiguous groups hold beyond the first `len` tokens of what was
    /// written last: of earlier sequences, or of this one.
    fn scrub_slot(&mut self, slot: u32, len: u32) -> Result<(), DeviceError> {
        let record = self.seqs.record(slot);
        let (written, dirty) = (record.written, record.dirty.max(record.written));
        for group in 0..self.plan.groups.len() {
            if self.plan.groups[group].kind != GroupKind::Contiguous {
                continue;
            }
            for tokens in self.stale_tokens(group, len, written, dirty) {
                self.scrub_tokens(group, slot, tokens)?;
            }
        }
        self.seqs.record_mut(slot).dirty = 0;
        Ok(())
    }

    /// The tokens of a slot that are none of its first `len`, as far as positions below `dirty`
    /// were ever written to it. At most three runs.
    fn stale_tokens(&self, group: usize, len: u32, written: u32, dirty: u32) -> [Tokens; 3] {
        let layout = &self.plan.groups[group].layout;
        let used = dirty.min(layout.unit_tokens);
        if layout.addressing != Addressing::Ring {
            return [len.min(used)..used, 0..0, 0..0];
        }
        let (sinks, ring) = (layout.sink_tokens, layout.ring_tokens);
        let below = len.min(sinks).min(used)..sinks.min(used);
        // The ring holds the latest positions that were written. Those from `kept` to `len` stay,
        // which is one run of places, around the end of the ring maybe.
        let kept = written.saturating_sub(ring).max(sinks);
        if kept >= len {
            return [below, sinks.min(used)..used, 0..0];
        }
        let place = |position: u32| sinks + (position - sinks) % ring;
        let (first, end) = (place(kept), place(len - 1) + 1);
        if first < end {
            [below, sinks.min(used)..first.min(used), end.min(used)..used]
        } else {
            [below, end.min(used)..first.min(used), 0..0]
        }
    }

    /// A slot is about to be filled otherwise than by steps: zeroes all of it, where anything is
    /// ever zeroed.
    pub(super) fn scrub_whole_slot(&mut self, slot: u32) -> Result<(), DeviceError> {
        let record = self.seqs.record(slot);
        if self.scrubs() && record.dirty.max(record.written) > 0 {
            self.scrub_slot(slot, 0)?;
        }
        Ok(())
    }

    /// A sequence has ended: zeroes what its slot does not keep for others.
    pub(super) fn scrub_released_slot(&mut self, slot: u32) {
        if !self.scrubs_at_once() {
            return;
        }
        let retained = self.reuse.as_ref().map_or(0, |reuse| reuse.seqs[slot as usize].retained);
        if self.scrub_slot(slot, retained).is_ok() && retained == 0 {
            self.seqs.record_mut(slot).written = 0;
        }
    }

    /// A sequence is about to be the slot's: what was written to it before is told apart from what
    /// will be.
    pub(super) fn note_dirty(&mut self, slot: u32) {
        let record = self.seqs.record_mut(slot);
        record.dirty = record.dirty.max(record.written);
    }

    /// A sequence has begun, with its first `len` tokens in the slot: zeroes everything else.
    pub(super) fn scrub_begun_slot(&mut self, slot: u32, len: u32) -> Result<(), CacheError> {
        if self.scrubs() && self.seqs.record(slot).dirty > 0 {
            // The copies into it must be made before anything beside them is zeroed.
            self.scrub_slot(slot, len)?;
        }
        Ok(())
    }

    /// A fork has its copy of all that was written of another's slot: zeroes everything else.
    pub(super) fn scrub_forked_slot(&mut self, slot: u32) -> Result<(), CacheError> {
        let record = *self.seqs.record(slot);
        if !self.scrubs() || record.dirty == 0 {
            return Ok(());
        }
        for group in 0..self.plan.groups.len() {
            if self.plan.groups[group].kind == GroupKind::Contiguous {
                let unit_tokens = self.plan.groups[group].layout.unit_tokens;
                let copied = record.written.min(unit_tokens);
                self.scrub_tokens(group, slot, copied..record.dirty.min(unit_tokens))?;
            }
        }
        self.seqs.record_mut(slot).dirty = 0;
        Ok(())
    }

    /// Every block and slot that is free, whatever it was: when everything is forgotten.
    pub(super) fn scrub_all(&mut self) {
        if !self.scrubs_at_once() {
            return;
        }
        for at in 0..self.seqs.free.len() {
            self.scrub_released_slot(self.seqs.free[at]);
        }
        for group in 0..self.plan.groups.len() {
            let unit_tokens = self.plan.groups[group].layout.unit_tokens;
            let total = self.pool.store(group).map_or(0, |store| store.total());
            for block in (0..total).map(BlockId) {
                let dirty = self.pool.store(group).is_some_and(|store| store.is_dirty(block));
                if dirty
                    && self.scrub_tokens(group, block.0, 0..unit_tokens).is_ok()
                    && let Some(store) = self.pool.store_mut(group)
                {
                    store.set_clean(block);
                }
            }
        }
    }

    /// The free block that should have been zeroed and was not, for the audit.
    pub(super) fn find_dirty(&self) -> Option<(usize, BlockId)> {
        let checked = self.scrubs_at_once() && self.counters.scrub_failures == 0;
        let mut groups = (0..self.plan.groups.len()).filter(|_| checked);
        groups.find_map(|group| {
            let store = self.pool.store(group)?;
            store.free_list().find(|block| store.is_dirty(*block)).map(|block| (group, block))
        })
    }

    /// The first place of a token that nobody holds and whose bytes are not all zeros, as group,
    /// unit and token; `None` where there is none, as must be between steps when `pool.scrub` is
    /// `"on-release"`. Reads the whole pool: for tests, and for an engine's own checks.
    ///
    /// # Errors
    /// The device's.
    pub fn find_residue(&self) -> Result<Option<(GroupIdx, u32, u32)>, CacheError> {
        for group in 0..self.plan.groups.len() {
            let held = self.places_held(group);
            let unit_tokens = self.plan.groups[group].layout.unit_tokens;
            for (unit, held) in (0..).zip(held.chunks(unit_tokens as usize)) {
                for (token, _) in (0..).zip(held).filter(|(_, held)| !**held) {
                    if !self.is_zero(group, unit, token)? {
                        return Ok(Some((group_idx(group), unit, token)));
                    }
                }
            }
        }
        Ok(None)
    }

    /// The token places of a group that are somebody's: as `places_in_use`, and those whose tokens
    /// have left the window while their block or ring has not. `[units, unit_tokens]`
    fn places_held(&self, group: usize) -> Vec<bool> {
        let layout = &self.plan.groups[group].layout;
        let per_unit = layout.unit_tokens;
        let mut held = vec![false; layout.units as usize * per_unit as usize];
        let mut hold = |unit: u32, tokens: Tokens, is_held: bool| {
            let start = unit as usize * per_unit as usize;
            held[start..][tokens.start as usize..tokens.end as usize].fill(is_held);
        };
        for slot in 0..self.plan.seq_slots {
            let record = self.seqs.record(slot);
            if self.pool.store(group).is_some() {
                for (at, block) in self.held_blocks(group, slot) {
                    hold(block.0, 0..record.len.saturating_sub(at * per_unit).min(per_unit), true);
                }
                continue;
            }
            let retained =
                self.reuse.as_ref().map_or(0, |reuse| reuse.seqs[slot as usize].retained);
            let len = if record.alive { record.len } else { retained };
            hold(slot, 0..per_unit, true);
            for tokens in self.stale_tokens(group, len, record.written, u32::MAX) {
                if !tokens.is_empty() {
                    hold(slot, tokens, false);
                }
            }
            // What was restored may begin later than the window does.
            let holds_from = self.seqs.state(slot, group).holds_from.min(len);
            let ring = layout.ring_tokens;
            let first = if ring > 0 { record.written.saturating_sub(ring) } else { 0 };
            for position in first.max(layout.sink_tokens)..holds_from {
                let (_, token) = SeqView { layout, table: &[], slot }.place(position);
                hold(slot, token..token + 1, false);
            }
        }
        for block in (0..layout.units).map(BlockId).filter(|b| self.is_shareable(group, *b)) {
            if self.pool.store(group).is_some() {
                hold(block.0, 0..per_unit, true);
            }
        }
        held
    }

    /// Whether K, V and scales of a token are zeros in every layer and head.
    fn is_zero(&self, group: usize, unit: u32, token: u32) -> Result<bool, CacheError> {
        let layout = &self.plan.groups[group].layout;
        let mut row = vec![0; usize::try_from(layout.row_bytes()).unwrap_or(0)];
        let mut scales = vec![0; (layout.scales_per_row * SCALE_BYTES) as usize];
        for layer in 0..layout.num_layers {
            for (kv, head) in
                (0..layout.num_kv_heads).flat_map(|head| [Kv::K, Kv::V].map(|kv| (kv, head)))
            {
                self.pool.device.read(layout.row(unit, layer, kv, head, token), &mut row)?;
                self.pool.device.read(layout.scales(unit, layer, kv, head, token), &mut scales)?;
                if row.iter().chain(&scales).any(|byte| *byte != 0) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }
}
