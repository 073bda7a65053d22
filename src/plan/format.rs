//! How one vector of `head_dim` elements is stored: its bytes and its scales.
//!
//! INT8 is symmetric: `x ≈ scale · q` with `q` in [-127, 127]. A scale is kept as a 16-bit
//! *E8M8* number, the bits 30..15 of an f32: no sign (a scale is never negative), the whole
//! exponent range of f32, and nine significant bits. Widening is one shift. A product of a
//! 9-bit scale and a 7-bit `q` is exact in f32, which is why quantising what was dequantised
//! changes nothing; an IEEE f16 scale would lose that below 2⁻¹⁴ and overflow above 8.3e6.

use serde::Serialize;

use crate::config::{Config, Format, ScaleKind};

/// Bytes of one stored scale.
pub const SCALE_BYTES: u32 = 2;

/// Elements that share a scale in the `per-group-32` form.
pub const SCALE_GROUP: u32 = 32;

/// The element type and, for INT8, what shares a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct KvFormat {
    /// The element type.
    pub element: Format,
    /// The scale form; `None` for every format but INT8.
    pub scale: Option<ScaleKind>,
}

impl KvFormat {
    /// The format that a configuration asks for.
    #[must_use]
    pub fn of(config: &Config) -> Self {
        let scale = (config.cache.format == Format::Int8)
            .then(|| config.cache.int8.as_ref().map_or(ScaleKind::default(), |int8| int8.scale));
        Self { element: config.cache.format, scale }
    }

    /// Bytes of one element.
    #[must_use]
    pub const fn element_bytes(self) -> u32 {
        match self.element {
            Format::F32 => 4,
            Format::F16 | Format::Bf16 => 2,
            Format::Int8 => 1,
        }
    }

    /// Scales stored with one vector of `head_dim` elements.
    #[must_use]
    pub const fn scales_per_row(self, head_dim: u32) -> u32 {
        match self.scale {
            None | Some(ScaleKind::PerTensor) => 0,
            Some(ScaleKind::PerTokenHead) => 1,
            Some(ScaleKind::PerGroup32) => head_dim / SCALE_GROUP,
        }
    }

    /// The name that reports use: `f16`, `int8`, `int8/per-group-32`, …
    #[must_use]
    pub const fn name(self) -> &'static str {
        match (self.element, self.scale) {
            (Format::F32, _) => "f32",
            (Format::F16, _) => "f16",
            (Format::Bf16, _) => "bf16",
            (Format::Int8, Some(ScaleKind::PerGroup32)) => "int8/per-group-32",
            (Format::Int8, Some(ScaleKind::PerTensor)) => "int8/per-tensor",
            (Format::Int8, _) => "int8",
        }
    }
}

/// An INT8 scale as it is stored: the bits 30..15 of a non-negative f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct E8M8(pub u16);

impl E8M8 {
    /// The smallest E8M8 number that is not below `value`; 0 for 0, and 0 for anything below the
    /// smallest normal f32, which is treated as zero. `value` is finite and not negative.
    #[inline]
    #[must_use]
    pub const fn round_up(value: f32) -> Self {
        if value < f32::MIN_POSITIVE {
            return Self(0);
        }
        let bits = value.to_bits() + 0x7FFF;
        // Lossless: the sign bit is clear, so 16 bits remain.
        #[expect(clippy::cast_possible_truncation, reason = "bits 30..15 are 16 bits")]
        Self((bits >> 15) as u16)
    }

    /// The value as f32, exactly.
    #[inline]
    #[must_use]
    pub const fn to_f32(self) -> f32 {
        f32::from_bits((self.0 as u32) << 15)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_round_up_by_less_than_one_part_in_256() {
        for exponent in [-126_i32, -30, -3, 0, 7, 100] {
            for step in 0..1000_u16 {
                let value = (1.0 + f32::from(step) / 1000.0) * 2.0_f32.powi(exponent);
                let scale = E8M8::round_up(value).to_f32();
                assert!(scale >= value && scale <= value * (1.0 + 1.0 / 256.0), "{value}");
                assert_eq!(E8M8::round_up(scale).to_f32().to_bits(), scale.to_bits());
                // 127 · scale is exact, so the largest element gives the same scale again.
                assert_eq!((127.0 * scale / 127.0).to_bits(), scale.to_bits());
            }
        }
        assert_eq!(E8M8::round_up(0.0).to_f32().to_bits(), 0);
        assert_eq!(E8M8::round_up(1e-40).to_f32().to_bits(), 0);
        assert!(E8M8::round_up(f32::MAX / 127.0).to_f32().is_finite());
    }
}
