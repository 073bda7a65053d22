//! A digest of a cache in which names do not count: for the test that follows every state once.
//!
//! Which block or slot it is that holds something changes nothing that a caller can see, nor do the
//! counters, nor how a cache came to where it is. Here blocks and slots are named by where they are
//! met, so that states that differ in names alone have the same digest, and the search goes on from
//! one of them. What is left out must change nothing later, so the bytes that some sequence may
//! come to read are part of it.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::audit::Digest;
use super::{Cache, SeqHandle};
use crate::config::Admission;
use crate::error::CacheError;
use crate::plan::{GroupKind, Kv, NO_BLOCK, SCALE_BYTES};
use crate::units::BlockId;

/// The names of slots and blocks.
struct Names {
    /// The slots in the order of their names.
    slots: Vec<u32>,
    /// The blocks of each group in the order of their names, and the name of each. Empty for a
    /// contiguous group. `[num_groups][blocks]`
    blocks: Vec<(Vec<u32>, Vec<u32>)>,
}

impl Names {
    /// The name of a block; [`NO_BLOCK`] for none, and for one that has none yet.
    fn of(&self, group: usize, block: u32) -> u32 {
        self.blocks[group].1.get(block as usize).copied().unwrap_or(NO_BLOCK)
    }

    fn meet(&mut self, group: usize, block: u32) {
        let (order, names) = &mut self.blocks[group];
        if let Some(name) = names.get_mut(block as usize).filter(|name| **name == NO_BLOCK) {
            *name = u32::try_from(order.len()).unwrap_or(NO_BLOCK);
            order.push(block);
        }
    }
}

impl Cache {
    /// A digest of everything that later verbs depend on, and of every byte that a sequence may
    /// come to read, but for the names of blocks and slots, the counters and the numbers of events.
    /// Each live sequence comes with a word of the caller's, which is part of it; in which order
    /// they come changes nothing.
    ///
    /// In a plan with contiguous layers the names of slots count: of two that give as much of a
    /// prefix, a new sequence copies from the lower one.
    ///
    /// # Errors
    /// A stale or foreign handle; the device's.
    #[doc(hidden)]
    pub fn shape_digest(&self, sequences: &[(SeqHandle, u64)]) -> Result<u64, CacheError> {
        let bytes = self.bytes_in_use()?;
        let mut marked = Vec::new();
        for (sequence, mark) in sequences {
            marked.push((self.seqs.check(*sequence)?, *mark));
        }
        let mut least = u64::MAX;
        each_order(&mut marked, 0, &mut |order| {
            least = least.min(self.shape_in_order(order, &bytes));
        });
        Ok(least)
    }

    /// What stands for the bytes of each unit that someone may come to read. `[num_groups][units]`
    fn bytes_in_use(&self) -> Result<Vec<Vec<u64>>, CacheError> {
        let mut all = Vec::new();
        for (group, layers) in self.plan.groups.iter().enumerate() {
            let layout = &layers.layout;
            let mut row_bytes = vec![0; (layout.head_dim * layout.element_bytes) as usize];
            let mut scale_bytes = vec![0; (layout.scales_per_row * SCALE_BYTES) as usize];
            let in_use = self.places_in_use(group);
            let mut units = Vec::new();
            for (unit, tokens) in (0..).zip(in_use.chunks(layout.unit_tokens as usize)) {
                let mut digest = Digest::new();
                for (token, _) in (0..).zip(tokens).filter(|(_, in_use)| **in_use) {
                    digest.push(u64::from(token));
                    for layer in 0..layout.num_layers {
                        for kv in [Kv::K, Kv::V] {
                            for head in 0..layout.num_kv_heads {
                                let at = layout.row(unit, layer, kv, head, token);
                                self.pool.device.read(at, &mut row_bytes)?;
                                push_bytes(&mut digest, &row_bytes);
                                if !scale_bytes.is_empty() {
                                    let at = layout.scales(unit, layer, kv, head, token);
                                    self.pool.device.read(at, &mut scale_bytes)?;
                                    push_bytes(&mut digest, &scale_bytes);
                                }
                            }
                        }
                    }
                }
                units.push(digest.value());
            }
            all.push(units);
        }
        Ok(all)
    }

