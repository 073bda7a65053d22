//! INT8 quantisation of one vector.
//!
//! Symmetric: `x ≈ scale · q` with `q` in [-127, 127], rounded half to even. What is computed on
//! append ([`ScaleKind::PerTokenHead`], [`ScaleKind::PerGroup32`]) has as its scale the smallest
//! E8M8 number that is not below amax / 127, so that nothing saturates: `|x - x'| ≤ scale / 2`,
//! and quantising what was dequantised changes no byte. NaN becomes 0 and ±∞ becomes ±127; both
//! are counted and neither influences a scale.
//!
//! The loops have no branch an element, so that the compiler turns them into vector code for
//! whatever instruction set the caller is compiled for.

use super::AppendCounts;
use super::convert::Source;
use crate::config::ScaleKind;
use crate::plan::{E8M8, SCALE_GROUP};

/// The largest `q`.
pub(super) const Q_MAX: f32 = 127.0;

/// The bits of +∞; a number is finite when its bits without the sign are below.
const INFINITY_BITS: u32 = 0x7F80_0000;

/// 1.5 · 2²³. Added to a number of small magnitude it leaves the number, rounded half to even, in
/// the low bits: `f32::round_ties_even` without the library call that it is before SSE4.1.
const ROUND: f32 = 12_582_912.0;

/// Where `q` is written: bytes of the pool, or `i8`.
pub(super) trait QuantByte: Copy {
    /// The byte that holds these 8 bits.
    fn from_bits(bits: u8) -> Self;
    /// The number.
    fn to_i8(self) -> i8;
}

impl QuantByte for u8 {
    #[inline(always)]
    fn from_bits(bits: u8) -> Self {
        bits
    }
    #[inline(always)]
    fn to_i8(self) -> i8 {
        self.cast_signed()
    }
}

impl QuantByte for i8 {
    #[inline(always)]
    fn from_bits(bits: u8) -> Self {
        bits.cast_signed()
    }
    #[inline(always)]
    fn to_i8(self) -> i8 {
        self
    }
}

/// Quantises elements that share a scale, and gives the scale. `x` and `q`: `[n]`
#[inline(always)]
pub(super) fn quantize_shared<S: Source, Q: QuantByte>(
    x: &[S],
    q: &mut [Q],
    counts: &mut AppendCounts,
) -> E8M8 {
    let mut amax = 0_u32;
    let mut nonfinite = 0_u32;
    for x in x {
        // Magnitudes are ordered as their bits are, and a maximum of integers may be reordered.
        let bits = x.to_f32().to_bits() & 0x7FFF_FFFF;
        let finite = bits < INFINITY_BITS;
        amax = amax.max(if finite { bits } else { 0 });
        nonfinite += u32::from(!finite);
    }
    counts.nonfinite += u64::from(nonfinite);
    let scale = E8M8::round_up(f32::from_bits(amax) / Q_MAX);
    quantize_elements(x, q, scale.to_f32());
    scale
}

/// Quantises elements with a given scale. `x` and `q`: `[n]`
#[inline(always)]
pub(super) fn quantize_static<S: Source, Q: QuantByte>(
    x: &[S],
    q: &mut [Q],
    scale: f32,
    counts: &mut AppendCounts,
) {
    let limit = Q_MAX * scale;
    let mut nonfinite = 0_u32;
    let mut saturated = 0_u32;
    for x in x {
        let magnitude = x.to_f32().abs();
        let finite = magnitude.to_bits() < INFINITY_BITS;
        nonfinite += u32::from(!finite);
        saturated += u32::from(finite & (magnitude > limit));
    }
    counts.nonfinite += u64::from(nonfinite);
    counts.saturated += u64::from(saturated);
    quantize_elements(x, q, scale);
}

/// `q = round(x / scale)`, clamped; all 0 where the scale is 0.
#[inline(always)]
fn quantize_elements<S: Source, Q: QuantByte>(x: &[S], q: &mut [Q], scale: f32) {
    if scale == 0.0 {
        q.fill(Q::from_bits(0));
        return;
    }
    for (q, x) in q.iter_mut().zip(x) {
        let x = x.to_f32();
        // A division, not a product with the reciprocal: only it rounds every tie as promised.
        let y = x / scale;
        // Written so that a NaN falls through, to become 0 below.
        let y = if y > Q_MAX { Q_MAX } else { y };
        let y = if y < -Q_MAX { -Q_MAX } else { y };
        let y = if x.is_nan() { 0.0 } else { y };
        #[expect(clippy::cast_possible_truncation, reason = "the low byte is the number")]
        let bits = (y + ROUND).to_bits() as u8;
        *q = Q::from_bits(bits);
    }
}

