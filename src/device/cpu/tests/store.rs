//! Storing on append: what AVX2 and AVX-512 do in their own way, against the portable code.

use half::{bf16, f16};

use super::super::super::AppendCounts;
use super::super::super::convert::Source;
use super::super::super::quant::quantize_shared;
use super::super::append::Stores;
use super::super::lanes::{AT_ONCE, Isa, Portable};
use super::super::x86::{Avx2, Avx512};
use super::rig::value;

/// Elements that start at a cache line, as the pool's vectors mostly do.
#[repr(align(64))]
struct Aligned([u8; 2 * CHUNK]);

/// Elements that the tests of 16-bit formats convert at a time.
const CHUNK: usize = 1 << 12;

/// Both ways of quantising, on the same elements, by every instruction set that the CPU has.
fn same<S: Source>(x: &[S]) {
    if let Some(isa) = Avx2::detect() {
        same_by(isa, x);
    }
    if let Some(isa) = Avx512::detect() {
        same_by(isa, x);
    }
}

/// Both ways of quantising, on the same elements.
fn same_by<I: Isa, S: Source>(isa: I, x: &[S]) {
    let (mut fast, mut slow) = (vec![0_u8; x.len()], vec![0_u8; x.len()]);
    let (mut fast_counts, mut slow_counts) = (AppendCounts::default(), AppendCounts::default());
    let fast_scale = isa.quantize(x, &mut fast, &mut fast_counts);
    let slow_scale = quantize_shared(x, &mut slow, &mut slow_counts);
    assert_eq!(fast_scale, slow_scale, "{isa:?}");
    assert_eq!(fast_counts, slow_counts, "{isa:?}");
    assert_eq!(fast, slow, "{isa:?}");
    for stores in [Stores::Cached, Stores::Past] {
        let mut four = Aligned([0; 2 * CHUNK]);
        let mut q: [&mut [u8]; AT_ONCE] = Default::default();
        for (q, part) in q.iter_mut().zip(four.0.chunks_exact_mut(x.len())) {
            *q = part;
        }
        let mut counts = AppendCounts::default();
        let scales = isa.quantize_some([x; AT_ONCE], q, stores, &mut counts);
        isa.fence();
        assert_eq!(scales, [slow_scale; AT_ONCE], "{isa:?}");
        assert_eq!(counts.nonfinite, AT_ONCE as u64 * slow_counts.nonfinite, "{isa:?}");
        let mut parts = four.0.chunks_exact(x.len()).take(AT_ONCE);
        assert!(parts.all(|q| q == slow), "{isa:?}");
    }
}

#[test]
fn quantising_gives_the_same_bytes() {
    let factors = [0.0, 1e-40, 1e-37, 1e-30, 1e-17, 1e-5, 1.0, 300.0, 1e17, 1e20, 2e38];
    for n in [8, 12, 32, 72, 128, 256] {
        for (seed, factor) in (0..400).flat_map(|seed| factors.map(|factor| (seed, factor))) {
            let mut x: Vec<f32> = (0..n).map(|i| value(0, seed, 7, i) * factor).collect();
            if seed % 3 == 0 {
                // Exact ties: halves of a scale that is a power of two.
                x.fill(factor);
                for (i, x) in x.iter_mut().enumerate() {
                    *x *= (value(1, seed, 0, i) * 127.0).round() + 0.5;
                }
                x[1] = 127.0 * factor;
            }
            match seed % 40 {
                7 => x[3] = f32::NAN,
                8 => x[3] = f32::INFINITY,
                9 => x[n - 1] = f32::NEG_INFINITY,
                10 => x[n / 2] = -f32::NAN,
                _ => {}
            }
            same(&x);
            same(&x.iter().map(|x| f16::from_f32_const(*x)).collect::<Vec<_>>());
            same(&x.iter().map(|x| bf16::from_f32_const(*x)).collect::<Vec<_>>());
        }
    }
}

