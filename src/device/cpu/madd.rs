//! Attention over INT8 with AVX2: integer dot products of numbers of two bytes.
//!
//! As in `vnni.rs`, queries and a tile's weights become integers, so that what they lose is small
//! beside what storing K and V as one byte has lost: a query's elements are rounded to
//! amax / 32767, a weight (that of the softmax times its V vector's scale) to the largest of its
//! head and tile / 32767. Stored bytes are widened to two, and `vpmaddwd` multiplies sixteen pairs
//! and adds each two products, where an FMA has eight and a byte first becomes an f32.
//!
//! All of that is exact integer arithmetic, so its order is of no consequence. A key that a row
//! does not see has the weight 0, and 0 times any byte is 0. What follows in f32 has a fixed order:
//! scores group by group of 32 elements where these have scales of their own, accumulators tile by
//! tile.

#![expect(
    clippy::needless_range_loop,
    reason = "loops over constant bounds index register arrays; this is the form that unrolls"
)]

use std::arch::x86_64::*;

use super::fast::{Products, split_with};
use super::lanes::{Isa, Line, WIDTH};
use super::madd_tile::split_many;
use super::task::{Split, Task};
use super::tile::{Ahead, Keys, QUAD, TILE, Tile, TileRow};
use super::x86::{Avx2, memory_op, op};
use crate::config::ScaleKind;
use crate::plan::{GroupLayout, LANES, SCALE_GROUP};

/// Elements of a vector, at most: 512 · 32767 · 128 is below 2³¹.
const MAX_DIM: u32 = 512;

/// The largest integer of a query, and of a weight.
const MOST: f32 = 32767.0;

/// A query whose largest element is below this is taken for 0.
const Q_TINY: f32 = 1e-30;

/// Elements that are widened together.
pub(super) const STEP: usize = WIDTH;

/// Query heads from which on a tile's vectors are widened once for all of them (`madd_tile.rs`).
const MANY_HEADS: usize = 16;

/// Lanes of four bytes.
pub(super) const EIGHT: usize = 8;

/// Steps of a group that has a scale of its own.
const GROUP_STEPS: usize = SCALE_GROUP as usize / STEP;

/// Lines of a head's weights as integers: one integer for each key of a tile.
pub(super) const CODED_LINES: usize = TILE * 2 / size_of::<Line>();

/// Half a line: sixteen integers of two bytes, or eight of four.
pub(super) type Half = [f32; EIGHT];

/// Whether INT8 vectors of this layout are computed here: several steps of sixteen, or whole groups,
/// and few enough that the sums of products fit in 32 bits.
pub(super) fn takes(layout: &GroupLayout) -> bool {
    let grouped = layout.format.scale == Some(ScaleKind::PerGroup32);
    let whole = if grouped { SCALE_GROUP } else { LANES };
    layout.head_dim.is_multiple_of(whole) && (LANES + 1..=MAX_DIM).contains(&layout.head_dim)
}

/// Computes one split.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn split<const GROUPED: bool>(isa: Avx2, work: &mut Split<'_, '_>) {
    if !GROUPED && work.task.has_heads(MANY_HEADS) {
        split_many(isa, work);
    } else {
        split_with(Integers::<GROUPED>(isa), work);
    }
}

/// Products of integers. `GROUPED`: every 32 elements have a scale that lies in the block.
#[derive(Clone, Copy, Debug)]
struct Integers<const GROUPED: bool>(Avx2);

/// Lines of a query as integers, and the one behind them that says what a unit stands for.
pub(super) fn query_lines(dim: usize) -> usize {
    (dim * 2).div_ceil(size_of::<Line>()) + 1
}

impl<const GROUPED: bool> Products for Integers<GROUPED> {
    type Isa = Avx2;
    const IN_RUNS: bool = false;
    const FAR: bool = true;

    #[inline(always)]
    fn isa(self) -> Avx2 {
        self.0
    }

