//! Which settings to use for a model, a budget and a workload: every candidate is replayed, and the
//! best is said with its reasons.

use std::path::Path;

use super::random::ln;
use super::replay::{Replay, ReplayObserver, ReplayOptions, Replayed, VariantResult, replay};
use crate::config::{
    Admission, CacheMode, Capacity, Config, ContiguousLayers, Format, Geometry, ScaleKind, Source,
    VariantConfig, parse,
};
use crate::error::JobError;
use crate::units::Bytes;

/// Sizes of blocks that are tried.
const BLOCKS: [u32; 4] = [16, 32, 64, 128];

/// Parts of the best candidate's memory that are tried with the best of each mode and format, in
/// hundredths.
const SHARES: [u64; 4] = [75, 50, 35, 25];

/// How much of the best score a cheaper setting must keep to be taken instead.
const KEPT: f64 = 0.99;

/// How far a format's answers are from attention in f64, measured on this machine.
#[derive(Clone, Debug, PartialEq)]
pub struct FormatError {
    /// The format, and what shares a scale: `f16`, `int8`, `int8/per-group-32`.
    pub format: String,
    /// The largest error of the outputs that were compared, over values of about ±4.
    pub max_abs_error: f64,
    /// How many outputs were compared.
    pub outputs: u64,
}

/// What was found.
#[derive(Debug)]
pub struct Recommendation {
    /// The settings, as a file: the job's own, with what was chosen in place of its variants.
    pub config: Config,
    /// The result of the chosen settings.
    pub best: VariantResult,
    /// All candidates with the file's capacity, the best first.
    pub ranked: Vec<VariantResult>,
    /// What the results are measured by.
    pub measure: Measure,
    /// The best settings of each mode and format with less memory, the most first.
    pub smaller: Vec<Smaller>,
    /// What candidates that cannot run say.
    pub refused: Vec<String>,
    /// What each format that may be chosen costs in accuracy, where there is more than one. Static
    /// scales are of the model's own K and V, which are not here: INT8 with these is not among
    /// them.
    pub errors: Vec<FormatError>,
}

/// A candidate with less memory than the file gives.
#[derive(Debug)]
pub struct Smaller {
    /// The candidate's name.
    pub of: String,
    /// What came out.
    pub result: VariantResult,
}

/// What results are measured by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// Requests a second: the file has no goals.
    Requests,
    /// Requests a second that keep the file's goals.
    WithinGoals,
    /// Requests a second, since no candidate keeps the file's goals with a single one.
    GoalsOutOfReach,
}

impl Measure {
    fn of(results: &[VariantResult]) -> Self {
        match results.iter().filter_map(|result| result.goodput_per_s).reduce(f64::max) {
            None => Self::Requests,
            Some(most) if most > 0.0 => Self::WithinGoals,
            Some(_) => Self::GoalsOutOfReach,
        }
    }

    /// What a result is worth. What refuses requests is worth the part that it serves.
    #[must_use]
    pub fn score(self, result: &VariantResult) -> f64 {
        match self {
            Self::WithinGoals => result.goodput_per_s.unwrap_or(0.0),
            Self::Requests | Self::GoalsOutOfReach => result.requests_per_s,
        }
    }

    /// Whether a result is as good as the best, or nearly.
    #[must_use]
    pub fn keeps(self, result: &VariantResult, best: &VariantResult) -> bool {
        self.score(result) >= KEPT * self.score(best)
            && result.requests_completed == best.requests_completed
    }
}

/// The formats, each once.
#[must_use]
pub fn different(formats: &[Format]) -> Vec<Format> {
    let mut different = Vec::new();
    for format in formats {
        if !different.contains(format) {
            different.push(*format);
        }
    }
    different
}

