//! The CPU device's fixed workspace: a sum of named terms.
//!
//! The device carves its memory with the numbers of [`CpuWorkspace`] and allocates exactly
//! [`CpuWorkspace::bytes`], so that the plan's sum and the allocation cannot differ (P2).

use serde::Serialize;

use super::{Plan, SPLIT_TOKENS};
use crate::units::{Bytes, Overflow};

/// Keys whose scores are computed before their values are read. Tiles start at multiples of this
/// position; a split is a whole number of them.
pub const TILE_TOKENS: u32 = 64;

/// Lanes that the CPU kernels compute side by side; vectors are padded to a multiple of it.
pub const LANES: u32 = 16;

/// (row, KV head) pairs for each thread from which on a pair is one item of work. Below, its
/// splits are dealt out one by one, and each needs a place for its partial result.
pub const PAIRS_PER_THREAD: u32 = 4;

/// Query heads, over several rows, that are computed side by side: what a tile's keys and values
/// are read and converted for once. Their queries and accumulators are to stay in the nearest
/// caches.
pub const HEADS_AT_ONCE: u32 = 32;

/// What the workspace is sized by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CpuWorkspace {
    /// Threads that compute.
    pub threads: u32,
    /// Query heads that share a KV head.
    pub q_heads_per_kv_head: u32,
    /// Elements of a vector.
    pub head_dim: u32,
    /// Elements of a vector, padded to whole lanes.
    pub padded_dim: u32,
    /// Splits of the longest sequence.
    pub max_splits: u32,
}

impl CpuWorkspace {
    /// Rows that are computed at once, at most.
    #[must_use]
    pub fn max_rows(&self) -> u32 {
        (HEADS_AT_ONCE / self.q_heads_per_kv_head.max(1)).max(1)
    }

    /// Query heads that are computed at once, at most.
    #[must_use]
    pub fn max_heads(&self) -> u32 {
        // No more than HEADS_AT_ONCE, or the heads of one row.
        self.max_rows() * self.q_heads_per_kv_head
    }

    /// f32 numbers of one partial result: running maximum and sum of each head (padded to lanes),
    /// and its accumulators `[heads, padded_dim]`.
    ///
    /// # Errors
    /// [`Overflow`] when it does not fit in 64 bits.
    pub fn partial_len(&self, heads: u64) -> Result<u64, Overflow> {
        let acc = Bytes(heads).try_mul(u64::from(self.padded_dim))?;
        let heads = Bytes(heads).align_up(u64::from(LANES))?;
        Ok(heads.try_mul(2)?.try_add(acc)?.get())
    }

    /// f32 numbers that hold the queries as integers of two bytes: for every four heads
    /// `[padded_dim / 16, 2 terms]` lines of 16, then for every 32 elements a line of sums, and
    /// one of scales.
    ///
    /// # Errors
    /// [`Overflow`] when it does not fit in 64 bits.
    pub fn coded_len(&self) -> Result<u64, Overflow> {
        let lines = u64::from(self.padded_dim / LANES);
        let per_four = Bytes(lines * 2 + lines.div_ceil(2) + 1).try_mul(u64::from(LANES))?;
        Ok(per_four.try_mul(u64::from(self.max_heads()).div_ceil(4))?.get())
    }

    /// f32 numbers that hold a tile's weights as integers of two bytes `[max_heads, 2 terms]`
    /// lines of 16, and their scales `[max_heads, padded to lanes]`.
    ///
    /// # Errors
    /// [`Overflow`] when it does not fit in 64 bits.
    pub fn weights_len(&self) -> Result<u64, Overflow> {
        let heads = u64::from(self.max_heads());
        let terms = Bytes(heads).try_mul(u64::from(TILE_TOKENS / 4 * 2))?;
        let scales = Bytes(heads).align_up(u64::from(LANES))?;
        Ok(terms.try_add(scales)?.get())
    }

    /// f32 numbers of one thread's scratch.
    ///
    /// # Errors
    /// [`Overflow`] when it does not fit in 64 bits.
    pub fn scratch_len(&self) -> Result<u64, Overflow> {
        let heads = u64::from(self.max_heads());
        // The queries as f32. [max_heads, padded_dim]
        let queries = Bytes(heads).try_mul(u64::from(self.padded_dim))?;
        // The queries as integers.
        let coded = Bytes(self.coded_len()?);
        // The scores of a tile. [max_heads, TILE_TOKENS]
        let scores = Bytes(heads).try_mul(u64::from(TILE_TOKENS))?;
        // The weights of a tile as integers.
        let weights = Bytes(self.weights_len()?);
        // The scales of a tile's K and V rows. [2, TILE_TOKENS]
        let scales = Bytes(2).try_mul(u64::from(TILE_TOKENS))?;
        // The split under way, and the sum of those before it.
        let partials = Bytes(self.partial_len(heads)?).try_mul(2)?;
        let terms = [coded, scores, weights, scales, partials];
        let sum = terms.into_iter().try_fold(queries, |sum, term| sum.try_add(term))?;
        Ok(sum.get())
    }

    /// (row, KV head) pairs whose splits may be dealt out one by one: fewer than
    /// [`PAIRS_PER_THREAD`] a thread, and none where one thread does everything anyway.
    #[must_use]
    pub fn split_pairs(&self) -> u64 {
        if self.threads <= 1 {
            0
        } else {
            u64::from(self.threads) * u64::from(PAIRS_PER_THREAD) - 1
        }
    }

    /// Bytes of the whole workspace.
    ///
    /// # Errors
    /// [`Overflow`] when it does not fit in 64 bits.
    pub fn bytes(&self) -> Result<Bytes, Overflow> {
        // Every thread has its own.
        let scratch = Bytes(self.scratch_len()?).try_mul(4)?.try_mul(u64::from(self.threads))?;
        // One a pair and split. [split_pairs, max_splits, partial_len]
        let partials = Bytes(self.partial_len(self.q_heads_per_kv_head.into())?)
            .try_mul(4)?
            .try_mul(u64::from(self.max_splits))?
            .try_mul(self.split_pairs())?;
        // The reference's accumulators in f64. [threads, head_dim]
        let reference =
            Bytes(8).try_mul(u64::from(self.head_dim))?.try_mul(u64::from(self.threads))?;
        scratch.try_add(partials)?.try_add(reference)
    }
}

impl Plan {
    /// The numbers that size the CPU device's workspace for `threads` threads.
    #[must_use]
    pub fn cpu_workspace(&self, threads: u32) -> CpuWorkspace {
        let head_dim = self.geometry.head_dim;
        CpuWorkspace {
            threads,
            q_heads_per_kv_head: self.geometry.q_heads_per_kv_head(),
            head_dim,
            padded_dim: head_dim.next_multiple_of(LANES),
            max_splits: self.limits.max_seq_len.div_ceil(SPLIT_TOKENS),
        }
    }

    /// Bytes of the CPU device's workspace with `threads` threads, the calling one included: what
    /// it allocates beside the pool, to the byte. The terms are in [`CpuWorkspace::bytes`].
    ///
    /// # Errors
    /// [`Overflow`] when it does not fit in 64 bits.
    pub fn cpu_workspace_bytes(&self, threads: u32) -> Result<Bytes, Overflow> {
        self.cpu_workspace(threads).bytes()
    }
}
