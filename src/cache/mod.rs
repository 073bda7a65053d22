//! Sequences and what their blocks mean: the verbs.
//!
//! A [`Cache`] is one plan, one device and everything between. Its verbs either do all they say
//! or refuse with a typed error and leave no trace (P4). None of them allocates, refusals
//! included (P1).
//!
//! **Threads.** A cache is used by one thread at a time: the verbs that change anything take
//! `&mut self`, and a [`Step`] borrows the cache for as long as it is open. Kernels run on the
//! device's own workers, inside the call. A `Cache` can be moved to another thread.
//!
//! **Order within a step.** [`Cache::reserve`] → for each layer [`Step::append`], then
//! [`Step::attend`] → [`Step::commit`]. A step that is dropped is cancelled.

mod admission;
mod audit;
mod audit_reuse;
mod batch;
mod cow;
mod donor;
mod events;
mod evict;
mod fork;
mod pin;
mod preempt;
mod prefix;
mod publish;
mod retention;
mod reuse;
mod sequence;
mod step;
mod truncate;

pub use admission::{BeginOptions, Begun, Estimate, Reservation};
pub use batch::Csr;
pub use events::{Event, EventKind, Polled};
pub use pin::PinHandle;
pub use preempt::Preempted;
pub use prefix::{KeyPart, Namespace, Probe, Prober};
pub use retention::{MAX_RETENTIONS, Retention, Retentions};
pub use sequence::SeqHandle;
pub use step::{AttendOptions, Step};

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::config::{Admission, DeviceConfig};
use crate::device::cpu::{CpuDevice, available_memory, num_threads};
use crate::device::{Device, DeviceInfo};
use crate::error::{CacheError, OpenError, PlanError};
use crate::plan::{GroupKind, NO_BLOCK, Plan};
use crate::pool::{BlockHandle, BlockStore, GroupStats, MAX_PRIORITY, Pool, Stats};
use crate::units::{BlockId, Bytes, GroupIdx, SeqSlot};
use admission::Pending;
use batch::Batch;
use prefix::ChainKeys;
use reuse::Reuse;
use sequence::SeqTable;

/// The next cache's id: what makes a handle of one cache foreign to every other.
static NEXT_CACHE_ID: AtomicU32 = AtomicU32::new(1);

/// A KV cache: one pool, its sequences, and the verbs on them.
#[derive(Debug)]
pub struct Cache {
    plan: Plan,
    pool: Pool,
    seqs: SeqTable,
    /// Block tables. `[num_groups][seq_slots, max_blocks_per_seq]`, empty for contiguous groups.
    tables: Vec<Vec<u32>>,
    /// Tokens in each group that some query may still see. `[num_groups]`
    live_tokens: Vec<u64>,
    batch: Batch,
    counters: Stats,
    /// Blocks evicted, by their priority.
    evictions_by_priority: [u64; MAX_PRIORITY as usize + 1],
    /// What prefixes are shared with; `None` where none are.
    reuse: Option<Reuse>,
    /// Sequences of a batch that is being begun. `[seq_slots]`
    pending: Vec<Pending>,
    /// `tokens_per_block` is 2 to this,
    block_shift: u32,
    /// and this and 1 more.
    block_mask: u32,
    /// Sequences begun since the last reset.
    begun: u64,
    /// Under static-batch: a step of this batch was committed, so nobody else gets in.
    batch_closed: bool,
    /// Under max-utilization: someone was preempted, and nobody has ended since.
    preempted: bool,
    cache_id: u32,
}

impl Cache {
    /// Opens a cache in this machine's memory: checks that the plan fits `device.memory_limit`, or
    /// else what the machine has available, then allocates. `progress` is told how many bytes of
    /// the pool have been touched, and of how many.
    ///
    /// # Errors
    /// [`OpenError::Plan`] with the shortfall when it does not fit (nothing is allocated then),
    /// [`OpenError::Device`] when the operating system refuses.
    pub fn open_on_cpu(
        plan: Plan,
        config: &DeviceConfig,
        progress: Option<&mut dyn FnMut(Bytes, Bytes)>,
    ) -> Result<Self, OpenError> {
        let workspace = plan.cpu_workspace_bytes(num_threads(config)).map_err(PlanError::from)?;
        match config.memory_limit {
            Some(limit) => plan.check_memory(workspace, limit, "device.memory_limit")?,
            None => {
                if let Some(available) = available_memory() {
                    plan.check_memory(workspace, available, "what this machine has available")?;
                }
            }
        }
        let device = CpuDevice::open(&plan, config, progress)?;
        Self::open(plan, Box::new(device))
    }

