//! The calls that need a current context: memory, copies, kernels, waiting.

use std::ffi::{c_int, c_void};
use std::ptr::{from_ref, null_mut};

use cudarc::driver::sys::{self, CUfunction_attribute, CUresult, CUstreamCaptureStatus};

use super::{Entered, Event, Function, Stream, check, check_sized, name_of};
use crate::error::DeviceError;
use crate::units::Bytes;

/// How a kernel is launched.
#[derive(Clone, Copy, Debug)]
pub(in crate::device::cuda) struct Launch {
    pub(in crate::device::cuda) function: Function,
    /// Thread blocks, in x and y.
    pub(in crate::device::cuda) grid: (u32, u32),
    /// Threads of a block.
    pub(in crate::device::cuda) block: u32,
    /// Bytes of dynamic shared memory.
    pub(in crate::device::cuda) shared_bytes: u32,
}

impl Entered<'_> {
    /// Free and total bytes of the GPU.
    pub(in crate::device::cuda) fn memory(&self) -> Result<(Bytes, Bytes), DeviceError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: places for two numbers.
        let result = unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) };
        check("cuMemGetInfo_v2", result)?;
        Ok((Bytes(free as u64), Bytes(total as u64)))
    }

    /// The error of an allocation that failed.
    fn refused(&self, call: &'static str, bytes: Bytes, result: CUresult) -> DeviceError {
        let said =
            DeviceError::CudaCall { call, name: name_of(result), code: result as u32, bytes };
        match self.memory() {
            Ok((free, total)) if result == CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                DeviceError::CudaOutOfMemory { call, bytes, free, total }
            }
            _ => said,
        }
    }

    /// Allocates device memory; gives its address.
    pub(in crate::device::cuda) fn allocate(&self, bytes: Bytes) -> Result<u64, DeviceError> {
        let mut address = 0;
        let size = usize::try_from(bytes.get()).unwrap_or(usize::MAX);
        // SAFETY: a place for an address.
        let result = unsafe { sys::cuMemAlloc_v2(&raw mut address, size) };
        if result == CUresult::CUDA_SUCCESS {
            return Ok(address);
        }
        Err(self.refused("cuMemAlloc_v2", bytes, result))
    }

    /// Frees what [`Entered::allocate`] gave.
    ///
    /// # Safety
    /// The address is from there, was not freed yet, and no work under way uses it.
    pub(in crate::device::cuda) unsafe fn free(&self, address: u64) {
        // SAFETY: the caller's promise. Nobody is there to be told of a failure.
        let _ = unsafe { sys::cuMemFree_v2(address) };
    }

    /// Allocates host memory that the GPU copies from and to by itself.
    pub(in crate::device::cuda) fn allocate_host(
        &self,
        bytes: Bytes,
    ) -> Result<*mut u8, DeviceError> {
        let mut place = null_mut();
        let size = usize::try_from(bytes.get()).unwrap_or(usize::MAX);
        // SAFETY: a place for a pointer.
        let result = unsafe { sys::cuMemHostAlloc(&raw mut place, size, 0) };
        if result == CUresult::CUDA_SUCCESS && !place.is_null() {
            return Ok(place.cast());
        }
        Err(self.refused("cuMemHostAlloc", bytes, result))
    }

    /// Frees what [`Entered::allocate_host`] gave.
    ///
    /// # Safety
    /// The pointer is from there, was not freed yet, and nothing uses it.
    pub(in crate::device::cuda) unsafe fn free_host(&self, place: *mut u8) {
        // SAFETY: the caller's promise.
        let _ = unsafe { sys::cuMemFreeHost(place.cast()) };
    }

    /// Puts a copy from the host into a stream.
    ///
    /// # Safety
    /// `from` is pinned memory that nobody writes or frees before the copy is done, or other memory
    /// that nobody writes or frees before the stream was waited for; the destination is device
    /// memory of at least so many bytes.
    pub(in crate::device::cuda) unsafe fn upload(
        &self,
        to: u64,
        from: &[u8],
        stream: Stream,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        let result =
            unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), stream.0) };
        check_sized("cuMemcpyHtoDAsync_v2", Bytes(from.len() as u64), result)
    }

    /// Puts a copy to the host into a stream.
    ///
    /// # Safety
    /// `to` is memory of at least `len` bytes: pinned, and nobody reads, writes or frees it before
    /// the copy is done; or other memory, the same before the stream was waited for. The source is
    /// device memory of at least so many bytes.
    pub(in crate::device::cuda) unsafe fn download(
        &self,
        to: *mut u8,
        from: u64,
        len: usize,
        stream: Stream,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        let result = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, len, stream.0) };
        check_sized("cuMemcpyDtoHAsync_v2", Bytes(len as u64), result)
    }

    /// Puts a copy within device memory into a stream.
    ///
    /// # Safety
    /// Both ranges are device memory, and do not overlap.
    pub(in crate::device::cuda) unsafe fn copy(
        &self,
        to: u64,
        from: u64,
        len: u64,
        stream: Stream,
    ) -> Result<(), DeviceError> {
        let size = usize::try_from(len).unwrap_or(usize::MAX);
        // SAFETY: the caller's promise.
        let result = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, size, stream.0) };
        check_sized("cuMemcpyDtoDAsync_v2", Bytes(len), result)
    }

    /// Puts a filling of device memory into a stream.
    ///
    /// # Safety
    /// The range is device memory.
    pub(in crate::device::cuda) unsafe fn fill(
        &self,
        to: u64,
        byte: u8,
        len: u64,
        stream: Stream,
    ) -> Result<(), DeviceError> {
        let size = usize::try_from(len).unwrap_or(usize::MAX);
        // SAFETY: the caller's promise.
        let result = unsafe { sys::cuMemsetD8Async(to, byte, size, stream.0) };
        check_sized("cuMemsetD8Async", Bytes(len), result)
    }

    /// Allows a kernel so much dynamic shared memory, and has it loaded.
    pub(in crate::device::cuda) fn allow_shared(
        &self,
        function: Function,
        bytes: u32,
    ) -> Result<(), DeviceError> {
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let value = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        // SAFETY: a kernel of a module that is loaded.
        let result = unsafe { sys::cuFuncSetAttribute(function.0, attribute, value) };
        check_sized("cuFuncSetAttribute", Bytes(bytes.into()), result)
    }

    /// Puts a kernel into a stream. Its one parameter is a struct, which the driver copies.
    ///
    /// # Safety
    /// `P` is the struct that the kernel takes, and the memory that it names is there and is used
    /// as the kernel's description says.
    pub(in crate::device::cuda) unsafe fn launch<P>(
        &self,
        launch: Launch,
        params: &P,
        stream: Stream,
    ) -> Result<(), DeviceError> {
        let (x, y) = launch.grid;
        let mut params = [from_ref(params).cast_mut().cast::<c_void>()];
        // SAFETY: the caller's promise; the list has one entry, as the kernel has one parameter.
        let result = unsafe {
            sys::cuLaunchKernel(
                launch.function.0,
                x,
                y,
                1,
                launch.block,
                1,
                1,
                launch.shared_bytes,
                stream.0,
                params.as_mut_ptr(),
                null_mut(),
            )
        };
        check("cuLaunchKernel", result)
    }

    /// Waits until all that was put into a stream is done.
    pub(in crate::device::cuda) fn wait_for_stream(
        &self,
        stream: Stream,
    ) -> Result<(), DeviceError> {
        // SAFETY: a stream of this context.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream.0) })
    }

    /// Refuses a stream that is being captured: a graph would repeat what comes next with what the
    /// host's buffers hold by then, an event that is recorded there cannot be asked any more, and
    /// waiting spoils the capture.
    pub(in crate::device::cuda) fn no_capture(&self, stream: Stream) -> Result<(), DeviceError> {
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: a place for a status, and a stream of this context.
        let result = unsafe { sys::cuStreamIsCapturing(stream.0, &raw mut status) };
        check("cuStreamIsCapturing", result)?;
        match status {
            CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => Ok(()),
            _ => Err(DeviceError::CudaCapturing),
        }
    }

    /// The event is done once everything that is in the stream now is.
    pub(in crate::device::cuda) fn record(
        &self,
        event: &Event,
        stream: Stream,
    ) -> Result<(), DeviceError> {
        // SAFETY: handles of this context.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.event, stream.0) })
    }

    /// Whether an event is done.
    pub(in crate::device::cuda) fn is_done(&self, event: &Event) -> Result<bool, DeviceError> {
        // SAFETY: a handle of this context.
        let result = unsafe { sys::cuEventQuery(event.event) };
        if result == CUresult::CUDA_ERROR_NOT_READY {
            return Ok(false);
        }
        check("cuEventQuery", result)?;
        Ok(true)
    }

    /// Waits until an event is done.
    pub(in crate::device::cuda) fn wait_for(&self, event: &Event) -> Result<(), DeviceError> {
        // SAFETY: a handle of this context.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(event.event) })
    }

    /// What is put into a stream from here on begins when the event is done.
    pub(in crate::device::cuda) fn order_behind(
        &self,
        stream: Stream,
        event: &Event,
    ) -> Result<(), DeviceError> {
        // SAFETY: handles of this context; 0 are the only flags.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream.0, event.event, 0) })
    }
}
