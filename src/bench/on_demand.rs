//! `kvpool bench on-demand`: the same steps over memory that was taken at the start and over memory
//! that is taken from the system's allocator when a sequence needs its next block.
//!
//! A few sequences run at once, each with a prompt that is written in one step and then a token a
//! step; whoever is done makes room for the next. Both arms write the same bytes into blocks of the
//! same size. They differ in where a block comes from: a free list over memory that has been
//! touched once, as kvpool's pool is, or `calloc` and `free`. New memory has no pages until it is
//! written, so that arm pays for page faults, and for giving pages back, in the middle of a step.

use std::time::Instant;

use crate::config::{CacheMode, Capacity, Source};
use crate::error::JobError;
use crate::plan::Plan;

/// Steps that are timed.
const STEPS: usize = 3000;
/// The most bytes that sequences hold.
const MOST_BYTES: u64 = 1 << 30;
/// The longest prompt and the longest answer.
const PROMPT: u32 = 512;
const ANSWER: u32 = 256;

/// The longest sequence.
pub const MOST_TOKENS: u32 = PROMPT + ANSWER;

/// One arm.
#[derive(Clone, Debug)]
pub struct Arm {
    /// What it is.
    pub name: &'static str,
    /// The times of its steps, in microseconds, in order.
    pub step_us: Vec<f64>,
    /// Page faults in its steps; `None` where the system does not say.
    pub faults: Option<u64>,
}

/// What was measured.
#[derive(Clone, Debug)]
pub struct OnDemand {
    /// Bytes of a block of `tokens_per_block` tokens, all layers together.
    pub block_bytes: u64,
    /// Tokens of a block.
    pub tokens_per_block: u32,
    /// Sequences at once.
    pub seqs: u32,
    /// Blocks that were taken in each arm.
    pub blocks: u64,
    /// The pool, and memory on demand.
    pub arms: [Arm; 2],
}

impl Arm {
    /// What `percent` of 100 steps do not exceed, in microseconds.
    #[must_use]
    pub fn percentile(&self, percent: f64) -> f64 {
        let mut sorted = self.step_us.clone();
        sorted.sort_by(f64::total_cmp);
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a few thousand steps"
        )]
        let rank = (percent / 100.0 * (sorted.len() - 1) as f64).round() as usize;
        sorted[rank.min(sorted.len() - 1)]
    }
}

/// Where blocks come from.
trait Memory {
    fn take(&mut self) -> Vec<u8>;
    fn give_back(&mut self, block: Vec<u8>);
}

/// Blocks that were there, and touched, before the first step.
struct Static(Vec<Vec<u8>>);

impl Memory for Static {
    fn take(&mut self) -> Vec<u8> {
        self.0.pop().unwrap_or_default()
    }
    fn give_back(&mut self, block: Vec<u8>) {
        self.0.push(block);
    }
}

/// Blocks of so many bytes from the allocator, zeroed: new pages where they are large.
struct Allocated(usize);

impl Memory for Allocated {
    fn take(&mut self) -> Vec<u8> {
        vec![0; self.0]
    }
    fn give_back(&mut self, block: Vec<u8>) {
        drop(block);
    }
}

/// A sequence: its blocks, its tokens, and how many it will have.
struct Seq {
    blocks: Vec<Vec<u8>>,
    len: u32,
    total: u32,
}

/// Runs both arms, step by step in turns.
///
/// # Errors
/// A file that cannot be planned.
pub fn run(source: &Source) -> Result<OnDemand, JobError> {
    let mut config = source.config.clone();
    if config.cache.mode == CacheMode::Dynamic {
        config.cache.mode = CacheMode::Paged;
    }
    // The size of a block is asked for, and no pool is made.
    config.pool.capacity = Capacity::WorstCase;
    config.pool.typical_seq_len = None;
    let plan = Plan::new(&config, &source.geometry).map_err(|error| JobError::Open {
        variant: "bench on-demand".to_owned(),
        source: error.into(),
    })?;
    let token_bytes = plan.bytes_per_token.get().max(1);
    let tokens_per_block = plan.tokens_per_block.max(1);
    let block_bytes = token_bytes * u64::from(tokens_per_block);
    let longest = u64::from(MOST_TOKENS).div_ceil(u64::from(tokens_per_block)) * block_bytes;
    let seqs = u32::try_from((MOST_BYTES / longest).clamp(2, 16)).unwrap_or(2);
    let each = longest / block_bytes;
    let (size, count) = (
        usize::try_from(block_bytes).unwrap_or(usize::MAX),
        usize::try_from(each * u64::from(seqs)).unwrap_or(usize::MAX),
    );
    let touched = (0..count).map(|_| vec![1; size]).collect();
    let row = vec![7; usize::try_from(token_bytes).unwrap_or(usize::MAX)];
    let mut pool = Runner::new(Box::new(Static(touched)), seqs, tokens_per_block);
    let mut demand = Runner::new(Box::new(Allocated(size)), seqs, tokens_per_block);
    for _ in 0..STEPS {
        pool.step(&row);
        demand.step(&row);
    }
    let blocks = pool.blocks;
    debug_assert_eq!(blocks, demand.blocks, "the same steps");
    let arms = [pool.arm("taken at the start"), demand.arm("taken on demand")];
    Ok(OnDemand { block_bytes, tokens_per_block, seqs, blocks, arms })
}

