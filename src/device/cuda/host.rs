//! Tensors in host memory: through pinned buffers, as many rows at a time as these hold.

use super::driver::Entered;
use super::memory::Ring;
use super::{Counting, CudaDevice, Rows, Stream, tables};
use crate::device::plain::{bytes_of, bytes_of_mut};
use crate::device::{
    AppendArgs, AppendCounts, AttendArgs, DType, DeviceAppend, DeviceAttend, DeviceTensor,
    TensorMut, TensorRef,
};
use crate::error::DeviceError;
use crate::plan::CUDA_COUNTS_BYTES;

impl TensorRef<'_> {
    /// The bytes of `count` elements from element `start` on.
    fn bytes(&self, start: usize, count: usize) -> &[u8] {
        let range = start..start + count;
        match self {
            Self::F32(data) => bytes_of(&data[range]),
            Self::F16(data) => bytes_of(&data[range]),
            Self::Bf16(data) => bytes_of(&data[range]),
        }
    }
}

impl TensorMut<'_> {
    const fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::F16(_) => DType::F16,
            Self::Bf16(_) => DType::Bf16,
        }
    }

    /// The bytes of `count` elements from element `start` on, to be written.
    fn bytes_mut(&mut self, start: usize, count: usize) -> &mut [u8] {
        let range = start..start + count;
        match self {
            Self::F32(data) => bytes_of_mut(&mut data[range]),
            Self::F16(data) => bytes_of_mut(&mut data[range]),
            Self::Bf16(data) => bytes_of_mut(&mut data[range]),
        }
    }
}

/// Copies bytes to the device, through the next pinned buffer of the ring.
///
/// # Safety
/// `to` is device memory with room for them.
unsafe fn put(
    ring: &mut Ring,
    cx: &Entered<'_>,
    stream: Stream,
    to: u64,
    parts: [&[u8]; 2],
) -> Result<(), DeviceError> {
    ring.with(cx, stream, |buffer| {
        let len = parts[0].len() + parts[1].len();
        let buffer = &mut buffer[..len];
        buffer[..parts[0].len()].copy_from_slice(parts[0]);
        buffer[parts[0].len()..].copy_from_slice(parts[1]);
        // SAFETY: a pinned buffer of the ring; for the rest, the caller's promise.
        unsafe { cx.upload(to, buffer, stream) }
    })?;
    Ok(())
}

/// Copies any number of bytes to the device, a buffer of the ring after the other. Nothing is
/// waited for but buffers.
///
/// # Safety
/// As [`put`].
pub(super) unsafe fn put_all(
    ring: &mut Ring,
    cx: &Entered<'_>,
    stream: Stream,
    mut to: u64,
    bytes: &[u8],
) -> Result<(), DeviceError> {
    for part in bytes.chunks(ring.slot_bytes()) {
        // SAFETY: the caller's promise.
        unsafe { put(ring, cx, stream, to, [part, &[]]) }?;
        to += part.len() as u64;
    }
    Ok(())
}

/// So many elements at an address of the workspace.
pub(super) fn at(address: u64, len: usize, dtype: DType) -> DeviceTensor {
    // SAFETY: the workspace is there as long as the device, and its stream's order is what keeps
    // writers and readers of it apart.
    unsafe { DeviceTensor::new(address, len, dtype) }
}

