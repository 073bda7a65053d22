//! `begin`: one sequence, or a batch of which all or none get in.
//!
//! A sequence goes through three parts. *Claimed*: it is checked, admitted, has its slot, its whole
//! blocks of the match and its promises, and all of that can be undone without a trace. *Settled*:
//! what it matched in part is copied or taken over. *Finished*: it has taken from its donor, and
//! knows its tokens. In a batch every sequence is claimed before the first is settled, so that
//! nothing one of them matched is evicted for another.

use super::prefix::{ChainKeys, Namespace};
use super::retention::Retentions;
use super::reuse::{Cut, Found, Reuse};
use super::{Cache, SeqHandle, group_idx};
use crate::error::{BatchRefused, CacheError};
use crate::plan::PENDING_BYTES;
use crate::pool::BlockStore;

/// How a sequence is begun.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BeginOptions {
    /// The engine's name for the sequence; no two live sequences have the same.
    pub key: Option<u64>,
    /// Tokens that the sequence may come to, prompt and output together. Default:
    /// `limits.max_seq_len`.
    pub max_len: Option<u32>,
    /// Tokens beyond `max_len` that speculative decoding may append and rewind. In a plan with
    /// windowed layers no more than `limits.max_rewind_tokens`. So many tokens at the end of the
    /// sequence are not shared yet.
    pub lookahead_tokens: u32,
    /// With whom it shares prefixes.
    pub namespace: Namespace,
    /// How long its blocks are kept for others. Refused where the plan keeps no prefixes in blocks.
    pub retention: Retentions,
}

/// What `begin` gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Begun {
    /// The sequence.
    pub sequence: SeqHandle,
    /// Tokens of the prompt that are already in the cache and need no computing: the first step
    /// appends from this position on. Never the whole prompt: the last token must be computed for
    /// its output.
    pub cached_len: u32,
    /// Tokens that the sequence may have: `max_len` and the look-ahead, as far as
    /// `limits.max_seq_len` has room for the latter.
    pub limit: u32,
}

/// Blocks that one sequence may have evicted to come to a namespace's number, at most.
const NAMES_EVICTED: u32 = 64;

/// What a sequence found when it began, to be counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hit {
    prompt_tokens: u64,
    found: Found,
}

/// A sequence of a batch that is claimed and not finished.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pending {
    found: Found,
    /// Where in the list of free slots its slot was.
    free_at: usize,
}

impl Pending {
    pub(super) const NOTHING: Self = Self { found: Found::NOTHING, free_at: 0 };

    /// Whether the sequence has taken its slot with the tokens in it.
    pub(super) fn is_take_over(&self, slot: u32) -> bool {
        self.found.donor.is_some_and(|donor| donor.slot == slot)
    }
}

const _: () = assert!(size_of::<Pending>() as u64 == PENDING_BYTES);

impl Cache {
    /// Begins a sequence. Under guaranteed admission every block that it may come to need is
    /// promised to it here. Under max-utilization nothing is: it is only checked that the prompt's
    /// blocks are free now, so sequences that begin one after the other may be promised the same
    /// ones, and a step may find too few. Either way a sequence that could not finish in an empty
    /// pool is refused, so give `max_len` where it is known.
    ///
    /// What the cache has of the prompt is the sequence's from here on, without computing: its
    /// whole blocks, and of the block behind them the tokens that match, if there is room to copy
    /// them. (For these the 32 newest continuations are compared, so behind a prompt that goes on
    /// in very many ways a match in part may be missed; one of a whole block never is.)
    ///
    /// What is cached keeps the highest priority that anyone asked for it, with the time limit that
    /// was asked for with that one: when it runs out the default is left, whatever lower priorities
    /// others asked for.
    ///
    /// # Errors
    /// - never: [`CacheError::SequenceTooLong`], [`CacheError::NeverFits`],
    ///   [`CacheError::LookaheadBeyondRewind`];
    /// - not now: [`CacheError::NoSeqSlot`], [`CacheError::NotAdmitted`],
    ///   [`CacheError::BatchUnderWay`];
    /// - [`CacheError::DuplicateKey`].
    ///
    /// Nothing changes then.
    pub fn begin(&mut self, prompt: &[u32], options: BeginOptions) -> Result<Begun, CacheError> {
        let (begun, hit) = self.begin_uncounted(prompt, &options)?;
        self.note_begun(&hit);
        Ok(begun)
    }

