//! Giving blocks back: to those who share them, to the cached lists, to the free list.

use super::Cache;
use super::prefix::PrefixIndex;
use crate::device::{huge_vec, prefetch};
use crate::error::DeviceError;
use crate::plan::{LATER_BYTES, NO_BLOCK};
use crate::pool::BlockStore;
use crate::units::BlockId;

/// How far ahead of the next victim the processor is told of those to come.
const VICTIMS_AHEAD: usize = 16;

/// Evictions between asking for a node and reading it.
const NODE_AHEAD: usize = 8;

/// Knows which block will be evicted some time after another, and has what that touches brought
/// near. Following the list of victims would not do: each names the next, so that every miss is
/// waited for. So a block that is cached is noted with the one that was cached some time before it,
/// and when that one is evicted, this one's turn is near. All of it is a hint: blocks that are
/// reused meanwhile leave entries that lead nowhere of use.
#[derive(Debug)]
pub(super) struct Scout {
    /// For each block of the lead group, the one that was cached `VICTIMS_AHEAD` later. `[blocks]`
    later: Vec<u32>,
    /// The blocks cached last: a ring, and its oldest.
    cached: [u32; VICTIMS_AHEAD],
    oldest_cached: usize,
    /// The blocks whose nodes were asked for last: a ring, and its oldest.
    asked: [u32; NODE_AHEAD],
    oldest_asked: usize,
}

const _: () = assert!(size_of::<u32>() as u64 == LATER_BYTES);

impl Scout {
    pub(super) fn new(blocks: u32) -> Result<Self, DeviceError> {
        Ok(Self {
            later: huge_vec(blocks as usize, |_| NO_BLOCK)?,
            cached: [NO_BLOCK; VICTIMS_AHEAD],
            oldest_cached: 0,
            asked: [NO_BLOCK; NODE_AHEAD],
            oldest_asked: 0,
        })
    }

    /// Notes that a block is cached.
    #[inline]
    pub(super) fn is_cached(&mut self, block: u32) {
        let earlier = std::mem::replace(&mut self.cached[self.oldest_cached], block);
        self.oldest_cached = (self.oldest_cached + 1) % VICTIMS_AHEAD;
        if let Some(later) = self.later.get_mut(earlier as usize) {
            *later = block;
        }
    }

    /// Asks for what the victim will touch whose turn comes some time after this one's.
    #[inline]
    fn leaves(&mut self, victim: u32, store: &BlockStore, index: &PrefixIndex) {
        let later = self.later.get(victim as usize).copied().unwrap_or(NO_BLOCK);
        store.prefetch(BlockId(later));
        index.prefetch_node(later);
        if let Some(next) = self.later.get(later as usize) {
            prefetch(next);
        }
        let earlier = std::mem::replace(&mut self.asked[self.oldest_asked], later);
        self.oldest_asked = (self.oldest_asked + 1) % NODE_AHEAD;
        // The node, which is here by now, names the place in the table.
        index.prefetch_place(earlier);
    }
}

impl Cache {
    /// Whether a block can be found by others: published, or attached to a published one.
    pub(super) fn is_shareable(&self, group: usize, block: BlockId) -> bool {
        let Some(index) = self.index() else { return false };
        if index.lead() == group {
            return index.is_published(block.0);
        }
        let windowed = index.windowed().iter().position(|of| *of == group);
        windowed.is_some_and(|windowed| index.lead_of(windowed, block.0) != NO_BLOCK)
    }

    /// Drops one reference to a block. The last one makes it cached if it can be found, and free
    /// otherwise.
    pub(super) fn give_up(&mut self, group: usize, block: BlockId) {
        let keep = self.is_shareable(group, block);
        let Some(store) = self.pool.store_mut(group) else { return };
        let last = store.give_up(block, keep);
        debug_assert!(last.is_ok(), "a reference that is dropped was held");
        if keep && last == Ok(true) {
            self.note_parked(group, block);
        }
    }

    /// Starts the time limit of a block that was just cached.
    pub(super) fn note_parked(&mut self, group: usize, block: BlockId) {
        if self.lead() == Some(group)
            && let Some(reuse) = &mut self.reuse
        {
            reuse.scout.is_cached(block.0);
            reuse.expiry.start(block.0);
        }
    }

    /// Makes sure that a group has a free block, evicting a cached one if it must. Says whether
    /// there is one.
    pub(super) fn make_free(&mut self, group: usize) -> bool {
        let Some(store) = self.pool.store(group) else { return false };
        if store.free() > 0 {
            return true;
        }
        let Some(victim) = store.victim() else { return false };
        self.evict_victim(group, victim);
        true
    }

