//! Conversions between f32 and the 16-bit formats, without a branch, so that loops over them
//! become vector code for whatever instruction set the caller is compiled for. (The `half`
//! crate's own conversions ask for the CPU's features at every element.)

use half::{bf16, f16};

use super::tensor::DType;

/// The f32 of an IEEE half: exact, subnormals, infinities and NaN payloads included.
#[inline(always)]
pub(super) const fn f16_to_f32(half: u16) -> f32 {
    let sign = (half as u32 & 0x8000) << 16;
    let magnitude = half as u32 & 0x7FFF;
    // A normal number: move the mantissa, rebias the exponent by 127 - 15.
    let normal = (magnitude << 13) + (112 << 23);
    // Infinity and NaN have the largest exponent in both: rebias once more, keep the payload.
    // A NaN is made quiet, as the hardware's conversion does.
    let quiet = if magnitude > 0x7C00 { 0x0040_0000 } else { 0 };
    let special = (normal + (112 << 23)) | quiet;
    // A subnormal m · 2⁻²⁴: let the subtraction normalise it, exactly.
    let subnormal =
        (f32::from_bits((magnitude << 13) + (113 << 23)) - f32::from_bits(113 << 23)).to_bits();
    let bits = if magnitude >= 0x7C00 {
        special
    } else if magnitude < 0x0400 {
        subnormal
    } else {
        normal
    };
    f32::from_bits(bits | sign)
}

/// The IEEE half nearest to an f32, ties to even; beyond the largest, infinity. A NaN stays one.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "every branch ends in 16 bits")]
pub(super) const fn f32_to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let magnitude = bits & 0x7FFF_FFFF;
    // Normal: rebias by 15 - 127, and round by adding just under half a unit, or half when odd.
    let odd = (magnitude >> 13) & 1;
    let normal = (magnitude.wrapping_sub(112 << 23).wrapping_add(0xFFF + odd)) >> 13;
    // Subnormal: the addition of 1/2 aligns the mantissa's last bit with 2⁻²⁴ and rounds to even.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(126 << 23);
    let nan = 0x7E00 | ((magnitude >> 13) & 0x3FF);
    let half = if magnitude > 0x7F80_0000 {
        nan
    } else if magnitude >= 0x4780_0000 {
        // 65536 and up; what rounds there from below does so by carry.
        0x7C00
    } else if magnitude < 0x3880_0000 {
        subnormal
    } else {
        normal
    };
    (half | sign) as u16
}

/// The f32 of a bfloat16, exactly.
#[inline(always)]
pub(super) const fn bf16_to_f32(x: u16) -> f32 {
    f32::from_bits((x as u32) << 16)
}

/// The bfloat16 nearest to an f32, ties to even. A NaN stays one.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "both branches end in 16 bits")]
pub(super) const fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
    let nan = (bits >> 16) | 0x40;
    (if bits & 0x7FFF_FFFF > 0x7F80_0000 { nan } else { rounded }) as u16
}

/// An element type of the tensors that callers have.
pub(super) trait Source: Copy + Sync {
    /// Which one.
    #[cfg_attr(not(x86_kernels), allow(dead_code, reason = "only vector kernels ask"))]
    const DTYPE: DType;
    /// As f32, exactly.
    fn to_f32(self) -> f32;
    /// As the bits of an IEEE half: verbatim, or rounded to nearest even.
    fn to_f16_bits(self) -> u16;
    /// As the bits of a bfloat16: verbatim, or rounded to nearest even.
    fn to_bf16_bits(self) -> u16;
}

impl Source for f32 {
    const DTYPE: DType = DType::F32;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn to_f16_bits(self) -> u16 {
        f32_to_f16(self)
    }
    #[inline(always)]
    fn to_bf16_bits(self) -> u16 {
        f32_to_bf16(self)
    }
}

impl Source for f16 {
    const DTYPE: DType = DType::F16;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16_to_f32(self.to_bits())
    }
    #[inline(always)]
    fn to_f16_bits(self) -> u16 {
        self.to_bits()
    }
    #[inline(always)]
    fn to_bf16_bits(self) -> u16 {
        f32_to_bf16(f16_to_f32(self.to_bits()))
    }
}

impl Source for bf16 {
    const DTYPE: DType = DType::Bf16;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        bf16_to_f32(self.to_bits())
    }
    #[inline(always)]
    fn to_f16_bits(self) -> u16 {
        f32_to_f16(bf16_to_f32(self.to_bits()))
    }
    #[inline(always)]
    fn to_bf16_bits(self) -> u16 {
        self.to_bits()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_widens_exactly() {
        for bits in 0..=u16::MAX {
            let (half, brain) = (f16::from_bits(bits), bf16::from_bits(bits));
            if half.is_nan() {
                assert!(f16_to_f32(bits).is_nan(), "{bits:#x}");
            } else {
                assert_eq!(f16_to_f32(bits).to_bits(), half.to_f32_const().to_bits(), "{bits:#x}");
                assert_eq!(f32_to_f16(f16_to_f32(bits)), bits, "{bits:#x}");
            }
            if !brain.is_nan() {
                assert_eq!(bf16_to_f32(bits).to_bits(), brain.to_f32_const().to_bits());
                assert_eq!(f32_to_bf16(bf16_to_f32(bits)), bits, "{bits:#x}");
            }
        }
    }

    #[test]
    fn narrowing_rounds_as_the_half_crate_does() {
        // Every exponent and sign with mantissas around the ties of both formats.
        for high in 0..=0x1FF_u32 {
            for top in 0..1024_u32 {
                for low in [0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF] {
                    let x = f32::from_bits((high << 23) | (top << 13) | low);
                    let (half, brain) = (f16::from_f32_const(x), bf16::from_f32_const(x));
                    if x.is_nan() {
                        assert!(f16::from_bits(f32_to_f16(x)).is_nan());
                        assert!(bf16::from_bits(f32_to_bf16(x)).is_nan());
                    } else {
                        assert_eq!(f32_to_f16(x), half.to_bits(), "{x} {:#x}", x.to_bits());
                        assert_eq!(f32_to_bf16(x), brain.to_bits(), "{x}");
                    }
                }
            }
        }
    }
}
