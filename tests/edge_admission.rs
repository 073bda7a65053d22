//! Edge cases 12–16, 19, 20: admission and sizing.

use kvpool::cache::{BeginOptions, Cache};
use kvpool::config::{Admission, CacheMode, Capacity, DeviceConfig};
use kvpool::error::{CacheError, PlanError};
use kvpool::plan::{Addressing, GroupKind};
use kvpool::units::{Bytes, GroupIdx, grouped};

use crate::common::{MODES, Rng, Spec, append_step, assert_refused, begin, begin_with, empty_step};

#[test]
fn edge_12_longer_than_the_pool_is_refused_at_once() {
    for admission in [Admission::Guaranteed, Admission::MaxUtilization] {
        let spec = Spec { capacity: Capacity::Blocks(4), admission, ..Spec::default() };
        let mut cache = spec.open();
        // 33 tokens are within max_seq_len and one block more than the pool has.
        let error = assert_refused(&mut cache, |cache| begin_with(cache, 33, Some(33)));
        let wanted = CacheError::NeverFits { group: GroupIdx(0), wanted: 5, total: 4 };
        assert_eq!(error, wanted, "empty pool");
        let _holder = begin_with(&mut cache, 0, Some(32)).expect("the whole pool");
        let error = assert_refused(&mut cache, |cache| begin_with(cache, 33, Some(33)));
        assert_eq!(error, wanted, "full pool: still never, not later");
    }
}

/// A watermark that is the whole of a group would let no sequence begin beside another.
#[test]
fn edge_12_a_watermark_leaves_room_beside_it() {
    // Three groups, of which that with the window of 5 has the fewest blocks.
    let spec = |watermark_blocks| Spec {
        windows: vec![0, 5, 33],
        max_seqs: 2,
        admission: Admission::MaxUtilization,
        watermark_blocks,
        ..Spec::default()
    };
    let plan = spec(0).plan();
    let units: Vec<u32> = plan.groups.iter().map(|group| group.layout.units).collect();
    let (most, all) = (units[1] - 1, units[1]);
    assert!(all < units[0] && all < units[2], "{units:?}");
    assert!(!plan.explain().contains("watermark"));
    let plan = spec(most).plan();
    let shown = format!("watermark {most} blocks of each paged group left free");
    assert!(plan.explain().contains(&shown), "{}", plan.explain());
    for watermark in [all, all + 1, u32::MAX] {
        let error = spec(watermark).try_plan().expect_err("refused").to_string();
        let start = format!(
            "cache.watermark_blocks: is {}, and layer group 1 has {all} blocks",
            grouped(watermark.into())
        );
        assert!(error.starts_with(&start), "{error}");
        assert!(error.ends_with(&format!("lower it to {most} at most, or raise pool.capacity")));
    }
}

/// The setting that a step too long for one sequence names is the one that bounds it.
#[test]
fn edge_12_a_step_that_is_too_long_names_what_bounds_it() {
    let base = Spec { max_seq_len: 256, ..Spec::default() };
    for (spec, limit, name) in [
        (Spec { max_batch_tokens: 40, ..base.clone() }, 40, "limits.max_batch_tokens"),
        (
            Spec { windows: vec![0, 24], ..base.clone() },
            24,
            "limits.max_step_tokens (left out, it is the smallest attention window)",
        ),
        (
            Spec { max_step_tokens: Some(10), ..base.clone() },
            10,
            "limits.max_step_tokens (tokens of one sequence)",
        ),
        (Spec { max_seq_len: 32, ..base }, 32, "limits.max_seq_len"),
    ] {
        let mut cache = spec.open();
        let sequence = begin(&mut cache, 0);
        let wanted = u64::from(limit) + 1;
        let batch = [(sequence, limit + 1)];
        let error = assert_refused(&mut cache, |cache| cache.reserve(&batch).map(|_| ()));
        assert_eq!(error, CacheError::StepTooLarge { wanted, limit, knob: name }, "{error}");
    }
}