    #[inline(always)]
    fn queries<'b>(
        self,
        task: &Task<'_>,
        q: &'b [f32],
        coded: &'b mut [f32],
    ) -> (&'b [Line], usize) {
        let lines = task.heads() * query_lines(task.padded_dim);
        (encode_queries(self.0, task, q, coded), lines)
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
        let isa = self.0;
        let per_head = lines / scores.len();
        let mut ahead = Some(ahead);
        let heads = scores.len();
        let mut g = 0;
        while heads - g >= 4 {
            let (q, scores) = (&q[g * per_head..], &mut scores[g..]);
            scores_of::<GROUPED, 4, 2>(isa, tile, quads, ahead.take(), q, per_head, scores);
            g += 4;
        }
        while heads - g >= 2 {
            let (q, scores) = (&q[g * per_head..], &mut scores[g..]);
            scores_of::<GROUPED, 2, 4>(isa, tile, quads, ahead.take(), q, per_head, scores);
            g += 2;
        }
        if heads > g {
            let (q, scores) = (&q[g * per_head..], &mut scores[g..]);
            scores_of::<GROUPED, 1, 4>(isa, tile, quads, ahead.take(), q, per_head, scores);
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
        let lines = task.padded_dim / WIDTH;
        let heads = weights.len();
        let (coded, units) = memory.split_at_mut(CODED_LINES * heads);
        let units = units.as_flattened_mut();
        // As many lines at a time as there are registers for, and as have one scale.
        let group = if GROUPED { GROUP_STEPS } else { lines };
        let at_once = lines_at_once(heads, group);
        let mut first = 0;
        while first < lines {
            let some = if first % group + at_once <= group.min(lines - first / group * group) {
                at_once
            } else {
                1
            };
            if first % group == 0 {
                let scales = if GROUPED { Some(first / group) } else { None };
                encode_weights(self.0, tile, scales, weights, coded, units);
            }
            let mut ahead = Some(&mut *ahead);
            let mut g = 0;
            while g < heads {
                let (w, units) = (&coded[g * CODED_LINES..], &units[g..]);
                let (isa, acc, ahead) = (self.0, &mut acc[g * lines..], ahead.take());
                debug_assert!(matches!((heads - g, some), (1, 1 | 2 | 4) | (2, 1 | 2) | (3.., 1)));
                match (heads - g, some) {
                    (1, 4) => values_of::<1, 4>(isa, tile, ahead, first, w, units, lines, acc),
                    (1, 2) => values_of::<1, 2>(isa, tile, ahead, first, w, units, lines, acc),
                    (1, _) => values_of::<1, 1>(isa, tile, ahead, first, w, units, lines, acc),
                    (2, 2) => values_of::<2, 2>(isa, tile, ahead, first, w, units, lines, acc),
                    (2, _) => values_of::<2, 1>(isa, tile, ahead, first, w, units, lines, acc),
                    (3, _) => values_of::<3, 1>(isa, tile, ahead, first, w, units, lines, acc),
                    _ => values_of::<4, 1>(isa, tile, ahead, first, w, units, lines, acc),
                }
                g += 4;
            }
            first += some;
        }
    }

    #[inline(always)]
    fn passes(self, tile: &Tile<'_>, heads: usize, _follows: bool) -> usize {
        let lines = tile.row_bytes / STEP;
        let group = if GROUPED { GROUP_STEPS } else { lines };
        (lines / lines_at_once(heads, group)).max(1)
    }
}

/// Lines of the values that are added up at once for some heads, of as many as have one scale: 4, 2
/// or 1, since there is code for these.
fn lines_at_once(heads: usize, group: usize) -> usize {
    match (heads, group) {
        (1, 4..) => 4,
        (1 | 2, 2..) => 2,
        _ => 1,
    }
}

