//! NVIDIA GPUs.
//!
//! [`CudaDevice::open`] makes one allocation for the pool and one for the workspace that
//! [`Plan::cuda_workspace`] lists, one of pinned host memory, and loads the kernels; after that
//! nothing is allocated (P1). The driver's library is opened at run time, so the same program
//! starts on machines without it; [`CudaGpu::find`] says what is missing. This folder is the only
//! place that names cudarc.
//!
//! **Streams.** All work goes into one stream, the device's own or the caller's
//! ([`Device::set_stream`]), and is done in the order of the calls.
//!
//! - With tensors in device memory ([`Device::append_device`], [`Device::attend_device`]) nothing
//!   is waited for. Token slots, block tables and work lists are uploaded once a step and group,
//!   from a ring of pinned buffers to places that stay the same; a buffer is written again when
//!   its copy is done (edge case 60), for which the host waits only when it is a whole ring ahead.
//! - With tensors in host memory ([`Device::append`], [`Device::attend`]) they go through pinned
//!   buffers, a part of the rows at a time. Attention waits for its results, and so does an append
//!   in INT8, for its counts.
//!
//! - A step that is prepared ([`Device::prepare`]) uploads everything first; behind that its calls
//!   put kernels into the stream and nothing else, which take all numbers from device memory. A
//!   graph that has captured them can be played again for a later step, once that is prepared.
//!
//! **Errors** of kernels show in a later call, as the driver has it.

mod bindings;
mod counts;
mod driver;
mod exports;
mod gather;
mod gpu;
mod host;
mod images;
mod items;
mod kernels;
mod launches;
mod memory;
mod params;
mod report;
mod tables;

pub use gpu::CudaGpu;
pub use images::Build;
pub use report::{CudaReport, DriverReport, GpuReport, report};

use std::sync::Arc;

use bindings::KvpoolCopyPair;
use counts::Counting;
use driver::{Context, Entered, Event, OwnStream, Stream};
use kernels::{Kernels, Target};
use launches::Rows;
use memory::{DeviceMemory, PinnedMemory, Ring};
use tables::Group;

use super::plain;
use super::{
    AppendArgs, AppendCounts, AttendArgs, CudaStream, DType, Device, DeviceAppend, DeviceAttend,
    DeviceInfo, DevicePrepare, DeviceTables, DeviceTensor, GatherArgs, TablesUpload, table_of,
};
use crate::config::RopeStyle;
use crate::error::DeviceError;
use crate::plan::{CUDA_COUNTS_BYTES, CudaWorkspace, GroupLayout, LayerScales, Plan, Rope};
use crate::units::Bytes;

/// What tensors in device memory must be aligned to: the kernels read so many bytes at once.
const TENSOR_ALIGN: u64 = 16;

/// A GPU as a device.
#[derive(Debug)]
pub struct CudaDevice {
    target: Target,
    /// Where the work goes.
    stream: Stream,
    /// The stream that was made at open.
    own_stream: OwnStream,
    /// Orders a new stream behind the one before.
    handover: Event,
    kernels: Kernels,
    pool: DeviceMemory,
    workspace: DeviceMemory,
    sizes: CudaWorkspace,
    /// Pinned buffers for tables, for pairs of units, and for tensors.
    table_ring: Ring,
    pair_ring: Ring,
    tensor_ring: Ring,
    groups: Vec<Group>,
    /// How K is rotated, without the angles.
    rope: Option<RopeShape>,
    q_per_kv: u32,
    max_tokens: u64,
    /// Whether appends count something.
    counts: bool,
    /// What those with tensors in device memory have counted, as far as it has been read back.
    counted: AppendCounts,
    plan_fingerprint: u64,
    context: Arc<Context>,
}

