//! Weights as integers, and the weighted values of a tile: the second half of `vnni.rs`.

use std::arch::x86_64::*;

use super::lanes::{Line, WIDTH};
use super::tile::{Ahead, QUAD, TILE, Tile, TileRow, prefetch};
use super::vnni::{GROUP, Vnni};

/// The largest integer of a weight.
const W_MAX: f32 = 65535.0;

/// Turns weights, times the scales of their values, into integers. `weights`: `[heads, 2]` lines
/// of four keys' high bytes a lane, and low ones; `units`: what one unit stands for, `[heads]`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
#[target_feature(enable = "avx512vnni,avx512vbmi")]
#[inline]
pub(super) fn encode_weights(
    isa: Vnni,
    rows: &[TileRow],
    scales: Option<&TileRow>,
    weights: &mut [Line],
    units: &mut [f32],
) {
    // SAFETY: the table is 64 bytes, and the load asks for no alignment.
    let order = unsafe { _mm512_loadu_si512(TWO_BYTES.as_ptr().cast()) };
    let pairs = weights.as_chunks_mut::<2>().0;
    for ((rows, pairs), units) in rows.chunks(4).zip(pairs.chunks_mut(4)).zip(units.chunks_mut(4)) {
        let mut w = [[_mm512_setzero_ps(); TILE / WIDTH]; 4];
        let mut largest = [_mm512_setzero_ps(); 4];
        let mut broken = [0; 4];
        let heads = w.iter_mut().zip(rows).zip(largest.iter_mut().zip(&mut broken));
        for ((w, row), (largest, broken)) in heads {
            for (i, line) in row.as_chunks::<WIDTH>().0.iter().enumerate() {
                // SAFETY: a `Line` is 64 bytes, and the load asks for no alignment.
                w[i] = unsafe { _mm512_loadu_ps(line.as_ptr()) };
                if let Some(scales) = scales {
                    let scales = &scales[i * WIDTH..][..WIDTH];
                    // SAFETY: sixteen f32 are 64 bytes, and the load asks for no alignment.
                    let scales = unsafe { _mm512_loadu_ps(scales.as_ptr()) };
                    // A weight of 0 stays so, as that of a key that is not seen is.
                    let some = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(w[i], _mm512_setzero_ps());
                    w[i] = _mm512_maskz_mul_ps(some, w[i], scales);
                }
                // The second operand where one is NaN.
                *largest = _mm512_max_ps(w[i], *largest);
                *broken |= _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(w[i], _mm512_set1_ps(f32::INFINITY));
            }
        }
        let largest = isa.plain().max_four(largest);
        // Weights so small that their reciprocal is infinite add nothing.
        let enough = _mm_cmp_ps_mask::<_CMP_GT_OQ>(largest, _mm_set1_ps(f32::MIN_POSITIVE * W_MAX));
        let to_integers = _mm_maskz_div_ps(enough, _mm_set1_ps(W_MAX), largest);
        let (mut factors, mut ones) = ([0.0; 4], [0.0; 4]);
        let unit = _mm_div_ps(largest, _mm_set1_ps(W_MAX));
        // SAFETY: four f32 are 16 bytes, and the store asks for no alignment.
        unsafe { _mm_storeu_ps(factors.as_mut_ptr(), to_integers) };
        // SAFETY: as above.
        unsafe { _mm_storeu_ps(ones.as_mut_ptr(), unit) };
        for ((to, unit), broken) in units.iter_mut().zip(ones).zip(broken) {
            // By a scale that is no number, of a key that is seen: there is no integer for that.
            *to = if broken == 0 { unit } else { f32::NAN };
        }
        for ((w, [high, low]), factor) in w.iter_mut().zip(pairs).zip(factors) {
            let mut integers = [_mm512_setzero_si512(); TILE / WIDTH];
            for (integers, w) in integers.iter_mut().zip(w) {
                *integers = _mm512_cvtps_epi32(_mm512_mul_ps(*w, _mm512_set1_ps(factor)));
            }
            // The low bytes of 32 keys, and then the high ones.
            let first = _mm512_permutex2var_epi8(integers[0], order, integers[1]);
            let second = _mm512_permutex2var_epi8(integers[2], order, integers[3]);
            let lows = _mm512_shuffle_i64x2::<0x44>(first, second);
            let highs = _mm512_shuffle_i64x2::<0xEE>(first, second);
            // SAFETY: a `Line` is 64 bytes, and the store asks for no alignment.
            unsafe { _mm512_storeu_si512(low.as_mut_ptr().cast(), lows) };
            // SAFETY: as above.
            unsafe { _mm512_storeu_si512(high.as_mut_ptr().cast(), highs) };
        }
    }
}

/// Of 32 integers in two vectors: the lowest bytes, then the second ones.
static TWO_BYTES: [u8; 64] = {
    let mut at = [0; 64];
    let mut i = 0;
    while i < 64 {
        // Bit 6 chooses the second vector.
        #[expect(clippy::cast_possible_truncation, reason = "below 128")]
        let byte = (i % 32 * 4 + i / 32) as u8;
        at[i] = byte;
        i += 1;
    }
    at
};

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
    let order = interleave();
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
            let v = four_keys(tile, key, part, order);
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

/// How to interleave, for [`four_keys`].
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
pub(super) fn interleave() -> [__m512i; 2] {
    // SAFETY: the table is 64 bytes, and the load asks for no alignment.
    let first = unsafe { _mm512_loadu_si512(INTERLEAVE.as_ptr().cast()) };
    [first, _mm512_add_epi8(first, _mm512_set1_epi8(16))]
}

/// The 32 elements of a part of four keys' values, element by element: sixteen in each vector.
#[target_feature(enable = "avx2,avx512f,avx512dq,avx512vbmi")]
#[inline]
pub(super) fn four_keys(
    tile: &Tile<'_>,
    key: usize,
    part: usize,
    order: [__m512i; 2],
) -> [__m512i; 2] {
    let ab = load_two(tile.v(key), tile.v(key + 1), part);
    let cd = load_two(tile.v(key + 2), tile.v(key + 3), part);
    let [first, second] = order;
    [_mm512_permutex2var_epi8(ab, first, cd), _mm512_permutex2var_epi8(ab, second, cd)]
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
