//! Storing a step's K and V.
//!
//! The work is dealt out by place, not by token: an item is K or V of one head, and of these the
//! token slots that fall into one of `parts` classes. Two items therefore never write the same
//! byte, whatever token slots the caller names; should it name one twice, the later token stays,
//! for any number of threads.

use super::super::convert::Source;
use super::super::quant::quantize_static;
use super::super::{AppendArgs, AppendCounts, TensorRef};
use super::disjoint::Disjoint;
use super::kernel::Kernel;
use super::lanes::Isa;
use super::memory::PoolMemory;
use super::workers::Workers;
use crate::config::{Format, ScaleKind};
use crate::error::DeviceError;
use crate::plan::{GroupLayout, Kv, LayerScales, SCALE_BYTES, SCALE_GROUP};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// Below this many elements of K and V the caller stores them itself: waking a worker takes as
/// long as converting some ten thousand elements.
const MIN_PARALLEL_ELEMENTS: usize = 64 << 10;

/// Consecutive token slots that fall into one class: enough for whole cache lines at a time.
const CLASS_TOKENS: u64 = 8;

/// An append that has been checked.
#[derive(Debug)]
pub(super) struct AppendJob<'a> {
    /// The whole pool.
    pool: Disjoint<'a, u8>,
    layout: &'a GroupLayout,
    layer: u32,
    scales: LayerScales,
    token_slots: &'a [u64],
    k: TensorRef<'a>,
    v: TensorRef<'a>,
    /// Classes of token slots.
    parts: u64,
}

/// K or V of one head, in one class of token slots. Whoever has one may write its vectors: it is
/// made by [`AppendJob::item`] only, and used up by [`store_item`].
#[derive(Debug)]
pub(super) struct AppendItem {
    kv: Kv,
    head: u32,
    part: u64,
}

impl AppendJob<'_> {
    /// Items of work.
    fn items(&self) -> usize {
        usize::try_from(self.parts).unwrap_or(1) * 2 * self.layout.num_kv_heads as usize
    }

    /// The item of an index.
    ///
    /// # Safety
    /// As long as the item is in use, no other of the same index is.
    unsafe fn item(&self, index: usize) -> AppendItem {
        let heads = self.layout.num_kv_heads as usize;
        let kv = if (index / heads).is_multiple_of(2) { Kv::K } else { Kv::V };
        let head = u32::try_from(index % heads).unwrap_or(u32::MAX);
        AppendItem { kv, head, part: (index / (2 * heads)) as u64 }
    }
}

/// Stores K and V of a step.
///
/// # Errors
/// [`DeviceError::OutOfRange`] before anything is written, [`DeviceError::WorkerPanicked`].
pub(super) fn append(
    kernel: &dyn Kernel,
    workers: &Workers,
    pool: &mut PoolMemory,
    args: &AppendArgs<'_>,
) -> Result<AppendCounts, DeviceError> {
    check(pool, args)?;
    let layout = args.layout;
    let heads = u64::from(layout.num_kv_heads);
    let elements = args.k.len() + args.v.len();
    let threads = workers.threads();
    let alone = threads == 1 || elements < MIN_PARALLEL_ELEMENTS;
    // A few items for each thread, so that one that is held up does not hold up all.
    let parts = if alone { 1 } else { (4 * threads as u64).div_ceil(2 * heads) };
    let job = AppendJob {
        pool: Disjoint::new(pool.bytes_mut()),
        layout,
        layer: args.layer,
        scales: args.scales,
        token_slots: args.token_slots,
        k: args.k,
        v: args.v,
        parts,
    };
    let mut counts = AppendCounts::default();
    if alone {
        for index in 0..job.items() {
            // SAFETY: the items are used one after the other.
            let item = unsafe { job.item(index) };
            counts.add(kernel.append(&job, item));
        }
        return Ok(counts);
    }
    let nonfinite = AtomicU64::new(0);
    let saturated = AtomicU64::new(0);
    workers.run(job.items(), &|_, index| {
        // SAFETY: `Workers::run` calls this once for each index.
        let item = unsafe { job.item(index) };
        let counts = kernel.append(&job, item);
        nonfinite.fetch_add(counts.nonfinite, Relaxed);
        saturated.fetch_add(counts.saturated, Relaxed);
    })?;
    counts
        .add(AppendCounts { nonfinite: nonfinite.into_inner(), saturated: saturated.into_inner() });
    Ok(counts)
}

/// Refuses what would be written outside the layer's units.
fn check(pool: &PoolMemory, args: &AppendArgs<'_>) -> Result<(), DeviceError> {
    let layout = args.layout;
    pool.range(layout.base, layout.bytes())?;
    let slots = u64::from(layout.units) * u64::from(layout.unit_tokens);
    let last = args.token_slots.iter().copied().max().unwrap_or(0);
    let inside = args.token_slots.is_empty() || last < slots;
    if inside && args.layer < layout.num_layers {
        return Ok(());
    }
    // The unit that the slot would be in, were there so many.
    let unit = last / u64::from(layout.unit_tokens);
    Err(DeviceError::OutOfRange {
        offset: layout.base.saturating_add(layout.unit_bytes.saturating_mul(unit)),
        len: layout.unit_bytes,
        pool: crate::units::Bytes(pool.bytes().len() as u64),
    })
}

