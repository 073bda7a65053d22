//! Every size, stride, count and capacity, computed from the configuration alone.
//!
//! A plan is pure numbers: no device, no memory, no clock. The same file gives the same plan on
//! every machine, and everything below reads the plan, never the TOML. All arithmetic is checked;
//! what does not fit is a [`PlanError`] before anything is allocated.
//!
//! Units: sizes end in `bytes`, lengths in `tokens` or `len`, counts of blocks in `blocks`.

mod budget;
mod cuda;
mod explain;
mod format;
mod group;
mod host;
mod layout;
mod reuse;
mod rope;
mod workspace;

pub use cuda::{
    CUDA_COUNTS_BYTES, CUDA_ITEM_BYTES, CUDA_PAIR_BYTES, CUDA_PAIR_SLOTS, CUDA_PAIRS_AT_ONCE,
    CUDA_SEQ_BYTES, CUDA_TENSOR_SLOTS, CudaExports, CudaTables, CudaWorkspace,
};
pub use format::{E8M8, KvFormat, SCALE_BYTES, SCALE_GROUP};
pub use group::{GroupKind, LayerGroup};
pub use host::{
    BATCH_SEQ_BYTES, BLOCK_LISTS_BYTES, BLOCK_RECORD_BYTES, COW_BYTES, DONOR_NAME_BYTES,
    EVENT_BYTES, EXPIRY_BYTES, GROUP_STATE_BYTES, HostTerm, LATER_BYTES, NAMESPACE_BYTES,
    NODE_BYTES, PENDING_BYTES, PIN_BYTES, SAVE_BLOCK_BYTES, SAVE_ENTRY_BYTES, SAVE_FIXED_BYTES,
    SAVE_NAME_BYTES, SAVE_SLOT_BYTES, SEQ_RECORD_BYTES, SEQ_SHARE_BYTES, probe_places,
};
pub use layout::{
    Addressing, GROUP_ALIGN, GroupLayout, Kv, LayerView, NO_BLOCK, SeqView, UNIT_ALIGN, UnitShape,
    visible,
};
pub use reuse::{GroupReuse, ReusePlan};
pub use rope::{Rope, RopeTable, rotated};
pub use workspace::{
    CpuWorkspace, ELEMENTS_AT_ONCE, HEADS_AT_ONCE, ITEMS_PER_THREAD, KV_HEADS_AT_ONCE, LANES,
    TILE_TOKENS,
};

use std::fmt::{self, Write as _};

use serde::Serialize;

use crate::config::{
    Admission, CacheMode, Capacity, Config, Geometry, Invalid, MAX_TOKENS_PER_BLOCK,
    MIN_TOKENS_PER_BLOCK, ScaleKind, Scrub, StaticScale, verify,
};
use crate::error::PlanError;
use crate::units::{Bytes, GroupIdx, LayerIdx, counted, grouped};

/// Keys of one split, in tokens. Attention over more keys than this is computed split by split
/// and combined in order. Splits start at multiples of this position, whatever the mode, the
/// block size, the batch or the number of threads: that is what makes the answers bitwise equal
/// (P5). It is a multiple of every block size.
pub const SPLIT_TOKENS: u32 = 512;

/// The limits in force, every default filled in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// Sequences alive at once, as configured.
    pub max_seqs: u32,
    /// Tokens of the longest sequence.
    pub max_seq_len: u32,
    /// Tokens of one step over all sequences.
    pub max_batch_tokens: u32,
    /// Tokens of one sequence in one step.
    pub max_step_tokens: u32,
    /// Tokens that `truncate` can always rewind in windowed layers.
    pub max_rewind_tokens: u32,
}

/// Where a layer lies in the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LayerPlace {
    /// Its group.
    pub group: GroupIdx,
    /// Its index within the group.
    pub index: u32,
}

/// Static INT8 scales of one layer; 0 where the scales are computed on append.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LayerScales {
    /// Scale of K.
    pub k: f32,
    /// Scale of V.
    pub v: f32,
}

