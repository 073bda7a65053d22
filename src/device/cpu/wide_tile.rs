//! f32 lanes with many query heads at once, for AVX-512: a tile's keys and values are widened once
//! for all of them, and the keys lie in lanes. Every sum has the order that it has in `scores.rs`
//! and `values.rs`, so the bits are the same.

#![expect(
    clippy::needless_range_loop,
    reason = "loops over constant bounds index register arrays; this is the form that unrolls"
)]

use std::arch::x86_64::*;

use super::fast::{Steps, split};
use super::lanes::{Element, Isa, Line, WIDTH};
use super::packed::{ABREAST, MANY_HEADS, Pair, transpose};
use super::portion::Portion;
use super::task::{Split, Task};
use super::tile::{Ahead, Keys, QUAD, TILE, Tile, TileRow};
use super::x86::{Avx512, op};

/// Query heads whose queries lie side by side.
const EIGHT: usize = 8;

/// The lanes of `Isa::sum` in the order in which their sums are wanted first: two that are next to
/// each other, two pairs, and so on are added.
const LANES_IN_ORDER: [usize; WIDTH] = [0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15];

/// How often halves are put together.
const LEVELS: usize = WIDTH.ilog2() as usize;

/// Computes one split.
#[inline(always)]
pub(super) fn split_wide<E: Element>(isa: Avx512, work: &mut Split<'_, '_>) {
    // Bytes are for VNNI.
    if E::BYTES > 1 && work.task.kv_heads == 1 && work.task.heads() >= MANY_HEADS {
        split_many::<E>(isa, work);
    } else {
        split::<Avx512, E>(isa, work);
    }
}

/// Computes one split of one KV head.
#[inline(always)]
fn split_many<E: Element>(isa: Avx512, work: &mut Split<'_, '_>) {
    let task = work.task;
    let dim = task.padded_dim;
    let lines = dim / WIDTH;
    let scores = work.scores.as_chunks_mut::<TILE>().0;
    let ([k_scales, v_scales], _) = work.row_scales.as_chunks_mut::<TILE>() else {
        return;
    };
    let (packed_k, packed_v) = work.packed.as_chunks_mut::<WIDTH>().0.split_at_mut(TILE * lines);
    let packed_k = packed_k.as_chunks_mut::<ABREAST>().0;
    let coded = work.coded.as_chunks_mut::<EIGHT>().0;
    for (head, q) in work.q.chunks_exact(dim).take(task.heads()).enumerate() {
        for (q, coded) in q.iter().zip(&mut coded[head / EIGHT * dim..]) {
            coded[head % EIGHT] = *q;
        }
    }
    work.parts.clear();
    let mut steps = Steps::new(task, work.start, work.end, work.goes_on);
    while steps.advance(task) {
        let tile = &steps.tile;
        let mut part = work.parts.of(0);
        tile.row_scales(task, k_scales, v_scales);
        pack_keys::<E>(isa, tile, dim, packed_k);
        pack_values::<E>(isa, tile, lines, packed_v);
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
            all_scores(isa, keys, dim, packed_k, coded, heads.start, scores);
            isa.all_weights(task, tile, portion, [&*k_scales, &*v_scales], scores, &mut part);
            let acc = &mut part.acc.as_chunks_mut::<WIDTH>().0[heads.start * lines..];
            all_values(isa, task, tile, portion, packed_v, scores, acc);
        }
    }
}

/// Widens and rearranges the keys of a tile: for each two lines of keys, for each element, that of
/// the first sixteen keys and of the others. `out`: `[TILE / 32, padded_dim]`
#[inline(always)]
fn pack_keys<E: Element>(isa: Avx512, tile: &Tile<'_>, dim: usize, out: &mut [Pair]) {
    for line in 0..TILE / WIDTH {
        let out = &mut out[line / ABREAST * dim..][..dim];
        for (chunk, out) in out.chunks_exact_mut(WIDTH).enumerate() {
            let mut rows = [op!(_mm512_setzero_si512()); WIDTH];
            for (i, row) in rows.iter_mut().enumerate() {
                let (whole, rest) = E::chunks(tile.k(line * WIDTH + i));
                let wide = match whole.get(chunk) {
                    Some(whole) => E::load(isa, whole),
                    None => E::load_tail(isa, rest),
                };
                *row = op!(_mm512_castps_si512(wide));
            }
            op!(transpose(&mut rows));
            for (row, out) in rows.into_iter().zip(out) {
                isa.store(op!(_mm512_castsi512_ps(row)), &mut out[line % ABREAST]);
            }
        }
    }
}

