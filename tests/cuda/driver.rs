//! The few calls of the driver that the tests make themselves, and the emulator's counters.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_void};

use cudarc::driver::sys;
use kvpool::device::{DType, DeviceTensor};

/// Device memory of a test.
pub(crate) struct Memory {
    pub(crate) address: u64,
}

impl Memory {
    pub(crate) fn new(bytes: usize) -> Self {
        let mut address = 0;
        let bytes = bytes.max(16);
        // SAFETY: a place for an address.
        let done = unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) };
        assert_eq!(done, sys::CUresult::CUDA_SUCCESS);
        Self { address }
    }

    /// With these numbers in it.
    pub(crate) fn of(values: &[f32]) -> Self {
        let memory = Self::new(size_of_val(values));
        // SAFETY: as many bytes as were allocated.
        let done = unsafe {
            sys::cuMemcpyHtoD_v2(memory.address, values.as_ptr().cast(), size_of_val(values))
        };
        assert_eq!(done, sys::CUresult::CUDA_SUCCESS);
        memory
    }

    /// The numbers in it. Waits for the default stream only.
    pub(crate) fn read(&self, len: usize) -> Vec<f32> {
        let mut values = vec![f32::NAN; len];
        // SAFETY: no more bytes than were allocated.
        let done =
            unsafe { sys::cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), self.address, len * 4) };
        assert_eq!(done, sys::CUresult::CUDA_SUCCESS);
        values
    }

    /// Numbers that lie elsewhere in device memory. Waits for the default stream only.
    pub(crate) fn read_u32(address: u64, len: usize) -> Vec<u32> {
        let mut values = vec![u32::MAX - 1; len];
        // SAFETY: the emulator checks that so many bytes are there.
        let done = unsafe { sys::cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), address, len * 4) };
        assert_eq!(done, sys::CUresult::CUDA_SUCCESS);
        values
    }

    pub(crate) fn tensor(&self, len: usize) -> DeviceTensor {
        // SAFETY: the tests keep memory until they have synchronised.
        unsafe { DeviceTensor::new(self.address, len, DType::F32) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it was allocated once.
        let _ = unsafe { sys::cuMemFree_v2(self.address) };
    }
}

/// The GPU's primary context, current on this thread.
pub(crate) fn enter() {
    let (mut context, mut device) = (std::ptr::null_mut(), 0);
    // SAFETY: the only flags that there are.
    assert_eq!(unsafe { sys::cuInit(0) }, sys::CUresult::CUDA_SUCCESS);
    // SAFETY: a place for a handle.
    assert_eq!(unsafe { sys::cuDeviceGet(&raw mut device, 0) }, sys::CUresult::CUDA_SUCCESS);
    // SAFETY: a place for a handle. It is kept until the process ends.
    let got = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device) };
    assert_eq!(got, sys::CUresult::CUDA_SUCCESS);
    // SAFETY: the context is held.
    let pushed = unsafe { sys::cuCtxPushCurrent_v2(context) };
    assert_eq!(pushed, sys::CUresult::CUDA_SUCCESS);
}

/// Undoes [`enter`].
pub(crate) fn forget() {
    leave();
    // SAFETY: `enter` has retained it.
    let released = unsafe { sys::cuDevicePrimaryCtxRelease_v2(0) };
    assert_eq!(released, sys::CUresult::CUDA_SUCCESS);
}

/// Takes the context off that was made current last on this thread.
pub(crate) fn leave() {
    let mut context = std::ptr::null_mut();
    // SAFETY: a place for a handle.
    let popped = unsafe { sys::cuCtxPopCurrent_v2(&raw mut context) };
    assert_eq!(popped, sys::CUresult::CUDA_SUCCESS);
}

/// The context that is current on this thread; 0 where none is.
pub(crate) fn current_context() -> usize {
    let mut context = std::ptr::null_mut();
    // SAFETY: a place for a handle.
    let got = unsafe { sys::cuCtxGetCurrent(&raw mut context) };
    assert_eq!(got, sys::CUresult::CUDA_SUCCESS);
    context.addr()
}

/// Waits for all work of the context.
pub(crate) fn wait() {
    // SAFETY: the context is current.
    assert_eq!(unsafe { sys::cuCtxSynchronize() }, sys::CUresult::CUDA_SUCCESS);
}

/// A function of the emulator (csrc/emulator/kvpool_emu.h).
///
/// # Safety
/// `F` is its type.
unsafe fn emulator<F: Copy>(name: &str) -> F {
    // SAFETY: the library is loaded, since the device is open.
    let library = unsafe { sys::culib() };
    // SAFETY: the caller's promise.
    *unsafe { library.get::<F>(name.as_bytes()) }.expect("the emulator")
}

