//! What a cache format costs: perplexity, and how far the scores are from those of an f32 cache.
//!
//! The text is cut into windows, each read by a sequence of its own. All formats read a piece of a
//! window one after the other, so that the scores of only one piece are kept. Weights and
//! arithmetic are the same for all; the cache alone differs.

use std::ops::AddAssign;

use serde::Serialize;

use super::engine::{Engine, StepInput};
use super::weights::Model;
use crate::cache::{BeginOptions, Cache, SeqHandle};
use crate::config::{
    CacheMode, Capacity, Config, ContiguousLayers, Format, HybridConfig, Int8Config, ScaleKind,
    StaticScale, verify,
};
use crate::error::ModelError;
use crate::plan::Plan;

/// Tokens that are read at once.
const PIECE: usize = 64;

/// Tokens of the first window that are read in every mode.
const MODE_TOKENS: usize = 192;

/// The formats that can be measured, by their names in a report.
pub const FORMATS: [&str; 9] = [
    "f32",
    "f16",
    "bf16",
    "int8/per-token-head",
    "int8/per-group-32",
    "int8/per-tensor",
    "int8/per-token-head+spread",
    "int8/per-group-32+spread",
    "int8/per-tensor+spread",
];

/// What is measured.
#[derive(Clone, Debug)]
pub struct Options {
    /// Windows of the text, from its beginning on.
    pub windows: usize,
    /// Tokens of a window.
    pub window_tokens: usize,
    /// Those of [`FORMATS`] that are measured beside f32, which the others are compared with; none
    /// stands for all.
    pub formats: Vec<String>,
}

/// One format of the cache.
#[derive(Clone, Debug)]
struct Case {
    name: String,
    config: Config,
    /// Whether K and V are turned before they are stored ([`Engine::spread`]).
    spreads: bool,
}

/// What a format costs.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    /// `f16`, `int8/per-token-head`, …
    pub format: String,
    /// Bytes of K and V of one token in all layers, scales included.
    pub bytes_per_token: u64,
    /// e to the mean negative logarithm of the next token's share.
    pub perplexity: f64,
    /// Its standard error over the tokens.
    pub perplexity_error: f64,
    /// How much more than with an f32 cache, in percent.
    pub change_percent: f64,
    /// Standard error of that change, over the tokens' differences: what both have in common is not
    /// in it. In percent
    pub change_error_percent: f64,
    /// Mean Kullback-Leibler divergence of the shares from those with an f32 cache.
    pub mean_kl: f64,
    /// How often the likeliest token is that of the f32 cache, in percent.
    pub same_top_percent: f64,
    /// Whether contiguous, paged and hybrid gave the same bits.
    pub modes_equal: bool,
    /// `[cache.int8]` as it was measured: with `per-tensor` also the scales, which a file can have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub int8: Option<Int8Config>,
}

/// All that was measured.
#[derive(Clone, Debug, Serialize)]
pub struct QualityReport {
    /// Windows that were read.
    pub windows: usize,
    /// Tokens of each.
    pub window_tokens: usize,
    /// Tokens that were predicted.
    pub predicted: u64,
    /// By format; the first is f32.
    pub formats: Vec<Measured>,
    /// Formats that the model cannot have, and why.
    pub left_out: LeftOut,
}

/// Sums over tokens.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    count: u64,
    nll: f64,
    nll_squares: f64,
    difference: f64,
    difference_squares: f64,
    kl: f64,
    same_top: u64,
}

impl AddAssign for Sums {
    fn add_assign(&mut self, other: Self) {
        self.count += other.count;
        self.nll += other.nll;
        self.nll_squares += other.nll_squares;
        self.difference += other.difference;
        self.difference_squares += other.difference_squares;
        self.kl += other.kl;
        self.same_top += other.same_top;
    }
}

/// Mean and its standard error.
fn mean_and_error(sum: f64, squares: f64, count: f64) -> (f64, f64) {
    let mean = sum / count;
    let variance = (squares / count - mean * mean).max(0.0) * count / (count - 1.0).max(1.0);
    (mean, (variance / count).sqrt())
}

