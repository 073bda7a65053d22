//! What proves AVX2 and AVX-512, the lanes of AVX-512, and the kernels compiled for them.

use std::arch::x86_64::*;

use super::super::AppendCounts;
use super::super::convert::Source;
use super::append::{AppendItem, AppendJob, Stores, store_item};
use super::avx2_tile;
use super::bf16::Bf16;
use super::bf16_tile::split_many;
use super::exp::{LN2_HIGH, LN2_LOW, LOG2_E, LOWEST, P, ROUND};
use super::fast::{split, split_with, way, way_in_lanes};
use super::kernel::Kernel;
use super::lanes::{
    AT_ONCE, Element, ElementBf16, ElementF16, ElementF32, ElementI8, ElementI8Grouped, Isa, Line,
    WIDTH,
};
use super::madd;
use super::packed::MANY_HEADS;
use super::portion::Portion;
use super::task::{Partial, Split, Task};
use super::tile::{Tile, TileRow};
use super::vnni::{self, Vnni};
use crate::config::{Format, ScaleKind};
use crate::plan::{E8M8, GroupLayout};

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

/// An intrinsic that touches no memory, for whoever has an [`Avx2`] or [`Avx512`] at hand.
macro_rules! op {
    ($op:expr) => {
        // SAFETY: the instruction only computes on registers, and the proof exists only on a CPU
        // that has it (`detect`).
        unsafe { $op }
    };
}

/// An intrinsic that reads or writes behind a reference to all of its operand.
macro_rules! memory_op {
    ($op:expr) => {
        // SAFETY: the reference covers every byte that is accessed and the instruction asks for
        // no alignment; the proof exists only on a CPU that has it (`detect`).
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

pub(super) use {memory_op, op, sum_eight};

impl Avx512 {
    /// The sums of sixteen vectors, in their order, each summed as `Isa::sum` does it: lanes 8
    /// apart first, then 4, 2 and 1, with every addition working for as many vectors as it can.
    #[inline(always)]
    fn sum_sixteen(self, v: [[__m512; 4]; 4]) -> __m512 {
        let a = [v[0][0], v[1][0], v[2][0], v[3][0]];
        let b = [v[0][1], v[1][1], v[2][1], v[3][1]];
        let c = [v[0][2], v[1][2], v[2][2], v[3][2]];
        let d = [v[0][3], v[1][3], v[2][3], v[3][3]];
        let ab = self.sums_two_apart(self.sums_four_apart(a), self.sums_four_apart(b));
        let cd = self.sums_two_apart(self.sums_four_apart(c), self.sums_four_apart(d));
        let even = op!(_mm512_shuffle_ps::<0x88>(ab, cd));
        let odd = op!(_mm512_shuffle_ps::<0xDD>(ab, cd));
        op!(_mm512_add_ps(even, odd))
    }

    /// `exp::exp` in every lane, to the bit.
    #[inline(always)]
    pub(super) fn exp(self, x: __m512) -> __m512 {
        // NaN counts as not below, and is the operand that the maximum gives.
        let above = op!(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, self.splat(LOWEST)));
        let clamped = op!(_mm512_max_ps(self.splat(LOWEST), x));
        let shifted = self.fma(clamped, self.splat(LOG2_E), self.splat(ROUND));
        let n = op!(_mm512_sub_ps(shifted, self.splat(ROUND)));
        let r = self.fma(n, self.splat(-LN2_HIGH), clamped);
        let r = self.fma(n, self.splat(-LN2_LOW), r);
        let mut p = self.splat(P[0]);
        for c in &P[1..] {
            p = self.fma(p, r, self.splat(*c));
        }
        let y = self.fma(p, self.mul(r, r), r);
        let y = op!(_mm512_add_ps(y, self.splat(1.0)));
        let power = op!(_mm512_slli_epi32::<23>(_mm512_castps_si512(shifted)));
        let power = op!(_mm512_add_epi32(power, _mm512_set1_epi32(127 << 23)));
        op!(_mm512_maskz_mul_ps(above, y, _mm512_castsi512_ps(power)))
    }

    /// Of four vectors, lanes 8 apart and then 4: four lanes of each.
    #[inline(always)]
    pub(super) fn sums_four_apart(self, v: [__m512; 4]) -> __m512 {
        let low = op!(_mm512_shuffle_f32x4::<0x44>(v[0], v[1]));
        let high = op!(_mm512_shuffle_f32x4::<0xEE>(v[0], v[1]));
        let ab = op!(_mm512_add_ps(low, high));
        let low = op!(_mm512_shuffle_f32x4::<0x44>(v[2], v[3]));
        let high = op!(_mm512_shuffle_f32x4::<0xEE>(v[2], v[3]));
        let cd = op!(_mm512_add_ps(low, high));
        let low = op!(_mm512_shuffle_f32x4::<0x88>(ab, cd));
        let high = op!(_mm512_shuffle_f32x4::<0xDD>(ab, cd));
        op!(_mm512_add_ps(low, high))
    }

    /// Of every four lanes of two vectors, those 2 apart.
    #[inline(always)]
    fn sums_two_apart(self, a: __m512, b: __m512) -> __m512 {
        let (a, b) = (op!(_mm512_castps_pd(a)), op!(_mm512_castps_pd(b)));
        let low = op!(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)));
        let high = op!(_mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
        op!(_mm512_add_ps(low, high))
    }
}

