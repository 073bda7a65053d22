//! The speed at which memory is read: the limit that decode attention is held against.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use crate::device::cpu::{available_memory, sum_words};
use crate::error::DeviceError;
use crate::units::Bytes;

/// Bytes that each thread reads: far beyond any cache.
const BYTES_PER_THREAD: usize = 256 << 20;

/// The best of how many passes counts: disturbances only ever slow a pass down.
const PASSES: usize = 5;

/// Reads memory with `threads` threads, each one long sequential stream, and gives the best
/// pass: 10⁹ bytes a second, all threads together.
///
/// # Errors
/// [`DeviceError::OutOfMemory`]: each thread reads memory of its own.
pub fn read_gbps(threads: u32) -> Result<f64, DeviceError> {
    let memory = memory_of(threads)?;
    let threads = memory.len();
    let barrier = Barrier::new(threads);
    let seconds: Vec<Vec<f64>> = thread::scope(|scope| {
        let passes = |words| scope.spawn(|| passes(&barrier, words));
        let workers: Vec<_> = memory.into_iter().map(passes).collect();
        workers.into_iter().filter_map(|worker| worker.join().ok()).collect()
    });
    // A pass ends when its slowest thread does.
    let slowest = |pass: usize| seconds.iter().map(|times| times[pass]).fold(0.0, f64::max);
    let best = (0..PASSES).map(slowest).fold(f64::INFINITY, f64::min);
    #[expect(clippy::cast_precision_loss, reason = "a size below 2^53")]
    let bytes = (threads * BYTES_PER_THREAD) as f64;
    Ok(bytes / best / 1e9)
}

/// Whether the machine has the memory that so many threads read.
///
/// # Errors
/// [`DeviceError::OutOfMemory`].
pub(super) fn check_memory(threads: u32) -> Result<(), DeviceError> {
    let bytes = Bytes(u64::from(threads.max(1)) * BYTES_PER_THREAD as u64);
    match available_memory() {
        Some(available) if available < bytes => {
            Err(DeviceError::OutOfMemory { bytes, code: 0, available })
        }
        _ => Ok(()),
    }
}

/// Bytes that each thread reads in one pass of a [`Passes`]: more than a cache holds of it by its
/// next turn, which comes when all else of its memory was read.
const BYTES_PER_PASS: usize = 64 << 20;

/// Threads that read memory when they are asked to: single passes that take turns with what is
/// measured, so that what else happens on the machine meets both alike.
pub(super) struct Passes {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    /// Before a pass and behind it. [`Passes`] waits there too.
    barrier: Barrier,
    ended: AtomicBool,
    /// Of each thread, the seconds of its last pass. `[threads]`
    seconds: Vec<Mutex<f64>>,
}

impl Passes {
    /// Threads with memory of their own, which wait.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub(super) fn new(threads: u32) -> Result<Self, DeviceError> {
        // Before any thread waits for the others.
        let memory = memory_of(threads)?;
        let threads = memory.len();
        let shared = Arc::new(Shared {
            barrier: Barrier::new(threads + 1),
            ended: AtomicBool::new(false),
            seconds: (0..threads).map(|_| Mutex::new(0.0)).collect(),
        });
        let spawn = |(own, words)| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.read(own, words))
        };
        let threads = memory.into_iter().enumerate().map(spawn).collect();
        Ok(Self { shared, threads })
    }

    /// One pass of all threads: 10⁹ bytes a second, together.
    pub(super) fn gbps(&self) -> f64 {
        self.shared.barrier.wait();
        self.shared.barrier.wait();
        let seconds = self
            .shared
            .seconds
            .iter()
            .map(|own| *own.lock().unwrap_or_else(PoisonError::into_inner));
        #[expect(clippy::cast_precision_loss, reason = "a size below 2^53")]
        let bytes = (self.threads.len() * BYTES_PER_PASS) as f64;
        // A pass ends when its slowest thread does.
        bytes / seconds.fold(0.0, f64::max) / 1e9
    }
}

impl Drop for Passes {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Release);
        self.shared.barrier.wait();
        for thread in self.threads.drain(..) {
            // It has nothing left to do, and nothing of it is used any more.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// A thread's passes, each over the next part of its memory.
    fn read(&self, own: usize, mut words: memmap2::MmapMut) {
        words.fill(1);
        for part in words.chunks_exact(BYTES_PER_PASS).cycle() {
            self.barrier.wait();
            if self.ended.load(Ordering::Acquire) {
                return;
            }
            let start = Instant::now();
            black_box(sum_words(black_box(part)));
            let seconds = start.elapsed().as_secs_f64();
            *self.seconds[own].lock().unwrap_or_else(PoisonError::into_inner) = seconds;
            self.barrier.wait();
        }
    }
}

/// One thread's passes over its own memory, in seconds.
fn passes(barrier: &Barrier, mut words: memmap2::MmapMut) -> Vec<f64> {
    words.fill(1);
    (0..PASSES)
        .map(|_| {
            barrier.wait();
            let start = Instant::now();
            black_box(sum_words(black_box(&words)));
            start.elapsed().as_secs_f64()
        })
        .collect()
}

/// Memory for each of so many threads, on huge pages where there are some: as the pool's is. There
/// is nothing in it yet, and a system that gives out more than it has would end the process when
/// there is: what it has is asked before.
fn memory_of(threads: u32) -> Result<Vec<memmap2::MmapMut>, DeviceError> {
    check_memory(threads)?;
    let map = |_| {
        let map = memmap2::MmapMut::map_anon(BYTES_PER_THREAD).map_err(|error| {
            DeviceError::OutOfMemory {
                bytes: Bytes(BYTES_PER_THREAD as u64),
                code: error.raw_os_error().unwrap_or(0),
                available: available_memory().unwrap_or(Bytes::ZERO),
            }
        })?;
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(map)
    };
    (0..threads.max(1)).map(map).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_threads_than_there_is_memory_for_are_refused() {
        let Some(available) = available_memory() else {
            // Where the system does not say what it has, nothing is refused.
            assert!(check_memory(u32::MAX).is_ok());
            return;
        };
        let threads = u32::try_from(available.get() / BYTES_PER_THREAD as u64).unwrap_or(u32::MAX);
        for threads in [threads.saturating_mul(2).saturating_add(64), u32::MAX] {
            let error = check_memory(threads).expect_err("there is not as much");
            let DeviceError::OutOfMemory { bytes, .. } = error else { panic!("{error}") };
            assert_eq!(bytes.get(), u64::from(threads) << 28);
            assert!(read_gbps(threads).is_err() && Passes::new(threads).is_err());
        }
    }
}
