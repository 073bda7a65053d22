//! Edge case 58, from the side of Rust, where a panic can be asked for: it becomes a status, the
//! cache says afterwards that it is not usable, and others go on.

use std::ffi::{CStr, CString};
use std::ptr::null;

use kvpool::capi::*;

const CONFIG: &str = "
    model = { num_layers = 1, num_q_heads = 4, num_kv_heads = 2, head_dim = 16 }
    limits = { max_seqs = 2, max_seq_len = 64, max_batch_tokens = 32 }
    cache = { mode = 'paged', format = 'f16' }";

fn open() -> kvpool_cache_t {
    let name = CString::new("panics.toml").unwrap();
    let (mut config, mut plan, mut cache) = (
        kvpool_config_t { word: [0; 2] },
        kvpool_plan_t { word: [0; 2] },
        kvpool_cache_t { word: [0; 2] },
    );
    // SAFETY: pointers to what lives during the calls, with its lengths.
    unsafe {
        let parsed = kvpool_config_parse(
            CONFIG.as_ptr().cast(),
            CONFIG.len(),
            name.as_ptr(),
            null(),
            0,
            &raw mut config,
        );
        assert_eq!(parsed, KVPOOL_OK);
        assert_eq!(kvpool_plan_new(config, &raw mut plan), KVPOOL_OK);
        assert_eq!(kvpool_cache_open(plan, &raw mut cache), KVPOOL_OK);
    }
    cache
}

/// A verb without arguments.
fn begin(cache: kvpool_cache_t) -> kvpool_status_t {
    // SAFETY: a struct of numbers.
    let mut begun: kvpool_begun_t = unsafe { std::mem::zeroed() };
    let prompt = [1, 2, 3];
    // SAFETY: pointers to what lives during the call, with its lengths.
    unsafe {
        kvpool_cache_begin(
            cache,
            prompt.as_ptr(),
            prompt.len(),
            null(),
            &raw mut begun,
            size_of::<kvpool_begun_t>(),
        )
    }
}

fn last_message() -> String {
    // SAFETY: a struct of numbers and bytes.
    let mut error: kvpool_error_t = unsafe { std::mem::zeroed() };
    // SAFETY: a place for an error, with its size, whose message ends with a NUL.
    let message = unsafe {
        assert_eq!(kvpool_last_error(&raw mut error, size_of::<kvpool_error_t>()), KVPOOL_OK);
        CStr::from_ptr(error.message.as_ptr())
    };
    message.to_str().unwrap().to_owned()
}

#[test]
fn edge_58_a_panic_poisons_its_cache_and_no_other() {
    let (cache, other) = (open(), open());
    assert_eq!(begin(cache), KVPOOL_OK);
    kvpool::capi::fault::panic_in_next_verb();
    assert_eq!(begin(cache), KVPOOL_PANIC);
    assert!(last_message().contains("a panic that a test asked for"), "{}", last_message());
    // Every kind of function: a verb, a reader, one for any thread.
    assert_eq!(begin(cache), KVPOOL_POISONED);
    assert_eq!(kvpool_cache_check(cache), KVPOOL_POISONED);
    // SAFETY: a struct of numbers.
    let mut info: kvpool_plan_info_t = unsafe { std::mem::zeroed() };
    // SAFETY: a place for it, with its size.
    let got = unsafe {
        kvpool_cache_get_plan_info(cache, &raw mut info, size_of::<kvpool_plan_info_t>())
    };
    assert_eq!(got, KVPOOL_POISONED);
    assert!(last_message().contains("close it"), "{}", last_message());
    assert_eq!(begin(other), KVPOOL_OK);
    assert_eq!(kvpool_cache_check(other), KVPOOL_OK);
    assert_eq!(kvpool_cache_close(cache), KVPOOL_OK);
    assert_eq!(kvpool_cache_close(cache), KVPOOL_STALE_HANDLE);
    assert_eq!(kvpool_cache_close(other), KVPOOL_OK);
}
