//! The driver's calls that are made, each checked: the only files that name cudarc.
//!
//! cudarc opens `libcuda` at run time, on the first call, and panics when it is not there or lacks
//! the symbol of a call. [`Driver::load`] looks first: for the library, and for each symbol in
//! [`SYMBOLS`]. All calls that need a context are methods of [`Entered`], which exists only while
//! the context is current; the caller's own context is current again behind it.

mod calls;

pub(super) use calls::Launch;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute, CUresult};

use crate::error::DeviceError;
use crate::units::Bytes;

/// Every entry point that is called.
const SYMBOLS: [&str; 36] = [
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuInit",
    "cuLaunchKernel",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamIsCapturing",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
];

/// The symbol by which `csrc/emulator` makes itself known.
const EMULATOR_SYMBOL: &str = "kvpool_emu_version";

/// Flags of streams and events.
const STREAM_NON_BLOCKING: u32 = 1;
const EVENT_DISABLE_TIMING: u32 = 2;

/// `CU_STREAM_PER_THREAD`: a handle that stands for a stream of whichever thread makes the call.
const STREAM_PER_THREAD: usize = 2;

/// Makes an error of what a call gave.
fn check(call: &'static str, result: CUresult) -> Result<(), DeviceError> {
    check_sized(call, Bytes::ZERO, result)
}

/// As [`check`], for a call about so many bytes.
fn check_sized(call: &'static str, bytes: Bytes, result: CUresult) -> Result<(), DeviceError> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(DeviceError::CudaCall { call, name: name_of(result), code: result as u32, bytes })
}

/// The driver's name of an error.
fn name_of(result: CUresult) -> &'static str {
    let mut name: *const c_char = std::ptr::null();
    // SAFETY: `name` is a place for a pointer; the library is loaded, since it gave the result.
    let known = unsafe { sys::cuGetErrorName(result, &raw mut name) };
    if known != CUresult::CUDA_SUCCESS || name.is_null() {
        return "an error without a name";
    }
    // SAFETY: the driver gives a text with an end, which lives as long as the library, and cudarc
    // never unloads that.
    let name: &'static CStr = unsafe { CStr::from_ptr(name) };
    name.to_str().unwrap_or("an error with an odd name")
}

/// The driver library, loaded and complete.
#[derive(Clone, Copy, Debug)]
pub(super) struct Driver {
    emulated: bool,
}

impl Driver {
    /// Loads the library.
    ///
    /// # Errors
    /// [`DeviceError::CudaNoDriver`]; [`DeviceError::CudaDriverTooOld`] when it lacks a call.
    pub(super) fn load() -> Result<Self, DeviceError> {
        // SAFETY: opening the driver's library runs its initialisers, which is what it is for.
        if !unsafe { sys::is_culib_present() } {
            return Err(DeviceError::CudaNoDriver);
        }
        // SAFETY: as above; it does not panic, since the library is there.
        let library = unsafe { sys::culib() };
        let has = |name: &str| {
            // SAFETY: the symbol is only looked for, and never used as the type that is named.
            unsafe { library.get::<*const c_void>(name.as_bytes()) }.is_ok()
        };
        let driver = Self { emulated: has(EMULATOR_SYMBOL) };
        if SYMBOLS.iter().all(|name| has(name)) {
            return Ok(driver);
        }
        let version = if has("cuDriverGetVersion") { driver.version().ok() } else { None };
        let needed = super::images::OLDEST_DRIVER;
        Err(DeviceError::CudaDriverTooOld { driver: version.unwrap_or((0, 0)), needed })
    }

    /// Whether it is the stand-in of `csrc/emulator`.
    pub(super) const fn emulated(self) -> bool {
        self.emulated
    }

    /// The CUDA version that the driver supports.
    pub(super) fn version(self) -> Result<(u32, u32), DeviceError> {
        let mut version: c_int = 0;
        // SAFETY: a place for a number; this call needs no initialisation.
        check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
        let version = version.unsigned_abs();
        Ok((version / 1000, version % 1000 / 10))
    }

