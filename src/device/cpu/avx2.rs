//! The lanes of AVX2: two registers of eight.

use std::arch::x86_64::*;

use super::super::AppendCounts;
use super::super::convert::Source;
use super::append::Stores;
use super::exp::{LN2_HIGH, LN2_LOW, LOG2_E, LOWEST, P, ROUND};
use super::lanes::{AT_ONCE, Isa, Line, WIDTH};
use super::tile::TileRow;
use super::x86::{Avx2, memory_op, op, sum_eight};
use crate::plan::E8M8;

impl Avx2 {
    /// `exp::exp` in every lane, to the bit.
    #[inline(always)]
    fn exp(self, x: __m256) -> __m256 {
        // NaN counts as not below, and is the operand that the maximum gives.
        let above = op!(_mm256_cmp_ps::<_CMP_NLT_UQ>(x, self.one_half(LOWEST)));
        let clamped = op!(_mm256_max_ps(self.one_half(LOWEST), x));
        let shifted = op!(_mm256_fmadd_ps(clamped, self.one_half(LOG2_E), self.one_half(ROUND)));
        let n = op!(_mm256_sub_ps(shifted, self.one_half(ROUND)));
        let r = op!(_mm256_fmadd_ps(n, self.one_half(-LN2_HIGH), clamped));
        let r = op!(_mm256_fmadd_ps(n, self.one_half(-LN2_LOW), r));
        let mut p = self.one_half(P[0]);
        for c in &P[1..] {
            p = op!(_mm256_fmadd_ps(p, r, self.one_half(*c)));
        }
        let y = op!(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r));
        let y = op!(_mm256_add_ps(y, self.one_half(1.0)));
        let power = op!(_mm256_slli_epi32::<23>(_mm256_castps_si256(shifted)));
        let power = op!(_mm256_add_epi32(power, _mm256_set1_epi32(127 << 23)));
        let y = op!(_mm256_mul_ps(y, _mm256_castsi256_ps(power)));
        op!(_mm256_and_ps(y, above))
    }

    /// Weights times the scales of their values. A weight of 0 stays so, as that of a key that is
    /// not seen is, whatever its scale.
    #[inline(always)]
    pub(super) fn scaled(
        self,
        weights: (__m256, __m256),
        scales: (__m256, __m256),
    ) -> (__m256, __m256) {
        let zero = op!(_mm256_setzero_ps());
        let low = op!(_mm256_cmp_ps::<_CMP_NEQ_UQ>(weights.0, zero));
        let high = op!(_mm256_cmp_ps::<_CMP_NEQ_UQ>(weights.1, zero));
        let product = self.mul(weights, scales);
        (op!(_mm256_and_ps(product.0, low)), op!(_mm256_and_ps(product.1, high)))
    }

    /// Exchanges rows and columns of eight.
    #[inline(always)]
    pub(super) fn transpose_eight(self, rows: [__m256; 8]) -> [__m256; 8] {
        let mut other = rows;
        for i in 0..4 {
            other[2 * i] = op!(_mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]));
            other[2 * i + 1] = op!(_mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]));
        }
        // In each half: one element of four rows.
        let mut fours = other;
        for i in 0..2 {
            let [a, b, c, d] = [other[4 * i], other[4 * i + 1], other[4 * i + 2], other[4 * i + 3]];
            fours[4 * i] = op!(_mm256_shuffle_ps::<0x44>(a, c));
            fours[4 * i + 1] = op!(_mm256_shuffle_ps::<0xEE>(a, c));
            fours[4 * i + 2] = op!(_mm256_shuffle_ps::<0x44>(b, d));
            fours[4 * i + 3] = op!(_mm256_shuffle_ps::<0xEE>(b, d));
        }
        let mut columns = fours;
        for j in 0..4 {
            columns[j] = op!(_mm256_permute2f128_ps::<0x20>(fours[j], fours[4 + j]));
            columns[4 + j] = op!(_mm256_permute2f128_ps::<0x31>(fours[j], fours[4 + j]));
        }
        columns
    }

    /// `a + b`
    #[inline(always)]
    pub(super) fn plus(self, a: (__m256, __m256), b: (__m256, __m256)) -> (__m256, __m256) {
        (op!(_mm256_add_ps(a.0, b.0)), op!(_mm256_add_ps(a.1, b.1)))
    }

    /// `x` in eight lanes.
    #[inline(always)]
    fn one_half(self, x: f32) -> __m256 {
        op!(_mm256_set1_ps(x))
    }

    /// The largest lane of a vector without NaN.
    #[inline(always)]
    pub(super) fn largest_lane(self, v: __m256) -> f32 {
        let four = op!(_mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v)));
        let two = op!(_mm_max_ps(four, _mm_movehl_ps(four, four)));
        op!(_mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two))))
    }

    /// The sum of two vectors of f32, or of integers.
    #[inline(always)]
    fn add<const INTEGERS: bool>(self, a: __m256, b: __m256) -> __m256 {
        if INTEGERS {
            let (a, b) = (op!(_mm256_castps_si256(a)), op!(_mm256_castps_si256(b)));
            op!(_mm256_castsi256_ps(_mm256_add_epi32(a, b)))
        } else {
            op!(_mm256_add_ps(a, b))
        }
    }

    /// The lanes 4 apart of two vectors: those of `a`, then those of `b`.
    #[inline(always)]
    fn four_apart<const INTEGERS: bool>(self, a: __m256, b: __m256) -> __m256 {
        let outer = op!(_mm256_blend_ps::<0xF0>(a, b));
        let inner = op!(_mm256_permute2f128_ps::<0x21>(a, b));
        self.add::<INTEGERS>(outer, inner)
    }

    /// Of every four lanes of two vectors, those 2 apart.
    #[inline(always)]
    fn two_apart<const INTEGERS: bool>(self, a: __m256, b: __m256) -> __m256 {
        let (a, b) = (op!(_mm256_castps_pd(a)), op!(_mm256_castps_pd(b)));
        let low = op!(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)));
        let high = op!(_mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
        self.add::<INTEGERS>(low, high)
    }

    /// The sums of eight vectors of f32, or of integers, in their order, each summed as
    /// `Isa::sum` does it once lanes 8 apart are: 4 apart first, then 2 and 1.
    #[inline(always)]
    pub(super) fn sums_of_eight<const INTEGERS: bool>(self, v: [__m256; 8]) -> __m256 {
        let ab = self.two_apart::<INTEGERS>(
            self.four_apart::<INTEGERS>(v[0], v[4]),
            self.four_apart::<INTEGERS>(v[1], v[5]),
        );
        let cd = self.two_apart::<INTEGERS>(
            self.four_apart::<INTEGERS>(v[2], v[6]),
            self.four_apart::<INTEGERS>(v[3], v[7]),
        );
        let even = op!(_mm256_shuffle_ps::<0x88>(ab, cd));
        let odd = op!(_mm256_shuffle_ps::<0xDD>(ab, cd));
        self.add::<INTEGERS>(even, odd)
    }

    /// The same of four, twice.
    #[inline(always)]
    pub(super) fn sums_of_four<const INTEGERS: bool>(self, v: [__m256; 4]) -> __m256 {
        let two = self.two_apart::<INTEGERS>(
            self.four_apart::<INTEGERS>(v[0], v[2]),
            self.four_apart::<INTEGERS>(v[1], v[3]),
        );
        let even = op!(_mm256_shuffle_ps::<0x88>(two, two));
        let odd = op!(_mm256_shuffle_ps::<0xDD>(two, two));
        // In each half those of two vectors, twice.
        let one = self.add::<INTEGERS>(even, odd);
        op!(_mm256_castpd_ps(_mm256_permute4x64_pd::<0b10_00_10_00>(_mm256_castps_pd(one))))
    }

    /// The sums of four or eight vectors.
    #[inline(always)]
    pub(super) fn lane_sums<const INTEGERS: bool>(self, v: &[__m256]) -> __m256 {
        match *v {
            [a, b, c, d] => self.sums_of_four::<INTEGERS>([a, b, c, d]),
            [a, b, c, d, e, f, g, h] => self.sums_of_eight::<INTEGERS>([a, b, c, d, e, f, g, h]),
            _ => unreachable!("four or eight vectors"),
        }
    }
}

