//! The audit's part on sharing: references, debts, the index, the donors.

use super::Cache;
use super::audit::{Digest, require};
use super::reuse::Reuse;
use crate::error::InvariantError;
use crate::plan::{GroupKind, NO_BLOCK};
use crate::pool::BlockState;
use crate::units::BlockId;

/// What holds a block, counted from the holders' side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Held {
    rows: u32,
    tails: u32,
    holds: u32,
    pins: u32,
}

impl Cache {
    /// References of a group's blocks against rows, pins and the step under way; what is promised
    /// against the sequences and the blocks' debts.
    pub(super) fn check_references(&self, group: usize) -> Result<(), InvariantError> {
        let Some(store) = self.pool.store(group) else { return Ok(()) };
        let mut held = vec![Held::default(); store.total() as usize];
        let mut promised = store.all_debts();
        let per_block = self.plan.groups[group].layout.unit_tokens;
        for slot in 0..self.plan.seq_slots {
            for (_, block) in self.held_blocks(group, slot) {
                held[block.index()].rows += 1;
            }
            let len = self.seqs.record(slot).len;
            let tail = if len.is_multiple_of(per_block) {
                NO_BLOCK
            } else {
                self.entry(group, slot, len / per_block)
            };
            if tail != NO_BLOCK {
                held[tail as usize].tails += 1;
            }
            promised += u64::from(self.seqs.state(slot, group).promised());
        }
        for replaced in &self.batch.replaced {
            if replaced.group as usize == group {
                held[replaced.block as usize].holds += 1;
            }
        }
        self.count_pins(group, &mut held)?;
        for (block, held) in (0..).zip(&held) {
            let refs = store.references(BlockId(block));
            let (tails, holds, pins) = store.kinds(BlockId(block));
            let counted = Held { rows: refs - holds - pins, tails, holds, pins };
            require(*held == counted, || {
                format!("group {group}: block {block} is held by {held:?}, and counts {counted:?}")
            })?;
        }
        let shared: u64 =
            held.iter().map(|held| u64::from((held.rows - held.tails).saturating_sub(1))).sum();
        require(shared == u64::from(store.shared_rows()), || {
            format!(
                "group {group}: {shared} rows share full blocks, {} counted",
                store.shared_rows()
            )
        })?;
        let counted = u64::from(store.counts().promised);
        require(promised == counted, || {
            format!("group {group}: {promised} blocks promised, {counted} counted")
        })
    }

    fn count_pins(&self, group: usize, held: &mut [Held]) -> Result<(), InvariantError> {
        let Some(Reuse { index: Some(index), pins, .. }) = &self.reuse else { return Ok(()) };
        for (last, blocks, windows) in pins.all() {
            let mut block = last;
            for at in (0..blocks).rev() {
                require(index.is_published(block), || format!("pinned block {block} is unknown"))?;
                if index.lead() == group {
                    held[block as usize].pins += 1;
                } else if (windows[group].0..windows[group].1).contains(&at) {
                    let windowed = index.windowed().iter().position(|of| *of == group);
                    let attached = windowed.map_or(NO_BLOCK, |w| index.attached(w, block));
                    require(attached != NO_BLOCK, || format!("nothing attached to {block}"))?;
                    held[attached as usize].pins += 1;
                }
                block = index.parent(block);
            }
        }
        Ok(())
    }