/// Widens the values of a tile: line by line, those of all keys. `out`: `[padded_dim / 16, TILE]`
#[inline(always)]
fn pack_values<E: Element>(isa: Avx512, tile: &Tile<'_>, lines: usize, out: &mut [Line]) {
    for (from, to) in tile.seen {
        for key in from..to {
            let (whole, rest) = E::chunks(tile.v(key));
            for (line, out) in out[key..].iter_mut().step_by(TILE).take(lines).enumerate() {
                let wide = match whole.get(line) {
                    Some(whole) => E::load(isa, whole),
                    None => E::load_tail(isa, rest),
                };
                isa.store(wide, out);
            }
        }
    }
}

/// q·k of all heads of a portion with the lines of keys in which it sees any. `coded`: for every
/// eight heads, `[padded_dim, 8]`
#[inline(always)]
fn all_scores(
    isa: Avx512,
    keys: Keys,
    dim: usize,
    k: &[Pair],
    coded: &[[f32; EIGHT]],
    first_head: usize,
    scores: &mut [TileRow],
) {
    let at_once = ABREAST * WIDTH;
    for (first, k) in (0..TILE).step_by(at_once).zip(k.chunks_exact(dim)) {
        if first >= keys.1 || first + at_once <= keys.0 {
            continue;
        }
        let mut g = 0;
        while g < scores.len() {
            let head = first_head + g;
            let q = &coded[head / EIGHT * dim..][..dim];
            let scores = &mut scores[g..];
            g += match head % EIGHT {
                0 if scores.len() >= 8 => scores_of::<8>(isa, first, k, q, 0, scores),
                0 if scores.len() >= 4 => scores_of::<4>(isa, first, k, q, 0, scores),
                4 if scores.len() >= 4 => scores_of::<4>(isa, first, k, q, 4, scores),
                at => scores_of::<1>(isa, first, k, q, at, scores),
            };
        }
    }
}

/// The same, of `G` heads, the first of which is number `at` of eight, with the keys from `first`
/// on. Gives `G`.
#[inline(always)]
fn scores_of<const G: usize>(
    isa: Avx512,
    first: usize,
    k: &[Pair],
    q: &[[f32; EIGHT]],
    at: usize,
    scores: &mut [TileRow],
) -> usize {
    let zero = [[isa.splat(0.0); ABREAST]; G];
    let mut levels = [zero; LEVELS];
    let mut total = zero;
    for (n, lane) in LANES_IN_ORDER.into_iter().enumerate() {
        let mut sums = zero;
        for (k, q) in k.chunks_exact(WIDTH).zip(q.chunks_exact(WIDTH)) {
            let k = [isa.load(&k[lane][0]), isa.load(&k[lane][1])];
            for g in 0..G {
                let q = isa.splat(q[lane][at + g]);
                for j in 0..ABREAST {
                    sums[g][j] = isa.fma(q, k[j], sums[g][j]);
                }
            }
        }
        // As many halves are complete as the number ends in ones.
        let complete = n.trailing_ones() as usize;
        for half in &levels[..complete] {
            for g in 0..G {
                for j in 0..ABREAST {
                    sums[g][j] = op!(_mm512_add_ps(half[g][j], sums[g][j]));
                }
            }
        }
        match levels.get_mut(complete) {
            Some(level) => *level = sums,
            None => total = sums,
        }
    }
    for g in 0..G {
        let lines = &mut scores[g].as_chunks_mut::<WIDTH>().0[first / WIDTH..];
        for j in 0..ABREAST {
            isa.store(total[g][j], &mut lines[j]);
        }
    }
    G
}

