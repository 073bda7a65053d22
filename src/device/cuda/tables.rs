//! What a step's kernels read beside the pool: token slots, sequences, blocks and work lists.
//!
//! Each group has a fixed place for them in the workspace. They are written into a pinned buffer of
//! the table ring and copied from there, behind the kernels that still read what was there before.

use std::ops::Range;

use super::CudaDevice;
use super::bindings::{KvpoolCopyPair, KvpoolItem, KvpoolKvGroup, KvpoolSeq};
use super::driver::{Entered, Stream};
use super::items::{self, Counts, Shape};
use super::params;
use crate::device::plain::{bytes_of, values_of_mut};
use crate::device::{BatchSeq, DeviceAppend, DeviceAttend, room};
use crate::error::DeviceError;
use crate::plan::{
    Addressing, CUDA_COUNTS_BYTES, CUDA_PAIRS_AT_ONCE, CudaTables, CudaWorkspace, GroupLayout,
    visible,
};
use crate::units::Bytes;

/// Bytes of the numbers ahead of the token slots, and of the sequences; and of what appends count.
pub(super) const COUNTS_BYTES: usize = 16;
const _: () = assert!(COUNTS_BYTES as u64 == CUDA_COUNTS_BYTES);

/// One layer group, as the kernels know it, and what was uploaded for it.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) params: KvpoolKvGroup,
    /// Where its tables lie in the workspace.
    pub(super) tables: CudaTables,
    /// The step whose token slots are there; 0 for none that has a name.
    pub(super) slots_of: u64,
    /// The step whose sequences and lists are there; 0 for none that has a name.
    pub(super) lists_of: u64,
    pub(super) lists: Counts,
    /// Packed rows of their items, at most.
    pub(super) item_rows: u32,
    /// The step whose kernels take all numbers from device memory; 0 for none.
    pub(super) prepared: u64,
    /// Copies that were noted down for the next launch. At most [`CUDA_PAIRS_AT_ONCE`]
    pub(super) copies: Vec<KvpoolCopyPair>,
}

impl Group {
    /// Whether the kernels of a step take all numbers from device memory.
    pub(super) const fn is_prepared(&self, step: u64) -> bool {
        step != 0 && self.prepared == step
    }
}

impl Group {
    pub(super) fn new(layout: &GroupLayout, tables: CudaTables) -> Result<Self, DeviceError> {
        let params = params::group(layout);
        let lists = Counts::default();
        let copies = room(CUDA_PAIRS_AT_ONCE as usize)?;
        let (slots_of, lists_of, item_rows, prepared) = (0, 0, 0, 0);
        Ok(Self { params, tables, slots_of, lists_of, lists, item_rows, prepared, copies })
    }

    /// Whether a copy cannot go into one launch with those that were noted down: what is in one
    /// launch has no order.
    pub(super) fn must_follow(&self, pair: &KvpoolCopyPair) -> bool {
        self.copies.len() == CUDA_PAIRS_AT_ONCE as usize
            || self.copies.iter().any(|other| have_an_order(other, pair))
    }
}

/// Whether of two copies one writes what the other reads or writes.
fn have_an_order(one: &KvpoolCopyPair, other: &KvpoolCopyPair) -> bool {
    let end = |pair: &KvpoolCopyPair| pair.first_token + pair.num_tokens;
    let units = one.dst_unit == other.src_unit
        || one.dst_unit == other.dst_unit
        || one.src_unit == other.dst_unit;
    units && one.first_token < end(other) && other.first_token < end(one)
}

/// A number of tokens as the kernels have it, when there is room for so many.
pub(super) fn checked(tokens: u64, limit: u64) -> Result<u32, DeviceError> {
    match u32::try_from(tokens) {
        Ok(tokens) if u64::from(tokens) <= limit => Ok(tokens),
        _ => Err(DeviceError::StepTooLong { tokens, limit }),
    }
}

/// As [`checked`], of the length of a list.
pub(super) fn checked_len<T>(list: &[T], limit: u64) -> Result<u32, DeviceError> {
    checked(list.len() as u64, limit)
}

