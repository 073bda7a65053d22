//! The speed at which memory is read: the limit that decode attention is held against.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Instant;

/// Bytes that each thread reads: far beyond any cache.
const BYTES_PER_THREAD: usize = 256 << 20;

/// The best of how many passes counts: disturbances only ever slow a pass down.
const PASSES: usize = 5;

/// Reads memory with `threads` threads, each one long sequential stream, and gives the best
/// pass: 10⁹ bytes a second, all threads together.
#[must_use]
pub fn read_gbps(threads: u32) -> f64 {
    let threads = threads.max(1) as usize;
    let barrier = Barrier::new(threads);
    let seconds: Vec<Vec<f64>> = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(|| passes(&barrier))).collect();
        workers.into_iter().filter_map(|worker| worker.join().ok()).collect()
    });
    // A pass ends when its slowest thread does.
    let slowest = |pass: usize| seconds.iter().map(|times| times[pass]).fold(0.0, f64::max);
    let best = (0..PASSES).map(slowest).fold(f64::INFINITY, f64::min);
    #[expect(clippy::cast_precision_loss, reason = "a size below 2^53")]
    let bytes = (threads * BYTES_PER_THREAD) as f64;
    bytes / best / 1e9
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
    /// # Panics
    /// Without that memory.
    pub(super) fn new(threads: u32) -> Self {
        let threads = threads.max(1) as usize;
        let shared = Arc::new(Shared {
            barrier: Barrier::new(threads + 1),
            ended: AtomicBool::new(false),
            seconds: (0..threads).map(|_| Mutex::new(0.0)).collect(),
        });
        // Before any thread waits for the others.
        let memory: Vec<_> = (0..threads).map(|_| map_of(BYTES_PER_THREAD)).collect();
        let spawn = |(own, words)| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.read(own, words))
        };
        let threads = memory.into_iter().enumerate().map(spawn).collect();
        Self { shared, threads }
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
            black_box(sum(black_box(part)));
            let seconds = start.elapsed().as_secs_f64();
            *self.seconds[own].lock().unwrap_or_else(PoisonError::into_inner) = seconds;
            self.barrier.wait();
        }
    }
}

/// One thread's passes over its own memory, in seconds.
fn passes(barrier: &Barrier) -> Vec<f64> {
    let words = memory_of(BYTES_PER_THREAD);
    (0..PASSES)
        .map(|_| {
            barrier.wait();
            let start = Instant::now();
            black_box(sum(black_box(&words)));
            start.elapsed().as_secs_f64()
        })
        .collect()
}

/// Memory with something in every page, on huge pages where there are some: as the pool's is.
fn memory_of(bytes: usize) -> memmap2::MmapMut {
    let mut map = map_of(bytes);
    map.fill(1);
    map
}

/// The same with nothing in it yet.
fn map_of(bytes: usize) -> memmap2::MmapMut {
    // A benchmark that cannot have a few hundred MiB has nothing to report.
    let map = memmap2::MmapMut::map_anon(bytes).expect("memory for the probe");
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage);
    map
}

/// Adds the words of a slice in 32 independent sums, which the compiler keeps in registers.
fn sum(bytes: &[u8]) -> u64 {
    let mut sums = [0_u64; 32];
    for chunk in bytes.as_chunks::<256>().0 {
        for (sum, word) in sums.iter_mut().zip(chunk.as_chunks::<8>().0) {
            *sum = sum.wrapping_add(u64::from_le_bytes(*word));
        }
    }
    sums.iter().fold(0, |all, sum| all.wrapping_add(*sum))
}
