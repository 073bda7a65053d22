//! How fast a model reads and writes, and how much of that is attention.

use std::time::Instant;

use serde::Serialize;

use super::super::random::Rng;
use super::engine::{Engine, StepInput, Timing};
use super::sample::best;
use super::weights::Model;
use crate::cache::{BeginOptions, Cache, SeqHandle};
use crate::config::{Capacity, Config, Format, verify};
use crate::device::TensorRef;
use crate::error::ModelError;
use crate::plan::Plan;
use crate::units::LayerIdx;

/// What is measured.
#[derive(Clone, Debug)]
pub struct Options {
    /// Tokens that are in the cache when writing begins.
    pub contexts: Vec<u32>,
    /// Tokens that are written, in each round.
    pub tokens: u32,
    /// Rounds, of which the median counts.
    pub rounds: u32,
    /// Cache formats.
    pub formats: Vec<Format>,
    /// Whether the context is made-up K and V instead of a text that is read: writing takes as
    /// long, and it is there at once.
    pub made_up: bool,
    /// Whether K and V are turned before they are stored ([`Engine::spread`]).
    pub spread: bool,
}

/// One format at one length.
#[derive(Clone, Debug, Serialize)]
pub struct Speed {
    /// The cache's format.
    pub format: String,
    /// Tokens that were in the cache when writing began.
    pub context: u32,
    /// Prompt tokens a second; none where the context was made up.
    pub read_tokens_per_s: Option<f64>,
    /// New tokens a second, of one sequence.
    pub write_tokens_per_s: f64,
    /// Milliseconds of a new token.
    pub write_ms: f64,
    /// Those of them that are `append` and `attend`.
    pub attention_ms: f64,
    /// Those of them that are `reserve` and `commit`.
    pub manager_ms: f64,
}

/// Measures each format at each length. `tokens`: a text to read, repeated where it is too short.
///
/// # Errors
/// [`ModelError::Setting`]: a context that does not fit the model; what a verb says.
pub fn measure(
    model: &Model,
    base: &Config,
    tokens: &[u32],
    options: &Options,
) -> Result<Vec<Speed>, ModelError> {
    let mut results = Vec::new();
    for context in &options.contexts {
        let len = context.saturating_add(options.tokens);
        if len > model.file.context_len || *context == 0 || tokens.is_empty() {
            return Err(ModelError::Setting(format!(
                "{context} tokens and {} more do not fit the model's {} positions",
                options.tokens, model.file.context_len
            )));
        }
        let prompt: Vec<u32> = tokens.iter().copied().cycle().take(*context as usize).collect();
        for format in &options.formats {
            let mut config = base.clone();
            config.cache.format = *format;
            if *format != Format::Int8 {
                config.cache.int8 = None;
            }
            config.cache.prefix_reuse = false;
            if options.spread {
                // The engine rotates K by its position, so that it can turn it behind that.
                config.rope = None;
            }
            config.variant.clear();
            config.limits.max_seqs = 1;
            config.limits.max_seq_len = len;
            config.limits.max_rewind_tokens = options.tokens;
            config.limits.max_batch_tokens = config.limits.max_batch_tokens.min(len);
            config.limits.max_step_tokens = None;
            config.pool.capacity = Capacity::WorstCase;
            config.pool.typical_seq_len = None;
            verify(&config, &model.file.geometry).map_err(|invalid| {
                ModelError::Setting(format!("{}: {}", invalid.key, invalid.problem))
            })?;
            let plan = Plan::new(&config, &model.file.geometry)?;
            let mut engine = Engine::new(model, &plan, &config.device)?;
            if options.spread {
                engine.spread(&plan)?;
            }
            let mut cache = Cache::open_on_cpu(plan, &config.device, None)?;
            results.push(one(&mut engine, &mut cache, &prompt, options)?);
        }
    }
    Ok(results)
}

fn one(
    engine: &mut Engine<'_>,
    cache: &mut Cache,
    prompt: &[u32],
    options: &Options,
) -> Result<Speed, ModelError> {
    let context = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
    let limits = &cache.plan().limits;
    let piece = limits.max_batch_tokens.min(limits.max_step_tokens) as usize;
    let sequence = cache.begin(prompt, BeginOptions::default())?.sequence;
    let mut first = 0;
    let began = Instant::now();
    for tokens in prompt.chunks(piece) {
        let count = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        if options.made_up {
            make_up(cache, sequence, count)?;
            continue;
        }
        let wanted = [tokens.len() - 1];
        let input = StepInput { seqs: &[(sequence, count)], tokens, wanted: &wanted };
        first = best(engine.step(cache, input)?);
    }
    let read_s = began.elapsed().as_secs_f64();
    let mut rounds = Vec::new();
    for _ in 0..options.rounds.max(1) {
        let (began, before, mut token) = (Instant::now(), engine.timing(), first);
        for _ in 0..options.tokens {
            let input = StepInput { seqs: &[(sequence, 1)], tokens: &[token], wanted: &[0] };
            token = best(engine.step(cache, input)?);
        }
        let after = engine.timing();
        rounds.push((began.elapsed().as_secs_f64(), since(after, before)));
        cache.truncate(sequence, context)?;
    }
    rounds.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (wall_s, timing) = rounds[rounds.len() / 2];
    let per_token = |seconds: f64| 1000.0 * seconds / f64::from(options.tokens);
    cache.release(sequence)?;
    Ok(Speed {
        format: cache.plan().format.name().to_owned(),
        context,
        read_tokens_per_s: (!options.made_up).then(|| f64::from(context) / read_s),
        write_tokens_per_s: f64::from(options.tokens) / wall_s,
        write_ms: per_token(wall_s),
        attention_ms: per_token(timing.attention_s),
        manager_ms: per_token(timing.manager_s),
    })
}

/// Appends tokens of evenly distributed K and V to a sequence.
fn make_up(cache: &mut Cache, sequence: SeqHandle, count: u32) -> Result<(), ModelError> {
    let geometry = &cache.plan().geometry;
    let (num_layers, row) = (geometry.num_layers, geometry.num_kv_heads * geometry.head_dim);
    let mut step = cache.reserve(&[(sequence, count)])?;
    for layer in 0..num_layers {
        let [k, v] = [0, 1].map(|which| {
            let mut rng = Rng::new(u64::from(layer), which);
            (0..count * row).map(|_| float(rng.unit() * 4.0 - 2.0)).collect::<Vec<f32>>()
        });
        step.append(LayerIdx(layer), TensorRef::F32(&k), TensorRef::F32(&v))?;
    }
    Ok(step.commit()?)
}

fn float(x: f64) -> f32 {
    #[expect(clippy::cast_possible_truncation, reason = "the nearest f32")]
    let nearest = x as f32;
    nearest
}

fn since(after: Timing, before: Timing) -> Timing {
    Timing {
        attention_s: after.attention_s - before.attention_s,
        manager_s: after.manager_s - before.manager_s,
        total_s: after.total_s - before.total_s,
    }
}
