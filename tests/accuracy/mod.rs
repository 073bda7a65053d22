//! Attention against f64 on inputs that are made to hurt, held to the bounds of `docs/accuracy.md`:
//! on every kernel of the CPU, and on the CUDA device where the tests run on it.

mod bounds;

use kvpool::cache::{AttendOptions, Cache};
use kvpool::config::{CacheMode, Format, KernelChoice, ScaleKind};
use kvpool::device::{TensorMut, TensorRef};
use kvpool::plan::Kv;
use kvpool::units::LayerIdx;

use crate::common::{FORMATS, Spec, begin, mix, on_cuda};
use bounds::{Exact, Losses, Seen, exact, storing};

/// K, V or Q (0, 1, 2) of a position, element by element. The third is the number of keys.
type Values = fn(u32, u32, u32, usize) -> f32;

/// A number in -1..1.
fn noise(what: u32, position: u32, i: usize) -> f32 {
    let word = mix(&[what.into(), position.into(), i as u64]);
    (word >> 40) as f32 / (1 << 23) as f32 - 1.0
}

const Q_HEADS: u32 = 3;

/// The last rows of a sequence are asked for.
const ROWS: u32 = 2;

fn spec(format: (Format, ScaleKind), kernel: KernelChoice, head_dim: u32, len: u32) -> Spec {
    Spec {
        mode: CacheMode::Paged,
        format: format.0,
        scale: format.1,
        tokens_per_block: 64,
        windows: vec![0],
        num_q_heads: Q_HEADS,
        head_dim,
        max_seqs: 1,
        max_seq_len: len,
        max_batch_tokens: 1024,
        kernel,
        prefix_reuse: false,
        ..Spec::default()
    }
}

/// What there is to compute with: one a device, all of this CPU's.
fn kernels() -> Vec<KernelChoice> {
    use KernelChoice::{Auto, Avx2, Avx512, Avx512Bf16, Portable, Reference};
    if on_cuda() {
        return vec![Auto];
    }
    let has = |choice: &KernelChoice| kvpool::device::cpu::kernel_name(*choice).is_ok();
    [Reference, Portable, Avx2, Avx512, Avx512Bf16].into_iter().filter(has).collect()
}

/// A sequence that was given some values, and what came of it.
struct Case {
    cache: Cache,
    kernel: &'static str,
    head_dim: usize,
    len: u32,
    /// K and V as given, and as they are stored. `[len, head_dim]`
    given: [Vec<f64>; 2],
    stored: [Vec<f64>; 2],
    /// `[ROWS, Q_HEADS, head_dim]`
    q: Vec<f32>,
    out: Vec<f32>,
    /// `[ROWS, Q_HEADS]`
    lse: Vec<f32>,
}

impl Case {
    fn run(spec: &Spec, len: u32, values: Values) -> Self {
        let mut cache = spec.open();
        let dim = spec.head_dim as usize;
        let seq = begin(&mut cache, 0);
        let row = |what: u32, position: u32, from: usize, n: usize| {
            (from..from + n).map(move |i| values(what, len, position, i))
        };
        let mut given = [Vec::new(), Vec::new()];
        let (mut q, mut out) = (Vec::new(), vec![f32::NAN; (ROWS * Q_HEADS) as usize * dim]);
        let mut lse = vec![f32::NAN; (ROWS * Q_HEADS) as usize];
        let mut first = 0;
        while first < len {
            let left = len - first;
            let count = if left == ROWS { ROWS } else { (left - ROWS).min(1024) };
            let rows = |what| -> Vec<f32> {
                (first..first + count).flat_map(|at| row(what, at, 0, dim)).collect()
            };
            let (k, v) = (rows(0), rows(1));
            let mut step = cache.reserve(&[(seq, count)]).expect("fits");
            step.append(LayerIdx(0), TensorRef::F32(&k), TensorRef::F32(&v)).expect("append");
            if left == ROWS {
                let n = Q_HEADS as usize * dim;
                q = (first..len).flat_map(|at| row(2, at, 0, n)).collect();
                let options = AttendOptions { softmax_scale: None, lse: Some(&mut lse) };
                step.attend(LayerIdx(0), TensorRef::F32(&q), TensorMut::F32(&mut out), options)
                    .expect("attend");
            }
            step.commit().expect("whole");
            for (all, new) in given.iter_mut().zip([k, v]) {
                all.extend(new.into_iter().map(f64::from));
            }
            first += count;
        }
        let stored = [Kv::K, Kv::V].map(|kv| {
            let mut rows = vec![0.0; len as usize * dim];
            cache.export(seq, LayerIdx(0), kv, 0, len, &mut rows).expect("held");
            rows.into_iter().map(f64::from).collect()
        });
        let kernel = cache.device_info().kernel;
        Self { cache, kernel, head_dim: dim, len, given, stored, q, out, lse }
    }

