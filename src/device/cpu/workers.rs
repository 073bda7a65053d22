//! A fixed pool of worker threads.
//!
//! The threads start with the pool and end with it. A dispatch allocates nothing and takes a lock
//! only where a thread sleeps. Items of work are claimed one by one through an atomic counter, by
//! the caller as well as by the workers; a worker that wakes up late finds the dispatch closed
//! and goes back to sleep, so nobody waits for it.
//!
//! Protocol. `state` packs the number of the dispatch, whether it is open, and how many workers
//! have joined it. The caller writes the job, then opens the dispatch; a worker joins by a
//! compare-and-exchange that succeeds only while it is open; the caller closes it and waits until
//! the last worker that joined has left. So the job is read only between those two points.
//!
//! Who is about to sleep says so, and then looks a last time; who has something for it changes
//! `state`, and then asks whether somebody sleeps. A fence between the two, on both sides, keeps
//! both from missing the other. `loom` goes through the interleavings of small cases (`.ci/run`, or
//! `RUSTFLAGS="--cfg loom" cargo test --release --lib loom_`).

#[cfg(loom)]
use loom::{
    cell::UnsafeCell,
    hint::spin_loop,
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, fence},
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread::{self, JoinHandle},
};
use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::thread::available_parallelism;
#[cfg(not(loom))]
use std::{
    hint::spin_loop,
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, fence},
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread::{self, JoinHandle},
};

use super::super::room;
use super::float_mode::FloatMode;
use super::signals::Blocked;
use crate::error::DeviceError;

/// In `state`: the dispatch may be joined.
const OPEN: u64 = 1 << 31;
/// In `state`: the workers that have joined and not left.
const JOINED: u64 = OPEN - 1;
/// In `state`: one more dispatch.
const DISPATCH: u64 = 1 << 32;

/// Bounds of how often a thread looks before it sleeps; a look takes some 10 to 50 ns.
const MIN_SPINS: u32 = 64;
const MAX_SPINS: u32 = 4096;

/// A job, its lifetime erased: called with the worker's index and the item's.
type Job = *const (dyn Fn(usize, usize) + Sync);

/// As `loom` has it, where its access is checked.
#[cfg(not(loom))]
struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    const fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
        read(self.0.get())
    }

    fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
        write(self.0.get())
    }
}

/// What the caller and the workers share.
struct Shared {
    /// See the module.
    state: AtomicU64,
    /// The job of the open dispatch.
    job: UnsafeCell<Option<Job>>,
    /// Items of the open dispatch.
    items: AtomicUsize,
    /// The next item that nobody has claimed.
    next: AtomicUsize,
    /// Whether an item of the open dispatch panicked.
    panicked: AtomicBool,
    /// Whether the workers are to end.
    stop: AtomicBool,
    /// Workers that sleep, or are about to.
    sleepers: AtomicUsize,
    /// Whether the caller sleeps, or is about to.
    caller_sleeps: AtomicBool,
    /// Held by whoever goes to sleep while it looks a last time, and by whoever wakes it.
    lock: Mutex<()>,
    /// Wakes workers.
    work: Condvar,
    /// Wakes the caller.
    done: Condvar,
    /// Workers that have begun: what a thread allocates for itself is behind it then.
    ready: AtomicUsize,
}

/// Calls what may panic, and says whether it returned. What it panicked with is left where it is: to
/// drop it could panic again, and nobody may leave a dispatch in that way.
pub(super) fn returns(call: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(call)).map_err(std::mem::forget).is_ok()
}

// SAFETY: everything but `job` is atomic or a lock. `job` is written by the caller while the
// dispatch is closed and nobody has joined, and read by workers that have joined it; `state`
// orders the two (see `Workers::run` and `Shared::join`). The pointee is `Sync`, so it may be
// called from any thread.
unsafe impl Sync for Shared {}
// SAFETY: as for `Sync`; nothing is bound to the thread that made it.
unsafe impl Send for Shared {}

