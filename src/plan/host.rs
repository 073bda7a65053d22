//! Host memory for tables and lists: a sum of named terms.
//!
//! The sizes of the records are stated here because the plan comes before the code that allocates
//! them; that code asserts at compile time that they are true.

use serde::Serialize;

use super::Limits;
use super::group::{GroupKind, LayerGroup};
use super::reuse::{ReusePlan, max_pins};
use crate::config::Geometry;
use crate::error::PlanError;
use crate::units::Bytes;

/// Bytes of one block's record: state, links, references, generation.
pub const BLOCK_RECORD_BYTES: u64 = 32;

/// Bytes of one group's lists of blocks: the free one, and one for each priority.
pub const BLOCK_LISTS_BYTES: u64 = 896;

/// Bytes of the headers of one group's tables: block table, token slots, CSR form, live tokens.
const GROUP_HEADERS_BYTES: u64 = 24 + 24 + 96 + 8;

/// Bytes of one sequence slot's record.
pub const SEQ_RECORD_BYTES: u64 = 80;

/// Bytes of one sequence's state in one layer group.
pub const GROUP_STATE_BYTES: u64 = 24;

/// Bytes of one block in the prefix index, its tokens aside.
pub const NODE_BYTES: u64 = 32;

/// Bytes of one namespace: salt, adapter, model, epoch, its list of blocks, who names it.
pub const NAMESPACE_BYTES: u64 = 164;

/// Bytes of what a sequence shares: namespaces, retention, how far it is published.
pub const SEQ_SHARE_BYTES: u64 = 176;

/// Bytes of one block's time limit.
pub const EXPIRY_BYTES: u64 = 24;

/// Bytes of one block's hint at a later victim.
pub const LATER_BYTES: u64 = 4;

/// Bytes of one event, its tokens aside.
pub const EVENT_BYTES: u64 = 32;

/// Bytes of whom the tokens of a contiguous slot belong to.
pub const DONOR_NAME_BYTES: u64 = 192;

/// Bytes of one sequence of a batch that begins.
pub const PENDING_BYTES: u64 = 48;

/// Bytes of one pin.
pub const PIN_BYTES: u64 = 24;

/// Bytes of one block that a step copies before it writes.
pub const COW_BYTES: u64 = 16;

/// Bytes that a save or restore keeps of a block of the file, at most.
pub const SAVE_ENTRY_BYTES: u64 = 40;

/// Bytes that it keeps of a block of the pool.
pub const SAVE_BLOCK_BYTES: u64 = 48;

/// Bytes that it keeps of a namespace.
pub const SAVE_NAME_BYTES: u64 = 160;

/// Bytes that it keeps of a sequence slot, its groups aside.
pub const SAVE_SLOT_BYTES: u64 = 512;

/// Bytes of a file's header, and of what else does not depend on the plan.
pub const SAVE_FIXED_BYTES: u64 = (1 << 20) + (16 << 10);

/// Places of a probing table for so many values: a power of two, at least twice as many.
#[must_use]
pub fn probe_places(values: u64) -> u64 {
    (values.max(1) * 2).next_power_of_two()
}

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
    reuse: &ReusePlan,
    event_buffer: u32,
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
    let mut terms = vec![
        // Every block of every paged group has one.
        term("block records", BLOCK_RECORD_BYTES, blocks)?,
        // Heads and tails of the lists that run through them.
        term("block lists", BLOCK_LISTS_BYTES, num_groups)?,
        // Where each group's tables lie.
        term("headers of groups", GROUP_HEADERS_BYTES, num_groups)?,
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
        // The last blocks that a step copies because others hold them too, or takes out of the
        // index to write in place, or may do either with.
        term("step: blocks copied", COW_BYTES + 8 + 8, batch_seqs * paged().count() as u64)?,
        // Blocks wanted in each group.
        term("step: blocks wanted", 8, num_groups)?,
        // What the sequences of a batch have found, while it begins.
        term("begin: matches", PENDING_BYTES, slots)?,
        // Keys of sequences to slots: u64 places.
        term("sequence keys", 8, probe_places(slots))?,
    ];
    if reuse.is_on() {
        let tokens = Bytes(slots).try_mul(u64::from(limits.max_seq_len))?.get();
        // u32 each: what each sequence consists of.
        terms.push(term("reuse: tokens of sequences", 4, tokens)?);
        terms.push(term("reuse: sequences", SEQ_SHARE_BYTES, slots)?);
    }
    if reuse.has_donors() {
        terms.push(term("reuse: names of slots", DONOR_NAME_BYTES, slots)?);
    }
    if let Some(lead) = reuse.lead {
        index_terms(&mut terms, groups, lead.index(), limits, seq_slots, event_buffer)?;
    }
    Ok(terms)
}

/// The terms of the prefix index.
fn index_terms(
    terms: &mut Vec<HostTerm>,
    groups: &[LayerGroup],
    lead: usize,
    limits: &Limits,
    seq_slots: u32,
    event_buffer: u32,
) -> Result<(), PlanError> {
    let mut push = |what, size: u64, times: u64| -> Result<(), PlanError> {
        terms.push(HostTerm { what, bytes: Bytes(size).try_mul(times)? });
        Ok(())
    };
    // The index's own head, and where each windowed group's tables lie.
    push("index: head", 512 + 72 * groups.len() as u64, 1)?;
    let blocks = u64::from(groups[lead].layout.units);
    let per_block = u64::from(groups[lead].layout.unit_tokens);
    push("index: nodes", NODE_BYTES, blocks)?;
    // u32 a token, in whole cache lines.
    push("index: tokens", 64, (blocks * per_block).div_ceil(16))?;
    push("index: table", 8, probe_places(blocks))?;
    push("index: time limits", EXPIRY_BYTES, blocks)?;
    push("index: order of eviction", LATER_BYTES, blocks)?;
    let namespaces = u64::from(max_namespaces(groups[lead].layout.units, seq_slots));
    push("index: namespaces", NAMESPACE_BYTES, namespaces)?;
    push("index: namespace table", 8, probe_places(namespaces))?;
    for (g, group) in groups.iter().enumerate() {
        if g != lead && group.kind == GroupKind::Paged {
            // u32 a block, one way and the other.
            push("index: blocks of windowed layers", 4, blocks + u64::from(group.layout.units))?;
        }
    }
    let pins = u64::from(max_pins(limits));
    push("pins", PIN_BYTES + 4, pins)?;
    // First and end of each windowed group.
    push("pins: windows", 8, pins * groups.len() as u64)?;
    push("events", EVENT_BYTES + 4 * per_block, u64::from(event_buffer))
}

/// Namespaces that can be told apart at once. Each needs a sequence or a cached block, so up to
/// 65,536 blocks there is always room for another.
pub(super) fn max_namespaces(lead_blocks: u32, seq_slots: u32) -> u32 {
    lead_blocks.min(1 << 16).saturating_add(seq_slots.saturating_mul(2))
}
