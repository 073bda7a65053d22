//! How long cached blocks are kept: priorities and time limits.
//!
//! A block's priority decides when it is evicted (`pool/lru.rs`). The range of tokens that gave it
//! may have a time limit; when it has passed since the block was last held, the block falls back
//! to the default, as the youngest of that class. Time is what the caller says it is
//! ([`Cache::set_time_ms`]): nothing here looks at a clock, so the same calls give the same
//! evictions (P10).

use super::prefix::PrefixIndex;
use super::reuse::Reuse;
use super::{Cache, SeqHandle};
use crate::device::{huge_vec, room};
use crate::error::{CacheError, DeviceError};
use crate::plan::{EXPIRY_BYTES, NO_BLOCK};
use crate::pool::{DEFAULT_PRIORITY, MAX_PRIORITY, Pool};
use crate::units::BlockId;

/// The most ranges that one sequence can have.
pub const MAX_RETENTIONS: usize = 4;

/// The priority of a range of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// The first token.
    pub from: u32,
    /// The end, not included; `u32::MAX` for "to the end".
    pub to: u32,
    /// 0 to 100; 0 is evicted first. What has no range has [`DEFAULT_PRIORITY`].
    pub priority: u8,
    /// How long the priority lasts after the last sequence has released the block; `None` = as
    /// long as the block is cached.
    pub duration_ms: Option<u64>,
}

/// The ranges of one sequence; none by default. A block that several ranges touch has the highest
/// of their priorities, with that one's time limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Retentions {
    ranges: [Option<Packed>; MAX_RETENTIONS],
}

/// One range, packed: there are four in every sequence's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Packed {
    from: u32,
    to: u32,
    /// `u64::MAX` for none.
    duration_ms: u64,
    priority: u8,
}

impl Retentions {
    /// No ranges.
    pub(super) const NONE: Self = Self { ranges: [None; MAX_RETENTIONS] };

    /// Checks the ranges and takes them.
    ///
    /// # Errors
    /// [`CacheError::BadRetention`]: more than [`MAX_RETENTIONS`], an empty or reversed range, two
    /// that overlap, a priority above 100.
    pub fn new(ranges: &[Retention]) -> Result<Self, CacheError> {
        let bad = |at, problem| Err(CacheError::BadRetention { at, problem });
        let mut all = Self::default();
        for (at, range) in ranges.iter().enumerate() {
            let Some(place) = all.ranges.get_mut(at) else {
                return bad(at, "a sequence has at most 4 ranges");
            };
            if range.from >= range.to {
                return bad(at, "the range is empty or reversed");
            }
            if range.priority > MAX_PRIORITY {
                return bad(at, "priorities are 0 to 100");
            }
            if ranges[..at].iter().any(|other| range.from < other.to && other.from < range.to) {
                return bad(at, "the range overlaps an earlier one");
            }
            let duration_ms = range.duration_ms.unwrap_or(u64::MAX);
            let Retention { from, to, priority, .. } = *range;
            *place = Some(Packed { from, to, duration_ms, priority });
        }
        Ok(all)
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.iter().all(Option::is_none)
    }

    /// The ranges.
    pub(super) fn ranges(&self) -> [Option<Retention>; MAX_RETENTIONS] {
        self.ranges.map(|range| {
            range.map(|Packed { from, to, duration_ms, priority }| Retention {
                from,
                to,
                priority,
                duration_ms: Some(duration_ms).filter(|duration| *duration != u64::MAX),
            })
        })
    }

    /// What they consist of, as numbers, for digests.
    pub(super) fn numbers(&self) -> impl Iterator<Item = u64> {
        self.ranges.iter().flatten().flat_map(|range| {
            let Packed { from, to, duration_ms, priority } = *range;
            [u64::from(from) << 32 | u64::from(to), duration_ms, u64::from(priority)]
        })
    }

    /// Priority and time limit (`u64::MAX` = none) of the block of tokens `from..to`.
    pub(super) fn of_block(&self, from: u32, to: u32) -> (u8, u64) {
        let touching =
            self.ranges.iter().flatten().filter(|range| range.from < to && from < range.to);
        let highest = touching.max_by_key(|range| (range.priority, range.duration_ms));
        highest.map_or((DEFAULT_PRIORITY, u64::MAX), |range| (range.priority, range.duration_ms))
    }
}

/// One block's time limit.
#[derive(Clone, Copy, Debug)]
struct Limit {
    /// How long its priority lasts once it is cached; `u64::MAX` = for ever.
    duration_ms: u64,
    /// When it ends, while it is in the heap.
    at_ms: u64,
}