impl Shared {
    /// The lock; a panic elsewhere leaves nothing inconsistent behind it, since it guards no data.
    fn locked(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims and runs items until there are none left.
    fn work_on(&self, worker: usize, job: &(dyn Fn(usize, usize) + Sync)) {
        let items = self.items.load(Relaxed);
        loop {
            let item = self.next.fetch_add(1, Relaxed);
            if item >= items {
                return;
            }
            if !returns(|| job(worker, item)) {
                self.panicked.store(true, Relaxed);
            }
        }
    }

    /// Joins the dispatch if it is open and not `last`, and gives its number.
    fn join(&self, last: u64) -> Option<u64> {
        let mut state = self.state.load(Relaxed);
        while state & OPEN != 0 && state / DISPATCH != last {
            match self.state.compare_exchange_weak(state, state + 1, Acquire, Relaxed) {
                Ok(_) => return Some(state / DISPATCH),
                Err(now) => state = now,
            }
        }
        None
    }

    /// Leaves the dispatch, and wakes the caller if it sleeps and this was the last to leave.
    fn leave(&self) {
        let before = self.state.fetch_sub(1, Release);
        if before & JOINED != 1 || before & OPEN != 0 {
            return;
        }
        fence(SeqCst);
        if self.caller_sleeps.load(Relaxed) {
            let _guard = self.locked();
            self.done.notify_one();
        }
    }

    /// Waits for a dispatch other than `last` and joins it; `None` when the pool ends.
    fn wait(&self, last: u64, spins: &mut Spins) -> Option<u64> {
        for _ in 0..spins.now {
            if let Some(dispatch) = self.join(last) {
                spins.paid_off();
                return Some(dispatch);
            }
            if self.stop.load(Relaxed) {
                return None;
            }
            spin_loop();
        }
        spins.in_vain();
        let mut guard = self.locked();
        // Announced before the last look: a caller that opens a dispatch after that look sees it.
        self.sleepers.fetch_add(1, Relaxed);
        fence(SeqCst);
        let joined = loop {
            if let Some(dispatch) = self.join(last) {
                break Some(dispatch);
            }
            if self.stop.load(Relaxed) {
                break None;
            }
            guard = self.work.wait(guard).unwrap_or_else(PoisonError::into_inner);
        };
        self.sleepers.fetch_sub(1, Relaxed);
        joined
    }

    /// What a worker thread does.
    fn serve(&self, worker: usize, max_spins: u32) {
        self.ready.fetch_add(1, Release);
        let mut spins = Spins { now: max_spins, max: max_spins };
        let mut last = 0;
        while let Some(dispatch) = self.wait(last, &mut spins) {
            last = dispatch;
            // SAFETY: this worker has joined, so the caller wrote the job before and does not
            // write it again until the worker has left.
            let job = self.job.with(|job| unsafe { *job });
            if let Some(job) = job {
                // Each time: an engine's job may have left another.
                let _mode = FloatMode::standard();
                // SAFETY: the pointee lives until `Workers::run` returns, which waits for this
                // worker to leave; it is `Sync`.
                self.work_on(worker, unsafe { &*job });
            }
            self.leave();
        }
    }
}

/// How often a thread looks before it sleeps, adapted to how that went.
struct Spins {
    now: u32,
    max: u32,
}

impl Spins {
    fn paid_off(&mut self) {
        self.now = (self.now * 2).clamp(MIN_SPINS.min(self.max), self.max);
    }

    fn in_vain(&mut self) {
        self.now = (self.now / 2).max(MIN_SPINS.min(self.max));
    }
}

/// The pool. Not `Sync`: one dispatch at a time, and none from inside a job.
pub(super) struct Workers {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    max_spins: u32,
    /// The process that has the threads: a child that it forks has not.
    process: u32,
    not_sync: PhantomData<Cell<()>>,
}

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workers").field("threads", &self.threads()).finish_non_exhaustive()
    }
}

impl Workers {
    /// Starts `threads` - 1 workers; the caller of [`Workers::run`] is the remaining one.
    ///
    /// # Errors
    /// [`DeviceError::Thread`] when one cannot be started; those before it are ended.
    /// [`DeviceError::OutOfMemory`].
    pub(super) fn start(threads: usize) -> Result<Self, DeviceError> {
        let cores = available_parallelism().map_or(1, std::num::NonZero::get);
        // With more threads than cores, who spins keeps from its core the thread it waits for.
        Self::spinning(threads, if threads > cores { 0 } else { MAX_SPINS })
    }

