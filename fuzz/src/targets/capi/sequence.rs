//! The header's section "Sequences".

use std::ptr::{null, null_mut};

use kvpool::capi::*;

use super::handles::Handles;
use super::input::{Broken, Options, Prompt, Which};
use super::zeroed;

pub(super) fn begin(
    cache: kvpool_cache_t,
    prompt: Prompt,
    options: Options,
    broken: Broken,
    handles: &mut Handles,
) -> kvpool_status_t {
    let (tokens, built) = (prompt.tokens(), options.build());
    let mut out: kvpool_begun_t = zeroed();
    let size = broken.size(size_of::<kvpool_begun_t>());
    let given = if options.given { &raw const built } else { null() };
    let place =
        if size > size_of::<kvpool_begun_t>() { null_mut() } else { broken.place(&mut out) };
    // SAFETY: tokens and how many they are, options or NULL, a place of that size or NULL.
    let status =
        unsafe { kvpool_cache_begin(cache, tokens.as_ptr(), tokens.len(), given, place, size) };
    if status == KVPOOL_OK {
        handles.seqs.push(out.sequence);
    }
    status
}

pub(super) fn begin_batch(
    cache: kvpool_cache_t,
    wanted: &[(Prompt, Options)],
    handles: &mut Handles,
) -> kvpool_status_t {
    let wanted = &wanted[..wanted.len().min(6)];
    let prompts: Vec<_> = wanted.iter().map(|(prompt, _)| prompt.tokens()).collect();
    let options: Vec<_> = wanted.iter().map(|(_, options)| options.build()).collect();
    let items: Vec<_> = prompts
        .iter()
        .zip(&options)
        .map(|(prompt, options)| kvpool_begin_item_t {
            prompt: prompt.as_ptr(),
            prompt_len: prompt.len(),
            options,
        })
        .collect();
    let mut out: Vec<kvpool_begun_t> = wanted.iter().map(|_| zeroed()).collect();
    let size = size_of::<kvpool_begun_t>();
    // SAFETY: items whose prompts and options live on, how many they are, and as many places.
    let status = unsafe {
        kvpool_cache_begin_batch(cache, items.as_ptr(), items.len(), out.as_mut_ptr(), size)
    };
    if status == KVPOOL_OK {
        handles.seqs.extend(out.iter().map(|begun| begun.sequence));
    }
    status
}

pub(super) fn fork(cache: kvpool_cache_t, which: Which, handles: &mut Handles) -> kvpool_status_t {
    let mut out: kvpool_seq_t = zeroed();
    // SAFETY: a place.
    let status = unsafe { kvpool_cache_fork(cache, handles.seq(which), &mut out) };
    if status == KVPOOL_OK {
        handles.seqs.push(out);
    }
    status
}

pub(super) fn info(cache: kvpool_cache_t, seq: kvpool_seq_t, broken: Broken) -> kvpool_status_t {
    let mut out: kvpool_seq_info_t = zeroed();
    let size = broken.size(size_of::<kvpool_seq_info_t>()).min(size_of::<kvpool_seq_info_t>());
    // SAFETY: a place that is not shorter than the size, or NULL.
    unsafe { kvpool_seq_get_info(cache, seq, broken.place(&mut out), size) }
}

pub(super) fn preempt(cache: kvpool_cache_t) -> kvpool_status_t {
    let mut out: kvpool_preempted_t = zeroed();
    // SAFETY: a place and its size.
    unsafe { kvpool_cache_preempt_youngest(cache, &mut out, size_of::<kvpool_preempted_t>()) }
}
