//! `begin`: who gets in.
//!
//! One function, [`Plan::blocks_for`](crate::plan::Plan::blocks_for), says how many blocks a
//! sequence may come to hold. The plan sizes the pool with it, `can_admit` estimates with it, and
//! `begin` promises with it, so the estimate and the act cannot differ (P3). What is held plus
//! what is still promised is the same number from begin to release.

use super::{Cache, SeqHandle, group_idx};
use crate::error::CacheError;
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
    /// windowed layers no more than `limits.max_rewind_tokens`.
    pub lookahead_tokens: u32,
}

/// What `begin` gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Begun {
    /// The sequence.
    pub sequence: SeqHandle,
    /// Tokens of the prompt that are already in the cache and need no computing.
    pub cached_len: u32,
    /// Tokens that the sequence may have: `max_len` and the look-ahead, as far as
    /// `limits.max_seq_len` has room for the latter.
    pub limit: u32,
}

impl Cache {
    /// Whether `begin` with a prompt of this length would succeed now. Changes nothing.
    ///
    /// # Errors
    /// As [`Cache::begin`].
    pub fn can_admit(&self, prompt_len: u32, options: &BeginOptions) -> Result<(), CacheError> {
        self.admit(u64::from(prompt_len), options).map(|_limit| ())
    }

    /// Begins a sequence. Under guaranteed admission every block that it may come to need is
    /// promised to it here. Under max-utilization nothing is: it is only checked that the prompt's
    /// blocks are free now, so sequences that begin one after the other may be promised the same
    /// ones, and a step may find too few. Either way a sequence that could not finish in an empty
    /// pool is refused, so give `max_len` where it is known.
    ///
    /// # Errors
    /// - never: [`CacheError::SequenceTooLong`], [`CacheError::NeverFits`],
    ///   [`CacheError::LookaheadBeyondRewind`];
    /// - not now: [`CacheError::NoSeqSlot`], [`CacheError::NotAdmitted`];
    /// - [`CacheError::DuplicateKey`].
    ///
    /// Nothing changes then.
    pub fn begin(&mut self, prompt: &[u32], options: BeginOptions) -> Result<Begun, CacheError> {
        self.abandon_step();
        let limit = self.admit(prompt.len() as u64, &options)?;
        let no_slot = CacheError::NoSeqSlot { seq_slots: self.plan.seq_slots };
        let sequence = self.seqs.take(options.key, limit).ok_or(no_slot)?;
        if self.guaranteed() {
            for group in 0..self.plan.groups.len() {
                let quota = self.plan.blocks_for(group_idx(group), limit);
                self.seqs.state_mut(sequence.slot, group).quota = quota;
                if let Some(store) = self.pool.store_mut(group) {
                    let promised = store.promise(quota);
                    debug_assert!(promised.is_ok(), "`admit` has counted them");
                }
            }
        }
        self.counters.seqs_begun += 1;
        self.note_peaks();
        Ok(Begun { sequence, cached_len: 0, limit })
    }

    /// Checks everything about a new sequence and gives the most tokens that it may have.
    fn admit(&self, prompt_len: u64, options: &BeginOptions) -> Result<u32, CacheError> {
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
        let windowed = self.plan.groups.iter().any(|group| group.window.is_some());
        let rewind = self.plan.limits.max_rewind_tokens;
        if windowed && options.lookahead_tokens > rewind {
            let wanted = options.lookahead_tokens;
            return Err(CacheError::LookaheadBeyondRewind { wanted, limit: rewind });
        }
        let limit = max_len.saturating_add(options.lookahead_tokens).min(most);
        // At most `max_len`, a u32.
        let prompt_len = u32::try_from(prompt_len).unwrap_or(u32::MAX);
        self.check_blocks(|group| {
            let whole = self.plan.blocks_for(group_idx(group), limit);
            let now = if self.guaranteed() {
                whole
            } else {
                self.plan.blocks_for(group_idx(group), prompt_len)
            };
            (whole, now)
        })?;
        if self.seqs.free.is_empty() {
            return Err(CacheError::NoSeqSlot { seq_slots: self.plan.seq_slots });
        }
        Ok(limit)
    }

    /// Checks that a copy of a sequence can be held.
    pub(super) fn check_room_for_fork(&self, source: u32) -> Result<(), CacheError> {
        self.check_blocks(|group| {
            let state = self.seqs.state(source, group);
            let now = state.held + state.promised();
            (now, now)
        })?;
        if self.seqs.free.is_empty() {
            return Err(CacheError::NoSeqSlot { seq_slots: self.plan.seq_slots });
        }
        Ok(())
    }

    /// Checks `(needed in all, needed now)` of every paged group. What can never be is found
    /// before what cannot be now.
    fn check_blocks(&self, needed: impl Fn(usize) -> (u32, u32)) -> Result<(), CacheError> {
        let paged = || (0..self.plan.groups.len()).filter_map(|g| Some((g, self.pool.store(g)?)));
        for (group, store) in paged() {
            let (whole, _) = needed(group);
            if whole > store.total() {
                return Err(CacheError::NeverFits {
                    group: group_idx(group),
                    wanted: u64::from(whole),
                    total: u64::from(store.total()),
                });
            }
        }
        for (group, store) in paged() {
            let (_, now) = needed(group);
            if now > BlockStore::unpromised(store) {
                return Err(CacheError::NotAdmitted {
                    group: group_idx(group),
                    wanted: u64::from(now),
                    available: u64::from(store.unpromised()),
                });
            }
        }
        Ok(())
    }
}
