//! How the kernels are launched, and that everything has been used once before the first verb.

use super::bindings::{
    KVPOOL_ROPE_HALVES, KVPOOL_ROPE_NONE, KVPOOL_ROPE_PAIRS, KvpoolAppendParams,
    KvpoolAttendParams, KvpoolCombineParams, KvpoolCopyPair, KvpoolCopyParams, KvpoolFillParams,
    KvpoolRange,
};
use super::driver::Entered;
use super::tables::Group;
use super::{Counting, CudaDevice, host, params};
use crate::config::RopeStyle;
use crate::device::plain::bytes_of;
use crate::device::{DType, DeviceAppend, DeviceAttend, DeviceTensor, GatherArgs};
use crate::error::DeviceError;
use crate::plan::{CUDA_PAIR_BYTES, GroupLayout, Kv, LayerScales, SeqView};

/// Rows of a step that go in one launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    pub(super) first: u32,
    pub(super) count: u32,
}

impl CudaDevice {
    /// Puts an append into the stream. The group's token slots are there; `rows` are those that
    /// the tensors have.
    pub(super) fn launch_append(
        &self,
        cx: &Entered<'_>,
        args: &DeviceAppend<'_>,
        group: usize,
        rows: Rows,
        counting: Counting,
    ) -> Result<(), DeviceError> {
        let group = &self.groups[group];
        let Rows { first, count: tokens } = rows;
        let workspace = self.workspace.address();
        let prepared = group.is_prepared(args.step);
        let (rope, rope_dims, [rope_cos, rope_sin]) = self.rope_of(args)?;
        let params = KvpoolAppendParams {
            group: group.params,
            pool: self.pool.address(),
            k: args.k.address(),
            v: args.v.address(),
            token_slots: workspace + group.tables.token_slots + u64::from(first) * 8,
            num_tokens_at: if prepared { workspace + group.tables.num_tokens } else { 0 },
            counts: self.counts_at(counting),
            positions: workspace + group.tables.positions + u64::from(first) * 4,
            rope_cos,
            rope_sin,
            num_tokens: tokens,
            layer: args.layer,
            rope,
            rope_dims,
            k_scale: args.scales.k,
            v_scale: args.scales.v,
        };
        let launch = self.kernels.append(args.k.dtype(), if prepared { u32::MAX } else { tokens });
        // SAFETY: the kernel takes this struct; the token slots were checked when they were
        // uploaded, so it writes into the pool only; whoever made the tensors has promised that
        // they are there (`DeviceTensor::new`).
        unsafe { cx.launch(launch, &params, self.stream) }
    }

    /// How an append rotates K: as the kernels have it, how many elements, and where cosines and
    /// sines are.
    fn rope_of(&self, args: &DeviceAppend<'_>) -> Result<(u32, u32, [u64; 2]), DeviceError> {
        let Some(table) = args.rope else { return Ok((KVPOOL_ROPE_NONE, 0, [0; 2])) };
        let rope = self.rope.filter(|rope| table < rope.tables).ok_or(DeviceError::BadLayout)?;
        let style = match rope.style {
            RopeStyle::Halves => KVPOOL_ROPE_HALVES,
            RopeStyle::Pairs => KVPOOL_ROPE_PAIRS,
        };
        let bytes = u64::from(rope.positions) * u64::from(rope.dims / 2) * 4;
        let cos = self.workspace.address() + self.sizes.rope + u64::from(table) * 2 * bytes;
        Ok((style, rope.dims, [cos, cos + bytes]))
    }

