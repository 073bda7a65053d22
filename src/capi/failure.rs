//! Failures and their statuses.

use super::bindings::*;
use crate::cache::ReservationRefused;
use crate::error::{
    BatchRefused, CacheError, ConfigError, DeviceError, InvariantError, OpenError, PlanError,
    SaveError,
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
    #[error(
        "this is the child of a fork, and its parent had opened a cache: it may close caches and nothing else; fork before the first cache is opened, or let the child start a program"
    )]
    Forked,
    #[error(
        "{limit} handles wait to be given back, more than there are good ones; give back each once"
    )]
    TooManyWait { limit: usize },
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
    #[error("{out} overlaps {other}; give each memory of its own")]
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
    #[error("{first} and {what} lie in different memories; give all tensors of a call in one")]
    MixedMemory { first: &'static str, what: &'static str },
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
    pub(super) const fn status(&self) -> kvpool_status_t {
        match self {
            Self::NullPointer { .. } => KVPOOL_NULL_POINTER,
            Self::Misaligned { .. } | Self::BadArgument { .. } => KVPOOL_BAD_ARGUMENT,
            Self::BadSize { .. } => KVPOOL_BAD_SIZE,
            Self::BadHandle { .. } => KVPOOL_BAD_HANDLE,
            Self::StaleHandle { .. } | Self::Forked => KVPOOL_STALE_HANDLE,
            Self::ForeignHandle { .. } => KVPOOL_FOREIGN_HANDLE,
            Self::BufferTooSmall { .. } => KVPOOL_BUFFER_TOO_SMALL,
            Self::Busy | Self::InCallback | Self::TooManyWait { .. } => KVPOOL_BUSY,
            Self::StepOpen => KVPOOL_STEP_OPEN,
            Self::Overlap { .. } => KVPOOL_OVERLAP,
            Self::TooManyObjects { .. } => KVPOOL_TOO_MANY_OBJECTS,
            Self::Poisoned => KVPOOL_POISONED,
            Self::NoView { .. } => KVPOOL_NO_VIEW,
            Self::Nobody => KVPOOL_NOBODY,
            Self::MixedMemory { .. } => KVPOOL_WRONG_MEMORY,
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
        DeviceError::CudaMixedTypes
        | DeviceError::CudaMisaligned { .. }
        | DeviceError::CudaStreamOfThread
        | DeviceError::OutOfRange { .. } => KVPOOL_BAD_ARGUMENT,
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

    pub(super) fn status(&self) -> kvpool_status_t {
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
