//! Every fast kernel against the reference, over the shapes and formats.

use super::rig::{Answer, FORMATS, Params, Rig, kernels, value};
use crate::config::{CacheMode, Format, KernelChoice, ScaleKind};

/// How far a fast kernel may be from the reference on the same bytes: what f32 sums of up to 256
/// products of numbers below 1, and of up to 1300 weights, lose. The stored format does not
/// matter to that, except that INT8 folds its scales in one more rounding.
fn tolerance(format: Format, kernel: KernelChoice) -> f32 {
    if format == Format::Bf16 && kernel == KernelChoice::Avx512Bf16 {
        // Queries and weights rounded as K and V are: as far as those may be from f32.
        return format_tolerance((format, None));
    }
    match format {
        Format::F32 | Format::F16 | Format::Bf16 => 2e-5,
        Format::Int8 => 3e-5,
    }
}

/// How far attention over a stored format may be from attention over f32, for values below 1.
fn format_tolerance((format, scale): (Format, Option<ScaleKind>)) -> f32 {
    match (format, scale) {
        (Format::F32, _) => 2e-5,
        (Format::F16, _) => 6e-4,
        (Format::Bf16, _) => 5e-3,
        (Format::Int8, Some(ScaleKind::PerTensor)) => 1.5e-2,
        (Format::Int8, _) => 1e-2,
    }
}

fn assert_close(got: &Answer, expected: &Answer, tolerance: f32, what: &dyn std::fmt::Debug) {
    let pairs = got.out.iter().zip(&expected.out).chain(got.lse.iter().zip(&expected.lse));
    for (i, (got, expected)) in pairs.enumerate() {
        let bound = tolerance * expected.abs().max(1.0);
        assert!((got - expected).abs() <= bound, "element {i}: {got}, not {expected}: {what:?}");
    }
}

// Up to eight lines of 8 and of 16, and some behind which lines are left over.
const HEAD_DIMS: [u32; 13] = [8, 16, 24, 32, 40, 48, 64, 72, 80, 96, 112, 128, 256];
const LENGTHS: [u32; 5] = [1, 7, 64, 513, 1300];

/// Mode, tokens per block, window, sinks.
const ARRANGEMENTS: [(CacheMode, u32, u32, u32); 7] = [
    (CacheMode::Contiguous, 16, 0, 0),
    (CacheMode::Paged, 8, 0, 0),
    (CacheMode::Contiguous, 16, 100, 0),
    (CacheMode::Paged, 64, 300, 0),
    (CacheMode::Contiguous, 16, 300, 5),
    (CacheMode::Paged, 16, 100, 20),
    (CacheMode::Paged, 128, 0, 0),
];

#[test]
fn every_kernel_agrees_with_the_reference() {
    let mut case = 0;
    for head_dim in HEAD_DIMS {
        for format in FORMATS {
            if format.1 == Some(ScaleKind::PerGroup32) && head_dim % 32 != 0 {
                continue;
            }
            for (kv_heads, group) in
                [1, 3, 8].into_iter().flat_map(|kv| [1, 3, 4, 8].map(|group| (kv, group)))
            {
                let (mode, tokens_per_block, window, sinks) = ARRANGEMENTS[case % 7];
                let len = LENGTHS[case / 7 % 5];
                case += 1;
                let max_seq_len = len + 50;
                let params = Params {
                    mode,
                    tokens_per_block,
                    format,
                    window,
                    sinks,
                    kv_heads,
                    group,
                    head_dim,
                    max_seq_len,
                    max_step_tokens: None,
                    threads: 2,
                    kernel: KernelChoice::Reference,
                };
                check(params, len);
            }
        }
    }
}

