//! What a job found out, in the form that programs read.

use serde::{Deserialize, Serialize};

use crate::config::CacheMode;
use crate::units::{Bytes, counted};

/// The whole job: one entry a variant, in the order of the file.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// One entry a variant.
    pub runs: Vec<Run>,
    /// Variants that must have given the same outputs, and whether they did.
    pub comparisons: Vec<Comparison>,
}

/// One variant.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Run {
    /// It ran to its end.
    Done(Box<RunReport>),
    /// It could not be planned or opened, or failed on the way.
    Failed(FailedRun),
}

/// A variant that ran to its end.
///
/// Times are those of the cache's own verbs (admission, reserve, append, attend, commit,
/// release); computing the formula that stands in for a model, and checking outputs, is not
/// part of them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunReport {
    /// Its name in the file.
    pub variant: String,
    /// Contiguous, paged or hybrid.
    pub mode: CacheMode,
    /// `f16`, `int8`, `int8/per-group-32`, …
    pub format: String,
    /// What computed: `cpu/avx512`, …
    pub device: String,
    /// Bytes of the pool according to the plan.
    pub planned_bytes: Bytes,
    /// Bytes of the pool that the device allocated.
    pub allocated_bytes: Bytes,
    /// The most bytes that held K, V and scales of visible tokens.
    pub peak_used_bytes: Bytes,
    /// Bytes held by or promised to sequences and not used; the mean over all steps.
    pub mean_waste_bytes: f64,
    /// Requests that ran to their end.
    pub requests_completed: u64,
    /// Tokens committed to the cache, those computed again after a preemption included.
    pub tokens_appended: u64,
    /// `tokens_appended` by the time in the cache's verbs.
    pub tokens_per_s: f64,
    /// The median time of a step in the cache's verbs, to 1 %.
    pub step_ms_p50: f64,
    /// The 99th percentile of it.
    pub step_ms_p99: f64,
    /// The largest difference between a checked output and attention in f64 over the formula's
    /// numbers, the rounding of the storage format included; `None` when nothing was checked.
    pub max_abs_error: Option<f64>,
    /// A sum over the outputs that a model would sample from (at the last token of each prompt and
    /// all behind it), in 16 hexadecimal digits: changes with every bit of them, and not with the
    /// order in which they were computed, nor with what is reused; `None` when nothing was
    /// computed.
    pub output_checksum: Option<String>,
    /// Allocations of the whole process from when the cache is open to the last release, with
    /// the observer's own left out; `None` when the program does not count
    /// (see [`crate::device::CountingAllocator`]).
    pub allocations_after_open: Option<u64>,
    /// Threads that computed.
    pub threads: u32,
    /// Tokens of a block in paged layers.
    pub tokens_per_block: u32,
    /// Bytes of bookkeeping beside the pool, according to the plan.
    pub host_bytes: Bytes,
    /// Tokens that the pool holds, over all sequences.
    pub capacity_tokens: u64,
    /// The most bytes of blocks and slots that sequences held.
    pub peak_held_bytes: Bytes,
    /// The most bytes promised to sequences and not taken yet.
    pub peak_promised_bytes: Bytes,
    /// Whether prefixes were reused.
    pub prefix_reuse: bool,
    /// Why not, where the file asked for it and the plan cannot.
    pub prefix_reuse_declined: Option<String>,
    /// Prompt tokens of the requests that were admitted, each request once.
    pub prompt_tokens: u64,
    /// How many of `prompt_tokens` were found in the cache and not computed.
    pub prefix_hit_tokens: u64,
    /// `prefix_hit_tokens` by `prompt_tokens`.
    pub prefix_hit_rate: f64,
    /// How many of the prompt tokens stand at the start of the prompt in an earlier request too: a
    /// cache that forgets nothing, with requests that come one after the other, finds these.
    pub repeated_prompt_tokens: u64,
    /// Tokens of requests that were admitted again after a preemption: their prompt and what they
    /// had generated.
    pub resumed_tokens: u64,
    /// How many of `resumed_tokens` were found in the cache and not computed again.
    pub resumed_hit_tokens: u64,
    /// All tokens that were found in the cache and not computed: `prefix_hit_tokens` and
    /// `resumed_hit_tokens`.
    pub saved_prefill_tokens: u64,
    /// Blocks that were kept for reuse and given to another sequence.
    pub evictions: u64,
    /// The most bytes of blocks that were kept for reuse while no sequence held them.
    pub peak_cached_bytes: Bytes,
    /// Requests refused before the first step: longer than `limits.max_seq_len`.
    pub requests_refused_too_long: u64,
    /// Requests refused before the first step: they need more blocks than the pool has.
    pub requests_refused_never_fits: u64,
    /// Why the first request was refused, and what to change; `None` when none was.
    pub first_refusal: Option<String>,
    /// How often a request lost its blocks and was computed again.
    pub preemptions: u64,
    /// The most preemptions of one request.
    pub most_preemptions_of_one: u32,
    /// Preemptions of a request that had gained no new token since it was admitted; 0, or preempt
    /// and resume could ping-pong.
    pub preemptions_without_progress: u64,
    /// Steps.
    pub steps: u64,
    /// The most requests that ran at once.
    pub peak_running: u32,
    /// Requests that ran at once; the mean over all steps.
    pub mean_running: f64,
    /// Outputs that were checked.
    pub outputs_checked: u64,
    /// The largest error that the format may have; `None` where it depends on given scales.
    pub error_limit: Option<f64>,
    /// Elements that were NaN or infinite on the way into INT8.
    pub nonfinite: u64,
    /// Elements beyond the range of a static INT8 scale.
    pub saturated: u64,
    /// Seconds in the cache's verbs.
    pub cache_s: f64,
    /// Seconds of the whole loop, the formula and the checks included.
    pub wall_s: f64,
    /// What is not as it must be; empty in a good run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}

