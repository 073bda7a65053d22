//! A cache without memory, prompts, and pools that are full of cached blocks.

use std::fmt::Write as _;
use std::path::Path;

use super::{ManagerError, check_memory};
use crate::cache::{BeginOptions, Begun, Cache, SeqHandle};
use crate::config::parse;
use crate::device::NullDevice;
use crate::error::{CacheError, OpenError};
use crate::plan::Plan;
use crate::pool::{BlockCounts, Stats};
use crate::units::{GroupIdx, LayerIdx};

/// Tokens of a block in all cases.
pub(super) const TOKENS_PER_BLOCK: u32 = 16;

/// Tokens of the largest step.
pub(super) const STEP_TOKENS: u32 = 4096;

/// The one group of all plans.
const GROUP: GroupIdx = GroupIdx(0);

/// The one layer of all plans.
const LAYER: LayerIdx = LayerIdx(0);

/// Sequences of one block that are released in random order while a pool is filled, at most: the
/// order of what is cached at first is shuffled over so many blocks.
const FILL_SEQS: u32 = 1024;

/// Tokens of all rows that filling asks for at most, so that the tables stay small.
const FILL_TOKENS: u32 = 1 << 22;

/// Pseudo-random numbers from a fixed seed (splitmix64).
pub(super) struct Random {
    state: u64,
    /// Prompts made so far.
    prompts: u32,
}

impl Random {
    fn next(&mut self) -> u32 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 32) as u32
    }

    /// A number below `end`.
    pub(super) fn below(&mut self, end: u32) -> u32 {
        ((u64::from(self.next()) * u64::from(end)) >> 32) as u32
    }

    /// A new prompt: token ids of a vocabulary of 131,072, but for the first, which no other prompt
    /// has, so that nothing of it is found.
    pub(super) fn tokens(&mut self, out: &mut [u32]) {
        out.fill_with(|| self.next() >> 15);
        self.prompts += 1;
        if let Some(first) = out.first_mut() {
            *first = (1 << 17) + self.prompts;
        }
    }

    /// A new prompt.
    pub(super) fn prompt(&mut self, len: u32) -> Vec<u32> {
        let mut prompt = vec![0; len as usize];
        self.tokens(&mut prompt);
        prompt
    }
}

/// What a case needs of its cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) blocks: u32,
    pub(super) max_seqs: u32,
    pub(super) max_seq_len: u32,
}

/// A cache on no memory, and what drives it.
pub(super) struct Fixture {
    pub(super) cache: Cache,
    pub(super) random: Random,
}

impl Fixture {
    /// Opens a cache with empty blocks.
    pub(super) fn open(sizes: Sizes) -> Result<Self, ManagerError> {
        let Sizes { blocks, max_seqs, max_seq_len } = sizes;
        // Filling wants some sequences at once, whatever the case does.
        let max_seqs = max_seqs.max(FILL_SEQS.min(FILL_TOKENS / max_seq_len));
        let mut toml =
            "model = { num_layers = 1, num_q_heads = 1, num_kv_heads = 1, head_dim = 16 }\n\
                        cache = { mode = 'paged', format = 'f16', admission = 'guaranteed'"
                .to_owned();
        // Writing to a String cannot fail.
        let _ = writeln!(
            toml,
            ", tokens_per_block = {TOKENS_PER_BLOCK} }}\n\
             pool = {{ capacity = 'blocks:{blocks}' }}\n\
             limits = {{ max_seqs = {max_seqs}, max_seq_len = {max_seq_len}, \
             max_batch_tokens = {STEP_TOKENS}, max_step_tokens = {STEP_TOKENS} }}"
        );
        // The text above is this function's own: that it parses is held by the test of every case.
        let source = parse(&toml, Path::new("bench"), &[]).expect("a valid configuration");
        let plan = Plan::new(&source.config, &source.geometry).map_err(OpenError::Plan)?;
        check_memory(plan.host_bytes)?;
        let device = Box::new(NullDevice::open(&plan));
        Ok(Self { cache: Cache::open(plan, device)?, random: Random { state: 1, prompts: 0 } })
    }

    /// A cache in which every block is cached, and the oldest come in no order.
    /// `filled` hears how many blocks are, and of how many.
    pub(super) fn full(
        sizes: Sizes,
        filled: &mut dyn FnMut(u32, u32),
    ) -> Result<Self, ManagerError> {
        let mut fixture = Self::open(sizes)?;
        fixture.fill(filled)?;
        Ok(fixture)
    }