    /// The prefix index against blocks, rows and itself.
    pub(super) fn check_index(&self) -> Result<(), InvariantError> {
        let Some(Reuse { index: Some(index), seqs, expiry, .. }) = &self.reuse else {
            return Ok(());
        };
        let lead = index.lead();
        let Some(store) = self.pool.store(lead) else { return Ok(()) };
        let mut published = 0;
        let mut names = std::collections::BTreeMap::new();
        let mut tokens = vec![0; self.plan.tokens_per_block as usize];
        for block in 0..store.total() {
            let state = store.get(BlockId(block)).map(|(state, ..)| state);
            if !index.is_published(block) {
                require(state != Some(BlockState::Cached), || format!("{block} cached, unknown"))?;
                continue;
            }
            published += 1;
            require(state != Some(BlockState::Free), || format!("{block} is published and free"))?;
            let parent = index.parent(block);
            if parent != NO_BLOCK {
                require(index.is_published(parent), || format!("{block} has no parent"))?;
                require(index.children(parent).any(|child| child == block), || {
                    format!("{block} is not among its parent's children")
                })?;
                let parent_state = store.get(BlockId(parent)).map(|(state, ..)| state);
                let cached = |state| state == Some(BlockState::Cached);
                require(!cached(parent_state) || cached(state), || {
                    format!("{block} is held, and its parent {parent} is not")
                })?;
                require(store.class(BlockId(parent)) >= store.class(BlockId(block)), || {
                    format!("{block} has a higher class than its parent {parent}")
                })?;
            }
            let ns = index.namespace_of(block);
            *names.entry(ns).or_insert(0_u32) += u32::from(ns != 0);
            index.load_tokens(block, &mut tokens);
            let hash = index.chain(index.hash_after(parent), &tokens, ns);
            let found = index.find(hash, parent, ns, &tokens);
            require(found == Some(block), || format!("{block} is found as {found:?}"))?;
            let timed = expiry.due(block).is_some();
            let should = state == Some(BlockState::Cached) && expiry.duration(block) != u64::MAX;
            require(timed == should, || format!("{block} has a time limit: {timed}"))?;
        }
        require(index.len() == (published, published), || {
            format!("{published} blocks published, {:?} counted and in the table", index.len())
        })?;
        self.check_eviction_order(lead)?;
        self.check_attached()?;
        for slot in 0..self.plan.seq_slots {
            self.check_published_row(slot)?;
            let keys = &seqs[slot as usize].keys;
            for ns in [keys.first, keys.salted] {
                *names.entry(ns).or_insert(0) += u32::from(ns != 0);
            }
        }
        names.remove(&0);
        let counted = index.names().0.collect();
        require(names == counted, || format!("namespaces {names:?}, counted {counted:?}"))
    }

    /// Followed to its end, eviction never meets a parent before its child.
    fn check_eviction_order(&self, lead: usize) -> Result<(), InvariantError> {
        let (Some(index), Some(store)) = (self.index(), self.pool.store(lead)) else {
            return Ok(());
        };
        let mut gone = vec![false; store.total() as usize];
        for block in store.cached_list() {
            gone[block.index()] = true;
            require(index.children(block.0).all(|child| gone[child as usize]), || {
                format!("{block} would be evicted before a child")
            })?;
        }
        Ok(())
    }

    /// Blocks of windowed groups against what they are attached to.
    fn check_attached(&self) -> Result<(), InvariantError> {
        let Some(index) = self.index() else { return Ok(()) };
        for (windowed, &group) in index.windowed().iter().enumerate() {
            let Some(store) = self.pool.store(group) else { continue };
            for block in 0..store.total() {
                let state = store.get(BlockId(block)).map(|(state, ..)| state);
                let lead_block = index.lead_of(windowed, block);
                if lead_block == NO_BLOCK {
                    require(state != Some(BlockState::Cached), || {
                        format!("group {group}: {block} is cached, and attached to nothing")
                    })?;
                    continue;
                }
                require(state != Some(BlockState::Free), || {
                    format!("group {group}: {block} is attached and free")
                })?;
                require(
                    index.attached(windowed, lead_block) == block && index.is_published(lead_block),
                    || format!("group {group}: {block} is not what {lead_block} has"),
                )?;
                let of_lead = self.pool.store(index.lead()).map(|s| s.class(BlockId(lead_block)));
                require(of_lead == Some(store.class(BlockId(block))), || {
                    format!("group {group}: {block} has another priority than {lead_block}")
                })?;
            }
        }
        Ok(())
    }

