//! The blocks of one paged layer group: states, references, generations, the free list, the
//! cached lists.
//!
//! No memory of K or V is touched here; a block is its id. The store is a flat array of records,
//! made once; every list runs through the records, so no operation allocates, and all are O(1).
//!
//! ```text
//!            take                 park (last reference)
//!   Free ───────────▶ Active ─────────────────────────▶ Cached
//!    ▲                 │  ▲                               │ │
//!    │  drop_ref (0)   │  └───────── revive ──────────────┘ │
//!    └─────────────────┘                                    │
//!    └───────────────────────── evict ◀─────────────────────┘
//! ```
//!
//! Invariants: free + active + cached = total; promised ≤ free + cached; a block on the free or
//! a cached list has no references; an active one has at least one. Blocks that are *promised*
//! to sequences ("reserved") are not picked out: they are a number of blocks on the
//! free or cached list that [`BlockStore::unpromised`] leaves out. What shared blocks owe is
//! promised too (`record.rs`).

use super::block::{BlockCounts, BlockState};
use super::lru::{ClassLists, DEFAULT_PRIORITY, MAX_PRIORITY};
use super::record::{DIRTY, Debts, Record, fresh};
use crate::device::{huge_vec, prefetch};
use crate::error::{CacheError, DeviceError};
use crate::plan::NO_BLOCK;
use crate::units::{BlockId, GroupIdx};

/// The blocks of one paged layer group.
#[derive(Debug)]
pub struct BlockStore {
    pub(super) group: GroupIdx,
    pub(super) records: Vec<Record>,
    /// References that a block may have.
    pub(super) ref_limit: u32,
    pub(super) debts: Debts,
    pub(super) free_head: u32,
    pub(super) free: u32,
    pub(super) lists: ClassLists,
    pub(super) cached: u32,
    peak_cached: u32,
    pub(super) promised: u32,
    /// Rows that hold a full block which another row holds full too, beyond the first of each.
    shared_rows: u32,
}

impl BlockStore {
    /// All `total` blocks free; block 0 is the first to be taken. Nothing is promised for sharing.
    ///
    /// # Panics
    /// There is no memory for the records.
    #[must_use]
    pub fn new(group: GroupIdx, total: u32, ref_limit: u32) -> Self {
        match Self::with_debts(group, total, ref_limit, Debts::None) {
            Ok(store) => store,
            Err(error) => panic!("{error}"),
        }
    }

