//! Attention over one split, for all query heads of a KV head together.
//!
//! Everything here is generic and inlined into functions compiled for one instruction set
//! (`x86.rs`, and `Portable` in `kernel.rs`). The order of every sum is fixed by positions alone:
//!
//! - A split is cut into tiles at multiples of [`TILE_TOKENS`]. A key's number in its tile is its
//!   position's, wherever in memory it lies and whatever else is visible.
//! - A score is summed in a fixed order (`scores.rs`). A key that a row does not see has a score
//!   of -∞ for it.
//! - The running maximum, sum and accumulators are brought up to date once a tile; within it the
//!   weighted values are added key by key (`values.rs`).
//!
//! So the result is the same, bit for bit, for every cache mode, block size, batch, number of
//! rows at once and number of threads (P5).

use super::exp::exp;
use super::lanes::{Element, Isa, WIDTH};
use super::scores::all_scores;
use super::task::{Partial, Split, Task, finite_base};
use super::tile::{TILE, Tile, TileRow, Vectors, mask};
use super::values::{all_values, passes};
use crate::plan::{Kv, TILE_TOKENS};

/// Computes one split; the kernels are instances of this.
#[inline(always)]
pub(super) fn split<I: Isa, E: Element>(isa: I, work: &mut Split<'_, '_>) {
    // One KV head alone is a single run, or one of many rows, which compute for longer than they
    // read. Few registers leave no room for a piece's place.
    if I::WIDE && work.task.kv_heads > 1 {
        // One byte an element is computed on for longer than it is read; the order in which it
        // lies gains nothing there, and costs.
        if E::BYTES > 1 {
            split_in_runs::<I, E>(isa, work);
        } else {
            split_at_pace::<I, E, true>(isa, work);
        }
    } else {
        split_at_pace::<I, E, false>(isa, work);
    }
}

/// Computes one split; with `SPREAD`, memory is asked for a little at a time.
#[inline(always)]
fn split_at_pace<I: Isa, E: Element, const SPREAD: bool>(isa: I, work: &mut Split<'_, '_>) {
    let task = work.task;
    let lines = task.padded_dim / WIDTH;
    let q = work.q.as_chunks::<WIDTH>().0;
    let scores = &mut work.scores.as_chunks_mut::<TILE>().0[..task.heads()];
    let ([k_scales, v_scales], _) = work.row_scales.as_chunks_mut::<TILE>() else {
        return;
    };
    let per_head = task.heads() * lines;
    work.parts.clear();
    let mut steps = Steps::new(task, work.start, work.end, work.goes_on);
    while steps.advance(task) {
        let (tile, kv_head) = (&steps.tile, steps.kv_head);
        let mut part = work.parts.of(kv_head);
        tile.row_scales(task, k_scales, v_scales);
        let q = &q[kv_head * per_head..];
        let mut ahead = steps.values_ahead::<SPREAD>();
        all_scores::<I, E>(isa, tile, tile.quads(), &mut ahead, q, lines, scores);
        all_weights(isa, task, tile, k_scales, v_scales, scores, &mut part);
        let acc = part.acc.as_chunks_mut::<WIDTH>().0;
        let mut ahead = steps.keys_ahead::<I, SPREAD>(isa, passes::<I, E>(tile, task.heads()));
        all_values::<I, E>(isa, task, tile, &mut ahead, scores, acc);
    }
}

/// Computes one split of several KV heads whose vectors lie in blocks, nearly in the order in which
/// they lie there: all heads' scores of a tile, block by block, and then their values.
#[inline(always)]
fn split_in_runs<I: Isa, E: Element>(isa: I, work: &mut Split<'_, '_>) {
    let task = work.task;
    let lines = task.padded_dim / WIDTH;
    let q = work.q.as_chunks::<WIDTH>().0;
    let heads = task.heads();
    let scores = work.scores.as_chunks_mut::<TILE>().0;
    let ([k_scales, v_scales], _) = work.row_scales.as_chunks_mut::<TILE>() else {
        return;
    };
    work.parts.clear();
    let mut steps = Steps::new(task, work.start, work.end, work.goes_on);
    while steps.next_tile(task) {
        for run in 0..steps.tile.runs() {
            let quads = steps.tile.quads_of(run);
            for kv_head in 0..task.kv_heads as usize {
                steps.tile.turn_to(kv_head);
                let mut ahead = steps.tile.ahead_in_runs::<true>(run, kv_head);
                let q = &q[kv_head * heads * lines..];
                let scores = &mut scores[kv_head * heads..][..heads];
                all_scores::<I, E>(isa, &steps.tile, quads, &mut ahead, q, lines, scores);
            }
        }
        let passes = passes::<I, E>(&steps.tile, heads);
        steps.tile.row_scales(task, k_scales, v_scales);
        for kv_head in 0..task.kv_heads as usize {
            steps.tile.turn_to(kv_head);
            let tile = &steps.tile;
            let scores = &mut scores[kv_head * heads..][..heads];
            let mut part = work.parts.of(kv_head);
            all_weights(isa, task, tile, k_scales, v_scales, scores, &mut part);
            let acc = part.acc.as_chunks_mut::<WIDTH>().0;
            let mut ahead = steps.values_ahead_in_runs(kv_head, passes);
            all_values::<I, E>(isa, task, tile, &mut ahead, scores, acc);
        }
    }
}

/// The steps of a split: its tiles of which anything is seen, and within a tile the KV heads. (Not
/// a closure called for each: that would be compiled for the baseline's instructions.)
#[derive(Debug)]
pub(super) struct Steps<'a> {
    /// The tile to compute, turned to `kv_head`.
    pub(super) tile: Tile<'a>,
    /// The KV head to compute, counted from the task's first.
    pub(super) kv_head: usize,
    kv_heads: usize,
    /// The tile after it.
    next: Tile<'a>,
    start: u32,
    end: u32,
    /// Where the tiles end that are worth asking for.
    ahead: u32,
}

