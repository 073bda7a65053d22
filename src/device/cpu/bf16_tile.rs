//! bfloat16 with many query heads at once: the products of `bf16.rs`, in the same order, with the
//! keys of a tile in lanes.

use std::arch::x86_64::*;

use super::bf16::{Bf16, PAIRS, bits};
use super::fast::{Products, Steps};
use super::lanes::{Isa, Line, WIDTH};
use super::packed::{ABREAST, Pair, pack_keys};
use super::portion::Portion;
use super::task::{Split, Task};
use super::tile::{Ahead, Keys, QUAD, TILE, Tile, TileRow};
use super::x86::{memory_op, op};

/// Query heads whose queries lie side by side.
const EIGHT: usize = 8;

/// Four sums make a score.
const SUMS: usize = 4;

/// Computes one split of one KV head.
#[inline(always)]
pub(super) fn split_many<const TERMS: usize>(isa: Bf16<TERMS>, work: &mut Split<'_, '_>) {
    let task = work.task;
    let lines = task.padded_dim / WIDTH;
    let words = task.padded_dim / 2;
    let scores = work.scores.as_chunks_mut::<TILE>().0;
    let ([k_scales, v_scales], _) = work.row_scales.as_chunks_mut::<TILE>() else {
        return;
    };
    let weights = work.weights.as_chunks_mut::<WIDTH>().0;
    let (packed_k, rest) = work.packed.as_chunks_mut::<WIDTH>().0.split_at_mut(TILE * lines / 2);
    let packed_k = packed_k.as_chunks_mut::<ABREAST>().0;
    let packed_v = rest[..TILE * lines / 2].as_chunks_mut::<ABREAST>().0;
    let per_eight = words * TERMS;
    encode_queries(isa, task, work.q, work.coded.as_chunks_mut().0);
    let coded = work.coded.as_chunks::<EIGHT>().0;
    work.parts.clear();
    let mut steps = Steps::new(task, work.start, work.end, work.goes_on);
    while steps.advance(task) {
        let tile = &steps.tile;
        let mut part = work.parts.of(0);
        tile.row_scales(task, k_scales, v_scales);
        // SAFETY: the proof includes that of AVX-512 F, BW, DQ and VL.
        unsafe { pack_keys(tile, 0, packed_k) };
        let finite = pack_values(isa, tile, bits(tile.seen), packed_v);
        let mut ahead = steps.next_ahead(isa.isa());
        let pieces = TILE / QUAD / Portion::of(task).count().max(1) + 1;
        for portion in Portion::of(task) {
            for ahead in &mut ahead {
                for _ in 0..pieces {
                    ahead.piece(isa.isa());
                }
            }
            let heads = portion.heads(task);
            let keys = portion.keys(task, tile);
            let scores = &mut scores[heads.clone()];
            // Where a portion does not begin with a whole eight, its first heads go one by one.
            all_scores(isa, keys, words, packed_k, coded, per_eight, heads.start, scores);
            let scales = [&*k_scales, &*v_scales];
            isa.isa().all_weights(task, tile, portion, scales, scores, &mut part);
            isa.encode_weights(scores, weights);
            let acc = &mut part.acc.as_chunks_mut::<WIDTH>().0[heads.start * lines..];
            let last = portion.first + portion.rows - 1;
            if finite || tile.all_seen_by(task, portion.first) && tile.all_seen_by(task, last) {
                let weights = &weights[..2 * TERMS * heads.len()];
                all_values(isa, keys, packed_v, weights, lines, acc);
                continue;
            }
            // 0 times what is stored in keys that a row does not see need not be 0.
            for row in 0..portion.rows {
                let seen = bits(tile.seen_by(task, portion.first + row));
                pack_values(isa, tile, seen, packed_v);
                let weights = &weights[2 * TERMS * row * task.group..][..2 * TERMS * task.group];
                let acc = &mut acc[row * task.group * lines..];
                all_values(isa, keys, packed_v, weights, lines, acc);
            }
            pack_values(isa, tile, bits(tile.seen), packed_v);
        }
    }
    isa.finish(work.parts.of(0).acc.as_chunks_mut().0);
}