/// The plan of one cache.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// The model's attention geometry.
    pub geometry: Geometry,
    /// The limits in force.
    pub limits: Limits,
    /// Contiguous, paged or hybrid.
    pub mode: CacheMode,
    /// How an element is stored.
    pub format: KvFormat,
    /// Tokens of a block in paged groups.
    pub tokens_per_block: u32,
    /// What `begin` promises.
    pub admission: Admission,
    /// Blocks that `begin` leaves free, under max-utilization.
    pub watermark_blocks: u32,
    /// How prefixes are shared.
    pub reuse: ReusePlan,
    /// How K is rotated before it is stored; `None`: not at all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope: Option<Rope>,
    /// Events that are kept until they are polled.
    pub event_buffer: u32,
    /// The capacity that was asked for.
    pub capacity: Capacity,
    /// When released bytes are zeroed.
    pub scrub: Scrub,
    /// The layer groups, in the order in which they lie in the pool.
    pub groups: Vec<LayerGroup>,
    /// For each layer, its place. `[num_layers]`
    pub layers: Vec<LayerPlace>,
    /// For each layer, its static scales. `[num_layers]`, empty unless `per-tensor`.
    pub static_scales: Vec<LayerScales>,
    /// Places for sequences: how many can be alive at once.
    pub seq_slots: u32,
    /// Bytes of the one allocation that holds K, V and scales.
    pub pool_bytes: Bytes,
    /// Of these, bytes that hold nothing: alignment of units and groups.
    pub padding_bytes: Bytes,
    /// Bytes of K, V and scales for one more token in all layers, windows aside.
    pub bytes_per_token: Bytes,
    /// Tokens that fit, over all sequences.
    pub capacity_tokens: u64,
    /// Sequences of `max_seq_len` tokens that are certain to run to their end at once (P3).
    pub full_length_seqs: u32,
    /// Host memory for tables and lists, term by term.
    pub host_terms: Vec<HostTerm>,
    /// The sum of `host_terms`.
    pub host_bytes: Bytes,
}

impl Plan {
    /// Computes the plan of a configuration. Settings that were made by hand are checked as those
    /// of a file are.
    ///
    /// # Errors
    /// [`PlanError`] when a setting is out of range, settings contradict each other, a size
    /// overflows, or the capacity does not hold a single unit.
    pub fn new(config: &Config, geometry: &Geometry) -> Result<Self, PlanError> {
        verify(config, geometry).map_err(contradiction)?;
        Self::of(config, geometry)
    }

    /// As [`Plan::new`], for blocks of 2 or 4 tokens: for tests that follow every state of a small
    /// cache. The manager takes blocks of any power of two. The kernels do not, which is why a
    /// configuration cannot ask for these; no device that computes is opened with such a plan.
    ///
    /// # Errors
    /// As [`Plan::new`].
    #[doc(hidden)]
    pub fn with_small_blocks(config: &Config, geometry: &Geometry) -> Result<Self, PlanError> {
        let tokens = config.cache.tokens_per_block;
        let mut checked = config.clone();
        if tokens == 2 || tokens == 4 {
            checked.cache.tokens_per_block = MIN_TOKENS_PER_BLOCK;
        }
        verify(&checked, geometry).map_err(contradiction)?;
        Self::of(config, geometry)
    }

    /// The plan of a configuration that was checked.
    fn of(config: &Config, geometry: &Geometry) -> Result<Self, PlanError> {
        if config.cache.mode == CacheMode::Dynamic {
            return Err(PlanError::Contradiction {
                key: "cache.mode".to_owned(),
                problem: "\"dynamic\" is a baseline that jobs simulate: it has no plan".to_owned(),
                help: "use \"contiguous\", \"paged\" or \"hybrid\"".to_owned(),
            });
        }
        let limits = limits(config, geometry);
        let format = KvFormat::of(config);
        let drafts = group::drafts(config, geometry, &limits, format)?;
        let sized = budget::size(config, &limits, &drafts)?;

        let mut layers = vec![LayerPlace { group: GroupIdx(0), index: 0 }; geometry.windows.len()];
        for (g, group) in (0..).zip(&sized.groups) {
            for (index, layer) in (0..).zip(&group.layers) {
                layers[layer.index()] = LayerPlace { group: GroupIdx(g), index };
            }
        }
        let padding = sized.groups.iter().try_fold(sized.group_padding, |sum, group| {
            let units = u64::from(group.layout.units);
            sum.try_add(Bytes(group.layout.unit_padding_bytes).try_mul(units)?)
        })?;
        let bytes_per_token = sized
            .groups
            .iter()
            .try_fold(Bytes::ZERO, |sum, group| sum.try_add(group.bytes_per_token))?;
        check_watermark(config.cache.watermark_blocks, &sized.groups)?;
        let reuse = ReusePlan::new(config, &sized.groups);
        let event_buffer = config.cache.event_buffer;
        let host_terms =
            host::terms(geometry, &limits, &sized.groups, sized.seq_slots, &reuse, event_buffer)?;
        let host_bytes =
            host_terms.iter().try_fold(Bytes::ZERO, |sum, term| sum.try_add(term.bytes))?;
        Ok(Self {
            geometry: geometry.clone(),
            mode: config.cache.mode,
            format,
            tokens_per_block: config.cache.tokens_per_block,
            admission: config.cache.admission,
            watermark_blocks: config.cache.watermark_blocks,
            reuse,
            rope: Rope::new(config, geometry),
            event_buffer,
            capacity: config.pool.capacity,
            scrub: config.pool.scrub,
            layers,
            static_scales: static_scales(config, geometry),
            seq_slots: sized.seq_slots,
            pool_bytes: sized.pool_bytes,
            padding_bytes: padding,
            bytes_per_token,
            capacity_tokens: capacity_tokens(&sized.groups, &limits, sized.seq_slots),
            full_length_seqs: full_length_seqs(&sized.groups, &limits, sized.seq_slots),
            groups: sized.groups,
            limits,
            host_terms,
            host_bytes,
        })
    }