    /// Opens a cache on a device that was opened with the same plan. All host memory that the
    /// cache will ever need is allocated here.
    ///
    /// # Errors
    /// [`OpenError::Plan`] when the device was opened with another plan.
    pub fn open(plan: Plan, device: Box<dyn Device>) -> Result<Self, OpenError> {
        Self::open_with_hash(plan, device, false)
    }

    /// As [`Cache::open`], with a prefix index in which every hash is the same: for the test that
    /// a hit never rests on a hash.
    ///
    /// # Errors
    /// As [`Cache::open`].
    #[doc(hidden)]
    pub fn open_with_constant_hash(plan: Plan, device: Box<dyn Device>) -> Result<Self, OpenError> {
        Self::open_with_hash(plan, device, true)
    }

    fn open_with_hash(
        plan: Plan,
        device: Box<dyn Device>,
        constant_hash: bool,
    ) -> Result<Self, OpenError> {
        if device.plan_fingerprint() != plan.fingerprint() {
            return Err(OpenError::Plan(PlanError::Contradiction {
                key: "device".to_owned(),
                problem: "it was opened with another plan".to_owned(),
                help: "open the device with the same plan".to_owned(),
            }));
        }
        let cache_id = NEXT_CACHE_ID.fetch_add(1, Relaxed);
        let table = |row: u32| vec![NO_BLOCK; plan.seq_slots as usize * row as usize];
        Ok(Self {
            seqs: SeqTable::new(plan.seq_slots, plan.groups.len(), cache_id),
            tables: plan.groups.iter().map(|group| table(group.max_blocks_per_seq)).collect(),
            live_tokens: vec![0; plan.groups.len()],
            batch: Batch::new(&plan),
            pool: Pool::new(&plan, device),
            counters: Stats::default(),
            evictions_by_priority: [0; MAX_PRIORITY as usize + 1],
            reuse: Reuse::new(&plan, constant_hash),
            pending: vec![Pending::NOTHING; plan.seq_slots as usize],
            block_shift: plan.tokens_per_block.trailing_zeros(),
            block_mask: plan.tokens_per_block - 1,
            begun: 0,
            batch_closed: false,
            preempted: false,
            cache_id,
            plan,
        })
    }

    /// The plan.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What the device says of itself.
    #[must_use]
    pub fn device_info(&self) -> DeviceInfo {
        self.pool.device.info()
    }

    /// The pool's first byte; stable for the life of the cache. With [`Plan::layer_view`] it gives
    /// an engine's own kernels the address of everything. They may read and write through it while
    /// no verb of the cache is under way.
    #[must_use]
    pub fn pool_ptr(&self) -> *mut u8 {
        self.pool.device.base_ptr()
    }

    /// Tokens committed to a sequence.
    ///
    /// # Errors
    /// A stale or foreign handle.
    pub fn seq_len(&self, sequence: SeqHandle) -> Result<u32, CacheError> {
        Ok(self.seqs.record(self.seqs.check(sequence)?).len)
    }

    /// Tokens that the sequence may have at most.
    ///
    /// # Errors
    /// A stale or foreign handle.
    pub fn seq_limit(&self, sequence: SeqHandle) -> Result<u32, CacheError> {
        Ok(self.seqs.record(self.seqs.check(sequence)?).limit)
    }

    /// Releases a sequence: its slot, its blocks and what it was promised. The handle is stale
    /// from here on. Blocks that can be shared stay cached until they are evicted.
    ///
    /// # Errors
    /// A stale or foreign handle; nothing changes.
    pub fn release(&mut self, sequence: SeqHandle) -> Result<(), CacheError> {
        self.abandon_step();
        let slot = self.seqs.check(sequence)?;
        self.release_slot(slot);
        self.preempted = false;
        Ok(())
    }

