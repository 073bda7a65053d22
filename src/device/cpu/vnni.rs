//! Attention over INT8 with AVX-512 VNNI: integer dot products of bytes.
//!
//! Queries, and a tile's weights, become integers of two bytes, so that what they lose is some
//! 250 times smaller than what storing K and V as one byte has lost: a query's elements are
//! rounded to amax / 32512, a weight (that of the softmax times its V vector's scale) to the
//! largest of its head and tile / 65535. The high and the low bytes are multiplied by the stored
//! ones separately (`vpdpbusd`: unsigned times signed) and the two sums are put together.
//!
//! All of that is exact integer arithmetic, so its order is of no consequence: the same bits come
//! out however heads and keys are arranged. A key that a row does not see has the weight 0, and 0
//! times any byte is 0. What follows in f32 has a fixed order: scores group by group of 32
//! elements where these have scales of their own, accumulators tile by tile.
//!
//! `vpdpbusd` wants its first operand unsigned. Weights are; stored keys get 128 added (the sign
//! bit flipped), and 128 times the sum of the query's integers is taken away at the end.

use std::arch::x86_64::*;

use super::fast::Steps;
use super::lanes::{Isa, Line, WIDTH};
use super::packed::MANY_HEADS;
use super::portion::Portion;
use super::task::{Split, Task};
use super::tile::{Ahead, QUAD, TILE, Tile, TileRow, Vectors, prefetch};
use super::vnni_tile::split_many;
use super::vnni_values::{all_values, encode_weights};
use super::x86::Avx512;
use crate::plan::{GroupLayout, Kv, SCALE_GROUP};

/// Proof that the CPU has AVX-512 VNNI and VBMI, beside what [`Avx512`] proves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Vnni(Avx512);

impl Vnni {
    /// The proof, where the CPU gives it.
    pub(super) fn detect() -> Option<Self> {
        let avx512 = Avx512::detect()?;
        (is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("avx512vbmi"))
            .then_some(Self(avx512))
    }

    /// The kernel for everything that is not INT8.
    pub(super) fn plain(self) -> Avx512 {
        self.0
    }

    /// Whether INT8 vectors of this layout are computed here: whole groups of 32 elements, and
    /// few enough that the sum of products with 15 bits and a sign fits in 32 bits.
    pub(super) fn takes(layout: &GroupLayout) -> bool {
        layout.head_dim.is_multiple_of(SCALE_GROUP) && layout.head_dim as usize <= MAX_DIM
    }
}

/// Elements of a vector, at most: 512 · 32512 · 127 is below 2³¹.
pub(super) const MAX_DIM: usize = 512;

/// Elements of a group, and of the part of a vector whose values are added up at once.
pub(super) const GROUP: usize = SCALE_GROUP as usize;

/// The largest integer of a query: its high byte is 127, its low one is in -128..128.
const Q_MAX: f32 = 32512.0;

/// A query whose largest element is below this is taken for 0.
const Q_TINY: f32 = 1e-30;

/// A scale for each group and key.
pub(super) type GroupScales = [TileRow; MAX_DIM / GROUP];

/// How queries lie in a block of heads: a line holds the same `64 / W` elements of `W` heads.
struct Blocks {
    /// Lines of the high bytes, and as many of the low ones.
    chunks: usize,
    /// Groups that have a sum, and a scale, of their own.
    groups: usize,
    /// Heads in all.
    heads: usize,
}

impl Blocks {
    fn new<const W: usize>(task: &Task<'_>, grouped: bool) -> Self {
        Self {
            chunks: task.padded_dim * W / 64,
            groups: if grouped { task.padded_dim / GROUP } else { 1 },
            heads: task.heads(),
        }
    }

    /// Lines of a block: high and low bytes chunk by chunk, then 128 times the sum of each
    /// group's integers, then what one unit of each head's integers stands for.
    fn lines(&self) -> usize {
        2 * self.chunks + self.groups + 1
    }
}

