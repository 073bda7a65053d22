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

use std::marker::PhantomData;

use super::exp::exp;
use super::lanes::{Element, Isa, Line, WIDTH};
use super::portion::Portion;
use super::scores::all_scores;
use super::task::{Partial, Split, Task, finite_base};
use super::tile::{Ahead, AheadOf, Keys, Onward, Run, TILE, Tile, TileRow, Vectors, mask};
use super::values::{Stored, all_values, passes};
use crate::plan::{Addressing, Kv, TILE_TOKENS};

/// How q·k and the weighted values of a tile are computed.
pub(super) trait Products: Copy {
    /// What else is computed with.
    type Isa: Isa;
    /// Whether all heads' scores come before their values where several KV heads lie in a block,
    /// so that both are read as one run. What is computed on for longer than it is read gains
    /// nothing from that, and loses.
    const IN_RUNS: bool;
    /// Whether memory is asked for a whole step ahead, keys while keys are computed on and values
    /// while values are; if not, values while the same step's keys are, and the next step's keys
    /// while these values are, which is half as far. With AVX2 that is too near for elements of one
    /// byte.
    const FAR: bool = false;
    /// Whether it makes a difference in what order the vectors of a slot are read ([`Ahead::FOLLOWS`]).
    const FOLLOWS: bool = false;
    /// Lines of a query head's weights in the form that `values_of_run` takes.
    const WEIGHT_LINES: usize = 0;

    /// The instructions.
    fn isa(self) -> Self::Isa;
    /// The queries in the form that `scores` takes, and how many lines there are for a KV head.
    /// `q`: `[kv_heads, heads, padded_dim]`; `coded`: as [`Split::coded`]
    fn queries<'b>(
        self,
        task: &Task<'_>,
        q: &'b [f32],
        coded: &'b mut [f32],
    ) -> (&'b [Line], usize);
    /// q·k of all heads with some quads of the tile, in two ranges: what is computed for keys that
    /// are not seen means nothing.
    fn scores(
        self,
        tile: &Tile<'_>,
        quads: [Keys; 2],
        ahead: &mut impl Ahead,
        q: &[Line],
        lines: usize,
        scores: &mut [TileRow],
    );
    /// Adds the weighted values of a tile to the accumulators of all heads. `memory`: as
    /// [`Split::weights`]
    fn values(
        self,
        task: &Task<'_>,
        tile: &Tile<'_>,
        ahead: &mut impl Ahead,
        weights: &[TileRow],
        memory: &mut [Line],
        acc: &mut [Line],
    );
    /// Brings the weights of a KV head into the form that `values_of_run` takes, where
    /// [`Products::IN_RUNS`]. `memory`: the KV head's part of [`Split::weights`]
    #[inline(always)]
    fn weights(self, _weights: &[TileRow], _memory: &mut [Line]) {}
    /// The same as `values` for the keys of one run, the runs in ascending order, where
    /// [`Products::IN_RUNS`]; others have no need of it. `memory`: as `weights` has left it
    #[expect(clippy::too_many_arguments, reason = "as `values`, and the run")]
    #[inline(always)]
    fn values_of_run(
        self,
        _task: &Task<'_>,
        _tile: &Tile<'_>,
        _run: Keys,
        _ahead: &mut impl Ahead,
        _weights: &[TileRow],
        _memory: &[Line],
        _acc: &mut [Line],
    ) {
        unreachable!("only where `IN_RUNS`")
    }
    /// How often the first heads go over the tile's values, or over each quad of them. `follows`:
    /// [`Ahead::FOLLOWS`]
    fn passes(self, tile: &Tile<'_>, heads: usize, follows: bool) -> usize;
    /// What is left to do with a split's accumulators.
    #[inline(always)]
    fn finish(self, _acc: &mut [Line]) {}
}

/// Products in f32 lanes.
#[derive(Debug)]
struct Lanes<I, E>(I, PhantomData<E>);

impl<I: Copy, E> Clone for Lanes<I, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<I: Copy, E> Copy for Lanes<I, E> {}

impl<I: Isa, E: Element> Products for Lanes<I, E> {
    type Isa = I;
    const IN_RUNS: bool = E::BYTES > 1;
    const FAR: bool = !I::WIDE && E::BYTES == 1;
    const FOLLOWS: bool = I::WIDE;

    #[inline(always)]
    fn isa(self) -> I {
        self.0
    }

    #[inline(always)]
    fn queries<'b>(self, task: &Task<'_>, q: &'b [f32], _: &'b mut [f32]) -> (&'b [Line], usize) {
        (q.as_chunks().0, task.heads() * task.padded_dim / WIDTH)
    }

    #[inline(always)]
    fn scores(
        self,
        tile: &Tile<'_>,
        quads: [Keys; 2],
        ahead: &mut impl Ahead,
        q: &[Line],
        lines: usize,
        scores: &mut [TileRow],
    ) {
        all_scores::<I, E, _>(self.0, tile, quads, ahead, q, lines / scores.len(), scores);
    }

    #[inline(always)]
    fn values(
        self,
        task: &Task<'_>,
        tile: &Tile<'_>,
        ahead: &mut impl Ahead,
        weights: &[TileRow],
        _: &mut [Line],
        acc: &mut [Line],
    ) {
        all_values(self.0, Stored::<E>(PhantomData), task, tile, (0, TILE), ahead, weights, acc);
    }

    #[inline(always)]
    fn values_of_run(
        self,
        task: &Task<'_>,
        tile: &Tile<'_>,
        run: Keys,
        ahead: &mut impl Ahead,
        weights: &[TileRow],
        _: &[Line],
        acc: &mut [Line],
    ) {
        all_values(self.0, Stored::<E>(PhantomData), task, tile, run, ahead, weights, acc);
    }

    #[inline(always)]
    fn passes(self, tile: &Tile<'_>, heads: usize, follows: bool) -> usize {
        passes::<I, E>(tile, heads, follows)
    }
}

