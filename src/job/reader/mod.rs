//! Traces: requests that come from outside, line by line.
//!
//! Every line is checked, and nothing larger than one line is ever held. What is wrong is said with
//! the file, the line and what was expected. With `skip_damaged_lines` a line that cannot be used
//! is left out and counted; a first line that is no header, and a file that cannot be read, end the
//! job all the same.

mod csv;
mod lines;
mod mooncake;
pub(super) mod openai;
#[cfg(test)]
mod tests;
mod time;

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use csv::Columns;
use lines::{Fault, Lines};

use crate::config::{Arrivals, WorkloadConfig, WorkloadKind};
use crate::error::JobError;

/// Where the public traces are.
const PUBLIC: &str = "Azure's public traces (CC-BY-4.0) are on GitHub, Azure/AzurePublicDataset, \
     data/AzureLLMInferenceTrace_conv.csv; Mooncake's (Apache-2.0) in kvcache-ai/Mooncake, \
     FAST25-release/traces; say where yours is with --set workload.path=FILE";

/// One request of a trace, its lengths as they stand there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Row {
    /// When it arrives, in nanoseconds from some point that all rows share; 0 where nobody asked.
    pub(super) arrival_ns: i64,
    pub(super) prompt_tokens: u32,
    pub(super) output_tokens: u32,
}

/// How a line is read.
#[derive(Debug)]
enum Format {
    Csv(Columns),
    Mooncake {
        /// Tokens of one entry of `hash_ids`.
        block_tokens: u32,
    },
    OpenAi(Box<openai::Requests>),
}

/// Lines that were left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Damaged {
    pub(super) lines: u64,
    /// What is wrong with the first of them.
    pub(super) first: Option<String>,
}

/// A trace that is being read.
#[derive(Debug)]
pub(super) struct Reader<R> {
    lines: Lines<R>,
    format: Format,
    /// Whether arrivals are asked for.
    timed: bool,
    skips: bool,
    damaged: Damaged,
}

/// Opens the trace of a workload and checks its first line.
///
/// # Errors
/// [`JobError::Trace`].
pub(super) fn open(config: &WorkloadConfig) -> Result<Reader<BufReader<File>>, JobError> {
    let path = config.path.as_deref().unwrap_or(Path::new(""));
    let refused = |problem: String| JobError::Trace { path: path.to_owned(), line: 0, problem };
    let file = File::open(path)
        .map_err(|error| refused(format!("the trace cannot be read: {error}; {PUBLIC}")))?;
    if file.metadata().is_ok_and(|metadata| metadata.is_dir()) {
        return Err(refused(format!("is a directory, expected a trace; {PUBLIC}")));
    }
    Reader::new(BufReader::new(file), path, config)
}

impl<R: BufRead> Reader<R> {
    fn new(reader: R, path: &Path, config: &WorkloadConfig) -> Result<Self, JobError> {
        let timed = config.arrivals == Arrivals::Trace;
        let longest = match config.kind {
            WorkloadKind::MooncakeJsonl => mooncake::MAX_LINE_BYTES,
            WorkloadKind::OpenaiJsonl => openai::MAX_LINE_BYTES,
            _ => csv::MAX_LINE_BYTES,
        };
        let mut lines = Lines::new(reader, path, longest);
        let format = match config.kind {
            WorkloadKind::MooncakeJsonl => {
                let block_tokens = config.hash_block_tokens.unwrap_or(mooncake::BLOCK_TOKENS);
                Format::Mooncake { block_tokens }
            }
            WorkloadKind::OpenaiJsonl => {
                let requests = openai::Requests::new(config);
                let refused = |problem| JobError::Trace { path: path.to_owned(), line: 0, problem };
                Format::OpenAi(Box::new(requests.map_err(refused)?))
            }
            kind => {
                let columns = Columns::read(&mut lines, kind, &config.columns, timed);
                Format::Csv(columns.map_err(|fault| lines.refused(fault))?)
            }
        };
        let skips = config.skip_damaged_lines;
        Ok(Self { lines, format, timed, skips, damaged: Damaged::default() })
    }

    /// The next request; the hashes of its prompt's blocks, where the trace has them, replace what
    /// is in `hash_ids`. `None` at the end. After an error there is nothing to be trusted.
    ///
    /// # Errors
    /// [`JobError::Trace`].
    pub(super) fn next_row(&mut self, hash_ids: &mut Vec<u64>) -> Result<Option<Row>, JobError> {
        loop {
            hash_ids.clear();
            match self.read_row(hash_ids) {
                Ok(row) => return Ok(row),
                Err(Fault::Damaged(problem)) if self.skips => {
                    self.damaged.lines += 1;
                    let error = self.lines.refused(Fault::Damaged(problem));
                    self.damaged.first.get_or_insert_with(|| error.to_string());
                }
                Err(fault) => return Err(self.lines.refused(fault)),
            }
        }
    }

    fn read_row(&mut self, hash_ids: &mut Vec<u64>) -> Result<Option<Row>, Fault> {
        let Some(line) = self.lines.next()? else { return Ok(None) };
        match &mut self.format {
            Format::Csv(columns) => columns.row(line, self.timed),
            Format::Mooncake { block_tokens } => mooncake::row(line, *block_tokens, hash_ids),
            Format::OpenAi(requests) => requests.row(line, hash_ids),
        }
        .map(Some)
        .map_err(Fault::Damaged)
    }

    /// Of how many requests the answer counts as long as it may become at most.
    pub(super) fn capped(&self) -> u64 {
        match &self.format {
            Format::OpenAi(requests) => requests.capped(),
            Format::Csv(_) | Format::Mooncake { .. } => 0,
        }
    }

    /// What was left out.
    pub(super) fn damaged(self) -> Damaged {
        self.damaged
    }
}

/// A number of tokens, or what is wrong with it.
fn tokens(column: &str, text: &str) -> Result<u32, String> {
    match text.trim().parse::<u32>() {
        Ok(tokens) if tokens > 0 => Ok(tokens),
        _ => Err(format!(
            "{column} is {:?}; expected a whole number of tokens from 1 to {}",
            shortened(text),
            u32::MAX
        )),
    }
}

/// What serde says of a line of JSON, without the line: that is 1 for it, whatever the file's is.
pub(super) fn json_problem(error: &serde_json::Error) -> String {
    error.to_string().replace(" at line 1 column ", " at column ")
}

/// The beginning of a text, enough to recognise it by.
fn shortened(text: &str) -> &str {
    match text.char_indices().nth(60) {
        Some((end, _)) => &text[..end],
        None => text,
    }
}