impl CudaDevice {
    /// Uploads a step's token slots, after checking that all lie in the group's units.
    pub(super) fn upload_slots(
        &mut self,
        cx: &Entered<'_>,
        index: usize,
        args: &DeviceAppend<'_>,
    ) -> Result<(), DeviceError> {
        let layout = args.layout;
        let last = args.token_slots.iter().copied().max().unwrap_or(0);
        if last >= u64::from(layout.units) * u64::from(layout.unit_tokens) {
            let unit = last / u64::from(layout.unit_tokens);
            return Err(DeviceError::OutOfRange {
                offset: layout.base.saturating_add(layout.unit_bytes.saturating_mul(unit)),
                len: layout.unit_bytes,
                pool: self.pool.bytes(),
            });
        }
        let positions = self.positions_of(args)?;
        let group = &mut self.groups[index];
        group.slots_of = 0;
        let to = self.workspace.address() + group.tables.num_tokens;
        let positions_at = self.workspace.address() + group.tables.positions;
        let stream = self.stream;
        self.table_ring.with(cx, stream, |buffer| {
            let slots = bytes_of(args.token_slots);
            let (used, rest) = buffer.split_at_mut(COUNTS_BYTES + slots.len());
            let (counts, places) = used.split_at_mut(COUNTS_BYTES);
            values_of_mut(counts)[0] = args.token_slots.len() as u64;
            places.copy_from_slice(slots);
            // SAFETY: a pinned buffer of the ring, and its place in the workspace, which the
            // caller has checked to have room for so many tokens.
            unsafe { cx.upload(to, used, stream) }?;
            if positions.is_empty() {
                return Ok(());
            }
            rest[..positions.len()].copy_from_slice(positions);
            // SAFETY: as above.
            unsafe { cx.upload(positions_at, &rest[..positions.len()], stream) }
        })?;
        group.slots_of = args.step;
        Ok(())
    }

    /// The bytes of a step's positions, after checking that there is an angle for each; none where
    /// no K is rotated.
    fn positions_of<'a>(&self, args: &DeviceAppend<'a>) -> Result<&'a [u8], DeviceError> {
        let Some(rope) = &self.rope else { return Ok(&[]) };
        let beyond = |position: &u32| *position >= rope.positions;
        if args.positions.len() != args.token_slots.len() || args.positions.iter().any(beyond) {
            return Err(DeviceError::BadLayout);
        }
        Ok(bytes_of(args.positions))
    }

    /// Uploads a step's sequences and their blocks, after checking them, and work lists for the
    /// rows `rows`.
    pub(super) fn upload_lists(
        &mut self,
        cx: &Entered<'_>,
        index: usize,
        args: &DeviceAttend<'_>,
        rows: Range<u32>,
    ) -> Result<(), DeviceError> {
        let packed = u64::from(rows.end - rows.start) * u64::from(self.q_per_kv);
        let packed_per_seq = packed / args.seqs.len().max(1) as u64;
        // What a graph has captured must fit every step: one kernel for all.
        let prepared = self.groups[index].is_prepared(args.step);
        let item_rows = self.kernels.item_rows(if prepared { 0 } else { packed_per_seq });
        let shape = Shape {
            per_kv: self.q_per_kv,
            num_kv_heads: args.layout.num_kv_heads,
            item_rows,
            window: args.window,
            sink_tokens: args.layout.sink_tokens,
            max_partials: self.sizes.max_partials,
            multiprocessors: self.target.multiprocessors,
        };
        let pool = self.pool.bytes();
        let group = &mut self.groups[index];
        group.lists_of = 0;
        let upload = Upload {
            cx,
            stream: self.stream,
            workspace: self.workspace.address(),
            tables: group.tables,
        };
        let sizes = &self.sizes;
        let (lists, _) = self.table_ring.with(cx, self.stream, |buffer| {
            let mut parts = Parts::new(buffer, &group.tables, sizes);
            let blocks = fill_seqs(args, pool, parts.seqs, parts.tables)?;
            let lists = items::build(&shape, args.seqs, rows, parts.items, parts.combines);
            parts.upload(&upload, args.seqs.len(), blocks, lists)?;
            Ok(lists)
        })?;
        group.lists = lists;
        group.item_rows = item_rows;
        group.lists_of = args.step;
        Ok(())
    }
}