    /// The published blocks of a row are a chain of the index, with the sequence's tokens.
    fn check_published_row(&self, slot: u32) -> Result<(), InvariantError> {
        let Some(Reuse { index: Some(index), seqs, .. }) = &self.reuse else { return Ok(()) };
        let Some(reuse) = &self.reuse else { return Ok(()) };
        let share = &seqs[slot as usize];
        let per_block = self.plan.tokens_per_block as usize;
        let mut parent = NO_BLOCK;
        let mut tokens = vec![0; per_block];
        for at in 0..share.published {
            let block = self.entry(index.lead(), slot, at);
            require(index.is_published(block) && index.parent(block) == parent, || {
                format!("slot {slot}: block {block} at {at} is not the child of {parent}")
            })?;
            // Who got no number for its namespaces still has what it found.
            let unnamed = share.keys.first == 0;
            require(unnamed || index.namespace_of(block) == share.keys.at(at), || {
                format!("slot {slot}: block {block} is in another namespace")
            })?;
            index.load_tokens(block, &mut tokens);
            let own = &reuse.tokens(slot)[at as usize * per_block..][..per_block];
            require(own == tokens, || format!("slot {slot}: block {block} has other tokens"))?;
            parent = block;
        }
        Ok(())
    }

    /// Adds everything about sharing that later verbs depend on.
    pub(super) fn digest_reuse(&self, digest: &mut Digest) {
        digest.push(u64::from(self.batch_closed) | u64::from(self.preempted) << 1);
        let Some(reuse) = &self.reuse else { return };
        digest.push(reuse.epoch);
        digest.push(reuse.expiry.now_ms);
        digest.push(reuse.events.next());
        for slot in 0..self.plan.seq_slots {
            let share = &reuse.seqs[slot as usize];
            let record = self.seqs.record(slot);
            for number in [share.published, record.lookahead, share.retained, record.known] {
                digest.push(u64::from(number));
            }
            for number in [share.keys.first, share.keys.salted, share.keys.salted_at] {
                digest.push(u64::from(number));
            }
            digest.push(share.released);
            let held = record.known.max(share.retained) as usize;
            reuse.tokens(slot)[..held].iter().for_each(|token| digest.push(u64::from(*token)));
            share.retentions.numbers().for_each(|number| digest.push(number));
        }
        let Some(index) = &reuse.index else { return };
        let Some(store) = self.pool.store(index.lead()) else { return };
        for block in 0..store.total() {
            if index.is_published(block) {
                digest.push(u64::from(block));
                digest.push(index.hash_after(block));
                digest.push(u64::from(index.own_class(block)));
                index.children(block).for_each(|child| digest.push(u64::from(child)));
                digest.push(reuse.expiry.duration(block));
                digest.push(reuse.expiry.due(block).unwrap_or(u64::MAX));
                for windowed in 0..index.windowed().len() {
                    digest.push(u64::from(index.attached(windowed, block)));
                }
            }
        }
        let (in_use, free) = index.names();
        in_use.for_each(|(id, refs)| digest.push(u64::from(id) << 32 | u64::from(refs)));
        free.iter().for_each(|id| digest.push(u64::from(*id)));
        for (last, blocks, windows) in reuse.pins.all() {
            digest.push(u64::from(last) << 32 | u64::from(blocks));
            windows.iter().for_each(|(first, end)| {
                digest.push(u64::from(*first) << 32 | u64::from(*end));
            });
        }
        reuse.pins.free().iter().for_each(|place| digest.push(u64::from(*place)));
    }

    /// Marks the token places of a group that nobody holds, but that a later sequence may find:
    /// shareable blocks, and what released sequences left in contiguous slots.
    pub(super) fn mark_shareable(&self, group: usize, live: &mut [bool]) {
        let layout = &self.plan.groups[group].layout;
        let per_unit = layout.unit_tokens as usize;
        if self.plan.groups[group].kind == GroupKind::Paged {
            for block in (0..layout.units).filter(|b| self.is_shareable(group, BlockId(*b))) {
                live[block as usize * per_unit..][..per_unit].fill(true);
            }
            return;
        }
        let Some(reuse) = self.reuse.as_ref().filter(|reuse| reuse.has_donors) else { return };
        for slot in 0..self.plan.seq_slots {
            let record = self.seqs.record(slot);
            let held = if record.alive { record.len } else { reuse.seqs[slot as usize].retained };
            let kept_from = if layout.ring_tokens > 0 {
                record.written.saturating_sub(layout.ring_tokens)
            } else {
                0
            };
            let sinks = layout.sink_tokens.min(held);
            for position in (0..sinks).chain(kept_from.max(sinks)..held) {
                let place = self.view(group, slot).token_slot(position);
                live[usize::try_from(place).unwrap_or(usize::MAX)] = true;
            }
        }
    }
}
