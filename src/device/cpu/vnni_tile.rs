//! INT8 with many query heads at once: the products of `vnni.rs`, with the keys of a tile in
//! lanes. The integers and their sums are the same, and so is what is done to them in f32, so the
//! bits are, too; only the arrangement is another.

use std::arch::x86_64::*;

use super::fast::Steps;
use super::lanes::{Isa, Line, WIDTH};
use super::packed::{ABREAST, Pair, pack_keys};
use super::portion::Portion;
use super::task::{Split, Task};
use super::tile::{Ahead, Keys, QUAD, TILE, Tile, TileRow};
use super::vnni::{GROUP, GroupScales, MAX_DIM, Vnni, query_scale, read_group_scales};
use super::vnni_values::{encode_weights, four_keys, interleave};

/// Quads of a tile.
const QUADS: usize = TILE / QUAD;

/// How a query lies in memory: for every four elements their high bytes and their low ones, then
/// 128 times the sum of each group's integers, then what one unit stands for.
#[derive(Clone, Copy)]
struct Coded {
    words: usize,
    groups: usize,
}

impl Coded {
    fn new(task: &Task<'_>, grouped: bool) -> Self {
        let groups = if grouped { task.padded_dim / GROUP } else { 1 };
        Self { words: task.padded_dim / 4, groups }
    }

    /// Numbers of one head; four of them are no more than a block of `vnni.rs` has.
    fn len(self) -> usize {
        2 * self.words + self.groups + 1
    }
}

/// Computes one split of one KV head.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
#[target_feature(enable = "avx512vnni,avx512vbmi")]
pub(super) fn split_many<const GROUPED: bool>(isa: Vnni, work: &mut Split<'_, '_>) {
    let task = work.task;
    let dim = task.padded_dim;
    let lines = dim / WIDTH;
    let form = Coded::new(task, GROUPED);
    let coded = &mut work.coded[..task.heads() * form.len()];
    let scores = work.scores.as_chunks_mut::<TILE>().0;
    let ([k_scales, v_scales], _) = work.row_scales.as_chunks_mut::<TILE>() else {
        return;
    };
    let (weights, units) = work.weights.as_chunks_mut::<WIDTH>().0.split_at_mut(2 * task.heads());
    let units = units.as_flattened_mut();
    let (packed_k, rest) = work.packed.as_chunks_mut::<WIDTH>().0.split_at_mut(TILE * lines / 4);
    let packed_k = packed_k.as_chunks_mut::<ABREAST>().0;
    let packed_v = rest[..TILE * lines / 4].as_chunks_mut::<ABREAST>().0;
    let q = work.q.as_chunks::<WIDTH>().0.chunks_exact(lines);
    for (q, coded) in q.zip(coded.chunks_exact_mut(form.len())) {
        encode_query::<GROUPED>(form, q, coded);
    }
    let mut k_groups: GroupScales = [[1.0; TILE]; MAX_DIM / GROUP];
    let mut v_groups = k_groups;
    work.parts.clear();
    let mut steps = Steps::new(task, work.start, work.end, work.goes_on);
    while steps.advance(task) {
        let tile = &steps.tile;
        let mut part = work.parts.of(0);
        tile.row_scales(task, k_scales, v_scales);
        if GROUPED {
            read_group_scales(tile, false, &mut k_groups[..form.groups]);
            read_group_scales(tile, true, &mut v_groups[..form.groups]);
        }
        // What is added to a stored byte is what `vnni.rs` adds.
        pack_keys(tile, 0x8080_8080_u32.cast_signed(), packed_k);
        pack_values(tile, packed_v);
        let mut ahead = steps.next_ahead(isa.plain());
        let pieces = TILE / QUAD / Portion::of(task).count().max(1) + 1;
        for portion in Portion::of(task) {
            for ahead in &mut ahead {
                for _ in 0..pieces {
                    ahead.piece(isa.plain());
                }
            }
            let heads = portion.heads(task);
            let keys = portion.keys(task, tile);
            let scores = &mut scores[heads.clone()];
            let coded = &coded[heads.start * form.len()..heads.end * form.len()];
            all_scores::<GROUPED>(form, keys, packed_k, coded, &k_groups, scores);
            isa.plain().all_weights(task, tile, portion, [k_scales, v_scales], scores, &mut part);
            let acc = &mut part.acc.as_chunks_mut::<WIDTH>().0[heads.start * lines..];
            for (i, v) in packed_v.chunks_exact(QUADS).enumerate() {
                if GROUPED || i == 0 {
                    let scales = if GROUPED { Some(&v_groups[i]) } else { None };
                    encode_weights(isa, scores, scales, weights, &mut units[..heads.len()]);
                }
                let weights = &weights[..2 * heads.len()];
                all_values(keys, v, i, weights, units, lines, acc);
            }
        }
    }
}

