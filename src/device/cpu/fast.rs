//! Attention over one split, for all query heads of a KV head together.
//!
//! Everything here is generic and inlined into functions compiled for one instruction set
//! (`x86.rs`, and `Portable` in `kernel.rs`). The order of every sum is fixed by positions alone:
//!
//! - A split is cut into tiles at multiples of [`TILE_TOKENS`]. A tile's visible keys are listed
//!   in ascending position, wherever in memory they lie; nothing else is read.
//! - A score is summed in 16 lanes over the elements, and the lanes in a fixed tree.
//! - The running maximum, sum and accumulators are brought up to date once a tile; within it the
//!   weighted values are added key by key.
//!
//! So the result is the same, bit for bit, for every cache mode, block size, batch and number of
//! threads (P5).

#![expect(
    clippy::needless_range_loop,
    reason = "loops over constant bounds index register arrays; this is the form that unrolls"
)]

use super::exp::exp;
use super::lanes::{Element, Isa, Line, WIDTH, sum_lanes};
use super::task::{Split, finite_base};
use super::tile::{TILE, Tile, TileRow};
use crate::plan::TILE_TOKENS;

/// Computes one split; the kernels are instances of this.
#[inline(always)]
pub(super) fn split<I: Isa, E: Element>(isa: I, work: &mut Split<'_, '_>) {
    let task = work.task;
    let lines = task.padded_dim / WIDTH;
    let q = work.q.as_chunks::<WIDTH>().0;
    let scores = work.scores.as_chunks_mut::<TILE>().0;
    let ([k_scales, v_scales], _) = work.row_scales.as_chunks_mut::<TILE>() else {
        return;
    };
    work.part.clear();
    let mut tile = Tile::new(task);
    let mut next = Tile::new(task);
    let mut start = work.start;
    next.locate(task, start, work.end.min(start + TILE_TOKENS));
    while start < work.end {
        std::mem::swap(&mut tile, &mut next);
        start = work.end.min(start + TILE_TOKENS);
        next.locate(task, start, work.end.min(start + TILE_TOKENS));
        if tile.keys == 0 {
            continue;
        }
        tile.row_scales(task, k_scales, v_scales);
        let scores = &mut scores[..task.group];
        scores.fill([f32::NEG_INFINITY; TILE]);
        all_scores::<I, E>(isa, &tile, q, lines, scores);
        for (g, row) in scores.iter_mut().enumerate() {
            let acc = &mut work.part.acc[g * task.padded_dim..][..task.padded_dim];
            let (max, sum) = (&mut work.part.max[g], &mut work.part.sum[g]);
            softmax::<I>(row, k_scales, v_scales, task.softmax_scale, max, sum, acc);
        }
        let acc = work.part.acc.as_chunks_mut::<WIDTH>().0;
        all_values::<I, E>(isa, &tile, &next, scores, lines, acc);
    }
}

/// Turns a tile's products q·k into weights, and brings the running state up to date.
#[inline(always)]
fn softmax<I: Isa>(
    row: &mut TileRow,
    k_scales: &TileRow,
    v_scales: &TileRow,
    softmax_scale: f32,
    max: &mut f32,
    sum: &mut f32,
    acc: &mut [f32],
) {
    let mut maxima = [f32::NEG_INFINITY; WIDTH];
    for (line, scales) in row.as_chunks_mut::<WIDTH>().0.iter_mut().zip(k_scales.as_chunks().0) {
        let scales: &Line = scales;
        for i in 0..WIDTH {
            line[i] = line[i] * scales[i] * softmax_scale;
            // False for NaN, which the sum below brings to light.
            maxima[i] = if line[i] > maxima[i] { line[i] } else { maxima[i] };
        }
    }
    let tile_max = maxima.into_iter().fold(*max, |a, b| if b > a { b } else { a });
    let base = finite_base(tile_max);
    let mut sums = [0.0; WIDTH];
    for (line, scales) in row.as_chunks_mut::<WIDTH>().0.iter_mut().zip(v_scales.as_chunks().0) {
        let scales: &Line = scales;
        for i in 0..WIDTH {
            let weight = exp_of::<I>(line[i] - base);
            sums[i] += weight;
            line[i] = weight * scales[i];
        }
    }
    let keep = exp_of::<I>(*max - base);
    *max = tile_max;
    *sum = *sum * keep + sum_lanes(sums);
    // A product with 1 changes nothing.
    if keep.to_bits() != 1.0_f32.to_bits() {
        for acc in acc {
            *acc *= keep;
        }
    }
}

