//! The baseline: memory as it was given out before paging. Each request gets one run of bytes as
//! long as it will be, the first that is long enough, and gives it back when it is done.
//!
//! Everything else is as in the scheduler: first come, first served, one token of every decoding
//! request and chunks of prompts in a step. Nothing is shared, kept or preempted.

use super::clock::Clock;
use super::meters::{Gauges, Meters};
use super::picture::{Album, Cell};
use crate::job::queue::Queue;
use crate::job::work::Served;
use crate::job::workload::Request;
use crate::plan::Limits;

/// The length of a run that is asked about in the article on paging.
const GIGABYTE: u64 = 1_000_000_000;

/// Memory as a list of the holes in it.
#[derive(Debug)]
pub(super) struct Heap {
    bytes: u64,
    /// Where each hole begins and how long it is, in the order of their places. No two touch.
    holes: Vec<(u64, u64)>,
    free: u64,
}

impl Heap {
    /// All free. There are never more holes than runs and one.
    pub(super) fn new(bytes: u64, runs: usize) -> Self {
        let mut holes = Vec::with_capacity(runs + 2);
        if bytes > 0 {
            holes.push((0, bytes));
        }
        Self { bytes, holes, free: bytes }
    }

    /// The first run of so many bytes that is free.
    pub(super) fn take(&mut self, bytes: u64) -> Option<u64> {
        let at = self.holes.iter().position(|(_, len)| *len >= bytes)?;
        let (start, len) = self.holes[at];
        if len == bytes {
            self.holes.remove(at);
        } else {
            self.holes[at] = (start + bytes, len - bytes);
        }
        self.free -= bytes;
        Some(start)
    }

    /// Gives a run back; holes that touch become one.
    pub(super) fn give_back(&mut self, start: u64, bytes: u64) {
        let at = self.holes.partition_point(|(hole, _)| *hole < start);
        let touches_next = self.holes.get(at).is_some_and(|(next, _)| *next == start + bytes);
        let touches_last =
            at > 0 && self.holes.get(at - 1).is_some_and(|(last, len)| last + len == start);
        match (touches_last, touches_next) {
            (true, true) => {
                let (_, next) = self.holes.remove(at);
                self.holes[at - 1].1 += bytes + next;
            }
            (true, false) => self.holes[at - 1].1 += bytes,
            (false, true) => self.holes[at] = (start, self.holes[at].1 + bytes),
            (false, false) => self.holes.insert(at, (start, bytes)),
        }
        self.free += bytes;
    }

    pub(super) fn largest(&self) -> u64 {
        self.holes.iter().map(|(_, len)| *len).max().unwrap_or(0)
    }
}

/// A request that runs.
#[derive(Clone, Copy, Debug)]
struct Running {
    request: u32,
    start: u64,
    bytes: u64,
    len: u32,
    /// Rows of the step under way.
    rows: u32,
    total: u32,
    admitted_ns: u64,
    first_ns: u64,
}

/// What went wrong on the way.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Failures {
    pub(super) all: u64,
    pub(super) with_room: u64,
    pub(super) worst_free: u64,
    pub(super) worst_largest: u64,
    pub(super) free_without_gb: u64,
    /// Who failed last: one that waits fails once, not in every step.
    last: Option<u32>,
    pub(super) too_long: u64,
    pub(super) never_fits: u64,
    pub(super) computed_tokens: u64,
    pub(super) prompt_tokens: u64,
}

/// One replay of the baseline. Allocates nothing after [`Dynamic::new`].
#[derive(Debug)]
pub(super) struct Dynamic<'a> {
    requests: &'a [Request],
    pub(super) queue: Queue<'a>,
    heap: Heap,
    bytes_per_token: u64,
    limits: Limits,
    /// Oldest first.
    running: Vec<Running>,
    used_tokens: u64,
    clock: Clock,
    pub(super) meters: Meters,
    pub(super) failures: Failures,
}

