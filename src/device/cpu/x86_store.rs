//! What AVX-512 stores on append: 16-bit formats, and INT8 quantised several vectors at a time.
//! All of it gives the bytes that the portable code gives. AVX2's is in `avx2_store.rs`.

use std::arch::x86_64::*;

use super::super::convert::Source;
use super::super::quant::{Q_MAX, quantize_shared};
use super::super::{AppendCounts, DType};
use super::append::Stores;
use super::lanes::{AT_ONCE, Isa, WIDTH};
use super::x86::{Avx512, memory_op, op};
use crate::plan::E8M8;

/// Elements of a cache line in a 16-bit format.
pub(super) const PAIR: usize = 2 * WIDTH;

/// Elements of a cache line of bytes.
pub(super) const QUARTET: usize = 4 * WIDTH;

/// Scales for which products with their reciprocal stay in the range of normal numbers.
pub(super) const SCALE_MIN: f32 = 1e-18;
pub(super) const SCALE_MAX: f32 = 1e18;

/// Puts the groups of four bytes, as `packs` leaves them, in the elements' order.
static UNPACK: [i32; WIDTH] = [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15];

/// The upper half of every lane of two vectors; from index 32 on these are the second's.
static UPPER: [u16; PAIR] = {
    let mut at = [1; PAIR];
    let mut i = 1;
    while i < PAIR {
        at[i] = at[i - 1] + 2;
        i += 1;
    }
    at
};

impl Avx512 {
    /// Sixteen elements of a tensor as f32.
    #[inline(always)]
    fn widen<S: Source>(self, x: &[S; WIDTH]) -> __m512 {
        let from = x.as_ptr();
        match S::DTYPE {
            // SAFETY: the type says that these are 64 bytes; any 64 bytes are sixteen f32.
            DType::F32 => self.widen_f32(unsafe { &*from.cast() }),
            // SAFETY: the type says that these are 32 bytes.
            DType::F16 => self.widen_f16(unsafe { &*from.cast() }),
            // SAFETY: the type says that these are 32 bytes.
            DType::Bf16 => self.widen_bf16(unsafe { &*from.cast() }),
        }
    }

    /// Quantises four vectors, with one computation of all their scales.
    #[inline(always)]
    pub(super) fn quantize_four<S: Source>(
        self,
        x: [&[S]; AT_ONCE],
        q: [&mut [u8]; AT_ONCE],
        stores: Stores,
        counts: &mut AppendCounts,
    ) -> [E8M8; AT_ONCE] {
        let mut largest = [op!(_mm512_setzero_si512()); AT_ONCE];
        for (largest, x) in largest.iter_mut().zip(x) {
            *largest = self.largest_lanes(x.as_chunks::<WIDTH>().0);
        }
        let largest = op!(_mm_castsi128_ps(self.largest_of_each(largest)));
        // As `E8M8::round_up` and `to_f32`.
        let exact = op!(_mm_div_ps(largest, _mm_set1_ps(Q_MAX)));
        let bits = op!(_mm_add_epi32(_mm_castps_si128(exact), _mm_set1_epi32(0x7FFF)));
        let scale = op!(_mm_castsi128_ps(_mm_and_si128(bits, _mm_set1_epi32(!0x7FFF))));
        let inverse = op!(_mm_div_ps(_mm_set1_ps(1.0), scale));
        // NaN and infinity are too large, zeros too small.
        let fits = op!(_mm_cmp_ps_mask::<_CMP_GE_OQ>(scale, _mm_set1_ps(SCALE_MIN)))
            & op!(_mm_cmp_ps_mask::<_CMP_LT_OQ>(scale, _mm_set1_ps(SCALE_MAX)))
            & op!(_mm_cmp_ps_mask::<_CMP_LT_OQ>(largest, _mm_set1_ps(f32::INFINITY)));
        let mut stored = [E8M8(0); AT_ONCE];
        if fits != 0xF || !x[0].len().is_multiple_of(WIDTH) {
            for ((x, q), stored) in x.into_iter().zip(q).zip(&mut stored) {
                *stored = self.quantize_one(x, q, counts);
            }
            return stored;
        }
        let (mut scales, mut inverses) = ([0.0; AT_ONCE], [0.0; AT_ONCE]);
        memory_op!(_mm_storeu_ps(scales.as_mut_ptr(), scale));
        memory_op!(_mm_storeu_ps(inverses.as_mut_ptr(), inverse));
        for (i, q) in q.into_iter().enumerate() {
            // Rounded already, so nothing changes.
            stored[i] = E8M8::round_up(scales[i]);
            self.quantize_lines(x[i], q, scales[i], inverses[i], stores);
        }
        stored
    }

