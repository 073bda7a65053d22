//! The f32 lanes of AVX2 with many query heads at once: the products of `scores.rs` and `values.rs`, in the
//! same order, with the vectors of a tile widened once for all of them.
//!
//! Keys lie in lanes, element by element, so that a score is one lane of a product and nothing is
//! summed across lanes. To be the same bits, element `16 c + j` of a vector still belongs to partial
//! sum `j` of sixteen, and these are added in the order of [`Isa::sum`].

#![expect(
    clippy::needless_range_loop,
    reason = "loops over constant bounds index register arrays; this is the form that unrolls"
)]

use std::arch::x86_64::*;

use super::fast::Steps;
use super::lanes::{Element, Isa, Line, WIDTH};
use super::portion::Portion;
use super::task::{Split, Task};
use super::tile::{Ahead, Keys, QUAD, TILE, Tile, TileRow};
use super::values::{Values, all_values};
use super::x86::{Avx2, memory_op, op};
use crate::config::Format;

/// Query heads to which a line of values is added side by side: twelve accumulators of eight lanes,
/// where there are sixteen registers.
const VALUES_ABREAST: usize = 6;

/// Query heads whose products with a line of keys are computed side by side: as many, two for each
/// of eight lanes.
const SCORES_ABREAST: usize = 3;

/// Keys whose values are widened side by side.
const KEYS_ABREAST: usize = 8;

/// The partial sums in the order in which they are added: each four lanes 4 apart, of these four
/// sums first the even ones.
const ORDER: [usize; 4] = [0, 2, 1, 3];

/// Sixteen lanes.
type Lanes = <Avx2 as Isa>::V;

/// Sixteen elements of sixteen keys: each line is one element of all of them.
type Block = [Line; WIDTH];

/// Whether a task's vectors are widened once for all of its query heads. Where widening takes longer,
/// that pays with fewer of them. (INT8 that `madd.rs` does not take: as bf16, not measured.)
pub(super) fn takes<E: Element>(task: &Task<'_>) -> bool {
    let many = match task.view.layout.format.element {
        Format::F32 | Format::F16 => 80,
        Format::Bf16 | Format::Int8 => 40,
    };
    !E::GROUPED && task.has_heads(many)
}

/// Computes one split of one KV head.
#[inline(always)]
pub(super) fn split_many<E: Element>(isa: Avx2, work: &mut Split<'_, '_>) {
    let task = work.task;
    let lines = task.padded_dim / WIDTH;
    let scores = &mut work.scores.as_chunks_mut::<TILE>().0[..task.heads()];
    let ([k_scales, v_scales], _) = work.row_scales.as_chunks_mut::<TILE>() else {
        return;
    };
    // The keys, and when they have been computed on, the values.
    let packed = &mut work.packed.as_chunks_mut::<WIDTH>().0[..TILE * lines];
    let q = work.q.as_chunks::<WIDTH>().0;
    work.parts.clear();
    let mut steps = Steps::new(task, work.start, work.end, work.goes_on);
    while steps.advance(task) {
        let tile = &steps.tile;
        let mut part = work.parts.of(0);
        tile.row_scales(task, k_scales, v_scales);
        pack_keys::<E>(isa, tile, lines, packed.as_chunks_mut().0);
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
            all_scores(isa, keys, packed.as_chunks().0, &q[heads.start * lines..], lines, scores);
            isa.all_weights(task, tile, portion, [k_scales, v_scales], scores, &mut part);
        }
        pack_values::<E>(isa, tile, packed);
        let acc = part.acc.as_chunks_mut::<WIDTH>().0;
        all_values(isa, Packed(packed), task, tile, (0, TILE), &mut ahead[0], scores, acc);
    }
}

/// Widens the keys of a tile, sixteen at a time, and exchanges rows and columns.
/// `out`: `[TILE / 16, lines, 16]`
#[inline(always)]
fn pack_keys<E: Element>(isa: Avx2, tile: &Tile<'_>, lines: usize, out: &mut [Block]) {
    let whole = tile.row_bytes / size_of::<E::Chunk>();
    for (line, out) in out.chunks_exact_mut(lines).enumerate() {
        let (out, tail) = out.split_at_mut(whole);
        whole_keys::<E>(isa, tile, line * WIDTH, out);
        for out in tail {
            for i in 0..WIDTH {
                let mut row = [0.0; WIDTH];
                let rest = E::chunks(tile.k(line * WIDTH + i)).1;
                isa.store(E::load_tail(isa, rest), &mut row);
                for (column, x) in out.iter_mut().zip(row) {
                    column[i] = x;
                }
            }
        }
    }
}

