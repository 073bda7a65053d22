//! Edge cases whose test for the CPU looks at the CPU device itself: 44, 45; and copies, counted.

use kvpool::cache::BeginOptions;
use kvpool::config::{Capacity, Format, ScaleKind};
use kvpool::plan::Kv;
use kvpool::units::{GroupIdx, LayerIdx};

use super::driver::{fail, launches, reset_counters};
use crate::common::{
    FORMATS, MODES, Spec, append_step, assert_same_bits, begin, begin_with, element, empty_step,
    run_step,
};

/// All bytes of the pool.
fn pool(cache: &kvpool::cache::Cache) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(cache.plan().pool_bytes.get()).unwrap()];
    cache.read_bytes(0, &mut bytes).expect("inside");
    bytes
}

#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn edge_44_geometries_store_the_cpus_bytes_and_give_its_answers() {
    for (head_dim, num_kv_heads, group) in
        [(64, 1, 8), (80, 3, 4), (96, 8, 3), (128, 32, 1), (256, 1, 4), (128, 8, 8), (264, 1, 1)]
    {
        for (format, scale) in FORMATS {
            if scale == ScaleKind::PerGroup32 && head_dim % 32 != 0 {
                continue;
            }
            let spec = Spec {
                format,
                scale,
                windows: vec![0, 7],
                sink_tokens: 1,
                num_q_heads: num_kv_heads * group,
                num_kv_heads,
                head_dim,
                max_seqs: 2,
                max_seq_len: 40,
                kernel: kvpool::config::KernelChoice::Reference,
                ..Spec::default()
            };
            let run = |cache: &mut kvpool::cache::Cache| {
                let (a, b) = (begin(cache, 0), begin(cache, 0));
                for from in [0_u64, 6, 12] {
                    let tags: Vec<u64> = (from..from + 6).collect();
                    append_step(cache, &[(a, 6)], &tags).expect("fits");
                }
                run_step(cache, &[(b, 3), (a, 1)], &[50, 51, 52, 99]).expect("fits")
            };
            let (mut gpu, mut cpu) = (spec.open(), spec.open_on_cpu());
            let (got, want) = (run(&mut gpu), run(&mut cpu));
            let what = format!("{head_dim} x {num_kv_heads} x {group}, {format:?} {scale:?}");
            assert_eq!(pool(&gpu), pool(&cpu), "{what}: bytes and scales");
            for (got, want) in got.out.iter().flatten().zip(want.out.iter().flatten()) {
                assert!((got - want).abs() < 2e-4, "{what}: {got}, reference {want}");
            }
        }
    }
}

/// Blocks beyond 2^31 elements and 4 GiB, in memory that takes room only where it is touched.
#[test]
#[ignore = "started by cuda::edge_45_offsets_past_four_gibibytes_on_the_device"]
fn edge_45_offsets_past_four_gibibytes() {
    let spec = Spec {
        format: Format::F16,
        tokens_per_block: 128,
        windows: vec![0; 4],
        num_q_heads: 8,
        num_kv_heads: 8,
        head_dim: 1024,
        max_seqs: 300,
        max_seq_len: 128,
        max_batch_tokens: 300,
        capacity: Capacity::Blocks(300),
        ..Spec::default()
    };
    let plan = spec.plan();
    assert!(plan.pool_bytes.get() > 4 << 30 && plan.groups[0].layout.units == 300);
    let mut cache = spec.open();
    let seqs: Vec<_> = (0..300).map(|_| begin(&mut cache, 0)).collect();
    let batch: Vec<_> = seqs.iter().map(|seq| (*seq, 1)).collect();
    let tags: Vec<u64> = (0..300).collect();
    append_step(&mut cache, &batch, &tags).expect("fits");
    let (mut farthest, mut seen) = (0, 0);
    for (seq, tag) in seqs.iter().zip(&tags) {
        let block = cache.block_of(*seq, GroupIdx(0), 0).expect("held");
        let unit = cache.block_table(GroupIdx(0)).expect("paged").0[seq.slot() as usize];
        let offset = plan.groups[0].layout.row(unit, 3, Kv::V, 7, 0);
        farthest = offset.max(farthest);
        if offset < 4 << 30 && *tag % 50 != 0 {
            continue;
        }
        seen += 1;
        let mut got = vec![f32::NAN; 8 * 1024];
        cache.export(*seq, LayerIdx(3), Kv::V, 0, 1, &mut got).expect("held");
        let want: Vec<f32> = (0..8)
            .flat_map(|head| (0..1024).map(move |d| element(*tag, 0, 3, 1, head, d)))
            .collect();
        assert_same_bits(&got, &want, &format!("block {block:?}"));
    }
    assert!(farthest > 4 << 30 && seen > 20, "{farthest} {seen}");
    // A fork, written to, is a copy from one end to the other; and attention reads it.
    let (first, last) = (seqs[0], seqs[299]);
    for (seq, tag) in [(first, 0), (last, 299)] {
        cache.release(seqs[if seq == first { 1 } else { 298 }]).expect("alive");
        let fork = cache.fork(seq).expect("room");
        append_step(&mut cache, &[(fork, 1)], &[7]).expect("copies on write");
        let out = run_step(&mut cache, &[(seq, 1)], &[8]).expect("fits");
        assert!(out.out.iter().flatten().all(|x| x.is_finite()));
        let mut got = vec![f32::NAN; 8 * 1024];
        cache.export(fork, LayerIdx(2), Kv::K, 0, 1, &mut got).expect("held");
        assert_eq!(got[1023].to_bits(), element(tag, 0, 2, 0, 0, 1023).to_bits());
    }
}