/// Computes one split.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
#[target_feature(enable = "avx512vnni,avx512vbmi")]
pub(super) fn split<const GROUPED: bool>(isa: Vnni, work: &mut Split<'_, '_>) {
    let dim = work.task.padded_dim;
    match work.task.heads() {
        MANY_HEADS.. if work.task.kv_heads == 1 => split_many::<GROUPED>(isa, work),
        1 if !GROUPED && dim.is_multiple_of(64) => split_at_pace::<GROUPED, 1, 64>(isa, work),
        1 | 2 => split_at_pace::<GROUPED, 2, 32>(isa, work),
        _ => split_at_pace::<GROUPED, 4, 16>(isa, work),
    }
}

/// Computes one split; several KV heads ask memory for a little at a time (see `fast.rs`).
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
#[target_feature(enable = "avx512vnni,avx512vbmi")]
fn split_at_pace<const GROUPED: bool, const W: usize, const B: usize>(
    isa: Vnni,
    work: &mut Split<'_, '_>,
) {
    if work.task.kv_heads > 1 {
        split_blocks::<GROUPED, W, B, true>(isa, work);
    } else {
        split_blocks::<GROUPED, W, B, false>(isa, work);
    }
}

/// Computes one split, `W` heads to a line of queries, with `B` = 64 / `W` bytes of each.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
#[target_feature(enable = "avx512vnni,avx512vbmi")]
fn split_blocks<const GROUPED: bool, const W: usize, const B: usize, const SPREAD: bool>(
    isa: Vnni,
    work: &mut Split<'_, '_>,
) {
    let task = work.task;
    let dim = task.padded_dim;
    let blocks = Blocks::new::<W>(task, GROUPED);
    let coded = work.coded.as_chunks_mut::<WIDTH>().0;
    let scores = &mut work.scores.as_chunks_mut::<TILE>().0[..blocks.heads];
    let ([k_scales, v_scales], _) = work.row_scales.as_chunks_mut::<TILE>() else {
        return;
    };
    let (weights, weight_scales) =
        work.weights.as_chunks_mut::<WIDTH>().0.split_at_mut(2 * blocks.heads);
    let weight_scales = weight_scales.as_flattened_mut();
    let per_head = blocks.heads.div_ceil(W) * blocks.lines();
    let lines = dim / WIDTH;
    let q = work.q.as_chunks::<WIDTH>().0.chunks_exact(blocks.heads * lines);
    let coded_heads = coded.chunks_exact_mut(per_head).take(task.kv_heads as usize);
    for (q, coded) in q.zip(coded_heads) {
        encode_queries::<GROUPED, W>(&blocks, task, q, coded);
    }
    let mut group_scales: GroupScales = [[1.0; TILE]; MAX_DIM / GROUP];
    let all = Portion::all(task);
    work.parts.clear();
    let mut steps = Steps::new(task, work.start, work.end, work.goes_on);
    while steps.advance(task) {
        let (tile, kv_head) = (&steps.tile, steps.kv_head);
        // Several heads: K while K is read, and V while V is, which is twice as far ahead.
        let mut ahead: Vectors<'_, SPREAD> =
            if SPREAD { steps.step_ahead(Kv::K, 1) } else { steps.values_ahead() };
        let mut part = work.parts.of(kv_head);
        let coded = &coded[kv_head * per_head..][..per_head];
        tile.row_scales(task, k_scales, v_scales);
        if GROUPED {
            read_group_scales(tile, false, &mut group_scales[..blocks.groups]);
        }
        for (block, scores) in scores.chunks_mut(W).enumerate() {
            let coded = &coded[block * blocks.lines()..][..blocks.lines()];
            all_scores::<GROUPED, W, B>(
                isa,
                &blocks,
                tile,
                if block == 0 { Some(&mut ahead) } else { None },
                coded,
                &group_scales,
                scores,
            );
        }
        isa.0.all_weights(task, tile, all, [k_scales, v_scales], scores, &mut part);
        if GROUPED {
            read_group_scales(tile, true, &mut group_scales[..blocks.groups]);
        }
        let acc = part.acc.as_chunks_mut::<WIDTH>().0;
        steps.scales_ahead(isa.0);
        let kv = if SPREAD { Kv::V } else { Kv::K };
        let mut ahead: Vectors<'_, SPREAD> = steps.step_ahead(kv, dim / GROUP);
        for (part, scales) in group_scales[..dim / GROUP].iter().enumerate() {
            if GROUPED || part == 0 {
                let scales = if GROUPED { Some(scales) } else { None };
                encode_weights(isa, scores, scales, weights, weight_scales);
            }
            all_values(isa, tile, &mut ahead, part, weights, weight_scales, lines, acc);
        }
    }
}