    fn release_slot(&mut self, slot: u32) {
        self.publish_the_rest(slot);
        for group in 0..self.plan.groups.len() {
            let live = self.live_in(group, slot);
            self.live_tokens[group] -= live;
            if self.pool.store(group).is_none() {
                continue;
            }
            self.leave_tail(group, slot);
            let promised = self.seqs.state(slot, group).promised();
            if let Some(store) = self.pool.store_mut(group) {
                store.unpromise(promised);
            }
            // Nothing is promised any more, so what comes back is anybody's.
            self.seqs.state_mut(slot, group).quota = 0;
            self.give_back_from(group, slot, 0);
        }
        self.retain(slot);
        if let Some(reuse) = &mut self.reuse {
            let share = &mut reuse.seqs[slot as usize];
            let keys = std::mem::replace(&mut share.keys, ChainKeys::NONE);
            share.published = 0;
            share.partial = None;
            if let Some(index) = &mut reuse.index {
                index.drop_keys(&keys);
            }
        }
        self.seqs.give_back(slot);
        if self.seqs.alive() == 0 {
            self.batch_closed = false;
        }
    }

    /// Takes a block into a row; out of the sequence's promise where it has one.
    fn take_block(&mut self, group: usize, slot: u32, at: u32) -> Option<BlockId> {
        if !self.make_free(group) {
            return None;
        }
        let store = self.pool.store_mut(group)?;
        let state = self.seqs.state_mut(slot, group);
        let promised = state.promised();
        state.held += 1;
        // First off the promise, then out of the list: never more promised than there is.
        store.unpromise(promised - state.promised());
        let block = store.take()?;
        self.set_entry(group, slot, at, block.0);
        Some(block)
    }

    /// The error for a group that has too few blocks.
    fn exhausted(&self, group: usize, wanted: u32) -> CacheError {
        let available = self.pool.store(group).map_or(0, BlockStore::available);
        CacheError::PoolExhausted {
            group: group_idx(group),
            wanted: u64::from(wanted),
            available: u64::from(available),
        }
    }