    /// Stores prompts of one block each until no block is free, and releases them out of order.
    fn fill(&mut self, filled: &mut dyn FnMut(u32, u32)) -> Result<(), ManagerError> {
        let slots = self.cache.plan().seq_slots.min(FILL_SEQS) as usize;
        let at_once = slots.min((STEP_TOKENS / TOKENS_PER_BLOCK) as usize);
        let mut alive: Vec<SeqHandle> = Vec::new();
        while self.counts().free > 0 {
            let now = at_once.min(self.counts().free as usize);
            let mut batch = Vec::new();
            for _ in 0..now {
                let prompt = self.random.prompt(TOKENS_PER_BLOCK);
                let sequence = self.begin(&prompt, TOKENS_PER_BLOCK)?.sequence;
                batch.push((sequence, TOKENS_PER_BLOCK));
            }
            self.step(&batch)?;
            let counts = self.counts();
            let total = counts.free + counts.active + counts.cached;
            filled(total - counts.free, total);
            alive.extend(batch.iter().map(|(sequence, _)| *sequence));
            if alive.len() + at_once > slots || self.counts().free == 0 {
                while !alive.is_empty() {
                    let len = u32::try_from(alive.len()).unwrap_or(u32::MAX);
                    let at = self.random.below(len) as usize;
                    self.cache.release(alive.swap_remove(at))?;
                }
            }
        }
        Ok(())
    }

    /// Begins a sequence that may come to `max_len` tokens.
    pub(super) fn begin(&mut self, prompt: &[u32], max_len: u32) -> Result<Begun, CacheError> {
        self.cache.begin(prompt, options(max_len))
    }

    /// One step of tokens that the prompts say, marked as appended and committed.
    pub(super) fn step(&mut self, batch: &[(SeqHandle, u32)]) -> Result<(), CacheError> {
        let mut step = self.cache.reserve(batch)?;
        step.mark_appended(LAYER)?;
        step.commit()
    }

    /// The same with the ids of the tokens.
    pub(super) fn step_of(
        &mut self,
        batch: &[(SeqHandle, u32)],
        tokens: &[u32],
    ) -> Result<(), CacheError> {
        let mut step = self.cache.reserve_tokens(batch, tokens)?;
        step.mark_appended(LAYER)?;
        step.commit()
    }

    /// Computes what is not cached of a prompt and releases it: its full blocks are cached then.
    pub(super) fn store(&mut self, prompt: &[u32]) -> Result<(), CacheError> {
        let len = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        let Begun { sequence, cached_len, .. } = self.begin(prompt, len)?;
        let mut done = cached_len;
        while done < len {
            let now = STEP_TOKENS.min(len - done);
            self.step(&[(sequence, now)])?;
            done += now;
        }
        self.cache.release(sequence)
    }

    /// The counters.
    pub(super) fn stats(&self) -> Stats {
        self.cache.stats()
    }

    /// The pool's blocks by state.
    pub(super) fn counts(&self) -> BlockCounts {
        self.cache.group_stats(GROUP).map(|group| group.blocks).unwrap_or_default()
    }
}

/// Options of a sequence that may come to `max_len` tokens.
pub(super) fn options(max_len: u32) -> BeginOptions {
    BeginOptions { max_len: Some(max_len), ..BeginOptions::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_pool_is_full_of_cached_blocks() {
        let sizes = Sizes { blocks: 3000, max_seqs: 1, max_seq_len: 4096 };
        let mut heard = Vec::new();
        let mut filled = |done, of| heard.push((done, of));
        let fixture = Fixture::full(sizes, &mut filled).expect("opens");
        assert!(heard.len() > 5 && heard.is_sorted(), "{heard:?}");
        assert_eq!(heard.last(), Some(&(3000, 3000)));
        let counts = fixture.counts();
        assert_eq!((counts.free, counts.active, counts.cached), (0, 0, 3000));
        assert_eq!(fixture.stats().evictions, 0);
    }

    #[test]
    fn numbers_below_are_below() {
        let mut random = Random { state: 7, prompts: 0 };
        assert!((0..1000).all(|_| random.below(3) < 3));
        assert!(random.prompt(1001)[1..].iter().all(|token| *token < 1 << 17));
    }
}
