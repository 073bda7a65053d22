//! The speed at which memory is read: the limit that decode attention is held against.

use std::hint::black_box;
use std::sync::Barrier;
use std::thread;
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
    // A benchmark that cannot have a few hundred MiB has nothing to report.
    let mut map = memmap2::MmapMut::map_anon(bytes).expect("memory for the probe");
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage);
    map.fill(1);
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
