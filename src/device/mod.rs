//! What holds the pool's bytes and computes on them.
//!
//! A [`Device`] makes one allocation when it is opened and none after that. It knows layouts,
//! token slots and block tables, and nothing of sequences, references or steps: those are the
//! cache's business. Every call is checked against the pool's size, so that a defect above cannot
//! become a write outside of it.
//!
//! This folder is the only place with `unsafe` code.

mod convert;
mod counting_alloc;
pub mod cpu;
pub mod cuda;
mod gather;
mod huge_vec;
mod null;
mod open;
mod plain;
mod quant;
pub(crate) mod rank;
mod tensor;

pub use counting_alloc::{AllocationCounts, CountingAllocator, counts as allocation_counts};
pub use gather::GatherArgs;
pub use huge_vec::{all_of, huge_vec, prefetch, room, table_of};
pub use null::NullDevice;
pub use open::{ResolvedBudget, open, resolve_budget};
pub use quant::{dequantize_row, quantize_row};
pub use tensor::{CudaStream, DType, DeviceTensor, TensorMut, TensorRef};

use std::fmt;

use crate::error::DeviceError;
use crate::plan::{GroupLayout, LayerScales, SeqView};
use crate::units::Bytes;

/// What a device says of itself.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct DeviceInfo {
    /// `cpu`; `cuda`; `cuda-emulated` for CUDA kernels that are executed by the host, in tests;
    /// or `none` for a device without memory.
    pub kind: &'static str,
    /// The kernels chosen at open: `reference`, `portable`, `avx2`, `avx512`, `avx512+vnni`
    /// (with VNNI for INT8), `avx512+vnni+bf16` (and BF16 in two terms for bfloat16 where query
    /// heads share a KV head) or `avx512-bf16` (in one term); `plain` or `tensor-cores` on a GPU;
    /// `none` for a device without memory.
    pub kernel: &'static str,
    /// Threads that compute, the calling one included; multiprocessors of a GPU.
    pub threads: u32,
    /// Bytes of the pool.
    pub pool_bytes: Bytes,
    /// Bytes of the fixed workspace beside the pool.
    pub workspace_bytes: Bytes,
    /// Whether the operating system was asked for huge pages and accepted.
    pub huge_pages: bool,
}

/// Things that an append met in its input. Summed up by the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct AppendCounts {
    /// Elements that were NaN or infinite. Counted for INT8 only: the other formats store them as
    /// they are, and f16 and bf16 round what is beyond their range to infinity, as IEEE says.
    pub nonfinite: u64,
    /// Finite elements beyond ±127 static scales, stored as ±127 (`per-tensor` only).
    pub saturated: u64,
}

impl AppendCounts {
    /// Adds another count.
    pub fn add(&mut self, other: Self) {
        self.nonfinite += other.nonfinite;
        self.saturated += other.saturated;
    }
}

/// K and V of a step, to be stored in one layer.
#[derive(Clone, Copy, Debug)]
pub struct AppendArgs<'a> {
    /// The layer's group.
    pub layout: &'a GroupLayout,
    /// The layer's index in the group.
    pub layer: u32,
    /// Static INT8 scales; unused unless the format is `per-tensor`.
    pub scales: LayerScales,
    /// Where each token goes: `unit · unit_tokens + token`. `[tokens]`
    pub token_slots: &'a [u64],
    /// Which of the plan's tables K is rotated with; `None`: it is stored as it comes.
    pub rope: Option<u32>,
    /// Each token's position; read only where K is rotated. `[tokens]`
    pub positions: &'a [u32],
    /// Keys. `[tokens, num_kv_heads, head_dim]`
    pub k: TensorRef<'a>,
    /// Values. `[tokens, num_kv_heads, head_dim]`
    pub v: TensorRef<'a>,
}

/// One sequence's queries in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchSeq {
    /// Its slot: the row of the block table, and the unit in contiguous groups.
    pub slot: u32,
    /// Its first row in the step's tensors.
    pub row_start: u32,
    /// Its rows: one query each.
    pub rows: u32,
    /// The position of its first row in the sequence.
    pub first_position: u32,
}