/// Turns the queries of a task into integers. Gives [`query_lines`] lines for each.
#[inline(always)]
pub(super) fn encode_queries<'b>(
    isa: Avx2,
    task: &Task<'_>,
    q: &[f32],
    coded: &'b mut [f32],
) -> &'b [Line] {
    let lines = query_lines(task.padded_dim);
    let vectors = task.kv_heads as usize * task.heads();
    let coded = &mut coded.as_chunks_mut::<WIDTH>().0[..vectors * lines];
    for (q, coded) in q.chunks_exact(task.padded_dim).zip(coded.chunks_exact_mut(lines)) {
        encode_query(isa, q, coded);
    }
    coded
}

/// Turns a query into integers of two bytes, and what one unit of them stands for: NaN for a query
/// that is not finite, whose scores are to be NaN. `coded`: [`query_lines`]
#[inline(always)]
fn encode_query(isa: Avx2, q: &[f32], coded: &mut [Line]) {
    let mut largest = 0_u32;
    for x in q {
        // Magnitudes are ordered as their bits are, NaN and infinity above all others.
        largest = largest.max(x.to_bits() & 0x7FFF_FFFF);
    }
    let largest = f32::from_bits(largest);
    let (factor, unit) = if !largest.is_finite() {
        (0.0, f32::NAN)
    } else if largest < Q_TINY {
        (0.0, 0.0)
    } else {
        (MOST / largest, largest / MOST)
    };
    let Some((units, integers)) = coded.split_last_mut() else { return };
    units.fill(unit);
    integers.as_flattened_mut().fill(0.0);
    let halves = integers.as_flattened_mut().as_chunks_mut::<EIGHT>().0;
    for (q, to) in q.as_chunks::<WIDTH>().0.iter().zip(halves) {
        store(isa, to_integers(isa, isa.load(q), factor), to);
    }
}

/// Sixteen numbers times a factor, as integers of two bytes in their order.
#[inline(always)]
fn to_integers(isa: Avx2, v: (__m256, __m256), factor: f32) -> __m256i {
    let v = isa.mul(v, isa.splat(factor));
    let (low, high) = (op!(_mm256_cvtps_epi32(v.0)), op!(_mm256_cvtps_epi32(v.1)));
    // Halves of each, one after the other, are put in order.
    op!(_mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(low, high)))
}

/// q·k of `G` heads with some quads of the tile, `K` keys at a time.
#[inline(always)]
fn scores_of<const GROUPED: bool, const G: usize, const K: usize>(
    isa: Avx2,
    tile: &Tile<'_>,
    quads: [Keys; 2],
    mut ahead: Option<&mut impl Ahead>,
    q: &[Line],
    per_head: usize,
    scores: &mut [TileRow],
) {
    let steps = tile.row_bytes / STEP;
    let mut heads: [&[Half]; G] = [&[]; G];
    let mut units = [[0.0; K]; G];
    for g in 0..G {
        let coded = &q[g * per_head..][..per_head];
        heads[g] = &coded.as_flattened().as_chunks::<EIGHT>().0[..steps];
        units[g] = [coded[per_head - 1][0]; K];
    }
    let scores = &mut scores[..G];
    for (from, to) in quads {
        for quad in from..to {
            // All at once: there is no register for a piece's place.
            if let Some(ahead) = &mut ahead {
                ahead.piece(isa);
            }
            for key in (quad * QUAD..(quad + 1) * QUAD).step_by(K) {
                let products = products::<GROUPED, G, K>(isa, tile, key, &heads);
                for g in 0..G {
                    for k in 0..K {
                        scores[g][key + k] = products[g][k] * units[g][k];
                    }
                }
            }
        }
    }
}

