//! Reading K or V back: stored vectors, widened to f32.

use std::ops::Range;

use super::Device;
use super::quant::dequantize_row;
use crate::config::{Format, ScaleKind};
use crate::error::DeviceError;
use crate::plan::{E8M8, Kv, SCALE_BYTES, SeqView};

/// The largest `head_dim`, in elements: what one row can take on the stack.
const MAX_HEAD_DIM: usize = 1024;

/// K or V of some tokens of one sequence in one layer, to be widened to f32.
#[derive(Debug)]
pub struct GatherArgs<'a> {
    /// The sequence, seen through the layer's group.
    pub view: SeqView<'a>,
    /// The layer's index in the group.
    pub layer: u32,
    /// Which of the two.
    pub kv: Kv,
    /// The static INT8 scale; unused unless the format is `per-tensor`.
    pub static_scale: f32,
    /// Positions in the sequence, all of them held.
    pub positions: Range<u32>,
    /// Where they go. `[positions, num_kv_heads, head_dim]`
    pub out: &'a mut [f32],
}

/// Reads and widens vector by vector.
pub(super) fn row_by_row<D: Device + ?Sized>(
    device: &D,
    args: &mut GatherArgs<'_>,
) -> Result<(), DeviceError> {
    let layout = args.view.layout;
    let mut rows = args.out.chunks_exact_mut(layout.head_dim as usize);
    for position in args.positions.clone() {
        let (unit, token) = args.view.place(position);
        for (head, out) in (0..layout.num_kv_heads).zip(&mut rows) {
            let mut bytes = [0_u8; MAX_HEAD_DIM * 4];
            let bytes = &mut bytes[..out.len() * layout.element_bytes as usize];
            device.read(layout.row(unit, args.layer, args.kv, head, token), bytes)?;
            if layout.format.element != Format::Int8 {
                widen(layout.format.element, bytes, out);
                continue;
            }
            let mut stored = [0_u8; MAX_HEAD_DIM / 32 * 2];
            let stored = &mut stored[..(layout.scales_per_row * SCALE_BYTES) as usize];
            device.read(layout.scales(unit, args.layer, args.kv, head, token), stored)?;
            let mut scales = [E8M8(0); MAX_HEAD_DIM / 32];
            for (scale, b) in scales.iter_mut().zip(stored.as_chunks::<2>().0) {
                *scale = E8M8(u16::from_le_bytes(*b));
            }
            let mut q = [0_i8; MAX_HEAD_DIM];
            for (q, b) in q.iter_mut().zip(bytes.iter()) {
                *q = b.cast_signed();
            }
            let kind = layout.format.scale.unwrap_or(ScaleKind::PerTokenHead);
            let scales = &scales[..layout.scales_per_row as usize];
            dequantize_row(&q[..out.len()], scales, kind, args.static_scale, out);
        }
    }
    Ok(())
}

/// Widens a vector that is stored without scales.
fn widen(element: Format, bytes: &[u8], out: &mut [f32]) {
    match element {
        Format::F16 => {
            for (out, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *out = half::f16::from_le_bytes(*b).to_f32();
            }
        }
        Format::Bf16 => {
            for (out, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *out = half::bf16::from_le_bytes(*b).to_f32();
            }
        }
        Format::F32 | Format::Int8 => {
            for (out, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *out = f32::from_le_bytes(*b);
            }
        }
    }
}
