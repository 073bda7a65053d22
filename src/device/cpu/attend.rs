//! Dealing out attention, and combining its splits.
//!
//! A row's keys are always computed split by split, each from a fresh state, and the splits are
//! combined in ascending order; who computes a split has no influence on the result. With many
//! (row, KV head) pairs a pair is one item of work; with few, each split is, and a second
//! dispatch combines them. Consecutive rows of a sequence are taken together where there are enough,
//! so that what is read and converted serves all of them; each row's arithmetic is the same as if
//! it were alone.

use super::disjoint::Disjoint;
use super::job::AttendJob;
use super::kernel::Kernel;
use super::task::{Partial, Split, Task, load_queries};
use super::workers::Workers;
use super::workspace::Workspace;
use crate::error::DeviceError;
use crate::plan::{CpuWorkspace, PAIRS_PER_THREAD, SPLIT_TOKENS, TILE_TOKENS};
use crate::units::Overflow;

/// The workspace in the hands of the workers.
struct Shared<'a> {
    /// One scratch a thread. `[threads, scratch_len]`
    scratch: Disjoint<'a, f32>,
    scratch_len: usize,
    /// `[split_pairs, max_splits, partial_len]`
    partials: Disjoint<'a, f32>,
    partial_len: usize,
    coded_len: usize,
    weights_len: usize,
    sizes: CpuWorkspace,
}

/// One thread's scratch, cut into its parts.
struct Scratch<'a> {
    q: &'a mut [f32],
    coded: &'a mut [f32],
    scores: &'a mut [f32],
    weights: &'a mut [f32],
    row_scales: &'a mut [f32],
    part: &'a mut [f32],
    total: &'a mut [f32],
}

impl Shared<'_> {
    /// The scratch of a worker.
    ///
    /// # Safety
    /// As long as it is in use, the same worker's is not used elsewhere.
    unsafe fn scratch(&self, worker: usize) -> Scratch<'_> {
        let heads = self.sizes.max_heads() as usize;
        // SAFETY: different workers' do not overlap; the caller sees to the rest.
        let memory = unsafe { self.scratch.part(worker * self.scratch_len, self.scratch_len) };
        let (q, rest) = memory.split_at_mut(heads * self.sizes.padded_dim as usize);
        let (coded, rest) = rest.split_at_mut(self.coded_len);
        let (scores, rest) = rest.split_at_mut(heads * TILE_TOKENS as usize);
        let (weights, rest) = rest.split_at_mut(self.weights_len);
        let (row_scales, rest) = rest.split_at_mut(2 * TILE_TOKENS as usize);
        let (part, total) = rest.split_at_mut(rest.len() / 2);
        Scratch { q, coded, scores, weights, row_scales, part, total }
    }

    /// The place of one split's partial result.
    ///
    /// # Safety
    /// As long as it is in use, the same pair's and split's is not used elsewhere.
    unsafe fn partial(&self, pair: usize, split: usize) -> Partial<'_> {
        // Beyond it lies the next pair's first split.
        assert!(split < self.sizes.max_splits as usize, "no sequence is longer than the plan's");
        let at = (pair * self.sizes.max_splits as usize + split) * self.partial_len;
        // SAFETY: places of different pairs or splits do not overlap; the caller sees to the rest.
        let memory = unsafe { self.partials.part(at, self.partial_len) };
        Partial::new(
            memory,
            self.sizes.q_heads_per_kv_head as usize,
            self.sizes.padded_dim as usize,
        )
    }
}

/// The splits of a task in which it sees any key, in ascending order: index, start and end.
fn splits<'t>(task: &'t Task<'_>) -> impl Iterator<Item = (u32, u32, u32)> + 't {
    (0..task.end().div_ceil(SPLIT_TOKENS)).filter_map(|split| split_range(task, split))
}

/// Index, start and end of a split, if the task sees any key in it.
fn split_range(task: &Task<'_>, split: u32) -> Option<(u32, u32, u32)> {
    let start = split * SPLIT_TOKENS;
    let end = task.end().min(start.saturating_add(SPLIT_TOKENS));
    (start < end && task.sees(start, end)).then_some((split, start, end))
}

/// Fills in the queries of a task that begins at `row`.
fn queries(job: &AttendJob<'_>, task: &Task<'_>, row: usize, q: &mut [f32]) {
    let head_dim = job.layout.head_dim as usize;
    let per_row = task.group * task.padded_dim;
    for (i, q) in q.chunks_exact_mut(per_row).take(task.rows).enumerate() {
        let first = job.first_element(row + i, task.head as usize);
        load_queries(&job.q, first, head_dim, task.padded_dim, q);
    }
}

