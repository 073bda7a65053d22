//! The header's section "Prefixes".

use kvpool::capi::*;

use super::handles::Handles;
use super::input::{Options, Prompt, Which};
use super::zeroed;

pub(super) fn probe(cache: kvpool_cache_t, prompt: Prompt, options: Options) -> kvpool_status_t {
    let (tokens, built) = (prompt.tokens(), options.build());
    let mut out: kvpool_probe_t = zeroed();
    let size = size_of::<kvpool_probe_t>();
    let name_space = &raw const built.name_space;
    let (prompt, len) = (tokens.as_ptr(), tokens.len());
    // SAFETY: tokens and how many they are, a namespace, a place and its size.
    unsafe { kvpool_cache_probe(cache, prompt, len, name_space, &mut out, size) }
}

pub(super) fn pin(cache: kvpool_cache_t, which: Which, handles: &mut Handles) -> kvpool_status_t {
    let mut out: kvpool_pin_t = zeroed();
    // SAFETY: a place.
    let status = unsafe { kvpool_cache_pin(cache, handles.seq(which), &mut out) };
    if status == KVPOOL_OK {
        handles.pins.push(out);
    }
    status
}

pub(super) fn set_retention(
    cache: kvpool_cache_t,
    seq: kvpool_seq_t,
    ranges: &[(u32, u32, u8)],
) -> kvpool_status_t {
    let ranges: Vec<_> = ranges
        .iter()
        .take(8)
        .map(|(from, to, priority)| {
            let mut range: kvpool_retention_t = zeroed();
            (range.from, range.to) = (*from, *to);
            range.priority = (*priority).into();
            range.duration_ms = u64::from(*priority) * 3;
            range
        })
        .collect();
    // SAFETY: ranges and how many they are.
    unsafe { kvpool_cache_set_retention(cache, seq, ranges.as_ptr(), ranges.len()) }
}
