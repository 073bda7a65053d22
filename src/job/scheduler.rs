//! Continuous batching: admit, prefill in chunks, decode, finish; and preempt where the pool has
//! promised nothing.
//!
//! **Order.** Requests are served first come, first served. A step takes one token of every
//! decoding request, then chunks of the prompts, the oldest first, until
//! `limits.max_batch_tokens` are together; what is left of them admits waiting requests. While
//! the oldest request is still prefilling, one token of the step is kept for it, so that the
//! oldest progresses in every step. Prefill starts behind what `begin` found in the cache.
//!
//! **Conversations.** A turn joins the end of the queue when the turn before it is done, since its
//! prompt holds that one's output, and the gap behind it has passed. With
//! `workload.max_open_conversations` so many conversations are open, and the next one opens when
//! one ends and it has arrived.
//!
//! **Static batches** (`admission = "static-batch"`) are filled at once, as far as the cache takes
//! requests, and nobody joins until all of the batch are done.
//!
//! **Preemption.** Only under `admission = "max-utilization"` can a step find too few blocks.
//! Then the youngest request gives up its blocks and goes back to the front of the queue, and its
//! whole prefix is computed again later, but for what the cache still has of it; the oldest is
//! never preempted. A request is only admitted (for the first time or again) when the blocks
//! suffice for its prefix and one new token *and* for what all running requests append in the
//! steps that this takes. So every admission ends in at least one new token, and a request that
//! generates n tokens is preempted at most n times: preempt and resume cannot ping-pong without
//! bound.
//!
//! **Other answers** to a prompt are forks of its sequence, made when the prompt is computed. One
//! that the cache has no room for joins the queue like any other request. Where the first answer
//! can never run, the others are forks of the first that can.
//!
//! **What can never run** is refused before the first step and never waits.
//!
//! **Time** is simulated: a step takes as long as its [`Work`] says, and requests arrive when the
//! workload says. Where the work takes no time, all are there from the start. Nothing here looks at
//! a real clock but to report it: the same requests and plan give the same steps.

mod admit;

use std::time::{Duration, Instant};

use super::meter::Histogram;
use super::queue::Queue;
use super::work::{Moment, Run, Served, Work};
use super::workload::Request;
use crate::cache::{Cache, SeqHandle};
use crate::config::Admission;
use crate::error::CacheError;

/// Where a request is.
#[derive(Clone, Copy, Debug, Default)]
struct Task {
    /// Tokens of the sequence when it is done; 0 for a request that was refused.
    total: u32,
    /// Tokens that are known before the next one is generated: the prompt, and after a preemption
    /// also what was generated before.
    prefix: u32,
    /// Tokens in the cache.
    len: u32,
    /// The most tokens that it had in the cache; more than `len` while a prefix is computed again.
    reached: u32,
    /// Preemptions so far.
    preemptions: u32,
    sequence: Option<SeqHandle>,
    /// Where its rows are remembered.
    memory: Option<u32>,
    /// When it was admitted for the first time, and had its first token.
    admitted_ns: u64,
    first_ns: u64,
}

impl Task {
    /// Tokens of the prefix that are not in the cache.
    fn prefill_left(&self) -> u32 {
        self.prefix.saturating_sub(self.len)
    }

    /// Notes that it has so many tokens, and says how many it never had before.
    fn reach(&mut self, len: u32) -> u64 {
        let new = len.saturating_sub(self.reached);
        self.reached += new;
        u64::from(new)
    }

    /// Tokens that it may have after `steps` more steps, at most.
    fn len_after(&self, steps: u32) -> u32 {
        self.len.max(self.prefix).saturating_add(steps).min(self.total)
    }
}

