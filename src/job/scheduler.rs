//! Continuous batching: admit, prefill in chunks, decode, finish; and preempt where the pool has
//! promised nothing.
//!
//! **Order.** Requests are served first come, first served. A step takes one token of every
//! decoding request, then chunks of the prompts, the oldest first, until
//! `limits.max_batch_tokens` are together; what is left of them admits waiting requests. While
//! the oldest request is still prefilling, one token of the step is kept for it, so that the
//! oldest progresses in every step.
//!
//! **Preemption.** Only under `admission = "max-utilization"` can a step find too few blocks.
//! Then the youngest request gives up its blocks and goes back to the front of the queue, and its
//! whole prefix is computed again later; the oldest is never preempted. A request is only
//! admitted (for the first time or again) when the blocks suffice for its prefix and one new
//! token *and* for what all running requests append in the steps that this takes. So every
//! admission ends in at least one new token, and a request that generates n tokens is preempted
//! at most n times: preempt and resume cannot ping-pong without bound.
//!
//! **What can never run** is refused before the first step and never waits.
//!
//! Nothing here looks at a clock: the same requests and plan give the same steps.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::engine::{Engine, Run, Tensors};
use super::meter::Histogram;
use super::workload::Request;
use crate::cache::{AttendOptions, BeginOptions, Cache, SeqHandle};
use crate::config::Admission;
use crate::error::CacheError;
use crate::plan::GroupKind;
use crate::units::{GroupIdx, LayerIdx};

/// Where a request is.
#[derive(Clone, Copy, Debug, Default)]
struct Task {
    /// Tokens of the sequence when it is done.
    total: u32,
    /// Tokens that are known before the next one is generated: the prompt, and after a preemption
    /// also what was generated before.
    prefix: u32,
    /// Tokens in the cache.
    len: u32,
    /// Tokens whose outputs were folded in; larger than `len` while a prefix is computed again.
    folded: u32,
    /// Preemptions so far.
    preemptions: u32,
    sequence: Option<SeqHandle>,
}

impl Task {
    /// Tokens of the prefix that are not in the cache.
    fn prefill_left(&self) -> u32 {
        self.prefix.saturating_sub(self.len)
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
    /// Tokens folded in for the first time.
    pub(super) new_tokens: u64,
}

/// Drives all requests through a cache. Allocates nothing after [`Scheduler::new`].
pub(super) struct Scheduler<'a> {
    pub(super) cache: Cache,
    pub(super) engine: Engine<'a>,
    requests: &'a [Request],
    tasks: Vec<Task>,
    waiting: VecDeque<u32>,
    /// Oldest first: requests are admitted in the order of their arrival, and it is the youngest
    /// that goes back to the queue.
    running: Vec<u32>,
    /// The step: which requests, and how many tokens of each.
    picked: Vec<u32>,
    batch: Vec<(SeqHandle, u32)>,
    /// The tokens of the request that is being admitted.
    prompt: Vec<u32>,
    pub(super) counts: Counts,
    pub(super) latency: Histogram,
    /// Time in the cache's verbs.
    pub(super) cache_time: Duration,
}

impl<'a> Scheduler<'a> {
    /// All requests waiting, but for those that can never run.
    ///
    /// # Errors
    /// A refusal of an empty cache that is not for ever: a defect.
    pub(super) fn new(
        cache: Cache,
        engine: Engine<'a>,
        requests: &'a [Request],
    ) -> Result<Self, CacheError> {
        let slots = cache.plan().seq_slots as usize;
        let longest = cache.plan().limits.max_seq_len as usize;
        let mut scheduler = Self {
            engine,
            requests,
            tasks: vec![Task::default(); requests.len()],
            waiting: VecDeque::with_capacity(requests.len()),
            running: Vec::with_capacity(slots),
            picked: Vec::with_capacity(slots),
            batch: Vec::with_capacity(slots),
            prompt: Vec::with_capacity(longest),
            counts: Counts::default(),
            latency: Histogram::new(),
            cache_time: Duration::ZERO,
            cache,
        };
        for (index, request) in (0..).zip(requests) {
            scheduler.enqueue(index, request)?;
        }
        Ok(scheduler)
    }