    /// Quantises whole lines with a scale and its reciprocal, which are finite and not 0.
    ///
    /// The quotient is correctly rounded by Markstein's method, in a third of a division's time:
    /// the reciprocal is correctly rounded, the remainder exact. (For an exact tie, which is all
    /// that matters to the integer, it is so whatever the first estimate.)
    #[inline(always)]
    fn quantize_lines<S: Source>(
        self,
        x: &[S],
        q: &mut [u8],
        scale: f32,
        inverse: f32,
        stores: Stores,
    ) {
        let (inverse, minus_scale) = (self.splat(inverse), self.splat(-scale));
        let (lines, _) = x.as_chunks::<WIDTH>();
        let (fours, rest) = lines.as_chunks::<4>();
        let (wide, narrow) = q.as_chunks_mut::<QUARTET>();
        let order = memory_op!(_mm512_loadu_si512(UNPACK.as_ptr().cast()));
        for (x, q) in fours.iter().zip(wide) {
            let mut v = [op!(_mm512_setzero_si512()); 4];
            for i in 0..4 {
                v[i] = self.quotients(self.widen(&x[i]), inverse, minus_scale);
            }
            // None is beyond a byte.
            let low = op!(_mm512_packs_epi32(v[0], v[1]));
            let high = op!(_mm512_packs_epi32(v[2], v[3]));
            let bytes = op!(_mm512_packs_epi16(low, high));
            self.put(op!(_mm512_permutexvar_epi32(order, bytes)), q, stores);
        }
        for (x, q) in rest.iter().zip(narrow.as_chunks_mut::<WIDTH>().0) {
            let v = self.quotients(self.widen(x), inverse, minus_scale);
            memory_op!(_mm_storeu_si128(q.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(v)));
        }
    }

    /// Sixteen elements divided by their scale, as integers.
    #[inline(always)]
    fn quotients(self, x: __m512, inverse: __m512, minus_scale: __m512) -> __m512i {
        let estimate = self.mul(x, inverse);
        let remainder = self.fma(estimate, minus_scale, x);
        op!(_mm512_cvtps_epi32(self.fma(remainder, inverse, estimate)))
    }

    /// Quantises one vector.
    #[inline(always)]
    pub(super) fn quantize_one<S: Source>(
        self,
        x: &[S],
        q: &mut [u8],
        counts: &mut AppendCounts,
    ) -> E8M8 {
        let (lines, rest) = x.as_chunks::<WIDTH>();
        let lanes = self.largest_lanes(lines);
        let largest = f32::from_bits(op!(_mm512_reduce_max_epu32(lanes)));
        let stored = E8M8::round_up(largest / Q_MAX);
        let scale = stored.to_f32();
        if !largest.is_finite() || !rest.is_empty() || !(SCALE_MIN..SCALE_MAX).contains(&scale) {
            return quantize_shared(x, q, counts);
        }
        self.quantize_lines(x, q, scale, 1.0 / scale, Stores::Cached);
        stored
    }