impl<'a> Dynamic<'a> {
    pub(super) fn new(
        requests: &'a [Request],
        most_open: Option<u32>,
        (pool_bytes, bytes_per_token): (u64, u64),
        limits: &Limits,
        clock: Clock,
        meters: impl FnOnce(Album) -> Meters,
    ) -> Self {
        let mut dynamic = Self {
            requests,
            queue: Queue::new(requests, most_open, true),
            heap: Heap::new(pool_bytes, limits.max_seqs as usize),
            bytes_per_token,
            limits: limits.clone(),
            running: Vec::with_capacity(limits.max_seqs as usize),
            used_tokens: 0,
            clock,
            meters: meters(Album::new("byte", pool_bytes)),
            failures: Failures::default(),
        };
        for (index, request) in requests.iter().enumerate() {
            let total = request.total_tokens();
            if total > u64::from(limits.max_seq_len) {
                dynamic.failures.too_long += 1;
            } else if total * bytes_per_token > pool_bytes {
                dynamic.failures.never_fits += 1;
            } else {
                dynamic.queue.accept(index);
            }
        }
        dynamic.queue.arrive();
        dynamic
    }

    /// Runs one step; `false` when there was nothing left to do.
    pub(super) fn step(&mut self) -> bool {
        self.queue.arrive();
        if self.running.is_empty() && self.queue.waiting.is_empty() && !self.queue.wait_for_next() {
            return false;
        }
        self.clock.clear();
        self.pick();
        let took_ns = self.clock.took_ns(0);
        let began_ns = self.queue.now_ns;
        self.queue.pass(took_ns);
        for running in &mut self.running {
            running.len += running.rows;
            self.used_tokens += u64::from(running.rows);
            self.failures.computed_tokens += u64::from(running.rows);
        }
        self.note(began_ns, took_ns);
        self.end();
        true
    }

    /// Chooses the tokens of the step, and admits.
    fn pick(&mut self) {
        let mut budget = self.limits.max_batch_tokens;
        let prompt = |running: &Running| self.requests[running.request as usize].prompt_tokens;
        let kept =
            u32::from(self.running.first().is_some_and(|oldest| oldest.len < prompt(oldest)));
        for running in &mut self.running {
            let decodes = running.len >= self.requests[running.request as usize].prompt_tokens;
            running.rows = u32::from(decodes && budget > kept);
            budget -= running.rows;
        }
        for at in 0..self.running.len() {
            self.take_chunk(at, &mut budget);
        }
        while budget > 0 && self.admit() {
            self.take_chunk(self.running.len() - 1, &mut budget);
        }
        for running in &self.running {
            if running.rows > 0 {
                self.clock.add(running.len, running.rows);
            }
        }
    }

    fn take_chunk(&mut self, at: usize, budget: &mut u32) {
        let running = &mut self.running[at];
        let left =
            self.requests[running.request as usize].prompt_tokens.saturating_sub(running.len);
        let chunk = left.min(self.limits.max_step_tokens).min(*budget);
        if chunk > 0 {
            running.rows = chunk;
            *budget -= chunk;
        }
    }

    /// Admits the request at the front of the queue, if a run is free that is long enough.
    fn admit(&mut self) -> bool {
        let Some(&index) = self.queue.waiting.front() else { return false };
        if self.running.len() == self.limits.max_seqs as usize {
            return false;
        }
        let request = &self.requests[index as usize];
        let bytes = request.total_tokens() * self.bytes_per_token;
        let Some(start) = self.heap.take(bytes) else {
            self.note_failure(index, bytes);
            return false;
        };
        self.queue.waiting.pop_front();
        self.failures.prompt_tokens += u64::from(request.prompt_tokens);
        self.running.push(Running {
            request: index,
            start,
            bytes,
            len: 0,
            rows: 0,
            // Longer ones were refused.
            total: u32::try_from(request.total_tokens()).unwrap_or(u32::MAX),
            admitted_ns: self.queue.now_ns,
            first_ns: 0,
        });
        true
    }

    fn note_failure(&mut self, index: u32, bytes: u64) {
        let failures = &mut self.failures;
        if failures.last.replace(index) != Some(index) {
            failures.all += 1;
            failures.with_room += u64::from(self.heap.free >= bytes);
        }
        if self.heap.free < bytes {
            return;
        }
        let largest = self.heap.largest();
        if self.heap.free > failures.worst_free {
            failures.worst_free = self.heap.free;
            failures.worst_largest = largest;
        }
        // A pool that is smaller than that never had such a run.
        if largest < GIGABYTE && self.heap.bytes >= GIGABYTE {
            failures.free_without_gb = failures.free_without_gb.max(self.heap.free);
        }
    }

