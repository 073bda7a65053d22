//! What is done with the tokens of a step: computing attention over them, or accounting for them.

use std::time::Duration;

use super::tokens::Tokens;
use crate::cache::{Cache, Step};
use crate::error::CacheError;
use crate::pool::Stats;

/// Consecutive tokens of one request in a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    /// The request's index in the job.
    pub(super) request: u32,
    /// The request's id.
    pub(super) id: u64,
    /// Rows of the step that belong to it.
    pub(super) rows: u32,
    /// The position of its first row.
    pub(super) first_position: u32,
    /// The position of its first row that counts: the last token of its prompt.
    pub(super) counts_from: u32,
    /// Where its rows are remembered; `None` when none is ever computed again.
    pub(super) memory: Option<u32>,
}

/// The moment after a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment<'a> {
    pub(super) cache: &'a Cache,
    pub(super) stats: &'a Stats,
    /// When the step began, on the simulated clock.
    pub(super) began_ns: u64,
    /// How long it took.
    pub(super) took_ns: u64,
    pub(super) running: usize,
    pub(super) waiting: usize,
}

/// A request that is done: when what happened, on the simulated clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Served {
    pub(super) arrived_ns: u64,
    /// When it was first admitted.
    pub(super) admitted_ns: u64,
    /// When its first token was there.
    pub(super) first_ns: u64,
    pub(super) done_ns: u64,
    /// Tokens that it generated.
    pub(super) output_tokens: u32,
}

/// Does the work of the steps. Nothing here allocates.
pub(super) trait Work {
    /// Which token stands where.
    fn tokens(&self) -> &Tokens;

    /// A place to remember a request's rows in; `None` when none is ever computed again.
    fn remember(&mut self) -> Option<u32> {
        None
    }

    /// Gives such a place back: the request is done.
    fn forget(&mut self, _place: u32) {}

    /// Begins a step with no rows.
    fn clear(&mut self);

    /// Adds the next rows of the step: their tokens, and the positions that the cache hands out.
    fn push(&mut self, run: Run, positions: &[u32], tokens: &[u32]);

    /// Appends and attends in every layer, or declares that. Time in the cache's verbs is added to
    /// `in_cache`.
    ///
    /// # Errors
    /// A verb that failed: a defect.
    fn compute(&mut self, step: &mut Step<'_>, in_cache: &mut Duration) -> Result<(), CacheError>;

    /// Ends a step that was committed.
    fn committed(&mut self) {}

    /// How long the step that was committed took on the simulated clock; 0 where there is none.
    /// `copied_bytes` have been copied within the pool so far.
    fn took_ns(&mut self, _copied_bytes: u64) -> u64 {
        0
    }

    /// A step is done.
    fn note(&mut self, _moment: &Moment<'_>) {}

    /// A request is done.
    fn served(&mut self, _served: &Served) {}
}
