//! Traces in the format of the Azure LLM inference traces: `TIMESTAMP,ContextTokens,GeneratedTokens`.
//!
//! A trace comes from outside, so every line is checked, and nothing larger than one line is ever
//! held. Requests keep the file's order; the job is a batch and does not wait for timestamps.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use crate::error::JobError;

/// The first line.
const HEADER: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";

/// The longest line, its end included. Real ones have about 40 bytes.
const MAX_LINE_BYTES: u64 = 4096;

/// Where the public traces are.
const PUBLIC: &str = "Azure's public traces (CC-BY-4.0) are on GitHub, Azure/AzurePublicDataset, \
     data/AzureLLMInferenceTrace_conv.csv; say where yours is with --set workload.path=FILE";

/// The requests of a trace, as `[context tokens, generated tokens]`.
pub(super) struct Trace<R> {
    reader: R,
    path: PathBuf,
    /// The line that `text` holds, counted from 1.
    line: u64,
    text: Vec<u8>,
    ended: bool,
}

/// Opens a trace and checks its first line.
///
/// # Errors
/// [`JobError::Trace`].
pub(super) fn open(path: &Path) -> Result<Trace<BufReader<File>>, JobError> {
    let refused = |problem: String| JobError::Trace { path: path.to_owned(), line: 0, problem };
    let file = File::open(path)
        .map_err(|error| refused(format!("the trace cannot be read: {error}; {PUBLIC}")))?;
    if file.metadata().is_ok_and(|metadata| metadata.is_dir()) {
        return Err(refused(format!("is a directory, expected a trace; {PUBLIC}")));
    }
    Trace::new(BufReader::new(file), path)
}

impl<R: BufRead> Trace<R> {
    fn new(reader: R, path: &Path) -> Result<Self, JobError> {
        let mut trace =
            Self { reader, path: path.to_owned(), line: 0, text: Vec::new(), ended: false };
        match trace.next_line()? {
            // Spreadsheets put a byte order mark before it.
            Some(line) if line.trim_start_matches('\u{feff}') == HEADER => Ok(trace),
            found => {
                let found = found.map_or_else(
                    || "an empty file".to_owned(),
                    |line| format!("{:?}", shortened(line)),
                );
                let problem = format!("expected the header {HEADER:?}, found {found}");
                Err(trace.refused(problem))
            }
        }
    }

    fn refused(&self, problem: String) -> JobError {
        JobError::Trace { path: self.path.clone(), line: self.line.max(1), problem }
    }

    /// The next line without its end, which may be LF or CR LF. `None` at the end of the file.
    fn next_line(&mut self) -> Result<Option<&str>, JobError> {
        self.text.clear();
        let mut limited = self.reader.by_ref().take(MAX_LINE_BYTES + 1);
        let read = limited.read_until(b'\n', &mut self.text);
        self.line += 1;
        let read = read.map_err(|error| self.refused(format!("cannot be read: {error}")))?;
        if read == 0 {
            return Ok(None);
        }
        if read as u64 > MAX_LINE_BYTES {
            let problem = format!(
                "the line is longer than {MAX_LINE_BYTES} bytes; expected {HEADER} in about 40"
            );
            return Err(self.refused(problem));
        }
        let line = self.text.strip_suffix(b"\n").unwrap_or(&self.text);
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        match std::str::from_utf8(line) {
            Ok(line) => Ok(Some(line)),
            Err(error) => {
                let byte = line[error.valid_up_to()];
                let problem = format!("byte 0x{byte:02x} is not UTF-8; expected {HEADER}");
                Err(self.refused(problem))
            }
        }
    }

    /// The lengths of the next request.
    fn next_request(&mut self) -> Result<Option<[u32; 2]>, JobError> {
        let parsed = match self.next_line()? {
            None => return Ok(None),
            Some("") => return self.end_after_blank(),
            Some(line) => parse(line),
        };
        parsed.map(Some).map_err(|problem| self.refused(problem))
    }

    /// A blank line may only be the last one.
    fn end_after_blank(&mut self) -> Result<Option<[u32; 2]>, JobError> {
        let blank = self.line;
        if self.next_line()?.is_none() {
            return Ok(None);
        }
        self.line = blank;
        Err(self.refused(format!("the line is blank; expected {HEADER}")))
    }
}

impl<R: BufRead> Iterator for Trace<R> {
    type Item = Result<[u32; 2], JobError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let next = self.next_request().transpose();
        // After an error there is nothing that could be trusted.
        self.ended = !matches!(next, Some(Ok(_)));
        next
    }
}