    fn note(&mut self, began_ns: u64, took_ns: u64) {
        let held = self.heap.bytes - self.heap.free;
        let gauges = Gauges {
            used: self.used_tokens * self.bytes_per_token,
            held,
            promised: 0,
            cached: 0,
            slot_waste: 0,
            free: self.heap.free,
            largest_run: self.heap.largest(),
            running: self.running.len(),
            waiting: self.queue.waiting.len(),
        };
        self.meters.step(began_ns, took_ns, &gauges);
        let Self { meters, running, bytes_per_token, heap, .. } = self;
        if meters.album.is_fuller(held) {
            meters.album.take(began_ns.saturating_add(took_ns), held, |cells, per_cell| {
                for (index, cell) in (0_u64..).zip(&mut *cells) {
                    cell.total = per_cell.min(heap.bytes - index * per_cell);
                }
                for run in &*running {
                    let used = u64::from(run.len) * *bytes_per_token;
                    spread(cells, per_cell, run.start, run.bytes, |cell| &mut cell.held);
                    spread(cells, per_cell, run.start, used, |cell| &mut cell.used);
                }
            });
        }
    }

    /// Ends requests that are done.
    fn end(&mut self) {
        let mut at = 0;
        while at < self.running.len() {
            let running = &mut self.running[at];
            running.rows = 0;
            let request = &self.requests[running.request as usize];
            if running.first_ns == 0 && running.len >= request.prompt_tokens {
                running.first_ns = self.queue.now_ns;
            }
            if running.len < running.total {
                at += 1;
                continue;
            }
            let done = self.running.remove(at);
            self.heap.give_back(done.start, done.bytes);
            self.used_tokens -= u64::from(done.len);
            self.meters.served(&Served {
                arrived_ns: self.queue.arrived_ns(done.request),
                admitted_ns: done.admitted_ns,
                first_ns: done.first_ns,
                done_ns: self.queue.now_ns,
                output_tokens: request.output_tokens,
            });
            self.queue.arrive_after(done.request);
        }
    }
}

/// Adds a run of bytes to the cells that it lies in.
fn spread(
    cells: &mut [Cell],
    per_cell: u64,
    start: u64,
    bytes: u64,
    part: fn(&mut Cell) -> &mut u64,
) {
    let (mut at, end) = (start, start + bytes);
    while at < end {
        let index = at / per_cell;
        let next = ((index + 1) * per_cell).min(end);
        let place = usize::try_from(index).unwrap_or(usize::MAX);
        if let Some(cell) = cells.get_mut(place) {
            *part(cell) += next - at;
        }
        at = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::random::Rng;

    #[test]
    fn the_first_run_that_fits_is_taken_and_holes_grow_together() {
        let mut heap = Heap::new(100, 8);
        assert_eq!([heap.take(10), heap.take(20), heap.take(30)], [Some(0), Some(10), Some(30)]);
        heap.give_back(10, 20);
        assert_eq!((heap.free, heap.largest()), (60, 40));
        assert_eq!(heap.take(41), None, "60 are free");
        assert_eq!(heap.take(5), Some(10));
        heap.give_back(0, 10);
        heap.give_back(10, 5);
        heap.give_back(30, 30);
        assert_eq!((heap.holes.as_slice(), heap.free), (&[(0, 100)][..], 100));
        assert_eq!(heap.take(100), Some(0));
        assert_eq!((heap.take(1), heap.largest()), (None, 0));
    }

    #[test]
    fn runs_never_overlap_and_nothing_is_lost() {
        let mut rng = Rng::new(1, 1);
        let mut heap = Heap::new(10_000, 64);
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for _ in 0..20_000 {
            if runs.len() < 64 && rng.below(2) == 0 {
                let bytes = u64::from(1 + rng.below(600));
                if let Some(start) = heap.take(bytes) {
                    let apart = |(s, b): &(u64, u64)| start + bytes <= *s || s + b <= start;
                    assert!(runs.iter().all(apart) && start + bytes <= 10_000);
                    runs.push((start, bytes));
                } else {
                    assert!(heap.largest() < bytes);
                }
            } else if let Some(count) = u32::try_from(runs.len()).ok().filter(|n| *n > 0) {
                let (start, bytes) = runs.swap_remove(rng.below(count) as usize);
                heap.give_back(start, bytes);
            }
            let held: u64 = runs.iter().map(|(_, bytes)| bytes).sum();
            assert_eq!(heap.free + held, 10_000);
            assert_eq!(heap.holes.iter().map(|(_, len)| len).sum::<u64>(), heap.free);
            assert!(heap.holes.windows(2).all(|pair| pair[0].0 + pair[0].1 < pair[1].0));
            assert!(heap.holes.capacity() == 66, "nothing is allocated");
        }
    }
}
