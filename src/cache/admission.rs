//! `begin`: who gets in.
//!
//! One function, [`Plan::blocks_for`](crate::plan::Plan::blocks_for), says how many blocks a
//! sequence may come to hold. The plan sizes the pool with it, `check_admission` estimates with
//! it, and `begin` promises with it, so the estimate and the act cannot differ (P3). What is held
//! plus what is still promised is the same number from begin to release.
//!
//! What a prompt finds in the cache counts once: a cached block that it claims is not available to
//! anyone any more, and one that others hold costs nothing until it must be copied, which is
//! promised too (see `pool/block_store.rs`, "What sharing owes").

use super::prefix::Namespace;
use super::retention::Retentions;
use super::reuse::{Cut, Found};
use super::{Cache, SeqHandle, group_idx};
use crate::config::Admission;
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
    /// How long its blocks are kept for others.
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

/// What `begin` would give now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// Tokens that are in the cache already.
    pub cached_len: u32,
    /// Tokens that the sequence may have.
    pub limit: u32,
}

/// A place that is kept for a sequence: everything that `begin` takes is taken. Turn it into the
/// sequence with [`Cache::begin_reserved`], or give it back with [`Cache::cancel_reservation`].
#[must_use = "it holds a sequence slot and blocks until it is begun or cancelled"]
#[derive(Debug, PartialEq, Eq)]
pub struct Reservation {
    begun: Begun,
}

impl Reservation {
    /// Tokens of the prompt that are in the cache.
    #[must_use]
    pub const fn cached_len(&self) -> u32 {
        self.begun.cached_len
    }

    /// Tokens that the sequence may have.
    #[must_use]
    pub const fn limit(&self) -> u32 {
        self.begun.limit
    }
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
}

const _: () = assert!(size_of::<Pending>() as u64 == PENDING_BYTES);

impl Cache {
    /// What `begin` with this prompt would give now. Changes nothing.
    ///
    /// # Errors
    /// As [`Cache::begin`].
    pub fn check_admission(
        &self,
        prompt: &[u32],
        options: &BeginOptions,
    ) -> Result<Estimate, CacheError> {
        let (limit, found) = self.admit(prompt, options)?;
        Ok(Estimate { cached_len: found.len, limit })
    }

    /// Keeps a place for a sequence, if `begin` would succeed now: nobody can take it before
    /// [`Cache::begin_reserved`].
    ///
    /// # Errors
    /// As [`Cache::begin`].
    pub fn can_admit(
        &mut self,
        prompt: &[u32],
        options: &BeginOptions,
    ) -> Result<Reservation, CacheError> {
        let begun = self.begin(prompt, *options)?;
        self.seqs.record_mut(begun.sequence.slot).reserved = true;
        Ok(Reservation { begun })
    }

    /// Begins the sequence that a place was kept for.
    ///
    /// # Errors
    /// A reservation of another cache.
    #[expect(clippy::needless_pass_by_value, reason = "a reservation is used once")]
    pub fn begin_reserved(&mut self, reservation: Reservation) -> Result<Begun, CacheError> {
        let slot = self.seqs.check(reservation.begun.sequence)?;
        self.begun += 1;
        let record = self.seqs.record_mut(slot);
        record.reserved = false;
        // It is as old as its beginning, not as its reservation.
        record.begun = self.begun;
        Ok(reservation.begun)
    }

    /// Gives a kept place back.
    ///
    /// # Errors
    /// A reservation of another cache.
    #[expect(clippy::needless_pass_by_value, reason = "a reservation is used once")]
    pub fn cancel_reservation(&mut self, reservation: Reservation) -> Result<(), CacheError> {
        self.release(reservation.begun.sequence)
    }

