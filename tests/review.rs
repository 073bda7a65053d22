//! What a second pair of eyes found: each of these was once wrong.

use kvpool::cache::{AttendOptions, BeginOptions, Cache};
use kvpool::config::{CacheMode, DeviceConfig, Format, ScaleKind};
use kvpool::device::cpu::CpuDevice;
use kvpool::device::{TensorMut, TensorRef};
use kvpool::error::{CacheError, DeviceError, OpenError, PlanError};
use kvpool::plan::{GroupKind, Kv, LayerGroup, Plan};
use kvpool::units::{Bytes, GroupIdx, LayerIdx};

use crate::common::{MODES, Spec, append_step, assert_refused, begin, element, empty_step};

#[test]
fn a_device_of_another_plan_is_refused() {
    // The same bytes, other sequences.
    let spec = Spec { max_seqs: 4, max_seq_len: 64, ..Spec::mode(CacheMode::Contiguous) };
    let other = Spec { max_seqs: 2, max_seq_len: 128, ..spec.clone() };
    let (plan, other_plan) = (spec.plan(), other.plan());
    assert_eq!(plan.pool_bytes, other_plan.pool_bytes);
    let device = CpuDevice::open(&plan, &DeviceConfig::default(), None).expect("opens");
    let refused = Cache::open(other_plan, Box::new(device)).expect_err("another plan");
    assert!(matches!(refused, OpenError::Plan(PlanError::Contradiction { .. })), "{refused}");
}

#[test]
fn a_plan_that_was_tampered_with_writes_nothing() {
    let tamper: [fn(&mut Plan); 4] = [
        |plan| plan.groups[0].layout.scales_at = 0,
        |plan| plan.groups[0].layout.unit_bytes = 64,
        |plan| plan.groups[0].layout.base = plan.pool_bytes.0 - 64,
        |plan| plan.groups[0].layout.unit_tokens = 12,
    ];
    for change in tamper {
        let mut plan = Spec { format: Format::Int8, ..Spec::default() }.plan();
        change(&mut plan);
        let mut cache = Cache::open_on_cpu(plan, &DeviceConfig::default(), None).expect("opens");
        let seq = begin(&mut cache, 0);
        let error = append_step(&mut cache, &[(seq, 1)], &[1]).expect_err("refused");
        assert_eq!(error, CacheError::Device(DeviceError::BadLayout));
    }
}

#[test]
fn settings_made_by_hand_are_checked_like_those_of_a_file() {
    let refused: [(&str, Spec); 6] = [
        ("model.head_dim", Spec { head_dim: 12, ..Spec::default() }),
        ("cache.tokens_per_block", Spec { tokens_per_block: 0, ..Spec::default() }),
        ("cache.tokens_per_block", Spec { tokens_per_block: 12, ..Spec::default() }),
        ("limits.max_seq_len", Spec { max_seq_len: 0, ..Spec::default() }),
        ("model.num_q_heads", Spec { num_q_heads: 3, num_kv_heads: 2, ..Spec::default() }),
        (
            "cache.int8.scale",
            Spec {
                format: Format::Int8,
                scale: ScaleKind::PerGroup32,
                head_dim: 40,
                ..Spec::default()
            },
        ),
    ];
    for (key, spec) in refused {
        let error = spec.try_plan().expect_err("refused").to_string();
        assert!(error.starts_with(key), "{error}");
    }
}

#[test]
fn a_leaked_step_is_undone_by_the_next_verb() {
    let mut cache = Spec::default().open();
    let seq = begin(&mut cache, 0);
    append_step(&mut cache, &[(seq, 3)], &[1, 2, 3]).expect("fits");
    let before = cache.state_digest();
    let verbs: [fn(&mut Cache, kvpool::cache::SeqHandle); 3] = [
        |cache, seq| assert!(cache.truncate(seq, 4).is_err()),
        |cache, seq| cache.reserve(&[(seq, 1)]).expect("fits").cancel(),
        |cache, _| assert!(cache.reset().is_err()),
    ];
    for verb in verbs {
        std::mem::forget(cache.reserve(&[(seq, 20)]).expect("fits"));
        verb(&mut cache, seq);
        cache.check_invariants().expect("invariants");
        assert_eq!(cache.state_digest(), before);
    }
    std::mem::forget(cache.reserve(&[(seq, 20)]).expect("fits"));
    cache.release(seq).expect("alive");
    assert_eq!(cache.stats().held_bytes, Bytes(0));
}

