//! One step of the model: the transaction in which tokens enter the cache.

use super::batch::StepItem;
use super::sequence::SeqHandle;
use super::{Cache, Csr};
use crate::device::{AppendArgs, AttendArgs, BatchSeq, DType, TensorMut, TensorRef};
use crate::error::CacheError;
use crate::plan::Plan;
use crate::units::{GroupIdx, LayerIdx};

/// How attention is computed.
#[derive(Debug, Default)]
pub struct AttendOptions<'a> {
    /// Factor on q·k before the softmax. Default: 1 / √`head_dim`.
    pub softmax_scale: Option<f32>,
    /// Where the natural logarithm of the softmax's denominator goes.
    /// `[num_tokens, num_q_heads]`
    pub lse: Option<&'a mut [f32]>,
}

/// An open step: its token slots are reserved, and nothing is part of a sequence yet.
///
/// [`Step::commit`] makes it so; [`Step::cancel`], or dropping the step, gives everything back and
/// leaves the cache as it was before [`Cache::reserve`], but for this: the handles of blocks that
/// the step had taken are stale, and what was cached and had to go for it, or was taken out of the
/// index to be written, does not come back. Rows of all tensors are in the order of the
/// reservation: all tokens of the first sequence, then those of the second, and so on.
#[must_use = "a step that is dropped is cancelled"]
#[derive(Debug)]
pub struct Step<'a> {
    pub(super) cache: &'a mut Cache,
    /// Whether dropping still has to undo the step.
    open: bool,
}

impl Cache {
    /// Opens a step that appends so many tokens to each of these sequences: prefilling ones
    /// (many tokens) and decoding ones (one) together. No sequences at all is a valid step.
    ///
    /// # Errors
    /// Stale, foreign or repeated handles, 0 tokens, a limit exceeded, or
    /// [`CacheError::PoolExhausted`], which guaranteed admission rules out. Nothing changes, except
    /// as [`CacheError::Device`] says.
    pub fn reserve(&mut self, wanted: &[(SeqHandle, u32)]) -> Result<Step<'_>, CacheError> {
        self.reserve_items(wanted, None)
    }

    /// As [`Cache::reserve`], with the ids of the step's tokens, in the order of its rows, so that
    /// tokens behind the prompt can be shared too. `[num_tokens]`
    ///
    /// Without them what lies behind the prompt is unknown, and the blocks from there on are not
    /// shared.
    ///
    /// # Errors
    /// As [`Cache::reserve`], [`CacheError::TokenMismatch`] where the prompt says otherwise, and
    /// [`CacheError::WrongShape`]. Nothing changes.
    pub fn reserve_tokens(
        &mut self,
        wanted: &[(SeqHandle, u32)],
        tokens: &[u32],
    ) -> Result<Step<'_>, CacheError> {
        self.reserve_items(wanted, Some(tokens))
    }

    /// Both of these, of entries of any form.
    pub(crate) fn reserve_items<W: StepItem>(
        &mut self,
        wanted: &[W],
        tokens: Option<&[u32]>,
    ) -> Result<Step<'_>, CacheError> {
        self.open_step(wanted, tokens)?;
        self.step_name += 1;
        Ok(Step { cache: self, open: true })
    }
}

impl Cache {
    /// The entry for which the last [`Cache::reserve_items`] was refused; `None` where it was for
    /// all of them together.
    pub(crate) const fn refused_item(&self) -> Option<usize> {
        self.batch.refused_at()
    }
}

/// An open step as a value that can be checked: for a border that cannot carry a [`Step`], which
/// borrows its cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StepId {
    cache_id: u32,
    name: u64,
}

impl StepId {
    /// An id made of its parts, to be checked at its next use.
    #[must_use]
    pub const fn from_parts(cache_id: u32, name: u64) -> Self {
        Self { cache_id, name }
    }

    /// The parts: the cache's id, the step's number.
    #[must_use]
    pub const fn parts(&self) -> (u32, u64) {
        (self.cache_id, self.name)
    }
}

impl Cache {
    /// Takes up a step that was put aside with [`Step::detach`].
    ///
    /// # Errors
    /// [`CacheError::StaleStep`]: it has ended, or was never open; [`CacheError::ForeignHandle`].
    pub fn resume(&mut self, step: StepId) -> Result<Step<'_>, CacheError> {
        if step.cache_id != self.cache_id {
            return Err(CacheError::ForeignHandle);
        }
        if !self.has_open_step() || step.name != self.step_name {
            return Err(CacheError::StaleStep { number: step.name });
        }
        Ok(Step { cache: self, open: true })
    }

    /// Cancels the step that is open, if one is, whoever has its [`StepId`]; says whether there was
    /// one.
    pub fn cancel_open_step(&mut self) -> bool {
        let open = self.has_open_step();
        self.abandon_step();
        open
    }

    /// Whether a step is open that was put aside with [`Step::detach`].
    #[must_use]
    pub fn has_open_step(&self) -> bool {
        self.batch.is_open()
    }
}

