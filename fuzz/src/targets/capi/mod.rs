//! The C interface, driven with sequences of calls: valid ones, handles that are stale or made up,
//! NULL where a pointer belongs, sizes that are none, from one thread and from two.
//!
//! Whatever the calls are, none may crash or break an invariant; every status must be one that the
//! header names; and at the end the cache, which no call may have poisoned, closes.
//!
//! - `input.rs`: what an input is. `handles.rs`: what its calls are made with.
//! - `cache.rs`, `sequence.rs`, `admission.rs`, `step.rs`, `prefix.rs`, `save.rs`, `events.rs`,
//!   `stats.rs`: the calls, by the sections of the header, as in `src/capi/`; `look.rs`: what only
//!   looks, and views.

mod admission;
mod cache;
mod events;
mod handles;
mod input;
mod look;
mod prefix;
mod save;
mod sequence;
mod stats;
mod step;

use std::ffi::CStr;
use std::ptr::null_mut;
use std::sync::Mutex;

use kvpool::capi::*;

use cache::Opened;
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
    assert!(!name.to_bytes().is_empty() && name.to_bytes() != b"unknown status", "status {status}");
    assert_ne!(status, KVPOOL_PANIC, "a panic");
    assert_ne!(status, KVPOOL_POISONED, "poisoned");
    assert_ne!(status, KVPOOL_INVARIANT, "an invariant is broken");
    status
}

/// One call.
fn call(opened: &Opened, op: &Op, h: &mut Handles) -> kvpool_status_t {
    let cache = opened.cache;
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
        Op::Lend { layer, part } => h.views.lend(cache, layer, part),
        Op::DeleteView(which) => {
            h.views.delete(which);
            KVPOOL_OK
        }
        Op::Describe { what, index, broken } => look::describe(cache, what, index, broken),
        Op::NamespaceNumbers(options) => look::namespace_numbers(cache, options),
        Op::LastError(broken) => look::last_error(broken),
        Op::OfThePlan { what, index, count } => look::plan(opened, what, index, count),
        Op::MarkOne(which, layer) => {
            kvpool_step_mark_appended(cache, h.step(which), u32::from(layer) % 3)
        }
        // SAFETY: NULL may be given.
        Op::CancelStep => unsafe { kvpool_cache_cancel_step(cache, null_mut()) },
        Op::OfAGpu { what, step, group } => step::of_a_gpu(cache, what, h.step(step), group),
        // Not too often: what follows is refused.
        Op::Close(often) if often.is_multiple_of(8) => kvpool_cache_close(cache),
        Op::Close(_) => kvpool_cache_check(cache),
        Op::ReleaseLater(which) => kvpool_cache_release_later(cache, h.seq(which)),
        Op::UnpinLater(which) => kvpool_cache_unpin_later(cache, h.pin(which)),
        Op::CancelLater(which) => kvpool_step_cancel_later(cache, h.step(which)),
        Op::CancelReservationLater(which) => {
            kvpool_cache_cancel_reservation_later(cache, h.reservation(which))
        }
    }
}

/// A thread's calls, with handles that both have got.
fn calls(opened: &Opened, ops: &[Op], shared: &Mutex<Handles>, alone: bool) {
    for op in ops {
        let before = shared.lock().expect("no panic").clone();
        let mut handles = before.clone();
        known(call(opened, op, &mut handles));
        shared.lock().expect("no panic").absorb(&before, handles);
        if alone {
            let status = kvpool_cache_check(opened.cache);
            assert!([KVPOOL_OK, KVPOOL_STALE_HANDLE].contains(&status), "{status} after {op:?}");
        }
    }
}

/// Opens a cache of each shape that an input can choose.
pub(super) fn open_all() {
    for input in Input::shapes() {
        run(&input);
    }
}

/// Runs one input.
pub(super) fn run(input: &Input) {
    let opened = cache::open(input);
    let cache = opened.cache;
    let two = input.two.is_multiple_of(4) && !input.beside.is_empty();
    let shared = Mutex::new(Handles::default());
    std::thread::scope(|scope| {
        let first = |ops: &'_ [Op], most: usize| ops[..ops.len().min(most)].to_vec();
        let beside = two.then(|| {
            let (ops, shared) = (first(&input.beside, 64), &shared);
            scope.spawn(move || calls(&opened, &ops, shared, false))
        });
        calls(&opened, &first(&input.ops, 256), &shared, !two);
        // Waited for by itself: the scope would go on while the thread is still being torn down,
        // and what it holds then looks like a leak.
        if let Some(beside) = beside {
            beside.join().expect("no panic");
        }
    });
    let closed = kvpool_cache_check(cache) == KVPOOL_STALE_HANDLE;
    let status = kvpool_cache_close(cache);
    assert_eq!(status, if closed { KVPOOL_STALE_HANDLE } else { KVPOOL_OK });
    assert_eq!(known(kvpool_cache_check(cache)), KVPOOL_STALE_HANDLE);
    // The views that are still out keep the memory.
    while shared.lock().expect("no panic").views.delete(0) {}
    opened.destroy();
    let _ = std::fs::remove_file(save::file());
}
