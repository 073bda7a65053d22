//! The header's section "Prefixes".

use super::bindings::*;
use super::caller::Caller;
use super::failure::Failure;
use super::handle::{self, of_pin};
use super::later::Ended;
use super::object::{any, give_back_later, reader, verb};
use super::sequence::{namespace, retentions};
use crate::cache::{Namespace, Probe};

/// The namespace of a pointer that may be NULL.
fn namespace_or_none(
    caller: &Caller,
    given: *const kvpool_namespace_t,
) -> Result<Namespace, Failure> {
    if given.is_null() {
        return Ok(Namespace::default());
    }
    namespace(caller, caller.plain("name_space", given)?)
}

fn of_probe(probe: Probe) -> kvpool_probe_t {
    let Probe { cached_len, full_blocks, partial_tokens } = probe;
    kvpool_probe_t { size: 0, cached_len, full_blocks, partial_tokens, reserved: 0 }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_probe(
    cache: kvpool_cache_t,
    prompt: *const u32,
    prompt_len: usize,
    given: *const kvpool_namespace_t,
    out: *mut kvpool_probe_t,
    out_size: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    let mut wait = false;
    let status = any(cache, |object| {
        let prompt = caller.slice("prompt", prompt, prompt_len)?;
        let namespace = namespace_or_none(&caller, given)?;
        let out = caller.out("out", out, out_size)?;
        match &object.prober {
            Some(prober) => out.set(of_probe(prober.probe(prompt, &namespace))),
            None => wait = true,
        }
        Ok(())
    });
    if !wait {
        return status;
    }
    // What the slots of contiguous layers hold is known to the cache alone.
    reader(cache, |open| {
        let prompt = caller.slice("prompt", prompt, prompt_len)?;
        let namespace = namespace_or_none(&caller, given)?;
        let out = caller.out("out", out, out_size)?;
        out.set(of_probe(open.cache.probe(prompt, &namespace)));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_pin(
    cache: kvpool_cache_t,
    sequence: kvpool_seq_t,
    out: *mut kvpool_pin_t,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    verb(cache, |open| {
        let out = caller.place("out", out)?;
        out.set(of_pin(open.cache.pin(handle::seq(sequence)?)?));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn kvpool_cache_unpin(cache: kvpool_cache_t, pin: kvpool_pin_t) -> kvpool_status_t {
    verb(cache, |open| Ok(open.cache.unpin(handle::pin(pin)?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn kvpool_cache_unpin_later(
    cache: kvpool_cache_t,
    pin: kvpool_pin_t,
) -> kvpool_status_t {
    give_back_later(cache, || {
        let pin = handle::pin(pin)?;
        Ok((pin.parts().0, Ended::Pin(pin)))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_set_retention(
    cache: kvpool_cache_t,
    sequence: kvpool_seq_t,
    given: *const kvpool_retention_t,
    num_retentions: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    verb(cache, |open| {
        let retention = retentions(&caller, given, num_retentions)?;
        Ok(open.cache.set_retention(handle::seq(sequence)?, retention)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn kvpool_cache_set_time_ms(cache: kvpool_cache_t, now_ms: u64) -> kvpool_status_t {
    verb(cache, |open| {
        open.cache.set_time_ms(now_ms);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn kvpool_cache_set_epoch(cache: kvpool_cache_t, epoch: u64) -> kvpool_status_t {
    verb(cache, |open| Ok(open.cache.set_epoch(epoch)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn kvpool_cache_clear_cached(cache: kvpool_cache_t) -> kvpool_status_t {
    verb(cache, |open| {
        open.cache.clear_cached();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_namespace_numbers(
    cache: kvpool_cache_t,
    given: *const kvpool_namespace_t,
    out: *mut u32,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    reader(cache, |open| {
        let namespace = namespace_or_none(&caller, given)?;
        let out = caller.slice_mut("out", out, 2)?;
        out.copy_from_slice(&open.cache.namespace_numbers(&namespace));
        Ok(())
    })
}