    /// The group of a layer.
    #[must_use]
    pub fn group_of(&self, layer: LayerIdx) -> &LayerGroup {
        &self.groups[self.layers[layer.index()].group.index()]
    }

    /// The static scales of a layer; zeros where scales are computed on append.
    #[must_use]
    pub fn scales_of(&self, layer: LayerIdx) -> LayerScales {
        self.static_scales.get(layer.index()).copied().unwrap_or_default()
    }

    /// Which of the plan's tables K of a layer is rotated with before it is stored; `None` where it
    /// is stored as it comes.
    #[must_use]
    pub fn rope_table_of(&self, layer: LayerIdx) -> Option<u32> {
        let windowed = self.geometry.windows[layer.index()] > 0;
        self.rope.as_ref().map(|rope| rope.table_of(windowed))
    }

    /// f32 numbers of the tables for the rotation of K.
    fn rope_len(&self) -> Result<u64, crate::units::Overflow> {
        self.rope.as_ref().map_or(Ok(0), Rope::numbers)
    }

    /// Blocks of group `group` that a sequence of `len` tokens can hold at once, at most; 0 for a
    /// contiguous group. This one function sizes the pool, admits sequences and states how many
    /// fit (P3).
    #[must_use]
    pub fn blocks_for(&self, group: GroupIdx, len: u32) -> u32 {
        self.groups[group.index()].blocks_for(len, &self.limits)
    }

    /// The first token that a group must still hold when `high_water` tokens have been committed
    /// at some time: what lies before has left the window, even after the longest rewind.
    #[must_use]
    pub fn keep_from(&self, group: GroupIdx, high_water: u32) -> u32 {
        match self.groups[group.index()].window {
            Some(window) => (high_water + 1).saturating_sub(window + self.limits.max_rewind_tokens),
            None => 0,
        }
    }

