//! Addresses: the only place in Rust that computes one.
//!
//! A *unit* is what one allocation step hands out: a block of a paged group, or the whole slot of
//! a sequence in a contiguous group. Both have the same inside, so one formula serves both:
//!
//! ```text
//! unit:  [layer in group][K, V][kv head][token][head_dim]   elements
//!        [layer in group][K, V][kv head][token][scale]      scales (INT8), 2 bytes each
//!        padding to 64 bytes
//! ```
//!
//! so that a block moves, is copied and is offloaded as one run of bytes, its scales inside (P9).
//! All offsets are bytes from the start of the pool, in 64 bits. Whether a product fits is
//! settled when the plan is made; the accessors here only add and multiply what is known to fit.

use serde::Serialize;

use super::format::{KvFormat, SCALE_BYTES};
use super::{LayerPlace, LayerScales};
use crate::config::MIN_TOKENS_PER_BLOCK;
use crate::units::{Bytes, GroupIdx, Overflow};

/// Alignment of every unit, in bytes: a cache line, and what the widest vector load likes.
pub const UNIT_ALIGN: u64 = 64;

/// Alignment of every group's first unit, in bytes: a page.
pub const GROUP_ALIGN: u64 = 4096;

/// The entry of a block table that names no block.
pub const NO_BLOCK: u32 = u32::MAX;

/// Key or value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kv {
    /// Keys.
    K = 0,
    /// Values.
    V = 1,
}

/// How a token's position in its sequence leads to its place in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Addressing {
    /// Through the block table: position / `tokens_per_block` picks the block.
    Blocks,
    /// The sequence's slot holds every position.
    Slot,
    /// The sequence's slot holds the sinks, then a ring of the latest positions.
    Ring,
}

/// Sizes and strides of one layer group's units.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GroupLayout {
    /// Byte offset of unit 0 in the pool.
    pub base: u64,
    /// Units of the group.
    pub units: u32,
    /// Tokens that one unit holds.
    pub unit_tokens: u32,
    /// Bytes of one unit, padding included.
    pub unit_bytes: u64,
    /// Bytes at the end of each unit that hold nothing.
    pub unit_padding_bytes: u64,
    /// Byte offset of the scales in a unit.
    pub scales_at: u64,
    /// Layers of the group.
    pub num_layers: u32,
    /// KV heads of a layer.
    pub num_kv_heads: u32,
    /// Elements of a vector.
    pub head_dim: u32,
    /// Bytes of one element.
    pub element_bytes: u32,
    /// Scales of a vector.
    pub scales_per_row: u32,
    /// Element type and scale form.
    pub format: KvFormat,
    /// How positions lead to places.
    pub addressing: Addressing,
    /// `Ring`: positions below this are never overwritten. In every windowed group: they stay
    /// visible to all queries.
    pub sink_tokens: u32,
    /// `Ring`: tokens of the ring behind the sinks; otherwise 0.
    pub ring_tokens: u32,
}

/// The shape of a group's units, before it is known where in the pool they lie.
#[derive(Clone, Copy, Debug)]
pub struct UnitShape {
    /// Layers of the group.
    pub num_layers: u32,
    /// KV heads of a layer.
    pub num_kv_heads: u32,
    /// Elements of a vector.
    pub head_dim: u32,
    /// Element type and scale form.
    pub format: KvFormat,
    /// Tokens that one unit holds.
    pub unit_tokens: u32,
    /// How positions lead to places.
    pub addressing: Addressing,
    /// Sinks of a windowed group.
    pub sink_tokens: u32,
    /// Tokens of the ring, for `Ring`.
    pub ring_tokens: u32,
}

impl GroupLayout {
    /// Lays out `units` units of the given shape from byte `base` of the pool.
    ///
    /// # Errors
    /// [`Overflow`] when a size does not fit in 64 bits.
    pub fn new(shape: UnitShape, base: u64, units: u32) -> Result<Self, Overflow> {
        let element_bytes = shape.format.element_bytes();
        let scales_per_row = shape.format.scales_per_row(shape.head_dim);
        // Rows of a unit: layers × {K, V} × heads × tokens.
        let rows = Bytes(2)
            .try_mul(u64::from(shape.num_layers))?
            .try_mul(u64::from(shape.num_kv_heads))?
            .try_mul(u64::from(shape.unit_tokens))?;
        let data = rows.try_mul(u64::from(shape.head_dim))?.try_mul(u64::from(element_bytes))?;
        let scales = rows.try_mul(u64::from(scales_per_row))?.try_mul(u64::from(SCALE_BYTES))?;
        let used = data.try_add(scales)?;
        let unit = used.align_up(UNIT_ALIGN)?;
        Bytes(base).try_add(unit.try_mul(u64::from(units))?)?;
        Ok(Self {
            base,
            units,
            unit_tokens: shape.unit_tokens,
            unit_bytes: unit.get(),
            unit_padding_bytes: unit.get() - used.get(),
            scales_at: data.get(),
            num_layers: shape.num_layers,
            num_kv_heads: shape.num_kv_heads,
            head_dim: shape.head_dim,
            element_bytes,
            scales_per_row,
            format: shape.format,
            addressing: shape.addressing,
            sink_tokens: shape.sink_tokens,
            ring_tokens: shape.ring_tokens,
        })
    }