/// Turns queries into terms. `coded`: for every eight heads, for every two elements, term by term,
/// those of all eight
#[inline(always)]
fn encode_queries<const TERMS: usize>(
    isa: Bf16<TERMS>,
    task: &Task<'_>,
    q: &[f32],
    coded: &mut [[f32; EIGHT]],
) {
    let per_eight = task.padded_dim / 2 * TERMS;
    coded[..task.heads().div_ceil(EIGHT) * per_eight].fill([0.0; EIGHT]);
    for (head, q) in q.chunks_exact(task.padded_dim).take(task.heads()).enumerate() {
        let coded = &mut coded[head / EIGHT * per_eight..][..per_eight];
        let some = coded.chunks_exact_mut(EIGHT * TERMS);
        for (q, coded) in q.as_chunks::<WIDTH>().0.iter().zip(some) {
            for (t, term) in isa.terms(isa.isa().load(q)).into_iter().enumerate() {
                let mut words = [0.0_f32; WIDTH / 2];
                // SAFETY: eight f32 are 32 bytes, and the store asks for no alignment.
                unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast(), term) };
                for (i, word) in words.into_iter().enumerate() {
                    coded[i * TERMS + t][head % EIGHT] = word;
                }
            }
        }
    }
}

/// q·k of all heads of a portion with the lines of keys in which it sees any.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the operands of one product")]
fn all_scores<const TERMS: usize>(
    isa: Bf16<TERMS>,
    keys: Keys,
    words: usize,
    k: &[Pair],
    coded: &[[f32; EIGHT]],
    per_eight: usize,
    first_head: usize,
    scores: &mut [TileRow],
) {
    let at_once = ABREAST * WIDTH;
    for (first, k) in (0..TILE).step_by(at_once).zip(k.chunks_exact(words)) {
        if first >= keys.1 || first + at_once <= keys.0 {
            continue;
        }
        let mut g = 0;
        while g < scores.len() {
            let head = first_head + g;
            let coded = &coded[head / EIGHT * per_eight..][..per_eight];
            let scores = &mut scores[g..];
            let left = scores.len();
            // Sixteen sums side by side.
            g += match (TERMS, head % EIGHT) {
                (1, 0) if left >= 8 => scores_of::<TERMS, 8>(isa, first, k, coded, 0, scores),
                (_, 0) if left >= 4 => scores_of::<TERMS, 4>(isa, first, k, coded, 0, scores),
                (_, 4) if left >= 4 => scores_of::<TERMS, 4>(isa, first, k, coded, 4, scores),
                (_, at) => scores_of::<TERMS, 1>(isa, first, k, coded, at, scores),
            };
        }
    }
}

/// The same, of `G` heads, the first of which is number `at` of eight, with the keys from `first`
/// on. Gives `G`.
#[inline(always)]
fn scores_of<const TERMS: usize, const G: usize>(
    isa: Bf16<TERMS>,
    first: usize,
    k: &[Pair],
    coded: &[[f32; EIGHT]],
    at: usize,
    scores: &mut [TileRow],
) -> usize {
    let lanes = isa.isa();
    let zero = lanes.splat(0.0);
    let mut halves = [[[zero; ABREAST]; G]; 2];
    for (half, second) in [(0, false), (0, true), (1, false), (1, true)] {
        let sum = half + if second { SUMS / 2 } else { 0 };
        let mut sums = [[[zero; ABREAST]; G]; TERMS];
        let steps = k.chunks_exact(SUMS).zip(coded.chunks_exact(SUMS * TERMS));
        for (k, q) in steps {
            let k = [line(&k[sum][0]), line(&k[sum][1])];
            for t in 0..TERMS {
                let q = &q[sum * TERMS + t];
                for g in 0..G {
                    let q = splat(q[at + g]);
                    for j in 0..ABREAST {
                        sums[t][g][j] = isa.dot(k[j], q, sums[t][g][j]);
                    }
                }
            }
        }
        for g in 0..G {
            for j in 0..ABREAST {
                let mut all = sums[0][g][j];
                for more in &sums[1..] {
                    all = add(all, more[g][j]);
                }
                let half = &mut halves[half][g][j];
                *half = if second { add(*half, all) } else { all };
            }
        }
    }
    for g in 0..G {
        for j in 0..ABREAST {
            let sum = add(halves[0][g][j], halves[1][g][j]);
            let to = &mut scores[g][first + j * WIDTH..][..WIDTH];
            // SAFETY: sixteen f32 are 64 bytes, and the store asks for no alignment.
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), sum) };
        }
    }
    G
}