#[test]
fn look_ahead_that_cannot_be_rejected_is_refused() {
    let spec = Spec { windows: vec![6, 0], max_rewind_tokens: 4, ..Spec::default() };
    for mode in MODES {
        let mut cache = Spec { mode, ..spec.clone() }.open();
        let options = |lookahead_tokens| BeginOptions {
            max_len: Some(40),
            lookahead_tokens,
            ..BeginOptions::default()
        };
        let error = assert_refused(&mut cache, |cache| cache.begin(&[], options(5)).map(|_| ()));
        assert_eq!(error, CacheError::LookaheadBeyondRewind { wanted: 5, limit: 4 });
        let begun = cache.begin(&[], options(4)).expect("can be rejected");
        assert_eq!(begun.limit, 44);
        for len in 0..40 {
            empty_step(&mut cache, &[(begun.sequence, 1)]).expect("fits");
            for _ in 0..4 {
                empty_step(&mut cache, &[(begun.sequence, 1)]).expect("drafts");
            }
            cache.truncate(begun.sequence, len + 1).expect("rejected");
        }
    }
}

#[test]
fn a_cancelled_step_counts_nothing() {
    let mut cache = Spec { format: Format::Int8, ..Spec::default() }.open();
    let seq = begin(&mut cache, 0);
    let before = cache.state_digest();
    let nan = [f32::NAN; 8];
    let mut step = cache.reserve(&[(seq, 1)]).expect("fits");
    step.append(LayerIdx(0), TensorRef::F32(&nan), TensorRef::F32(&nan)).expect("append");
    step.cancel();
    assert_eq!(cache.state_digest(), before);
    assert_eq!((cache.stats().nonfinite, cache.stats().steps_cancelled), (0, 1));
}

#[test]
fn csr_and_token_slots_name_every_block_and_place() {
    let spec = Spec {
        windows: vec![0, 11],
        sink_tokens: 9,
        max_seq_len: 100,
        max_step_tokens: Some(5),
        ..Spec::default()
    };
    let mut cache = spec.open();
    let (a, b) = (begin(&mut cache, 0), begin(&mut cache, 0));
    for _ in 0..12 {
        empty_step(&mut cache, &[(a, 5), (b, 2)]).expect("fits");
    }
    let mut step = cache.reserve(&[(b, 1), (a, 5)]).expect("fits");
    assert_eq!(step.csr(GroupIdx(0)), Err(CacheError::CsrNotBuilt));
    step.build_csr();
    assert!(matches!(step.csr(GroupIdx(2)), Err(CacheError::NoSuchGroup { .. })));
    assert_eq!(step.seq_lens(), [25, 65]);
    for group in [GroupIdx(0), GroupIdx(1)] {
        let (csr, plan) = (step.csr(group).expect("built"), step.plan());
        let (table, row) = step.block_table(group).expect("paged");
        let slots = step.token_slots(group).expect("a group");
        assert_eq!(slots.len(), 6);
        let mut token = 0;
        for (at, (seq, len)) in step.seqs().iter().zip(step.seq_lens()).enumerate() {
            let row = &table[(seq.slot * row) as usize..((seq.slot + 1) * row) as usize];
            let held: Vec<u32> =
                row.iter().copied().filter(|block| *block != kvpool::plan::NO_BLOCK).collect();
            let range = csr.kv_indptr[at] as usize..csr.kv_indptr[at + 1] as usize;
            assert_eq!(csr.kv_indices[range], held, "all blocks that are held, in order");
            assert_eq!(csr.kv_last_block_len[at], (len - 1) % 8 + 1);
            let sinks = if group == GroupIdx(0) { 0 } else { 2 };
            let first = row.iter().skip(sinks).position(|b| *b != kvpool::plan::NO_BLOCK);
            let first = (sinks + first.expect("a block")) as u32 * 8;
            assert_eq!(csr.kv_first_position[at], first);
            for position in seq.first_position..seq.first_position + seq.rows {
                let expected = row[position as usize / 8] * 8 + position % 8;
                assert_eq!(slots[token], u64::from(expected));
                assert_eq!(step.positions()[token], position);
                token += 1;
            }
        }
        assert_eq!(plan.group_of(LayerIdx(group.0)).layout.unit_tokens, 8);
    }
}