/// The plans that edge 13 runs: every mode, with windows, sinks, rewinds and tight capacities.
fn sizing_specs() -> Vec<Spec> {
    let mut specs = Vec::new();
    for mode in MODES {
        for windows in [vec![0, 0], vec![5, 0], vec![3, 17]] {
            for capacity in
                [Capacity::WorstCase, Capacity::Tokens(130), Capacity::Budget(Bytes(40_000))]
            {
                for (sink_tokens, max_rewind_tokens) in [(0, 0), (9, 4)] {
                    let windowed = windows.iter().any(|w| *w > 0);
                    let sink_tokens = if windowed { sink_tokens } else { 0 };
                    specs.push(Spec {
                        windows: windows.clone(),
                        capacity,
                        sink_tokens,
                        max_rewind_tokens,
                        ..Spec::mode(mode)
                    });
                }
            }
        }
    }
    specs
}

#[test]
fn edge_13_what_the_plan_says_fits_runs_to_full_length() {
    let mut ran = 0;
    for spec in sizing_specs() {
        let Ok(plan) = spec.try_plan() else { continue };
        let mut cache = spec.open();
        let fits = plan.full_length_seqs;
        let seqs: Vec<_> = (0..fits).map(|_| begin(&mut cache, 0)).collect();
        let error = assert_refused(&mut cache, |cache| begin_with(cache, 0, None));
        assert!(
            matches!(
                error,
                CacheError::NotAdmitted { .. }
                    | CacheError::NoSeqSlot { .. }
                    | CacheError::NeverFits { .. }
            ),
            "{spec:?}: {error}"
        );
        // Full speed in uneven steps; every one succeeds.
        let mut rng = Rng(1);
        while let Some(seq) =
            seqs.iter().find(|s| cache.seq_len(**s).expect("alive") < plan.limits.max_seq_len)
        {
            let left = plan.limits.max_seq_len - cache.seq_len(*seq).expect("alive");
            let tokens = 1 + rng.below(plan.limits.max_step_tokens.min(left).into()) as u32;
            empty_step(&mut cache, &[(*seq, tokens)]).expect("promised");
            cache.check_invariants().expect("invariants");
        }
        ran += fits;
    }
    assert!(ran > 60, "only {ran} sequences ran");
}

#[test]
fn edge_14_two_holders_of_half_the_pool_both_finish() {
    let spec = Spec { capacity: Capacity::Blocks(8), max_seq_len: 32, ..Spec::default() };
    let mut cache = spec.open();
    let options = |max_len, lookahead_tokens| BeginOptions {
        max_len: Some(max_len),
        lookahead_tokens,
        ..BeginOptions::default()
    };
    // 28 tokens and 4 of look-ahead: four blocks each.
    let a = cache.begin(&[], options(28, 4)).expect("half").sequence;
    let b = cache.begin(&[], options(28, 4)).expect("half").sequence;
    assert!(cache.check_admission(&[], &options(1, 0)).is_err());
    for step in 0..28 {
        empty_step(&mut cache, &[(a, 1), (b, 1)]).expect("promised");
        // Four draft tokens, all rejected: the blocks go back to the sequence's promise.
        let held = cache.stats().held_bytes.0 + cache.stats().promised_bytes.0;
        empty_step(&mut cache, &[(a, 4)]).expect("look-ahead was promised");
        cache.truncate(a, step + 1).expect("rejected");
        assert_eq!(cache.stats().held_bytes.0 + cache.stats().promised_bytes.0, held);
        assert!(
            cache.check_admission(&[], &options(1, 0)).is_err(),
            "promised blocks are not free"
        );
    }
}