/// Turns a query into integers, as `vnni.rs` does.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
fn encode_query<const GROUPED: bool>(form: Coded, q: &[Line], coded: &mut [f32]) {
    let (words, rest) = coded.split_at_mut(2 * form.words);
    let (sums, unit) = rest.split_at_mut(form.groups);
    let (to_integers, one) = query_scale(q);
    unit[0] = one;
    let mut all = [0_i32; MAX_DIM / GROUP];
    for (i, (q, words)) in q.iter().zip(words.as_chunks_mut::<8>().0).enumerate() {
        // SAFETY: a `Line` is 64 bytes, and the load asks for no alignment.
        let q = unsafe { _mm512_loadu_ps(q.as_ptr()) };
        let q = _mm512_cvtps_epi32(_mm512_mul_ps(q, _mm512_set1_ps(to_integers)));
        let high = _mm512_srai_epi32::<8>(_mm512_add_epi32(q, _mm512_set1_epi32(128)));
        let low = _mm512_sub_epi32(q, _mm512_slli_epi32::<8>(high));
        let (high, low) = (_mm512_cvtepi32_epi8(high), _mm512_cvtepi32_epi8(low));
        let halves = [_mm_unpacklo_epi32(high, low), _mm_unpackhi_epi32(high, low)];
        for (half, words) in halves.into_iter().zip(words.as_chunks_mut::<4>().0) {
            // SAFETY: four f32 are 16 bytes, and the store asks for no alignment.
            unsafe { _mm_storeu_si128(words.as_mut_ptr().cast(), half) };
        }
        all[if GROUPED { i * WIDTH / GROUP } else { 0 }] += 128 * _mm512_reduce_add_epi32(q);
    }
    for (sum, all) in sums.iter_mut().zip(all) {
        *sum = f32::from_bits(all.cast_unsigned());
    }
}

/// q·k of all heads of a portion with the lines of keys in which it sees any.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
#[target_feature(enable = "avx512vnni,avx512vbmi")]
#[inline]
fn all_scores<const GROUPED: bool>(
    form: Coded,
    keys: Keys,
    k: &[Pair],
    coded: &[f32],
    scales: &GroupScales,
    scores: &mut [TileRow],
) {
    let at_once = ABREAST * WIDTH;
    for (first, k) in (0..TILE).step_by(at_once).zip(k.chunks_exact(form.words)) {
        if first >= keys.1 || first + at_once <= keys.0 {
            continue;
        }
        let mut g = 0;
        while g < scores.len() {
            let (coded, scores) = (&coded[g * form.len()..], &mut scores[g..]);
            match scores.len() {
                1 => scores_of::<GROUPED, 1>(form, first, k, coded, scales, scores),
                2 => scores_of::<GROUPED, 2>(form, first, k, coded, scales, scores),
                3 => scores_of::<GROUPED, 3>(form, first, k, coded, scales, scores),
                _ => scores_of::<GROUPED, 4>(form, first, k, coded, scales, scores),
            }
            g += 4;
        }
    }
}

/// The same, of the first `G` heads with the keys from `first` on.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
#[target_feature(enable = "avx512vnni,avx512vbmi")]
#[inline]
fn scores_of<const GROUPED: bool, const G: usize>(
    form: Coded,
    first: usize,
    k: &[Pair],
    coded: &[f32],
    scales: &GroupScales,
    scores: &mut [TileRow],
) {
    let per_group = form.words / form.groups;
    let mut total = [[_mm512_setzero_ps(); ABREAST]; G];
    for group in 0..form.groups {
        let k = &k[group * per_group..][..per_group];
        let mut q: [&[[f32; 2]]; G] = [&[]; G];
        for g in 0..G {
            let words = &coded[g * form.len()..][2 * group * per_group..];
            q[g] = &words.as_chunks::<2>().0[..per_group];
        }
        let mut high = [[_mm512_setzero_si512(); ABREAST]; G];
        let mut low = high;
        for i in 0..per_group {
            let k = [load(&k[i][0]), load(&k[i][1])];
            for g in 0..G {
                let q_high = _mm512_set1_epi32(q[g][i][0].to_bits().cast_signed());
                let q_low = _mm512_set1_epi32(q[g][i][1].to_bits().cast_signed());
                for j in 0..ABREAST {
                    high[g][j] = _mm512_dpbusd_epi32(high[g][j], k[j], q_high);
                    low[g][j] = _mm512_dpbusd_epi32(low[g][j], k[j], q_low);
                }
            }
        }
        for g in 0..G {
            let sum = coded[g * form.len() + 2 * form.words + group].to_bits().cast_signed();
            for j in 0..ABREAST {
                let products = _mm512_add_epi32(_mm512_slli_epi32::<8>(high[g][j]), low[g][j]);
                let products = _mm512_sub_epi32(products, _mm512_set1_epi32(sum));
                let products = _mm512_cvtepi32_ps(products);
                if GROUPED {
                    let scales = &scales[group][first + j * WIDTH..][..WIDTH];
                    // SAFETY: sixteen f32 are 64 bytes, and the load asks for no alignment.
                    let scales = unsafe { _mm512_loadu_ps(scales.as_ptr()) };
                    total[g][j] = _mm512_fmadd_ps(products, scales, total[g][j]);
                } else {
                    total[g][j] = products;
                }
            }
        }
    }
    for g in 0..G {
        let unit = _mm512_set1_ps(coded[(g + 1) * form.len() - 1]);
        for j in 0..ABREAST {
            let to = &mut scores[g][first + j * WIDTH..][..WIDTH];
            let total = _mm512_mul_ps(total[g][j], unit);
            // SAFETY: sixteen f32 are 64 bytes, and the store asks for no alignment.
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), total) };
        }
    }
}

