//! The header's section "Admission".

use std::ptr::null_mut;

use kvpool::capi::*;

use super::handles::Handles;
use super::input::{Options, Prompt, Which};
use super::zeroed;

pub(super) fn check(cache: kvpool_cache_t, prompt: Prompt, options: Options) -> kvpool_status_t {
    let (tokens, built) = (prompt.tokens(), options.build());
    let mut out: kvpool_estimate_t = zeroed();
    let size = size_of::<kvpool_estimate_t>();
    let (prompt, len) = (tokens.as_ptr(), tokens.len());
    // SAFETY: tokens and how many they are, options, a place and its size.
    unsafe { kvpool_cache_check_admission(cache, prompt, len, &built, &mut out, size) }
}

pub(super) fn can_admit(
    cache: kvpool_cache_t,
    prompt: Prompt,
    options: Options,
    handles: &mut Handles,
) -> kvpool_status_t {
    let (tokens, built) = (prompt.tokens(), options.build());
    let mut out: kvpool_reservation_t = zeroed();
    let (prompt, len) = (tokens.as_ptr(), tokens.len());
    // SAFETY: tokens and how many they are, options, a place, and none for the estimate.
    let status =
        unsafe { kvpool_cache_can_admit(cache, prompt, len, &built, &mut out, null_mut(), 0) };
    if status == KVPOOL_OK {
        handles.reservations.push(out);
    }
    status
}

pub(super) fn begin_reserved(
    cache: kvpool_cache_t,
    which: Which,
    handles: &mut Handles,
) -> kvpool_status_t {
    let mut out: kvpool_begun_t = zeroed();
    let reservation = handles.reservation(which);
    let size = size_of::<kvpool_begun_t>();
    // SAFETY: a place and its size.
    let status = unsafe { kvpool_cache_begin_reserved(cache, reservation, &mut out, size) };
    if status == KVPOOL_OK {
        handles.seqs.push(out.sequence);
    }
    status
}

pub(super) fn cancel_all(cache: kvpool_cache_t) -> kvpool_status_t {
    // SAFETY: NULL, which is right here.
    unsafe { kvpool_cache_cancel_reservations(cache, null_mut()) }
}
