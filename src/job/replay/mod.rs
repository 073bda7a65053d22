//! Replaying the manager alone: `workload.compute = "none"`.
//!
//! Every variant runs the real manager (blocks, prefix index, admission, steps) at the full size of
//! its plan, on a device that has no memory; the K/V memory is planned and accounted for. Time is
//! simulated from `[cost]` (see [`crate::config::CostConfig`]), so the same file gives the same
//! numbers on every machine, and variants run side by side in threads.
//!
//! `mode = "dynamic"` is the baseline: see `dynamic.rs`.

mod clock;
mod distribution;
mod dynamic;
mod meters;
mod picture;
mod result;
mod series;
mod simulated;
mod variant;

pub use distribution::Summary;
pub use picture::Picture;
pub use result::{Replay, Replayed, VariantFailure, VariantResult, WorkloadSummary};
pub use series::{MAX_POINTS, Point};
pub use variant::check_memory;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use super::meter::{float, mean};
use super::output::go_on;
use super::replay_output;
use super::tokens::Tokens;
use super::workload::{self, Request, Requests};
use super::workload_of;
use crate::config::{Compute, Config, Geometry, Source};
use crate::error::JobError;
use variant::Replayer;

/// Which variants are replayed, and how.
#[derive(Debug, Default)]
pub struct ReplayOptions<'a> {
    /// Which part of the variants: the k-th of n, counted from 1. All of them without.
    pub shard: Option<(usize, usize)>,
    /// Results of an earlier run of the same file: a variant that is among them with the same
    /// settings and workload is not run again.
    pub done: &'a [Replayed],
    /// Set to stop: what is complete then is the result.
    pub stop: Option<&'a AtomicBool>,
}

/// Is told how a replay gets on, from several threads.
pub trait ReplayObserver: Sync {
    /// So many variants run, and this is what the workload has.
    fn begins(&self, _variants: usize, _workload: &WorkloadSummary) {}
    /// Requests of a variant are done since the last call, of so many.
    fn requests(&self, _variant: &str, _done: u64, _of: u64) {}
    /// A variant is done, or cannot run.
    fn finished(&self, _run: &Replayed) {}
}

impl ReplayObserver for super::Silent {}

/// What all variants of a job share.
pub(super) struct Shared<'a> {
    pub(super) geometry: &'a Geometry,
    pub(super) requests: Vec<Request>,
    pub(super) tokens: Tokens,
    pub(super) most_open: Option<u32>,
    pub(super) ceiling_hit_rate: f64,
    pub(super) stop: Option<&'a AtomicBool>,
}

/// Replays a job: each variant of the file, side by side in as many threads as `device.threads`
/// says (0: as many as there are cores). A variant that cannot be planned is reported before any
/// runs, and the others run.
///
/// # Errors
/// A file without `[workload]` or that computes, or a trace that cannot be read;
/// [`JobError::OtherJob`] when the results to go on with have no variant of this job.
pub fn replay(
    source: &Source,
    options: &ReplayOptions<'_>,
    observer: &dyn ReplayObserver,
) -> Result<Replay, JobError> {
    let workload = workload_of(source)?;
    if workload.compute != Compute::None {
        return Err(JobError::Computes { path: source.path.clone() });
    }
    let mut requests = workload::requests(workload)?;
    let summary = summarize(&requests);
    let tokens = requests.take_tokens(workload.seed);
    let shared = Shared {
        geometry: &source.geometry,
        requests: requests.list,
        tokens,
        most_open: workload.max_open_conversations,
        ceiling_hit_rate: summary.ceiling_hit_rate,
        stop: options.stop,
    };
    let all = source.variants();
    let variants = all.len();
    let of =
        |(name, config): &(String, Config)| fingerprint(name, config, &source.geometry, &summary);
    let fingerprints: Vec<String> = all.iter().map(of).collect();
    go_on(replay_output::done(options.done), &fingerprints)?;
    let of_shard = |index: usize| options.shard.is_none_or(|(k, n)| index % n == k - 1);
    let mine: Vec<Variant> = all
        .into_iter()
        .zip(fingerprints.iter().cloned())
        .enumerate()
        .filter(|(index, _)| of_shard(*index))
        .map(|(index, ((name, config), fingerprint))| Variant { index, name, config, fingerprint })
        .collect();
    observer.begins(mine.len(), &summary);
    let runs = run_all(&shared, &mine, options, observer);
    Ok(Replay {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        config: toml::to_string_pretty(&source.config).unwrap_or_default(),
        workload: summary,
        runs,
        variants,
        fingerprints,
    })
}

