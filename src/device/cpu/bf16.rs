//! Attention over bfloat16 with AVX-512 BF16: dot products of pairs.
//!
//! Keys and values are multiplied as they are stored. Queries and weights become bfloat16, in one
//! term or in two (the second is what the first has lost):
//!
//! - two terms leave an error of 2⁻¹⁷ of each query element and of each weight, 512 times less than
//!   what storing K and V as bfloat16 may have lost;
//! - one term leaves 2⁻⁸, as much as storing does. This is what most engines do, and is taken only
//!   where it is asked for.
//!
//! Sums are kept in f32. Their order is fixed: a score has four sums for each term, of every
//! fourth pair of elements; the terms are added, then sums 2 apart, then 1. Values are added up
//! pair of keys by pair of keys, and term by term. The instruction takes subnormal numbers for 0
//! and makes 0 of what would be one, and a pair of unseen keys may turn -0 to 0, which the others
//! of the row's heads would not see: so what is left in the accumulators at the end of a split
//! goes through it once more, and through an addition of 0.
//!
//! A key that a row does not see has the weight 0, and its values are read as 0.
//!
//! Beyond these errors there is one difference to f32: with two terms, an infinity that is stored
//! in a key gives NaN where its products with the terms are infinities of both signs, or with 0.

#![expect(
    clippy::needless_range_loop,
    reason = "loops over constant bounds index register arrays; this is the form that unrolls"
)]

use std::arch::x86_64::*;
use std::mem::transmute;

use super::fast::Products;
use super::lanes::{Isa, Line, WIDTH};
use super::task::Task;
use super::tile::{Ahead, Keys, QUAD, TILE, Tile, TileRow, prefetch};
use super::vnni::Vnni;
use super::x86::{Avx512, memory_op, op};
use crate::plan::GroupLayout;

/// Proof that the CPU has AVX-512 BF16, beside what [`Vnni`] proves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bf16<const TERMS: usize>(Vnni);

/// Elements of a part of a vector, whose values are added up at once.
pub(super) const PART: usize = 2 * WIDTH;

/// Pairs of keys of a tile.
pub(super) const PAIRS: usize = TILE / 2;

/// Query heads that are computed side by side.
const HEADS: usize = 4;

/// Elements of a query that lie side by side for each of four heads.
const PIECE: usize = 8;

impl<const TERMS: usize> Bf16<TERMS> {
    /// The instructions, in words.
    pub(super) const NEEDS: &'static str = "AVX-512 F, BW, DQ, VL, VBMI, VNNI and BF16";

    /// The proof, where the CPU gives it.
    pub(super) fn detect() -> Option<Self> {
        let vnni = Vnni::detect()?;
        is_x86_feature_detected!("avx512bf16").then_some(Self(vnni))
    }

    /// The kernel for everything that is not bfloat16.
    pub(super) fn plain(self) -> Vnni {
        self.0
    }

    /// Whether vectors of this layout are computed here: whole parts of 32 elements.
    pub(super) fn takes(layout: &GroupLayout) -> bool {
        (layout.head_dim as usize).is_multiple_of(PART)
    }

    /// `a · b + c`, of two neighbours each.
    #[inline(always)]
    pub(super) fn dot(self, a: __m512i, b: __m512i, c: __m512) -> __m512 {
        // SAFETY: both are 64 bytes of numbers, of which any bits will do.
        let a = unsafe { transmute::<__m512i, __m512bh>(a) };
        // SAFETY: as above.
        let b = unsafe { transmute::<__m512i, __m512bh>(b) };
        op!(_mm512_dpbf16_ps(c, a, b))
    }

