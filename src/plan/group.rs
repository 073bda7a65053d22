//! Layer groups: the layers with the same kind, window and format.

use serde::Serialize;

use super::Limits;
use super::format::{KvFormat, SCALE_BYTES};
use super::layout::{Addressing, GroupLayout, UnitShape};
use crate::config::{Config, Geometry, contiguous_set};
use crate::error::PlanError;
use crate::units::{Bytes, LayerIdx};

/// How a group keeps its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum GroupKind {
    /// One run of memory for each sequence slot.
    Contiguous,
    /// Blocks, found through the block table.
    Paged,
}

/// The layers that share a kind and a window: what the plan lists, the pool allocates and the
/// block table indexes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LayerGroup {
    /// Contiguous or paged.
    pub kind: GroupKind,
    /// Keys a query may see, itself included; `None` = all. A window that no sequence can
    /// outgrow counts as none.
    pub window: Option<u32>,
    /// The group's layers, in ascending order.
    pub layers: Vec<LayerIdx>,
    /// Sizes and strides.
    pub layout: GroupLayout,
    /// Bytes of K, V and scales of one token in the group's layers.
    pub bytes_per_token: Bytes,
    /// Entries in a sequence's row of the block table; 0 for contiguous groups.
    pub max_blocks_per_seq: u32,
}

impl LayerGroup {
    /// Blocks that a sequence of `len` tokens can hold at once, at most; 0 for contiguous.
    #[must_use]
    pub fn blocks_for(&self, len: u32, limits: &Limits) -> u32 {
        if self.kind == GroupKind::Contiguous {
            return 0;
        }
        let sinks = self.layout.sink_tokens;
        blocks_for(len, self.layout.unit_tokens, self.window, sinks, limits)
    }
}

/// A group before it is known how many units it has.
#[derive(Clone, Debug)]
pub(super) struct Draft {
    pub(super) kind: GroupKind,
    pub(super) window: Option<u32>,
    pub(super) layers: Vec<LayerIdx>,
    pub(super) shape: UnitShape,
    pub(super) bytes_per_token: Bytes,
    /// Blocks of one sequence of `max_seq_len` tokens; 0 for contiguous groups.
    pub(super) blocks_per_full_seq: u32,
    pub(super) max_blocks_per_seq: u32,
    /// Whether blocks beyond what sequences hold are of use: they keep prefixes.
    pub(super) keeps_prefixes: bool,
}

impl Draft {
    /// Blocks that a sequence of `len` tokens can hold at once, at most.
    pub(super) fn blocks_for(&self, len: u32, limits: &Limits) -> u32 {
        blocks_for(len, self.shape.unit_tokens, self.window, self.shape.sink_tokens, limits)
    }
}

/// Blocks that a sequence of `len` tokens can hold at once.
///
/// Without a window that is ⌈len / T⌉. With one, a step of n tokens needs the n new tokens, the
/// W - 1 before them, and those that a rewind may bring back: m = W - 1 + rewind + n consecutive
/// tokens, which touch at most ⌈(m - 1) / T⌉ + 1 blocks however they lie, and the blocks of the
/// sinks, which never leave.
fn blocks_for(
    len: u32,
    tokens_per_block: u32,
    window: Option<u32>,
    sink_tokens: u32,
    limits: &Limits,
) -> u32 {
    let whole = len.div_ceil(tokens_per_block);
    let Some(window) = window else { return whole };
    if len == 0 {
        return 0;
    }
    let step = u64::from(limits.max_step_tokens.min(len));
    let held = u64::from(window) - 1 + u64::from(limits.max_rewind_tokens) + step;
    let blocks = (held - 1).div_ceil(u64::from(tokens_per_block))
        + 1
        + u64::from(sink_tokens.div_ceil(tokens_per_block));
    u32::try_from(blocks).unwrap_or(u32::MAX).min(whole)
}

