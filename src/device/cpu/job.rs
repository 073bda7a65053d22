//! An attend call that has been checked, in the form that the kernels share.

use half::{bf16, f16};

use super::super::convert::{f32_to_bf16, f32_to_f16};
use super::super::{AttendArgs, BatchSeq, TensorMut, TensorRef};
use super::disjoint::Disjoint;
use super::task::{Partial, Task};
use crate::error::DeviceError;
use crate::plan::{Addressing, GroupLayout, LANES, LayerScales, SeqView, visible};
use crate::units::Bytes;

/// Where the result goes.
#[derive(Debug)]
pub(super) enum Out<'a> {
    /// IEEE single precision.
    F32(Disjoint<'a, f32>),
    /// IEEE half precision.
    F16(Disjoint<'a, f16>),
    /// bfloat16.
    Bf16(Disjoint<'a, bf16>),
}

/// Everything that the workers read, and where they write.
#[derive(Debug)]
pub(super) struct AttendJob<'a> {
    pub(super) pool: &'a [u8],
    pub(super) layout: &'a GroupLayout,
    pub(super) layer: u32,
    pub(super) scales: LayerScales,
    pub(super) window: u32,
    pub(super) softmax_scale: f32,
    pub(super) seqs: &'a [BatchSeq],
    pub(super) tables: &'a [u32],
    pub(super) table_row: usize,
    /// Queries. `[rows, num_q_heads, head_dim]`
    pub(super) q: TensorRef<'a>,
    /// Result. `[rows, num_q_heads, head_dim]`
    pub(super) out: Out<'a>,
    /// `[rows, num_q_heads]`
    pub(super) lse: Option<Disjoint<'a, f32>>,
    pub(super) rows: usize,
    pub(super) num_q_heads: usize,
    /// Query heads that share a KV head.
    pub(super) group: usize,
}

impl<'a> AttendJob<'a> {
    /// Checks a call against the pool.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`] when a visible position would lie outside the group's units.
    ///
    /// # Panics
    /// When the rows of the sequences do not ascend, or overlap.
    pub(super) fn new(pool: &'a [u8], args: &'a mut AttendArgs<'_>) -> Result<Self, DeviceError> {
        let num_q_heads = args.num_q_heads as usize;
        let row_len = num_q_heads * args.layout.head_dim as usize;
        let rows = args.out.len() / row_len.max(1);
        let mut end = 0_u64;
        for seq in args.seqs.iter().filter(|seq| seq.rows > 0) {
            // Rows of which two threads would write one.
            assert!(u64::from(seq.row_start) >= end, "the rows of sequences ascend, each once");
            end = u64::from(seq.row_start) + u64::from(seq.rows);
        }
        let out = match &mut args.out {
            TensorMut::F32(out) => Out::F32(Disjoint::new(out)),
            TensorMut::F16(out) => Out::F16(Disjoint::new(out)),
            TensorMut::Bf16(out) => Out::Bf16(Disjoint::new(out)),
        };
        let job = Self {
            pool,
            layout: args.layout,
            layer: args.layer,
            scales: args.scales,
            window: args.window,
            softmax_scale: args.softmax_scale,
            seqs: args.seqs,
            tables: args.tables,
            table_row: args.table_row as usize,
            q: args.q,
            out,
            lse: args.lse.as_deref_mut().map(Disjoint::new),
            rows,
            num_q_heads,
            group: num_q_heads / args.layout.num_kv_heads as usize,
        };
        job.check()?;
        Ok(job)
    }

    /// Refuses a layer, a unit or a position that the group does not have. Only the table entries
    /// of visible positions are looked at; the others may name nothing.
    fn check(&self) -> Result<(), DeviceError> {
        let layout = self.layout;
        let pool = Bytes(self.pool.len() as u64);
        let error = |unit: u32| DeviceError::OutOfRange {
            offset: layout.base.saturating_add(layout.unit_bytes.saturating_mul(u64::from(unit))),
            len: layout.unit_bytes,
            pool,
        };
        let end = layout.base.saturating_add(layout.bytes());
        if end > pool.get() || self.layer >= layout.num_layers {
            return Err(error(layout.units));
        }
        for seq in self.seqs.iter().filter(|seq| seq.rows > 0) {
            // The first row sees farthest back, the last one sees farthest ahead.
            let (sinks, from) = visible(seq.first_position, self.window, layout.sink_tokens);
            let end = seq.first_position.saturating_add(seq.rows);
            if layout.addressing != Addressing::Blocks {
                let beyond = layout.addressing == Addressing::Slot && end > layout.unit_tokens;
                if seq.slot >= layout.units || beyond {
                    return Err(error(seq.slot));
                }
                continue;
            }
            let table = self.view(seq).table;
            let block = |position: u32| (position / layout.unit_tokens) as usize;
            for (from, to) in [(0, sinks), (from, end)] {
                if from < to {
                    let blocks = &table[block(from)..=block(to - 1)];
                    let largest = blocks.iter().copied().max().unwrap_or(0);
                    if largest >= layout.units {
                        return Err(error(largest));
                    }
                }
            }
        }
        Ok(())
    }

    /// One sequence seen through the group.
    fn view(&self, seq: &BatchSeq) -> SeqView<'a> {
        let table = if self.table_row == 0 {
            &[]
        } else {
            &self.tables[seq.slot as usize * self.table_row..][..self.table_row]
        };
        SeqView { layout: self.layout, table, slot: seq.slot }
    }

    /// The block of at most `block` rows that begins at `row`, and one KV head; `None` for a row
    /// that begins no block, or belongs to no sequence.
    pub(super) fn task(&self, row: usize, head: usize, block: usize) -> Option<Task<'a>> {
        let after = self.seqs.partition_point(|seq| seq.row_start as usize <= row);
        let seq = &self.seqs[after.checked_sub(1)?];
        let behind = row - seq.row_start as usize;
        let rows = (seq.rows as usize).saturating_sub(behind).min(block);
        if rows == 0 || !behind.is_multiple_of(block) {
            return None;
        }
        Some(Task {
            pool: self.pool,
            view: self.view(seq),
            layer: self.layer,
            head: u32::try_from(head).ok()?,
            kv_heads: 1,
            rows,
            position: seq.first_position + u32::try_from(behind).ok()?,
            window: self.window,
            group: self.group,
            padded_dim: self.layout.head_dim.next_multiple_of(LANES) as usize,
            softmax_scale: self.softmax_scale,
            scales: self.scales,
        })
    }

    /// Index of the first element of a row's first query head of a KV head.
    pub(super) fn first_element(&self, row: usize, head: usize) -> usize {
        (row * self.num_q_heads + head * self.group) * self.layout.head_dim as usize
    }

    /// Writes the result of a task of one KV head that begins at `row`.
    ///
    /// # Safety
    /// No other thread writes the result of the same rows and KV head meanwhile.
    pub(super) unsafe fn finish(&self, row: usize, task: &Task<'_>, total: &Partial<'_>) {
        let head_dim = self.layout.head_dim as usize;
        let padded_dim = head_dim.next_multiple_of(LANES as usize);
        let heads = total.acc.chunks_exact(padded_dim).take(task.heads());
        for (g, acc) in heads.enumerate() {
            let (row, head) = (row + g / self.group, task.head as usize);
            let first = self.first_element(row, head) + g % self.group * head_dim;
            let sum = total.sum[g];
            // No key had a score above -∞; a NaN is unequal to 0.
            let nothing = sum == 0.0;
            let value = |x: &f32| if nothing { 0.0 } else { x / sum };
            match &self.out {
                Out::F32(out) => {
                    // SAFETY: the place of this row and query head, which nobody else writes (the
                    // contract of the function).
                    let out = unsafe { out.part(first, head_dim) };
                    for (out, x) in out.iter_mut().zip(acc) {
                        *out = value(x);
                    }
                }
                Out::F16(out) => {
                    // SAFETY: as above.
                    let out = unsafe { out.part(first, head_dim) };
                    for (out, x) in out.iter_mut().zip(acc) {
                        *out = f16::from_bits(f32_to_f16(value(x)));
                    }
                }
                Out::Bf16(out) => {
                    // SAFETY: as above.
                    let out = unsafe { out.part(first, head_dim) };
                    for (out, x) in out.iter_mut().zip(acc) {
                        *out = bf16::from_bits(f32_to_bf16(value(x)));
                    }
                }
            }
            if let Some(lse) = &self.lse {
                let at = row * self.num_q_heads + head * self.group + g % self.group;
                // SAFETY: as above.
                let lse = unsafe { lse.part(at, 1) };
                lse[0] = if nothing { f32::NEG_INFINITY } else { total.max[g] + sum.ln() };
            }
        }
    }
}