/// The blocks whose priority ends at some time: a binary heap over their ids, earliest first, that
/// knows where each one is. O(log n), and only for blocks with a time limit.
#[derive(Debug)]
pub(super) struct Expiry {
    /// `[blocks]`
    limits: Vec<Limit>,
    heap: Vec<u32>,
    /// Where in the heap a block is; [`NO_BLOCK`] for nowhere. `[blocks]`
    place: Vec<u32>,
    /// Blocks with a time limit: where there are none, the tables need not be looked at.
    limited: u32,
    pub(super) now_ms: u64,
}

const _: () = assert!(size_of::<Limit>() as u64 + 4 + 4 == EXPIRY_BYTES);

impl Expiry {
    pub(super) fn new(blocks: u32) -> Result<Self, DeviceError> {
        let len = blocks as usize;
        Ok(Self {
            limits: huge_vec(len, |_| Limit { duration_ms: u64::MAX, at_ms: u64::MAX })?,
            heap: room(len)?,
            place: huge_vec(len, |_| NO_BLOCK)?,
            limited: 0,
            now_ms: 0,
        })
    }

    /// Gives a block a time limit, or none (`u64::MAX`); it runs from the next time that the
    /// block is cached.
    #[inline]
    pub(super) fn set_duration(&mut self, block: u32, duration_ms: u64) {
        if duration_ms == u64::MAX && self.limited == 0 {
            return;
        }
        let limit = &mut self.limits[block as usize];
        self.limited += u32::from(duration_ms != u64::MAX);
        self.limited -= u32::from(limit.duration_ms != u64::MAX);
        limit.duration_ms = duration_ms;
    }

    /// The time limit of a block.
    pub(super) fn duration(&self, block: u32) -> u64 {
        self.limits[block as usize].duration_ms
    }

    /// Notes that a block is cached from now on.
    #[inline]
    pub(super) fn start(&mut self, block: u32) {
        if self.limited == 0 {
            return;
        }
        let limit = &mut self.limits[block as usize];
        if limit.duration_ms != u64::MAX {
            limit.at_ms = self.now_ms.saturating_add(limit.duration_ms);
            self.insert(block);
        }
    }

    /// Notes that a block is cached from now on, and has less of its time left.
    pub(super) fn start_with(&mut self, block: u32, left_ms: u64) {
        let limit = &mut self.limits[block as usize];
        if limit.duration_ms != u64::MAX {
            limit.at_ms = self.now_ms.saturating_add(left_ms.min(limit.duration_ms));
            self.insert(block);
        }
    }

    /// Puts a block back that was taken out by mistake of a verb that was undone.
    pub(super) fn restart(&mut self, block: u32) {
        if self.limited > 0 && self.limits[block as usize].duration_ms != u64::MAX {
            self.insert(block);
        }
    }

    /// Notes that a block is not cached any more.
    #[inline]
    pub(super) fn stop(&mut self, block: u32) {
        if self.heap.is_empty() {
            return;
        }
        let at = self.place[block as usize];
        if at == NO_BLOCK {
            return;
        }
        self.place[block as usize] = NO_BLOCK;
        let last = self.heap.pop().unwrap_or(NO_BLOCK);
        if last != block {
            self.put(at, last);
            self.sift_up(at);
            self.sift_down(self.place[last as usize]);
        }
    }

    /// Takes out a block whose time has passed.
    pub(super) fn pop_due(&mut self) -> Option<u32> {
        let first = *self.heap.first()?;
        if self.limits[first as usize].at_ms > self.now_ms {
            return None;
        }
        self.stop(first);
        self.set_duration(first, u64::MAX);
        Some(first)
    }

    /// Forgets everything, the time too.
    pub(super) fn clear(&mut self) {
        self.now_ms = 0;
        self.heap.clear();
        self.limited = 0;
        self.place.fill(NO_BLOCK);
        self.limits.fill(Limit { duration_ms: u64::MAX, at_ms: u64::MAX });
    }

    /// The end of a block's priority, if it is cached with a time limit.
    pub(super) fn due(&self, block: u32) -> Option<u64> {
        (self.place[block as usize] != NO_BLOCK).then(|| self.limits[block as usize].at_ms)
    }

    fn insert(&mut self, block: u32) {
        // At most one entry a block, and block ids are u32.
        let at = u32::try_from(self.heap.len()).unwrap_or(NO_BLOCK);
        self.heap.push(block);
        self.place[block as usize] = at;
        self.sift_up(at);
    }

    /// The order: by time, and among equal times by id, so that it never depends on history.
    fn key(&self, at: u32) -> (u64, u32) {
        let block = self.heap[at as usize];
        (self.limits[block as usize].at_ms, block)
    }

    fn put(&mut self, at: u32, block: u32) {
        self.heap[at as usize] = block;
        self.place[block as usize] = at;
    }

