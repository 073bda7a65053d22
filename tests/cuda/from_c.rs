//! The C interface on the CUDA device.

use std::ffi::c_void;
use std::mem::zeroed;
use std::ptr::{null, null_mut};

use cudarc::driver::sys;
use kvpool::capi::*;

use super::driver::{self, Memory, counter};

const TOML: &str = "model = { num_layers = 1, num_q_heads = 2, num_kv_heads = 1, head_dim = 64 }\n\
    cache = { mode = 'paged', format = 'f16' }\n\
    limits = { max_seqs = 4, max_seq_len = 64, max_batch_tokens = 64 }\n\
    device = { kind = 'cuda' }";

/// An open cache.
fn open() -> kvpool_cache_t {
    // SAFETY: handles are numbers.
    let (mut config, mut plan, mut cache): (kvpool_config_t, kvpool_plan_t, kvpool_cache_t) =
        unsafe { zeroed() };
    let (text, name) = (TOML.as_ptr().cast(), c"test".as_ptr());
    // SAFETY: a text and its length, a C string, no overrides, a place.
    let status = unsafe { kvpool_config_parse(text, TOML.len(), name, null(), 0, &raw mut config) };
    assert_eq!(status, KVPOOL_OK);
    // SAFETY: a place.
    assert_eq!(unsafe { kvpool_plan_new(config, &raw mut plan) }, KVPOOL_OK);
    // SAFETY: a place.
    assert_eq!(unsafe { kvpool_cache_open(plan, &raw mut cache) }, KVPOOL_OK);
    assert_eq!(kvpool_plan_destroy(plan), KVPOOL_OK);
    assert_eq!(kvpool_config_destroy(config), KVPOOL_OK);
    cache
}

/// A step of so many tokens of a new sequence.
fn reserve(cache: kvpool_cache_t, prompt: &[u32]) -> kvpool_step_t {
    // SAFETY: numbers.
    let (mut begun, mut step): (kvpool_begun_t, kvpool_step_t) = unsafe { zeroed() };
    let size = size_of::<kvpool_begun_t>();
    // SAFETY: a prompt and its length, no options, a place and its size.
    let status = unsafe {
        kvpool_cache_begin(cache, prompt.as_ptr(), prompt.len(), null(), &raw mut begun, size)
    };
    assert_eq!(status, KVPOOL_OK);
    let num_tokens = u32::try_from(prompt.len()).unwrap();
    let item = kvpool_step_item_t { sequence: begun.sequence, num_tokens, reserved: 0 };
    // SAFETY: an item, no tokens, a place.
    let status =
        unsafe { kvpool_cache_reserve(cache, &raw const item, 1, null(), 0, &raw mut step) };
    assert_eq!(status, KVPOOL_OK);
    step
}

/// A tensor in device memory.
fn on_device(memory: &Memory, len: usize) -> kvpool_tensor_t {
    kvpool_tensor_t {
        data: std::ptr::with_exposed_provenance_mut::<c_void>(memory.address as usize),
        len: len as u64,
        dtype: KVPOOL_F32,
        memory: KVPOOL_DEVICE_MEMORY,
    }
}