/// The last positions of a sequence of `len` tokens, by every kernel.
fn check(params: Params, len: u32) {
    let mut rig = Rig::new(params);
    rig.begin(1, 42);
    rig.append(1, len, u32::MAX);
    let batch = [(1, len.min(2))];
    let expected = rig.attend(&batch);
    assert!(expected.out.iter().all(|x| x.is_finite()), "poison was read: {params:?}");
    for kernel in kernels() {
        rig.use_kernel(kernel);
        let what = (params, len, kernel);
        let tolerance = tolerance(params.format.0, kernel);
        assert_close(&rig.attend(&batch), &expected, tolerance, &what);
        let half = rig.attend_into(&batch, true);
        assert_close(&half, &expected, tolerance + 5e-4, &what);
    }
}

#[test]
fn every_format_stays_close_to_f32() {
    for kernel in kernels().into_iter().chain([KernelChoice::Reference]) {
        let answers = FORMATS.map(|format| {
            let mut rig = Rig::new(Params { format, head_dim: 96, kernel, ..Params::default() });
            rig.begin(0, 7);
            rig.append(0, 700, u32::MAX);
            rig.attend(&[(0, 3)])
        });
        for (format, answer) in FORMATS.into_iter().zip(&answers) {
            let mut bound = format_tolerance(format);
            if (kernel, format.0) == (KernelChoice::Avx512Bf16, Format::Bf16) {
                bound += tolerance(format.0, kernel);
            }
            assert_close(answer, &answers[0], bound, &(kernel, format));
        }
    }
}

#[test]
fn a_prefill_agrees_with_the_reference() {
    for (mode, window, sinks) in
        [(CacheMode::Contiguous, 0, 0), (CacheMode::Paged, 40, 3), (CacheMode::Contiguous, 200, 3)]
    {
        let params = Params { mode, window, sinks, threads: 2, ..Params::default() };
        let mut rig = Rig::new(params);
        rig.begin(0, 1);
        rig.begin(2, 2);
        rig.append(0, 130, 40);
        rig.append(2, 77, 40);
        rig.append(0, 30, 40);
        rig.use_kernel(KernelChoice::Reference);
        let batch = [(2, 10), (0, 30)];
        let expected = rig.attend(&batch);
        for kernel in kernels() {
            rig.use_kernel(kernel);
            assert_close(&rig.attend(&batch), &expected, tolerance(Format::F16, kernel), &params);
        }
    }
}

#[test]
fn an_int8_key_of_zeros_spoils_no_row_that_does_not_see_it() {
    // Its scale is 0, and the scores that are masked are -∞.
    for format in &FORMATS[3..] {
        for (group, rows) in [(1, 3), (4, 40)] {
            let mut rig = Rig::new(Params { format: *format, group, ..Params::default() });
            rig.values = |what, key, position, i| match (what, position) {
                (0, 575) => 0.0,
                _ => value(what, key, position, i),
            };
            rig.begin(0, 1);
            rig.append(0, 600 - rows, u32::MAX);
            rig.append(0, rows, u32::MAX);
            rig.use_kernel(KernelChoice::Reference);
            let expected = rig.attend(&[(0, rows)]);
            for kernel in kernels() {
                rig.use_kernel(kernel);
                let bound = tolerance(format.0, kernel);
                assert_close(&rig.attend(&[(0, rows)]), &expected, bound, &(format, kernel));
            }
        }
    }
}

#[test]
fn large_scores_do_not_overflow() {
    for format in FORMATS {
        let mut rig = Rig::new(Params { format, ..Params::default() });
        // Scores of some thousands, which exp in f32 would turn into infinity.
        rig.values = |what, key, position, i| {
            value(what, key, position, i) * if what == 2 { 3e4 } else { 1.0 }
        };
        rig.begin(0, 3);
        rig.append(0, 600, u32::MAX);
        rig.use_kernel(KernelChoice::Reference);
        let expected = rig.attend(&[(0, 2)]);
        for kernel in kernels() {
            if (kernel, format.0) == (KernelChoice::Avx512Bf16, Format::Bf16) {
                // Of such scores it knows the first eight bits.
                continue;
            }
            rig.use_kernel(kernel);
            // The scores themselves are only known to some 1e-3.
            assert_close(&rig.attend(&[(0, 2)]), &expected, 2e-2, &(format, kernel));
        }
    }
}
