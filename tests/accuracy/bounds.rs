//! The error bounds of `docs/accuracy.md`, term by term, for one query and head.

use kvpool::config::{Format, ScaleKind};
use kvpool::plan::SPLIT_TOKENS;

/// Half a unit in the last place of f32, relative.
const U: f64 = 1.0 / 16_777_216.0;

/// What a kernel loses, by its name and the stored format.
#[derive(Clone, Copy, Debug)]
pub(super) struct Losses {
    /// Of a score, relative to the sum of the products' magnitudes.
    score: f64,
    /// Of each query element, relative to the query's largest: what is coded as integers or halves.
    query: f64,
    /// Of each weight, relative.
    weight: f64,
    /// Of each weight, relative to its row's largest: what is below that is lost.
    weight_floor: f64,
    /// Of a tile's weights times their values' scales, relative to the tile's largest.
    tile: f64,
    /// 127 scales of V, where they are static.
    pub(super) v_range: f64,
    /// Roundings of the accumulators for a key.
    adds: f64,
    /// What of a product or an element may be taken for 0.
    tiny: f64,
}

impl Losses {
    pub(super) fn of(kernel: &str, format: Format, head_dim: u32) -> Self {
        let dim = f64::from(head_dim);
        let lanes = Self {
            // A chain of head_dim / 16, a tree of four, and the factors.
            score: (dim / 16.0 + 8.0) * U,
            query: 0.0,
            weight: 0.0,
            weight_floor: 0.0,
            tile: 0.0,
            v_range: 0.0,
            adds: 1.0,
            tiny: 2.0_f64.powi(-149),
        };
        let pairs = |bits: i32| Self {
            score: 2.0_f64.powi(-bits) + (dim / 4.0 + 8.0) * 2.0 * U,
            weight: 2.0_f64.powi(-bits),
            adds: 2.0,
            tiny: 2.0_f64.powi(-126),
            ..lanes
        };
        match (kernel, format) {
            ("reference", _) => Self { score: 0.0, adds: 0.0, tiny: 2.0_f64.powi(-149), ..lanes },
            ("avx512-bf16", Format::Bf16) => pairs(8),
            ("avx512+vnni+bf16", Format::Bf16) => pairs(17),
            (_, Format::Int8) if kernel.contains("vnni") || kernel == "avx512-bf16" => {
                Self { query: 1.0 / 65024.0, tile: 1.0 / 131_070.0, tiny: 1e-30, ..lanes }
            }
            ("avx2", Format::Int8) => {
                Self { query: 1.0 / 65534.0, tile: 1.0 / 65534.0, tiny: 1e-30, ..lanes }
            }
            ("plain", _) => Self { score: (dim + 16.0) * 2.0 * U, adds: 2.0, ..lanes },
            ("tensor-cores", Format::F16) => Self {
                score: (dim + 32.0) * 2.0 * U,
                query: 2.0_f64.powi(-21),
                weight: 2.0_f64.powi(-21),
                weight_floor: 2.0_f64.powi(-25),
                adds: 4.0,
                ..lanes
            },
            ("tensor-cores", format) => Self {
                score: if format == Format::Bf16 { 2.0_f64.powi(-16) } else { 0.0 }
                    + (dim + 32.0) * 2.0 * U,
                query: 2.0_f64.powi(-21),
                weight: 2.0_f64.powi(-16),
                adds: 4.0,
                tiny: 2.0_f64.powi(-126),
                ..lanes
            },
            _ => lanes,
        }
    }
}

/// Attention of one query and head in f64, and how far a kernel's may be from it.
#[derive(Debug)]
pub(super) struct Exact {
    /// `[head_dim]`
    pub(super) out: Vec<f64>,
    pub(super) lse: f64,
    /// `[head_dim]`
    pub(super) bound: Vec<f64>,
    pub(super) lse_bound: f64,
    /// The largest magnitude of a value: an output cannot be larger.
    pub(super) hull: f64,
}

/// The keys that a query sees, as they are stored, and what is known of each.
#[derive(Debug)]
pub(super) struct Seen<'a> {
    pub(super) q: &'a [f32],
    /// `[keys, head_dim]`
    pub(super) k: &'a [f64],
    /// `[keys, head_dim]`
    pub(super) v: &'a [f64],
    pub(super) softmax_scale: f64,
    /// How far each element of K may be from what is meant. `[keys, head_dim]`; empty: not at all.
    pub(super) k_error: &'a [f64],
    /// The same of V.
    pub(super) v_error: &'a [f64],
}

