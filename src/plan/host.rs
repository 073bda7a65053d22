//! Host memory for tables and lists: a sum of named terms.
//!
//! The sizes of the records are stated here because the plan comes before the code that allocates
//! them; that code asserts at compile time that they are true.

use serde::Serialize;

use super::Limits;
use super::group::{GroupKind, LayerGroup};
use crate::config::Geometry;
use crate::error::PlanError;
use crate::units::Bytes;

/// Bytes of one block's record: state, links, references, generation.
pub const BLOCK_RECORD_BYTES: u64 = 24;

/// Bytes of one sequence slot's record.
pub const SEQ_RECORD_BYTES: u64 = 64;

/// Bytes of one sequence's state in one layer group.
pub const GROUP_STATE_BYTES: u64 = 16;

/// Bytes of one sequence's entry in a step.
pub const BATCH_SEQ_BYTES: u64 = 16;

/// One term of the host bookkeeping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct HostTerm {
    /// What it is.
    pub what: &'static str,
    /// Its bytes.
    pub bytes: Bytes,
}

/// All terms.
pub(super) fn terms(
    geometry: &Geometry,
    limits: &Limits,
    groups: &[LayerGroup],
    seq_slots: u32,
) -> Result<Vec<HostTerm>, PlanError> {
    let slots = u64::from(seq_slots);
    let batch_tokens = u64::from(limits.max_batch_tokens);
    let batch_seqs = slots.min(batch_tokens);
    let num_groups = groups.len() as u64;
    let paged = || groups.iter().filter(|group| group.kind == GroupKind::Paged);
    let blocks: u64 = paged().map(|group| u64::from(group.layout.units)).sum();
    let table_row: u64 = paged().map(|group| u64::from(group.max_blocks_per_seq)).sum();
    let term = |what, size: u64, times: u64| -> Result<HostTerm, PlanError> {
        Ok(HostTerm { what, bytes: Bytes(size).try_mul(times)? })
    };
    // Entries of all rows of all tables.
    let table_entries = Bytes(slots).try_mul(table_row)?.get();
    Ok(vec![
        // Every block of every paged group has one.
        term("block records", BLOCK_RECORD_BYTES, blocks)?,
        // u32 a block of the longest sequence, a row a slot, a table a paged group.
        term("block tables", 4, table_entries)?,
        term("sequence records", SEQ_RECORD_BYTES, slots)?,
        // The list of free slots: u32 each.
        term("free sequence slots", 4, slots)?,
        term("sequence state by group", GROUP_STATE_BYTES, slots * num_groups)?,
        // Sequences of the step under way.
        term("step: sequences", BATCH_SEQ_BYTES, batch_seqs)?,
        // u32 a token.
        term("step: positions", 4, batch_tokens)?,
        // u64 a token and group.
        term("step: token slots", 8, Bytes(batch_tokens).try_mul(num_groups)?.get())?,
        // u32 a sequence: lengths after the step.
        term("step: sequence lengths", 4, batch_seqs)?,
        // CSR form of each paged group, u32 each: indptr, last block length and first position of
        // every sequence, and the indices.
        term("step: CSR", 4, (3 * batch_seqs + 1) * paged().count() as u64 + table_entries)?,
        // One flag a layer.
        term("step: layers appended", 1, u64::from(geometry.num_layers))?,
    ])
}