/// Where a group's tables go.
struct Upload<'a> {
    cx: &'a Entered<'a>,
    stream: Stream,
    workspace: u64,
    tables: CudaTables,
}

impl Upload<'_> {
    /// # Safety
    /// `from` is part of the ring's buffer; the workspace has room for it at the offset.
    unsafe fn part(&self, offset: u64, from: &[u8]) -> Result<(), DeviceError> {
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.cx.upload(self.workspace + offset, from, self.stream) }
    }
}

/// A buffer of the ring, divided as the group's place in the workspace is.
struct Parts<'a> {
    /// The numbers of items and of items of the combination. `[4]`
    counts: &'a mut [u32],
    seqs: &'a mut [KvpoolSeq],
    tables: &'a mut [u32],
    items: &'a mut [KvpoolItem],
    combines: &'a mut [KvpoolItem],
}

impl<'a> Parts<'a> {
    fn new(buffer: &'a mut [u8], at: &CudaTables, sizes: &CudaWorkspace) -> Self {
        let len = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let (counts, rest) = buffer.split_at_mut(COUNTS_BYTES);
        let (seqs, rest) = rest.split_at_mut(len(at.tables - at.seqs));
        let (tables, rest) = rest.split_at_mut(len(at.items - at.tables));
        let (items, combines) = rest.split_at_mut(len(at.combines - at.items));
        Self {
            counts: values_of_mut(counts),
            seqs: values_of_mut(seqs),
            tables: values_of_mut(tables),
            items: &mut values_of_mut(items)[..sizes.max_items as usize],
            combines: &mut values_of_mut(combines)[..sizes.max_tiles as usize],
        }
    }

    /// Puts the copies of what has been filled in into the stream.
    fn upload(
        &mut self,
        upload: &Upload<'_>,
        seqs: usize,
        blocks: usize,
        lists: Counts,
    ) -> Result<(), DeviceError> {
        let CudaTables { num_items: counts_at, seqs: seqs_at, tables, items, combines, .. } =
            upload.tables;
        self.counts[..2].copy_from_slice(&[lists.items, lists.combines]);
        let (num_items, num_combines) = (lists.items as usize, lists.combines as usize);
        // SAFETY: each part of the buffer is as long as its place in the workspace.
        unsafe { upload.part(counts_at, bytes_of(self.counts)) }?;
        // SAFETY: as above.
        unsafe { upload.part(seqs_at, bytes_of(&self.seqs[..seqs])) }?;
        // SAFETY: as above.
        unsafe { upload.part(tables, bytes_of(&self.tables[..blocks])) }?;
        // SAFETY: as above.
        unsafe { upload.part(items, bytes_of(&self.items[..num_items])) }?;
        // SAFETY: as above.
        unsafe { upload.part(combines, bytes_of(&self.combines[..num_combines])) }
    }
}

