//! Addresses against first principles (edge cases 44, 45).
//!
//! The expected offsets come from walking through the memory with a counter, in the order in which
//! DESIGN and `plan/layout.rs` say that things lie; no product of strides appears here.

use kvpool::config::{CacheMode, Capacity, Format, ScaleKind};
use kvpool::plan::{
    Addressing, GroupKind, GroupLayout, Kv, LayerGroup, Plan, SCALE_BYTES, SeqView,
};
use kvpool::units::LayerIdx;

use crate::common::{FORMATS, MODES, Rng, Spec};

/// Every combination of the grid, in every mode and format.
fn grid(mut check: impl FnMut(&Spec, &Plan)) {
    let mut combinations = 0;
    for head_dim in [64, 80, 96, 128, 256] {
        for num_kv_heads in [1, 3, 8, 32] {
            for group in [1, 3, 4, 8] {
                for (format, scale) in FORMATS {
                    for mode in MODES {
                        if scale == ScaleKind::PerGroup32 && head_dim % 32 != 0 {
                            continue;
                        }
                        let spec = Spec {
                            head_dim,
                            num_kv_heads,
                            num_q_heads: num_kv_heads * group,
                            format,
                            scale,
                            windows: vec![9, 0, 9, 0],
                            contiguous_layers: vec![0, 1, 2],
                            max_seqs: 2,
                            max_seq_len: 40,
                            ..Spec::mode(mode)
                        };
                        check(&spec, &spec.plan());
                        combinations += 1;
                    }
                }
            }
        }
    }
    assert_eq!(combinations, (5 * 6 - 1) * 4 * 4 * 3);
}

#[test]
fn edge_44_addresses_are_those_of_a_walk_through_memory() {
    grid(|spec, plan| {
        let mut end = 0;
        for group in &plan.groups {
            assert!(group.layout.base >= end && group.layout.base % 4096 == 0);
            assert!(group.layout.base - end < 4096);
            end = walk(spec, group);
        }
        assert_eq!(end, plan.pool_bytes.0, "the pool ends where the last unit ends");
    });
}

/// Walks through every unit of a group and gives the offset behind the last one.
fn walk(spec: &Spec, group: &LayerGroup) -> u64 {
    let layout = &group.layout;
    let element_bytes: u64 = match spec.format {
        Format::F32 => 4,
        Format::F16 | Format::Bf16 => 2,
        Format::Int8 => 1,
    };
    let scales_per_row: u64 = match (spec.format, spec.scale) {
        (Format::Int8, ScaleKind::PerTokenHead) => 1,
        (Format::Int8, ScaleKind::PerGroup32) => u64::from(spec.head_dim) / 32,
        _ => 0,
    };
    let mut at = layout.base;
    for unit in 0..layout.units {
        let start = at;
        assert_eq!(layout.unit(unit), start);
        assert_eq!(start % 64, 0, "units are aligned");
        for layer in 0..group.layers.len() as u32 {
            for kv in [Kv::K, Kv::V] {
                for head in 0..spec.num_kv_heads {
                    for token in 0..layout.unit_tokens {
                        assert_eq!(layout.row(unit, layer, kv, head, token), at);
                        for _ in 0..spec.head_dim {
                            at += element_bytes;
                        }
                    }
                }
            }
        }
        for layer in 0..group.layers.len() as u32 {
            for kv in [Kv::K, Kv::V] {
                for head in 0..spec.num_kv_heads {
                    for token in 0..layout.unit_tokens {
                        if scales_per_row > 0 {
                            assert_eq!(layout.scales(unit, layer, kv, head, token), at);
                        }
                        for _ in 0..scales_per_row {
                            at += 2;
                        }
                    }
                }
            }
        }
        assert!(layout.unit_padding_bytes < 64);
        at += layout.unit_padding_bytes;
        assert_eq!(at - start, layout.unit_bytes);
    }
    at
}

#[test]
fn edge_44_strides_agree_with_addresses() {
    grid(|_, plan| {
        for group in &plan.groups {
            let layout = &group.layout;
            let row = |layer, kv, head, token| layout.row(1, layer, kv, head, token);
            let zero = row(0, Kv::K, 0, 0);
            assert_eq!(row(0, Kv::K, 0, 1) - zero, layout.row_bytes());
            assert_eq!(row(0, Kv::V, 0, 0) - zero, layout.kv_stride());
            if layout.num_kv_heads > 1 {
                assert_eq!(row(0, Kv::K, 1, 0) - zero, layout.head_stride());
            }
            if layout.num_layers > 1 {
                assert_eq!(row(1, Kv::K, 0, 0) - zero, layout.layer_stride());
            }
        }
    });
}