/// The scales of every 32 elements, of V vectors or of K vectors, for keys that are seen. (Those
/// of keys that are not are scales of other keys, or 1.)
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
pub(super) fn read_group_scales(tile: &Tile<'_>, of_v: bool, out: &mut [TileRow]) {
    for (from, to) in tile.seen {
        let mut key = from;
        while key < to {
            let octet = if out.len() == 4 && key + 8 <= to {
                tile.octet_scales::<64>(of_v, key)
            } else {
                None
            };
            let Some(octet) = octet else {
                tile.group_scales(of_v, key, out);
                key += 1;
                continue;
            };
            // SAFETY: 64 bytes, and the load asks for no alignment.
            let mut keys = unsafe { _mm512_loadu_si512(octet.as_ptr().cast()) };
            // Eight keys with four scales of 16 bits each.
            for out in &mut *out {
                let scales = _mm256_slli_epi32::<16>(_mm512_cvtepi64_epi32(keys));
                let scales = _mm256_castsi256_ps(_mm256_srli_epi32::<1>(scales));
                let to = &mut out[key..key + 8];
                // SAFETY: eight f32 are 32 bytes, and the store asks for no alignment.
                unsafe { _mm256_storeu_ps(to.as_mut_ptr(), scales) };
                keys = _mm512_srli_epi64::<16>(keys);
            }
            key += 8;
        }
    }
}

/// Turns queries into integers. `q`: `[heads, padded_dim]`; `coded`: `[blocks, Blocks::lines]`
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
#[target_feature(enable = "avx512vnni,avx512vbmi")]
#[inline]
fn encode_queries<const GROUPED: bool, const W: usize>(
    blocks: &Blocks,
    task: &Task<'_>,
    q: &[Line],
    coded: &mut [Line],
) {
    let lines = task.padded_dim / WIDTH;
    let per_chunk = 4 / W;
    let used = blocks.heads.div_ceil(W) * blocks.lines();
    coded[..used].fill([0.0; WIDTH]);
    for (head, q) in q.chunks_exact(lines).take(blocks.heads).enumerate() {
        let block = &mut coded[head / W * blocks.lines()..][..blocks.lines()];
        let (bytes, rest) = block.split_at_mut(2 * blocks.chunks);
        let (sums, scale) = rest.split_at_mut(blocks.groups);
        let first = head % W * per_chunk;
        let (to_integers, unit) = query_scale(q);
        scale[0][first * 4..(first + per_chunk) * 4].fill(unit);
        for (i, q) in q.iter().enumerate() {
            // SAFETY: a `Line` is 64 bytes, and the load asks for no alignment.
            let q = unsafe { _mm512_loadu_ps(q.as_ptr()) };
            let q = _mm512_cvtps_epi32(_mm512_mul_ps(q, _mm512_set1_ps(to_integers)));
            let high = _mm512_srai_epi32::<8>(_mm512_add_epi32(q, _mm512_set1_epi32(128)));
            let low = _mm512_sub_epi32(q, _mm512_slli_epi32::<8>(high));
            let at = (first + i % per_chunk) * 4;
            let chunk = i / per_chunk * 2;
            store_bytes(high, &mut bytes[chunk], at);
            store_bytes(low, &mut bytes[chunk + 1], at);
            let group = if GROUPED { i * WIDTH / GROUP } else { 0 };
            // A query that is no number becomes the least integer: it is its scale that says so.
            let sum = _mm512_reduce_add_epi32(q).wrapping_mul(128);
            for lane in &mut sums[group][first * 4..(first + per_chunk) * 4] {
                *lane =
                    f32::from_bits(lane.to_bits().cast_signed().wrapping_add(sum).cast_unsigned());
            }
        }
    }
}