/// Computes attention with a kernel that works split by split.
///
/// # Errors
/// [`DeviceError::WorkerPanicked`].
///
/// # Panics
/// When the call's heads are not those that the workspace was sized for.
pub(super) fn attend(
    kernel: &dyn Kernel,
    workspace: &mut Workspace,
    workers: &Workers,
    job: &AttendJob<'_>,
) -> Result<(), DeviceError> {
    let sizes = *workspace.sizes();
    assert_eq!(job.group, sizes.q_heads_per_kv_head as usize, "query heads as in the plan");
    assert_eq!(job.layout.head_dim, sizes.head_dim, "head_dim as in the plan");
    let threads = workers.threads();
    let pairs = job.rows * job.layout.num_kv_heads as usize;
    let (scratch_len, partial_len) = workspace.lens();
    let len = |numbers: Result<u64, Overflow>| {
        numbers.map_or(0, |n| usize::try_from(n).unwrap_or(usize::MAX))
    };
    let (coded_len, weights_len) = (len(sizes.coded_len()), len(sizes.weights_len()));
    let (scratch, partials) = workspace.scratch_and_partials();
    let shared = Shared {
        scratch: Disjoint::new(scratch),
        scratch_len,
        partials: Disjoint::new(partials),
        partial_len,
        coded_len,
        weights_len,
        sizes,
    };
    let enough = PAIRS_PER_THREAD as usize * threads;
    if threads == 1 || pairs >= enough {
        // As many rows at once as there is room for, but still something to do for every thread.
        let most = sizes.max_rows() as usize;
        let block = if threads == 1 { most } else { (pairs / enough).clamp(1, most) };
        workers.run(pairs, &|worker, pair| {
            whole_pairs(kernel, &shared, job, worker, pair, block);
        })
    } else {
        let longest = job.seqs.iter().map(|seq| seq.first_position + seq.rows).max().unwrap_or(0);
        let splits = longest.div_ceil(SPLIT_TOKENS) as usize;
        workers.run(pairs * splits, &|worker, item| {
            one_split(kernel, &shared, job, worker, (item / splits, item % splits));
        })?;
        workers.run(pairs, &|worker, pair| combine(&shared, job, worker, pair))
    }
}

/// The row and the KV head of a pair. Rows of one sequence follow each other, so that threads
/// find each other's keys in the cache.
fn row_and_head(job: &AttendJob<'_>, pair: usize) -> (usize, usize) {
    (pair % job.rows, pair / job.rows)
}

/// All splits of a block of pairs, one after the other; nothing for a pair that begins none.
fn whole_pairs(
    kernel: &dyn Kernel,
    shared: &Shared<'_>,
    job: &AttendJob<'_>,
    worker: usize,
    pair: usize,
    block: usize,
) {
    let (row, head) = row_and_head(job, pair);
    let Some(task) = job.task(row, head, block) else {
        return;
    };
    // SAFETY: `Workers::run` runs no two calls with the same worker index at once.
    let scratch = unsafe { shared.scratch(worker) };
    let heads = task.heads();
    let mut part = Partial::new(scratch.part, heads, task.padded_dim);
    let mut total = Partial::new(scratch.total, heads, task.padded_dim);
    queries(job, &task, row, scratch.q);
    total.clear();
    for (_, start, end) in splits(&task) {
        kernel.split(&mut Split {
            task: &task,
            start,
            end,
            goes_on: true,
            q: scratch.q,
            coded: scratch.coded,
            scores: scratch.scores,
            weights: scratch.weights,
            row_scales: scratch.row_scales,
            part: part.reborrow(),
        });
        total.merge(&part, task.padded_dim);
    }
    // SAFETY: the block begins with this item's pair, so no other item has a row of it.
    unsafe { job.finish(row, &task, &total) };
}

/// One split of one pair, into its place.
fn one_split(
    kernel: &dyn Kernel,
    shared: &Shared<'_>,
    job: &AttendJob<'_>,
    worker: usize,
    (pair, split): (usize, usize),
) {
    let (row, head) = row_and_head(job, pair);
    let Some(task) = job.task(row, head, 1) else {
        return;
    };
    let Ok(index) = u32::try_from(split) else {
        return;
    };
    let Some((_, start, end)) = split_range(&task, index) else {
        return;
    };
    // SAFETY: `Workers::run` runs no two calls with the same worker index at once.
    let scratch = unsafe { shared.scratch(worker) };
    queries(job, &task, row, scratch.q);
    // SAFETY: pair and split are this item's alone in this dispatch.
    let part = unsafe { shared.partial(pair, split) };
    kernel.split(&mut Split {
        task: &task,
        start,
        end,
        goes_on: false,
        q: scratch.q,
        coded: scratch.coded,
        scores: scratch.scores,
        weights: scratch.weights,
        row_scales: scratch.row_scales,
        part,
    });
}

/// Combines the splits of one pair.
fn combine(shared: &Shared<'_>, job: &AttendJob<'_>, worker: usize, pair: usize) {
    let (row, head) = row_and_head(job, pair);
    let Some(task) = job.task(row, head, 1) else {
        return;
    };
    // SAFETY: `Workers::run` runs no two calls with the same worker index at once.
    let scratch = unsafe { shared.scratch(worker) };
    let mut total = Partial::new(scratch.total, task.heads(), task.padded_dim);
    total.clear();
    for (split, _, _) in splits(&task) {
        // SAFETY: the dispatch that wrote it is over, and in this one the pair is this item's
        // alone.
        let part = unsafe { shared.partial(pair, split as usize) };
        total.merge(&part, task.padded_dim);
    }
    // SAFETY: the pair is this item's alone in this dispatch.
    unsafe { job.finish(row, &task, &total) };
}
