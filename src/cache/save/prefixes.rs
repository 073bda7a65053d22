//! What of the prefix cache is saved, and in which order: what would be evicted last comes first,
//! and so a block before those that go on from it.

use super::buffer_of;
use super::format::{BlockHead, Span};
use super::write::{Saver, Source};
use crate::cache::Cache;
use crate::cache::prefix::{NameWords, Namespace};
use crate::cache::reuse::Reuse;
use crate::config::MAX_TOKENS_PER_BLOCK;
use crate::error::{CacheError, SaveError};
use crate::plan::{Addressing, GroupKind, NO_BLOCK, SAVE_BLOCK_BYTES, SAVE_SLOT_BYTES};
use crate::pool::{BlockState, DEFAULT_PRIORITY};
use crate::units::BlockId;

/// What is known of a block of the index while it is saved.
#[derive(Clone, Copy, Debug)]
struct Known {
    /// The number of its record; [`NO_BLOCK`] for none.
    record: u32,
    /// The position of its first token.
    start: u32,
    /// A slot whose contiguous groups have the same tokens; [`NO_BLOCK`] for none.
    slot: u32,
}

const UNKNOWN: Known = Known { record: NO_BLOCK, start: 0, slot: NO_BLOCK };

/// Which prefixes are saved.
#[derive(Clone, Copy, Debug)]
pub(super) struct Policy {
    pub(super) unsalted_only: bool,
}

impl Policy {
    /// Whether blocks of a namespace are saved: of this epoch, and with a salt only if that is
    /// wanted.
    fn takes(self, (words, epoch): &(NameWords, u64), now: u64) -> bool {
        let salted = words[..6] != [0; 6];
        *epoch == now && !(salted && self.unsalted_only)
    }
}

const _: () = assert!(size_of::<Known>() as u64 <= SAVE_BLOCK_BYTES);
const _: () =
    assert!((size_of::<OfSlot>() + 4 + 2 * size_of::<NameWords>()) as u64 <= SAVE_SLOT_BYTES);

impl Cache {
    /// Writes all prefixes that can be found now.
    pub(super) fn write_prefixes(
        &self,
        saver: &mut Saver<'_>,
        policy: Policy,
    ) -> Result<(), SaveError> {
        let reuse = self.reuse.as_ref().ok_or(CacheError::ReuseOff)?;
        if reuse.index.is_some() {
            self.write_index(saver, reuse, policy)
        } else {
            self.write_slots(saver, reuse, policy)
        }
    }

    /// The blocks of the index: held ones first, then from the last to be evicted to the first.
    fn write_index(
        &self,
        saver: &mut Saver<'_>,
        reuse: &Reuse,
        policy: Policy,
    ) -> Result<(), SaveError> {
        let Some(index) = &reuse.index else { return Ok(()) };
        let Some(store) = self.pool.store(index.lead()) else { return Ok(()) };
        let mut known = buffer_of(store.total() as usize, UNKNOWN)?;
        let mut names = buffer_of(self.plan.max_namespaces() as usize + 1, 0_u32)?;
        self.find_slots(reuse, &mut known);
        let mut result = Ok(());
        let mut write = |block: u32| {
            if result.is_ok() {
                result = self.write_node(saver, reuse, policy, block, &mut known, &mut names);
            }
        };
        index.each_published(&mut |block| {
            if store.get(BlockId(block)).is_some_and(|(state, ..)| state == BlockState::Active) {
                write(block);
            }
        });
        store.cached_from_youngest().for_each(|block| write(block.0));
        result
    }

    /// Notes which blocks of the index lie in slots of contiguous groups too: of several slots, the
    /// one that has lost the least.
    fn find_slots(&self, reuse: &Reuse, known: &mut [Known]) {
        let Some(index) = reuse.index.as_ref().filter(|_| reuse.has_donors) else { return };
        let per_block = self.plan.tokens_per_block as usize;
        for slot in 0..self.plan.seq_slots {
            let name = &reuse.names[slot as usize];
            let held = self.held_in_slot(reuse, slot);
            if name.epoch != Some(reuse.epoch) {
                continue;
            }
            let keys = index.keys(&name.namespace);
            if keys.first == 0 {
                continue;
            }
            let (mut parent, mut hash) = (NO_BLOCK, index.hash_after(NO_BLOCK));
            let tokens = &reuse.tokens(slot)[..held as usize];
            for (at, tokens) in (0..).zip(tokens.chunks_exact(per_block)) {
                let ns = keys.at(at);
                hash = index.chain(hash, tokens, ns);
                let Some(block) = index.find(hash, parent, ns, tokens) else { break };
                let best = &mut known[block as usize].slot;
                if *best == NO_BLOCK || self.lost_by(slot) < self.lost_by(*best) {
                    *best = slot;
                }
                parent = block;
            }
        }
    }

