//! The header's section "Statistics and checks".

use std::ffi::c_void;

use super::bindings::*;
use super::caller::Caller;
use super::failure::CallError;
use super::handle::{self, of_block};
use super::object::reader;
use super::plan::{check_group, reuse_of};
use super::tensor::{apart, bytes_of, pool_bytes};
use crate::cache::Cache;
use crate::plan::Kv;
use crate::pool::{MAX_PRIORITY, Stats};
use crate::units::{Bytes, GroupIdx, LayerIdx};

const _: () = assert!(KVPOOL_PRIORITIES as usize == MAX_PRIORITY as usize + 1);

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_stats(
    cache: kvpool_cache_t,
    out: *mut kvpool_stats_t,
    out_size: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    reader(cache, |open| {
        let out = caller.out("out", out, out_size)?;
        out.set(of_stats(&open.cache.stats()));
        Ok(())
    })
}

/// All fields of both structs by name, so that one that only one of them has does not compile.
macro_rules! copied {
    ($stats:expr; seqs $(, $number:ident)*; $($bytes:ident),*) => {{
        let Stats { seqs, $($number,)* $($bytes,)* } = *$stats;
        kvpool_stats_t {
            size: 0,
            seqs: seqs.into(),
            $($number,)*
            $($bytes: Bytes::get($bytes),)*
        }
    }};
}

fn of_stats(stats: &Stats) -> kvpool_stats_t {
    copied!(stats;
        seqs, tokens_appended, steps_committed, steps_cancelled, seqs_begun, nonfinite, saturated,
        prefix_queries, prefix_query_tokens, prefix_hit_tokens, prefix_hit_blocks,
        prefix_partial_hits, prefix_partial_tokens, window_misses, donor_misses, blocks_published,
        blocks_deduplicated, evictions, cow_copies, blocks_withdrawn, partial_copies,
        partial_takeovers, donor_copies, donor_takeovers, namespaces_refused, saves, saved_tokens,
        restored_seqs, restored_blocks, restored_slots, preemptions,
        refused_slots, refused_blocks, refused_never, refused_too_long, refused_static_batch,
        scrub_failures;
        used_bytes, held_bytes, promised_bytes, cached_bytes, peak_used_bytes, peak_held_bytes,
        copied_bytes, scrubbed_bytes
    )
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_group_stats(
    cache: kvpool_cache_t,
    group: u32,
    out: *mut kvpool_group_stats_t,
    out_size: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    reader(cache, |open| {
        let out = caller.out("out", out, out_size)?;
        check_group(open.cache.plan(), group)?;
        if let Some(stats) = open.cache.group_stats(GroupIdx(group)) {
            out.set(kvpool_group_stats_t {
                size: 0,
                reuse: reuse_of(stats.reuse),
                blocks_free: stats.blocks.free,
                blocks_active: stats.blocks.active,
                blocks_cached: stats.blocks.cached,
                blocks_promised: stats.blocks.promised,
                peak_cached: stats.peak_cached,
                live_tokens: stats.live_tokens,
            });
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_evictions(
    cache: kvpool_cache_t,
    out: *mut u64,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    reader(cache, |open| {
        let out = caller.slice_mut("out", out, KVPOOL_PRIORITIES as usize)?;
        out.copy_from_slice(open.cache.evictions_by_priority());
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn kvpool_cache_check(cache: kvpool_cache_t) -> kvpool_status_t {
    reader(cache, |open| Ok(open.cache.check_invariants()?))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_digest(
    cache: kvpool_cache_t,
    out: *mut u64,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    reader(cache, |open| {
        caller.place("out", out)?.set(open.cache.state_digest());
        Ok(())
    })
}

/// Where the pool of a cache lies.
fn pool_of(cache: &Cache) -> (usize, usize) {
    pool_bytes(cache.plan(), cache.pool_ptr())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_export(
    cache: kvpool_cache_t,
    sequence: kvpool_seq_t,
    layer: u32,
    part: kvpool_part_t,
    from: u32,
    to: u32,
    out: *mut f32,
    out_len: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    reader(cache, |open| {
        let kv = match part {
            KVPOOL_K => Kv::K,
            KVPOOL_V => Kv::V,
            _ => {
                let problem = "is neither KVPOOL_K nor KVPOOL_V";
                return Err(CallError::BadArgument { what: "part", problem }.into());
            }
        };
        apart(("out", bytes_of(out, out_len)), ("the pool", pool_of(&open.cache)))?;
        let out = caller.slice_mut("out", out, out_len)?;
        let sequence = handle::seq(sequence)?;
        Ok(open.cache.export(sequence, LayerIdx(layer), kv, from, to, out)?)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_read(
    cache: kvpool_cache_t,
    offset: u64,
    out: *mut c_void,
    out_len: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    reader(cache, |open| {
        let out = out.cast::<u8>();
        apart(("out", bytes_of(out, out_len)), ("the pool", pool_of(&open.cache)))?;
        let out = caller.slice_mut("out", out, out_len)?;
        Ok(open.cache.read_bytes(offset, out)?)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_block_of(
    cache: kvpool_cache_t,
    sequence: kvpool_seq_t,
    group: u32,
    position: u32,
    out: *mut kvpool_block_t,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    reader(cache, |open| {
        let out = caller.place("out", out)?;
        let sequence = handle::seq(sequence)?;
        out.set(of_block(open.cache.block_of(sequence, GroupIdx(group), position)?)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_block_refs(
    cache: kvpool_cache_t,
    block: kvpool_block_t,
    out: *mut u32,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    reader(cache, |open| {
        let out = caller.place("out", out)?;
        out.set(open.cache.block_refs(handle::block(block)?)?);
        Ok(())
    })
}
