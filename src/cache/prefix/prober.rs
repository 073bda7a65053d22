//! How much of a prompt is cached, asked beside a writer.

use std::sync::Arc;

use super::namespaces::Namespace;
use super::shared::{Shared, Walk};
use crate::plan::{NO_BLOCK, Plan};

/// How much of a prompt the cache has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Probe {
    /// Tokens that need no computing: what `begin` would give, if nothing changed meanwhile and
    /// the pool had the blocks.
    pub cached_len: u32,
    /// Whole blocks among them.
    pub full_blocks: u32,
    /// Tokens of the block that matches in part.
    pub partial_tokens: u32,
}

/// The window of a paged group, as a match needs it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    /// Tokens that a sequence of `len` still needs begin at `len + 1 - kept`.
    kept: u32,
    /// Blocks of its sinks.
    sink_blocks: u32,
}

/// Reads a cache's prefix index: [`Send`], [`Sync`] and cheap to clone.
///
/// It works beside a writer and never holds it up: it looks, and looks again when the index
/// changed meanwhile, [`Prober::TRIES`] times at most; what it says then may mix moments. It
/// outlives the cache, and then says what was last there. It follows
/// [`Cache::set_epoch`](crate::cache::Cache::set_epoch).
#[derive(Clone, Debug)]
pub struct Prober {
    shared: Arc<Shared>,
    windows: Arc<[Window]>,
}

impl Prober {
    /// How often it looks again.
    pub const TRIES: u32 = 1000;

    pub(super) fn new(shared: Arc<Shared>, windows: Arc<[Window]>) -> Self {
        Self { shared, windows }
    }

    /// How much of a prompt is cached now. Changes nothing, and allocates nothing.
    #[must_use]
    pub fn probe(&self, prompt: &[u32], namespace: &Namespace) -> Probe {
        let look = || {
            let walk = self.shared.walk(prompt, &self.shared.keys(namespace));
            self.shared.fit_windows(&walk, &self.windows)
        };
        for _ in 0..Self::TRIES {
            if let Some(probe) = self.shared.version.try_read(look) {
                return probe;
            }
            std::hint::spin_loop();
        }
        look()
    }
}

impl Window {
    pub(super) fn of(plan: &Plan, group: usize) -> Self {
        let layers = &plan.groups[group];
        let per_block = layers.layout.unit_tokens;
        Self {
            kept: layers.window.unwrap_or(0).saturating_add(plan.limits.max_rewind_tokens),
            sink_blocks: layers.layout.sink_tokens.div_ceil(per_block),
        }
    }

    /// The first block that a sequence of `len` tokens still needs.
    fn first_block(&self, len: u32, per_block: u32) -> u32 {
        (len + 1).saturating_sub(self.kept) / per_block
    }
}

impl Shared {
    /// The longest part of a match for which every windowed group still has its blocks.
    pub(super) fn fit_windows(&self, walk: &Walk, windows: &[Window]) -> Probe {
        let per_block = self.tokens_per_block();
        let partial = walk.partial.map_or(0, |(_, tokens)| tokens);
        let whole = Probe {
            cached_len: walk.full * per_block + partial,
            full_blocks: walk.full,
            partial_tokens: partial,
        };
        let partial_fits = walk.partial.is_none_or(|(block, _)| {
            (0..windows.len()).all(|windowed| self.attached(windowed, block) != NO_BLOCK)
        });
        if partial_fits && self.has_windows(whole.cached_len, walk.full, walk.last, windows) {
            return whole;
        }
        let (mut full, mut last) = (walk.full, walk.last);
        loop {
            let before = full;
            for (windowed, window) in windows.iter().enumerate() {
                (full, last) = self.fit_window(windowed, window, full, last);
            }
            if full == before {
                return Probe {
                    cached_len: full * per_block,
                    full_blocks: full,
                    partial_tokens: 0,
                };
            }
        }
    }

    /// The longest chain of whole blocks, at most `full` and ending in `last`, for which a
    /// windowed group has what it needs. Looks at each block twice at most.
    fn fit_window(&self, windowed: usize, window: &Window, full: u32, last: u32) -> (u32, u32) {
        let per_block = self.tokens_per_block();
        let (mut full, mut last) = (full, last);
        let (mut at, mut block) = (full, last);
        while at > window.first_block(full * per_block, per_block) {
            at -= 1;
            let parent = self.parent(block);
            if self.attached(windowed, block) == NO_BLOCK {
                (full, last) = (at, parent);
            }
            block = parent;
        }
        // The sinks, from the window's end down.
        while at > 0 && window.sink_blocks > 0 {
            at -= 1;
            let parent = self.parent(block);
            if at < window.sink_blocks && self.attached(windowed, block) == NO_BLOCK {
                (full, last) = (at, parent);
            }
            block = parent;
        }
        (full, last)
    }

    /// Whether every windowed group has the blocks below `full` that a sequence of `len` tokens
    /// needs; `last` is the block before `full`.
    fn has_windows(&self, len: u32, full: u32, last: u32, windows: &[Window]) -> bool {
        let per_block = self.tokens_per_block();
        windows.iter().enumerate().all(|(windowed, window)| {
            let first = window.first_block(len, per_block);
            let (mut at, mut block) = (full, last);
            while at > first || (at > 0 && window.sink_blocks > 0) {
                at -= 1;
                let needed = at >= first || at < window.sink_blocks;
                if needed && self.attached(windowed, block) == NO_BLOCK {
                    return false;
                }
                block = self.parent(block);
            }
            true
        })
    }
}
