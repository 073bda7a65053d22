//! `[cost]` and `[goals]`: the clock of a job that computes nothing.

use serde::{Deserialize, Serialize};

use super::complaint::{Complaint, short};
use crate::units::Bytes;

/// `[cost]`: how long a step takes on the simulated clock.
///
/// ```text
/// bytes = weight_bytes
///       + K and V of every token that some query of the step may see   (read once a sequence)
///       + K and V of every token of the step                           (written)
///       + 2 · bytes copied within the pool since the step before       (read and written)
/// time  = step_us + token_us · tokens of the step + bytes / bandwidth
/// ```
///
/// The numbers are the user's: `kvpool bench` measures the bandwidth of this machine, a data sheet
/// gives that of another. The model knows nothing else, so it compares variants of one file with
/// each other, and does not foretell the time of an engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostConfig {
    /// Bytes that the device's memory moves in a second.
    #[serde(deserialize_with = "super::load::size")]
    pub bandwidth: Bytes,
    /// Microseconds that every step takes besides.
    pub step_us: f64,
    /// Microseconds that every token of a step takes besides: what is bound by arithmetic, such
    /// as prefill.
    #[serde(default)]
    pub token_us: f64,
    /// Bytes of the model's weights, which every step reads once. 0: only the cache's own are
    /// counted.
    #[serde(deserialize_with = "super::load::size_or_none")]
    pub weight_bytes: Bytes,
}

/// `[goals]`: what a request must keep to count as served well.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GoalsConfig {
    /// The longest time from a request's arrival to its first token.
    pub first_token_ms: f64,
    /// The longest time from one token to the next, in the mean of a request.
    pub token_ms: f64,
}

/// The longest time that a step or a token may be said to take: a quarter of an hour.
const MAX_US: f64 = 1e9;

/// The least bandwidth: a megabyte a second. What is below was meant in GB or TB, and steps would
/// take hours.
const MIN_BANDWIDTH: Bytes = Bytes(1_000_000);

impl CostConfig {
    pub(super) fn check(&self) -> Result<(), Complaint> {
        if self.bandwidth < MIN_BANDWIDTH {
            return Err(Complaint::with_help(
                "cost.bandwidth",
                format!("{} bytes a second are less than 1 MB", self.bandwidth),
                "a plain number is of bytes; write the unit too, such as \"3350 GB\"",
            ));
        }
        for (key, time) in [("cost.step_us", self.step_us), ("cost.token_us", self.token_us)] {
            if !(0.0..=MAX_US).contains(&time) {
                return Err(Complaint::new(key, format!("{} is out of range", short(time))));
            }
        }
        Ok(())
    }
}

impl GoalsConfig {
    pub(super) fn check(&self) -> Result<(), Complaint> {
        for (key, time) in
            [("goals.first_token_ms", self.first_token_ms), ("goals.token_ms", self.token_ms)]
        {
            if !(time > 0.0 && time.is_finite()) {
                return Err(Complaint::new(key, format!("{} is out of range", short(time))));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_in_range() {
        let cost = CostConfig {
            bandwidth: MIN_BANDWIDTH,
            step_us: 0.0,
            token_us: 0.0,
            weight_bytes: Bytes(1),
        };
        assert_eq!(cost.check(), Ok(()));
        let slow = CostConfig { bandwidth: Bytes(999_999), ..cost };
        assert_eq!(slow.check().unwrap_err().key, "cost.bandwidth");
        for time in [-1.0, f64::NAN, f64::INFINITY, 2e9] {
            let wrong = CostConfig { step_us: time, ..cost.clone() };
            assert_eq!(wrong.check().unwrap_err().key, "cost.step_us");
            let wrong = CostConfig { token_us: time, ..cost.clone() };
            assert_eq!(wrong.check().unwrap_err().key, "cost.token_us");
        }
        for (first_token_ms, token_ms, key) in
            [(0.0, 1.0, "goals.first_token_ms"), (1.0, f64::NAN, "goals.token_ms")]
        {
            let wrong = GoalsConfig { first_token_ms, token_ms };
            assert_eq!(wrong.check().unwrap_err().key, key);
        }
    }
}
