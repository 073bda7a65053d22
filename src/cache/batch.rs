//! The batch of the step under way: which sequences, which positions, which token slots.
//!
//! All buffers have their largest size from open on; a step writes prefixes of them.

use super::cow::Replaced;
use super::csr::CsrBuffers;
use super::sequence::SeqHandle;
use super::{Cache, group_idx};
use crate::device::{AppendCounts, BatchSeq, all_of, prefetch, room, table_of};
use crate::error::{CacheError, DeviceError};
use crate::plan::{BATCH_SEQ_BYTES, GroupKind, Plan, SeqView};
use crate::units::{BlockId, LayerIdx};

const _: () = assert!(size_of::<BatchSeq>() as u64 == BATCH_SEQ_BYTES);

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
    /// How many of them are.
    pub(super) num_appended: usize,
    /// Elements that the step's appends had to change; counted when it commits.
    pub(super) counts: AppendCounts,
    /// Blocks that the step needs of each group. `[num_groups]`
    pub(super) wanted: Vec<u64>,
    /// The last blocks that it copies because others hold them too.
    pub(super) replaced: Vec<Replaced>,
    /// Groups and blocks that it takes out of the index, to write in place.
    pub(super) withdrawn: Vec<(u32, u32)>,
    /// Groups and slots whose last block it may copy, if there is room: empty but while that is
    /// decided.
    pub(super) optional: Vec<(u32, u32)>,
    /// Whether some last block was shared with others.
    pub(super) shared_tails: bool,
    /// Whether it was told which tokens it appends.
    pub(super) tokens_given: bool,
    /// Whether a step is open. It still is when its [`Step`](super::Step) was leaked or detached.
    open: bool,
    /// `[num_groups]`, `None` for contiguous groups.
    pub(super) csr: Vec<Option<CsrBuffers>>,
    pub(super) csr_built: bool,
    /// The number of the step, to tell sequences that it names from others.
    number: u64,
    /// Which entry was refused, if one was.
    refused_at: Option<usize>,
}

impl Batch {
    pub(super) fn new(plan: &Plan) -> Result<Self, DeviceError> {
        let tokens = plan.limits.max_batch_tokens as usize;
        let seqs = tokens.min(plan.seq_slots as usize);
        let csr = plan.groups.iter().map(|group| {
            let entries = group.max_blocks_per_seq as usize * plan.seq_slots as usize;
            let buffers = (group.kind == GroupKind::Paged).then(|| CsrBuffers::new(seqs, entries));
            buffers.transpose()
        });
        let csr = all_of(csr)?;
        let token_slots = plan.groups.iter().map(|_| room(tokens));
        // At most one a sequence and paged group.
        let tails = seqs * csr.iter().flatten().count();
        Ok(Self {
            seqs: room(seqs)?,
            positions: room(tokens)?,
            token_slots: all_of(token_slots)?,
            seq_lens: room(seqs)?,
            appended: table_of(plan.layers.len(), false)?,
            num_appended: 0,
            counts: AppendCounts::default(),
            wanted: table_of(plan.groups.len(), 0)?,
            replaced: room(tails)?,
            withdrawn: room(tails)?,
            optional: room(tails)?,
            shared_tails: false,
            tokens_given: false,
            open: false,
            csr,
            csr_built: false,
            number: 0,
            refused_at: None,
        })
    }

    /// The entry for which the last step was refused; `None` where it was for all of them.
    pub(super) const fn refused_at(&self) -> Option<usize> {
        self.refused_at
    }

    /// Whether a step is open.
    pub(super) const fn is_open(&self) -> bool {
        self.open
    }

    /// Notes that a layer was appended. Says whether it had been already; then nothing changes.
    pub(super) fn set_appended(&mut self, layer: LayerIdx) -> bool {
        let again = std::mem::replace(&mut self.appended[layer.index()], true);
        self.num_appended += usize::from(!again);
        again
    }

    pub(super) fn clear(&mut self) {
        self.seqs.clear();
        self.positions.clear();
        self.token_slots.iter_mut().for_each(Vec::clear);
        self.seq_lens.clear();
        if std::mem::take(&mut self.num_appended) > 0 {
            self.appended.fill(false);
        }
        self.counts = AppendCounts::default();
        self.replaced.clear();
        self.tokens_given = false;
        self.open = false;
        self.csr_built = false;
        self.refused_at = None;
    }
}

/// An entry of what a step reserves: a sequence, and how many tokens it gets. The C interface has
/// its own, which are not copied.
pub(crate) trait StepItem {
    fn sequence(&self) -> SeqHandle;
    fn num_tokens(&self) -> u32;
}

impl StepItem for (SeqHandle, u32) {
    #[inline]
    fn sequence(&self) -> SeqHandle {
        self.0
    }

