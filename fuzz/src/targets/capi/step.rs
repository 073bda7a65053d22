//! The header's section "Steps".

use std::ptr::{null, null_mut};

use kvpool::capi::*;

use super::cache::{HEAD_DIM, KV_HEADS, MAX_TOKENS, Q_HEADS};
use super::handles::Handles;
use super::input::{Broken, Which};
use super::zeroed;

pub(super) fn reserve(
    cache: kvpool_cache_t,
    wanted: &[(Which, u8)],
    tokens: bool,
    short: bool,
    handles: &mut Handles,
) -> kvpool_status_t {
    let wanted = &wanted[..wanted.len().min(6)];
    let items: Vec<_> = wanted
        .iter()
        .map(|(which, count)| {
            let mut item: kvpool_step_item_t = zeroed();
            item.sequence = handles.seq(*which);
            item.num_tokens = u32::from(*count) % 12;
            item
        })
        .collect();
    let total: u32 = items.iter().map(|item| item.num_tokens).sum();
    let ids: Vec<u32> = (0..total + 1).map(|at| at % 5).collect();
    let len = if short { total as usize + 1 } else { total as usize };
    let (ids, len) = if tokens { (ids.as_ptr(), len) } else { (null(), 0) };
    let mut out: kvpool_step_t = zeroed();
    // SAFETY: items and how many they are, no more tokens than there are or NULL, a place.
    let status =
        unsafe { kvpool_cache_reserve(cache, items.as_ptr(), items.len(), ids, len, &mut out) };
    if status == KVPOOL_OK {
        handles.steps.push(out);
        handles.tokens = total;
        assert!(total as usize <= MAX_TOKENS);
    }
    status
}

fn tensor(data: &mut [f32], broken: Broken) -> kvpool_tensor_t {
    let mut tensor: kvpool_tensor_t = zeroed();
    tensor.data =
        if matches!(broken, Broken::Null) { null_mut() } else { data.as_mut_ptr().cast() };
    tensor.len = match broken {
        // Never longer than it is: that is the caller's to keep.
        Broken::Size(size) => (data.len() as u64).min(size.into()),
        _ => data.len() as u64,
    };
    tensor.dtype = KVPOOL_F32;
    tensor
}

pub(super) fn append(
    cache: kvpool_cache_t,
    which: Which,
    layer: u8,
    broken: Broken,
    handles: &Handles,
) -> kvpool_status_t {
    let n = handles.tokens as usize * KV_HEADS * HEAD_DIM;
    let (mut data, mut other) = (vec![0.5; n.max(1)], vec![0.25; n.max(1)]);
    let key = tensor(&mut data[..n], broken);
    let value = tensor(&mut other[..n], Broken::No);
    let step = handles.step(which);
    // SAFETY: tensors that live on, no longer than they are.
    unsafe { kvpool_step_append(cache, step, u32::from(layer) % 3, &key, &value) }
}

pub(super) fn attend(
    cache: kvpool_cache_t,
    which: Which,
    (layer, scale): (u8, f32),
    broken: Broken,
    handles: &Handles,
) -> kvpool_status_t {
    let n = handles.tokens as usize * Q_HEADS * HEAD_DIM;
    let (mut q, mut out) = (vec![0.5; n.max(1)], vec![0.0; n.max(1)]);
    let q = tensor(&mut q[..n], Broken::No);
    let to = tensor(&mut out[..n], broken);
    let mut options: kvpool_attend_options_t = zeroed();
    options.size = size_of::<kvpool_attend_options_t>();
    options.softmax_scale = scale;
    let step = handles.step(which);
    // SAFETY: tensors that live on, no longer than they are, and options.
    unsafe { kvpool_step_attend(cache, step, u32::from(layer) % 3, &q, &to, &options) }
}

/// What the CPU refuses.
pub(super) fn of_a_gpu(
    cache: kvpool_cache_t,
    what: u8,
    step: kvpool_step_t,
    group: u8,
) -> kvpool_status_t {
    match what % 4 {
        0 => kvpool_step_prepare(cache, step),
        1 => {
            let mut out: kvpool_step_device_t = zeroed();
            let size = size_of::<kvpool_step_device_t>();
            // SAFETY: a place and its size.
            unsafe { kvpool_step_get_device(cache, step, group.into(), 1, &mut out, size) }
        }
        2 => kvpool_cache_synchronize(cache),
        // SAFETY: the default stream.
        _ => unsafe { kvpool_cache_set_stream(cache, null_mut()) },
    }
}

pub(super) fn view(cache: kvpool_cache_t, step: kvpool_step_t) -> kvpool_status_t {
    let mut out: kvpool_step_view_t = zeroed();
    // SAFETY: a place and its size.
    unsafe { kvpool_step_get_view(cache, step, &mut out, size_of::<kvpool_step_view_t>()) }
}

pub(super) fn group(cache: kvpool_cache_t, step: kvpool_step_t, group: u8) -> kvpool_status_t {
    let mut out: kvpool_step_group_t = zeroed();
    let size = size_of::<kvpool_step_group_t>();
    // SAFETY: a place and its size.
    unsafe { kvpool_step_get_group(cache, step, group.into(), &mut out, size) }
}

pub(super) fn csr(cache: kvpool_cache_t, step: kvpool_step_t, group: u8) -> kvpool_status_t {
    let mut out: kvpool_step_csr_t = zeroed();
    let size = size_of::<kvpool_step_csr_t>();
    // SAFETY: a place and its size.
    unsafe { kvpool_step_get_csr(cache, step, group.into(), &mut out, size) }
}
