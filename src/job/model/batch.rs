//! Many requests at once: continuous batching over one cache.
//!
//! Requests wait in their order. Each step takes one token of every answer that is being written,
//! and as much of the prompts that are being read as `limits.max_batch_tokens` leaves room for. A
//! request with several answers reads its prompt once: the others are forked from the first when it
//! has, or, if there is no room then, begin on their own later and find the prompt in the cache.
//!
//! Under max-utilization a step may find too few blocks. Then the answer that began last gives its
//! own back and waits; it goes on later from where it was, with the same text
//! ([`sample`](super::sample)).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::answer::Written;
pub use super::answer::{Answer, Finish, Request};
use super::engine::{Engine, StepInput};
use super::tokenizer::Tokenizer;
use crate::cache::{BeginOptions, Cache, SeqHandle};
use crate::error::{CacheError, ModelError};

/// Is told what is written.
pub trait Listener {
    /// More text of an answer that will not be taken back.
    fn text(&mut self, _request: usize, _answer: u32, _text: &str) {}
    /// A request can never be run.
    ///
    /// # Errors
    /// What ends the run; this error, unless one wants to know.
    fn refused(&mut self, _request: usize, error: CacheError) -> Result<(), ModelError> {
        Err(error.into())
    }

    /// A request has all its answers.
    ///
    /// # Errors
    /// What ends the run.
    fn done(&mut self, request: usize, answers: Vec<Answer>) -> Result<(), ModelError>;
}

/// What a run did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counts {
    /// Steps of the model.
    pub steps: u64,
    /// Prompt tokens of all answers.
    pub prompt_tokens: u64,
    /// Those that were not computed.
    pub cached_tokens: u64,
    /// Tokens of answers.
    pub new_tokens: u64,
    /// Answers that had to give their blocks back and wait.
    pub preemptions: u64,
    /// Answers at once at most.
    pub peak_running: usize,
    /// Requests that can never be run.
    pub refused: u64,
    /// Of the steps' seconds, the share of the rows that were read of prompts; the rest was
    /// writing.
    pub reading_s: f64,
    /// Whether it was stopped before everything was done.
    pub interrupted: bool,
}

/// An answer that waits.
struct Waiting {
    request: usize,
    answer: u32,
    /// Where it was when it had to wait.
    state: Option<Box<Written>>,
}

/// An answer that is being written, or whose prompt is being read.
struct Running {
    request: usize,
    answer: u32,
    sequence: SeqHandle,
    /// Tokens that the cache has.
    len: usize,
    /// Tokens that it may come to.
    limit: usize,
    written: Box<Written>,
    /// Answers that are forked from this one when its prompt is read.
    forks: u32,
}

impl Running {
    fn tokens_to_come(&self) -> usize {
        self.written.tokens.len() - self.len
    }
}

/// Runs all requests, or until `stop` is set: then with what is done by then.
///
/// # Errors
/// What the listener says, of a request that can never be run for example, or a verb.
pub fn run(
    engine: &mut Engine<'_>,
    cache: &mut Cache,
    tokenizer: &Tokenizer,
    requests: &[Request],
    listener: &mut dyn Listener,
    stop: &AtomicBool,
) -> Result<Counts, ModelError> {
    let waiting =
        (0..requests.len()).map(|request| Waiting { request, answer: 0, state: None }).collect();
    let mut batch = Batch {
        tokenizer,
        requests,
        listener,
        waiting,
        running: Vec::new(),
        answers: requests.iter().map(|request| vec![None; request.answers as usize]).collect(),
        counts: Counts::default(),
        input: Input::default(),
    };
    let result = batch.run(engine, cache, stop);
    // Whatever happened, the cache is left without sequences of this run.
    for running in &batch.running {
        let released = cache.release(running.sequence);
        debug_assert!(released.is_ok(), "nobody else releases it");
    }
    result.map(|()| batch.counts)
}

/// The tensors of a step.
#[derive(Default)]
struct Input {
    seqs: Vec<(SeqHandle, u32)>,
    tokens: Vec<u32>,
    wanted: Vec<usize>,
    /// Which of the running ones get a token. `[wanted]`
    who: Vec<usize>,
}

struct Batch<'a> {
    tokenizer: &'a Tokenizer,
    requests: &'a [Request],
    listener: &'a mut dyn Listener,
    waiting: VecDeque<Waiting>,
    /// In the order in which they began.
    running: Vec<Running>,
    answers: Vec<Vec<Option<Answer>>>,
    counts: Counts,
    input: Input,
}

