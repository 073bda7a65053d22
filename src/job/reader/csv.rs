//! Tables of lengths: Azure's traces, and any other with a line of names.

use std::io::BufRead;

use super::lines::{Fault, Lines};
use super::{Row, shortened, time, tokens};
use crate::config::{ArrivalUnit, ColumnsConfig, WorkloadKind};

/// The longest line, its end included. Real ones have about 40 bytes.
pub(super) const MAX_LINE_BYTES: u64 = 4096;

/// The first line of Azure's traces.
const AZURE: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";

/// The names of public traces: Azure and apex_plus, vidur, and plain ones.
const PROMPT: &[&str] = &["ContextTokens", "num_prefill_tokens", "prompt_tokens", "input_length"];
const OUTPUT: &[&str] = &["GeneratedTokens", "num_decode_tokens", "output_tokens", "output_length"];
const ARRIVAL: &[(&str, ArrivalUnit)] = &[
    ("StartTimeOffset_ns", ArrivalUnit::Nanoseconds),
    ("arrived_at", ArrivalUnit::Seconds),
    ("TIMESTAMP", ArrivalUnit::DateTime),
    ("timestamp_ms", ArrivalUnit::Milliseconds),
];

/// Which column holds what.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Columns {
    /// All names, for errors about lines of another width.
    header: String,
    count: usize,
    prompt: usize,
    output: usize,
    arrival: Option<(usize, ArrivalUnit)>,
}

impl Columns {
    /// Reads the first line.
    pub(super) fn read<R: BufRead>(
        lines: &mut Lines<R>,
        kind: WorkloadKind,
        named: &ColumnsConfig,
        timed: bool,
    ) -> Result<Self, Fault> {
        let header = lines.next()?;
        let columns = if kind == WorkloadKind::AzureCsv {
            Self::azure(header)
        } else {
            Self::find(header, named, timed)
        };
        columns.map_err(Fault::Fatal)
    }

    fn azure(header: Option<&str>) -> Result<Self, String> {
        if header != Some(AZURE) {
            return Err(format!("expected the header {AZURE:?}, found {}", found(header)));
        }
        let arrival = Some((0, ArrivalUnit::DateTime));
        Ok(Self { header: AZURE.to_owned(), count: 3, prompt: 1, output: 2, arrival })
    }

    fn find(header: Option<&str>, named: &ColumnsConfig, timed: bool) -> Result<Self, String> {
        let names: Vec<&str> = header.unwrap_or_default().split(',').map(str::trim).collect();
        let place = |name: &str| names.iter().position(|own| *own == name);
        let find = |key: &str, given: &Option<String>, known: &[&str]| match given {
            Some(name) => place(name).ok_or_else(|| {
                format!(
                    "expected a header with the column {name:?} (workload.columns.{key}), found {}",
                    found(header)
                )
            }),
            None => known.iter().find_map(|name| place(name)).ok_or_else(|| {
                format!(
                    "expected a header with one of {}, found {}; say which column it is with \
                     workload.columns.{key}",
                    known.join(", "),
                    found(header)
                )
            }),
        };
        let prompt = find("prompt", &named.prompt, PROMPT)?;
        let output = find("output", &named.output, OUTPUT)?;
        if prompt == output {
            return Err(format!(
                "workload.columns.prompt and workload.columns.output are both {:?}; expected two columns",
                names[prompt]
            ));
        }
        let arrival = match (&named.arrival, named.arrival_unit) {
            (Some(name), Some(unit)) => Some((find("arrival", &Some(name.clone()), &[])?, unit)),
            _ => ARRIVAL.iter().find_map(|(name, unit)| Some((place(name)?, *unit))),
        };
        if timed && arrival.is_none() {
            return Err(format!(
                "has no column of arrivals, found {}; say which it is with [workload.columns], or \
                 use workload.arrivals = \"poisson\"",
                found(header)
            ));
        }
        let header = shortened(header.unwrap_or_default()).to_owned();
        Ok(Self { header, count: names.len(), prompt, output, arrival })
    }

    /// The request of a line, or what is wrong with it. A time that nobody asks for is not read.
    pub(super) fn row(&self, line: &str, timed: bool) -> Result<Row, String> {
        let count = line.split(',').count();
        if count != self.count {
            let (header, expected) = (&self.header, self.count);
            return Err(format!("expected {expected} columns ({header}), found {count}"));
        }
        let cell = |at: usize| line.split(',').nth(at).unwrap_or_default();
        let mut arrival_ns = 0;
        if let Some((at, unit)) = self.arrival {
            let name = self.name(at);
            if cell(at).trim().is_empty() {
                return Err(format!("{name} is empty; expected {}", time::expected(unit)));
            }
            if timed {
                arrival_ns = time::nanoseconds(name, cell(at), unit)?;
            }
        }
        Ok(Row {
            arrival_ns,
            prompt_tokens: tokens(self.name(self.prompt), cell(self.prompt))?,
            output_tokens: tokens(self.name(self.output), cell(self.output))?,
        })
    }

    /// A column's name; its number where the header was too long to be kept.
    fn name(&self, at: usize) -> &str {
        self.header.split(',').nth(at).unwrap_or("a column").trim()
    }
}

/// A first line in words.
fn found(header: Option<&str>) -> String {
    header.map_or_else(|| "an empty file".to_owned(), |line| format!("{:?}", shortened(line)))
}