/// Replays the candidates of a file, its own variants aside. `formats` are those that may be
/// chosen; one that is named twice counts once.
///
/// # Errors
/// As [`replay`]; [`JobError::NoCandidate`] when no candidate can run.
pub fn recommend(
    source: &Source,
    formats: &[Format],
    observer: &dyn ReplayObserver,
) -> Result<Recommendation, JobError> {
    let formats = &different(formats)[..];
    let candidates = source.with_variants(candidates(&source.config, formats));
    let report = replay(&candidates, &ReplayOptions::default(), observer)?;
    let (mut ranked, refused) = results(report);
    let measure = Measure::of(&ranked);
    ranked.sort_by(|a, b| better(measure, a, b));
    let none =
        || JobError::NoCandidate { path: source.path.clone(), first: refused.first().cloned() };
    let top = ranked.first().ok_or_else(none)?.clone();
    // The best of every kind: one that is no better than others with all of the memory may be the
    // one that needs the least of it.
    let kinds: Vec<(VariantConfig, u64)> = (best_of_kinds(&ranked).iter())
        .filter(|result| measure.keeps(result, &top))
        .filter_map(|result| {
            let kind = named(&candidates.config.variant, &result.variant)?;
            Some((kind, share_of(result, &top)))
        })
        .collect();
    let smaller = with_less(source, &kinds, top.pool_bytes, observer)?;
    let full = ranked.iter().map(|result| (result, result.variant.as_str(), None));
    let less = smaller.iter().map(|Smaller { of, result }| {
        let capacity = Capacity::Budget(Bytes(result.pool_bytes));
        (result, of.as_str(), Some(capacity))
    });
    // Of those with as little, the better one, and then what takes fewer bytes. (The places of the two lists
    // have nothing to do with each other.)
    let least = full.chain(less).filter(|(result, ..)| measure.keeps(result, &top)).min_by(
        |(a, ..), (b, ..)| {
            (share_of(a, &top).cmp(&share_of(b, &top)))
                .then_with(|| worth(measure, a, b))
                .then_with(|| a.pool_bytes.cmp(&b.pool_bytes))
        },
    );
    let (best, of, capacity) = least.ok_or_else(none)?;
    let chosen = named(&candidates.config.variant, of).ok_or_else(none)?;
    let capacity = capacity.or(chosen.capacity);
    let best = best.clone();
    let config = VariantConfig { capacity, ..chosen }.apply(&source.config);
    let errors = if formats.len() > 1 { measured_errors(source, formats)? } else { Vec::new() };
    Ok(Recommendation { config, best, ranked, measure, smaller, refused, errors })
}

/// How much of the best candidate's memory another one takes, in hundredths, rounded up to what is
/// tried: a slot or a block less is not less.
#[must_use]
pub fn share_of(result: &VariantResult, top: &VariantResult) -> u64 {
    let is_within = |share: &u64| {
        u128::from(result.pool_bytes) * 100 <= u128::from(top.pool_bytes) * u128::from(*share)
    };
    SHARES.into_iter().rev().find(is_within).unwrap_or(100)
}

fn named(candidates: &[VariantConfig], name: &str) -> Option<VariantConfig> {
    candidates.iter().find(|candidate| candidate.name == name).cloned()
}

/// The first of each mode and format.
#[must_use]
pub fn best_of_kinds(ranked: &[VariantResult]) -> Vec<&VariantResult> {
    let mut kinds: Vec<&VariantResult> = Vec::new();
    for run in ranked {
        if !kinds.iter().any(|kind| (kind.mode, &kind.format) == (run.mode, &run.format)) {
            kinds.push(run);
        }
    }
    kinds
}

/// Replays candidates with parts of some memory, the largest part first, and of each those that are
/// less than it takes anyway.
fn with_less(
    source: &Source,
    kinds: &[(VariantConfig, u64)],
    bytes: u64,
    observer: &dyn ReplayObserver,
) -> Result<Vec<Smaller>, JobError> {
    let name = |kind: &VariantConfig, share: u64| format!("{} with {share} %", kind.name);
    let parts: Vec<(u64, &VariantConfig)> = SHARES
        .iter()
        .flat_map(|share| kinds.iter().map(move |(kind, own)| (*share, kind, *own)))
        .filter(|(share, _, own)| share < own)
        .map(|(share, kind, _)| (share, kind))
        .collect();
    if parts.is_empty() {
        return Ok(Vec::new());
    }
    let less = parts.iter().map(|(share, kind)| VariantConfig {
        name: name(kind, *share),
        capacity: Some(Capacity::Budget(Bytes(bytes / 100 * share))),
        ..(*kind).clone()
    });
    let report =
        replay(&source.with_variants(less.collect()), &ReplayOptions::default(), observer)?;
    let (done, _) = results(report);
    // Those that do not fit are not among the results.
    let of = |result: VariantResult| {
        let (_, kind) = parts.iter().find(|(share, kind)| name(kind, *share) == result.variant)?;
        Some(Smaller { of: kind.name.clone(), result })
    };
    Ok(done.into_iter().filter_map(of).collect())
}

