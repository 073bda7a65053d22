//! The header's section "Statistics and checks".

use std::ops::Range;

use kvpool::capi::*;

use super::cache::{HEAD_DIM, KV_HEADS};
use super::handles::Handles;
use super::input::{Broken, Which};
use super::{known, zeroed};

pub(super) fn stats(cache: kvpool_cache_t, broken: Broken) -> kvpool_status_t {
    let mut out: kvpool_stats_t = zeroed();
    let size = broken.size(size_of::<kvpool_stats_t>()).min(size_of::<kvpool_stats_t>());
    // SAFETY: a place that is not shorter than the size, or NULL.
    unsafe { kvpool_cache_stats(cache, broken.place(&mut out), size) }
}

pub(super) fn group_stats(cache: kvpool_cache_t, group: u8) -> kvpool_status_t {
    let mut out: kvpool_group_stats_t = zeroed();
    let size = size_of::<kvpool_group_stats_t>();
    // SAFETY: a place and its size.
    unsafe { kvpool_cache_group_stats(cache, group.into(), &mut out, size) }
}

/// Into room for `len` elements where that is odd, and otherwise for as many as there are.
pub(super) fn export(
    cache: kvpool_cache_t,
    seq: kvpool_seq_t,
    (layer, part): (u8, kvpool_part_t),
    tokens: Range<u8>,
    len: u16,
) -> kvpool_status_t {
    let mut out = vec![0.0; usize::from(len) + 1];
    let (layer, from, to) = (layer.into(), u32::from(tokens.start), u32::from(tokens.end));
    let right = to.saturating_sub(from) as usize * KV_HEADS * HEAD_DIM;
    out.resize(out.len().max(right), 0.0);
    let len = if len.is_multiple_of(2) { right } else { usize::from(len) };
    // SAFETY: no more places than there are.
    unsafe { kvpool_cache_export(cache, seq, layer, part, from, to, out.as_mut_ptr(), len) }
}

pub(super) fn read(cache: kvpool_cache_t, offset: u64, len: u8) -> kvpool_status_t {
    let mut out = [0_u8; 256];
    // SAFETY: a place longer than any length here.
    unsafe { kvpool_cache_read(cache, offset, out.as_mut_ptr().cast(), len.into()) }
}

/// A block, and how many hold one that was given out, which may be another.
pub(super) fn block_of(
    cache: kvpool_cache_t,
    which: Which,
    (group, position): (u8, u8),
    handles: &mut Handles,
) -> kvpool_status_t {
    let mut out: kvpool_block_t = zeroed();
    let (seq, group, position) = (handles.seq(which), group.into(), position.into());
    // SAFETY: a place.
    let status = unsafe { kvpool_cache_block_of(cache, seq, group, position, &mut out) };
    if status == KVPOOL_OK {
        handles.blocks.push(out);
    }
    let mut refs = 0;
    // SAFETY: a place.
    known(unsafe { kvpool_cache_block_refs(cache, handles.block(which), &mut refs) });
    status
}