/// Gathers the layers into groups, in the order of their first layers.
pub(super) fn drafts(
    config: &Config,
    geometry: &Geometry,
    limits: &Limits,
    format: KvFormat,
) -> Result<Vec<Draft>, PlanError> {
    let contiguous = contiguous_set(config, geometry);
    let mut keys: Vec<(GroupKind, Option<u32>)> = Vec::new();
    let mut layers: Vec<Vec<LayerIdx>> = Vec::new();
    for (layer, (&window, &contiguous)) in (0..).zip(geometry.windows.iter().zip(&contiguous)) {
        let kind = if contiguous { GroupKind::Contiguous } else { GroupKind::Paged };
        let window = Some(window).filter(|w| *w > 0 && *w < limits.max_seq_len);
        let at = keys.iter().position(|key| *key == (kind, window)).unwrap_or_else(|| {
            keys.push((kind, window));
            layers.push(Vec::new());
            keys.len() - 1
        });
        layers[at].push(LayerIdx(layer));
    }
    keys.into_iter()
        .zip(layers)
        .map(|((kind, window), layers)| {
            draft(config, geometry, limits, format, kind, window, layers)
        })
        .collect()
}

/// Works out the unit of one group.
fn draft(
    config: &Config,
    geometry: &Geometry,
    limits: &Limits,
    format: KvFormat,
    kind: GroupKind,
    window: Option<u32>,
    layers: Vec<LayerIdx>,
) -> Result<Draft, PlanError> {
    let sink_tokens = if window.is_some() { geometry.sink_tokens } else { 0 };
    let tokens_per_block = config.cache.tokens_per_block;
    let (unit_tokens, addressing, ring_tokens) = match (kind, window) {
        (GroupKind::Paged, _) => (tokens_per_block, Addressing::Blocks, 0),
        (GroupKind::Contiguous, None) => (limits.max_seq_len, Addressing::Slot, 0),
        (GroupKind::Contiguous, Some(window)) => {
            refuse_short_window(window, limits)?;
            // The window, what a rewind may bring back, and the tokens of the step under way.
            let ring = u64::from(window)
                + u64::from(limits.max_rewind_tokens)
                + u64::from(limits.max_step_tokens);
            let slot = ring + u64::from(sink_tokens);
            match u32::try_from(slot) {
                Ok(slot) if slot < limits.max_seq_len => {
                    (slot, Addressing::Ring, slot - sink_tokens)
                }
                _ => (limits.max_seq_len, Addressing::Slot, 0),
            }
        }
    };
    let num_layers = u32::try_from(layers.len()).unwrap_or(u32::MAX);
    let scale_bytes = format.scales_per_row(geometry.head_dim) * SCALE_BYTES;
    let row_bytes = u64::from(geometry.head_dim * format.element_bytes() + scale_bytes);
    let bytes_per_token = Bytes(2)
        .try_mul(u64::from(num_layers))?
        .try_mul(u64::from(geometry.num_kv_heads))?
        .try_mul(row_bytes)?;
    let paged = kind == GroupKind::Paged;
    let full = blocks_for(limits.max_seq_len, tokens_per_block, window, sink_tokens, limits);
    Ok(Draft {
        kind,
        window,
        layers,
        shape: UnitShape {
            num_layers,
            num_kv_heads: geometry.num_kv_heads,
            head_dim: geometry.head_dim,
            format,
            unit_tokens,
            addressing,
            sink_tokens,
            ring_tokens,
        },
        bytes_per_token,
        blocks_per_full_seq: if paged { full } else { 0 },
        max_blocks_per_seq: if paged { limits.max_seq_len.div_ceil(tokens_per_block) } else { 0 },
        keeps_prefixes: paged && config.cache.prefix_reuse,
    })
}

/// A step longer than the window would write keys that none of its own later queries may see:
/// a sign that the step limit and the window were not meant for each other.
fn refuse_short_window(window: u32, limits: &Limits) -> Result<(), PlanError> {
    if limits.max_step_tokens <= window {
        return Ok(());
    }
    Err(PlanError::Contradiction {
        key: "limits.max_step_tokens".to_owned(),
        problem: format!(
            "a step of {} tokens is longer than the attention window of {window} of a contiguous layer",
            limits.max_step_tokens
        ),
        help: "lower limits.max_step_tokens to the window (leaving it out does that), or make the \
               layer paged"
            .to_owned(),
    })
}
