//! What the C interface costs: the same decode steps through it and through the Rust API.
//!
//! Two caches of the same plan, with 256 sequences each, take turns of 64 steps. A step is
//! `reserve` of one token for each sequence with its id, `mark_appended` and `commit`; nothing is
//! computed. Each call is timed by itself; a figure is the median over the turns of a turn's mean.

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::cache::{Cache, SeqHandle};
use crate::capi::decode::{Decode, SaidNo};
use crate::config;
use crate::error::{CacheError, ConfigError, OpenError};
use crate::plan::Plan;
use crate::units::LayerIdx;

use super::error::shown;

/// Sequences of a step.
const NUM_SEQS: u32 = 256;

/// Steps of a turn.
const TURN: u32 = 64;

/// Turns in which a sequence comes to its end.
const TURNS_PER_LIFE: u32 = 16;

/// Tokens of the shortest prompt; the others have up to a block more, so that blocks fill up in
/// different steps.
const PROMPT_TOKENS: u32 = 32;

/// The calls.
const NAMES: [&str; 3] = ["reserve_256", "commit_256", "step_256"];

/// One call, both ways.
#[derive(Clone, Debug, Serialize)]
pub struct Crossing {
    /// `reserve_256`, `commit_256` (with `mark_appended`), or `step_256` (both).
    pub name: &'static str,
    /// Nanoseconds of a call through the Rust API.
    pub rust_ns: f64,
    /// Nanoseconds of a call through the C interface.
    pub c_ns: f64,
    /// `c_ns / rust_ns`, the median over the turns of the two turns that lie side by side.
    pub ratio: f64,
}

/// Why there are no figures.
#[derive(Debug, thiserror::Error)]
pub enum CrossingError {
    /// No call has such a name.
    #[error("no call's name contains {}; there are {}", shown(filter), NAMES.join(", "))]
    NoSuchCall {
        /// What was asked for.
        filter: String,
    },
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A cache could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A verb failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A function of the C interface failed.
    #[error(transparent)]
    C(#[from] SaidNo),
}

fn toml() -> String {
    let max_len = PROMPT_TOKENS + 16 + TURN * TURNS_PER_LIFE;
    format!(
        "model = {{ num_layers = 1, num_q_heads = 1, num_kv_heads = 1, head_dim = 16 }}\n\
         cache = {{ mode = 'paged', format = 'f16' }}\n\
         limits = {{ max_seqs = {NUM_SEQS}, max_seq_len = {max_len}, max_batch_tokens = {NUM_SEQS} }}\n\
         device = {{ threads = 1 }}"
    )
}

/// Nanoseconds of reserve and of commit.
type Spent = [f64; 2];

/// A call's part of them.
type Part = fn(&Spent) -> f64;

/// The two ways.
trait Way {
    type Error;
    fn begin(&mut self, prompt: &[u32]) -> Result<(), Self::Error>;
    fn reserve(&mut self, tokens: &[u32]) -> Result<(), Self::Error>;
    fn commit(&mut self) -> Result<(), Self::Error>;
    fn release(&mut self) -> Result<(), Self::Error>;
}

impl Way for Decode {
    type Error = SaidNo;
    fn begin(&mut self, prompt: &[u32]) -> Result<(), SaidNo> {
        Self::begin(self, prompt)
    }
    fn reserve(&mut self, tokens: &[u32]) -> Result<(), SaidNo> {
        Self::reserve(self, tokens)
    }
    fn commit(&mut self) -> Result<(), SaidNo> {
        Self::commit(self)
    }
    fn release(&mut self) -> Result<(), SaidNo> {
        Self::release(self)
    }
}

/// Through the Rust API.
struct Direct {
    cache: Cache,
    batch: Vec<(SeqHandle, u32)>,
    step: Option<crate::cache::StepId>,
}

impl Way for Direct {
    type Error = CacheError;

    fn begin(&mut self, prompt: &[u32]) -> Result<(), CacheError> {
        let begun = self.cache.begin(prompt, crate::cache::BeginOptions::default())?;
        let tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX) - begun.cached_len;
        let mut step = self.cache.reserve(&[(begun.sequence, tokens)])?;
        step.mark_appended(LayerIdx(0))?;
        step.commit()?;
        self.batch.push((begun.sequence, 1));
        Ok(())
    }

    fn reserve(&mut self, tokens: &[u32]) -> Result<(), CacheError> {
        // Put aside between the two calls, which costs nothing, so that each is timed by itself.
        self.step = Some(self.cache.reserve_tokens(&self.batch, tokens)?.detach());
        Ok(())
    }

