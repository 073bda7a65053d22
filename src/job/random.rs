//! Seeded numbers that are the same on every machine.
//!
//! Nothing here calls a mathematical function of the platform: `exp` and `ln` may differ in their
//! last bit from one C library to the next, and a length that is rounded from them could then
//! differ by a whole token.

/// The increment of SplitMix64: 2⁶⁴ divided by the golden ratio, odd.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// The finaliser of SplitMix64: every bit of the input reaches every bit of the output.
#[inline]
#[must_use]
pub(super) const fn scramble(word: u64) -> u64 {
    let x = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// Mixes words into one; their order counts.
#[inline]
#[must_use]
pub(super) fn mix(words: &[u64]) -> u64 {
    words.iter().fold(GOLDEN, |state, word| scramble((state ^ word).wrapping_add(GOLDEN)))
}

/// The upper half of a word.
#[inline]
#[must_use]
pub(super) const fn high(word: u64) -> u32 {
    (word >> 32) as u32
}

/// The lower half of a word.
#[inline]
#[must_use]
pub(super) const fn low(word: u64) -> u32 {
    #[expect(clippy::cast_possible_truncation, reason = "the lower half is what is wanted")]
    let half = word as u32;
    half
}

/// A SplitMix64 generator.
#[derive(Clone, Debug)]
pub(super) struct Rng(u64);

impl Rng {
    /// A generator whose sequence depends on the seed and on what it is for.
    pub(super) fn new(seed: u64, purpose: u64) -> Self {
        Self(mix(&[seed, purpose]))
    }

    /// 64 random bits.
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        scramble(self.0)
    }

    /// A number below `end`, which is at least 1. The bias is below 2⁻³².
    pub(super) fn below(&mut self, end: u32) -> u32 {
        high(u64::from(high(self.next())) * u64::from(end))
    }

    /// A number in [0, 1).
    pub(super) fn unit(&mut self) -> f64 {
        f64::from(high(self.next())) / 4_294_967_296.0
    }

    /// A normally distributed number: the sum of twelve uniform ones has variance 1. Nothing
    /// beyond ±6 occurs.
    pub(super) fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.unit()).sum::<f64>() - 6.0
    }
}

/// The natural logarithm, from operations that IEEE 754 rounds the same way everywhere. `x` is
/// normal and above 0.
#[must_use]
pub(super) fn ln(x: f64) -> f64 {
    // x = m · 2^e with m in [1, 2), and ln m = 2 · artanh((m - 1) / (m + 1)).
    let bits = x.to_bits();
    let exponent = f64::from(low(bits >> 52) & 0x7FF) - 1023.0;
    let m = f64::from_bits(bits & 0x000F_FFFF_FFFF_FFFF | 1023 << 52);
    let s = (m - 1.0) / (m + 1.0);
    let square = s * s;
    let mut term = s;
    let mut sum = 0.0;
    // s is at most a third, so the terms fall to 2^-54 within 17.
    for i in 0..20 {
        sum += term / f64::from(2 * i + 1);
        term *= square;
    }
    2.0 * sum + exponent * std::f64::consts::LN_2
}

/// eˣ from additions, multiplications and divisions alone, which IEEE 754 rounds the same way
/// everywhere. `x` within ±700.
#[must_use]
pub(super) fn exp(x: f64) -> f64 {
    // e^x = (e^(x / 1024))^1024, and the series of so small a power ends soon.
    let small = x.clamp(-700.0, 700.0) / 1024.0;
    let mut term = 1.0;
    let mut sum = 1.0;
    for i in 1..=16 {
        term *= small / f64::from(i);
        sum += term;
    }
    (0..10).fold(sum, |power, _| power * power)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_fixed() {
        let mut rng = Rng::new(7, 1);
        let first = rng.next();
        assert_eq!(Rng::new(7, 1).next(), first);
        assert_ne!(Rng::new(8, 1).next(), first);
        assert_ne!(Rng::new(7, 2).next(), first);
        assert_ne!(rng.next(), first);
        // The published first output of SplitMix64 with state 0.
        assert_eq!(Rng(0).next(), 0xE220_A839_7B1D_CDAF);
        assert_ne!(mix(&[1, 2]), mix(&[2, 1]));
    }

    #[test]
    fn numbers_are_distributed_as_they_say() {
        let mut rng = Rng::new(1, 1);
        let normals: Vec<f64> = (0..20_000).map(|_| rng.normal()).collect();
        let mean = normals.iter().sum::<f64>() / 20_000.0;
        let variance = normals.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 20_000.0;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05, "{mean} {variance}");
        let mut seen = [0_u32; 7];
        for _ in 0..7000 {
            seen[rng.below(7) as usize] += 1;
        }
        assert!(seen.iter().all(|count| (850..1150).contains(count)), "{seen:?}");
    }

    #[test]
    fn ln_is_the_logarithm() {
        for x in [1e-9, 0.001, 0.3, 0.5, 0.999_999, 1.0, 1.5, 2.0, 3.0, 1e12] {
            let error = (ln(x) - f64::ln(x)).abs();
            assert!(error <= 1e-13 * f64::ln(x).abs().max(1.0), "ln({x}): {error}");
        }
        assert!((exp(ln(0.37)) - 0.37).abs() < 1e-13);
    }

    #[test]
    fn exp_is_the_exponential() {
        for x in [-30.0, -2.5, -1e-9, 0.0, 0.3, 1.0, 4.0, 12.5, 300.0] {
            let error = (exp(x) / f64::exp(x) - 1.0).abs();
            assert!(error < 1e-12, "exp({x}): {error}");
        }
        assert!(exp(1e9).is_finite() && exp(-1e9) >= 0.0);
    }
}