    /// Puts an attention into the stream, and the combination of its splits. The group's
    /// sequences and lists are there. Gives what the kernel was told.
    ///
    /// `first` is the row of the step that the tensors begin with.
    pub(super) fn launch_attend(
        &self,
        cx: &Entered<'_>,
        args: &DeviceAttend<'_>,
        group: &Group,
        first: u32,
    ) -> Result<KvpoolAttendParams, DeviceError> {
        let prepared = group.is_prepared(args.step);
        let workspace = self.workspace.address();
        let head_dim = u64::from(args.layout.head_dim);
        // Sequences count rows from the step's first: the address that row 0 would have.
        let of_row_0 = |address: u64, row_bytes: u64| {
            address.wrapping_sub(u64::from(first).wrapping_mul(row_bytes))
        };
        let heads = u64::from(args.num_q_heads);
        let row = |tensor: &DeviceTensor| heads * head_dim * tensor.dtype().bytes() as u64;
        let out = of_row_0(args.out.address(), row(&args.out));
        let lse = args.lse.map_or(0, |lse| of_row_0(lse.address(), heads * 4));
        let params = KvpoolAttendParams {
            group: group.params,
            pool: self.pool.address(),
            q: of_row_0(args.q.address(), row(&args.q)),
            out,
            lse,
            seqs: workspace + group.tables.seqs,
            tables: workspace + group.tables.tables,
            items: workspace + group.tables.items,
            num_items_at: if prepared { workspace + group.tables.num_items } else { 0 },
            partial_acc: workspace + self.sizes.partial_acc,
            partial_ml: workspace + self.sizes.partial_ml,
            num_items: group.lists.items,
            max_partials: self.sizes.max_partials,
            layer: args.layer,
            window: args.window,
            q_per_kv: self.q_per_kv,
            q_dtype: params::dtype(args.q.dtype()),
            out_dtype: params::dtype(args.out.dtype()),
            softmax_scale: args.softmax_scale,
            k_scale: args.scales.k,
            v_scale: args.scales.v,
            reserved: [0; 2],
        };
        let kv_heads = args.layout.num_kv_heads;
        let items = if prepared { u32::MAX } else { group.lists.items };
        let launch = self.kernels.attend(group.item_rows, items, kv_heads);
        // SAFETY: the kernel takes this struct; sequences and blocks were checked when they were
        // uploaded, so it reads the pool only; the tensors are there (`DeviceTensor::new`).
        unsafe { cx.launch(launch, &params, self.stream) }?;
        if prepared || group.lists.combines > 0 {
            self.launch_combine(cx, &params, group)?;
        }
        Ok(params)
    }

    /// Puts the combination of an attention's splits into the stream.
    fn launch_combine(
        &self,
        cx: &Entered<'_>,
        params: &KvpoolAttendParams,
        group: &Group,
    ) -> Result<(), DeviceError> {
        let kv_heads = group.params.num_kv_heads;
        let combine = KvpoolCombineParams {
            out: params.out,
            lse: params.lse,
            seqs: params.seqs,
            items: self.workspace.address() + group.tables.combines,
            // Behind the number of items of attention.
            num_items_at: if params.num_items_at == 0 { 0 } else { params.num_items_at + 4 },
            partial_acc: params.partial_acc,
            partial_ml: params.partial_ml,
            num_items: group.lists.combines,
            max_partials: params.max_partials,
            num_kv_heads: kv_heads,
            head_dim: group.params.head_dim,
            q_per_kv: self.q_per_kv,
            out_dtype: params.out_dtype,
        };
        let items = if params.num_items_at == 0 { group.lists.combines } else { u32::MAX };
        let launch = self.kernels.combine(items, kv_heads);
        // SAFETY: as in `launch_attend`; the places that it reads were written by that kernel.
        unsafe { cx.launch(launch, &combine, self.stream) }
    }

    /// Puts the copies that were noted down for a group into the stream, in one launch. All their
    /// units lie in the pool.
    pub(super) fn launch_copies(
        &mut self,
        cx: &Entered<'_>,
        group: usize,
    ) -> Result<(), DeviceError> {
        let pairs = self.workspace.address() + self.sizes.pairs;
        let (stream, group) = (self.stream, &mut self.groups[group]);
        let num_pairs = u32::try_from(group.copies.len()).unwrap_or(u32::MAX);
        let tokens = group.copies.iter().map(|pair| pair.num_tokens).max().unwrap_or(0);
        let uploaded = self.pair_ring.with(cx, stream, |buffer| {
            let copies = bytes_of(&group.copies);
            let buffer = &mut buffer[..copies.len()];
            buffer.copy_from_slice(copies);
            // SAFETY: a pinned buffer of the ring, and its place in the workspace.
            unsafe { cx.upload(pairs, buffer, stream) }
        });
        group.copies.clear();
        uploaded?;
        let params = group.params;
        let bytes = params.used_bytes / u64::from(params.unit_tokens) * u64::from(tokens);
        let params = KvpoolCopyParams {
            group: params,
            pool: self.pool.address(),
            pairs,
            num_pairs,
            reserved: 0,
        };
        // SAFETY: the kernel takes this struct; all units lie in the pool.
        unsafe { cx.launch(self.kernels.copy_pairs(num_pairs, bytes), &params, stream) }
    }