    /// Puts a request into the queue, or refuses it for ever.
    fn enqueue(&mut self, index: u32, request: &Request) -> Result<(), CacheError> {
        // What does not fit u32 is longer than any limit.
        let total = u32::try_from(request.total_tokens()).unwrap_or(u32::MAX);
        let options = BeginOptions { max_len: Some(total), ..BeginOptions::default() };
        let longest = self.cache.plan().limits.max_seq_len as usize + 1;
        let prompt = vec![0; (request.prompt_tokens as usize).min(longest)];
        match self.cache.check_admission(&prompt, &options) {
            Ok(_) => {
                let prefix = request.prompt_tokens;
                self.tasks[index as usize] = Task { total, prefix, ..Task::default() };
                self.waiting.push_back(index);
            }
            Err(CacheError::SequenceTooLong { .. }) => self.counts.refused_too_long += 1,
            Err(CacheError::NeverFits { .. }) => self.counts.refused_never_fits += 1,
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Requests that run now.
    pub(super) fn num_running(&self) -> usize {
        self.running.len()
    }

    /// Requests that wait.
    pub(super) fn num_waiting(&self) -> usize {
        self.waiting.len()
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
        if self.running.is_empty() && self.waiting.is_empty() {
            return Ok(false);
        }
        let began = Instant::now();
        self.pick()?;
        let mut in_cache = began.elapsed();
        while let Some(exhausted) = self.try_step(&mut in_cache)? {
            let began = Instant::now();
            self.preempt_youngest(exhausted)?;
            in_cache += began.elapsed();
        }
        self.note_step();
        let began = Instant::now();
        self.advance()?;
        in_cache += began.elapsed();
        self.latency.add(in_cache);
        self.cache_time += in_cache;
        Ok(true)
    }

    /// Chooses the tokens of the next step, and admits.
    fn pick(&mut self) -> Result<(), CacheError> {
        self.picked.clear();
        self.batch.clear();
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
        while budget > 0 {
            let Some(&index) = self.waiting.front() else { break };
            if !self.admit(index)? {
                break;
            }
            self.waiting.pop_front();
            self.running.push(index);
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

    /// Begins a request's sequence if the cache takes it now.
    fn admit(&mut self, index: u32) -> Result<bool, CacheError> {
        let task = self.tasks[index as usize];
        let id = self.requests[index as usize].id;
        let options =
            BeginOptions { key: Some(id), max_len: Some(task.total), ..BeginOptions::default() };
        let formula = self.engine.formula();
        self.prompt.clear();
        self.prompt.extend((0..task.prefix).map(|position| formula.token(id, position)));
        match self.cache.check_admission(&self.prompt, &options) {
            Ok(_) => {}
            Err(CacheError::NotAdmitted { .. } | CacheError::NoSeqSlot { .. }) => return Ok(false),
            Err(error) => return Err(error),
        }
        if !self.has_room_to_progress(&task) {
            return Ok(false);
        }
        let begun = self.cache.begin(&self.prompt, options)?;
        let task = &mut self.tasks[index as usize];
        task.sequence = Some(begun.sequence);
        task.len = begun.cached_len;
        Ok(true)
    }

    /// Whether the blocks suffice for the request's prefix and one new token, and for what all
    /// running requests append meanwhile. Under guaranteed admission they have been promised.
    fn has_room_to_progress(&self, task: &Task) -> bool {
        let plan = self.cache.plan();
        if plan.admission == Admission::Guaranteed || self.running.is_empty() {
            return true;
        }
        let running = || self.running.iter().map(|index| &self.tasks[*index as usize]);
        let count = u32::try_from(self.running.len()).unwrap_or(u32::MAX);
        let prefill_budget = plan.limits.max_batch_tokens.saturating_sub(count);
        if prefill_budget == 0 {
            // Decoding alone fills the steps: its prefix would never be computed.
            return false;
        }
        // A step either is full, or has the longest chunk of this prefix. Then the new token.
        let prefixes = running().map(Task::prefill_left).fold(task.prefix, u32::saturating_add);
        let steps = prefixes.div_ceil(prefill_budget)
            + task.prefix.div_ceil(plan.limits.max_step_tokens)
            + 1;
        let len = task.prefix.saturating_add(1).min(task.total);
        let mut paged = (0..)
            .zip(&plan.groups)
            .filter(|(_, group)| group.kind == GroupKind::Paged)
            .map(|(g, group)| (GroupIdx(g), group));
        paged.all(|(g, group)| {
            let blocks = self.cache.group_stats(g).unwrap_or_default().blocks;
            let per_block = group.layout.unit_tokens;
            let growth = |running: &Task| {
                let later = running.len_after(steps);
                let new = later.div_ceil(per_block) - running.len.div_ceil(per_block);
                // A windowed layer gives blocks back as it takes new ones.
                u64::from(new.min(plan.blocks_for(g, later)))
            };
            let needed = u64::from(plan.blocks_for(g, len)) + running().map(growth).sum::<u64>();
            needed <= u64::from(blocks.free + blocks.cached)
        })
    }

    /// Reserves and computes the chosen step. Gives the error back when blocks are missing and
    /// there is someone to preempt; nothing has changed then.
    fn try_step(&mut self, in_cache: &mut Duration) -> Result<Option<CacheError>, CacheError> {
        let Self { cache, engine, requests, tasks, picked, batch, .. } = self;
        let num_layers = cache.plan().geometry.num_layers;
        let began = Instant::now();
        let mut step = match cache.reserve(batch) {
            Ok(step) => step,
            Err(error @ CacheError::PoolExhausted { .. }) if self.running.len() > 1 => {
                return Ok(Some(error));
            }
            Err(error) => return Err(error),
        };
        *in_cache += began.elapsed();

        engine.clear();
        let mut start = 0;
        for (&index, &(_, rows)) in picked.iter().zip(&*batch) {
            let positions = &step.positions()[start..start + rows as usize];
            start += rows as usize;
            let task = &tasks[index as usize];
            let run = Run {
                request: index,
                id: requests[index as usize].id,
                rows,
                first_position: positions[0],
                folded: task.folded,
            };
            engine.push(run, positions);
        }
        for layer in 0..num_layers {
            let Tensors { k, v, q, out } = engine.fill(layer);
            let began = Instant::now();
            step.append(LayerIdx(layer), k.into(), v.into())?;
            step.attend(LayerIdx(layer), q.into(), out.into(), AttendOptions::default())?;
            *in_cache += began.elapsed();
            engine.fold(layer);
        }
        let began = Instant::now();
        step.commit()?;
        *in_cache += began.elapsed();
        engine.committed();
        Ok(None)
    }

    /// Puts the youngest running request back to the front of the queue. There are at least two.
    fn preempt_youngest(&mut self, exhausted: CacheError) -> Result<(), CacheError> {
        let index = self.running.pop().ok_or(exhausted)?;
        if let Some(at) = self.picked.iter().position(|picked| *picked == index) {
            self.picked.remove(at);
            self.batch.remove(at);
        }
        let task = &mut self.tasks[index as usize];
        if let Some(sequence) = task.sequence.take() {
            self.cache.release(sequence)?;
        }
        self.counts.fruitless += u64::from(task.len <= task.prefix);
        task.prefix = task.prefix.max(task.len);
        task.len = 0;
        task.preemptions += 1;
        self.counts.preemptions += 1;
        self.counts.most_preemptions = self.counts.most_preemptions.max(task.preemptions);
        self.engine.preempted(index, task.folded);
        self.waiting.push_front(index);
        Ok(())
    }

    /// Takes the averages and peaks of the step that was committed.
    fn note_step(&mut self) {
        let stats = self.cache.stats();
        let taken = stats.held_bytes.get() + stats.promised_bytes.get();
        let counts = &mut self.counts;
        counts.waste_sum += u128::from(taken.saturating_sub(stats.used_bytes.get()));
        counts.promised_peak = counts.promised_peak.max(stats.promised_bytes.get());
        counts.steps += 1;
        counts.peak_running = counts.peak_running.max(stats.seqs);
        counts.running_sum += u64::from(stats.seqs);
    }

    /// Moves the step's requests on, and releases those that are done.
    fn advance(&mut self) -> Result<(), CacheError> {
        let mut done = 0;
        for (&index, &(sequence, rows)) in self.picked.iter().zip(&self.batch) {
            let task = &mut self.tasks[index as usize];
            task.len += rows;
            let new = task.len.saturating_sub(task.folded);
            task.folded += new;
            self.counts.new_tokens += u64::from(new);
            if task.len == task.total {
                self.cache.release(sequence)?;
                task.sequence = None;
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
