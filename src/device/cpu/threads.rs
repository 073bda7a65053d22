//! Threads that more than one may give work to.

use std::fmt;
use std::sync::{Arc, Mutex, TryLockError};

use super::float_mode::FloatMode;
use super::workers::{Workers, returns};
use crate::error::DeviceError;

/// The threads that compute for a device, and for an engine that would rather have none of its own.
///
/// Two teams of threads on the same cores are in each other's way: one that has just worked still
/// looks for more, for some microseconds, on the core that the other one is woken on. An engine
/// between whose products lies an attention of that length gains by using these for both
/// ([`Cache::threads`](crate::cache::Cache::threads)). Clones are the same threads; they end with
/// the last one.
#[derive(Clone)]
pub struct Threads {
    /// Only ever tried: nobody waits for it.
    workers: Arc<Mutex<Workers>>,
    count: usize,
}

impl fmt::Debug for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Threads").field("count", &self.count).finish_non_exhaustive()
    }
}

impl Threads {
    /// Starts so many, the calling one included.
    ///
    /// # Errors
    /// [`DeviceError::Thread`] when one cannot be started; [`DeviceError::OutOfMemory`].
    pub fn start(count: usize) -> Result<Self, DeviceError> {
        let workers = Workers::start(count)?;
        let count = workers.threads();
        Ok(Self { workers: Arc::new(Mutex::new(workers)), count })
    }

    /// How many compute, the calling one included.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Calls `job(worker, item)` once for each item in `0..items`, and returns when all are done.
    /// `worker` is below [`Threads::count`], and no two calls of one run have the same one at once.
    /// Allocates nothing. On x86-64 floating-point arithmetic is in the standard mode, whatever the
    /// caller's is. While the threads are busy, with a run of another thread's or the one that this call is
    /// made from, the caller does all of it by itself.
    ///
    /// # Errors
    /// [`DeviceError::WorkerPanicked`] when a call panicked; all others have run, and the threads
    /// go on working.
    pub fn run(
        &self,
        items: usize,
        job: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<(), DeviceError> {
        // On all threads the same, whoever asks.
        let _mode = FloatMode::standard();
        match self.workers.try_lock() {
            Ok(workers) => workers.run(items, job),
            Err(TryLockError::Poisoned(workers)) => workers.into_inner().run(items, job),
            Err(TryLockError::WouldBlock) => alone(items, job),
        }
    }
}

/// What a run does, by the caller's thread alone.
fn alone(items: usize, job: &(dyn Fn(usize, usize) + Sync)) -> Result<(), DeviceError> {
    let panics = |item: &usize| !returns(|| job(0, *item));
    let panicked = (0..items).filter(panics).count() > 0;
    if panicked { Err(DeviceError::WorkerPanicked) } else { Ok(()) }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use super::*;

    #[test]
    fn a_run_from_inside_of_one_or_beside_one_is_done_too() {
        let threads = Threads::start(3).expect("threads");
        assert_eq!(threads.count(), 3);
        let (inner, outer) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        let job = |worker: usize, _: usize| {
                            assert!(worker < 3);
                            outer.fetch_add(1, Relaxed);
                            let nested = |_: usize, item| _ = inner.fetch_add(item, Relaxed);
                            threads.run(4, &nested).expect("no panic");
                        };
                        threads.run(5, &job).expect("no panic");
                    }
                });
            }
        });
        assert_eq!(outer.load(Relaxed), 4 * 100 * 5);
        assert_eq!(inner.load(Relaxed), 4 * 100 * 5 * 6);
    }

    /// A job that leaves another mode on its thread changes no later job's.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn every_job_runs_in_the_standard_mode() {
        use std::sync::Barrier;
        let threads = Threads::start(3).expect("threads");
        // As many items as threads, so that each has one.
        let all = Barrier::new(3);
        for _ in 0..3 {
            let job = |_: usize, _: usize| {
                assert!(FloatMode::is_standard());
                all.wait();
                FloatMode::flush_to_zero();
            };
            assert_eq!(threads.run(3, &job), Ok(()));
        }
    }

    #[test]
    fn a_panic_is_an_error_also_for_whoever_works_alone() {
        let threads = Threads::start(2).expect("threads");
        for _ in 0..2 {
            let panics = |_: usize, item: usize| assert!(item != 1, "a panic for the test");
            let nested = |_: usize, _: usize| {
                assert_eq!(threads.run(3, &panics), Err(DeviceError::WorkerPanicked));
            };
            assert_eq!(threads.run(1, &nested), Ok(()));
            assert_eq!(threads.run(3, &panics), Err(DeviceError::WorkerPanicked));
        }
    }
}
