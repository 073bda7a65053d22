//! Blocks of a few bits an element, expanded to the numbers that they stand for.
//!
//! The layouts are those of GGUF files. `d` and `m` are halves; an element is what its format's
//! arm says, in f32 and in that order of operations.

use super::super::super::convert::{bf16_to_f32, f16_to_f32};

/// How a matrix's elements are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(non_camel_case_types, reason = "the names that GGUF has for them")]
pub enum WeightFormat {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// 32 elements: d, 4 bits each. `d · (q - 8)`
    Q4_0,
    /// 32 elements: d, m, 4 bits each. `d · q + m`
    Q4_1,
    /// 32 elements: d, 5 bits each. `d · (q - 16)`
    Q5_0,
    /// 32 elements: d, m, 5 bits each. `d · q + m`
    Q5_1,
    /// 32 elements: d, 8 bits each. `d · q`
    Q8_0,
    /// 256 elements in eight groups with a scale and a minimum of 6 bits, 4 bits each.
    Q4_K,
    /// As `Q4_K`, 5 bits each.
    Q5_K,
    /// 256 elements in sixteen groups with a scale of 8 bits, 6 bits each.
    Q6_K,
}

/// Two bytes as a half.
#[inline(always)]
fn half(bytes: &[u8], at: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([bytes[at], bytes[at + 1]]))
}

/// A number below 256 as f32.
#[inline(always)]
fn float(q: u8) -> f32 {
    f32::from(q)
}

impl WeightFormat {
    /// The format of a GGUF tensor type; `None` for those that this engine does not read.
    #[must_use]
    pub const fn of_gguf(number: u32) -> Option<Self> {
        Some(match number {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            12 => Self::Q4_K,
            13 => Self::Q5_K,
            14 => Self::Q6_K,
            30 => Self::Bf16,
            _ => return None,
        })
    }

    /// Elements and bytes of a block.
    const fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q4_0 => (32, 18),
            Self::Q4_1 => (32, 20),
            Self::Q5_0 => (32, 22),
            Self::Q5_1 => (32, 24),
            Self::Q8_0 => (32, 34),
            Self::Q4_K => (256, 144),
            Self::Q5_K => (256, 176),
            Self::Q6_K => (256, 210),
        }
    }

    /// Bytes of a row of so many elements; `None` if they are no whole blocks.
    #[must_use]
    pub fn row_bytes(self, elements: usize) -> Option<usize> {
        let (block, bytes) = self.block();
        if !elements.is_multiple_of(block) {
            return None;
        }
        (elements / block).checked_mul(bytes)
    }

    /// Expands a row. Both are whole blocks, as many of the one as of the other.
    #[inline(always)]
    pub(super) fn expand(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            Self::F32 => {
                for (x, bytes) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *x = f32::from_le_bytes(*bytes);
                }
            }
            Self::F16 => {
                for (x, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *x = f16_to_f32(u16::from_le_bytes(*bytes));
                }
            }
            Self::Bf16 => {
                for (x, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *x = bf16_to_f32(u16::from_le_bytes(*bytes));
                }
            }
            Self::Q4_0 => blocks(bytes, out, |b: &[u8; 18], out| {
                let d = half(b, 0);
                for i in 0..16 {
                    out[i] = d * (float(b[2 + i] & 15) - 8.0);
                    out[16 + i] = d * (float(b[2 + i] >> 4) - 8.0);
                }
            }),
            Self::Q4_1 => blocks(bytes, out, |b: &[u8; 20], out| {
                let (d, m) = (half(b, 0), half(b, 2));
                for i in 0..16 {
                    out[i] = d * float(b[4 + i] & 15) + m;
                    out[16 + i] = d * float(b[4 + i] >> 4) + m;
                }
            }),
            Self::Q5_0 => blocks(bytes, out, |b: &[u8; 22], out| {
                let (d, high) = (half(b, 0), word(b, 2));
                five(high, &b[6..], |i, q| out[i] = d * (q - 16.0));
            }),
            Self::Q5_1 => blocks(bytes, out, |b: &[u8; 24], out| {
                let (d, m, high) = (half(b, 0), half(b, 2), word(b, 4));
                five(high, &b[8..], |i, q| out[i] = d * q + m);
            }),
            Self::Q8_0 => blocks(bytes, out, |b: &[u8; 34], out| {
                let d = half(b, 0);
                for i in 0..32 {
                    out[i] = d * f32::from(i8::from_le_bytes([b[2 + i]]));
                }
            }),
            Self::Q4_K => large_blocks(bytes, out, q4_k),
            Self::Q5_K => large_blocks(bytes, out, q5_k),
            Self::Q6_K => large_blocks(bytes, out, q6_k),
        }
    }
}