/// Measures every format on a text. `tokens`: the text's, without the one that texts begin with;
/// `progress` is told the windows that are done.
///
/// # Errors
/// [`ModelError::Setting`]: the text is too short; what a verb says.
pub fn measure(
    model: &Model,
    base: &Config,
    tokens: &[u32],
    options: &Options,
    progress: &mut dyn FnMut(usize),
) -> Result<QualityReport, ModelError> {
    let bos = model.tokenizer.prompt("").first().copied().filter(|_| model.tokenizer.adds_bos());
    let of_text = options.window_tokens - usize::from(bos.is_some());
    let windows: Vec<Vec<u32>> = tokens
        .chunks_exact(of_text.max(1))
        .map(|text| bos.into_iter().chain(text.iter().copied()).collect())
        .collect();
    // The window behind those that are measured gives the static scales.
    if windows.len() <= options.windows || options.window_tokens < 2 || options.windows == 0 {
        return Err(ModelError::Setting(format!(
            "{} windows of {} tokens were asked for, and one more to take static scales from; the text has {} tokens",
            options.windows,
            options.window_tokens,
            tokens.len()
        )));
    }
    let (measured, rest) = windows.split_at(options.windows);
    let base = base_of(base, options.window_tokens)?;
    let asked = |name: &&str| {
        *name == FORMATS[0]
            || options.formats.is_empty()
            || options.formats.iter().any(|one| one == name)
    };
    let names: Vec<&str> = FORMATS.into_iter().filter(asked).collect();
    let (cases, left_out) = cases(model, &base, &names, &rest[0])?;
    let mut results = Vec::new();
    let mut modes_equal = Vec::new();
    for case in &cases {
        modes_equal.push(modes_agree(model, case, &measured[0])?);
    }
    let mut runs: Vec<(Engine<'_>, Cache)> = Vec::new();
    for case in &cases {
        runs.push(open(model, &case.config, case.spreads)?);
    }
    let mut sums = vec![Sums::default(); cases.len()];
    for (index, window) in measured.iter().enumerate() {
        read_window(model, &mut runs, window, &mut sums)?;
        progress(index + 1);
    }
    for (((case, (_, cache)), sums), modes_equal) in
        cases.iter().zip(&runs).zip(&sums).zip(modes_equal)
    {
        cache.check_invariants().map_err(|error| ModelError::Setting(error.to_string()))?;
        results.push(describe(case, cache.plan(), sums, modes_equal));
    }
    Ok(QualityReport {
        windows: options.windows,
        window_tokens: options.window_tokens,
        predicted: sums[0].count,
        formats: results,
        left_out,
    })
}

fn describe(case: &Case, plan: &Plan, sums: &Sums, modes_equal: bool) -> Measured {
    let count = float(sums.count);
    let (nll, error) = mean_and_error(sums.nll, sums.nll_squares, count);
    let (difference, of_difference) =
        mean_and_error(sums.difference, sums.difference_squares, count);
    Measured {
        format: case.name.clone(),
        bytes_per_token: plan.bytes_per_token.get(),
        perplexity: nll.exp(),
        perplexity_error: nll.exp() * error,
        change_percent: 100.0 * difference.exp_m1(),
        change_error_percent: 100.0 * of_difference,
        mean_kl: sums.kl / count,
        same_top_percent: 100.0 * float(sums.same_top) / count,
        modes_equal,
        int8: case.config.cache.int8.clone(),
    }
}

/// What all cases have in common: one sequence of a window, nothing shared.
fn base_of(base: &Config, window_tokens: usize) -> Result<Config, ModelError> {
    let len = u32::try_from(window_tokens)
        .map_err(|_| ModelError::Setting("the windows are too long".to_owned()))?;
    let mut config = base.clone();
    config.workload = None;
    config.variant.clear();
    config.limits.max_seqs = 1;
    config.limits.max_seq_len = len;
    config.limits.max_batch_tokens = len.min(u32::try_from(PIECE).unwrap_or(u32::MAX));
    config.limits.max_step_tokens = None;
    config.limits.max_rewind_tokens = 0;
    config.pool.capacity = Capacity::WorstCase;
    config.pool.typical_seq_len = None;
    config.cache.prefix_reuse = false;
    config.cache.event_buffer = 0;
    config.cache.int8 = None;
    config.cache.hybrid = None;
    config.cache.mode = CacheMode::Paged;
    Ok(config)
}

/// Formats that a model cannot have, and why.
type LeftOut = Vec<(String, String)>;

/// The formats that the model can have, and those that it cannot, with the reason.
fn cases(
    model: &Model,
    base: &Config,
    names: &[&str],
    calibration: &[u32],
) -> Result<(Vec<Case>, LeftOut), ModelError> {
    let int8 = |scale| Some(Int8Config { scale, ..Int8Config::default() });
    let per_tensor = |spreads| {
        let (k_scale, v_scale) = static_scales(model, base, calibration, spreads)?;
        let (k_scale, v_scale) = (Some(k_scale), Some(v_scale));
        Ok::<_, ModelError>(Some(Int8Config { scale: ScaleKind::PerTensor, k_scale, v_scale }))
    };
    let can_spread = model.file.geometry.head_dim.is_power_of_two();
    let (mut cases, mut left_out) = (Vec::new(), Vec::new());
    for name in names.iter().copied() {
        let (format, spreads) = match name.strip_suffix("+spread") {
            Some(format) => (format, true),
            None => (name, false),
        };
        if spreads && !can_spread {
            let problem = "model: its head_dim is no power of two".to_owned();
            left_out.push((name.to_owned(), problem));
            continue;
        }
        let (format, int8) = match format {
            "f32" => (Format::F32, None),
            "f16" => (Format::F16, None),
            "bf16" => (Format::Bf16, None),
            "int8/per-token-head" => (Format::Int8, int8(ScaleKind::PerTokenHead)),
            "int8/per-group-32" => (Format::Int8, int8(ScaleKind::PerGroup32)),
            _ => (Format::Int8, per_tensor(spreads)?),
        };
        let mut config = base.clone();
        config.cache.format = format;
        config.cache.int8 = int8;
        if spreads {
            // The engine rotates K by its position, so that it can turn it behind that.
            config.rope = None;
        }
        match verify(&config, &model.file.geometry) {
            Ok(()) => cases.push(Case { name: name.to_owned(), config, spreads }),
            Err(invalid) => {
                left_out.push((name.to_owned(), format!("{}: {}", invalid.key, invalid.problem)));
            }
        }
    }
    Ok((cases, left_out))
}

/// A scale for K and V of each layer: the largest magnitude of a window of text, divided by 127.
fn static_scales(
    model: &Model,
    base: &Config,
    window: &[u32],
    spreads: bool,
) -> Result<(StaticScale, StaticScale), ModelError> {
    let mut config = base.clone();
    config.cache.format = Format::F32;
    // The engine rotates, so that it sees K as it is stored.
    config.rope = None;
    let (mut engine, mut cache) = open(model, &config, spreads)?;
    engine.observe_extremes();
    let sequence = begin(&mut cache, window)?;
    for piece in window.chunks(PIECE) {
        feed(&mut engine, &mut cache, sequence, piece, &[])?;
    }
    let of = |which: usize| {
        let scales = engine.extremes().iter();
        StaticScale::PerLayer(
            scales.map(|most| (most[which] / 127.0).max(f32::MIN_POSITIVE)).collect(),
        )
    };
    Ok((of(0), of(1)))
}

fn open<'m>(
    model: &'m Model,
    config: &Config,
    spreads: bool,
) -> Result<(Engine<'m>, Cache), ModelError> {
    let plan = Plan::new(config, &model.file.geometry)?;
    let mut engine = Engine::new(model, &plan, &config.device)?;
    if spreads {
        engine.spread(&plan)?;
    }
    Ok((engine, Cache::open_on_cpu(plan, &config.device, None)?))
}

