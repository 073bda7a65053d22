//! Times of requests and steps: percentiles, to three digits.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::job::meter::float;

/// The longest time that is told apart, in microseconds: eleven days.
const MAX_US: u64 = 1_000_000_000_000;

/// The percentages at which a distribution is drawn.
const CURVE: usize = 50;

/// Counts times. Allocates nothing after [`Times::new`].
#[derive(Debug)]
pub(super) struct Times {
    histogram: Option<Histogram<u64>>,
    cut: u64,
}

impl Times {
    pub(super) fn new() -> Self {
        // The bounds are in order, so there is a histogram.
        Self { histogram: Histogram::new_with_bounds(1, MAX_US, 3).ok(), cut: 0 }
    }

    pub(super) fn add_ns(&mut self, ns: u64) {
        let us = (ns.saturating_add(500) / 1000).max(1);
        self.cut += u64::from(us > MAX_US);
        if let Some(histogram) = &mut self.histogram {
            histogram.saturating_record(us);
        }
    }

    /// How many were longer than is told apart: they count as the longest that is.
    pub(super) fn cut(&self) -> u64 {
        self.cut
    }

    pub(super) fn summary(&self) -> Summary {
        let Some(histogram) = self.histogram.as_ref().filter(|histogram| !histogram.is_empty())
        else {
            return Summary::default();
        };
        let ms = |us: u64| float(us) / 1000.0;
        let at = |percent: f64| ms(histogram.value_at_quantile(percent / 100.0));
        Summary {
            mean: histogram.mean() / 1000.0,
            p50: at(50.0),
            p90: at(90.0),
            p99: at(99.0),
            max: ms(histogram.max()),
            curve: (0..=CURVE).map(|i| at(100.0 * float(i as u64) / float(CURVE as u64))).collect(),
        }
    }
}

/// A distribution of times, in milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The mean.
    pub mean: f64,
    /// The median.
    pub p50: f64,
    /// What nine of ten do not exceed.
    pub p90: f64,
    /// What 99 of 100 do not exceed.
    pub p99: f64,
    /// The longest.
    pub max: f64,
    /// What 0, 2, 4, … 100 of 100 do not exceed. Empty for no times at all.
    pub curve: Vec<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_right_to_three_digits() {
        let mut times = Times::new();
        assert_eq!(times.summary(), Summary::default());
        for ms in 1..=1000 {
            times.add_ns(ms * 1_000_000);
        }
        let summary = times.summary();
        for (got, expected) in [
            (summary.p50, 500.0),
            (summary.p90, 900.0),
            (summary.p99, 990.0),
            (summary.max, 1000.0),
            (summary.mean, 500.5),
            (summary.curve[25], 500.0),
        ] {
            assert!((got / expected - 1.0).abs() < 2e-3, "{got}, expected {expected}");
        }
        assert!(summary.curve.len() == CURVE + 1 && summary.curve.is_sorted());
        times.add_ns(0);
        times.add_ns(u64::MAX);
        assert!(times.summary().max >= 1e9);
    }
}
