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

/// Items of work that there are to be for each thread, so that none waits long for the others.
pub const ITEMS_PER_THREAD: u32 = 4;

/// KV heads of one row that are computed tile by tile side by side, at most. In a block the
/// heads of a layer lie one behind the other: read together they are one long run of bytes, which
/// comes from memory faster than a short run here and there.
pub const KV_HEADS_AT_ONCE: u32 = 8;

/// Elements of a row's queries, and of its accumulators, that are kept in the nearest cache while
/// 16-bit formats and f32 are computed in f32 lanes: as long as there are no more, more KV heads
/// than [`KV_HEADS_AT_ONCE`] are computed side by side.
pub const ELEMENTS_AT_ONCE: u32 = 4096;

/// Query heads, over several rows, that are computed side by side: what a tile's keys and values
/// are read and converted for once. Their queries and accumulators are to stay in the nearest
/// caches.
pub const HEADS_AT_ONCE: u32 = 128;

/// What the workspace is sized by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CpuWorkspace {
    /// Threads that compute.
    pub threads: u32,
    /// Query heads that share a KV head.
    pub q_heads_per_kv_head: u32,
    /// KV heads.
    pub num_kv_heads: u32,
    /// Elements of a vector.
    pub head_dim: u32,
    /// Elements of a vector, padded to whole lanes.
    pub padded_dim: u32,
    /// Splits of the longest sequence.
    pub max_splits: u32,
    /// f32 numbers of the tables for the rotation of K.
    pub rope_len: u64,
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

    /// KV heads of one row that are computed side by side, at most: no more query heads than those
    /// of several rows. `lanes`: in f32 lanes, where queries have no other form.
    #[must_use]
    pub fn kv_heads_at_once(&self, lanes: bool) -> u32 {
        let elements = (self.q_heads_per_kv_head * self.padded_dim).max(1);
        let few = if lanes { ELEMENTS_AT_ONCE / elements } else { 0 };
        self.num_kv_heads.min(self.max_rows()).clamp(1, KV_HEADS_AT_ONCE.max(few))
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

    /// f32 numbers that hold the queries of some heads in another form, for every four of them,
    /// and whole eights: as two terms in bf16, `[padded_dim / 16, 2 terms, 2]` lines of 16; or as
    /// integers of two bytes, half as many, then for every 32 elements a line of sums, and one of
    /// scales; or as such integers for each head alone, half a line for 16 elements, and a line of
    /// scales, which is no more from 32 elements on.
    ///
    /// # Errors
    /// [`Overflow`] when it does not fit in 64 bits.
    pub fn coded_len(&self, heads: u64) -> Result<u64, Overflow> {
        let lines = u64::from(self.padded_dim / LANES);
        let per_four = Bytes(lines * 4 + 1).try_mul(u64::from(LANES))?;
        Ok(per_four.try_mul(heads.div_ceil(8) * 2)?.get())
    }

    /// What is kept of all heads that a thread computes side by side, be they those of several
    /// rows and one KV head or of one row and several KV heads: `len` says how much it is for
    /// some heads of one KV head. `lanes`: as of [`Self::kv_heads_at_once`].
    fn of_all_heads(
        &self,
        lanes: bool,
        len: impl Fn(u64) -> Result<u64, Overflow>,
    ) -> Result<u64, Overflow> {
        let rows = len(u64::from(self.max_heads()))?;
        let kv_heads = Bytes(len(u64::from(self.q_heads_per_kv_head))?)
            .try_mul(u64::from(self.kv_heads_at_once(lanes)))?;
        Ok(rows.max(kv_heads.get()))
    }

    /// f32 numbers that hold the queries of all heads in another form.
    ///
    /// # Errors
    /// [`Overflow`] when it does not fit in 64 bits.
    pub fn all_coded_len(&self) -> Result<u64, Overflow> {
        self.of_all_heads(false, |heads| self.coded_len(heads))
    }

    /// f32 numbers of the partial results of all heads.
    ///
    /// # Errors
    /// [`Overflow`] when it does not fit in 64 bits.
    pub fn all_partials_len(&self) -> Result<u64, Overflow> {
        self.of_all_heads(true, |heads| self.partial_len(heads))
    }

    /// f32 numbers that hold a tile's weights in another form: as two terms in bf16, `[max_heads,
    /// 2 terms, 2]` lines of 16; or as integers of two bytes, half as many, and their scales
    /// `[max_heads, padded to lanes]`.
    ///
    /// # Errors
    /// [`Overflow`] when it does not fit in 64 bits.
    pub fn weights_len(&self) -> Result<u64, Overflow> {
        let heads = u64::from(self.max_heads());
        let terms = Bytes(heads).try_mul(u64::from(TILE_TOKENS / 2 * 2))?;
        let scales = Bytes(heads).align_up(u64::from(LANES))?;
        Ok(terms.try_add(scales)?.get())
    }

    /// f32 numbers that hold a tile's keys, and its values, rearranged, with two bytes an element
    /// at most, `[2, TILE_TOKENS, padded_dim / 2]`; or one after the other as f32,
    /// `[TILE_TOKENS, padded_dim]`.
    ///
    /// # Errors
    /// [`Overflow`] when it does not fit in 64 bits.
    pub fn packed_len(&self) -> Result<u64, Overflow> {
        Ok(Bytes(u64::from(TILE_TOKENS)).try_mul(u64::from(self.padded_dim))?.get())
    }

    /// f32 numbers of one thread's scratch.
    ///
    /// # Errors
    /// [`Overflow`] when it does not fit in 64 bits.
    pub fn scratch_len(&self) -> Result<u64, Overflow> {
        let heads = u64::from(self.max_heads());
        // The queries as f32. [max_heads, padded_dim]
        let queries = Bytes(heads).try_mul(u64::from(self.padded_dim))?;
        // The queries in another form.
        let coded = Bytes(self.all_coded_len()?);
        // The scores of a tile. [max_heads, TILE_TOKENS]
        let scores = Bytes(heads).try_mul(u64::from(TILE_TOKENS))?;
        // The weights of a tile in another form.
        let weights = Bytes(self.weights_len()?);
        // The scales of a tile's K and V rows. [2, TILE_TOKENS]
        let scales = Bytes(2).try_mul(u64::from(TILE_TOKENS))?;
        // A tile's keys and values, rearranged.
        let packed = Bytes(self.packed_len()?);
        // The split under way, and the sum of those before it.
        let partials = Bytes(self.all_partials_len()?).try_mul(2)?;
        let terms = [coded, scores, weights, scales, packed, partials];
        let sum = terms.into_iter().try_fold(queries, |sum, term| sum.try_add(term))?;
        Ok(sum.get())
    }

    /// Whether the splits of so many rows are dealt out one by one: where there are fewer (row, KV
    /// head) pairs than [`ITEMS_PER_THREAD`] a thread; and where KV heads are computed side by
    /// side and there are fewer rows than threads, since there it is the heads that are not to be
    /// torn apart.
    #[must_use]
    pub fn deals_out_splits(&self, rows: u64, side_by_side: bool) -> bool {
        let pairs = rows.saturating_mul(u64::from(self.num_kv_heads));
        let enough = u64::from(self.threads) * u64::from(ITEMS_PER_THREAD);
        let few_rows = side_by_side && rows < u64::from(self.threads);
        self.threads > 1 && (few_rows || pairs < enough)
    }

    /// (row, KV head) pairs whose splits may be dealt out one by one.
    #[must_use]
    pub fn split_pairs(&self) -> u64 {
        if self.threads <= 1 {
            return 0;
        }
        let enough = u64::from(self.threads) * u64::from(ITEMS_PER_THREAD);
        let kv_heads = u64::from(self.num_kv_heads.max(1));
        let rows = (u64::from(self.threads) - 1).max((enough - 1) / kv_heads);
        rows * kv_heads
    }

    /// Bytes of the whole workspace.
    ///
    /// # Errors
    /// [`Overflow`] when it does not fit in 64 bits.
    pub fn bytes(&self) -> Result<Bytes, Overflow> {
        // Every thread has its own.
        let scratch = Bytes(self.scratch_len()?).try_mul(4)?.try_mul(u64::from(self.threads))?;
        // One a pair (of a row and a KV head) and split. [rows, max_splits, num_kv_heads, partial_len]
        let partials = Bytes(self.partial_len(self.q_heads_per_kv_head.into())?)
            .try_mul(4)?
            .try_mul(u64::from(self.max_splits))?
            .try_mul(self.split_pairs())?;
        // The reference's accumulators in f64. [threads, head_dim]
        let reference =
            Bytes(8).try_mul(u64::from(self.head_dim))?.try_mul(u64::from(self.threads))?;
        let rope = Bytes(4).try_mul(self.rope_len)?;
        scratch.try_add(partials)?.try_add(reference)?.try_add(rope)
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
            num_kv_heads: self.geometry.num_kv_heads,
            head_dim,
            padded_dim: head_dim.next_multiple_of(LANES),
            max_splits: self.limits.max_seq_len.div_ceil(SPLIT_TOKENS),
            // What does not fit in 64 bits fits no machine either.
            rope_len: self.rope_len().unwrap_or(u64::MAX),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_place_for_every_split_that_is_dealt_out() {
        for threads in 1..20 {
            for num_kv_heads in 1..40 {
                let sizes = CpuWorkspace {
                    threads,
                    q_heads_per_kv_head: 4,
                    num_kv_heads,
                    head_dim: 128,
                    padded_dim: 128,
                    max_splits: 3,
                    rope_len: 0,
                };
                let rows = (0..200).filter(|rows| sizes.deals_out_splits(*rows, true)).max();
                let pairs = rows.unwrap_or(0) * u64::from(num_kv_heads);
                assert_eq!(pairs, sizes.split_pairs(), "{threads} {num_kv_heads}");
            }
        }
    }

    #[test]
    fn more_kv_heads_are_taken_at_once_where_they_are_small() {
        let sizes = |num_kv_heads, q_heads_per_kv_head, padded_dim| CpuWorkspace {
            threads: 1,
            q_heads_per_kv_head,
            num_kv_heads,
            head_dim: padded_dim,
            padded_dim,
            max_splits: 1,
            rope_len: 0,
        };
        assert_eq!(sizes(32, 1, 128).kv_heads_at_once(true), 32);
        assert_eq!(sizes(32, 1, 128).kv_heads_at_once(false), KV_HEADS_AT_ONCE);
        assert_eq!(sizes(32, 2, 128).kv_heads_at_once(true), 16);
        assert_eq!(sizes(32, 4, 256).kv_heads_at_once(true), KV_HEADS_AT_ONCE);
        assert_eq!(sizes(4, 1, 64).kv_heads_at_once(true), 4);
        // No more query heads than those of several rows.
        assert_eq!(sizes(32, 64, 16).kv_heads_at_once(true), 2);
    }
}
