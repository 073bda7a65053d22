//! Making blocks shareable when a step commits.

use super::Cache;
use super::reuse::Reuse;
use crate::plan::NO_BLOCK;
use crate::pool::DEFAULT_PRIORITY;
use crate::units::BlockId;

/// Blocks whose hashes are computed, and whose places are asked for, before the first of them is
/// published.
const AHEAD: u32 = 16;

impl Cache {
    /// Publishes the blocks of a sequence that are full, known and out of reach of a rewind of its
    /// look-ahead. Where the index has the same block already, the sequence takes that one and
    /// gives its own back.
    pub(super) fn publish(&mut self, slot: u32) {
        let record = self.seqs.record(slot);
        let Some(reuse) = &self.reuse else { return };
        let share = &reuse.seqs[slot as usize];
        let settled = record.known.min(record.len.saturating_sub(record.lookahead));
        if share.keys.first == 0 || settled >> self.block_shift <= share.published {
            return;
        }
        let Some(lead) = self.lead() else { return };
        let (first, end) = (share.published, settled >> self.block_shift);
        let mut parent = if first == 0 { NO_BLOCK } else { self.entry(lead, slot, first - 1) };
        for start in (first..end).step_by(AHEAD as usize) {
            let stretch = start..end.min(start + AHEAD);
            let hashes = self.hashes_ahead(slot, stretch.clone());
            for (at, hash) in stretch.zip(hashes) {
                let block = self.publish_block(lead, slot, at, parent, hash);
                let Some(block) = block else { return };
                parent = block;
                if let Some(reuse) = &mut self.reuse {
                    reuse.seqs[slot as usize].published = at + 1;
                }
            }
        }
    }

    /// The hashes of a stretch of a sequence's blocks, of which the one before is published. The
    /// processor is told which lines publishing them will touch, so that its misses overlap.
    pub(super) fn hashes_ahead(
        &self,
        slot: u32,
        blocks: std::ops::Range<u32>,
    ) -> [u64; AHEAD as usize] {
        let mut hashes = [0; AHEAD as usize];
        let Some(reuse) = &self.reuse else { return hashes };
        let Some(index) = &reuse.index else { return hashes };
        let per_block = self.plan.tokens_per_block as usize;
        let keys = &reuse.seqs[slot as usize].keys;
        let tokens = &reuse.tokens(slot)[blocks.start as usize * per_block..];
        let parent = match blocks.start {
            0 => NO_BLOCK,
            start => self.entry(index.lead(), slot, start - 1),
        };
        let mut hash = index.hash_after(parent);
        for ((at, tokens), of_block) in blocks.zip(tokens.chunks_exact(per_block)).zip(&mut hashes)
        {
            hash = index.chain(hash, tokens, keys.at(at));
            *of_block = hash;
            index.prefetch_insert(self.entry(index.lead(), slot, at), hash);
        }
        hashes
    }

    /// Publishes what a look-ahead held back, of a sequence that ends: nothing is rewound any more.
    pub(super) fn publish_the_rest(&mut self, slot: u32) {
        self.seqs.record_mut(slot).lookahead = 0;
        self.publish(slot);
    }

    /// Publishes one block of a row; gives the block that stands for these tokens from now on.
    /// `None` when the index has another one and taking that would cost a block that is not
    /// there: then it is tried again later.
    fn publish_block(
        &mut self,
        lead: usize,
        slot: u32,
        at: u32,
        parent: u32,
        hash: u64,
    ) -> Option<u32> {
        let per_block = self.plan.tokens_per_block;
        let own = self.entry(lead, slot, at);
        let Some(Reuse { index: Some(index), seqs, tokens, events, expiry, .. }) = &mut self.reuse
        else {
            return None;
        };
        let share = &seqs[slot as usize];
        let ns = share.keys.at(at);
        let row = slot as usize * self.plan.limits.max_seq_len as usize;
        let start = row + (at * per_block) as usize;
        let tokens = &tokens[start..start + per_block as usize];
        let (class, duration) = share.retentions.of_block(at * per_block, (at + 1) * per_block);
        let asked = !share.retentions.is_empty();
        let block = match index.find(hash, parent, ns, tokens) {
            Some(block) if block == own => own,
            Some(block) => {
                if !self.may_swap(lead, own, block) {
                    return None;
                }
                self.swap_for(lead, slot, at, block);
                self.counters.blocks_deduplicated += 1;
                if asked {
                    self.keep(block, class, duration);
                }
                block
            }
            None => {
                index.insert(own, (parent, ns), tokens, hash, class);
                events.stored(lead, own, (parent, ns), tokens);
                expiry.set_duration(own, duration);
                if let Some(store) = self.pool.store_mut(lead) {
                    store.set_class(BlockId(own), class);
                }
                self.counters.blocks_published += 1;
                self.raise_parents(own, class);
                own
            }
        };
        for windowed in 0..self.windowed_groups() {
            self.attach(windowed, slot, at, block);
        }
        Some(block)
    }

    /// Attaches a sequence's block of a windowed group to the published block of the same tokens,
    /// or takes the one that is attached.
    fn attach(&mut self, windowed: usize, slot: u32, at: u32, lead_block: u32) {
        let Some(index) = self.index() else { return };
        let group = index.windowed()[windowed];
        let there = index.attached(windowed, lead_block);
        let own = self.entry(group, slot, at);
        if own == NO_BLOCK || own == there {
            return;
        }
        // Of a sequence that was restored, the first of them may not be there whole.
        let whole = at * self.plan.tokens_per_block >= self.seqs.state(slot, group).holds_from;
        if there != NO_BLOCK {
            if self.may_swap(group, own, there) {
                self.swap_for(group, slot, at, there);
            }
            return;
        }
        let Some(reuse) = self.reuse.as_mut().filter(|_| whole) else { return };
        let Some(index) = &mut reuse.index else { return };
        index.attach(windowed, lead_block, own);
        reuse.events.attached(group, own, lead_block);
        let class = self.pool.store(index.lead()).map(|store| store.class(BlockId(lead_block)));
        let class = class.unwrap_or(DEFAULT_PRIORITY);
        if let Some(store) = self.pool.store_mut(group) {
            store.set_class(BlockId(own), class);
        }
    }

    /// Whether a row may give one full block up for another that holds the same tokens. Its own
    /// comes back only if nobody else holds it, a cached one stops being available, and what the
    /// two owe their other holders changes: all that must not cost a block that was promised. (A block
    /// is published by the commit that fills it, with one holder, which then costs none; so this
    /// refuses nothing as things are, and is what keeps the promise should they change.)
    fn may_swap(&self, group: usize, own: u32, other: u32) -> bool {
        let (own, other) = (BlockId(own), BlockId(other));
        let Some(store) = self.pool.store(group) else { return false };
        let cost = i64::from(store.holders(other) == 0) - i64::from(store.references(own) == 1)
            + store.debt_change(other, 1, 0, 0)
            + store.debt_change(own, -1, 0, 0);
        cost <= i64::from(store.unpromised())
    }

    /// Replaces a block of a row by one that holds the same tokens.
    fn swap_for(&mut self, group: usize, slot: u32, at: u32, block: u32) {
        let own = self.entry(group, slot, at);
        self.claim_block(group, block);
        self.set_entry(group, slot, at, block);
        self.give_up(group, BlockId(own));
        self.seqs.record_mut(slot).table_version += 1;
    }
}