/// The factor that makes a query's elements integers, and what one unit then stands for. NaN for
/// a query that is not finite, whose scores are to be NaN.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
pub(super) fn query_scale(q: &[Line]) -> (f32, f32) {
    let mut largest = _mm512_setzero_si512();
    for line in q {
        // Magnitudes are ordered as their bits are, NaN and infinity above all others.
        let x = _mm512_and_si512(load_integers(line), _mm512_set1_epi32(0x7FFF_FFFF));
        largest = _mm512_max_epi32(largest, x);
    }
    let largest = f32::from_bits(_mm512_reduce_max_epi32(largest).cast_unsigned());
    if !largest.is_finite() {
        (0.0, f32::NAN)
    } else if largest < Q_TINY {
        (0.0, 0.0)
    } else {
        (Q_MAX / largest, largest / Q_MAX)
    }
}

/// Stores the low byte of each of 16 integers in four numbers of a line.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
fn store_bytes(v: __m512i, line: &mut Line, at: usize) {
    let to = &mut line[at..at + 4];
    let bytes = _mm512_cvtepi32_epi8(v);
    // SAFETY: four f32 are 16 bytes, and the store asks for no alignment.
    unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), bytes) };
}

/// The integers in a line.
#[target_feature(enable = "avx512f")]
#[inline]
fn load_integers(line: &Line) -> __m512i {
    // SAFETY: a `Line` is 64 bytes, and the load asks for no alignment.
    unsafe { _mm512_loadu_si512(line.as_ptr().cast()) }
}

/// q·k of one block of heads with all keys of the tile, in whole quads.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
#[target_feature(enable = "avx512vnni,avx512vbmi")]
#[inline]
fn all_scores<const GROUPED: bool, const W: usize, const B: usize>(
    isa: Vnni,
    blocks: &Blocks,
    tile: &Tile<'_>,
    mut ahead: Option<&mut impl Ahead>,
    coded: &[Line],
    group_scales: &GroupScales,
    scores: &mut [TileRow],
) {
    let (bytes, rest) = coded.split_at(2 * blocks.chunks);
    let (sums, unit) = rest.split_at(blocks.groups);
    // SAFETY: a `Line` is 64 bytes, and the load asks for no alignment.
    let unit = unsafe { _mm512_loadu_ps(unit[0].as_ptr()) };
    let per_group = blocks.chunks / blocks.groups;
    for (from, to) in tile.quads() {
        for quad in from..to {
            let key = quad * QUAD;
            let mut piece = None;
            if let Some(ahead) = &mut ahead {
                piece = ahead.piece(isa.0);
            }
            let rows = [
                tile.k(key).as_chunks::<B>().0,
                tile.k(key + 1).as_chunks::<B>().0,
                tile.k(key + 2).as_chunks::<B>().0,
                tile.k(key + 3).as_chunks::<B>().0,
            ];
            let mut total = _mm512_setzero_ps();
            for (group, sum) in sums.iter().enumerate() {
                let chunks = group * per_group..(group + 1) * per_group;
                let bytes = &bytes[2 * chunks.start..2 * chunks.end];
                let products = products::<W, B>(isa, piece, rows, chunks.start, bytes);
                let products = _mm512_sub_epi32(products, load_integers(sum));
                let products = _mm512_cvtepi32_ps(products);
                if GROUPED {
                    let four: &[f32] = &group_scales[group][key..key + QUAD];
                    // SAFETY: four f32 are 16 bytes, and the load asks for no alignment.
                    let four = unsafe { _mm_loadu_ps(four.as_ptr()) };
                    let scales = _mm512_broadcast_f32x4(four);
                    total = _mm512_fmadd_ps(products, scales, total);
                } else {
                    total = products;
                }
            }
            let total = _mm512_mul_ps(total, unit);
            let quarters = [
                _mm512_castps512_ps128(total),
                _mm512_extractf32x4_ps::<1>(total),
                _mm512_extractf32x4_ps::<2>(total),
                _mm512_extractf32x4_ps::<3>(total),
            ];
            for (head, scores) in scores.iter_mut().enumerate() {
                let to = &mut scores[key..key + QUAD];
                // SAFETY: four f32 are 16 bytes, and the store asks for no alignment.
                unsafe { _mm_storeu_ps(to.as_mut_ptr(), quarters[head * 4 / W]) };
            }
        }
    }
}