fn begin(cache: &mut Cache, window: &[u32]) -> Result<SeqHandle, ModelError> {
    Ok(cache.begin(window, BeginOptions::default())?.sequence)
}

fn feed<'e>(
    engine: &'e mut Engine<'_>,
    cache: &mut Cache,
    sequence: SeqHandle,
    tokens: &[u32],
    wanted: &[usize],
) -> Result<&'e [f32], ModelError> {
    let count = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
    engine.step(cache, StepInput { seqs: &[(sequence, count)], tokens, wanted })
}

/// Whether the first tokens of a window have scores of the same bits in all modes.
fn modes_agree(model: &Model, case: &Case, window: &[u32]) -> Result<bool, ModelError> {
    let tokens = &window[..window.len().min(MODE_TOKENS)];
    let mut first: Option<Vec<u32>> = None;
    let mut equal = true;
    for mode in [CacheMode::Contiguous, CacheMode::Paged, CacheMode::Hybrid] {
        let mut config = case.config.clone();
        config.cache.mode = mode;
        let windowed = model.file.geometry.windows.iter().any(|window| *window > 0);
        if mode == CacheMode::Hybrid && !windowed {
            let half = (0..model.file.geometry.num_layers).step_by(2).collect();
            config.cache.hybrid =
                Some(HybridConfig { contiguous_layers: ContiguousLayers::List(half) });
        }
        let (mut engine, mut cache) = open(model, &config, case.spreads)?;
        let sequence = begin(&mut cache, tokens)?;
        let mut bits = Vec::new();
        for piece in tokens.chunks(PIECE) {
            let last = [piece.len() - 1];
            let scores = feed(&mut engine, &mut cache, sequence, piece, &last)?;
            bits.extend(scores.iter().map(|score| score.to_bits()));
        }
        match &first {
            Some(first) => equal &= *first == bits,
            None => first = Some(bits),
        }
    }
    Ok(equal)
}

