//! The header's section "Events".

use std::ffi::c_void;
use std::ptr::null_mut;

use kvpool::capi::*;

unsafe extern "C" fn ignore(_: *mut c_void, _: *const kvpool_event_t) {}

pub(super) fn poll(cache: kvpool_cache_t) -> kvpool_status_t {
    // SAFETY: a callback that looks at nothing, and NULL, which is right here.
    unsafe { kvpool_cache_poll_events(cache, Some(ignore), null_mut(), null_mut(), null_mut()) }
}

pub(super) fn resync(cache: kvpool_cache_t) -> kvpool_status_t {
    // SAFETY: as in `poll`.
    unsafe { kvpool_cache_resync_events(cache, Some(ignore), null_mut(), null_mut()) }
}