/// Writes the sequences, and the blocks that their rows see one behind the other; gives how many
/// blocks.
///
/// # Errors
/// [`DeviceError::OutOfRange`] when a position that is seen would lie outside the group's units.
fn fill_seqs(
    args: &DeviceAttend<'_>,
    pool: Bytes,
    seqs: &mut [KvpoolSeq],
    packed: &mut [u32],
) -> Result<usize, DeviceError> {
    let layout = args.layout;
    let outside = |unit: u32| DeviceError::OutOfRange {
        offset: layout.base.saturating_add(layout.unit_bytes.saturating_mul(unit.into())),
        len: layout.unit_bytes,
        pool,
    };
    if args.seqs.len() > seqs.len() {
        return Err(DeviceError::StepTooLong {
            tokens: args.seqs.len() as u64,
            limit: seqs.len() as u64,
        });
    }
    let mut len = 0;
    for (seq, out) in args.seqs.iter().zip(seqs) {
        let mut table_at = 0;
        if layout.addressing == Addressing::Blocks && seq.rows > 0 {
            let (first, blocks) = blocks_of(args, seq).ok_or_else(|| outside(layout.units))?;
            let room = packed.get_mut(len..len + blocks.len());
            room.ok_or_else(|| outside(layout.units))?.copy_from_slice(blocks);
            check_blocks(args, seq, first, blocks).map_err(outside)?;
            // Wraps where the first block is not the sequence's first; the kernels add it back.
            table_at = u32::try_from(len).unwrap_or(u32::MAX).wrapping_sub(first);
            len += blocks.len();
        } else if layout.addressing != Addressing::Blocks {
            let end = seq.first_position.saturating_add(seq.rows);
            let beyond = layout.addressing == Addressing::Slot && end > layout.unit_tokens;
            if seq.slot >= layout.units || beyond {
                return Err(outside(seq.slot));
            }
        }
        *out = KvpoolSeq {
            unit: seq.slot,
            row_start: seq.row_start,
            rows: seq.rows,
            first_position: seq.first_position,
            table_at,
            reserved: 0,
        };
    }
    Ok(len)
}

/// The blocks from the first that a sequence's rows see to their last; and the first one's index in
/// the sequence. With sinks from the very first on.
fn blocks_of<'a>(args: &DeviceAttend<'a>, seq: &BatchSeq) -> Option<(u32, &'a [u32])> {
    let layout = args.layout;
    let (_, from) = visible(seq.first_position, args.window, layout.sink_tokens);
    let sinks = args.window > 0 && layout.sink_tokens > 0;
    let first = if sinks { 0 } else { from / layout.unit_tokens };
    let last = (seq.first_position.checked_add(seq.rows)? - 1) / layout.unit_tokens;
    let row = (seq.slot as usize).checked_mul(args.table_row as usize)?;
    if last >= args.table_row {
        return None;
    }
    Some((first, args.tables.get(row + first as usize..=row + last as usize)?))
}

/// Checks the blocks that are seen: between sinks and window there may be none.
fn check_blocks(
    args: &DeviceAttend<'_>,
    seq: &BatchSeq,
    first: u32,
    blocks: &[u32],
) -> Result<(), u32> {
    let layout = args.layout;
    // The first row sees farthest back; the last one may be the first that sees sinks apart.
    let (_, from) = visible(seq.first_position, args.window, layout.sink_tokens);
    let last = seq.first_position + seq.rows - 1;
    let (sinks, _) = visible(last, args.window, layout.sink_tokens);
    let seen_from = (from / layout.unit_tokens - first) as usize;
    let seen_sinks = (sinks.div_ceil(layout.unit_tokens) as usize).min(seen_from);
    let seen = blocks[..seen_sinks].iter().chain(&blocks[seen_from..]);
    match seen.copied().max() {
        Some(largest) if largest >= layout.units => Err(largest),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_the_same_place_have_an_order() {
        let pair = |src_unit, dst_unit, first_token, num_tokens| KvpoolCopyPair {
            src_unit,
            dst_unit,
            first_token,
            num_tokens,
        };
        let first = pair(1, 2, 4, 4);
        for (other, ordered) in [
            (pair(1, 3, 0, 8), false),
            (pair(3, 2, 0, 8), true),
            (pair(2, 3, 0, 5), true),
            (pair(3, 1, 7, 1), true),
            (pair(3, 4, 0, 8), false),
            // Other tokens of the same units.
            (pair(3, 2, 0, 4), false),
            (pair(2, 3, 8, 1), false),
        ] {
            assert_eq!(have_an_order(&first, &other), ordered, "{other:?}");
            assert_eq!(have_an_order(&other, &first), ordered, "{other:?}");
        }
    }
}
