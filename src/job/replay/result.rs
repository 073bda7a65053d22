//! What a replay found out, in the form that programs read and `--resume` and `kvpool merge` read
//! again.

use serde::{Deserialize, Serialize};

use super::distribution::Summary;
use super::picture::Picture;
use super::series::Point;
use crate::config::CacheMode;
use crate::units::{counted, grouped};

/// A replayed job: one entry a variant, in the order of the file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Replay {
    /// The version of kvpool.
    pub version: String,
    /// The settings in force, as `kvpool config` prints them.
    pub config: String,
    /// What the workload has.
    pub workload: WorkloadSummary,
    /// One entry a variant; those of other shards, and those that were interrupted, are not there.
    pub runs: Vec<Replayed>,
    /// How many variants the job has.
    pub variants: usize,
    /// What tells each of them from others; empty in results that were read.
    #[serde(skip)]
    pub fingerprints: Vec<String>,
}

/// What all variants were given.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkloadSummary {
    /// Requests.
    pub requests: u64,
    /// Tokens of their prompts.
    pub prompt_tokens: u64,
    /// Tokens that they generate.
    pub output_tokens: u64,
    /// Tokens of prompts that stand at the start of an earlier request too.
    pub repeated_tokens: u64,
    /// `repeated_tokens` by `prompt_tokens`: what a cache that forgets nothing hits.
    pub ceiling_hit_rate: f64,
    /// When the last request arrives that does not wait for another, in seconds.
    pub last_arrival_s: f64,
    /// The longest request, prompt and output.
    pub longest_tokens: u64,
    /// Lines of the trace that could not be used and were left out.
    pub damaged_lines: u64,
    /// What is wrong with the first of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_damaged: Option<String>,
    /// Requests in OpenAI's form whose answers count as long as their `max_tokens` lets them
    /// become, since nothing says how long they are.
    #[serde(default, skip_serializing_if = "is_none")]
    pub capped_outputs: u64,
    /// How many requests `workload.requests` asks for beyond those that the trace has.
    #[serde(default, skip_serializing_if = "is_none")]
    pub missing_requests: u64,
    /// A hash of all requests, in hexadecimal digits: lengths, arrivals, contents, their order.
    /// Empty in results of a kvpool that did not write it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub digest: String,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_none(count: &u64) -> bool {
    *count == 0
}

impl WorkloadSummary {
    /// What the workload is without, a line each.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.damaged_lines > 0 {
            warnings.push(format!(
                "{} of the trace left out; the first: {}",
                counted(self.damaged_lines, "damaged line"),
                self.first_damaged.as_deref().unwrap_or_default()
            ));
        }
        if self.missing_requests > 0 {
            warnings.push(format!(
                "the trace has {}, and workload.requests asks for {}",
                counted(self.requests, "request"),
                grouped(self.requests + self.missing_requests)
            ));
        }
        warnings
    }

    /// What is to be said of the lengths of answers that nobody knows.
    #[must_use]
    pub fn about_outputs(&self) -> Option<String> {
        (self.capped_outputs > 0).then(|| {
            format!(
                "{} are counted as long as max_tokens lets them become; workload.output_tokens says how long \
                 answers are",
                counted(self.capped_outputs, "answer")
            )
        })
    }
}

/// One variant.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Replayed {
    /// It was replayed to its end.
    Done(Box<VariantResult>),
    /// It cannot be planned, or failed on the way.
    Failed(VariantFailure),
}

impl Replayed {
    /// The variant's name.
    #[must_use]
    pub fn variant(&self) -> &str {
        match self {
            Self::Done(run) => &run.variant,
            Self::Failed(run) => &run.variant,
        }
    }

    /// Its place in the file, counted from 0.
    #[must_use]
    pub fn index(&self) -> usize {
        match self {
            Self::Done(run) => run.index,
            Self::Failed(run) => run.index,
        }
    }

    /// Gives it another place.
    pub(in crate::job) fn set_index(&mut self, index: usize) {
        match self {
            Self::Done(run) => run.index = index,
            Self::Failed(run) => run.index = index,
        }
    }

    /// What tells its settings and workload from others.
    #[must_use]
    pub fn fingerprint(&self) -> &str {
        match self {
            Self::Done(run) => &run.fingerprint,
            Self::Failed(run) => &run.fingerprint,
        }
    }
}

/// A variant that was not replayed to its end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VariantFailure {
    /// Its name.
    pub variant: String,
    /// Its place in the file, counted from 0.
    pub index: usize,
    /// What tells its settings and workload from others.
    pub fingerprint: String,
    /// Contiguous, paged, hybrid or dynamic.
    pub mode: CacheMode,
    /// Why.
    pub error: String,
}

