//! Pins: prefixes that stay whatever happens.

use super::{Cache, SeqHandle, group_idx};
use crate::device::{room, table_of};
use crate::error::{CacheError, DeviceError};
use crate::plan::{NO_BLOCK, PIN_BYTES, Plan};
use crate::units::BlockId;

/// A pinned prefix, as a value that can be checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PinHandle {
    cache_id: u32,
    slot: u32,
    generation: u64,
}

impl PinHandle {
    /// A handle made of its parts, to be checked at its next use.
    #[must_use]
    pub const fn from_parts(cache_id: u32, slot: u32, generation: u64) -> Self {
        Self { cache_id, slot, generation }
    }

    /// The parts: the cache's id, the slot, the generation.
    #[must_use]
    pub const fn parts(&self) -> (u32, u32, u64) {
        (self.cache_id, self.slot, self.generation)
    }
}

/// One pin.
#[derive(Clone, Copy, Debug, Default)]
struct Record {
    generation: u64,
    /// The last block of the chain that is pinned.
    last: u32,
    /// Blocks of the chain.
    blocks: u32,
    alive: bool,
}

const _: () = assert!(size_of::<Record>() as u64 == PIN_BYTES);

/// All pins.
#[derive(Debug)]
pub(super) struct PinTable {
    records: Vec<Record>,
    free: Vec<u32>,
    /// First and end of the blocks of each windowed group. `[pins, num_groups]`
    windows: Vec<(u32, u32)>,
    num_groups: usize,
}

impl PinTable {
    pub(super) fn new(plan: &Plan) -> Result<Self, DeviceError> {
        let (pins, num_groups) = (plan.max_pins(), plan.groups.len());
        let mut free = room(pins as usize)?;
        free.extend((0..pins).rev());
        Ok(Self {
            records: table_of(pins as usize, Record::default())?,
            free,
            windows: table_of(pins as usize * num_groups, (0, 0))?,
            num_groups,
        })
    }

    /// Of a plan that has no blocks to pin.
    pub(super) fn none() -> Self {
        Self { records: Vec::new(), free: Vec::new(), windows: Vec::new(), num_groups: 0 }
    }

    /// None is alive, and they are given out again in the order in which they are at open.
    pub(super) fn clear(&mut self) {
        self.records.iter_mut().for_each(|record| record.alive = false);
        self.free.clear();
        self.free.extend((0..u32::try_from(self.records.len()).unwrap_or(u32::MAX)).rev());
    }

    /// The places that are free, the next one last, for the audit.
    pub(super) fn free(&self) -> &[u32] {
        &self.free
    }

    /// Pins that are alive.
    pub(super) fn alive(&self) -> u32 {
        u32::try_from(self.records.len() - self.free.len()).unwrap_or(u32::MAX)
    }

    /// What is pinned, for the audit: last block, blocks, and the windows of each group.
    pub(super) fn all(&self) -> impl Iterator<Item = (u32, u32, &[(u32, u32)])> {
        let windows = self.windows.chunks_exact(self.num_groups.max(1));
        let all = self.records.iter().zip(windows);
        all.filter(|(r, _)| r.alive).map(|(r, windows)| (r.last, r.blocks, windows))
    }
}

impl Cache {
    /// Pins the shareable blocks that a sequence holds: all full blocks from its first token on
    /// that were published. They stay in the pool, and can be hit, until [`Cache::unpin`], also
    /// when the sequence is released. Pinned blocks are not available to anyone, so under
    /// guaranteed admission less is admitted.
    ///
    /// In windowed groups those blocks are pinned that the sequence still holds. Contiguous
    /// groups keep no blocks: nothing of them is pinned.
    ///
    /// # Errors
    /// A stale or foreign handle, [`CacheError::ReuseOff`], [`CacheError::NothingToPin`],
    /// [`CacheError::NoPin`] when all pins are in use, [`CacheError::NotAdmitted`] when what the
    /// sequences of a windowed group were promised could not be kept; nothing changes.
    pub fn pin(&mut self, sequence: SeqHandle) -> Result<PinHandle, CacheError> {
        self.abandon_step();
        let slot = self.seqs.check(sequence)?;
        let Some(reuse) = &self.reuse else { return Err(CacheError::ReuseOff) };
        let Some(index) = &reuse.index else { return Err(CacheError::ReuseOff) };
        let blocks = self.published_blocks(slot);
        if blocks == 0 {
            return Err(CacheError::NothingToPin);
        }
        let Some(&at) = reuse.pins.free.last() else {
            return Err(CacheError::NoPin { limit: self.plan.max_pins() });
        };
        let lead = index.lead();
        for windowed in 0..index.windowed().len() {
            let (group, first, end) = self.window_to_pin(windowed, slot, blocks);
            let Some(store) = self.pool.store(group) else { continue };
            let more: i64 = (first..end)
                .map(|at| store.debt_change(BlockId(self.entry(group, slot, at)), 1, 0, 1))
                .sum();
            if more > i64::from(store.unpromised()) {
                return Err(CacheError::NotAdmitted {
                    group: group_idx(group),
                    wanted: u64::try_from(more).unwrap_or(0),
                    available: u64::from(store.unpromised()),
                });
            }
        }
        for block in 0..blocks {
            let id = BlockId(self.entry(lead, slot, block));
            if let Some(store) = self.pool.store_mut(lead) {
                store.pin(id)?;
            }
        }
        let last = self.entry(lead, slot, blocks - 1);
        let windowed_groups = self.windowed_groups();
        for windowed in 0..windowed_groups {
            let (group, first, end) = self.window_to_pin(windowed, slot, blocks);
            for block in first..end {
                let id = BlockId(self.entry(group, slot, block));
                if let Some(store) = self.pool.store_mut(group) {
                    store.pin(id)?;
                }
            }
            if let Some(reuse) = &mut self.reuse {
                let num_groups = reuse.pins.num_groups;
                reuse.pins.windows[at as usize * num_groups + group] = (first, end);
            }
        }
        let cache_id = self.cache_id;
        let Some(reuse) = &mut self.reuse else { return Err(CacheError::ReuseOff) };
        reuse.pins.free.pop();
        let record = &mut reuse.pins.records[at as usize];
        let generation = record.generation + 1;
        *record = Record { generation, last, blocks, alive: true };
        Ok(PinHandle { cache_id, slot: at, generation })
    }