    /// `begin`, but for what the counters say of it.
    pub(super) fn begin_uncounted(
        &mut self,
        prompt: &[u32],
        options: &BeginOptions,
    ) -> Result<(Begun, Hit), CacheError> {
        self.abandon_step();
        let (begun, pending) = self.begin_claimed(prompt, options, false)?;
        let Pending { found, free_at } = pending;
        let slot = begun.sequence.slot;
        let finished = self
            .take_partial(slot)
            .and_then(|()| self.finish_begin(prompt, options, slot, &found))
            .and_then(|()| Ok(self.pool.device.submit()?))
            .and_then(|()| self.scrub_begun_slot(slot, found.len))
            .and_then(|()| self.check_scrubbed());
        if let Err(error) = finished {
            self.abandon_begun(begun.sequence, free_at);
            return Err(error);
        }
        self.note_peaks();
        self.scrub_freed();
        Ok((begun, Hit { prompt_tokens: prompt.len() as u64, found }))
    }

    /// Begins several sequences, all or none. What each of them finds in the cache is claimed
    /// before anything is evicted for any of them. They do not share with each other what none of
    /// them has computed yet. `out` gets one entry for each, in order; it must have room for them.
    ///
    /// # Errors
    /// [`BatchRefused`] names the first that was refused, and why, as [`Cache::begin`]; nothing
    /// changes then.
    pub fn begin_batch(
        &mut self,
        wanted: &[(&[u32], BeginOptions)],
        out: &mut Vec<Begun>,
    ) -> Result<(), BatchRefused> {
        self.abandon_step();
        out.clear();
        let room = out.capacity();
        if room < wanted.len() {
            let source = CacheError::WrongShape {
                what: "the capacity of out",
                got: room,
                expected: wanted.len(),
                shape: "[sequences]",
            };
            return Err(BatchRefused { index: room, source });
        }
        self.mark_donors(wanted, true);
        let mut refused = None;
        for (index, (prompt, options)) in wanted.iter().enumerate() {
            match self.begin_claimed(prompt, options, true) {
                Ok((begun, pending)) => {
                    self.pending[begun.sequence.slot as usize] = pending;
                    out.push(begun);
                }
                Err(source) => {
                    refused = Some(BatchRefused { index, source });
                    break;
                }
            }
        }
        self.mark_donors(wanted, false);
        if let Some(refused) = refused {
            while let Some(begun) = out.pop() {
                self.unbegin(begun.sequence.slot);
            }
            return Err(refused);
        }
        if let Err(failed) = self.finish_batch(wanted, out) {
            // The device failed: give back what there is.
            while let Some(begun) = out.pop() {
                let free_at = self.pending[begun.sequence.slot as usize].free_at;
                self.abandon_begun(begun.sequence, free_at);
            }
            return Err(failed);
        }
        self.note_peaks();
        self.scrub_freed();
        Ok(())
    }