    /// Counters and gauges.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let (active, promised, cached) = self.pool.block_bytes(&self.plan);
        Stats {
            cached_bytes: cached,
            seqs: self.seqs.alive(),
            used_bytes: self.used_bytes(),
            held_bytes: Bytes(active.0 + self.slot_bytes()),
            promised_bytes: promised,
            ..self.counters.clone()
        }
    }

    /// Blocks evicted so far, by the priority that they had. `[101]`
    #[must_use]
    pub fn evictions_by_priority(&self) -> &[u64; MAX_PRIORITY as usize + 1] {
        &self.evictions_by_priority
    }

    /// Gauges of one group; `None` for a group that the plan does not have.
    #[must_use]
    pub fn group_stats(&self, group: GroupIdx) -> Option<GroupStats> {
        let live_tokens = *self.live_tokens.get(group.index())?;
        let blocks = self.pool.store(group.index()).map(BlockStore::counts);
        Some(GroupStats { blocks: blocks.unwrap_or_default(), live_tokens })
    }

    /// A group's block table, row by sequence slot, and the entries of a row. Entries that name
    /// no block are [`NO_BLOCK`].
    ///
    /// # Errors
    /// A group that does not exist or is contiguous.
    pub fn block_table(&self, group: GroupIdx) -> Result<(&[u32], u32), CacheError> {
        let layers = self.plan.groups.get(group.index());
        match layers.filter(|layers| layers.kind == GroupKind::Paged) {
            Some(layers) => Ok((&self.tables[group.index()], layers.max_blocks_per_seq)),
            None => Err(self.no_such_group(group, "paged")),
        }
    }

    /// A number that changes whenever a block leaves the sequence: a row of a block table that was
    /// read under another number is stale.
    ///
    /// # Errors
    /// A stale or foreign handle.
    pub fn table_version(&self, sequence: SeqHandle) -> Result<u64, CacheError> {
        Ok(self.seqs.record(self.seqs.check(sequence)?).table_version)
    }

    /// The block that holds a position of a sequence, as a handle that can be checked later.
    ///
    /// # Errors
    /// A stale or foreign handle, a group that is not paged, a position that is not held.
    pub fn block_of(
        &self,
        sequence: SeqHandle,
        group: GroupIdx,
        position: u32,
    ) -> Result<BlockHandle, CacheError> {
        let slot = self.seqs.check(sequence)?;
        let (table, row) = self.block_table(group)?;
        let layers = &self.plan.groups[group.index()];
        let at = position / layers.layout.unit_tokens;
        let entry = slot as usize * row as usize + at as usize;
        let block = if at < row { table[entry] } else { NO_BLOCK };
        let store = self.pool.store(group.index());
        match store.and_then(|store| store.get(BlockId(block))) {
            Some((_, _, generation)) => Ok(BlockHandle {
                cache_id: self.cache_id,
                group,
                block: BlockId(block),
                generation,
            }),
            None => Err(CacheError::NotHeld {
                layer: layers.layers[0],
                from: position,
                to: position + 1,
                kept_from: self.plan.keep_from(group, self.seqs.record(slot).high_water),
                len: self.seqs.record(slot).len,
            }),
        }
    }

    /// The references to a block, when it still is what the handle says.
    ///
    /// # Errors
    /// A stale or foreign handle.
    pub fn block_refs(&self, handle: BlockHandle) -> Result<u32, CacheError> {
        if handle.cache_id != self.cache_id {
            return Err(CacheError::ForeignHandle);
        }
        let store = self.pool.store(handle.group.index());
        match store.and_then(|store| store.get(handle.block)) {
            Some((_, refs, generation)) if generation == handle.generation && refs > 0 => Ok(refs),
            _ => Err(CacheError::StaleBlock {
                group: handle.group,
                block: handle.block.0,
                generation: handle.generation,
            }),
        }
    }

    /// Forgets everything: counters and the order of the free lists are as after open. The bytes
    /// of the pool are not touched.
    ///
    /// # Errors
    /// [`CacheError::SequencesAlive`] while there are sequences, [`CacheError::PinsAlive`] while
    /// there are pins; nothing changes.
    pub fn reset(&mut self) -> Result<(), CacheError> {
        self.abandon_step();
        let live = self.seqs.alive();
        if live > 0 {
            return Err(CacheError::SequencesAlive { live });
        }
        if let Some(live) = self.reuse.as_ref().map(|r| r.pins.alive()).filter(|live| *live > 0) {
            return Err(CacheError::PinsAlive { live });
        }
        for group in 0..self.plan.groups.len() {
            if let Some(store) = self.pool.store_mut(group) {
                store.reset();
            }
        }
        self.seqs.free.sort_unstable_by(|a, b| b.cmp(a));
        if let Some(reuse) = &mut self.reuse {
            reuse.clear();
        }
        self.counters = Stats::default();
        self.evictions_by_priority.fill(0);
        self.begun = 0;
        self.preempted = false;
        Ok(())
    }

    /// The slot of a live sequence.
    ///
    /// # Errors
    /// A stale or foreign handle.
    pub fn seq_slot(&self, sequence: SeqHandle) -> Result<SeqSlot, CacheError> {
        self.seqs.check(sequence).map(SeqSlot)
    }

    fn no_such_group(&self, group: GroupIdx, kind: &'static str) -> CacheError {
        CacheError::NoSuchGroup { group, num_groups: group_idx(self.plan.groups.len()).0, kind }
    }

    /// Tokens of a sequence of this length that some query may still see.
    fn live_of(&self, group: usize, len: u32, high_water: u32) -> u64 {
        let kept_from = self.plan.keep_from(group_idx(group), high_water).min(len);
        let sinks = self.plan.groups[group].layout.sink_tokens.min(kept_from);
        u64::from(len - kept_from + sinks)
    }

    fn live_in(&self, group: usize, slot: u32) -> u64 {
        let record = self.seqs.record(slot);
        self.live_of(group, record.len, record.high_water)
    }

    /// Gives back the blocks of a row from the last down to `keep`, the reverse of the order in
    /// which they were taken.
    fn give_back_from(&mut self, group: usize, slot: u32, keep: u32) {
        let state = *self.seqs.state(slot, group);
        for at in (keep..state.next).rev() {
            self.give_back_block(group, slot, at);
        }
        let state = self.seqs.state_mut(slot, group);
        state.next = state.next.min(keep);
        state.first = state.first.min(keep);
    }

    /// Gives back one block of a row, if the row has it.
    fn give_back_block(&mut self, group: usize, slot: u32, at: u32) {
        let block = self.entry(group, slot, at);
        if block == NO_BLOCK {
            return;
        }
        self.set_entry(group, slot, at, NO_BLOCK);
        let state = self.seqs.state_mut(slot, group);
        let promised_before = state.promised();
        state.held -= 1;
        let promised = state.promised() - promised_before;
        self.give_up(group, BlockId(block));
        if let Some(store) = self.pool.store_mut(group) {
            let kept = store.promise(promised);
            debug_assert!(kept.is_ok(), "the block that came back can be promised");
        }
        self.seqs.record_mut(slot).table_version += 1;
    }

    /// The blocks that a sequence holds of a group, with their places in its row.
    fn held_blocks(&self, group: usize, slot: u32) -> impl Iterator<Item = (u32, BlockId)> + '_ {
        let row = self.plan.groups[group].max_blocks_per_seq as usize;
        let next = self.seqs.state(slot, group).next as usize;
        let entries = &self.tables[group][slot as usize * row..][..next];
        (0..).zip(entries).filter(|(_, block)| **block != NO_BLOCK).map(|(at, b)| (at, BlockId(*b)))
    }

    /// Notes that the last block of a row is no tail any more: it is full, or the sequence goes.
    fn leave_tail(&mut self, group: usize, slot: u32) {
        self.set_tail(group, slot, false);
    }

    /// Notes that the last block of a row is its tail, or no more, if it is not full.
    fn set_tail(&mut self, group: usize, slot: u32, tail: bool) {
        let len = self.seqs.record(slot).len;
        let layers = &self.plan.groups[group];
        let per_block = layers.layout.unit_tokens;
        if layers.kind == GroupKind::Contiguous || len.is_multiple_of(per_block) {
            return;
        }
        let block = self.entry(group, slot, len / per_block);
        if let Some(store) = self.pool.store_mut(group)
            && block != NO_BLOCK
        {
            store.set_tail(BlockId(block), tail);
        }
    }

    /// Bytes of the slots of live sequences in contiguous groups.
    fn slot_bytes(&self) -> u64 {
        let per_seq: u64 = self
            .plan
            .groups
            .iter()
            .filter(|group| group.kind == GroupKind::Contiguous)
            .map(|group| group.layout.unit_bytes)
            .sum();
        per_seq * u64::from(self.seqs.alive())
    }

    fn used_bytes(&self) -> Bytes {
        let groups = (0..).zip(self.live_tokens.iter().zip(&self.plan.groups));
        let used = groups.map(|(g, (tokens, group))| {
            // What several sequences hold is there once.
            let again = self.pool.store(g).map_or(0, |store| u64::from(store.shared_rows()));
            let tokens = tokens.saturating_sub(again * u64::from(group.layout.unit_tokens));
            tokens * group.bytes_per_token.get()
        });
        Bytes(used.sum())
    }

    fn note_peaks(&mut self) {
        self.note_used_peak();
        self.note_held_peak();
    }

    fn note_used_peak(&mut self) {
        let used = self.used_bytes();
        self.counters.peak_used_bytes = self.counters.peak_used_bytes.max(used);
    }

    fn note_held_peak(&mut self) {
        let held = Bytes(self.pool.block_bytes(&self.plan).0.0 + self.slot_bytes());
        self.counters.peak_held_bytes = self.counters.peak_held_bytes.max(held);
    }

    /// Whether `begin` promises blocks.
    fn guaranteed(&self) -> bool {
        self.plan.admission != Admission::MaxUtilization
    }
}

/// The index of a group as an id; plans have far fewer groups than u32 holds.
fn group_idx(group: usize) -> GroupIdx {
    GroupIdx(u32::try_from(group).unwrap_or(u32::MAX))
}