/// A variant that did not run to its end.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FailedRun {
    /// Its name in the file.
    pub variant: String,
    /// Contiguous, paged or hybrid.
    pub mode: CacheMode,
    /// `f16`, `int8`, …
    pub format: String,
    /// Why.
    pub error: String,
}

/// Variants with the same format on the same device, whose outputs must be the same bits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Comparison {
    /// The format.
    pub format: String,
    /// What computed.
    pub device: String,
    /// The variants.
    pub variants: Vec<String>,
    /// Whether they agree.
    pub outcome: Outcome,
}

/// What a comparison came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// All checksums are equal.
    Equal,
    /// They are not: an answer depends on the cache mode or on what is reused, which must never
    /// be.
    Different,
    /// No other variant completed the same requests, so the checksum is one of other outputs.
    NotComparable,
    /// They have computed nothing, so there is nothing to compare.
    NothingComputed,
}

impl Report {
    /// The report of these runs, with the comparisons worked out.
    #[must_use]
    pub fn new(runs: Vec<Run>) -> Self {
        let done = || {
            runs.iter().filter_map(|run| match run {
                Run::Done(run) => Some(&**run),
                Run::Failed(_) => None,
            })
        };
        let mut comparisons: Vec<Comparison> = Vec::new();
        for run in done() {
            if comparisons.iter().any(|seen| seen.variants.contains(&run.variant)) {
                continue;
            }
            let same_bits =
                |other: &&RunReport| other.format == run.format && other.device == run.device;
            let group: Vec<_> =
                done().filter(same_bits).filter(|o| what_ran(o) == what_ran(run)).collect();
            // Alone of its kind, there is nothing to compare it with.
            if done().filter(same_bits).count() > 1 {
                comparisons.push(compare(&group));
            }
        }
        Self { runs, comparisons }
    }