/// What a run counts.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) completed: u64,
    pub(super) refused_too_long: u64,
    pub(super) refused_never_fits: u64,
    /// The first request of the list that was refused, and why.
    pub(super) first_refusal: Option<(u32, CacheError)>,
    pub(super) preemptions: u64,
    pub(super) most_preemptions: u32,
    /// Preemptions of a request that had gained no new token since it was admitted.
    pub(super) fruitless: u64,
    pub(super) steps: u64,
    pub(super) peak_running: u32,
    pub(super) running_sum: u64,
    /// Bytes held or promised and not used, summed over the steps.
    pub(super) waste_sum: u128,
    pub(super) promised_peak: u64,
    /// The most bytes of blocks that were kept for reuse and held by nobody.
    pub(super) cached_peak: u64,
    /// Tokens that requests have reached, computed or found in the cache, each counted once.
    pub(super) new_tokens: u64,
    /// Prompt tokens of the requests that were admitted, and how many of them were found in the
    /// cache. What is admitted again after a preemption is not among them.
    pub(super) prompt_tokens: u64,
    pub(super) hit_tokens: u64,
    /// The same of requests that were admitted again; their prefix is what they had reached.
    pub(super) resumed_tokens: u64,
    pub(super) resumed_hit_tokens: u64,
    /// Prompt tokens that an earlier request of the list has too.
    pub(super) repeated_tokens: u64,
    /// Rows that a model would sample a token from.
    pub(super) sampled_rows: u64,
    /// Sequences that were forked.
    pub(super) forks: u64,
}

/// Drives all requests through a cache. Allocates nothing after [`Scheduler::new`].
pub(super) struct Scheduler<'a, W> {
    pub(super) cache: Cache,
    pub(super) work: W,
    requests: &'a [Request],
    tasks: Vec<Task>,
    pub(super) queue: Queue<'a>,
    /// Oldest first: requests are admitted in the order of their arrival, and it is the youngest
    /// that goes back to the queue.
    running: Vec<u32>,
    /// The step: which requests, and how many tokens of each.
    picked: Vec<u32>,
    batch: Vec<(SeqHandle, u32)>,
    /// The token ids of the step, row by row.
    tokens: Vec<u32>,
    /// The tokens of the request that is to be admitted next, and which request that is: it may
    /// be asked for in many steps until there is room.
    prompt: Vec<u32>,
    prompt_of: Option<u32>,
    pub(super) counts: Counts,
    pub(super) latency: Histogram,
    /// Time in the cache's verbs.
    pub(super) cache_time: Duration,
}

impl<'a, W: Work> Scheduler<'a, W> {
    /// All requests that are there from the start waiting, but for those that can never run; of
    /// conversations at most `most_open` are open at once, or all.
    ///
    /// # Errors
    /// A refusal of an empty cache that is not for ever: a defect.
    pub(super) fn new(
        cache: Cache,
        work: W,
        requests: &'a [Request],
        most_open: Option<u32>,
    ) -> Result<Self, CacheError> {
        let slots = cache.plan().seq_slots as usize;
        let longest = cache.plan().limits.max_seq_len as usize;
        let step_tokens = cache.plan().limits.max_batch_tokens as usize;
        let mut scheduler = Self {
            work,
            requests,
            tasks: vec![Task::default(); requests.len()],
            queue: Queue::new(requests, most_open, false),
            running: Vec::with_capacity(slots),
            picked: Vec::with_capacity(slots),
            batch: Vec::with_capacity(slots),
            tokens: Vec::with_capacity(step_tokens),
            prompt: Vec::with_capacity(longest),
            prompt_of: None,
            counts: Counts::default(),
            latency: Histogram::new(),
            cache_time: Duration::ZERO,
            cache,
        };
        for (task, request) in requests.iter().enumerate() {
            scheduler.accept(task, request)?;
        }
        scheduler.queue.arrive();
        Ok(scheduler)
    }

    /// Requests that run now.
    pub(super) fn num_running(&self) -> usize {
        self.running.len()
    }

    /// Requests that wait.
    pub(super) fn num_waiting(&self) -> usize {
        self.queue.waiting.len()
    }

    /// Tokens of all requests that were not refused.
    pub(super) fn tokens_to_come(&self) -> u64 {
        self.tasks.iter().map(|task| u64::from(task.total)).sum()
    }

