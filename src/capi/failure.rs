//! Failures: their statuses, and the last one of each thread.
//!
//! Those of verbs own no heap memory and are kept as they are; their text is made when it is asked
//! for. So a refused call allocates nothing (P1). Those of opening are kept as text.

use std::cell::RefCell;
use std::ffi::{CStr, c_char};
use std::fmt::{self, Write as _};

use super::bindings::*;
use super::caller::Caller;
use crate::cache::ReservationRefused;
use crate::error::{
    BatchRefused, CacheError, ConfigError, DeviceError, InvariantError, OpenError, Origin,
    PlanError, SaveError,
};
use crate::units::grouped;

/// A call that is wrong in itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum CallError {
    #[error("{what} is NULL")]
    NullPointer { what: &'static str },
    #[error("{what} is not aligned to {align} bytes")]
    Misaligned { what: &'static str, align: usize },
    #[error(
        "{what} has size {got}, and this library's has {expected}: set `size` to sizeof, and use the header and the library of one version"
    )]
    BadSize { what: &'static str, got: usize, expected: usize },
    #[error("{what} {problem}")]
    BadArgument { what: &'static str, problem: &'static str },
    #[error("{}", bad_handle(wanted, *zero))]
    BadHandle { wanted: &'static str, zero: bool },
    #[error("the handle is of a {what} that is not there: it was closed, or never given out")]
    StaleHandle { what: &'static str },
    #[error("the {what} belongs to another cache")]
    ForeignHandle { what: &'static str },
    #[error(
        "the text takes {} bytes and the buffer has {}", grouped(*wanted as u64), grouped(*capacity as u64)
    )]
    BufferTooSmall { wanted: usize, capacity: usize },
    #[error(
        "another thread, or the caller of this callback, is in a verb of this cache; call its verbs one at a time"
    )]
    Busy,
    #[error(
        "this waits for other threads, which a callback must not: call it when the verb is over"
    )]
    InCallback,
    #[error("a step is open; commit or cancel it first")]
    StepOpen,
    #[error("{out} overlaps {other}; give an output memory of its own")]
    Overlap { out: &'static str, other: &'static str },
    #[error("all {limit} handles of a {what} are in use; close some")]
    TooManyObjects { what: &'static str, limit: usize },
    #[error("the cache met a panic before and is not to be trusted; close it, and open another")]
    Poisoned,
    #[error("all {limit} DLPack views are out; delete some")]
    NoView { limit: usize },
    #[error(
        "there is nobody to preempt: fewer than two sequences run, or admission promised their blocks"
    )]
    Nobody,
    #[error("{what} must lie in {where_} memory")]
    WrongMemory { what: &'static str, where_: &'static str },
    #[error("there is no layer group {group}; the plan has {num_groups}")]
    NoSuchGroup { group: u32, num_groups: u32 },
}

fn bad_handle(wanted: &str, zero: bool) -> String {
    if zero {
        format!("the {wanted} is zero, which names nothing")
    } else {
        format!("this is no handle of a {wanted}")
    }
}

