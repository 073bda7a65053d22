//! `[workload]`: what `kvpool run` drives through the cache.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::complaint::Complaint;

/// The accepted forms of a length distribution.
pub(super) const DISTRIBUTIONS: &str = "expected { dist = \"fixed\", value = 128 }, { dist = \"uniform\", min = 16, max = 256 } or \
     { dist = \"lognormal\", median = 128, sigma = 0.8, min = 8, max = 512 }";

/// `[workload]`. A key that belongs to the other kind is refused.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkloadConfig {
    /// Where the requests come from.
    pub kind: WorkloadKind,
    /// Seeds everything that is drawn: lengths, tokens, keys and values.
    #[serde(default)]
    pub seed: u64,
    /// How many requests are generated, each turn of a conversation being one; of a trace, how
    /// many are taken from its start (default: all).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests: Option<u32>,
    /// `azure-csv` only: the trace. A relative path starts from the current directory, since a
    /// trace usually does not lie beside the configuration.
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
    /// open at the start. Only with `turns`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_open_conversations: Option<u32>,
    /// `azure-csv` only: every length of the trace is multiplied by this and rounded up to a whole
    /// token. Above 0, at most 1.
    #[serde(default = "unscaled", skip_serializing_if = "is_unscaled")]
    pub length_scale: f64,
    /// How many attention outputs are checked against a computation in f64.
    #[serde(default = "default_check_samples")]
    pub check_samples: u32,
}

/// Lengths as the trace has them.
fn unscaled() -> f64 {
    1.0
}

/// Whether lengths stay as they are; then the key is not written.
fn is_unscaled(scale: &f64) -> bool {
    *scale == unscaled()
}

/// Enough to meet every layer and most sequences of a small run.
fn default_check_samples() -> u32 {
    64
}

/// The most requests of a job: the list of their lengths is held in memory.
const MAX_REQUESTS: u32 = 10_000_000;

/// The most shared prefixes: the list of their lengths is held in memory.
const MAX_SHARED_PREFIXES: u32 = 1_000_000;

/// Where the requests of a workload come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WorkloadKind {
    /// Drawn from the length distributions.
    Generator,
    /// Read from a trace in the format of the Azure LLM inference traces.
    AzureCsv,
}

/// How a length in tokens, or a number of turns, is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "dist", rename_all = "lowercase", try_from = "RawLength")]
pub enum LengthDistribution {
    /// Always the same.
    Fixed {
        /// The length.
        value: u32,
    },
    /// Each length of a range with the same probability.
    Uniform {
        /// The shortest.
        min: u32,
        /// The longest; it can occur.
        max: u32,
    },
    /// The exponential of a normal distribution, cut off at both ends.
    Lognormal {
        /// Half of the lengths are shorter.
        median: f64,
        /// The standard deviation of the length's logarithm.
        sigma: f64,
        /// Shorter lengths become this one.
        min: u32,
        /// Longer lengths become this one.
        max: u32,
    },
}

/// A distribution as it is written. serde would read a tagged enum through a buffer, and forget
/// which key of it was wrong.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawLength {
    dist: Dist,
    value: Option<u32>,
    min: Option<u32>,
    max: Option<u32>,
    median: Option<f64>,
    sigma: Option<f64>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Dist {
    Fixed,
    Uniform,
    Lognormal,
}

/// A complaint about a field of a distribution, as the text of a serde error.
struct BadLength(String);

impl std::fmt::Display for BadLength {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl BadLength {
    fn new(key: &str, problem: impl Into<String>) -> Self {
        Self(Complaint::with_help(key, problem, DISTRIBUTIONS).into_serde_text())
    }
}

impl TryFrom<RawLength> for LengthDistribution {
    type Error = BadLength;

    fn try_from(raw: RawLength) -> Result<Self, BadLength> {
        let (name, fields): (_, &[&str]) = match raw.dist {
            Dist::Fixed => ("fixed", &["value"]),
            Dist::Uniform => ("uniform", &["min", "max"]),
            Dist::Lognormal => ("lognormal", &["median", "sigma", "min", "max"]),
        };
        for (key, given) in [
            ("value", raw.value.is_some()),
            ("min", raw.min.is_some()),
            ("max", raw.max.is_some()),
            ("median", raw.median.is_some()),
            ("sigma", raw.sigma.is_some()),
        ] {
            if given && !fields.contains(&key) {
                return Err(BadLength::new(key, format!("does not belong to dist = {name:?}")));
            }
        }
        let missing =
            |key| move || BadLength::new(key, format!("is missing; dist = {name:?} needs it"));
        let distribution = match raw.dist {
            Dist::Fixed => Self::Fixed { value: raw.value.ok_or_else(missing("value"))? },
            Dist::Uniform => Self::Uniform {
                min: raw.min.ok_or_else(missing("min"))?,
                max: raw.max.ok_or_else(missing("max"))?,
            },
            Dist::Lognormal => Self::Lognormal {
                median: raw.median.ok_or_else(missing("median"))?,
                sigma: raw.sigma.ok_or_else(missing("sigma"))?,
                min: raw.min.ok_or_else(missing("min"))?,
                max: raw.max.ok_or_else(missing("max"))?,
            },
        };
        distribution.in_range()
    }
}

impl LengthDistribution {
    /// The longest length that can be drawn.
    #[must_use]
    pub fn longest(&self) -> u32 {
        match *self {
            Self::Fixed { value } => value,
            Self::Uniform { max, .. } | Self::Lognormal { max, .. } => max,
        }
    }

