//! Storing one token's vectors.

use super::super::AppendCounts;
use super::super::convert::Source;
use super::super::quant::quantize_static;
use super::append::{AppendJob, Stores};
use super::lanes::{AT_ONCE, Isa};
use super::tile::CACHE_LINE;
use crate::config::{Format, ScaleKind};
use crate::plan::{Kv, SCALE_BYTES, SCALE_GROUP};

/// Stores K, or V, of one token after the other.
#[derive(Debug)]
pub(super) struct Store<'j, I> {
    isa: I,
    job: &'j AppendJob<'j>,
    kv: Kv,
    static_scale: f32,
    /// Elements of a vector, its bytes, and those from a head's to the next.
    head_dim: usize,
    row_bytes: usize,
    head_stride: usize,
    /// Bytes of a vector's scales, and those from a head's to the next.
    scale_bytes: usize,
    scale_stride: usize,
    pub(super) counts: AppendCounts,
}

/// An offset in the pool as an index.
#[inline(always)]
fn index(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

impl<'j, I: Isa> Store<'j, I> {
    #[inline(always)]
    pub(super) fn new(isa: I, job: &'j AppendJob<'j>, kv: Kv, static_scale: f32) -> Self {
        let layout = job.layout;
        let scale_bytes = (layout.scales_per_row * SCALE_BYTES) as usize;
        Self {
            isa,
            job,
            kv,
            static_scale,
            head_dim: layout.head_dim as usize,
            row_bytes: index(layout.row_bytes()),
            head_stride: index(layout.head_stride()),
            scale_bytes,
            scale_stride: scale_bytes * layout.unit_tokens as usize,
            counts: AppendCounts::default(),
        }
    }

    /// Byte offsets of the first head's vector, and of its scales.
    #[inline(always)]
    fn first(&self, unit: u32, token: u32) -> (usize, usize) {
        let (layout, layer) = (self.job.layout, self.job.layer);
        let row = index(layout.row(unit, layer, self.kv, 0, token));
        (row, index(layout.scales(unit, layer, self.kv, 0, token)))
    }

    /// Asks for the place of a token that is stored soon.
    #[inline(always)]
    pub(super) fn prefetch(&self, unit: u32, token: u32) {
        let (mut row, mut scales) = self.first(unit, token);
        for _ in 0..self.job.layout.num_kv_heads {
            if self.job.stores == Stores::Cached {
                for at in (row..row + self.row_bytes).step_by(CACHE_LINE) {
                    self.isa.prefetch_write(self.job.pool.address(at));
                }
            }
            // Scales are never whole cache lines.
            if self.scale_bytes > 0 {
                self.isa.prefetch_write(self.job.pool.address(scales));
            }
            row += self.head_stride;
            scales += self.scale_stride;
        }
    }

    /// Stores a token's vectors. `x`: `[num_kv_heads, head_dim]`
    ///
    /// # Safety
    /// The caller has the token's [`AppendItem`](super::append::AppendItem).
    #[inline(always)]
    pub(super) unsafe fn token<S: Source>(&mut self, x: &[S], unit: u32, token: u32) {
        let (mut row, mut scale) = self.first(unit, token);
        let mut heads = x.chunks_exact(self.head_dim);
        let format = self.job.layout.format;
        if let (Format::Int8, Some(ScaleKind::PerTokenHead)) = (format.element, format.scale) {
            let some = x.chunks_exact(AT_ONCE * self.head_dim);
            heads = some.remainder().chunks_exact(self.head_dim);
            for x in some {
                // SAFETY: the caller has the token's item.
                unsafe { self.several(x, row, scale) };
                row += AT_ONCE * self.head_stride;
                scale += AT_ONCE * self.scale_stride;
            }
        }
        for x in heads {
            // SAFETY: the caller has the token's item; one vector is in use at a time.
            let (to, scales) = unsafe { self.place(row, scale) };
            self.vector(x, to, scales);
            row += self.head_stride;
            scale += self.scale_stride;
        }
    }

    /// Stores one head's vector of a token. `x`: `[head_dim]`
    ///
    /// # Safety
    /// The caller has the token's [`AppendItem`](super::append::AppendItem).
    #[inline(always)]
    pub(super) unsafe fn head(&mut self, x: &[f32], unit: u32, token: u32, head: usize) {
        let (row, scale) = self.first(unit, token);
        let (row, scale) = (row + head * self.head_stride, scale + head * self.scale_stride);
        // SAFETY: the caller has the token's item; one vector is in use at a time.
        let (to, scales) = unsafe { self.place(row, scale) };
        self.vector(x, to, scales);
    }

    /// One vector's bytes and its scales'.
    ///
    /// # Safety
    /// The caller has the vector's item, and the vector is not in use elsewhere.
    #[inline(always)]
    unsafe fn place(&self, row: usize, scales: usize) -> (&'j mut [u8], &'j mut [u8]) {
        let scales = if self.scale_bytes == 0 { 0 } else { scales };
        // SAFETY: K or V and class of token slots are the item's, so no other item has the
        // vector; the caller sees to the rest.
        let row = unsafe { self.job.pool.part(row, self.row_bytes) };
        // SAFETY: the same vector's scales, which are its alone and not among the elements.
        let scales = unsafe { self.job.pool.part(scales, self.scale_bytes) };
        (row, scales)
    }

    /// Quantises the vectors of several heads, whose scales are computed side by side.
    /// `x`: `[AT_ONCE, head_dim]`
    ///
    /// # Safety
    /// The caller has the vectors' item.
    #[inline(always)]
    unsafe fn several<S: Source>(&mut self, x: &[S], row: usize, scale: usize) {
        let mut vectors: [&[S]; AT_ONCE] = [&[]; AT_ONCE];
        let mut rows: [&mut [u8]; AT_ONCE] = Default::default();
        let mut places: [&mut [u8]; AT_ONCE] = Default::default();
        for (i, x) in x.chunks_exact(self.head_dim).enumerate() {
            vectors[i] = x;
            let (row, scale) = (row + i * self.head_stride, scale + i * self.scale_stride);
            // SAFETY: the caller has the item; vectors of different heads do not overlap.
            (rows[i], places[i]) = unsafe { self.place(row, scale) };
        }
        let scales = self.isa.quantize_some(vectors, rows, self.job.stores, &mut self.counts);
        for (to, scale) in places.into_iter().zip(scales) {
            if let Some(to) = to.first_chunk_mut() {
                *to = scale.0.to_le_bytes();
            }
        }
    }

    /// Stores one vector. `x`: `[head_dim]`; `row` and `scales` are its bytes.
    #[inline(always)]
    fn vector<S: Source>(&mut self, x: &[S], row: &mut [u8], scales: &mut [u8]) {
        let (isa, counts) = (self.isa, &mut self.counts);
        let format = self.job.layout.format;
        match (format.element, format.scale) {
            (Format::F32, _) => {
                for (to, x) in row.as_chunks_mut::<4>().0.iter_mut().zip(x) {
                    *to = x.to_f32().to_le_bytes();
                }
            }
            (Format::F16, _) => isa.store_f16(x, row, self.job.stores),
            (Format::Bf16, _) => isa.store_bf16(x, row, self.job.stores),
            (Format::Int8, Some(ScaleKind::PerTensor)) => {
                quantize_static(x, row, self.static_scale, counts);
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
}