    fn losses(&self) -> Losses {
        let format = self.cache.plan().format;
        let mut losses = Losses::of(self.kernel, format.element, self.head_dim as u32);
        if format.scale == Some(ScaleKind::PerTensor) {
            // As `Spec` has it.
            losses.v_range = 4.0;
        }
        losses
    }

    /// What the result of a row and head must be, from the stored or the given values.
    fn exact(&self, row: u32, head: u32, kv: &[Vec<f64>; 2], errors: &[Vec<f64>; 2]) -> Exact {
        let dim = self.head_dim;
        let seen = (self.len - ROWS + row + 1) as usize * dim;
        let [k, v] = kv;
        let from = (row * Q_HEADS + head) as usize * dim;
        let error = |at: usize| errors[at].get(..seen).unwrap_or(&[]);
        let softmax_scale = f64::from(1.0 / (dim as f32).sqrt());
        let q = &self.q[from..from + dim];
        let (k, v, k_error, v_error) = (&k[..seen], &v[..seen], error(0), error(1));
        exact(&Seen { q, k, v, softmax_scale, k_error, v_error }, &self.losses())
    }

    /// Compares every element with its bound, and gives the largest part of a bound that was used.
    fn check(&self, kv: &[Vec<f64>; 2], errors: &[Vec<f64>; 2], what: &str) -> f64 {
        let mut used = 0.0_f64;
        let format = self.cache.plan().format;
        for (row, head) in (0..ROWS).flat_map(|row| (0..Q_HEADS).map(move |head| (row, head))) {
            let exact = self.exact(row, head, kv, errors);
            let at = (row * Q_HEADS + head) as usize;
            let out = &self.out[at * self.head_dim..][..self.head_dim];
            let place = || format!("{what}: {} {format:?} row {row} head {head}", self.kernel);
            for (i, (got, (want, bound))) in
                out.iter().zip(exact.out.iter().zip(&exact.bound)).enumerate()
            {
                let error = (f64::from(*got) - want).abs();
                assert!(error <= *bound, "{}, {i}: {got}, not {want} ± {bound:e}", place());
                let inside = f64::from(got.abs()) <= exact.hull * 1.01 + 1e-30;
                assert!(inside, "{}, {i}: {got} is larger than any value", place());
                if *bound > 0.0 {
                    used = used.max(error / bound);
                }
            }
            let error = (f64::from(self.lse[at]) - exact.lse).abs();
            assert!(
                error <= exact.lse_bound,
                "{}: lse {}, not {} ± {:e}",
                place(),
                self.lse[at],
                exact.lse,
                exact.lse_bound
            );
        }
        used
    }

    /// How far each stored element may be from what was given.
    fn storage_errors(&self) -> [Vec<f64>; 2] {
        let format = self.cache.plan().format;
        let scale = format.scale.unwrap_or(ScaleKind::PerTokenHead);
        let shared = if scale == ScaleKind::PerGroup32 { 32 } else { self.head_dim };
        [0, 1].map(|kv| {
            let parts = self.given[kv].chunks(shared).flat_map(|part| {
                let largest = part.iter().fold(0.0, |max, x| f64::max(max, x.abs()));
                part.iter().map(move |x| storing(format.element, scale, *x, largest))
            });
            parts.collect()
        })
    }
}