    fn swap(&mut self, a: u32, b: u32) {
        let (first, second) = (self.heap[a as usize], self.heap[b as usize]);
        self.put(a, second);
        self.put(b, first);
    }

    fn sift_up(&mut self, mut at: u32) {
        while at > 0 && self.key(at) < self.key((at - 1) / 2) {
            self.swap(at, (at - 1) / 2);
            at = (at - 1) / 2;
        }
    }

    fn sift_down(&mut self, mut at: u32) {
        let len = u32::try_from(self.heap.len()).unwrap_or(NO_BLOCK);
        loop {
            let (left, right) = (2 * at + 1, 2 * at + 2);
            let mut least = at;
            for child in [left, right] {
                if child < len && self.key(child) < self.key(least) {
                    least = child;
                }
            }
            if least == at {
                return;
            }
            self.swap(at, least);
            at = least;
        }
    }
}

impl Cache {
    /// Tells the cache the time, in milliseconds from any start. It only grows; an earlier time
    /// than the last one is that one. Priorities whose time has passed fall back to the default.
    pub fn set_time_ms(&mut self, now: u64) {
        self.abandon_step();
        let Some(reuse) = &mut self.reuse else { return };
        reuse.expiry.now_ms = reuse.expiry.now_ms.max(now);
        while let Some(block) = self.reuse.as_mut().and_then(|reuse| reuse.expiry.pop_due()) {
            self.set_own_class(block, DEFAULT_PRIORITY);
        }
    }

    /// Gives a sequence other ranges: for what it publishes from now on and, at once, for the
    /// blocks that it holds. Where others hold them too, the last one to say counts.
    ///
    /// # Errors
    /// A stale or foreign handle, [`CacheError::ReuseOff`]; nothing changes.
    pub fn set_retention(
        &mut self,
        sequence: SeqHandle,
        retentions: Retentions,
    ) -> Result<(), CacheError> {
        self.abandon_step();
        let slot = self.seqs.check(sequence)?;
        let Some(reuse) = &mut self.reuse else { return Err(CacheError::ReuseOff) };
        let Some(index) = &reuse.index else { return Err(CacheError::ReuseOff) };
        let lead = index.lead();
        let share = &mut reuse.seqs[slot as usize];
        share.retentions = retentions;
        let published = share.published;
        let per_block = self.plan.tokens_per_block;
        // From the last to the first, so that a parent sees its children's new classes.
        for at in (0..published).rev() {
            let block = self.entry(lead, slot, at);
            let (class, duration) = retentions.of_block(at * per_block, (at + 1) * per_block);
            if let Some(reuse) = &mut self.reuse {
                reuse.expiry.set_duration(block, duration);
            }
            self.set_own_class(block, class);
        }
        Ok(())
    }

    /// Applies the ranges of a sequence that begins to the first blocks of its row, which it found:
    /// they are kept for as much as any who asked for them. Nothing is lowered.
    pub(super) fn keep_claimed(&mut self, slot: u32, blocks: u32) {
        let Some(Reuse { index: Some(index), seqs, .. }) = &self.reuse else { return };
        let (lead, retentions) = (index.lead(), seqs[slot as usize].retentions);
        if retentions.is_empty() {
            return;
        }
        let per_block = self.plan.tokens_per_block;
        for at in (0..blocks).rev() {
            let block = self.entry(lead, slot, at);
            let (class, duration) = retentions.of_block(at * per_block, (at + 1) * per_block);
            self.keep(block, class, duration);
        }
    }

    /// Keeps a published block that is held for as much as someone else asks for it, if that is
    /// more.
    pub(super) fn keep(&mut self, block: u32, class: u8, duration_ms: u64) {
        let Some(Reuse { index: Some(index), expiry, .. }) = &mut self.reuse else { return };
        let own = index.own_class(block);
        if class > own || (class == own && duration_ms > expiry.duration(block)) {
            expiry.set_duration(block, duration_ms);
            self.set_own_class(block, class);
        }
    }

    /// A block that counted for `class` is no child of this one any more, which may have counted
    /// for as much because of it.
    pub(super) fn lose_child(&mut self, parent: u32, class: u8) {
        let Some(index) = self.index().filter(|_| parent != NO_BLOCK) else { return };
        let own = index.own_class(parent);
        if class > own {
            self.set_own_class(parent, own);
        }
    }

