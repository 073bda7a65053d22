//! What one item of attention works on: a row and a KV head, its running state, and a split of it.

use super::super::TensorRef;
use super::super::convert::Source;
use super::exp::exp;
use super::lanes::WIDTH;
use crate::plan::{LayerScales, SeqView, visible};

/// A few consecutive rows of one sequence and one KV head, or one row and a few KV heads in a row.
/// The rows' query heads are computed side by side; to each of them it makes no difference which
/// others there are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Task<'a> {
    /// The whole pool.
    pub(super) pool: &'a [u8],
    /// The sequence.
    pub(super) view: SeqView<'a>,
    /// The layer's index in the group.
    pub(super) layer: u32,
    /// The first KV head.
    pub(super) head: u32,
    /// KV heads, at least one.
    pub(super) kv_heads: u32,
    /// Rows, at least one.
    pub(super) rows: usize,
    /// The position of the first row in the sequence.
    pub(super) position: u32,
    /// Keys a row may see, itself included; 0 = all.
    pub(super) window: u32,
    /// Query heads that share the KV head.
    pub(super) group: usize,
    /// Elements of a vector, padded to whole lines.
    pub(super) padded_dim: usize,
    /// Factor on q·k.
    pub(super) softmax_scale: f32,
    /// Static INT8 scales.
    pub(super) scales: LayerScales,
}

impl Task<'_> {
    /// Query heads of all rows that share a KV head.
    pub(super) fn heads(&self) -> usize {
        self.rows * self.group
    }

    /// Whether there are at least so many of them, all of one KV head.
    #[cfg(x86_kernels)]
    pub(super) fn has_heads(&self, many: usize) -> bool {
        self.kv_heads == 1 && self.heads() >= many
    }

    /// The tasks of the single KV heads.
    pub(super) fn each_kv_head(&self) -> impl Iterator<Item = Self> {
        let task = *self;
        (task.head..task.head + task.kv_heads).map(move |head| Self { head, kv_heads: 1, ..task })
    }

    /// The positions that a row sees: the sinks, and the rest.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "rows of one sequence")]
    pub(super) fn seen_by(&self, row: usize) -> [(u32, u32); 2] {
        let position = self.position + row as u32;
        let (sinks, from) = visible(position, self.window, self.view.layout.sink_tokens);
        [(0, sinks), (from, position + 1)]
    }

    /// The positions that any of some rows sees. The first one sees farthest back, the last one
    /// farthest ahead, and each begins where those before it see something.
    #[inline(always)]
    pub(super) fn seen_by_rows(&self, first: usize, last: usize) -> [(u32, u32); 2] {
        let [sinks, (from, _)] = self.seen_by(first);
        let [_, (_, to)] = self.seen_by(last);
        [sinks, (from, to)]
    }

    /// The positions that any row sees.
    #[inline(always)]
    pub(super) fn seen(&self) -> [(u32, u32); 2] {
        self.seen_by_rows(0, self.rows - 1)
    }

    /// The end of what any row sees.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "rows of one sequence")]
    pub(super) fn end(&self) -> u32 {
        self.position + self.rows as u32
    }

    /// Whether any row sees a position in `start..end`.
    pub(super) fn sees(&self, start: u32, end: u32) -> bool {
        self.seen().iter().any(|(from, to)| *from.max(&start) < *to.min(&end))
    }
}

/// The running state of some of the keys, for each query head of one KV head: what is kept of a
/// split, and what splits are combined into.
#[derive(Debug)]
pub(super) struct Partial<'a> {
    /// Largest score so far; -∞ before the first. `[heads, padded to lanes]`
    pub(super) max: &'a mut [f32],
    /// Sum of e^(score - max). `[heads, padded to lanes]`
    pub(super) sum: &'a mut [f32],
    /// Sum of e^(score - max) · v. `[heads, padded_dim]`
    pub(super) acc: &'a mut [f32],
}

impl<'a> Partial<'a> {
    /// Cuts memory of at least `CpuWorkspace::partial_len(heads)` numbers into its parts.
    pub(super) fn new(memory: &'a mut [f32], heads: usize, padded_dim: usize) -> Self {
        let padded = heads.next_multiple_of(WIDTH);
        let (max, rest) = memory.split_at_mut(padded);
        let (sum, rest) = rest.split_at_mut(padded);
        let acc = &mut rest[..heads * padded_dim];
        Self { max, sum, acc }
    }

    /// Nothing seen.
    pub(super) fn clear(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
        self.acc.fill(0.0);
    }