    /// As [`Workers::start`], with threads that look so often before they sleep.
    fn spinning(threads: usize, max_spins: u32) -> Result<Self, DeviceError> {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            items: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            caller_sleeps: AtomicBool::new(false),
            lock: Mutex::new(()),
            work: Condvar::new(),
            done: Condvar::new(),
            ready: AtomicUsize::new(0),
        });
        let mut workers = Self {
            shared,
            handles: room(threads.saturating_sub(1))?,
            max_spins,
            process: std::process::id(),
            not_sync: PhantomData,
        };
        let blocked = Blocked::new();
        for index in 1..threads {
            let shared = Arc::clone(&workers.shared);
            let handle = thread::Builder::new()
                .name(format!("kvpool-{index}"))
                .spawn(move || shared.serve(index, max_spins))
                .map_err(|error| DeviceError::Thread {
                    index: u32::try_from(index).unwrap_or(u32::MAX),
                    code: error.raw_os_error().unwrap_or(0),
                })?;
            workers.handles.push(handle);
        }
        drop(blocked);
        while workers.shared.ready.load(Acquire) < workers.handles.len() {
            thread::yield_now();
        }
        Ok(workers)
    }

    /// Threads that compute, the calling one included.
    pub(super) fn threads(&self) -> usize {
        self.handles.len() + 1
    }

    /// Calls `job(worker, item)` once for each item in `0..items`; `worker` is below
    /// [`Workers::threads`] and no two calls with the same `worker` run at once. Returns when all
    /// are done.
    ///
    /// # Errors
    /// [`DeviceError::WorkerPanicked`] when a call panicked; all others have run, and the pool
    /// goes on working.
    pub(super) fn run(
        &self,
        items: usize,
        job: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<(), DeviceError> {
        let shared = &*self.shared;
        shared.items.store(items, Relaxed);
        shared.next.store(0, Relaxed);
        shared.panicked.store(false, Relaxed);
        if self.handles.is_empty() || items <= 1 {
            shared.work_on(0, job);
        } else {
            self.open(job);
            shared.work_on(0, job);
            self.close();
        }
        if shared.panicked.load(Relaxed) { Err(DeviceError::WorkerPanicked) } else { Ok(()) }
    }

    /// Publishes the job and wakes who sleeps.
    fn open(&self, job: &(dyn Fn(usize, usize) + Sync)) {
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. The pointer is used by workers that have joined this
        // dispatch, and `close` returns after the last of them has left; `run` calls it before
        // `job`'s borrow ends, and nothing between can unwind (`work_on` catches panics).
        let job =
            unsafe { std::mem::transmute::<*const (dyn Fn(usize, usize) + Sync + '_), Job>(job) };
        // SAFETY: the dispatch is closed and nobody has joined it (the end of the last `close`),
        // so no worker reads; `Workers` is not `Sync`, so no other caller writes.
        shared.job.with_mut(|place| unsafe { *place = Some(job) });
        let dispatch = shared.state.load(Relaxed) / DISPATCH + 1;
        // Wraps after 2³² dispatches; a worker would have to sleep through all of them to mistake
        // one for another, and then would only sit that one out.
        shared.state.store(((dispatch % DISPATCH) * DISPATCH) | OPEN, Release);
        fence(SeqCst);
        if shared.sleepers.load(Relaxed) > 0 {
            let _guard = shared.locked();
            shared.work.notify_all();
        }
    }

    /// Ends the dispatch and waits for those who joined it.
    fn close(&self) {
        let shared = &*self.shared;
        shared.state.fetch_and(!OPEN, AcqRel);
        for _ in 0..self.max_spins {
            if shared.state.load(Acquire) & JOINED == 0 {
                return;
            }
            spin_loop();
        }
        let mut guard = shared.locked();
        shared.caller_sleeps.store(true, Relaxed);
        fence(SeqCst);
        while shared.state.load(Acquire) & JOINED != 0 {
            guard = shared.done.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        shared.caller_sleeps.store(false, Relaxed);
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        if std::process::id() != self.process {
            // A forked child that ends: there is nobody to wait for, and the lock may be held for
            // ever.
            self.handles.drain(..).for_each(std::mem::forget);
            return;
        }
        self.shared.stop.store(true, Relaxed);
        {
            let _guard = self.shared.locked();
            self.shared.work.notify_all();
        }
        for handle in self.handles.drain(..) {
            // Jobs' panics are caught, so there is nothing that joining could report.
            let _ = handle.join();
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;

    /// All interleavings in which threads are interrupted so often.
    fn model(interruptions: usize, threads: usize, max_spins: u32, dispatches: usize) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(interruptions);
        model.check(move || {
            let workers = Workers::spinning(threads, max_spins).expect("threads");
            for dispatch in 1..=dispatches {
                // Each item once, and all before `run` returns.
                let ran = [AtomicUsize::new(0), AtomicUsize::new(0)];
                let job = |_, item: usize| {
                    assert_eq!(ran[item].fetch_add(dispatch, Relaxed), 0);
                };
                workers.run(2, &job).expect("no panic");
                assert!(ran.iter().all(|ran| ran.load(Relaxed) == dispatch));
            }
        });
    }

    #[test]
    fn loom_workers_that_sleep_at_once() {
        model(3, 2, 0, 2);
    }

    #[test]
    fn loom_workers_that_look_first() {
        model(3, 2, 1, 2);
    }

    #[test]
    fn loom_two_workers() {
        model(2, 3, 0, 1);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_item_runs_exactly_once() {
        for threads in [1, 2, 5] {
            let workers = Workers::start(threads).expect("threads");
            assert_eq!(workers.threads(), threads);
            for items in [0, 1, 2, 100, 1000] {
                let counts: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
                workers
                    .run(items, &|worker, item| {
                        assert!(worker < threads);
                        counts[item].fetch_add(1, Relaxed);
                    })
                    .expect("no panic");
                assert!(counts.iter().all(|count| count.load(Relaxed) == 1));
            }
        }
    }

    #[test]
    fn a_worker_index_is_used_by_one_thread_at_a_time() {
        let workers = Workers::start(4).expect("threads");
        let busy: Vec<AtomicBool> = (0..4).map(|_| AtomicBool::new(false)).collect();
        for _ in 0..50 {
            workers
                .run(64, &|worker, _| {
                    assert!(!busy[worker].swap(true, SeqCst));
                    thread::yield_now();
                    assert!(busy[worker].swap(false, SeqCst));
                })
                .expect("no overlap");
        }
    }

    #[test]
    fn a_panic_is_an_error_and_the_pool_goes_on() {
        for threads in [1, 3] {
            let workers = Workers::start(threads).expect("threads");
            for round in 0..3 {
                let ran = AtomicUsize::new(0);
                let result = workers.run(20, &|_, item| {
                    ran.fetch_add(1, Relaxed);
                    assert!(item != 7, "a panic for the test");
                });
                assert_eq!(result, Err(DeviceError::WorkerPanicked), "{round}");
                assert_eq!(ran.load(Relaxed), 20);
                assert_eq!(workers.run(20, &|_, _| {}), Ok(()));
            }
        }
    }

    /// What a job panics with may panic itself when it is dropped: on the caller's thread and on a
    /// worker's the pool goes on.
    #[test]
    fn a_panic_whose_payload_panics_is_an_error_too() {
        struct Payload;
        impl Drop for Payload {
            fn drop(&mut self) {
                panic!("a second panic for the test");
            }
        }
        let workers = Workers::start(3).expect("threads");
        let by_whom = AtomicUsize::new(0);
        while by_whom.load(Relaxed) & 0b11 != 0b11 {
            let result = workers.run(200, &|worker, _| {
                by_whom.fetch_or(1 << worker.min(1), Relaxed);
                thread::yield_now();
                std::panic::panic_any(Payload);
            });
            assert_eq!(result, Err(DeviceError::WorkerPanicked));
            assert_eq!(workers.run(20, &|_, _| {}), Ok(()));
        }
        let threads = super::super::threads::Threads::start(1).expect("threads");
        let result = threads.run(2, &|_, _| {
            // From inside of a run the caller does all by itself.
            let inner = threads.run(2, &|_, _| std::panic::panic_any(Payload));
            assert_eq!(inner, Err(DeviceError::WorkerPanicked));
        });
        assert_eq!(result, Ok(()));
    }

    #[test]
    fn thousands_of_dispatches_with_pauses() {
        for threads in [2, 4] {
            let workers = Workers::start(threads).expect("threads");
            let sum = AtomicUsize::new(0);
            for round in 0..3000 {
                if round % 500 == 0 {
                    // Long enough for the workers to fall asleep.
                    thread::sleep(std::time::Duration::from_millis(5));
                }
                workers.run(3, &|_, item| _ = sum.fetch_add(item, Relaxed)).expect("no panic");
                assert_eq!(sum.load(Relaxed), (round + 1) * 3);
            }
        }
    }

    #[test]
    fn dropping_ends_the_threads() {
        let workers = Workers::start(3).expect("threads");
        let shared = Arc::clone(&workers.shared);
        drop(workers);
        assert_eq!(Arc::strong_count(&shared), 1);
    }
}