#[test]
fn each_of_four_vectors_has_its_own_scale() {
    fn scales<I: Isa>(isa: I) {
        for n in [8, 32, 72, 128] {
            for largest in 0..n {
                let vectors: Vec<Vec<f32>> = (0..4_u8)
                    .map(|k| {
                        let mut x = vec![0.25; n];
                        // In a different place and with a different sign in each.
                        let i = (largest + usize::from(k)) % n;
                        x[i] = f32::from(k + 1) * if k % 2 == 0 { 3.0 } else { -3.0 };
                        x
                    })
                    .collect();
                let x: [&[f32]; AT_ONCE] = std::array::from_fn(|k| &*vectors[k]);
                let mut bytes = vec![vec![0_u8; n]; AT_ONCE];
                let mut q: [&mut [u8]; AT_ONCE] = Default::default();
                for (q, bytes) in q.iter_mut().zip(&mut bytes) {
                    *q = bytes;
                }
                let mut counts = AppendCounts::default();
                let scales = isa.quantize_some(x, q, Stores::Cached, &mut counts);
                for (k, x) in x.into_iter().enumerate() {
                    let mut expected = vec![0_u8; n];
                    let scale = quantize_shared(x, &mut expected, &mut counts);
                    assert_eq!((scales[k], &bytes[k]), (scale, &expected), "{isa:?} {n} {k}");
                }
            }
        }
    }
    scales(Portable);
    if let Some(isa) = Avx2::detect() {
        scales(isa);
    }
    if let Some(isa) = Avx512::detect() {
        scales(isa);
    }
}

/// Stores elements in both 16-bit formats, in both ways of storing, by `isa` and portably.
fn narrowed_by<I: Isa, S: Source>(isa: I, x: &[S]) {
    let bytes = 2 * x.len();
    let (mut fast, mut slow) = (Aligned([0; 2 * CHUNK]), Aligned([0; 2 * CHUNK]));
    let first = |fast: &[u8], slow: &[u8]| {
        let at = fast.iter().zip(slow).position(|(fast, slow)| fast != slow);
        at.map(|at| (at / 2, x[at / 2].to_f32().to_bits()))
    };
    for stores in [Stores::Cached, Stores::Past] {
        isa.store_f16(x, &mut fast.0[..bytes], stores);
        isa.fence();
        Portable.store_f16(x, &mut slow.0[..bytes], stores);
        // Compared at once: what differs is only looked for where something does.
        let equal = fast.0 == slow.0;
        assert!(equal, "{isa:?} f16 {:x?}", first(&fast.0, &slow.0));
        isa.store_bf16(x, &mut fast.0[..bytes], stores);
        isa.fence();
        Portable.store_bf16(x, &mut slow.0[..bytes], stores);
        let equal = fast.0 == slow.0;
        assert!(equal, "{isa:?} bf16 {:x?}", first(&fast.0, &slow.0));
    }
}

/// The same by every instruction set that the CPU has.
fn narrowed<S: Source>(x: &[S]) {
    if let Some(isa) = Avx2::detect() {
        narrowed_by(isa, x);
    }
    if let Some(isa) = Avx512::detect() {
        narrowed_by(isa, x);
    }
}

#[test]
fn narrowing_gives_the_same_bytes() {
    // Every sign, exponent and upper ten bits of a mantissa, with lower ones around the ties of
    // both formats: NaN of many payloads, infinities, subnormal numbers and zeros among them.
    let lows = [0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF];
    let mut x = Vec::with_capacity(CHUNK);
    for high in 0..1_u32 << 19 {
        for low in lows {
            x.push(f32::from_bits((high << 13) | low));
            if x.len() == CHUNK {
                narrowed(&x);
                x.clear();
            }
        }
    }
    narrowed(&x);
}

#[test]
fn every_number_of_16_bits_gives_the_same_bytes() {
    let bits: Vec<u16> = (0..=u16::MAX).collect();
    for bits in bits.chunks(CHUNK) {
        narrowed(&bits.iter().map(|bits| f16::from_bits(*bits)).collect::<Vec<_>>());
        narrowed(&bits.iter().map(|bits| bf16::from_bits(*bits)).collect::<Vec<_>>());
    }
}

#[test]
fn vectors_of_any_length_are_stored_whole() {
    for n in 0..200 {
        let x: Vec<f32> = (0..n).map(|i| value(0, 1, 2, i)).collect();
        narrowed(&x);
        narrowed(&x.iter().map(|x| f16::from_f32_const(*x)).collect::<Vec<_>>());
        narrowed(&x.iter().map(|x| bf16::from_f32_const(*x)).collect::<Vec<_>>());
    }
}
