//! The header's section "Sequences".

use super::bindings::*;
use super::caller::Caller;
use super::failure::{CallError, Failure};
use super::handle::{self, of_seq};
use super::later::Ended;
use super::object::{give_back_later, reader, verb};
use crate::cache::{BeginOptions, Begun, KeyPart, Namespace, Retention, Retentions};
use crate::error::{BatchRefused, CacheError};

pub(super) fn key_part(
    caller: &Caller,
    what: &'static str,
    part: &kvpool_key_part_t,
) -> Result<Option<KeyPart>, Failure> {
    match part.kind {
        KVPOOL_KEY_ABSENT => Ok(None),
        KVPOOL_KEY_IS_NUMBER => Ok(Some(KeyPart::number(part.number))),
        KVPOOL_KEY_IS_BYTES => {
            // The length first: what is too long is not looked at.
            let len = part.num_bytes as usize;
            if len > KeyPart::MAX_BYTES {
                let limit = KeyPart::MAX_BYTES;
                return Err(CacheError::KeyPartTooLong { len, limit }.into());
            }
            Ok(Some(KeyPart::bytes(caller.slice(what, part.bytes, len)?)?))
        }
        _ => Err(CallError::BadArgument { what, problem: "has a kind that does not exist" }.into()),
    }
}

pub(super) fn namespace(caller: &Caller, given: &kvpool_namespace_t) -> Result<Namespace, Failure> {
    Caller::unused("name_space", given.reserved)?;
    Ok(Namespace {
        salt: key_part(caller, "the salt", &given.salt)?,
        salt_from: given.salt_from,
        adapter: key_part(caller, "the adapter", &given.adapter)?,
        model: key_part(caller, "the model", &given.model)?,
    })
}

pub(super) fn retentions(
    caller: &Caller,
    given: *const kvpool_retention_t,
    len: usize,
) -> Result<Retentions, Failure> {
    let given = caller.slice("retentions", given, len)?;
    let limit = KVPOOL_MAX_RETENTIONS as usize;
    let mut ranges = [Retention { from: 0, to: 0, priority: 0, duration_ms: None }; 5];
    // One more than there may be is enough to be refused.
    let given = &given[..given.len().min(limit + 1)];
    for (range, given) in ranges.iter_mut().zip(given) {
        Caller::unused("retentions", given.reserved)?;
        *range = Retention {
            from: given.from,
            to: given.to,
            // What does not fit is above 100 all the same.
            priority: u8::try_from(given.priority).unwrap_or(u8::MAX),
            duration_ms: Some(given.duration_ms).filter(|duration| *duration != u64::MAX),
        };
    }
    Ok(Retentions::new(&ranges[..given.len()])?)
}

pub(super) fn options(
    caller: &Caller,
    given: *const kvpool_begin_options_t,
) -> Result<BeginOptions, Failure> {
    let Some(given) = caller.options("options", given)? else {
        return Ok(BeginOptions::default());
    };
    Ok(BeginOptions {
        key: (given.has_key != 0).then_some(given.key),
        max_len: Some(given.max_len).filter(|len| *len > 0),
        lookahead_tokens: given.lookahead_tokens,
        namespace: namespace(caller, &given.name_space)?,
        retention: retentions(caller, given.retentions, given.num_retentions as usize)?,
    })
}

