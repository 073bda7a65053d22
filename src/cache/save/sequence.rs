//! One sequence, into a file and back.

use std::path::Path;

use super::format::{self, BlockHead, Holds, Span};
use super::read::{Loader, Room, SequenceHead, Table};
use super::write::{Saver, Source};
use super::{RestoreOptions, SaveOptions, Saved};
use crate::cache::begin::Begun;
use crate::cache::prefix::{ChainKeys, Namespace};
use crate::cache::retention::{Retention, Retentions};
use crate::cache::{Cache, SeqHandle, group_idx};
use crate::error::{CacheError, SaveError};
use crate::plan::{Addressing, GroupKind, NO_BLOCK};

impl Cache {
    /// Writes a sequence to a file: its tokens, as far as their ids are known, its K and V, its
    /// limits, namespace and retentions. Layers with a window give what they still hold: the
    /// window, what a rewind may bring back, and the sinks. Changes nothing. The file of that name
    /// is replaced when the new one is whole and on the disk.
    ///
    /// Allocates buffers of [`Plan::save_bytes`](crate::plan::Plan::save_bytes) at most, and gives
    /// them back.
    ///
    /// # Errors
    /// [`SaveError::Cache`]: a stale or foreign handle, or the device failed;
    /// [`SaveError::Salted`], [`SaveError::Io`], [`SaveError::UnderWay`],
    /// [`SaveError::OutOfMemory`]. The old file is as it was, unless the error says that the new
    /// one is in its place.
    pub fn save_sequence(
        &self,
        sequence: SeqHandle,
        path: &Path,
        options: &SaveOptions,
    ) -> Result<Saved, SaveError> {
        let slot = self.seqs.check(sequence)?;
        let record = *self.seqs.record(slot);
        let known = if self.reuse.is_some() { record.known } else { 0 };
        let most = format::FRAME + format::SEQUENCE_FIXED + 4 * known as usize + format::CHECKSUM;
        let (namespace, retentions) = self.shares_of(slot);
        if options.unsalted_only && namespace.is_none_or(|namespace| namespace.salt.is_some()) {
            return Err(SaveError::Salted);
        }
        let mut saver = Saver::create(self, path, options, Holds::Sequence, most)?;
        saver.put(format::SEQUENCE, |out| {
            let numbers = [record.len, record.high_water, record.limit, record.lookahead, known];
            numbers.iter().for_each(|number| format::put32(out, *number));
            format::put32(out, namespace.is_some().into());
            let namespace = namespace.unwrap_or_default();
            format::put32(out, namespace.salt_from);
            format::put32(out, 0);
            format::put_name(out, &namespace.words(true));
            for range in retentions.ranges() {
                format::put32(out, range.map_or(0, |range| range.from));
                format::put32(out, range.map_or(0, |range| range.to));
                format::put64(out, range.and_then(|range| range.duration_ms).unwrap_or(u64::MAX));
                format::put32(out, range.map_or(0, |range| range.priority.into()));
                format::put32(out, 0);
            }
            let tokens = self.reuse.as_ref().map_or(&[][..], |reuse| reuse.tokens(slot));
            tokens[..known as usize].iter().for_each(|id| format::put32(out, *id));
        })?;
        let per_block = self.plan.tokens_per_block;
        let (mut start, mut parent) = (0, NO_BLOCK);
        while start < record.len {
            let tokens = per_block.min(record.len - start);
            let head = BlockHead::of_sequence(parent, tokens);
            parent = saver.block(&head, start, &[], &|group| {
                (Source::Row(slot), self.span_of_sequence(group, slot, start, tokens))
            })?;
            start += tokens;
        }
        Ok(self.saves.counted(saver.finish()?))
    }

    /// Whom a sequence shares with, if with anyone of the present epoch, and its retentions.
    fn shares_of(&self, slot: u32) -> (Option<Namespace>, Retentions) {
        let Some(reuse) = &self.reuse else { return (None, Retentions::NONE) };
        let share = &reuse.seqs[slot as usize];
        if let Some(name) = reuse.names.get(slot as usize) {
            let namespace = (name.epoch == Some(reuse.epoch)).then_some(name.namespace);
            return (namespace, share.retentions);
        }
        let keys = &share.keys;
        let namespace = self.index().and_then(|index| {
            let (first, epoch) = index.name(keys.first)?;
            let salted = index.name(keys.salted).map(|(words, _)| words);
            let salt_from = keys.salted_at * self.plan.tokens_per_block;
            let namespace = Namespace::of_words(&first, salted.as_ref(), salt_from)?;
            (epoch == reuse.epoch).then_some(namespace)
        });
        (namespace, share.retentions)
    }