/// Blocks of 32 elements, one by one.
#[inline(always)]
fn blocks<const B: usize>(bytes: &[u8], out: &mut [f32], one: impl Fn(&[u8; B], &mut [f32; 32])) {
    for (bytes, out) in bytes.as_chunks::<B>().0.iter().zip(out.as_chunks_mut::<32>().0) {
        one(bytes, out);
    }
}

/// Blocks of 256 elements, one by one.
#[inline(always)]
fn large_blocks<const B: usize>(
    bytes: &[u8],
    out: &mut [f32],
    one: impl Fn(&[u8; B], &mut [f32; 256]),
) {
    for (bytes, out) in bytes.as_chunks::<B>().0.iter().zip(out.as_chunks_mut::<256>().0) {
        one(bytes, out);
    }
}

/// Four bytes as a word.
#[inline(always)]
fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// 32 numbers of five bits: four of each in `low`, the fifth in `high`.
#[inline(always)]
fn five(high: u32, low: &[u8], mut one: impl FnMut(usize, f32)) {
    let bit = |at: usize| u8::from(high >> at & 1 == 1) << 4;
    for (i, low) in low[..16].iter().enumerate() {
        one(i, float(low & 15 | bit(i)));
        one(16 + i, float(low >> 4 | bit(16 + i)));
    }
}

/// Scale and minimum of group `j` of eight, packed in 12 bytes of 6 bits each.
#[inline(always)]
fn scale_and_min(packed: &[u8], j: usize) -> (f32, f32) {
    if j < 4 {
        return (float(packed[j] & 63), float(packed[j + 4] & 63));
    }
    let low = packed[j + 4];
    let (scale, min) = (packed[j - 4] >> 6, packed[j] >> 6);
    (float(low & 15 | scale << 4), float(low >> 4 | min << 4))
}

#[inline(always)]
fn q4_k(b: &[u8; 144], out: &mut [f32; 256]) {
    let (d, d_min) = (half(b, 0), half(b, 2));
    let quads = b[16..].as_chunks::<32>().0.iter().zip(out.as_chunks_mut::<64>().0);
    for (j, (q, out)) in quads.enumerate() {
        let (scale, min) = scale_and_min(&b[4..16], 2 * j);
        let (d1, m1) = (d * scale, d_min * min);
        let (scale, min) = scale_and_min(&b[4..16], 2 * j + 1);
        let (d2, m2) = (d * scale, d_min * min);
        for i in 0..32 {
            out[i] = d1 * float(q[i] & 15) - m1;
            out[32 + i] = d2 * float(q[i] >> 4) - m2;
        }
    }
}

#[inline(always)]
fn q5_k(b: &[u8; 176], out: &mut [f32; 256]) {
    let (d, d_min) = (half(b, 0), half(b, 2));
    let high = &b[16..48];
    let quads = b[48..].as_chunks::<32>().0.iter().zip(out.as_chunks_mut::<64>().0);
    for (j, (q, out)) in quads.enumerate() {
        let (scale, min) = scale_and_min(&b[4..16], 2 * j);
        let (d1, m1) = (d * scale, d_min * min);
        let (scale, min) = scale_and_min(&b[4..16], 2 * j + 1);
        let (d2, m2) = (d * scale, d_min * min);
        for i in 0..32 {
            let (first, second) = (high[i] >> (2 * j) & 1, high[i] >> (2 * j + 1) & 1);
            out[i] = d1 * float(q[i] & 15 | first << 4) - m1;
            out[32 + i] = d2 * float(q[i] >> 4 | second << 4) - m2;
        }
    }
}