/// Stores one item.
#[inline(always)]
#[expect(clippy::needless_pass_by_value, reason = "the right to write is used up")]
pub(super) fn store_item<I: Isa>(isa: I, job: &AppendJob<'_>, item: AppendItem) -> AppendCounts {
    let (tensor, scale) = match item.kv {
        Kv::K => (&job.k, job.scales.k),
        Kv::V => (&job.v, job.scales.v),
    };
    match tensor {
        TensorRef::F32(data) => store_vectors(isa, job, &item, data, scale),
        TensorRef::F16(data) => store_vectors(isa, job, &item, data, scale),
        TensorRef::Bf16(data) => store_vectors(isa, job, &item, data, scale),
    }
}

/// Stores one item's vectors. `data`: `[tokens, num_kv_heads, head_dim]`
#[inline(always)]
fn store_vectors<I: Isa, S: Source>(
    isa: I,
    job: &AppendJob<'_>,
    item: &AppendItem,
    data: &[S],
    static_scale: f32,
) -> AppendCounts {
    let layout = job.layout;
    let head_dim = layout.head_dim as usize;
    let per_token = layout.num_kv_heads as usize * head_dim;
    let row_bytes = head_dim * layout.element_bytes as usize;
    let scale_bytes = (layout.scales_per_row * SCALE_BYTES) as usize;
    let index = |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX);
    let mut counts = AppendCounts::default();
    // The last slot's unit and place, which most often tell the next one's without a division.
    let (mut last, mut unit, mut at) = (u64::MAX, 0, u32::MAX);
    for (token, &slot) in job.token_slots.iter().enumerate() {
        if job.parts > 1 && slot / CLASS_TOKENS % job.parts != item.part {
            continue;
        }
        if slot == last.wrapping_add(1) && at < layout.unit_tokens - 1 {
            at += 1;
        } else {
            (unit, at) = layout.split_slot(slot);
        }
        last = slot;
        let x = &data[token * per_token + item.head as usize * head_dim..][..head_dim];
        let row = index(layout.row(unit, job.layer, item.kv, item.head, at));
        let scales = index(layout.scales(unit, job.layer, item.kv, item.head, at));
        let scales = if scale_bytes == 0 { 0 } else { scales };
        // SAFETY: the bytes of one vector; K or V, head and class of token slots are the item's,
        // so no other item has it; nobody else has this item (`AppendJob::item`), and here its
        // vectors are gone through one by one.
        let row = unsafe { job.pool.part(row, row_bytes) };
        // SAFETY: the same vector's scales, which are its alone and not among the elements.
        let scales = unsafe { job.pool.part(scales, scale_bytes) };
        store_vector(isa, x, row, scales, layout, static_scale, &mut counts);
    }
    counts
}

/// Stores one vector. `x`: `[head_dim]`; `row` and `scales` are its bytes.
#[inline(always)]
fn store_vector<I: Isa, S: Source>(
    isa: I,
    x: &[S],
    row: &mut [u8],
    scales: &mut [u8],
    layout: &GroupLayout,
    static_scale: f32,
    counts: &mut AppendCounts,
) {
    match (layout.format.element, layout.format.scale) {
        (Format::F32, _) => {
            for (to, x) in row.as_chunks_mut::<4>().0.iter_mut().zip(x) {
                *to = x.to_f32().to_le_bytes();
            }
        }
        (Format::F16, _) => {
            for (to, x) in row.as_chunks_mut::<2>().0.iter_mut().zip(x) {
                *to = x.to_f16_bits().to_le_bytes();
            }
        }
        (Format::Bf16, _) => {
            for (to, x) in row.as_chunks_mut::<2>().0.iter_mut().zip(x) {
                *to = x.to_bf16_bits().to_le_bytes();
            }
        }
        (Format::Int8, Some(ScaleKind::PerTensor)) => {
            quantize_static(x, row, static_scale, counts);
        }
        (Format::Int8, Some(ScaleKind::PerGroup32)) => {
            let group = SCALE_GROUP as usize;
            let parts = x.chunks_exact(group).zip(row.chunks_exact_mut(group));
            for ((x, q), scale) in parts.zip(scales.as_chunks_mut::<2>().0) {
                *scale = isa.quantize(x, q, counts).0.to_le_bytes();
            }
        }
        (Format::Int8, Some(ScaleKind::PerTokenHead) | None) => {
            let scale = isa.quantize(x, row, counts);
            for to in scales.as_chunks_mut::<2>().0 {
                *to = scale.0.to_le_bytes();
            }
        }
    }
}