/// The ways in which a split goes over its tiles. A constant of the functions that do, so that each is
/// compiled by itself: in one function registers for one way's loops would be lacking in another's.
pub(super) mod way {
    /// One KV head after the other.
    pub(in super::super) const PLAIN: u8 = 0;
    /// The same; memory is asked for a little at a time.
    pub(in super::super) const SPREAD: u8 = 1;
    /// The KV heads of a block in the order in which they lie.
    pub(in super::super) const RUNS: u8 = 2;
    /// One token and KV head of a slot, in the order in which memory lies
    /// ([`Ahead::FOLLOWS`](super::Ahead::FOLLOWS)).
    pub(in super::super) const FOLLOWS: u8 = 3;
}

/// The way to compute a split in f32 lanes.
pub(super) fn way_in_lanes<I: Isa, E: Element>(task: &Task<'_>) -> u8 {
    way_of::<Lanes<I, E>>(task)
}

/// Computes one split in f32 lanes, as [`way_in_lanes`] says; most kernels are instances of this.
#[inline(always)]
pub(super) fn split<I: Isa, E: Element, const WAY: u8>(isa: I, work: &mut Split<'_, '_>) {
    split_as::<_, WAY>(Lanes::<I, E>(isa, PhantomData), work);
}

/// The same, in whichever way it is.
#[inline(always)]
pub(super) fn split_in_lanes<I: Isa, E: Element>(isa: I, work: &mut Split<'_, '_>) {
    split_with(Lanes::<I, E>(isa, PhantomData), work);
}

fn way_of<P: Products>(task: &Task<'_>) -> u8 {
    // Many rows compute for longer than they read. Few registers leave no room for a piece's place,
    // unless there is but one query head.
    let room = P::Isa::WIDE || (P::IN_RUNS && task.group == 1);
    let in_slot = task.view.layout.addressing != Addressing::Blocks;
    match () {
        () if room && task.kv_heads > 1 && P::IN_RUNS => way::RUNS,
        () if room && task.kv_heads > 1 => way::SPREAD,
        () if P::FOLLOWS && in_slot && task.kv_heads == 1 && task.rows == 1 => way::FOLLOWS,
        () => way::PLAIN,
    }
}

/// Computes one split.
#[inline(always)]
pub(super) fn split_with<P: Products>(products: P, work: &mut Split<'_, '_>) {
    match way_of::<P>(work.task) {
        way::RUNS => split_as::<P, { way::RUNS }>(products, work),
        way::SPREAD => split_as::<P, { way::SPREAD }>(products, work),
        way::FOLLOWS => split_as::<P, { way::FOLLOWS }>(products, work),
        _ => split_as::<P, { way::PLAIN }>(products, work),
    }
}

/// Computes one split in one way.
#[inline(always)]
fn split_as<P: Products, const WAY: u8>(products: P, work: &mut Split<'_, '_>) {
    match WAY {
        way::RUNS if P::IN_RUNS => split_in_runs(products, work),
        way::SPREAD if !P::IN_RUNS => split_at_pace::<P, Vectors<'_, true>>(products, work),
        way::FOLLOWS if P::FOLLOWS => split_at_pace::<P, Onward<'_>>(products, work),
        way::PLAIN => split_at_pace::<P, Vectors<'_, false>>(products, work),
        _ => unreachable!("not a way of these products"),
    }
    for kv_head in 0..work.task.kv_heads as usize {
        products.finish(work.parts.of(kv_head).acc.as_chunks_mut().0);
    }
}