/// One variant of the file.
struct Variant {
    /// Its place there, counted from 0.
    index: usize,
    name: String,
    config: Config,
    fingerprint: String,
}

/// Plans every variant, then replays those that can run.
fn run_all(
    shared: &Shared<'_>,
    variants: &[Variant],
    options: &ReplayOptions<'_>,
    observer: &dyn ReplayObserver,
) -> Vec<Replayed> {
    let mut runs = Vec::new();
    let mut ready = Vec::new();
    for Variant { index, name, config, fingerprint } in variants {
        let before = options
            .done
            .iter()
            .find(|run| matches!(run, Replayed::Done(_)) && run.fingerprint() == *fingerprint);
        if let Some(Replayed::Done(run)) = before {
            runs.push(Replayed::Done(Box::new(VariantResult { index: *index, ..(**run).clone() })));
            continue;
        }
        match Replayer::plan(shared, config) {
            Ok(replayer) => ready.push((*index, name, fingerprint, replayer)),
            Err(error) => runs.push(Replayed::Failed(VariantFailure {
                variant: name.clone(),
                index: *index,
                fingerprint: fingerprint.clone(),
                mode: config.cache.mode,
                error: format!("variant {name:?}: {error}"),
            })),
        }
    }
    runs.iter().for_each(|run| observer.finished(run));
    let threads = variants.first().map_or(1, |variant| threads(&variant.config)).min(ready.len());
    let (next, results) = (AtomicUsize::new(0), Mutex::new(runs));
    let work = || {
        while let Some((index, name, fingerprint, replayer)) = ready.get(next.fetch_add(1, Relaxed))
        {
            let Some(run) = replayer.run(name, *index, fingerprint, observer) else { break };
            observer.finished(&run);
            if let Ok(mut results) = results.lock() {
                results.push(run);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(work);
        }
        work();
    });
    let mut runs = results.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    runs.sort_by_key(Replayed::index);
    runs
}

/// How many variants are replayed at once.
fn threads(config: &Config) -> usize {
    match config.device.threads {
        0 => std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        threads => threads as usize,
    }
}

/// Counts what the requests bring. Of prompts with hashes, before these are taken.
pub(super) fn summarize(requests: &Requests) -> WorkloadSummary {
    let digest = format!("{:016x}", requests.digest());
    let damaged = (requests.damaged_lines, requests.first_damaged.clone());
    let Requests { capped_outputs, missing_requests, .. } = *requests;
    let requests = &requests.list;
    let sum = |of: fn(&Request) -> u32| requests.iter().map(|r| u64::from(of(r))).sum::<u64>();
    let prompt_tokens = sum(|request| request.prompt_tokens);
    let repeated_tokens = sum(|request| request.repeated_tokens);
    let last_arrival = requests.iter().map(|request| request.arrival_ns).max();
    WorkloadSummary {
        requests: requests.len() as u64,
        prompt_tokens,
        output_tokens: sum(|request| request.output_tokens),
        repeated_tokens,
        ceiling_hit_rate: mean(repeated_tokens.into(), prompt_tokens),
        last_arrival_s: float(last_arrival.unwrap_or(0)) / 1e9,
        longest_tokens: requests.iter().map(Request::total_tokens).max().unwrap_or(0),
        damaged_lines: damaged.0,
        first_damaged: damaged.1,
        capped_outputs,
        missing_requests,
        digest,
    }
}

/// A hash of a variant's settings, the model and every request of the workload: results with the
/// same are results of the same replay. Where it runs, and where a trace lies, is no part of it.
pub(super) fn fingerprint(
    name: &str,
    config: &Config,
    geometry: &Geometry,
    summary: &WorkloadSummary,
) -> String {
    let mut config = config.clone();
    config.device.threads = 0;
    if let Some(workload) = &mut config.workload {
        workload.path = None;
    }
    // It names the file.
    let summary = WorkloadSummary { first_damaged: None, ..summary.clone() };
    let text = format!("{}{name}{config:?}{geometry:?}{summary:?}", env!("CARGO_PKG_VERSION"));
    let hash = text.bytes().fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
    });
    format!("{hash:016x}")
}