/// Causal attention of a step's queries over what their sequences hold in one layer.
#[derive(Debug)]
pub struct AttendArgs<'a> {
    /// The layer's group.
    pub layout: &'a GroupLayout,
    /// The layer's index in the group.
    pub layer: u32,
    /// Static INT8 scales; unused unless the format is `per-tensor`.
    pub scales: LayerScales,
    /// Keys a query may see, itself included; 0 = all.
    pub window: u32,
    /// Query heads; a multiple of the layout's KV heads.
    pub num_q_heads: u32,
    /// Factor on q·k before the softmax.
    pub softmax_scale: f32,
    /// The sequences of the step. `[num_seqs]`
    pub seqs: &'a [BatchSeq],
    /// The group's block table, empty for contiguous groups. `[seq_slots, table_row]`
    pub tables: &'a [u32],
    /// Entries of one row of `tables`.
    pub table_row: u32,
    /// Queries. `[tokens, num_q_heads, head_dim]`
    pub q: TensorRef<'a>,
    /// Where the result goes. `[tokens, num_q_heads, head_dim]`
    pub out: TensorMut<'a>,
    /// Natural logarithm of the softmax's denominator, scores scaled; -∞ where no key has a
    /// finite score. `[tokens, num_q_heads]`
    pub lse: Option<&'a mut [f32]>,
}

impl AttendArgs<'_> {
    /// One sequence seen through the layer's group.
    #[must_use]
    pub fn view(&self, seq: &BatchSeq) -> SeqView<'_> {
        let row = self.table_row as usize;
        let start = seq.slot as usize * row;
        let table = if row == 0 { &[] } else { &self.tables[start..start + row] };
        SeqView { layout: self.layout, table, slot: seq.slot }
    }
}

/// K and V of a step in the device's own memory, to be stored in one layer.
#[derive(Clone, Copy, Debug)]
pub struct DeviceAppend<'a> {
    /// Names the step: token slots of a group that were uploaded for it are not uploaded again.
    /// 0 names none.
    pub step: u64,
    /// As [`AppendArgs::layout`].
    pub layout: &'a GroupLayout,
    /// As [`AppendArgs::layer`].
    pub layer: u32,
    /// As [`AppendArgs::scales`].
    pub scales: LayerScales,
    /// As [`AppendArgs::token_slots`]; none twice. `[tokens]`
    pub token_slots: &'a [u64],
    /// As [`AppendArgs::rope`].
    pub rope: Option<u32>,
    /// As [`AppendArgs::positions`]. `[tokens]`
    pub positions: &'a [u32],
    /// Keys. `[tokens, num_kv_heads, head_dim]`
    pub k: DeviceTensor,
    /// Values, of the same element type. `[tokens, num_kv_heads, head_dim]`
    pub v: DeviceTensor,
}

/// What the kernels of a step read of one group.
#[derive(Clone, Copy, Debug)]
pub struct DevicePrepare<'a> {
    /// Names the step; not 0.
    pub step: u64,
    /// As [`AttendArgs::layout`].
    pub layout: &'a GroupLayout,
    /// As [`AttendArgs::window`].
    pub window: u32,
    /// As [`AttendArgs::num_q_heads`].
    pub num_q_heads: u32,
    /// As [`AppendArgs::token_slots`]. `[tokens]`
    pub token_slots: &'a [u64],
    /// As [`AppendArgs::positions`]. `[tokens]`
    pub positions: &'a [u32],
    /// As [`AttendArgs::seqs`]. `[num_seqs]`
    pub seqs: &'a [BatchSeq],
    /// As [`AttendArgs::tables`]. `[seq_slots, table_row]`
    pub tables: &'a [u32],
    /// As [`AttendArgs::table_row`].
    pub table_row: u32,
}

/// Attention whose tensors are in the device's own memory.
#[derive(Clone, Copy, Debug)]
pub struct DeviceAttend<'a> {
    /// Names the step, as [`DeviceAppend::step`].
    pub step: u64,
    /// As [`AttendArgs::layout`].
    pub layout: &'a GroupLayout,
    /// As [`AttendArgs::layer`].
    pub layer: u32,
    /// As [`AttendArgs::scales`].
    pub scales: LayerScales,
    /// As [`AttendArgs::window`].
    pub window: u32,
    /// As [`AttendArgs::num_q_heads`].
    pub num_q_heads: u32,
    /// As [`AttendArgs::softmax_scale`].
    pub softmax_scale: f32,
    /// As [`AttendArgs::seqs`]. `[num_seqs]`
    pub seqs: &'a [BatchSeq],
    /// As [`AttendArgs::tables`]. `[seq_slots, table_row]`
    pub tables: &'a [u32],
    /// As [`AttendArgs::table_row`].
    pub table_row: u32,
    /// Queries. `[tokens, num_q_heads, head_dim]`
    pub q: DeviceTensor,
    /// Where the result goes. `[tokens, num_q_heads, head_dim]`
    pub out: DeviceTensor,
    /// As [`AttendArgs::lse`], in f32. `[tokens, num_q_heads]`
    pub lse: Option<DeviceTensor>,
}

