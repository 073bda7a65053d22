//! The header's section "Plan".

use std::ffi::c_char;
use std::ptr::null_mut;
use std::sync::Arc;

use super::bindings::*;
use super::caller::Caller;
use super::config::CONFIGS;
use super::failure::{CallError, Failure};
use super::object::guarded;
use super::registry::Registry;
use super::tensor::{apart, bytes_of};
use super::text::{Form, TextOut, json};
use crate::config::{Admission, CacheMode, Config, DeviceKind, Format, ScaleKind, Scrub};
use crate::device::cpu::num_threads;
use crate::device::resolve_budget;
use crate::error::{CacheError, PlanError};
use crate::plan::{Addressing, GroupKind, GroupReuse, KvFormat, Plan};
use crate::units::{Bytes, GroupIdx, LayerIdx};

/// A plan, and what it was made of.
#[derive(Debug)]
pub(super) struct Planned {
    pub(super) plan: Plan,
    /// With a capacity that was a share turned into bytes.
    pub(super) config: Config,
}

/// The plans of the process.
pub(super) static PLANS: Registry<Planned> = Registry::new();

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_plan_new(
    config: kvpool_config_t,
    out: *mut kvpool_plan_t,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    guarded(|| {
        let source = CONFIGS.get(config)?;
        let out = caller.place("out", out)?;
        let mut config = source.config.clone();
        resolve_budget(&mut config)?;
        let plan = Plan::new(&config, &source.geometry)?;
        out.set(PLANS.insert(Arc::new(Planned { plan, config }))?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn kvpool_plan_destroy(plan: kvpool_plan_t) -> kvpool_status_t {
    guarded(|| {
        PLANS.remove(plan)?;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_plan_get_info(
    plan: kvpool_plan_t,
    out: *mut kvpool_plan_info_t,
    out_size: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    guarded(|| {
        let planned = PLANS.get(plan)?;
        let out = caller.out("out", out, out_size)?;
        out.set(info_of(&planned.plan, &planned.config)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_plan_get_group(
    plan: kvpool_plan_t,
    group: u32,
    out: *mut kvpool_group_info_t,
    out_size: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    guarded(|| {
        let planned = PLANS.get(plan)?;
        let out = caller.out("out", out, out_size)?;
        out.set(group_of(&planned.plan, group)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_plan_get_layer(
    plan: kvpool_plan_t,
    layer: u32,
    out: *mut kvpool_layer_t,
    out_size: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    guarded(|| {
        let planned = PLANS.get(plan)?;
        let out = caller.out("out", out, out_size)?;
        out.set(layer_of(&planned.plan, layer)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_plan_text(
    plan: kvpool_plan_t,
    form: kvpool_text_form_t,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    guarded(|| {
        let planned = PLANS.get(plan)?;
        let text = match Form::of(form)? {
            Form::Text => planned.plan.explain(),
            Form::Json => json(&planned.plan)?,
        };
        TextOut { buffer, capacity, needed }.put(&caller, &text)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_plan_blocks_for(
    plan: kvpool_plan_t,
    group: u32,
    len: u32,
    out: *mut u32,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    guarded(|| {
        let planned = PLANS.get(plan)?;
        let out = caller.place("out", out)?;
        let plan = &planned.plan;
        check_group(plan, group)?;
        let limit = plan.limits.max_seq_len;
        if len > limit {
            let (wanted, knob) = (u64::from(len), "limits.max_seq_len");
            return Err(CacheError::SequenceTooLong { wanted, limit, knob }.into());
        }
        out.set(plan.blocks_for(GroupIdx(group), len));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_plan_rotate(
    plan: kvpool_plan_t,
    layer: u32,
    positions: *const u32,
    num_tokens: usize,
    num_heads: u32,
    x: *const f32,
    out: *mut f32,
    len: usize,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    guarded(|| {
        let planned = PLANS.get(plan)?;
        let plan = &planned.plan;
        let (at, num_layers) = (LayerIdx(layer), plan.geometry.num_layers);
        if layer >= num_layers {
            return Err(CacheError::NoSuchLayer { layer: at, num_layers }.into());
        }
        let (Some(rope), Some(table)) = (&plan.rope, plan.rope_table_of(at)) else {
            let problem = "has no [rope]: K is stored as it comes, and queries are the engine's";
            return Err(CallError::BadArgument { what: "the plan", problem }.into());
        };
        let positions = caller.slice("positions", positions, num_tokens)?;
        if let Some(position) = positions.iter().find(|position| **position >= rope.positions) {
            let (wanted, limit) = (u64::from(*position) + 1, rope.positions);
            return Err(
                CacheError::SequenceTooLong { wanted, limit, knob: "limits.max_seq_len" }.into()
            );
        }
        let head_dim = plan.geometry.head_dim;
        let row = num_heads as usize * head_dim as usize;
        if num_tokens.checked_mul(row) != Some(len) {
            let (what, shape) = ("x", "[num_tokens, num_heads, head_dim]");
            let expected = num_tokens.saturating_mul(row);
            return Err(CacheError::WrongShape { what, got: len, expected, shape }.into());
        }
        let of_out = ("out", bytes_of(out, len));
        apart(of_out, ("positions", bytes_of(positions.as_ptr(), num_tokens)))?;
        let out = if x == out.cast_const() {
            caller.slice_mut("out", out, len)?
        } else {
            let x = caller.slice("x", x, len)?;
            apart(of_out, ("x", bytes_of(x.as_ptr(), len)))?;
            let out = caller.slice_mut("out", out, len)?;
            out.copy_from_slice(x);
            out
        };
        if row > 0 {
            for (position, x) in positions.iter().zip(out.chunks_exact_mut(row)) {
                rope.rotate(table, *position, head_dim, x);
            }
        }
        Ok(())
    })
}

/// The number of a count that a plan keeps far below this.
fn count(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

const fn format_of(format: KvFormat) -> (kvpool_format_t, kvpool_scale_t) {
    let element = match format.element {
        Format::F32 => KVPOOL_FORMAT_F32,
        Format::F16 => KVPOOL_FORMAT_F16,
        Format::Bf16 => KVPOOL_FORMAT_BF16,
        Format::Int8 => KVPOOL_FORMAT_INT8,
    };
    let scale = match format.scale {
        None => KVPOOL_SCALE_NONE,
        Some(ScaleKind::PerTokenHead) => KVPOOL_SCALE_PER_TOKEN_HEAD,
        Some(ScaleKind::PerTensor) => KVPOOL_SCALE_PER_TENSOR,
        Some(ScaleKind::PerGroup32) => KVPOOL_SCALE_PER_GROUP,
    };
    (element, scale)
}

pub(super) const fn reuse_of(reuse: GroupReuse) -> kvpool_reuse_t {
    match reuse {
        GroupReuse::Off => KVPOOL_REUSE_NONE,
        GroupReuse::Index => KVPOOL_REUSE_INDEX,
        GroupReuse::Attached => KVPOOL_REUSE_ATTACHED,
        GroupReuse::Donor => KVPOOL_REUSE_DONOR,
    }
}

/// What the device takes beside the pool.
fn workspace_of(plan: &Plan, config: &Config) -> Result<Bytes, PlanError> {
    Ok(match config.device.kind {
        DeviceKind::Cpu => plan.cpu_workspace_bytes(num_threads(&config.device))?,
        DeviceKind::Cuda => plan.cuda_workspace()?.device_bytes,
    })
}

pub(super) fn info_of(plan: &Plan, config: &Config) -> Result<kvpool_plan_info_t, Failure> {
    let (format, scale) = format_of(plan.format);
    let (geometry, limits) = (&plan.geometry, &plan.limits);
    Ok(kvpool_plan_info_t {
        size: 0,
        mode: match plan.mode {
            // The baseline of jobs has no plan.
            CacheMode::Contiguous | CacheMode::Dynamic => KVPOOL_MODE_CONTIGUOUS,
            CacheMode::Paged => KVPOOL_MODE_PAGED,
            CacheMode::Hybrid => KVPOOL_MODE_HYBRID,
        },
        format,
        scale,
        admission: match plan.admission {
            Admission::Guaranteed => KVPOOL_GUARANTEED,
            Admission::MaxUtilization => KVPOOL_MAX_UTILIZATION,
            Admission::StaticBatch => KVPOOL_STATIC_BATCH,
        },
        num_layers: geometry.num_layers,
        num_q_heads: geometry.num_q_heads,
        num_kv_heads: geometry.num_kv_heads,
        head_dim: geometry.head_dim,
        num_groups: count(plan.groups.len()),
        tokens_per_block: plan.tokens_per_block,
        max_seqs: limits.max_seqs,
        max_seq_len: limits.max_seq_len,
        max_batch_tokens: limits.max_batch_tokens,
        max_step_tokens: limits.max_step_tokens,
        max_rewind_tokens: limits.max_rewind_tokens,
        watermark_blocks: plan.watermark_blocks,
        seq_slots: plan.seq_slots,
        full_length_seqs: plan.full_length_seqs,
        max_pins: plan.max_pins(),
        prefix_reuse: plan.reuse.is_on().into(),
        rope: plan.rope.is_some().into(),
        scrub: match plan.scrub {
            Scrub::Off => KVPOOL_SCRUB_OFF,
            Scrub::OnRelease => KVPOOL_SCRUB_ON_RELEASE,
            Scrub::OnReuse => KVPOOL_SCRUB_ON_REUSE,
        },
        pool_bytes: plan.pool_bytes.get(),
        padding_bytes: plan.padding_bytes.get(),
        host_bytes: plan.host_bytes.get(),
        workspace_bytes: workspace_of(plan, config)?.get(),
        bytes_per_token: plan.bytes_per_token.get(),
        capacity_tokens: plan.capacity_tokens,
    })
}

/// Refuses a group that the plan does not have.
pub(super) fn check_group(plan: &Plan, group: u32) -> Result<(), CallError> {
    let num_groups = count(plan.groups.len());
    if group < num_groups { Ok(()) } else { Err(CallError::NoSuchGroup { group, num_groups }) }
}

pub(super) fn group_of(plan: &Plan, group: u32) -> Result<kvpool_group_info_t, Failure> {
    check_group(plan, group)?;
    let index = group as usize;
    let group = &plan.groups[index];
    let layout = &group.layout;
    Ok(kvpool_group_info_t {
        size: 0,
        kind: match group.kind {
            GroupKind::Contiguous => KVPOOL_CONTIGUOUS,
            GroupKind::Paged => KVPOOL_PAGED,
        },
        addressing: match layout.addressing {
            Addressing::Blocks => KVPOOL_BLOCKS,
            Addressing::Slot => KVPOOL_SLOT,
            Addressing::Ring => KVPOOL_RING,
        },
        reuse: reuse_of(plan.reuse.groups[index]),
        window: group.window.unwrap_or(0),
        sink_tokens: layout.sink_tokens,
        ring_tokens: layout.ring_tokens,
        num_layers: layout.num_layers,
        units: layout.units,
        unit_tokens: layout.unit_tokens,
        max_blocks_per_seq: group.max_blocks_per_seq,
        unit_bytes: layout.unit_bytes,
        offset: layout.base,
        bytes_per_token: group.bytes_per_token.get(),
    })
}

/// A layer's place in the pool, without addresses.
pub(super) fn layer_of(plan: &Plan, layer: u32) -> Result<kvpool_layer_t, Failure> {
    let num_layers = plan.geometry.num_layers;
    let at = LayerIdx(layer);
    let view = plan.layer_view(at).ok_or(CacheError::NoSuchLayer { layer: at, num_layers })?;
    let (format, scale) = format_of(view.format);
    let scales = |offset: u64| if view.scales_per_row == 0 { 0 } else { offset };
    Ok(kvpool_layer_t {
        size: 0,
        group: view.group.0,
        index_in_group: plan.layers[at.index()].index,
        format,
        scale,
        num_kv_heads: plan.geometry.num_kv_heads,
        head_dim: plan.geometry.head_dim,
        units: view.units,
        unit_tokens: view.unit_tokens,
        scales_per_row: view.scales_per_row,
        reserved: 0,
        k_static_scale: view.static_scales.k,
        v_static_scale: view.static_scales.v,
        k_offset: view.k,
        v_offset: view.v,
        k_scales_offset: scales(view.k_scales),
        v_scales_offset: scales(view.v_scales),
        unit_stride: view.unit_stride,
        head_stride: view.head_stride,
        token_stride: view.token_stride,
        scale_head_stride: view.scale_head_stride,
        scale_token_stride: view.scale_token_stride,
        k: null_mut(),
        v: null_mut(),
        k_scales: null_mut(),
        v_scales: null_mut(),
    })
}
