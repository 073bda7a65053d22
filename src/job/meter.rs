//! What a run measures besides its answers: time, allocations, averages. Fixed in size.

use std::time::Duration;

use crate::device::allocation_counts;

/// Buckets of the histogram: 1 % apart, from 1 µs to more than 1000 s.
const BUCKETS: usize = 2100;

/// The ratio of one bucket's bounds.
const RATIO: f64 = 1.01;

/// Durations, counted in buckets that are 1 % apart.
#[derive(Debug)]
pub(super) struct Histogram {
    counts: Vec<u64>,
    total: u64,
}

impl Histogram {
    pub(super) fn new() -> Self {
        Self { counts: vec![0; BUCKETS], total: 0 }
    }

    /// Counts one duration; what lies outside the range goes into the first or last bucket.
    pub(super) fn add(&mut self, duration: Duration) {
        let micros = duration.as_secs_f64() * 1e6;
        let bucket = micros.max(1.0).ln() / RATIO.ln();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "not negative, and `as` saturates"
        )]
        let bucket = (bucket as usize).min(BUCKETS - 1);
        self.counts[bucket] += 1;
        self.total += 1;
    }

    /// The duration that `percent` of 100 do not exceed, in milliseconds and to 1 %; 0 for none.
    pub(super) fn percentile_ms(&self, percent: u64) -> f64 {
        let rank = (self.total * percent).div_ceil(100).max(1);
        let mut seen = 0;
        for (bucket, count) in (0..).zip(&self.counts) {
            seen += count;
            if seen >= rank {
                return RATIO.powf(f64::from(bucket) + 0.5) / 1000.0;
            }
        }
        0.0
    }
}

/// Counts the process's allocations between `resume` and `pause`.
#[derive(Debug, Default)]
pub(super) struct AllocationMeter {
    since: u64,
    counted: u64,
}

impl AllocationMeter {
    pub(super) fn resume(&mut self) {
        self.since = allocation_counts().allocations;
    }

    pub(super) fn pause(&mut self) {
        self.counted += allocation_counts().allocations - self.since;
    }

    /// The count; `None` when the program has not installed the counting allocator. A process
    /// that has, has allocated long before it comes here.
    pub(super) fn counted(&self) -> Option<u64> {
        (allocation_counts().allocations > 0).then_some(self.counted)
    }
}

/// A number as f64, for averages and rates.
#[expect(clippy::cast_precision_loss, reason = "averages and rates are shown to a few digits")]
pub(super) fn float(number: u64) -> f64 {
    number as f64
}

/// `sum / count`; 0 for none.
pub(super) fn mean(sum: u128, count: u64) -> f64 {
    if count == 0 {
        return 0.0;
    }
    #[expect(clippy::cast_precision_loss, reason = "an average is shown to a few digits")]
    let sum = sum as f64;
    sum / float(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_right_to_one_percent() {
        let mut histogram = Histogram::new();
        assert!(histogram.percentile_ms(50).abs() < f64::EPSILON);
        for micros in 1..=1000 {
            histogram.add(Duration::from_micros(10 * micros));
        }
        for (percent, ms) in [(1, 0.1), (50, 5.0), (99, 9.9), (100, 10.0)] {
            let got = histogram.percentile_ms(percent);
            assert!((got / ms - 1.0).abs() < 0.011, "p{percent}: {got}, expected {ms}");
        }
        histogram.add(Duration::ZERO);
        histogram.add(Duration::from_secs(1_000_000));
        assert!(histogram.percentile_ms(100) > 1e6);
    }

    #[test]
    fn averages_of_nothing_are_nothing() {
        assert!(mean(0, 0).abs() < f64::EPSILON);
        assert!((mean(u128::from(u64::MAX), 2) - 9.223e18).abs() < 1e16);
    }
}