impl CudaDevice {
    /// Loads the kernels of a plan, and allocates its pool and its workspace.
    ///
    /// `fits` is asked in between, with the bytes that are free then: kernels take some of them.
    ///
    /// # Errors
    /// What `fits` says; [`DeviceError::CudaOutOfMemory`] with the size and what the GPU has,
    /// [`DeviceError::CudaNoKernel`], or what the driver says. Nothing stays allocated then.
    pub fn open<E: From<DeviceError>>(
        plan: &Plan,
        gpu: &CudaGpu,
        fits: impl FnOnce(Bytes) -> Result<(), E>,
    ) -> Result<Self, E> {
        let context = &gpu.context;
        let cx = context.enter()?;
        let kernels =
            Kernels::load(context, &cx, &gpu.target, plan.format, plan.geometry.head_dim)?;
        let own_stream = OwnStream::new(context, &cx)?;
        fits(cx.memory()?.0)?;
        let mut device = Self::allocate(plan, gpu, &cx, kernels, own_stream)?;
        device.clear(&cx)?;
        device.upload_rope(&cx, plan)?;
        device.warm_up(&cx, &plan.groups[0].layout)?;
        drop(cx);
        Ok(device)
    }

    /// Allocates everything; nothing is in it yet.
    fn allocate(
        plan: &Plan,
        gpu: &CudaGpu,
        cx: &Entered<'_>,
        kernels: Kernels,
        own_stream: OwnStream,
    ) -> Result<Self, DeviceError> {
        let sizes = plan.cuda_workspace().map_err(|_| DeviceError::BadLayout)?;
        let context = &gpu.context;
        let pool = DeviceMemory::allocate(context, cx, plan.pool_bytes)?;
        let workspace = DeviceMemory::allocate(context, cx, sizes.device_bytes)?;
        let pinned = Arc::new(PinnedMemory::allocate(context, cx, sizes.pinned_bytes)?);
        let mut first = 0;
        let mut ring = |(slots, bytes): (u32, u64)| {
            let ring = Ring::new(&pinned, cx, first, slots, bytes);
            first += u64::from(slots) * bytes;
            ring
        };
        let [tables, pairs, tensors] = sizes.rings();
        let (table_ring, pair_ring, tensor_ring) = (ring(tables)?, ring(pairs)?, ring(tensors)?);
        let groups = plan.groups.iter().zip(&sizes.groups);
        Ok(Self {
            target: gpu.target,
            stream: own_stream.stream(),
            handover: Event::new(context, cx)?,
            own_stream,
            kernels,
            pool,
            workspace,
            table_ring,
            pair_ring,
            tensor_ring,
            groups: groups
                .map(|(group, tables)| Group::new(&group.layout, *tables))
                .collect::<Result<_, _>>()?,
            sizes,
            rope: plan.rope.as_ref().map(RopeShape::of),
            q_per_kv: plan.geometry.q_heads_per_kv_head(),
            max_tokens: plan.limits.max_batch_tokens.into(),
            counts: plan.format.scale.is_some(),
            counted: AppendCounts::default(),
            plan_fingerprint: plan.fingerprint(),
            context: Arc::clone(context),
        })
    }

    /// Zeroes the pool, as the operating system does for the CPU's, and the counts.
    fn clear(&self, cx: &Entered<'_>) -> Result<(), DeviceError> {
        let Self { pool, stream, .. } = self;
        // SAFETY: the whole pool.
        unsafe { cx.fill(pool.address(), 0, pool.bytes().get(), *stream) }?;
        let counts = self.counts_at(Counting::Since);
        // SAFETY: four numbers of the workspace, those of host appends behind the others.
        unsafe { cx.fill(counts, 0, 2 * CUDA_COUNTS_BYTES, *stream) }?;
        cx.wait_for_stream(*stream)
    }

    /// Puts the tables for the rotation of K into the workspace.
    fn upload_rope(&self, cx: &Entered<'_>, plan: &Plan) -> Result<(), DeviceError> {
        let Some(rope) = &plan.rope else { return Ok(()) };
        let len = rope.numbers().ok().and_then(|len| usize::try_from(len).ok());
        let mut numbers = table_of(len.ok_or(DeviceError::BadLayout)?, 0.0)?;
        rope.fill(&mut numbers);
        let to = self.workspace.address() + self.sizes.rope;
        // SAFETY: their place in the workspace; `numbers` is there until the copy is done.
        unsafe { cx.upload(to, plain::bytes_of(&numbers), self.stream) }?;
        cx.wait_for_stream(self.stream)
    }