impl Step<'_> {
    /// Puts the step aside: it stays open, and [`Cache::resume`] takes it up again. Every verb of
    /// the cache that is not of the step, and may change anything, cancels it, also when it is
    /// refused.
    pub fn detach(mut self) -> StepId {
        self.open = false;
        StepId { cache_id: self.cache.cache_id, name: self.cache.step_name }
    }

    /// Tokens of the step.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.cache.batch.positions.len()
    }

    /// Each token's position in its sequence: what a position encoding must use. `[num_tokens]`
    #[must_use]
    pub fn positions(&self) -> &[u32] {
        &self.cache.batch.positions
    }

    /// The step's sequences: slot, rows and first position. `[num_seqs]`
    #[must_use]
    pub fn seqs(&self) -> &[BatchSeq] {
        &self.cache.batch.seqs
    }

    /// Each sequence's length with the step's tokens. `[num_seqs]`
    #[must_use]
    pub fn seq_lens(&self) -> &[u32] {
        &self.cache.batch.seq_lens
    }

    /// Each token's place in a group: `unit · unit_tokens + token`. `[num_tokens]`
    ///
    /// # Errors
    /// A group that does not exist.
    pub fn token_slots(&self, group: GroupIdx) -> Result<&[u64], CacheError> {
        match self.cache.batch.token_slots.get(group.index()) {
            Some(slots) => Ok(slots),
            None => Err(self.cache.no_such_group(group, "")),
        }
    }

    /// A group's block table, row by sequence slot, and the entries of a row.
    ///
    /// # Errors
    /// A group that does not exist or is contiguous.
    pub fn block_table(&self, group: GroupIdx) -> Result<(&[u32], u32), CacheError> {
        self.cache.block_table(group)
    }

    /// Builds the CSR form of every paged group, the step's tokens included; it stays valid for
    /// the life of the step.
    pub fn build_csr(&mut self) {
        self.cache.build_csr();
    }

    /// A group's blocks in CSR form.
    ///
    /// # Errors
    /// [`CacheError::CsrNotBuilt`] before [`Step::build_csr`]; a group that does not exist or is
    /// contiguous.
    pub fn csr(&self, group: GroupIdx) -> Result<Csr<'_>, CacheError> {
        self.cache.csr(group)
    }

    /// The plan: where every layer's keys and values lie ([`Plan::layer_view`]).
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.cache.plan
    }

    /// The pool's first byte, for an engine's own kernels; see [`Cache::pool_ptr`].
    #[must_use]
    pub fn pool_ptr(&self) -> *mut u8 {
        self.cache.pool_ptr()
    }

    /// Stores K and V of the step's tokens in a layer. `[num_tokens, num_kv_heads, head_dim]` each
    ///
    /// Where the plan has [`Plan::rope`], K is rotated by its tokens' positions first; queries must
    /// come rotated, as [`Rope::rotate`](crate::plan::Rope::rotate) does it.
    ///
    /// # Errors
    /// A layer that does not exist or has been appended, a wrong shape, K and V of two element
    /// types; nothing changes.
    pub fn append(
        &mut self,
        layer: LayerIdx,
        k: TensorRef<'_>,
        v: TensorRef<'_>,
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
        let Cache { plan, pool, batch, .. } = &mut *self.cache;
        let counts = pool.device.append(&AppendArgs {
            layout: &plan.groups[place.group.index()].layout,
            layer: place.index,
            scales: plan.scales_of(layer),
            token_slots: &batch.token_slots[place.group.index()],
            rope: plan.rope_table_of(layer),
            positions: &batch.positions,
            k,
            v,
        })?;
        batch.counts.add(counts);
        batch.set_appended(layer);
        Ok(())
    }

    /// Declares that an engine's own kernels have written K and V of the step in a layer, K rotated
    /// where the plan has [`Plan::rope`].
    ///
    /// # Errors
    /// A layer that does not exist or has been appended.
    pub fn mark_appended(&mut self, layer: LayerIdx) -> Result<(), CacheError> {
        self.place(layer)?;
        if self.cache.batch.set_appended(layer) {
            return Err(CacheError::AlreadyAppended { layer });
        }
        Ok(())
    }

    /// Declares the same of every layer that was neither appended nor marked yet.
    pub fn mark_all_appended(&mut self) {
        for layer in 0..self.cache.plan.geometry.num_layers {
            self.cache.batch.set_appended(LayerIdx(layer));
        }
    }

    /// Causal attention of the step's queries over everything that their sequences hold in a
    /// layer, the step's own tokens included. `q` and `out` are
    /// `[num_tokens, num_q_heads, head_dim]`; the layer's window and sinks apply. Sums are kept
    /// in f32 or better.
    ///
    /// # Errors
    /// A layer that does not exist or was not appended yet, a wrong shape, a softmax scale that is
    /// not finite and positive. Nothing is written then.
    pub fn attend(
        &mut self,
        layer: LayerIdx,
        q: TensorRef<'_>,
        out: TensorMut<'_>,
        options: AttendOptions<'_>,
    ) -> Result<(), CacheError> {
        let place = self.place(layer)?;
        if !self.cache.batch.appended[layer.index()] {
            return Err(CacheError::AttendBeforeAppend { layer });
        }
        let geometry = &self.cache.plan.geometry;
        let softmax_scale = scale_or_default(options.softmax_scale, geometry.head_dim)?;
        let heads = self.num_tokens() * geometry.num_q_heads as usize;
        let expected = heads * geometry.head_dim as usize;
        let shape = "[num_tokens, num_q_heads, head_dim]";
        expect_len("q", q.len(), expected, shape)?;
        expect_len("out", out.len(), expected, shape)?;
        if let Some(lse) = &options.lse {
            expect_len("lse", lse.len(), heads, "[num_tokens, num_q_heads]")?;
        }
        let num_q_heads = geometry.num_q_heads;
        let Cache { plan, pool, batch, tables, .. } = &mut *self.cache;
        let group = &plan.groups[place.group.index()];
        pool.device.attend(&mut AttendArgs {
            layout: &group.layout,
            layer: place.index,
            scales: plan.scales_of(layer),
            window: group.window.unwrap_or(0),
            num_q_heads,
            softmax_scale,
            seqs: &batch.seqs,
            tables: &tables[place.group.index()],
            table_row: group.max_blocks_per_seq,
            q,
            out,
            lse: options.lse,
        })?;
        Ok(())
    }

    /// Makes the step's tokens part of their sequences. Blocks that have left the window of a
    /// windowed layer go back.
    ///
    /// # Errors
    /// [`CacheError::StepIncomplete`] when a layer was neither appended nor marked; the step is
    /// then cancelled.
    pub fn commit(mut self) -> Result<(), CacheError> {
        self.cache.commit_step()?;
        self.open = false;
        Ok(())
    }

    /// Gives everything back; the same as dropping the step.
    pub fn cancel(self) {
        drop(self);
    }

    pub(super) fn place(&self, layer: LayerIdx) -> Result<crate::plan::LayerPlace, CacheError> {
        let layers = &self.cache.plan.layers;
        layers.get(layer.index()).copied().ok_or(CacheError::NoSuchLayer {
            layer,
            num_layers: self.cache.plan.geometry.num_layers,
        })
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        // In a panic the device may be what panics, and a second one would end the process. What is
        // left open the next verb cancels.
        if self.open && !std::thread::panicking() {
            self.cache.cancel_step();
        }
    }
}

/// Refuses a buffer of the wrong length.
pub(super) fn expect_len(
    what: &'static str,
    got: usize,
    expected: usize,
    shape: &'static str,
) -> Result<(), CacheError> {
    if got == expected {
        return Ok(());
    }
    Err(CacheError::WrongShape { what, got, expected, shape })
}

/// Refuses K and V of two element types: no model has them, and no kernel takes them.
pub(super) fn expect_one_type(k: DType, v: DType) -> Result<(), CacheError> {
    if k == v {
        return Ok(());
    }
    Err(CacheError::MixedTypes { k: k.name(), v: v.name() })
}

/// The factor on q·k: as given, or 1 / √`head_dim`.
pub(super) fn scale_or_default(given: Option<f32>, head_dim: u32) -> Result<f32, CacheError> {
    let scale = given.unwrap_or_else(|| 1.0 / f32_of(head_dim).sqrt());
    if scale.is_finite() && scale > 0.0 { Ok(scale) } else { Err(CacheError::BadSoftmaxScale) }
}

/// The number as f32; `head_dim` is far below 2²⁴.
fn f32_of(number: u32) -> f32 {
    #[expect(clippy::cast_precision_loss, reason = "head_dim is at most 1024")]
    let value = number as f32;
    value
}