impl Isa for Avx2 {
    type V = (__m256, __m256);
    type Half = __m256;
    const FMA: bool = true;
    const WIDE: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        let v = op!(_mm256_set1_ps(x));
        (v, v)
    }

    #[inline(always)]
    fn load(self, from: &Line) -> Self::V {
        let (low, high) = from.split_at(8);
        (memory_op!(_mm256_loadu_ps(low.as_ptr())), memory_op!(_mm256_loadu_ps(high.as_ptr())))
    }

    #[inline(always)]
    fn store(self, v: Self::V, to: &mut Line) {
        let (low, high) = to.split_at_mut(8);
        memory_op!(_mm256_storeu_ps(low.as_mut_ptr(), v.0));
        memory_op!(_mm256_storeu_ps(high.as_mut_ptr(), v.1));
    }

    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        (op!(_mm256_mul_ps(a.0, b.0)), op!(_mm256_mul_ps(a.1, b.1)))
    }

    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        (op!(_mm256_fmadd_ps(a.0, b.0, c.0)), op!(_mm256_fmadd_ps(a.1, b.1, c.1)))
    }

    #[inline(always)]
    fn no_half(self) -> __m256 {
        op!(_mm256_setzero_ps())
    }

    #[inline(always)]
    fn fma_half<const UPPER: bool>(self, a: Self::V, b: Self::V, c: __m256) -> __m256 {
        let (a, b) = if UPPER { (a.1, b.1) } else { (a.0, b.0) };
        op!(_mm256_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn join(self, lower: __m256, upper: __m256) -> Self::V {
        (lower, upper)
    }

    #[inline(always)]
    fn scale_scores(self, row: &mut TileRow, scales: &TileRow, scale: f32) -> f32 {
        let scale = self.splat(scale);
        let mut maxima = op!(_mm256_set1_ps(f32::NEG_INFINITY));
        let lines = row.as_chunks_mut::<WIDTH>().0.iter_mut();
        for (line, scales) in lines.zip(scales.as_chunks::<WIDTH>().0) {
            let scores = self.mul(self.mul(self.load(line), self.load(scales)), scale);
            // The second operand where one is NaN.
            maxima = op!(_mm256_max_ps(scores.0, maxima));
            maxima = op!(_mm256_max_ps(scores.1, maxima));
            self.store(scores, line);
        }
        self.largest_lane(maxima)
    }

    #[inline(always)]
    fn exp_scores(self, row: &mut TileRow, scales: &TileRow, base: f32) -> f32 {
        let base = op!(_mm256_set1_ps(base));
        let mut sums = self.splat(0.0);
        let lines = row.as_chunks_mut::<WIDTH>().0.iter_mut();
        for (line, scales) in lines.zip(scales.as_chunks::<WIDTH>().0) {
            let (low, high) = self.load(line);
            let low = self.exp(op!(_mm256_sub_ps(low, base)));
            let high = self.exp(op!(_mm256_sub_ps(high, base)));
            sums = (op!(_mm256_add_ps(sums.0, low)), op!(_mm256_add_ps(sums.1, high)));
            self.store(self.scaled((low, high), self.load(scales)), line);
        }
        self.sum(sums)
    }

    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        sum_eight!(op!(_mm256_add_ps(v.0, v.1)))
    }

    #[inline(always)]
    fn sums<const K: usize, const G: usize>(self, v: [[Self::V; K]; G]) -> [[f32; K]; G] {
        let mut sums = [[0.0; K]; G];
        if K * G != 4 && K * G != 8 {
            for (sum, v) in sums.as_flattened_mut().iter_mut().zip(v.as_flattened()) {
                *sum = self.sum(*v);
            }
            return sums;
        }
        let mut all = [op!(_mm256_setzero_ps()); 8];
        for (all, v) in all.iter_mut().zip(v.as_flattened()) {
            *all = op!(_mm256_add_ps(v.0, v.1));
        }
        let lanes = self.lane_sums::<false>(&all[..K * G]);
        let mut half = [0.0; 8];
        memory_op!(_mm256_storeu_ps(half.as_mut_ptr(), lanes));
        sums.as_flattened_mut().copy_from_slice(&half[..K * G]);
        sums
    }

    #[inline(always)]
    fn quantize<S: Source>(self, x: &[S], q: &mut [u8], counts: &mut AppendCounts) -> E8M8 {
        self.quantize_one(x, q, counts)
    }

    #[inline(always)]
    fn quantize_some<S: Source>(
        self,
        x: [&[S]; AT_ONCE],
        q: [&mut [u8]; AT_ONCE],
        stores: Stores,
        counts: &mut AppendCounts,
    ) -> [E8M8; AT_ONCE] {
        self.quantize_four(x, q, stores, counts)
    }

    #[inline(always)]
    fn store_f16<S: Source>(self, x: &[S], row: &mut [u8], stores: Stores) {
        self.store_halves(x, row, stores);
    }

    #[inline(always)]
    fn store_bf16<S: Source>(self, x: &[S], row: &mut [u8], stores: Stores) {
        self.store_brains(x, row, stores);
    }

    #[inline(always)]
    fn fence(self) {
        op!(_mm_sfence());
    }

    #[inline(always)]
    fn prefetch_write(self, byte: *const u8) {
        // SAFETY: a hint, which has no effect on memory and does not fault, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_ET0>(byte.cast()) };
    }

    #[inline(always)]
    fn prefetch(self, byte: *const u8) {
        // SAFETY: a hint, which has no effect on memory and does not fault, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(byte.cast()) };
    }

    #[inline(always)]
    fn widen_f32(self, bytes: &[u8; 64]) -> Self::V {
        let (low, high) = bytes.split_at(32);
        (
            memory_op!(_mm256_loadu_ps(low.as_ptr().cast())),
            memory_op!(_mm256_loadu_ps(high.as_ptr().cast())),
        )
    }

    #[inline(always)]
    fn widen_f16(self, bytes: &[u8; 32]) -> Self::V {
        let (low, high) = bytes.split_at(16);
        let low = memory_op!(_mm_loadu_si128(low.as_ptr().cast()));
        let high = memory_op!(_mm_loadu_si128(high.as_ptr().cast()));
        (op!(_mm256_cvtph_ps(low)), op!(_mm256_cvtph_ps(high)))
    }

    #[inline(always)]
    fn widen_bf16(self, bytes: &[u8; 32]) -> Self::V {
        let (low, high) = bytes.split_at(16);
        let low = memory_op!(_mm_loadu_si128(low.as_ptr().cast()));
        let high = memory_op!(_mm_loadu_si128(high.as_ptr().cast()));
        let widen = |v| op!(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(v))));
        (widen(low), widen(high))
    }

    #[inline(always)]
    fn widen_i8(self, bytes: &[u8; 16]) -> Self::V {
        let all = memory_op!(_mm_loadu_si128(bytes.as_ptr().cast()));
        let high = op!(_mm_unpackhi_epi64(all, all));
        (
            op!(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(all))),
            op!(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high))),
        )
    }
}