    /// Refuses a layout that is not one of the plan's, and gives the group's index.
    fn group_of(&self, layout: &GroupLayout, layer: u32) -> Result<usize, DeviceError> {
        let known = |group: &Group| group.params.base == layout.base;
        match self.groups.iter().position(known) {
            Some(index)
                if layout.is_consistent(self.pool.bytes().get()) && layer < layout.num_layers =>
            {
                Ok(index)
            }
            _ => Err(DeviceError::BadLayout),
        }
    }

    /// Refuses a kernel of a step that is not prepared while the stream is captured, its tables
    /// uploaded or not: it is told how many tokens there are, and a graph would repeat that number
    /// with the tokens of later steps.
    fn keep_out_of_graphs(
        &self,
        cx: &Entered<'_>,
        index: usize,
        step: u64,
    ) -> Result<(), DeviceError> {
        if self.groups[index].is_prepared(step) { Ok(()) } else { cx.no_capture(self.stream) }
    }

    /// Makes the copies that were noted down for some groups.
    fn launch_queued(&mut self, groups: std::ops::Range<usize>) -> Result<(), DeviceError> {
        let context = Arc::clone(&self.context);
        let launched = context.enter().and_then(|cx| {
            for group in groups {
                if !self.groups[group].copies.is_empty() {
                    self.launch_copies(&cx, group)?;
                }
            }
            Ok(())
        });
        if launched.is_err() {
            // The caller undoes what they were for, and their units may soon be others'.
            self.groups.iter_mut().for_each(|group| group.copies.clear());
        }
        launched
    }

    /// Work from here on goes into another stream, behind what was put into the one before.
    fn change_stream(&mut self, stream: Stream) -> Result<(), DeviceError> {
        let context = Arc::clone(&self.context);
        let cx = context.enter()?;
        cx.no_capture(self.stream)?;
        cx.no_capture(stream)?;
        cx.record(&self.handover, self.stream)?;
        cx.order_behind(stream, &self.handover)?;
        self.stream = stream;
        Ok(())
    }

    /// Times that the host was a whole ring of buffers ahead of the GPU, and had to wait.
    #[must_use]
    pub fn ring_waits(&self) -> u64 {
        self.table_ring.waits() + self.pair_ring.waits()
    }
}

/// How K is rotated, without the angles: they lie in the workspace.
#[derive(Clone, Copy, Debug)]
struct RopeShape {
    style: RopeStyle,
    dims: u32,
    positions: u32,
    tables: u32,
}

impl RopeShape {
    fn of(rope: &Rope) -> Self {
        let tables = u32::try_from(rope.tables.len()).unwrap_or(u32::MAX);
        Self { style: rope.style, dims: rope.dims, positions: rope.positions, tables }
    }
}

/// Refuses a tensor that the kernels could not read.
fn check_tensor(what: &'static str, tensor: &DeviceTensor) -> Result<(), DeviceError> {
    let address = tensor.address();
    if tensor.is_empty() || (address != 0 && address.is_multiple_of(TENSOR_ALIGN)) {
        return Ok(());
    }
    Err(DeviceError::CudaMisaligned { what, address })
}

