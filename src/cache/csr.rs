//! The block tables of a step in compressed sparse row form.

use super::Cache;
use super::batch::Batch;
use crate::device::room;
use crate::error::{CacheError, DeviceError};
use crate::units::GroupIdx;

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
pub(super) struct CsrBuffers {
    kv_indptr: Vec<u32>,
    kv_indices: Vec<u32>,
    kv_last_block_len: Vec<u32>,
    kv_first_position: Vec<u32>,
}

impl CsrBuffers {
    pub(super) fn new(seqs: usize, table_entries: usize) -> Result<Self, DeviceError> {
        Ok(Self {
            kv_indptr: room(seqs + 1)?,
            kv_indices: room(table_entries)?,
            kv_last_block_len: room(seqs)?,
            kv_first_position: room(seqs)?,
        })
    }

    /// The four lists, as [`Csr`] names them.
    pub(super) fn lists(&self) -> [&[u32]; 4] {
        [&self.kv_indptr, &self.kv_indices, &self.kv_last_block_len, &self.kv_first_position]
    }

    fn clear(&mut self) {
        self.kv_indptr.clear();
        self.kv_indices.clear();
        self.kv_last_block_len.clear();
        self.kv_first_position.clear();
    }
}

impl Cache {
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
            _ => Err(self.no_such_group(group, ", or is not paged")),
        }
    }
}