/// Inputs, each with its name. What is stored must be finite.
const CASES: [(&str, Values); 11] = [
    ("noise", |what, _, at, i| noise(what, at, i)),
    ("huge logits", |what, _, at, i| noise(what, at, i) * if what == 2 { 3e4 } else { 1.0 }),
    ("equal keys", |what, _, at, i| match what {
        0 => 0.5,
        _ => noise(what, at, i),
    }),
    ("one dominant key", |what, len, at, i| match what {
        0 if at == len / 3 => 3.0,
        0 => -0.2,
        2 => 1.0,
        _ => noise(what, at, i),
    }),
    ("one dominant key, far away", |what, len, at, i| match what {
        0 if at == len / 3 => 3.0,
        0 => 0.01 * noise(what, at, i),
        2 => 0.6,
        _ => noise(what, at, i) * if at == len / 3 { 1e-3 } else { 1.0 },
    }),
    ("every score larger than the one before", |what, len, at, i| match what {
        0 => 3.0 * at as f32 / len as f32,
        2 => 2.0,
        _ => noise(what, at, i),
    }),
    ("every score smaller than the one before", |what, len, at, i| match what {
        0 => -3.0 * at as f32 / len as f32,
        2 => 2.0,
        _ => noise(what, at, i),
    }),
    ("cancellation", |what, _, at, i| match what {
        0 => (if i % 2 == 0 { 3.0 } else { -3.0 }) + noise(what, at, i) / 64.0,
        1 => (if at % 2 == 0 { 3.5 } else { -3.5 }) + noise(what, at, i) / 64.0,
        _ => 3.0,
    }),
    ("values of very different sizes", |what, _, at, i| match what {
        1 if at % 97 == 3 => 4.0 * noise(what, at, i),
        1 => noise(what, at, i) * 1e-4,
        _ => noise(what, at, i),
    }),
    ("denormals", |what, _, at, i| match what {
        2 => noise(what, at, i) * 1e30,
        _ => noise(what, at, i) * 1e-39,
    }),
    ("the least halves", |what, _, at, i| match what {
        2 => noise(what, at, i) * 1e6,
        _ => noise(what, at, i) * 3e-7,
    }),
];

#[test]
fn adversarial_inputs_stay_within_the_bounds() {
    let len = if on_cuda() { 200 } else { 700 };
    for (name, values) in CASES {
        for (format, kernel) in
            FORMATS.into_iter().flat_map(|format| kernels().into_iter().map(move |k| (format, k)))
        {
            let spec = spec(format, kernel, 64, len);
            let case = Case::run(&spec, len, values);
            let computed = case.check(&case.stored, &[vec![], vec![]], name);
            let stored = case.check(&case.given, &case.storage_errors(), name);
            if kernel == KernelChoice::Auto || kernel == KernelChoice::Avx512 {
                println!(
                    "{name}, {format:?}, {}: {computed:.3} of the bound, {stored:.3} with storing",
                    case.kernel
                );
            }
        }
    }
}

/// The largest element that a format stores, divided by the keys that are added up in f32.
#[test]
fn values_at_the_formats_largest() {
    let len = if on_cuda() { 130 } else { 600 };
    for (format, kernel) in
        FORMATS.into_iter().flat_map(|format| kernels().into_iter().map(move |k| (format, k)))
    {
        let values: Values = match format.0 {
            Format::F16 => |what, _, at, i| match what {
                2 => noise(what, at, i),
                _ => 65504.0 * if noise(what, at, i) > 0.0 { 1.0 } else { -1.0 },
            },
            Format::Int8 if format.1 == ScaleKind::PerTensor => |what, _, at, i| match what {
                2 => noise(what, at, i),
                _ => 4.0 * if noise(what, at, i) > 0.0 { 1.0 } else { -1.0 },
            },
            _ => |what, _, at, i| match what {
                0 => noise(what, at, i) * 1e37,
                1 => f32::MAX / 1024.0 * if noise(what, at, i) > 0.0 { 1.0 } else { -1.0 },
                _ => noise(what, at, i) * 1e-36,
            },
        };
        let case = Case::run(&spec(format, kernel, 64, len), len, values);
        case.check(&case.stored, &[vec![], vec![]], "largest values");
        case.check(&case.given, &case.storage_errors(), "largest values");
    }
}