/// Adds the weighted values of a tile to the accumulators of a portion, as `values.rs` does: a key
/// that a row does not see is passed over for it.
#[inline(always)]
fn all_values(
    isa: Avx512,
    task: &Task<'_>,
    tile: &Tile<'_>,
    portion: Portion,
    v: &[Line],
    weights: &[TileRow],
    acc: &mut [Line],
) {
    let lines = task.padded_dim / WIDTH;
    let (heads, per_row) = (task.group, task.group * lines);
    let [_, last] = tile.seen_by(task, portion.first + portion.rows - 1);
    let [_, first] = tile.seen_by(task, portion.first);
    let common = (last.0, first.1);
    let common = if last.0 < last.1 && common.0 < common.1 { common } else { (TILE, TILE) };
    for row in 0..portion.rows {
        let [sinks, (from, to)] = tile.seen_by(task, portion.first + row);
        let (weights, acc) = (&weights[row * heads..][..heads], &mut acc[row * per_row..]);
        add(isa, sinks, v, weights, lines, acc);
        add(isa, (from, to.min(common.0)), v, weights, lines, acc);
    }
    add(isa, common, v, weights, lines, acc);
    for row in 0..portion.rows {
        let [_, (from, to)] = tile.seen_by(task, portion.first + row);
        let (weights, acc) = (&weights[row * heads..][..heads], &mut acc[row * per_row..]);
        add(isa, (from.max(common.1), to), v, weights, lines, acc);
    }
}

/// Adds the weighted values of some keys to the accumulators of some heads.
#[inline(always)]
fn add(isa: Avx512, keys: Keys, v: &[Line], weights: &[TileRow], lines: usize, acc: &mut [Line]) {
    if keys.0 >= keys.1 {
        return;
    }
    let mut line = 0;
    while line < lines {
        let (v, acc) = (&v[line * TILE..], &mut acc[line..]);
        if lines - line >= 2 {
            lines_of::<2>(isa, keys, v, weights, lines, acc);
            line += 2;
        } else {
            lines_of::<1>(isa, keys, v, weights, lines, acc);
            line += 1;
        }
    }
}

/// The same, of the first `B` lines.
#[inline(always)]
fn lines_of<const B: usize>(
    isa: Avx512,
    keys: Keys,
    v: &[Line],
    weights: &[TileRow],
    lines: usize,
    acc: &mut [Line],
) {
    let mut g = 0;
    while g < weights.len() {
        let (weights, acc) = (&weights[g..], &mut acc[g * lines..]);
        g += match weights.len() {
            8.. => values_of::<8, B>(isa, keys, v, weights, lines, acc),
            4.. => values_of::<4, B>(isa, keys, v, weights, lines, acc),
            _ => values_of::<1, B>(isa, keys, v, weights, lines, acc),
        };
    }
}

/// The same, to those of the first `G` heads. Gives `G`.
#[inline(always)]
fn values_of<const G: usize, const B: usize>(
    isa: Avx512,
    keys: Keys,
    v: &[Line],
    weights: &[TileRow],
    lines: usize,
    acc: &mut [Line],
) -> usize {
    let weights = &weights[..G];
    let v = &v[..B * TILE];
    let mut sums = [[isa.splat(0.0); B]; G];
    for g in 0..G {
        for b in 0..B {
            sums[g][b] = isa.load(&acc[g * lines + b]);
        }
    }
    for key in keys.0..keys.1.min(TILE) {
        let mut values = [isa.splat(0.0); B];
        for b in 0..B {
            values[b] = isa.load(&v[b * TILE + key]);
        }
        for g in 0..G {
            let weight = isa.splat(weights[g][key]);
            for b in 0..B {
                sums[g][b] = isa.fma(weight, values[b], sums[g][b]);
            }
        }
    }
    for g in 0..G {
        for b in 0..B {
            isa.store(sums[g][b], &mut acc[g * lines + b]);
        }
    }
    G
}
