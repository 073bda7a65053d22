//! Dealing out attention, and combining its splits.
//!
//! A row's keys are always computed split by split, each from a fresh state, and the splits are
//! combined in ascending order; who computes a split has no influence on the result. With many
//! (row, KV head) pairs an item of work is some of these; with few, one split of some of them, and
//! a second dispatch combines the splits. Two things are taken together in an item, and the
//! arithmetic is the same as if each were alone:
//!
//! - consecutive rows of a sequence, where there are enough, so that what is read and converted
//!   serves all of them;
//! - where every sequence has a single row, several KV heads, which are computed in turns, tile by
//!   tile: their keys lie one behind the other in a block, and are read as one run.

use super::disjoint::Disjoint;
use super::job::AttendJob;
use super::kernel::Kernel;
use super::lanes::WIDTH;
use super::task::{Partial, Parts, Split, Task, load_queries};
use super::threads::Threads;
use super::workspace::Workspace;
use crate::config::Format;
use crate::error::DeviceError;
use crate::plan::{Addressing, CpuWorkspace, ITEMS_PER_THREAD, SPLIT_TOKENS, TILE_TOKENS};
use crate::units::Overflow;

/// The workspace in the hands of the workers.
struct Shared<'a> {
    /// One scratch a thread. `[threads, scratch_len]`
    scratch: Disjoint<'a, f32>,
    scratch_len: usize,
    /// `[rows, max_splits, num_kv_heads, partial_len]`
    partials: Disjoint<'a, f32>,
    partial_len: usize,
    coded_len: usize,
    weights_len: usize,
    packed_len: usize,
    sizes: CpuWorkspace,
}

/// One thread's scratch, cut into its parts.
struct Scratch<'a> {
    q: &'a mut [f32],
    coded: &'a mut [f32],
    scores: &'a mut [f32],
    weights: &'a mut [f32],
    row_scales: &'a mut [f32],
    packed: &'a mut [f32],
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
        let (packed, rest) = rest.split_at_mut(self.packed_len);
        let (part, total) = rest.split_at_mut(rest.len() / 2);
        Scratch { q, coded, scores, weights, row_scales, packed, part, total }
    }

    /// The places of one split's partial results of a task of one row.
    ///
    /// # Safety
    /// As long as they are in use, those of the same row, KV heads and split are not used
    /// elsewhere.
    unsafe fn partials(&self, row: usize, split: usize, task: &Task<'_>) -> Parts<'_> {
        // Beyond it lies the next row's first split.
        assert!(split < self.sizes.max_splits as usize, "no sequence is longer than the plan's");
        let kv_heads = self.sizes.num_kv_heads as usize;
        let at = (row * self.sizes.max_splits as usize + split) * kv_heads + task.head as usize;
        let len = task.kv_heads as usize * self.partial_len;
        // SAFETY: places of different rows, splits or heads do not overlap; the caller sees to the
        // rest.
        let memory = unsafe { self.partials.part(at * self.partial_len, len) };
        Parts::new(memory, self.partial_len, task)
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
    let mut rows = q.chunks_exact_mut(per_row);
    for task in task.each_kv_head() {
        for (i, q) in rows.by_ref().take(task.rows).enumerate() {
            let first = job.first_element(row + i, task.head as usize);
            load_queries(&job.q, first, head_dim, task.padded_dim, q);
        }
    }
}

/// How a call is dealt out.
#[derive(Clone, Copy, Debug)]
struct Deal {
    /// Rows of a sequence that are taken together, at most.
    rows: usize,
    /// KV heads that are taken together, at most; 1 unless `rows` is.
    kv_heads: usize,
    /// Blocks of so many KV heads in a row.
    head_blocks: usize,
    /// Splits that are dealt out one by one; `None` where all of a sequence's go together.
    splits: Option<usize>,
}

impl Deal {
    fn new(kernel: &dyn Kernel, job: &AttendJob<'_>, sizes: &CpuWorkspace) -> Self {
        let lanes = kernel.in_lanes(job.layout, job.group);
        let single_rows = job.seqs.iter().all(|seq| seq.rows <= 1);
        let side_by_side = single_rows && takes_heads_together(job, sizes);
        let num_kv_heads = job.layout.num_kv_heads as usize;
        let enough = (sizes.threads * ITEMS_PER_THREAD) as usize;
        let splits = sizes.deals_out_splits(job.rows as u64, side_by_side).then(|| {
            let ends = job.seqs.iter().map(|seq| seq.first_position + seq.rows);
            ends.max().unwrap_or(0).div_ceil(SPLIT_TOKENS) as usize
        });
        let mut kv_heads = if side_by_side { sizes.kv_heads_at_once(lanes) as usize } else { 1 };
        // As many heads at once as there is room for, but still something to do for everyone.
        let items = job.rows * splits.unwrap_or(1);
        while kv_heads > 1 && sizes.threads > 1 && items * num_kv_heads.div_ceil(kv_heads) < enough
        {
            kv_heads = kv_heads.div_ceil(2);
        }
        // The same for rows. Many rows read the same keys: head after head, so that they find
        // each other's in the cache.
        let most = sizes.max_rows() as usize;
        let rows = match (single_rows || splits.is_some(), sizes.threads) {
            (true, _) => 1,
            (false, 1) => most,
            (false, _) => (job.rows * num_kv_heads / enough).clamp(1, most),
        };
        Self { rows, kv_heads, head_blocks: num_kv_heads.div_ceil(kv_heads), splits }
    }

    /// The task that begins with a row and a block of KV heads, if one does.
    fn task<'a>(self, job: &AttendJob<'a>, row: usize, head_block: usize) -> Option<Task<'a>> {
        let head = head_block * self.kv_heads;
        let mut task = job.task(row, head, self.rows)?;
        task.kv_heads = u32::try_from(self.kv_heads).ok()?.min(job.layout.num_kv_heads - task.head);
        Some(task)
    }
}

