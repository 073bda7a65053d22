//! Tables of a step for an engine's own kernels: each in its fixed place of the workspace.

use super::CudaDevice;
use super::driver::Entered;
use super::tables::checked_len;
use crate::device::plain::bytes_of;
use crate::device::{DeviceTables, TablesUpload};
use crate::error::DeviceError;

impl CudaDevice {
    /// Uploads a group's tables, behind what the stream has to do before.
    pub(super) fn upload_exports(
        &mut self,
        cx: &Entered<'_>,
        index: usize,
        args: &TablesUpload<'_>,
    ) -> Result<DeviceTables, DeviceError> {
        checked_len(args.positions, self.max_tokens)?;
        let at = self.groups[index].tables.exports;
        let (base, stream) = (self.workspace.address(), self.stream);
        let [indptr, indices, last_block_len, first_position] = args.csr;
        let lists: [(u64, &[u8]); 7] = [
            (at.positions, bytes_of(args.positions)),
            (at.token_slots, bytes_of(args.token_slots)),
            (at.seq_lens, bytes_of(args.seq_lens)),
            (at.kv_indptr, bytes_of(indptr)),
            (at.kv_last_block_len, bytes_of(last_block_len)),
            (at.kv_first_position, bytes_of(first_position)),
            (at.kv_indices, bytes_of(indices)),
        ];
        self.table_ring.with(cx, stream, |buffer| {
            let mut len = 0;
            for (to, bytes) in lists.into_iter().filter(|(_, bytes)| !bytes.is_empty()) {
                let part = &mut buffer[len..len + bytes.len()];
                part.copy_from_slice(bytes);
                len += part.len();
                // SAFETY: a pinned buffer of the ring; the workspace has room for the longest
                // step's list, and the cache makes none that is longer.
                unsafe { cx.upload(base + to, part, stream) }?;
            }
            Ok(())
        })?;
        if args.dense {
            let row = args.table_row as usize;
            self.table_ring.with(cx, stream, |buffer| {
                let mut len = 0;
                for seq in args.seqs {
                    let from = seq.slot as usize * row;
                    let bytes = bytes_of(&args.tables[from..from + row]);
                    buffer[len..len + bytes.len()].copy_from_slice(bytes);
                    len += bytes.len();
                }
                // SAFETY: a pinned buffer of the ring; the workspace has a row for every slot.
                unsafe { cx.upload(base + at.block_table, &buffer[..len], stream) }
            })?;
        }
        let csr = |offset: u64| if indptr.is_empty() { 0 } else { base + offset };
        Ok(DeviceTables {
            positions: base + at.positions,
            seq_lens: base + at.seq_lens,
            token_slots: base + at.token_slots,
            block_table: if args.dense { base + at.block_table } else { 0 },
            kv_indptr: csr(at.kv_indptr),
            kv_indices: csr(at.kv_indices),
            kv_last_block_len: csr(at.kv_last_block_len),
            kv_first_position: csr(at.kv_first_position),
            block_table_row: if args.dense { args.table_row } else { 0 },
        })
    }
}
