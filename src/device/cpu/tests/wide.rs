//! What AVX-512 does in its own way: INT8 with and without VNNI, and quantising on append.

use half::{bf16, f16};

use super::super::super::AppendCounts;
use super::super::super::convert::Source;
use super::super::super::quant::quantize_shared;
use super::super::append::Stores;
use super::super::kernel::Chosen;
use super::super::lanes::{AT_ONCE, Isa};
use super::super::vnni::Vnni;
use super::super::x86::Avx512;
use super::rig::{FORMATS, Params, Rig, Values, value};
use crate::config::{CacheMode, KernelChoice};

/// The largest and the mean error of the output and the lse against the reference, with and
/// without VNNI, and of the reference's INT8 against its f32.
fn errors(values: Values, params: Params) -> [(f32, f32); 3] {
    let prepared = |params| {
        let mut rig = Rig::new(params);
        rig.values = values;
        rig.begin(0, 1);
        rig.append(0, 900, u32::MAX);
        rig
    };
    let mut rig = prepared(params);
    let mut answer = |chosen| {
        rig.device.kernel = chosen;
        let answer = rig.attend(&[(0, 4)]);
        answer.out.into_iter().chain(answer.lse).collect::<Vec<_>>()
    };
    let expected = answer(Chosen::Reference);
    let vnni = answer(Chosen::Fast(Box::new(Vnni::detect().expect("VNNI"))));
    let plain = answer(Chosen::Fast(Box::new(Avx512::detect().expect("AVX-512"))));
    let exact = prepared(Params { format: FORMATS[0], kernel: KernelChoice::Reference, ..params })
        .attend(&[(0, 4)]);
    let exact: Vec<f32> = exact.out.into_iter().chain(exact.lse).collect();
    let error = |got: &[f32], expected: &[f32]| {
        let errors = got.iter().zip(expected).map(|(a, b)| (a - b).abs());
        let n = u16::try_from(got.len()).expect("few");
        let sum: f32 = errors.clone().sum();
        (errors.fold(0.0, f32::max), sum / f32::from(n))
    };
    [error(&vnni, &expected), error(&plain, &expected), error(&expected, &exact)]
}

/// Numbers as a model has them: some dimensions of the keys and some tokens' values much larger
/// than all others.
fn outliers(what: u32, key: u32, position: u32, i: usize) -> f32 {
    let x = value(what, key, position, i);
    match what {
        0 if i % 64 == 5 => 8.0 * x,
        1 if position % 97 == 3 => 20.0 * x,
        2 => 3.0 * x,
        _ => x,
    }
}

#[test]
fn vnni_loses_far_less_than_int8_itself() {
    if Vnni::detect().is_none() {
        return;
    }
    for values in [value as Values, outliers] {
        for format in &FORMATS[3..] {
            for (group, head_dim, mode) in [
                (1, 64, CacheMode::Contiguous),
                (4, 128, CacheMode::Paged),
                (3, 96, CacheMode::Contiguous),
            ] {
                let params = Params { format: *format, group, head_dim, mode, ..Params::default() };
                let [vnni, plain, stored] = errors(values, params);
                assert!(
                    vnni.0 < stored.0 / 30.0 && vnni.1 < stored.1 / 30.0,
                    "{vnni:?} {stored:?} {params:?}"
                );
                assert!(plain.0 < 1e-4, "{params:?}");
            }
        }
    }
}

#[test]
fn tiny_and_huge_queries() {
    if Vnni::detect().is_none() {
        return;
    }
    for format in &FORMATS[3..] {
        for values in [
            (|what, key, position, i| {
                value(what, key, position, i) * if what == 2 { 1e-36 } else { 1.0 }
            }) as Values,
            |what, key, position, i| {
                if what == 2 { 0.0 } else { value(what, key, position, i) }
            },
            |what, key, position, i| {
                value(what, key, position, i) * if what == 2 { 1e-20 } else { 1.0 }
            },
        ] {
            let [vnni, plain, _] = errors(values, Params { format: *format, ..Params::default() });
            assert!(vnni.0 < 3e-5 && plain.0 < 3e-5, "{vnni:?} {plain:?}");
        }
    }
}

/// Both ways of quantising, on the same elements.
fn same<S: Source>(x: &[S]) {
    let Some(isa) = Avx512::detect() else {
        return;
    };
    let (mut fast, mut slow) = (vec![0_u8; x.len()], vec![0_u8; x.len()]);
    let (mut fast_counts, mut slow_counts) = (AppendCounts::default(), AppendCounts::default());
    let fast_scale = isa.quantize(x, &mut fast, &mut fast_counts);
    let slow_scale = quantize_shared(x, &mut slow, &mut slow_counts);
    assert_eq!(fast_scale, slow_scale);
    assert_eq!(fast_counts, slow_counts);
    assert_eq!(fast, slow);
    for stores in [Stores::Cached, Stores::Past] {
        let mut four = vec![0_u8; AT_ONCE * x.len()];
        let mut q: [&mut [u8]; AT_ONCE] = Default::default();
        for (q, part) in q.iter_mut().zip(four.chunks_exact_mut(x.len())) {
            *q = part;
        }
        let mut counts = AppendCounts::default();
        let scales = isa.quantize_some([x; AT_ONCE], q, stores, &mut counts);
        isa.fence();
        assert_eq!(scales, [slow_scale; AT_ONCE]);
        assert_eq!(counts.nonfinite, AT_ONCE as u64 * slow_counts.nonfinite);
        assert!(four.chunks_exact(x.len()).all(|q| q == slow));
    }
}

#[test]
fn quantising_gives_the_same_bytes() {
    let factors = [0.0, 1e-40, 1e-37, 1e-30, 1e-17, 1e-5, 1.0, 300.0, 1e17, 1e20, 2e38];
    for n in [8, 32, 72, 128, 256] {
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
                _ => {}
            }
            same(&x);
            same(&x.iter().map(|x| f16::from_f32_const(*x)).collect::<Vec<_>>());
            same(&x.iter().map(|x| bf16::from_f32_const(*x)).collect::<Vec<_>>());
        }
    }
}
