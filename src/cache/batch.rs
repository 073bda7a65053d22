//! The batch of the step under way: which sequences, which positions, which token slots.
//!
//! All buffers have their largest size from open on; a step writes prefixes of them.

use super::cow::Replaced;
use super::sequence::SeqHandle;
use super::{Cache, group_idx};
use crate::config::Admission;
use crate::device::{AppendCounts, BatchSeq};
use crate::error::CacheError;
use crate::plan::{BATCH_SEQ_BYTES, GroupKind, Plan, SeqView};
use crate::units::{GroupIdx, LayerIdx};

const _: () = assert!(size_of::<BatchSeq>() as u64 == BATCH_SEQ_BYTES);

/// The blocks of a batch in compressed sparse row form, as FlashInfer takes it.
///
/// In a windowed group the blocks of a sequence begin with those of its sinks, if it has any, and
/// go on at `kv_first_position`; what lies between has left the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Csr<'a> {
    /// Where each sequence's blocks begin in `kv_indices`, and the end. `[num_seqs + 1]`
    pub kv_indptr: &'a [u32],
    /// The blocks of all sequences, in order of position. `[kv_indptr[num_seqs]]`
    pub kv_indices: &'a [u32],
    /// Tokens in each sequence's last block, 1..=`tokens_per_block`. `[num_seqs]`
    pub kv_last_block_len: &'a [u32],
    /// Position of the first token of each sequence's first block behind the sinks' blocks; 0 in
    /// a group without a window. `[num_seqs]`
    pub kv_first_position: &'a [u32],
}

/// The buffers of one paged group's CSR form.
#[derive(Debug)]
struct CsrBuffers {
    kv_indptr: Vec<u32>,
    kv_indices: Vec<u32>,
    kv_last_block_len: Vec<u32>,
    kv_first_position: Vec<u32>,
}

impl CsrBuffers {
    fn new(seqs: usize, table_entries: usize) -> Self {
        Self {
            kv_indptr: Vec::with_capacity(seqs + 1),
            kv_indices: Vec::with_capacity(table_entries),
            kv_last_block_len: Vec::with_capacity(seqs),
            kv_first_position: Vec::with_capacity(seqs),
        }
    }

    fn clear(&mut self) {
        self.kv_indptr.clear();
        self.kv_indices.clear();
        self.kv_last_block_len.clear();
        self.kv_first_position.clear();
    }
}

/// The buffers, and whether a step is open.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) seqs: Vec<BatchSeq>,
    pub(super) positions: Vec<u32>,
    /// `[num_groups][tokens]`
    pub(super) token_slots: Vec<Vec<u64>>,
    pub(super) seq_lens: Vec<u32>,
    /// `[num_layers]`
    pub(super) appended: Vec<bool>,
    /// Elements that the step's appends had to change; counted when it commits.
    pub(super) counts: AppendCounts,
    /// Blocks that the step needs of each group. `[num_groups]`
    pub(super) wanted: Vec<u64>,
    /// The last blocks that it copies because others hold them too.
    pub(super) replaced: Vec<Replaced>,
    /// Groups and blocks that it takes out of the index, to write in place.
    pub(super) withdrawn: Vec<(u32, u32)>,
    /// Whether it was told which tokens it appends.
    tokens_given: bool,
    /// Whether a step is open. It still is when its [`Step`](super::Step) was leaked.
    open: bool,
    /// `[num_groups]`, `None` for contiguous groups.
    csr: Vec<Option<CsrBuffers>>,
    csr_built: bool,
    /// The number of the step, to tell sequences that it names from others.
    number: u64,
}

impl Batch {
    pub(super) fn new(plan: &Plan) -> Self {
        let tokens = plan.limits.max_batch_tokens as usize;
        let seqs = tokens.min(plan.seq_slots as usize);
        let csr = plan.groups.iter().map(|group| {
            let entries = group.max_blocks_per_seq as usize * plan.seq_slots as usize;
            (group.kind == GroupKind::Paged).then(|| CsrBuffers::new(seqs, entries))
        });
        Self {
            seqs: Vec::with_capacity(seqs),
            positions: Vec::with_capacity(tokens),
            token_slots: plan.groups.iter().map(|_| Vec::with_capacity(tokens)).collect(),
            seq_lens: Vec::with_capacity(seqs),
            appended: vec![false; plan.layers.len()],
            counts: AppendCounts::default(),
            wanted: vec![0; plan.groups.len()],
            replaced: Vec::with_capacity(seqs * csr.clone().flatten().count()),
            withdrawn: Vec::with_capacity(seqs * csr.clone().flatten().count()),
            tokens_given: false,
            open: false,
            csr: csr.collect(),
            csr_built: false,
            number: 0,
        }
    }

