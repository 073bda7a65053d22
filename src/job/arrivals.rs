//! When requests arrive on the simulated clock.

use super::random::{Rng, ln};
use super::workload::Request;
use crate::config::{Arrivals, WorkloadConfig};

/// What the gaps between arrivals are drawn for.
const ARRIVALS: u64 = 0x4152_5256;

/// Gives every first turn its time, and puts the list in the order of arrival. Times of a trace,
/// which may begin anywhere and go back and forth, are counted from the earliest.
pub(super) fn assign(config: &WorkloadConfig, requests: &mut [Request]) {
    let gap_ns = config.requests_per_s.map_or(0.0, |rate| 1e9 / rate);
    match config.arrivals {
        Arrivals::AtOnce => requests.iter_mut().for_each(|request| request.arrival_ns = 0),
        Arrivals::Trace => from_trace(config.time_scale, requests),
        Arrivals::Poisson => {
            let mut rng = Rng::new(config.seed, ARRIVALS);
            let mut now = 0.0;
            each_first_turn(requests, |_| {
                // In (0, 1], so that there is a logarithm.
                now -= gap_ns * ln(1.0 - rng.unit());
                now
            });
        }
        Arrivals::Bursts => {
            let size = config.burst_requests.unwrap_or(1).max(1);
            let every = gap_ns * f64::from(size);
            each_first_turn(requests, |index| f64::from(index / size) * every);
        }
    }
}

/// Sets the arrival of the first turns, each from its number.
fn each_first_turn(requests: &mut [Request], mut at: impl FnMut(u32) -> f64) {
    let mut now = 0;
    let mut index = 0;
    for request in requests {
        if request.turn == 0 && !request.is_fork {
            now = nanoseconds(at(index));
            index += 1;
        }
        request.arrival_ns = now;
    }
}

/// The times that the trace gave, read as signed numbers.
fn from_trace(scale: f64, requests: &mut [Request]) {
    let Some(first) = requests.iter().map(|r| r.arrival_ns.cast_signed()).min() else { return };
    for request in &mut *requests {
        let since = request.arrival_ns.cast_signed().abs_diff(first);
        #[expect(clippy::cast_precision_loss, reason = "scaled times are rounded anyway")]
        let scaled = nanoseconds(since as f64 * scale);
        request.arrival_ns = if scale == 1.0 { since } else { scaled };
    }
    requests.sort_by_key(|request| request.arrival_ns);
    for (place, request) in (0..).zip(requests) {
        request.arrival = place;
        request.id = u64::from(place);
    }
}

fn nanoseconds(time: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "not negative, and `as` saturates"
    )]
    let whole = time.round() as u64;
    whole
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::WorkloadKind;

    fn config(arrivals: Arrivals) -> WorkloadConfig {
        WorkloadConfig {
            arrivals,
            requests_per_s: Some(4.0),
            burst_requests: Some(8),
            ..WorkloadConfig::new(WorkloadKind::Generator)
        }
    }

    fn list(turns: &[u32]) -> Vec<Request> {
        turns.iter().map(|turn| Request { turn: *turn, ..Request::default() }).collect()
    }

    #[test]
    fn poisson_arrivals_have_their_rate_and_their_spread() {
        let mut requests = list(&[0; 20_000]);
        assign(&config(Arrivals::Poisson), &mut requests);
        assert!(requests.is_sorted_by_key(|r| r.arrival_ns));
        let mut gaps: Vec<u64> =
            requests.windows(2).map(|pair| pair[1].arrival_ns - pair[0].arrival_ns).collect();
        let mean = gaps.iter().sum::<u64>() / gaps.len() as u64;
        assert!((245_000_000..255_000_000).contains(&mean), "{mean}");
        gaps.sort_unstable();
        // The median of an exponential distribution is ln 2 of its mean.
        assert!((168_000_000..179_000_000).contains(&gaps[gaps.len() / 2]));
        let again = &mut list(&[0; 20_000]);
        assign(&config(Arrivals::Poisson), again);
        assert_eq!(requests, *again);
    }

    #[test]
    fn bursts_come_together_and_turns_with_their_conversation() {
        let turns: Vec<u32> = (0..40).map(|at| at % 2).collect();
        let mut requests = list(&turns);
        assign(&config(Arrivals::Bursts), &mut requests);
        let seconds: Vec<u64> = requests.iter().map(|r| r.arrival_ns / 1_000_000_000).collect();
        assert!(seconds[..16].iter().all(|s| *s == 0) && seconds[16..32].iter().all(|s| *s == 2));
        assert_eq!(seconds[39], 4);
    }

    #[test]
    fn a_trace_is_counted_from_its_earliest() {
        let mut requests = list(&[0; 3]);
        for (request, time) in requests.iter_mut().zip([700_i64, 300, 500]) {
            request.arrival_ns = time.cast_unsigned();
        }
        let traced = WorkloadConfig { time_scale: 0.5, ..config(Arrivals::Trace) };
        let mut slow = requests.clone();
        assign(&traced, &mut slow);
        let times: Vec<_> = slow.iter().map(|r| (r.arrival_ns, r.arrival)).collect();
        assert_eq!(times, [(0, 0), (100, 1), (200, 2)]);
        assign(&config(Arrivals::AtOnce), &mut requests);
        assert!(requests.iter().all(|r| r.arrival_ns == 0));
    }
}