impl Batch<'_> {
    fn run(
        &mut self,
        engine: &mut Engine<'_>,
        cache: &mut Cache,
        stop: &AtomicBool,
    ) -> Result<(), ModelError> {
        let vocab = self.tokenizer.len();
        loop {
            self.admit(cache)?;
            if self.running.is_empty() {
                return Ok(());
            }
            if stop.load(Ordering::Relaxed) {
                self.counts.interrupted = true;
                return Ok(());
            }
            self.counts.peak_running = self.counts.peak_running.max(self.running.len());
            self.fill_input(cache);
            let Input { seqs, tokens, wanted, .. } = &self.input;
            let began = Instant::now();
            let logits = match engine.step(cache, StepInput { seqs, tokens, wanted }) {
                Ok(logits) => logits,
                Err(ModelError::Cache(error @ CacheError::PoolExhausted { .. })) => {
                    if self.preempt(cache) {
                        continue;
                    }
                    return Err(error.into());
                }
                Err(error) => return Err(error),
            };
            let seconds = began.elapsed().as_secs_f64();
            self.advance(seconds);
            let who = std::mem::take(&mut self.input.who);
            let mut chosen = Vec::with_capacity(who.len());
            for (logits, index) in logits.chunks_exact(vocab).zip(&who) {
                self.fork(cache, *index, logits, &mut chosen)?;
            }
            self.input.who = who;
            self.take(cache, &chosen)?;
        }
    }

    /// Notes that a step of so many seconds was committed.
    fn advance(&mut self, seconds: f64) {
        self.counts.steps += 1;
        let (mut read, mut rows) = (0, 0);
        for (seq, count) in &self.input.seqs {
            if let Some(one) = self.running.iter_mut().find(|one| one.sequence == *seq) {
                let prompt = self.requests[one.request].prompt.len();
                read += prompt.saturating_sub(one.len).min(*count as usize);
                rows += *count as usize;
                one.len += *count as usize;
            }
        }
        let [read, rows] = [read, rows].map(|rows| u32::try_from(rows).unwrap_or(u32::MAX));
        self.counts.reading_s += seconds * f64::from(read) / f64::from(rows.max(1));
    }

    /// Lets waiting answers in, the first first, as long as there is room.
    fn admit(&mut self, cache: &mut Cache) -> Result<(), ModelError> {
        while let Some(first) = self.waiting.front() {
            let request = &self.requests[first.request];
            if self.is_being_read(cache, &request.prompt) {
                return Ok(());
            }
            let max_seq_len = cache.plan().limits.max_seq_len as usize;
            let limit = max_seq_len.min(request.prompt.len() + request.max_tokens as usize);
            let prompt = first.state.as_ref().map_or(&request.prompt, |state| &state.tokens);
            let options = BeginOptions {
                // A prompt that is too long is refused by the setting, not by what follows from it.
                max_len: (prompt.len() <= limit).then(|| u32::try_from(limit).unwrap_or(u32::MAX)),
                ..BeginOptions::default()
            };
            let begun = match cache.begin(prompt, options) {
                Ok(begun) => begun,
                Err(
                    CacheError::NoSeqSlot { .. }
                    | CacheError::NotAdmitted { .. }
                    | CacheError::BatchUnderWay { .. },
                ) if !self.running.is_empty() => return Ok(()),
                Err(
                    error @ (CacheError::SequenceTooLong { .. } | CacheError::NeverFits { .. }),
                ) => {
                    let request = first.request;
                    self.waiting.retain(|waiting| waiting.request != request);
                    self.counts.refused += 1;
                    self.listener.refused(request, error)?;
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            let Some(Waiting { request: index, answer, state }) = self.waiting.pop_front() else {
                return Ok(());
            };
            let is_new = state.is_none();
            let written =
                state.unwrap_or_else(|| Box::new(Written::new(&request.prompt, begun.cached_len)));
            if is_new {
                self.counts.prompt_tokens += request.prompt.len() as u64;
                self.counts.cached_tokens += u64::from(begun.cached_len);
            }
            self.running.push(Running {
                request: index,
                answer,
                sequence: begun.sequence,
                len: begun.cached_len as usize,
                limit,
                written,
                forks: if is_new && answer == 0 { request.answers.saturating_sub(1) } else { 0 },
            });
        }
        Ok(())
    }

    /// Whether an answer that still reads its prompt will leave more of this one in the cache than
    /// it has by now: whole blocks of the tokens that both begin with. It is worth waiting for,
    /// because reading takes as long for one of them after the other as for both at once.
    fn is_being_read(&self, cache: &Cache, prompt: &[u32]) -> bool {
        let plan = cache.plan();
        let block = plan.tokens_per_block as usize;
        plan.reuse.is_on()
            && self.running.iter().filter(|one| one.tokens_to_come() > 1).any(|one| {
                let pairs = one.written.tokens.iter().zip(prompt);
                let common = pairs.take_while(|(a, b)| a == b).count();
                one.len < common / block * block
            })
    }

    /// Makes the tensors of the next step: those that write first, then those that read.
    fn fill_input(&mut self, cache: &Cache) {
        let limits = &cache.plan().limits;
        let Input { seqs, tokens, wanted, who } = &mut self.input;
        seqs.clear();
        tokens.clear();
        wanted.clear();
        who.clear();
        let mut room = limits.max_batch_tokens as usize;
        let writes = |one: &Running| one.tokens_to_come() == 1;
        let (first, then): (Vec<_>, Vec<_>) =
            (0..self.running.len()).partition(|index| writes(&self.running[*index]));
        for index in first.into_iter().chain(then) {
            let one = &self.running[index];
            let count = one.tokens_to_come().min(room).min(limits.max_step_tokens as usize);
            if count == 0 {
                break;
            }
            room -= count;
            seqs.push((one.sequence, u32::try_from(count).unwrap_or(u32::MAX)));
            tokens.extend_from_slice(&one.written.tokens[one.len..one.len + count]);
            if one.len + count == one.written.tokens.len() {
                wanted.push(tokens.len() - 1);
                who.push(index);
            }
        }
    }

    /// The answer that began last gives its blocks back and waits. Whether there was one.
    fn preempt(&mut self, cache: &mut Cache) -> bool {
        let Some(preempted) = cache.preempt_youngest() else { return false };
        let youngest = self.running.iter().position(|one| one.sequence == preempted.sequence);
        let Some(youngest) = youngest else { return false };
        let Running { request, answer, written, forks, .. } = self.running.remove(youngest);
        self.counts.preemptions += 1;
        // Its forks are not made yet: it makes them when it has read its prompt again, as if new.
        let state = (forks == 0).then_some(written);
        if state.is_none() {
            self.counts.prompt_tokens -= self.requests[request].prompt.len() as u64;
        }
        self.waiting.push_front(Waiting { request, answer, state });
        true
    }

    /// Chooses the token of an answer, and of those that are forked from it.
    fn fork(
        &mut self,
        cache: &mut Cache,
        index: usize,
        logits: &[f32],
        chosen: &mut Vec<(SeqHandle, u32)>,
    ) -> Result<(), ModelError> {
        let one = &self.running[index];
        let (request, forks) = (one.request, std::mem::take(&mut self.running[index].forks));
        let one = &self.running[index];
        let sampling = self.requests[request].sampling;
        let position = u32::try_from(one.written.tokens.len()).unwrap_or(u32::MAX);
        chosen.push((one.sequence, sampling.choose(logits, one.answer, position)));
        let (source, limit) = (one.sequence, one.limit);
        for answer in (1..=forks).rev() {
            let prompt = &self.requests[request].prompt;
            match cache.fork(source) {
                Ok(sequence) => {
                    chosen.push((sequence, sampling.choose(logits, answer, position)));
                    self.counts.prompt_tokens += prompt.len() as u64;
                    self.counts.cached_tokens += prompt.len() as u64;
                    self.running.push(Running {
                        request,
                        answer,
                        sequence,
                        len: prompt.len(),
                        limit,
                        written: Box::new(Written::new(prompt, position)),
                        forks: 0,
                    });
                }
                Err(
                    CacheError::NoSeqSlot { .. }
                    | CacheError::NotAdmitted { .. }
                    | CacheError::BatchUnderWay { .. },
                ) => self.waiting.push_front(Waiting { request, answer, state: None }),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Gives the answers their tokens, and ends those that are done.
    fn take(&mut self, cache: &mut Cache, chosen: &[(SeqHandle, u32)]) -> Result<(), ModelError> {
        for (sequence, token) in chosen {
            let Some(index) = self.running.iter().position(|one| one.sequence == *sequence) else {
                continue;
            };
            self.counts.new_tokens += 1;
            let one = &mut self.running[index];
            let request = &self.requests[one.request];
            let finish = one.written.push(self.tokenizer, request, one.limit, *token);
            if let Some(text) = one.written.tell(&request.stop, finish.is_some()) {
                self.listener.text(one.request, one.answer, text);
            }
            let Some(finish) = finish else { continue };
            let Running { request, answer, sequence, written, .. } = self.running.remove(index);
            cache.release(sequence)?;
            let prompt = self.requests[request].prompt.len();
            let Written { mut tokens, text, cached_tokens, .. } = *written;
            let tokens = tokens.split_off(prompt);
            let done = Answer { text, tokens, finish, cached_tokens };
            self.answers[request][answer as usize] = Some(done);
            if self.answers[request].iter().all(Option::is_some) {
                let answers = std::mem::take(&mut self.answers[request]);
                self.listener.done(request, answers.into_iter().flatten().collect())?;
            }
        }
        Ok(())
    }
}
