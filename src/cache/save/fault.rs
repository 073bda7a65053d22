//! Where a test makes the files of saves fail: the writing at a byte, by an error or whatever else
//! the test does there; reads and writes that are short, that a signal interrupts, or that fail.
//! Nothing of it happens unless the thread has asked for it.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};

/// Where writing ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// When so many bytes are written.
    Byte(u64),
    /// When all are written.
    BeforeSync,
    /// When they are on the disk.
    BeforeRename,
    /// When the file has its name.
    AfterRename,
}

/// What happens there, and the error that comes of it.
type Fault = fn() -> io::Error;

/// What the operating system makes of reads and writes, as it may of any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileCalls {
    /// Bytes that one of them takes at most; 0 for as many as are asked for.
    pub most: usize,
    /// Whether a signal interrupts every other one.
    pub interrupted: bool,
    /// The one that fails with an I/O error, counted from 1; 0 for none. A seek counts too.
    pub fails: u64,
    /// How many there were.
    pub calls: u64,
}

thread_local! {
    static ARMED: Cell<Option<(Point, Fault)>> = const { Cell::new(None) };
    static CALLS: Cell<Option<FileCalls>> = const { Cell::new(None) };
}

/// The saves of this thread fail at a point, until it asks for another or for none: with what the
/// function gives, if it comes back.
#[doc(hidden)]
pub fn fail_saves(fault: Option<(Point, Fault)>) {
    ARMED.set(fault);
}

/// The calls of this thread for the files of saves are like this from now on, or as they come.
/// Gives what there was before.
#[doc(hidden)]
pub fn disturb_files(calls: Option<FileCalls>) -> Option<FileCalls> {
    CALLS.replace(calls)
}

/// What of some bytes behind `written` is written before the fault, and the fault.
pub(super) fn cut(written: u64, bytes: &[u8]) -> (&[u8], Option<Fault>) {
    match ARMED.get() {
        Some((Point::Byte(at), fault)) if at < written + bytes.len() as u64 => {
            let before = usize::try_from(at.saturating_sub(written)).unwrap_or(0);
            (&bytes[..before], Some(fault))
        }
        _ => (bytes, None),
    }
}

/// Lets a fault happen that is not at a byte.
pub(super) fn at(point: Point) -> io::Result<()> {
    match ARMED.get().filter(|armed| armed.0 == point) {
        Some((_, fault)) => Err(fault()),
        None => Ok(()),
    }
}

/// Counts a call about so many bytes, and gives how many it may take.
fn counted(bytes: usize) -> io::Result<usize> {
    let Some(mut calls) = CALLS.get() else { return Ok(bytes) };
    calls.calls += 1;
    CALLS.set(Some(calls));
    if calls.calls == calls.fails {
        // 5 is EIO.
        return Err(io::Error::from_raw_os_error(5));
    }
    // A seek moves no bytes, and waits for nothing that a signal could interrupt.
    if bytes > 0 && calls.interrupted && calls.calls % 2 == 1 {
        return Err(ErrorKind::Interrupted.into());
    }
    Ok(if calls.most == 0 { bytes } else { bytes.min(calls.most) })
}

/// A file, with what a thread has asked for.
#[derive(Debug)]
pub(super) struct Calls<'a>(pub(super) &'a File);

impl Read for Calls<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let len = counted(out.len())?;
        self.0.read(&mut out[..len])
    }
}

impl Write for Calls<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let len = counted(bytes.len())?;
        self.0.write(&bytes[..len])
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl Seek for Calls<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        counted(0)?;
        self.0.seek(to)
    }
}