/// Runs the steps of one arm.
struct Runner {
    memory: Box<dyn Memory>,
    seqs: Vec<Seq>,
    per_block: u32,
    state: u64,
    blocks: u64,
    step_us: Vec<f64>,
    faults: Option<u64>,
}

impl Runner {
    fn new(memory: Box<dyn Memory>, seqs: u32, per_block: u32) -> Self {
        let none = || Seq { blocks: Vec::new(), len: 0, total: 0 };
        Self {
            memory,
            seqs: (0..seqs).map(|_| none()).collect(),
            per_block,
            state: 1,
            blocks: 0,
            step_us: Vec::with_capacity(STEPS),
            faults: Some(0),
        }
    }

    /// A number from 1 to `most`, the same ones in both arms.
    fn draw(&mut self, most: u32) -> u32 {
        self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        u32::try_from((self.state >> 33) % u64::from(most)).unwrap_or(0) + 1
    }

    /// One step: a token of every sequence, and the prompt of one that begins where one is done.
    fn step(&mut self, row: &[u8]) {
        let (prompt, answer) = (self.draw(PROMPT), self.draw(ANSWER));
        let faults = page_faults();
        let began = Instant::now();
        let mut may_begin = true;
        for at in 0..self.seqs.len() {
            if self.seqs[at].len == self.seqs[at].total {
                for block in self.seqs[at].blocks.drain(..) {
                    self.memory.give_back(block);
                }
                self.seqs[at].len = 0;
                self.seqs[at].total = 0;
                if !std::mem::take(&mut may_begin) {
                    continue;
                }
                self.seqs[at].total = prompt + answer;
                (0..prompt).for_each(|_| self.append(at, row));
            } else {
                self.append(at, row);
            }
        }
        self.step_us.push(began.elapsed().as_secs_f64() * 1e6);
        self.faults = match (self.faults, faults, page_faults()) {
            (Some(sum), Some(before), Some(after)) => Some(sum + after.saturating_sub(before)),
            _ => None,
        };
    }

    /// Writes a token's bytes.
    fn append(&mut self, at: usize, row: &[u8]) {
        let place = self.seqs[at].len % self.per_block;
        if place == 0 {
            let block = self.memory.take();
            self.seqs[at].blocks.push(block);
            self.blocks += 1;
        }
        self.seqs[at].len += 1;
        let from = place as usize * row.len();
        if let Some(block) = self.seqs[at].blocks.last_mut() {
            block[from..from + row.len()].copy_from_slice(row);
        }
    }

    fn arm(self, name: &'static str) -> Arm {
        Arm { name, step_us: self.step_us, faults: self.faults }
    }
}

/// Pages that this process has got without reading a file.
fn page_faults() -> Option<u64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // Behind the name, which may have blanks: state is the third field, minor faults the tenth.
    stat.rsplit_once(')')?.1.split_whitespace().nth(7)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_arms_do_the_same_and_one_of_them_faults() {
        let text = "
            model = { num_layers = 2, num_q_heads = 2, num_kv_heads = 2, head_dim = 128 }
            limits = { max_seqs = 2, max_seq_len = 64, max_batch_tokens = 32 }
            cache = { mode = 'paged', tokens_per_block = 16 }
            pool = { capacity = 'budget:90%', typical_seq_len = 32 }";
        let source = crate::config::parse(text, "t".as_ref(), &[]).expect("fine");
        let measured = run(&source).expect("plans");
        assert_eq!((measured.block_bytes, measured.seqs), (16 * 2048, 16));
        let [pool, demand] = &measured.arms;
        assert_eq!((pool.step_us.len(), demand.step_us.len()), (STEPS, STEPS));
        assert!(pool.percentile(50.0) <= pool.percentile(99.0));
        assert!(measured.blocks > 10_000 / 16, "{}", measured.blocks);
    }
}
