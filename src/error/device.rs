//! Devices that cannot be opened, and calls of them that failed.

use crate::units::{Bytes, grouped};

/// A device that cannot be opened, or a call of it that failed. Owns no heap memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// Host memory could not be allocated: for the pool, or for a table or buffer beside it.
    #[error(
        "the system did not give {} bytes of memory (system error {code}), of {} bytes that it has available; lower pool.capacity, limits.max_seqs or limits.max_seq_len",
        grouped(bytes.get()), grouped(available.get())
    )]
    OutOfMemory {
        /// How much was wanted.
        bytes: Bytes,
        /// The operating system's error number, 0 when it gave none.
        code: i32,
        /// What it said to have available just after that; 0 where it does not say.
        available: Bytes,
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
    /// Tensors in device memory were given to a device that computes in the host's.
    #[error("this device takes tensors in host memory only (device.kind = {kind:?})")]
    HostTensorsOnly {
        /// What device it is.
        kind: &'static str,
    },
    /// A stream was given to a device that has none.
    #[error("this device has no streams (device.kind = {kind:?})")]
    NoStreams {
        /// What device it is.
        kind: &'static str,
    },
    /// `device.kind = "cuda"`: there is no driver library.
    #[error(
        "device.kind = \"cuda\" needs NVIDIA's driver, and this machine has no libcuda; install the driver, or use \"cpu\""
    )]
    CudaNoDriver,
    /// The driver is there and sees no such GPU.
    #[error(
        "device.kind = \"cuda\": the driver sees {count} GPUs, so there is no GPU {ordinal}; check nvidia-smi, \
         CUDA_VISIBLE_DEVICES and device.ordinal, or use \"cpu\""
    )]
    CudaNoGpu {
        /// The GPU that was asked for, counted from 0.
        ordinal: u32,
        /// How many there are.
        count: u32,
    },
    /// The driver is older than what the kernels were compiled with.
    #[error(
        "the driver is of CUDA {}.{}, and the kernels of this build need {}.{} or later; update the driver, or build \
         with an older toolkit", driver.0, driver.1, needed.0, needed.1
    )]
    CudaDriverTooOld {
        /// What the driver says, (0, 0) when it does not even do that.
        driver: (u32, u32),
        /// What is needed.
        needed: (u32, u32),
    },
    /// kvpool was built without CUDA kernels.
    #[error(
        "this build of kvpool has no CUDA kernels ({why}); install the CUDA toolkit (or the wheel nvidia-cuda-nvcc) and \
         build again with KVPOOL_CUDA=require"
    )]
    CudaNotCompiled {
        /// Why not.
        why: &'static str,
    },
    /// None of the compiled kernels runs on this GPU.
    #[error(
        "the GPU is of compute capability {}.{}, and the kernels were compiled for {compiled}; build again with \
         KVPOOL_CUDA_ARCHS={}{}", capability.0, capability.1, capability.0, capability.1
    )]
    CudaOtherArchitecture {
        /// The GPU's compute capability.
        capability: (u32, u32),
        /// The architectures that were compiled, as `80,90+ptx`.
        compiled: &'static str,
    },
    /// The compiled kernels do not cover this plan.
    #[error(
        "there is no CUDA kernel {stem}… for cache.format = {format:?} and head_dim {head_dim}"
    )]
    CudaNoKernel {
        /// How its name begins.
        stem: &'static str,
        /// The cache's format.
        format: &'static str,
        /// Elements of a vector.
        head_dim: u32,
    },
    /// K and V of different element types.
    #[error("K and V are of different element types, which the CUDA kernels do not take")]
    CudaMixedTypes,
    /// The stream is being captured, and the call cannot be part of a graph: it copies from buffers
    /// of the host, which hold something else when the graph is played, or waits.
    #[error(
        "the stream is being captured, and this call cannot be part of a graph; set the stream and prepare the step \
         (Step::prepare) before the capture begins"
    )]
    CudaCapturing,
    /// A stream that is another one in each thread.
    #[error(
        "CU_STREAM_PER_THREAD is another stream in each thread that calls, so a cache that changes threads would lose \
         the order of its work; make a stream (cuStreamCreate, cudaStreamCreate) and set that"
    )]
    CudaStreamOfThread,
    /// More tokens in a call than the device was opened for.
    #[error("a step of {tokens} tokens is more than the {limit} of limits.max_batch_tokens")]
    StepTooLong {
        /// Tokens of the call.
        tokens: u64,
        /// Tokens that there is room for.
        limit: u64,
    },
    /// A tensor in device memory whose address the kernels cannot use.
    #[error("{what} lies at address {address:#x}, which is no multiple of 16 above 0")]
    CudaMisaligned {
        /// Which tensor.
        what: &'static str,
        /// Its address.
        address: u64,
    },
    /// The GPU's memory, or the host memory that it can read, does not suffice.
    #[error(
        "{call} of {} bytes: out of memory; the GPU has {} of {} bytes free; lower pool.capacity, or give \
         pool.capacity = \"budget:90%\"",
        grouped(bytes.get()), grouped(free.get()), grouped(total.get())
    )]
    CudaOutOfMemory {
        /// The driver call.
        call: &'static str,
        /// How much was wanted.
        bytes: Bytes,
        /// How much was free.
        free: Bytes,
        /// How much the GPU has in all.
        total: Bytes,
    },
    /// A call of the driver failed. Failures of kernels show in a later call.
    #[error("{call}{} failed: {name} ({code})", of_bytes(*bytes))]
    CudaCall {
        /// The driver call, or the kernel that was launched.
        call: &'static str,
        /// The driver's name of the error.
        name: &'static str,
        /// Its number.
        code: u32,
        /// The size that was asked for; 0 where there is none.
        bytes: Bytes,
    },
}

/// ` of N bytes`, or nothing.
fn of_bytes(bytes: Bytes) -> String {
    match bytes.get() {
        0 => String::new(),
        bytes => format!(" of {} bytes", grouped(bytes)),
    }
}