#[inline(always)]
fn q6_k(b: &[u8; 210], out: &mut [f32; 256]) {
    let d = half(b, 208);
    let halves = b[..128].as_chunks::<64>().0.iter().zip(b[128..192].as_chunks::<32>().0);
    let scales = b[192..208].as_chunks::<8>().0;
    for (((low, high), scales), out) in halves.zip(scales).zip(out.as_chunks_mut::<128>().0) {
        let mut scaled = [0.0; 8];
        for (to, scale) in scaled.iter_mut().zip(scales) {
            *to = d * f32::from(i8::from_le_bytes([*scale]));
        }
        for part in 0..2 {
            for i in 16 * part..16 * part + 16 {
                let h = high[i];
                let q = |low: u8, shift: u32| float(low | (h >> shift & 3) << 4) - 32.0;
                out[i] = scaled[part] * q(low[i] & 15, 0);
                out[32 + i] = scaled[2 + part] * q(low[32 + i] & 15, 2);
                out[64 + i] = scaled[4 + part] * q(low[i] >> 4, 4);
                out[96 + i] = scaled[6 + part] * q(low[32 + i] >> 4, 6);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The half of a small whole number.
    fn half_of(x: u8) -> [u8; 2] {
        half::f16::from_f32(f32::from(x)).to_le_bytes()
    }

    fn expanded<const N: usize>(format: WeightFormat, bytes: &[u8]) -> [f32; N] {
        assert_eq!(format.row_bytes(N), Some(bytes.len()), "{format:?}");
        let mut out = [f32::NAN; N];
        format.expand(bytes, &mut out);
        out
    }

    #[test]
    fn blocks_of_32_are_what_their_formats_say() {
        let low: Vec<u8> = (0..16).map(|i| i | (15 - i) << 4).collect();
        let index = |i: usize| if i < 16 { i as f32 } else { (31 - i) as f32 };
        let (two, three) = (half_of(2), half_of(3));
        let q4_0 = expanded::<32>(WeightFormat::Q4_0, &[&two[..], &low].concat());
        let q4_1 = expanded::<32>(WeightFormat::Q4_1, &[&two[..], &three, &low].concat());
        // The fifth bit of elements 1 and 31.
        let high = 0x8000_0002_u32.to_le_bytes();
        let q5_0 = expanded::<32>(WeightFormat::Q5_0, &[&two[..], &high, &low].concat());
        let q5_1 = expanded::<32>(WeightFormat::Q5_1, &[&two[..], &three, &high, &low].concat());
        // From -128 to 120.
        let q8: Vec<u8> = (0..32_u8).map(|i| (i * 8).wrapping_sub(128)).collect();
        let q8_0 = expanded::<32>(WeightFormat::Q8_0, &[&two[..], &q8].concat());
        for i in 0..32 {
            let fifth = if i == 1 || i == 31 { 16.0 } else { 0.0 };
            assert_eq!(q4_0[i], 2.0 * (index(i) - 8.0));
            assert_eq!(q4_1[i], 2.0 * index(i) + 3.0);
            assert_eq!(q5_0[i], 2.0 * (index(i) + fifth - 16.0));
            assert_eq!(q5_1[i], 2.0 * (index(i) + fifth) + 3.0);
            assert_eq!(q8_0[i], 2.0 * f32::from(i8::from_le_bytes([q8[i]])));
        }
    }

    /// Blocks of any bytes, as the Python package `gguf` 0.x (`gguf.quants.dequantize`) expands
    /// them: the first and the last numbers, and FNV-1a over the bits of all.
    #[test]
    #[expect(clippy::excessive_precision, reason = "exact numbers, as they were printed")]
    fn numbers_are_those_of_another_program_to_the_bit() {
        let (d, m, d_min) = (0.0371, -0.61, 0.0213);
        for (format, halves, first, last, digest) in [
            (
                WeightFormat::Q4_0,
                &[(0, d)][..],
                [0.1484375, 0.185546875],
                [0.296875, -0.51953125],
                0xe9d6_8b17_335a_0825,
            ),
            (
                WeightFormat::Q4_1,
                &[(0, d), (2, m)],
                [-0.16455078125, -0.20166015625],
                [-0.9228515625, -0.5517578125],
                0xec86_02a7_5eed_6825,
            ),
            (
                WeightFormat::Q5_0,
                &[(0, d)],
                [-0.1484375, -0.111328125],
                [0.59375, 0.81640625],
                0x5cfb_daa9_6436_0825,
            ),
            (
                WeightFormat::Q5_1,
                &[(0, d), (2, m)],
                [-0.57275390625, -0.20166015625],
                [-0.2548828125, -0.4775390625],
                0xe010_607f_f044_4825,
            ),
            (
                WeightFormat::Q8_0,
                &[(0, d)],
                [-3.7109375, -0.705078125],
                [7.05078125, 7.71875],
                0xf2f8_495e_4396_4825_u64,
            ),
            (
                WeightFormat::Q4_K,
                &[(0, d), (2, d_min)],
                [2.75506591796875, 4.53631591796875],
                [3.0472412109375, 0.4495849609375],
                0x3ac8_5587_110e_3355,
            ),
            (
                WeightFormat::Q5_K,
                &[(0, d), (2, d_min)],
                [7.20819091796875, 13.44256591796875],
                [18.480712890625, 29.910400390625],
                0xf892_7c31_c378_af55,
            ),
            (
                WeightFormat::Q6_K,
                &[(208, d)],
                [-18.294921875, 4.416015625],
                [-54.7734375, -45.64453125],
                0x305b_2358_f389_17a5,
            ),
        ] {
            let (elements, size) = format.block();
            let mut state = 7_u32;
            let mut bytes: Vec<u8> = (0..2 * size)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    state.to_be_bytes()[0]
                })
                .collect();
            for (block, factor) in [(0, 1.0), (size, 2.0)] {
                for (at, x) in halves {
                    let half = half::f16::from_f64(factor * x).to_le_bytes();
                    bytes[block + at..block + at + 2].copy_from_slice(&half);
                }
            }
            let mut out = vec![f32::NAN; 2 * elements];
            format.expand(&bytes, &mut out);
            assert_eq!(out[..2], first, "{format:?}");
            assert_eq!(out[2 * elements - 2..], last, "{format:?}");
            let fnv = out.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, x| {
                (hash ^ u64::from(x.to_bits())).wrapping_mul(0x100_0000_01b3)
            });
            assert_eq!(fnv, digest, "{format:?}");
        }
    }

    #[test]
    fn scales_of_six_bits_are_unpacked() {
        // Group j has scale 8 j + 1 and minimum 63 - 7 j.
        let (scale, min) = (|j: u8| 8 * j + 1, |j: u8| 63 - 7 * j);
        let mut packed = [0_u8; 12];
        for j in 0..4 {
            packed[usize::from(j)] = scale(j) | (scale(j + 4) >> 4) << 6;
            packed[usize::from(j) + 4] = min(j) | (min(j + 4) >> 4) << 6;
            packed[usize::from(j) + 8] = scale(j + 4) & 15 | (min(j + 4) & 15) << 4;
        }
        for j in 0..8_u8 {
            assert_eq!(scale_and_min(&packed, j.into()), (scale(j).into(), min(j).into()));
        }
    }
}