impl<'a> Steps<'a> {
    /// The steps of the split `start..end`; the last tile is followed by one beyond `end` if the
    /// task goes on there.
    pub(super) fn new(task: &Task<'a>, start: u32, end: u32, goes_on: bool) -> Self {
        let kv_heads = task.kv_heads as usize;
        let mut next = Tile::new(task);
        next.locate(task, start, end.min(start.saturating_add(TILE_TOKENS)));
        Self {
            tile: Tile::new(task),
            // There is nothing more to do with the tile before the first.
            kv_head: kv_heads - 1,
            kv_heads,
            next,
            start,
            end,
            ahead: if goes_on { task.end() } else { end },
        }
    }

    /// Goes to the next step; whether there is one.
    pub(super) fn advance(&mut self, task: &Task<'a>) -> bool {
        self.kv_head += 1;
        if self.kv_head < self.kv_heads {
            self.tile.turn_to(self.kv_head);
            return true;
        }
        self.kv_head = 0;
        self.next_tile(task)
    }

    /// Goes to the next tile, and its first KV head; whether there is one.
    pub(super) fn next_tile(&mut self, task: &Task<'a>) -> bool {
        while self.start < self.end {
            std::mem::swap(&mut self.tile, &mut self.next);
            self.start = self.end.min(self.start.saturating_add(TILE_TOKENS));
            let end = self.ahead.min(self.start.saturating_add(TILE_TOKENS));
            self.next.locate(task, self.start, end);
            if self.tile.seen != [(0, 0); 2] {
                self.tile.turn_to(0);
                return true;
            }
        }
        false
    }

    /// What to ask for while a KV head's values are added up, in `passes` pieces for each quad,
    /// where all heads' scores come first: the next head's values, or the next tile's first keys.
    #[inline(always)]
    fn values_ahead_in_runs(&self, kv_head: usize, passes: usize) -> Vectors<'a, true> {
        if kv_head + 1 < self.kv_heads {
            self.tile.ahead(Kv::V, kv_head + 1, passes)
        } else {
            self.next.first_in_runs(passes)
        }
    }

    /// What to ask for while the scores are computed: the step's values.
    pub(super) fn values_ahead<const SPREAD: bool>(&self) -> Vectors<'a, SPREAD> {
        self.tile.ahead(Kv::V, self.kv_head, 1)
    }

    /// What to ask for while the values are added up, in `passes` pieces for each quad: the keys
    /// of the step after it. Asks for its scales right away.
    #[inline(always)]
    pub(super) fn keys_ahead<I: Isa, const SPREAD: bool>(
        &self,
        isa: I,
        passes: usize,
    ) -> Vectors<'a, SPREAD> {
        let (tile, kv_head) = if self.kv_head + 1 < self.kv_heads {
            (&self.tile, self.kv_head + 1)
        } else {
            (&self.next, 0)
        };
        tile.prefetch_scales(isa, kv_head);
        tile.ahead(Kv::K, kv_head, passes)
    }
}

/// Turns a tile's products q·k into weights, for all heads, and brings the running state up to
/// date.
#[inline(always)]
pub(super) fn all_weights<I: Isa>(
    isa: I,
    task: &Task<'_>,
    tile: &Tile<'_>,
    k_scales: &TileRow,
    v_scales: &TileRow,
    scores: &mut [TileRow],
    part: &mut Partial<'_>,
) {
    for row in 0..task.rows {
        let seen = tile.seen_by(task, row);
        let heads = row * task.group..(row + 1) * task.group;
        for scores in &mut scores[heads] {
            mask(scores, seen);
        }
    }
    let lines = task.padded_dim / WIDTH;
    let acc = part.acc.as_chunks_mut().0;
    // Step by step for a few heads at once: each step of one head waits for the one before.
    let mut first = 0;
    while first < scores.len() {
        let some = scores.len().min(first + ABREAST) - first;
        let scores = &mut scores[first..first + some];
        let mut maxima = [f32::NEG_INFINITY; ABREAST];
        for (scores, max) in scores.iter_mut().zip(&mut maxima) {
            *max = isa.scale_scores(scores, k_scales, task.softmax_scale);
        }
        let mut sums = [0.0; ABREAST];
        for (i, scores) in scores.iter_mut().enumerate() {
            let max = part.max[first + i];
            // A NaN is not among the maxima; the sum brings it to light.
            maxima[i] = if maxima[i] > max { maxima[i] } else { max };
            sums[i] = isa.exp_scores(scores, v_scales, finite_base(maxima[i]));
        }
        for i in 0..some {
            let g = first + i;
            let keep = exp_of::<I>(part.max[g] - finite_base(maxima[i]));
            part.max[g] = maxima[i];
            part.sum[g] = part.sum[g] * keep + sums[i];
            // A product with 1 changes nothing.
            if keep.to_bits() != 1.0_f32.to_bits() {
                let keep = isa.splat(keep);
                for acc in &mut acc[g * lines..][..lines] {
                    isa.store(isa.mul(isa.load(acc), keep), acc);
                }
            }
        }
        first += some;
    }
}

/// Heads whose scores become weights side by side.
const ABREAST: usize = 4;

/// `exp` with the instruction set's way of multiplying and adding.
#[inline(always)]
pub(super) fn exp_of<I: Isa>(x: f32) -> f32 {
    if I::FMA { exp::<true>(x) } else { exp::<false>(x) }
}
