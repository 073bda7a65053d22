//! What the kernels are told of types and layouts.

use super::bindings::{
    KVPOOL_ADDRESSING_BLOCKS, KVPOOL_ADDRESSING_RING, KVPOOL_ADDRESSING_SLOT, KVPOOL_DTYPE_BF16,
    KVPOOL_DTYPE_F16, KVPOOL_DTYPE_F32, KVPOOL_FORMAT_BF16, KVPOOL_FORMAT_F16, KVPOOL_FORMAT_F32,
    KVPOOL_FORMAT_INT8, KVPOOL_SCALE_NONE, KVPOOL_SCALE_PER_GROUP_32, KVPOOL_SCALE_PER_TENSOR,
    KVPOOL_SCALE_PER_TOKEN_HEAD, KvpoolCopyPair, KvpoolItem, KvpoolKvGroup, KvpoolSeq,
};
use crate::config::{Format, ScaleKind};
use crate::device::DType;
use crate::device::plain::Plain;
use crate::plan::{Addressing, CUDA_ITEM_BYTES, CUDA_PAIR_BYTES, CUDA_SEQ_BYTES, GroupLayout};

// SAFETY: numbers of 32 bits, no padding.
unsafe impl Plain for KvpoolSeq {}
// SAFETY: as above.
unsafe impl Plain for KvpoolItem {}
// SAFETY: as above.
unsafe impl Plain for KvpoolCopyPair {}

// The plan's sizes are the kernels'.
const _: () = assert!(size_of::<KvpoolSeq>() as u64 == CUDA_SEQ_BYTES);
const _: () = assert!(size_of::<KvpoolItem>() as u64 == CUDA_ITEM_BYTES);
const _: () = assert!(size_of::<KvpoolCopyPair>() as u64 == CUDA_PAIR_BYTES);
const _: () = assert!(super::bindings::KVPOOL_NO_BLOCK == crate::plan::NO_BLOCK);
const _: () = assert!(super::bindings::KVPOOL_SCALE_BYTES == crate::plan::SCALE_BYTES);
const _: () = assert!(super::bindings::KVPOOL_SCALE_GROUP == crate::plan::SCALE_GROUP);

/// An element type of tensors.
pub(super) const fn dtype(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => KVPOOL_DTYPE_F32,
        DType::F16 => KVPOOL_DTYPE_F16,
        DType::Bf16 => KVPOOL_DTYPE_BF16,
    }
}

/// A group's layout.
pub(super) fn group(layout: &GroupLayout) -> KvpoolKvGroup {
    // A row is at most 1024 elements of 4 bytes.
    let row_bytes = layout.head_dim * layout.element_bytes;
    KvpoolKvGroup {
        base: layout.base,
        unit_bytes: layout.unit_bytes,
        used_bytes: layout.unit_bytes - layout.unit_padding_bytes,
        layer_stride: layout.layer_stride(),
        kv_stride: layout.kv_stride(),
        head_stride: layout.head_stride(),
        scales_at: layout.scales_at,
        row_bytes,
        scales_per_row: layout.scales_per_row,
        unit_tokens: layout.unit_tokens,
        unit_shift: match layout.addressing {
            Addressing::Blocks => layout.unit_tokens.trailing_zeros(),
            Addressing::Slot | Addressing::Ring => 0,
        },
        units: layout.units,
        addressing: match layout.addressing {
            Addressing::Blocks => KVPOOL_ADDRESSING_BLOCKS,
            Addressing::Slot => KVPOOL_ADDRESSING_SLOT,
            Addressing::Ring => KVPOOL_ADDRESSING_RING,
        },
        sink_tokens: layout.sink_tokens,
        ring_tokens: layout.ring_tokens,
        num_layers: layout.num_layers,
        num_kv_heads: layout.num_kv_heads,
        head_dim: layout.head_dim,
        element_bytes: layout.element_bytes,
        format: match layout.format.element {
            Format::F32 => KVPOOL_FORMAT_F32,
            Format::F16 => KVPOOL_FORMAT_F16,
            Format::Bf16 => KVPOOL_FORMAT_BF16,
            Format::Int8 => KVPOOL_FORMAT_INT8,
        },
        scale: match layout.format.scale {
            None => KVPOOL_SCALE_NONE,
            Some(ScaleKind::PerTokenHead) => KVPOOL_SCALE_PER_TOKEN_HEAD,
            Some(ScaleKind::PerGroup32) => KVPOOL_SCALE_PER_GROUP_32,
            Some(ScaleKind::PerTensor) => KVPOOL_SCALE_PER_TENSOR,
        },
    }
}
