//! Devices that cannot be opened, and calls of them that failed.

use crate::units::{Bytes, grouped};

/// A device that cannot be opened, or a call of it that failed. Owns no heap memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The memory could not be allocated.
    #[error("the device could not allocate {} bytes (system error {code}); lower pool.capacity", grouped(bytes.get()))]
    OutOfMemory {
        /// How much was wanted.
        bytes: Bytes,
        /// The operating system's error number, 0 when it gave none.
        code: i32,
    },
    /// The requested kernels need instructions that this CPU does not have.
    #[error("device.kernel = {kernel:?} needs {needs}, which this CPU does not have; use \"auto\"")]
    KernelUnsupported {
        /// The kernels asked for.
        kernel: &'static str,
        /// The instructions.
        needs: &'static str,
    },
    /// A worker thread could not be started.
    #[error(
        "worker thread {index} could not be started (system error {code}); lower device.threads"
    )]
    Thread {
        /// Which.
        index: u32,
        /// The operating system's error number, 0 when it gave none.
        code: i32,
    },
    /// A layout whose sizes do not follow from one another, so that its rows could overlap.
    #[error(
        "the layout of a layer group is not one that a plan computes; do not change a plan's numbers"
    )]
    BadLayout,
    /// A worker panicked: a defect of kvpool. The call's outputs are not valid.
    #[error(
        "a worker thread panicked inside a kernel; this is a defect of kvpool, please report it"
    )]
    WorkerPanicked,
    /// A range outside the pool.
    #[error("bytes {offset}..{} lie outside the pool of {} bytes", offset.saturating_add(*len), grouped(pool.get()))]
    OutOfRange {
        /// First byte.
        offset: u64,
        /// Length.
        len: u64,
        /// Size of the pool.
        pool: Bytes,
    },
}