    /// Initialises the driver, and counts the GPUs; 0 where it finds none.
    pub(super) fn count(self) -> Result<u32, DeviceError> {
        // SAFETY: the only flags that there are.
        let result = unsafe { sys::cuInit(0) };
        if result == CUresult::CUDA_ERROR_NO_DEVICE {
            return Ok(0);
        }
        check("cuInit", result)?;
        let mut count: c_int = 0;
        // SAFETY: a place for a number.
        check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
        Ok(count.unsigned_abs())
    }

    /// One of the GPUs; [`Driver::count`] has been called.
    pub(super) fn gpu(self, ordinal: u32) -> Result<Gpu, DeviceError> {
        let mut device = 0;
        let ordinal = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: a place for a handle.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, ordinal) })?;
        Ok(Gpu { device })
    }
}

/// A GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gpu {
    device: sys::CUdevice,
}

impl Gpu {
    /// What its maker calls it.
    pub(super) fn name(self) -> Result<String, DeviceError> {
        let mut name = [0_u8; 128];
        let len = c_int::try_from(name.len()).unwrap_or(0);
        // SAFETY: room for `len` bytes; the driver writes an end.
        let result = unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), len, self.device) };
        check("cuDeviceGetName", result)?;
        let text = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        Ok(text.to_string_lossy().into_owned())
    }

    /// Its compute capability.
    pub(super) fn capability(self) -> Result<(u32, u32), DeviceError> {
        let major = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
        let minor = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR;
        Ok((self.attribute(major)?, self.attribute(minor)?))
    }

    /// Its multiprocessors, at least 1.
    pub(super) fn multiprocessors(self) -> Result<u32, DeviceError> {
        let count = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        Ok(self.attribute(count)?.max(1))
    }

    /// All of its memory.
    pub(super) fn total_memory(self) -> Result<Bytes, DeviceError> {
        let mut bytes = 0;
        // SAFETY: a place for a number.
        let result = unsafe { sys::cuDeviceTotalMem_v2(&raw mut bytes, self.device) };
        check("cuDeviceTotalMem_v2", result)?;
        Ok(Bytes(bytes as u64))
    }

    fn attribute(self, which: CUdevice_attribute) -> Result<u32, DeviceError> {
        let mut value: c_int = 0;
        // SAFETY: a place for a number, and a handle that the driver gave.
        let result = unsafe { sys::cuDeviceGetAttribute(&raw mut value, which, self.device) };
        check("cuDeviceGetAttribute", result)?;
        Ok(value.unsigned_abs())
    }

    /// Holds on to its primary context: the one that the runtime API and frameworks use too, so
    /// that their pointers and streams are ours.
    pub(super) fn context(self) -> Result<Arc<Context>, DeviceError> {
        let mut context = null_mut();
        // SAFETY: a place for a handle.
        let result = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, self.device) };
        check("cuDevicePrimaryCtxRetain", result)?;
        Ok(Arc::new(Context { device: self.device, context }))
    }
}

/// A GPU's primary context, held until this is dropped.
#[derive(Debug)]
pub(super) struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
}

// SAFETY: the handle may be used from any thread; the driver does its own locking.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Makes the context current on this thread until the result is dropped.
    pub(super) fn enter(&self) -> Result<Entered<'_>, DeviceError> {
        // SAFETY: the context is held.
        check("cuCtxPushCurrent_v2", unsafe { sys::cuCtxPushCurrent_v2(self.context) })?;
        Ok(Entered { context: PhantomData, on_this_thread: PhantomData })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was retained once for this. Nobody is there to be told of a failure.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// Shows that a context is current on this thread.
#[derive(Debug)]
pub(super) struct Entered<'a> {
    context: PhantomData<&'a Context>,
    on_this_thread: PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut context = null_mut();
        // SAFETY: a place for a handle; what was pushed by `enter` is on top, since guards are
        // dropped in the reverse order.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut context) };
    }
}

/// A stream: the work that is put into it is done in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stream(sys::CUstream);

// SAFETY: a handle, which the driver takes from any thread.
unsafe impl Send for Stream {}

impl Stream {
    /// A stream that someone else made; null is the default stream.
    ///
    /// # Errors
    /// [`DeviceError::CudaStreamOfThread`]
    pub(super) fn foreign(stream: *mut c_void) -> Result<Self, DeviceError> {
        if stream.addr() == STREAM_PER_THREAD {
            return Err(DeviceError::CudaStreamOfThread);
        }
        Ok(Self(stream.cast()))
    }
}