    /// Names everything in the order in which it is met, from these sequences on.
    fn names(&self, sequences: &[(u32, u64)]) -> Names {
        let mut slots: Vec<u32> = sequences.iter().map(|(slot, _)| *slot).collect();
        let others = (0..self.plan.seq_slots).filter(|slot| !slots.contains(slot));
        let others: Vec<u32> = others.filter(|slot| self.seqs.record(*slot).alive).collect();
        slots.extend(others);
        slots.extend(self.seqs.free.iter().rev());
        let mut names = Names { slots, blocks: Vec::new() };
        for group in 0..self.plan.groups.len() {
            let total = self.pool.store(group).map_or(0, |store| store.total());
            names.blocks.push((Vec::new(), vec![NO_BLOCK; total as usize]));
            let Some(store) = self.pool.store(group) else { continue };
            for at in 0..names.slots.len() {
                for (_, block) in self.held_blocks(group, names.slots[at]) {
                    names.meet(group, block.0);
                }
            }
            store.free_list().chain(store.cached_list()).for_each(|b| names.meet(group, b.0));
        }
        let Some(reuse) = &self.reuse else { return names };
        let Some(index) = &reuse.index else { return names };
        // What is left is pinned, and nobody else holds it.
        for (last, ..) in reuse.pins.all() {
            let mut block = last;
            while block != NO_BLOCK {
                names.meet(index.lead(), block);
                block = index.parent(block);
            }
        }
        for at in 0..names.blocks[index.lead()].0.len() {
            let block = names.blocks[index.lead()].0[at];
            for (windowed, group) in index.windowed().iter().enumerate() {
                names.meet(*group, index.attached(windowed, block));
            }
        }
        names
    }

    /// The digest with the sequences in this order, each with its mark.
    fn shape_in_order(&self, sequences: &[(u32, u64)], bytes: &[Vec<u64>]) -> u64 {
        let names = self.names(sequences);
        let mut digest = Digest::new();
        sequences.iter().for_each(|(_, mark)| digest.push(*mark));
        digest.push(u64::from(self.batch_closed) | u64::from(self.preempted) << 1);
        for slot in &names.slots {
            self.push_sequence(*slot, &names, &mut digest);
        }
        for (group, layers) in self.plan.groups.iter().enumerate() {
            if layers.kind == GroupKind::Contiguous {
                names.slots.iter().for_each(|slot| digest.push(bytes[group][*slot as usize]));
            }
            let Some(store) = self.pool.store(group) else { continue };
            for block in store.free_list().chain(store.cached_list()) {
                digest.push(u64::from(names.of(group, block.0)));
            }
            digest.push(u64::from(store.free()) << 32 | u64::from(store.counts().promised));
            for &block in &names.blocks[group].0 {
                let (tails, holds, pins) = store.kinds(BlockId(block));
                digest.push(u64::from(store.references(BlockId(block))));
                digest.push(u64::from(tails) << 32 | u64::from(holds) << 16 | u64::from(pins));
                digest.push(u64::from(store.class(BlockId(block))));
                digest.push(bytes[group][block as usize]);
            }
        }
        self.push_index(&names, &mut digest);
        digest.value()
    }