/// Computes one split, and asks for memory as `A` does.
#[inline(always)]
fn split_at_pace<'a, P: Products, A: AheadOf<'a>>(products: P, work: &mut Split<'a, '_>) {
    let task = work.task;
    let isa = products.isa();
    let (q, lines) = products.queries(task, work.q, work.coded);
    let scores = &mut work.scores.as_chunks_mut::<TILE>().0[..task.heads()];
    let memory = work.weights.as_chunks_mut().0;
    let ([k_scales, v_scales], _) = work.row_scales.as_chunks_mut::<TILE>() else {
        return;
    };
    let all = Portion::all(task);
    work.parts.clear();
    let mut steps = Steps::new(task, work.start, work.end, work.goes_on);
    while steps.advance(task) {
        let (tile, kv_head) = (&steps.tile, steps.kv_head);
        let mut part = work.parts.of(kv_head);
        tile.row_scales(task, k_scales, v_scales);
        let q = &q[kv_head * lines..][..lines];
        let mut ahead: A = if P::FAR { steps.step_ahead(Kv::K, 1) } else { steps.values_ahead() };
        products.scores(tile, tile.quads(), &mut ahead, q, lines, scores);
        isa.all_weights(task, tile, all, [k_scales, v_scales], scores, &mut part);
        let acc = part.acc.as_chunks_mut::<WIDTH>().0;
        steps.scales_ahead(isa);
        let kv = if P::FAR { Kv::V } else { Kv::K };
        let passes = products.passes(tile, task.heads(), A::FOLLOWS);
        let mut ahead: A = steps.step_ahead(kv, passes);
        products.values(task, tile, &mut ahead, scores, memory, acc);
    }
}

/// Computes one split of several KV heads whose vectors lie in blocks, in the order in which they
/// lie there: all heads' scores of a tile, block by block, and then their values, block by block.
#[inline(always)]
fn split_in_runs<P: Products>(products: P, work: &mut Split<'_, '_>) {
    let task = work.task;
    let isa = products.isa();
    let (q, lines) = products.queries(task, work.q, work.coded);
    let heads = task.heads();
    let scores = work.scores.as_chunks_mut::<TILE>().0;
    let memory = work.weights.as_chunks_mut().0;
    let memory_lines = P::WEIGHT_LINES * heads;
    let ([k_scales, v_scales], _) = work.row_scales.as_chunks_mut::<TILE>() else {
        return;
    };
    let all = Portion::all(task);
    work.parts.clear();
    let mut steps = Steps::new(task, work.start, work.end, work.goes_on);
    while steps.next_tile(task) {
        steps.next.touch(isa);
        for run in 0..steps.tile.runs() {
            let quads = steps.tile.quads_of(run);
            for kv_head in 0..task.kv_heads as usize {
                steps.tile.turn_to(kv_head);
                let q = &q[kv_head * lines..][..lines];
                let scores = &mut scores[kv_head * heads..][..heads];
                let mut ahead = steps.later_in_runs(Kv::K, run, kv_head, task.group, 1);
                products.scores(&steps.tile, quads, &mut ahead, q, lines, scores);
            }
        }
        steps.tile.row_scales(task, k_scales, v_scales);
        for kv_head in 0..task.kv_heads as usize {
            steps.tile.turn_to(kv_head);
            let scores = &mut scores[kv_head * heads..][..heads];
            let mut part = work.parts.of(kv_head);
            isa.all_weights(task, &steps.tile, all, [k_scales, v_scales], scores, &mut part);
            products.weights(scores, &mut memory[kv_head * memory_lines..][..memory_lines]);
        }
        let passes = products.passes(&steps.tile, heads, Run::FOLLOWS);
        for run in 0..steps.tile.runs() {
            let keys = steps.tile.keys_of(run);
            for kv_head in 0..task.kv_heads as usize {
                steps.tile.turn_to(kv_head);
                let scores = &scores[kv_head * heads..][..heads];
                let memory = &memory[kv_head * memory_lines..][..memory_lines];
                let acc = work.parts.of(kv_head).acc.as_chunks_mut::<WIDTH>().0;
                let mut ahead = steps.later_in_runs(Kv::V, run, kv_head, task.group, passes);
                products.values_of_run(task, &steps.tile, keys, &mut ahead, scores, memory, acc);
            }
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
            self.tile.become_like(&self.next);
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

    /// What is read some steps after a run of one KV head, where each step is one: K vectors of all
    /// runs, then V vectors, then the next tile's K vectors. Steps of several query heads take
    /// longer, and are best begun with later ones under way.
    #[inline(always)]
    fn later_in_runs(
        &self,
        kv: Kv,
        run: usize,
        kv_head: usize,
        group: usize,
        passes: usize,
    ) -> Run<'a> {
        let runs = self.tile.runs();
        let distance = if group == 1 { runs / 2 } else { runs };
        let (mut run, mut kv_head) = (run, kv_head + distance);
        while kv_head >= self.kv_heads {
            (run, kv_head) = (run + 1, kv_head - self.kv_heads);
        }
        if run < runs {
            return self.tile.run_ahead(kv, run, kv_head, passes);
        }
        match kv {
            Kv::K => self.tile.run_ahead(Kv::V, run - runs, kv_head, passes),
            Kv::V => self.next.run_ahead(Kv::K, run - runs, kv_head, passes),
        }
    }

    /// The next tile's keys and values, of the task's only KV head; asks for its scales right away.
    #[inline(always)]
    pub(super) fn next_ahead<I: Isa>(&self, isa: I) -> [Vectors<'a, false>; 2] {
        self.next.prefetch_scales(isa, 0);
        [Vectors::of(&self.next, Kv::K, 0, 1), Vectors::of(&self.next, Kv::V, 0, 1)]
    }

    /// What to ask for while the scores are computed: the step's values.
    #[inline(always)]
    pub(super) fn values_ahead<A: AheadOf<'a>>(&self) -> A {
        A::of(&self.tile, Kv::V, self.kv_head, 1)
    }

    /// Keys or values of the step after this one, in `passes` pieces for each quad.
    #[inline(always)]
    pub(super) fn step_ahead<A: AheadOf<'a>>(&self, kv: Kv, passes: usize) -> A {
        let (tile, kv_head) = self.next_step();
        A::of(tile, kv, kv_head, passes)
    }

    /// Asks for the scales of the step after this one.
    #[inline(always)]
    pub(super) fn scales_ahead<I: Isa>(&self, isa: I) {
        let (tile, kv_head) = self.next_step();
        tile.prefetch_scales(isa, kv_head);
    }

    /// The tile and the KV head of the step after this one.
    #[inline(always)]
    fn next_step(&self) -> (&Tile<'a>, usize) {
        if self.kv_head + 1 < self.kv_heads {
            (&self.tile, self.kv_head + 1)
        } else {
            (&self.next, 0)
        }
    }
}