/// A stream of our own.
#[derive(Debug)]
pub(super) struct OwnStream {
    context: Arc<Context>,
    stream: Stream,
}

impl OwnStream {
    /// A stream that does not wait for the default one.
    pub(super) fn new(context: &Arc<Context>, _: &Entered<'_>) -> Result<Self, DeviceError> {
        let mut stream = null_mut();
        // SAFETY: a place for a handle; the context is current.
        let result = unsafe { sys::cuStreamCreate(&raw mut stream, STREAM_NON_BLOCKING) };
        check("cuStreamCreate", result)?;
        Ok(Self { context: Arc::clone(context), stream: Stream(stream) })
    }

    pub(super) const fn stream(&self) -> Stream {
        self.stream
    }
}

impl Drop for OwnStream {
    fn drop(&mut self) {
        if let Ok(_cx) = self.context.enter() {
            // SAFETY: it is ours; the driver finishes what is in it.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.stream.0) };
        }
    }
}

/// A point in a stream that can be waited for.
#[derive(Debug)]
pub(super) struct Event {
    context: Arc<Context>,
    event: sys::CUevent,
}

// SAFETY: a handle, which the driver takes from any thread.
unsafe impl Send for Event {}

impl Event {
    /// An event, which counts as done until it is recorded.
    pub(super) fn new(context: &Arc<Context>, _: &Entered<'_>) -> Result<Self, DeviceError> {
        let mut event = null_mut();
        // SAFETY: a place for a handle; the context is current.
        let result = unsafe { sys::cuEventCreate(&raw mut event, EVENT_DISABLE_TIMING) };
        check("cuEventCreate", result)?;
        Ok(Self { context: Arc::clone(context), event })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_cx) = self.context.enter() {
            // SAFETY: it is ours; the driver keeps what still needs it.
            let _ = unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}

/// A loaded image.
#[derive(Debug)]
pub(super) struct Module {
    context: Arc<Context>,
    module: sys::CUmodule,
}

// SAFETY: a handle, which the driver takes from any thread.
unsafe impl Send for Module {}

impl Module {
    /// Loads an image of kernels.
    ///
    /// # Errors
    /// The driver's own; what it says of images is told by its number (see [`not_for_this_gpu`]).
    pub(super) fn load(
        context: &Arc<Context>,
        _: &Entered<'_>,
        image: &[u8],
    ) -> Result<Self, DeviceError> {
        let mut module = null_mut();
        // SAFETY: a fatbin tells its own length, and a text has an end: both were embedded whole.
        let result = unsafe { sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast()) };
        check_sized("cuModuleLoadData", Bytes(image.len() as u64), result)?;
        Ok(Self { context: Arc::clone(context), module })
    }

    /// A kernel by its name; `None` when the image does not have it.
    pub(super) fn function(&self, name: &CStr) -> Result<Option<Function>, DeviceError> {
        let mut function = null_mut();
        // SAFETY: a module that is loaded, and a text with an end.
        let result =
            unsafe { sys::cuModuleGetFunction(&raw mut function, self.module, name.as_ptr()) };
        if result == CUresult::CUDA_ERROR_NOT_FOUND {
            return Ok(None);
        }
        check("cuModuleGetFunction", result)?;
        Ok(Some(Function(function)))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Ok(_cx) = self.context.enter() {
            // SAFETY: the device that owns it has waited for its kernels.
            let _ = unsafe { sys::cuModuleUnload(self.module) };
        }
    }
}

/// A kernel of a loaded image; the image stays loaded as long as the device is open.
#[derive(Clone, Copy, Debug)]
pub(super) struct Function(sys::CUfunction);

// SAFETY: a handle, which the driver takes from any thread.
unsafe impl Send for Function {}

/// Whether loading an image failed because it holds nothing for the GPU.
pub(super) fn not_for_this_gpu(error: DeviceError) -> bool {
    let DeviceError::CudaCall { code, .. } = error else { return false };
    code == CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU as u32
}

/// Whether loading an image failed because the driver does not know its form.
pub(super) fn beyond_this_driver(error: DeviceError) -> bool {
    let DeviceError::CudaCall { code, .. } = error else { return false };
    [CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION, CUresult::CUDA_ERROR_INVALID_PTX]
        .iter()
        .any(|known| *known as u32 == code)
}