/// Whether KV heads are best computed side by side. In blocks they are one run. In a slot each is a
/// run of its own, and better read alone; except by one thread in INT8 with grouped queries, which
/// computes for longer than it reads (measured, see the notes in `benches`).
fn takes_heads_together(job: &AttendJob<'_>, sizes: &CpuWorkspace) -> bool {
    let int8 = job.layout.format.element == Format::Int8;
    job.layout.addressing == Addressing::Blocks || (int8 && sizes.threads == 1 && job.group > 1)
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
    threads: &Threads,
    job: &AttendJob<'_>,
) -> Result<(), DeviceError> {
    let sizes = *workspace.sizes();
    assert_eq!(job.group, sizes.q_heads_per_kv_head as usize, "query heads as in the plan");
    assert_eq!(job.layout.num_kv_heads, sizes.num_kv_heads, "KV heads as in the plan");
    assert_eq!(job.layout.head_dim, sizes.head_dim, "head_dim as in the plan");
    let (scratch_len, partial_len) = workspace.lens();
    let len = |numbers: Result<u64, Overflow>| {
        numbers.map_or(0, |n| usize::try_from(n).unwrap_or(usize::MAX))
    };
    let (coded_len, weights_len) = (len(sizes.all_coded_len()), len(sizes.weights_len()));
    let (scratch, partials) = workspace.scratch_and_partials();
    let shared = Shared {
        scratch: Disjoint::new(scratch),
        scratch_len,
        partials: Disjoint::new(partials),
        partial_len,
        coded_len,
        weights_len,
        packed_len: len(sizes.packed_len()),
        sizes,
    };
    let deal = Deal::new(kernel, job, &sizes);
    let items = job.rows * deal.head_blocks;
    let Some(splits) = deal.splits else {
        return threads.run(items, &|worker, item| {
            whole_tasks(kernel, &shared, job, worker, item, deal);
        });
    };
    threads.run(items * splits, &|worker, item| {
        one_split(kernel, &shared, job, worker, (item / splits, item % splits), deal);
    })?;
    let pairs = job.rows * job.layout.num_kv_heads as usize;
    threads.run(pairs, &|worker, pair| combine(&shared, job, worker, pair))
}

