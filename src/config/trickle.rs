//! For tests: what the operating system may make of any reading.

use std::io::{Error, ErrorKind, Read, Result};

/// A file that comes byte by byte, with a signal before each, and that may fail at a byte.
#[derive(Debug)]
pub(crate) struct Trickle<'a> {
    bytes: &'a [u8],
    /// Bytes before the one that fails.
    until_error: Option<usize>,
    interrupted: bool,
}

impl<'a> Trickle<'a> {
    pub(crate) const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, until_error: None, interrupted: false }
    }

    /// Fails with an I/O error behind so many bytes.
    pub(crate) const fn failing(bytes: &'a [u8], until_error: usize) -> Self {
        Self { bytes, until_error: Some(until_error), interrupted: false }
    }
}

impl Read for Trickle<'_> {
    fn read(&mut self, out: &mut [u8]) -> Result<usize> {
        self.interrupted = !self.interrupted;
        if self.interrupted {
            return Err(ErrorKind::Interrupted.into());
        }
        if self.until_error == Some(0) {
            // 5 is EIO.
            return Err(Error::from_raw_os_error(5));
        }
        let (Some((first, rest)), Some(place)) = (self.bytes.split_first(), out.first_mut()) else {
            return Ok(0);
        };
        *place = *first;
        self.bytes = rest;
        self.until_error = self.until_error.map(|left| left - 1);
        Ok(1)
    }
}
