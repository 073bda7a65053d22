//! The blocks of one paged layer group: states, references, generations, the free list.
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
//! the cached list has no references; an active one has at least one. Blocks that are *promised*
//! to sequences ("reserved") are not picked out: they are a number of blocks on the
//! free or cached list that [`BlockStore::unpromised`] leaves out.

use serde::Serialize;

use crate::error::{CacheError, InvariantError};
use crate::plan::{BLOCK_RECORD_BYTES, NO_BLOCK};
use crate::units::{BlockId, GroupIdx};

/// Who holds a block, and where it goes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum BlockState {
    /// Nobody; on the free list. Goes to a sequence (`Active`).
    Free,
    /// One or more sequences. Goes to the free list, or, when its tokens can be reused, to
    /// `Cached`.
    Active,
    /// Nobody, but its tokens are valid and may be reused; on the cached list, oldest first.
    /// Goes back to a sequence (`Active`) or is evicted (`Free`).
    Cached,
}

/// A block as a value that can be checked: it is refused once the block was given back (P6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockHandle {
    pub(crate) cache_id: u32,
    pub(crate) group: GroupIdx,
    pub(crate) block: BlockId,
    pub(crate) generation: u64,
}

impl BlockHandle {
    /// The layer group.
    #[must_use]
    pub const fn group(&self) -> GroupIdx {
        self.group
    }

    /// The block's id within the group.
    #[must_use]
    pub const fn block(&self) -> BlockId {
        self.block
    }
}

/// One block's record.
#[derive(Clone, Copy, Debug)]
struct Record {
    /// Raised each time the block is given back.
    generation: u64,
    /// References held by sequences.
    refs: u32,
    /// Free list: the next free block. Cached list: the next younger one.
    next: u32,
    /// Cached list: the next older one.
    prev: u32,
    state: BlockState,
}

const _: () = assert!(size_of::<Record>() as u64 == BLOCK_RECORD_BYTES);

/// The blocks of one paged layer group.
#[derive(Debug)]
pub struct BlockStore {
    group: GroupIdx,
    records: Vec<Record>,
    /// References that a block may have.
    ref_limit: u32,
    free_head: u32,
    free: u32,
    cached_oldest: u32,
    cached_youngest: u32,
    cached: u32,
    promised: u32,
}

/// How many blocks are in which state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BlockCounts {
    /// All blocks of the group.
    pub total: u32,
    /// On the free list and not promised.
    pub free: u32,
    /// Held by sequences.
    pub active: u32,
    /// Kept for reuse, held by nobody, and not promised.
    pub cached: u32,
    /// Promised to admitted sequences, not yet taken.
    pub promised: u32,
}

impl BlockStore {
    /// All `total` blocks free; block 0 is the first to be taken.
    #[must_use]
    pub fn new(group: GroupIdx, total: u32, ref_limit: u32) -> Self {
        let record = |id: u32| Record {
            generation: 0,
            refs: 0,
            next: if id + 1 < total { id + 1 } else { NO_BLOCK },
            prev: NO_BLOCK,
            state: BlockState::Free,
        };
        Self {
            group,
            records: (0..total).map(record).collect(),
            ref_limit,
            free_head: if total == 0 { NO_BLOCK } else { 0 },
            free: total,
            cached_oldest: NO_BLOCK,
            cached_youngest: NO_BLOCK,
            cached: 0,
            promised: 0,
        }
    }

    /// Every block free again and block 0 the first to be taken; handles are stale.
    pub(crate) fn reset(&mut self) {
        let total = self.total();
        for (id, record) in (0..).zip(&mut self.records) {
            *record = Record {
                generation: record.generation + 1,
                refs: 0,
                next: if id + 1 < total { id + 1 } else { NO_BLOCK },
                prev: NO_BLOCK,
                state: BlockState::Free,
            };
        }
        self.free_head = if total == 0 { NO_BLOCK } else { 0 };
        self.free = total;
        self.cached_oldest = NO_BLOCK;
        self.cached_youngest = NO_BLOCK;
        self.cached = 0;
        self.promised = 0;
    }

