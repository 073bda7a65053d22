//! What every simulated variant is measured by, whatever allocates its memory.

use super::distribution::Times;
use super::picture::Album;
use super::result::VariantResult;
use super::series::{Point, Series};
use crate::config::GoalsConfig;
use crate::job::meter::{float, mean};
use crate::job::work::Served;
use crate::units::counted;

/// The memory at one moment, in bytes, and who runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gauges {
    pub(super) used: u64,
    pub(super) held: u64,
    pub(super) promised: u64,
    pub(super) cached: u64,
    pub(super) slot_waste: u64,
    pub(super) free: u64,
    pub(super) largest_run: u64,
    pub(super) running: usize,
    pub(super) waiting: usize,
}

/// Gauges times nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    used: u128,
    held: u128,
    promised: u128,
    cached: u128,
    slot_waste: u128,
    running: u128,
}

/// Sums, distributions, the series and the picture of one variant. Allocates nothing after
/// [`Meters::new`].
#[derive(Debug)]
pub(super) struct Meters {
    goals: Option<GoalsConfig>,
    sums: Sums,
    busy_ns: u64,
    steps: u64,
    peak_running: usize,
    peak_used: u64,
    peak_held: u64,
    completed: u64,
    output_tokens: u64,
    good: u64,
    queue: Times,
    first_token: Times,
    token: Times,
    latency: Times,
    step: Times,
    series: Series,
    pub(super) album: Album,
}

impl Meters {
    pub(super) fn new(goals: Option<GoalsConfig>, album: Album) -> Self {
        Self {
            goals,
            sums: Sums::default(),
            busy_ns: 0,
            steps: 0,
            peak_running: 0,
            peak_used: 0,
            peak_held: 0,
            completed: 0,
            output_tokens: 0,
            good: 0,
            queue: Times::new(),
            first_token: Times::new(),
            token: Times::new(),
            latency: Times::new(),
            step: Times::new(),
            series: Series::new(),
            album,
        }
    }

    /// A step began at `began_ns` and took `took_ns`; at its end the memory is like this.
    pub(super) fn step(&mut self, began_ns: u64, took_ns: u64, gauges: &Gauges) {
        let time = u128::from(took_ns);
        let sums = &mut self.sums;
        for (sum, value) in [
            (&mut sums.used, gauges.used),
            (&mut sums.held, gauges.held),
            (&mut sums.promised, gauges.promised),
            (&mut sums.cached, gauges.cached),
            (&mut sums.slot_waste, gauges.slot_waste),
            (&mut sums.running, gauges.running as u64),
        ] {
            *sum = sum.saturating_add(time * u128::from(value));
        }
        self.busy_ns = self.busy_ns.saturating_add(took_ns);
        self.steps += 1;
        self.peak_running = self.peak_running.max(gauges.running);
        self.peak_used = self.peak_used.max(gauges.used);
        self.peak_held = self.peak_held.max(gauges.held);
        self.step.add_ns(took_ns);
        self.series.offer(|| Point {
            at_s: float(began_ns.saturating_add(took_ns)) / 1e9,
            used: gauges.used,
            held: gauges.held,
            promised: gauges.promised,
            cached: gauges.cached,
            slot_waste: gauges.slot_waste,
            free: gauges.free,
            largest_run: gauges.largest_run,
            running: u32::try_from(gauges.running).unwrap_or(u32::MAX),
            waiting: u32::try_from(gauges.waiting).unwrap_or(u32::MAX),
        });
    }

    /// A request is done.
    pub(super) fn served(&mut self, served: &Served) {
        let Served { arrived_ns, admitted_ns, first_ns, done_ns, output_tokens } = *served;
        let first_token = first_ns - arrived_ns;
        // The first token is there when the prompt is; each of the others takes a step.
        let token = (done_ns - first_ns) / u64::from(output_tokens.max(1));
        self.queue.add_ns(admitted_ns - arrived_ns);
        self.first_token.add_ns(first_token);
        self.token.add_ns(token);
        self.latency.add_ns(done_ns - arrived_ns);
        self.completed += 1;
        self.output_tokens += u64::from(output_tokens);
        if let Some(goals) = self.goals {
            let kept = float(first_token) <= goals.first_token_ms * 1e6
                && float(token) <= goals.token_ms * 1e6;
            self.good += u64::from(kept);
        }
    }

    /// Requests that are done.
    pub(super) fn completed(&self) -> u64 {
        self.completed
    }

    /// Fills in what was measured; the last request ended at `end_ns`.
    pub(super) fn fill(&self, result: &mut VariantResult, end_ns: u64) {
        let of = |sum: u128| mean(sum, self.busy_ns);
        let seconds = float(end_ns) / 1e9;
        let rate = |amount: u64| if end_ns > 0 { float(amount) / seconds } else { 0.0 };
        let sums = &self.sums;
        result.simulated_s = seconds;
        result.busy_s = float(self.busy_ns) / 1e9;
        result.steps = self.steps;
        result.peak_running = u32::try_from(self.peak_running).unwrap_or(u32::MAX);
        result.mean_running = of(sums.running);
        result.peak_used_bytes = self.peak_used;
        result.peak_held_bytes = self.peak_held;
        result.mean_used_bytes = of(sums.used);
        result.mean_held_bytes = of(sums.held);
        result.mean_promised_bytes = of(sums.promised);
        result.mean_cached_bytes = of(sums.cached);
        result.mean_slot_waste_bytes = of(sums.slot_waste);
        let waste = sums.held.saturating_sub(sums.used).saturating_sub(sums.slot_waste);
        result.mean_block_waste_bytes = of(waste);
        let taken = of(sums.held.saturating_add(sums.promised));
        result.utilization = if taken > 0.0 { of(sums.used) / taken } else { 0.0 };
        result.requests_completed = self.completed;
        result.output_tokens = self.output_tokens;
        result.output_tokens_per_s = rate(self.output_tokens);
        result.requests_per_s = rate(self.completed);
        result.good_requests = self.goals.map(|_| self.good);
        result.goodput_per_s = self.goals.map(|_| rate(self.good));
        result.queue_ms = self.queue.summary();
        result.first_token_ms = self.first_token.summary();
        result.token_ms = self.token.summary();
        result.latency_ms = self.latency.summary();
        result.step_ms = self.step.summary();
        result.series = self.series.finish();
        result.picture = self.album.finish();
        let times = [&self.queue, &self.first_token, &self.token, &self.latency, &self.step];
        let cut: u64 = times.iter().map(|times| times.cut()).sum();
        if cut > 0 {
            result.problems.push(format!(
                "{} of more than eleven days count as eleven days",
                counted(cut, "time")
            ));
        }
        if end_ns == u64::MAX {
            result.problems.push(
                "the simulated clock reached its end, after 584 years: no time of this replay is right; check \
                 [cost] and the workload's arrivals"
                    .to_owned(),
            );
        }
    }
}