    /// Begins a sequence. Under guaranteed admission every block that it may come to need is
    /// promised to it here. Under max-utilization nothing is: it is only checked that the prompt's
    /// blocks are free now, so sequences that begin one after the other may be promised the same
    /// ones, and a step may find too few. Either way a sequence that could not finish in an empty
    /// pool is refused, so give `max_len` where it is known.
    ///
    /// What the cache has of the prompt is the sequence's from here on, without computing.
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
        self.abandon_step();
        let (mut begun, Pending { mut found, .. }) = self.begin_claimed(prompt, &options)?;
        let slot = begun.sequence.slot;
        let finished = self
            .settle_partial(slot, &mut found)
            .and_then(|()| self.finish_begin(prompt, &options, slot, &found));
        if let Err(error) = finished {
            self.release(begun.sequence)?;
            return Err(error);
        }
        begun.cached_len = found.len;
        self.note_peaks();
        Ok(begun)
    }

    /// Begins several sequences, all or none. What each of them finds in the cache is claimed
    /// before anything is evicted for any of them. `out` gets one entry for each, in order; it
    /// must have room for them.
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
            match self.begin_claimed(prompt, options) {
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
            self.note_refusal(&refused.source);
            return Err(refused);
        }
        if let Err(failed) = self.finish_batch(wanted, out) {
            // The device failed: give back what there is.
            while let Some(begun) = out.pop() {
                let _ = self.release(begun.sequence);
            }
            return Err(failed);
        }
        self.note_peaks();
        Ok(())
    }

    /// Finishes a batch of which every sequence has claimed what it found.
    fn finish_batch(
        &mut self,
        wanted: &[(&[u32], BeginOptions)],
        out: &mut [Begun],
    ) -> Result<(), BatchRefused> {
        // Copies first, the last first: so a block that several go on with in part has one
        // claimant left when the first one looks whether it can take it over.
        for (index, begun) in out.iter_mut().enumerate().rev() {
            let slot = begun.sequence.slot;
            let mut found = self.pending[slot as usize].found;
            self.settle_partial(slot, &mut found)
                .map_err(|source| BatchRefused { index, source })?;
            begun.cached_len = found.len;
            self.pending[slot as usize].found = found;
        }
        // Then the slots, the first first: a slot that one copies from may be another's.
        for (index, ((prompt, options), begun)) in wanted.iter().zip(&*out).enumerate() {
            let slot = begun.sequence.slot;
            let found = self.pending[slot as usize].found;
            self.finish_begin(prompt, options, slot, &found)
                .map_err(|source| BatchRefused { index, source })?;
        }
        Ok(())
    }

    /// Takes what a new sequence matched in part; where there was no block for that, it begins
    /// with its whole blocks.
    fn settle_partial(&mut self, slot: u32, found: &mut Found) -> Result<(), CacheError> {
        if self.take_partial(slot)? {
            return Ok(());
        }
        *found = found.without_partial(self.plan.tokens_per_block);
        if found.donor.is_some() {
            // A donor that fits the longer prefix need not fit the shorter one.
            *found = Found { cut: Cut::Donor, ..Found::NOTHING };
            for group in 0..self.plan.groups.len() {
                if self.pool.store(group).is_some() {
                    self.give_back_from(group, slot, 0);
                }
            }
            if let Some(reuse) = &mut self.reuse {
                reuse.seqs[slot as usize].published = 0;
            }
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
    fn begin_claimed(
        &mut self,
        prompt: &[u32],
        options: &BeginOptions,
    ) -> Result<(Begun, Pending), CacheError> {
        let (limit, found) = match self.admit(prompt, options) {
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
            reuse.seqs[slot as usize].keys = keys.unwrap_or(super::prefix::ChainKeys::NONE);
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
        self.claim_partial(slot, &found);
        Ok((Begun { sequence, cached_len: found.len, limit }, Pending { found, free_at: at }))
    }

    /// Undoes [`Cache::begin_claimed`], when everything since has been undone.
    fn unbegin(&mut self, slot: u32) {
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
            let keys = std::mem::replace(&mut share.keys, super::prefix::ChainKeys::NONE);
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
    fn finish_begin(
        &mut self,
        prompt: &[u32],
        options: &BeginOptions,
        slot: u32,
        found: &Found,
    ) -> Result<(), CacheError> {
        if let Some(donor) = found.donor {
            self.take_from_donor(slot, donor)?;
        }
        let record = self.seqs.record_mut(slot);
        record.len = found.len;
        record.high_water = found.len;
        record.written = if found.donor.is_some() { record.written.max(found.len) } else { 0 };
        for group in 0..self.plan.groups.len() {
            self.live_tokens[group] += self.live_in(group, slot);
            self.set_tail(group, slot, true);
        }
        self.counters.seqs_begun += 1;
        let Some(reuse) = &mut self.reuse else { return Ok(()) };
        let known = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        let record = self.seqs.record_mut(slot);
        record.known = known;
        record.settles_late = options.lookahead_tokens > 0;
        reuse.tokens_mut(slot)[..prompt.len()].copy_from_slice(prompt);
        let share = &mut reuse.seqs[slot as usize];
        share.retentions = options.retention;
        share.lookahead = options.lookahead_tokens;
        share.retained = 0;
        if let Some(name) = reuse.names.get_mut(slot as usize) {
            name.namespace = options.namespace;
            name.epoch = reuse.epoch;
        }
        let counters = &mut self.counters;
        counters.prefix_queries += 1;
        counters.prefix_query_tokens += u64::from(known);
        counters.prefix_hit_tokens += u64::from(found.len);
        counters.prefix_hit_blocks += u64::from(found.full);
        if let Some((_, tokens)) = found.partial {
            counters.prefix_partial_hits += 1;
            counters.prefix_partial_tokens += u64::from(tokens);
        }
        counters.window_misses += u64::from(found.cut == Cut::Window);
        counters.donor_misses += u64::from(found.cut == Cut::Donor);
        Ok(())
    }

    /// Counts a refusal by its cause.
    fn note_refusal(&mut self, error: &CacheError) {
        let counters = &mut self.counters;
        match error {
            CacheError::NoSeqSlot { .. } => counters.refused_slots += 1,
            CacheError::NotAdmitted { .. } => counters.refused_blocks += 1,
            CacheError::NeverFits { .. } => counters.refused_never += 1,
            CacheError::SequenceTooLong { .. } => counters.refused_too_long += 1,
            CacheError::BatchUnderWay { .. } => counters.refused_static_batch += 1,
            _ => {}
        }
    }

    /// Checks everything about a new sequence; gives the most tokens that it may have and what it
    /// finds in the cache.
    fn admit(&self, prompt: &[u32], options: &BeginOptions) -> Result<(u32, Found), CacheError> {
        let limit = self.check_request(prompt.len() as u64, options)?;
        // At most `max_len`, a u32.
        let prompt_len = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        let found = self.find(prompt, &options.namespace);
        self.check_blocks(prompt_len, limit, &found)?;
        if self.seqs.free.is_empty() {
            return Err(CacheError::NoSeqSlot { seq_slots: self.plan.seq_slots });
        }
        if self.batch_closed && self.seqs.alive() > 0 {
            return Err(CacheError::BatchUnderWay { live: self.seqs.alive() });
        }
        Ok((limit, found))
    }

    /// Checks a request by itself; gives the most tokens that its sequence may have.
    fn check_request(&self, prompt_len: u64, options: &BeginOptions) -> Result<u32, CacheError> {
        let most = self.plan.limits.max_seq_len;
        let max_len = options.max_len.unwrap_or(most);
        if max_len > most {
            let wanted = u64::from(max_len);
            return Err(CacheError::SequenceTooLong {
                wanted,
                limit: most,
                knob: "limits.max_seq_len",
            });
        }
        if prompt_len > u64::from(max_len) {
            let knob =
                if options.max_len.is_some() { "max_len of begin" } else { "limits.max_seq_len" };
            return Err(CacheError::SequenceTooLong { wanted: prompt_len, limit: max_len, knob });
        }
        if let Some(key) = options.key.filter(|key| self.seqs.has_key(*key)) {
            return Err(CacheError::DuplicateKey { key });
        }
        if !options.retention.is_empty() && self.reuse.is_none() {
            return Err(CacheError::ReuseOff);
        }
        let windowed = self.plan.groups.iter().any(|group| group.window.is_some());
        let rewind = self.plan.limits.max_rewind_tokens;
        if windowed && options.lookahead_tokens > rewind {
            let wanted = options.lookahead_tokens;
            return Err(CacheError::LookaheadBeyondRewind { wanted, limit: rewind });
        }
        Ok(max_len.saturating_add(options.lookahead_tokens).min(most))
    }

    /// Checks that every paged group has the blocks for a new sequence. What can never be is found
    /// before what cannot be now.
    fn check_blocks(&self, prompt_len: u32, limit: u32, found: &Found) -> Result<(), CacheError> {
        let paged = || (0..self.plan.groups.len()).filter_map(|g| Some((g, self.pool.store(g)?)));
        for (group, store) in paged() {
            let whole = self.plan.blocks_for(group_idx(group), limit);
            if whole > store.total() {
                return Err(CacheError::NeverFits {
                    group: group_idx(group),
                    wanted: u64::from(whole),
                    total: u64::from(store.total()),
                });
            }
        }
        for (group, store) in paged() {
            let len = if self.guaranteed() { limit } else { prompt_len };
            let whole = self.plan.blocks_for(group_idx(group), len);
            // A block that is claimed instead of taken is cached at most once and owes at most one
            // more; so where there is room for this, there is room, and nothing need be counted.
            let most = u64::from(whole) + 2 * (u64::from(found.full) + 1);
            if most + u64::from(self.headroom(store)) <= u64::from(store.unpromised()) {
                continue;
            }
            let claims = self.claims(group, found);
            let wanted = i64::from(whole.saturating_sub(claims.held))
                + i64::from(claims.cached)
                + claims.debts
                + i64::from(self.headroom(store));
            if wanted > i64::from(BlockStore::unpromised(store)) {
                return Err(CacheError::NotAdmitted {
                    group: group_idx(group),
                    wanted: u64::try_from(wanted).unwrap_or(0),
                    available: u64::from(store.unpromised()),
                });
            }
        }
        Ok(())
    }

    /// Blocks that `begin` leaves free under max-utilization: the watermark, and after a
    /// preemption one for each sequence that runs, until one of them ends: so that whoever comes
    /// back is not the next to go.
    fn headroom(&self, store: &BlockStore) -> u32 {
        if self.plan.admission != Admission::MaxUtilization || self.seqs.alive() == 0 {
            return 0;
        }
        let watermark = self.plan.watermark_blocks.min(store.total());
        if self.preempted { watermark.max(self.seqs.alive()) } else { watermark }
    }

    /// Checks that a sequence can be forked.
    pub(super) fn check_room_for_fork(&self, source: u32) -> Result<(), CacheError> {
        for group in 0..self.plan.groups.len() {
            let Some(store) = self.pool.store(group) else { continue };
            let state = self.seqs.state(source, group);
            let per_block = self.plan.groups[group].layout.unit_tokens;
            let tail = !self.seqs.record(source).len.is_multiple_of(per_block);
            let mut wanted = i64::from(state.promised());
            for (at, block) in self.held_blocks(group, source) {
                let is_tail = tail && at + 1 == state.next;
                wanted += store.debt_change(block, 1, i32::from(is_tail), 0);
            }
            if wanted > i64::from(store.unpromised()) {
                return Err(CacheError::NotAdmitted {
                    group: group_idx(group),
                    wanted: u64::try_from(wanted).unwrap_or(0),
                    available: u64::from(store.unpromised()),
                });
            }
        }
        if self.seqs.free.is_empty() {
            return Err(CacheError::NoSeqSlot { seq_slots: self.plan.seq_slots });
        }
        Ok(())
    }
}