    fn clear(&mut self) {
        self.seqs.clear();
        self.positions.clear();
        self.token_slots.iter_mut().for_each(Vec::clear);
        self.seq_lens.clear();
        self.appended.fill(false);
        self.counts = AppendCounts::default();
        self.replaced.clear();
        self.tokens_given = false;
        self.open = false;
        self.csr_built = false;
    }
}

impl Cache {
    /// Checks a batch and takes its blocks: all or nothing. `tokens` are the ids of all tokens in
    /// the order of the rows, where the caller knows them.
    pub(super) fn open_step(
        &mut self,
        wanted: &[(SeqHandle, u32)],
        tokens: Option<&[u32]>,
    ) -> Result<(), CacheError> {
        self.abandon_step();
        self.batch.number += 1;
        self.batch.clear();
        self.batch.wanted.fill(0);
        let shared_tails = self.check_batch(wanted)?;
        if let Some(tokens) = tokens {
            self.check_tokens(wanted, tokens)?;
        }
        if shared_tails {
            self.hold_shared_tails(wanted);
        }
        if let Err(error) = self.check_batch_blocks() {
            self.unhold_shared_tails();
            return Err(error);
        }
        self.batch.open = true;
        self.withdraw_tails();
        if let Err(error) = self.copy_shared_tails() {
            self.undo_step();
            return Err(error);
        }
        for &(sequence, tokens) in wanted {
            self.take_for_step(sequence.slot, tokens);
        }
        if let Some(tokens) = tokens {
            self.note_tokens(wanted, tokens);
        }
        self.note_peaks();
        Ok(())
    }

    /// Handles, lengths, limits; sums up the blocks that are wanted. Marks sequences with the
    /// step's number, which no one else reads. Says whether some last block may be shared.
    fn check_batch(&mut self, wanted: &[(SeqHandle, u32)]) -> Result<bool, CacheError> {
        let limits = &self.plan.limits;
        let mut total = 0_u64;
        let mut shared_tails = false;
        for &(sequence, tokens) in wanted {
            let slot = self.seqs.check(sequence)?;
            let record = self.seqs.record_mut(slot);
            if record.last_step == self.batch.number {
                return Err(CacheError::SequenceTwice { slot });
            }
            record.last_step = self.batch.number;
            if tokens == 0 {
                return Err(CacheError::ZeroTokens { slot });
            }
            if tokens > limits.max_step_tokens {
                return Err(CacheError::StepTooLarge {
                    wanted: u64::from(tokens),
                    limit: limits.max_step_tokens,
                    knob: "limits.max_step_tokens (tokens of one sequence)",
                });
            }
            let len = u64::from(record.len) + u64::from(tokens);
            if len > u64::from(record.limit) {
                let knob = if record.limit < limits.max_seq_len {
                    "max_len of begin"
                } else {
                    "limits.max_seq_len"
                };
                return Err(CacheError::SequenceTooLong { wanted: len, limit: record.limit, knob });
            }
            total += u64::from(tokens);
            let end = record.len + tokens;
            for (group, wanted) in self.batch.wanted.iter_mut().enumerate() {
                let layers = &self.plan.groups[group];
                if layers.kind == GroupKind::Paged {
                    let state = self.seqs.state(slot, group);
                    shared_tails |= state.shared_tail;
                    // `tokens_per_block` is a power of two.
                    let blocks = (end + self.block_mask) >> self.block_shift;
                    *wanted += u64::from(blocks - state.next);
                }
            }
        }
        if total > u64::from(limits.max_batch_tokens) {
            return Err(CacheError::StepTooLarge {
                wanted: total,
                limit: limits.max_batch_tokens,
                knob: "limits.max_batch_tokens",
            });
        }
        Ok(shared_tails)
    }

    /// Whether the tokens are as many as the step's, and those that the prompts had.
    fn check_tokens(&self, wanted: &[(SeqHandle, u32)], tokens: &[u32]) -> Result<(), CacheError> {
        let total: usize = wanted.iter().map(|(_, tokens)| *tokens as usize).sum();
        if tokens.len() != total {
            let (got, shape) = (tokens.len(), "[num_tokens]");
            return Err(CacheError::WrongShape { what: "tokens", got, expected: total, shape });
        }
        let Some(reuse) = &self.reuse else { return Ok(()) };
        let mut start = 0;
        for &(sequence, count) in wanted {
            let slot = sequence.slot;
            let record = self.seqs.record(slot);
            let given = &tokens[start..start + count as usize];
            start += count as usize;
            if record.known <= record.len {
                continue;
            }
            let known = &reuse.tokens(slot)[record.len as usize..record.known as usize];
            let pairs = (record.len..).zip(known.iter().zip(given));
            for (position, (known, given)) in pairs {
                if known != given {
                    let (known, given) = (*known, *given);
                    return Err(CacheError::TokenMismatch { slot, position, known, given });
                }
            }
        }
        Ok(())
    }

