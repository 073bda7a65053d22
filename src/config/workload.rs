//! `[workload]`: the requests of a job, and whether their attention is computed.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::complaint::Complaint;
use super::length::LengthDistribution;

/// `[workload]`. A key that belongs to another kind is refused.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkloadConfig {
    /// Where the requests come from.
    pub kind: WorkloadKind,
    /// Whether K, V and attention are computed, or the manager is replayed alone.
    #[serde(default, skip_serializing_if = "is_default")]
    pub compute: Compute,
    /// Seeds everything that is drawn: lengths, arrivals, tokens, keys and values.
    #[serde(default)]
    pub seed: u64,
    /// How many requests are generated, each turn of a conversation being one; of a trace, how
    /// many are taken from its start (default: all).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests: Option<u32>,
    /// Traces only: the file. A relative path starts from the current directory, since a trace
    /// usually does not lie beside the configuration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// `generator` only: how many tokens of its own each request brings. They are its prompt,
    /// behind a shared prefix and the earlier turns of its conversation where there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_tokens: Option<LengthDistribution>,
    /// How long outputs are: of a `generator`, and of the requests of an `openai-jsonl`, where each
    /// is cut off at the request's `max_tokens`. Without it an answer of these counts as long as
    /// that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_tokens: Option<LengthDistribution>,
    /// `generator` only: how long the shared prefixes (system prompts) are. Each request's prompt
    /// begins with one of them; all turns of a conversation with the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_prefix_tokens: Option<LengthDistribution>,
    /// How many shared prefixes there are; 1 when the file does not say. Only with
    /// `shared_prefix_tokens`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_shared_prefixes: Option<u32>,
    /// `generator` only: how many turns a conversation has. The prompt of a turn is the whole
    /// conversation so far, prompts and outputs, and new tokens (`prompt_tokens`); it arrives when
    /// the turn before it is done. Without it, every request stands alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turns: Option<LengthDistribution>,
    /// `generator` with `compute = "none"` only: how many answers each prompt has. All but the
    /// first are forks of its sequence; each is a request. Without it, one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answers: Option<LengthDistribution>,
    /// How many conversations are open at once: the next one opens when one ends. Without it all
    /// open when they arrive. Only with `turns` or `tool_calls`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_open_conversations: Option<u32>,
    /// The time from the end of a turn to the next one, in milliseconds of the simulated clock.
    /// Only with `turns`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub think_ms: Option<LengthDistribution>,
    /// `generator` only: how many calls of tools an agent makes in each turn. After each call the
    /// tool's answer (`tool_tokens`) joins the context, and the model goes on: a request of its
    /// own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<LengthDistribution>,
    /// How long the answers of tools are. With `tool_calls`, and only then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_tokens: Option<LengthDistribution>,
    /// How long a tool takes, in milliseconds of the simulated clock. Only with `tool_calls`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_ms: Option<LengthDistribution>,
    /// `openai-jsonl` only: the `tokenizer.json` that a model comes with. A relative path starts
    /// from the current directory. Prompts that are lists of tokens need none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<PathBuf>,
    /// Traces only: every length of the trace is multiplied by this and rounded up to a whole
    /// token. Above 0, at most 1.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub length_scale: f64,
    /// When requests arrive on the simulated clock.
    #[serde(default, skip_serializing_if = "is_default")]
    pub arrivals: Arrivals,
    /// `arrivals = "trace"` only: the times of the trace are multiplied by this. 0.5 sends the
    /// same requests twice as fast.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub time_scale: f64,
    /// `arrivals = "poisson"` and `"bursts"`: how many arrive in a second, in the mean. With
    /// conversations, how many of these.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests_per_s: Option<f64>,
    /// `arrivals = "bursts"`: how many arrive at the same moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst_requests: Option<u32>,
    /// `lengths-csv` only: what its columns are called.
    #[serde(default, skip_serializing_if = "is_default")]
    pub columns: ColumnsConfig,
    /// `mooncake-jsonl` only: for how many tokens each entry of `hash_ids` stands; 512 when the
    /// file does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hash_block_tokens: Option<u32>,
    /// Traces only: a line that cannot be used is left out and counted, and does not end the job.
    #[serde(default, skip_serializing_if = "is_default")]
    pub skip_damaged_lines: bool,
    /// How many attention outputs are checked against a computation in f64. Only with
    /// `compute = "attention"`.
    #[serde(default = "default_check_samples", skip_serializing_if = "is_default_samples")]
    pub check_samples: u32,
}

