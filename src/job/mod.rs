//! The batch job: real request lengths through the whole cache, with the answers checked.
//!
//! A job is a file with a `[workload]`. [`run`] takes each variant of the file in turn: it plans,
//! opens a cache, drives all requests through it with continuous batching, and closes it. Each
//! layer's K, V and Q come from a fixed [`formula`], so every number in the cache is knowable:
//! samples of the output are compared with naive attention in f64 over the formula's own numbers,
//! and a checksum over all outputs that a model would sample from must be the same for every mode
//! of one format, with prefix reuse and without.
//!
//! - [`workload`]: which requests, from a seeded generator or a trace.
//! - [`formula`]: the contents.
//! - [`check`]: what some of the outputs must be.
//! - `scheduler`: admit, prefill, decode, finish, preempt.
//! - `engine`: fills the tensors of a step and folds its outputs.
//! - [`report`]: what came out.
//! - [`computed`]: a job's variants compared: parts of them, again, merged, as files.
//! - [`replay`]: the other depth, without K and V and with a simulated clock.
//!
//! All memory of a run is allocated before its loop begins. What the loop allocates, in the whole
//! process, is counted and reported.

mod arrivals;
pub mod check;
pub mod computed;
mod engine;
pub mod formula;
mod generator;
mod html;
mod meter;
#[cfg(feature = "model")]
pub mod model;
mod output;
mod queue;
mod random;
mod reader;
pub mod recommend;
pub mod replay;
pub mod replay_output;
pub mod report;
mod scheduler;
pub mod tokens;
mod work;
pub mod workload;

pub use output::{csv, json, prepare, write};
pub use report::{Comparison, FailedRun, Outcome, Report, Run, RunReport};

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use check::Checker;
use engine::Engine;
use formula::Formula;
use meter::{AllocationMeter, float, mean};
use scheduler::Scheduler;
use workload::Request;

use crate::cache::Cache;
use crate::config::{Config, Geometry, Source, WorkloadConfig};
use crate::device::{ResolvedBudget, resolve_budget};
use crate::error::{CacheError, JobError, OpenError};
use crate::plan::Plan;
use crate::units::{Bytes, counted};

/// How far a variant is.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Tokens of its requests that are done, computed or found in the cache; what is computed
    /// again is not counted twice.
    pub tokens_done: u64,
    /// Tokens of all its requests.
    pub tokens_total: u64,
    /// Steps done.
    pub steps: u64,
    /// Requests that run.
    pub running: usize,
    /// Requests that wait.
    pub waiting: usize,
}

/// Is told how a job gets on. What it allocates is not counted as the cache's.
pub trait Observer {
    /// A variant begins; `of` is how many there are.
    fn variant(&mut self, name: &str, index: usize, of: usize);
    /// A capacity in percent has come to this many bytes.
    fn resolved(&mut self, _budget: &ResolvedBudget) {}
    /// So much of the pool has been made resident.
    fn opening(&mut self, done: Bytes, total: Bytes);
    /// A step is done.
    fn step(&mut self, progress: &Progress);
    /// The variant is done.
    fn finished(&mut self, run: &Run);
}

/// Wants to know nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Observer for Silent {
    fn variant(&mut self, _name: &str, _index: usize, _of: usize) {}
    fn opening(&mut self, _done: Bytes, _total: Bytes) {}
    fn step(&mut self, _progress: &Progress) {}
    fn finished(&mut self, _run: &Run) {}
}

/// What all variants of a job share.
struct Job<'a> {
    geometry: &'a Geometry,
    requests: Vec<Request>,
    /// Conversations that are open at once; all when there is no limit.
    open: Option<u32>,
    formula: Formula,
    checker: Checker,
    stop: Option<&'a AtomicBool>,
}