/// An engine's own kernels: K and V written through the pool's pointer at the places that a layer
/// view gives are what `export` and `attend` find.
#[test]
fn layer_views_lead_to_the_bytes() {
    for mode in MODES {
        let spec = Spec { mode, num_kv_heads: 2, num_q_heads: 2, ..Spec::default() };
        let mut cache = spec.open();
        let seq = begin(&mut cache, 0);
        let tags: Vec<u64> = (0..13).collect();
        append_step(&mut cache, &[(seq, 13)], &tags).expect("fits");
        let step = cache.reserve(&[(seq, 1)]).expect("fits");
        let view = step.plan().layer_view(LayerIdx(1)).expect("a layer");
        let slot = step.token_slots(view.group).expect("a group")[0];
        assert!(step.plan().layer_view(LayerIdx(2)).is_none());
        step.cancel();
        // The place of the last token is one before that of the next one, in every mode here.
        let (unit, token) =
            (slot / u64::from(view.unit_tokens), slot % u64::from(view.unit_tokens));
        for (base, what) in [(view.k, 0), (view.v, 1)] {
            for head in 0..2 {
                let at = base
                    + unit * view.unit_stride
                    + u64::from(head) * view.head_stride
                    + (token - 1) * view.token_stride;
                let mut bytes = [0; 32];
                cache.read_bytes(at, &mut bytes).expect("in the pool");
                for (d, bytes) in (0..).zip(bytes.as_chunks::<4>().0) {
                    assert_eq!(f32::from_le_bytes(*bytes), element(12, 12, 1, what, head, d));
                }
            }
        }
        assert!(!cache.pool_ptr().is_null());
    }
}

#[test]
fn statistics_count_what_happened() {
    for mode in MODES {
        let mut cache = Spec { windows: vec![0, 0, 0], ..Spec::mode(mode) }.open();
        let plan = cache.plan().clone();
        let a = begin(&mut cache, 0);
        empty_step(&mut cache, &[(a, 10)]).expect("fits");
        let per_token = plan.bytes_per_token.0;
        assert_eq!(cache.stats().used_bytes.0, 10 * per_token);
        let held: u64 = plan
            .groups
            .iter()
            .map(|group| {
                group.layout.unit_bytes * u64::from(10_u32.div_ceil(group.layout.unit_tokens))
            })
            .sum();
        assert_eq!(cache.stats().held_bytes.0, held);
        let b = cache.fork(a).expect("fits");
        // Contiguous layers are copied at once, blocks when one of the two writes.
        let is_contiguous = |group: &&LayerGroup| group.kind == GroupKind::Contiguous;
        let contiguous = || plan.groups.iter().filter(is_contiguous);
        let slots: u64 = contiguous().map(|group| group.layout.unit_bytes).sum();
        assert_eq!(cache.stats().held_bytes.0, held + slots);
        let copied: u64 = contiguous().map(|group| 10 * group.bytes_per_token.0).sum();
        assert_eq!(cache.stats().copied_bytes.0, copied);
        let peak_used = cache.stats().peak_used_bytes.0;
        assert!(peak_used >= 10 * per_token && peak_used <= 20 * per_token);
        cache.release(b).expect("alive");
        cache.truncate(a, 3).expect("any length");
        cache.reserve(&[(a, 1)]).expect("fits").cancel();
        let stats = cache.stats();
        assert_eq!(stats.used_bytes.0, 3 * per_token);
        assert_eq!(stats.peak_used_bytes.0, peak_used);
        assert_eq!(stats.peak_held_bytes.0, held + slots);
        assert_eq!((stats.seqs, stats.seqs_begun), (1, 2));
        assert_eq!((stats.steps_committed, stats.steps_cancelled), (1, 1));
        assert_eq!(stats.tokens_appended, 10);
        let live: u64 = (0..)
            .map_while(|g| cache.group_stats(GroupIdx(g)))
            .map(|group| group.live_tokens)
            .sum();
        assert_eq!(live, 3 * plan.groups.len() as u64);
    }
}

