//! What looks at a cache, or at the plan that it was opened with, without changing it; and the
//! views of its layers, which outlive it.

use std::ptr::{null, null_mut};
use std::sync::{Arc, Mutex};

use kvpool::capi::*;

use super::cache::{HEAD_DIM, Opened};
use super::input::{Broken, Options};
use super::{known, zeroed};

/// Views that are out: shared by the threads, and deleted once.
#[derive(Clone, Default)]
pub(super) struct Views(Arc<Mutex<Vec<usize>>>);

impl Views {
    pub(super) fn lend(&self, cache: kvpool_cache_t, layer: u8, part: u8) -> kvpool_status_t {
        let mut tensor = null_mut();
        let (layer, part) = (u32::from(layer) % 3, i32::from(part) % 5);
        // SAFETY: a place.
        let status = unsafe { kvpool_cache_dlpack(cache, layer, part, &mut tensor) };
        if status == KVPOOL_OK {
            self.0.lock().expect("no panic").push(tensor.expose_provenance());
        }
        status
    }

    /// Reads a view's first and last element, and deletes it. False where none is out.
    pub(super) fn delete(&self, which: u8) -> bool {
        let mut out = self.0.lock().expect("no panic");
        if out.is_empty() {
            return false;
        }
        let at = usize::from(which) % out.len();
        let address = out.swap_remove(at);
        drop(out);
        let tensor: *mut DLManagedTensor = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: it was lent, and is deleted here alone.
        let (view, deleter) = unsafe { (&(*tensor).dl_tensor, (*tensor).deleter) };
        let bytes = i64::from(view.dtype.bits / 8);
        let last: i64 = (0..4)
            .map(|dim| {
                // SAFETY: four dimensions.
                let (len, stride) = unsafe { (*view.shape.add(dim), *view.strides.add(dim)) };
                (len - 1) * stride
            })
            .sum();
        for at in [0, last * bytes + bytes - 1] {
            let at = isize::try_from(at).expect("in the pool");
            // SAFETY: what the view says is there. Another thread may write it: the value is not
            // used.
            let _ = unsafe { view.data.cast::<u8>().offset(at).read_volatile() };
        }
        // SAFETY: once.
        unsafe { deleter.expect("a deleter")(tensor) };
        true
    }
}

/// One of the functions that describe a cache.
pub(super) fn describe(
    cache: kvpool_cache_t,
    what: u8,
    index: u8,
    broken: Broken,
) -> kvpool_status_t {
    /// A place for a struct, and a size that is never larger.
    fn place<T>(out: &mut T, broken: Broken) -> (*mut T, usize) {
        (broken.place(out), broken.size(size_of::<T>()).min(size_of::<T>()))
    }
    let index = u32::from(index) % 4;
    // SAFETY: places, with their sizes or less, or NULL.
    unsafe {
        match what % 8 {
            0 => {
                let mut out: kvpool_plan_info_t = zeroed();
                let (out, size) = place(&mut out, broken);
                kvpool_cache_get_plan_info(cache, out, size)
            }
            1 => {
                let mut out: kvpool_group_info_t = zeroed();
                let (out, size) = place(&mut out, broken);
                kvpool_cache_get_group(cache, index, out, size)
            }
            2 => {
                let mut out: kvpool_layer_t = zeroed();
                let (out, size) = place(&mut out, broken);
                kvpool_cache_get_layer(cache, index, out, size)
            }
            3 => {
                let mut out: kvpool_device_info_t = zeroed();
                let (out, size) = place(&mut out, broken);
                kvpool_cache_get_device(cache, out, size)
            }
            4 => {
                let (mut base, mut bytes) = (null_mut(), 0);
                kvpool_cache_get_pool(cache, broken.place(&mut base), &mut bytes)
            }
            5 => kvpool_cache_reservations(cache, broken.place(&mut 0)),
            6 => {
                let mut out = [0; KVPOOL_PRIORITIES as usize];
                kvpool_cache_evictions(cache, out.as_mut_ptr())
            }
            _ => kvpool_cache_digest(cache, broken.place(&mut 0)),
        }
    }
}

pub(super) fn namespace_numbers(cache: kvpool_cache_t, options: Options) -> kvpool_status_t {
    let built = options.build();
    let given = if options.given { &raw const built.name_space } else { null() };
    let mut out = [0; 2];
    // SAFETY: a namespace or NULL, and two places.
    unsafe { kvpool_cache_namespace_numbers(cache, given, out.as_mut_ptr()) }
}

/// The last failure of this thread, whatever it was.
pub(super) fn last_error(broken: Broken) -> kvpool_status_t {
    let mut out: kvpool_error_t = zeroed();
    let size = broken.size(size_of::<kvpool_error_t>()).min(size_of::<kvpool_error_t>());
    // SAFETY: a place, or NULL, and no more than its size.
    unsafe { kvpool_last_error(broken.place(&mut out), size) }
}

/// One of the functions of the configuration and the plan.
pub(super) fn plan(opened: &Opened, what: u8, index: u8, count: u8) -> kvpool_status_t {
    let Opened { config, plan, .. } = *opened;
    let (group, count) = (u32::from(index) % 4, usize::from(count));
    let mut text = [0; 256];
    let mut needed = 0;
    let form = if index.is_multiple_of(2) { KVPOOL_TEXT } else { KVPOOL_JSON };
    // SAFETY: places with their sizes, and buffers that are as long as any count here.
    unsafe {
        match what % 6 {
            0 => {
                let mut out: kvpool_plan_info_t = zeroed();
                kvpool_plan_get_info(plan, &mut out, size_of::<kvpool_plan_info_t>())
            }
            1 => {
                let mut out: kvpool_group_info_t = zeroed();
                kvpool_plan_get_group(plan, group, &mut out, size_of::<kvpool_group_info_t>())
            }
            2 => {
                let mut out: kvpool_layer_t = zeroed();
                kvpool_plan_get_layer(plan, group, &mut out, size_of::<kvpool_layer_t>())
            }
            3 => {
                known(kvpool_config_text(config, form, text.as_mut_ptr(), count, &mut needed));
                kvpool_plan_text(plan, form, text.as_mut_ptr(), count, &mut needed)
            }
            4 => kvpool_plan_blocks_for(plan, group, u32::from(index) * 7, &mut 0),
            _ => {
                let tokens = count % 8;
                let positions: Vec<u32> = (0..8).map(|at| at * u32::from(index)).collect();
                let x = vec![0.5; 8 * HEAD_DIM];
                let mut out = vec![0.0; 8 * HEAD_DIM];
                let (at, len) = (positions.as_ptr(), tokens * HEAD_DIM);
                kvpool_plan_rotate(plan, group, at, tokens, 1, x.as_ptr(), out.as_mut_ptr(), len)
            }
        }
    }
}