    /// As [`BlockStore::new`], with what shared blocks owe.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn with_debts(
        group: GroupIdx,
        total: u32,
        ref_limit: u32,
        debts: Debts,
    ) -> Result<Self, DeviceError> {
        Ok(Self {
            group,
            records: huge_vec(total as usize, |id| fresh(id, total, 0))?,
            ref_limit,
            debts,
            free_head: if total == 0 { NO_BLOCK } else { 0 },
            free: total,
            lists: ClassLists::new(),
            cached: 0,
            peak_cached: 0,
            promised: 0,
            shared_rows: 0,
        })
    }

    /// All blocks free again, in the order of a new store; every handle is stale.
    pub fn reset(&mut self) {
        let total = self.total();
        for (id, record) in self.records.iter_mut().enumerate() {
            let dirty = record.state != BlockState::Free || record.prev == DIRTY;
            *record = fresh(id, total, record.generation + 1);
            record.prev = if dirty { DIRTY } else { NO_BLOCK };
        }
        self.free_head = if total == 0 { NO_BLOCK } else { 0 };
        self.free = total;
        self.lists = ClassLists::new();
        self.cached = 0;
        self.peak_cached = 0;
        self.promised = 0;
        self.shared_rows = 0;
    }

    /// All blocks.
    #[must_use]
    pub fn total(&self) -> u32 {
        // `new` was given a u32.
        u32::try_from(self.records.len()).unwrap_or(u32::MAX)
    }

    /// Free blocks.
    #[must_use]
    pub const fn free(&self) -> u32 {
        self.free
    }

    /// Blocks that can be taken: free ones, and cached ones that can be evicted. A cached block
    /// is counted here once, as capacity, however often it may be hit.
    #[must_use]
    pub const fn available(&self) -> u32 {
        self.free + self.cached
    }

    /// Available blocks that no admitted sequence was promised.
    #[must_use]
    pub const fn unpromised(&self) -> u32 {
        self.available().saturating_sub(self.promised)
    }

    /// The most blocks that were ever cached at once.
    #[must_use]
    pub const fn peak_cached(&self) -> u32 {
        self.peak_cached
    }

    /// Rows that hold a full block which another row holds full too, beyond the first of each.
    #[must_use]
    pub(crate) const fn shared_rows(&self) -> u32 {
        self.shared_rows
    }

    /// How many blocks are in which state; the five counts add up.
    #[must_use]
    pub fn counts(&self) -> BlockCounts {
        let from_free = self.promised.min(self.free);
        BlockCounts {
            total: self.total(),
            free: self.free - from_free,
            active: self.total() - self.available(),
            cached: self.cached - (self.promised - from_free),
            promised: self.promised,
        }
    }

    /// Promises blocks to a sequence: they stay available to it and to nobody else.
    ///
    /// # Errors
    /// [`CacheError::NotAdmitted`] when fewer are unpromised; nothing changes.
    pub fn promise(&mut self, blocks: u32) -> Result<(), CacheError> {
        if blocks > self.unpromised() {
            return Err(CacheError::NotAdmitted {
                group: self.group,
                wanted: u64::from(blocks),
                available: u64::from(self.unpromised()),
            });
        }
        self.promised += blocks;
        Ok(())
    }

    /// Takes a promise back: the blocks are anybody's, or are about to be taken by the sequence
    /// that had it. More than was promised counts as all of it.
    pub fn unpromise(&mut self, blocks: u32) {
        debug_assert!(blocks <= self.promised, "more taken back than was promised");
        self.promised = self.promised.saturating_sub(blocks);
    }

    /// Changes a record, and what its block owes with it.
    fn change(&mut self, block: BlockId, change: impl FnOnce(&mut Record)) {
        let debts = self.debts;
        let record = &mut self.records[block.index()];
        let (owed, shared) = (debts.of(record), record.shared_rows());
        change(record);
        self.promised = self.promised + debts.of(record) - owed;
        self.shared_rows = self.shared_rows + record.shared_rows() - shared;
    }

    /// What a block would owe more (or, negative, less) with other numbers of references and
    /// tails.
    pub(crate) fn debt_change(&self, block: BlockId, refs: i32, tails: i32, pins: i16) -> i64 {
        let before = self.records[block.index()];
        let mut after = before;
        after.refs = after.refs.saturating_add_signed(refs);
        after.tails = after.tails.saturating_add_signed(tails);
        after.pins = after.pins.saturating_add_signed(pins);
        i64::from(self.debts.of(&after)) - i64::from(self.debts.of(&before))
    }

    /// Takes the first free block, with one reference. `None` when no block is free, cached ones
    /// aside (see [`BlockStore::evict`]); nothing has changed then.
    pub fn take(&mut self) -> Option<BlockId> {
        self.take_dirty().map(|(block, _)| block)
    }

    /// As [`BlockStore::take`]; says also whether tokens may still be in it, of those who had it
    /// before.
    #[inline]
    pub(crate) fn take_dirty(&mut self) -> Option<(BlockId, bool)> {
        let id = self.free_head;
        let record = self.records.get_mut(id as usize)?;
        self.free_head = record.next;
        self.free -= 1;
        record.state = BlockState::Active;
        record.refs = 1;
        let dirty = std::mem::replace(&mut record.prev, NO_BLOCK) == DIRTY;
        Some((BlockId(id), dirty))
    }

    /// The free block behind one on the list, or the first, if tokens may still be in it.
    pub(crate) fn next_dirty(&self, after: Option<BlockId>) -> Option<BlockId> {
        let next = match after {
            Some(block) => self.records.get(block.index())?.next,
            None => self.free_head,
        };
        Some(BlockId(next)).filter(|block| self.is_dirty(*block))
    }

    /// Whether a block is free and tokens may still be in it.
    pub(crate) fn is_dirty(&self, block: BlockId) -> bool {
        let record = self.records.get(block.index());
        record.is_some_and(|record| record.state == BlockState::Free && record.prev == DIRTY)
    }

    /// Notes that a free block was zeroed.
    pub(crate) fn set_clean(&mut self, block: BlockId) {
        if self.is_dirty(block) {
            self.records[block.index()].prev = NO_BLOCK;
        }
    }

    /// Adds a reference to an active block.
    ///
    /// # Errors
    /// [`CacheError::TooManyRefs`] at the limit, [`CacheError::StaleBlock`] for a block that is
    /// not active; nothing changes.
    pub fn add_ref(&mut self, block: BlockId) -> Result<(), CacheError> {
        let limit = self.ref_limit;
        let record = self.active(block)?;
        if record.refs >= limit {
            return Err(CacheError::TooManyRefs { block: block.0, limit });
        }
        self.change(block, |record| record.refs += 1);
        Ok(())
    }

    /// Drops a reference. The last one gives the block back to the front of the free list, where
    /// it is the next to be taken, and makes its handles stale.
    ///
    /// # Errors
    /// [`CacheError::StaleBlock`] for a block that is not active; nothing changes.
    pub fn drop_ref(&mut self, block: BlockId) -> Result<(), CacheError> {
        let last = self.active(block)?.refs == 1;
        self.change(block, |record| record.refs -= 1);
        if last {
            self.set_free(block);
        }
        Ok(())
    }

    /// Drops the last reference of a block whose tokens can be reused: it becomes the youngest
    /// cached block of its class, and its handles are stale.
    ///
    /// # Errors
    /// [`CacheError::StaleBlock`] for a block that is not active, [`CacheError::TooManyRefs`] for
    /// one that others hold too; nothing changes.
    pub fn park(&mut self, block: BlockId) -> Result<(), CacheError> {
        if self.active(block)?.refs != 1 {
            return Err(CacheError::TooManyRefs { block: block.0, limit: 1 });
        }
        self.change(block, |record| record.refs = 0);
        let record = &mut self.records[block.index()];
        record.state = BlockState::Cached;
        record.generation += 1;
        self.lists.push(&mut self.records, block.0);
        self.cached += 1;
        self.peak_cached = self.peak_cached.max(self.cached);
        Ok(())
    }

    /// As [`BlockStore::park`], but the block becomes the oldest cached one of its class.
    ///
    /// # Errors
    /// As [`BlockStore::park`].
    pub(crate) fn park_oldest(&mut self, block: BlockId) -> Result<(), CacheError> {
        self.park(block)?;
        self.lists.unlink(&mut self.records, block.0);
        self.lists.push_oldest(&mut self.records, block.0);
        Ok(())
    }

    /// Drops a reference of a block that others may hold; the last one parks it if `keep`, and
    /// frees it otherwise. Says whether it was the last.
    pub(crate) fn give_up(&mut self, block: BlockId, keep: bool) -> Result<bool, CacheError> {
        let last = self.active(block)?.refs == 1;
        if last && keep {
            self.park(block)?;
        } else {
            self.drop_ref(block)?;
        }
        Ok(last)
    }

    /// Gives a cached block to a sequence again, with one reference.
    ///
    /// # Errors
    /// [`CacheError::StaleBlock`] for a block that is not cached; nothing changes.
    pub fn revive(&mut self, block: BlockId) -> Result<(), CacheError> {
        match self.records.get(block.index()) {
            Some(record) if record.state == BlockState::Cached => {}
            other => return Err(self.stale(block, other.map_or(0, |record| record.generation))),
        }
        self.lists.unlink(&mut self.records, block.0);
        self.cached -= 1;
        let record = &mut self.records[block.index()];
        record.state = BlockState::Active;
        record.refs = 1;
        Ok(())
    }

    /// One more reference to a block that is active or cached. Says whether it was cached.
    ///
    /// # Errors
    /// As [`BlockStore::add_ref`].
    #[inline]
    pub(crate) fn claim(&mut self, block: BlockId) -> Result<bool, CacheError> {
        if self.records.get(block.index()).is_some_and(|r| r.state == BlockState::Cached) {
            self.revive(block).map(|()| true)
        } else {
            self.add_ref(block).map(|()| false)
        }
    }

    /// Undoes [`BlockStore::claim`], when everything that happened since has been undone: a block
    /// that was cached is again where it was on its list.
    pub(crate) fn unclaim(&mut self, block: BlockId) {
        self.change(block, |record| record.refs -= 1);
        if self.records[block.index()].refs == 0 {
            self.records[block.index()].state = BlockState::Cached;
            self.lists.link(&mut self.records, block.0);
            self.cached += 1;
        }
    }

    /// Notes that a block is, or no more is, the last and not full in one of the rows that hold it.
    pub(crate) fn set_tail(&mut self, block: BlockId, tail: bool) {
        self.change(block, |record| {
            record.tails = if tail { record.tails + 1 } else { record.tails.saturating_sub(1) };
        });
    }

    /// Turns a row's reference to its last block into a step's hold, because the row is about to
    /// get a copy.
    pub(crate) fn hold_tail(&mut self, block: BlockId) {
        self.change(block, |record| {
            record.holds += 1;
            record.tails = record.tails.saturating_sub(1);
        });
    }

    /// Undoes [`BlockStore::hold_tail`].
    pub(crate) fn unhold_tail(&mut self, block: BlockId) {
        self.change(block, |record| {
            record.holds = record.holds.saturating_sub(1);
            record.tails += 1;
        });
    }

    /// Drops a step's hold, as [`BlockStore::give_up`].
    pub(crate) fn drop_hold(&mut self, block: BlockId, keep: bool) -> Result<bool, CacheError> {
        self.change(block, |record| record.holds = record.holds.saturating_sub(1));
        self.give_up(block, keep)
    }

    /// Adds a reference that no sequence holds.
    pub(crate) fn pin(&mut self, block: BlockId) -> Result<(), CacheError> {
        self.active(block)?;
        self.change(block, |record| {
            record.refs += 1;
            record.pins += 1;
        });
        Ok(())
    }

    /// Drops the reference of a pin, as [`BlockStore::give_up`].
    pub(crate) fn unpin(&mut self, block: BlockId, keep: bool) -> Result<bool, CacheError> {
        let last = self.active(block)?.refs == 1;
        self.change(block, |record| record.pins = record.pins.saturating_sub(1));
        self.give_up(block, keep)?;
        Ok(last)
    }

    /// References that rows and pins have to a block: those of a step that copied it left out.
    #[must_use]
    pub(crate) fn holders(&self, block: BlockId) -> u32 {
        self.records.get(block.index()).map_or(0, |record| record.refs - record.holds)
    }

    /// All references to a block.
    #[must_use]
    pub(crate) fn references(&self, block: BlockId) -> u32 {
        self.records.get(block.index()).map_or(0, |record| record.refs)
    }

    /// The priority class of a block.
    #[must_use]
    pub fn class(&self, block: BlockId) -> u8 {
        self.records.get(block.index()).map_or(0, |record| record.class)
    }

    /// Gives a block another priority class; a cached one becomes the youngest of it.
    pub(crate) fn set_class(&mut self, block: BlockId, class: u8) {
        let class = class.min(MAX_PRIORITY);
        let Some(record) = self.records.get(block.index()) else { return };
        if record.class == class {
            return;
        }
        let cached = record.state == BlockState::Cached;
        if cached {
            self.lists.unlink(&mut self.records, block.0);
        }
        self.records[block.index()].class = class;
        if cached {
            self.lists.push(&mut self.records, block.0);
        }
    }

    /// Makes the handles of a block stale: its tokens are not kept any more.
    pub(crate) fn outdate(&mut self, block: BlockId) {
        if let Some(record) = self.records.get_mut(block.index()) {
            record.generation += 1;
        }
    }

    /// Makes a cached block the youngest of its class.
    pub(crate) fn renew(&mut self, block: BlockId) {
        if self.records.get(block.index()).is_some_and(|r| r.state == BlockState::Cached) {
            self.lists.unlink(&mut self.records, block.0);
            self.lists.push(&mut self.records, block.0);
        }
    }

    /// The cached block that is evicted next: the oldest of the lowest class.
    #[must_use]
    pub fn victim(&self) -> Option<BlockId> {
        self.lists.first().map(BlockId)
    }

    /// Tells the processor that a block's record will be read.
    #[inline]
    pub(crate) fn prefetch(&self, block: BlockId) {
        if let Some(record) = self.records.get(block.index()) {
            prefetch(record);
        }
    }

    /// Forgets a cached block: it is the next free one, and its handles are stale.
    ///
    /// # Errors
    /// [`CacheError::StaleBlock`] for a block that is not cached; nothing changes.
    pub fn evict(&mut self, block: BlockId) -> Result<(), CacheError> {
        match self.records.get(block.index()) {
            Some(record) if record.state == BlockState::Cached => {}
            other => return Err(self.stale(block, other.map_or(0, |record| record.generation))),
        }
        self.lists.unlink(&mut self.records, block.0);
        self.cached -= 1;
        self.set_free(block);
        Ok(())
    }

    /// Puts a block to the front of the free list.
    fn set_free(&mut self, block: BlockId) {
        let record = &mut self.records[block.index()];
        record.state = BlockState::Free;
        record.class = DEFAULT_PRIORITY;
        record.generation += 1;
        record.next = self.free_head;
        record.prev = DIRTY;
        self.free_head = block.0;
        self.free += 1;
    }

    /// The state, references and generation of a block.
    #[must_use]
    pub fn get(&self, block: BlockId) -> Option<(BlockState, u32, u64)> {
        self.records.get(block.index()).map(|record| (record.state, record.refs, record.generation))
    }

    fn active(&self, block: BlockId) -> Result<&Record, CacheError> {
        match self.records.get(block.index()) {
            Some(record) if record.state == BlockState::Active => Ok(record),
            Some(record) => Err(self.stale(block, record.generation)),
            None => Err(self.stale(block, 0)),
        }
    }

    fn stale(&self, block: BlockId, generation: u64) -> CacheError {
        CacheError::StaleBlock { group: self.group, block: block.0, generation }
    }
}