#[test]
fn edge_15_the_estimate_equals_what_happens_around_a_block_boundary() {
    for windows in [vec![0], vec![6]] {
        for len in [1, 7, 8, 9, 15, 16, 17, 24] {
            let spec =
                Spec { windows: windows.clone(), max_step_tokens: Some(24), ..Spec::default() };
            let mut cache = spec.open();
            let estimate = cache.plan().blocks_for(GroupIdx(0), len);
            let seq = begin_with(&mut cache, len, Some(len)).expect("fits");
            let unit = cache.plan().groups[0].layout.unit_bytes;
            assert_eq!(cache.stats().promised_bytes.0, u64::from(estimate) * unit);
            empty_step(&mut cache, &[(seq, len)]).expect("promised");
            // In one step, all of them at once, whatever the window.
            assert_eq!(estimate, len.div_ceil(8));
            let stats = cache.stats();
            assert_eq!(stats.peak_held_bytes.0, u64::from(estimate) * unit);
            // Then what the next token does not see is given back: to the promise, since a rewind
            // to nothing may need it again.
            let seen_from = if windows == [0] { 0 } else { (len + 1).saturating_sub(6) };
            let held = u64::from(len.div_ceil(8) - seen_from / 8) * unit;
            assert_eq!(stats.held_bytes.0, held, "{windows:?} {len}");
            let estimated = u64::from(estimate) * unit;
            assert_eq!(stats.held_bytes.0 + stats.promised_bytes.0, estimated);
        }
    }
}

#[test]
fn edge_16_held_plus_promised_is_constant() {
    for mode in [CacheMode::Paged, CacheMode::Hybrid] {
        let spec = Spec {
            windows: vec![6, 0, 13],
            sink_tokens: 3,
            max_rewind_tokens: 5,
            max_seqs: 6,
            max_seq_len: 200,
            ..Spec::mode(mode)
        };
        let mut cache = spec.open();
        let mut rng = Rng(3);
        let seq = begin_with(&mut cache, 0, Some(150)).expect("fits");
        let total = |cache: &Cache| {
            let stats = cache.stats();
            stats.held_bytes.0 + stats.promised_bytes.0
        };
        let admitted = total(&cache);
        let mut forks = Vec::new();
        for _ in 0..400 {
            let len = cache.seq_len(seq).expect("alive");
            match rng.below(4) {
                0 => {
                    let back = rng.below(6) as u32;
                    let _ = cache.truncate(seq, len.saturating_sub(back));
                }
                1 if forks.is_empty() => {
                    // A fork is promised what it does not share.
                    forks.push(cache.fork(seq).expect("fits"));
                }
                1 => cache.release(forks.remove(0)).expect("alive"),
                _ => {
                    let tokens = 1 + rng.below(6) as u32;
                    if len + tokens <= 150 {
                        empty_step(&mut cache, &[(seq, tokens)]).expect("promised");
                    } else {
                        cache.truncate(seq, 0).expect("to nothing");
                    }
                }
            }
            // Alone it is the same number at every moment. A fork adds what it does not share,
            // and a rewind into what is shared can only add to that.
            if forks.is_empty() {
                assert_eq!(total(&cache), admitted);
            } else {
                assert!((admitted..=2 * admitted).contains(&total(&cache)));
            }
            cache.check_invariants().expect("invariants");
        }
    }
}

/// The bound for windowed groups is reached: some alignment of steps really holds that many.
#[test]
fn edge_16_the_windowed_bound_is_tight() {
    for (window, sinks, rewind, step) in [(6, 0, 0, 1), (6, 0, 0, 5), (9, 3, 2, 4), (17, 8, 0, 8)] {
        let spec = Spec {
            windows: vec![window],
            sink_tokens: sinks,
            max_rewind_tokens: rewind,
            max_step_tokens: Some(step),
            max_seq_len: 400,
            max_batch_tokens: 16,
            ..Spec::default()
        };
        let mut cache = spec.open();
        let seq = begin(&mut cache, 0);
        let unit = cache.plan().groups[0].layout.unit_bytes;
        let bound = cache.plan().blocks_for(GroupIdx(0), 400);
        let mut rng = Rng(1);
        let mut most = 0;
        while cache.seq_len(seq).expect("alive") + step <= 400 {
            let tokens = if rng.below(3) == 0 { 1 } else { step };
            let open = cache.reserve(&[(seq, tokens)]).expect("promised");
            drop(open);
            empty_step(&mut cache, &[(seq, tokens)]).expect("promised");
            most = most.max(cache.stats().peak_held_bytes.0 / unit);
        }
        assert_eq!(most, u64::from(bound), "window {window}, sinks {sinks}, step {step}");
    }
}