    /// Sixteen numbers as terms.
    #[inline(always)]
    pub(super) fn terms(self, x: __m512) -> [__m256i; TERMS] {
        let mut terms = [op!(_mm256_setzero_si256()); TERMS];
        let mut rest = x;
        for term in &mut terms {
            let brains = op!(_mm512_cvtneps_pbh(rest));
            // SAFETY: both are 32 bytes of numbers, of which any bits will do.
            *term = unsafe { transmute::<__m256bh, __m256i>(brains) };
            let wide = op!(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(*term)));
            let left = op!(_mm512_sub_ps(rest, _mm512_castsi512_ps(wide)));
            // Of an infinity there is nothing left, not NaN.
            let ordered = op!(_mm512_cmp_ps_mask::<_CMP_ORD_Q>(left, left));
            rest = op!(_mm512_maskz_mov_ps(ordered, left));
        }
        terms
    }

    /// A tile's weights as terms. `memory`: `[heads, TERMS, 2]` lines
    #[inline(always)]
    pub(super) fn encode_weights(self, weights: &[TileRow], memory: &mut [Line]) {
        let isa = self.isa();
        for (row, memory) in weights.iter().zip(memory.chunks_exact_mut(2 * TERMS)) {
            let memory = memory.as_flattened_mut();
            for (i, line) in row.as_chunks::<WIDTH>().0.iter().enumerate() {
                for (t, term) in self.terms(isa.load(line)).into_iter().enumerate() {
                    let to = &mut memory[t * PAIRS + i * WIDTH / 2..][..WIDTH / 2];
                    memory_op!(_mm256_storeu_si256(to.as_mut_ptr().cast(), term));
                }
            }
        }
    }

    /// The values of a part of two keys, pair by pair: sixteen elements in each vector. Those of
    /// keys whose bit is not set are 0.
    #[inline(always)]
    pub(super) fn two_keys(
        self,
        tile: &Tile<'_>,
        key: usize,
        part: usize,
        seen: u64,
        order: [__m512i; 2],
    ) -> [__m512i; 2] {
        let mut rows = [op!(_mm512_setzero_si512()); 2];
        for (i, row) in rows.iter_mut().enumerate() {
            if seen & (1 << (key + i)) != 0 {
                let bytes = &tile.v(key + i)[part * 2 * PART..][..2 * PART];
                *row = memory_op!(_mm512_loadu_si512(bytes.as_ptr().cast()));
            }
        }
        let [first, second] = order;
        let [a, b] = rows;
        [op!(_mm512_permutex2var_epi16(a, first, b)), op!(_mm512_permutex2var_epi16(a, second, b))]
    }

    /// How to make pairs, for [`Bf16::two_keys`].
    #[inline(always)]
    pub(super) fn order(self) -> [__m512i; 2] {
        let first: [u16; 2 * WIDTH] = const {
            let mut at = [0; 2 * WIDTH];
            let mut i = 0;
            while i < 2 * WIDTH {
                // Bit 5 chooses the second vector.
                #[expect(clippy::cast_possible_truncation, reason = "below 64")]
                let element = (i % 2 * 2 * WIDTH + i / 2) as u16;
                at[i] = element;
                i += 1;
            }
            at
        };
        let first = memory_op!(_mm512_loadu_si512(first.as_ptr().cast()));
        [first, op!(_mm512_add_epi16(first, _mm512_set1_epi16(16)))]
    }
}

/// Of every four lanes of two vectors, those 2 apart: `a, b, a, b`.
#[inline(always)]
fn add_halves(a: __m512, b: __m512) -> __m512 {
    op!(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)))
}

/// A bit for each key of two ranges.
#[inline(always)]
pub(super) fn bits(seen: [Keys; 2]) -> u64 {
    let mut bits = 0;
    for (from, to) in seen {
        if from < to {
            bits |= (u64::MAX >> (TILE - (to - from))) << from;
        }
    }
    bits
}

impl<const TERMS: usize> Products for Bf16<TERMS> {
    type Isa = Avx512;
    const IN_RUNS: bool = true;
    const WEIGHT_LINES: usize = 2 * TERMS;

    #[inline(always)]
    fn isa(self) -> Avx512 {
        self.0.plain()
    }

