//! What the vector kernels do in their own way: INT8 in integers and in f32 lanes, and the softmax.

use super::super::exp::exp;
use super::super::kernel::{Chosen, Kernel};
use super::super::lanes::{Isa, Portable, WIDTH, sum_lanes};
use super::super::tile::TILE;
use super::super::vnni::Vnni;
use super::super::x86::{Avx2, Avx512};
use super::rig::{FORMATS, Params, Rig, Values, value};
use crate::config::{CacheMode, KernelChoice};

/// A kernel whose INT8 is computed in integers, and one whose is in f32 lanes.
type Pair = (Box<dyn Kernel>, Box<dyn Kernel>);

/// Those that this CPU has.
fn pairs() -> Vec<Pair> {
    let mut pairs: Vec<Pair> = Vec::new();
    if let (Some(vnni), Some(lanes)) = (Vnni::detect(), Avx512::detect()) {
        pairs.push((Box::new(vnni), Box::new(lanes)));
    }
    if let Some(avx2) = Avx2::detect() {
        pairs.push((Box::new(avx2), Box::new(Portable)));
    }
    pairs
}

/// The largest and the mean error of the output and the lse against the reference, in integers and
/// in lanes, and of the reference's INT8 against its f32.
fn errors((integers, lanes): Pair, values: Values, params: Params) -> [(f32, f32); 3] {
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
    let integers = answer(Chosen::Fast(integers));
    let lanes = answer(Chosen::Fast(lanes));
    let exact = prepared(Params { format: FORMATS[0], kernel: KernelChoice::Reference, ..params })
        .attend(&[(0, 4)]);
    let exact: Vec<f32> = exact.out.into_iter().chain(exact.lse).collect();
    let error = |got: &[f32], expected: &[f32]| {
        let errors = got.iter().zip(expected).map(|(a, b)| (a - b).abs());
        let n = u16::try_from(got.len()).expect("few");
        let sum: f32 = errors.clone().sum();
        (errors.fold(0.0, f32::max), sum / f32::from(n))
    };
    [error(&integers, &expected), error(&lanes, &expected), error(&expected, &exact)]
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
fn integers_lose_far_less_than_int8_itself() {
    for values in [value as Values, outliers] {
        for format in &FORMATS[3..] {
            for (group, head_dim, mode) in [
                (1, 64, CacheMode::Contiguous),
                (4, 128, CacheMode::Paged),
                (3, 96, CacheMode::Contiguous),
            ] {
                let params = Params { format: *format, group, head_dim, mode, ..Params::default() };
                for pair in pairs() {
                    let kernel = pair.0.name();
                    let [integers, lanes, stored] = errors(pair, values, params);
                    assert!(
                        integers.0 < stored.0 / 30.0 && integers.1 < stored.1 / 30.0,
                        "{kernel}: {integers:?} {stored:?} {params:?}"
                    );
                    assert!(lanes.0 < 1e-4, "{params:?}");
                }
            }
        }
    }
}

#[test]
fn tiny_and_huge_queries() {
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
            for pair in pairs() {
                let params = Params { format: *format, ..Params::default() };
                let [integers, lanes, _] = errors(pair, values, params);
                assert!(integers.0 < 3e-5 && lanes.0 < 3e-5, "{integers:?} {lanes:?}");
            }
        }
    }
}

#[test]
fn avx2_has_the_weights_of_the_portable_code() {
    let Some(isa) = Avx2::detect() else {
        return;
    };
    for seed in 0..200 {
        let mut row = [0.0; TILE];
        let mut scales = row;
        for (i, (x, scale)) in row.iter_mut().zip(&mut scales).enumerate() {
            *x = 60.0 * value(0, seed, 1, i);
            *scale = value(1, seed, 1, i).abs();
        }
        let special = [f32::NAN, f32::NEG_INFINITY, -0.0, -1e30, 1e-40, -87.3, -87.34];
        if let Some(x) = special.get(seed as usize) {
            row[seed as usize * 5 + 3] = *x;
        }
        let mut fast = row;
        let max = isa.scale_scores(&mut fast, &scales, 0.37);
        let mut slow = row;
        let mut expected = f32::NEG_INFINITY;
        for (x, scale) in slow.iter_mut().zip(&scales) {
            *x = *x * scale * 0.37;
            expected = expected.max(*x);
        }
        assert_eq!(bits(&fast), bits(&slow));
        assert_eq!(max.to_bits(), expected.to_bits());
        let sum = isa.exp_scores(&mut fast, &scales, max);
        let mut sums = [0.0; WIDTH];
        for (i, (x, scale)) in slow.iter_mut().zip(&scales).enumerate() {
            let weight = exp::<true>(*x - max);
            sums[i % WIDTH] += weight;
            *x = weight * scale;
        }
        assert_eq!(bits(&fast), bits(&slow), "{seed}");
        assert_eq!(bits(&[sum]), bits(&[sum_lanes(sums)]), "{seed}");
    }
}

/// The bits, all kinds of NaN being one.
fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() }).collect()
}
