//! Claiming what a prompt found: from then on nobody evicts it.
//!
//! A match is claimed block by block, from its last to its first; undoing goes the other way, so
//! that every list is again as it was. Only when all is claimed are blocks taken for the tokens
//! that are copied.

use super::reuse::{Found, Reuse};
use super::{Cache, group_idx};
use crate::error::CacheError;
use crate::plan::{GroupReuse, NO_BLOCK};
use crate::pool::DEFAULT_PRIORITY;
use crate::units::BlockId;

/// Blocks of one group that a match claims.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Claims {
    /// Blocks that the new sequence will hold.
    pub(super) held: u32,
    /// Of the blocks claimed, those that are cached and stop being available.
    pub(super) cached: u32,
    /// What the blocks claimed owe more.
    pub(super) debts: i64,
}

/// The room in a group for the part of a block that a new sequence goes on with.
#[derive(Clone, Copy, Debug)]
pub(super) enum Room {
    /// In a batch: blocks that neither were promised nor are wanted by the sequence.
    Spare(i64),
    /// Alone: blocks that are available when the whole blocks of the match are claimed.
    Left(i64),
}

impl Cache {
    /// Calls `each` with every block that a match claims, as (group, place in the row, block), in
    /// the order of claiming: from the last to the first.
    fn each_claim(&self, found: &Found, each: &mut dyn FnMut(usize, u32, u32)) {
        let Some(index) = self.index() else { return };
        let lead = index.lead();
        let mut block = found.last;
        for at in (0..found.full).rev() {
            each(lead, at, block);
            for (windowed, &group) in index.windowed().iter().enumerate() {
                if self.is_needed(group, at, found.len) {
                    each(group, at, index.attached(windowed, block));
                }
            }
            block = index.parent(block);
        }
    }

    /// Whether a windowed group of a sequence of `len` tokens needs the block at a place.
    fn is_needed(&self, group: usize, at: u32, len: u32) -> bool {
        let layers = &self.plan.groups[group];
        let per_block = layers.layout.unit_tokens;
        at >= self.plan.keep_from(group_idx(group), len) / per_block
            || at < layers.layout.sink_tokens.div_ceil(per_block)
    }

    /// What a match claims of one group.
    pub(super) fn claims(&self, group: usize, found: &Found) -> Claims {
        let mut claims = Claims::default();
        let Some(store) = self.pool.store(group) else { return claims };
        self.each_claim(found, &mut |of, at, block| {
            if of == group && at < found.full {
                claims.held += 1;
                if store.holders(BlockId(block)) == 0 {
                    claims.cached += 1;
                } else {
                    claims.debts += store.debt_change(BlockId(block), 1, 0, 0);
                }
            }
        });
        claims
    }

    /// Whether a group has room to copy a part of a block, the block that it is copied to aside,
    /// which the sequence has counted: the source must not be evicted meanwhile, which costs a
    /// block until the verb ends if it was cached.
    ///
    /// Alone, a sequence may use for that what others were promised, as long as there is a block to
    /// copy to; and a source that will be taken over costs nothing. In a batch others claim, too,
    /// before anything is copied, the same source maybe, so it must cost nobody's promise.
    pub(super) fn part_fits(&self, group: usize, found: &Found, room: Room) -> bool {
        let (Some((source, _)), Some(index)) = (found.partial, self.index()) else { return true };
        let windowed = index.windowed().iter().position(|of| *of == group);
        let block = match windowed {
            Some(windowed) => BlockId(index.attached(windowed, source)),
            None if group == index.lead() => BlockId(source),
            None => return true,
        };
        let Some(store) = self.pool.store(group) else { return true };
        let cached = store.holders(block) == 0;
        match room {
            Room::Spare(spare) if cached => spare >= 1,
            Room::Spare(spare) => spare >= store.debt_change(block, 1, 0, 0),
            Room::Left(left) if cached => {
                left >= 2 || (index.windowed().is_empty() && index.is_leaf(source))
            }
            Room::Left(_) => true,
        }
    }

    /// Claims the whole blocks of a match for a new sequence: from here on none of them is evicted.
    pub(super) fn claim(&mut self, slot: u32, found: &Found) {
        let Some(index) = self.index() else { return };
        if index.windowed().is_empty() {
            self.claim_row(slot, found);
        } else {
            self.claim_rows(slot, found);
        }
        for group in 0..self.plan.groups.len() {
            if matches!(self.plan.reuse.groups[group], GroupReuse::Index | GroupReuse::Attached) {
                let first =
                    self.plan.keep_from(group_idx(group), found.len) / self.plan.tokens_per_block;
                let state = self.seqs.state_mut(slot, group);
                state.next = found.full;
                state.first = first.min(found.full);
            }
        }
        if let Some(reuse) = &mut self.reuse {
            reuse.seqs[slot as usize].published = found.full;
        }
    }