/// The two lengths of a line, or what is wrong with it.
fn parse(line: &str) -> Result<[u32; 2], String> {
    let mut columns = line.split(',');
    let (Some(timestamp), Some(context), Some(generated), None) =
        (columns.next(), columns.next(), columns.next(), columns.next())
    else {
        let found = line.split(',').count();
        return Err(format!("expected 3 columns ({HEADER}), found {found}"));
    };
    if timestamp.trim().is_empty() {
        return Err("TIMESTAMP is empty; expected a date and time".to_owned());
    }
    Ok([tokens("ContextTokens", context)?, tokens("GeneratedTokens", generated)?])
}

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

/// The beginning of a text, enough to recognise it by.
fn shortened(text: &str) -> &str {
    match text.char_indices().nth(60) {
        Some((end, _)) => &text[..end],
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &[u8]) -> Result<Vec<[u32; 2]>, String> {
        let trace = Trace::new(text, Path::new("t.csv")).map_err(|error| error.to_string())?;
        trace.collect::<Result<_, _>>().map_err(|error| error.to_string())
    }

    fn with_header(rest: &str) -> Vec<u8> {
        format!("{HEADER}\n{rest}").into_bytes()
    }

    #[test]
    fn traces_are_read() {
        let rows = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109";
        let expected = Ok(vec![[374, 44], [396, 109]]);
        assert_eq!(read(&with_header(rows)), expected);
        assert_eq!(read(&with_header(&format!("{rows}\n"))), expected);
        assert_eq!(read(&with_header(&format!("{rows}\n\n"))), expected, "a blank last line");
        let crlf = format!("{HEADER}\n{rows}\n\n").replace('\n', "\r\n");
        assert_eq!(read(crlf.as_bytes()), expected);
        assert_eq!(read(&with_header("")), Ok(vec![]));
    }

    #[test]
    fn mistakes_are_told_with_their_line() {
        for (rest, line, words) in [
            ("t,1,1\nt,-3,1\n", 3, "ContextTokens is \"-3\"; expected a whole number"),
            ("t,1,x\n", 2, "GeneratedTokens is \"x\""),
            ("t,1,0\n", 2, "GeneratedTokens is \"0\""),
            ("t,1.5,1\n", 2, "ContextTokens is \"1.5\""),
            ("t,4294967296,1\n", 2, "from 1 to 4294967295"),
            ("t,1\n", 2, "expected 3 columns (TIMESTAMP,ContextTokens,GeneratedTokens), found 2"),
            ("t,1,1,1\n", 2, "found 4"),
            (",1,1\n", 2, "TIMESTAMP is empty"),
            ("t,1,1\n\nt,1,1\n", 3, "the line is blank"),
        ] {
            let error = read(&with_header(rest)).expect_err(rest);
            assert!(
                error.starts_with(&format!("t.csv:{line}: ")) && error.contains(words),
                "{error}"
            );
        }
    }

    #[test]
    fn a_byte_order_mark_is_passed_over() {
        let text = format!("\u{feff}{HEADER}\n2023-11-16 18:15:46.68,374,44\n");
        assert!(read(text.as_bytes()).is_ok());
    }

    #[test]
    fn what_is_no_trace_is_refused() {
        let error = read(b"").expect_err("empty");
        assert!(error.contains("t.csv:1: expected the header") && error.contains("an empty file"));
        let error = read(b"num_prefill_tokens,num_decode_tokens\n1,2\n").expect_err("another csv");
        assert!(error.contains("found \"num_prefill_tokens"), "{error}");
        let long = with_header(&format!("t,1,1\n{},1,1\n", "t".repeat(5000)));
        let error = read(&long).expect_err("a long line");
        assert!(error.starts_with("t.csv:3: the line is longer than 4096 bytes"), "{error}");
        let mut binary = with_header("t,1,1\n");
        binary.extend_from_slice(b"t,\xFF,1\n");
        let error = read(&binary).expect_err("not UTF-8");
        assert!(error.starts_with("t.csv:3: byte 0xff is not UTF-8"), "{error}");
    }

    #[test]
    fn a_missing_trace_says_where_the_public_one_is() {
        let error = open(Path::new("no/such.csv")).err().expect("there is none").to_string();
        assert!(error.starts_with("no/such.csv: the trace cannot be read"), "{error}");
        assert!(
            error.contains("Azure/AzurePublicDataset") && error.contains("--set workload.path=")
        );
        assert!(open(Path::new("src")).is_err(), "a directory");
    }
}