    /// Adds the keys of `part`, which come after those of `self`.
    pub(super) fn merge(&mut self, part: &Partial<'_>, padded_dim: usize) {
        let vectors = self.acc.chunks_exact_mut(padded_dim).zip(part.acc.chunks_exact(padded_dim));
        for (g, (acc, added)) in vectors.enumerate() {
            // Nothing seen: even the sign of a zero is to stay as it is, as if the part were not
            // there at all.
            if part.max[g] == f32::NEG_INFINITY && part.sum[g] == 0.0 {
                continue;
            }
            let max = self.max[g].max(part.max[g]);
            let base = finite_base(max);
            let keep = exp::<false>(self.max[g] - base);
            let add = exp::<false>(part.max[g] - base);
            self.max[g] = max;
            self.sum[g] = self.sum[g] * keep + part.sum[g] * add;
            for (acc, added) in acc.iter_mut().zip(added) {
                *acc = *acc * keep + added * add;
            }
        }
    }
}

/// A [`Partial`] for each KV head of a task, one behind the other.
#[derive(Debug)]
pub(super) struct Parts<'a> {
    memory: &'a mut [f32],
    /// Numbers of one.
    len: usize,
    kv_heads: usize,
    heads: usize,
    padded_dim: usize,
}

impl<'a> Parts<'a> {
    /// Cuts memory into places of `len` numbers, at least `CpuWorkspace::partial_len(heads)`.
    pub(super) fn new(memory: &'a mut [f32], len: usize, task: &Task<'_>) -> Self {
        let kv_heads = task.kv_heads as usize;
        Self { memory, len, kv_heads, heads: task.heads(), padded_dim: task.padded_dim }
    }

    /// The same, borrowed for less long.
    pub(super) fn reborrow(&mut self) -> Parts<'_> {
        Parts { memory: self.memory, ..*self }
    }

    /// Takes over those of another place, of the same shape.
    pub(super) fn take(&mut self, other: &Self) {
        self.memory.copy_from_slice(other.memory);
    }

    /// Nothing seen.
    pub(super) fn clear(&mut self) {
        for kv_head in 0..self.kv_heads {
            self.of(kv_head).clear();
        }
    }

    /// The state of one KV head, counted from the task's first.
    #[inline(always)]
    pub(super) fn of(&mut self, kv_head: usize) -> Partial<'_> {
        let memory = &mut self.memory[kv_head * self.len..][..self.len];
        Partial::new(memory, self.heads, self.padded_dim)
    }
}

/// What is subtracted from scores: their maximum, and 0 where that is -∞, so that the exponential
/// of a score of -∞ is 0 and not NaN.
#[inline(always)]
pub(super) fn finite_base(max: f32) -> f32 {
    if max == f32::NEG_INFINITY { 0.0 } else { max }
}

/// One split of one task, and the memory to work in.
#[derive(Debug)]
pub(super) struct Split<'a, 'b> {
    /// The task.
    pub(super) task: &'b Task<'a>,
    /// First position of the split.
    pub(super) start: u32,
    /// Its end.
    pub(super) end: u32,
    /// Whether the split behind it is computed next, so that its first keys are worth asking for.
    pub(super) goes_on: bool,
    /// The queries. `[kv_heads, heads, padded_dim]`, zeros in the padding
    pub(super) q: &'b [f32],
    /// For queries in another form. `[kv_heads, CpuWorkspace::coded_len(heads)]`
    pub(super) coded: &'b mut [f32],
    /// For the scores of a tile, then its weights. `[heads, TILE_TOKENS]`
    pub(super) scores: &'b mut [f32],
    /// For weights in another form. `[CpuWorkspace::weights_len]`
    pub(super) weights: &'b mut [f32],
    /// For the scales of a tile's K vectors, and of its V vectors. `[2, TILE_TOKENS]`
    pub(super) row_scales: &'b mut [f32],
    /// For a tile's K vectors and its V vectors in another form, side by side or one after the
    /// other. `[CpuWorkspace::packed_len]`
    pub(super) packed: &'b mut [f32],
    /// Where the result goes; whatever it held is lost. `[kv_heads, partial_len]`
    pub(super) parts: Parts<'b>,
}

/// Fills in queries as f32. `from` is the index of the first element of the first.
pub(super) fn load_queries(
    q: &TensorRef<'_>,
    from: usize,
    head_dim: usize,
    padded_dim: usize,
    out: &mut [f32],
) {
    fn widen<S: Source>(data: &[S], head_dim: usize, padded_dim: usize, out: &mut [f32]) {
        let vectors = out.chunks_exact_mut(padded_dim).zip(data.chunks_exact(head_dim));
        for (out, q) in vectors {
            let (out, padding) = out.split_at_mut(head_dim);
            for (out, q) in out.iter_mut().zip(q) {
                *out = q.to_f32();
            }
            padding.fill(0.0);
        }
    }
    let len = out.len() / padded_dim * head_dim;
    match q {
        TensorRef::F32(data) => widen(&data[from..from + len], head_dim, padded_dim, out),
        TensorRef::F16(data) => widen(&data[from..from + len], head_dim, padded_dim, out),
        TensorRef::Bf16(data) => widen(&data[from..from + len], head_dim, padded_dim, out),
    }
}