/// Scales beyond 4 GiB. One sequence, which is given no K or V, holds what lies below.
#[test]
#[ignore = "started by cuda::edge_45_offsets_past_four_gibibytes_on_the_device"]
fn edge_45_scales_past_four_gibibytes() {
    for scale in [ScaleKind::PerTokenHead, ScaleKind::PerGroup32] {
        let spec = Spec {
            format: Format::Int8,
            scale,
            tokens_per_block: 128,
            windows: vec![0; 4],
            num_q_heads: 8,
            num_kv_heads: 8,
            head_dim: 1024,
            max_seqs: 4,
            max_seq_len: 128 * 520,
            max_batch_tokens: 1024,
            capacity: Capacity::Blocks(530),
            kernel: kvpool::config::KernelChoice::Reference,
            prefix_reuse: false,
            ..Spec::default()
        };
        let mut cache = spec.open();
        let filler = begin(&mut cache, 0);
        (0..65).for_each(|_| empty_step(&mut cache, &[(filler, 1024)]).expect("promised"));
        let small = Spec { max_seq_len: 128, capacity: Capacity::Blocks(6), ..spec.clone() };
        let mut cpu = small.open_on_cpu();
        let run = |cache: &mut kvpool::cache::Cache| {
            let seq = begin_with(cache, 0, Some(128)).expect("room");
            append_step(cache, &[(seq, 3)], &[1, 2, 3]).expect("fits");
            let fork = cache.fork(seq).expect("room");
            append_step(cache, &[(fork, 1)], &[7]).expect("copies on write");
            let out = run_step(cache, &[(fork, 1), (seq, 1)], &[8, 9]).expect("fits");
            (fork, out.out)
        };
        let ((fork, got), (cpu_fork, want)) = (run(&mut cache), run(&mut cpu));
        let layout = &cache.plan().groups[0].layout;
        let (table, row) = cache.block_table(GroupIdx(0)).expect("paged");
        let unit = table[(fork.slot() * row) as usize];
        assert!(layout.scales(unit, 0, Kv::K, 0, 0) > 4 << 30);
        for (layer, kv) in (0..4).flat_map(|layer| [(layer, Kv::K), (layer, Kv::V)]) {
            let [mut gpu_rows, mut cpu_rows] = [(); 2].map(|()| vec![f32::NAN; 5 * 8 * 1024]);
            cache.export(fork, LayerIdx(layer), kv, 0, 5, &mut gpu_rows).expect("held");
            cpu.export(cpu_fork, LayerIdx(layer), kv, 0, 5, &mut cpu_rows).expect("held");
            assert_same_bits(&gpu_rows, &cpu_rows, &format!("{scale:?}: layer {layer} {kv:?}"));
        }
        for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
            assert!((got - want).abs() < 1e-3, "{scale:?}: {got}, reference {want}");
        }
    }
}

