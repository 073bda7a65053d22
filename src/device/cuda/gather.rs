//! K or V of a sequence, read back: widened by a kernel, a part at a time.

use super::CudaDevice;
use super::bindings::KvpoolGatherParams;
use super::driver::Entered;
use super::tables::Group;
use crate::device::GatherArgs;
use crate::device::plain::{bytes_of, bytes_of_mut};
use crate::error::DeviceError;
use crate::plan::{Addressing, Kv};

impl CudaDevice {
    /// [`crate::device::Device::gather`]. The rows go through the place of results on their way to
    /// the host, whose readers this waits for as they wait for it: all are in one stream.
    pub(super) fn gather_to_host(
        &self,
        cx: &Entered<'_>,
        args: &mut GatherArgs<'_>,
    ) -> Result<(), DeviceError> {
        let index = self.group_of(args.view.layout, args.layer)?;
        cx.no_capture(self.stream)?;
        if args.positions.is_empty() {
            return Ok(());
        }
        let gathered = self.gather_parts(cx, index, args);
        if gathered.is_err() {
            // The row of the table may be on its way still, and is the caller's.
            let _ = cx.wait_for_stream(self.stream);
        }
        gathered
    }

    fn gather_parts(
        &self,
        cx: &Entered<'_>,
        index: usize,
        args: &mut GatherArgs<'_>,
    ) -> Result<(), DeviceError> {
        let layout = args.view.layout;
        let table = self.upload_row(cx, args)?;
        let row = (layout.num_kv_heads * layout.head_dim) as usize;
        let room = u64::from(self.sizes.tensor_rows) * self.sizes.out_row_bytes;
        let at_once = u32::try_from(room / (row as u64 * 4)).unwrap_or(u32::MAX);
        let from = self.workspace.address() + self.sizes.tensors_out;
        let all = self.gather_params(&self.groups[index], args);
        let mut first = args.positions.start;
        for part in args.out.chunks_mut(at_once as usize * row) {
            let num_tokens = at_once.min(args.positions.end - first);
            let params = KvpoolGatherParams { first_position: first, num_tokens, table, ..all };
            self.launch_gather(cx, &params)?;
            let part = bytes_of_mut(part);
            // SAFETY: the part of the workspace that was written; `part` is borrowed until the copy
            // is done.
            unsafe { cx.download(part.as_mut_ptr(), from, part.len(), self.stream) }?;
            cx.wait_for_stream(self.stream)?;
            first += num_tokens;
        }
        Ok(())
    }

    /// Puts a part into the stream. Its units have been checked.
    pub(super) fn launch_gather(
        &self,
        cx: &Entered<'_>,
        params: &KvpoolGatherParams,
    ) -> Result<(), DeviceError> {
        let launch = self.kernels.gather(params.num_tokens * params.group.num_kv_heads);
        // SAFETY: the kernel takes this struct; the units lie in the group, so it reads the pool
        // only, and the workspace has room for what it writes.
        unsafe { cx.launch(launch, params, self.stream) }
    }

    /// What does not change from part to part: all but positions and table.
    pub(super) fn gather_params(&self, group: &Group, args: &GatherArgs<'_>) -> KvpoolGatherParams {
        KvpoolGatherParams {
            group: group.params,
            pool: self.pool.address(),
            out: self.workspace.address() + self.sizes.tensors_out,
            table: 0,
            unit: args.view.slot,
            first_position: 0,
            num_tokens: 0,
            layer: args.layer,
            is_v: u32::from(args.kv == Kv::V),
            static_scale: args.static_scale,
        }
    }

    /// Checks where the positions lie, and puts the blocks that hold them into the workspace, each
    /// at its own place of a row. Gives the row's address.
    fn upload_row(&self, cx: &Entered<'_>, args: &GatherArgs<'_>) -> Result<u64, DeviceError> {
        let layout = args.view.layout;
        let outside = |unit: u32| DeviceError::OutOfRange {
            offset: layout.base.saturating_add(layout.unit_bytes.saturating_mul(unit.into())),
            len: layout.unit_bytes,
            pool: self.pool.bytes(),
        };
        let (first, last) = (args.positions.start, args.positions.end - 1);
        let row = self.workspace.address() + self.sizes.gather_row;
        if layout.addressing != Addressing::Blocks {
            let beyond = layout.addressing == Addressing::Slot && last >= layout.unit_tokens;
            if args.view.slot >= layout.units || beyond {
                return Err(outside(args.view.slot));
            }
            return Ok(row);
        }
        let (first, last) = (first / layout.unit_tokens, last / layout.unit_tokens);
        let blocks = args.view.table.get(first as usize..=last as usize);
        let blocks = blocks.ok_or_else(|| outside(layout.units))?;
        if let Some(unit) = blocks.iter().find(|unit| **unit >= layout.units) {
            return Err(outside(*unit));
        }
        // SAFETY: the workspace has room for a whole row of any group; `blocks` is borrowed until
        // the stream has been waited for.
        unsafe { cx.upload(row + u64::from(first) * 4, bytes_of(blocks), self.stream) }?;
        Ok(row)
    }
}