    /// Which tokens of a block a sequence has in a group.
    fn span_of_sequence(&self, group: usize, slot: u32, start: u32, tokens: u32) -> Span {
        let layers = &self.plan.groups[group];
        if layers.window.is_none() {
            return Span::WHOLE;
        }
        let record = self.seqs.record(slot);
        let state = self.seqs.state(slot, group);
        let per_block = self.plan.tokens_per_block;
        // In whole blocks, as far as they are there.
        let kept = self.plan.keep_from(group_idx(group), record.high_water) / per_block * per_block;
        let lost = match layers.layout.addressing {
            Addressing::Ring => record.written.saturating_sub(layers.layout.ring_tokens),
            Addressing::Slot | Addressing::Blocks => 0,
        };
        let sinks = layers.layout.sink_tokens;
        let whole_sinks = layers.kind == GroupKind::Paged && state.holds_from == 0;
        let head = if whole_sinks { sinks.next_multiple_of(per_block) } else { sinks };
        Span::new(start, tokens, head, kept.max(lost).max(state.holds_from))
    }

    /// Begins a sequence that was saved: with the same tokens and, bit for bit, the same K and V,
    /// whatever mode and block size this plan has. It is admitted as by [`Cache::begin`], without
    /// looking for a prefix; the next step goes on behind its last token. `cached_len` is the
    /// tokens that it has.
    ///
    /// Its limit is that of the file, or `options.max_len` and the file's look-ahead, and
    /// `limits.max_seq_len` at most. Where this plan may rewind windowed layers further than the
    /// file has their tokens, [`Cache::truncate`] says so.
    ///
    /// The whole file is checked first. Buffers as [`Cache::save_sequence`].
    ///
    /// # Errors
    /// What is wrong with the file, or what this plan has otherwise ([`SaveError`]); as
    /// [`Cache::begin`]. Nothing changes then. If the device fails, or the file is changed by
    /// another meanwhile or cannot be read any more, what was evicted to make room stays so.
    pub fn restore_sequence(
        &mut self,
        path: &Path,
        options: &RestoreOptions,
    ) -> Result<Begun, SaveError> {
        self.abandon_step();
        let epoch = self.reuse.as_ref().map(|reuse| reuse.epoch);
        let (mut loader, header, first) =
            Loader::open(&self.plan, path, Holds::Sequence, options, epoch)?;
        let blocks = self.plan.limits.max_seq_len.div_ceil(header.block_tokens) as usize + 1;
        let table = loader.verify(header, first, Room { entries: blocks, names: 0 })?;
        let head =
            table.sequence.ok_or(SaveError::Damaged { at: first, problem: "no sequence" })?;
        let limit = self.check_sequence(&head, options)?;
        let holds_from = self.windows_of_file(&mut loader, &table, head.len)?;
        let (begun, free_at) = self.admit_saved(&head, limit, options)?;
        let slot = begun.sequence.slot;
        let high_water = self.high_water_of(&head, &holds_from);
        let written = self
            .fill_sequence(&mut loader, &table, &head, (slot, high_water), &holds_from)
            .and_then(|()| Ok(self.pool.device.submit()?))
            .and_then(|()| Ok(self.scrub_begun_slot(slot, head.len)?))
            .and_then(|()| Ok(self.check_scrubbed()?));
        if let Err(error) = written {
            self.abandon_begun(begun.sequence, free_at);
            return Err(error);
        }
        self.finish_sequence(&head, slot, high_water);
        self.scrub_freed();
        Ok(begun)
    }

    /// Checks a sequence by itself; gives the most tokens that it may have.
    fn check_sequence(
        &self,
        head: &SequenceHead,
        options: &RestoreOptions,
    ) -> Result<u32, SaveError> {
        let most = self.plan.limits.max_seq_len;
        let limit = match options.max_len {
            Some(len) if len > most => {
                let wanted = u64::from(len);
                let knob = "limits.max_seq_len";
                return Err(CacheError::SequenceTooLong { wanted, limit: most, knob }.into());
            }
            Some(len) => len.saturating_add(head.lookahead).min(most),
            None => head.limit.min(most),
        };
        let len = head.len.max(head.known);
        if len > limit {
            let knob = if limit < most { "max_len of the restore" } else { "limits.max_seq_len" };
            return Err(CacheError::SequenceTooLong { wanted: len.into(), limit, knob }.into());
        }
        if let Some(key) = options.key.filter(|key| self.seqs.has_key(*key)) {
            return Err(CacheError::DuplicateKey { key }.into());
        }
        let rewind = self.plan.limits.max_rewind_tokens;
        if self.has_windows && head.lookahead > rewind {
            let wanted = head.lookahead;
            return Err(CacheError::LookaheadBeyondRewind { wanted, limit: rewind }.into());
        }
        Ok(limit)
    }