    /// Claims the whole blocks of a match in the lead group, where no windowed group follows it.
    fn claim_row(&mut self, slot: u32, found: &Found) {
        let Some(Reuse { index: Some(index), expiry, .. }) = &mut self.reuse else { return };
        let lead = index.lead();
        let Some(store) = self.pool.store_mut(lead) else { return };
        let start = slot as usize * self.plan.groups[lead].max_blocks_per_seq as usize;
        let row = &mut self.tables[lead][start..start + found.full as usize];
        let mut block = found.last;
        for entry in row.iter_mut().rev() {
            let was_cached = store.claim(BlockId(block));
            debug_assert!(was_cached.is_ok(), "what the index names is active or cached");
            if was_cached == Ok(true) {
                expiry.stop(block);
            }
            *entry = block;
            block = index.parent(block);
        }
        self.seqs.state_mut(slot, lead).held += found.full;
    }

    /// The same in the lead group and those that follow it.
    fn claim_rows(&mut self, slot: u32, found: &Found) {
        let Some(lead) = self.lead() else { return };
        let mut block = found.last;
        for at in (0..found.full).rev() {
            self.claim_into_row(lead, slot, at, block);
            for windowed in 0..self.windowed_groups() {
                let (group, attached) = self.attached_to(windowed, block);
                if self.is_needed(group, at, found.len) {
                    self.claim_into_row(group, slot, at, attached);
                }
            }
            block = self.index().map_or(NO_BLOCK, |index| index.parent(block));
        }
    }

    /// Claims the block that a new sequence goes on with in part, until it has been copied or has
    /// become the sequence's own. In a batch that promises nothing, the block that it is copied to
    /// is promised until then.
    pub(super) fn claim_partial(&mut self, slot: u32, found: &Found, in_batch: bool) {
        let (Some(lead), Some((block, _))) = (self.lead(), found.partial) else { return };
        let promise = in_batch && !self.guaranteed();
        if promise {
            self.promise_parts(true);
        }
        self.claim_block(lead, block);
        for windowed in 0..self.windowed_groups() {
            let (group, attached) = self.attached_to(windowed, block);
            self.claim_block(group, attached);
        }
        if let Some(reuse) = &mut self.reuse {
            let share = &mut reuse.seqs[slot as usize];
            share.partial = found.partial;
            share.part_promised = promise;
        }
    }

    /// Promises a block of every group that copies parts of blocks, or takes that promise back.
    fn promise_parts(&mut self, promise: bool) {
        for at in 0..=self.windowed_groups() {
            let Some(index) = self.index() else { return };
            let group = at.checked_sub(1).map_or(index.lead(), |at| index.windowed()[at]);
            let Some(store) = self.pool.store_mut(group) else { continue };
            if promise {
                let promised = store.promise(1);
                debug_assert!(promised.is_ok(), "`admit` has counted it");
            } else {
                store.unpromise(1);
            }
        }
    }

    /// Takes the part that was claimed for a sequence off it, and the promise that came with it.
    fn part_of(&mut self, slot: u32) -> Option<(u32, u32)> {
        let share = &mut self.reuse.as_mut()?.seqs[slot as usize];
        let partial = share.partial.take()?;
        if std::mem::take(&mut share.part_promised) {
            self.promise_parts(false);
        }
        Some(partial)
    }

    /// Undoes [`Cache::claim_partial`].
    pub(super) fn unclaim_partial(&mut self, slot: u32) {
        let (Some(lead), Some((block, _))) = (self.lead(), self.part_of(slot)) else { return };
        for windowed in (0..self.windowed_groups()).rev() {
            let (group, attached) = self.attached_to(windowed, block);
            self.unclaim_block(group, attached);
        }
        self.unclaim_block(lead, block);
    }

    /// Lets the block go that a sequence would have gone on with in part: it ends before.
    pub(super) fn give_up_partial(&mut self, slot: u32) {
        let (Some(lead), Some((block, _))) = (self.lead(), self.part_of(slot)) else { return };
        for windowed in 0..self.windowed_groups() {
            let (group, attached) = self.attached_to(windowed, block);
            self.give_up(group, BlockId(attached));
        }
        self.give_up(lead, BlockId(block));
    }

    /// A windowed group, and its block that is attached to one of the lead group.
    pub(super) fn attached_to(&self, windowed: usize, block: u32) -> (usize, u32) {
        self.index().map_or((0, NO_BLOCK), |index| {
            (index.windowed()[windowed], index.attached(windowed, block))
        })
    }

    fn claim_into_row(&mut self, group: usize, slot: u32, at: u32, block: u32) {
        self.claim_block(group, block);
        self.set_entry(group, slot, at, block);
        self.seqs.state_mut(slot, group).held += 1;
    }

