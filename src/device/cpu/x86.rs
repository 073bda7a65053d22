//! The lanes of AVX2 and AVX-512, and the kernels compiled for them.

use std::arch::x86_64::*;

use super::super::AppendCounts;
use super::append::{AppendItem, AppendJob, store_item};
use super::fast::split;
use super::kernel::Kernel;
use super::lanes::{
    Element, ElementBf16, ElementF16, ElementF32, ElementI8, ElementI8Grouped, Isa, Line,
};
use super::task::Split;
use crate::config::{Format, ScaleKind};

/// Proof that the CPU has AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub(super) struct Avx2(());

/// Proof that the CPU has AVX-512 F, BW, DQ and VL, and what [`Avx2`] proves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Avx512(());

impl Avx2 {
    /// The instructions, in words.
    pub(super) const NEEDS: &'static str = "AVX2, FMA and F16C";

    /// The proof, where the CPU gives it.
    pub(super) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c"))
        .then_some(Self(()))
    }
}

impl Avx512 {
    /// The instructions, in words.
    pub(super) const NEEDS: &'static str = "AVX-512 F, BW, DQ and VL";

    /// The proof, where the CPU gives it.
    pub(super) fn detect() -> Option<Self> {
        (Avx2::detect().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl"))
        .then_some(Self(()))
    }
}

/// An intrinsic that touches no memory, inside a method of [`Avx2`] or [`Avx512`].
macro_rules! op {
    ($op:expr) => {
        // SAFETY: the instruction only computes on registers, and `self` exists only on a CPU
        // that has it (`detect`).
        unsafe { $op }
    };
}

/// An intrinsic that reads or writes behind a reference to all of its operand.
macro_rules! memory_op {
    ($op:expr) => {
        // SAFETY: the reference covers every byte that is accessed and the instruction asks for
        // no alignment; `self` exists only on a CPU that has it (`detect`).
        unsafe { $op }
    };
}

/// The last steps of the sum: 8 lanes, then 4, 2, 1.
macro_rules! sum_eight {
    ($eight:expr) => {{
        let eight = $eight;
        let high = op!(_mm256_extractf128_ps::<1>(eight));
        let four = op!(_mm_add_ps(_mm256_castps256_ps128(eight), high));
        let two = op!(_mm_add_ps(four, _mm_movehl_ps(four, four)));
        op!(_mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two))))
    }};
}

impl Isa for Avx2 {
    type V = (__m256, __m256);
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
    fn sum(self, v: Self::V) -> f32 {
        sum_eight!(op!(_mm256_add_ps(v.0, v.1)))
    }

    #[inline(always)]
    fn prefetch(self, byte: &u8) {
        memory_op!(_mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(byte).cast()));
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

impl Isa for Avx512 {
    type V = __m512;
    const FMA: bool = true;
    const WIDE: bool = true;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        op!(_mm512_set1_ps(x))
    }

    #[inline(always)]
    fn load(self, from: &Line) -> Self::V {
        memory_op!(_mm512_loadu_ps(from.as_ptr()))
    }

    #[inline(always)]
    fn store(self, v: Self::V, to: &mut Line) {
        memory_op!(_mm512_storeu_ps(to.as_mut_ptr(), v));
    }

    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        op!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        op!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        let high = op!(_mm512_extractf32x8_ps::<1>(v));
        sum_eight!(op!(_mm256_add_ps(_mm512_castps512_ps256(v), high)))
    }

    #[inline(always)]
    fn prefetch(self, byte: &u8) {
        memory_op!(_mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(byte).cast()));
    }

    #[inline(always)]
    fn widen_f32(self, bytes: &[u8; 64]) -> Self::V {
        memory_op!(_mm512_loadu_ps(bytes.as_ptr().cast()))
    }

    #[inline(always)]
    fn widen_f16(self, bytes: &[u8; 32]) -> Self::V {
        let halves = memory_op!(_mm256_loadu_si256(bytes.as_ptr().cast()));
        op!(_mm512_cvtph_ps(halves))
    }

    #[inline(always)]
    fn widen_bf16(self, bytes: &[u8; 32]) -> Self::V {
        let halves = memory_op!(_mm256_loadu_si256(bytes.as_ptr().cast()));
        op!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves))))
    }

    #[inline(always)]
    fn widen_i8(self, bytes: &[u8; 16]) -> Self::V {
        let bytes = memory_op!(_mm_loadu_si128(bytes.as_ptr().cast()));
        op!(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)))
    }
}

macro_rules! kernel {
    ($isa:ident, $name:literal, $features:literal, $split:ident, $store:ident) => {
        #[target_feature(enable = $features)]
        fn $split<E: Element>(isa: $isa, work: &mut Split<'_, '_>) {
            split::<$isa, E>(isa, work);
        }

        #[target_feature(enable = $features)]
        fn $store(job: &AppendJob<'_>, item: AppendItem) -> AppendCounts {
            store_item(job, item)
        }

        impl Kernel for $isa {
            fn name(&self) -> &'static str {
                $name
            }

            fn split(&self, work: &mut Split<'_, '_>) {
                let format = work.task.view.layout.format;
                let split = match (format.element, format.scale) {
                    (Format::F32, _) => $split::<ElementF32>,
                    (Format::F16, _) => $split::<ElementF16>,
                    (Format::Bf16, _) => $split::<ElementBf16>,
                    (Format::Int8, Some(ScaleKind::PerGroup32)) => $split::<ElementI8Grouped>,
                    (Format::Int8, _) => $split::<ElementI8>,
                };
                // SAFETY: `self` exists only on a CPU that has the features (`detect`).
                unsafe { split(*self, work) }
            }

            fn append(&self, job: &AppendJob<'_>, item: AppendItem) -> AppendCounts {
                // SAFETY: `self` exists only on a CPU that has the features (`detect`).
                unsafe { $store(job, item) }
            }
        }
    };
}

kernel!(Avx2, "avx2", "avx2,fma,f16c", split_avx2, store_avx2);
kernel!(
    Avx512,
    "avx512",
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl",
    split_avx512,
    store_avx512
);