/// [`Isa::all_weights`].
#[inline(always)]
pub(super) fn all_weights<I: Isa>(
    isa: I,
    task: &Task<'_>,
    tile: &Tile<'_>,
    portion: Portion,
    [k_scales, v_scales]: [&TileRow; 2],
    scores: &mut [TileRow],
    part: &mut Partial<'_>,
) {
    let lines = task.padded_dim / WIDTH;
    let acc = part.acc.as_chunks_mut().0;
    // Step by step for a few heads at once: each step of one head waits for the one before.
    for (i, scores) in scores.chunks_mut(ABREAST).enumerate() {
        let first = portion.first * task.group + i * ABREAST;
        let mut maxima = [f32::NEG_INFINITY; ABREAST];
        for (i, (scores, max)) in scores.iter_mut().zip(&mut maxima).enumerate() {
            *max = isa.scale_scores(scores, k_scales, task.softmax_scale);
            let row = (first + i) / task.group;
            if !tile.all_seen_by(task, row) {
                // Not before: a scale of 0 would make NaN of -∞.
                mask(scores, tile.seen_by(task, row));
                *max = largest(scores);
            }
        }
        let mut sums = [0.0; ABREAST];
        for (i, scores) in scores.iter_mut().enumerate() {
            let max = part.max[first + i];
            // A NaN is not among the maxima; the sum brings it to light.
            maxima[i] = if maxima[i] > max { maxima[i] } else { max };
            sums[i] = isa.exp_scores(scores, v_scales, finite_base(maxima[i]));
        }
        for i in 0..scores.len() {
            let g = first + i;
            // Mostly it stays, and e^0 is 1.
            let stays = part.max[g] == maxima[i] && maxima[i].is_finite();
            let keep = if stays { 1.0 } else { exp_of::<I>(part.max[g] - finite_base(maxima[i])) };
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
    }
}

/// The largest score; NaN is passed over.
#[inline(always)]
pub(super) fn largest(scores: &TileRow) -> f32 {
    let mut maxima = [f32::NEG_INFINITY; WIDTH];
    for line in scores.as_chunks::<WIDTH>().0 {
        for (max, score) in maxima.iter_mut().zip(line) {
            *max = if score > max { *score } else { *max };
        }
    }
    let larger = |a, b| if b > a { b } else { a };
    maxima.into_iter().fold(f32::NEG_INFINITY, larger)
}

/// Heads whose scores become weights side by side.
const ABREAST: usize = 4;

/// `exp` with the instruction set's way of multiplying and adding.
#[inline(always)]
pub(super) fn exp_of<I: Isa>(x: f32) -> f32 {
    if I::FMA { exp::<true>(x) } else { exp::<false>(x) }
}
