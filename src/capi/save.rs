//! The header's section "Save and restore".

use std::ffi::c_char;

use super::bindings::*;
use super::caller::Caller;
use super::failure::Failure;
use super::handle;
use super::object::{reader, verb};
use super::sequence::{key_part, of_begun};
use crate::cache::{RestoreOptions, Restored, SaveOptions, Saved};

fn save_options(
    caller: &Caller,
    given: *const kvpool_save_options_t,
) -> Result<SaveOptions, Failure> {
    let Some(given) = caller.options("options", given)? else { return Ok(SaveOptions::default()) };
    Caller::unused("options", given.reserved)?;
    Ok(SaveOptions {
        model: key_part(caller, "the model", &given.model)?,
        unsalted_only: given.unsalted_only != 0,
    })
}

fn restore_options(
    caller: &Caller,
    given: *const kvpool_restore_options_t,
) -> Result<RestoreOptions, Failure> {
    let Some(given) = caller.options("options", given)? else {
        return Ok(RestoreOptions::default());
    };
    Ok(RestoreOptions {
        model: key_part(caller, "the model", &given.model)?,
        key: (given.has_key != 0).then_some(given.key),
        max_len: Some(given.max_len).filter(|len| *len > 0),
    })
}

fn of_saved(saved: Saved) -> kvpool_saved_t {
    let Saved { bytes, blocks, tokens } = saved;
    kvpool_saved_t { size: 0, bytes: bytes.get(), blocks, tokens }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_save_prefixes(
    cache: kvpool_cache_t,
    path: *const c_char,
    given: *const kvpool_save_options_t,
    out: *mut kvpool_saved_t,
    out_size: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    reader(cache, |open| {
        let path = caller.path("path", path)?;
        let options = save_options(&caller, given)?;
        let out = caller.out("out", out, out_size)?;
        out.set(of_saved(open.cache.save_prefixes(path, &options)?));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_restore_prefixes(
    cache: kvpool_cache_t,
    path: *const c_char,
    given: *const kvpool_restore_options_t,
    out: *mut kvpool_restored_t,
    out_size: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    verb(cache, |open| {
        let path = caller.path("path", path)?;
        let options = restore_options(&caller, given)?;
        let out = caller.out("out", out, out_size)?;
        let restored = open.cache.restore_prefixes(path, &options)?;
        let Restored { file_tokens, dropped_tokens, blocks, blocks_present, slots } = restored;
        out.set(kvpool_restored_t {
            size: 0,
            file_tokens,
            dropped_tokens,
            blocks,
            blocks_present,
            slots,
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_save_sequence(
    cache: kvpool_cache_t,
    sequence: kvpool_seq_t,
    path: *const c_char,
    given: *const kvpool_save_options_t,
    out: *mut kvpool_saved_t,
    out_size: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    reader(cache, |open| {
        let path = caller.path("path", path)?;
        let options = save_options(&caller, given)?;
        let out = caller.out("out", out, out_size)?;
        out.set(of_saved(open.cache.save_sequence(handle::seq(sequence)?, path, &options)?));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_restore_sequence(
    cache: kvpool_cache_t,
    path: *const c_char,
    given: *const kvpool_restore_options_t,
    out: *mut kvpool_begun_t,
    out_size: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    verb(cache, |open| {
        let path = caller.path("path", path)?;
        let options = restore_options(&caller, given)?;
        let out = caller.out("out", out, out_size)?;
        out.set(of_begun(&open.cache.restore_sequence(path, &options)?));
        Ok(())
    })
}
