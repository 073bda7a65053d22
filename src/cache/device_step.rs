//! A step whose tensors are in the device's own memory: nothing is copied, nothing waited for.

use super::step::{expect_len, expect_one_type, scale_or_default};
use super::{Cache, Step};
use crate::device::{
    DType, DeviceAppend, DeviceAttend, DevicePrepare, DeviceTables, DeviceTensor, TablesUpload,
};
use crate::error::CacheError;
use crate::plan::GroupKind;
use crate::units::{GroupIdx, LayerIdx};

impl Step<'_> {
    /// Uploads what the device's kernels read of the step in all groups. From here on
    /// [`Step::append_device`] and [`Step::attend_device`] put kernels into the stream and nothing
    /// else, which take the step's numbers from the device's memory.
    ///
    /// So a graph can capture them, once. For a later step it is played again after that step has
    /// been prepared, in place of these calls, with [`Step::mark_appended`] for each layer. The
    /// tensors stay where they are, with room for the tokens of any step. A step that was not
    /// prepared, or a verb that copies or waits, is refused while the stream is captured, and
    /// spoils neither the capture nor the cache.
    ///
    /// # Errors
    /// A device that computes in the host's memory, or what the driver says.
    pub fn prepare(&mut self) -> Result<(), CacheError> {
        let cache = &mut *self.cache;
        for (index, group) in cache.plan.groups.iter().enumerate() {
            cache.pool.device.prepare(&DevicePrepare {
                step: cache.step_name,
                layout: &group.layout,
                window: group.window.unwrap_or(0),
                num_q_heads: cache.plan.geometry.num_q_heads,
                token_slots: &cache.batch.token_slots[index],
                positions: &cache.batch.positions,
                seqs: &cache.batch.seqs,
                tables: &cache.tables[index],
                table_row: group.max_blocks_per_seq,
            })?;
        }
        Ok(())
    }

    /// Puts a group's tables of the step into the device's memory, in the order of its stream, for
    /// an engine's own kernels in that stream; says where they are. The places are the same for
    /// every step. Of a paged group also the blocks: `csr` in compressed sparse row form, `dense`
    /// as whole rows, which are far more bytes.
    ///
    /// # Errors
    /// A group that does not exist; a device that computes in the host's memory, where
    /// [`Step::token_slots`], [`Step::block_table`] and [`Step::csr`] are all there is; what the
    /// driver says.
    pub fn upload_tables(
        &mut self,
        group: GroupIdx,
        csr: bool,
        dense: bool,
    ) -> Result<DeviceTables, CacheError> {
        let Some(layers) = self.cache.plan.groups.get(group.index()) else {
            return Err(self.cache.no_such_group(group, "a group"));
        };
        let paged = layers.kind == GroupKind::Paged;
        let (csr, dense) = (csr && paged, dense && paged);
        if csr && !self.cache.batch.csr_built {
            self.build_csr();
        }
        let Cache { plan, pool, batch, tables, .. } = &mut *self.cache;
        let layers = &plan.groups[group.index()];
        let csr = match &batch.csr[group.index()] {
            Some(lists) if csr => lists.lists(),
            _ => [&[][..]; 4],
        };
        Ok(pool.device.upload_tables(&TablesUpload {
            layout: &layers.layout,
            positions: &batch.positions,
            seq_lens: &batch.seq_lens,
            token_slots: &batch.token_slots[group.index()],
            seqs: &batch.seqs,
            tables: &tables[group.index()],
            table_row: layers.max_blocks_per_seq,
            dense,
            csr,
        })?)
    }

    /// As [`Step::append`], with K and V in the device's memory. What INT8 counts of them is added
    /// to the counters by [`super::Cache::synchronize`].
    ///
    /// # Errors
    /// As [`Step::append`]; a device that computes in the host's memory.
    pub fn append_device(
        &mut self,
        layer: LayerIdx,
        k: DeviceTensor,
        v: DeviceTensor,
    ) -> Result<(), CacheError> {
        let place = self.place(layer)?;
        if self.cache.batch.appended[layer.index()] {
            return Err(CacheError::AlreadyAppended { layer });
        }
        let geometry = &self.cache.plan.geometry;
        let row = geometry.num_kv_heads as usize * geometry.head_dim as usize;
        let expected = self.num_tokens() * row;
        let shape = "[num_tokens, num_kv_heads, head_dim]";
        expect_len("k", k.len(), expected, shape)?;
        expect_len("v", v.len(), expected, shape)?;
        expect_one_type(k.dtype(), v.dtype())?;
        let cache = &mut *self.cache;
        let group = place.group.index();
        cache.pool.device.append_device(&DeviceAppend {
            step: cache.step_name,
            layout: &cache.plan.groups[group].layout,
            layer: place.index,
            scales: cache.plan.scales_of(layer),
            token_slots: &cache.batch.token_slots[group],
            rope: cache.plan.rope_table_of(layer),
            positions: &cache.batch.positions,
            k,
            v,
        })?;
        cache.batch.set_appended(layer);
        Ok(())
    }

    /// As [`Step::attend`], with queries, result and lse (f32) in the device's memory.
    ///
    /// # Errors
    /// As [`Step::attend`]; a device that computes in the host's memory.
    pub fn attend_device(
        &mut self,
        layer: LayerIdx,
        q: DeviceTensor,
        out: DeviceTensor,
        lse: Option<DeviceTensor>,
        softmax_scale: Option<f32>,
    ) -> Result<(), CacheError> {
        let place = self.place(layer)?;
        if !self.cache.batch.appended[layer.index()] {
            return Err(CacheError::AttendBeforeAppend { layer });
        }
        let geometry = &self.cache.plan.geometry;
        let softmax_scale = scale_or_default(softmax_scale, geometry.head_dim)?;
        let heads = self.num_tokens() * geometry.num_q_heads as usize;
        let expected = heads * geometry.head_dim as usize;
        let shape = "[num_tokens, num_q_heads, head_dim]";
        expect_len("q", q.len(), expected, shape)?;
        expect_len("out", out.len(), expected, shape)?;
        if let Some(lse) = &lse {
            let len = if lse.dtype() == DType::F32 { lse.len() } else { 0 };
            expect_len("lse (f32)", len, heads, "[num_tokens, num_q_heads]")?;
        }
        let num_q_heads = geometry.num_q_heads;
        let cache = &mut *self.cache;
        let group = &cache.plan.groups[place.group.index()];
        cache.pool.device.attend_device(&DeviceAttend {
            step: cache.step_name,
            layout: &group.layout,
            layer: place.index,
            scales: cache.plan.scales_of(layer),
            window: group.window.unwrap_or(0),
            num_q_heads,
            softmax_scale,
            seqs: &cache.batch.seqs,
            tables: &cache.tables[place.group.index()],
            table_row: group.max_blocks_per_seq,
            q,
            out,
            lse,
        })?;
        Ok(())
    }
}