/// Factors that change nothing.
fn one() -> f64 {
    1.0
}

/// Whether a factor changes nothing; then the key is not written.
fn is_one(factor: &f64) -> bool {
    *factor == one()
}

/// Whether a value is its type's default; then the key is not written.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Enough to meet every layer and most sequences of a small run.
fn default_check_samples() -> u32 {
    64
}

fn is_default_samples(samples: &u32) -> bool {
    *samples == default_check_samples()
}

/// Tokens of one entry of Mooncake's `hash_ids`.
const HASH_BLOCK_TOKENS: u32 = 512;

/// Where the requests of a workload come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WorkloadKind {
    /// Drawn from the length distributions.
    Generator,
    /// Read from a trace in the format of the Azure LLM inference traces.
    AzureCsv,
    /// Read from a trace in Mooncake's format: a JSON object a line, with the hashes of its
    /// prompt's blocks.
    MooncakeJsonl,
    /// Read from a table of lengths, with or without arrivals.
    LengthsCsv,
    /// Read from requests in OpenAI's form, a JSON object a line: prompts and chats, alone or as
    /// the `body` of a batch. The tokens of texts are counted with `tokenizer`.
    OpenaiJsonl,
}

/// What a job does with a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Compute {
    /// Appends and attends on the device, and checks the answers. There is no clock: all
    /// requests are there from the start.
    #[default]
    Attention,
    /// Replays the manager alone. The pool is planned and accounted and not allocated; time is
    /// simulated from `[cost]`.
    None,
}

/// When the requests of a workload arrive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arrivals {
    /// All at the start.
    #[default]
    AtOnce,
    /// When the trace says.
    Trace,
    /// Independently of each other, `requests_per_s` in the mean.
    Poisson,
    /// `burst_requests` at the same moment, at a steady pace.
    Bursts,
}

/// `[workload.columns]`: what the columns of a CSV are called. What is left out is looked for
/// under the names that public traces have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ColumnsConfig {
    /// Tokens of the prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt: Option<String>,
    /// Tokens of the output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output: Option<String>,
    /// When the request arrives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arrival: Option<String>,
    /// What the arrivals are counted in; with `arrival`, and only then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arrival_unit: Option<ArrivalUnit>,
}

/// What a column of arrivals is counted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ArrivalUnit {
    /// Nanoseconds.
    #[serde(rename = "ns")]
    Nanoseconds,
    /// Microseconds.
    #[serde(rename = "us")]
    Microseconds,
    /// Milliseconds.
    #[serde(rename = "ms")]
    Milliseconds,
    /// Seconds.
    #[serde(rename = "s")]
    Seconds,
    /// A date and time, `2023-11-16 18:15:46.6805900`.
    #[serde(rename = "datetime")]
    DateTime,
}

impl WorkloadConfig {
    /// A workload of a kind with every other key at its default.
    #[must_use]
    pub fn new(kind: WorkloadKind) -> Self {
        Self {
            kind,
            compute: Compute::default(),
            seed: 0,
            requests: None,
            path: None,
            prompt_tokens: None,
            output_tokens: None,
            shared_prefix_tokens: None,
            num_shared_prefixes: None,
            answers: None,
            turns: None,
            max_open_conversations: None,
            think_ms: None,
            tool_calls: None,
            tool_tokens: None,
            tool_ms: None,
            tokenizer: None,
            length_scale: one(),
            arrivals: Arrivals::default(),
            time_scale: one(),
            requests_per_s: None,
            burst_requests: None,
            columns: ColumnsConfig::default(),
            hash_block_tokens: None,
            skip_damaged_lines: false,
            check_samples: default_check_samples(),
        }
    }

    /// Tokens of one entry of `hash_ids`, scaled as lengths are; a whole number by `check`.
    #[must_use]
    pub fn scaled_hash_block(&self) -> u32 {
        let tokens = f64::from(self.hash_block_tokens.unwrap_or(HASH_BLOCK_TOKENS));
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "not negative, and at most what it was"
        )]
        let scaled = (tokens * self.length_scale) as u32;
        scaled.max(1)
    }
}

mod check;
#[cfg(test)]
mod tests;
