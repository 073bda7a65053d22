//! The C interface, driven with sequences of calls: valid ones, handles that are stale or made up,
//! NULL where a pointer belongs, sizes that are none, from one thread and from two.
//!
//! Whatever the calls are, none may crash or break an invariant; every status must be one that the
//! header names; and at the end the cache, which no call may have poisoned, closes.
//!
//! - `input.rs`: what an input is. `handles.rs`: what its calls are made with.
//! - `cache.rs`, `sequence.rs`, `admission.rs`, `step.rs`, `prefix.rs`, `save.rs`, `events.rs`, `stats.rs`:
//!   the calls, by the sections of the header, as in `src/capi/`.

mod admission;
mod cache;
mod events;
mod handles;
mod input;
mod prefix;
mod save;
mod sequence;
mod stats;
mod step;

use std::ffi::CStr;

use kvpool::capi::*;

use handles::Handles;
use input::{Input, Op};

/// A struct of numbers and pointers, all zeros.
fn zeroed<T>() -> T {
    // SAFETY: only used for the header's structs, which are numbers and pointers.
    unsafe { std::mem::zeroed() }
}

/// The status of a call is one that there is.
fn known(status: kvpool_status_t) -> kvpool_status_t {
    // SAFETY: any number may be asked for; the text has an end.
    let name = unsafe { CStr::from_ptr(kvpool_status_name(status)) };
    assert!(!name.to_bytes().is_empty() && name.to_bytes() != b"unknown", "status {status}");
    assert_ne!(status, KVPOOL_PANIC, "a panic");
    assert_ne!(status, KVPOOL_POISONED, "poisoned");
    assert_ne!(status, KVPOOL_INVARIANT, "an invariant is broken");
    status
}

/// One call.
fn call(cache: kvpool_cache_t, op: &Op, h: &mut Handles) -> kvpool_status_t {
    match *op {
        Op::Begin { prompt, options, broken } => sequence::begin(cache, prompt, options, broken, h),
        Op::BeginBatch(ref items) => sequence::begin_batch(cache, items, h),
        Op::CheckAdmission(prompt, options) => admission::check(cache, prompt, options),
        Op::CanAdmit(prompt, options) => admission::can_admit(cache, prompt, options, h),
        Op::BeginReserved(which) => admission::begin_reserved(cache, which, h),
        Op::CancelReservation(which) => {
            kvpool_cache_cancel_reservation(cache, h.reservation(which))
        }
        Op::CancelReservations => admission::cancel_all(cache),
        Op::Fork(which) => sequence::fork(cache, which, h),
        Op::Truncate(which, len) => kvpool_cache_truncate(cache, h.seq(which), len.into()),
        Op::Release(which) => kvpool_cache_release(cache, h.seq(which)),
        Op::SeqInfo(which, broken) => sequence::info(cache, h.seq(which), broken),
        Op::Preempt => sequence::preempt(cache),
        Op::Reset => kvpool_cache_reset(cache),
        Op::Reserve { ref items, tokens, short } => step::reserve(cache, items, tokens, short, h),
        Op::Append { step, layer, broken } => step::append(cache, step, layer, broken, h),
        Op::Attend { step, layer, broken, scale } => {
            step::attend(cache, step, (layer, scale), broken, h)
        }
        Op::MarkAll(which) => kvpool_step_mark_all_appended(cache, h.step(which)),
        Op::View(which) => step::view(cache, h.step(which)),
        Op::Group(which, group) => step::group(cache, h.step(which), group),
        Op::Csr(which, group) => step::csr(cache, h.step(which), group),
        Op::Commit(which) => kvpool_step_commit(cache, h.step(which)),
        Op::Cancel(which) => kvpool_step_cancel(cache, h.step(which)),
        Op::Probe(prompt, options) => prefix::probe(cache, prompt, options),
        Op::Pin(which) => prefix::pin(cache, which, h),
        Op::Unpin(which) => kvpool_cache_unpin(cache, h.pin(which)),
        Op::Retention(which, ref ranges) => prefix::set_retention(cache, h.seq(which), ranges),
        Op::Time(now) => kvpool_cache_set_time_ms(cache, now),
        Op::Epoch(epoch) => kvpool_cache_set_epoch(cache, epoch.into()),
        Op::ClearCached => kvpool_cache_clear_cached(cache),
        Op::Poll => events::poll(cache),
        Op::Resync => events::resync(cache),
        Op::Stats(broken) => stats::stats(cache, broken),
        Op::GroupStats(group) => stats::group_stats(cache, group),
        Op::Export { seq, layer, part, from, to, len } => {
            stats::export(cache, h.seq(seq), (layer, part), from..to, len)
        }
        Op::Read { offset, len } => stats::read(cache, offset, len),
        Op::BlockOf(which, group, at) => stats::block_of(cache, which, (group, at), h),
        Op::Text(as_json, capacity) => cache::text(cache, as_json, capacity),
        Op::Check => kvpool_cache_check(cache),
        Op::SavePrefixes(unsalted_only) => save::save_prefixes(cache, unsalted_only),
        Op::RestorePrefixes => save::restore_prefixes(cache),
        Op::SaveSequence(which, broken) => save::save_sequence(cache, h.seq(which), broken),
        Op::RestoreSequence { key, max_len, broken } => {
            save::restore_sequence(cache, key, max_len, broken, h)
        }
    }
}

/// Runs one input.
pub(super) fn run(input: &Input) {
    let Some(cache) = cache::open(input) else { return };
    let two = input.two % 4 == 0 && !input.beside.is_empty();
    std::thread::scope(|scope| {
        if two {
            scope.spawn(|| {
                let mut handles = Handles::default();
                for op in input.beside.iter().take(64) {
                    known(call(cache, op, &mut handles));
                }
            });
        }
        let mut handles = Handles::default();
        for op in input.ops.iter().take(256) {
            known(call(cache, op, &mut handles));
            if !two {
                assert_eq!(kvpool_cache_check(cache), KVPOOL_OK, "{op:?}");
            }
        }
    });
    assert_eq!(kvpool_cache_check(cache), KVPOOL_OK);
    assert_eq!(kvpool_cache_close(cache), KVPOOL_OK);
    assert_eq!(known(kvpool_cache_check(cache)), KVPOOL_STALE_HANDLE);
    let _ = std::fs::remove_file(save::file());
}
