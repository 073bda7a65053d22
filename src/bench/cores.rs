//! How near each other two of the machine's cores are.
//!
//! Cores that share a chiplet share its way to memory as well: on the machines that kvpool was
//! measured on, two cores of one chiplet read 51 to 54 GB/s together, two of different ones 85 to
//! 89, and a virtual machine's cores move from the one to the other while it runs. So what is
//! measured with several threads says which of them it was, by the time that a cache line takes
//! from one core to the other and back.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Ways there and back of one sample.
const TRIPS: u64 = 500;

/// The least of how many samples counts: disturbances only ever lengthen them.
const SAMPLES: usize = 40;

/// Nothing is said when the other core has not answered for so long.
const PATIENCE: Duration = Duration::from_millis(500);

/// What the other thread takes for the end.
const END: u64 = u64::MAX;

/// Polls after which a thread that waits lets others run: both may be on the same core at first.
const POLLS: u32 = 1 << 14;

/// A line of its own, so that nothing else moves with it.
#[derive(Default)]
#[repr(align(128))]
struct Line(AtomicU64);

/// Nanoseconds that a cache line takes from one core to another and back, for whichever two the
/// system gives to two threads: on a machine of two cores those are the ones. `None` on a machine
/// of one core, or one that is too busy to tell.
#[must_use]
pub fn line_ns() -> Option<f64> {
    if thread::available_parallelism().map_or(1, std::num::NonZero::get) < 2 {
        return None;
    }
    let line = Line::default();
    thread::scope(|scope| {
        scope.spawn(|| answer(&line));
        let best = ask(&line);
        line.0.store(END, Ordering::Release);
        best
    })
}

/// Sends the line away and waits until it is back. Odd numbers go, even ones come back.
fn ask(line: &Line) -> Option<f64> {
    let start = Instant::now();
    let mut best = f64::INFINITY;
    let mut number = 0;
    for _ in 0..SAMPLES {
        let before = Instant::now();
        for _ in 0..TRIPS {
            line.0.store(number + 1, Ordering::Release);
            number += 2;
            let mut polls = 0;
            while line.0.load(Ordering::Acquire) != number {
                polls = polled(polls);
                if polls == 0 && start.elapsed() > PATIENCE {
                    return best.is_finite().then_some(best);
                }
            }
        }
        #[expect(clippy::cast_precision_loss, reason = "a small number")]
        let trip = before.elapsed().as_secs_f64() * 1e9 / TRIPS as f64;
        best = best.min(trip);
    }
    Some(best)
}

/// Sends every odd number back as the next.
fn answer(line: &Line) {
    let mut polls = 0;
    loop {
        match line.0.load(Ordering::Acquire) {
            END => return,
            number if number % 2 == 1 => {
                // Unless the end was told meanwhile.
                let (taken, failed) = (Ordering::AcqRel, Ordering::Acquire);
                if line.0.compare_exchange(number, number + 1, taken, failed).is_ok() {
                    polls = 0;
                }
            }
            _ => polls = polled(polls),
        }
    }
}

/// Counts a poll; after many others may run, and it begins at 0.
fn polled(polls: u32) -> u32 {
    if polls < POLLS {
        return polls + 1;
    }
    thread::yield_now();
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_comes_back() {
        if let Some(ns) = line_ns() {
            assert!(ns > 1.0 && ns < 1e9, "{ns}");
        }
    }
}