/// Reads a window with every format, piece by piece.
fn read_window(
    model: &Model,
    runs: &mut [(Engine<'_>, Cache)],
    window: &[u32],
    sums: &mut [Sums],
) -> Result<(), ModelError> {
    let vocab = model.file.vocab_size as usize;
    let mut sequences = Vec::new();
    for (_, cache) in runs.iter_mut() {
        sequences.push(begin(cache, window)?);
    }
    let mut at = 0;
    for piece in window.chunks(PIECE) {
        // What follows each of its tokens; the window's last has no next one.
        let targets = &window[at + 1..window.len().min(at + piece.len() + 1)];
        let wanted: Vec<usize> = (0..targets.len()).collect();
        at += piece.len();
        let mut reference: Option<(Vec<f32>, Vec<Row>)> = None;
        for (((engine, cache), sequence), sums) in runs.iter_mut().zip(&sequences).zip(&mut *sums) {
            let scores = feed(engine, cache, *sequence, piece, &wanted)?;
            if let Some((of_f32, rows)) = &reference {
                *sums += compare(scores, Some((of_f32, rows)), targets, vocab).0;
            } else {
                let (own, rows) = compare(scores, None, targets, vocab);
                *sums += own;
                reference = Some((scores.to_vec(), rows));
            }
        }
    }
    for ((_, cache), sequence) in runs.iter_mut().zip(sequences) {
        cache.release(sequence)?;
    }
    Ok(())
}

/// What is known of the scores of one row.
#[derive(Clone, Copy, Debug, Default)]
struct Row {
    /// The logarithm of the sum of their exponentials.
    log_sum: f64,
    top: usize,
    nll: f64,
    /// With an f32 cache: the mean score, weighted with the shares.
    mean: f64,
}

/// The sums of some rows, and the rows. Without a reference they are it.
fn compare(
    scores: &[f32],
    reference: Option<(&[f32], &[Row])>,
    targets: &[u32],
    vocab: usize,
) -> (Sums, Vec<Row>) {
    let mut rows = vec![Row::default(); targets.len()];
    let mut sums = vec![Sums::default(); targets.len()];
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let chunk = targets.len().div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        let parts = rows.chunks_mut(chunk).zip(sums.chunks_mut(chunk));
        for (part, (rows, sums)) in parts.enumerate() {
            scope.spawn(move || {
                for (at, (row, sums)) in (part * chunk..).zip(rows.iter_mut().zip(sums)) {
                    let scores = &scores[at * vocab..][..vocab];
                    let of_f32 =
                        reference.map(|(scores, rows)| (&scores[at * vocab..][..vocab], &rows[at]));
                    (*row, *sums) = compare_row(scores, of_f32, targets[at] as usize);
                }
            });
        }
    });
    let mut all = Sums::default();
    sums.into_iter().for_each(|sums| all += sums);
    (all, rows)
}