    /// What to raise when one sequence should have more tokens in a step: what
    /// `limits.max_step_tokens` follows from where it was left out, or is bounded by.
    #[must_use]
    pub fn step_tokens_knob(&self) -> &'static str {
        let limits = &self.limits;
        let step = limits.max_step_tokens;
        if step == limits.max_seq_len {
            "limits.max_seq_len"
        } else if step == limits.max_batch_tokens {
            "limits.max_batch_tokens"
        } else if Some(step) == smallest_window(&self.geometry) {
            "limits.max_step_tokens (left out, it is the smallest attention window)"
        } else {
            "limits.max_step_tokens (tokens of one sequence)"
        }
    }

    /// Pins that can be held at once.
    #[must_use]
    pub fn max_pins(&self) -> u32 {
        reuse::max_pins(&self.limits)
    }

    /// Host memory that saving or restoring allocates and gives back, at most: one block of
    /// [`MAX_TOKENS_PER_BLOCK`] tokens, and what is kept of each block, namespace and slot.
    ///
    /// # Errors
    /// [`PlanError::Overflow`].
    pub fn save_bytes(&self) -> Result<Bytes, PlanError> {
        let (slots, groups) = (u64::from(self.seq_slots), self.groups.len() as u64);
        let seq_len = u64::from(self.limits.max_seq_len);
        let per_block = u64::from(MIN_TOKENS_PER_BLOCK.min(self.tokens_per_block));
        let layers = u64::from(self.geometry.num_layers);
        let units: u64 = self.groups.iter().map(|group| u64::from(group.layout.units)).sum();
        let lead = self.reuse.lead.map(|lead| &self.groups[lead.index()].layout);
        let tokens = match lead {
            Some(lead) => Bytes(lead.units.into()).try_mul(lead.unit_tokens.into())?,
            None => Bytes(slots).try_mul(seq_len)?,
        };
        let names = u64::from(self.max_namespaces()).max(2 * slots) + 1;
        let block = Bytes(self.bytes_per_token.get() + 4).try_mul(MAX_TOKENS_PER_BLOCK.into())?;
        let chain = (seq_len / per_block + 2) * 4 * (groups + 1);
        let terms = [
            block.try_add(Bytes(4 * layers + seq_len * 4))?,
            Bytes(SAVE_ENTRY_BYTES).try_mul(tokens.get() / per_block + slots + seq_len)?,
            Bytes(SAVE_BLOCK_BYTES).try_mul(units)?,
            Bytes(SAVE_NAME_BYTES).try_mul(names)?,
            Bytes(SAVE_SLOT_BYTES + 8 * groups).try_mul(slots)?,
            Bytes(chain + 4 * seq_len + 12 * groups + SAVE_FIXED_BYTES),
        ];
        Ok(terms.into_iter().try_fold(Bytes::ZERO, Bytes::try_add)?)
    }

    /// Namespaces that can be told apart at once.
    #[must_use]
    pub fn max_namespaces(&self) -> u32 {
        let lead = self.reuse.lead.map_or(0, |lead| self.groups[lead.index()].layout.units);
        host::max_namespaces(lead, self.seq_slots)
    }

    /// Checks the plan, with a device's workspace of so many bytes, against the memory that there
    /// is.
    ///
    /// # Errors
    /// [`PlanError::MemoryTooSmall`] with the shortfall and the settings that close it.
    pub fn check_memory(
        &self,
        workspace: Bytes,
        available: Bytes,
        source_of_limit: &'static str,
    ) -> Result<(), PlanError> {
        let needed = self.pool_bytes.try_add(self.host_bytes)?.try_add(workspace)?;
        if needed <= available {
            return Ok(());
        }
        Err(PlanError::MemoryTooSmall {
            needed,
            pool: self.pool_bytes,
            host: self.host_bytes,
            workspace,
            available,
            source_of_limit,
            worst_case: self.capacity == Capacity::WorstCase,
        })
    }

    /// Checks the plan, with a workspace of so many bytes, against a device's own memory, which
    /// holds none of the bookkeeping.
    ///
    /// # Errors
    /// As [`Plan::check_memory`].
    pub fn check_device_memory(
        &self,
        workspace: Bytes,
        available: Bytes,
        source_of_limit: &'static str,
    ) -> Result<(), PlanError> {
        let needed = self.pool_bytes.try_add(workspace)?;
        if needed <= available {
            return Ok(());
        }
        Err(PlanError::MemoryTooSmall {
            needed,
            pool: self.pool_bytes,
            host: Bytes::ZERO,
            workspace,
            available,
            source_of_limit,
            worst_case: self.capacity == Capacity::WorstCase,
        })
    }

    /// A hash of every number of the plan. A device remembers that of the plan it was opened with,
    /// so that a cache with another plan of the same size is refused.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        /// FNV-1a of what is written: the text is never there as a whole, and takes no memory.
        struct Hash(u64);
        impl fmt::Write for Hash {
            fn write_str(&mut self, text: &str) -> fmt::Result {
                self.0 = text.bytes().fold(self.0, |hash, byte| {
                    (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
                });
                Ok(())
            }
        }
        let mut hash = Hash(0xCBF2_9CE4_8422_2325);
        // Neither the numbers nor the hash fail.
        let _ = write!(hash, "{self:?}");
        hash.0
    }

    /// Where a layer's keys and values lie: what an engine's own kernels need beside the pool's
    /// first byte, token slots and block tables.
    #[must_use]
    pub fn layer_view(&self, layer: LayerIdx) -> Option<LayerView> {
        let place = self.layers.get(layer.index())?;
        let layout = &self.groups[place.group.index()].layout;
        Some(LayerView::new(layout, *place, self.scales_of(layer)))
    }
}