/// K whose first element is -∞ where a key is masked, and a query of 1 there.
fn masked(what: u32, i: usize, is_masked: bool) -> Option<f32> {
    match (what, i % 64) {
        (0, 0) if is_masked => Some(f32::NEG_INFINITY),
        (2, 0) => Some(1.0),
        _ => None,
    }
}

/// A whole split, and every third key after it.
const MASKED: Values =
    |what, _, at, i| masked(what, i, at < 512 || at % 3 == 0).unwrap_or_else(|| noise(what, at, i));

/// All keys.
const ALL_MASKED: Values =
    |what, _, at, i| masked(what, i, true).unwrap_or_else(|| noise(what, at, i));

/// Whether an infinity in a key gives NaN by a kernel: the one documented exception, of queries in
/// two terms whose second is 0.
fn is_exception(case: &Case, format: Format) -> bool {
    (case.kernel, format) == ("avx512+vnni+bf16", Format::Bf16)
}

/// Keys with a score of -∞, by an infinity that is stored.
#[test]
fn keys_of_minus_infinity_are_left_out() {
    for (format, kernel) in
        FORMATS[..3].iter().flat_map(|format| kernels().into_iter().map(move |k| (*format, k)))
    {
        for (all, values) in [(false, MASKED), (true, ALL_MASKED)] {
            let case = Case::run(&spec(format, kernel, 64, 700), 700, values);
            check_masked(&case, format.0, all);
        }
    }
}

fn check_masked(case: &Case, format: Format, all: bool) {
    if is_exception(case, format) {
        assert!(case.out.iter().all(|x| x.is_nan()), "{} {format:?}: the docs say so", case.kernel);
    } else if all {
        assert!(case.out.iter().all(|x| x.to_bits() == 0), "{} {format:?}", case.kernel);
        assert!(case.lse.iter().all(|x| *x == f32::NEG_INFINITY), "{}", case.kernel);
    } else {
        let used = case.check(&case.stored, &[vec![], vec![]], "masked");
        assert!(used < 1.0);
    }
}

/// INT8 has no infinity: one of K is stored as the largest that the scale of its vector can say,
/// and counted. So it masks nothing; the outputs are those of what is stored.
#[test]
fn int8_stores_no_infinity_and_masks_nothing() {
    for (format, kernel) in
        FORMATS[3..].iter().flat_map(|format| kernels().into_iter().map(move |k| (*format, k)))
    {
        for (masks, values) in [(512 + 63, MASKED), (700, ALL_MASKED)] {
            let case = Case::run(&spec(format, kernel, 64, 700), 700, values);
            assert_eq!(case.cache.stats().nonfinite, masks, "{format:?}");
            case.check(&case.stored, &[vec![], vec![]], "-∞ in INT8");
            let shared = if format.1 == ScaleKind::PerGroup32 { 32 } else { 64 };
            for (given, stored) in case.given[0].chunks(64).zip(case.stored[0].chunks(64)) {
                let rest = given[1..shared].iter().fold(0.0, |max, x| f64::max(max, x.abs()));
                let range = if format.1 == ScaleKind::PerTensor { 4.0 } else { rest };
                let (low, high) = (-range * (1.0 + 1.0 / 256.0) - 1e-6, -range * 0.999_999);
                let is_largest = (low..=high).contains(&stored[0]);
                assert!(given[0].is_finite() || is_largest, "{format:?}: {} of {range}", stored[0]);
            }
        }
    }
}

