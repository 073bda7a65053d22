//! The lines of a file, one at a time and none longer than it may be.

use std::io::{BufRead, ErrorKind, Read};
use std::path::{Path, PathBuf};

use crate::error::JobError;

/// Why there is no line.
#[derive(Debug)]
pub(super) enum Fault {
    /// The line cannot be used; the next one may be.
    Damaged(String),
    /// Nothing more can be read.
    Fatal(String),
}

/// The lines of a file. Blank ones may only stand at its end.
#[derive(Debug)]
pub(super) struct Lines<R> {
    reader: R,
    path: PathBuf,
    longest: u64,
    /// The line that errors are about, counted from 1.
    line: u64,
    /// Lines read.
    read: u64,
    text: Vec<u8>,
    /// Whether `text` is still to be given out: a blank line before it was refused first.
    held: bool,
    started: bool,
}

impl<R: BufRead> Lines<R> {
    pub(super) fn new(reader: R, path: &Path, longest: u64) -> Self {
        let path = path.to_owned();
        let text = Vec::new();
        Self { reader, path, longest, line: 0, read: 0, text, held: false, started: false }
    }

    /// The fault as an error about the line that was read last.
    pub(super) fn refused(&self, fault: Fault) -> JobError {
        let (Fault::Damaged(problem) | Fault::Fatal(problem)) = fault;
        JobError::Trace { path: self.path.clone(), line: self.line.max(1), problem }
    }

    /// The next line that is not blank, without its end (LF or CR LF) and without a byte order mark
    /// before the first. `None` at the end of the file.
    pub(super) fn next(&mut self) -> Result<Option<&str>, Fault> {
        if !std::mem::take(&mut self.held) {
            let mut blank = None;
            loop {
                if !self.fill()? {
                    return Ok(None);
                }
                if !self.content().is_empty() {
                    break;
                }
                blank.get_or_insert(self.read);
            }
            if let Some(blank) = blank {
                self.held = true;
                self.line = blank;
                return Err(Fault::Damaged("the line is blank; expected a request".to_owned()));
            }
        }
        self.line = self.read;
        let first = !std::mem::replace(&mut self.started, true);
        match std::str::from_utf8(self.content()) {
            // Spreadsheets put a byte order mark before the first.
            Ok(line) if first => Ok(Some(line.trim_start_matches('\u{feff}'))),
            Ok(line) => Ok(Some(line)),
            Err(error) => {
                let byte = self.content()[error.valid_up_to()];
                Err(Fault::Damaged(format!("byte 0x{byte:02x} is not UTF-8; expected text")))
            }
        }
    }

    /// Reads a line; `false` at the end. Of one that is too long the rest is passed over.
    fn fill(&mut self) -> Result<bool, Fault> {
        self.text.clear();
        let mut limited = self.reader.by_ref().take(self.longest + 1);
        let read = limited.read_until(b'\n', &mut self.text);
        self.read += 1;
        self.line = self.read;
        let read = read.map_err(|error| Fault::Fatal(format!("cannot be read: {error}")))?;
        if read as u64 > self.longest {
            self.pass_over()?;
            let problem = format!("the line is longer than {} bytes", self.longest);
            return Err(Fault::Damaged(problem));
        }
        Ok(read > 0)
    }

    /// Passes over the rest of a line, unless its end has been read.
    fn pass_over(&mut self) -> Result<(), Fault> {
        if self.text.last() == Some(&b'\n') {
            return Ok(());
        }
        loop {
            let buffer = match self.reader.fill_buf() {
                Ok(buffer) => buffer,
                // By a signal, which is none of its business.
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(Fault::Fatal(format!("cannot be read: {error}"))),
            };
            let end = buffer.iter().position(|byte| *byte == b'\n');
            let len = end.map_or(buffer.len(), |end| end + 1);
            self.reader.consume(len);
            if end.is_some() || len == 0 {
                return Ok(());
            }
        }
    }

    fn content(&self) -> &[u8] {
        let line = self.text.strip_suffix(b"\n").unwrap_or(&self.text);
        line.strip_suffix(b"\r").unwrap_or(line)
    }
}