    fn commit(&mut self) -> Result<(), CacheError> {
        let Some(step) = self.step.take() else { return Ok(()) };
        let mut step = self.cache.resume(step)?;
        step.mark_appended(LayerIdx(0))?;
        step.commit()
    }

    fn release(&mut self) -> Result<(), CacheError> {
        self.batch.drain(..).try_for_each(|(sequence, _)| self.cache.release(sequence))
    }
}

/// Token ids that never come again.
struct Tokens(u32);

impl Tokens {
    fn fill(&mut self, out: &mut [u32]) {
        for token in out {
            self.0 = self.0.wrapping_add(1);
            *token = self.0;
        }
    }
}

/// Releases the sequences, and begins new ones.
fn begin_anew<W: Way>(way: &mut W, mut tokens: Tokens) -> Result<(), W::Error> {
    way.release()?;
    for at in 0..NUM_SEQS {
        let mut prompt = vec![0; (PROMPT_TOKENS + at % 16) as usize];
        tokens.fill(&mut prompt);
        way.begin(&prompt)?;
    }
    Ok(())
}

/// A turn's mean nanoseconds of reserve and of commit.
fn turn<W: Way>(way: &mut W, mut tokens: Tokens) -> Result<Spent, W::Error> {
    let mut ids = [0; NUM_SEQS as usize];
    let mut spent = [Duration::ZERO; 2];
    for _ in 0..TURN {
        tokens.fill(&mut ids);
        let start = Instant::now();
        way.reserve(&ids)?;
        let between = Instant::now();
        way.commit()?;
        spent[0] += between - start;
        spent[1] += between.elapsed();
    }
    Ok(spent.map(|spent| spent.as_secs_f64() * 1e9 / f64::from(TURN)))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Measures the crossing, of the calls whose name contains `filter`.
///
/// # Errors
/// [`CrossingError`].
pub fn run(quick: bool, filter: &str) -> Result<Vec<Crossing>, CrossingError> {
    if !NAMES.iter().any(|name| name.contains(filter)) {
        return Err(CrossingError::NoSuchCall { filter: filter.to_owned() });
    }
    let toml = toml();
    let source = config::parse(&toml, "bench".as_ref(), &[])?;
    let plan = Plan::new(&source.config, &source.geometry).map_err(OpenError::Plan)?;
    let cache = Cache::open_on_cpu(plan, &source.config.device, None)?;
    let mut rust = Direct { cache, batch: Vec::with_capacity(NUM_SEQS as usize), step: None };
    let mut c = Decode::open(&toml)?;
    let lives = if quick { 2 } else { 200 };
    // `[turns][rust, c][reserve, commit]`
    let mut all: Vec<[Spent; 2]> = Vec::new();
    let mut seed = 0;
    for life in 0..lives {
        begin_anew(&mut rust, Tokens(seed))?;
        begin_anew(&mut c, Tokens(seed))?;
        for at in 0..TURNS_PER_LIFE {
            seed += NUM_SEQS * TURN;
            // Who comes first changes.
            let both = if at % 2 == 0 {
                let direct = turn(&mut rust, Tokens(seed))?;
                [direct, turn(&mut c, Tokens(seed))?]
            } else {
                let crossed = turn(&mut c, Tokens(seed))?;
                [turn(&mut rust, Tokens(seed))?, crossed]
            };
            // The first life warms up.
            if life > 0 {
                all.push(both);
            }
        }
    }
    let of = |(name, take): (_, Part)| Crossing {
        name,
        rust_ns: median(all.iter().map(|both| take(&both[0])).collect()),
        c_ns: median(all.iter().map(|both| take(&both[1])).collect()),
        ratio: median(all.iter().map(|both| take(&both[1]) / take(&both[0])).collect()),
    };
    let calls: [Part; 3] = [|call| call[0], |call| call[1], |call| call[0] + call[1]];
    let named = NAMES.into_iter().zip(calls);
    Ok(named.filter(|(name, _)| name.contains(filter)).map(of).collect())
}

#[cfg(test)]
mod tests {
    #[test]
    fn both_ways_run() {
        let crossings = super::run(true, "").expect("figures");
        assert_eq!(crossings.len(), 3);
        assert!(crossings.iter().all(|one| one.rust_ns > 0.0 && one.c_ns > 0.0));
    }
}
