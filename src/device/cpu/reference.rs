//! The truth that every kernel is tested against: scalar, in f64, one position after the other.
//!
//! For each row and query head: the largest score, then the sum of the weights and the weighted
//! sum of the values, over all visible positions in ascending order. Scores are computed twice
//! rather than kept, so that a sequence may be of any length. It shares with the fast path the
//! layout and the definition of what is visible, and no arithmetic.

use half::{bf16, f16};

use super::super::TensorRef;
use super::super::quant::dequantize;
use super::disjoint::Disjoint;
use super::job::{AttendJob, Out};
use super::task::Task;
use super::threads::Threads;
use super::workspace::Workspace;
use crate::config::{Format, ScaleKind};
use crate::error::DeviceError;
use crate::plan::{E8M8, Kv, SCALE_BYTES, SCALE_GROUP};

/// Computes attention; an item of work is one row and one query head.
///
/// # Errors
/// [`DeviceError::WorkerPanicked`].
pub(super) fn attend(
    workspace: &mut Workspace,
    threads: &Threads,
    job: &AttendJob<'_>,
) -> Result<(), DeviceError> {
    let head_dim = job.layout.head_dim as usize;
    let doubles = Disjoint::new(workspace.doubles());
    threads.run(job.rows * job.num_q_heads, &|worker, item| {
        let (row, q_head) = (item / job.num_q_heads, item % job.num_q_heads);
        // SAFETY: `Threads::run` runs no two calls with the same worker index at once.
        let acc = unsafe { doubles.part(worker * head_dim, head_dim) };
        // SAFETY: `Threads::run` calls this once for each row and query head.
        unsafe { one_head(job, row, q_head, acc) };
    })
}

/// One row and one query head. `acc`: `[head_dim]`
///
/// # Safety
/// No other thread writes the result of the same row and query head meanwhile.
unsafe fn one_head(job: &AttendJob<'_>, row: usize, q_head: usize, acc: &mut [f64]) {
    let head_dim = job.layout.head_dim as usize;
    let Some(task) = job.task(row, q_head / job.group, 1) else {
        return;
    };
    let first = (row * job.num_q_heads + q_head) * head_dim;
    let score = |position: u32| -> f64 {
        let dot: f64 = (0..head_dim)
            .map(|i| query(&job.q, first + i) * element(&task, Kv::K, position, i))
            .sum();
        dot * f64::from(task.softmax_scale)
    };
    let [(_, sinks), (from, end)] = task.seen();
    let positions = || (0..sinks).chain(from..end);

    // `f64::max` passes over NaN; the sum brings it to light.
    let max = positions().map(score).fold(f64::NEG_INFINITY, f64::max);
    let mut sum = 0.0;
    acc.fill(0.0);
    for position in positions() {
        let score = score(position);
        let weight = if score == f64::NEG_INFINITY { 0.0 } else { (score - max).exp() };
        sum += weight;
        for (i, acc) in acc.iter_mut().enumerate() {
            *acc += weight * element(&task, Kv::V, position, i);
        }
    }
    // No key has a score above -∞.
    let nothing = sum == 0.0;
    let value = |acc: f64| if nothing { 0.0 } else { acc / sum };
    #[expect(clippy::cast_possible_truncation, reason = "rounded to f32 at the very end")]
    let narrow = |x: f64| x as f32;
    match &job.out {
        Out::F32(out) => {
            // SAFETY: the place of this row and query head, which nobody else writes (the contract
            // of the function).
            let out = unsafe { out.part(first, head_dim) };
            for (out, acc) in out.iter_mut().zip(acc) {
                *out = narrow(value(*acc));
            }
        }
        Out::F16(out) => {
            // SAFETY: as above.
            let out = unsafe { out.part(first, head_dim) };
            for (out, acc) in out.iter_mut().zip(acc) {
                *out = f16::from_f64(value(*acc));
            }
        }
        Out::Bf16(out) => {
            // SAFETY: as above.
            let out = unsafe { out.part(first, head_dim) };
            for (out, acc) in out.iter_mut().zip(acc) {
                *out = bf16::from_f64(value(*acc));
            }
        }
    }
    if let Some(lse) = &job.lse {
        // SAFETY: as above.
        let lse = unsafe { lse.part(row * job.num_q_heads + q_head, 1) };
        lse[0] = if nothing { f32::NEG_INFINITY } else { narrow(max + sum.ln()) };
    }
}

/// One element of the queries.
fn query(q: &TensorRef<'_>, at: usize) -> f64 {
    match q {
        TensorRef::F32(data) => f64::from(data[at]),
        TensorRef::F16(data) => data[at].to_f64(),
        TensorRef::Bf16(data) => data[at].to_f64(),
    }
}

/// One element of K or V at a position.
fn element(task: &Task<'_>, kv: Kv, position: u32, i: usize) -> f64 {
    let layout = task.view.layout;
    let (unit, token) = task.view.place(position);
    let size = layout.element_bytes as usize;
    let row = layout.row(unit, task.layer, kv, task.head, token);
    let at = usize::try_from(row).expect("a pool that is mapped has indices") + i * size;
    let bytes = &task.pool[at..at + size];
    match layout.format.element {
        Format::F32 => f64::from(f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])),
        Format::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
        Format::Bf16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
        Format::Int8 => {
            f64::from(dequantize(i8::from_le_bytes([bytes[0]]), scale(task, kv, unit, token, i)))
        }
    }
}

/// The scale of one INT8 element.
fn scale(task: &Task<'_>, kv: Kv, unit: u32, token: u32, i: usize) -> f32 {
    let layout = task.view.layout;
    let which = match layout.format.scale {
        Some(ScaleKind::PerTensor) => {
            return match kv {
                Kv::K => task.scales.k,
                Kv::V => task.scales.v,
            };
        }
        Some(ScaleKind::PerGroup32) => i / SCALE_GROUP as usize,
        Some(ScaleKind::PerTokenHead) | None => 0,
    };
    let scales = layout.scales(unit, task.layer, kv, task.head, token);
    let at = usize::try_from(scales).expect("a pool that is mapped has indices")
        + which * SCALE_BYTES as usize;
    E8M8(u16::from_le_bytes([task.pool[at], task.pool[at + 1]])).to_f32()
}