    /// All blocks.
    #[must_use]
    pub fn total(&self) -> u32 {
        // `new` was given a u32.
        u32::try_from(self.records.len()).unwrap_or(u32::MAX)
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
        self.available() - self.promised
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

    /// Takes a block with one reference: a free one, or else the oldest cached one, evicted.
    /// `None` when there is neither; nothing has changed then.
    pub fn take(&mut self) -> Option<BlockId> {
        if self.free == 0 {
            self.evict()?;
        }
        let id = self.free_head;
        let record = self.records.get_mut(id as usize)?;
        self.free_head = record.next;
        self.free -= 1;
        record.state = BlockState::Active;
        record.refs = 1;
        record.next = NO_BLOCK;
        Some(BlockId(id))
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
        record.refs += 1;
        Ok(())
    }

    /// Drops a reference. The last one gives the block back to the front of the free list, where
    /// it is the next to be taken, and makes its handles stale.
    ///
    /// # Errors
    /// [`CacheError::StaleBlock`] for a block that is not active; nothing changes.
    pub fn drop_ref(&mut self, block: BlockId) -> Result<(), CacheError> {
        let free_head = self.free_head;
        let record = self.active(block)?;
        record.refs -= 1;
        if record.refs == 0 {
            record.state = BlockState::Free;
            record.generation += 1;
            record.next = free_head;
            self.free_head = block.0;
            self.free += 1;
        }
        Ok(())
    }

    /// Drops the last reference of a block whose tokens can be reused: it becomes the youngest
    /// cached block and keeps its generation.
    ///
    /// # Errors
    /// [`CacheError::StaleBlock`] for a block that is not active, [`CacheError::TooManyRefs`] for
    /// one that others hold too; nothing changes.
    pub fn park(&mut self, block: BlockId) -> Result<(), CacheError> {
        let youngest = self.cached_youngest;
        let record = self.active(block)?;
        if record.refs != 1 {
            return Err(CacheError::TooManyRefs { block: block.0, limit: 1 });
        }
        record.refs = 0;
        record.state = BlockState::Cached;
        record.prev = youngest;
        record.next = NO_BLOCK;
        match self.records.get_mut(youngest as usize) {
            Some(older) => older.next = block.0,
            None => self.cached_oldest = block.0,
        }
        self.cached_youngest = block.0;
        self.cached += 1;
        Ok(())
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
        self.unlink_cached(block);
        let record = &mut self.records[block.index()];
        record.state = BlockState::Active;
        record.refs = 1;
        Ok(())
    }

    /// Forgets the oldest cached block: it is free, and its handles are stale.
    pub fn evict(&mut self) -> Option<BlockId> {
        let oldest = BlockId(self.cached_oldest);
        self.records.get(oldest.index())?;
        self.unlink_cached(oldest);
        let record = &mut self.records[oldest.index()];
        record.state = BlockState::Free;
        record.generation += 1;
        record.next = self.free_head;
        self.free_head = oldest.0;
        self.free += 1;
        Some(oldest)
    }

    /// Takes a cached block out of the cached list.
    fn unlink_cached(&mut self, block: BlockId) {
        let Record { next, prev, .. } = self.records[block.index()];
        match self.records.get_mut(prev as usize) {
            Some(older) => older.next = next,
            None => self.cached_oldest = next,
        }
        match self.records.get_mut(next as usize) {
            Some(younger) => younger.prev = prev,
            None => self.cached_youngest = prev,
        }
        let record = &mut self.records[block.index()];
        record.next = NO_BLOCK;
        record.prev = NO_BLOCK;
        self.cached -= 1;
    }

    /// The state, references and generation of a block.
    #[must_use]
    pub fn get(&self, block: BlockId) -> Option<(BlockState, u32, u64)> {
        self.records.get(block.index()).map(|record| (record.state, record.refs, record.generation))
    }

    /// The free blocks, next to be taken first.
    pub fn free_list(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.list(self.free_head, self.free)
    }

    /// The cached blocks, next to be evicted first.
    pub fn cached_list(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.list(self.cached_oldest, self.cached)
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
                "{cached} cached, {cached_listed} on the list, {} counted",
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
            if (record.refs > 0) != (record.state == BlockState::Active) {
                return fail(format!(
                    "block {id} is {:?} with {} references",
                    record.state, record.refs
                ));
            }
            if record.refs > self.ref_limit {
                return fail(format!("block {id} has {} references", record.refs));
            }
        }
        Ok(())
    }

    fn active(&mut self, block: BlockId) -> Result<&mut Record, CacheError> {
        let group = self.group;
        let stale = |generation| CacheError::StaleBlock { group, block: block.0, generation };
        match self.records.get_mut(block.index()) {
            Some(record) if record.state == BlockState::Active => Ok(record),
            Some(record) => Err(stale(record.generation)),
            None => Err(stale(0)),
        }
    }

    fn stale(&self, block: BlockId, generation: u64) -> CacheError {
        CacheError::StaleBlock { group: self.group, block: block.0, generation }
    }
}