impl CudaDevice {
    /// [`crate::device::Device::append`].
    pub(super) fn append_from_host(
        &mut self,
        cx: &Entered<'_>,
        args: &AppendArgs<'_>,
    ) -> Result<AppendCounts, DeviceError> {
        let layout = args.layout;
        let index = self.group_of(layout, args.layer)?;
        let tokens = tables::checked_len(args.token_slots, self.max_tokens)?;
        let row = (layout.num_kv_heads * layout.head_dim) as usize;
        let place = self.workspace.address() + self.sizes.tensors_in;
        let nothing = at(place, 0, args.k.dtype());
        let mut device = DeviceAppend {
            step: 0,
            layout,
            layer: args.layer,
            scales: args.scales,
            token_slots: args.token_slots,
            rope: args.rope,
            positions: args.positions,
            k: nothing,
            v: nothing,
        };
        if tokens == 0 {
            return Ok(AppendCounts::default());
        }
        let (k, v) = (args.k, args.v);
        if k.dtype() != v.dtype() {
            return Err(DeviceError::CudaMixedTypes);
        }
        self.upload_slots(cx, index, &device)?;
        if self.counts {
            let counts = self.counts_at(Counting::Once);
            // SAFETY: two numbers of the workspace.
            unsafe { cx.fill(counts, 0, CUDA_COUNTS_BYTES, self.stream) }?;
        }
        let mut first = 0;
        while first < tokens {
            let count = self.sizes.tensor_rows.min(tokens - first);
            let (start, len) = (first as usize * row, count as usize * row);
            let [k, v] = [k.bytes(start, len), v.bytes(start, len)];
            // SAFETY: the plan has room for so many rows of K and V in f32.
            unsafe { put(&mut self.tensor_ring, cx, self.stream, place, [k, v]) }?;
            device.k = at(place, len, args.k.dtype());
            device.v = at(place + k.len() as u64, len, args.k.dtype());
            self.launch_append(cx, &device, index, Rows { first, count }, Counting::Once)?;
            first += count;
        }
        if !self.counts {
            return Ok(AppendCounts::default());
        }
        self.read_counts(cx, Counting::Once)
    }

    /// [`crate::device::Device::attend`].
    pub(super) fn attend_from_host(
        &mut self,
        cx: &Entered<'_>,
        args: &mut AttendArgs<'_>,
    ) -> Result<(), DeviceError> {
        let index = self.group_of(args.layout, args.layer)?;
        let row = (args.num_q_heads * args.layout.head_dim) as usize;
        let heads = args.num_q_heads as usize;
        let rows = tables::checked((args.out.len() / row.max(1)) as u64, self.max_tokens)?;
        let (q_type, out_type) = (args.q.dtype(), args.out.dtype());
        let workspace = self.workspace.address();
        let (q_at, out_at) =
            (workspace + self.sizes.tensors_in, workspace + self.sizes.tensors_out);
        let mut first = 0;
        while first < rows {
            let count = self.sizes.tensor_rows.min(rows - first);
            let (start, len) = (first as usize * row, count as usize * row);
            let out_len = len * out_type.bytes();
            let lse_len = if args.lse.is_some() { count as usize * heads * 4 } else { 0 };
            let lse_at = out_at + out_len as u64;
            let device = DeviceAttend {
                step: 0,
                layout: args.layout,
                layer: args.layer,
                scales: args.scales,
                window: args.window,
                num_q_heads: args.num_q_heads,
                softmax_scale: args.softmax_scale,
                seqs: args.seqs,
                tables: args.tables,
                table_row: args.table_row,
                q: at(q_at, len, q_type),
                out: at(out_at, len, out_type),
                lse: args.lse.is_some().then(|| at(lse_at, lse_len / 4, DType::F32)),
            };
            // Refuses what lies outside before anything is computed.
            self.upload_lists(cx, index, &device, first..first + count)?;
            let q = args.q.bytes(start, len);
            // SAFETY: the plan has room for so many rows of queries in f32.
            unsafe { put(&mut self.tensor_ring, cx, self.stream, q_at, [q, &[]]) }?;
            if self.groups[index].lists.items > 0 {
                self.launch_attend(cx, &device, &self.groups[index], first)?;
            }
            let stream = self.stream;
            let ((), slot) = self.tensor_ring.with(cx, stream, |buffer| {
                let buffer = &mut buffer[..out_len + lse_len];
                // SAFETY: a pinned buffer of the ring; the result and the lse behind it.
                unsafe { cx.download(buffer.as_mut_ptr(), out_at, buffer.len(), stream) }
            })?;
            let result = self.tensor_ring.finished(cx, slot)?;
            args.out.bytes_mut(start, len).copy_from_slice(&result[..out_len]);
            if let Some(lse) = &mut args.lse {
                let lse = &mut lse[first as usize * heads..][..count as usize * heads];
                bytes_of_mut(lse).copy_from_slice(&result[out_len..out_len + lse_len]);
            }
            first += count;
        }
        Ok(())
    }
}