    /// Finishes a batch of which every sequence has claimed what it found.
    fn finish_batch(
        &mut self,
        wanted: &[(&[u32], BeginOptions)],
        out: &[Begun],
    ) -> Result<(), BatchRefused> {
        // Copies first, the last first: so a block that several go on with in part has one
        // claimant left when the first one looks whether it can take it over.
        for (index, begun) in out.iter().enumerate().rev() {
            self.take_partial(begun.sequence.slot)
                .map_err(|source| BatchRefused { index, source })?;
        }
        // Then the slots, the first first: a slot that one copies from may be another's.
        for (index, ((prompt, options), begun)) in wanted.iter().zip(out).enumerate() {
            let slot = begun.sequence.slot;
            let found = self.pending[slot as usize].found;
            self.finish_begin(prompt, options, slot, &found)
                .map_err(|source| BatchRefused { index, source })?;
        }
        let index = out.len().saturating_sub(1);
        self.pool.device.submit().map_err(|error| BatchRefused { index, source: error.into() })?;
        // Only now: a slot that one begins in may be another's donor.
        for (index, begun) in out.iter().enumerate() {
            let slot = begun.sequence.slot;
            let len = self.pending[slot as usize].found.len;
            self.scrub_begun_slot(slot, len).map_err(|source| BatchRefused { index, source })?;
        }
        self.check_scrubbed().map_err(|source| BatchRefused { index, source })?;
        for ((prompt, _), begun) in wanted.iter().zip(out) {
            let found = self.pending[begun.sequence.slot as usize].found;
            self.note_begun(&Hit { prompt_tokens: prompt.len() as u64, found });
        }
        Ok(())
    }

    /// Marks the slots that the sequences of a batch would copy from, so that none of them is
    /// taken for another while there is a choice.
    fn mark_donors(&mut self, wanted: &[(&[u32], BeginOptions)], mark: bool) {
        if !self.reuse.as_ref().is_some_and(|reuse| reuse.has_donors) {
            return;
        }
        for (prompt, options) in wanted {
            let donor = if mark { self.find(prompt, &options.namespace).donor } else { None };
            let Some(reuse) = &mut self.reuse else { return };
            match donor {
                Some(donor) => reuse.seqs[donor.slot as usize].wanted = true,
                None if !mark => reuse.seqs.iter_mut().for_each(|share| share.wanted = false),
                None => {}
            }
        }
    }

    /// The part of `begin` that can be refused, and undone: checks, claims, promises.
    pub(super) fn begin_claimed(
        &mut self,
        prompt: &[u32],
        options: &BeginOptions,
        in_batch: bool,
    ) -> Result<(Begun, Pending), CacheError> {
        let (limit, found) = match self.admit(prompt, options, in_batch) {
            Ok(admitted) => admitted,
            Err(error) => {
                self.note_refusal(&error);
                return Err(error);
            }
        };
        let no_slot = CacheError::NoSeqSlot { seq_slots: self.plan.seq_slots };
        let at = self.choose_slot(found.donor).ok_or(no_slot)?;
        let sequence = self.seqs.take_at(at, options.key, limit);
        let slot = sequence.slot;
        self.begun += 1;
        self.seqs.record_mut(slot).begun = self.begun;
        if let Some(reuse) = &mut self.reuse {
            let keys = reuse.index.as_mut().map(|index| index.take_keys(&options.namespace));
            reuse.seqs[slot as usize].keys = keys.unwrap_or(ChainKeys::NONE);
        }
        self.claim(slot, &found);
        if self.guaranteed() {
            for group in 0..self.plan.groups.len() {
                let quota = self.plan.blocks_for(group_idx(group), limit);
                let state = self.seqs.state_mut(slot, group);
                state.quota = quota;
                let promised = state.promised();
                if let Some(store) = self.pool.store_mut(group) {
                    let promised = store.promise(promised);
                    debug_assert!(promised.is_ok(), "`admit` has counted them");
                }
            }
        }
        self.claim_partial(slot, &found, in_batch);
        Ok((Begun { sequence, cached_len: found.len, limit }, Pending { found, free_at: at }))
    }

