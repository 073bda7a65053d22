//! Verbs on prompts whose prefix is cached, or is not.

use std::hint::black_box;

use super::fixture::{Fixture, Sizes, TOKENS_PER_BLOCK};
use super::{ManagerError, Sample, Work, expect};
use crate::cache::{Namespace, SeqHandle};
use crate::error::CacheError;

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    /// `begin` with a cached prefix.
    Hit,
    /// `begin` without.
    Miss,
    /// `probe` of a cached prefix.
    Probe,
    /// `release` after a hit.
    Release,
    /// `fork` after a hit.
    Fork,
}

/// Tokens of all prompts together, but not more than 16 prompts.
const PROMPT_TOKENS: u32 = 131_072;

/// Timed passes over the prompts in a turn.
const PASSES: u32 = 4;

/// A cache that has stored the prefixes of some prompts.
pub(super) struct Prefix {
    verb: Verb,
    /// Tokens of a prefix that are cached; the prompts have one more.
    cached: u32,
    fixture: Fixture,
    prompts: Vec<Vec<u32>>,
    /// Sequences that live now.
    alive: Vec<SeqHandle>,
    /// The forks of those.
    forks: Vec<SeqHandle>,
}

impl Prefix {
    pub(super) fn open(
        verb: Verb,
        tokens: u32,
        runs: u32,
        pool: u32,
        filled: &mut dyn FnMut(u32, u32),
    ) -> Result<Self, ManagerError> {
        let num_prompts = (PROMPT_TOKENS / tokens).min(16);
        // The prefixes, a block more for each live sequence, and the same again for the forks
        // under guaranteed admission.
        let needed = 2 * num_prompts * (tokens / TOKENS_PER_BLOCK + 1);
        let sizes = Sizes {
            blocks: pool.max(needed),
            max_seqs: 2 * num_prompts,
            max_seq_len: tokens + TOKENS_PER_BLOCK,
        };
        let mut fixture = Fixture::full(sizes, filled)?;
        let prompts: Vec<_> = (0..num_prompts).map(|_| fixture.random.prompt(tokens + 1)).collect();
        if verb != Verb::Miss {
            for run in 1..=runs {
                // In turns, so that the runs of one prompt do not lie side by side.
                for prompt in &prompts {
                    fixture.store(&prompt[..(tokens / runs * run) as usize])?;
                }
            }
        }
        let alive = Vec::with_capacity(num_prompts as usize);
        let forks = Vec::with_capacity(num_prompts as usize);
        let cached = if verb == Verb::Miss { 0 } else { tokens };
        Ok(Self { verb, cached, fixture, prompts, alive, forks })
    }

    /// Begins every prompt once; tokens that were cached.
    fn begin_all(&mut self) -> Result<u64, CacheError> {
        let Self { fixture, prompts, alive, .. } = self;
        let mut cached = 0;
        for prompt in &*prompts {
            let len = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
            let begun = fixture.begin(prompt, len)?;
            cached += u64::from(begun.cached_len);
            alive.push(begun.sequence);
        }
        Ok(cached)
    }

    fn release_all(&mut self) -> Result<(), CacheError> {
        let Self { fixture, alive, .. } = self;
        alive.drain(..).try_for_each(|sequence| fixture.cache.release(sequence))
    }

    fn fork_all(&mut self) -> Result<(), CacheError> {
        let Self { fixture, alive, forks, .. } = self;
        for sequence in &*alive {
            forks.push(fixture.cache.fork(*sequence)?);
        }
        Ok(())
    }

    /// One pass over the prompts; only the verb is timed.
    fn pass(&mut self) -> Result<Sample, ManagerError> {
        let units = self.prompts.len() as u64;
        let hits = units * u64::from(self.cached);
        let before = self.fixture.stats();
        let sample = match self.verb {
            Verb::Hit | Verb::Miss => {
                let mut cached = 0;
                let sample = Sample::of(units, || {
                    cached = black_box(self.begin_all()?);
                    Ok::<_, CacheError>(())
                })?;
                expect("cached tokens", hits, cached)?;
                sample
            }
            Verb::Probe => {
                let mut cached = 0;
                let sample = Sample::of(units, || {
                    for prompt in &self.prompts {
                        let probe = self.fixture.cache.probe(prompt, &Namespace::default());
                        cached += u64::from(black_box(probe).cached_len);
                    }
                    Ok::<_, CacheError>(())
                })?;
                expect("cached tokens", hits, cached)?;
                expect(
                    "queries of a probe",
                    0,
                    self.fixture.stats().prefix_queries - before.prefix_queries,
                )?;
                return Ok(sample);
            }
            Verb::Release => {
                self.begin_all()?;
                expect(
                    "active blocks",
                    hits / u64::from(TOKENS_PER_BLOCK),
                    u64::from(self.fixture.counts().active),
                )?;
                Sample::of(units, || self.release_all())?
            }
            Verb::Fork => {
                self.begin_all()?;
                let sample = Sample::of(units, || self.fork_all())?;
                let Self { fixture, forks, cached, .. } = &mut *self;
                for fork in forks.drain(..) {
                    let len = fixture.cache.seq_len(fork)?;
                    expect("tokens of a fork", u64::from(*cached), u64::from(len))?;
                    fixture.cache.release(fork)?;
                }
                sample
            }
        };
        self.release_all()?;
        let after = self.fixture.stats();
        expect("queries", units, after.prefix_queries - before.prefix_queries)?;
        expect("hit tokens", hits, after.prefix_hit_tokens - before.prefix_hit_tokens)?;
        expect("active blocks", 0, u64::from(self.fixture.counts().active))?;
        Ok(sample)
    }
}

impl Work for Prefix {
    fn turn(&mut self) -> Result<Sample, ManagerError> {
        self.pass()?;
        let mut sum = Sample::default();
        for _ in 0..PASSES {
            sum.add(self.pass()?);
        }
        Ok(sum)
    }
}