/// The bounds of `docs/accuracy.md`.
pub(super) fn exact(seen: &Seen<'_>, losses: &Losses) -> Exact {
    let dim = seen.q.len();
    let keys = seen.k.len() / dim;
    let at =
        |rows: &'_ [f64], key: usize, i: usize| rows.get(key * dim + i).copied().unwrap_or(0.0);
    let amax = seen.q.iter().fold(0.0, |max, q| f64::max(max, f64::from(q.abs())));
    let (mut scores, mut errors) = (Vec::new(), Vec::new());
    for key in 0..keys {
        let (mut dot, mut sum, mut coded, mut stored) = (0.0, 0.0, 0.0, 0.0);
        for (i, q) in seen.q.iter().enumerate() {
            let (q, k) = (f64::from(*q), at(seen.k, key, i));
            dot += q * k;
            sum += (q * k).abs();
            coded += losses.query * amax * k.abs() + losses.tiny * (q.abs() + k.abs() + 1.0);
            stored += q.abs() * at(seen.k_error, key, i);
        }
        let sigma = seen.softmax_scale;
        scores.push(dot * sigma);
        errors.push((losses.score * sum + coded + stored) * sigma);
    }
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores
        .iter()
        .map(|score| if score.is_finite() { (score - max).exp() } else { 0.0 })
        .collect();
    let total: f64 = weights.iter().sum();
    let splits = (keys as f64 / f64::from(SPLIT_TOKENS)).ceil();
    // Roundings on the way of one key's share into the result.
    let adds = losses.adds * (keys as f64).min(SPLIT_TOKENS.into()) + 16.0 + 3.0 * splits;
    let rounding = adds * U + (8.0 + splits) * 6.0 * U;
    // The relative error of each weight, numerator and denominator alike. The largest score may be
    // that of another key for the kernel: it cancels.
    let relative = |key: usize| {
        if weights[key] == 0.0 {
            return 0.0;
        }
        (errors[key] + 2.0 * U * (scores[key] - max).abs() + 6.0 * U).exp_m1() + rounding
    };
    let relative: Vec<f64> = (0..keys).map(relative).collect();
    let p = |key: usize| weights[key] / total;
    let denominator: f64 = (0..keys).map(|key| p(key) * relative[key]).sum();
    let hull = seen.v.iter().zip(0..).fold(0.0, |max, (v, i)| {
        f64::max(max, v.abs() + seen.v_error.get(i).copied().unwrap_or(0.0))
    });
    let tile = tile_error(seen, losses, &weights, total);
    let (mut out, mut bound) = (vec![0.0; dim], vec![tile; dim]);
    // A value that nobody weighs is passed over, be it infinite.
    for key in (0..keys).filter(|key| weights[*key] > 0.0) {
        let lost = p(key) * (relative[key] + losses.weight)
            + losses.weight_floor.min(weights[key]) / total;
        let values = &seen.v[key * dim..][..dim];
        for (i, ((sum, error), v)) in out.iter_mut().zip(&mut bound).zip(values).enumerate() {
            *sum += p(key) * v;
            *error += lost * v.abs();
            *error += p(key) * (1.0 + relative[key]) * at(seen.v_error, key, i);
        }
    }
    for (sum, error) in out.iter().zip(&mut bound) {
        let numerator = *error + sum.abs() * denominator;
        let far = numerator / (1.0 - denominator).max(0.0) + 2.0 * U * sum.abs();
        *error = (far + losses.tiny * keys as f64).min(2.0 * hull);
    }
    let lse = max + total.ln();
    let lse_bound = if denominator < 1.0 {
        -(-denominator).ln_1p() + 4.0 * U * (max.abs() + total.ln().abs() + 1.0)
    } else {
        errors.iter().copied().fold(0.0, f64::max) + 1.0
    };
    Exact { out, lse, bound, lse_bound, hull }
}

/// What coding a tile's weights as integers may add to any element.
fn tile_error(seen: &Seen<'_>, losses: &Losses, weights: &[f64], total: f64) -> f64 {
    if losses.tile == 0.0 {
        return 0.0;
    }
    let dim = seen.q.len();
    let mut error = 0.0;
    for (weights, values) in weights.chunks(64).zip(seen.v.chunks(64 * dim)) {
        let rows = weights.iter().zip(values.chunks(dim));
        let largest = rows.fold(0.0, |max, (weight, row)| {
            // 127 scales of a row are no more than its largest element and a part in 100.
            let range = row.iter().fold(losses.v_range, |max, v| f64::max(max, v.abs() * 1.01));
            f64::max(max, weight * range)
        });
        error += weights.len() as f64 * losses.tile * largest / total;
    }
    error
}

/// How far a stored element may be from what was given. `largest`: of the elements that share a
/// scale.
pub(super) fn storing(format: Format, scale: ScaleKind, x: f64, largest: f64) -> f64 {
    match format {
        Format::F32 => 0.0,
        Format::F16 => x.abs() * 2.0_f64.powi(-11) + 2.0_f64.powi(-25),
        Format::Bf16 => x.abs() * 2.0_f64.powi(-8) + 2.0_f64.powi(-134),
        Format::Int8 if scale == ScaleKind::PerTensor => {
            // The scale of `Spec`, and what is beyond its range.
            (4.0 / 127.0 / 2.0_f64).max(x.abs() - 4.0) * (1.0 + 4.0 * U)
        }
        Format::Int8 => {
            (largest / 127.0 * (1.0 + 1.0 / 256.0) / 2.0).max(127.0 * 2.0_f64.powi(-126))
        }
    }
}