    /// Sets ranges of the pool to a byte, as many in one launch as a list of pairs has room for.
    /// Gives how many bytes.
    pub(super) fn fill_ranges(
        &mut self,
        cx: &Entered<'_>,
        mut ranges: impl Iterator<Item = (u64, u64)>,
        byte: u8,
    ) -> Result<u64, DeviceError> {
        const RANGE_BYTES: usize = size_of::<KvpoolRange>();
        const _: () = assert!(RANGE_BYTES as u64 == CUDA_PAIR_BYTES, "they share a place");
        let list = self.workspace.address() + self.sizes.pairs;
        let (pool, stream) = (&self.pool, self.stream);
        let mut all = 0;
        loop {
            let ((num_ranges, longest, sum), _) = self.pair_ring.with(cx, stream, |buffer| {
                let (mut num_ranges, mut longest, mut sum) = (0, 0, 0);
                let places = buffer.chunks_exact_mut(RANGE_BYTES);
                // The place first: a range that has none is for the next launch.
                for (place, (offset, bytes)) in places.zip(&mut ranges) {
                    pool.range(offset, bytes)?;
                    place.copy_from_slice(bytes_of(&[offset, bytes]));
                    num_ranges += 1;
                    longest = bytes.max(longest);
                    sum += bytes;
                }
                let buffer = &buffer[..num_ranges as usize * RANGE_BYTES];
                if num_ranges > 0 {
                    // SAFETY: a pinned buffer of the ring, and its place in the workspace.
                    unsafe { cx.upload(list, buffer, stream) }?;
                }
                Ok((num_ranges, longest, sum))
            })?;
            if num_ranges == 0 {
                return Ok(all);
            }
            all += sum;
            self.launch_fill(cx, num_ranges, longest, byte)?;
        }
    }

    /// Puts a filling of the ranges that were uploaded into the stream.
    fn launch_fill(
        &self,
        cx: &Entered<'_>,
        num_ranges: u32,
        longest: u64,
        byte: u8,
    ) -> Result<(), DeviceError> {
        let params = KvpoolFillParams {
            pool: self.pool.address(),
            ranges: self.workspace.address() + self.sizes.pairs,
            num_ranges,
            value: byte.into(),
        };
        // SAFETY: the kernel takes this struct; all ranges lie in the pool.
        unsafe { cx.launch(self.kernels.fill(num_ranges, longest), &params, self.stream) }
    }

    /// Makes every call that a verb makes once, with nothing to do: the driver loads a kernel, and
    /// cudarc looks a symbol up, when they are used first, and both allocate.
    pub(super) fn warm_up(
        &mut self,
        cx: &Entered<'_>,
        layout: &GroupLayout,
    ) -> Result<(), DeviceError> {
        let place = self.workspace.address() + self.sizes.tensors_in;
        let scales = LayerScales::default();
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            let k = host::at(place, 0, dtype);
            let token_slots = &[];
            let args = DeviceAppend {
                step: 0,
                layout,
                layer: 0,
                scales,
                token_slots,
                rope: None,
                positions: &[],
                k,
                v: k,
            };
            self.launch_append(cx, &args, 0, Rows { first: 0, count: 0 }, Counting::Since)?;
        }
        let q = host::at(place, 0, DType::F32);
        let args = DeviceAttend {
            step: 0,
            layout,
            layer: 0,
            scales,
            window: 0,
            num_q_heads: self.q_per_kv * layout.num_kv_heads,
            softmax_scale: 1.0,
            seqs: &[],
            tables: &[],
            table_row: 0,
            q,
            out: q,
            lse: None,
        };
        // The kernel for items of few packed rows, and the one for those of many.
        for item_rows in [0, u32::MAX] {
            self.groups[0].item_rows = item_rows;
            let params = self.launch_attend(cx, &args, &self.groups[0], 0)?;
            self.launch_combine(cx, &params, &self.groups[0])?;
        }
        let nothing = KvpoolCopyPair { src_unit: 0, dst_unit: 0, first_token: 0, num_tokens: 0 };
        self.groups[0].copies.push(nothing);
        self.launch_copies(cx, 0)?;
        self.launch_fill(cx, 0, 0, 0)?;
        let view = SeqView { layout, table: &[], slot: 0 };
        let positions = 0..0;
        let gather =
            GatherArgs { view, layer: 0, kv: Kv::K, static_scale: 0.0, positions, out: &mut [] };
        self.launch_gather(cx, &self.gather_params(&self.groups[0], &gather))?;
        let counts = self.counts_at(Counting::Since);
        // SAFETY: one number of the workspace onto another; both are 0.
        unsafe { cx.copy(counts + 8, counts, 8, self.stream) }?;
        cx.record(&self.handover, self.stream)?;
        cx.order_behind(self.stream, &self.handover)?;
        cx.is_done(&self.handover)?;
        cx.wait_for(&self.handover)?;
        let mut number = [0];
        // SAFETY: a byte of the workspace; its place is waited for before it is used.
        unsafe { cx.download(number.as_mut_ptr(), counts, 1, self.stream) }?;
        cx.wait_for_stream(self.stream)
    }
}
