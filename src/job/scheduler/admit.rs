//! Who gets in.

use std::time::{Duration, Instant};

use super::{Scheduler, Task};
use crate::cache::{BeginOptions, Begun, SeqHandle};
use crate::config::Admission;
use crate::error::CacheError;
use crate::job::work::Work;
use crate::job::workload::Request;
use crate::plan::GroupKind;
use crate::units::{GroupIdx, counted, grouped};

impl<W: Work> Scheduler<'_, W> {
    /// Makes a request a task, or refuses it for ever. A turn is longer than the one before it, so
    /// when one is refused, those that would follow it are too.
    pub(super) fn accept(&mut self, index: usize, request: &Request) -> Result<(), CacheError> {
        // What does not fit u32 is longer than any limit.
        let total = u32::try_from(request.total_tokens()).unwrap_or(u32::MAX);
        let options = BeginOptions { max_len: Some(total), ..BeginOptions::default() };
        // Whether a sequence can ever fit depends on its length alone; its tokens come later.
        match self.cache.check_admission(&[], &options) {
            Ok(_) => {
                let prefix = request.prompt_tokens;
                self.tasks[index] = Task { total, prefix, ..Task::default() };
                let is_first = self.queue.accept(index);
                // Of an answer whose elders were refused nothing has been computed before.
                if !(request.is_fork && is_first) {
                    self.counts.repeated_tokens += u64::from(request.repeated_tokens);
                }
                self.counts.sampled_rows += u64::from(request.output_tokens) + 1;
            }
            Err(error @ CacheError::SequenceTooLong { .. }) => {
                self.counts.refused_too_long += 1;
                self.note_refusal(index, error);
            }
            Err(error @ CacheError::NeverFits { .. }) => {
                self.counts.refused_never_fits += 1;
                self.note_refusal(index, error);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Keeps the reason of the first refusal.
    fn note_refusal(&mut self, index: usize, error: CacheError) {
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        self.counts.first_refusal.get_or_insert((index, error));
    }

    /// The first refusal in the words of a job, whose lengths come from its workload: what the
    /// request needs, what there is, and what to change.
    pub(in crate::job) fn first_refusal(&self) -> Option<String> {
        let (index, error) = self.counts.first_refusal?;
        let tokens = counted(self.requests.get(index as usize)?.total_tokens(), "token");
        let number = grouped(u64::from(index) + 1);
        Some(match error {
            CacheError::NeverFits { group, wanted, total } => format!(
                "request number {number}, of {tokens}, needs {} of layer group {group} and the whole pool \
                 has {}; raise pool.capacity, or shorten the workload's requests",
                counted(wanted, "block"),
                grouped(total)
            ),
            CacheError::SequenceTooLong { limit, knob, .. } => format!(
                "request number {number} comes to {tokens} and {knob} is {}; raise it, or shorten the \
                 workload's requests",
                grouped(limit.into())
            ),
            other => format!("request number {number}, of {tokens}: {other}"),
        })
    }

    /// Begins the sequence of the request at the front of the queue, if there is one and the cache
    /// takes it now.
    pub(super) fn admit_next(
        &mut self,
        in_cache: &mut Duration,
    ) -> Result<Option<u32>, CacheError> {
        let Some(&index) = self.queue.waiting.front() else { return Ok(None) };
        let task = self.tasks[index as usize];
        let request = &self.requests[index as usize];
        if self.prompt_of.replace(index) != Some(index) {
            self.prompt.clear();
            let Self { work, prompt, .. } = &mut *self;
            work.tokens().each(&request.content, 0..task.prefix, |token| prompt.push(token));
        }
        let options = BeginOptions {
            key: Some(request.id),
            max_len: Some(task.total),
            ..BeginOptions::default()
        };
        let began = Instant::now();
        let begun = if self.has_room_to_progress(index, &options)? {
            self.cache.begin(&self.prompt, options).map(Some)
        } else {
            Ok(None)
        };
        *in_cache += began.elapsed();
        let Some(begun) = self.or_later(begun)?.flatten() else { return Ok(None) };
        self.queue.waiting.pop_front();
        self.running.push(index);
        self.prompt_of = None;
        self.note_admission(index, begun);
        Ok(Some(index))
    }

    /// `None` for a refusal that ends when one of those that run gives back what it holds. When
    /// none runs there is nothing to wait for: then the refusal is the job's error.
    fn or_later<T>(&self, admitted: Result<T, CacheError>) -> Result<Option<T>, CacheError> {
        match admitted {
            Ok(admitted) => Ok(Some(admitted)),
            Err(CacheError::NotAdmitted { .. } | CacheError::NoSeqSlot { .. })
                if !self.running.is_empty() =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Forks a sequence whose prompt is computed, once for each other answer that is asked for.
    /// Those that do not fit now wait.
    pub(super) fn fork(&mut self, index: u32, sequence: SeqHandle) -> Result<(), CacheError> {
        let arrived_ns = self.queue.arrived_ns(index);
        for other in index + 1.. {
            let request = self.requests.get(other as usize).filter(|request| request.is_fork);
            let Some(request) = request else { break };
            if self.tasks[other as usize].total == 0 {
                continue;
            }
            match self.cache.fork(sequence) {
                Ok(fork) => {
                    self.queue.note_arrival(other, arrived_ns);
                    self.running.push(other);
                    let task = &mut self.tasks[other as usize];
                    (task.sequence, task.len) = (Some(fork), request.prompt_tokens);
                    (task.admitted_ns, task.first_ns) = (self.queue.now_ns, self.queue.now_ns);
                    let prompt = u64::from(request.prompt_tokens);
                    self.counts.prompt_tokens += prompt;
                    self.counts.hit_tokens += prompt;
                    self.counts.new_tokens += task.reach(request.prompt_tokens);
                    self.counts.forks += 1;
                }
                Err(CacheError::NotAdmitted { .. } | CacheError::NoSeqSlot { .. }) => {
                    self.queue.join(other, arrived_ns);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Starts a task behind what the cache has of its prefix.
    fn note_admission(&mut self, index: u32, begun: Begun) {
        let counts = &mut self.counts;
        let task = &mut self.tasks[index as usize];
        task.sequence = Some(begun.sequence);
        task.len = begun.cached_len;
        let (known, hit) = (u64::from(task.prefix), u64::from(begun.cached_len));
        if task.preemptions == 0 {
            counts.prompt_tokens += known;
            counts.hit_tokens += hit;
            task.memory = self.work.remember();
            task.admitted_ns = self.queue.now_ns;
        } else {
            counts.resumed_tokens += known;
            counts.resumed_hit_tokens += hit;
        }
        counts.new_tokens += task.reach(begun.cached_len);
    }

    /// Whether the blocks suffice for the prefix of the request whose prompt is at hand and one new
    /// token, and for what all running requests append meanwhile. Where blocks are promised, they
    /// do.
    fn has_room_to_progress(&self, index: u32, options: &BeginOptions) -> Result<bool, CacheError> {
        let plan = self.cache.plan();
        if plan.admission != Admission::MaxUtilization || self.running.is_empty() {
            return Ok(true);
        }
        let estimate = self.cache.check_admission(&self.prompt, options);
        let Some(estimate) = self.or_later(estimate)? else { return Ok(false) };
        let shared = self.shared_with_running(index).min(estimate.cached_len);
        let task = &self.tasks[index as usize];
        let running = || self.running.iter().map(|index| &self.tasks[*index as usize]);
        let count = u32::try_from(self.running.len()).unwrap_or(u32::MAX);
        let prefill_budget = plan.limits.max_batch_tokens.saturating_sub(count);
        if prefill_budget == 0 {
            // Decoding alone fills the steps: its prefix would never be computed.
            return Ok(false);
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
        Ok(paged.all(|(g, group)| {
            let blocks = self.cache.group_stats(g).map(|group| group.blocks).unwrap_or_default();
            let per_block = group.layout.unit_tokens;
            let growth = |running: &Task| {
                let later = running.len_after(steps);
                let new = later.div_ceil(per_block) - running.len.div_ceil(per_block);
                // A windowed layer gives blocks back as it takes new ones.
                u64::from(new.min(plan.blocks_for(g, later)))
            };
            // What is shared takes no block. A windowed layer may have lost it: count it there.
            let taken = if group.window.is_none() { shared / per_block } else { 0 };
            let needed = u64::from(plan.blocks_for(g, len) - taken);
            needed + running().map(growth).sum::<u64>() <= u64::from(blocks.free + blocks.cached)
        }))
    }

    /// Tokens of the request's shared prefix, if a request that runs holds them all. What else the
    /// cache has of the request is held by nobody, and takes as many blocks as computing it.
    fn shared_with_running(&self, index: u32) -> u32 {
        let content = self.requests[index as usize].content;
        let holds = |other: &&u32| {
            let theirs = self.requests[**other as usize].content;
            theirs.prefix == content.prefix
                && self.tasks[**other as usize].len >= content.prefix_tokens
        };
        self.running.iter().find(holds).map_or(0, |_| content.prefix_tokens)
    }
}
