//! What AVX2 stores on append: as `x86_store.rs` for AVX-512, eight lanes at a time. All of it
//! gives the bytes that the portable code gives.
//!
//! A cache line is two vectors here. Past the caches both are stored one right after the other, so
//! that the line leaves the core as one.

use std::arch::x86_64::*;

use super::super::convert::Source;
use super::super::quant::{Q_MAX, quantize_shared};
use super::super::{AppendCounts, DType};
use super::append::Stores;
use super::lanes::AT_ONCE;
use super::x86::{Avx2, memory_op, op};
use super::x86_store::{PAIR, QUARTET, SCALE_MAX, SCALE_MIN};
use crate::plan::E8M8;

/// Lanes of a register. Vectors are multiples of it.
const EIGHT: usize = 8;

impl Avx2 {
    /// Eight elements of a tensor as f32.
    #[inline(always)]
    fn widen<S: Source>(self, x: &[S; EIGHT]) -> __m256 {
        match S::DTYPE {
            DType::F32 => memory_op!(_mm256_loadu_ps(x.as_ptr().cast())),
            DType::F16 => op!(_mm256_cvtph_ps(self.sixteen_bits(x))),
            DType::Bf16 => {
                let wide = op!(_mm256_cvtepu16_epi32(self.sixteen_bits(x)));
                op!(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide)))
            }
        }
    }

    /// Eight elements of a 16-bit format.
    #[inline(always)]
    fn sixteen_bits<S: Source>(self, x: &[S; EIGHT]) -> __m128i {
        const { assert!(size_of::<S>() >= 2) };
        memory_op!(_mm_loadu_si128(x.as_ptr().cast()))
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
        let mut largest = [op!(_mm256_setzero_si256()); AT_ONCE];
        for (largest, x) in largest.iter_mut().zip(x) {
            *largest = self.largest_lanes(x.as_chunks::<EIGHT>().0);
        }
        let largest = op!(_mm_castsi128_ps(self.largest_of_each(largest)));
        // As `E8M8::round_up` and `to_f32`.
        let exact = op!(_mm_div_ps(largest, _mm_set1_ps(Q_MAX)));
        let bits = op!(_mm_add_epi32(_mm_castps_si128(exact), _mm_set1_epi32(0x7FFF)));
        let scale = op!(_mm_castsi128_ps(_mm_and_si128(bits, _mm_set1_epi32(!0x7FFF))));
        let inverse = op!(_mm_div_ps(_mm_set1_ps(1.0), scale));
        // NaN and infinity are too large, zeros too small.
        let above = op!(_mm_cmp_ps::<_CMP_GE_OQ>(scale, _mm_set1_ps(SCALE_MIN)));
        let below = op!(_mm_cmp_ps::<_CMP_LT_OQ>(scale, _mm_set1_ps(SCALE_MAX)));
        let finite = op!(_mm_cmp_ps::<_CMP_LT_OQ>(largest, _mm_set1_ps(f32::INFINITY)));
        let fits = op!(_mm_movemask_ps(_mm_and_ps(_mm_and_ps(above, below), finite)));
        let mut stored = [E8M8(0); AT_ONCE];
        if fits != 0xF || !x[0].len().is_multiple_of(EIGHT) {
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

    /// Quantises one vector.
    #[inline(always)]
    pub(super) fn quantize_one<S: Source>(
        self,
        x: &[S],
        q: &mut [u8],
        counts: &mut AppendCounts,
    ) -> E8M8 {
        let (lines, rest) = x.as_chunks::<EIGHT>();
        let lanes = self.largest_lanes(lines);
        let high = op!(_mm256_extracti128_si256::<1>(lanes));
        let four = op!(_mm_max_epu32(_mm256_castsi256_si128(lanes), high));
        let two = op!(_mm_max_epu32(four, _mm_unpackhi_epi64(four, four)));
        let one = op!(_mm_max_epu32(two, _mm_srli_epi64::<32>(two)));
        let largest = op!(_mm_cvtss_f32(_mm_castsi128_ps(one)));
        let stored = E8M8::round_up(largest / Q_MAX);
        let scale = stored.to_f32();
        if !largest.is_finite() || !rest.is_empty() || !(SCALE_MIN..SCALE_MAX).contains(&scale) {
            return quantize_shared(x, q, counts);
        }
        self.quantize_lines(x, q, scale, 1.0 / scale, Stores::Cached);
        stored
    }

    /// Quantises with a scale and its reciprocal, which are finite and not 0, as AVX-512 does it.
    #[inline(always)]
    fn quantize_lines<S: Source>(
        self,
        x: &[S],
        q: &mut [u8],
        scale: f32,
        inverse: f32,
        stores: Stores,
    ) {
        let inverse = op!(_mm256_set1_ps(inverse));
        let scale = op!(_mm256_set1_ps(scale));
        let (lines, rest) = x.as_chunks::<QUARTET>();
        let (wide, narrow) = q.as_chunks_mut::<QUARTET>();
        for (x, q) in lines.iter().zip(wide) {
            let (x, _) = x.as_chunks::<PAIR>();
            let low = self.bytes(&x[0], inverse, scale);
            let high = self.bytes(&x[1], inverse, scale);
            self.put([low, high], q, stores);
        }
        let (pairs, rest) = rest.as_chunks::<PAIR>();
        let (wide, narrow) = narrow.as_chunks_mut::<PAIR>();
        for (x, q) in pairs.iter().zip(wide) {
            let bytes = self.bytes(x, inverse, scale);
            memory_op!(_mm256_storeu_si256(q.as_mut_ptr().cast(), bytes));
        }
        for (x, q) in rest.as_chunks().0.iter().zip(narrow.as_chunks_mut::<EIGHT>().0) {
            let v = self.quotients(self.widen(x), inverse, scale);
            let high = op!(_mm256_extracti128_si256::<1>(v));
            let words = op!(_mm_packs_epi32(_mm256_castsi256_si128(v), high));
            memory_op!(_mm_storel_epi64(q.as_mut_ptr().cast(), _mm_packs_epi16(words, words)));
        }
    }

    /// Thirty-two elements divided by their scale, as bytes.
    #[inline(always)]
    fn bytes<S: Source>(self, x: &[S; PAIR], inverse: __m256, scale: __m256) -> __m256i {
        let mut v = [op!(_mm256_setzero_si256()); 4];
        for (v, x) in v.iter_mut().zip(x.as_chunks().0) {
            *v = self.quotients(self.widen(x), inverse, scale);
        }
        // None is beyond a byte.
        let low = op!(_mm256_packs_epi32(v[0], v[1]));
        let high = op!(_mm256_packs_epi32(v[2], v[3]));
        // Groups of four: 0, 2, 4, 6 in the lower half, 1, 3, 5, 7 in the upper.
        let order = op!(_mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        op!(_mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order))
    }

    /// Eight elements divided by their scale, as integers.
    #[inline(always)]
    fn quotients(self, x: __m256, inverse: __m256, scale: __m256) -> __m256i {
        let estimate = op!(_mm256_mul_ps(x, inverse));
        let remainder = op!(_mm256_fnmadd_ps(estimate, scale, x));
        op!(_mm256_cvtps_epi32(_mm256_fmadd_ps(remainder, inverse, estimate)))
    }

    /// The bits of the largest magnitude of some elements as f32, in every lane those of its own;
    /// infinity and NaN are larger than all others.
    #[inline(always)]
    fn largest_lanes<S: Source>(self, x: &[[S; EIGHT]]) -> __m256i {
        // Magnitudes are ordered as their bits are, in all formats.
        if let DType::F16 | DType::Bf16 = S::DTYPE {
            let magnitude = op!(_mm_set1_epi16(0x7FFF));
            let mut largest = op!(_mm_setzero_si128());
            for x in x {
                let bits = op!(_mm_and_si128(self.sixteen_bits(x), magnitude));
                largest = op!(_mm_max_epu16(largest, bits));
            }
            return match S::DTYPE {
                DType::F16 => op!(_mm256_castps_si256(_mm256_cvtph_ps(largest))),
                _ => op!(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(largest))),
            };
        }
        let magnitude = op!(_mm256_set1_epi32(0x7FFF_FFFF));
        let mut largest = op!(_mm256_setzero_si256());
        for x in x {
            let bits = op!(_mm256_castps_si256(self.widen(x)));
            largest = op!(_mm256_max_epu32(largest, _mm256_and_si256(bits, magnitude)));
        }
        largest
    }

    /// The largest lane of each of four vectors.
    #[inline(always)]
    fn largest_of_each(self, [a, b, c, d]: [__m256i; AT_ONCE]) -> __m128i {
        let low = op!(_mm256_unpacklo_epi32(a, b));
        let ab = op!(_mm256_max_epu32(low, _mm256_unpackhi_epi32(a, b)));
        let low = op!(_mm256_unpacklo_epi32(c, d));
        let cd = op!(_mm256_max_epu32(low, _mm256_unpackhi_epi32(c, d)));
        let low = op!(_mm256_unpacklo_epi64(ab, cd));
        let all = op!(_mm256_max_epu32(low, _mm256_unpackhi_epi64(ab, cd)));
        let high = op!(_mm256_extracti128_si256::<1>(all));
        op!(_mm_max_epu32(_mm256_castsi256_si128(all), high))
    }

    /// Stores a vector as IEEE halves.
    #[inline(always)]
    pub(super) fn store_halves<S: Source>(self, x: &[S], row: &mut [u8], stores: Stores) {
        let (whole, rest) = row.as_chunks_mut::<64>();
        let (lines, tail) = x.as_chunks::<PAIR>();
        for (to, x) in whole.iter_mut().zip(lines) {
            let (x, _) = x.as_chunks();
            let low = self.join(self.halves(&x[0]), self.halves(&x[1]));
            let high = self.join(self.halves(&x[2]), self.halves(&x[3]));
            self.put([low, high], to, stores);
        }
        let (eights, rest) = rest.as_chunks_mut::<16>();
        let (lines, tail) = tail.as_chunks();
        for (to, x) in eights.iter_mut().zip(lines) {
            memory_op!(_mm_storeu_si128(to.as_mut_ptr().cast(), self.halves(x)));
        }
        for (to, x) in rest.as_chunks_mut::<2>().0.iter_mut().zip(tail) {
            *to = x.to_f16_bits().to_le_bytes();
        }
    }

    /// Eight elements as IEEE halves: verbatim, or rounded.
    #[inline(always)]
    fn halves<S: Source>(self, x: &[S; EIGHT]) -> __m128i {
        match S::DTYPE {
            DType::F16 => self.sixteen_bits(x),
            _ => op!(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.widen(x))),
        }
    }

    /// Stores a vector as bfloat16.
    #[inline(always)]
    pub(super) fn store_brains<S: Source>(self, x: &[S], row: &mut [u8], stores: Stores) {
        let (whole, rest) = row.as_chunks_mut::<64>();
        let (lines, tail) = x.as_chunks::<PAIR>();
        for (to, x) in whole.iter_mut().zip(lines) {
            let (x, _) = x.as_chunks();
            let low = self.sixteen_brains(&x[0], &x[1]);
            let high = self.sixteen_brains(&x[2], &x[3]);
            self.put([low, high], to, stores);
        }
        let (eights, rest) = rest.as_chunks_mut::<16>();
        let (lines, tail) = tail.as_chunks();
        for (to, x) in eights.iter_mut().zip(lines) {
            let brains = op!(_mm256_castsi256_si128(self.sixteen_brains(x, x)));
            memory_op!(_mm_storeu_si128(to.as_mut_ptr().cast(), brains));
        }
        for (to, x) in rest.as_chunks_mut::<2>().0.iter_mut().zip(tail) {
            *to = x.to_bf16_bits().to_le_bytes();
        }
    }

    /// Two times eight elements as bfloat16: verbatim, or rounded.
    #[inline(always)]
    fn sixteen_brains<S: Source>(self, low: &[S; EIGHT], high: &[S; EIGHT]) -> __m256i {
        if let DType::Bf16 = S::DTYPE {
            return self.join(self.sixteen_bits(low), self.sixteen_bits(high));
        }
        let low = self.round_to_bf16(self.widen(low));
        let high = self.round_to_bf16(self.widen(high));
        // By fours: 0 and 2 in the lower half, 1 and 3 in the upper.
        op!(_mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high)))
    }

    /// `convert::f32_to_bf16` in the lower half of every lane, the upper all zeros.
    #[inline(always)]
    fn round_to_bf16(self, x: __m256) -> __m256i {
        let bits = op!(_mm256_castps_si256(x));
        let odd = op!(_mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1)));
        let half = op!(_mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
        let rounded = op!(_mm256_castsi256_ps(_mm256_add_epi32(bits, half)));
        let quiet = op!(_mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000)));
        let nan = op!(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
        let all = op!(_mm256_blendv_ps(rounded, _mm256_castsi256_ps(quiet), nan));
        op!(_mm256_srli_epi32::<16>(_mm256_castps_si256(all)))
    }

    /// One register of two.
    #[inline(always)]
    fn join(self, low: __m128i, high: __m128i) -> __m256i {
        op!(_mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high))
    }

    /// Stores a cache line's worth of bytes.
    #[inline(always)]
    fn put(self, [low, high]: [__m256i; 2], to: &mut [u8; 64], stores: Stores) {
        let past = stores == Stores::Past && to.as_ptr().addr().is_multiple_of(64);
        let (first, second) = to.split_at_mut(32);
        let first: *mut __m256i = first.as_mut_ptr().cast();
        let second: *mut __m256i = second.as_mut_ptr().cast();
        if past {
            // SAFETY: the reference covers the 32 bytes, and they are aligned. Whoever asks for
            // `Stores::Past` sees to the fences.
            unsafe { _mm256_stream_si256(first, low) };
            // SAFETY: as above.
            unsafe { _mm256_stream_si256(second, high) };
        } else {
            memory_op!(_mm256_storeu_si256(first, low));
            memory_op!(_mm256_storeu_si256(second, high));
        }
    }
}