    /// Writes the step's tokens to their sequences' rows. They count as known when it commits.
    fn note_tokens(&mut self, wanted: &[(SeqHandle, u32)], tokens: &[u32]) {
        let Some(reuse) = &mut self.reuse else { return };
        self.batch.tokens_given = true;
        let mut start = 0;
        for &(sequence, count) in wanted {
            let len = self.seqs.record(sequence.slot).len as usize;
            let row = &mut reuse.tokens_mut(sequence.slot)[len..len + count as usize];
            row.copy_from_slice(&tokens[start..start + count as usize]);
            start += count as usize;
        }
    }

    /// Whether every paged group has the blocks. Under guaranteed admission they were promised.
    fn check_batch_blocks(&self) -> Result<(), CacheError> {
        for (group, &wanted) in self.batch.wanted.iter().enumerate() {
            let Some(store) = self.pool.store(group) else { continue };
            if wanted > u64::from(store.available()) {
                let available = u64::from(store.available());
                return Err(CacheError::PoolExhausted {
                    group: group_idx(group),
                    wanted,
                    available,
                });
            }
        }
        Ok(())
    }

    /// Takes the blocks of one sequence and writes its part of the batch. There are enough.
    fn take_for_step(&mut self, slot: u32, tokens: u32) {
        let record = self.seqs.record_mut(slot);
        let first_position = record.len;
        let end = first_position + tokens;
        record.written = record.written.max(end);
        for group in 0..self.plan.groups.len() {
            self.take_blocks(group, slot, end);
            let layout = &self.plan.groups[group].layout;
            let row = self.plan.groups[group].max_blocks_per_seq as usize;
            let start = slot as usize * row;
            let table = &self.tables[group][start..start + row];
            let view = SeqView { layout, table, slot };
            let mut position = first_position;
            while position < end {
                let run = view.run(position, end);
                let token_slot = view.token_slot(position);
                self.batch.token_slots[group].extend(token_slot..token_slot + u64::from(run));
                position += run;
            }
        }
        let row_start = u32::try_from(self.batch.positions.len()).unwrap_or(u32::MAX);
        self.batch.positions.extend(first_position..end);
        self.batch.seqs.push(BatchSeq { slot, row_start, rows: tokens, first_position });
        self.batch.seq_lens.push(end);
    }

    /// Gives a row the blocks that it lacks for its first `end` tokens.
    fn take_blocks(&mut self, group: usize, slot: u32, end: u32) {
        if self.pool.store(group).is_none() {
            return;
        }
        let per_block = self.plan.groups[group].layout.unit_tokens;
        for at in self.seqs.state(slot, group).next..end.div_ceil(per_block) {
            let block = self.take_block(group, slot, at);
            debug_assert!(block.is_some(), "check_batch_blocks counted them");
            self.seqs.state_mut(slot, group).next = at + 1;
        }
    }

    /// Undoes a step whose [`Step`](super::Step) was leaked, so that it was neither committed nor
    /// dropped. Every verb that changes anything does this first.
    pub(super) fn abandon_step(&mut self) {
        if self.batch.open {
            self.undo_step();
        }
    }

    /// Undoes `open_step`: blocks go back in the reverse order, so the free lists are as before.
    pub(super) fn undo_step(&mut self) {
        for at in (0..self.batch.seqs.len()).rev() {
            let BatchSeq { slot, first_position, .. } = self.batch.seqs[at];
            for group in 0..self.plan.groups.len() {
                if self.pool.store(group).is_some() {
                    let per_block = self.plan.groups[group].layout.unit_tokens;
                    self.give_back_from(group, slot, first_position.div_ceil(per_block));
                }
            }
        }
        self.undo_copies();
        self.batch.clear();
        self.counters.steps_cancelled += 1;
    }

    /// Makes the batch's tokens part of their sequences.
    pub(super) fn commit_step(&mut self) -> Result<(), CacheError> {
        let missing = self.batch.appended.iter().filter(|done| !**done).count();
        if missing > 0 && !self.batch.seqs.is_empty() {
            let first = self.batch.appended.iter().position(|done| !done).unwrap_or(0);
            return Err(CacheError::StepIncomplete {
                missing: u32::try_from(missing).unwrap_or(u32::MAX),
                first: LayerIdx(u32::try_from(first).unwrap_or(u32::MAX)),
            });
        }
        self.drop_replaced();
        for at in 0..self.batch.seqs.len() {
            let BatchSeq { slot, rows, .. } = self.batch.seqs[at];
            self.grow(slot, rows);
        }
        self.counters.nonfinite += self.batch.counts.nonfinite;
        self.counters.saturated += self.batch.counts.saturated;
        if self.plan.admission == Admission::StaticBatch && !self.batch.seqs.is_empty() {
            self.batch_closed = true;
        }
        self.batch.clear();
        self.counters.steps_committed += 1;
        self.note_peaks();
        Ok(())
    }

