//! Looking into a store: its lists, and whether everything it knows agrees.

use super::block::BlockState;
use super::block_store::BlockStore;
use super::record::Record;
use crate::error::InvariantError;
use crate::plan::NO_BLOCK;
use crate::units::BlockId;

impl BlockStore {
    /// Of a block's references: tails, holds and pins.
    pub(crate) fn kinds(&self, block: BlockId) -> (u32, u32, u32) {
        let record = &self.records[block.index()];
        (record.tails, record.holds, u32::from(record.pins))
    }

    /// What all blocks owe together.
    pub(crate) fn all_debts(&self) -> u64 {
        self.records.iter().map(|record| u64::from(self.debts.of(record))).sum()
    }

    /// The free blocks, next to be taken first.
    pub fn free_list(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.list(self.free_head, self.free)
    }

    /// The cached blocks, next to be evicted first.
    pub fn cached_list(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.lists.heads().flat_map(|head| self.list(head, self.cached))
    }

    /// The cached blocks, last to be evicted first: a parent before its children.
    pub(crate) fn cached_from_youngest(&self) -> impl Iterator<Item = BlockId> + '_ {
        let older = |block: &u32| {
            let prev = self.records[*block as usize].prev;
            (prev != NO_BLOCK).then_some(prev)
        };
        let of_class = move |tail| std::iter::successors(Some(tail), older);
        self.lists.tails().flat_map(of_class).map(BlockId)
    }

    /// Follows `next` from `head`, at most one step further than `expected`, so that a broken
    /// list cannot run for ever.
    fn list(&self, head: u32, expected: u32) -> impl Iterator<Item = BlockId> + '_ {
        let first = (head != NO_BLOCK).then_some(BlockId(head));
        std::iter::successors(first, |block| {
            let next = self.records[block.index()].next;
            (next != NO_BLOCK).then_some(BlockId(next))
        })
        .take(expected as usize + 1)
    }

    /// Checks that the lists, the states and the counts agree.
    ///
    /// # Errors
    /// [`InvariantError`] names the first disagreement.
    pub fn check_invariants(&self) -> Result<(), InvariantError> {
        let group = self.group;
        let fail = |what: String| Err(InvariantError(format!("group {group}: {what}")));
        let in_state = |state| self.records.iter().filter(|r| r.state == state).count();
        let (free, cached) = (in_state(BlockState::Free), in_state(BlockState::Cached));
        let active = in_state(BlockState::Active);
        let listed = |list: &mut dyn Iterator<Item = BlockId>, state| {
            list.filter(|block| self.records[block.index()].state == state).count()
        };
        let free_listed = listed(&mut self.free_list(), BlockState::Free);
        let cached_listed = listed(&mut self.cached_list(), BlockState::Cached);
        if free != self.free as usize || free_listed != free {
            return fail(format!("{free} free, {free_listed} on the list, {} counted", self.free));
        }
        if cached != self.cached as usize || cached_listed != cached {
            return fail(format!(
                "{cached} cached, {cached_listed} on the lists, {} counted",
                self.cached
            ));
        }
        if free + active + cached != self.records.len() {
            return fail("free + active + cached is not the total".to_owned());
        }
        if self.promised > self.available() {
            return fail(format!("{} promised of {} available", self.promised, self.available()));
        }
        for (id, record) in self.records.iter().enumerate() {
            self.check_record(record).or_else(|what| fail(format!("block {id}: {what}")))?;
        }
        Ok(())
    }

    fn check_record(&self, record: &Record) -> Result<(), String> {
        let Record { refs, tails, holds, pins, state, .. } = *record;
        if (refs > 0) != (state == BlockState::Active) {
            return Err(format!("{state:?} with {refs} references"));
        }
        if refs > self.ref_limit {
            return Err(format!("{refs} references, at most {}", self.ref_limit));
        }
        if u64::from(tails) + u64::from(holds) + u64::from(pins) > u64::from(refs) {
            return Err(format!("{refs} references, {tails} tails, {holds} holds, {pins} pins"));
        }
        Ok(())
    }
}
