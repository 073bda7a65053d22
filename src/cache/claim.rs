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

    /// Claims the block that a new sequence goes on with in part, until it has been copied. While
    /// a batch begins that may be one block more than was counted; it comes back before the verb
    /// ends, or becomes the sequence's own.
    pub(super) fn claim_partial(&mut self, slot: u32, found: &Found) {
        let (Some(lead), Some((block, _))) = (self.lead(), found.partial) else { return };
        self.claim_block(lead, block);
        for windowed in 0..self.windowed_groups() {
            let (group, attached) = self.attached_to(windowed, block);
            self.claim_block(group, attached);
        }
        if let Some(reuse) = &mut self.reuse {
            reuse.seqs[slot as usize].partial = found.partial;
        }
    }

    /// Undoes [`Cache::claim_partial`].
    pub(super) fn unclaim_partial(&mut self, slot: u32) {
        let Some(reuse) = &mut self.reuse else { return };
        let partial = reuse.seqs[slot as usize].partial.take();
        let (Some(lead), Some((block, _))) = (self.lead(), partial) else { return };
        for windowed in (0..self.windowed_groups()).rev() {
            let (group, attached) = self.attached_to(windowed, block);
            self.unclaim_block(group, attached);
        }
        self.unclaim_block(lead, block);
    }

    /// A windowed group, and its block that is attached to one of the lead group.
    fn attached_to(&self, windowed: usize, block: u32) -> (usize, u32) {
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
    /// copy to. Says whether the sequence has these tokens now.
    ///
    /// # Errors
    /// The device's.
    pub(super) fn take_partial(&mut self, slot: u32) -> Result<bool, CacheError> {
        let Some(reuse) = &mut self.reuse else { return Ok(true) };
        let share = &mut reuse.seqs[slot as usize];
        let Some((source, tokens)) = share.partial.take() else { return Ok(true) };
        let at = share.published;
        let Some(index) = &reuse.index else { return Ok(true) };
        let (lead, is_leaf) = (index.lead(), index.is_leaf(source));
        let alone = index.windowed().is_empty()
            && is_leaf
            && self.pool.store(lead).is_some_and(|store| store.holders(BlockId(source)) == 1);
        let groups = || std::iter::once(lead).chain(index.windowed().iter().copied());
        let room = groups().all(|g| self.pool.store(g).is_some_and(|s| s.available() > 0));
        if alone && (tokens * 2 >= self.plan.tokens_per_block || !room) {
            self.take_over(slot, lead, at, source);
            self.counters.partial_takeovers += 1;
            return Ok(true);
        }
        let mut result = Ok(room);
        if room {
            result = self.copy_partial(slot, lead, at, source, tokens).map(|()| true);
        }
        for windowed in 0..self.windowed_groups() {
            let (group, attached) = self.attached_to(windowed, source);
            if room && result.is_ok() {
                result = self.copy_partial(slot, group, at, attached, tokens).map(|()| true);
            }
            self.give_up(group, BlockId(attached));
        }
        self.give_up(lead, BlockId(source));
        self.counters.partial_copies += u64::from(room);
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
        }
    }

    /// Takes a block for a row and copies some tokens into it.
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
        let bytes = self.pool.device.copy_tokens(layout, source, block.0, 0..tokens)?;
        self.counters.copied_bytes.0 += bytes;
        Ok(())
    }
}