/// The whole lines of sixteen keys, from `first` on.
#[inline(always)]
fn whole_keys<E: Element>(isa: Avx2, tile: &Tile<'_>, first: usize, out: &mut [Block]) {
    for keys in [0, 8] {
        let mut rows: [&[E::Chunk]; 8] = [&[]; 8];
        for (i, row) in rows.iter_mut().enumerate() {
            *row = &E::chunks(tile.k(first + keys + i)).0[..out.len()];
        }
        for c in 0..out.len() {
            let (mut low, mut high) =
                ([op!(_mm256_setzero_ps()); 8], [op!(_mm256_setzero_ps()); 8]);
            for i in 0..8 {
                (low[i], high[i]) = E::load(isa, &rows[i][c]);
            }
            let halves = [isa.transpose_eight(low), isa.transpose_eight(high)];
            for (half, columns) in halves.into_iter().enumerate() {
                let out = &mut out[c][8 * half..8 * half + 8];
                for (column, out) in columns.into_iter().zip(out) {
                    memory_op!(_mm256_storeu_ps(out[keys..keys + 8].as_mut_ptr(), column));
                }
            }
        }
    }
}

/// Widens the values of a tile. `out`: `[lines, TILE]`
#[inline(always)]
fn pack_values<E: Element>(isa: Avx2, tile: &Tile<'_>, out: &mut [Line]) {
    let whole = tile.row_bytes / size_of::<E::Chunk>();
    // A few keys at a time, since what is written for one of them lies a whole tile apart.
    for first in (0..TILE).step_by(KEYS_ABREAST) {
        let mut rows: [&[E::Chunk]; KEYS_ABREAST] = [&[]; KEYS_ABREAST];
        let mut rests: [&[u8]; KEYS_ABREAST] = [&[]; KEYS_ABREAST];
        for i in 0..KEYS_ABREAST {
            (rows[i], rests[i]) = E::chunks(tile.v(first + i));
            rows[i] = &rows[i][..whole];
        }
        let (out, tail) = out.split_at_mut(whole * TILE);
        for (c, out) in out.chunks_exact_mut(TILE).enumerate() {
            let out = &mut out[first..first + KEYS_ABREAST];
            for i in 0..KEYS_ABREAST {
                isa.store(E::load(isa, &rows[i][c]), &mut out[i]);
            }
        }
        if !tail.is_empty() {
            for i in 0..KEYS_ABREAST {
                isa.store(E::load_tail(isa, rests[i]), &mut tail[first + i]);
            }
        }
    }
}

/// q·k of some heads with the lines of keys in which there are any of `keys`.
#[inline(always)]
fn all_scores(
    isa: Avx2,
    keys: Keys,
    k: &[Block],
    q: &[Line],
    lines: usize,
    scores: &mut [TileRow],
) {
    for (line, k) in k.chunks_exact(lines).enumerate() {
        if line * WIDTH >= keys.1 || (line + 1) * WIDTH <= keys.0 {
            continue;
        }
        let heads = scores.len();
        let mut g = 0;
        while g < heads {
            let (q, scores) = (&q[g * lines..], &mut scores[g..]);
            g += match heads - g {
                SCORES_ABREAST.. => scores_of::<SCORES_ABREAST>(isa, line, k, q, lines, scores),
                2 => scores_of::<2>(isa, line, k, q, lines, scores),
                _ => scores_of::<1>(isa, line, k, q, lines, scores),
            };
        }
    }
}