/// Quantises one vector.
///
/// `x` and `q` are `[head_dim]`; `scales` is `[scales_per_row]`: 1 for `PerTokenHead`,
/// `head_dim / 32` for `PerGroup32` (`head_dim` is then a multiple of 32), 0 for `PerTensor`,
/// which alone uses `static_scale`.
///
/// # Panics
/// When the lengths do not match.
pub fn quantize_row(
    x: &[f32],
    q: &mut [i8],
    scales: &mut [E8M8],
    kind: ScaleKind,
    static_scale: f32,
) -> AppendCounts {
    assert_eq!(x.len(), q.len(), "as many outputs as inputs");
    let mut counts = AppendCounts::default();
    match kind {
        ScaleKind::PerTokenHead => scales[0] = quantize_shared(x, q, &mut counts),
        ScaleKind::PerGroup32 => {
            let group = SCALE_GROUP as usize;
            assert_eq!(x.len(), scales.len() * group, "one scale for 32 elements");
            let parts = x.chunks_exact(group).zip(q.chunks_exact_mut(group));
            for ((x, q), scale) in parts.zip(scales) {
                *scale = quantize_shared(x, q, &mut counts);
            }
        }
        ScaleKind::PerTensor => quantize_static(x, q, static_scale, &mut counts),
    }
    counts
}

/// `scale · q`, and the largest finite number where that is beyond it: the scale of values close
/// to `f32::MAX` is rounded up, and 127 of it would be infinite.
#[inline(always)]
pub(super) fn dequantize(q: i8, scale: f32) -> f32 {
    (f32::from(q) * scale).clamp(-f32::MAX, f32::MAX)
}