    /// The bits of the largest magnitude of some elements as f32, in every lane those of its own;
    /// infinity and NaN are larger than all others.
    #[inline(always)]
    fn largest_lanes<S: Source>(self, x: &[[S; WIDTH]]) -> __m512i {
        // Magnitudes are ordered as their bits are, in all formats.
        if let DType::F16 | DType::Bf16 = S::DTYPE {
            let magnitude = op!(_mm256_set1_epi16(0x7FFF));
            let mut largest = op!(_mm256_setzero_si256());
            for x in x {
                let bits = memory_op!(_mm256_loadu_si256(x.as_ptr().cast()));
                largest = op!(_mm256_max_epu16(largest, _mm256_and_si256(bits, magnitude)));
            }
            return match S::DTYPE {
                DType::F16 => op!(_mm512_castps_si512(_mm512_cvtph_ps(largest))),
                _ => op!(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(largest))),
            };
        }
        let magnitude = op!(_mm512_set1_epi32(0x7FFF_FFFF));
        let mut largest = op!(_mm512_setzero_si512());
        for x in x {
            let bits = op!(_mm512_castps_si512(self.widen(x)));
            largest = op!(_mm512_max_epu32(largest, _mm512_and_si512(bits, magnitude)));
        }
        largest
    }

    /// The largest lane of each of four vectors.
    #[inline(always)]
    fn largest_of_each(self, [a, b, c, d]: [__m512i; AT_ONCE]) -> __m128i {
        let low = op!(_mm512_unpacklo_epi32(a, b));
        let ab = op!(_mm512_max_epu32(low, _mm512_unpackhi_epi32(a, b)));
        let low = op!(_mm512_unpacklo_epi32(c, d));
        let cd = op!(_mm512_max_epu32(low, _mm512_unpackhi_epi32(c, d)));
        let low = op!(_mm512_unpacklo_epi64(ab, cd));
        let all = op!(_mm512_max_epu32(low, _mm512_unpackhi_epi64(ab, cd)));
        let high = op!(_mm512_extracti64x4_epi64::<1>(all));
        let all = op!(_mm256_max_epu32(_mm512_castsi512_si256(all), high));
        let high = op!(_mm256_extracti128_si256::<1>(all));
        op!(_mm_max_epu32(_mm256_castsi256_si128(all), high))
    }

    /// Stores a vector as IEEE halves.
    #[inline(always)]
    pub(super) fn store_halves<S: Source>(self, x: &[S], row: &mut [u8], stores: Stores) {
        const ROUND: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        let (whole, rest) = row.as_chunks_mut::<64>();
        let (lines, tail) = x.as_chunks::<PAIR>();
        for (to, x) in whole.iter_mut().zip(lines) {
            let halves = if let DType::F16 = S::DTYPE {
                memory_op!(_mm512_loadu_si512(x.as_ptr().cast()))
            } else {
                let [low, high] = self.widen_pair(x);
                let low = op!(_mm512_cvtps_ph::<ROUND>(low));
                let high = op!(_mm512_cvtps_ph::<ROUND>(high));
                op!(_mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high))
            };
            self.put(halves, to, stores);
        }
        for (to, x) in rest.as_chunks_mut::<2>().0.iter_mut().zip(tail) {
            *to = x.to_f16_bits().to_le_bytes();
        }
    }

    /// Stores a vector as bfloat16.
    #[inline(always)]
    pub(super) fn store_brains<S: Source>(self, x: &[S], row: &mut [u8], stores: Stores) {
        let (whole, rest) = row.as_chunks_mut::<64>();
        let (lines, tail) = x.as_chunks::<PAIR>();
        let upper = memory_op!(_mm512_loadu_si512(UPPER.as_ptr().cast()));
        for (to, x) in whole.iter_mut().zip(lines) {
            let brains = if let DType::Bf16 = S::DTYPE {
                memory_op!(_mm512_loadu_si512(x.as_ptr().cast()))
            } else {
                let [low, high] = self.widen_pair(x);
                let (low, high) = (self.round_to_bf16(low), self.round_to_bf16(high));
                op!(_mm512_permutex2var_epi16(low, upper, high))
            };
            self.put(brains, to, stores);
        }
        for (to, x) in rest.as_chunks_mut::<2>().0.iter_mut().zip(tail) {
            *to = x.to_bf16_bits().to_le_bytes();
        }
    }

    /// `convert::f32_to_bf16` in the upper half of every lane. (The instruction for it takes
    /// subnormal numbers for 0.)
    #[inline(always)]
    fn round_to_bf16(self, x: __m512) -> __m512i {
        let bits = op!(_mm512_castps_si512(x));
        let odd = op!(_mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1)));
        let half = op!(_mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
        let rounded = op!(_mm512_add_epi32(bits, half));
        let nan = op!(_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x));
        op!(_mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x40_0000)))
    }

    /// Thirty-two elements of a tensor as f32.
    #[inline(always)]
    fn widen_pair<S: Source>(self, x: &[S; PAIR]) -> [__m512; 2] {
        let mut pair = [self.splat(0.0); 2];
        for (to, x) in pair.iter_mut().zip(x.as_chunks::<WIDTH>().0) {
            *to = self.widen(x);
        }
        pair
    }

    /// Stores a cache line's worth of bytes.
    #[inline(always)]
    fn put(self, v: __m512i, to: &mut [u8; 64], stores: Stores) {
        let to: *mut __m512i = to.as_mut_ptr().cast();
        if stores == Stores::Past && to.addr().is_multiple_of(64) {
            // SAFETY: the reference covers the 64 bytes, and they are aligned. Whoever asks for
            // `Stores::Past` sees to the fences.
            unsafe { _mm512_stream_si512(to, v) };
        } else {
            memory_op!(_mm512_storeu_si512(to, v));
        }
    }
}