/// Runs a job: every variant of the file, one after the other. A variant that cannot be planned
/// or opened is reported with its error, and the others run.
///
/// # Errors
/// A file without `[workload]`, or a trace that cannot be read.
pub fn run(source: &Source, observer: &mut dyn Observer) -> Result<Report, JobError> {
    let computed = computed::compute(source, &computed::ComputeOptions::default(), observer)?;
    Ok(Report::new(computed.runs.into_iter().map(|run| run.run).collect()))
}

/// What the file's workload is.
///
/// # Errors
/// [`JobError::Generates`] and [`JobError::NoWorkload`] for a file that has none.
fn workload_of(source: &Source) -> Result<&WorkloadConfig, JobError> {
    let path = || source.path.clone();
    match &source.config.workload {
        Some(workload) => Ok(workload),
        None if source.config.generate.is_some() => Err(JobError::Generates { path: path() }),
        None => Err(JobError::NoWorkload { path: path() }),
    }
}

impl Job<'_> {
    /// Runs one variant; `None` when it was stopped before its end.
    fn run_variant(
        &self,
        name: &str,
        config: &Config,
        observer: &mut dyn Observer,
    ) -> Result<Option<RunReport>, JobError> {
        let open = |source: OpenError| JobError::Open { variant: name.to_owned(), source };
        let failed = |source: CacheError| JobError::Cache { variant: name.to_owned(), source };
        let mut config = config.clone();
        if let Some(budget) = resolve_budget(&mut config).map_err(|error| open(error.into()))? {
            observer.resolved(&budget);
        }
        let plan = Plan::new(&config, self.geometry).map_err(|error| open(error.into()))?;
        let mut progress = |done, total| observer.opening(done, total);
        let cache =
            Cache::open_on_device(plan, &config.device, Some(&mut progress)).map_err(open)?;
        let engine = Engine::new(cache.plan(), &self.formula, &self.checker, &self.requests);
        let mut scheduler =
            Scheduler::new(cache, engine, &self.requests, self.open).map_err(failed)?;

        let tokens_total = scheduler.tokens_to_come();
        let mut allocations = AllocationMeter::default();
        let began = Instant::now();
        loop {
            allocations.resume();
            let more = scheduler.step();
            allocations.pause();
            if !more.map_err(failed)? {
                break;
            }
            if self.stop.is_some_and(|stop| stop.load(Relaxed)) {
                return Ok(None);
            }
            observer.step(&Progress {
                tokens_done: scheduler.counts.new_tokens,
                tokens_total,
                steps: scheduler.counts.steps,
                running: scheduler.num_running(),
                waiting: scheduler.num_waiting(),
            });
        }
        let wall_s = began.elapsed().as_secs_f64();
        Ok(Some(describe(name, config.cache.prefix_reuse, &scheduler, &allocations, wall_s)))
    }
}