/// The row and the KV head, or block of these, of an item. Rows of one sequence follow each
/// other, so that threads find each other's keys in the cache.
fn row_and_head(job: &AttendJob<'_>, item: usize) -> (usize, usize) {
    (item % job.rows, item / job.rows)
}

/// All splits of a task, one after the other; nothing for a row that begins none.
fn whole_tasks(
    kernel: &dyn Kernel,
    shared: &Shared<'_>,
    job: &AttendJob<'_>,
    worker: usize,
    item: usize,
    deal: Deal,
) {
    let (row, head_block) = row_and_head(job, item);
    let Some(task) = deal.task(job, row, head_block) else {
        return;
    };
    // SAFETY: `Threads::run` runs no two calls with the same worker index at once.
    let scratch = unsafe { shared.scratch(worker) };
    let len = scratch.part.len() / task.kv_heads as usize / WIDTH * WIDTH;
    let mut parts = Parts::new(scratch.part, len, &task);
    let mut totals = Parts::new(scratch.total, len, &task);
    queries(job, &task, row, scratch.q);
    totals.clear();
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
            packed: scratch.packed,
            parts: parts.reborrow(),
        });
        for head in 0..task.kv_heads as usize {
            totals.of(head).merge(&parts.of(head), task.padded_dim);
        }
    }
    for (i, task) in task.each_kv_head().enumerate() {
        // SAFETY: the block begins with this item's row and head, so no other item has any of it.
        unsafe { job.finish(row, &task, &totals.of(i)) };
    }
}

/// One split of one task, into its place.
fn one_split(
    kernel: &dyn Kernel,
    shared: &Shared<'_>,
    job: &AttendJob<'_>,
    worker: usize,
    (item, split): (usize, usize),
    deal: Deal,
) {
    let (row, head_block) = row_and_head(job, item);
    let Some(task) = deal.task(job, row, head_block) else {
        return;
    };
    let Ok(index) = u32::try_from(split) else {
        return;
    };
    let Some((_, start, end)) = split_range(&task, index) else {
        return;
    };
    // SAFETY: `Threads::run` runs no two calls with the same worker index at once.
    let scratch = unsafe { shared.scratch(worker) };
    queries(job, &task, row, scratch.q);
    let len = task.kv_heads as usize * shared.partial_len;
    let mut parts = Parts::new(&mut scratch.part[..len], shared.partial_len, &task);
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
        packed: scratch.packed,
        parts: parts.reborrow(),
    });
    // Only now: another core had these lines in the call before, and may be far away. To work there
    // made two cores of different chiplets take 1.5 times as long.
    // SAFETY: row, heads and split are this item's alone in this dispatch.
    unsafe { shared.partials(row, split, &task) }.take(&parts);
}

/// Combines the splits of one pair.
fn combine(shared: &Shared<'_>, job: &AttendJob<'_>, worker: usize, pair: usize) {
    let (row, head) = row_and_head(job, pair);
    let Some(task) = job.task(row, head, 1) else {
        return;
    };
    // SAFETY: `Threads::run` runs no two calls with the same worker index at once.
    let scratch = unsafe { shared.scratch(worker) };
    let mut total = Partial::new(scratch.total, task.heads(), task.padded_dim);
    total.clear();
    for (split, _, _) in splits(&task) {
        // SAFETY: the dispatch that wrote it is over, and in this one the pair is this item's
        // alone.
        let mut part = unsafe { shared.partials(row, split as usize, &task) };
        total.merge(&part.of(0), task.padded_dim);
    }
    // SAFETY: the pair is this item's alone in this dispatch.
    unsafe { job.finish(row, &task, &total) };
}
