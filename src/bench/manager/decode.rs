//! Steps of one token of each running sequence.

use super::fixture::{Fixture, STEP_TOKENS, Sizes, TOKENS_PER_BLOCK};
use super::{ManagerError, Sample, Work, expect};
use crate::cache::SeqHandle;

/// Tokens of the shortest prompt; the others have up to a block more.
const PROMPT_TOKENS: u32 = 2 * TOKENS_PER_BLOCK;

/// Tokens that a turn appends to all sequences together, about.
const TURN_TOKENS: u32 = 16_384;

/// Turns after which the sequences begin anew, so that they have an end.
const TURNS_PER_LIFE: u32 = 16;

/// Running sequences of staggered lengths.
pub(super) struct Decode {
    fixture: Fixture,
    num_seqs: u32,
    /// Steps of a turn: a multiple of the tokens of a block, so that every turn has as many block
    /// boundaries.
    steps: u32,
    turns_left: u32,
    /// What every step reserves. `[num_seqs]`
    batch: Vec<(SeqHandle, u32)>,
    /// The tokens of a turn. `[steps, num_seqs]`
    tokens: Vec<u32>,
}

impl Decode {
    pub(super) fn open(
        num_seqs: u32,
        pool: u32,
        filled: &mut dyn FnMut(u32, u32),
    ) -> Result<Self, ManagerError> {
        let steps = (TURN_TOKENS / num_seqs).clamp(TOKENS_PER_BLOCK, 1024);
        let max_len = Self::max_len(steps);
        // An eighth more than the sequences may come to hold, so that there are cached blocks to
        // evict.
        let held = num_seqs * max_len.div_ceil(TOKENS_PER_BLOCK);
        let blocks = pool.max(held + held / 8);
        let sizes = Sizes { blocks, max_seqs: num_seqs, max_seq_len: max_len };
        let fixture = Fixture::full(sizes, filled)?;
        Ok(Self {
            fixture,
            num_seqs,
            steps,
            turns_left: 0,
            batch: Vec::with_capacity(num_seqs as usize),
            tokens: vec![0; (steps * num_seqs) as usize],
        })
    }

    /// Tokens that the longest sequence comes to.
    const fn max_len(steps: u32) -> u32 {
        PROMPT_TOKENS + TOKENS_PER_BLOCK + steps * TURNS_PER_LIFE
    }

    /// Releases the sequences and begins new ones, with prompts that nobody has seen.
    fn begin_anew(&mut self) -> Result<(), ManagerError> {
        let Self { fixture, batch, .. } = self;
        for (sequence, _) in batch.drain(..) {
            fixture.cache.release(sequence)?;
        }
        let max_len = Self::max_len(self.steps);
        let mut prefill: Vec<(SeqHandle, u32)> = Vec::new();
        let mut tokens = 0;
        for at in 0..self.num_seqs {
            let len = PROMPT_TOKENS + at % TOKENS_PER_BLOCK;
            if tokens + len > STEP_TOKENS {
                fixture.step(&prefill)?;
                prefill.clear();
                tokens = 0;
            }
            let prompt = fixture.random.prompt(len);
            let sequence = fixture.begin(&prompt, max_len)?.sequence;
            prefill.push((sequence, len));
            tokens += len;
            batch.push((sequence, 1));
        }
        fixture.step(&prefill)?;
        self.turns_left = TURNS_PER_LIFE;
        Ok(())
    }
}

impl Work for Decode {
    fn turn(&mut self) -> Result<Sample, ManagerError> {
        if self.turns_left == 0 {
            self.begin_anew()?;
        }
        self.turns_left -= 1;
        let Self { fixture, batch, tokens, .. } = self;
        fixture.random.tokens(tokens);
        let before = fixture.stats();
        let units = tokens.len() as u64;
        let sample = Sample::of(units, || {
            tokens.chunks(batch.len()).try_for_each(|tokens| fixture.step_of(batch, tokens))
        })?;
        let after = fixture.stats();
        let blocks = units / u64::from(TOKENS_PER_BLOCK);
        expect("tokens appended", units, after.tokens_appended - before.tokens_appended)?;
        expect("published blocks", blocks, after.blocks_published - before.blocks_published)?;
        Ok(sample)
    }
}