    fn in_range(self) -> Result<Self, BadLength> {
        match self {
            Self::Fixed { value: 0 } => return Err(BadLength::new("value", "is 0")),
            Self::Fixed { .. } => {}
            Self::Uniform { min, max } | Self::Lognormal { min, max, .. } => {
                if min == 0 {
                    return Err(BadLength::new("min", "is 0"));
                }
                if min > max {
                    return Err(BadLength::new("min", format!("is {min}, more than max = {max}")));
                }
            }
        }
        if let Self::Lognormal { median, sigma, .. } = self {
            if !(median.is_finite() && median > 0.0) {
                return Err(BadLength::new(
                    "median",
                    format!("{median} is not a finite number above 0"),
                ));
            }
            if !(sigma.is_finite() && sigma >= 0.0) {
                let problem = format!("{sigma} is not a finite number of 0 or more");
                return Err(BadLength::new("sigma", problem));
            }
        }
        Ok(self)
    }
}

impl WorkloadConfig {
    /// Refuses keys that are missing, out of range, or of the other kind. `scale_given` says
    /// whether the file has `length_scale`: even 1.0 is refused where it means nothing.
    pub(super) fn check(&self, scale_given: bool) -> Result<(), Complaint> {
        self.check_kind(scale_given)?;
        self.check_sharing()?;
        if let Some(requests) = self.requests.filter(|n| !(1..=MAX_REQUESTS).contains(n)) {
            return Err(Complaint::new("workload.requests", format!("{requests} is out of range")));
        }
        if !(self.length_scale > 0.0 && self.length_scale <= 1.0) {
            let problem = format!("{} is out of range", self.length_scale);
            return Err(Complaint::new("workload.length_scale", problem));
        }
        Ok(())
    }

    /// Refuses keys that the kind needs and that are missing, and those of the other kind.
    fn check_kind(&self, scale_given: bool) -> Result<(), Complaint> {
        let (kind, needed, foreign) = match self.kind {
            WorkloadKind::Generator => (
                "generator",
                vec![
                    ("workload.requests", self.requests.is_some()),
                    ("workload.prompt_tokens", self.prompt_tokens.is_some()),
                    ("workload.output_tokens", self.output_tokens.is_some()),
                ],
                vec![
                    ("workload.path", self.path.is_some()),
                    ("workload.length_scale", scale_given),
                ],
            ),
            WorkloadKind::AzureCsv => (
                "azure-csv",
                vec![("workload.path", self.path.is_some())],
                vec![
                    ("workload.prompt_tokens", self.prompt_tokens.is_some()),
                    ("workload.output_tokens", self.output_tokens.is_some()),
                    ("workload.shared_prefix_tokens", self.shared_prefix_tokens.is_some()),
                    ("workload.num_shared_prefixes", self.num_shared_prefixes.is_some()),
                    ("workload.turns", self.turns.is_some()),
                    ("workload.max_open_conversations", self.max_open_conversations.is_some()),
                ],
            ),
        };
        if let Some((key, _)) = foreign.iter().find(|(_, given)| *given) {
            return Err(Complaint::with_help(
                *key,
                format!("does not belong to workload.kind = {kind:?}"),
                "remove it, or change workload.kind",
            ));
        }
        if let Some((key, _)) = needed.iter().find(|(_, given)| !given) {
            let problem = format!("is missing; workload.kind = {kind:?} needs it");
            return Err(Complaint::new(*key, problem));
        }
        Ok(())
    }

