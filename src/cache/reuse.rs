//! What a prompt finds in the cache, and how it is claimed.
//!
//! A match is the longest prefix that every layer group can give (see
//! [`ReusePlan`](crate::plan::ReusePlan)): whole blocks of the index, the windows behind them, the
//! first tokens of one block more, and for contiguous groups a donor's slot. It is looked for
//! without changing anything, so the estimate and the act are the same function; then it is
//! claimed, block by block, and only then are blocks taken for the tokens that are copied. So
//! within a batch nothing that one sequence matched is evicted for another.

use super::Cache;
use super::donor::{Donor, DonorName};
use super::events::EventRing;
use super::evict::Scout;
use super::pin::PinTable;
use super::prefix::{ChainKeys, Namespace, PrefixIndex, Probe, Prober, Walk};
use super::retention::{Expiry, Retentions};
use crate::device::{huge_vec, table_of};
use crate::error::{CacheError, DeviceError};
use crate::plan::{NO_BLOCK, Plan, SEQ_SHARE_BYTES};

/// What a sequence shares; the index of its slot is its own.
#[derive(Clone, Copy, Debug)]
pub(super) struct SeqShare {
    pub(super) retentions: Retentions,
    pub(super) keys: ChainKeys,
    /// Blocks of its row that are published, from the first on.
    pub(super) published: u32,
    /// When it was released, as a count of releases; donors only.
    pub(super) released: u64,
    /// Tokens of a released sequence that are still in the slot's contiguous groups; donors only.
    pub(super) retained: u32,
    /// The block that it goes on with in part, claimed and not copied yet, and its tokens.
    pub(super) partial: Option<(u32, u32)>,
    /// Whether the blocks that it is copied to are promised.
    pub(super) part_promised: bool,
    /// Whether a sequence of the batch under way wants to copy from the slot; donors only.
    pub(super) wanted: bool,
}

const _: () = assert!(size_of::<SeqShare>() as u64 == SEQ_SHARE_BYTES);

impl SeqShare {
    const NEW: Self = Self {
        retentions: Retentions::NONE,
        keys: ChainKeys::NONE,
        published: 0,
        released: 0,
        retained: 0,
        partial: None,
        part_promised: false,
        wanted: false,
    };
}

/// Everything that sharing prefixes needs; absent where the plan shares none.
#[derive(Debug)]
pub(super) struct Reuse {
    /// `None` in a plan whose groups are all contiguous.
    pub(super) index: Option<PrefixIndex>,
    /// `[seq_slots]`
    pub(super) seqs: Vec<SeqShare>,
    /// What the sequences consist of. `[seq_slots, max_seq_len]`
    pub(super) tokens: Vec<u32>,
    row: usize,
    /// Who each slot's tokens belong to. `[seq_slots]`, empty without donors.
    pub(super) names: Vec<DonorName>,
    pub(super) epoch: u64,
    pub(super) has_donors: bool,
    pub(super) releases: u64,
    pub(super) scout: Scout,
    pub(super) expiry: Expiry,
    pub(super) events: EventRing,
    pub(super) pins: PinTable,
}

impl Reuse {
    pub(super) fn new(plan: &Plan, constant_hash: bool) -> Result<Option<Self>, DeviceError> {
        if !plan.reuse.is_on() {
            return Ok(None);
        }
        let index = PrefixIndex::new(plan, constant_hash)?;
        let blocks = plan.reuse.lead.map_or(0, |lead| plan.groups[lead.index()].layout.units);
        let row = plan.limits.max_seq_len as usize;
        let none = plan.reuse.lead.is_none();
        let (slots, has_donors) = (plan.seq_slots as usize, plan.reuse.has_donors());
        let names = if has_donors { slots } else { 0 };
        Ok(Some(Self {
            seqs: table_of(slots, SeqShare::NEW)?,
            tokens: huge_vec(slots * row, |_| 0)?,
            row,
            names: table_of(names, DonorName::default())?,
            epoch: 0,
            has_donors,
            releases: 0,
            scout: Scout::new(blocks)?,
            expiry: Expiry::new(blocks)?,
            events: EventRing::new(plan.event_buffer, plan.tokens_per_block)?,
            pins: if none { PinTable::none() } else { PinTable::new(plan)? },
            index,
        }))
    }

    /// What a sequence consists of, its slot's whole row.
    pub(super) fn tokens(&self, slot: u32) -> &[u32] {
        &self.tokens[slot as usize * self.row..][..self.row]
    }

    /// What a sequence consists of, to write.
    pub(super) fn tokens_mut(&mut self, slot: u32) -> &mut [u32] {
        &mut self.tokens[slot as usize * self.row..][..self.row]
    }

    /// Copies the first tokens of one sequence's row to another's.
    pub(super) fn copy_tokens(&mut self, from: u32, to: u32, tokens: usize) {
        let start = from as usize * self.row;
        self.tokens.copy_within(start..start + tokens, to as usize * self.row);
    }

    /// Forgets everything; no sequence is alive.
    pub(super) fn clear(&mut self) {
        if let Some(index) = &mut self.index {
            index.clear();
            self.events.cleared(index.lead());
        }
        self.seqs.fill(SeqShare::NEW);
        self.expiry.clear();
        self.pins.clear();
        self.epoch = 0;
        self.releases = 0;
    }
}

/// What a prompt finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    /// Tokens that need no computing.
    pub(super) len: u32,
    /// Whole blocks of the index among them, and the last one.
    pub(super) full: u32,
    pub(super) last: u32,
    /// The block that goes on in part, and its tokens.
    pub(super) partial: Option<(u32, u32)>,
    pub(super) donor: Option<Donor>,
    /// Whether a window, or the lack of a donor, made it shorter than the index alone.
    pub(super) cut: Cut,
}