    /// Evicts the block whose turn it is.
    #[inline]
    pub(super) fn evict_victim(&mut self, group: usize, victim: BlockId) {
        let class = self.pool.store(group).map_or(0, |store| store.class(victim));
        self.ask_ahead(group, victim);
        self.evict(group, victim);
        self.counters.evictions += 1;
        self.evictions_by_priority[usize::from(class)] += 1;
    }

    /// Takes everything that goes on from a block of the lead group out of the index. Nobody holds
    /// it: whoever did would hold the block too.
    pub(super) fn prune(&mut self, lead: usize, block: u32) {
        let mut at = block;
        loop {
            let Some(index) = self.index() else { return };
            if let Some(child) = index.children(at).next() {
                at = child;
                continue;
            }
            if at == block {
                return;
            }
            let parent = index.parent(at);
            self.evict(lead, BlockId(at));
            self.counters.blocks_withdrawn += 1;
            at = parent;
        }
    }

    /// Tells the processor of a victim to come.
    fn ask_ahead(&mut self, group: usize, victim: BlockId) {
        let Some(reuse) = &mut self.reuse else { return };
        let Some(index) = reuse.index.as_ref().filter(|index| index.lead() == group) else {
            return;
        };
        if let Some(store) = self.pool.store(group) {
            reuse.scout.leaves(victim.0, store, index);
        }
    }

    /// Forgets a cached block: it is free.
    fn evict(&mut self, group: usize, block: BlockId) {
        self.forget(group, block);
        if let Some(store) = self.pool.store_mut(group) {
            let evicted = store.evict(block);
            debug_assert!(evicted.is_ok(), "a victim is cached");
        }
    }

    /// Takes a block out of the index, and with a block of the lead group what is attached to it.
    pub(super) fn forget(&mut self, group: usize, block: BlockId) {
        if self.lead() == Some(group) {
            for windowed in 0..self.windowed_groups() {
                let (of_group, attached) = self.attached_to(windowed, block.0);
                self.scrub_unshared(of_group, BlockId(attached));
            }
        }
        self.scrub_unshared(group, block);
        let Some(reuse) = &mut self.reuse else { return };
        let Some(index) = &mut reuse.index else { return };
        let lead = index.lead();
        if group != lead {
            let windowed = index.windowed().iter().position(|of| *of == group);
            if let Some(windowed) = windowed {
                let lead_block = index.lead_of(windowed, block.0);
                if lead_block != NO_BLOCK {
                    index.detach(windowed, lead_block);
                    reuse.events.removed(group, block.0);
                }
            }
            return;
        }
        for windowed in 0..index.windowed().len() {
            let attached = index.detach(windowed, block.0);
            if attached == NO_BLOCK {
                continue;
            }
            let of_group = index.windowed()[windowed];
            reuse.events.removed(of_group, attached);
            if let Some(store) = self.pool.store_mut(of_group)
                && store.holders(BlockId(attached)) == 0
            {
                // Held by nobody, so it is cached, and nobody can find it any more.
                let freed = store.evict(BlockId(attached));
                debug_assert!(freed.is_ok(), "a block that nobody holds is cached");
            }
        }
        let parent = index.parent(block.0);
        index.remove(block.0);
        reuse.expiry.stop(block.0);
        reuse.expiry.set_duration(block.0, u64::MAX);
        reuse.events.removed(lead, block.0);
        let class = self.pool.store(lead).map_or(0, |store| store.class(block));
        self.lose_child(parent, class);
    }

    /// Forgets every cached block that nobody holds; what sequences and pins hold stays, and stays
    /// shareable. Retained slots of contiguous groups are forgotten too.
    pub fn clear_cached(&mut self) {
        self.abandon_step();
        let Some(lead) = self.lead() else {
            self.forget_donors();
            return;
        };
        let groups = self.plan.groups.len();
        // The lead first: its blocks take what is attached with them.
        for group in std::iter::once(lead).chain((0..groups).filter(|g| *g != lead)) {
            while let Some(victim) = self.pool.store(group).and_then(|store| store.victim()) {
                self.evict(group, victim);
            }
        }
        if let Some(reuse) = &mut self.reuse
            && reuse.index.as_ref().is_some_and(PrefixIndex::is_empty)
        {
            // Nothing is left: here a reader that has lost events can begin again.
            reuse.events.cleared(lead);
        }
        self.forget_donors();
        self.scrub_freed();
    }
}