    #[inline]
    fn num_tokens(&self) -> u32 {
        self.1
    }
}

/// What a batch that may be taken consists of.
struct Checked {
    /// Its tokens.
    total: u64,
    /// Whether some last block may be shared.
    shared_tails: bool,
    /// Whether some sequence's next tokens are those of its prompt.
    prefilling: bool,
}

impl Cache {
    /// Checks a batch and takes its blocks: all or nothing. `tokens` are the ids of all tokens in
    /// the order of the rows, where the caller knows them.
    pub(super) fn open_step<W: StepItem>(
        &mut self,
        wanted: &[W],
        tokens: Option<&[u32]>,
    ) -> Result<(), CacheError> {
        self.abandon_step();
        self.batch.number += 1;
        self.batch.clear();
        let Checked { total, shared_tails, prefilling } = self.check_batch(wanted)?;
        let total = usize::try_from(total).unwrap_or(usize::MAX);
        if let Some(tokens) = tokens {
            let (got, expected, shape) = (tokens.len(), total, "[num_tokens]");
            if got != expected {
                return Err(CacheError::WrongShape { what: "tokens", got, expected, shape });
            }
            if prefilling {
                self.check_tokens(wanted, tokens)?;
            }
        }
        self.batch.shared_tails = shared_tails;
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
        if total == wanted.len() {
            self.take_single_rows(wanted);
        } else {
            for item in wanted {
                self.take_for_step(item.sequence().slot, item.num_tokens());
            }
        }
        if let Err(error) = self.check_scrubbed() {
            self.undo_step();
            return Err(error);
        }
        self.scrub_freed();
        if let Some(tokens) = tokens {
            self.note_tokens(wanted, tokens);
        }
        self.note_held_peak();
        if !self.batch.replaced.is_empty() {
            // Copies make tokens that were there once be there twice.
            self.note_used_peak();
        }
        Ok(())
    }

    /// Handles, lengths, limits; sums up the blocks that are wanted. Marks sequences with the
    /// step's number, which no one else reads.
    fn check_batch<W: StepItem>(&mut self, wanted: &[W]) -> Result<Checked, CacheError> {
        let mut checked = Checked { total: 0, shared_tails: false, prefilling: false };
        if wanted.is_empty() {
            self.batch.wanted.fill(0);
        }
        for (at, item) in wanted.iter().enumerate() {
            if let Err(error) = self.check_item(at, item, &mut checked) {
                self.batch.refused_at = Some(at);
                return Err(error);
            }
        }
        let limit = self.plan.limits.max_batch_tokens;
        if checked.total > u64::from(limit) {
            let knob = "limits.max_batch_tokens";
            return Err(CacheError::StepTooLarge { wanted: checked.total, limit, knob });
        }
        Ok(checked)
    }

