//! What many rows of a prefill share: keys and values of a tile, rearranged once, so that the
//! products of all of its query heads need nothing but loads.
//!
//! Keys lie in lanes: the same four bytes of sixteen keys are a line.

use std::arch::x86_64::*;

use super::lanes::{Line, WIDTH};
use super::tile::{TILE, Tile};

/// Query heads from which on a tile is rearranged.
pub(super) const MANY_HEADS: usize = 16;

/// Lines of keys that are computed side by side.
pub(super) const ABREAST: usize = 2;

/// Some lines of keys or of elements, side by side.
pub(super) type Pair = [Line; ABREAST];

/// Rearranges the keys of a tile: for each two lines of keys, for each four bytes, these of the
/// first sixteen keys and of the others. `flip` is applied to every four bytes.
/// `out`: `[TILE / 32, row_bytes / 4, 2]` lines
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
pub(super) fn pack_keys(tile: &Tile<'_>, flip: i32, out: &mut [Pair]) {
    let words = tile.row_bytes / 4;
    let flip = _mm512_set1_epi32(flip);
    for line in 0..TILE / WIDTH {
        let out = &mut out[line / ABREAST * words..][..words];
        for first in (0..words).step_by(WIDTH) {
            let some = words.min(first + WIDTH) - first;
            let mask = u16::MAX >> (WIDTH - some);
            let mut rows = [_mm512_setzero_si512(); WIDTH];
            for (i, row) in rows.iter_mut().enumerate() {
                let bytes = &tile.k(line * WIDTH + i)[first * 4..][..some * 4];
                // SAFETY: the bytes of `some` words are those that the mask lets through, and the
                // load asks for no alignment.
                *row = unsafe { _mm512_maskz_loadu_epi32(mask, bytes.as_ptr().cast()) };
                *row = _mm512_xor_si512(*row, flip);
            }
            transpose(&mut rows);
            for (row, out) in rows.into_iter().zip(&mut out[first..first + some]) {
                let to = &mut out[line % ABREAST];
                // SAFETY: a `Line` is 64 bytes, and the store asks for no alignment.
                unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), row) };
            }
        }
    }
}

/// Exchanges rows and columns of 16 × 16 words.
#[target_feature(enable = "avx512f")]
#[inline]
fn transpose(rows: &mut [__m512i; WIDTH]) {
    let mut other = [_mm512_setzero_si512(); WIDTH];
    for i in 0..WIDTH / 2 {
        other[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        other[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    // In each quarter: word w of four rows.
    for i in 0..WIDTH / 4 {
        let [a, b, c, d] = [other[4 * i], other[4 * i + 1], other[4 * i + 2], other[4 * i + 3]];
        rows[4 * i] = _mm512_unpacklo_epi64(a, c);
        rows[4 * i + 1] = _mm512_unpackhi_epi64(a, c);
        rows[4 * i + 2] = _mm512_unpacklo_epi64(b, d);
        rows[4 * i + 3] = _mm512_unpackhi_epi64(b, d);
    }
    for i in 0..4 {
        let [a, b, c, d] = [rows[i], rows[4 + i], rows[8 + i], rows[12 + i]];
        let (low, high) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0x88>(c, d));
        other[i] = _mm512_shuffle_i32x4::<0x88>(low, high);
        other[8 + i] = _mm512_shuffle_i32x4::<0xDD>(low, high);
        let (low, high) = (_mm512_shuffle_i32x4::<0xDD>(a, b), _mm512_shuffle_i32x4::<0xDD>(c, d));
        other[4 + i] = _mm512_shuffle_i32x4::<0x88>(low, high);
        other[12 + i] = _mm512_shuffle_i32x4::<0xDD>(low, high);
    }
    *rows = other;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::x86::Avx512;

    #[target_feature(enable = "avx512f")]
    fn transposed(from: &[[i32; WIDTH]; WIDTH]) -> [[i32; WIDTH]; WIDTH] {
        let mut rows = [_mm512_setzero_si512(); WIDTH];
        for (row, from) in rows.iter_mut().zip(from) {
            // SAFETY: sixteen words are 64 bytes, and the load asks for no alignment.
            *row = unsafe { _mm512_loadu_si512(from.as_ptr().cast()) };
        }
        transpose(&mut rows);
        let mut to = [[0; WIDTH]; WIDTH];
        for (row, to) in rows.into_iter().zip(&mut to) {
            // SAFETY: as above.
            unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), row) };
        }
        to
    }

    #[test]
    fn rows_become_columns() {
        if Avx512::detect().is_none() {
            return;
        }
        let mut from = [[0; WIDTH]; WIDTH];
        for (i, word) in from.as_flattened_mut().iter_mut().enumerate() {
            *word = i32::try_from(i).expect("small");
        }
        // SAFETY: the CPU has AVX-512.
        let to = unsafe { transposed(&from) };
        for (i, row) in from.iter().enumerate() {
            for (j, word) in row.iter().enumerate() {
                assert_eq!(to[j][i], *word, "{i} {j}");
            }
        }
    }
}
