//! The header's section "Cache: open, look, close".

use std::ffi::{CStr, c_char, c_void};
use std::ptr::with_exposed_provenance_mut;

use super::bindings::*;
use super::caller::Caller;
use super::config::toml_of;
use super::object::{self, CACHES, Object, any, guarded, verb, verb_beside_step};
use super::plan::{PLANS, group_of, layer_of};
use super::process;
use super::text::{Form, TextOut, json};
use crate::cache::Cache;
use crate::config::DeviceKind;
use crate::device::CudaStream;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_open(
    plan: kvpool_plan_t,
    out: *mut kvpool_cache_t,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    guarded(|| {
        let planned = PLANS.get(plan)?;
        let out = caller.place("out", out)?;
        let (plan, config) = (&planned.plan, &planned.config);
        process::watch_forks();
        let cache = Cache::open_on_device(plan.clone(), &config.device, None)?;
        out.set(CACHES.insert(Object::new(cache, plan.clone(), config.clone())?)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn kvpool_cache_close(cache: kvpool_cache_t) -> kvpool_status_t {
    object::close(cache)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_get_plan_info(
    cache: kvpool_cache_t,
    out: *mut kvpool_plan_info_t,
    out_size: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    any(cache, |object| {
        let out = caller.out("out", out, out_size)?;
        out.set(object.info);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_get_group(
    cache: kvpool_cache_t,
    group: u32,
    out: *mut kvpool_group_info_t,
    out_size: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    any(cache, |object| {
        let out = caller.out("out", out, out_size)?;
        out.set(group_of(&object.plan, group)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_get_layer(
    cache: kvpool_cache_t,
    layer: u32,
    out: *mut kvpool_layer_t,
    out_size: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    any(cache, |object| {
        let out = caller.out("out", out, out_size)?;
        let layer = layer_of(&object.plan, layer)?;
        let at = |offset: u64| -> *mut c_void {
            with_exposed_provenance_mut(object.base + usize::try_from(offset).unwrap_or_default())
        };
        let scales =
            |offset| if layer.scales_per_row == 0 { std::ptr::null_mut() } else { at(offset) };
        out.set(kvpool_layer_t {
            k: at(layer.k_offset),
            v: at(layer.v_offset),
            k_scales: scales(layer.k_scales_offset),
            v_scales: scales(layer.v_scales_offset),
            ..layer
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_text(
    cache: kvpool_cache_t,
    form: kvpool_text_form_t,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    any(cache, |object| {
        let Object { plan, config, device, .. } = &**object;
        let text = match Form::of(form)? {
            Form::Text => format!(
                "{}\n{}device    {}, kernels {}, {} threads, workspace {} B\n",
                toml_of(config)?,
                plan.explain(),
                device.kind,
                device.kernel,
                device.threads,
                device.workspace_bytes
            ),
            Form::Json => json(&serde_json::json!({
                "config": config,
                "plan": plan,
                "device": device,
            }))?,
        };
        TextOut { buffer, capacity, needed }.put(&caller, &text)
    })
}

/// The kernels' name as a C string that lives as long as the library.
pub(super) fn kernel_name(name: &str) -> &'static CStr {
    match name {
        "reference" => c"reference",
        "portable" => c"portable",
        "avx2" => c"avx2",
        "avx512" => c"avx512",
        "avx512+vnni" => c"avx512+vnni",
        "avx512+vnni+bf16" => c"avx512+vnni+bf16",
        "avx512-bf16" => c"avx512-bf16",
        "plain" => c"plain",
        "tensor-cores" => c"tensor-cores",
        "none" => c"none",
        _ => c"other",
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_get_device(
    cache: kvpool_cache_t,
    out: *mut kvpool_device_info_t,
    out_size: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    any(cache, |object| {
        let out = caller.out("out", out, out_size)?;
        let device = &object.device;
        out.set(kvpool_device_info_t {
            size: 0,
            kind: match object.config.device.kind {
                DeviceKind::Cpu => KVPOOL_CPU,
                DeviceKind::Cuda => KVPOOL_CUDA,
            },
            threads: device.threads,
            huge_pages: device.huge_pages.into(),
            emulated: (device.kind == "cuda-emulated").into(),
            pool_bytes: device.pool_bytes.get(),
            workspace_bytes: device.workspace_bytes.get(),
            kernel: kernel_name(device.kernel).as_ptr(),
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_get_pool(
    cache: kvpool_cache_t,
    base: *mut *mut c_void,
    bytes: *mut u64,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    any(cache, |object| {
        let base = caller.place("base", base)?;
        let bytes = caller.place("bytes", bytes)?;
        base.set(with_exposed_provenance_mut(object.base));
        bytes.set(object.plan.pool_bytes.get());
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_set_stream(
    cache: kvpool_cache_t,
    stream: *mut c_void,
) -> kvpool_status_t {
    verb(cache, |open| {
        // SAFETY: the caller keeps to kvpool.h: the stream lives until another is set.
        let stream = unsafe { CudaStream::new(stream) };
        Ok(open.cache.set_stream(stream)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn kvpool_cache_synchronize(cache: kvpool_cache_t) -> kvpool_status_t {
    verb_beside_step(cache, |open| Ok(open.cache.synchronize()?))
}
