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
mod batch;
mod fork;
mod sequence;
mod step;
mod truncate;

pub use admission::{BeginOptions, Begun};
pub use batch::Csr;
pub use sequence::SeqHandle;
pub use step::{AttendOptions, Step};

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::config::{Admission, DeviceConfig};
use crate::device::cpu::{CpuDevice, available_memory, num_threads};
use crate::device::{Device, DeviceInfo};
use crate::error::{CacheError, OpenError, PlanError};
use crate::plan::{GroupKind, NO_BLOCK, Plan};
use crate::pool::{BlockHandle, BlockStore, GroupStats, Pool, Stats};
use crate::units::{BlockId, Bytes, GroupIdx, SeqSlot};
use batch::Batch;
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
    /// from here on.
    ///
    /// # Errors
    /// A stale or foreign handle; nothing changes.
    pub fn release(&mut self, sequence: SeqHandle) -> Result<(), CacheError> {
        self.abandon_step();
        let slot = self.seqs.check(sequence)?;
        for group in 0..self.plan.groups.len() {
            let live = self.live_in(group, slot);
            self.live_tokens[group] -= live;
            self.give_back_from(group, slot, 0);
            let promised = self.seqs.state(slot, group).promised();
            if let Some(store) = self.pool.store_mut(group) {
                store.unpromise(promised);
            }
        }
        self.seqs.give_back(slot);
        Ok(())
    }

    /// Takes a block into a row; out of the sequence's promise where it has one.
    fn take_block(&mut self, group: usize, slot: u32, at: u32) -> Option<BlockId> {
        let store = self.pool.store_mut(group).filter(|store| store.available() > 0)?;
        let state = self.seqs.state_mut(slot, group);
        let promised = state.promised();
        state.held += 1;
        // First off the promise, then out of the list: never more promised than there is.
        store.unpromise(promised - state.promised());
        let block = store.take()?;
        let row = self.plan.groups[group].max_blocks_per_seq as usize;
        self.tables[group][slot as usize * row + at as usize] = block.0;
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
        let (active, promised) = self.pool.block_bytes(&self.plan);
        Stats {
            seqs: self.seqs.alive(),
            used_bytes: self.used_bytes(),
            held_bytes: Bytes(active.0 + self.slot_bytes()),
            promised_bytes: promised,
            ..self.counters.clone()
        }
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
    /// [`CacheError::SequencesAlive`] while there are sequences; nothing changes.
    pub fn reset(&mut self) -> Result<(), CacheError> {
        self.abandon_step();
        let live = self.seqs.alive();
        if live > 0 {
            return Err(CacheError::SequencesAlive { live });
        }
        for group in 0..self.plan.groups.len() {
            if let Some(store) = self.pool.store_mut(group) {
                store.reset();
            }
        }
        self.seqs.free.sort_unstable_by(|a, b| b.cmp(a));
        self.counters = Stats::default();
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
        let row = self.plan.groups[group].max_blocks_per_seq;
        let entry = &mut self.tables[group][slot as usize * row as usize + at as usize];
        let block = std::mem::replace(entry, NO_BLOCK);
        if block == NO_BLOCK {
            return;
        }
        let state = self.seqs.state_mut(slot, group);
        let promised_before = state.promised();
        state.held -= 1;
        let promised = state.promised() - promised_before;
        if let Some(store) = self.pool.store_mut(group) {
            let dropped = store.drop_ref(BlockId(block));
            debug_assert!(dropped.is_ok(), "a table names an active block");
            let kept = store.promise(promised);
            debug_assert!(kept.is_ok(), "the block that came back can be promised");
        }
        self.seqs.record_mut(slot).table_version += 1;
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
        let groups = self.live_tokens.iter().zip(&self.plan.groups);
        Bytes(groups.map(|(tokens, group)| tokens * group.bytes_per_token.get()).sum())
    }

    fn note_peaks(&mut self) {
        let used = self.used_bytes();
        let held = Bytes(self.pool.block_bytes(&self.plan).0.0 + self.slot_bytes());
        self.counters.peak_used_bytes = self.counters.peak_used_bytes.max(used);
        self.counters.peak_held_bytes = self.counters.peak_held_bytes.max(held);
    }

    /// Whether `begin` promises blocks.
    fn guaranteed(&self) -> bool {
        self.plan.admission == Admission::Guaranteed
    }
}

/// The index of a group as an id; plans have far fewer groups than u32 holds.
fn group_idx(group: usize) -> GroupIdx {
    GroupIdx(u32::try_from(group).unwrap_or(u32::MAX))
}