/// A group's tables of a step, to be put into the device's memory for an engine's own kernels.
#[derive(Clone, Copy, Debug)]
pub struct TablesUpload<'a> {
    /// As [`AppendArgs::layout`].
    pub layout: &'a GroupLayout,
    /// Each token's position in its sequence. `[tokens]`
    pub positions: &'a [u32],
    /// Tokens of each sequence, the step's included. `[num_seqs]`
    pub seq_lens: &'a [u32],
    /// As [`AppendArgs::token_slots`]. `[tokens]`
    pub token_slots: &'a [u64],
    /// As [`AttendArgs::seqs`]. `[num_seqs]`
    pub seqs: &'a [BatchSeq],
    /// As [`AttendArgs::tables`]. `[seq_slots, table_row]`
    pub tables: &'a [u32],
    /// As [`AttendArgs::table_row`].
    pub table_row: u32,
    /// Whether the rows of `tables` are wanted.
    pub dense: bool,
    /// Where each sequence's blocks begin, the blocks, the tokens of the last ones, and the
    /// positions of the first ones (`Csr` of the cache); empty where they are not wanted, and for a
    /// contiguous group.
    pub csr: [&'a [u32]; 4],
}

/// Where they are: addresses in the device's memory, 0 for what was not wanted and for what a
/// contiguous group does not have. The same for every step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceTables {
    /// `[tokens]`, 4 bytes each
    pub positions: u64,
    /// `[num_seqs]`, 4 bytes each
    pub seq_lens: u64,
    /// `[tokens]`, 8 bytes each
    pub token_slots: u64,
    /// A row for each sequence of the step, in its order. `[num_seqs, block_table_row]`, 4 bytes
    /// each
    pub block_table: u64,
    /// `[num_seqs + 1]`, 4 bytes each
    pub kv_indptr: u64,
    /// `[kv_indptr[num_seqs]]`, 4 bytes each
    pub kv_indices: u64,
    /// `[num_seqs]`, 4 bytes each
    pub kv_last_block_len: u64,
    /// `[num_seqs]`, 4 bytes each
    pub kv_first_position: u64,
    /// Entries of a row of the block table.
    pub block_table_row: u32,
}

/// Memory and kernels.
pub trait Device: Send + fmt::Debug {
    /// What it is, and how it was opened.
    fn info(&self) -> DeviceInfo;

    /// [`Plan::fingerprint`](crate::plan::Plan::fingerprint) of the plan that it was opened with.
    fn plan_fingerprint(&self) -> u64;

    /// The host's threads that it computes with, if it does so there.
    fn threads(&self) -> Option<&cpu::Threads> {
        None
    }

    /// The pool's first byte; stable for the life of the device. An engine's own kernels may read
    /// and write through it while no call of the device is under way. Null for a device without
    /// memory.
    fn base_ptr(&self) -> *mut u8;

