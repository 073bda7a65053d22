//! How many units each group gets, and where they lie.

use super::group::{Draft, GroupKind, LayerGroup};
use super::layout::{GROUP_ALIGN, GroupLayout};
use super::{Limits, NO_BLOCK};
use crate::config::{CacheMode, Capacity, Config};
use crate::error::PlanError;
use crate::units::{Bytes, Overflow};

/// The groups with their units, and the pool that holds them.
pub(super) struct Sized {
    pub(super) groups: Vec<LayerGroup>,
    pub(super) seq_slots: u32,
    pub(super) pool_bytes: Bytes,
    /// Bytes between groups.
    pub(super) group_padding: Bytes,
}

/// How much every group gets: slots for contiguous groups, blocks for paged ones.
#[derive(Clone, Copy)]
enum Measure {
    /// `max_seqs` sequences of full length.
    WorstCase,
    /// This many slots in an all-contiguous plan.
    Slots(u32),
    /// This many blocks in every paged group.
    Each(u64),
    /// This many blocks of full attention, and in windowed groups what sequences of
    /// `typical_seq_len` need beside them.
    Shared {
        /// Blocks of full attention.
        blocks: u64,
        /// The length by which the capacity is divided.
        typical_seq_len: u32,
    },
}

/// Sizes the groups as `pool.capacity` asks.
pub(super) fn size(config: &Config, limits: &Limits, drafts: &[Draft]) -> Result<Sized, PlanError> {
    let tokens_per_block = u64::from(config.cache.tokens_per_block);
    let typical_seq_len = config.pool.typical_seq_len.unwrap_or(limits.max_seq_len);
    let contiguous_only = config.cache.mode == CacheMode::Contiguous;
    let measure = match (config.pool.capacity, contiguous_only) {
        (Capacity::WorstCase, _) => Measure::WorstCase,
        (Capacity::Tokens(tokens), true) => {
            let slots = tokens / u64::from(limits.max_seq_len);
            if slots == 0 {
                return Err(PlanError::CapacityTooSmall {
                    given: tokens,
                    unit: "tokens",
                    needed: u64::from(limits.max_seq_len),
                    what: "one contiguous slot of limits.max_seq_len tokens",
                    knobs: "limits.max_seq_len, or use cache.mode = \"paged\"",
                });
            }
            Measure::Slots(clamp(slots).min(limits.max_seqs))
        }
        (Capacity::Tokens(tokens), false) => {
            let blocks = tokens.div_ceil(tokens_per_block);
            Measure::Shared { blocks, typical_seq_len }
        }
        (Capacity::Blocks(_), true) => {
            return Err(PlanError::Contradiction {
                key: "pool.capacity".to_owned(),
                problem: "it counts blocks, and every layer is contiguous".to_owned(),
                help: "give \"tokens:N\" or \"budget:SIZE\", or use cache.mode = \"paged\""
                    .to_owned(),
            });
        }
        (Capacity::Blocks(blocks), false) => Measure::Each(blocks),
        (Capacity::BudgetPercent(percent), _) => {
            return Err(PlanError::Contradiction {
                key: "pool.capacity".to_owned(),
                problem: format!("{percent} % of the free memory is no number of bytes yet"),
                help: "resolve it with what the device has free (device::resolve_budget)"
                    .to_owned(),
            });
        }
        (Capacity::Budget(budget), _) => {
            let measure = |n: u64| {
                if contiguous_only {
                    Measure::Slots(clamp(n))
                } else {
                    Measure::Shared { blocks: n, typical_seq_len }
                }
            };
            fit(budget, contiguous_only, limits, drafts, &measure)?
        }
    };
    place(measure, limits, drafts)
}

/// The largest measure whose pool takes no more than `budget` bytes.
fn fit(
    budget: Bytes,
    contiguous_only: bool,
    limits: &Limits,
    drafts: &[Draft],
    measure: &dyn Fn(u64) -> Measure,
) -> Result<Measure, PlanError> {
    let fits = |n: u64| match place(measure(n), limits, drafts) {
        Ok(sized) => sized.pool_bytes <= budget,
        Err(_) => false,
    };
    if !fits(1) {
        let smallest = place(measure(1), limits, drafts)?.pool_bytes;
        let (what, knobs) = if contiguous_only {
            (
                "one slot of limits.max_seq_len tokens",
                "limits.max_seq_len, or use cache.mode = \"paged\"",
            )
        } else if drafts.iter().any(|draft| draft.kind == GroupKind::Contiguous) {
            (
                "all contiguous slots and one block",
                "limits.max_seqs, limits.max_seq_len or cache.hybrid.contiguous_layers",
            )
        } else {
            ("one block", "cache.tokens_per_block")
        };
        return Err(PlanError::BudgetTooSmall { what, needed: smallest, available: budget, knobs });
    }
    // `fits` only turns from true to false as n grows: bisect.
    let mut low = 1;
    let mut high = if contiguous_only { u64::from(limits.max_seqs) } else { MAX_UNITS };
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    Ok(measure(low))
}

