//! Which keys of `[workload]` go together.

use super::super::complaint::short;
use super::*;

/// The most requests of a job: the list of their lengths is held in memory.
const MAX_REQUESTS: u32 = 10_000_000;

/// The most shared prefixes: the list of their lengths is held in memory.
pub(super) const MAX_SHARED_PREFIXES: u32 = 1_000_000;

/// The largest factor on the times of a trace, and the most arrivals in a second.
const MAX_RATE: f64 = 1e6;

/// The fewest arrivals in a second: one in eleven days.
const MIN_REQUESTS_PER_S: f64 = 1e-6;

/// The most outputs that are checked: each holds a row of numbers of its own.
pub(super) const MAX_CHECK_SAMPLES: u32 = 1_000_000;

/// The keys that belong to some kinds only.
pub(super) const OF_KINDS: &[(&str, &[WorkloadKind])] = &[
    ("path", FILES),
    ("length_scale", TRACES),
    ("skip_damaged_lines", FILES),
    ("tokenizer", OPENAI),
    ("prompt_tokens", GENERATOR),
    ("output_tokens", &[WorkloadKind::Generator, WorkloadKind::OpenaiJsonl]),
    ("shared_prefix_tokens", GENERATOR),
    ("num_shared_prefixes", GENERATOR),
    ("answers", GENERATOR),
    ("turns", GENERATOR),
    ("max_open_conversations", GENERATOR),
    ("think_ms", GENERATOR),
    ("tool_calls", GENERATOR),
    ("tool_tokens", GENERATOR),
    ("tool_ms", GENERATOR),
    ("columns", &[WorkloadKind::LengthsCsv]),
    ("hash_block_tokens", &[WorkloadKind::MooncakeJsonl]),
];
pub(super) const GENERATOR: &[WorkloadKind] = &[WorkloadKind::Generator];
const TRACES: &[WorkloadKind] =
    &[WorkloadKind::AzureCsv, WorkloadKind::MooncakeJsonl, WorkloadKind::LengthsCsv];
const OPENAI: &[WorkloadKind] = &[WorkloadKind::OpenaiJsonl];
pub(super) const FILES: &[WorkloadKind] = &[
    WorkloadKind::AzureCsv,
    WorkloadKind::MooncakeJsonl,
    WorkloadKind::LengthsCsv,
    WorkloadKind::OpenaiJsonl,
];

impl WorkloadConfig {
    /// Refuses keys that are missing, out of range, of another kind, or that mean nothing beside
    /// the others. `given` says whether the file has a key: even a default is refused where it
    /// means nothing.
    pub(in crate::config) fn check(&self, given: &dyn Fn(&str) -> bool) -> Result<(), Complaint> {
        self.check_kind(given)?;
        self.check_sharing()?;
        self.check_arrivals(given)?;
        self.check_compute(given)?;
        self.check_columns()?;
        self.check_lengths()?;
        if let Some(requests) = self.requests.filter(|n| !(1..=MAX_REQUESTS).contains(n)) {
            return Err(Complaint::new("workload.requests", format!("{requests} is out of range")));
        }
        if !(self.length_scale > 0.0 && self.length_scale <= 1.0) {
            let problem = format!("{} is out of range", short(self.length_scale));
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
        let others = [
            ("shared_prefix_tokens", self.shared_prefix_tokens.is_some()),
            ("turns", self.turns.is_some()),
            ("tool_calls", self.tool_calls.is_some()),
        ];
        if let (Some(_), Some((other, _))) = (self.answers, others.iter().find(|(_, given)| *given))
        {
            return Err(Complaint::with_help(
                "workload.answers",
                format!("cannot stand beside workload.{other}: its prompts stand alone"),
                "remove one of them",
            ));
        }
        let of_job = self.check_samples;
        if of_job > MAX_CHECK_SAMPLES {
            let problem = format!("{of_job} is out of range");
            return Err(Complaint::new("workload.check_samples", problem));
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
        for (key, rate, least) in [
            ("workload.time_scale", Some(self.time_scale), f64::MIN_POSITIVE),
            ("workload.requests_per_s", self.requests_per_s, MIN_REQUESTS_PER_S),
        ] {
            if let Some(rate) = rate.filter(|rate| !(least..=MAX_RATE).contains(rate)) {
                return Err(Complaint::new(key, format!("{} is out of range", short(rate))));
            }
        }
        let has_no_times = [WorkloadKind::Generator, WorkloadKind::OpenaiJsonl];
        if self.arrivals == Arrivals::Trace && has_no_times.contains(&self.kind) {
            return Err(Complaint::with_help(
                "workload.arrivals",
                format!("there is no trace with workload.kind = {:?}", self.kind.name()),
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
        if self.compute == Compute::Attention && self.answers.is_some() {
            return Err(Complaint::with_help(
                "workload.answers",
                "forks sequences, which workload.compute = \"attention\" does not",
                "remove it, or give workload.compute = \"none\" and [cost]",
            ));
        }
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

    /// Refuses lengths and counts that may come out as 0. Times may, and how often a tool is
    /// called.
    fn check_lengths(&self) -> Result<(), Complaint> {
        for (key, drawn) in [
            ("prompt_tokens", self.prompt_tokens),
            ("output_tokens", self.output_tokens),
            ("shared_prefix_tokens", self.shared_prefix_tokens),
            ("answers", self.answers),
            ("turns", self.turns),
            ("tool_tokens", self.tool_tokens),
        ] {
            if let Some((field, 0)) = drawn.map(|drawn| drawn.least()) {
                let key = format!("workload.{key}.{field}");
                return Err(Complaint::new(key, "is 0, and must be at least 1"));
            }
        }
        Ok(())
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