    /// Blocks of a row that are published, from the first on: also those that a fork has published
    /// since.
    fn published_blocks(&self, slot: u32) -> u32 {
        let Some(super::reuse::Reuse { index: Some(index), seqs, .. }) = &self.reuse else {
            return 0;
        };
        let mut blocks = seqs[slot as usize].published;
        let whole = self.seqs.record(slot).len / self.plan.tokens_per_block;
        while blocks < whole {
            let block = self.entry(index.lead(), slot, blocks);
            let parent = match blocks {
                0 => NO_BLOCK,
                at => self.entry(index.lead(), slot, at - 1),
            };
            if !index.is_published(block) || index.parent(block) != parent {
                break;
            }
            blocks += 1;
        }
        blocks
    }

    /// The blocks of a windowed group that a pin of a sequence's first `blocks` blocks covers: the
    /// last run of them that it holds and that are attached to the index.
    fn window_to_pin(&self, windowed: usize, slot: u32, blocks: u32) -> (usize, u32, u32) {
        let Some(index) = self.index() else { return (0, 0, 0) };
        let group = index.windowed()[windowed];
        let end = blocks.min(self.seqs.state(slot, group).next);
        let attached = |at: &u32| {
            let block = self.entry(group, slot, *at);
            block != NO_BLOCK && index.lead_of(windowed, block) != NO_BLOCK
        };
        let held = (0..end).rev().take_while(attached).count();
        (group, end - u32::try_from(held).unwrap_or(0), end)
    }

    /// Lets a pinned prefix go: its blocks can be evicted when nobody holds them.
    ///
    /// # Errors
    /// A stale or foreign handle; nothing changes.
    pub fn unpin(&mut self, pin: PinHandle) -> Result<(), CacheError> {
        self.abandon_step();
        if pin.cache_id != self.cache_id {
            return Err(CacheError::ForeignHandle);
        }
        let stale = CacheError::StalePin { slot: pin.slot, generation: pin.generation };
        let Some(reuse) = &mut self.reuse else { return Err(stale) };
        let record = match reuse.pins.records.get_mut(pin.slot as usize) {
            Some(record) if record.alive && record.generation == pin.generation => record,
            _ => return Err(stale),
        };
        record.alive = false;
        let Record { last, blocks, .. } = *record;
        reuse.pins.free.push(pin.slot);
        let Some(lead) = self.lead() else { return Ok(()) };
        // From the last to the first, so that children are older than parents.
        let mut block = last;
        for at in (0..blocks).rev() {
            for windowed in 0..self.windowed_groups() {
                self.unpin_windowed(pin.slot, windowed, at, block);
            }
            let parent = self.index().map_or(NO_BLOCK, |index| index.parent(block));
            self.unpin_block(lead, BlockId(block));
            block = parent;
        }
        self.scrub_freed();
        Ok(())
    }

    fn unpin_windowed(&mut self, pin: u32, windowed: usize, at: u32, lead_block: u32) {
        let Some(reuse) = &self.reuse else { return };
        let Some(index) = &reuse.index else { return };
        let group = index.windowed()[windowed];
        let (first, end) = reuse.pins.windows[pin as usize * reuse.pins.num_groups + group];
        if (first..end).contains(&at) {
            let block = index.attached(windowed, lead_block);
            self.unpin_block(group, BlockId(block));
        }
    }

    /// Drops a pin's reference to a block.
    fn unpin_block(&mut self, group: usize, block: BlockId) {
        let keep = self.is_shareable(group, block);
        if let Some(store) = self.pool.store_mut(group) {
            let last = store.unpin(block, keep);
            debug_assert!(last.is_ok(), "a pinned block is active");
            if last == Ok(true) && keep {
                self.note_parked(group, block);
            }
        }
    }
}