/// q·k of `G` heads with one line of keys. Gives `G`.
#[inline(always)]
fn scores_of<const G: usize>(
    isa: Avx2,
    line: usize,
    k: &[Block],
    q: &[Line],
    lines: usize,
    scores: &mut [TileRow],
) -> usize {
    let mut heads: [&[Line]; G] = [&[]; G];
    for g in 0..G {
        heads[g] = &q[g * lines..][..lines];
    }
    let mut fours = [[isa.splat(0.0); G]; 2];
    for (i, first) in ORDER.into_iter().enumerate() {
        let mut four = [isa.splat(0.0); G];
        for half in 0..2 {
            let eight = eight_apart(isa, first + 4 * half, k, &heads, lines);
            for g in 0..G {
                four[g] = if half == 0 { eight[g] } else { isa.plus(four[g], eight[g]) };
            }
        }
        let sums = &mut fours[i / 2];
        for g in 0..G {
            sums[g] = if i % 2 == 0 { four[g] } else { isa.plus(sums[g], four[g]) };
        }
    }
    for g in 0..G {
        let sum = isa.plus(fours[0][g], fours[1][g]);
        if let Some(to) = scores[g].as_chunks_mut::<WIDTH>().0.get_mut(line) {
            isa.store(sum, to);
        }
    }
    G
}

/// Partial sums `j` and `j + 8` of sixteen, added up, of `G` heads and one line of keys.
#[inline(always)]
fn eight_apart<const G: usize>(
    isa: Avx2,
    j: usize,
    k: &[Block],
    heads: &[&[Line]; G],
    lines: usize,
) -> [Lanes; G] {
    let k = &k[..lines];
    let mut heads = *heads;
    for g in 0..G {
        heads[g] = &heads[g][..lines];
    }
    let mut lower = [isa.splat(0.0); G];
    let mut upper = lower;
    for c in 0..lines {
        let column = isa.load(&k[c][j % 8]);
        for g in 0..G {
            lower[g] = isa.fma(isa.splat(heads[g][c][j % 8]), column, lower[g]);
        }
        let column = isa.load(&k[c][j % 8 + 8]);
        for g in 0..G {
            upper[g] = isa.fma(isa.splat(heads[g][c][j % 8 + 8]), column, upper[g]);
        }
    }
    for g in 0..G {
        lower[g] = isa.plus(lower[g], upper[g]);
    }
    lower
}

/// The values of a tile as [`pack_values`] has left them.
#[derive(Clone, Copy, Debug)]
struct Packed<'a>(&'a [Line]);

impl Values<Avx2> for Packed<'_> {
    #[inline(always)]
    fn add<A: Ahead>(
        self,
        isa: Avx2,
        _tile: &Tile<'_>,
        _ahead: Option<&mut A>,
        keys: Keys,
        heads: usize,
        weights: &[TileRow],
        lines: usize,
        acc: &mut [Line],
    ) {
        if keys.0 >= keys.1 {
            return;
        }
        let keys = (keys.0, keys.1.min(TILE));
        for (line, v) in self.0.chunks_exact(TILE).enumerate() {
            let v = &v[keys.0..keys.1];
            let mut g = 0;
            while g < heads {
                let (weights, acc) = (&weights[g..], &mut acc[g * lines + line..]);
                g += match heads - g {
                    VALUES_ABREAST.. => {
                        values_of::<VALUES_ABREAST>(isa, keys.0, v, weights, lines, acc)
                    }
                    4.. => values_of::<4>(isa, keys.0, v, weights, lines, acc),
                    2.. => values_of::<2>(isa, keys.0, v, weights, lines, acc),
                    _ => values_of::<1>(isa, keys.0, v, weights, lines, acc),
                };
            }
        }
    }
}

/// Adds one line of the weighted values of some keys, from `first` on, to the accumulators of `G`
/// heads, which lie `lines` lines apart. Gives `G`.
#[inline(always)]
fn values_of<const G: usize>(
    isa: Avx2,
    first: usize,
    v: &[Line],
    weights: &[TileRow],
    lines: usize,
    acc: &mut [Line],
) -> usize {
    let mut heads: [&[f32]; G] = [&[]; G];
    let mut sums = [isa.splat(0.0); G];
    for g in 0..G {
        heads[g] = &weights[g][first..][..v.len()];
        sums[g] = isa.load(&acc[g * lines]);
    }
    for key in 0..v.len() {
        let v = isa.load(&v[key]);
        for g in 0..G {
            sums[g] = isa.fma(isa.splat(heads[g][key]), v, sums[g]);
        }
    }
    for g in 0..G {
        isa.store(sums[g], &mut acc[g * lines]);
    }
    G
}