/// Computes attention in each of the formats but INT8 with static scales: two requests of 480
/// tokens through one layer with the model's heads, and compares outputs with f64.
fn measured_errors(source: &Source, formats: &[Format]) -> Result<Vec<FormatError>, JobError> {
    let Geometry { num_q_heads, num_kv_heads, head_dim, .. } = source.geometry;
    let scale = source.config.cache.int8.as_ref().map_or(ScaleKind::default(), |int8| int8.scale);
    let is_static = |format: Format| format == Format::Int8 && scale == ScaleKind::PerTensor;
    let variants: Vec<String> = formats
        .iter()
        .filter(|format| !is_static(**format))
        .map(|format| {
            let scale = if *format == Format::Int8 {
                format!(", scale = '{scale}'")
            } else {
                String::new()
            };
            format!("{{ name = '{format}', format = '{format}'{scale} }}")
        })
        .collect();
    let text = format!(
        "variant = [{}]
        model = {{ num_layers = 1, num_q_heads = {num_q_heads}, num_kv_heads = {num_kv_heads}, head_dim = {head_dim} }}
        limits = {{ max_seqs = 2, max_seq_len = 512, max_batch_tokens = 128 }}
        cache = {{ mode = 'paged' }}
        [workload]
        kind = 'generator'
        seed = 1
        requests = 2
        prompt_tokens = {{ dist = 'fixed', value = 448 }}
        output_tokens = {{ dist = 'fixed', value = 32 }}
        check_samples = 128",
        variants.join(", ")
    );
    let source = parse(&text, Path::new("the measurement of errors"), &[])?;
    let report = super::run(&source, &mut super::Silent)?;
    let error = |run: super::Run| match run {
        super::Run::Done(run) => Some(FormatError {
            format: run.format,
            max_abs_error: run.max_abs_error?,
            outputs: run.outputs_checked,
        }),
        super::Run::Failed(_) => None,
    };
    Ok(report.runs.into_iter().filter_map(error).collect())
}

/// The results of those that ran and say nothing against themselves, and the errors of the others.
fn results(report: Replay) -> (Vec<VariantResult>, Vec<String>) {
    let (mut done, mut refused) = (Vec::new(), Vec::new());
    for run in report.runs {
        match run {
            Replayed::Done(run) if !run.problems.is_empty() => {
                refused.push(format!("variant {:?}: {}", run.variant, run.problems.join("; ")));
            }
            Replayed::Done(run) if run.requests_completed == 0 => {
                refused.push(format!("variant {:?}: no request was completed", run.variant));
            }
            Replayed::Done(run) => done.push(*run),
            Replayed::Failed(run) => refused.push(run.error),
        }
    }
    (done, refused)
}

/// The better first: who serves more requests, then who serves more of them well, then who has the
/// shorter wait. Numbers count in steps of a thousandth: on the same step the plainer one wins.
/// Whether two numbers are close would be no order: a is close to b and b to c, and a not to c.
fn better(measure: Measure, a: &VariantResult, b: &VariantResult) -> std::cmp::Ordering {
    worth(measure, a, b).then_with(|| a.index.cmp(&b.index))
}

/// The same of results of different replays, whose places say nothing of each other.
fn worth(measure: Measure, a: &VariantResult, b: &VariantResult) -> std::cmp::Ordering {
    let score = |result| step(measure.score(result));
    (b.requests_completed.cmp(&a.requests_completed))
        .then_with(|| score(b).cmp(&score(a)))
        .then_with(|| step(a.first_token_ms.p99).cmp(&step(b.first_token_ms.p99)))
        .then_with(|| a.preemptions.cmp(&b.preemptions))
}

/// Which step of a thousandth a number is on, counted from 1; the same on every machine.
fn step(number: f64) -> i64 {
    #[expect(clippy::cast_possible_truncation, reason = "at most 709,783 to either side")]
    let step = (1000.0 * ln(number.max(f64::MIN_POSITIVE))).round() as i64;
    step
}