/// The most units that a 32-bit index, less the one that means "none", can tell apart.
const MAX_UNITS: u64 = NO_BLOCK as u64;

/// The number as u32, or the largest u32: for counts that are compared with a limit next.
fn clamp(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// Gives every group its units and its place in the pool.
fn place(measure: Measure, limits: &Limits, drafts: &[Draft]) -> Result<Sized, PlanError> {
    let seq_slots = match measure {
        Measure::Slots(slots) => slots,
        Measure::WorstCase | Measure::Each(_) | Measure::Shared { .. } => limits.max_seqs,
    };
    let mut groups: Vec<LayerGroup> = Vec::with_capacity(drafts.len());
    let mut end = Bytes::ZERO;
    let mut group_padding = Bytes::ZERO;
    for draft in drafts {
        let base = end.align_up(GROUP_ALIGN)?;
        group_padding = group_padding.try_add(Bytes(base.get() - end.get()))?;
        let units = units_of(draft, measure, limits, seq_slots)?;
        let layout = GroupLayout::new(draft.shape, base.get(), units)?;
        end = base.try_add(Bytes(layout.bytes()))?;
        groups.push(LayerGroup {
            kind: draft.kind,
            window: draft.window,
            layers: draft.layers.clone(),
            layout,
            bytes_per_token: draft.bytes_per_token,
            max_blocks_per_seq: draft.max_blocks_per_seq,
        });
    }
    Ok(Sized { groups, seq_slots, pool_bytes: end, group_padding })
}

/// The units of one group.
fn units_of(
    draft: &Draft,
    measure: Measure,
    limits: &Limits,
    seq_slots: u32,
) -> Result<u32, PlanError> {
    if draft.kind == GroupKind::Contiguous {
        return Ok(seq_slots);
    }
    let worst = u64::from(draft.blocks_per_full_seq)
        .checked_mul(u64::from(limits.max_seqs))
        .ok_or(Overflow {
            what: "blocks",
            left: u64::from(draft.blocks_per_full_seq),
            op: '×',
            right: u64::from(limits.max_seqs),
        })?;
    let units = match measure {
        Measure::WorstCase | Measure::Slots(_) => worst,
        Measure::Each(blocks) if draft.window.is_none() => blocks,
        // Windowed layers can never use more than their worst case, but to keep prefixes.
        Measure::Each(blocks) if draft.keeps_prefixes => blocks,
        Measure::Each(blocks) => blocks.min(worst),
        Measure::Shared { blocks, typical_seq_len } => {
            let units = shared_units(draft, blocks, typical_seq_len, limits);
            if draft.keeps_prefixes { units } else { units.min(worst) }
        }
    };
    match u32::try_from(units) {
        Ok(units) if u64::from(units) <= MAX_UNITS => Ok(units),
        _ => Err(PlanError::TooMany {
            what: "blocks of a layer group",
            wanted: units,
            limit: MAX_UNITS,
            knob: "raise cache.tokens_per_block, or lower pool.capacity",
        }),
    }
}

/// The blocks of one group beside `blocks` blocks of full attention.
///
/// A sequence of the typical length holds f blocks of full attention and w of this group, so
/// `blocks` of the former go with ⌈blocks · w / f⌉ of the latter. One sequence that fills all of
/// the former must fit too. More than one for each of the former is never used.
fn shared_units(draft: &Draft, blocks: u64, typical_seq_len: u32, limits: &Limits) -> u64 {
    if draft.window.is_none() {
        return blocks;
    }
    let per_seq = |len| u64::from(draft.blocks_for(len, limits));
    let full = u64::from(typical_seq_len.div_ceil(draft.shape.unit_tokens));
    let beside = u128::from(blocks) * u128::from(per_seq(typical_seq_len));
    let beside = u64::try_from(beside.div_ceil(u128::from(full))).unwrap_or(u64::MAX);
    let alone = blocks.min(per_seq(limits.max_seq_len));
    beside.max(alone).min(blocks)
}
