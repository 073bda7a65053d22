//! The CUDA device's fixed workspace: where everything beside the pool lies, in one device
//! allocation and one of pinned host memory.
//!
//! The device carves both with the offsets of [`CudaWorkspace`] and allocates exactly its sums, so
//! that the plan's numbers and the allocations cannot differ (P2). What a step's kernels read
//! (token slots, sequences, block tables, work lists) has a fixed place for each group, so that a
//! captured graph stays valid.

use serde::Serialize;

use super::{Plan, SPLIT_TOKENS};
use crate::units::{Bytes, Overflow};

/// Alignment of every part of the workspace, in bytes.
const PART_ALIGN: u64 = 256;

/// The most bytes that partial results of splits may take. Where a step would need more, its later
/// sequences go through their splits one after the other, which gives the same bits.
const MAX_PARTIALS_BYTES: u64 = 64 << 20;

/// Bytes of a sequence, and of an item of work, as the kernels read them.
pub const CUDA_SEQ_BYTES: u64 = 24;
/// See [`CUDA_SEQ_BYTES`].
pub const CUDA_ITEM_BYTES: u64 = 24;
/// Bytes of the numbers that lie ahead of a list, so that both go in one copy, and of what appends
/// count: nonfinite and saturated elements.
pub const CUDA_COUNTS_BYTES: u64 = 16;
/// Bytes of a pair of units to copy.
pub const CUDA_PAIR_BYTES: u64 = 16;
/// Pairs of units that are copied in one launch, at most.
pub const CUDA_PAIRS_AT_ONCE: u32 = 256;
/// Lists of pairs that can be on their way to the GPU at once.
pub const CUDA_PAIR_SLOTS: u32 = 16;
/// Tables of so many steps can be on their way to the GPU at once.
const STEPS_AHEAD: u32 = 2;
/// Pinned buffers for tensors that lie in host memory: one is filled while one is copied.
pub const CUDA_TENSOR_SLOTS: u32 = 2;
/// Bytes of tensors that go through them at a time, about.
const TENSOR_SLOT_BYTES: u64 = 4 << 20;

/// Where the tables of one group lie in the device's workspace, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CudaTables {
    /// The step's number of tokens, in [`CUDA_COUNTS_BYTES`].
    pub num_tokens: u64,
    /// Token slots, behind it. `[max_batch_tokens]`, 8 bytes each
    pub token_slots: u64,
    /// The tokens' positions, where K is rotated. `[max_batch_tokens]`, 4 bytes each
    pub positions: u64,
    /// The numbers of items and of items of the combination, in [`CUDA_COUNTS_BYTES`].
    pub num_items: u64,
    /// Sequences of the step, behind them. `[seq_slots]`
    pub seqs: u64,
    /// Their blocks, packed. `[seq_slots, max_blocks_per_seq]`, 4 bytes each
    pub tables: u64,
    /// Items of attention. `[max_items]`
    pub items: u64,
    /// Items of the combination. `[max_tiles]`
    pub combines: u64,
    /// What an engine's own kernels read.
    pub exports: CudaExports,
}

/// Where the tables of one group lie that an engine's own kernels read, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CudaExports {
    /// `[max_batch_tokens]`, 4 bytes each
    pub positions: u64,
    /// `[max_batch_tokens]`, 8 bytes each
    pub token_slots: u64,
    /// `[seq_slots]`, 4 bytes each
    pub seq_lens: u64,
    /// `[seq_slots + 1]`, 4 bytes each
    pub kv_indptr: u64,
    /// `[seq_slots]`, 4 bytes each
    pub kv_last_block_len: u64,
    /// `[seq_slots]`, 4 bytes each
    pub kv_first_position: u64,
    /// `[seq_slots, max_blocks_per_seq]`, 4 bytes each
    pub kv_indices: u64,
    /// `[seq_slots, max_blocks_per_seq]`, 4 bytes each
    pub block_table: u64,
}

