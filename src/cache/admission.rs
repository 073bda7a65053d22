//! `begin`: who gets in.
//!
//! One function, [`Plan::blocks_for`](crate::plan::Plan::blocks_for), says how many blocks a
//! sequence may come to hold. The plan sizes the pool with it, `check_admission` estimates with
//! it, and `begin` promises with it, so the estimate and the act cannot differ (P3). What is held
//! plus what is still promised is the same number from begin to release.
//!
//! What a prompt finds in the cache counts once: a cached block that it claims is not available to
//! anyone any more, and one that others hold costs nothing until it must be copied, which is
//! promised too (see `pool/record.rs`, "What sharing owes").

use super::begin::{BeginOptions, Begun, Hit};
use super::claim::Room;
use super::reuse::Found;
use super::{Cache, SeqHandle, group_idx};
use crate::config::Admission;
use crate::error::CacheError;
use crate::pool::BlockStore;

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
    hit: Hit,
}

/// A reservation that was neither begun nor cancelled.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReservationRefused {
    /// It is another cache's: here it is again, for that cache.
    #[error("the reservation belongs to another cache; begin or cancel it there")]
    Foreign(Reservation),
    /// `cancel_reservations` has given its place back.
    #[error("the reservation has been cancelled")]
    Cancelled,
}

impl Reservation {
    /// The sequence that it will be: not to be used before it is begun.
    pub(crate) const fn sequence(&self) -> SeqHandle {
        self.begun.sequence
    }

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
        let (limit, found) = self.admit(prompt, options, false)?;
        Ok(Estimate { cached_len: found.len, limit })
    }

    /// Keeps a place for a sequence, if `begin` would succeed now: nobody can take it before
    /// [`Cache::begin_reserved`]. Under static-batch it is a place in the batch that is being made
    /// up, which it keeps when that runs, and in the next one when that has ended. Under
    /// max-utilization it is the first to go when [`Cache::preempt_youngest`] is called.
    ///
    /// # Errors
    /// As [`Cache::begin`].
    pub fn can_admit(
        &mut self,
        prompt: &[u32],
        options: &BeginOptions,
    ) -> Result<Reservation, CacheError> {
        let (begun, hit) = self.begin_uncounted(prompt, options)?;
        self.seqs.set_reserved(begun.sequence.slot, true);
        Ok(Reservation { begun, hit })
    }

    /// Begins the sequence that a place was kept for.
    ///
    /// # Errors
    /// [`ReservationRefused`]: a reservation of another cache, which comes back with the error, or
    /// one that [`Cache::cancel_reservations`] has cancelled.
    pub fn begin_reserved(
        &mut self,
        reservation: Reservation,
    ) -> Result<Begun, ReservationRefused> {
        self.abandon_step();
        let (slot, Reservation { begun, hit }) = self.check_reservation(reservation)?;
        self.begun += 1;
        self.seqs.set_reserved(slot, false);
        // It is as old as its beginning, not as its reservation.
        self.seqs.record_mut(slot).begun = self.begun;
        self.note_begun(&hit);
        Ok(begun)
    }

    /// Gives a kept place back.
    ///
    /// # Errors
    /// As [`Cache::begin_reserved`].
    pub fn cancel_reservation(
        &mut self,
        reservation: Reservation,
    ) -> Result<(), ReservationRefused> {
        self.abandon_step();
        let (slot, _) = self.check_reservation(reservation)?;
        self.release_slot(slot);
        Ok(())
    }

    /// Gives back every place that is kept, also those whose [`Reservation`] was lost: it holds
    /// room until it is begun or cancelled, and dropping it does neither. Gives how many they were.
    pub fn cancel_reservations(&mut self) -> u32 {
        self.abandon_step();
        let mut cancelled = 0;
        for slot in 0..self.plan.seq_slots {
            if self.seqs.record(slot).reserved {
                self.release_slot(slot);
                cancelled += 1;
            }
        }
        cancelled
    }

    /// How many places are kept.
    #[must_use]
    pub const fn reservations(&self) -> u32 {
        self.seqs.reserved()
    }

    /// The slot that a reservation keeps.
    fn check_reservation(
        &self,
        reservation: Reservation,
    ) -> Result<(u32, Reservation), ReservationRefused> {
        match self.seqs.check_reserved(reservation.begun.sequence) {
            Ok(slot) => Ok((slot, reservation)),
            Err(CacheError::ForeignHandle) => Err(ReservationRefused::Foreign(reservation)),
            Err(_) => Err(ReservationRefused::Cancelled),
        }
    }

    /// Counts a refusal by its cause.
    pub(super) fn note_refusal(&mut self, error: &CacheError) {
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
    /// finds in the cache. Where there is no room to copy a part of a block, it goes without that
    /// part.
    pub(super) fn admit(
        &self,
        prompt: &[u32],
        options: &BeginOptions,
        in_batch: bool,
    ) -> Result<(u32, Found), CacheError> {
        let limit = self.check_request(prompt.len() as u64, options)?;
        // At most `max_len`, a u32.
        let prompt_len = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        let mut found = self.find(prompt, &options.namespace);
        let checked = self.check_blocks(prompt_len, limit, &found, in_batch);
        if matches!(checked, Err(CacheError::NotAdmitted { .. })) && found.partial.is_some() {
            found = self.find_whole(prompt, &options.namespace);
            self.check_blocks(prompt_len, limit, &found, in_batch)?;
        } else {
            checked?;
        }
        if self.seqs.free.is_empty() {
            return Err(CacheError::NoSeqSlot { seq_slots: self.plan.seq_slots });
        }
        if self.batch_closed && self.seqs.alive() > 0 {
            return Err(CacheError::BatchUnderWay { live: self.seqs.alive() });
        }
        Ok((limit, found))
    }

    /// Checks that there is room for a sequence of `len` tokens that takes nothing from others.
    pub(super) fn admit_without_prefix(&self, len: u32, limit: u32) -> Result<(), CacheError> {
        self.check_blocks(len, limit, &Found::NOTHING, false)?;
        if self.seqs.free.is_empty() {
            return Err(CacheError::NoSeqSlot { seq_slots: self.plan.seq_slots });
        }
        if self.batch_closed && self.seqs.alive() > 0 {
            return Err(CacheError::BatchUnderWay { live: self.seqs.alive() });
        }
        Ok(())
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
        // Where there are no blocks to keep, ranges would mean nothing.
        let index = self.reuse.as_ref().and_then(|reuse| reuse.index.as_ref());
        if !options.retention.is_empty() && index.is_none() {
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
    fn check_blocks(
        &self,
        prompt_len: u32,
        limit: u32,
        found: &Found,
        in_batch: bool,
    ) -> Result<(), CacheError> {
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
            let spare = i64::from(store.unpromised()) - wanted;
            let left = i64::from(store.available()) - i64::from(claims.cached);
            let room = if in_batch { Room::Spare(spare) } else { Room::Left(left) };
            if spare < 0 || !self.part_fits(group, found, room) {
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
            let unshared = self.first_unshared(source);
            for (at, block) in self.held_blocks(group, source) {
                if at >= unshared {
                    wanted += 1;
                    continue;
                }
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