    /// Undoes [`Cache::begin_claimed`], when everything since has been undone.
    pub(super) fn unbegin(&mut self, slot: u32) {
        self.unclaim_partial(slot);
        for group in 0..self.plan.groups.len() {
            let promised = self.seqs.state(slot, group).promised();
            if let Some(store) = self.pool.store_mut(group) {
                store.unpromise(promised);
            }
        }
        self.unclaim(slot);
        if let Some(reuse) = &mut self.reuse {
            let share = &mut reuse.seqs[slot as usize];
            let keys = std::mem::replace(&mut share.keys, ChainKeys::NONE);
            share.published = 0;
            if let Some(index) = &mut reuse.index {
                index.drop_keys(&keys);
            }
        }
        self.begun -= 1;
        let free_at = self.pending[slot as usize].free_at;
        self.seqs.untake(slot, free_at);
    }

    /// The part of `begin` that follows when all are in: takes from donors, remembers.
    pub(super) fn finish_begin(
        &mut self,
        prompt: &[u32],
        options: &BeginOptions,
        slot: u32,
        found: &Found,
    ) -> Result<(), CacheError> {
        self.note_dirty(slot);
        if let Some(donor) = found.donor {
            self.take_from_donor(slot, donor)?;
        }
        let record = self.seqs.record_mut(slot);
        record.len = found.len;
        record.high_water = found.len;
        record.written = if found.donor.is_some() { record.written.max(found.len) } else { 0 };
        for group in 0..self.plan.groups.len() {
            if found.donor.is_none() || self.pool.store(group).is_some() {
                self.seqs.state_mut(slot, group).holds_from = 0;
            }
            self.live_tokens[group] += self.live_in(group, slot);
            self.set_tail(group, slot, true);
        }
        self.seqs.record_mut(slot).lookahead = options.lookahead_tokens;
        let Some(reuse) = &mut self.reuse else { return Ok(()) };
        let known = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        self.seqs.record_mut(slot).known = known;
        reuse.tokens_mut(slot)[..prompt.len()].copy_from_slice(prompt);
        let share = &mut reuse.seqs[slot as usize];
        share.retentions = options.retention;
        share.retained = 0;
        if let Some(name) = reuse.names.get_mut(slot as usize) {
            name.namespace = options.namespace;
            name.epoch = Some(reuse.epoch);
        }
        self.name_sequence(slot, &options.namespace);
        self.keep_claimed(slot, found.full);
        Ok(())
    }

    /// Tries again to give a sequence its namespaces, if all numbers were in use when it was
    /// admitted: the oldest blocks go, until one of them was the last of its namespace.
    pub(super) fn name_sequence(&mut self, slot: u32, namespace: &Namespace) {
        let Some(lead) = self.lead() else { return };
        let mut evicted = 0;
        while self.reuse.as_ref().is_some_and(|r| r.seqs[slot as usize].keys.first == 0) {
            let Some(victim) = self.pool.store(lead).and_then(BlockStore::victim) else { break };
            if evicted == NAMES_EVICTED {
                break;
            }
            evicted += 1;
            self.evict_victim(lead, victim);
            let Some(Reuse { index: Some(index), seqs, .. }) = &mut self.reuse else { return };
            seqs[slot as usize].keys = index.take_keys(namespace);
        }
        let unnamed = self.reuse.as_ref().is_some_and(|r| r.seqs[slot as usize].keys.first == 0);
        self.counters.namespaces_refused += u64::from(unnamed);
    }

    /// Counts a sequence that has begun, and what it found.
    pub(super) fn note_begun(&mut self, hit: &Hit) {
        let Hit { prompt_tokens, found } = hit;
        let counters = &mut self.counters;
        counters.seqs_begun += 1;
        if self.reuse.is_none() {
            return;
        }
        counters.prefix_queries += 1;
        counters.prefix_query_tokens += prompt_tokens;
        counters.prefix_hit_tokens += u64::from(found.len);
        counters.prefix_hit_blocks += u64::from(found.full);
        if let Some((_, tokens)) = found.partial {
            counters.prefix_partial_hits += 1;
            counters.prefix_partial_tokens += u64::from(tokens);
        }
        counters.window_misses += u64::from(found.cut == Cut::Window);
        counters.donor_misses += u64::from(found.cut == Cut::Donor);
    }
}