    /// Whether the sizes follow from one another as [`GroupLayout::new`] computes them, and the
    /// units lie within `pool_bytes`. Then no two rows or scales overlap, which is what the
    /// device's writers rely on.
    #[must_use]
    pub fn is_consistent(&self, pool_bytes: u64) -> bool {
        let shape = UnitShape {
            num_layers: self.num_layers,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            format: self.format,
            unit_tokens: self.unit_tokens,
            addressing: self.addressing,
            sink_tokens: self.sink_tokens,
            ring_tokens: self.ring_tokens,
        };
        let addressable = match self.addressing {
            // A plan of smaller blocks is for the manager alone (`Plan::with_small_blocks`).
            Addressing::Blocks => {
                self.unit_tokens.is_power_of_two() && self.unit_tokens >= MIN_TOKENS_PER_BLOCK
            }
            Addressing::Slot => true,
            Addressing::Ring => {
                self.ring_tokens > 0
                    && self.sink_tokens.checked_add(self.ring_tokens) == Some(self.unit_tokens)
            }
        };
        addressable
            && Self::new(shape, self.base, self.units).as_ref() == Ok(self)
            && self.base + self.bytes() <= pool_bytes
    }

    /// Bytes of all units.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.unit_bytes * self.units as u64
    }

    /// Byte offset of the first byte of a unit.
    #[inline]
    #[must_use]
    pub const fn unit(&self, unit: u32) -> u64 {
        self.base + self.unit_bytes * unit as u64
    }

    /// Bytes of one vector: the distance from a token to the next.
    #[inline]
    #[must_use]
    pub const fn row_bytes(&self) -> u64 {
        self.head_dim as u64 * self.element_bytes as u64
    }

    /// Bytes from a KV head to the next.
    #[inline]
    #[must_use]
    pub const fn head_stride(&self) -> u64 {
        self.row_bytes() * self.unit_tokens as u64
    }

    /// Bytes from K to V.
    #[inline]
    #[must_use]
    pub const fn kv_stride(&self) -> u64 {
        self.head_stride() * self.num_kv_heads as u64
    }

    /// Bytes from a layer of the group to the next.
    #[inline]
    #[must_use]
    pub const fn layer_stride(&self) -> u64 {
        self.kv_stride() * 2
    }

    /// The number of a row within its unit, counted in tokens over all layers, kinds and heads.
    #[inline]
    const fn row_index(&self, layer: u32, kv: Kv, head: u32, token: u32) -> u64 {
        let kind = layer as u64 * 2 + kv as u64;
        (kind * self.num_kv_heads as u64 + head as u64) * self.unit_tokens as u64 + token as u64
    }

    /// Byte offset of the first element of one vector.
    ///
    /// `layer` counts within the group and `token` within the unit.
    #[inline]
    #[must_use]
    pub const fn row(&self, unit: u32, layer: u32, kv: Kv, head: u32, token: u32) -> u64 {
        self.unit(unit) + self.row_index(layer, kv, head, token) * self.row_bytes()
    }

    /// Byte offset of the first scale of one vector. Meaningless where `scales_per_row` is 0.
    #[inline]
    #[must_use]
    pub const fn scales(&self, unit: u32, layer: u32, kv: Kv, head: u32, token: u32) -> u64 {
        let per_row = self.scales_per_row as u64 * SCALE_BYTES as u64;
        self.unit(unit) + self.scales_at + self.row_index(layer, kv, head, token) * per_row
    }

    /// The runs of bytes of some tokens of a unit, in any order: byte offset and length of K, V and
    /// scales of every layer and head. None is empty.
    pub fn token_ranges(
        &self,
        unit: u32,
        tokens: std::ops::Range<u32>,
    ) -> impl Iterator<Item = (u64, u64)> {
        let layout = self;
        let count = u64::from(tokens.end.saturating_sub(tokens.start));
        let row_bytes = layout.row_bytes() * count;
        let scale_bytes = u64::from(layout.scales_per_row * SCALE_BYTES) * count;
        let heads = layout.num_kv_heads;
        let runs = (0..layout.num_layers * 2 * heads).flat_map(move |run| {
            let (layer, kv) = (run / (2 * heads), [Kv::K, Kv::V][(run / heads % 2) as usize]);
            let at = (layer, kv, run % heads, tokens.start);
            let row = layout.row(unit, at.0, at.1, at.2, at.3);
            [(row, row_bytes), (layout.scales(unit, at.0, at.1, at.2, at.3), scale_bytes)]
        });
        runs.filter(|(_, bytes)| *bytes > 0)
    }

    /// Splits a token slot (`unit · unit_tokens + token`) into unit and token.
    #[inline]
    #[must_use]
    pub const fn split_slot(&self, token_slot: u64) -> (u32, u32) {
        let per_unit = self.unit_tokens as u64;
        #[expect(clippy::cast_possible_truncation, reason = "units and unit_tokens are u32")]
        ((token_slot / per_unit) as u32, (token_slot % per_unit) as u32)
    }
}

