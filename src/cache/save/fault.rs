//! Where a test makes the writing of a save fail: at a byte, by an error or by the end of the
//! process. Nothing of it happens unless the thread has asked for it.

use std::cell::Cell;
use std::io;

/// How writing ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteFault {
    /// The process ends at once, as if it were killed.
    Abort,
    /// The disk is full.
    Full,
}

/// Where it does.
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

thread_local! {
    static ARMED: Cell<Option<(Point, WriteFault)>> = const { Cell::new(None) };
}

/// The saves of this thread fail at a point, until it asks for another or for none.
#[doc(hidden)]
pub fn fail_saves(fault: Option<(Point, WriteFault)>) {
    ARMED.set(fault);
}

impl WriteFault {
    /// Lets it happen.
    pub(super) fn happen(self) -> io::Error {
        match self {
            Self::Abort => std::process::abort(),
            // 28 is ENOSPC.
            Self::Full => io::Error::from_raw_os_error(28),
        }
    }
}

/// What of some bytes behind `written` is written before the fault, and the fault.
pub(super) fn cut(written: u64, bytes: &[u8]) -> (&[u8], Option<WriteFault>) {
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
        Some((_, fault)) => Err(fault.happen()),
        None => Ok(()),
    }
}