#[test]
fn foreign_block_handles_are_refused() {
    let (mut cache, mut other) = (Spec::default().open(), Spec::default().open());
    let (seq, foreign) = (begin(&mut cache, 0), begin(&mut other, 0));
    empty_step(&mut cache, &[(seq, 1)]).expect("fits");
    empty_step(&mut other, &[(foreign, 1)]).expect("fits");
    let block = other.block_of(foreign, GroupIdx(0), 0).expect("held");
    assert_eq!(cache.block_refs(block), Err(CacheError::ForeignHandle));
    assert_eq!(other.block_refs(block), Ok(1));
    let error = cache.block_of(seq, GroupIdx(0), 8).expect_err("not held");
    assert!(matches!(error, CacheError::NotHeld { from: 8, to: 9, len: 1, .. }));
}

/// A budget is divided so that what fits in one kind of layer fits in the other too.
#[test]
fn a_budget_is_divided_for_sequences_of_the_typical_length() {
    use kvpool::config::Capacity;
    let spec = Spec {
        windows: [vec![64; 5], vec![0]].concat(),
        head_dim: 64,
        max_seqs: 64,
        max_seq_len: 4096,
        max_batch_tokens: 512,
        max_step_tokens: Some(64),
        capacity: Capacity::Budget(Bytes(32 << 20)),
        ..Spec::default()
    };
    let plan = spec.plan();
    // One sequence of 4,096 tokens takes 2 MiB in the full layer and a tenth of that elsewhere.
    assert!(plan.full_length_seqs >= 9, "{}", plan.explain());
    let mut config = spec.config();
    config.pool.typical_seq_len = Some(64);
    let short = Plan::new(&config, &spec.geometry()).expect("a plan");
    let units = |plan: &Plan, group: usize| u64::from(plan.groups[group].layout.units);
    // Group 0 is the windowed one: short sequences need as many of its blocks as of the others.
    assert!(units(&short, 0) > units(&plan, 0) && units(&short, 1) < units(&plan, 1));
    for plan in [&plan, &short] {
        assert!(plan.pool_bytes <= Bytes(32 << 20));
        assert!(plan.pool_bytes.0 > 31 << 20, "the budget is used: {}", plan.explain());
    }
    config.pool.capacity = Capacity::WorstCase;
    let error = Plan::new(&config, &spec.geometry()).expect_err("nothing to divide").to_string();
    assert!(error.starts_with("pool.typical_seq_len"), "{error}");
}

#[test]
fn all_windowed_plans_state_a_capacity_that_holds() {
    use kvpool::config::Capacity;
    let spec = Spec { windows: vec![9, 9], capacity: Capacity::Blocks(1), ..Spec::default() };
    let plan = spec.plan();
    assert_eq!((plan.capacity_tokens, plan.full_length_seqs), (8, 0));
}

/// The caller's floating-point mode changes no bit, and is as before after the call.
#[cfg(target_arch = "x86_64")]
#[test]
fn the_callers_floating_point_mode_changes_no_bit() {
    fn mode() -> u32 {
        let mut mode = 0_u32;
        // SAFETY: stores 4 bytes to `mode`.
        unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut mode, options(nostack)) };
        mode
    }
    fn set(mode: u32) {
        // SAFETY: a mode with denormals flushed, or the one that was read before.
        unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const mode, options(nostack)) };
    }
    let spec = Spec { threads: 2, num_q_heads: 16, num_kv_heads: 8, ..Spec::default() };
    let mut cache = spec.open();
    let seq = begin(&mut cache, 0);
    // Values that are denormal: flushed to zero in the mode of `-ffast-math`.
    let (kv, q) = (vec![1e-39; 64 * 64], vec![1.0; 64 * 128]);
    let mut answers = Vec::new();
    for flush in [false, true] {
        let mut step = cache.reserve(&[(seq, 64)]).expect("fits");
        let before = mode();
        if flush {
            set(before | 0x8040);
        }
        step.append(LayerIdx(0), TensorRef::F32(&kv), TensorRef::F32(&kv)).expect("append");
        let mut out = vec![0.0; q.len()];
        let (q, all) = (TensorRef::F32(&q), TensorMut::F32(&mut out));
        step.attend(LayerIdx(0), q, all, AttendOptions::default()).expect("attend");
        let after = mode();
        set(before);
        assert_eq!(after & 0x8040 != 0, flush, "the mode is the caller's again");
        step.cancel();
        answers.push(out.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
    }
    assert!(answers[0].iter().all(|bits| *bits != 0), "denormals are kept");
    assert!(answers[0] == answers[1]);
    assert_eq!(cache.export(seq, LayerIdx(0), Kv::K, 0, 0, &mut []), Ok(()));
}