/// Sizes and offsets of the workspace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CudaWorkspace {
    /// `[num_groups]`
    pub groups: Vec<CudaTables>,
    /// Partial results. `[num_kv_heads, max_partials, head_dim]` f32
    pub partial_acc: u64,
    /// Their maxima and sums. `[num_kv_heads, max_partials, 2]` f32
    pub partial_ml: u64,
    /// What appends with tensors in device memory have counted since the device was opened, in
    /// [`CUDA_COUNTS_BYTES`]; and behind it what the append of host tensors under way counts.
    pub counts: u64,
    /// Pairs of units to copy. `[CUDA_PAIRS_AT_ONCE]`
    pub pairs: u64,
    /// A sequence's blocks in one group, to be read back. `[max_blocks_per_seq]` of the group with
    /// the most, 4 bytes each
    pub gather_row: u64,
    /// Tables for the rotation of K. [`Rope::fill`](super::Rope::fill)
    pub rope: u64,
    /// Where tensors of host memory are put: K and V, or queries. `[tensor_rows, in_row_bytes]`
    pub tensors_in: u64,
    /// Results on their way to the host. `[tensor_rows, out_row_bytes]`
    pub tensors_out: u64,
    /// All of this.
    pub device_bytes: Bytes,

    /// Packed rows (a row and a query head of a KV head's group) of an item, at least.
    pub item_rows: u32,
    /// Items of a step that go through all splits, at most.
    pub max_tiles: u32,
    /// Items of a step, at most.
    pub max_items: u32,
    /// Places for partial results.
    pub max_partials: u32,
    /// Rows of tensors of host memory that are staged at a time.
    pub tensor_rows: u32,
    /// Bytes of a row that is staged in: K and V in f32, or queries.
    pub in_row_bytes: u64,
    /// Bytes of a row that is staged out: the result in f32, and the lse.
    pub out_row_bytes: u64,

    /// Pinned buffers for tables.
    pub table_slots: u32,
    /// Bytes of one of them.
    pub table_slot_bytes: u64,
    /// Bytes of a pinned buffer for tensors.
    pub tensor_slot_bytes: u64,
    /// All pinned host memory.
    pub pinned_bytes: Bytes,
}

/// Takes parts one behind the other.
struct Carver(Bytes);

impl Carver {
    /// The offset of a part of so many elements of so many bytes.
    fn take(&mut self, count: u64, bytes: u64) -> Result<u64, Overflow> {
        let at = self.0;
        self.0 = at.try_add(Bytes(count).try_mul(bytes)?)?.align_up(PART_ALIGN)?;
        Ok(at.get())
    }
}

/// The least packed rows of an item, by `head_dim` (`KVPOOL_WIDE_ROWS` in `params.h`).
const fn item_rows(head_dim: u32) -> u32 {
    match head_dim {
        0..=256 => 8,
        _ => 2,
    }
}