/// One of the emulator's counters.
pub(crate) fn counter(name: &str) -> u64 {
    let name = CString::new(name).unwrap();
    // SAFETY: its type.
    let function: unsafe extern "C" fn(*const c_char) -> u64 =
        unsafe { emulator("kvpool_emu_counter") };
    // SAFETY: a text with an end.
    let count = unsafe { function(name.as_ptr()) };
    assert_ne!(count, u64::MAX, "{name:?} is no counter");
    count
}

/// What a kernel has read and written: bytes read, bytes written, sectors read, sectors written.
pub(crate) fn traffic(kernel: &str) -> [u64; 4] {
    let name = CString::new(kernel).unwrap();
    let mut numbers = [0; 4];
    // SAFETY: its type.
    let function: unsafe extern "C" fn(*const c_char, *mut u64) -> u64 =
        unsafe { emulator("kvpool_emu_traffic") };
    // SAFETY: a text with an end, and room for four numbers.
    unsafe { function(name.as_ptr(), numbers.as_mut_ptr()) };
    numbers
}

/// How often a kernel has been launched.
pub(crate) fn launches(kernel: &str) -> u64 {
    let name = CString::new(kernel).unwrap();
    let mut numbers = [0_u64; 4];
    // SAFETY: its type.
    let function: unsafe extern "C" fn(*const c_char, *mut u64) -> u64 =
        unsafe { emulator("kvpool_emu_traffic") };
    // SAFETY: a text with an end, and room for four numbers.
    unsafe { function(name.as_ptr(), numbers.as_mut_ptr()) }
}

/// Sets all counters to 0.
pub(crate) fn reset_counters() {
    // SAFETY: its type.
    let function: unsafe extern "C" fn() = unsafe { emulator("kvpool_emu_reset_counters") };
    // SAFETY: nothing to keep.
    unsafe { function() };
}

/// What is given back, and is not yet: memory, the host's too, modules, events, streams, and holds
/// on the context.
pub(crate) fn live() -> [u64; 8] {
    [
        "live_bytes",
        "live_allocations",
        "live_host_bytes",
        "live_host_allocations",
        "live_modules",
        "live_events",
        "live_streams",
        "live_contexts",
    ]
    .map(counter)
}

/// The entry points that were called since the counters were reset, and how often each.
pub(crate) fn calls() -> BTreeMap<String, u64> {
    unsafe extern "C" fn note(call: *const c_char, count: u64, calls: *mut c_void) {
        // SAFETY: the map below.
        let calls = unsafe { &mut *calls.cast::<BTreeMap<String, u64>>() };
        // SAFETY: a text with an end.
        let call = unsafe { CStr::from_ptr(call) };
        calls.insert(call.to_str().unwrap().to_owned(), count);
    }
    type Note = unsafe extern "C" fn(*const c_char, u64, *mut c_void);
    let mut calls = BTreeMap::new();
    // SAFETY: its type.
    let function: unsafe extern "C" fn(Note, *mut c_void) =
        unsafe { emulator("kvpool_emu_each_call") };
    // SAFETY: it calls `note` with the map, and keeps neither.
    unsafe { function(note, (&raw mut calls).cast()) };
    calls
}

/// The kernels that were launched since the counters were reset.
pub(crate) fn kernels() -> Vec<String> {
    unsafe extern "C" fn note(kernel: *const c_char, kernels: *mut c_void) {
        // SAFETY: the list below.
        let kernels = unsafe { &mut *kernels.cast::<Vec<String>>() };
        // SAFETY: a text with an end.
        let kernel = unsafe { CStr::from_ptr(kernel) };
        kernels.push(kernel.to_str().unwrap().to_owned());
    }
    type Note = unsafe extern "C" fn(*const c_char, *mut c_void);
    let mut kernels = Vec::new();
    // SAFETY: its type.
    let function: unsafe extern "C" fn(Note, *mut c_void) =
        unsafe { emulator("kvpool_emu_each_kernel") };
    // SAFETY: it calls `note` with the list, and keeps neither.
    unsafe { function(note, (&raw mut kernels).cast()) };
    kernels
}

/// The call, or kernel, that failed as planned last.
pub(crate) fn last_failure() -> String {
    // SAFETY: its type.
    let function: unsafe extern "C" fn() -> *const c_char =
        unsafe { emulator("kvpool_emu_last_failure") };
    // SAFETY: nothing to keep.
    let call = unsafe { function() };
    // SAFETY: a text with an end, which is there until the next call.
    unsafe { CStr::from_ptr(call) }.to_str().unwrap().to_owned()
}

/// Makes calls fail, as `call:n:code`; `None` forgets it.
pub(crate) fn fail(plan: Option<&str>) {
    let plan = plan.map(|plan| CString::new(plan).unwrap());
    let plan = plan.as_ref().map_or(std::ptr::null(), |plan| plan.as_ptr());
    // SAFETY: its type.
    let function: unsafe extern "C" fn(*const c_char) -> i32 =
        unsafe { emulator("kvpool_emu_fail") };
    // SAFETY: a text with an end, or none.
    assert_eq!(unsafe { function(plan) }, 1, "a plan that the emulator takes");
}