#[test]
fn edge_19_budgets_at_the_edge() {
    let paged = Spec::default();
    let block = paged.plan().groups[0].layout.unit_bytes;
    let with = |capacity| Spec { capacity, ..paged.clone() };
    // Exactly enough for n blocks, one byte short of it, one byte more.
    for n in [1, 2, 7] {
        let blocks = |bytes| {
            let plan = with(Capacity::Budget(Bytes(bytes))).try_plan();
            plan.map(|plan| (plan.groups[0].layout.units, plan.pool_bytes.0))
        };
        assert_eq!(blocks(n * block), Ok((n as u32, n * block)));
        assert_eq!(blocks(n * block + 1), Ok((n as u32, n * block)));
        match blocks(n * block - 1) {
            Ok((units, _)) => assert_eq!(u64::from(units), n - 1),
            Err(error) => {
                assert_eq!(n, 1);
                let text = error.to_string();
                assert!(text.contains("1 bytes short") && text.contains("pool.capacity"), "{text}");
            }
        }
    }
    let error = with(Capacity::Budget(Bytes(0))).try_plan().expect_err("nothing fits");
    assert!(matches!(error, PlanError::BudgetTooSmall { .. }), "{error}");

    // Contiguous: in slots.
    let spec = |capacity| Spec { capacity, ..Spec::mode(CacheMode::Contiguous) };
    let slot = spec(Capacity::WorstCase).plan().groups[0].layout.unit_bytes;
    let slots = |capacity| spec(capacity).try_plan().map(|plan| plan.seq_slots);
    assert_eq!(slots(Capacity::Budget(Bytes(3 * slot))), Ok(3));
    assert_eq!(slots(Capacity::Budget(Bytes(3 * slot - 1))), Ok(2));
    assert_eq!(slots(Capacity::Budget(Bytes(99 * slot))), Ok(4), "max_seqs");
    assert!(slots(Capacity::Budget(Bytes(slot - 1))).is_err());
    assert_eq!(slots(Capacity::Tokens(128)), Ok(2));
    let error = slots(Capacity::Tokens(63)).expect_err("less than one slot");
    assert!(error.to_string().contains("64"), "{error}");
    assert!(matches!(slots(Capacity::Blocks(8)), Err(PlanError::Contradiction { .. })));

    // Products beyond 64 bits, and beyond 32-bit ids.
    let huge = Spec {
        max_seqs: 1 << 20,
        max_seq_len: 1 << 24,
        max_batch_tokens: 1 << 20,
        num_q_heads: 1024,
        num_kv_heads: 1024,
        head_dim: 1024,
        windows: vec![0; 4096],
        ..Spec::mode(CacheMode::Contiguous)
    };
    assert!(matches!(huge.try_plan(), Err(PlanError::Overflow(_))), "{:?}", huge.try_plan());
    let many = Spec { max_seqs: 1 << 20, max_seq_len: 1 << 24, ..Spec::default() };
    assert!(matches!(many.try_plan(), Err(PlanError::TooMany { .. })));
    let error = with(Capacity::Blocks(1 << 32)).try_plan().expect_err("beyond 32-bit ids");
    assert!(error.to_string().contains("4294967296"), "{error}");

    // More than the machine has: refused by the plan, before anything is allocated.
    let plan = Spec { max_seqs: 1 << 16, max_seq_len: 1 << 16, ..Spec::default() }.plan();
    let needed = plan.pool_bytes.try_add(plan.host_bytes).expect("fits 64 bits");
    assert_eq!(plan.check_memory(Bytes(0), needed, "a test"), Ok(()));
    let error = plan.check_memory(Bytes(1), needed, "a test").expect_err("one byte short");
    let text = error.to_string();
    assert!(text.contains(": 1 bytes short") && text.contains("limits.max_seqs"), "{text}");
}