    /// Refuses counts of shared prefixes and conversations that are out of range, or that count
    /// what the workload does not have.
    fn check_sharing(&self) -> Result<(), Complaint> {
        for (key, count, most, of, of_given) in [
            (
                "workload.num_shared_prefixes",
                self.num_shared_prefixes,
                MAX_SHARED_PREFIXES,
                "workload.shared_prefix_tokens",
                self.shared_prefix_tokens.is_some(),
            ),
            (
                "workload.max_open_conversations",
                self.max_open_conversations,
                u32::MAX,
                "workload.turns",
                self.turns.is_some(),
            ),
        ] {
            let Some(count) = count else { continue };
            if !of_given {
                return Err(Complaint::with_help(
                    key,
                    format!("means nothing without {of}"),
                    format!("remove it, or give {of}"),
                ));
            }
            if !(1..=most).contains(&count) {
                return Err(Complaint::new(key, format!("{count} is out of range")));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generator() -> WorkloadConfig {
        WorkloadConfig {
            kind: WorkloadKind::Generator,
            seed: 0,
            requests: Some(8),
            path: None,
            prompt_tokens: Some(LengthDistribution::Fixed { value: 16 }),
            output_tokens: Some(LengthDistribution::Uniform { min: 1, max: 9 }),
            shared_prefix_tokens: None,
            num_shared_prefixes: None,
            turns: None,
            max_open_conversations: None,
            length_scale: 1.0,
            check_samples: 64,
        }
    }

    #[test]
    fn keys_of_the_other_kind_are_refused() {
        assert_eq!(generator().check(false), Ok(()));
        assert_eq!(generator().check(true).unwrap_err().key, "workload.length_scale");
        let with_path = WorkloadConfig { path: Some("a.csv".into()), ..generator() };
        assert_eq!(with_path.check(false).unwrap_err().key, "workload.path");
        let trace = WorkloadConfig { kind: WorkloadKind::AzureCsv, ..with_path };
        assert_eq!(trace.check(false).unwrap_err().key, "workload.prompt_tokens");
        let trace = WorkloadConfig { prompt_tokens: None, output_tokens: None, ..trace };
        assert_eq!(trace.check(true), Ok(()));
        for scale in [0.0, -0.5, 1.5, f64::NAN, f64::INFINITY] {
            let scaled = WorkloadConfig { length_scale: scale, ..trace.clone() };
            assert_eq!(scaled.check(true).unwrap_err().key, "workload.length_scale");
        }
    }

    #[test]
    fn what_a_kind_needs_is_named() {
        let none = WorkloadConfig { requests: None, ..generator() };
        assert_eq!(none.check(false).unwrap_err().key, "workload.requests");
        let none = WorkloadConfig { output_tokens: None, ..generator() };
        assert_eq!(none.check(false).unwrap_err().key, "workload.output_tokens");
        let zero = WorkloadConfig { requests: Some(0), ..generator() };
        assert_eq!(zero.check(false).unwrap_err().key, "workload.requests");
    }

    #[test]
    fn counts_belong_to_what_they_count() {
        let four = Some(LengthDistribution::Fixed { value: 4 });
        let prefixes = WorkloadConfig { num_shared_prefixes: Some(2), ..generator() };
        assert_eq!(prefixes.check(false).unwrap_err().key, "workload.num_shared_prefixes");
        let prefixes = WorkloadConfig { shared_prefix_tokens: four, ..prefixes };
        assert_eq!(prefixes.check(false), Ok(()));
        for count in [0, MAX_SHARED_PREFIXES + 1] {
            let wrong = WorkloadConfig { num_shared_prefixes: Some(count), ..prefixes.clone() };
            assert_eq!(wrong.check(false).unwrap_err().key, "workload.num_shared_prefixes");
        }
        let open = WorkloadConfig { max_open_conversations: Some(1), ..generator() };
        let complaint = open.check(false).unwrap_err();
        assert_eq!(complaint.key, "workload.max_open_conversations");
        assert!(complaint.help.ends_with("or give workload.turns"), "{}", complaint.help);
        let open = WorkloadConfig { turns: four, ..open };
        assert_eq!(open.check(false), Ok(()));
        let none = WorkloadConfig { max_open_conversations: Some(0), ..open.clone() };
        assert_eq!(none.check(false).unwrap_err().key, "workload.max_open_conversations");
        let trace = WorkloadConfig {
            kind: WorkloadKind::AzureCsv,
            path: Some("a.csv".into()),
            prompt_tokens: None,
            output_tokens: None,
            max_open_conversations: None,
            ..open
        };
        assert_eq!(trace.check(false).unwrap_err().key, "workload.turns");
    }

    #[test]
    fn distributions_are_read_and_checked() {
        let read = |text: &str| toml::from_str::<LengthDistribution>(text);
        assert_eq!(
            read("dist = 'lognormal'\nmedian = 9\nsigma = 0.5\nmin = 1\nmax = 20").unwrap(),
            LengthDistribution::Lognormal { median: 9.0, sigma: 0.5, min: 1, max: 20 }
        );
        for (text, key) in [
            ("dist = 'fixed'", "value"),
            ("dist = 'fixed'\nvalue = 0", "value"),
            ("dist = 'fixed'\nvalue = 1\nmin = 1", "min"),
            ("dist = 'uniform'\nmin = 1", "max"),
            ("dist = 'uniform'\nmin = 0\nmax = 4", "min"),
            ("dist = 'uniform'\nmin = 5\nmax = 4", "min"),
            ("dist = 'lognormal'\nmedian = nan\nsigma = 0.5\nmin = 1\nmax = 20", "median"),
            ("dist = 'lognormal'\nmedian = 9\nsigma = -1\nmin = 1\nmax = 20", "sigma"),
            ("dist = 'lognormal'\nmedian = 9\nsigma = inf\nmin = 1\nmax = 20", "sigma"),
        ] {
            let error = read(text).unwrap_err();
            let complaint = Complaint::from_serde_text("", error.message()).unwrap();
            assert_eq!(complaint.key, key, "{text}");
        }
        let longest = LengthDistribution::Uniform { min: 1, max: 9 }.longest();
        assert_eq!(longest, 9);
    }
}
