//! The header's section "Events".

use std::ffi::c_void;
use std::ptr::null;

use super::bindings::*;
use super::caller::Caller;
use super::failure::CallError;
use super::object::{call_back, verb_beside_step};
use crate::cache::{Event, EventKind, Polled};

/// The caller's function.
type Each = unsafe extern "C" fn(*mut c_void, *const kvpool_event_t);

fn each_of(each: kvpool_event_fn) -> Result<Each, CallError> {
    each.ok_or(CallError::NullPointer { what: "each" })
}

/// Hands one event over.
fn deliver(each: Each, context: *mut c_void, event: &Event<'_>) {
    let mut told = kvpool_event_t {
        size: size_of::<kvpool_event_t>(),
        number: event.number,
        kind: KVPOOL_CLEARED,
        group: event.group.0,
        block: KVPOOL_NO_BLOCK,
        parent: KVPOOL_NO_BLOCK,
        name_space: 0,
        num_tokens: 0,
        tokens: null(),
    };
    match event.kind {
        EventKind::Stored { block, parent, tokens, namespace } => {
            told.kind = KVPOOL_STORED;
            told.block = block;
            told.parent = parent.unwrap_or(KVPOOL_NO_BLOCK);
            told.name_space = namespace;
            // `tokens_per_block` of them.
            told.num_tokens = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
            told.tokens = tokens.as_ptr();
        }
        EventKind::Attached { block, of } => {
            told.kind = KVPOOL_ATTACHED;
            told.block = block;
            told.parent = of;
        }
        EventKind::Removed { block } => {
            told.kind = KVPOOL_REMOVED;
            told.block = block;
        }
        EventKind::Cleared => {}
    }
    // SAFETY: the caller keeps to kvpool.h: the function takes an event and its context, and throws
    // nothing.
    call_back(|| unsafe { each(context, &raw const told) });
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_poll_events(
    cache: kvpool_cache_t,
    each: kvpool_event_fn,
    context: *mut c_void,
    delivered: *mut u64,
    lost: *mut u64,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    verb_beside_step(cache, |open| {
        let each = each_of(each)?;
        let delivered = caller.maybe_place("delivered", delivered)?;
        let lost = caller.maybe_place("lost", lost)?;
        let polled: Polled = open.cache.poll_events(&mut |event| deliver(each, context, &event));
        delivered.set(polled.delivered);
        lost.set(polled.lost);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_resync_events(
    cache: kvpool_cache_t,
    each: kvpool_event_fn,
    context: *mut c_void,
    delivered: *mut u64,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    verb_beside_step(cache, |open| {
        let each = each_of(each)?;
        let delivered = caller.maybe_place("delivered", delivered)?;
        delivered.set(open.cache.resync_events(&mut |event| deliver(each, context, &event)));
        Ok(())
    })
}