    #[inline]
    fn check_item<W: StepItem>(
        &mut self,
        at: usize,
        item: &W,
        checked: &mut Checked,
    ) -> Result<(), CacheError> {
        let limits = &self.plan.limits;
        let tokens = item.num_tokens();
        let slot = self.seqs.check(item.sequence())?;
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
                knob: self.plan.step_tokens_knob(),
            });
        }
        let len = u64::from(record.len) + u64::from(tokens);
        if len > u64::from(record.limit) {
            let shorter = record.limit < limits.max_seq_len;
            let knob = if shorter { "max_len of begin" } else { "limits.max_seq_len" };
            return Err(CacheError::SequenceTooLong { wanted: len, limit: record.limit, knob });
        }
        checked.total += u64::from(tokens);
        let end = record.len + tokens;
        checked.prefilling |= record.known > record.len;
        if let Some(reuse) = &self.reuse {
            prefetch(&reuse.tokens(slot)[record.len as usize]);
        }
        for (group, wanted) in self.batch.wanted.iter_mut().enumerate() {
            let layers = &self.plan.groups[group];
            if layers.kind == GroupKind::Paged {
                let state = self.seqs.state(slot, group);
                checked.shared_tails |= state.shared_tail;
                // `tokens_per_block` is a power of two.
                let blocks = (end + self.block_mask) >> self.block_shift;
                // The first sequence begins the sum. (Cleared before, it would be read back
                // while the call that clears it is still at it.)
                let others = if at == 0 { 0 } else { *wanted };
                *wanted = others + u64::from(blocks - state.next);
            }
        }
        Ok(())
    }

    /// Whether the tokens are those that the prompts had.
    fn check_tokens<W: StepItem>(
        &mut self,
        wanted: &[W],
        tokens: &[u32],
    ) -> Result<(), CacheError> {
        let Some(reuse) = &self.reuse else { return Ok(()) };
        let mut start = 0;
        for (at, item) in wanted.iter().enumerate() {
            let (slot, count) = (item.sequence().slot, item.num_tokens());
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
                    self.batch.refused_at = Some(at);
                    return Err(CacheError::TokenMismatch { slot, position, known, given });
                }
            }
        }
        Ok(())
    }

    /// Writes the step's tokens to their sequences' rows. They count as known when it commits.
    fn note_tokens<W: StepItem>(&mut self, wanted: &[W], tokens: &[u32]) {
        let Some(reuse) = &mut self.reuse else { return };
        self.batch.tokens_given = true;
        if tokens.len() == wanted.len() {
            let rows = wanted.iter().zip(&self.batch.positions);
            for ((item, position), token) in rows.zip(tokens) {
                reuse.tokens_mut(item.sequence().slot)[*position as usize] = *token;
            }
            return;
        }
        let mut start = 0;
        for item in wanted {
            let (slot, count) = (item.sequence().slot, item.num_tokens());
            let len = self.seqs.record(slot).len as usize;
            let row = &mut reuse.tokens_mut(slot)[len..len + count as usize];
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

    /// [`Cache::take_for_step`] for a batch of one token of each sequence: what an engine that
    /// decodes does all day.
    fn take_single_rows<W: StepItem>(&mut self, wanted: &[W]) {
        for item in wanted {
            let slot = item.sequence().slot;
            let record = self.seqs.record_mut(slot);
            let position = record.len;
            record.written = record.written.max(position + 1);
            self.batch.positions.push(position);
            if position & self.block_mask == 0 {
                for group in 0..self.plan.groups.len() {
                    self.take_blocks(group, slot, position + 1);
                }
            } else if (position + 1) & self.block_mask == 0 {
                self.prefetch_full_block(slot, position >> self.block_shift);
            }
        }
        let (shift, mask) = (self.block_shift, self.block_mask);
        let Batch { positions, seqs, seq_lens, token_slots, .. } = &mut self.batch;
        let rows = || wanted.iter().map(|item| item.sequence().slot).zip(&*positions);
        seq_lens.extend(positions.iter().map(|position| position + 1));
        seqs.extend((0..).zip(rows()).map(|(row_start, (slot, position))| BatchSeq {
            slot,
            row_start,
            rows: 1,
            first_position: *position,
        }));
        for (group, token_slots) in token_slots.iter_mut().enumerate() {
            let layers = &self.plan.groups[group];
            if layers.kind == GroupKind::Contiguous {
                let view = |slot| SeqView { layout: &layers.layout, table: &[], slot };
                token_slots.extend(rows().map(|(slot, position)| view(slot).token_slot(*position)));
                continue;
            }
            let (table, row) = (&self.tables[group], layers.max_blocks_per_seq as usize);
            token_slots.extend(rows().map(|(slot, position)| {
                let block = table[slot as usize * row + (position >> shift) as usize];
                (u64::from(block) << shift) + u64::from(position & mask)
            }));
        }
    }

    /// Tells the processor of what is looked at when a block that is getting full is published.
    fn prefetch_full_block(&self, slot: u32, at: u32) {
        let Some(reuse) = &self.reuse else { return };
        let Some(index) = &reuse.index else { return };
        let lead = index.lead();
        prefetch(&reuse.seqs[slot as usize].keys);
        if let Some(store) = self.pool.store(lead) {
            store.prefetch(BlockId(self.entry(lead, slot, at)));
        }
        if at > 0 {
            index.prefetch_node(self.entry(lead, slot, at - 1));
        }
    }

    /// Gives a row the blocks that it lacks for its first `end` tokens.
    fn take_blocks(&mut self, group: usize, slot: u32, end: u32) {
        if self.pool.store(group).is_none() {
            return;
        }
        // `tokens_per_block` is a power of two.
        let blocks = (end + self.block_mask) >> self.block_shift;
        for at in self.seqs.state(slot, group).next..blocks {
            let block = self.take_block(group, slot, at);
            debug_assert!(block.is_some(), "check_batch_blocks counted them");
            self.seqs.state_mut(slot, group).next = at + 1;
        }
    }

    /// Undoes a step whose [`Step`](super::Step) was leaked or put aside, so that it was neither
    /// committed nor dropped. Every verb that changes anything does this first.
    pub(super) fn abandon_step(&mut self) {
        if self.batch.open {
            self.cancel_step();
        }
    }

    /// Undoes a step that was open.
    pub(super) fn cancel_step(&mut self) {
        self.undo_step();
        self.counters.steps_cancelled += 1;
    }

    /// Undoes `open_step`: blocks go back in the reverse order, so the free lists are as before.
    fn undo_step(&mut self) {
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
        self.scrub_undone();
        self.batch.clear();
        self.scrub_freed();
    }
}