    /// For every four heads, for every eight elements, term by term, a line of all four heads'.
    #[inline(always)]
    fn queries<'b>(
        self,
        task: &Task<'_>,
        q: &'b [f32],
        coded: &'b mut [f32],
    ) -> (&'b [Line], usize) {
        let isa = self.isa();
        let (heads, per_head) = (task.heads(), task.padded_dim / WIDTH);
        let per_block = task.padded_dim / PIECE * TERMS;
        let lines = heads.div_ceil(HEADS) * per_block;
        let q = q.as_chunks::<WIDTH>().0.chunks_exact(heads * per_head);
        let coded = coded.as_chunks_mut::<WIDTH>().0;
        for (q, coded) in q.zip(coded.chunks_exact_mut(lines).take(task.kv_heads as usize)) {
            coded.fill([0.0; WIDTH]);
            for (head, q) in q.chunks_exact(per_head).enumerate() {
                let block = &mut coded[head / HEADS * per_block..][..per_block];
                let at = head % HEADS * (WIDTH / HEADS);
                for (q, two) in q.iter().zip(block.chunks_exact_mut(2 * TERMS)) {
                    for (t, term) in self.terms(isa.load(q)).into_iter().enumerate() {
                        let first = &mut two[t][at..at + WIDTH / HEADS];
                        let low = op!(_mm256_castsi256_si128(term));
                        memory_op!(_mm_storeu_si128(first.as_mut_ptr().cast(), low));
                        let second = &mut two[TERMS + t][at..at + WIDTH / HEADS];
                        let high = op!(_mm256_extracti128_si256::<1>(term));
                        memory_op!(_mm_storeu_si128(second.as_mut_ptr().cast(), high));
                    }
                }
            }
        }
        (coded, lines)
    }

    #[inline(always)]
    fn scores(
        self,
        tile: &Tile<'_>,
        quads: [Keys; 2],
        ahead: &mut impl Ahead,
        q: &[Line],
        lines: usize,
        scores: &mut [TileRow],
    ) {
        let mut ahead = Some(ahead);
        let per_block = lines / scores.len().div_ceil(HEADS);
        for (scores, q) in scores.chunks_mut(HEADS).zip(q.chunks_exact(per_block)) {
            let mut ahead = ahead.take();
            for (from, to) in quads {
                for quad in from..to {
                    let mut piece = None;
                    if let Some(ahead) = &mut ahead {
                        piece = ahead.piece(self.isa());
                    }
                    let key = quad * QUAD;
                    let four = self.four_scores(tile, key, piece, q);
                    let quarters = [
                        op!(_mm512_castps512_ps128(four)),
                        op!(_mm512_extractf32x4_ps::<1>(four)),
                        op!(_mm512_extractf32x4_ps::<2>(four)),
                        op!(_mm512_extractf32x4_ps::<3>(four)),
                    ];
                    for (scores, quarter) in scores.iter_mut().zip(quarters) {
                        let to = &mut scores[key..key + QUAD];
                        memory_op!(_mm_storeu_ps(to.as_mut_ptr(), quarter));
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn values(
        self,
        task: &Task<'_>,
        tile: &Tile<'_>,
        ahead: &mut impl Ahead,
        weights: &[TileRow],
        memory: &mut [Line],
        acc: &mut [Line],
    ) {
        self.encode_weights(weights, memory);
        self.add_all(task, tile, (0, TILE), ahead, memory, acc);
    }

    #[inline(always)]
    fn weights(self, weights: &[TileRow], memory: &mut [Line]) {
        self.encode_weights(weights, memory);
    }

    #[inline(always)]
    fn values_of_run(
        self,
        task: &Task<'_>,
        tile: &Tile<'_>,
        run: Keys,
        ahead: &mut impl Ahead,
        _: &[TileRow],
        memory: &[Line],
        acc: &mut [Line],
    ) {
        self.add_all(task, tile, run, ahead, memory, acc);
    }

    #[inline(always)]
    fn passes(self, tile: &Tile<'_>, _heads: usize, _follows: bool) -> usize {
        let parts = tile.row_bytes / (2 * PART);
        if parts.is_multiple_of(2) { parts / 2 } else { parts }
    }

    #[inline(always)]
    fn finish(self, acc: &mut [Line]) {
        let (isa, zero) = (self.isa(), op!(_mm512_setzero_si512()));
        for acc in acc {
            let sum = self.dot(zero, zero, isa.load(acc));
            isa.store(op!(_mm512_add_ps(sum, isa.splat(0.0))), acc);
        }
    }
}

impl<const TERMS: usize> Bf16<TERMS> {
    /// q·k of four heads with four keys: `[heads, keys]`. Asks for as many bytes from `piece` on as
    /// it reads.
    #[inline(always)]
    fn four_scores(
        self,
        tile: &Tile<'_>,
        key: usize,
        piece: Option<*const u8>,
        q: &[Line],
    ) -> __m512 {
        let isa = self.isa();
        let pieces = q.len() / TERMS;
        let mut rows: [&[[u8; 2 * PIECE]]; QUAD] = [&[]; QUAD];
        for (i, row) in rows.iter_mut().enumerate() {
            *row = &tile.k(key + i).as_chunks().0[..pieces];
        }
        let mut sums = [[isa.splat(0.0); QUAD]; TERMS];
        for i in 0..pieces {
            if let Some(piece) = piece {
                let bytes = QUAD * 2 * PIECE;
                prefetch(isa, piece.wrapping_add(i * bytes), bytes);
            }
            let mut k = [op!(_mm512_setzero_si512()); QUAD];
            for j in 0..QUAD {
                let row = memory_op!(_mm_loadu_si128(rows[j][i].as_ptr().cast()));
                k[j] = op!(_mm512_broadcast_i32x4(row));
            }
            for t in 0..TERMS {
                let q = memory_op!(_mm512_loadu_si512(q[i * TERMS + t].as_ptr().cast()));
                for j in 0..QUAD {
                    sums[t][j] = self.dot(k[j], q, sums[t][j]);
                }
            }
        }
        let mut all = sums[0];
        for more in &sums[1..] {
            for j in 0..QUAD {
                all[j] = op!(_mm512_add_ps(all[j], more[j]));
            }
        }
        // In every quarter the sums of four lanes, of each key: lanes 2 apart, then 1.
        let ab = op!(_mm512_castps_pd(add_halves(all[0], all[1])));
        let cd = op!(_mm512_castps_pd(add_halves(all[2], all[3])));
        let even = op!(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)));
        let odd = op!(_mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
        op!(_mm512_add_ps(even, odd))
    }

    /// Adds the weighted values of the keys `within` to the accumulators of all heads.
    #[inline(always)]
    fn add_all(
        self,
        task: &Task<'_>,
        tile: &Tile<'_>,
        within: Keys,
        ahead: &mut impl Ahead,
        memory: &[Line],
        acc: &mut [Line],
    ) {
        let lines = task.padded_dim / WIDTH;
        let (first, last) = (tile.all_seen_by(task, 0), tile.all_seen_by(task, task.rows - 1));
        let rows = if first && last { task.rows } else { 1 };
        let mut ahead = Some(ahead);
        for row in (0..task.rows).step_by(rows) {
            let keys = (within, bits(tile.seen_by(task, row)));
            let (mut g, end) = (row * task.group, (row + rows) * task.group);
            while g < end {
                let (memory, acc) = (&memory[g * 2 * TERMS..], &mut acc[g * lines..]);
                match end - g {
                    1 => self.add::<1>(tile, ahead.take(), keys, memory, lines, acc),
                    2 => self.add::<2>(tile, ahead.take(), keys, memory, lines, acc),
                    3 => self.add::<3>(tile, ahead.take(), keys, memory, lines, acc),
                    _ => self.add::<4>(tile, ahead.take(), keys, memory, lines, acc),
                }
                g += HEADS;
            }
        }
    }

    /// Adds the weighted values of the keys of a range whose bits are set to the accumulators of
    /// `G` heads.
    #[inline(always)]
    fn add<const G: usize>(
        self,
        tile: &Tile<'_>,
        mut ahead: Option<&mut impl Ahead>,
        keys: (Keys, u64),
        weights: &[Line],
        lines: usize,
        acc: &mut [Line],
    ) {
        let parts = lines / 2;
        if parts.is_multiple_of(2) {
            for part in (0..parts).step_by(2) {
                let ahead = ahead.as_deref_mut();
                self.add_parts::<G, 2>(tile, ahead, keys, part, weights, lines, acc);
            }
        } else {
            for part in 0..parts {
                let ahead = ahead.as_deref_mut();
                self.add_parts::<G, 1>(tile, ahead, keys, part, weights, lines, acc);
            }
        }
    }

    /// The same, of `P` parts.
    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "the operands of one product")]
    fn add_parts<const G: usize, const P: usize>(
        self,
        tile: &Tile<'_>,
        mut ahead: Option<&mut impl Ahead>,
        ((from, to), seen): (Keys, u64),
        first: usize,
        weights: &[Line],
        lines: usize,
        acc: &mut [Line],
    ) {
        let isa = self.isa();
        let order = self.order();
        let weights = &weights.as_flattened().as_chunks::<PAIRS>().0[..G * TERMS];
        let mut sums = [[[isa.splat(0.0); 2]; P]; G];
        for g in 0..G {
            for p in 0..P {
                for i in 0..2 {
                    sums[g][p][i] = isa.load(&acc[g * lines + 2 * (first + p) + i]);
                }
            }
        }
        let mut piece = None;
        for pair in from / 2..to.min(TILE) / 2 {
            let key = 2 * pair;
            if let Some(ahead) = &mut ahead {
                if key.is_multiple_of(QUAD) {
                    piece = ahead.piece(isa);
                }
                if let Some(first) = piece {
                    let bytes = 2 * P * 2 * PART;
                    prefetch(isa, first.wrapping_add(key % QUAD / 2 * bytes), bytes);
                }
            }
            if seen >> key & 3 == 0 {
                continue;
            }
            let mut v = [[op!(_mm512_setzero_si512()); 2]; P];
            for p in 0..P {
                v[p] = self.two_keys(tile, key, first + p, seen, order);
            }
            for g in 0..G {
                for t in 0..TERMS {
                    let w = weights[g * TERMS + t][pair].to_bits().cast_signed();
                    let w = op!(_mm512_set1_epi32(w));
                    for p in 0..P {
                        for i in 0..2 {
                            sums[g][p][i] = self.dot(v[p][i], w, sums[g][p][i]);
                        }
                    }
                }
            }
        }
        for g in 0..G {
            for p in 0..P {
                for i in 0..2 {
                    isa.store(sums[g][p][i], &mut acc[g * lines + 2 * (first + p) + i]);
                }
            }
        }
    }
}