impl Isa for Avx512 {
    type V = __m512;
    type Half = ();
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
    fn all_weights(
        self,
        task: &Task<'_>,
        tile: &Tile<'_>,
        portion: Portion,
        [k_scales, v_scales]: [&TileRow; 2],
        scores: &mut [TileRow],
        part: &mut Partial<'_>,
    ) {
        self.weights(task, tile, portion, k_scales, v_scales, scores, part);
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
    fn sums<const K: usize, const G: usize>(self, v: [[__m512; K]; G]) -> [[f32; K]; G] {
        let mut sums = [[0.0; K]; G];
        if K != 4 || G > 4 {
            for (sums, v) in sums.iter_mut().zip(v) {
                for (sum, v) in sums.iter_mut().zip(v) {
                    *sum = self.sum(v);
                }
            }
            return sums;
        }
        let mut all = [[self.splat(0.0); 4]; 4];
        for (all, v) in all.iter_mut().zip(v) {
            all[..K].copy_from_slice(&v);
        }
        let mut line = [0.0; WIDTH];
        self.store(self.sum_sixteen(all), &mut line);
        for (sums, four) in sums.iter_mut().zip(line.as_chunks::<4>().0) {
            sums.copy_from_slice(&four[..K]);
        }
        sums
    }

    #[inline(always)]
    fn prefetch(self, byte: *const u8) {
        // SAFETY: a hint, which has no effect on memory and does not fault, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(byte.cast()) };
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
    ($isa:ident, $name:literal, $features:literal, $split:ident, $store:ident, $integers:expr) => {
        #[target_feature(enable = $features)]
        fn $split<E: Element, const WAY: u8>(isa: $isa, work: &mut Split<'_, '_>) {
            isa.split_in_lanes::<E, WAY>(work);
        }

        #[target_feature(enable = $features)]
        fn $store(isa: $isa, job: &AppendJob<'_>, item: AppendItem) -> AppendCounts {
            store_item(isa, job, item)
        }

        impl $isa {
            /// What computes a split in f32 lanes.
            fn in_lanes<E: Element>(task: &Task<'_>) -> SplitFn<Self> {
                match way_in_lanes::<Self, E>(task) {
                    way::RUNS => $split::<E, { way::RUNS }>,
                    way::SPREAD => $split::<E, { way::SPREAD }>,
                    way::FOLLOWS => $split::<E, { way::FOLLOWS }>,
                    _ => $split::<E, { way::PLAIN }>,
                }
            }
        }

        impl Kernel for $isa {
            fn name(&self) -> &'static str {
                $name
            }

            fn split(&self, work: &mut Split<'_, '_>) {
                let layout = work.task.view.layout;
                let format = layout.format;
                if let Some(split) = $integers(layout) {
                    // SAFETY: `self` exists only on a CPU that has the features (`detect`).
                    return unsafe { split(*self, work) };
                }
                let task = work.task;
                let split = match (format.element, format.scale) {
                    (Format::F32, _) => Self::in_lanes::<ElementF32>(task),
                    (Format::F16, _) => Self::in_lanes::<ElementF16>(task),
                    (Format::Bf16, _) => Self::in_lanes::<ElementBf16>(task),
                    (Format::Int8, Some(ScaleKind::PerGroup32)) => {
                        Self::in_lanes::<ElementI8Grouped>(task)
                    }
                    (Format::Int8, _) => Self::in_lanes::<ElementI8>(task),
                };
                // SAFETY: `self` exists only on a CPU that has the features (`detect`).
                unsafe { split(*self, work) }
            }

            fn append(&self, job: &AppendJob<'_>, item: AppendItem) -> AppendCounts {
                // SAFETY: `self` exists only on a CPU that has the features (`detect`).
                unsafe { $store(*self, job, item) }
            }
        }
    };
}

impl Kernel for Vnni {
    fn name(&self) -> &'static str {
        "avx512+vnni"
    }