fn compare_row(scores: &[f32], reference: Option<(&[f32], &Row)>, target: usize) -> (Row, Sums) {
    let mut top = 0;
    for (token, score) in scores.iter().enumerate() {
        if *score > scores[top] {
            top = token;
        }
    }
    let most = f64::from(scores[top]);
    let sum: f64 = scores.iter().map(|score| (f64::from(*score) - most).exp()).sum();
    let log_sum = most + sum.ln();
    let nll = log_sum - f64::from(scores[target]);
    // Σ p · score, with the shares of the f32 cache.
    let weighted = |of_f32: &[f32], log_sum: f64| -> f64 {
        let pairs = of_f32.iter().zip(scores);
        pairs.map(|(own, score)| (f64::from(*own) - log_sum).exp() * f64::from(*score)).sum()
    };
    let mean = reference.map_or_else(|| weighted(scores, log_sum), |(_, row)| row.mean);
    let row = Row { log_sum, top, nll, mean };
    let mut sums = Sums { count: 1, nll, nll_squares: nll * nll, ..Sums::default() };
    if let Some((of_f32, own)) = reference {
        let difference = nll - own.nll;
        sums.difference = difference;
        sums.difference_squares = difference * difference;
        sums.kl = (own.mean - own.log_sum) - (weighted(of_f32, own.log_sum) - log_sum);
        sums.same_top = u64::from(own.top == top);
    } else {
        sums.same_top = 1;
    }
    (row, sums)
}

/// A count as a float.
fn float(count: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "counts of tokens are below 2⁵³")]
    let value = count as f64;
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_and_perplexity_are_those_of_the_formulas() {
        #[expect(clippy::cast_possible_truncation, reason = "scores are f32")]
        let scores = |shares: [f64; 3], shift: f32| shares.map(|share| share.ln() as f32 + shift);
        let (p, q) = ([0.5, 0.25, 0.25], [0.25, 0.5, 0.25]);
        let (own, sums) = compare_row(&scores(p, 3.0), None, 1);
        assert!((sums.nll - 4.0_f64.ln()).abs() < 1e-6);
        assert_eq!((own.top, sums.same_top, sums.kl), (0, 1, 0.0));
        let (_, sums) = compare_row(&scores(q, -7.0), Some((&scores(p, 3.0), &own)), 1);
        let kl: f64 = p.iter().zip(q).map(|(p, q)| p * (p / q).ln()).sum();
        assert!((sums.kl - kl).abs() < 1e-6, "{} {kl}", sums.kl);
        assert!((sums.difference + 2.0_f64.ln()).abs() < 1e-6);
        assert_eq!(sums.same_top, 0);
    }

    #[test]
    fn the_error_of_a_mean_is_that_of_the_textbook() {
        let (mean, error) = mean_and_error(10.0, 30.0, 4.0);
        // Of 1, 2, 3, 4: variance 5/3.
        assert!((mean - 2.5).abs() < 1e-12);
        assert!((error - (5.0_f64 / 3.0 / 4.0).sqrt()).abs() < 1e-12);
    }
}