    /// From where on the file has the tokens of each group, sinks aside: no later than the next
    /// query needs them. `[num_groups]`
    fn windows_of_file(
        &self,
        loader: &mut Loader,
        table: &Table,
        len: u32,
    ) -> Result<Vec<u32>, SaveError> {
        let groups = self.plan.groups.len();
        let mut holds_from = super::buffer_of(groups, 0)?;
        for entry in &table.entries {
            let block = loader.block(entry, table.header.block_tokens)?;
            for (group, holds_from) in holds_from.iter_mut().enumerate() {
                let layers = &self.plan.groups[group];
                for layer in &layers.layers {
                    let span = block.span(layer.index());
                    if span == Span::WHOLE {
                        continue;
                    }
                    let sinks =
                        0..layers.layout.sink_tokens.saturating_sub(entry.start).min(entry.tokens);
                    let held = entry.start + u32::from(span.from);
                    let needed = match layers.window {
                        Some(window) if sinks.is_empty() || span.covers(&sinks) => {
                            (len + 1).saturating_sub(window)
                        }
                        Some(_) => entry.start,
                        None => 0,
                    };
                    if held > needed {
                        return Err(SaveError::NotWhole { layer: layer.0, needed, held });
                    }
                    // The group has what all of its layers have.
                    *holds_from = held.max(*holds_from);
                }
            }
        }
        Ok(holds_from)
    }

    /// Admits a sequence, and takes its slot and its promises. Gives where in the free list the slot
    /// was, too.
    fn admit_saved(
        &mut self,
        head: &SequenceHead,
        limit: u32,
        options: &RestoreOptions,
    ) -> Result<(Begun, usize), SaveError> {
        let checked = self.admit_without_prefix(head.len, limit);
        if let Err(error) = checked {
            self.note_refusal(&error);
            return Err(error.into());
        }
        let no_slot = CacheError::NoSeqSlot { seq_slots: self.plan.seq_slots };
        let at = self.choose_slot(None).ok_or(no_slot)?;
        let sequence = self.seqs.take_at(at, options.key, limit);
        let slot = sequence.slot;
        self.begun += 1;
        self.seqs.record_mut(slot).begun = self.begun;
        let namespace = name_of(head);
        if let Some(reuse) = &mut self.reuse {
            let share = &mut reuse.seqs[slot as usize];
            (share.published, share.retained) = (0, 0);
            share.keys = match (&mut reuse.index, namespace) {
                (Some(index), Some(namespace)) => index.take_keys(&namespace),
                _ => ChainKeys::NONE,
            };
        }
        if self.guaranteed() {
            for group in 0..self.plan.groups.len() {
                let quota = self.plan.blocks_for(group_idx(group), limit);
                let state = self.seqs.state_mut(slot, group);
                state.quota = quota;
                let promised = state.promised();
                if let Some(store) = self.pool.store_mut(group) {
                    let promised = store.promise(promised);
                    debug_assert!(promised.is_ok(), "the admission has counted them");
                }
            }
        }
        Ok((Begun { sequence, cached_len: head.len, limit }, at))
    }

    /// The length that a sequence is taken to have had once: it can be rewound no further than the
    /// file has the windows.
    fn high_water_of(&self, head: &SequenceHead, holds_from: &[u32]) -> u32 {
        let rewind = self.plan.limits.max_rewind_tokens;
        let mut high_water = head.high_water.min(head.len + rewind);
        for (group, from) in holds_from.iter().enumerate() {
            if let Some(window) = self.plan.groups[group].window.filter(|_| *from > 0) {
                high_water = high_water.max(from + window + rewind - 1);
            }
        }
        high_water
    }