/// What made a match shorter than the index has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    Nothing,
    Window,
    Donor,
}

impl Found {
    pub(super) const NOTHING: Self =
        Self { len: 0, full: 0, last: NO_BLOCK, partial: None, donor: None, cut: Cut::Nothing };
}

impl Cache {
    /// The prefix index, if the plan has one.
    pub(super) fn index(&self) -> Option<&PrefixIndex> {
        self.reuse.as_ref()?.index.as_ref()
    }

    /// The lead group, if the plan has one.
    pub(super) fn lead(&self) -> Option<usize> {
        self.index().map(PrefixIndex::lead)
    }

    /// How many windowed paged groups follow the lead.
    pub(super) fn windowed_groups(&self) -> usize {
        self.index().map_or(0, |index| index.windowed().len())
    }

    /// How much of a prompt is in the cache. Changes nothing.
    #[must_use]
    pub fn probe(&self, prompt: &[u32], namespace: &Namespace) -> Probe {
        let found = self.find(prompt, namespace);
        let partial_tokens = found.partial.map_or(0, |(_, tokens)| tokens);
        Probe { cached_len: found.len, full_blocks: found.full, partial_tokens }
    }

    /// A reader that says how much of a prompt is cached, from any thread, while this cache works.
    /// `None` where nothing is shared or contiguous layers take part: what a donor's slot holds is
    /// known to the cache alone.
    #[must_use]
    pub fn prober(&self) -> Option<Prober> {
        let reuse = self.reuse.as_ref().filter(|reuse| !reuse.has_donors)?;
        reuse.index.as_ref().map(PrefixIndex::prober)
    }

    /// New sequences begin in another epoch: what was cached in others is not found any more, because
    /// the weights or an adapter changed. Sequences that run keep what they have. An epoch is its
    /// number: one that is used again finds again what was cached in it.
    ///
    /// # Errors
    /// [`CacheError::ReservationsHeld`]: a reservation holds a match of the old epoch, which its
    /// sequence would go on from. Begin or cancel it first; nothing changes.
    pub fn set_epoch(&mut self, epoch: u64) -> Result<(), CacheError> {
        self.abandon_step();
        let held = self.reservations();
        if held > 0 {
            return Err(CacheError::ReservationsHeld { held });
        }
        if let Some(reuse) = &mut self.reuse {
            reuse.epoch = epoch;
            if let Some(index) = &mut reuse.index {
                index.set_epoch(epoch);
            }
        }
        Ok(())
    }

    /// The longest prefix of a prompt that every group can give.
    pub(super) fn find(&self, prompt: &[u32], namespace: &Namespace) -> Found {
        self.find_parts(prompt, namespace, true)
    }

    /// The same in whole blocks of the index only: for when there is no room to copy a part of one.
    pub(super) fn find_whole(&self, prompt: &[u32], namespace: &Namespace) -> Found {
        self.find_parts(prompt, namespace, false)
    }

    fn find_parts(&self, prompt: &[u32], namespace: &Namespace, parts: bool) -> Found {
        let Some(reuse) = &self.reuse else { return Found::NOTHING };
        // The last token is always computed, for its output.
        let usable = u32::try_from(prompt.len()).unwrap_or(u32::MAX).saturating_sub(1);
        let mut found = match &reuse.index {
            None => Found { len: usable, ..Found::NOTHING },
            Some(index) => {
                let walk = index.walk(prompt, namespace);
                self.fit(&Walk { partial: walk.partial.filter(|_| parts), ..walk }, index)
            }
        };
        if !reuse.has_donors {
            return found;
        }
        // Without an index there is nothing that a donor could have less than.
        let cut = if reuse.index.is_some() { Cut::Donor } else { Cut::Nothing };
        // Each round ends it or makes it shorter.
        while found.len > 0 {
            let Some(donor) = self.find_donor(prompt, namespace, found.len) else {
                return Found { cut, ..Found::NOTHING };
            };
            if donor.len == found.len {
                return Found { donor: Some(donor), ..found };
            }
            found = match &reuse.index {
                None => Found { len: donor.len, ..found },
                Some(index) => {
                    let per_block = self.plan.tokens_per_block;
                    let len = if parts { donor.len } else { donor.len / per_block * per_block };
                    self.fit(&self.shorten(&found, len, index), index)
                }
            };
            found.cut = cut;
        }
        found
    }

    /// What the windowed groups leave of a walk.
    fn fit(&self, walk: &Walk, index: &PrefixIndex) -> Found {
        let probe = index.fit_windows(walk);
        let mut last = walk.last;
        for _ in probe.full_blocks..walk.full {
            last = index.parent(last);
        }
        let full = probe.full_blocks;
        let partial = walk.partial.filter(|_| probe.partial_tokens > 0);
        let cut = if probe.cached_len < walk.len(self.plan.tokens_per_block) {
            Cut::Window
        } else {
            Cut::Nothing
        };
        Found { len: probe.cached_len, full, last, partial, donor: None, cut }
    }

    /// The same match, but of `len` tokens only.
    fn shorten(&self, found: &Found, len: u32, index: &PrefixIndex) -> Walk {
        let per_block = self.plan.tokens_per_block;
        let (full, rest) = (len / per_block, len % per_block);
        let mut last = found.last;
        let mut next = found.partial.map_or(NO_BLOCK, |(block, _)| block);
        for _ in full..found.full {
            next = last;
            last = index.parent(last);
        }
        Walk { full, last, partial: (rest > 0).then_some((next, rest)) }
    }
}