/// "It must live until another is set, or the cache is closed": a view that is still out keeps the
/// pool's memory, and has nothing to do with the caller's stream.
#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn the_callers_stream_may_go_when_the_cache_is_closed() {
    driver::enter();
    let before = counter("live_bytes");
    let cache = open();
    // CU_STREAM_PER_THREAD
    let of_thread = std::ptr::without_provenance_mut(2);
    // SAFETY: a constant of the driver's.
    let status = unsafe { kvpool_cache_set_stream(cache, of_thread) };
    assert_eq!(status, KVPOOL_BAD_ARGUMENT);
    let mut stream: sys::CUstream = null_mut();
    // SAFETY: a place for a handle; the flag of streams that do not wait for the default one.
    let made = unsafe { sys::cuStreamCreate(&raw mut stream, 1) };
    assert_eq!(made, sys::CUresult::CUDA_SUCCESS);
    // SAFETY: the stream lives until the cache is closed.
    assert_eq!(unsafe { kvpool_cache_set_stream(cache, stream.cast()) }, KVPOOL_OK);
    let mut view: *mut DLManagedTensor = null_mut();
    // SAFETY: a place.
    assert_eq!(unsafe { kvpool_cache_dlpack(cache, 0, KVPOOL_K, &raw mut view) }, KVPOOL_OK);
    let step = reserve(cache, &[1; 40]);
    let memory = Memory::of(&[1.0; 40 * 64]);
    let tensor = on_device(&memory, 40 * 64);
    // SAFETY: two tensors in device memory.
    let status =
        unsafe { kvpool_step_append(cache, step, 0, &raw const tensor, &raw const tensor) };
    assert_eq!(status, KVPOOL_OK);
    assert_eq!(kvpool_cache_close(cache), KVPOOL_OK);
    // SAFETY: nobody uses it any more. Its work is still done.
    assert_eq!(unsafe { sys::cuStreamDestroy_v2(stream) }, sys::CUresult::CUDA_SUCCESS);
    // SAFETY: it was just lent.
    let delete = unsafe { (*view).deleter }.expect("a deleter");
    // SAFETY: once.
    unsafe { delete(view) };
    assert_eq!(counter("pending"), 0, "the pool's memory went under work that was not done");
    drop(memory);
    assert_eq!(counter("live_bytes"), before);
    driver::wait();
}

/// "None lies in the pool": a view of a layer is one mistake away from being an output.
#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn device_tensors_within_the_pool_are_refused() {
    driver::enter();
    let cache = open();
    // SAFETY: numbers.
    let mut layer: kvpool_layer_t = unsafe { zeroed() };
    let size = size_of::<kvpool_layer_t>();
    // SAFETY: a place and its size.
    let status = unsafe { kvpool_cache_get_layer(cache, 0, &raw mut layer, size) };
    assert_eq!(status, KVPOOL_OK);
    let step = reserve(cache, &[1; 40]);
    let (kv, q) = (Memory::of(&[1.0; 40 * 64]), Memory::of(&[1.0; 40 * 128]));
    let (kv, q) = (on_device(&kv, 40 * 64), on_device(&q, 40 * 128));
    let out = Memory::new(40 * 128 * 4);
    let out = on_device(&out, 40 * 128);
    let within = |len| kvpool_tensor_t { data: layer.v, len, ..out };
    // SAFETY: two tensors in device memory each time.
    let append = |k, v| unsafe { kvpool_step_append(cache, step, 0, &raw const k, &raw const v) };
    assert_eq!(append(within(40 * 64), kv), KVPOOL_OVERLAP);
    assert_eq!(append(kv, within(40 * 64)), KVPOOL_OVERLAP);
    assert_eq!(append(kv, kv), KVPOOL_OK);
    let attend = |q: kvpool_tensor_t, out: kvpool_tensor_t, lse: kvpool_tensor_t| {
        // SAFETY: numbers, of which 0 is the default.
        let mut options: kvpool_attend_options_t = unsafe { zeroed() };
        options.size = size_of::<kvpool_attend_options_t>();
        options.lse = lse;
        // SAFETY: three tensors in device memory.
        unsafe {
            kvpool_step_attend(cache, step, 0, &raw const q, &raw const out, &raw const options)
        }
    };
    let lse = Memory::new(80 * 4);
    let lse = on_device(&lse, 80);
    assert_eq!(attend(within(40 * 128), out, lse), KVPOOL_OVERLAP);
    assert_eq!(attend(q, within(40 * 128), lse), KVPOOL_OVERLAP);
    assert_eq!(attend(q, out, within(80)), KVPOOL_OVERLAP);
    assert_eq!(attend(q, out, lse), KVPOOL_OK);
    assert_eq!(kvpool_step_commit(cache, step), KVPOOL_OK);
    assert_eq!(kvpool_cache_close(cache), KVPOOL_OK);
    driver::wait();
}