    /// Runs one step; `false` when there was nothing left to do.
    ///
    /// # Errors
    /// A verb that failed where it must not: a defect.
    pub(super) fn step(&mut self) -> Result<bool, CacheError> {
        self.queue.arrive();
        let idle = self.running.is_empty() && self.queue.waiting.is_empty();
        if idle && !self.queue.wait_for_next() {
            return Ok(false);
        }
        let mut in_cache = Duration::ZERO;
        self.pick(&mut in_cache)?;
        while let Some(exhausted) = self.try_step(&mut in_cache)? {
            let began = Instant::now();
            self.preempt_youngest(exhausted)?;
            in_cache += began.elapsed();
        }
        self.note_step();
        self.advance(&mut in_cache)?;
        self.latency.add(in_cache);
        self.cache_time += in_cache;
        Ok(true)
    }

    /// Chooses the tokens of the next step, and admits.
    fn pick(&mut self, in_cache: &mut Duration) -> Result<(), CacheError> {
        self.picked.clear();
        self.batch.clear();
        let one_batch = self.cache.plan().admission == Admission::StaticBatch;
        if one_batch && self.running.is_empty() {
            while self.admit_next(in_cache)?.is_some() {}
        }
        let mut budget = self.cache.plan().limits.max_batch_tokens;
        let oldest_prefills = (self.running.first())
            .is_some_and(|oldest| self.tasks[*oldest as usize].prefill_left() > 0);
        for at in 0..self.running.len() {
            let index = self.running[at];
            let kept = u32::from(oldest_prefills);
            if self.tasks[index as usize].prefill_left() == 0 && budget > kept {
                self.take(index, 1, &mut budget);
            }
        }
        for at in 0..self.running.len() {
            self.take_chunk(self.running[at], &mut budget);
        }
        while budget > 0 && !one_batch {
            let Some(index) = self.admit_next(in_cache)? else { break };
            self.take_chunk(index, &mut budget);
        }
        Ok(())
    }

    /// Takes what the step has room for of a request's prefix.
    fn take_chunk(&mut self, index: u32, budget: &mut u32) {
        let most = self.cache.plan().limits.max_step_tokens.min(*budget);
        let chunk = self.tasks[index as usize].prefill_left().min(most);
        if chunk > 0 {
            self.take(index, chunk, budget);
        }
    }

    fn take(&mut self, index: u32, tokens: u32, budget: &mut u32) {
        if let Some(sequence) = self.tasks[index as usize].sequence {
            self.picked.push(index);
            self.batch.push((sequence, tokens));
            *budget -= tokens;
        }
    }

    /// Reserves and computes the chosen step. Gives the error back when blocks are missing and
    /// there is someone to preempt; nothing has changed then.
    fn try_step(&mut self, in_cache: &mut Duration) -> Result<Option<CacheError>, CacheError> {
        let Self { cache, work, requests, tasks, picked, batch, tokens: ids, .. } = self;
        ids.clear();
        for (&index, &(_, rows)) in picked.iter().zip(&*batch) {
            let from = tasks[index as usize].len;
            let request = &requests[index as usize];
            work.tokens().each(&request.content, from..from + rows, |token| ids.push(token));
        }
        let began = Instant::now();
        let mut step = match cache.reserve_tokens(batch, ids) {
            Ok(step) => step,
            Err(error @ CacheError::PoolExhausted { .. }) if self.running.len() > 1 => {
                return Ok(Some(error));
            }
            Err(error) => return Err(error),
        };
        *in_cache += began.elapsed();

        work.clear();
        let mut start = 0;
        for (&index, &(_, rows)) in picked.iter().zip(&*batch) {
            let end = start + rows as usize;
            let positions = &step.positions()[start..end];
            let request = &requests[index as usize];
            let run = Run {
                request: index,
                id: request.id,
                rows,
                first_position: positions[0],
                counts_from: request.prompt_tokens - 1,
                memory: tasks[index as usize].memory,
            };
            work.push(run, positions, &ids[start..end]);
            start = end;
        }
        work.compute(&mut step, in_cache)?;
        let began = Instant::now();
        step.commit()?;
        *in_cache += began.elapsed();
        work.committed();
        Ok(None)
    }