#[test]
fn edge_44_positions_lead_to_places_in_every_kind_of_group() {
    let spec = Spec {
        windows: vec![0, 9, 0, 9],
        sink_tokens: 3,
        contiguous_layers: vec![0, 1],
        max_seq_len: 200,
        max_step_tokens: Some(6),
        max_rewind_tokens: 2,
        ..Spec::mode(CacheMode::Hybrid)
    };
    let plan = spec.plan();
    let group = |layer| plan.group_of(LayerIdx(layer));
    let table: Vec<u32> = (0..25).map(|at| (at * 7) % 25).collect();
    for (layer, addressing) in [
        (0, Addressing::Slot),
        (1, Addressing::Ring),
        (2, Addressing::Blocks),
        (3, Addressing::Blocks),
    ] {
        let layout = &group(layer).layout;
        assert_eq!(layout.addressing, addressing);
        let view = SeqView { layout, table: &table, slot: 1 };
        for position in 0..200 {
            let expected = match addressing {
                Addressing::Slot => (1, position),
                // Sinks, then a ring of window 9 + rewind 2 + step 6.
                Addressing::Ring if position < 3 => (1, position),
                Addressing::Ring => (1, 3 + (position - 3) % 17),
                Addressing::Blocks => (table[position as usize / 8], position % 8),
            };
            assert_eq!(view.place(position), expected, "{addressing:?} {position}");
            let slot =
                u64::from(expected.0) * u64::from(layout.unit_tokens) + u64::from(expected.1);
            assert_eq!(view.token_slot(position), slot);
            assert_eq!(layout.split_slot(slot), expected);
            // A run ends where the next position is not the next place.
            let run = view.run(position, 200);
            for next in 1..run {
                assert_eq!(view.place(position + next), (expected.0, expected.1 + next));
            }
            if position + run < 200 && addressing != Addressing::Blocks {
                let after = view.place(position + run);
                // The end of the sinks is the one seam where the places happen to touch.
                assert!(after != (expected.0, expected.1 + run) || position < 3);
            }
            assert!(run >= 1 && position + run <= 200);
            assert_eq!(view.run(position, position + 1), 1);
        }
    }
}

#[test]
fn edge_45_offsets_past_four_gibibytes() {
    // 70B geometry on a large card: 80 layers of 8 heads, 300,000 blocks, 0.75 to 3 TiB.
    let spec = Spec {
        windows: vec![0; 80],
        num_q_heads: 64,
        num_kv_heads: 8,
        head_dim: 128,
        tokens_per_block: 16,
        max_seqs: 64,
        max_seq_len: 1 << 17,
        capacity: Capacity::Blocks(300_000),
        ..Spec::default()
    };
    let mut rng = Rng(5);
    for (mode, (format, scale)) in [CacheMode::Paged, CacheMode::Contiguous]
        .into_iter()
        .flat_map(|mode| FORMATS.map(|format| (mode, format)))
    {
        let capacity = if mode == CacheMode::Paged { spec.capacity } else { Capacity::WorstCase };
        let plan = Spec { mode, capacity, format, scale, ..spec.clone() }.plan();
        assert!(plan.pool_bytes.0 > 1 << 39, "{}", plan.pool_bytes);
        let layout = &plan.groups[0].layout;
        let mut beyond = 0;
        for _ in 0..10_000 {
            check_with_128_bits(layout, &mut rng);
            let unit = rng.below(layout.units.into()) as u32;
            beyond += u64::from(layout.unit(unit) > u64::from(u32::MAX));
        }
        assert!(beyond > 9_000, "the walk must reach past 4 GiB");
        let (unit, token) = (layout.units - 1, layout.unit_tokens - 1);
        let last = if layout.scales_per_row == 0 {
            layout.row(unit, 79, Kv::V, 7, token) + layout.row_bytes()
        } else {
            layout.scales(unit, 79, Kv::V, 7, token)
                + u64::from(layout.scales_per_row * SCALE_BYTES)
        };
        let end = last + layout.unit_padding_bytes;
        assert_eq!(end, plan.pool_bytes.0, "the last vector ends at the end of the pool");
        assert_eq!(plan.groups[0].kind == GroupKind::Paged, mode == CacheMode::Paged);
    }
}

/// One random address of a vector, and of its scales, again in 128-bit arithmetic.
fn check_with_128_bits(layout: &GroupLayout, rng: &mut Rng) {
    let pick = |rng: &mut Rng, end: u32| rng.below(end.into()) as u32;
    let unit = pick(rng, layout.units);
    let layer = pick(rng, layout.num_layers);
    let head = pick(rng, layout.num_kv_heads);
    let token = pick(rng, layout.unit_tokens);
    let kv = if rng.below(2) == 0 { Kv::K } else { Kv::V };
    let wide = |n: u32| u128::from(n);
    let rows_before = ((wide(layer) * 2 + kv as u128) * wide(layout.num_kv_heads) + wide(head))
        * wide(layout.unit_tokens)
        + wide(token);
    let start = u128::from(layout.base) + wide(unit) * u128::from(layout.unit_bytes);
    let row_bytes = wide(layout.head_dim) * wide(layout.element_bytes);
    let row = layout.row(unit, layer, kv, head, token);
    assert_eq!(u128::from(row), start + rows_before * row_bytes);
    if layout.scales_per_row > 0 {
        let rows =
            wide(layout.num_layers) * 2 * wide(layout.num_kv_heads) * wide(layout.unit_tokens);
        let scales_before = rows_before * wide(layout.scales_per_row) * wide(SCALE_BYTES);
        let scales = layout.scales(unit, layer, kv, head, token);
        assert_eq!(u128::from(scales), start + rows * row_bytes + scales_before);
    }
}
