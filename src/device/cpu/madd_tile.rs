//! INT8 with AVX2 and many query heads at once: the integers of `madd.rs`, with the vectors of a
//! tile widened to two bytes once for all of them.
//!
//! Keys lie in lanes, two elements of each, and values element by element, two keys of each: what
//! `vpmaddwd` adds up. The sums are the same integers as those of `madd.rs`, so all that comes of
//! them has the same bits.

use std::arch::x86_64::*;

use super::fast::Steps;
use super::lanes::{Isa, WIDTH};
use super::madd::{
    CODED_LINES, EIGHT, Half, STEP, encode_queries, encode_weights, load, query_lines, store,
    two_keys, widen,
};
use super::portion::Portion;
use super::task::Split;
use super::tile::{Ahead, Keys, QUAD, TILE, Tile, TileRow};
use super::x86::{Avx2, memory_op, op};

/// Query heads whose products are computed side by side: twelve accumulators, where there are
/// sixteen registers.
const ABREAST: usize = 6;

/// Pairs of keys of a tile.
const PAIRS: usize = TILE / 2;

/// Two elements of sixteen keys, or sixteen elements of two.
type Words = [Half; 2];

/// Computes one split of one KV head.
#[inline(always)]
pub(super) fn split_many(isa: Avx2, work: &mut Split<'_, '_>) {
    let task = work.task;
    let lines = task.padded_dim / WIDTH;
    let per_head = query_lines(task.padded_dim);
    let scores = &mut work.scores.as_chunks_mut::<TILE>().0[..task.heads()];
    let ([k_scales, v_scales], _) = work.row_scales.as_chunks_mut::<TILE>() else {
        return;
    };
    let memory = work.weights.as_chunks_mut::<WIDTH>().0;
    let (weights, units) = memory.split_at_mut(CODED_LINES * task.heads());
    let units = units.as_flattened_mut();
    let packed = work.packed.as_chunks_mut::<WIDTH>().0;
    let (packed_k, packed_v) = packed[..TILE * lines].split_at_mut(TILE * lines / 2);
    let packed_k = packed_k.as_flattened_mut().as_chunks_mut::<EIGHT>().0.as_chunks_mut().0;
    let packed_v = packed_v.as_flattened_mut().as_chunks_mut::<EIGHT>().0.as_chunks_mut().0;
    let q = encode_queries(isa, task, work.q, work.coded);
    work.parts.clear();
    let mut steps = Steps::new(task, work.start, work.end, work.goes_on);
    while steps.advance(task) {
        let tile = &steps.tile;
        let mut part = work.parts.of(0);
        tile.row_scales(task, k_scales, v_scales);
        pack_keys(isa, tile, packed_k);
        let mut ahead = steps.next_ahead(isa);
        let pieces = TILE / QUAD / Portion::of(task).count().max(1) + 1;
        for portion in Portion::of(task) {
            for ahead in &mut ahead {
                for _ in 0..pieces {
                    ahead.piece(isa);
                }
            }
            let heads = portion.heads(task);
            let keys = portion.keys(task, tile);
            let scores = &mut scores[heads.clone()];
            let q = &q[heads.start * per_head..heads.end * per_head];
            all_scores(isa, keys, packed_k, q.as_flattened(), per_head * WIDTH, scores);
            isa.all_weights(task, tile, portion, [k_scales, v_scales], scores, &mut part);
        }
        encode_weights(isa, tile, None, scores, weights, units);
        pack_values(isa, tile, packed_v);
        let acc = part.acc.as_chunks_mut::<EIGHT>().0.as_chunks_mut().0;
        all_values(isa, packed_v, weights.as_flattened().as_chunks().0, units, lines, acc);
    }
}

/// Widens the keys of a tile, and exchanges rows and columns of words of two elements.
/// `out`: `[TILE / 16, row_bytes / 2]`
#[inline(always)]
fn pack_keys(isa: Avx2, tile: &Tile<'_>, out: &mut [Words]) {
    let words = tile.row_bytes / 2;
    for (line, out) in out.chunks_exact_mut(words).enumerate() {
        for (step, out) in out.as_chunks_mut::<EIGHT>().0.iter_mut().enumerate() {
            for half in 0..2 {
                let first = line * WIDTH + half * EIGHT;
                let mut rows = [op!(_mm256_setzero_ps()); EIGHT];
                for (i, row) in rows.iter_mut().enumerate() {
                    let bytes = &tile.k(first + i).as_chunks::<STEP>().0[step];
                    *row = op!(_mm256_castsi256_ps(widen(isa, bytes)));
                }
                let columns = isa.transpose_eight(rows);
                for (column, out) in columns.into_iter().zip(out.iter_mut()) {
                    store(isa, op!(_mm256_castps_si256(column)), &mut out[half]);
                }
            }
        }
    }
}

/// Widens the values of a tile, two keys side by side. `out`: `[row_bytes / 16, TILE / 2]`
#[inline(always)]
fn pack_values(isa: Avx2, tile: &Tile<'_>, out: &mut [Words]) {
    for (step, out) in out.as_chunks_mut::<PAIRS>().0.iter_mut().enumerate() {
        for (pair, out) in out.iter_mut().enumerate() {
            let rows = [tile.v(2 * pair).as_chunks().0, tile.v(2 * pair + 1).as_chunks().0];
            for (v, out) in two_keys(isa, &rows[0][step], &rows[1][step]).into_iter().zip(out) {
                store(isa, v, out);
            }
        }
    }
}