    /// Everything that is not as it must be, a line each, with the variant's name in front. A
    /// program that gets any has reason to fail.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        for run in &self.runs {
            match run {
                Run::Done(run) => {
                    let named = |problem: &str| format!("variant {:?}: {problem}", run.variant);
                    problems.extend(run.problems.iter().map(|problem| named(problem)));
                    if run.requests_completed == 0 {
                        problems.push(named("no request was completed, so nothing was measured"));
                    }
                }
                Run::Failed(run) => problems.push(run.error.clone()),
            }
        }
        for comparison in &self.comparisons {
            if comparison.outcome == Outcome::Different {
                problems.push(comparison.to_string());
            }
        }
        problems
    }
}

/// Which requests a run completed. Those that are refused are the longest, so equal counts mean
/// equal requests.
fn what_ran(run: &RunReport) -> [u64; 3] {
    [run.requests_completed, run.requests_refused_too_long, run.requests_refused_never_fits]
}

/// Compares runs of the same requests with the same format on the same device.
fn compare(runs: &[&RunReport]) -> Comparison {
    let first = runs[0];
    let outcome = if runs.iter().all(|run| run.output_checksum.is_none()) {
        Outcome::NothingComputed
    } else if runs.len() == 1 {
        Outcome::NotComparable
    } else if runs.iter().all(|run| run.output_checksum == first.output_checksum) {
        Outcome::Equal
    } else {
        Outcome::Different
    };
    Comparison {
        format: first.format.clone(),
        device: first.device.clone(),
        variants: runs.iter().map(|run| run.variant.clone()).collect(),
        outcome,
    }
}

/// What computed, each device once.
#[must_use]
pub fn devices(runs: &[&RunReport]) -> String {
    let mut devices: Vec<String> = Vec::new();
    for run in runs {
        let device = format!("{} with {}", run.device, counted(run.threads.into(), "thread"));
        if !devices.contains(&device) {
            devices.push(device);
        }
    }
    devices.join(", ")
}

