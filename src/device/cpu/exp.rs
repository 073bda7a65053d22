//! The exponential function of the softmax, in code that the compiler vectorises.

use super::lanes::mul_add;

/// Below this `exp` gives 0: its true value is less than the smallest normal f32.
pub(super) const LOWEST: f32 = -87.336_54;

/// 1.5 · 2²³: added, it leaves a rounded integer in the low bits.
pub(super) const ROUND: f32 = 12_582_912.0;

/// log₂ e.
pub(super) const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// ln 2 in two parts; the product of the first with a small integer is exact.
pub(super) const LN2_HIGH: f32 = 0.693_359_4;
pub(super) const LN2_LOW: f32 = -2.121_944_4e-4;

/// e^r = 1 + r + r² · P(r); the coefficients of P, highest power first, are those of the Cephes
/// library.
pub(super) const P: [f32; 6] =
    [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5];

/// eˣ for x ≤ 0, to a relative error of 2.5e-7 (about 2 units in the last place). 0 for what is
/// below -87.3366 (-∞ included); NaN for NaN.
#[inline(always)]
pub(super) fn exp<const FMA: bool>(x: f32) -> f32 {
    // Comparisons are false for NaN, which falls through all of them.
    let clamped = if x < LOWEST { LOWEST } else { x };
    // x = n · ln 2 + r with |r| ≤ ln 2 / 2.
    let shifted = mul_add::<FMA>(clamped, LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = mul_add::<FMA>(n, -LN2_HIGH, clamped);
    let r = mul_add::<FMA>(n, -LN2_LOW, r);
    let mut p = P[0];
    for c in &P[1..] {
        p = mul_add::<FMA>(p, r, *c);
    }
    let y = mul_add::<FMA>(p, r * r, r) + 1.0;
    // Times 2ⁿ: n is in -126..=0, so its exponent is that of a normal number.
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    if x < LOWEST { 0.0 } else { y * power }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worst(exp: impl Fn(f32) -> f32) -> f64 {
        (0..=4_000_000)
            .map(|i| {
                #[expect(clippy::cast_precision_loss, reason = "i is below 2²⁴")]
                let x = -87.3 * (i as f32 / 4_000_000.0);
                let truth = f64::from(x).exp();
                ((f64::from(exp(x)) - truth) / truth).abs()
            })
            .fold(0.0, f64::max)
    }

    #[test]
    fn the_error_is_as_stated() {
        let (one, two) = (worst(exp::<true>), worst(exp::<false>));
        assert!(one < 2.5e-7 && two < 2.5e-7, "{one:e} {two:e}");
    }

    #[test]
    fn special_values() {
        for exp in [exp::<true>, exp::<false>] {
            assert_eq!(exp(0.0).to_bits(), 1.0_f32.to_bits());
            assert_eq!(exp(-0.0).to_bits(), 1.0_f32.to_bits());
            assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0);
            assert_eq!(exp(-1e30).to_bits(), 0);
            assert_eq!(exp(-88.0).to_bits(), 0);
            assert!(exp(-87.33) > 0.0);
            assert!(exp(f32::NAN).is_nan());
        }
    }
}