/// q·k of some heads with the lines of keys in which there are any of `keys`. `q`: for each head
/// `per_head` words, of which the last line says what a unit stands for
#[inline(always)]
fn all_scores(
    isa: Avx2,
    keys: Keys,
    k: &[Words],
    q: &[f32],
    per_head: usize,
    scores: &mut [TileRow],
) {
    for (line, k) in k.chunks_exact(k.len() / (TILE / WIDTH)).enumerate() {
        if line * WIDTH >= keys.1 || (line + 1) * WIDTH <= keys.0 {
            continue;
        }
        let heads = scores.len();
        let mut g = 0;
        while g < heads {
            let (q, scores) = (&q[g * per_head..], &mut scores[g..]);
            g += match heads - g {
                ABREAST.. => scores_of::<ABREAST>(isa, line, k, q, per_head, scores),
                4.. => scores_of::<4>(isa, line, k, q, per_head, scores),
                2.. => scores_of::<2>(isa, line, k, q, per_head, scores),
                _ => scores_of::<1>(isa, line, k, q, per_head, scores),
            };
        }
    }
}

/// q·k of `G` heads with one line of keys. Gives `G`.
#[inline(always)]
fn scores_of<const G: usize>(
    isa: Avx2,
    line: usize,
    k: &[Words],
    q: &[f32],
    per_head: usize,
    scores: &mut [TileRow],
) -> usize {
    let mut heads: [&[f32]; G] = [&[]; G];
    let mut units = [0.0; G];
    for g in 0..G {
        heads[g] = &q[g * per_head..][..k.len()];
        units[g] = q[(g + 1) * per_head - 1];
    }
    let mut sums = [[op!(_mm256_setzero_si256()); 2]; G];
    for (i, k) in k.iter().enumerate() {
        let k = [load(isa, &k[0]), load(isa, &k[1])];
        for g in 0..G {
            add_products(isa, k, heads[g][i], &mut sums[g]);
        }
    }
    for g in 0..G {
        let [low, high] = sums[g];
        let sum = (op!(_mm256_cvtepi32_ps(low)), op!(_mm256_cvtepi32_ps(high)));
        if let Some(to) = scores[g].as_chunks_mut::<WIDTH>().0.get_mut(line) {
            isa.store(isa.mul(sum, isa.splat(units[g])), to);
        }
    }
    G
}

/// Adds the products of two numbers in every lane with `two`.
#[inline(always)]
fn add_products(_isa: Avx2, v: [__m256i; 2], two: f32, sums: &mut [__m256i; 2]) {
    let two = op!(_mm256_castps_si256(_mm256_set1_ps(two)));
    for i in 0..2 {
        sums[i] = op!(_mm256_add_epi32(sums[i], _mm256_madd_epi16(v[i], two)));
    }
}

/// Adds the weighted values of a tile to the accumulators of all heads. `acc`: `[heads, lines]`
#[inline(always)]
fn all_values(
    isa: Avx2,
    v: &[Words],
    weights: &[[f32; PAIRS]],
    units: &[f32],
    lines: usize,
    acc: &mut [Words],
) {
    for (line, v) in v.as_chunks().0.iter().enumerate() {
        let heads = weights.len();
        let mut g = 0;
        while g < heads {
            let (weights, units) = (&weights[g..], &units[g..]);
            let acc = &mut acc[g * lines + line..];
            g += match heads - g {
                ABREAST.. => values_of::<ABREAST>(isa, v, weights, units, lines, acc),
                4.. => values_of::<4>(isa, v, weights, units, lines, acc),
                2.. => values_of::<2>(isa, v, weights, units, lines, acc),
                _ => values_of::<1>(isa, v, weights, units, lines, acc),
            };
        }
    }
}

/// Adds one line of them to those of `G` heads, which lie `lines` lines apart. Gives `G`.
#[inline(always)]
fn values_of<const G: usize>(
    isa: Avx2,
    v: &[Words; PAIRS],
    weights: &[[f32; PAIRS]],
    units: &[f32],
    lines: usize,
    acc: &mut [Words],
) -> usize {
    let (weights, units) = (&weights[..G], &units[..G]);
    let mut sums = [[op!(_mm256_setzero_si256()); 2]; G];
    for pair in 0..PAIRS {
        let v = [load(isa, &v[pair][0]), load(isa, &v[pair][1])];
        for g in 0..G {
            add_products(isa, v, weights[g][pair], &mut sums[g]);
        }
    }
    for g in 0..G {
        let unit = op!(_mm256_set1_ps(units[g]));
        for (sum, acc) in sums[g].into_iter().zip(&mut acc[g * lines]) {
            let sum = op!(_mm256_cvtepi32_ps(sum));
            let old = memory_op!(_mm256_loadu_ps(acc.as_ptr()));
            let sum = op!(_mm256_fmadd_ps(sum, unit, old));
            memory_op!(_mm256_storeu_ps(acc.as_mut_ptr(), sum));
        }
    }
    G
}
