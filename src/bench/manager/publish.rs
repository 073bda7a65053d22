//! New prompts in a full pool: every block evicts one and is published.

use super::fixture::{Fixture, STEP_TOKENS, Sizes, TOKENS_PER_BLOCK};
use super::{ManagerError, Sample, Work, expect};
use crate::error::CacheError;

/// Sequences in a turn.
const SEQS_PER_TURN: u32 = 16;

/// Blocks of a sequence.
const SEQ_BLOCKS: u32 = STEP_TOKENS / TOKENS_PER_BLOCK;

/// A pool full of cached blocks.
pub(super) struct Publish {
    fixture: Fixture,
    prompt: Vec<u32>,
}

impl Publish {
    pub(super) fn open(
        blocks: u32,
        filled: &mut dyn FnMut(u32, u32),
    ) -> Result<Self, ManagerError> {
        let sizes = Sizes { blocks, max_seqs: 1, max_seq_len: STEP_TOKENS };
        let fixture = Fixture::full(sizes, filled)?;
        Ok(Self { fixture, prompt: vec![0; STEP_TOKENS as usize] })
    }

    /// A new prompt, published.
    fn publish(&mut self) -> Result<Sample, ManagerError> {
        let Self { fixture, prompt } = self;
        fixture.random.tokens(prompt);
        let mut begun = None;
        let sample = Sample::of(u64::from(SEQ_BLOCKS), || {
            let sequence = fixture.begin(prompt, STEP_TOKENS)?.sequence;
            begun = Some(sequence);
            fixture.step(&[(sequence, STEP_TOKENS)])
        })?;
        begun.map_or(Ok::<_, CacheError>(()), |sequence| fixture.cache.release(sequence))?;
        Ok(sample)
    }
}

impl Work for Publish {
    fn turn(&mut self) -> Result<Sample, ManagerError> {
        let before = self.fixture.stats();
        let mut sum = Sample::default();
        for _ in 0..SEQS_PER_TURN {
            sum.add(self.publish()?);
        }
        let after = self.fixture.stats();
        expect("evictions", sum.units, after.evictions - before.evictions)?;
        expect("published blocks", sum.units, after.blocks_published - before.blocks_published)?;
        expect("hit tokens", 0, after.prefix_hit_tokens - before.prefix_hit_tokens)?;
        expect("free blocks", 0, u64::from(self.fixture.counts().free))?;
        Ok(sum)
    }
}