    /// Puts the youngest running request back to the front of the queue. There are at least two.
    fn preempt_youngest(&mut self, exhausted: CacheError) -> Result<(), CacheError> {
        let preempted = self.cache.preempt_youngest().ok_or(exhausted)?;
        let index = self.running.pop().ok_or(exhausted)?;
        let is_own = |key| key == self.requests[index as usize].id;
        // A fork has no key.
        debug_assert!(preempted.key.is_none_or(is_own), "both by admission");
        if let Some(at) = self.picked.iter().position(|picked| *picked == index) {
            self.picked.remove(at);
            self.batch.remove(at);
        }
        let task = &mut self.tasks[index as usize];
        task.sequence = None;
        self.counts.fruitless += u64::from(task.len <= task.prefix);
        task.prefix = task.prefix.max(task.len);
        task.len = 0;
        task.preemptions += 1;
        self.counts.preemptions += 1;
        self.counts.most_preemptions = self.counts.most_preemptions.max(task.preemptions);
        self.queue.waiting.push_front(index);
        Ok(())
    }

    /// Moves the clock on, and takes the averages and peaks of the step that was committed.
    fn note_step(&mut self) {
        let stats = self.cache.stats();
        let took_ns = self.work.took_ns(stats.copied_bytes.get());
        self.work.note(&Moment {
            cache: &self.cache,
            stats: &stats,
            began_ns: self.queue.now_ns,
            took_ns,
            running: self.running.len(),
            waiting: self.queue.waiting.len(),
        });
        self.queue.pass(took_ns);
        let taken = stats.held_bytes.get() + stats.promised_bytes.get();
        let counts = &mut self.counts;
        counts.waste_sum += u128::from(taken.saturating_sub(stats.used_bytes.get()));
        counts.promised_peak = counts.promised_peak.max(stats.promised_bytes.get());
        counts.cached_peak = counts.cached_peak.max(stats.cached_bytes.get());
        counts.steps += 1;
        counts.peak_running = counts.peak_running.max(stats.seqs);
        counts.running_sum += u64::from(stats.seqs);
    }

    /// Moves the step's requests on, and releases those that are done.
    fn advance(&mut self, in_cache: &mut Duration) -> Result<(), CacheError> {
        let mut done = 0;
        for at in 0..self.picked.len() {
            let (index, (sequence, rows)) = (self.picked[at], self.batch[at]);
            let task = &mut self.tasks[index as usize];
            task.len += rows;
            self.counts.new_tokens += task.reach(task.len);
            let request = &self.requests[index as usize];
            if task.len == request.prompt_tokens && task.first_ns == 0 {
                // Computed again it is not the first any more.
                task.first_ns = self.queue.now_ns;
                if !self.queue.is_forked(index) {
                    let began = Instant::now();
                    self.fork(index, sequence)?;
                    *in_cache += began.elapsed();
                }
            }
            let task = &mut self.tasks[index as usize];
            if task.len == task.total {
                let began = Instant::now();
                self.cache.release(sequence)?;
                *in_cache += began.elapsed();
                task.sequence = None;
                if let Some(place) = task.memory.take() {
                    self.work.forget(place);
                }
                self.work.served(&Served {
                    arrived_ns: self.queue.arrived_ns(index),
                    admitted_ns: task.admitted_ns,
                    first_ns: task.first_ns,
                    done_ns: self.queue.now_ns,
                    output_tokens: request.output_tokens,
                });
                if !self.queue.is_forked(index) {
                    self.queue.arrive_after(index);
                }
                done += 1;
            }
        }
        if done > 0 {
            self.counts.completed += done;
            let tasks = &self.tasks;
            self.running.retain(|index| tasks[*index as usize].sequence.is_some());
        }
        Ok(())
    }
}