/// Every combination that is worth a replay.
fn candidates(base: &Config, formats: &[Format]) -> Vec<VariantConfig> {
    let mut variants = Vec::new();
    for &format in formats {
        let plain = |mode: CacheMode, name: &str| VariantConfig {
            name: format!("{name}-{format}"),
            mode: Some(mode),
            format: (format != base.cache.format).then_some(format),
            ..VariantConfig::default()
        };
        variants.push(plain(CacheMode::Contiguous, "contiguous"));
        for tokens in BLOCKS {
            for admission in [Admission::Guaranteed, Admission::MaxUtilization] {
                let with = |name: &str, mode, contiguous_layers| VariantConfig {
                    tokens_per_block: Some(tokens),
                    admission: Some(admission),
                    contiguous_layers,
                    ..plain(mode, &format!("{name}-b{tokens}-{admission}"))
                };
                variants.push(with("paged", CacheMode::Paged, None));
                // A split by windows; refused where the model has none, or nothing else.
                variants.push(with("hybrid", CacheMode::Hybrid, Some(ContiguousLayers::default())));
                if tokens == BLOCKS[0] {
                    for first in ["first:1", "first:4"] {
                        let layers = Some(ContiguousLayers::Named(first.to_owned()));
                        let name = format!("hybrid-{}", first.replace(':', ""));
                        variants.push(with(&name, CacheMode::Hybrid, layers));
                    }
                }
            }
        }
    }
    variants
}

#[cfg(test)]
mod tests {
    use std::cmp::Ordering;

    use super::*;
    use crate::job::replay::Summary;

    fn result(score: f64, p99: f64, index: usize) -> VariantResult {
        let first_token_ms = Summary { p99, ..Summary::default() };
        VariantResult { requests_per_s: score, first_token_ms, index, ..VariantResult::default() }
    }

    fn ranks(a: &VariantResult, b: &VariantResult) -> Ordering {
        better(Measure::Requests, a, b)
    }

    /// Scores a little less than a thousandth apart: each is close to its neighbour, and the first
    /// is not to the last.
    #[test]
    fn the_ranking_is_an_order() {
        let mut results = Vec::new();
        for (index, at) in (0_u32..12).enumerate() {
            let (up, down) =
                (1.0006_f64.powi(at.cast_signed()), 1.0004_f64.powi(-at.cast_signed()));
            results.push(result(7.0 * up, 900.0 * down, 2 * index));
            results.push(result(7.0, 900.0 * up, 2 * index + 1));
        }
        results.push(result(0.0, 0.0, 24));
        results.push(result(f64::INFINITY, f64::NAN, 25));
        for a in &results {
            assert_eq!(ranks(a, a), Ordering::Equal);
            for b in &results {
                assert_eq!(ranks(a, b), ranks(b, a).reverse());
                for c in &results {
                    if ranks(a, b).is_le() && ranks(b, c).is_le() {
                        assert!(ranks(a, c).is_le(), "{} {} {}", a.index, b.index, c.index);
                    }
                }
            }
        }
        results.sort_by(ranks);
        assert_eq!((results[0].index, results[25].index), (25, 24));
    }

    #[test]
    fn what_is_nearly_the_same_is_on_one_step() {
        assert_eq!(step(1.0), 0);
        assert_eq!(step(1.0004), 0);
        assert_eq!([step(1.002), step(0.998)], [2, -2]);
        assert_eq!(step(0.0), step(f64::MIN_POSITIVE));
        // Two candidates of the same worth: the earlier one is the plainer.
        assert_eq!(ranks(&result(3.0, 80.0, 1), &result(3.0001, 80.0, 0)), Ordering::Greater);
        assert_eq!(ranks(&result(3.01, 80.0, 1), &result(3.0, 80.0, 0)), Ordering::Less);
    }

    #[test]
    fn goals_that_nobody_keeps_measure_nothing() {
        let with = |goodput: Option<f64>, rate: f64| VariantResult {
            goodput_per_s: goodput,
            ..result(rate, 80.0, 0)
        };
        assert_eq!(Measure::of(&[with(None, 3.0)]), Measure::Requests);
        let some = [with(Some(0.0), 9.0), with(Some(1.0), 3.0)];
        assert_eq!(Measure::of(&some), Measure::WithinGoals);
        assert!(!Measure::WithinGoals.keeps(&some[0], &some[1]));
        let none = [with(Some(0.0), 9.0), with(Some(0.0), 3.0)];
        let measure = Measure::of(&none);
        assert_eq!(measure, Measure::GoalsOutOfReach);
        assert!(measure.keeps(&none[0], &none[1]) && !measure.keeps(&none[1], &none[0]));
    }
}
