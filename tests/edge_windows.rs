//! Edge case 41, step by step: where a token leaves its window, which blocks go with it, and what a
//! rewind brings back. `stateful.rs` has the same with random operations.

use kvpool::cache::{Cache, SeqHandle};
use kvpool::error::CacheError;
use kvpool::plan::NO_BLOCK;
use kvpool::units::GroupIdx;

use crate::common::{
    MODES, Spec, assert_refused, assert_same_bits, begin, naive_attention, run_step,
};

const PER_BLOCK: u32 = 8;

/// One sequence in every mode, its layer 0 with a window and its layer 1 without.
struct Line {
    caches: Vec<(Cache, SeqHandle)>,
    tags: Vec<u64>,
    next_tag: u64,
    /// The longest that it ever was.
    high_water: u32,
}

impl Line {
    fn new(window: u32, sink_tokens: u32, rewind: u32, step: u32) -> Self {
        let spec = Spec {
            windows: vec![window, 0],
            sink_tokens,
            max_rewind_tokens: rewind,
            max_step_tokens: Some(step),
            max_seqs: 1,
            max_seq_len: 160,
            tokens_per_block: PER_BLOCK,
            prefix_reuse: false,
            ..Spec::default()
        };
        let caches = MODES.iter().map(|mode| Spec { mode: *mode, ..spec.clone() }.open());
        let caches = caches.map(|mut cache| (begin(&mut cache, 0), cache)).map(|(s, c)| (c, s));
        Self { caches: caches.collect(), tags: Vec::new(), next_tag: 1, high_water: 0 }
    }

    fn len(&self) -> u32 {
        self.tags.len() as u32
    }

    /// Appends tokens in one step; the outputs are those of naive attention over what is in sight.
    fn step(&mut self, count: u32) {
        let new: Vec<u64> = (self.next_tag..).take(count as usize).collect();
        self.next_tag += u64::from(count);
        let outputs: Vec<_> = self
            .caches
            .iter_mut()
            .map(|(cache, seq)| run_step(cache, &[(*seq, count)], &new).expect("promised"))
            .collect();
        for layer in 0..2 {
            for other in &outputs[1..] {
                assert_same_bits(&outputs[0].out[layer], &other.out[layer], "modes");
            }
        }
        let geometry = self.caches[0].0.plan().geometry.clone();
        let (heads, dim) = (geometry.num_q_heads as usize, geometry.head_dim as usize);
        for (row, tag) in new.into_iter().enumerate() {
            self.tags.push(tag);
            for head in 0..heads {
                let (want, _) =
                    naive_attention(&geometry, &self.tags, 0, head as u32, |_, x| x.to_vec());
                let got = &outputs[0].out[0][(row * heads + head) * dim..][..dim];
                for (got, want) in got.iter().zip(&want) {
                    assert!((f64::from(*got) - want).abs() < 2e-4, "{}: {got}, {want}", self.len());
                }
            }
        }
        self.high_water = self.high_water.max(self.len());
        self.check_blocks();
    }

    /// Goes back to a length that the window allows.
    fn back_to(&mut self, len: u32) {
        for (cache, seq) in &mut self.caches {
            cache.truncate(*seq, len).expect("within max_rewind_tokens");
        }
        self.tags.truncate(len as usize);
        self.check_blocks();
    }

    /// One token further back would bring back what is gone.
    fn cannot_go_back_to(&mut self, len: u32) {
        for (cache, seq) in &mut self.caches {
            let error = assert_refused(cache, |cache| cache.truncate(*seq, len));
            assert!(matches!(error, CacheError::WindowGone { .. }), "{error}");
        }
    }

    /// The blocks of the windowed layer that the paged cache holds, and NaN in all that is not
    /// held.
    fn check_blocks(&mut self) {
        for (cache, _) in &mut self.caches {
            cache.check_invariants().expect("invariants");
            cache.poison_unused(0xFF).expect("in the pool");
        }
        assert_eq!(self.held(), self.expected(), "{} tokens, {}", self.len(), self.high_water);
    }

    /// Which blocks the row of the windowed layer has.
    fn held(&self) -> Vec<u32> {
        let (cache, seq) = &self.caches[1];
        let (table, row) = cache.block_table(GroupIdx(0)).expect("paged");
        let row = &table[(seq.slot() * row) as usize..][..row as usize];
        (0..).zip(row).filter(|(_, block)| **block != NO_BLOCK).map(|(at, _)| at).collect()
    }

    /// Which it must have: those of the sinks, and from the first token that the next one sees, or
    /// would see after the longest rewind.
    fn expected(&self) -> Vec<u32> {
        let plan = self.caches[1].0.plan();
        let (window, sinks) = (plan.geometry.windows[0], plan.geometry.sink_tokens);
        let shortest = self.high_water.saturating_sub(plan.limits.max_rewind_tokens);
        let first = (shortest + 1).saturating_sub(window);
        let is_held = |at: &u32| (at + 1) * PER_BLOCK > first || at * PER_BLOCK < sinks;
        (0..self.len().div_ceil(PER_BLOCK)).filter(is_held).collect()
    }
}

/// Token by token past several boundaries: a block goes with the step after which its last token is
/// in nobody's sight, no step earlier and none later.
#[test]
fn edge_41_a_token_leaves_exactly_at_a_boundary() {
    for (window, sinks) in [(1, 0), (7, 0), (8, 0), (9, 3), (16, 0), (16, 8), (17, 9)] {
        let mut line = Line::new(window, sinks, 0, 1);
        let mut left = Vec::new();
        for _ in 0..60 {
            let before = line.held();
            line.step(1);
            let now = line.held();
            left.extend(before.iter().filter(|at| !now.contains(at)).map(|at| (*at, line.len())));
        }
        // The next token, at position `len`, sees `len - window + 1` and what is behind that.
        let blocks = sinks.div_ceil(PER_BLOCK)..;
        let whole = blocks.map(|at| (at, (at + 1) * PER_BLOCK + window - 1));
        let want: Vec<_> = whole.take_while(|(_, len)| *len <= 60).collect();
        assert_eq!(left, want, "a window of {window}, {sinks} sinks");
    }
}

/// A step as long as the window: several blocks leave at once, and its first tokens have seen them.
#[test]
fn edge_41_several_blocks_leave_in_one_step() {
    for sinks in [0, 5] {
        for first in [23, 24, 31, 32] {
            let mut line = Line::new(32, sinks, 0, 32);
            line.step(first);
            let before = line.held().len();
            line.step(32);
            let gone = before + 4 - line.held().len();
            assert!(gone >= 2, "{first}: {gone}");
            line.step(1);
            line.step(32);
            line.step(32);
        }
    }
}

/// Back across the boundary at which tokens left, and on with others: what is in sight again is
/// what was there, as far as max_rewind_tokens goes and not one token further.
#[test]
fn edge_41_a_rewind_across_that_boundary() {
    for (window, sinks, rewind) in [(8, 0, 1), (16, 0, 8), (16, 3, 5), (9, 0, 12), (1, 0, 9)] {
        for len in 30..50 {
            let longest = window.min(4);
            let mut line = Line::new(window, sinks, rewind, longest);
            (0..len).for_each(|_| line.step(1));
            line.cannot_go_back_to(len - rewind - 1);
            line.back_to(len - rewind);
            line.cannot_go_back_to(len - rewind - 1);
            (0..rewind + 2).for_each(|_| line.step(1));
            line.back_to(line.len() - 1);
            line.step(longest);
            line.step(1);
        }
    }
}