/// The same at open: what the machine has, or `device.memory_limit`, to the byte.
#[test]
fn edge_19_memory_is_checked_before_anything_is_allocated() {
    let spec = Spec::default();
    let plan = spec.plan();
    // Pool, bookkeeping, and the workspace of the one thread.
    let workspace = plan.cpu_workspace_bytes(1).expect("fits 64 bits");
    let needed = Bytes(plan.pool_bytes.0 + plan.host_bytes.0 + workspace.0);
    let open = |limit| {
        let device = DeviceConfig { memory_limit: Some(limit), ..spec.config().device };
        Cache::open_on_cpu(spec.plan(), &device, None)
    };
    assert!(open(needed).is_ok());
    let error = open(Bytes(needed.0 - 1)).expect_err("one byte short");
    assert!(error.to_string().contains("device.memory_limit"), "{error}");
    // 128 TiB: no machine that runs this test has them, and asking must not hurt it.
    let huge = Spec {
        max_seqs: 1 << 16,
        max_seq_len: 1 << 20,
        head_dim: 128,
        tokens_per_block: 128,
        ..spec
    };
    let error = Cache::open_on_cpu(huge.plan(), &huge.config().device, None).expect_err("too much");
    let text = error.to_string();
    assert!(text.contains("bytes short") && text.contains("limits.max_seqs"), "{text}");
}

#[test]
fn edge_20_windows_of_every_size() {
    for window in [1, 2, 7, 8, 9, 31, 63, 64, 65, 1000] {
        for mode in MODES {
            let spec = Spec { windows: vec![window, 0], ..Spec::mode(mode) };
            let mut cache = spec.open();
            let plan = cache.plan().clone();
            let group = plan.group_of(kvpool::units::LayerIdx(0));
            if window >= 64 {
                assert_eq!(group.window, None, "no sequence outgrows it");
            } else {
                assert_eq!(group.window, Some(window));
                assert!(plan.limits.max_step_tokens <= window);
                if group.kind == GroupKind::Contiguous && window * 2 < 64 {
                    assert_eq!(group.layout.addressing, Addressing::Ring);
                    assert_eq!(group.layout.unit_tokens, 2 * window);
                }
            }
            let seq = begin(&mut cache, 0);
            for tag in 0..64 {
                append_step(&mut cache, &[(seq, 1)], &[tag]).expect("promised");
                cache.check_invariants().expect("invariants");
            }
        }
    }
    // A step longer than the window of a contiguous layer is a contradiction; of a paged one not.
    let spec = |mode| Spec { windows: vec![4, 0], max_step_tokens: Some(5), ..Spec::mode(mode) };
    let error = spec(CacheMode::Contiguous).try_plan().expect_err("edge 64");
    let text = error.to_string();
    assert!(text.contains("limits.max_step_tokens") && text.contains("window of 4"), "{text}");
    assert!(spec(CacheMode::Paged).try_plan().is_ok());
}

#[test]
fn max_utilization_admits_more_and_exhausts_in_the_open() {
    let spec = Spec {
        capacity: Capacity::Blocks(4),
        admission: Admission::MaxUtilization,
        ..Spec::default()
    };
    let mut cache = spec.open();
    let (a, b) = (
        begin_with(&mut cache, 1, Some(32)).expect("one block"),
        begin_with(&mut cache, 1, Some(32)).expect("one block"),
    );
    empty_step(&mut cache, &[(a, 16), (b, 16)]).expect("all four blocks");
    let error = assert_refused(&mut cache, |cache| empty_step(cache, &[(a, 1)]));
    assert_eq!(error, CacheError::PoolExhausted { group: GroupIdx(0), wanted: 1, available: 0 });
    cache.release(b).expect("preempted");
    empty_step(&mut cache, &[(a, 1)]).expect("room again");
}