/// `a + b`
#[inline(always)]
fn add(a: __m512, b: __m512) -> __m512 {
    // SAFETY: called with the proof that the CPU has AVX-512.
    unsafe { _mm512_add_ps(a, b) }
}

/// A line as it is.
#[inline(always)]
fn line(line: &Line) -> __m512i {
    // SAFETY: a `Line` is 64 bytes, and the load asks for no alignment; called with the proof that
    // the CPU has AVX-512.
    unsafe { _mm512_loadu_si512(line.as_ptr().cast()) }
}

/// Two neighbours in every lane.
#[inline(always)]
fn splat(two: f32) -> __m512i {
    // SAFETY: called with the proof that the CPU has AVX-512.
    unsafe { _mm512_set1_epi32(two.to_bits().cast_signed()) }
}

/// Rearranges the values of a tile: for every 32 elements, for every two keys, these elements of
/// both, pair by pair. Values of keys whose bit is not set are 0. Tells whether all others are
/// finite. `out`: `[head_dim / 32, TILE / 2]`
#[inline(always)]
fn pack_values<const TERMS: usize>(
    isa: Bf16<TERMS>,
    tile: &Tile<'_>,
    seen: u64,
    out: &mut [Pair],
) -> bool {
    let order = isa.order();
    let exponent = op!(_mm512_set1_epi16(0x7F80));
    let mut special = 0_u32;
    for (part, out) in out.chunks_exact_mut(PAIRS).enumerate() {
        for (pair, out) in out.iter_mut().enumerate() {
            let v = isa.two_keys(tile, 2 * pair, part, seen, order);
            for (v, out) in v.into_iter().zip(out) {
                let exponents = op!(_mm512_and_si512(v, exponent));
                special |= op!(_mm512_cmpeq_epi16_mask(exponents, exponent));
                memory_op!(_mm512_storeu_si512(out.as_mut_ptr().cast(), v));
            }
        }
    }
    special == 0
}

/// Adds the weighted values of a tile to the accumulators of some heads.
#[inline(always)]
fn all_values<const TERMS: usize>(
    isa: Bf16<TERMS>,
    keys: Keys,
    v: &[Pair],
    weights: &[Line],
    lines: usize,
    acc: &mut [Line],
) {
    let pairs = (keys.0 / 2, keys.1.div_ceil(2).min(PAIRS));
    let heads = weights.len() / (2 * TERMS);
    let weights = weights.as_flattened().as_chunks::<PAIRS>().0;
    for (part, v) in v.chunks_exact(PAIRS).enumerate() {
        let mut g = 0;
        while g < heads {
            let weights = &weights[g * TERMS..];
            let acc = &mut acc[g * lines + 2 * part..];
            g += match heads - g {
                8.. => values_of::<TERMS, 8>(isa, pairs, v, weights, lines, acc),
                4.. => values_of::<TERMS, 4>(isa, pairs, v, weights, lines, acc),
                _ => values_of::<TERMS, 1>(isa, pairs, v, weights, lines, acc),
            };
        }
    }
}

/// The same, of one part, to those of the first `G` heads. Gives `G`.
#[inline(always)]
fn values_of<const TERMS: usize, const G: usize>(
    isa: Bf16<TERMS>,
    pairs: (usize, usize),
    v: &[Pair],
    weights: &[[f32; PAIRS]],
    lines: usize,
    acc: &mut [Line],
) -> usize {
    let lanes = isa.isa();
    let weights = &weights[..G * TERMS];
    let v = &v[..PAIRS];
    let mut sums = [[lanes.splat(0.0); ABREAST]; G];
    for g in 0..G {
        for i in 0..ABREAST {
            sums[g][i] = lanes.load(&acc[g * lines + i]);
        }
    }
    for pair in pairs.0..pairs.1.min(PAIRS) {
        let v = [line(&v[pair][0]), line(&v[pair][1])];
        for t in 0..TERMS {
            for g in 0..G {
                let w = splat(weights[g * TERMS + t][pair]);
                for i in 0..ABREAST {
                    sums[g][i] = isa.dot(v[i], w, sums[g][i]);
                }
            }
        }
    }
    for g in 0..G {
        for i in 0..ABREAST {
            lanes.store(sums[g][i], &mut acc[g * lines + i]);
        }
    }
    G
}
