//! What AVX-512 does in its own way: INT8 with and without VNNI.

use super::super::kernel::Chosen;
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