/// A line as integers.
#[target_feature(enable = "avx512f")]
#[inline]
fn load(line: &Line) -> __m512i {
    // SAFETY: a `Line` is 64 bytes, and the load asks for no alignment.
    unsafe { _mm512_loadu_si512(line.as_ptr().cast()) }
}

/// Rearranges the values of a tile: for every 32 elements, for every four keys, these elements'
/// bytes of the four, element by element. `out`: `[head_dim / 32, TILE / 4]`
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
#[target_feature(enable = "avx512vnni,avx512vbmi")]
#[inline]
fn pack_values(tile: &Tile<'_>, out: &mut [Pair]) {
    let order = interleave();
    for (part, out) in out.chunks_exact_mut(QUADS).enumerate() {
        for (from, to) in tile.quads() {
            for quad in from..to {
                let v = four_keys(tile, quad * QUAD, part, order);
                for (v, out) in v.into_iter().zip(&mut out[quad]) {
                    // SAFETY: a `Line` is 64 bytes, and the store asks for no alignment.
                    unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), v) };
                }
            }
        }
    }
}

/// Adds the weighted values of one part of 32 elements to the accumulators of a portion's heads.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
#[target_feature(enable = "avx512vnni,avx512vbmi")]
#[inline]
fn all_values(
    keys: Keys,
    v: &[Pair],
    part: usize,
    weights: &[Line],
    units: &[f32],
    lines: usize,
    acc: &mut [Line],
) {
    let quads = (keys.0 / QUAD, keys.1.div_ceil(QUAD).min(QUADS));
    let heads = weights.len() / 2;
    let mut g = 0;
    while g < heads {
        let (weights, units) = (&weights[2 * g..], &units[g..]);
        let acc = &mut acc[g * lines + 2 * part..];
        match heads - g {
            1 => values_of::<1>(quads, v, weights, units, lines, acc),
            2 => values_of::<2>(quads, v, weights, units, lines, acc),
            3 => values_of::<3>(quads, v, weights, units, lines, acc),
            _ => values_of::<4>(quads, v, weights, units, lines, acc),
        }
        g += 4;
    }
}

/// The same, to those of the first `G` heads.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
#[target_feature(enable = "avx512vnni,avx512vbmi")]
#[inline]
fn values_of<const G: usize>(
    quads: (usize, usize),
    v: &[Pair],
    weights: &[Line],
    units: &[f32],
    lines: usize,
    acc: &mut [Line],
) {
    let weights = &weights.as_chunks::<2>().0[..G];
    let v = &v[..QUADS];
    let mut high = [[_mm512_setzero_si512(); ABREAST]; G];
    let mut low = high;
    for quad in quads.0..quads.1.min(QUADS) {
        let v = [load(&v[quad][0]), load(&v[quad][1])];
        for g in 0..G {
            let [w_high, w_low] = &weights[g];
            let w_high = _mm512_set1_epi32(w_high[quad].to_bits().cast_signed());
            let w_low = _mm512_set1_epi32(w_low[quad].to_bits().cast_signed());
            for i in 0..ABREAST {
                high[g][i] = _mm512_dpbusd_epi32(high[g][i], w_high, v[i]);
                low[g][i] = _mm512_dpbusd_epi32(low[g][i], w_low, v[i]);
            }
        }
    }
    for g in 0..G {
        let unit = _mm512_set1_ps(units[g]);
        for (i, acc) in acc[g * lines..][..ABREAST].iter_mut().enumerate() {
            let sum = _mm512_add_epi32(_mm512_slli_epi32::<8>(high[g][i]), low[g][i]);
            let at = acc.as_mut_ptr();
            // SAFETY: a `Line` is 64 bytes, and the load asks for no alignment.
            let before = unsafe { _mm512_loadu_ps(at) };
            let after = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), unit, before);
            // SAFETY: a `Line` is 64 bytes, and the store asks for no alignment.
            unsafe { _mm512_storeu_ps(at, after) };
        }
    }
}