    /// Tokens that others may take from a slot.
    fn held_in_slot(&self, reuse: &Reuse, slot: u32) -> u32 {
        let record = self.seqs.record(slot);
        match (record.alive, record.reserved) {
            (true, true) => 0,
            (true, false) => record.len.min(record.known),
            (false, _) => reuse.seqs[slot as usize].retained,
        }
    }

    /// How much a slot's windowed groups have lost, to be compared.
    fn lost_by(&self, slot: u32) -> (u32, u32) {
        let groups = 0..self.plan.groups.len();
        let holds_from = groups.map(|group| self.seqs.state(slot, group).holds_from).max();
        (holds_from.unwrap_or(0), self.seqs.record(slot).written)
    }

    /// Which tokens of a block the slot of a contiguous group has.
    fn span_in_slot(&self, group: usize, slot: u32, start: u32, tokens: u32) -> Span {
        let layers = &self.plan.groups[group];
        if layers.window.is_none() {
            return Span::WHOLE;
        }
        let lost = match layers.layout.addressing {
            Addressing::Ring => {
                self.seqs.record(slot).written.saturating_sub(layers.layout.ring_tokens)
            }
            Addressing::Slot | Addressing::Blocks => 0,
        };
        let from = lost.max(self.seqs.state(slot, group).holds_from);
        Span::new(start, tokens, layers.layout.sink_tokens, from)
    }

    /// One block of the index.
    fn write_node(
        &self,
        saver: &mut Saver<'_>,
        reuse: &Reuse,
        policy: Policy,
        block: u32,
        known: &mut [Known],
        names: &mut [u32],
    ) -> Result<(), SaveError> {
        let Some(index) = &reuse.index else { return Ok(()) };
        let (parent, ns) = (index.parent(block), index.namespace_of(block));
        let tokens = self.plan.tokens_per_block;
        let mut before = NO_BLOCK;
        if parent != NO_BLOCK {
            let Known { record, start, .. } = known[parent as usize];
            if record == NO_BLOCK {
                return Ok(());
            }
            before = record;
            known[block as usize].start = start + tokens;
        }
        let mut name = 0;
        if ns != 0 {
            let Some(words) = index.name(ns) else { return Ok(()) };
            if !policy.takes(&words, reuse.epoch) {
                return Ok(());
            }
            if names[ns as usize] == 0 {
                names[ns as usize] = saver.name(&words.0)?;
            }
            name = names[ns as usize];
        }
        let mut ids = [0; MAX_TOKENS_PER_BLOCK as usize];
        let ids = &mut ids[..tokens as usize];
        index.load_tokens(block, ids);
        let left = reuse.expiry.due(block).map(|due| due.saturating_sub(reuse.expiry.now_ms));
        let duration_ms = reuse.expiry.duration(block);
        let head = BlockHead {
            parent: before,
            name,
            tokens,
            class: index.own_class(block),
            duration_ms,
            left_ms: left.unwrap_or(duration_ms),
        };
        let Known { start, slot, .. } = known[block as usize];
        let absent = Span::new(0, tokens, 0, u32::MAX);
        let source = |group: usize| {
            if group == index.lead() {
                return (Source::Block(block), Span::WHOLE);
            }
            if self.plan.groups[group].kind == GroupKind::Contiguous {
                let span =
                    self.span_in_slot(group, slot.min(self.plan.seq_slots - 1), start, tokens);
                return (Source::Row(slot), if slot == NO_BLOCK { absent } else { span });
            }
            let windowed = index.windowed().iter().position(|of| *of == group);
            let attached = windowed.map_or(NO_BLOCK, |windowed| index.attached(windowed, block));
            (Source::Block(attached), if attached == NO_BLOCK { absent } else { Span::WHOLE })
        };
        known[block as usize].record = saver.block(&head, start, ids, &source)?;
        Ok(())
    }
}

/// A slot of contiguous groups whose tokens are saved.
#[derive(Clone, Copy, Debug)]
struct OfSlot {
    slot: u32,
    /// Tokens that are saved of it.
    held: u32,
    /// The first block that it does not have from an earlier one, and that one's record.
    first: u32,
    record: u32,
    /// The earlier one, as a place in the list.
    earlier: usize,
}