/// A query that is not finite: NaN in its own row and head, whatever is stored, and nowhere else.
#[test]
fn an_infinite_query_spoils_its_own_row_only() {
    for (format, kernel) in
        FORMATS.into_iter().flat_map(|format| kernels().into_iter().map(move |k| (format, k)))
    {
        let spec = spec(format, kernel, 64, 130);
        let plain = Case::run(&spec, 130, |what, _, at, i| noise(what, at, i));
        let case = Case::run(&spec, 130, |what, len, at, i| match (what, len - at, i) {
            (2, 1, 70) => f32::NEG_INFINITY,
            (2, 2, 130) => f32::INFINITY,
            _ => noise(what, at, i),
        });
        for (at, (got, want)) in case.out.chunks(64).zip(plain.out.chunks(64)).enumerate() {
            // Head 2 of the row before the last, head 1 of the last.
            if at == 2 || at == 4 {
                let lse = case.lse[at];
                assert!(got.iter().all(|x| x.is_nan()), "{} {format:?}: {got:?}", case.kernel);
                assert!(lse.is_nan(), "{} {format:?}: {lse}", case.kernel);
            } else {
                assert!(got == want, "{} {format:?} {at}", case.kernel);
            }
        }
    }
}

/// 128k keys, for every format: the bound grows by 9 units for each split, and is held.
#[test]
fn a_hundred_and_twenty_eight_thousand_keys() {
    if on_cuda() {
        return;
    }
    let len = 1 << 17;
    let cases: [(&str, Values); 5] = [
        ("noise", |what, _, at, i| noise(what, at, i)),
        ("one dominant key", |what, len, at, i| match what {
            0 if at == len / 3 => 3.0,
            2 => 0.5,
            _ => noise(what, at, i),
        }),
        ("equal logits", |what, _, at, i| if what == 0 { 0.5 } else { noise(what, at, i) }),
        ("huge logits", |what, _, at, i| noise(what, at, i) * if what == 2 { 3e4 } else { 1.0 }),
        ("masked", |what, _, at, i| match (what, i % 32) {
            (0, 0) if at < 512 || at % 3 == 0 => f32::NEG_INFINITY,
            (2, 0) => 1.0,
            _ => noise(what, at, i),
        }),
    ];
    for (name, values) in cases {
        let all = kernels();
        let auto = [KernelChoice::Auto];
        let kernels = if name == "noise" || name.starts_with("one") { &all[..] } else { &auto };
        for (format, kernel) in
            FORMATS.into_iter().flat_map(|format| kernels.iter().map(move |k| (format, *k)))
        {
            // In one term it is another kernel for bf16 alone.
            if kernel == KernelChoice::Avx512Bf16 && format.0 != Format::Bf16 {
                continue;
            }
            let case = Case::run(&spec(format, kernel, 32, len), len, values);
            if name == "masked" && format.0 != Format::Int8 {
                check_masked(&case, format.0, false);
                continue;
            }
            let used = case.check(&case.stored, &[vec![], vec![]], name);
            println!("{name}, 128k keys, {format:?}, {}: {used:.3} of the bound", case.kernel);
        }
    }
}

/// Of numbers whose products or sums are beyond f32 nothing is promised but this: it stays in the
/// rows that see them.
#[test]
fn what_overflows_stays_in_its_own_row() {
    if on_cuda() {
        return;
    }
    for kernel in kernels() {
        let spec = spec(FORMATS[0], kernel, 64, 100);
        let plain = Case::run(&spec, 100, |what, _, at, i| noise(what, at, i));
        let case = Case::run(&spec, 100, |what, _, at, i| match (what, at) {
            (1 | 0, 99) => f32::MAX,
            _ => noise(what, at, i),
        });
        let row = Q_HEADS as usize * 64;
        assert!(case.out[..row] == plain.out[..row], "{}", case.kernel);
    }
}