    /// A slot: its sequence, or what was left in it.
    fn push_sequence(&self, slot: u32, names: &Names, digest: &mut Digest) {
        let record = self.seqs.record(slot);
        let contiguous = self.plan.groups.iter().any(|g| g.kind == GroupKind::Contiguous);
        if contiguous {
            digest.push(u64::from(slot));
            digest.push(u64::from(record.written));
        }
        digest.push(u64::from(record.alive) << 1 | u64::from(record.reserved));
        digest.push(record.key.map_or(0, |key| key ^ 0x5555));
        for number in [record.len, record.high_water, record.limit, record.known, record.lookahead]
        {
            digest.push(u64::from(number));
        }
        if self.plan.admission == Admission::MaxUtilization {
            // Who is older counts, when the youngest must go.
            let older = self.seqs.records.iter().filter(|other| other.begun < record.begun);
            digest.push(older.count() as u64);
        }
        for group in 0..self.plan.groups.len() {
            let state = self.seqs.state(slot, group);
            for number in [state.first, state.next, state.held, state.quota] {
                digest.push(u64::from(number));
            }
            digest.push(u64::from(state.shared_tail));
            for (at, block) in self.held_blocks(group, slot) {
                digest.push(u64::from(at) << 32 | u64::from(names.of(group, block.0)));
            }
        }
        let Some(reuse) = &self.reuse else { return };
        let share = &reuse.seqs[slot as usize];
        let mut hasher = DefaultHasher::new();
        share.retentions.hash(&mut hasher);
        (share.published, share.retained, share.wanted).hash(&mut hasher);
        (share.keys.first, share.keys.salted, share.keys.salted_at).hash(&mut hasher);
        let known = record.known.max(share.retained) as usize;
        reuse.tokens(slot)[..known].hash(&mut hasher);
        if let Some(name) = reuse.names.get(slot as usize).filter(|_| known > 0) {
            (name.namespace, name.epoch).hash(&mut hasher);
        }
        // Only the order of the releases counts.
        let earlier = reuse.seqs.iter().filter(|other| other.released < share.released);
        earlier.count().hash(&mut hasher);
        digest.push(hasher.finish());
    }

    /// The index, the time limits and the pins.
    fn push_index(&self, names: &Names, digest: &mut Digest) {
        let Some(reuse) = &self.reuse else { return };
        digest.push(reuse.epoch);
        let Some(index) = &reuse.index else { return };
        let lead = index.lead();
        let mut tokens = vec![0; self.plan.tokens_per_block as usize];
        for &block in &names.blocks[lead].0 {
            digest.push(u64::from(index.is_published(block)));
            if !index.is_published(block) {
                continue;
            }
            let links = [
                index.parent(block),
                index.sibling(block).unwrap_or(NO_BLOCK),
                index.children(block).next().unwrap_or(NO_BLOCK),
            ];
            links.iter().for_each(|link| digest.push(u64::from(names.of(lead, *link))));
            digest.push(
                u64::from(index.namespace_of(block)) << 8 | u64::from(index.own_class(block)),
            );
            index.load_tokens(block, &mut tokens);
            tokens.iter().for_each(|token| digest.push(u64::from(*token)));
            digest.push(reuse.expiry.duration(block));
            let due = reuse.expiry.due(block).map(|due| due.saturating_sub(reuse.expiry.now_ms));
            digest.push(due.unwrap_or(u64::MAX));
            for (windowed, group) in index.windowed().iter().enumerate() {
                digest.push(u64::from(names.of(*group, index.attached(windowed, block))));
            }
        }
        for (last, blocks, windows) in reuse.pins.all() {
            digest.push(u64::from(names.of(lead, last)) << 32 | u64::from(blocks));
            windows
                .iter()
                .for_each(|(from, to)| digest.push(u64::from(*from) << 32 | u64::from(*to)));
        }
    }
}

/// Calls `each` with every order of `items` from `at` on.
fn each_order<T: Copy>(items: &mut [T], at: usize, each: &mut dyn FnMut(&[T])) {
    if at + 1 >= items.len() {
        return each(items);
    }
    for other in at..items.len() {
        items.swap(at, other);
        each_order(items, at + 1, each);
        items.swap(at, other);
    }
}

fn push_bytes(digest: &mut Digest, bytes: &[u8]) {
    for eight in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..eight.len()].copy_from_slice(eight);
        digest.push(u64::from_le_bytes(word));
    }
}