/// Why a function failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error(transparent)]
    Call(#[from] CallError),
    /// An entry of an array is wrong in itself.
    #[error("item {index}: {error}")]
    Item { index: usize, error: CallError },
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error(transparent)]
    Batch(#[from] BatchRefused),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Save(#[from] SaveError),
    #[error(transparent)]
    Invariant(#[from] InvariantError),
    #[error("a panic inside kvpool, which is a defect of it, please report it: {0}")]
    Panic(String),
    #[error("the text cannot be written: {0}")]
    Text(String),
}

impl From<ReservationRefused> for Failure {
    fn from(refused: ReservationRefused) -> Self {
        match refused {
            ReservationRefused::Foreign(_) => {
                CallError::ForeignHandle { what: "reservation" }.into()
            }
            ReservationRefused::Cancelled => CallError::StaleHandle { what: "reservation" }.into(),
        }
    }
}

impl CallError {
    const fn status(&self) -> kvpool_status_t {
        match self {
            Self::NullPointer { .. } => KVPOOL_NULL_POINTER,
            Self::Misaligned { .. } | Self::BadArgument { .. } => KVPOOL_BAD_ARGUMENT,
            Self::BadSize { .. } => KVPOOL_BAD_SIZE,
            Self::BadHandle { .. } => KVPOOL_BAD_HANDLE,
            Self::StaleHandle { .. } => KVPOOL_STALE_HANDLE,
            Self::ForeignHandle { .. } => KVPOOL_FOREIGN_HANDLE,
            Self::BufferTooSmall { .. } => KVPOOL_BUFFER_TOO_SMALL,
            Self::Busy | Self::InCallback => KVPOOL_BUSY,
            Self::StepOpen => KVPOOL_STEP_OPEN,
            Self::Overlap { .. } => KVPOOL_OVERLAP,
            Self::TooManyObjects { .. } => KVPOOL_TOO_MANY_OBJECTS,
            Self::Poisoned => KVPOOL_POISONED,
            Self::NoView { .. } => KVPOOL_NO_VIEW,
            Self::Nobody => KVPOOL_NOBODY,
            Self::WrongMemory { .. } => KVPOOL_WRONG_MEMORY,
            Self::NoSuchGroup { .. } => KVPOOL_NO_SUCH_GROUP,
        }
    }
}

const fn of_cache(error: &CacheError) -> kvpool_status_t {
    match error {
        CacheError::ForeignHandle => KVPOOL_FOREIGN_HANDLE,
        CacheError::StaleHandle { .. }
        | CacheError::StaleStep { .. }
        | CacheError::StaleBlock { .. }
        | CacheError::StalePin { .. } => KVPOOL_STALE_HANDLE,
        CacheError::DuplicateKey { .. } => KVPOOL_DUPLICATE_KEY,
        CacheError::NoSeqSlot { .. } => KVPOOL_NO_SEQ_SLOT,
        CacheError::SequenceTooLong { .. } | CacheError::LookaheadBeyondRewind { .. } => {
            KVPOOL_TOO_LONG
        }
        CacheError::NeverFits { .. } => KVPOOL_NEVER_FITS,
        CacheError::NotAdmitted { .. } => KVPOOL_NOT_ADMITTED,
        CacheError::PoolExhausted { .. } => KVPOOL_POOL_EXHAUSTED,
        CacheError::SequenceTwice { .. } | CacheError::ZeroTokens { .. } => KVPOOL_BAD_STEP,
        CacheError::StepTooLarge { .. } => KVPOOL_STEP_TOO_LARGE,
        CacheError::NoSuchLayer { .. } => KVPOOL_NO_SUCH_LAYER,
        CacheError::NoSuchGroup { .. } => KVPOOL_NO_SUCH_GROUP,
        CacheError::WrongShape { .. } => KVPOOL_WRONG_SHAPE,
        CacheError::AttendBeforeAppend { .. } | CacheError::StepIncomplete { .. } => {
            KVPOOL_NOT_APPENDED
        }
        CacheError::AlreadyAppended { .. } => KVPOOL_ALREADY_APPENDED,
        CacheError::TruncateBeyondEnd { .. }
        | CacheError::WindowGone { .. }
        | CacheError::NotHeld { .. } => KVPOOL_NOT_HELD,
        CacheError::BadSoftmaxScale | CacheError::CsrNotBuilt | CacheError::MixedTypes { .. } => {
            KVPOOL_BAD_ARGUMENT
        }
        CacheError::TooManyRefs { .. } => KVPOOL_TOO_MANY_REFS,
        CacheError::BatchUnderWay { .. } => KVPOOL_BATCH_UNDER_WAY,
        CacheError::TokenMismatch { .. } => KVPOOL_TOKEN_MISMATCH,
        CacheError::BadRetention { .. } => KVPOOL_BAD_RETENTION,
        CacheError::ReuseOff => KVPOOL_REUSE_OFF,
        CacheError::NothingToPin => KVPOOL_NOTHING_TO_PIN,
        CacheError::NoPin { .. } => KVPOOL_NO_PIN,
        CacheError::ReservationsHeld { .. } => KVPOOL_RESERVATIONS_HELD,
        CacheError::KeyPartTooLong { .. } => KVPOOL_KEY_TOO_LONG,
        CacheError::PinsAlive { .. } => KVPOOL_PINS_ALIVE,
        CacheError::SequencesAlive { .. } => KVPOOL_SEQUENCES_ALIVE,
        CacheError::Device(error) => of_device(error),
    }
}

const fn of_device(error: &DeviceError) -> kvpool_status_t {
    match error {
        DeviceError::OutOfMemory { .. } | DeviceError::CudaOutOfMemory { .. } => {
            KVPOOL_OUT_OF_MEMORY
        }
        DeviceError::KernelUnsupported { .. }
        | DeviceError::CudaNoDriver
        | DeviceError::CudaNoGpu { .. }
        | DeviceError::CudaDriverTooOld { .. }
        | DeviceError::CudaNotCompiled { .. }
        | DeviceError::CudaOtherArchitecture { .. }
        | DeviceError::CudaNoKernel { .. } => KVPOOL_NO_DEVICE,
        DeviceError::HostTensorsOnly { .. } | DeviceError::NoStreams { .. } => KVPOOL_WRONG_MEMORY,
        DeviceError::StepTooLong { .. } => KVPOOL_STEP_TOO_LARGE,
        DeviceError::CudaMixedTypes | DeviceError::CudaMisaligned { .. } => KVPOOL_BAD_ARGUMENT,
        DeviceError::OutOfRange { .. } => KVPOOL_BAD_ARGUMENT,
        DeviceError::Thread { .. }
        | DeviceError::BadLayout
        | DeviceError::WorkerPanicked
        | DeviceError::CudaCapturing
        | DeviceError::CudaCall { .. } => KVPOOL_DEVICE,
    }
}

const fn of_save(error: &SaveError) -> kvpool_status_t {
    match error {
        SaveError::Io { .. } => KVPOOL_SAVE_IO,
        SaveError::UnderWay => KVPOOL_SAVE_UNDER_WAY,
        SaveError::NotASave | SaveError::Truncated { .. } | SaveError::Damaged { .. } => {
            KVPOOL_SAVE_DAMAGED
        }
        SaveError::OtherVersion { .. }
        | SaveError::OtherKind { .. }
        | SaveError::Differs { .. }
        | SaveError::OtherModel
        | SaveError::OtherEpoch { .. }
        | SaveError::NotWhole { .. } => KVPOOL_SAVE_MISMATCH,
        SaveError::Salted => KVPOOL_BAD_ARGUMENT,
        SaveError::OutOfMemory { .. } => KVPOOL_OUT_OF_MEMORY,
        SaveError::Cache(error) => of_cache(error),
    }
}

const fn of_plan(error: &PlanError) -> kvpool_status_t {
    match error {
        PlanError::MemoryTooSmall { .. } => KVPOOL_MEMORY_TOO_SMALL,
        _ => KVPOOL_PLAN,
    }
}

impl Failure {
    /// The same, of an entry of an array.
    pub(super) fn of_item(self, index: usize) -> Self {
        match self {
            Self::Call(error) => Self::Item { index, error },
            Self::Cache(source) => Self::Batch(BatchRefused { index, source }),
            other => other,
        }
    }

    fn status(&self) -> kvpool_status_t {
        match self {
            Self::Call(error) | Self::Item { error, .. } => error.status(),
            Self::Cache(error) | Self::Batch(BatchRefused { source: error, .. }) => of_cache(error),
            Self::Config(_) => KVPOOL_CONFIG,
            Self::Plan(error) | Self::Open(OpenError::Plan(error)) => of_plan(error),
            Self::Device(error) | Self::Open(OpenError::Device(error)) => of_device(error),
            Self::Save(error) => of_save(error),
            Self::Invariant(_) => KVPOOL_INVARIANT,
            Self::Panic(_) => KVPOOL_PANIC,
            Self::Text(_) => KVPOOL_BAD_ARGUMENT,
        }
    }
}

/// The numbers of a failure, where it has some.
#[derive(Clone, Copy, Debug)]
struct Facts {
    line: u32,
    wanted: u64,
    available: u64,
    index: u64,
    knob: Text<64>,
}

/// `KVPOOL_NO_NUMBER`
const NO_NUMBER: u64 = u64::MAX;

impl Facts {
    const NONE: Self = Self {
        line: 0,
        wanted: NO_NUMBER,
        available: NO_NUMBER,
        index: NO_NUMBER,
        knob: Text::EMPTY,
    };

    fn of(wanted: impl Into<u64>, available: impl Into<u64>, knob: &str) -> Self {
        Self { wanted: wanted.into(), available: available.into(), ..Self::knob(knob) }
    }

    /// A setting without numbers. What follows the first blank explains it.
    fn knob(knob: &str) -> Self {
        let mut facts = Self::NONE;
        // A text that is too long is cut.
        let _ = facts.knob.write_str(knob.split(' ').next().unwrap_or_default());
        facts
    }

    fn available(available: impl Into<u64>, knob: &str) -> Self {
        Self { available: available.into(), ..Self::knob(knob) }
    }

    fn of_cache(error: &CacheError) -> Self {
        const POOL: &str = "pool.capacity";
        const SEQS: &str = "limits.max_seqs";
        const REWIND: &str = "limits.max_rewind_tokens";
        match *error {
            CacheError::NoSeqSlot { seq_slots } => Self::available(seq_slots, SEQS),
            CacheError::SequenceTooLong { wanted, limit, knob }
            | CacheError::StepTooLarge { wanted, limit, knob } => Self::of(wanted, limit, knob),
            CacheError::NeverFits { wanted, total, .. } => Self::of(wanted, total, POOL),
            CacheError::NotAdmitted { wanted, available, .. }
            | CacheError::PoolExhausted { wanted, available, .. } => {
                Self::of(wanted, available, POOL)
            }
            CacheError::LookaheadBeyondRewind { wanted, limit } => Self::of(wanted, limit, REWIND),
            CacheError::WrongShape { got, expected, .. } => {
                Self::of(expected as u64, got as u64, "")
            }
            CacheError::TruncateBeyondEnd { wanted, len } => Self::of(wanted, len, ""),
            CacheError::WindowGone { wanted, shortest, .. } => Self::of(wanted, shortest, REWIND),
            CacheError::NotHeld { from, kept_from, .. } => Self::of(from, kept_from, ""),
            CacheError::TooManyRefs { limit, .. } => Self::available(limit, ""),
            CacheError::BatchUnderWay { live } => Self::available(live, "cache.admission"),
            CacheError::BadRetention { at, .. } => Self { index: at as u64, ..Self::NONE },
            CacheError::ReuseOff => Self::knob("cache.prefix_reuse"),
            CacheError::NoPin { limit } => Self::available(limit, SEQS),
            CacheError::KeyPartTooLong { len, limit } => Self::of(len as u64, limit as u64, ""),
            CacheError::NoSuchLayer { layer, num_layers } => Self::of(layer.0, num_layers, ""),
            CacheError::NoSuchGroup { group, num_groups, .. } => Self::of(group.0, num_groups, ""),
            CacheError::Device(error) => Self::of_device(&error),
            _ => Self::NONE,
        }
    }

    fn of_device(error: &DeviceError) -> Self {
        const POOL: &str = "pool.capacity";
        match *error {
            DeviceError::OutOfMemory { bytes, available, .. } => {
                Self::of(bytes.get(), available.get(), POOL)
            }
            DeviceError::CudaOutOfMemory { bytes, free, .. } => {
                Self::of(bytes.get(), free.get(), POOL)
            }
            DeviceError::KernelUnsupported { .. } => Self::knob("device.kernel"),
            DeviceError::Thread { .. } => Self::knob("device.threads"),
            DeviceError::CudaNoGpu { ordinal, count } => Self::of(ordinal, count, "device.ordinal"),
            DeviceError::CudaNoDriver
            | DeviceError::CudaNotCompiled { .. }
            | DeviceError::CudaDriverTooOld { .. } => Self::knob("device.kind"),
            _ => Self::NONE,
        }
    }

    fn of_save(error: &SaveError) -> Self {
        match *error {
            SaveError::OtherVersion { found, supported } => Self::of(found, supported, ""),
            SaveError::Differs { found, expected, .. }
            | SaveError::OtherEpoch { found, expected } => Self::of(found, expected, ""),
            SaveError::OutOfMemory { bytes } => Self { wanted: bytes.get(), ..Self::NONE },
            SaveError::Cache(ref error) => Self::of_cache(error),
            _ => Self::NONE,
        }
    }

    fn of_plan(error: &PlanError) -> Self {
        const POOL: &str = "pool.capacity";
        match error {
            PlanError::MemoryTooSmall { needed, available, .. }
            | PlanError::BudgetTooSmall { needed, available, .. } => {
                Self::of(needed.get(), available.get(), POOL)
            }
            PlanError::CapacityTooSmall { given, needed, .. } => Self::of(*needed, *given, POOL),
            PlanError::TooMany { wanted, limit, .. } => Self::of(*wanted, *limit, ""),
            PlanError::Contradiction { key, .. } => Self::knob(key),
            PlanError::Overflow(_) => Self::NONE,
        }
    }

    fn of_config(error: &ConfigError) -> Self {
        let line_of = |origin: &Origin| match origin {
            Origin::File { line, .. } => u32::try_from(*line).unwrap_or(u32::MAX),
            Origin::Override => 0,
        };
        match error {
            ConfigError::Key { origin, key, .. } => {
                Self { line: line_of(origin), ..Self::knob(key) }
            }
            ConfigError::Syntax { origin, .. } => Self { line: line_of(origin), ..Self::NONE },
            ConfigError::Read { .. } | ConfigError::Override { .. } => Self::NONE,
        }
    }

    fn of_call(error: &CallError) -> Self {
        let of = |wanted: usize, available: usize| Self::of(wanted as u64, available as u64, "");
        match *error {
            CallError::BadSize { got, expected, .. } => of(expected, got),
            CallError::BufferTooSmall { wanted, capacity } => of(wanted, capacity),
            CallError::TooManyObjects { limit, .. } | CallError::NoView { limit } => {
                Self::available(limit as u64, "")
            }
            CallError::NoSuchGroup { group, num_groups } => Self::of(group, num_groups, ""),
            _ => Self::NONE,
        }
    }

    fn of_failure(failure: &Failure) -> Self {
        match failure {
            Failure::Call(error) => Self::of_call(error),
            Failure::Item { index, error } => Self { index: *index as u64, ..Self::of_call(error) },
            Failure::Cache(error) => Self::of_cache(error),
            Failure::Batch(refused) => {
                Self { index: refused.index as u64, ..Self::of_cache(&refused.source) }
            }
            Failure::Config(error) => Self::of_config(error),
            Failure::Save(error) => Self::of_save(error),
            Failure::Plan(error) | Failure::Open(OpenError::Plan(error)) => Self::of_plan(error),
            Failure::Device(error) | Failure::Open(OpenError::Device(error)) => {
                Self::of_device(error)
            }
            Failure::Invariant(_) | Failure::Panic(_) | Failure::Text(_) => Self::NONE,
        }
    }
}

/// A C string of fixed size; what does not fit is cut, at a character.
#[derive(Clone, Copy, Debug)]
struct Text<const N: usize> {
    bytes: [u8; N],
    len: usize,
}

impl<const N: usize> Text<N> {
    const EMPTY: Self = Self { bytes: [0; N], len: 0 };

    fn to_c(self) -> [c_char; N] {
        self.bytes.map(|byte| c_char::from_ne_bytes([byte]))
    }
}

impl<const N: usize> fmt::Write for Text<N> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = N - 1 - self.len;
        let cut = (0..=room.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
        let text = &text.as_bytes()[..cut.unwrap_or(0)];
        self.bytes[self.len..self.len + text.len()].copy_from_slice(text);
        self.len += text.len();
        Ok(())
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_at_a_character() {
        let mut text = Text::<6>::EMPTY;
        write!(text, "abcd→").expect("cut");
        assert_eq!(&text.bytes, b"abcd\0\0");
        write!(text, "é").expect("cut");
        assert_eq!(&text.bytes, b"abcd\0\0");
        write!(text, "ef").expect("cut");
        assert_eq!(&text.bytes, b"abcde\0");
    }

    #[test]
    fn a_knob_is_a_key_and_nothing_else() {
        let knob = "limits.max_step_tokens (left out, it is the smallest attention window)";
        let error = CacheError::StepTooLarge { wanted: 3, limit: 2, knob };
        let facts = Facts::of_cache(&error);
        assert_eq!(&facts.knob.bytes[..facts.knob.len], b"limits.max_step_tokens");
        assert_eq!((facts.wanted, facts.available), (3, 2));
    }
}