/// A setting that was refused, as an error of the plan.
fn contradiction(Invalid { key, problem, help }: Invalid) -> PlanError {
    PlanError::Contradiction { key, problem, help }
}

/// Refuses a watermark that is the whole of some group: beside one sequence no other could begin.
fn check_watermark(watermark: u32, groups: &[LayerGroup]) -> Result<(), PlanError> {
    let paged = (0..).zip(groups).filter(|(_, group)| group.kind == GroupKind::Paged);
    let smallest = paged.map(|(index, group)| (group.layout.units, index)).min();
    let Some((blocks, group)) = smallest.filter(|(blocks, _)| watermark >= *blocks) else {
        return Ok(());
    };
    let group = GroupIdx(group);
    let most = blocks.saturating_sub(1);
    Err(PlanError::Contradiction {
        key: "cache.watermark_blocks".to_owned(),
        problem: format!(
            "is {}, and layer group {group} has {} in all, so that no sequence could begin beside \
             another",
            grouped(watermark.into()),
            counted(blocks.into(), "block")
        ),
        help: format!("lower it to {} at most, or raise pool.capacity", grouped(most.into())),
    })
}

/// Fills in the limits' defaults.
fn limits(config: &Config, geometry: &Geometry) -> Limits {
    let given = &config.limits;
    let natural = given.max_batch_tokens.min(smallest_window(geometry).unwrap_or(u32::MAX));
    Limits {
        max_seqs: given.max_seqs,
        max_seq_len: given.max_seq_len,
        max_batch_tokens: given.max_batch_tokens,
        max_step_tokens: given.max_step_tokens.unwrap_or(natural).min(given.max_seq_len),
        max_rewind_tokens: given.max_rewind_tokens,
    }
}

/// The smallest attention window; `None` when every layer sees everything.
fn smallest_window(geometry: &Geometry) -> Option<u32> {
    geometry.windows.iter().copied().filter(|window| *window > 0).min()
}

/// One entry a layer for static scales, none otherwise.
fn static_scales(config: &Config, geometry: &Geometry) -> Vec<LayerScales> {
    let Some(int8) = &config.cache.int8 else {
        return Vec::new();
    };
    if int8.scale != ScaleKind::PerTensor {
        return Vec::new();
    }
    let at = |scale: &Option<StaticScale>, layer: usize| match scale {
        Some(StaticScale::One(value)) => *value,
        Some(StaticScale::PerLayer(values)) => values[layer],
        None => 0.0,
    };
    (0..geometry.windows.len())
        .map(|layer| LayerScales { k: at(&int8.k_scale, layer), v: at(&int8.v_scale, layer) })
        .collect()
}

/// Tokens over all sequences: what the blocks of full attention hold. In a plan whose paged layers
/// all have windows, what is certain: the full-length sequences, or, where not even one fits, the
/// tokens of the blocks. Never more than the sequence slots hold.
fn capacity_tokens(groups: &[LayerGroup], limits: &Limits, seq_slots: u32) -> u64 {
    let paged = || groups.iter().filter(|group| group.kind == GroupKind::Paged);
    let held =
        |group: &LayerGroup| u64::from(group.layout.units) * u64::from(group.layout.unit_tokens);
    let slots = u64::from(seq_slots) * u64::from(limits.max_seq_len);
    let full = paged().filter(|group| group.window.is_none()).map(held).min();
    let windowed = paged().map(held).min().map(|tokens| {
        let seqs = full_length_seqs(groups, limits, seq_slots);
        tokens.max(u64::from(seqs) * u64::from(limits.max_seq_len))
    });
    full.or(windowed).unwrap_or(slots).min(slots)
}

/// How many sequences of full length every group can hold at once.
fn full_length_seqs(groups: &[LayerGroup], limits: &Limits, seq_slots: u32) -> u32 {
    groups
        .iter()
        .filter(|group| group.kind == GroupKind::Paged)
        .map(|group| group.layout.units / group.blocks_for(limits.max_seq_len, limits))
        .chain([seq_slots])
        .min()
        .unwrap_or(0)
}