    /// Undoes [`Cache::claim`], when everything since has been undone: in the reverse order, so
    /// that every list is again as it was.
    pub(super) fn unclaim(&mut self, slot: u32) {
        let Some(lead) = self.lead() else { return };
        let full = self.reuse.as_ref().map_or(0, |reuse| reuse.seqs[slot as usize].published);
        for at in 0..full {
            for windowed in (0..self.windowed_groups()).rev() {
                let Some(index) = self.index() else { return };
                let group = index.windowed()[windowed];
                let block = self.entry(group, slot, at);
                if block != NO_BLOCK {
                    self.unclaim_block(group, block);
                    self.set_entry(group, slot, at, NO_BLOCK);
                }
            }
            let block = self.entry(lead, slot, at);
            self.unclaim_block(lead, block);
            self.set_entry(lead, slot, at, NO_BLOCK);
        }
    }

    /// One reference more to a block that is shareable.
    pub(super) fn claim_block(&mut self, group: usize, block: u32) {
        let Some(store) = self.pool.store_mut(group) else { return };
        let was_cached = store.claim(BlockId(block));
        debug_assert!(was_cached.is_ok(), "what the index names is active or cached");
        if was_cached == Ok(true)
            && self.lead() == Some(group)
            && let Some(reuse) = &mut self.reuse
        {
            reuse.expiry.stop(block);
        }
    }

    fn unclaim_block(&mut self, group: usize, block: u32) {
        let is_lead = self.lead() == Some(group);
        let Some(store) = self.pool.store_mut(group) else { return };
        store.unclaim(BlockId(block));
        if store.holders(BlockId(block)) == 0
            && is_lead
            && let Some(reuse) = &mut self.reuse
        {
            reuse.expiry.restart(block);
        }
    }

    /// Copies the tokens that a new sequence matched of a block it does not share, or takes the
    /// block over where nobody else can want it (a leaf that nobody holds, in a plan that keeps
    /// each token in one block only): if at least half of it is of use, or if there is no block to
    /// copy to.
    ///
    /// # Errors
    /// The device's.
    pub(super) fn take_partial(&mut self, slot: u32) -> Result<(), CacheError> {
        let Some((source, tokens)) = self.part_of(slot) else { return Ok(()) };
        let Some(Reuse { index: Some(index), seqs, .. }) = &self.reuse else { return Ok(()) };
        let at = seqs[slot as usize].published;
        let (lead, is_leaf) = (index.lead(), index.is_leaf(source));
        let Some(store) = self.pool.store(lead) else { return Ok(()) };
        let alone = index.windowed().is_empty() && is_leaf && store.holders(BlockId(source)) == 1;
        if alone && (tokens * 2 >= self.plan.tokens_per_block || store.available() == 0) {
            self.take_over(slot, lead, at, source);
            self.counters.partial_takeovers += 1;
            return self.scrub_rest(lead, source, tokens);
        }
        let mut result = self.copy_partial(slot, lead, at, source, tokens);
        for windowed in 0..self.windowed_groups() {
            let (group, attached) = self.attached_to(windowed, source);
            if result.is_ok() {
                result = self.copy_partial(slot, group, at, attached, tokens);
            }
            self.give_up(group, BlockId(attached));
        }
        self.give_up(lead, BlockId(source));
        self.counters.partial_copies += u64::from(result.is_ok());
        result
    }

    /// Makes a claimed leaf of the index the last block of a row.
    fn take_over(&mut self, slot: u32, lead: usize, at: u32, block: u32) {
        self.forget(lead, BlockId(block));
        self.set_entry(lead, slot, at, block);
        let state = self.seqs.state_mut(slot, lead);
        let promised = state.promised();
        state.held += 1;
        state.next = at + 1;
        let less = promised - state.promised();
        if let Some(store) = self.pool.store_mut(lead) {
            store.unpromise(less);
            store.set_class(BlockId(block), DEFAULT_PRIORITY);
            store.outdate(BlockId(block));
        }
    }

    /// Takes a block for a row and copies some tokens into it. `admit` has seen to it that there is
    /// one.
    fn copy_partial(
        &mut self,
        slot: u32,
        group: usize,
        at: u32,
        source: u32,
        tokens: u32,
    ) -> Result<(), CacheError> {
        let block = self.take_block(group, slot, at).ok_or(self.exhausted(group, 1))?;
        self.seqs.state_mut(slot, group).next = at + 1;
        let layout = &self.plan.groups[group].layout;
        let bytes = self.pool.device.queue_copy(layout, source, block.0, 0..tokens)?;
        self.counters.copied_bytes.0 += bytes;
        Ok(())
    }
}
