//! The last failure of each thread.
//!
//! Those of verbs own no heap memory and are kept as they are; their text is made when it is asked
//! for. So a refused call allocates nothing (P1). Those of opening are kept as text.

use std::cell::RefCell;
use std::ffi::{CStr, c_char};
use std::fmt::Write as _;

use super::bindings::*;
use super::caller::Caller;
use super::facts::{Facts, Text};
use super::failure::{CallError, Failure};
use crate::error::{BatchRefused, CacheError, SaveError};

/// A failure as it is kept: what can be copied, as it is.
#[derive(Clone, Copy, Debug)]
enum Kept {
    Call(CallError),
    Item(usize, CallError),
    Cache(CacheError),
    Batch(BatchRefused),
    Save(SaveError),
    /// The facts and the text are there.
    Told,
}

/// The last failure of a thread.
struct Last {
    status: kvpool_status_t,
    kept: Kept,
    facts: Facts,
    message: Text<1024>,
}

thread_local! {
    // Without a destructor, so that a thread's first failure allocates nothing either.
    static LAST: RefCell<Last> = const {
        RefCell::new(Last {
            status: KVPOOL_OK,
            kept: Kept::Told,
            facts: Facts::NONE,
            message: Text::EMPTY,
        })
    };
}

/// Keeps a failure, and gives its status.
pub(super) fn note(failure: &Failure) -> kvpool_status_t {
    let status = failure.status();
    LAST.with_borrow_mut(|last| {
        last.status = status;
        last.kept = match failure {
            Failure::Call(error) => Kept::Call(*error),
            Failure::Item { index, error } => Kept::Item(*index, *error),
            Failure::Cache(error) => Kept::Cache(*error),
            Failure::Batch(refused) => Kept::Batch(*refused),
            Failure::Save(error) => Kept::Save(*error),
            told => {
                last.facts = Facts::of_failure(told);
                last.message = Text::EMPTY;
                // Cut if it is too long.
                let _ = write!(last.message, "{told}");
                Kept::Told
            }
        };
    });
    status
}

impl Last {
    /// The facts and the text, made now where they were not yet.
    fn tell(&self) -> (Facts, Text<1024>) {
        let failure = match self.kept {
            Kept::Told => return (self.facts, self.message),
            Kept::Call(error) => Failure::Call(error),
            Kept::Item(index, error) => Failure::Item { index, error },
            Kept::Cache(error) => Failure::Cache(error),
            Kept::Batch(refused) => Failure::Batch(refused),
            Kept::Save(error) => Failure::Save(error),
        };
        let mut message = Text::EMPTY;
        let _ = write!(message, "{failure}");
        (Facts::of_failure(&failure), message)
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_last_error(
    out: *mut kvpool_error_t,
    out_size: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    // Not through `note`: asking for a failure must not replace it.
    let out = match caller.out("out", out, out_size) {
        Ok(out) => out,
        Err(error) => return error.status(),
    };
    LAST.with_borrow(|last| {
        let (facts, message) = last.tell();
        out.set(kvpool_error_t {
            size: 0,
            status: last.status,
            line: facts.line,
            wanted: facts.wanted,
            available: facts.available,
            index: facts.index,
            knob: facts.knob.to_c(),
            message: message.to_c(),
        });
    });
    KVPOOL_OK
}

macro_rules! names {
    ($status:expr; $($name:ident),* $(,)?) => {
        match $status {
            $($name => {
                const NAME: &CStr =
                    match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                        Ok(name) => name,
                        Err(_) => panic!("it ends with its only NUL"),
                    };
                NAME
            })*
            _ => c"unknown status",
        }
    };
}

#[unsafe(no_mangle)]
pub extern "C" fn kvpool_status_name(status: kvpool_status_t) -> *const c_char {
    let name = names!(status;
        KVPOOL_OK, KVPOOL_NULL_POINTER, KVPOOL_BAD_SIZE, KVPOOL_BAD_ARGUMENT, KVPOOL_BAD_HANDLE,
        KVPOOL_STALE_HANDLE, KVPOOL_FOREIGN_HANDLE, KVPOOL_BUFFER_TOO_SMALL, KVPOOL_BUSY,
        KVPOOL_STEP_OPEN, KVPOOL_WRONG_SHAPE, KVPOOL_OVERLAP, KVPOOL_NO_SUCH_LAYER,
        KVPOOL_NO_SUCH_GROUP, KVPOOL_PANIC, KVPOOL_POISONED, KVPOOL_INVARIANT, KVPOOL_CONFIG,
        KVPOOL_PLAN, KVPOOL_MEMORY_TOO_SMALL, KVPOOL_NO_DEVICE, KVPOOL_OUT_OF_MEMORY,
        KVPOOL_TOO_MANY_OBJECTS, KVPOOL_NO_SEQ_SLOT, KVPOOL_NOT_ADMITTED, KVPOOL_NEVER_FITS,
        KVPOOL_TOO_LONG, KVPOOL_DUPLICATE_KEY, KVPOOL_BATCH_UNDER_WAY, KVPOOL_POOL_EXHAUSTED,
        KVPOOL_STEP_TOO_LARGE, KVPOOL_NO_PIN, KVPOOL_NO_VIEW, KVPOOL_NOBODY, KVPOOL_BAD_STEP,
        KVPOOL_TOKEN_MISMATCH, KVPOOL_NOT_APPENDED, KVPOOL_ALREADY_APPENDED, KVPOOL_NOT_HELD,
        KVPOOL_BAD_RETENTION, KVPOOL_REUSE_OFF, KVPOOL_NOTHING_TO_PIN, KVPOOL_RESERVATIONS_HELD,
        KVPOOL_PINS_ALIVE, KVPOOL_SEQUENCES_ALIVE, KVPOOL_TOO_MANY_REFS, KVPOOL_KEY_TOO_LONG,
        KVPOOL_DEVICE, KVPOOL_WRONG_MEMORY, KVPOOL_SAVE_IO, KVPOOL_SAVE_UNDER_WAY,
        KVPOOL_SAVE_DAMAGED, KVPOOL_SAVE_MISMATCH,
    );
    name.as_ptr()
}
