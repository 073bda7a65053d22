//! Weights as integers, and the weighted values of a tile: the second half of `vnni.rs`.

use std::arch::x86_64::*;

use super::lanes::{Line, WIDTH};
use super::tile::{Ahead, QUAD, TILE, Tile, TileRow, prefetch};
use super::vnni::{GROUP, Vnni, store_bytes};

/// The largest integer of a weight.
const W_MAX: f32 = 65535.0;

/// Turns weights, times the scales of their values, into integers. `weights`: `[heads, 2]` lines
/// of four keys' high bytes a lane, and low ones; `units`: what one unit stands for, `[heads]`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
#[target_feature(enable = "avx512vnni,avx512vbmi")]
#[inline]
pub(super) fn encode_weights(
    rows: &[TileRow],
    scales: Option<&TileRow>,
    weights: &mut [Line],
    units: &mut [f32],
) {
    let pairs = weights.as_chunks_mut::<2>().0.iter_mut();
    for ((row, [high, low]), unit) in rows.iter().zip(pairs).zip(units) {
        let mut w = [_mm512_setzero_ps(); TILE / WIDTH];
        let mut largest = _mm512_setzero_ps();
        for (i, line) in row.as_chunks::<WIDTH>().0.iter().enumerate() {
            // SAFETY: a `Line` is 64 bytes, and the load asks for no alignment.
            w[i] = unsafe { _mm512_loadu_ps(line.as_ptr()) };
            if let Some(scales) = scales {
                let scales = &scales[i * WIDTH..][..WIDTH];
                // SAFETY: sixteen f32 are 64 bytes, and the load asks for no alignment.
                w[i] = _mm512_mul_ps(w[i], unsafe { _mm512_loadu_ps(scales.as_ptr()) });
            }
            largest = _mm512_max_ps(largest, w[i]);
        }
        let largest = _mm512_reduce_max_ps(largest);
        // Weights so small that their reciprocal is infinite add nothing.
        let to_integers = if largest > f32::MIN_POSITIVE * W_MAX { W_MAX / largest } else { 0.0 };
        *unit = largest / W_MAX;
        for (i, w) in w.into_iter().enumerate() {
            let w = _mm512_cvtps_epi32(_mm512_mul_ps(w, _mm512_set1_ps(to_integers)));
            store_bytes(_mm512_srli_epi32::<8>(w), high, i * 4);
            store_bytes(w, low, i * 4);
        }
    }
}

/// For the 32 elements of a part and four keys `[2 keys, 32 elements]` in each of two vectors:
/// which bytes make 16 lanes of four keys. The second 16 elements' are 16 further.
static INTERLEAVE: [u8; 64] = {
    let mut at = [0; 64];
    let mut i = 0;
    while i < 64 {
        let (element, key) = (i / 4, i % 4);
        // Bit 6 chooses the second vector.
        #[expect(clippy::cast_possible_truncation, reason = "below 128")]
        let byte = (key * 32 + element) as u8;
        at[i] = byte;
        i += 1;
    }
    at
};

/// Adds the weighted values of one part of 32 elements to the accumulators of all heads.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
#[target_feature(enable = "avx512vnni,avx512vbmi")]
#[inline]
#[expect(clippy::too_many_arguments, reason = "the operands of one product")]
pub(super) fn all_values(
    isa: Vnni,
    tile: &Tile<'_>,
    ahead: &mut impl Ahead,
    part: usize,
    weights: &[Line],
    units: &[f32],
    lines: usize,
    acc: &mut [Line],
) {
    let heads = weights.len() / 2;
    let mut ahead = Some(ahead);
    let mut g = 0;
    while g < heads {
        let (weights, units) = (&weights[2 * g..], &units[g..]);
        let acc = &mut acc[g * lines..];
        match heads - g {
            1 => values_of::<1>(isa, tile, ahead.take(), part, weights, units, lines, acc),
            2 => values_of::<2>(isa, tile, ahead.take(), part, weights, units, lines, acc),
            3 => values_of::<3>(isa, tile, ahead.take(), part, weights, units, lines, acc),
            _ => values_of::<4>(isa, tile, ahead.take(), part, weights, units, lines, acc),
        }
        g += 4;
    }
}

/// The same, to those of the first `G` heads.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
#[target_feature(enable = "avx512vnni,avx512vbmi")]
#[inline]
#[expect(clippy::too_many_arguments, reason = "the operands of one product")]
fn values_of<const G: usize>(
    isa: Vnni,
    tile: &Tile<'_>,
    mut ahead: Option<&mut impl Ahead>,
    part: usize,
    weights: &[Line],
    units: &[f32],
    lines: usize,
    acc: &mut [Line],
) {
    // SAFETY: the table is 64 bytes, and the load asks for no alignment.
    let first = unsafe { _mm512_loadu_si512(INTERLEAVE.as_ptr().cast()) };
    let second = _mm512_add_epi8(first, _mm512_set1_epi8(16));
    let weights = &weights.as_chunks::<2>().0[..G];
    let mut high = [[_mm512_setzero_si512(); 2]; G];
    let mut low = high;
    for (from, to) in tile.quads() {
        for quad in from..to.min(WIDTH) {
            let key = quad * QUAD;
            if let Some(ahead) = &mut ahead
                && let Some(piece) = ahead.piece(isa.plain())
            {
                prefetch(isa.plain(), piece, QUAD * GROUP);
            }
            let ab = load_two(tile.v(key), tile.v(key + 1), part);
            let cd = load_two(tile.v(key + 2), tile.v(key + 3), part);
            let v =
                [_mm512_permutex2var_epi8(ab, first, cd), _mm512_permutex2var_epi8(ab, second, cd)];
            for g in 0..G {
                let [w_high, w_low] = &weights[g];
                let w_high = _mm512_set1_epi32(w_high[quad].to_bits().cast_signed());
                let w_low = _mm512_set1_epi32(w_low[quad].to_bits().cast_signed());
                for i in 0..2 {
                    high[g][i] = _mm512_dpbusd_epi32(high[g][i], w_high, v[i]);
                    low[g][i] = _mm512_dpbusd_epi32(low[g][i], w_low, v[i]);
                }
            }
        }
    }
    for g in 0..G {
        let unit = _mm512_set1_ps(units[g]);
        let acc = &mut acc[g * lines + 2 * part..][..2];
        for i in 0..2 {
            let sum = _mm512_add_epi32(_mm512_slli_epi32::<8>(high[g][i]), low[g][i]);
            let at = acc[i].as_mut_ptr();
            // SAFETY: a `Line` is 64 bytes, and the load asks for no alignment.
            let before = unsafe { _mm512_loadu_ps(at) };
            let after = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), unit, before);
            // SAFETY: a `Line` is 64 bytes, and the store asks for no alignment.
            unsafe { _mm512_storeu_ps(at, after) };
        }
    }
}

/// The 32 elements of a part of two vectors, one behind the other.
#[target_feature(enable = "avx2,avx512f,avx512dq")]
#[inline]
fn load_two(a: &[u8], b: &[u8], part: usize) -> __m512i {
    let a = &a[part * GROUP..][..GROUP];
    let b = &b[part * GROUP..][..GROUP];
    // SAFETY: 32 bytes, and the load asks for no alignment.
    let a = unsafe { _mm256_loadu_si256(a.as_ptr().cast()) };
    // SAFETY: 32 bytes, and the load asks for no alignment.
    let b = unsafe { _mm256_loadu_si256(b.as_ptr().cast()) };
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b)
}
