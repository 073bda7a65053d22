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
    /// `generator` only: how long outputs are.
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

/// The most requests of a job: the list of their lengths is held in memory.
const MAX_REQUESTS: u32 = 10_000_000;

/// The most shared prefixes: the list of their lengths is held in memory.
const MAX_SHARED_PREFIXES: u32 = 1_000_000;

/// Tokens of one entry of Mooncake's `hash_ids`.
const HASH_BLOCK_TOKENS: u32 = 512;

/// The largest factor on the times of a trace, and the most arrivals in a second.
const MAX_RATE: f64 = 1e6;

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

/// The keys that belong to some kinds only.
const OF_KINDS: &[(&str, &[WorkloadKind])] = &[
    ("path", TRACES),
    ("length_scale", TRACES),
    ("skip_damaged_lines", TRACES),
    ("prompt_tokens", GENERATOR),
    ("output_tokens", GENERATOR),
    ("shared_prefix_tokens", GENERATOR),
    ("num_shared_prefixes", GENERATOR),
    ("turns", GENERATOR),
    ("max_open_conversations", GENERATOR),
    ("think_ms", GENERATOR),
    ("tool_calls", GENERATOR),
    ("tool_tokens", GENERATOR),
    ("tool_ms", GENERATOR),
    ("columns", &[WorkloadKind::LengthsCsv]),
    ("hash_block_tokens", &[WorkloadKind::MooncakeJsonl]),
];
const GENERATOR: &[WorkloadKind] = &[WorkloadKind::Generator];
const TRACES: &[WorkloadKind] =
    &[WorkloadKind::AzureCsv, WorkloadKind::MooncakeJsonl, WorkloadKind::LengthsCsv];

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
            turns: None,
            max_open_conversations: None,
            think_ms: None,
            tool_calls: None,
            tool_tokens: None,
            tool_ms: None,
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

    /// Refuses keys that are missing, out of range, of another kind, or that mean nothing beside
    /// the others. `given` says whether the file has a key: even a default is refused where it
    /// means nothing.
    pub(super) fn check(&self, given: &dyn Fn(&str) -> bool) -> Result<(), Complaint> {
        self.check_kind(given)?;
        self.check_sharing()?;
        self.check_arrivals(given)?;
        self.check_compute(given)?;
        self.check_columns()?;
        if let Some(requests) = self.requests.filter(|n| !(1..=MAX_REQUESTS).contains(n)) {
            return Err(Complaint::new("workload.requests", format!("{requests} is out of range")));
        }
        if !(self.length_scale > 0.0 && self.length_scale <= 1.0) {
            let problem = format!("{} is out of range", self.length_scale);
            return Err(Complaint::new("workload.length_scale", problem));
        }
        self.check_hash_block()
    }

    /// Refuses keys that the kind needs and that are missing, and those of another kind.
    fn check_kind(&self, given: &dyn Fn(&str) -> bool) -> Result<(), Complaint> {
        let kind = self.kind.name();
        for (key, kinds) in OF_KINDS {
            let key = format!("workload.{key}");
            if given(&key) && !kinds.contains(&self.kind) {
                return Err(Complaint::with_help(
                    key,
                    format!("does not belong to workload.kind = {kind:?}"),
                    "remove it, or change workload.kind",
                ));
            }
        }
        let needed: &[_] = if self.kind == WorkloadKind::Generator {
            &[
                ("workload.requests", self.requests.is_some()),
                ("workload.prompt_tokens", self.prompt_tokens.is_some()),
                ("workload.output_tokens", self.output_tokens.is_some()),
            ]
        } else {
            &[("workload.path", self.path.is_some())]
        };
        if let Some((key, _)) = needed.iter().find(|(_, given)| !given) {
            let problem = format!("is missing; workload.kind = {kind:?} needs it");
            return Err(Complaint::new(*key, problem));
        }
        Ok(())
    }

    /// Refuses counts of shared prefixes and conversations that are out of range, or that count
    /// what the workload does not have.
    fn check_sharing(&self) -> Result<(), Complaint> {
        let conversations = self.turns.is_some() || self.tool_calls.is_some();
        for (key, given, of, of_given) in [
            (
                "num_shared_prefixes",
                self.num_shared_prefixes.is_some(),
                "shared_prefix_tokens",
                self.shared_prefix_tokens.is_some(),
            ),
            (
                "max_open_conversations",
                self.max_open_conversations.is_some(),
                "turns",
                conversations,
            ),
            ("think_ms", self.think_ms.is_some(), "turns", self.turns.is_some()),
            ("tool_tokens", self.tool_tokens.is_some(), "tool_calls", self.tool_calls.is_some()),
            ("tool_ms", self.tool_ms.is_some(), "tool_calls", self.tool_calls.is_some()),
            ("tool_calls", self.tool_calls.is_some(), "tool_tokens", self.tool_tokens.is_some()),
        ] {
            if given && !of_given {
                return Err(Complaint::with_help(
                    format!("workload.{key}"),
                    format!("means nothing without workload.{of}"),
                    format!("remove it, or give workload.{of}"),
                ));
            }
        }
        for (key, count, most) in [
            ("workload.num_shared_prefixes", self.num_shared_prefixes, MAX_SHARED_PREFIXES),
            ("workload.max_open_conversations", self.max_open_conversations, u32::MAX),
            ("workload.burst_requests", self.burst_requests, MAX_REQUESTS),
            ("workload.hash_block_tokens", self.hash_block_tokens, 1 << 20),
        ] {
            if let Some(count) = count.filter(|count| !(1..=most).contains(count)) {
                return Err(Complaint::new(key, format!("{count} is out of range")));
            }
        }
        Ok(())
    }

    /// Refuses settings of another form of arrivals.
    fn check_arrivals(&self, given: &dyn Fn(&str) -> bool) -> Result<(), Complaint> {
        let keys: &[&str] = match self.arrivals {
            Arrivals::AtOnce => &[],
            Arrivals::Trace => &["time_scale"],
            Arrivals::Poisson => &["requests_per_s"],
            Arrivals::Bursts => &["requests_per_s", "burst_requests"],
        };
        let name = self.arrivals.name();
        for own in ["time_scale", "requests_per_s", "burst_requests"] {
            let key = format!("workload.{own}");
            let belongs = keys.contains(&own);
            if given(&key) && !belongs {
                return Err(Complaint::with_help(
                    key,
                    format!("does not belong to workload.arrivals = {name:?}"),
                    "remove it, or change workload.arrivals",
                ));
            }
            if belongs && own != "time_scale" && !given(&key) {
                let problem = format!("is missing; workload.arrivals = {name:?} needs it");
                return Err(Complaint::new(key, problem));
            }
        }
        for (key, rate) in [
            ("workload.time_scale", Some(self.time_scale)),
            ("workload.requests_per_s", self.requests_per_s),
        ] {
            if let Some(rate) = rate.filter(|rate| !(*rate > 0.0 && *rate <= MAX_RATE)) {
                return Err(Complaint::new(key, format!("{rate} is out of range")));
            }
        }
        if self.arrivals == Arrivals::Trace && self.kind == WorkloadKind::Generator {
            return Err(Complaint::with_help(
                "workload.arrivals",
                "there is no trace with workload.kind = \"generator\"",
                "use \"at-once\", \"poisson\" or \"bursts\"",
            ));
        }
        Ok(())
    }

    /// Refuses what needs a clock where there is none, and checks where nothing is computed.
    fn check_compute(&self, given: &dyn Fn(&str) -> bool) -> Result<(), Complaint> {
        let timed = [
            ("workload.arrivals", self.arrivals != Arrivals::AtOnce),
            ("workload.think_ms", self.think_ms.is_some()),
            ("workload.tool_ms", self.tool_ms.is_some()),
        ];
        match self.compute {
            Compute::Attention => match timed.iter().find(|(_, given)| *given) {
                Some((key, _)) => Err(Complaint::with_help(
                    *key,
                    "needs a clock, and workload.compute = \"attention\" has none",
                    "remove it, or give workload.compute = \"none\" and [cost]",
                )),
                None => Ok(()),
            },
            Compute::None if given("workload.check_samples") => Err(Complaint::with_help(
                "workload.check_samples",
                "workload.compute = \"none\" computes nothing that could be checked",
                "remove it, or remove workload.compute",
            )),
            Compute::None => Ok(()),
        }
    }

    fn check_columns(&self) -> Result<(), Complaint> {
        let columns = &self.columns;
        for (key, name) in [
            ("prompt", &columns.prompt),
            ("output", &columns.output),
            ("arrival", &columns.arrival),
        ] {
            if name.as_ref().is_some_and(|name| name.trim().is_empty()) {
                return Err(Complaint::new(format!("workload.columns.{key}"), "is empty"));
            }
        }
        if columns.arrival.is_some() != columns.arrival_unit.is_some() {
            let [missing, given] = match columns.arrival {
                Some(_) => ["arrival_unit", "arrival"],
                None => ["arrival", "arrival_unit"],
            };
            let problem = format!("is missing; workload.columns.{given} needs it");
            return Err(Complaint::new(format!("workload.columns.{missing}"), problem));
        }
        Ok(())
    }

    /// Blocks of hashed tokens must stay whole when lengths are scaled.
    fn check_hash_block(&self) -> Result<(), Complaint> {
        if self.kind != WorkloadKind::MooncakeJsonl {
            return Ok(());
        }
        let tokens = f64::from(self.hash_block_tokens.unwrap_or(HASH_BLOCK_TOKENS));
        let scaled = tokens * self.length_scale;
        if scaled >= 1.0 && scaled.fract() == 0.0 {
            return Ok(());
        }
        Err(Complaint::with_help(
            "workload.length_scale",
            format!("would make {scaled} tokens of the {tokens} of one hash"),
            "choose one that gives a whole number, such as 0.25",
        ))
    }
}

#[cfg(test)]
mod tests;
