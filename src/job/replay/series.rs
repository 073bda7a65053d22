//! What changes over time, in at most as many points as a picture can show.

use serde::{Deserialize, Serialize};

/// The most points of a finished series.
pub const MAX_POINTS: usize = 500;

/// The pool at one moment of the simulated clock. Bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Seconds since the start.
    pub at_s: f64,
    /// K, V and scales of tokens that some query may still see.
    pub used: u64,
    /// Held by sequences: used, and what is wasted in their blocks and slots.
    pub held: u64,
    /// Promised to sequences and not taken.
    pub promised: u64,
    /// Kept for reuse and held by nobody.
    pub cached: u64,
    /// Of what is held and not used, the part in contiguous slots; the rest is in blocks.
    pub slot_waste: u64,
    /// Neither held nor promised: what is cached counts as free.
    pub free: u64,
    /// The largest piece that one request could have of it: all of it, but with dynamic
    /// allocation.
    pub largest_run: u64,
    /// Requests that run.
    pub running: u32,
    /// Requests that wait.
    pub waiting: u32,
}

/// Collects points at a distance that doubles whenever there are too many. Allocates nothing after
/// [`Series::new`].
#[derive(Debug)]
pub(super) struct Series {
    points: Vec<Point>,
    every: u64,
    offered: u64,
}

impl Series {
    pub(super) fn new() -> Self {
        Self { points: Vec::with_capacity(2 * MAX_POINTS), every: 1, offered: 0 }
    }

    /// Whether the next point is one to be kept.
    pub(super) fn wants(&self) -> bool {
        self.offered.is_multiple_of(self.every)
    }

    /// Takes a point, or leaves it out.
    pub(super) fn offer(&mut self, point: impl FnOnce() -> Point) {
        if self.wants() {
            if self.points.len() == 2 * MAX_POINTS {
                let mut index = 0;
                self.points.retain(|_| {
                    index += 1;
                    index % 2 == 1
                });
                self.every *= 2;
            }
            // Twice the distance may leave this one out.
            if self.wants() {
                self.points.push(point());
            }
        }
        self.offered += 1;
    }

    /// The points, at most [`MAX_POINTS`] of them; the last one is among them.
    pub(super) fn finish(&self) -> Vec<Point> {
        let every = self.points.len().div_ceil(MAX_POINTS).max(1);
        let last = self.points.len().saturating_sub(1);
        self.points.iter().rev().step_by(every).rev().copied().take(last + 1).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_series_is_bounded_and_even() {
        for count in [0_u32, 1, 499, 500, 501, 1000, 1001, 12_345, 100_000] {
            let mut series = Series::new();
            for at in 0..count {
                series.offer(|| Point { at_s: f64::from(at), ..Point::default() });
            }
            let points = series.finish();
            assert!(points.len() <= MAX_POINTS && points.len() >= (count as usize).min(250));
            let gaps: Vec<f64> = points.windows(2).map(|p| p[1].at_s - p[0].at_s).collect();
            assert!(gaps.iter().all(|gap| *gap == gaps[0]), "{count}: {gaps:?}");
        }
    }
}
