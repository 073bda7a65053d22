//! Prefixes of contiguous groups: copied from, or taken over with, another sequence's slot.
//!
//! A slot keeps its tokens when its sequence is released, until another sequence takes it. A new
//! sequence that begins alike can then take that very slot (nothing is copied), or copy what it
//! needs from it, or from a sequence that is alive. A ring holds its latest tokens only, so it
//! gives a prefix that ends near them: the next turn of a conversation, not the system prompt.

use super::prefix::{Namespace, work};
use super::{Cache, group_idx};
use crate::error::CacheError;
use crate::plan::{Addressing, DONOR_NAME_BYTES, GroupKind, SeqView};

/// Who gives a prefix of the contiguous groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Donor {
    pub(super) slot: u32,
    /// Tokens.
    pub(super) len: u32,
    /// Whether the new sequence takes the donor's slot.
    pub(super) take_over: bool,
}

/// Who the tokens of a slot belong to.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DonorName {
    pub(super) namespace: Namespace,
    /// Without, nobody may share them: it is not known whose they are.
    pub(super) epoch: Option<u64>,
}

const _: () = assert!(size_of::<DonorName>() as u64 == DONOR_NAME_BYTES);

impl DonorName {
    /// Of `len` tokens, how many another namespace may share.
    pub(super) fn common(&self, other: &Namespace, epoch: u64, len: u32, per_block: u32) -> u32 {
        let own = &self.namespace;
        if self.epoch != Some(epoch) || own.adapter != other.adapter || own.model != other.model {
            return 0;
        }
        let private_from = |namespace: &Namespace| match namespace.salt {
            Some(_) => namespace.salt_from / per_block * per_block,
            None => u32::MAX,
        };
        let (a, b) = (private_from(own), private_from(other));
        if own.salt == other.salt && a == b { len } else { len.min(a).min(b) }
    }
}

impl Cache {
    /// The slot that gives the most tokens of a prompt, at most `most`; of equals the lowest.
    pub(super) fn find_donor(
        &self,
        prompt: &[u32],
        namespace: &Namespace,
        most: u32,
    ) -> Option<Donor> {
        let reuse = self.reuse.as_ref()?;
        let wanted = &prompt[..most as usize];
        let mut best: Option<Donor> = None;
        for slot in 0..self.plan.seq_slots {
            let record = self.seqs.record(slot);
            let share = &reuse.seqs[slot as usize];
            let kept = !record.alive || self.is_taken_over(slot);
            let held = if kept { share.retained } else { record.len.min(record.known) };
            if held == 0 || best.is_some_and(|best| best.len >= held) {
                continue;
            }
            // Only what may be shared is compared: how long that takes tells nothing of the rest.
            let name = &reuse.names[slot as usize];
            let held = name.common(namespace, reuse.epoch, held, self.plan.tokens_per_block);
            let tokens = &reuse.tokens(slot)[..held as usize];
            let common = tokens.iter().zip(wanted).take_while(|(a, b)| a == b).count();
            work::compared(common);
            let len = u32::try_from(common).unwrap_or(0);
            if len > best.map_or(0, |best| best.len) && self.slot_has(slot, len) {
                best = Some(Donor { slot, len, take_over: self.may_take_over(slot, len) });
            }
        }
        best
    }

    /// Whether a slot was taken over by a sequence of the batch that is being begun. Nothing is
    /// written to it before the batch has begun, so it still has what the one before left.
    fn is_taken_over(&self, slot: u32) -> bool {
        // Once a sequence has begun, nothing is retained in its slot.
        let retained =
            self.reuse.as_ref().is_some_and(|reuse| reuse.seqs[slot as usize].retained > 0);
        retained && self.pending[slot as usize].is_take_over(slot)
    }

    /// Whether the slot's rings still have what a sequence of `len` tokens needs.
    fn slot_has(&self, slot: u32, len: u32) -> bool {
        let written = self.seqs.record(slot).written;
        self.plan.groups.iter().enumerate().all(|(group, layers)| {
            let kept_from = self.plan.keep_from(group_idx(group), len);
            if kept_from < self.seqs.state(slot, group).holds_from {
                return false;
            }
            layers.layout.addressing != Addressing::Ring || {
                written.saturating_sub(layers.layout.ring_tokens)
                    <= kept_from.max(
                        // What lies below the sinks' end is never overwritten.
                        layers.layout.sink_tokens.min(len),
                    )
            }
        })
    }