/// Products of the integers of `W` heads with four keys, each plus 128, over some chunks:
/// `[W, 4 / W of the same, 4 keys]`. Asks for as many bytes from `piece` on as the four keys have.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
#[target_feature(enable = "avx512vnni,avx512vbmi")]
#[inline]
fn products<const W: usize, const B: usize>(
    isa: Vnni,
    piece: Option<*const u8>,
    rows: [&[[u8; B]]; 4],
    first: usize,
    bytes: &[Line],
) -> __m512i {
    let bytes = bytes.as_chunks::<2>().0;
    let mut chunks: [&[[u8; B]]; 4] = [&[]; 4];
    for k in 0..4 {
        chunks[k] = &rows[k][first..first + bytes.len()];
    }
    let flip = _mm512_set1_epi8(-128);
    let mut high = [_mm512_setzero_si512(); 4];
    let mut low = [_mm512_setzero_si512(); 4];
    for (i, [q_high, q_low]) in bytes.iter().enumerate() {
        if let Some(piece) = piece {
            prefetch(isa.0, piece.wrapping_add((first + i) * 4 * B), 4 * B);
        }
        let (q_high, q_low) = (load_integers(q_high), load_integers(q_low));
        for k in 0..4 {
            let row = _mm512_xor_si512(load_chunk(&chunks[k][i]), flip);
            high[k] = _mm512_dpbusd_epi32(high[k], row, q_high);
            low[k] = _mm512_dpbusd_epi32(low[k], row, q_low);
        }
    }
    let mut all = low;
    for k in 0..4 {
        all[k] = _mm512_add_epi32(_mm512_slli_epi32::<8>(high[k]), low[k]);
    }
    // In every quarter the sums of four lanes, of each key.
    let ab = add_halves(all[0], all[1]);
    let cd = add_halves(all[2], all[3]);
    let sums = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    // A head with more than one quarter has its sum in each of them.
    let sums = if W <= 2 {
        _mm512_add_epi32(sums, _mm512_shuffle_i32x4::<0b10_11_00_01>(sums, sums))
    } else {
        sums
    };
    if W == 1 {
        _mm512_add_epi32(sums, _mm512_shuffle_i32x4::<0b01_00_11_10>(sums, sums))
    } else {
        sums
    }
}

/// Of every four lanes of two vectors, those 2 apart: `a, b, a, b`.
#[target_feature(enable = "avx512f")]
#[inline]
fn add_halves(a: __m512i, b: __m512i) -> __m512i {
    _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b))
}

/// The bytes of a chunk, as often as they fit in a line: `64 / B` times.
#[target_feature(enable = "avx2,avx512f,avx512dq")]
#[inline]
fn load_chunk<const B: usize>(chunk: &[u8; B]) -> __m512i {
    let from = chunk.as_ptr();
    match B {
        // SAFETY: 16 bytes, and the load asks for no alignment.
        16 => _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(from.cast()) }),
        // SAFETY: 32 bytes, and the load asks for no alignment.
        32 => _mm512_broadcast_i64x4(unsafe { _mm256_loadu_si256(from.cast()) }),
        _ => {
            const { assert!(B == 16 || B == 32 || B == 64) };
            // SAFETY: 64 bytes, and the load asks for no alignment.
            unsafe { _mm512_loadu_si512(from.cast()) }
        }
    }
}