/// However many rows of a step end in blocks that others hold too, they are copied in one launch a
/// group; and so are the blocks that a batch takes over in part.
#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn many_copies_are_one_launch() {
    for (windows, groups) in [(vec![0, 0], 1), (vec![0, 24], 2)] {
        let spec = Spec { windows, max_seqs: 12, max_seq_len: 64, ..Spec::default() };
        let mut cache = spec.open();
        let seq = begin(&mut cache, 0);
        append_step(&mut cache, &[(seq, 12)], &(0..12).collect::<Vec<u64>>()).expect("fits");
        let mut seqs = vec![seq];
        seqs.extend((1..12).map(|_| cache.fork(seq).expect("room")));
        reset_counters();
        let batch: Vec<_> = seqs.iter().map(|seq| (*seq, 1)).collect();
        let tags: Vec<u64> = (100..112).collect();
        append_step(&mut cache, &batch, &tags).expect("copies on write");
        assert_eq!(cache.stats().cow_copies, 11 * groups, "the last one writes in place");
        assert_eq!(launches("kvpool_copy_pairs"), groups);
        for (seq, tag) in seqs.iter().zip(&tags) {
            let mut got = vec![f32::NAN; 13 * 8];
            for (layer, window) in (0..).zip(&spec.windows) {
                assert!(*window == 0 || *window > 13, "everything is in sight");
                cache.export(*seq, LayerIdx(layer), Kv::V, 0, 13, &mut got).expect("held");
                for (at, got) in (0..).zip(got.chunks(8)) {
                    let tag = if at < 12 { u64::from(at) } else { *tag };
                    let want: Vec<f32> = (0..8).map(|d| element(tag, at, layer, 1, 0, d)).collect();
                    assert_same_bits(got, &want, &format!("position {at}"));
                }
            }
        }
    }
}

/// A batch that takes over parts of cached blocks, and a fork of slots, copy in one launch too.
#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn the_copies_of_a_batch_that_begins_are_one_launch() {
    for mode in MODES {
        let spec = Spec { mode, max_seqs: 8, ..Spec::default() };
        let mut cache = spec.open();
        let prompt: Vec<u32> = (0..24).collect();
        let begun = cache.begin(&prompt, BeginOptions::default()).expect("admitted");
        let tags: Vec<u64> = (0..24).collect();
        append_step(&mut cache, &[(begun.sequence, 24)], &tags).expect("fits");
        reset_counters();
        // Three tokens of the last block match.
        let other = |last: u32| [&prompt[..19], &[last; 4]].concat();
        let prompts = [other(100), other(101), other(102)];
        let wanted: Vec<_> =
            prompts.iter().map(|prompt| (&prompt[..], BeginOptions::default())).collect();
        let mut out = Vec::with_capacity(3);
        cache.begin_batch(&wanted, &mut out).expect("admitted");
        assert!(out.iter().all(|begun| begun.cached_len == 19), "{mode:?}: {out:?}");
        let groups = cache.plan().groups.len() as u64;
        assert_eq!(launches("kvpool_copy_pairs"), groups, "{mode:?}");
        for begun in &out {
            let mut got = vec![f32::NAN; 19 * 8];
            for layer in 0..2 {
                cache
                    .export(begun.sequence, LayerIdx(layer), Kv::K, 0, 19, &mut got)
                    .expect("held");
                for (at, got) in (0..).zip(got.chunks(8)) {
                    let want: Vec<f32> =
                        (0..8).map(|d| element(at.into(), at, layer, 0, 0, d)).collect();
                    assert_same_bits(got, &want, &format!("{mode:?} position {at}"));
                }
            }
        }
    }
}

#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn copies_of_a_step_that_failed_are_not_made_later() {
    // Two groups of blocks, one with a window: the copies of the second were noted down when the
    // launch of the first failed.
    let spec = Spec { windows: vec![0, 16], max_seqs: 3, prefix_reuse: false, ..Spec::default() };
    let run = |failing: bool| {
        let mut cache = spec.open();
        let a = begin(&mut cache, 0);
        append_step(&mut cache, &[(a, 4)], &[1, 2, 3, 4]).expect("fits");
        let b = cache.fork(a).expect("shares");
        if failing {
            // CUDA_ERROR_OUT_OF_MEMORY
            fail(Some("cuLaunchKernel:1:2"));
            let error = append_step(&mut cache, &[(b, 1)], &[5]).unwrap_err();
            fail(None);
            assert!(error.to_string().contains("cuLaunchKernel"), "{error}");
            cache.check_invariants().expect("undone");
        }
        // Gets the blocks that were to be copied to.
        let c = begin(&mut cache, 0);
        append_step(&mut cache, &[(c, 7)], &[11, 12, 13, 14, 15, 16, 17]).expect("fits");
        append_step(&mut cache, &[(b, 1)], &[5]).expect("copies");
        let out = run_step(&mut cache, &[(a, 1), (b, 1), (c, 1)], &[6, 7, 18]).expect("fits");
        out.out
    };
    for (layer, (got, want)) in run(true).iter().zip(&run(false)).enumerate() {
        assert_same_bits(got, want, &format!("layer {layer}"));
    }
}