impl Device for CudaDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            kind: if self.target.emulated { "cuda-emulated" } else { "cuda" },
            kernel: self.kernels.path().name(),
            threads: self.target.multiprocessors,
            pool_bytes: self.pool.bytes(),
            workspace_bytes: self.workspace.bytes(),
            huge_pages: false,
        }
    }

    fn plan_fingerprint(&self) -> u64 {
        self.plan_fingerprint
    }

    /// The address in the GPU's memory, which the host cannot read.
    fn base_ptr(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(
            usize::try_from(self.pool.address()).unwrap_or_default(),
        )
    }

    fn append(&mut self, args: &AppendArgs<'_>) -> Result<AppendCounts, DeviceError> {
        let context = Arc::clone(&self.context);
        self.append_from_host(&context.enter()?, args)
    }

    fn attend(&mut self, args: &mut AttendArgs<'_>) -> Result<(), DeviceError> {
        let context = Arc::clone(&self.context);
        self.attend_from_host(&context.enter()?, args)
    }

    fn prepare(&mut self, args: &DevicePrepare<'_>) -> Result<(), DeviceError> {
        let context = Arc::clone(&self.context);
        let cx = context.enter()?;
        let DevicePrepare { step, layout, token_slots, positions, .. } = *args;
        let index = self.group_of(layout, 0)?;
        let tokens = tables::checked_len(token_slots, self.max_tokens)?;
        let nothing = host::at(self.workspace.address(), 0, DType::F32);
        let scales = LayerScales::default();
        let append = DeviceAppend {
            step,
            layout,
            layer: 0,
            scales,
            token_slots,
            rope: None,
            positions,
            k: nothing,
            v: nothing,
        };
        let attend = DeviceAttend {
            step,
            layout,
            layer: 0,
            scales,
            window: args.window,
            num_q_heads: args.num_q_heads,
            softmax_scale: 1.0,
            seqs: args.seqs,
            tables: args.tables,
            table_row: args.table_row,
            q: nothing,
            out: nothing,
            lse: None,
        };
        self.groups[index].prepared = step;
        let uploaded = self
            .upload_slots(&cx, index, &append)
            .and_then(|()| self.upload_lists(&cx, index, &attend, 0..tokens));
        if uploaded.is_err() {
            // What an earlier call of the step has left there is not what a graph may read.
            self.groups[index].prepared = 0;
        }
        uploaded
    }

    fn upload_tables(&mut self, args: &TablesUpload<'_>) -> Result<DeviceTables, DeviceError> {
        let context = Arc::clone(&self.context);
        let index = self.group_of(args.layout, 0)?;
        self.upload_exports(&context.enter()?, index, args)
    }

    fn append_device(&mut self, args: &DeviceAppend<'_>) -> Result<(), DeviceError> {
        let context = Arc::clone(&self.context);
        let cx = context.enter()?;
        check_tensor("k", &args.k)?;
        check_tensor("v", &args.v)?;
        let index = self.group_of(args.layout, args.layer)?;
        let tokens = tables::checked_len(args.token_slots, self.max_tokens)?;
        if tokens == 0 {
            return Ok(());
        }
        self.keep_out_of_graphs(&cx, index, args.step)?;
        if args.step == 0 || self.groups[index].slots_of != args.step {
            self.upload_slots(&cx, index, args)?;
        }
        self.launch_append(&cx, args, index, Rows { first: 0, count: tokens }, Counting::Since)
    }

    fn attend_device(&mut self, args: &DeviceAttend<'_>) -> Result<(), DeviceError> {
        let context = Arc::clone(&self.context);
        let cx = context.enter()?;
        check_tensor("q", &args.q)?;
        check_tensor("out", &args.out)?;
        if let Some(lse) = &args.lse {
            check_tensor("lse", lse)?;
        }
        let index = self.group_of(args.layout, args.layer)?;
        let row = u64::from(args.num_q_heads) * u64::from(args.layout.head_dim);
        let rows = args.out.len() as u64 / row.max(1);
        self.keep_out_of_graphs(&cx, index, args.step)?;
        if args.step == 0 || self.groups[index].lists_of != args.step {
            self.upload_lists(&cx, index, args, 0..tables::checked(rows, self.max_tokens)?)?;
        }
        let group = &self.groups[index];
        if group.lists.items == 0 && !group.is_prepared(args.step) {
            return Ok(());
        }
        self.launch_attend(&cx, args, &self.groups[index], 0)?;
        Ok(())
    }

    fn set_stream(&mut self, stream: CudaStream) -> Result<(), DeviceError> {
        self.change_stream(Stream::foreign(stream.as_ptr())?)
    }

    fn leave_stream(&mut self) -> Result<(), DeviceError> {
        let own = self.own_stream.stream();
        // Where there was no other, there is nothing to wait for either.
        let changed = if self.stream == own { Ok(()) } else { self.change_stream(own) };
        self.stream = own;
        changed
    }

    fn synchronize(&mut self) -> Result<AppendCounts, DeviceError> {
        let context = Arc::clone(&self.context);
        self.new_counts(&context.enter()?)
    }

    fn copy(&mut self, src: u64, dst: u64, len: u64) -> Result<(), DeviceError> {
        let from = self.pool.range(src, len)?;
        let to = self.pool.range(dst, len)?;
        if len == 0 {
            return Ok(());
        }
        let cx = self.context.enter()?;
        // SAFETY: both lie in the pool, and the caller's ranges do not overlap.
        unsafe { cx.copy(to, from, len, self.stream) }
    }

    fn copy_tokens(
        &mut self,
        layout: &GroupLayout,
        src_unit: u32,
        dst_unit: u32,
        tokens: std::ops::Range<u32>,
    ) -> Result<u64, DeviceError> {
        let bytes = self.queue_copy(layout, src_unit, dst_unit, tokens)?;
        self.submit()?;
        Ok(bytes)
    }

    fn queue_copy(
        &mut self,
        layout: &GroupLayout,
        src_unit: u32,
        dst_unit: u32,
        tokens: std::ops::Range<u32>,
    ) -> Result<u64, DeviceError> {
        let num_tokens = tokens.end.saturating_sub(tokens.start);
        let inside = |unit: u32| unit < layout.units && tokens.end <= layout.unit_tokens;
        if !(inside(src_unit) && inside(dst_unit)) {
            let unit = src_unit.max(dst_unit);
            let (offset, len) = (layout.unit(unit), layout.unit_bytes);
            return Err(DeviceError::OutOfRange { offset, len, pool: self.pool.bytes() });
        }
        let group = self.group_of(layout, 0)?;
        let rows = u64::from(2 * layout.num_layers * layout.num_kv_heads);
        let scale_bytes = u64::from(layout.scales_per_row * crate::plan::SCALE_BYTES);
        let bytes = rows * u64::from(num_tokens) * (layout.row_bytes() + scale_bytes);
        if bytes == 0 || src_unit == dst_unit {
            return Ok(bytes);
        }
        let pair = KvpoolCopyPair { src_unit, dst_unit, first_token: tokens.start, num_tokens };
        if self.groups[group].must_follow(&pair) {
            self.launch_queued(group..group + 1)?;
        }
        self.groups[group].copies.push(pair);
        Ok(bytes)
    }

    fn submit(&mut self) -> Result<(), DeviceError> {
        if self.groups.iter().all(|group| group.copies.is_empty()) {
            return Ok(());
        }
        self.launch_queued(0..self.groups.len())
    }

    fn fill(&mut self, offset: u64, len: u64, byte: u8) -> Result<(), DeviceError> {
        let to = self.pool.range(offset, len)?;
        if len == 0 {
            return Ok(());
        }
        // What was noted down may read from there.
        self.submit()?;
        let cx = self.context.enter()?;
        // A graph would set them again whenever it is played, whoever has them then.
        cx.no_capture(self.stream)?;
        // SAFETY: it lies in the pool.
        unsafe { cx.fill(to, byte, len, self.stream) }
    }

    fn fill_tokens(
        &mut self,
        layout: &GroupLayout,
        unit: u32,
        tokens: std::ops::Range<u32>,
        byte: u8,
    ) -> Result<u64, DeviceError> {
        if unit >= layout.units || tokens.end > layout.unit_tokens {
            let (offset, len) = (layout.unit(unit), layout.unit_bytes);
            return Err(DeviceError::OutOfRange { offset, len, pool: self.pool.bytes() });
        }
        self.group_of(layout, 0)?;
        // What was noted down may read from there.
        self.submit()?;
        let context = Arc::clone(&self.context);
        self.fill_ranges(&context.enter()?, layout.token_ranges(unit, tokens), byte)
    }

    fn gather(&self, args: &mut GatherArgs<'_>) -> Result<(), DeviceError> {
        self.gather_to_host(&self.context.enter()?, args)
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let to = self.pool.range(offset, bytes.len() as u64)?;
        let context = Arc::clone(&self.context);
        let cx = context.enter()?;
        // SAFETY: it lies in the pool.
        unsafe { host::put_all(&mut self.tensor_ring, &cx, self.stream, to, bytes) }
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        let from = self.pool.range(offset, out.len() as u64)?;
        if out.is_empty() {
            return Ok(());
        }
        let cx = self.context.enter()?;
        cx.no_capture(self.stream)?;
        // SAFETY: it lies in the pool; `out` is borrowed until the copy is done, pinned or not.
        unsafe { cx.download(out.as_mut_ptr(), from, out.len(), self.stream) }?;
        cx.wait_for_stream(self.stream)
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        if let Ok(cx) = self.context.enter() {
            // The memory is given back next. What failed before has been told by the call after.
            let _ = cx.wait_for_stream(self.stream);
            let _ = cx.wait_for_stream(self.own_stream.stream());
        }
    }
}