    /// Stores K and V of a step in one layer, quantising them where the format asks for it.
    /// Shapes have been checked by the caller.
    ///
    /// # Errors
    /// [`DeviceError`] when the layout is not consistent or a token slot lies outside the pool
    /// (nothing is written then), or a worker failed.
    fn append(&mut self, args: &AppendArgs<'_>) -> Result<AppendCounts, DeviceError>;

    /// Computes attention in one layer. Shapes have been checked by the caller.
    ///
    /// # Errors
    /// [`DeviceError`] when the layout is not consistent or a block lies outside the pool, or a
    /// worker failed.
    fn attend(&mut self, args: &mut AttendArgs<'_>) -> Result<(), DeviceError>;

    /// Uploads what the kernels of a step read of one group, so that its appends and attentions
    /// with tensors in the device's memory put nothing but kernels into the stream, with numbers
    /// read from the device's memory: what a graph can capture and play again for later steps.
    ///
    /// # Errors
    /// As [`Device::append`] and [`Device::attend`]; [`DeviceError::HostTensorsOnly`].
    fn prepare(&mut self, args: &DevicePrepare<'_>) -> Result<(), DeviceError> {
        let _ = args;
        Err(DeviceError::HostTensorsOnly { kind: self.info().kind })
    }

    /// As [`Device::append`], with tensors in the device's memory: the work is put into the
    /// device's stream and not waited for. What it counts comes with [`Device::synchronize`].
    ///
    /// # Errors
    /// As [`Device::append`]; [`DeviceError::HostTensorsOnly`].
    fn append_device(&mut self, args: &DeviceAppend<'_>) -> Result<(), DeviceError> {
        let _ = args;
        Err(DeviceError::HostTensorsOnly { kind: self.info().kind })
    }

    /// As [`Device::attend`], with tensors in the device's memory: the work is put into the
    /// device's stream and not waited for.
    ///
    /// # Errors
    /// As [`Device::attend`]; [`DeviceError::HostTensorsOnly`].
    fn attend_device(&mut self, args: &DeviceAttend<'_>) -> Result<(), DeviceError> {
        let _ = args;
        Err(DeviceError::HostTensorsOnly { kind: self.info().kind })
    }

    /// Puts a group's tables of a step into the device's memory, in the order of the stream, for
    /// an engine's own kernels in that stream.
    ///
    /// # Errors
    /// [`DeviceError::HostTensorsOnly`] where the host's tables are all there is, or what the
    /// driver says.
    fn upload_tables(&mut self, args: &TablesUpload<'_>) -> Result<DeviceTables, DeviceError> {
        let _ = args;
        Err(DeviceError::HostTensorsOnly { kind: self.info().kind })
    }

    /// Puts all work from here on into a stream of the caller's, behind what was put into the one
    /// before.
    ///
    /// # Errors
    /// [`DeviceError::NoStreams`], [`DeviceError::CudaStreamOfThread`], or what the driver says.
    fn set_stream(&mut self, stream: CudaStream) -> Result<(), DeviceError> {
        let _ = stream;
        Err(DeviceError::NoStreams { kind: self.info().kind })
    }

    /// Puts the work from here on into the device's own stream, behind what was put into the
    /// caller's, which is not used any more. Nothing to do without streams.
    ///
    /// # Errors
    /// What the driver says.
    fn leave_stream(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Waits for all work that was put into the stream, and gives what its appends with tensors in
    /// the device's memory counted since the last time. Nothing to do where every call waits for
    /// itself.
    ///
    /// # Errors
    /// What went wrong in work that was not waited for.
    fn synchronize(&mut self) -> Result<AppendCounts, DeviceError> {
        Ok(AppendCounts::default())
    }

    /// Copies `len` bytes from offset `src` to offset `dst` of the pool; the ranges do not
    /// overlap.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`].
    fn copy(&mut self, src: u64, dst: u64, len: u64) -> Result<(), DeviceError>;

    /// Copies some tokens of a unit to the same places of another unit of the same layout: K, V
    /// and scales of every layer and head, and no byte more. Gives the bytes copied.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`].
    fn copy_tokens(
        &mut self,
        layout: &GroupLayout,
        src_unit: u32,
        dst_unit: u32,
        tokens: std::ops::Range<u32>,
    ) -> Result<u64, DeviceError> {
        let mut bytes = 0;
        let to = layout.token_ranges(dst_unit, tokens.clone());
        for ((src, len), (dst, _)) in layout.token_ranges(src_unit, tokens).zip(to) {
            self.copy(src, dst, len)?;
            bytes += len;
        }
        Ok(bytes)
    }

    /// As [`Device::copy_tokens`], but the copy may only be noted down: [`Device::submit`] makes
    /// what was noted in as few launches as there are layer groups. Until then nothing but further
    /// copies and fillings may be asked for. They take effect in the order of the calls. When a
    /// launch fails, nothing that was noted down is left.
    ///
    /// # Errors
    /// As [`Device::copy_tokens`].
    fn queue_copy(
        &mut self,
        layout: &GroupLayout,
        src_unit: u32,
        dst_unit: u32,
        tokens: std::ops::Range<u32>,
    ) -> Result<u64, DeviceError> {
        self.copy_tokens(layout, src_unit, dst_unit, tokens)
    }

    /// Makes the copies that [`Device::queue_copy`] has noted down.
    ///
    /// # Errors
    /// What the driver says.
    fn submit(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Sets some tokens of a unit to `byte`, behind all copies that were noted down: K, V and
    /// scales of every layer and head, and no byte more. Gives how many bytes.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`].
    fn fill_tokens(
        &mut self,
        layout: &GroupLayout,
        unit: u32,
        tokens: std::ops::Range<u32>,
        byte: u8,
    ) -> Result<u64, DeviceError> {
        let mut bytes = 0;
        for (offset, len) in layout.token_ranges(unit, tokens) {
            self.fill(offset, len, byte)?;
            bytes += len;
        }
        Ok(bytes)
    }

    /// Sets `len` bytes from `offset` on to `byte`, behind all copies that were noted down.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`].
    fn fill(&mut self, offset: u64, len: u64, byte: u8) -> Result<(), DeviceError>;

    /// Writes bytes of the pool, behind all work that was put into the stream. They need not be
    /// kept when the call is over, which need not wait for the device.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`], or what the driver says.
    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Reads K or V of some tokens of a sequence back, widened to f32, behind all work that was put
    /// into the stream. Shapes have been checked by the caller.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`] for a block or slot outside the pool, or what the driver says.
    fn gather(&self, args: &mut GatherArgs<'_>) -> Result<(), DeviceError> {
        gather::row_by_row(self, args)
    }

    /// Reads bytes of the pool.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`].
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), DeviceError>;
}