impl Cache {
    /// A plan without an index: the slots, those of live sequences first, then from the one
    /// released last to the one released first.
    fn write_slots(
        &self,
        saver: &mut Saver<'_>,
        reuse: &Reuse,
        policy: Policy,
    ) -> Result<(), SaveError> {
        let per_block = self.plan.tokens_per_block;
        let mut slots = buffer_of(0, OfSlot { slot: 0, held: 0, first: 0, record: 0, earlier: 0 })?;
        slots
            .try_reserve_exact(self.plan.seq_slots as usize)
            .map_err(|_| bytes_of_slots(self.plan.seq_slots, size_of::<OfSlot>()))?;
        for slot in 0..self.plan.seq_slots {
            let name = &reuse.names[slot as usize];
            let mut held = self.held_in_slot(reuse, slot);
            if name.epoch != Some(reuse.epoch) {
                held = 0;
            }
            if policy.unsalted_only && name.namespace.salt.is_some() {
                held = held.min(name.namespace.salt_from / per_block * per_block);
            }
            if held > 0 {
                slots.push(OfSlot { slot, held, first: 0, record: 0, earlier: usize::MAX });
            }
        }
        slots.sort_unstable_by_key(|of| {
            let record = self.seqs.record(of.slot);
            let age =
                if record.alive { record.begun } else { reuse.seqs[of.slot as usize].released };
            (!record.alive, std::cmp::Reverse(age))
        });
        let mut common = buffer_of(slots.len(), 0_u32)?;
        let mut names: Vec<NameWords> = Vec::new();
        names
            .try_reserve_exact(2 * slots.len())
            .map_err(|_| bytes_of_slots(self.plan.seq_slots, 2 * size_of::<NameWords>()))?;
        for at in 0..slots.len() {
            self.write_slot(saver, reuse, at, &mut slots, &mut common, &mut names)?;
        }
        Ok(())
    }

    /// What the first tokens of two slots have in common.
    fn common_tokens(&self, reuse: &Reuse, a: OfSlot, b: OfSlot) -> u32 {
        let most = a.held.min(b.held) as usize;
        let (x, y) = (&reuse.tokens(a.slot)[..most], &reuse.tokens(b.slot)[..most]);
        let same = x.iter().zip(y).take_while(|(x, y)| x == y).count();
        let same = u32::try_from(same).unwrap_or(0);
        let other = &reuse.names[b.slot as usize].namespace;
        reuse.names[a.slot as usize].common(other, reuse.epoch, same, self.plan.tokens_per_block)
    }

    /// The blocks of one slot that no earlier one has.
    fn write_slot(
        &self,
        saver: &mut Saver<'_>,
        reuse: &Reuse,
        at: usize,
        slots: &mut [OfSlot],
        common: &mut [u32],
        names: &mut Vec<NameWords>,
    ) -> Result<(), SaveError> {
        let per_block = self.plan.tokens_per_block;
        let own = slots[at];
        for (other, common) in slots.iter().zip(&mut *common) {
            *common = self.common_tokens(reuse, own, *other);
        }
        let earlier = (0..at).max_by_key(|other| (common[*other], std::cmp::Reverse(*other)));
        let shared = earlier.map_or(0, |other| common[other]);
        slots[at].earlier = earlier.unwrap_or(usize::MAX);
        slots[at].first = shared / per_block;
        slots[at].record = saver.blocks;
        if shared >= own.held {
            // The rest of its last block is another's too.
            return Ok(());
        }
        let namespace = reuse.names[own.slot as usize].namespace;
        let mut start = shared / per_block * per_block;
        let mut parent = record_of(slots, at, (start / per_block).checked_sub(1));
        while start < own.held {
            let tokens = per_block.min(own.held - start);
            let end = start + tokens;
            let name = match namespace_at(&namespace, start, per_block) {
                Some(words) => match names.iter().position(|name| *name == words) {
                    Some(known) => u32::try_from(known + 1).unwrap_or(u32::MAX),
                    None => {
                        names.push(words);
                        saver.name(&words)?
                    }
                },
                None => 0,
            };
            let having = slots.iter().zip(&*common).filter(|(_, common)| **common >= end);
            let best = having.map(|(of, _)| of.slot).min_by_key(|slot| self.lost_by(*slot));
            let best = best.unwrap_or(own.slot);
            let head = BlockHead {
                name,
                class: DEFAULT_PRIORITY,
                ..BlockHead::of_sequence(parent, tokens)
            };
            let ids = &reuse.tokens(own.slot)[start as usize..end as usize];
            parent = saver.block(&head, start, ids, &|group| {
                (Source::Row(best), self.span_in_slot(group, best, start, tokens))
            })?;
            start = end;
        }
        Ok(())
    }
}

/// The number of the record of a slot's block, which it may have from earlier slots.
fn record_of(slots: &[OfSlot], mut at: usize, block: Option<u32>) -> u32 {
    let Some(block) = block else { return NO_BLOCK };
    while let Some(of) = slots.get(at) {
        if block >= of.first {
            return of.record + (block - of.first);
        }
        at = of.earlier;
    }
    NO_BLOCK
}

/// The namespace that begins at a block of a prompt.
fn namespace_at(namespace: &Namespace, start: u32, per_block: u32) -> Option<NameWords> {
    let salted_at = namespace.salt_from / per_block * per_block;
    let salted = namespace.salt.is_some() && salted_at == start;
    (start == 0 || salted).then(|| namespace.words(salted))
}

/// The error for a list of so many bytes a slot.
const fn bytes_of_slots(slots: u32, each: usize) -> SaveError {
    super::out_of_memory(slots as u64 * each as u64)
}