/// The number, or the largest u32, which no list that fits a GPU comes near to.
fn clamp(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

impl Plan {
    /// The CUDA device's workspace for this plan.
    ///
    /// # Errors
    /// [`Overflow`] when it does not fit in 64 bits.
    pub fn cuda_workspace(&self) -> Result<CudaWorkspace, Overflow> {
        let geometry = &self.geometry;
        let tokens = u64::from(self.limits.max_batch_tokens);
        let seqs = u64::from(self.seq_slots);
        let (q_heads, kv_heads) =
            (u64::from(geometry.num_q_heads), u64::from(geometry.num_kv_heads));
        let head_dim = u64::from(geometry.head_dim);
        let per_kv = u64::from(geometry.q_heads_per_kv_head());

        let item_rows = item_rows(geometry.head_dim);
        // A sequence's last item may be short.
        let max_tiles = Bytes(tokens).try_mul(per_kv)?.get() / u64::from(item_rows) + seqs + 1;
        let splits = u64::from(self.limits.max_seq_len.div_ceil(SPLIT_TOKENS));
        let partial_bytes = Bytes(head_dim + 2).try_mul(4)?.try_mul(kv_heads)?.get();
        let max_partials = if splits < 2 {
            0
        } else {
            let all = Bytes(seqs.min(tokens)).try_mul(per_kv)?.try_mul(splits)?.get();
            all.min(MAX_PARTIALS_BYTES / partial_bytes)
        };
        // An item of one split takes at least one place.
        let max_items = max_tiles + max_partials;

        let mut device = Carver(Bytes::ZERO);
        let mut groups = Vec::with_capacity(self.groups.len());
        let mut table_slot_bytes = 0;
        let longest_row = self.groups.iter().map(|group| group.max_blocks_per_seq).max();
        let longest_row = longest_row.unwrap_or(0);
        for group in &self.groups {
            let entries = Bytes(seqs).try_mul(u64::from(group.max_blocks_per_seq))?.get();
            let (tables, uploaded) =
                self.carve_tables(&mut device, entries, max_items, max_tiles)?;
            table_slot_bytes = uploaded.max(table_slot_bytes);
            groups.push(tables);
        }
        let in_row_bytes = q_heads.max(2 * kv_heads) * head_dim * 4;
        let out_row_bytes = q_heads * (head_dim + 1) * 4;
        let tensor_rows = (TENSOR_SLOT_BYTES / in_row_bytes.max(out_row_bytes)).clamp(1, tokens);
        let workspace = CudaWorkspace {
            groups,
            partial_acc: device.take(max_partials * kv_heads, head_dim * 4)?,
            partial_ml: device.take(max_partials * kv_heads, 8)?,
            counts: device.take(2, CUDA_COUNTS_BYTES)?,
            pairs: device.take(CUDA_PAIRS_AT_ONCE.into(), CUDA_PAIR_BYTES)?,
            gather_row: device.take(longest_row.into(), 4)?,
            rope: device.take(self.rope_len()?, 4)?,
            tensors_in: device.take(tensor_rows, in_row_bytes)?,
            tensors_out: device.take(tensor_rows, out_row_bytes)?,
            device_bytes: device.0,
            item_rows,
            max_tiles: clamp(max_tiles),
            max_items: clamp(max_items),
            max_partials: clamp(max_partials),
            tensor_rows: clamp(tensor_rows),
            in_row_bytes,
            out_row_bytes,
            // Token slots, the rest, and twice what an engine's kernels read, of every group.
            table_slots: clamp(self.groups.len() as u64 * 4 * u64::from(STEPS_AHEAD)),
            table_slot_bytes,
            tensor_slot_bytes: Bytes(tensor_rows)
                .try_mul(in_row_bytes.max(out_row_bytes))?
                .align_up(PART_ALIGN)?
                .get(),
            pinned_bytes: Bytes::ZERO,
        };
        let pinned =
            workspace.rings().into_iter().try_fold(Bytes::ZERO, |sum, (slots, bytes)| {
                sum.try_add(Bytes(bytes).try_mul(slots.into())?)
            })?;
        Ok(CudaWorkspace { pinned_bytes: pinned, ..workspace })
    }

    /// A group's tables, and the bytes of the largest part of them that is uploaded at once.
    /// `entries`: of its block table.
    fn carve_tables(
        &self,
        device: &mut Carver,
        entries: u64,
        max_items: u64,
        max_tiles: u64,
    ) -> Result<(CudaTables, u64), Overflow> {
        let tokens = u64::from(self.limits.max_batch_tokens);
        let seqs = u64::from(self.seq_slots);
        let from = device.take(CUDA_COUNTS_BYTES + tokens * 8, 1)?;
        let positions = device.take(if self.rope.is_some() { tokens } else { 0 }, 4)?;
        let attend = device.0;
        let num_items = device.take(CUDA_COUNTS_BYTES + seqs * CUDA_SEQ_BYTES, 1)?;
        let mut tables = CudaTables {
            num_tokens: from,
            token_slots: from + CUDA_COUNTS_BYTES,
            positions,
            num_items,
            seqs: num_items + CUDA_COUNTS_BYTES,
            tables: device.take(entries, 4)?,
            items: device.take(max_items, CUDA_ITEM_BYTES)?,
            combines: device.take(max_tiles, CUDA_ITEM_BYTES)?,
            exports: CudaExports::default(),
        };
        // Token slots are uploaded by append, the rest by attend.
        let larger = (attend.get() - from).max(device.0.get() - attend.get());
        let exports = device.0;
        tables.exports = CudaExports {
            positions: device.take(tokens, 4)?,
            token_slots: device.take(tokens, 8)?,
            seq_lens: device.take(seqs, 4)?,
            kv_indptr: device.take(seqs + 1, 4)?,
            kv_last_block_len: device.take(seqs, 4)?,
            kv_first_position: device.take(seqs, 4)?,
            kv_indices: device.take(entries, 4)?,
            block_table: device.take(entries, 4)?,
        };
        // All but the dense table go through one buffer.
        let dense = Bytes(entries).try_mul(4)?.align_up(PART_ALIGN)?;
        let csr = device.0.get() - exports.get() - dense.get();
        Ok((tables, larger.max(csr).max(dense.get())))
    }
}

impl CudaWorkspace {
    /// The rings of pinned buffers, for tables, pairs and tensors: how many, and of how many bytes.
    #[must_use]
    pub fn rings(&self) -> [(u32, u64); 3] {
        [
            (self.table_slots, self.table_slot_bytes),
            (CUDA_PAIR_SLOTS, u64::from(CUDA_PAIRS_AT_ONCE) * CUDA_PAIR_BYTES),
            (CUDA_TENSOR_SLOTS, self.tensor_slot_bytes),
        ]
    }

    /// The parts of the device's workspace, as named sizes that add up to it.
    #[must_use]
    pub fn terms(&self) -> [(&'static str, Bytes); 4] {
        let part = |from: u64, to: u64| Bytes(to - from);
        [
            (
                "token slots, block tables and work lists of a step, for both kinds of kernels",
                part(0, self.partial_acc),
            ),
            ("partial results of splits", part(self.partial_acc, self.counts)),
            (
                "counts, pairs to copy, blocks to read back, tables of RoPE",
                part(self.counts, self.tensors_in),
            ),
            ("tensors from and to host memory", part(self.tensors_in, self.device_bytes.get())),
        ]
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::parse;

    fn plan(max_seq_len: u32, max_batch_tokens: u32) -> Plan {
        let toml = format!(
            "model = {{ preset = 'llama-3-8b' }}
             limits = {{ max_seqs = 64, max_seq_len = {max_seq_len}, max_batch_tokens = {max_batch_tokens} }}
             cache = {{ mode = 'paged', format = 'f16', tokens_per_block = 16 }}
             pool = {{ capacity = 'tokens:100000' }}"
        );
        let source = parse(&toml, Path::new("cuda"), &[]).expect("a valid configuration");
        Plan::new(&source.config, &source.geometry).expect("a plan")
    }

    #[test]
    fn parts_follow_one_another_and_add_up() {
        let workspace = plan(16_384, 8192).cuda_workspace().expect("fits");
        let [group] = workspace.groups[..] else { panic!("one group") };
        let at = [
            group.num_tokens,
            group.num_items,
            group.tables,
            group.items,
            group.combines,
            group.exports.positions,
            group.exports.token_slots,
            group.exports.seq_lens,
            group.exports.kv_indptr,
            group.exports.kv_last_block_len,
            group.exports.kv_first_position,
            group.exports.kv_indices,
            group.exports.block_table,
            workspace.partial_acc,
            workspace.partial_ml,
            workspace.counts,
            workspace.pairs,
            workspace.gather_row,
            workspace.tensors_in,
            workspace.tensors_out,
            workspace.device_bytes.get(),
        ];
        assert!(at.is_sorted_by(|a, b| a < b), "{at:?}");
        assert!(at.iter().all(|at| at.is_multiple_of(PART_ALIGN)), "{at:?}");
        let seqs = CUDA_COUNTS_BYTES + 64 * CUDA_SEQ_BYTES;
        assert_eq!(group.tables - group.num_items, seqs.next_multiple_of(PART_ALIGN));
        assert_eq!(group.items - group.tables, 64 * 1024 * 4);
        let sum: u64 = workspace.terms().iter().map(|(_, bytes)| bytes.get()).sum();
        assert_eq!(sum, workspace.device_bytes.get());
        // 64 sequences, 4 query heads a KV head, 32 splits.
        assert_eq!(workspace.max_partials, 64 * 4 * 32);
        assert!(workspace.tensor_slot_bytes <= TENSOR_SLOT_BYTES);
    }

    #[test]
    fn partial_results_are_limited_and_short_sequences_have_none() {
        let long = plan(1 << 20, 8192).cuda_workspace().expect("fits");
        let bytes = u64::from(long.max_partials) * 8 * (128 + 2) * 4;
        assert!(bytes <= MAX_PARTIALS_BYTES && bytes > MAX_PARTIALS_BYTES / 2, "{bytes}");
        let short = plan(512, 64).cuda_workspace().expect("fits");
        assert_eq!(short.max_partials, 0);
        assert_eq!(short.partial_acc, short.counts);
    }

    #[test]
    fn every_row_of_a_step_has_its_item() {
        let workspace = plan(4096, 1000).cuda_workspace().expect("fits");
        // The worst: 64 sequences, each with a last item of one packed row.
        let packed = 1000 * 4;
        assert!(workspace.max_tiles >= packed / workspace.item_rows + 64);
        assert!(workspace.max_items >= workspace.max_tiles + workspace.max_partials);
    }
}