/// `exp` with the instruction set's way of multiplying and adding.
#[inline(always)]
fn exp_of<I: Isa>(x: f32) -> f32 {
    if I::FMA { exp::<true>(x) } else { exp::<false>(x) }
}

/// q·k of all heads of the group with all keys of the tile.
#[inline(always)]
fn all_scores<I: Isa, E: Element>(
    isa: I,
    tile: &Tile<'_>,
    q: &[Line],
    lines: usize,
    scores: &mut [TileRow],
) {
    let group = scores.len();
    let mut g = 0;
    while I::WIDE && group - g >= 8 {
        scores_of::<I, E, 8, 2>(isa, tile, &q[g * lines..], lines, &mut scores[g..], g == 0);
        g += 8;
    }
    while group - g >= 4 {
        if I::WIDE {
            scores_of::<I, E, 4, 4>(isa, tile, &q[g * lines..], lines, &mut scores[g..], g == 0);
        } else {
            scores_of::<I, E, 4, 1>(isa, tile, &q[g * lines..], lines, &mut scores[g..], g == 0);
        }
        g += 4;
    }
    while group - g >= 2 {
        scores_of::<I, E, 2, 2>(isa, tile, &q[g * lines..], lines, &mut scores[g..], g == 0);
        g += 2;
    }
    if group > g {
        scores_of::<I, E, 1, 4>(isa, tile, &q[g * lines..], lines, &mut scores[g..], g == 0);
    }
}

/// q·k of `G` heads with all keys of the tile, `K` keys at a time.
#[inline(always)]
fn scores_of<I: Isa, E: Element, const G: usize, const K: usize>(
    isa: I,
    tile: &Tile<'_>,
    q: &[Line],
    lines: usize,
    scores: &mut [TileRow],
    prefetch: bool,
) {
    let mut heads: [&[Line]; G] = [&[]; G];
    for g in 0..G {
        heads[g] = &q[g * lines..][..lines];
    }
    let mut key = 0;
    while key + K <= tile.keys {
        if prefetch {
            // The tile's values, which are next.
            for k in 0..K {
                tile.prefetch_v(isa, key + k);
            }
        }
        products::<I, E, G, K>(isa, tile, key, &heads, scores);
        key += K;
    }
    while key < tile.keys {
        products::<I, E, G, 1>(isa, tile, key, &heads, scores);
        key += 1;
    }
}

/// q·k of `G` heads with `K` keys.
#[inline(always)]
fn products<I: Isa, E: Element, const G: usize, const K: usize>(
    isa: I,
    tile: &Tile<'_>,
    key: usize,
    heads: &[&[Line]; G],
    scores: &mut [TileRow],
) {
    let mut rows: [&[E::Chunk]; K] = [&[]; K];
    let mut rests: [&[u8]; K] = [&[]; K];
    for k in 0..K {
        (rows[k], rests[k]) = E::chunks(tile.k(key + k));
    }
    let whole = rows[0].len();
    let mut heads = *heads;
    let mut tails: [&[Line]; G] = [&[]; G];
    for g in 0..G {
        (heads[g], tails[g]) = heads[g].split_at(whole);
    }
    for k in 0..K {
        rows[k] = &rows[k][..whole];
    }
    let mut acc = [[isa.splat(0.0); G]; K];
    if E::GROUPED {
        for pair in 0..whole / 2 {
            for k in 0..K {
                let scale = isa.splat(tile.scale(tile.scale_at[key + k], pair));
                let first = E::load(isa, &rows[k][2 * pair]);
                let second = E::load(isa, &rows[k][2 * pair + 1]);
                for g in 0..G {
                    let sum = isa.mul(isa.load(&heads[g][2 * pair]), first);
                    let sum = isa.fma(isa.load(&heads[g][2 * pair + 1]), second, sum);
                    acc[k][g] = isa.fma(sum, scale, acc[k][g]);
                }
            }
        }
    } else {
        for i in 0..whole {
            for k in 0..K {
                let row = E::load(isa, &rows[k][i]);
                for g in 0..G {
                    acc[k][g] = isa.fma(isa.load(&heads[g][i]), row, acc[k][g]);
                }
            }
        }
        if !rests[0].is_empty() {
            for k in 0..K {
                let row = E::load_tail(isa, rests[k]);
                for g in 0..G {
                    acc[k][g] = isa.fma(isa.load(&tails[g][0]), row, acc[k][g]);
                }
            }
        }
    }
    for g in 0..G {
        for k in 0..K {
            scores[g][key + k] = isa.sum(acc[k][g]);
        }
    }
}