pub(super) fn of_begun(begun: &Begun) -> kvpool_begun_t {
    kvpool_begun_t {
        size: size_of::<kvpool_begun_t>(),
        sequence: of_seq(begun.sequence),
        cached_len: begun.cached_len,
        limit: begun.limit,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_begin(
    cache: kvpool_cache_t,
    prompt: *const u32,
    prompt_len: usize,
    given: *const kvpool_begin_options_t,
    out: *mut kvpool_begun_t,
    out_size: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    verb(cache, |open| {
        let prompt = caller.slice("prompt", prompt, prompt_len)?;
        let options = options(&caller, given)?;
        let out = caller.out("out", out, out_size)?;
        out.set(of_begun(&open.cache.begin(prompt, options)?));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_begin_batch(
    cache: kvpool_cache_t,
    items: *const kvpool_begin_item_t,
    num_items: usize,
    out: *mut kvpool_begun_t,
    out_size: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    verb(cache, |open| {
        let items = caller.slice("items", items, num_items)?;
        let outs = caller.outs("out", out, num_items, out_size)?;
        let seq_slots = open.cache.plan().seq_slots;
        if items.len() > open.batch.capacity() {
            let source = CacheError::NoSeqSlot { seq_slots };
            return Err(BatchRefused { index: seq_slots as usize, source }.into());
        }
        // Whatever a call before has left, if it was refused.
        open.batch.clear();
        for (index, item) in items.iter().enumerate() {
            let prompt = caller.slice("prompt", item.prompt, item.prompt_len);
            let prompt = prompt.map_err(|error| Failure::from(error).of_item(index))?;
            let options =
                options(&caller, item.options).map_err(|failure| failure.of_item(index))?;
            // SAFETY: the slice outlives this call, and so the list, which is emptied below and
            // before it is used again.
            let prompt: &'static [u32] = unsafe { &*std::ptr::from_ref(prompt) };
            open.batch.push((prompt, options));
        }
        let result = open.cache.begin_batch(&open.batch, &mut open.begun);
        open.batch.clear();
        result?;
        for (out, begun) in outs.iter_mut().zip(&open.begun) {
            *out = of_begun(begun);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_fork(
    cache: kvpool_cache_t,
    sequence: kvpool_seq_t,
    out: *mut kvpool_seq_t,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    verb(cache, |open| {
        let out = caller.place("out", out)?;
        out.set(of_seq(open.cache.fork(handle::seq(sequence)?)?));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn kvpool_cache_truncate(
    cache: kvpool_cache_t,
    sequence: kvpool_seq_t,
    len: u32,
) -> kvpool_status_t {
    verb(cache, |open| Ok(open.cache.truncate(handle::seq(sequence)?, len)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn kvpool_cache_release(
    cache: kvpool_cache_t,
    sequence: kvpool_seq_t,
) -> kvpool_status_t {
    verb(cache, |open| Ok(open.cache.release(handle::seq(sequence)?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn kvpool_cache_release_later(
    cache: kvpool_cache_t,
    sequence: kvpool_seq_t,
) -> kvpool_status_t {
    give_back_later(cache, || {
        let sequence = handle::seq(sequence)?;
        Ok((sequence.parts().0, Ended::Sequence(sequence)))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_seq_get_info(
    cache: kvpool_cache_t,
    sequence: kvpool_seq_t,
    out: *mut kvpool_seq_info_t,
    out_size: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    reader(cache, |open| {
        let out = caller.out("out", out, out_size)?;
        let sequence = handle::seq(sequence)?;
        let cache = &open.cache;
        out.set(kvpool_seq_info_t {
            size: 0,
            slot: cache.seq_slot(sequence)?.0,
            len: cache.seq_len(sequence)?,
            limit: cache.seq_limit(sequence)?,
            reserved: 0,
            table_version: cache.table_version(sequence)?,
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_preempt_youngest(
    cache: kvpool_cache_t,
    out: *mut kvpool_preempted_t,
    out_size: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    verb(cache, |open| {
        let out = caller.out("out", out, out_size)?;
        let preempted = open.cache.preempt_youngest().ok_or(CallError::Nobody)?;
        out.set(kvpool_preempted_t {
            size: 0,
            sequence: of_seq(preempted.sequence),
            key: preempted.key.unwrap_or(0),
            has_key: preempted.key.is_some().into(),
            was_reservation: preempted.reserved.into(),
            len: preempted.len,
            reserved: 0,
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn kvpool_cache_reset(cache: kvpool_cache_t) -> kvpool_status_t {
    verb(cache, |open| Ok(open.cache.reset()?))
}