/// Sums of products of `G` heads' integers with the bytes of `K` keys, times these's own scales
/// where `GROUPED`.
#[inline(always)]
fn products<const GROUPED: bool, const G: usize, const K: usize>(
    isa: Avx2,
    tile: &Tile<'_>,
    key: usize,
    heads: &[&[Half]; G],
) -> [[f32; K]; G] {
    let steps = heads[0].len();
    let mut heads = *heads;
    let mut rows: [&[[u8; STEP]]; K] = [&[]; K];
    for k in 0..K {
        rows[k] = &tile.k(key + k).as_chunks().0[..steps];
    }
    for g in 0..G {
        heads[g] = &heads[g][..steps];
    }
    let group = if GROUPED { GROUP_STEPS } else { steps };
    let zero = op!(_mm256_setzero_si256());
    let mut totals = [[op!(_mm256_setzero_ps()); K]; G];
    let mut sums = [[zero; K]; G];
    let mut first = 0;
    while first < steps {
        sums = [[zero; K]; G];
        for step in first..(first + group).min(steps) {
            let mut bytes = [zero; K];
            for k in 0..K {
                bytes[k] = widen(isa, &rows[k][step]);
            }
            for g in 0..G {
                let q = load(isa, &heads[g][step]);
                for k in 0..K {
                    sums[g][k] = op!(_mm256_add_epi32(sums[g][k], _mm256_madd_epi16(bytes[k], q)));
                }
            }
        }
        if GROUPED {
            for k in 0..K {
                let scale = op!(_mm256_set1_ps(tile.k_scale(key + k, first / GROUP_STEPS)));
                for g in 0..G {
                    let sum = op!(_mm256_cvtepi32_ps(sums[g][k]));
                    totals[g][k] = op!(_mm256_fmadd_ps(sum, scale, totals[g][k]));
                }
            }
        }
        first += group;
    }
    let lanes = if GROUPED {
        isa.lane_sums::<false>(totals.as_flattened())
    } else {
        for (total, sum) in totals.as_flattened_mut().iter_mut().zip(sums.as_flattened()) {
            *total = op!(_mm256_castsi256_ps(*sum));
        }
        let sums = isa.lane_sums::<true>(totals.as_flattened());
        op!(_mm256_cvtepi32_ps(_mm256_castps_si256(sums)))
    };
    let mut half = [0.0; EIGHT];
    memory_op!(_mm256_storeu_ps(half.as_mut_ptr(), lanes));
    let mut all = [[0.0; K]; G];
    all.as_flattened_mut().copy_from_slice(&half[..G * K]);
    all
}

/// Sixteen bytes as integers of two.
#[inline(always)]
pub(super) fn widen(_isa: Avx2, bytes: &[u8; STEP]) -> __m256i {
    let bytes = memory_op!(_mm_loadu_si128(bytes.as_ptr().cast()));
    op!(_mm256_cvtepi8_epi16(bytes))
}

/// Half a line as integers.
#[inline(always)]
pub(super) fn load(_isa: Avx2, from: &Half) -> __m256i {
    memory_op!(_mm256_loadu_si256(from.as_ptr().cast()))
}

/// Stores integers as half a line.
#[inline(always)]
pub(super) fn store(_isa: Avx2, v: __m256i, to: &mut Half) {
    memory_op!(_mm256_storeu_si256(to.as_mut_ptr().cast(), v));
}

