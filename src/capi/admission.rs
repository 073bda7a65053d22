//! The header's section "Admission".

use super::bindings::*;
use super::caller::Caller;
use super::failure::{CallError, Failure};
use super::handle::{Parts, pack, unpack};
use super::later::Ended;
use super::object::{Open, give_back_later, reader, verb};
use super::sequence::{of_begun, options};
use crate::cache::Reservation;

fn estimate(cached_len: u32, limit: u32) -> kvpool_estimate_t {
    kvpool_estimate_t { size: 0, cached_len, limit }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_check_admission(
    cache: kvpool_cache_t,
    prompt: *const u32,
    prompt_len: usize,
    given: *const kvpool_begin_options_t,
    out: *mut kvpool_estimate_t,
    out_size: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    reader(cache, |open| {
        let prompt = caller.slice("prompt", prompt, prompt_len)?;
        let options = options(&caller, given)?;
        let out = caller.out("out", out, out_size)?;
        let found = open.cache.check_admission(prompt, &options)?;
        out.set(estimate(found.cached_len, found.limit));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_can_admit(
    cache: kvpool_cache_t,
    prompt: *const u32,
    prompt_len: usize,
    given: *const kvpool_begin_options_t,
    out: *mut kvpool_reservation_t,
    found: *mut kvpool_estimate_t,
    found_size: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    verb(cache, |open| {
        let prompt = caller.slice("prompt", prompt, prompt_len)?;
        let options = options(&caller, given)?;
        let out = caller.place("out", out)?;
        let found = if found.is_null() && found_size == 0 {
            None
        } else {
            Some(caller.out("estimate", found, found_size)?)
        };
        let reservation = open.cache.can_admit(prompt, &options)?;
        if let Some(found) = found {
            found.set(estimate(reservation.cached_len(), reservation.limit()));
        }
        let (owner, place, generation) = reservation.sequence().parts();
        out.set(pack(Parts { owner, place, generation }));
        // One of this slot that is still here was cancelled by others.
        open.reservations[place as usize] = Some(reservation);
        Ok(())
    })
}

/// Takes out the reservation of a handle.
fn take(open: &mut Open, handle: kvpool_reservation_t) -> Result<Reservation, Failure> {
    let Parts { owner, place, generation } = unpack(handle)?;
    if owner != open.cache.id() {
        return Err(CallError::ForeignHandle { what: "reservation" }.into());
    }
    let kept = open.reservations.get_mut(place as usize);
    let kept = kept.and_then(|kept| {
        kept.take_if(|kept| kept.sequence().parts() == (owner, place, generation))
    });
    kept.ok_or_else(|| CallError::StaleHandle { what: "reservation" }.into())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_begin_reserved(
    cache: kvpool_cache_t,
    reservation: kvpool_reservation_t,
    out: *mut kvpool_begun_t,
    out_size: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    verb(cache, |open| {
        let out = caller.out("out", out, out_size)?;
        let reservation = take(open, reservation)?;
        out.set(of_begun(&open.cache.begin_reserved(reservation)?));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn kvpool_cache_cancel_reservation(
    cache: kvpool_cache_t,
    reservation: kvpool_reservation_t,
) -> kvpool_status_t {
    verb(cache, |open| cancel(open, reservation))
}

pub(super) fn cancel(open: &mut Open, handle: kvpool_reservation_t) -> Result<(), Failure> {
    let reservation = take(open, handle)?;
    Ok(open.cache.cancel_reservation(reservation)?)
}

#[unsafe(no_mangle)]
pub extern "C" fn kvpool_cache_cancel_reservation_later(
    cache: kvpool_cache_t,
    reservation: kvpool_reservation_t,
) -> kvpool_status_t {
    give_back_later(cache, || {
        let Parts { owner, .. } = unpack(reservation)?;
        Ok((owner, Ended::Reservation(reservation)))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_cancel_reservations(
    cache: kvpool_cache_t,
    cancelled: *mut u32,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    verb(cache, |open| {
        let cancelled = caller.maybe_place("cancelled", cancelled)?;
        cancelled.set(open.cache.cancel_reservations());
        open.reservations.fill_with(|| None);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_reservations(
    cache: kvpool_cache_t,
    out: *mut u32,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    reader(cache, |open| {
        caller.place("out", out)?.set(open.cache.reservations());
        Ok(())
    })
}