/// A variant that was replayed to its end. Bytes are those of the planned pool, times are those of
/// the simulated clock, and means are over the time in which steps ran.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VariantResult {
    /// Its name.
    pub variant: String,
    /// Its place in the file, counted from 0.
    pub index: usize,
    /// What tells its settings and workload from others.
    pub fingerprint: String,
    /// Contiguous, paged, hybrid or dynamic.
    pub mode: Option<CacheMode>,
    /// `f16`, `int8`, `int8/per-group-32`, …
    pub format: String,
    /// Tokens of a block; 0 where there are none.
    pub tokens_per_block: u32,
    /// `guaranteed`, …
    pub admission: String,
    /// Whether prefixes are reused.
    pub prefix_reuse: bool,
    /// What else of the settings variants may differ in: the contiguous layers of a hybrid plan,
    /// the watermark, the buffer of events. Empty where there is nothing to say.
    #[serde(default)]
    pub other_settings: String,
    /// `pool.capacity` as written.
    pub capacity: String,
    /// Bytes of the pool according to the plan.
    pub pool_bytes: u64,
    /// Bytes of bookkeeping beside the pool.
    pub host_bytes: u64,
    /// Of these, bytes of the block tables.
    pub table_bytes: u64,
    /// Bytes of one token in all layers.
    pub bytes_per_token: u64,
    /// Tokens that the pool holds, over all sequences.
    pub capacity_tokens: u64,
    /// Requests that ran to their end.
    pub requests_completed: u64,
    /// Requests refused before the first step: longer than `limits.max_seq_len`.
    pub requests_refused_too_long: u64,
    /// Requests refused before the first step: larger than the whole pool.
    pub requests_refused_never_fits: u64,
    /// Why the first was refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_refusal: Option<String>,
    /// How often a request lost its memory and was computed again.
    pub preemptions: u64,
    /// Sequences that were forked: other answers to a prompt that is there.
    #[serde(default)]
    pub forks: u64,
    /// Seconds from the start to the end of the last request.
    pub simulated_s: f64,
    /// Seconds in which steps ran.
    pub busy_s: f64,
    /// Steps.
    pub steps: u64,
    /// The most requests that ran at once.
    pub peak_running: u32,
    /// Requests that ran at once, in the mean.
    pub mean_running: f64,
    /// The most bytes that held tokens,
    pub peak_used_bytes: u64,
    /// and that sequences held.
    pub peak_held_bytes: u64,
    /// Bytes that held tokens, in the mean.
    pub mean_used_bytes: f64,
    /// Bytes that sequences held.
    pub mean_held_bytes: f64,
    /// Bytes promised to sequences and not taken.
    pub mean_promised_bytes: f64,
    /// Bytes kept for reuse and held by nobody.
    pub mean_cached_bytes: f64,
    /// Bytes held in blocks (or runs of dynamic allocation) without a token.
    pub mean_block_waste_bytes: f64,
    /// Bytes held in contiguous slots without a token.
    pub mean_slot_waste_bytes: f64,
    /// `mean_used_bytes` by what was held or promised.
    pub utilization: f64,
    /// Prompt tokens of the requests that were admitted, each once.
    pub prompt_tokens: u64,
    /// How many of them were found in the cache.
    pub prefix_hit_tokens: u64,
    /// `prefix_hit_tokens` by `prompt_tokens`.
    pub hit_rate: f64,
    /// What a cache that forgets nothing hits of the same requests.
    pub ceiling_hit_rate: f64,
    /// Tokens computed: prompts without what was found, outputs, and what was computed again.
    pub computed_tokens: u64,
    /// Tokens generated.
    pub output_tokens: u64,
    /// Tokens generated in a second.
    pub output_tokens_per_s: f64,
    /// Requests completed in a second.
    pub requests_per_s: f64,
    /// Requests that kept `[goals]`; `None` without.
    pub good_requests: Option<u64>,
    /// `good_requests` in a second.
    pub goodput_per_s: Option<f64>,
    /// Blocks that were kept for reuse and given to another sequence.
    pub evictions: u64,
    /// Bytes copied within the pool.
    pub copied_bytes: u64,
    /// Dynamic allocation: tries that found no run that was long enough.
    pub alloc_failures: u64,
    /// Of these, tries when as much was free, in pieces.
    pub alloc_failures_with_room: u64,
    /// The most bytes that were free, in pieces, when such a try failed, and the largest of the
    /// pieces then.
    pub worst_free_bytes: u64,
    /// See `worst_free_bytes`.
    pub worst_largest_run: u64,
    /// The most bytes that were free when such a try failed and no piece had 10⁹ bytes; 0 for a
    /// pool that has fewer.
    #[serde(default)]
    pub free_without_1gb_run: u64,
    /// From a request's arrival to its first admission, in milliseconds.
    pub queue_ms: Summary,
    /// From its arrival to its first token.
    pub first_token_ms: Summary,
    /// From one token to the next, in the mean of a request.
    pub token_ms: Summary,
    /// From its arrival to its end.
    pub latency_ms: Summary,
    /// Times of steps.
    pub step_ms: Summary,
    /// The pool over time.
    pub series: Vec<Point>,
    /// The pool at its fullest moment.
    pub picture: Option<Picture>,
    /// What is not as it must be; empty in a good run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}