    fn split(&self, work: &mut Split<'_, '_>) {
        let layout = work.task.view.layout;
        if layout.format.element != Format::Int8 || !Self::takes(layout) {
            return self.plain().split(work);
        }
        let split = if layout.format.scale == Some(ScaleKind::PerGroup32) {
            vnni::split::<true>
        } else {
            vnni::split::<false>
        };
        // SAFETY: `self` exists only on a CPU that has the features (`detect`).
        unsafe { split(*self, work) }
    }

    fn append(&self, job: &AppendJob<'_>, item: AppendItem) -> AppendCounts {
        self.plain().append(job, item)
    }
}

/// Computes one split over bfloat16.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
#[target_feature(enable = "avx512vnni,avx512vbmi,avx512bf16")]
fn split_bf16<const TERMS: usize>(isa: Bf16<TERMS>, work: &mut Split<'_, '_>) {
    if work.task.has_heads(MANY_HEADS) {
        split_many(isa, work);
    } else {
        split_with(isa, work);
    }
}

impl<const TERMS: usize> Bf16<TERMS> {
    /// Whether vectors are computed in pairs of bfloat16. Where each query head has a KV head of
    /// its own, f32 lanes are faster than two terms when one token is decoded: the queries of many
    /// heads stay in the nearest cache. Reading a prompt is slower by some per cent then, but has
    /// to give the same bits.
    fn in_pairs(layout: &GroupLayout, group: usize) -> bool {
        layout.format.element == Format::Bf16 && Self::takes(layout) && (TERMS == 1 || group > 1)
    }
}

impl<const TERMS: usize> Kernel for Bf16<TERMS> {
    fn name(&self) -> &'static str {
        if TERMS == 1 { "avx512-bf16" } else { "avx512+vnni+bf16" }
    }

    fn split(&self, work: &mut Split<'_, '_>) {
        if !Self::in_pairs(work.task.view.layout, work.task.group) {
            return self.plain().split(work);
        }
        // SAFETY: `self` exists only on a CPU that has the features (`detect`).
        unsafe { split_bf16(*self, work) }
    }

    fn in_lanes(&self, layout: &GroupLayout, group: usize) -> bool {
        layout.format.element != Format::Int8 && !Self::in_pairs(layout, group)
    }

    fn append(&self, job: &AppendJob<'_>, item: AppendItem) -> AppendCounts {
        self.plain().append(job, item)
    }
}

/// What computes a split, of vectors that are computed as integers.
type SplitFn<I> = unsafe fn(I, &mut Split<'_, '_>);

impl Avx2 {
    /// Computes one split in f32 lanes.
    #[inline(always)]
    fn split_in_lanes<E: Element, const WAY: u8>(self, work: &mut Split<'_, '_>) {
        // Many rows of one KV head go over it in no other way.
        if WAY == way::PLAIN && avx2_tile::takes::<E>(work.task) {
            avx2_tile::split_many::<E>(self, work);
        } else {
            split::<Self, E, WAY>(self, work);
        }
    }

    /// INT8 of most shapes.
    fn integers(layout: &GroupLayout) -> Option<SplitFn<Self>> {
        if layout.format.element != Format::Int8 || !madd::takes(layout) {
            return None;
        }
        let grouped = layout.format.scale == Some(ScaleKind::PerGroup32);
        Some(if grouped { madd::split::<true> } else { madd::split::<false> })
    }
}

impl Avx512 {
    /// Computes one split in f32 lanes. Vectors that are widened once gain nothing here.
    #[inline(always)]
    fn split_in_lanes<E: Element, const WAY: u8>(self, work: &mut Split<'_, '_>) {
        split::<Self, E, WAY>(self, work);
    }

    /// None: that is what [`Vnni`] is for.
    fn integers(_: &GroupLayout) -> Option<SplitFn<Self>> {
        None
    }
}

kernel!(Avx2, "avx2", "avx2,fma,f16c", split_avx2, store_avx2, Self::integers);
kernel!(
    Avx512,
    "avx512",
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl",
    split_avx512,
    store_avx512,
    Self::integers
);