/// The report of a finished run.
fn describe(
    name: &str,
    asked_for_reuse: bool,
    scheduler: &Scheduler<'_, Engine<'_>>,
    allocations: &AllocationMeter,
    wall_s: f64,
) -> RunReport {
    let Scheduler { cache, work: engine, counts, latency, cache_time, .. } = scheduler;
    let plan = cache.plan();
    let device = cache.device_info();
    let stats = cache.stats();
    let verdict = engine.verdict();
    let cache_s = cache_time.as_secs_f64();
    let rate = |amount: u64| if cache_s > 0.0 { float(amount) / cache_s } else { 0.0 };
    RunReport {
        variant: name.to_owned(),
        mode: plan.mode,
        format: plan.format.name().to_owned(),
        device: format!("{}/{}", device.kind, device.kernel),
        planned_bytes: plan.pool_bytes,
        allocated_bytes: device.pool_bytes,
        peak_used_bytes: stats.peak_used_bytes,
        mean_waste_bytes: mean(counts.waste_sum, counts.steps),
        requests_completed: counts.completed,
        tokens_appended: stats.tokens_appended,
        tokens_per_s: rate(stats.tokens_appended),
        step_ms_p50: latency.percentile_ms(50),
        step_ms_p99: latency.percentile_ms(99),
        max_abs_error: verdict.max_abs_error(),
        output_checksum: (engine.counted() > 0).then(|| format!("{:016x}", engine.checksum())),
        allocations_after_open: allocations.counted(),
        threads: device.threads,
        tokens_per_block: plan.tokens_per_block,
        host_bytes: plan.host_bytes,
        capacity_tokens: plan.capacity_tokens,
        peak_held_bytes: stats.peak_held_bytes,
        peak_promised_bytes: Bytes(counts.promised_peak),
        prefix_reuse: plan.reuse.is_on(),
        prefix_reuse_declined: plan.reuse.declined.filter(|_| asked_for_reuse).map(str::to_owned),
        prompt_tokens: counts.prompt_tokens,
        prefix_hit_tokens: counts.hit_tokens,
        prefix_hit_rate: mean(counts.hit_tokens.into(), counts.prompt_tokens),
        repeated_prompt_tokens: counts.repeated_tokens,
        resumed_tokens: counts.resumed_tokens,
        resumed_hit_tokens: counts.resumed_hit_tokens,
        saved_prefill_tokens: counts.hit_tokens + counts.resumed_hit_tokens,
        evictions: stats.evictions,
        peak_cached_bytes: Bytes(counts.cached_peak),
        requests_refused_too_long: counts.refused_too_long,
        requests_refused_never_fits: counts.refused_never_fits,
        first_refusal: scheduler.first_refusal(),
        preemptions: counts.preemptions,
        most_preemptions_of_one: counts.most_preemptions,
        preemptions_without_progress: counts.fruitless,
        steps: counts.steps,
        peak_running: counts.peak_running,
        mean_running: mean(u128::from(counts.running_sum), counts.steps),
        outputs_checked: verdict.checked(),
        error_limit: check::error_limit(plan.format),
        nonfinite: stats.nonfinite,
        saturated: stats.saturated,
        cache_s,
        wall_s,
        problems: problems(scheduler),
    }
}

/// What is not as it must be at the end of a run.
fn problems(scheduler: &Scheduler<'_, Engine<'_>>) -> Vec<String> {
    let Scheduler { cache, work: engine, counts, .. } = scheduler;
    let (planned, allocated) = (cache.plan().pool_bytes, cache.device_info().pool_bytes);
    let mut problems = Vec::new();
    if planned != allocated {
        problems.push(format!("{planned} bytes were planned and {allocated} allocated"));
    }
    let (got, expected) = (counts.new_tokens, scheduler.tokens_to_come());
    if got != expected {
        problems.push(format!("{got} tokens were reached, expected {expected}"));
    }
    let (got, expected) = (engine.counted(), counts.sampled_rows);
    if got != expected {
        problems.push(format!("{got} outputs are in the checksum, expected {expected}"));
    }
    if engine.mismatches() > 0 {
        problems.push(format!(
            "{} outputs were others when they were computed again after a preemption",
            engine.mismatches()
        ));
    }
    if counts.hit_tokens > counts.repeated_tokens {
        problems.push(format!(
            "{} prompt tokens were found in the cache, and only {} are in an earlier request too",
            counts.hit_tokens, counts.repeated_tokens
        ));
    }
    let error = engine.verdict().max_abs_error();
    let limit = check::error_limit(cache.plan().format);
    if let (Some(error), Some(limit)) = (error, limit)
        && error > limit
    {
        problems.push(format!(
            "the largest error of the checked outputs is {error:.3e}, and {} may have {limit:.0e}",
            cache.plan().format.name()
        ));
    }
    if cache.stats().seqs > 0 {
        let seqs = counted(cache.stats().seqs.into(), "sequence");
        problems.push(format!("not released at the end: {seqs}"));
    }
    if let Err(error) = cache.check_invariants() {
        problems.push(error.to_string());
    }
    problems
}