    /// Gives a published block a priority of its own. It counts for as much as the highest of its
    /// children, which must go first; so do its parents, as far up as that changes their order.
    pub(super) fn set_own_class(&mut self, block: u32, class: u8) {
        let Some(index) = self.reuse.as_ref().and_then(|reuse| reuse.index.as_ref()) else {
            return;
        };
        index.set_own_class(block, class);
        let lead = index.lead();
        let (mut at, mut moved) = (block, class);
        while at != NO_BLOCK {
            let Some(index) = self.reuse.as_ref().and_then(|reuse| reuse.index.as_ref()) else {
                return;
            };
            let Some(store) = self.pool.store_mut(lead) else { return };
            let before = store.class(BlockId(at));
            let mut class = index.own_class(at).max(if at == block { 0 } else { moved });
            // No other child counts for more than the block did before: one that counts for as much
            // ends the search, so that many siblings do not make it long.
            let mut children = index.children(at);
            while class < before
                && let Some(child) = children.next()
            {
                class = class.max(store.class(BlockId(child)));
            }
            if class != store.class(BlockId(at)) {
                store.set_class(BlockId(at), class);
            } else if at == block || class != moved {
                return;
            } else {
                // The child has just become the youngest of this class: its parent is younger.
                store.renew(BlockId(at));
            }
            moved = class;
            set_class_of_attached(index, &mut self.pool, at, class);
            at = index.parent(at);
        }
    }

    /// Raises the class of a block's parents to that of a block that was published behind them.
    /// They are held by whoever published it, so no list changes; what is attached to them may be
    /// cached.
    pub(super) fn raise_parents(&mut self, block: u32, class: u8) {
        let Some(index) = self.reuse.as_ref().and_then(|reuse| reuse.index.as_ref()) else {
            return;
        };
        let mut at = index.parent(block);
        while at != NO_BLOCK {
            let Some(store) = self.pool.store_mut(index.lead()) else { return };
            if store.class(BlockId(at)) >= class {
                return;
            }
            store.set_class(BlockId(at), class);
            set_class_of_attached(index, &mut self.pool, at, class);
            at = index.parent(at);
        }
    }
}

/// Gives what is attached to a block of the lead group the same priority: a match needs them all.
pub(super) fn set_class_of_attached(index: &PrefixIndex, pool: &mut Pool, block: u32, class: u8) {
    for (windowed, group) in index.windowed().iter().enumerate() {
        let attached = index.attached(windowed, block);
        if let Some(store) = pool.store_mut(*group).filter(|_| attached != NO_BLOCK) {
            store.set_class(BlockId(attached), class);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_heap_follows_a_model() {
        let mut expiry = Expiry::new(50).expect("memory");
        let mut model: Vec<(u64, u32)> = Vec::new();
        let mut state = 7_u64;
        for _ in 0..20_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let block = (state >> 40) as u32 % 50;
            match (state >> 33) % 4 {
                0 | 1 => {
                    expiry.stop(block);
                    model.retain(|entry| entry.1 != block);
                    let duration = (state >> 20) % 30;
                    expiry.set_duration(block, duration);
                    expiry.start(block);
                    model.push((expiry.now_ms + duration, block));
                }
                2 => {
                    expiry.stop(block);
                    model.retain(|entry| entry.1 != block);
                }
                _ => {
                    expiry.now_ms += (state >> 50) % 4;
                    model.sort_unstable();
                    while let Some(block) = expiry.pop_due() {
                        assert_eq!(model.remove(0).1, block);
                    }
                    assert!(model.first().is_none_or(|entry| entry.0 > expiry.now_ms));
                }
            }
        }
    }

    #[test]
    fn edge_31_bad_ranges_are_refused() {
        let range = |from, to, priority| Retention { from, to, priority, duration_ms: None };
        let bad = |ranges: &[Retention]| Retentions::new(ranges).expect_err("bad").to_string();
        assert!(bad(&[range(5, 5, 1)]).contains("empty or reversed"));
        assert!(bad(&[range(6, 5, 1)]).contains("empty or reversed"));
        assert!(bad(&[range(0, 5, 101)]).contains("0 to 100"));
        assert!(bad(&[range(0, 5, 1), range(4, 6, 1)]).contains("overlaps"));
        assert!(bad(&[range(0, 1, 1); 5]).contains("overlaps"));
        let five = [0, 1, 2, 3, 4].map(|at| range(at, at + 1, 1));
        assert!(bad(&five).contains("at most 4"));
        // Not aligned to blocks: whoever touches a block gives it the highest priority.
        let all = Retentions::new(&[range(0, 10, 80), range(10, u32::MAX, 20)]).expect("good");
        assert_eq!(all.of_block(0, 8).0, 80);
        assert_eq!(all.of_block(8, 16).0, 80);
        assert_eq!(all.of_block(16, 24).0, 20);
        assert_eq!(Retentions::default().of_block(0, 8), (DEFAULT_PRIORITY, u64::MAX));
    }
}
