//! Sequences and what their blocks mean: the verbs.
//!
//! A [`Cache`] is one plan, one device and everything between. Its verbs either do all they say
//! or refuse with a typed error and leave no trace (P4). None of them allocates, refusals
//! included (P1), but those that save and restore, which give back what they take (`save/`).
//!
//! **Threads.** A cache is used by one thread at a time: the verbs that change anything take
//! `&mut self`, and a [`Step`] borrows the cache for as long as it is open. Kernels run on the
//! device's own workers, inside the call. A `Cache` can be moved to another thread. What runs
//! beside a writer, on any thread, is a [`Prober`].
//!
//! **Order within a step.** [`Cache::reserve`] → for each layer [`Step::append`], then
//! [`Step::attend`] → [`Step::commit`]. A step that is dropped is cancelled.

mod admission;
mod audit;
mod audit_reuse;
mod audit_shape;
mod batch;
mod begin;
mod claim;
mod commit;
mod cow;
mod csr;
mod device_step;
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
mod rows;
mod save;
mod scrub;
mod sequence;
mod stats;
mod step;
#[cfg(test)]
mod tests_tenants;
mod truncate;

pub use admission::{Estimate, Reservation, ReservationRefused};
pub(crate) use batch::StepItem;
pub use begin::{BeginOptions, Begun};
pub use csr::Csr;
pub use events::{Event, EventKind, Polled};
pub use pin::PinHandle;
pub use preempt::Preempted;
pub use prefix::{KeyPart, Namespace, Probe, Prober};
pub use retention::{MAX_RETENTIONS, Retention, Retentions};
#[doc(hidden)]
pub use save::{FileCalls, Point as SavePoint, disturb_files, fail_saves};
pub use save::{RestoreOptions, Restored, SaveOptions, Saved};
pub use sequence::SeqHandle;
pub use step::{AttendOptions, Step, StepId};

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::config::{Admission, DeviceConfig, DeviceKind};
use crate::device::cpu::Threads;
use crate::device::{self, CudaStream, Device, DeviceInfo, all_of, table_of};
use crate::error::{CacheError, DeviceError, OpenError, PlanError};
use crate::plan::{NO_BLOCK, Plan};
use crate::pool::{MAX_PRIORITY, Pool, Stats};
use crate::units::{Bytes, GroupIdx, SeqSlot};
use batch::Batch;
use begin::Pending;
use prefix::ChainKeys;
use reuse::Reuse;
use save::SaveCounts;
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
    saves: SaveCounts,
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
    /// Whether some group has a window.
    has_windows: bool,
    /// Sequences begun since the last reset.
    begun: u64,
    /// Under static-batch: a step of this batch was committed, so nobody else gets in.
    batch_closed: bool,
    /// Under max-utilization: someone was preempted, and nobody has ended since.
    preempted: bool,
    cache_id: u32,
    /// Names the step that is open, or was last: never 0.
    step_name: u64,
    /// Why a block that was taken could not be zeroed.
    scrub_refused: Option<DeviceError>,
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
        let config = DeviceConfig { kind: DeviceKind::Cpu, ..config.clone() };
        Self::open_on_device(plan, &config, progress)
    }

    /// Opens a cache on the device that a configuration names: as [`Cache::open_on_cpu`] in this
    /// machine's memory, or in a GPU's.
    ///
    /// # Errors
    /// As [`Cache::open_on_cpu`]; for a GPU also what is missing to use it.
    pub fn open_on_device(
        plan: Plan,
        config: &DeviceConfig,
        progress: Option<&mut dyn FnMut(Bytes, Bytes)>,
    ) -> Result<Self, OpenError> {
        let device = device::open(&plan, config, progress)?;
        Self::open(plan, device)
    }

    /// Opens a cache on a device that was opened with the same plan. All host memory that the
    /// cache will ever need is allocated here.
    ///
    /// # Errors
    /// [`OpenError::Plan`] when the device was opened with another plan, [`OpenError::Device`] when
    /// there is no memory for it.
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
        let slots = plan.seq_slots as usize;
        let table = |row: u32| table_of(slots * row as usize, NO_BLOCK);
        let tables = plan.groups.iter().map(|group| table(group.max_blocks_per_seq));
        Ok(Self {
            seqs: SeqTable::new(plan.seq_slots, plan.groups.len(), cache_id)?,
            tables: all_of(tables)?,
            live_tokens: table_of(plan.groups.len(), 0)?,
            batch: Batch::new(&plan)?,
            pool: Pool::new(&plan, device)?,
            counters: Stats::default(),
            saves: SaveCounts::default(),
            evictions_by_priority: [0; MAX_PRIORITY as usize + 1],
            reuse: Reuse::new(&plan, constant_hash)?,
            pending: table_of(slots, Pending::NOTHING)?,
            block_shift: plan.tokens_per_block.trailing_zeros(),
            block_mask: plan.tokens_per_block - 1,
            has_windows: plan.groups.iter().any(|group| group.window.is_some()),
            begun: 0,
            batch_closed: false,
            preempted: false,
            cache_id,
            step_name: 0,
            scrub_refused: None,
            plan,
        })
    }

    /// What tells this cache's handles from those of every other cache of the process.
    #[must_use]
    pub const fn id(&self) -> u32 {
        self.cache_id
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

    /// The threads that append and attend, where they are the host's: an engine that multiplies on
    /// the host can do it on these, and needs none beside them.
    #[must_use]
    pub fn threads(&self) -> Option<&Threads> {
        self.pool.device.threads()
    }

    /// The pool's first byte; stable for the life of the cache. With [`Plan::layer_view`] it gives
    /// an engine's own kernels the address of everything. They may read and write through it while
    /// no verb of the cache is under way.
    #[must_use]
    pub fn pool_ptr(&self) -> *mut u8 {
        self.pool.device.base_ptr()
    }

    /// Puts all work of the device from here on into a stream of the caller's, behind what was
    /// put into the one before. For a GPU.
    ///
    /// # Errors
    /// A device without streams, a stream that is another one in each thread, or what the driver
    /// says.
    pub fn set_stream(&mut self, stream: CudaStream) -> Result<(), CacheError> {
        Ok(self.pool.device.set_stream(stream)?)
    }

    /// Puts the work from here on into the device's own stream again: the caller's is not used any
    /// more, and may go. Nothing to do where there is none.
    pub(crate) fn leave_stream(&mut self) -> Result<(), CacheError> {
        Ok(self.pool.device.leave_stream()?)
    }

    /// Waits for all work that was put into the device's stream, after which the counters of
    /// appends whose tensors were in device memory are complete. Nothing to do on the CPU.
    ///
    /// # Errors
    /// What went wrong in work that was not waited for.
    pub fn synchronize(&mut self) -> Result<(), CacheError> {
        let counts = self.pool.device.synchronize()?;
        self.counters.nonfinite += counts.nonfinite;
        self.counters.saturated += counts.saturated;
        Ok(())
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

    /// Gives back what a sequence has that could not be begun, because the device failed. Not all
    /// of it was written, so nobody else gets any of it; and nobody has ended. `free_at`: the place
    /// in the free list that its slot was taken from.
    fn abandon_begun(&mut self, sequence: SeqHandle, free_at: usize) {
        self.scrub_refused = None;
        self.seqs.record_mut(sequence.slot).known = 0;
        self.release_slot(sequence.slot);
        self.seqs.move_freed(free_at);
        // Nor has it made those younger that begin after it.
        self.begun -= 1;
    }

    fn release_slot(&mut self, slot: u32) {
        self.give_up_partial(slot);
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
        self.scrub_released_slot(slot);
        if let Some(reuse) = &mut self.reuse {
            let share = &mut reuse.seqs[slot as usize];
            let keys = std::mem::replace(&mut share.keys, ChainKeys::NONE);
            share.published = 0;
            if let Some(index) = &mut reuse.index {
                index.drop_keys(&keys);
            }
        }
        self.seqs.give_back(slot);
        if self.seqs.alive() == self.seqs.reserved() {
            // The batch has ended. Places that are kept are of the next one.
            self.batch_closed = false;
        }
        self.scrub_freed();
    }

    /// Forgets everything: counters and the order of the free lists are as after open. The bytes
    /// of the pool are not touched, unless `pool.scrub` asks for it.
    ///
    /// # Errors
    /// [`CacheError::SequencesAlive`] while there are sequences, [`CacheError::PinsAlive`] while
    /// there are pins; nothing changes.
    pub fn reset(&mut self) -> Result<(), CacheError> {
        self.abandon_step();
        let live = self.seqs.alive();
        if live > 0 {
            let reserved = self.reservations();
            return Err(CacheError::SequencesAlive { live, reserved });
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
        self.scrub_all();
        self.counters = Stats::default();
        self.saves = SaveCounts::default();
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

    /// Whether `begin` promises blocks.
    fn guaranteed(&self) -> bool {
        self.plan.admission != Admission::MaxUtilization
    }
}

/// The index of a group as an id; plans have far fewer groups than u32 holds.
fn group_idx(group: usize) -> GroupIdx {
    GroupIdx(u32::try_from(group).unwrap_or(u32::MAX))
}
