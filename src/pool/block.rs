//! What is said of blocks: their states, how many are in which, and a handle that can be checked.

use serde::Serialize;

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

/// A block as a value that can be checked: it is refused once nobody held the block, or tokens that
/// it shared were written over (P6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockHandle {
    pub(crate) cache_id: u32,
    pub(crate) group: GroupIdx,
    pub(crate) block: BlockId,
    pub(crate) generation: u64,
}

impl BlockHandle {
    /// A handle made of its parts, to be checked at its next use.
    #[must_use]
    pub const fn from_parts(cache_id: u32, group: u32, block: u32, generation: u64) -> Self {
        Self { cache_id, group: GroupIdx(group), block: BlockId(block), generation }
    }

    /// The parts: the cache's id, the group, the block, the generation.
    #[must_use]
    pub const fn parts(&self) -> (u32, u32, u32, u64) {
        (self.cache_id, self.group.0, self.block.0, self.generation)
    }

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