/// Turns weights, times the scales of their values if these lie in the block, into integers of two
/// bytes. `group`: which of a vector's scales; `coded`: `[heads, CODED_LINES]`; `units`: what one
/// unit stands for, `[heads]`
#[inline(always)]
pub(super) fn encode_weights(
    isa: Avx2,
    tile: &Tile<'_>,
    group: Option<usize>,
    weights: &[TileRow],
    coded: &mut [Line],
    units: &mut [f32],
) {
    let mut scales = [1.0; TILE];
    if let Some(group) = group {
        for (from, to) in tile.seen {
            for key in from..to {
                scales[key] = tile.v_scale(key, group);
            }
        }
    }
    let scales = scales.as_chunks::<WIDTH>().0;
    let coded = coded.chunks_exact_mut(CODED_LINES);
    for ((row, coded), unit) in weights.iter().zip(coded).zip(units) {
        let mut w = [isa.splat(0.0); TILE / WIDTH];
        let mut largest = op!(_mm256_setzero_ps());
        let mut broken = largest;
        let infinity = op!(_mm256_set1_ps(f32::INFINITY));
        for (i, line) in row.as_chunks::<WIDTH>().0.iter().enumerate() {
            w[i] = isa.load(line);
            if group.is_some() {
                w[i] = isa.scaled(w[i], isa.load(&scales[i]));
            }
            for half in [w[i].0, w[i].1] {
                // The second operand where one is NaN.
                largest = op!(_mm256_max_ps(half, largest));
                let beyond = op!(_mm256_cmp_ps::<_CMP_NLT_UQ>(half, infinity));
                broken = op!(_mm256_or_ps(broken, beyond));
            }
        }
        let largest = isa.largest_lane(largest);
        // Weights so small that their reciprocal is infinite add nothing.
        let factor = if largest > f32::MIN_POSITIVE * MOST { MOST / largest } else { 0.0 };
        // By a scale that is no number, of a key that is seen: there is no integer for that.
        let broken = op!(_mm256_movemask_ps(broken)) != 0;
        *unit = if broken { f32::NAN } else { largest / MOST };
        let halves = coded.as_flattened_mut().as_chunks_mut::<EIGHT>().0;
        for (w, to) in w.into_iter().zip(halves) {
            store(isa, to_integers(isa, w, factor), to);
        }
    }
}

/// Adds `B` lines of the weighted values, from `first` on, to the accumulators of `G` heads.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the operands of one product")]
fn values_of<const G: usize, const B: usize>(
    isa: Avx2,
    tile: &Tile<'_>,
    mut ahead: Option<&mut impl Ahead>,
    first: usize,
    coded: &[Line],
    units: &[f32],
    lines: usize,
    acc: &mut [Line],
) {
    let zero = op!(_mm256_setzero_si256());
    let mut sums = [[[zero; 2]; B]; G];
    let mut pairs: [&[f32; TILE / 2]; G] = [&[0.0; TILE / 2]; G];
    let coded = coded.as_flattened().as_chunks().0;
    for g in 0..G {
        pairs[g] = &coded[g];
    }
    for (from, to) in tile.quads() {
        for quad in from..to.min(TILE / QUAD) {
            if let Some(ahead) = &mut ahead {
                ahead.piece(isa);
            }
            for pair in [2 * quad, 2 * quad + 1] {
                let rows = [tile.v(2 * pair).as_chunks().0, tile.v(2 * pair + 1).as_chunks().0];
                let rows = [&rows[0][first..first + B], &rows[1][first..first + B]];
                for b in 0..B {
                    let v = two_keys(isa, &rows[0][b], &rows[1][b]);
                    for g in 0..G {
                        let w = op!(_mm256_castps_si256(_mm256_set1_ps(pairs[g][pair])));
                        for i in 0..2 {
                            let products = op!(_mm256_madd_epi16(v[i], w));
                            sums[g][b][i] = op!(_mm256_add_epi32(sums[g][b][i], products));
                        }
                    }
                }
            }
        }
    }
    for g in 0..G {
        for b in 0..B {
            let to = &mut acc[g * lines + first + b];
            let [low, high] = sums[g][b];
            let sum = (op!(_mm256_cvtepi32_ps(low)), op!(_mm256_cvtepi32_ps(high)));
            isa.store(isa.fma(sum, isa.splat(units[g]), isa.load(to)), to);
        }
    }
}

/// Some values of two keys, element by element: eight elements of both in each vector.
#[inline(always)]
pub(super) fn two_keys(_isa: Avx2, first: &[u8; STEP], second: &[u8; STEP]) -> [__m256i; 2] {
    let first = memory_op!(_mm_loadu_si128(first.as_ptr().cast()));
    let second = memory_op!(_mm_loadu_si128(second.as_ptr().cast()));
    [
        op!(_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(first, second))),
        op!(_mm256_cvtepi8_epi16(_mm_unpackhi_epi8(first, second))),
    ]
}