/// Dequantises one vector; the shapes are those of [`quantize_row`].
///
/// # Panics
/// When the lengths do not match.
pub fn dequantize_row(
    q: &[i8],
    scales: &[E8M8],
    kind: ScaleKind,
    static_scale: f32,
    out: &mut [f32],
) {
    assert_eq!(q.len(), out.len(), "as many outputs as inputs");
    let part = match kind {
        ScaleKind::PerGroup32 => SCALE_GROUP as usize,
        ScaleKind::PerTokenHead | ScaleKind::PerTensor => q.len().max(1),
    };
    for (i, (q, out)) in q.chunks(part).zip(out.chunks_mut(part)).enumerate() {
        let scale = match kind {
            ScaleKind::PerTensor => static_scale,
            ScaleKind::PerTokenHead | ScaleKind::PerGroup32 => scales[i].to_f32(),
        };
        for (out, &q) in out.iter_mut().zip(q) {
            *out = dequantize(q.to_i8(), scale);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [ScaleKind; 3] =
        [ScaleKind::PerTokenHead, ScaleKind::PerGroup32, ScaleKind::PerTensor];

    struct Quantized {
        q: Vec<i8>,
        scales: Vec<E8M8>,
        back: Vec<f32>,
        counts: AppendCounts,
    }

    fn quantized(x: &[f32], kind: ScaleKind, static_scale: f32) -> Quantized {
        let num_scales = match kind {
            ScaleKind::PerTokenHead => 1,
            ScaleKind::PerGroup32 => x.len() / 32,
            ScaleKind::PerTensor => 0,
        };
        let mut q = vec![99; x.len()];
        let mut scales = vec![E8M8(0xFFFF); num_scales];
        let mut back = vec![f32::NAN; x.len()];
        let counts = quantize_row(x, &mut q, &mut scales, kind, static_scale);
        dequantize_row(&q, &scales, kind, static_scale, &mut back);
        Quantized { q, scales, back, counts }
    }

    /// The scale of element `i`.
    fn scale_of(done: &Quantized, kind: ScaleKind, static_scale: f32, i: usize) -> f32 {
        match kind {
            ScaleKind::PerTokenHead => done.scales[0].to_f32(),
            ScaleKind::PerGroup32 => done.scales[i / 32].to_f32(),
            ScaleKind::PerTensor => static_scale,
        }
    }

    /// Error bound and idempotence of finite input that does not saturate.
    fn check(x: &[f32], kind: ScaleKind, static_scale: f32) {
        let done = quantized(x, kind, static_scale);
        // (k + 1/2) · scale has a place in f32 for a scale of 9 bits; for a static one of 24
        // bits the quotient's rounding shows.
        let slack = if kind == ScaleKind::PerTensor { 1e-5 } else { 0.0 };
        for (i, (&x, &back)) in x.iter().zip(&done.back).enumerate() {
            let scale = scale_of(&done, kind, static_scale, i);
            let bound = f64::from(scale) * (0.5 + slack);
            let floor = if scale == 0.0 { 127.0 * f64::from(f32::MIN_POSITIVE) } else { 0.0 };
            let error = (f64::from(x) - f64::from(back)).abs();
            assert!(error <= bound.max(floor), "{kind:?} {i}: {x} became {back}, scale {scale}");
            assert!(done.q[i] >= -127);
        }
        assert_eq!(done.counts, AppendCounts::default());
        let again = quantized(&done.back, kind, static_scale);
        assert_eq!(again.q, done.q, "{kind:?}");
        assert_eq!(again.scales, done.scales, "{kind:?}");
    }

    fn noise(n: usize, seed: u32) -> impl Iterator<Item = f32> {
        let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
        (0..n).map(move |_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f32::from(u16::try_from(state >> 16).expect("16 bits")) / 32768.0 - 1.0
        })
    }

    #[test]
    fn edge_48_every_value_stays_within_half_a_scale_and_a_second_pass_changes_nothing() {
        for kind in KINDS {
            for seed in 0..200 {
                let factor = 2.0_f32.powi(i32::try_from(seed % 60).expect("small") - 30);
                let x: Vec<f32> = noise(128, seed).map(|x| x * factor).collect();
                check(&x, kind, factor / 100.0);
            }
        }
    }

    #[test]
    fn edge_47_outliers_and_the_limits_of_f16() {
        for kind in KINDS {
            let mut x: Vec<f32> = noise(64, 7).collect();
            x[5] = 1e4;
            check(&x, kind, 80.0);
            x[40] = -65504.0;
            check(&x, kind, 520.0);
        }
    }

    #[test]
    fn edge_48_halves_go_to_the_even_neighbour() {
        let mut x = vec![0.0; 32];
        x[..6].copy_from_slice(&[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]);
        for kind in KINDS {
            let done = quantized(&x, kind, 1.0);
            assert_eq!(done.q[..6], [127, 0, 2, 2, 0, -2], "{kind:?}");
        }
    }

    #[test]
    fn edge_48_the_rounding_is_round_ties_even() {
        for i in -127 * 64..=127 * 64_i16 {
            let x = f32::from(i) / 64.0;
            let mut q = [0_i8];
            quantize_static(&[x], &mut q, 1.0, &mut AppendCounts::default());
            assert_eq!(f32::from(q[0]).to_bits() << 1, x.round_ties_even().to_bits() << 1, "{x}");
        }
    }

    #[test]
    fn edge_47_zero_and_subnormal_vectors_are_exact_zeros() {
        for kind in [ScaleKind::PerTokenHead, ScaleKind::PerGroup32] {
            for x in [0.0, -0.0, 1e-40, -1e-45, f32::MIN_POSITIVE] {
                let done = quantized(&[x; 64], kind, 0.0);
                assert!(done.scales.iter().all(|scale| scale.0 == 0), "{x}");
                assert!(done.back.iter().all(|x| x.to_bits() == 0), "{x}");
            }
            check(&[128.0 * f32::MIN_POSITIVE; 64], kind, 0.0);
        }
    }

    #[test]
    fn edge_47_the_largest_f32_comes_back_finite() {
        let mut x = vec![f32::MAX; 32];
        x[3] = -f32::MAX;
        x[4] = 1.0;
        for kind in KINDS {
            check(&x, kind, f32::MAX / 126.0);
        }
    }

    #[test]
    fn edge_47_nan_and_infinity_are_counted_and_touch_no_other_element() {
        for kind in KINDS {
            let clean: Vec<f32> = noise(64, 3).collect();
            let mut x = clean.clone();
            x[0] = f32::NAN;
            x[17] = f32::INFINITY;
            x[63] = f32::NEG_INFINITY;
            let done = quantized(&x, kind, 0.01);
            assert_eq!(done.counts.nonfinite, 3, "{kind:?}");
            assert_eq!((done.q[0], done.q[17], done.q[63]), (0, 127, -127), "{kind:?}");
            // The same as if the elements were 0.
            let mut zeroed = clean;
            for i in [0, 17, 63] {
                zeroed[i] = 0.0;
            }
            let expected = quantized(&zeroed, kind, 0.01);
            assert_eq!(done.scales, expected.scales);
            for i in (0..64).filter(|i| ![0, 17, 63].contains(i)) {
                assert_eq!(done.q[i], expected.q[i]);
            }
        }
    }

    #[test]
    fn edge_47_nothing_finite_gives_a_zero_scale() {
        let done = quantized(&[f32::NAN, f32::INFINITY].repeat(16), ScaleKind::PerTokenHead, 0.0);
        assert_eq!(done.scales[0].0, 0);
        assert_eq!(done.counts.nonfinite, 32);
        assert!(done.back.iter().all(|x| x.to_bits() == 0));
    }

    #[test]
    fn edge_47_static_scales_saturate_and_count() {
        let mut x = vec![0.0; 32];
        x[..5].copy_from_slice(&[127.0, 127.4, 128.0, -1e30, f32::INFINITY]);
        let done = quantized(&x, ScaleKind::PerTensor, 1.0);
        assert_eq!(done.q[..5], [127, 127, 127, -127, 127]);
        assert_eq!(done.counts, AppendCounts { nonfinite: 1, saturated: 3 });
    }
}
