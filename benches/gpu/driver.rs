//! The few calls of the driver that the benchmark makes itself: memory, a stream, events.

use cudarc::driver::sys;
use kvpool::device::{CudaStream, DType, DeviceTensor};

/// Ends the benchmark where the driver does not do what it is asked for.
fn ok(call: &str, result: sys::CUresult) {
    assert!(result == sys::CUresult::CUDA_SUCCESS, "{call}: {result:?}");
}

/// Makes the GPU's primary context current on this thread, for the rest of the program.
pub(crate) fn enter(ordinal: i32) {
    let (mut context, mut device) = (std::ptr::null_mut(), 0);
    // SAFETY: the only flags that there are.
    ok("cuInit", unsafe { sys::cuInit(0) });
    // SAFETY: a place for a handle.
    ok("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, ordinal) });
    // SAFETY: a place for a handle.
    let retained = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device) };
    ok("cuDevicePrimaryCtxRetain", retained);
    // SAFETY: the context is held.
    ok("cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(context) });
}

/// Free bytes of the GPU.
pub(crate) fn free_bytes() -> u64 {
    let (mut free, mut total) = (0, 0);
    // SAFETY: places for two numbers.
    ok("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) });
    free as u64
}

/// Device memory.
pub(crate) struct Memory {
    address: u64,
    bytes: usize,
}

impl Memory {
    pub(crate) fn new(bytes: usize) -> Self {
        let (mut address, bytes) = (0, bytes.max(16));
        // SAFETY: a place for an address.
        ok("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) });
        Self { address, bytes }
    }

    /// With these halves in it.
    pub(crate) fn of(values: &[half::f16]) -> Self {
        let memory = Self::new(size_of_val(values));
        let (to, from) = (memory.address, values.as_ptr().cast());
        // SAFETY: as many bytes as were allocated.
        ok("cuMemcpyHtoD", unsafe { sys::cuMemcpyHtoD_v2(to, from, size_of_val(values)) });
        memory
    }

    /// The first `len` halves, as a tensor.
    pub(crate) fn tensor(&self, len: usize) -> DeviceTensor {
        assert!(len * 2 <= self.bytes);
        // SAFETY: the benchmark keeps memory until the stream was waited for, and nothing but the
        // calls that get the tensor touches it.
        unsafe { DeviceTensor::new(self.address, len, DType::F16) }
    }

    /// The first `len` floats, as a tensor.
    pub(crate) fn floats(&self, len: usize) -> DeviceTensor {
        assert!(len * 4 <= self.bytes);
        // SAFETY: as above.
        unsafe { DeviceTensor::new(self.address, len, DType::F32) }
    }

    /// `len` floats from the float `from` on. Whoever wrote them has been waited for.
    pub(crate) fn read(&self, from: usize, len: usize) -> Vec<f32> {
        assert!((from + len) * 4 <= self.bytes);
        let mut values = vec![f32::NAN; len];
        let (to, from) = (values.as_mut_ptr().cast(), self.address + from as u64 * 4);
        // SAFETY: both have so many bytes.
        ok("cuMemcpyDtoH", unsafe { sys::cuMemcpyDtoH_v2(to, from, len * 4) });
        values
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it was allocated once, and what used it was waited for.
        let _ = unsafe { sys::cuMemFree_v2(self.address) };
    }
}

/// A stream with two events to time what is put into it. Kept until the program ends.
pub(crate) struct Stream {
    stream: sys::CUstream,
    from: sys::CUevent,
    to: sys::CUevent,
    elapsed: Elapsed,
}

/// `cuEventElapsedTime`. cudarc has its second version only, which drivers before CUDA 12.8 lack.
type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;

impl Stream {
    pub(crate) fn new() -> Self {
        let (mut stream, mut events) = (std::ptr::null_mut(), [std::ptr::null_mut(); 2]);
        let flag = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a place for a handle.
        ok("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut stream, flag) });
        for event in &mut events {
            // SAFETY: a place for a handle.
            ok("cuEventCreate", unsafe { sys::cuEventCreate(event, 0) });
        }
        let [from, to] = events;
        // SAFETY: the library is loaded, since it has answered.
        let library = unsafe { sys::culib() };
        // SAFETY: its type.
        let elapsed = unsafe { library.get::<Elapsed>(b"cuEventElapsedTime") };
        Self { stream, from, to, elapsed: *elapsed.expect("every driver has it") }
    }

    /// For the device under test.
    pub(crate) fn handle(&self) -> CudaStream {
        // SAFETY: it lives until the program ends.
        unsafe { CudaStream::new(self.stream.cast()) }
    }

    /// Microseconds that the GPU takes for what `work` puts into the stream.
    pub(crate) fn time(&self, work: impl FnOnce()) -> f64 {
        // SAFETY: both are alive.
        ok("cuEventRecord", unsafe { sys::cuEventRecord(self.from, self.stream) });
        work();
        // SAFETY: as above.
        ok("cuEventRecord", unsafe { sys::cuEventRecord(self.to, self.stream) });
        // SAFETY: the event is alive.
        ok("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.to) });
        let mut ms = 0.0;
        // SAFETY: a place for a number; both events are done.
        ok("cuEventElapsedTime", unsafe { (self.elapsed)(&raw mut ms, self.from, self.to) });
        f64::from(ms) * 1e3
    }

    /// Copies so many bytes from one place to another.
    pub(crate) fn copy(&self, to: &Memory, from: &Memory, bytes: usize) {
        assert!(bytes <= to.bytes && bytes <= from.bytes);
        // SAFETY: both have so many bytes.
        let copied =
            unsafe { sys::cuMemcpyDtoDAsync_v2(to.address, from.address, bytes, self.stream) };
        ok("cuMemcpyDtoDAsync", copied);
    }
}