/// Offsets and strides of one layer, in bytes from the start of the pool, for an engine's own
/// kernels. A vector of `head_dim` elements lies at
/// `k + unit · unit_stride + head · head_stride + token · token_stride`, where unit and token are
/// the two parts of a token slot; its scales likewise.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LayerView {
    /// First key.
    pub k: u64,
    /// First value.
    pub v: u64,
    /// From a unit (block or slot) to the next.
    pub unit_stride: u64,
    /// From a KV head to the next.
    pub head_stride: u64,
    /// From a token to the next.
    pub token_stride: u64,
    /// First scale of the keys; meaningless where `scales_per_row` is 0.
    pub k_scales: u64,
    /// First scale of the values.
    pub v_scales: u64,
    /// From a KV head's scales to the next head's.
    pub scale_head_stride: u64,
    /// From a token's scales to the next token's.
    pub scale_token_stride: u64,
    /// Scales of one vector, each an [`E8M8`](super::E8M8) in 2 bytes.
    pub scales_per_row: u32,
    /// Units of the group.
    pub units: u32,
    /// Tokens of a unit.
    pub unit_tokens: u32,
    /// Element type and scale form.
    pub format: KvFormat,
    /// The layer's group: whose token slots and block table apply.
    pub group: GroupIdx,
    /// Static scales, for `per-tensor`.
    pub static_scales: LayerScales,
}

impl LayerView {
    pub(super) const fn new(
        layout: &GroupLayout,
        place: LayerPlace,
        static_scales: LayerScales,
    ) -> Self {
        let scale_token_stride = layout.scales_per_row as u64 * SCALE_BYTES as u64;
        Self {
            k: layout.row(0, place.index, Kv::K, 0, 0),
            v: layout.row(0, place.index, Kv::V, 0, 0),
            unit_stride: layout.unit_bytes,
            head_stride: layout.head_stride(),
            token_stride: layout.row_bytes(),
            k_scales: layout.scales(0, place.index, Kv::K, 0, 0),
            v_scales: layout.scales(0, place.index, Kv::V, 0, 0),
            scale_head_stride: scale_token_stride * layout.unit_tokens as u64,
            scale_token_stride,
            scales_per_row: layout.scales_per_row,
            units: layout.units,
            unit_tokens: layout.unit_tokens,
            format: layout.format,
            group: place.group,
            static_scales,
        }
    }
}

/// One sequence seen through one group: from positions to places.
///
/// `kv_view.cuh` holds its twin for CUDA; `tests/cuda` compares what the two store, byte for byte.
#[derive(Clone, Copy, Debug)]
pub struct SeqView<'a> {
    /// The group's layout.
    pub layout: &'a GroupLayout,
    /// The sequence's row of the block table, `[max_blocks_per_seq]`; empty unless `Blocks`.
    pub table: &'a [u32],
    /// The sequence's slot: the unit of a contiguous group.
    pub slot: u32,
}

impl SeqView<'_> {
    /// The unit and the token within it of a position. The position must be held.
    #[inline]
    #[must_use]
    pub fn place(&self, position: u32) -> (u32, u32) {
        let layout = self.layout;
        match layout.addressing {
            Addressing::Blocks => {
                let shift = layout.unit_tokens.trailing_zeros();
                (self.table[(position >> shift) as usize], position & (layout.unit_tokens - 1))
            }
            Addressing::Slot => (self.slot, position),
            Addressing::Ring if position < layout.sink_tokens => (self.slot, position),
            Addressing::Ring => {
                let behind = (position - layout.sink_tokens) % layout.ring_tokens;
                (self.slot, layout.sink_tokens + behind)
            }
        }
    }

    /// How many of the positions `position..end` lie one behind the other from `position` on;
    /// at least 1.
    #[inline]
    #[must_use]
    pub fn run(&self, position: u32, end: u32) -> u32 {
        let layout = self.layout;
        let room = match layout.addressing {
            Addressing::Blocks => layout.unit_tokens - (position & (layout.unit_tokens - 1)),
            Addressing::Slot => end - position,
            Addressing::Ring if position < layout.sink_tokens => layout.sink_tokens - position,
            Addressing::Ring => {
                layout.ring_tokens - (position - layout.sink_tokens) % layout.ring_tokens
            }
        };
        room.min(end - position)
    }

    /// The flat token slot of a position: `unit · unit_tokens + token`.
    #[inline]
    #[must_use]
    pub fn token_slot(&self, position: u32) -> u64 {
        let (unit, token) = self.place(position);
        u64::from(unit) * u64::from(self.layout.unit_tokens) + u64::from(token)
    }
}

/// The positions that a query at `position` may see in a layer: `0..sinks` and `from..=position`.
///
/// `window` counts the keys a query may see, itself included; 0 = all.
#[inline]
#[must_use]
pub const fn visible(position: u32, window: u32, sink_tokens: u32) -> (u32, u32) {
    if window == 0 || position < window {
        return (0, 0);
    }
    let from = position + 1 - window;
    if from <= sink_tokens { (0, 0) } else { (sink_tokens, from) }
}