/// Adds the weighted values of all keys of the tile to the accumulators of all heads.
#[inline(always)]
fn all_values<I: Isa, E: Element>(
    isa: I,
    tile: &Tile<'_>,
    next: &Tile<'_>,
    weights: &[TileRow],
    lines: usize,
    acc: &mut [Line],
) {
    let group = weights.len();
    // The next tile's keys are asked for once, by the first heads.
    let ahead = |g: usize| (g == 0).then_some(next);
    let mut g = 0;
    while I::WIDE && group - g >= 8 {
        values_of::<I, E, 8, 2>(isa, tile, ahead(g), &weights[g..], lines, &mut acc[g * lines..]);
        g += 8;
    }
    while group - g >= 4 {
        if I::WIDE {
            values_of::<I, E, 4, 4>(
                isa,
                tile,
                ahead(g),
                &weights[g..],
                lines,
                &mut acc[g * lines..],
            );
        } else {
            values_of::<I, E, 4, 1>(
                isa,
                tile,
                ahead(g),
                &weights[g..],
                lines,
                &mut acc[g * lines..],
            );
        }
        g += 4;
    }
    while group - g >= 2 {
        values_of::<I, E, 2, 2>(isa, tile, ahead(g), &weights[g..], lines, &mut acc[g * lines..]);
        g += 2;
    }
    if group > g {
        values_of::<I, E, 1, 4>(isa, tile, ahead(g), &weights[g..], lines, &mut acc[g * lines..]);
    }
}

/// Adds the weighted values to the accumulators of `G` heads, `B` lines at a time.
#[inline(always)]
fn values_of<I: Isa, E: Element, const G: usize, const B: usize>(
    isa: I,
    tile: &Tile<'_>,
    mut next: Option<&Tile<'_>>,
    weights: &[TileRow],
    lines: usize,
    acc: &mut [Line],
) {
    let whole = tile.row_bytes / (E::BYTES * WIDTH);
    let mut first = 0;
    while first + B <= whole {
        lines_of::<I, E, G, B>(isa, tile, next.take(), first, weights, lines, acc);
        first += B;
    }
    while first < whole {
        lines_of::<I, E, G, 1>(isa, tile, next.take(), first, weights, lines, acc);
        first += 1;
    }
    if whole < lines {
        for key in 0..tile.keys {
            let row = E::load_tail(isa, E::chunks(tile.v(key)).1);
            for g in 0..G {
                let acc = &mut acc[g * lines + whole];
                let sum = isa.fma(isa.splat(weights[g][key]), row, isa.load(acc));
                isa.store(sum, acc);
            }
        }
    }
}

/// Adds lines `first..first + B` of the weighted values to the accumulators of `G` heads.
#[inline(always)]
fn lines_of<I: Isa, E: Element, const G: usize, const B: usize>(
    isa: I,
    tile: &Tile<'_>,
    next: Option<&Tile<'_>>,
    first: usize,
    weights: &[TileRow],
    lines: usize,
    acc: &mut [Line],
) {
    let weights = &weights[..G];
    let mut sums = [[isa.splat(0.0); B]; G];
    for g in 0..G {
        for b in 0..B {
            sums[g][b] = isa.load(&acc[g * lines + first + b]);
        }
    }
    for key in 0..tile.keys.min(TILE) {
        if let Some(next) = next {
            next.prefetch_k(isa, key);
        }
        let row = &E::chunks(tile.v(key)).0[first..first + B];
        for b in 0..B {
            let value = E::load(isa, &row[b]);
            let value = if E::GROUPED {
                let at = tile.scale_at[key] + tile.scale_to_v;
                isa.mul(value, isa.splat(tile.scale(at, (first + b) / 2)))
            } else {
                value
            };
            for g in 0..G {
                sums[g][b] = isa.fma(isa.splat(weights[g][key]), value, sums[g][b]);
            }
        }
    }
    for g in 0..G {
        for b in 0..B {
            isa.store(sums[g][b], &mut acc[g * lines + first + b]);
        }
    }
}