    /// Whether a new sequence takes the slot of a released one rather than copy from it: when most
    /// of what it holds is of use, or when there is no empty slot to copy to.
    fn may_take_over(&self, slot: u32, len: u32) -> bool {
        let Some(reuse) = &self.reuse else { return false };
        if self.seqs.record(slot).alive {
            return false;
        }
        let retained = reuse.seqs[slot as usize].retained;
        let empty = |slot: &u32| reuse.seqs[*slot as usize].retained == 0;
        u64::from(len) * 2 >= u64::from(retained) || !self.seqs.free.iter().any(empty)
    }

    /// Which free slot a new sequence takes, as a place in the free list. Where slots keep tokens:
    /// the donor's, or an empty one, or the one released first, the donor's own last.
    pub(super) fn choose_slot(&self, donor: Option<Donor>) -> Option<usize> {
        let last = self.seqs.free.len().checked_sub(1)?;
        let Some(reuse) = self.reuse.as_ref().filter(|reuse| reuse.has_donors) else {
            return Some(last);
        };
        let free = || self.seqs.free.iter().enumerate();
        if let Some(donor) = donor.filter(|donor| donor.take_over) {
            return free().find(|(_, slot)| **slot == donor.slot).map(|(at, _)| at);
        }
        let age = |slot: u32| {
            let share = &reuse.seqs[slot as usize];
            let is_donor = donor.is_some_and(|donor| donor.slot == slot);
            (is_donor, share.wanted, share.retained > 0, share.released)
        };
        // Of equals the last, which is the next to be taken.
        free().rev().min_by_key(|(_, slot)| age(**slot)).map(|(at, _)| at)
    }

    /// Gives a new sequence what its donor has.
    ///
    /// # Errors
    /// The device's.
    pub(super) fn take_from_donor(&mut self, slot: u32, donor: Donor) -> Result<(), CacheError> {
        if donor.slot == slot {
            self.counters.donor_takeovers += 1;
            return Ok(());
        }
        for group in 0..self.plan.groups.len() {
            if self.plan.groups[group].kind == GroupKind::Contiguous {
                self.copy_prefix(group, donor.slot, slot, donor.len)?;
            }
        }
        // The same places hold tokens as in the donor's slot, and no others.
        self.seqs.record_mut(slot).written = self.seqs.record(donor.slot).written;
        for group in 0..self.plan.groups.len() {
            self.seqs.state_mut(slot, group).holds_from =
                self.seqs.state(donor.slot, group).holds_from;
        }
        self.counters.donor_copies += 1;
        Ok(())
    }

    /// Copies the first `len` tokens of a contiguous group to another slot, as far as the slot
    /// still has them: also those that have left the window, so that the new slot can be a donor
    /// for all that this one could be.
    fn copy_prefix(
        &mut self,
        group: usize,
        from: u32,
        to: u32,
        len: u32,
    ) -> Result<(), CacheError> {
        let layout = &self.plan.groups[group].layout;
        let overwritten = match layout.addressing {
            Addressing::Ring => {
                self.seqs.record(from).written.saturating_sub(layout.ring_tokens).min(len)
            }
            Addressing::Slot | Addressing::Blocks => 0,
        };
        let sinks = layout.sink_tokens.min(len);
        let kept_from = overwritten.max(sinks);
        let view = SeqView { layout, table: &[], slot: from };
        for (mut position, end) in [(0, sinks), (kept_from, len)] {
            while position < end {
                let run = view.run(position, end);
                let (_, token) = view.place(position);
                let range = token..token + run;
                let bytes = self.pool.device.queue_copy(layout, from, to, range)?;
                self.counters.copied_bytes.0 += bytes;
                position += run;
            }
        }
        Ok(())
    }

    /// Keeps what a released sequence has in its slot's contiguous groups.
    pub(super) fn retain(&mut self, slot: u32) {
        let record = self.seqs.record(slot);
        let held = record.len.min(record.known);
        let Some(reuse) = self.reuse.as_mut().filter(|reuse| reuse.has_donors) else { return };
        reuse.releases += 1;
        let released = reuse.releases;
        let share = &mut reuse.seqs[slot as usize];
        share.retained = held;
        share.released = if held > 0 { released } else { 0 };
    }

    /// Forgets what released sequences left in their slots.
    pub(super) fn forget_donors(&mut self) {
        let Some(reuse) = &mut self.reuse else { return };
        for &slot in &self.seqs.free {
            reuse.seqs[slot as usize].retained = 0;
        }
        for at in 0..self.seqs.free.len() {
            self.scrub_released_slot(self.seqs.free[at]);
        }
    }
}