impl std::fmt::Display for Comparison {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (variants, format) = (self.variants.join(", "), &self.format);
        match self.outcome {
            Outcome::Equal => write!(f, "equal outputs, bit for bit ({format}): {variants}"),
            Outcome::Different => {
                write!(f, "DIFFERENT OUTPUTS ({format}): {variants}; this is a defect of kvpool")
            }
            Outcome::NotComparable => write!(
                f,
                "outputs not compared ({format}): {variants} completed other requests than the other variants"
            ),
            Outcome::NothingComputed => {
                write!(f, "outputs not compared ({format}): nothing was computed by {variants}")
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::job) fn run(variant: &str, format: &str, checksum: &str, completed: u64) -> Run {
        Run::Done(Box::new(RunReport {
            variant: variant.to_owned(),
            mode: CacheMode::Paged,
            format: format.to_owned(),
            device: "cpu/portable".to_owned(),
            planned_bytes: Bytes(64),
            allocated_bytes: Bytes(64),
            peak_used_bytes: Bytes(32),
            mean_waste_bytes: 1.5,
            requests_completed: completed,
            tokens_appended: 3,
            tokens_per_s: 1e3,
            step_ms_p50: 0.5,
            step_ms_p99: 0.75,
            max_abs_error: Some(1e-3),
            output_checksum: (completed > 0).then(|| checksum.to_owned()),
            allocations_after_open: Some(0),
            threads: 1,
            tokens_per_block: 16,
            host_bytes: Bytes(1),
            capacity_tokens: 10,
            peak_held_bytes: Bytes(48),
            peak_promised_bytes: Bytes(16),
            prefix_reuse: true,
            prefix_reuse_declined: None,
            prompt_tokens: 40,
            prefix_hit_tokens: 10,
            prefix_hit_rate: 0.25,
            repeated_prompt_tokens: 20,
            resumed_tokens: 4,
            resumed_hit_tokens: 2,
            saved_prefill_tokens: 12,
            evictions: 3,
            peak_cached_bytes: Bytes(16),
            requests_refused_too_long: 0,
            requests_refused_never_fits: 0,
            first_refusal: None,
            preemptions: 0,
            most_preemptions_of_one: 0,
            preemptions_without_progress: 0,
            steps: 2,
            peak_running: 1,
            mean_running: 1.0,
            outputs_checked: 1,
            error_limit: Some(1e-2),
            nonfinite: 0,
            saturated: 0,
            cache_s: 0.003,
            wall_s: 0.004,
            problems: Vec::new(),
        }))
    }

    #[test]
    fn only_what_must_be_equal_is_compared() {
        let report = Report::new(vec![
            run("a", "f16", "1", 5),
            run("b", "int8", "2", 5),
            run("c", "f16", "1", 5),
            run("d", "bf16", "3", 5),
            run("e", "int8", "2", 4),
        ]);
        let outcomes: Vec<_> =
            report.comparisons.iter().map(|c| (c.variants.join(" "), c.outcome)).collect();
        assert_eq!(
            outcomes,
            [
                ("a c".to_owned(), Outcome::Equal),
                ("b".to_owned(), Outcome::NotComparable),
                ("e".to_owned(), Outcome::NotComparable),
            ]
        );
        assert_eq!(report.comparisons[0].to_string(), "equal outputs, bit for bit (f16): a, c");
        assert_eq!(report.problems(), Vec::<String>::new());
    }

    #[test]
    fn runs_that_computed_nothing_are_not_called_equal() {
        let none = |variant| run(variant, "f16", "0", 0);
        let report = Report::new(vec![none("a"), none("b"), run("c", "f16", "1", 5)]);
        let outcomes: Vec<_> =
            report.comparisons.iter().map(|c| (c.variants.join(" "), c.outcome)).collect();
        let [nothing, other] = &outcomes[..] else { panic!("{outcomes:?}") };
        assert_eq!(*nothing, ("a b".to_owned(), Outcome::NothingComputed));
        assert_eq!(*other, ("c".to_owned(), Outcome::NotComparable));
        let text = "outputs not compared (f16): nothing was computed by a, b";
        assert_eq!(report.comparisons[0].to_string(), text);
        let problems = report.problems();
        assert_eq!(problems.len(), 2);
        assert!(problems[0].contains("no request was completed"), "{problems:?}");
    }

    #[test]
    fn different_outputs_and_failures_are_problems() {
        let failed = Run::Failed(FailedRun {
            variant: "x".to_owned(),
            mode: CacheMode::Paged,
            format: "f16".to_owned(),
            error: "variant \"x\": no memory".to_owned(),
        });
        let report =
            Report::new(vec![run("a", "f16", "1", 5), run("b", "f16", "2", 5), failed.clone()]);
        assert_eq!(report.comparisons[0].outcome, Outcome::Different);
        let problems = report.problems();
        assert_eq!(problems.len(), 2);
        assert!(problems[0].contains("no memory") && problems[1].contains("DIFFERENT OUTPUTS"));
        let json = serde_json::to_string(&Report::new(vec![failed])).expect("plain values");
        assert_eq!(
            json,
            r#"{"runs":[{"variant":"x","mode":"paged","format":"f16","error":"variant \"x\": no memory"}],"comparisons":[]}"#
        );
    }

    #[test]
    fn the_keys_come_in_their_documented_order() {
        let json =
            serde_json::to_string(&Report::new(vec![run("a", "f16", "1f", 5)])).expect("plain");
        let beginning = r#"{"runs":[{"variant":"a","mode":"paged","format":"f16","device":"cpu/portable","planned_bytes":64,"allocated_bytes":64,"peak_used_bytes":32,"mean_waste_bytes":1.5,"requests_completed":5,"tokens_appended":3,"tokens_per_s":1000.0,"step_ms_p50":0.5,"step_ms_p99":0.75,"max_abs_error":0.001,"output_checksum":"1f","allocations_after_open":0,"threads":1"#;
        assert!(json.starts_with(beginning), "{json}");
    }
}
