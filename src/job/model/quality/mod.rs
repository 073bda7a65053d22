//! What a cache format costs: perplexity, and how far the scores are from those of an f32 cache.
//!
//! The text is cut into windows, each read by a sequence of its own. All formats read a piece of a
//! window one after the other, so that the scores of only one piece are kept. Weights and
//! arithmetic are the same for all; the cache alone differs.

mod cases;
mod scores;

use serde::Serialize;

pub use cases::FORMATS;
use cases::{Case, LeftOut, cases};
use scores::{Row, Sums, compare, float, mean_and_error};

use super::engine::{Engine, StepInput};
use super::weights::Model;
use crate::cache::{BeginOptions, Cache, SeqHandle};
use crate::config::{CacheMode, Capacity, Config, ContiguousLayers, HybridConfig, Int8Config};
use crate::error::ModelError;
use crate::plan::Plan;
use crate::units::counted;

/// Tokens that are read at once.
const PIECE: usize = 64;

/// Tokens of the first window that are read in every mode.
const MODE_TOKENS: usize = 192;

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
            "{} of {} asked for, and one more to take static scales from; the text has {}",
            counted(options.windows as u64, "window"),
            counted(options.window_tokens as u64, "token"),
            counted(tokens.len() as u64, "token")
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