    /// Makes a step's tokens part of one sequence.
    fn grow(&mut self, slot: u32, rows: u32) {
        let (len, old_water) = (self.seqs.record(slot).len, self.seqs.record(slot).high_water);
        let new_len = len + rows;
        let high_water = old_water.max(new_len);
        // The last block stays the last and not full: the usual case of decoding.
        let same_tail = len & self.block_mask != 0
            && new_len & self.block_mask != 0
            && len >> self.block_shift == new_len >> self.block_shift;
        for group in 0..self.plan.groups.len() {
            // Its last block was copied if anyone else held it: it is its own now.
            self.seqs.state_mut(slot, group).shared_tail = false;
            if self.plan.groups[group].window.is_none() {
                self.live_tokens[group] += u64::from(rows);
            } else {
                let before = self.live_of(group, len, old_water);
                self.live_tokens[group] += self.live_of(group, new_len, high_water);
                self.live_tokens[group] -= before;
            }
            if !same_tail {
                self.leave_tail(group, slot);
            }
        }
        let tokens_given = self.batch.tokens_given;
        let record = self.seqs.record_mut(slot);
        if tokens_given && record.known >= len {
            record.known = record.known.max(new_len);
        }
        record.len = new_len;
        record.high_water = high_water;
        self.counters.tokens_appended += u64::from(rows);
        if !same_tail {
            for group in 0..self.plan.groups.len() {
                self.set_tail(group, slot, true);
            }
        }
        if self.reuse.is_some() && (!same_tail || self.seqs.record(slot).settles_late) {
            self.publish(slot);
        }
        for group in 0..self.plan.groups.len() {
            if self.plan.groups[group].window.is_some() {
                self.leave_window(group, slot);
            }
        }
    }

    /// Gives back the blocks that have left the window of a paged group.
    fn leave_window(&mut self, group: usize, slot: u32) {
        let layers = &self.plan.groups[group];
        if layers.window.is_none() || layers.kind == GroupKind::Contiguous {
            return;
        }
        let per_block = layers.layout.unit_tokens;
        let sink_blocks = layers.layout.sink_tokens.div_ceil(per_block);
        let high_water = self.seqs.record(slot).high_water;
        let first = self.plan.keep_from(group_idx(group), high_water) / per_block;
        let from = self.seqs.state(slot, group).first.max(sink_blocks);
        for at in from..first {
            self.give_back_block(group, slot, at);
        }
        let state = self.seqs.state_mut(slot, group);
        state.first = state.first.max(first);
    }

    /// Builds the CSR form of every paged group for the batch under way.
    pub(super) fn build_csr(&mut self) {
        for group in 0..self.plan.groups.len() {
            self.build_csr_of(group);
        }
        self.batch.csr_built = true;
    }

    fn build_csr_of(&mut self, group: usize) {
        let Batch { seqs, seq_lens, csr, .. } = &mut self.batch;
        let Some(csr) = &mut csr[group] else { return };
        let layers = &self.plan.groups[group];
        let per_block = layers.layout.unit_tokens;
        let sink_blocks = layers.layout.sink_tokens.div_ceil(per_block);
        csr.clear();
        csr.kv_indptr.push(0);
        for (seq, len) in seqs.iter().zip(seq_lens) {
            let state = self.seqs.state(seq.slot, group);
            let start = seq.slot as usize * layers.max_blocks_per_seq as usize;
            let row = &self.tables[group][start..start + state.next as usize];
            let sinks = sink_blocks.min(state.next) as usize;
            let first = (state.first as usize).max(sinks);
            csr.kv_indices.extend_from_slice(&row[..sinks]);
            csr.kv_indices.extend_from_slice(&row[first..]);
            csr.kv_indptr.push(u32::try_from(csr.kv_indices.len()).unwrap_or(u32::MAX));
            csr.kv_last_block_len.push((*len - 1) % per_block + 1);
            csr.kv_first_position.push(state.first.max(sink_blocks.min(state.next)) * per_block);
        }
    }

    /// A paged group's CSR form.
    pub(super) fn csr(&self, group: GroupIdx) -> Result<Csr<'_>, CacheError> {
        match self.batch.csr.get(group.index()) {
            Some(Some(csr)) if self.batch.csr_built => Ok(Csr {
                kv_indptr: &csr.kv_indptr,
                kv_indices: &csr.kv_indices,
                kv_last_block_len: &csr.kv_last_block_len,
                kv_first_position: &csr.kv_first_position,
            }),
            Some(Some(_)) => Err(CacheError::CsrNotBuilt),
            _ => Err(self.no_such_group(group, "paged")),
        }
    }
}