    /// Gives a sequence that was admitted its blocks and everything that the file has for them.
    fn fill_sequence(
        &mut self,
        loader: &mut Loader,
        table: &Table,
        head: &SequenceHead,
        (slot, high_water): (u32, u32),
        holds_from: &[u32],
    ) -> Result<(), SaveError> {
        // A ring has places that the file has nothing for.
        self.scrub_whole_slot(slot)?;
        self.note_dirty(slot);
        self.seqs.record_mut(slot).written = high_water;
        for (group, from) in holds_from.iter().enumerate() {
            self.seqs.state_mut(slot, group).holds_from = *from;
            self.take_saved_blocks(group, slot, head.len, high_water)?;
        }
        for entry in &table.entries {
            let block = loader.block(entry, table.header.block_tokens)?;
            self.write_row(&block, entry, slot, entry.tokens, &|cache, group| {
                let layout = &cache.plan.groups[group].layout;
                let per_block = layout.unit_tokens;
                // All that the row keeps.
                let (sinks, from) = match layout.addressing {
                    Addressing::Blocks => {
                        let first = cache.plan.keep_from(group_idx(group), high_water) / per_block;
                        (layout.sink_tokens.next_multiple_of(per_block), first * per_block)
                    }
                    Addressing::Slot => (layout.sink_tokens, holds_from[group]),
                    Addressing::Ring => {
                        let kept = high_water.saturating_sub(layout.ring_tokens);
                        (layout.sink_tokens, kept.max(holds_from[group]))
                    }
                };
                Some((sinks, from))
            })?;
        }
        if self.reuse.is_some() {
            let ids = loader.sequence_ids(head)?;
            if let Some(reuse) = &mut self.reuse {
                reuse.tokens_mut(slot).iter_mut().zip(ids).for_each(|(id, saved)| *id = saved);
            }
        }
        Ok(())
    }

    /// Takes the blocks of one group that a sequence of `len` tokens holds.
    fn take_saved_blocks(
        &mut self,
        group: usize,
        slot: u32,
        len: u32,
        high_water: u32,
    ) -> Result<(), SaveError> {
        if self.pool.store(group).is_none() {
            return Ok(());
        }
        let layout = &self.plan.groups[group].layout;
        let per_block = layout.unit_tokens;
        let sink_blocks = layout.sink_tokens.div_ceil(per_block);
        let first = self.plan.keep_from(group_idx(group), high_water) / per_block;
        let next = len.div_ceil(per_block);
        {
            let state = self.seqs.state_mut(slot, group);
            (state.first, state.next) = (first.min(next), next);
        }
        for at in (0..next).filter(|at| *at < sink_blocks || *at >= first) {
            self.take_block(group, slot, at).ok_or(self.exhausted(group, 1))?;
        }
        Ok(())
    }

    /// Makes a sequence whose bytes are there like any other.
    fn finish_sequence(&mut self, head: &SequenceHead, slot: u32, high_water: u32) {
        let record = self.seqs.record_mut(slot);
        record.len = head.len;
        record.high_water = high_water;
        for group in 0..self.plan.groups.len() {
            self.live_tokens[group] += self.live_in(group, slot);
            self.set_tail(group, slot, true);
        }
        self.seqs.record_mut(slot).lookahead = head.lookahead;
        self.counters.seqs_begun += 1;
        self.counters.restored_seqs += 1;
        if let Some(reuse) = &mut self.reuse {
            let namespace = name_of(head);
            let share = &mut reuse.seqs[slot as usize];
            share.retentions = retentions_of(head);
            if let Some(name) = reuse.names.get_mut(slot as usize) {
                name.namespace = namespace.unwrap_or_default();
                name.epoch = namespace.map(|_| reuse.epoch);
            }
            if let Some(namespace) = namespace {
                self.seqs.record_mut(slot).known = head.known;
                self.name_sequence(slot, &namespace);
                self.publish(slot);
            }
        }
        self.note_peaks();
    }
}

/// Whom a saved sequence shares with.
fn name_of(head: &SequenceHead) -> Option<Namespace> {
    let salt_from = head.salt_from;
    // The words were found to be right.
    let namespace = Namespace::of_words(&head.name, Some(&head.name), salt_from);
    namespace.filter(|_| head.shares)
}

fn retentions_of(head: &SequenceHead) -> Retentions {
    let none = Retention { from: 0, to: 0, priority: 0, duration_ms: None };
    let mut ranges = [none; 4];
    let mut count = 0;
    for range in head.retentions.iter().flatten() {
        ranges[count] = *range;
        count += 1;
    }
    // Those of a file of ours are right.
    Retentions::new(&ranges[..count]).unwrap_or_default()
}
