//! Tests of the CUDA device itself. They are started by `cuda::the_tests_of_the_device_…`.

use kvpool::cache::{AttendOptions, Cache, SeqHandle};
use kvpool::config::{CacheMode, Format, KernelChoice, RopeConfig, ScaleKind};
use kvpool::device::{CudaStream, DType, DeviceTensor, TensorMut, TensorRef};
use kvpool::units::LayerIdx;

use super::driver::{self, Memory, counter};
use crate::common::{
    FORMATS, MODES, Outputs, Spec, append_step, assert_same_bits, begin, run_step, tensor,
};

/// Grouped heads, windows with and without sinks, sequences of more than one split.
fn spec(format: Format, scale: ScaleKind) -> Spec {
    Spec {
        format,
        scale,
        windows: vec![0, 24],
        sink_tokens: 3,
        num_q_heads: 8,
        num_kv_heads: 2,
        head_dim: 64,
        max_seqs: 3,
        max_seq_len: 1100,
        max_batch_tokens: 600,
        max_step_tokens: Some(24),
        kernel: KernelChoice::Reference,
        ..Spec::default()
    }
}

fn tags(which: u64, len: u32) -> Vec<u64> {
    (0..u64::from(len)).map(|at| which * 10_000 + at).collect()
}

/// Two sequences in steps of some tokens; the outputs of the last step.
fn drive(cache: &mut Cache) -> Outputs {
    let (a, b) = (begin(cache, 0), begin(cache, 0));
    for chunk in tags(1, 48).chunks(24) {
        append_step(cache, &[(a, chunk.len() as u32)], chunk).expect("fits");
    }
    let mut both = tags(1, 55)[48..].to_vec();
    both.extend(tags(2, 9));
    run_step(cache, &[(a, 7), (b, 9)], &both).expect("fits")
}

/// All bytes of the pool.
fn pool(cache: &Cache) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(cache.plan().pool_bytes.get()).unwrap()];
    cache.read_bytes(0, &mut bytes).expect("inside");
    bytes
}

#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn what_is_stored_equals_the_cpus_bytes_and_attention_its_reference() {
    for (format, scale) in FORMATS {
        for mode in MODES {
            let spec = Spec { mode, max_seq_len: 64, max_batch_tokens: 48, ..spec(format, scale) };
            let (mut gpu, mut cpu) = (spec.open(), spec.open_on_cpu());
            assert_eq!(gpu.device_info().kind, "cuda-emulated");
            let (got, want) = (drive(&mut gpu), drive(&mut cpu));
            assert_eq!(pool(&gpu), pool(&cpu), "{format:?} {scale:?} {mode:?}: bytes stored");
            for (layer, (got, want)) in got.out.iter().zip(&want.out).enumerate() {
                for (at, (got, want)) in got.iter().zip(want).enumerate() {
                    let what = format!("{format:?} {mode:?} layer {layer} element {at}");
                    assert!((got - want).abs() < 2e-4, "{what}: {got}, reference {want}");
                }
            }
            for (got, want) in got.lse.iter().flatten().zip(want.lse.iter().flatten()) {
                assert!((got - want).abs() < 2e-4, "lse {got}, reference {want}");
            }
        }
    }
}

/// Steps with tensors in device memory, nothing waited for until all have been put into the
/// stream; gives the outputs of the last one, `[layers]`.
fn drive_on_device(
    cache: &mut Cache,
    seqs: &[SeqHandle],
    steps: u32,
    prepare: bool,
) -> Vec<Vec<f32>> {
    let geometry = cache.plan().geometry.clone();
    let (kv_heads, q_heads, dim) = (geometry.num_kv_heads, geometry.num_q_heads, geometry.head_dim);
    let mut kept = Vec::new();
    let mut last = Vec::new();
    for at in 0..steps {
        let batch: Vec<_> = seqs.iter().map(|seq| (*seq, 1)).collect();
        let tags: Vec<u64> = (1..=seqs.len() as u64).map(|s| s * 10_000 + u64::from(at)).collect();
        let mut step = cache.reserve(&batch).expect("fits");
        let positions = step.positions().to_vec();
        if prepare {
            step.prepare().expect("uploads");
        }
        last.clear();
        for layer in 0..geometry.num_layers {
            let input = |what, heads| tensor(&tags, &positions, layer, what, heads, dim);
            let (k, v, q) = (input(0, kv_heads), input(1, kv_heads), input(2, q_heads));
            let (k_at, v_at, q_at) = (Memory::of(&k), Memory::of(&v), Memory::of(&q));
            let out_at = Memory::new(q.len() * 4);
            let before = (counter("allocations"), counter("synchronisations"));
            step.append_device(LayerIdx(layer), k_at.tensor(k.len()), v_at.tensor(v.len()))
                .expect("append");
            let (q, out) = (q_at.tensor(q.len()), out_at.tensor(q.len()));
            step.attend_device(LayerIdx(layer), q, out, None, None).expect("attend");
            let after = (counter("allocations"), counter("synchronisations"));
            assert_eq!(after, before, "step {at}: nothing is allocated or waited for");
            last.push((out_at.address, q.len(), kept.len()));
            kept.extend([k_at, v_at, q_at, out_at]);
        }
        step.commit().expect("whole");
    }
    cache.synchronize().expect("no kernel failed");
    last.iter().map(|(_, len, first)| kept[first + 3].read(*len)).collect()
}

#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn tensors_in_device_memory_give_the_same_bits_without_waiting() {
    driver::enter();
    for (mode, prepare) in MODES.into_iter().flat_map(|mode| [(mode, false), (mode, true)]) {
        // As many steps as buffers are in the ring (two steps' worth), and none more.
        let spec = Spec { mode, ..spec(Format::F16, ScaleKind::PerTokenHead) };
        let mut cache = spec.open();
        let seqs = [begin(&mut cache, 0), begin(&mut cache, 0)];
        let got = drive_on_device(&mut cache, &seqs, 2, prepare);
        let mut host = spec.open();
        let seqs = [begin(&mut host, 0), begin(&mut host, 0)];
        let mut want = None;
        for at in 0..2 {
            let batch: Vec<_> = seqs.iter().map(|seq| (*seq, 1)).collect();
            want = Some(run_step(&mut host, &batch, &[10_000 + at, 20_000 + at]).expect("fits"));
        }
        for (got, want) in got.iter().zip(&want.unwrap().out) {
            assert_same_bits(got, want, &format!("{mode:?}"));
        }
        assert_eq!(pool(&cache), pool(&host), "{mode:?}");
    }
}

#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn edge_60_a_table_that_is_being_copied_is_never_overwritten() {
    driver::enter();
    // Far more steps than the ring has buffers, put into the stream at once: each must find its
    // own tables.
    let spec = Spec {
        windows: vec![0],
        tokens_per_block: 8,
        ..spec(Format::F32, ScaleKind::PerTokenHead)
    };
    let mut cache = spec.open();
    let seqs = [begin(&mut cache, 0), begin(&mut cache, 0)];
    let got = many_steps(&mut cache, &seqs);
    let mut host = spec.open_on_cpu();
    let seqs = [begin(&mut host, 0), begin(&mut host, 0)];
    for at in 0..30 {
        let batch: Vec<_> = seqs.iter().map(|seq| (*seq, 1)).collect();
        let want = run_step(&mut host, &batch, &[10_000 + at, 20_000 + at]).expect("fits");
        for (got, want) in got[at as usize].iter().zip(&want.out[0]) {
            assert!((got - want).abs() < 1e-4, "step {at}: {got} and {want}");
        }
    }
}

/// Thirty decode steps of one layer; all their outputs, read at the end.
fn many_steps(cache: &mut Cache, seqs: &[SeqHandle]) -> Vec<Vec<f32>> {
    let geometry = cache.plan().geometry.clone();
    let (kv_heads, q_heads, dim) = (geometry.num_kv_heads, geometry.num_q_heads, geometry.head_dim);
    let mut kept = Vec::new();
    for at in 0..30 {
        let batch: Vec<_> = seqs.iter().map(|seq| (*seq, 1)).collect();
        let tags = [10_000 + at, 20_000 + at];
        let mut step = cache.reserve(&batch).expect("fits");
        let positions = step.positions().to_vec();
        let input = |what, heads| tensor(&tags, &positions, 0, what, heads, dim);
        let (k, v, q) = (input(0, kv_heads), input(1, kv_heads), input(2, q_heads));
        let memory = [Memory::of(&k), Memory::of(&v), Memory::of(&q), Memory::new(q.len() * 4)];
        let [k_at, v_at, q_at, out_at] = &memory;
        step.append_device(LayerIdx(0), k_at.tensor(k.len()), v_at.tensor(v.len()))
            .expect("append");
        let (q_at, out_at) = (q_at.tensor(q.len()), out_at.tensor(q.len()));
        step.attend_device(LayerIdx(0), q_at, out_at, None, None).expect("attend");
        step.commit().expect("whole");
        kept.push((memory, q.len()));
    }
    cache.synchronize().expect("no kernel failed");
    kept.iter().map(|(memory, len)| memory[3].read(*len)).collect()
}

#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn splits_are_combined_to_the_same_bits_as_one_after_the_other() {
    // A decode behind 1050 tokens is divided into splits; the same row at the end of a prefill of
    // 24 tokens is one of several items.
    for (format, scale) in [FORMATS[1], FORMATS[3]] {
        let mut outputs = Vec::new();
        for (mode, last) in
            [(CacheMode::Paged, 1), (CacheMode::Contiguous, 1), (CacheMode::Paged, 20)]
        {
            let spec = Spec { mode, ..spec(format, scale) };
            let mut cache = spec.open();
            let seq = begin(&mut cache, 0);
            let all = tags(1, 1051);
            let before = 1051 - last;
            for chunk in all[..before].chunks(24) {
                append_step(&mut cache, &[(seq, chunk.len() as u32)], chunk).expect("fits");
            }
            let out = run_step(&mut cache, &[(seq, last as u32)], &all[before..]).expect("fits");
            let row = 8 * 64;
            outputs.push(
                out.out.iter().map(|out| out[out.len() - row..].to_vec()).collect::<Vec<_>>(),
            );
        }
        for other in &outputs[1..] {
            for (a, b) in outputs[0].iter().zip(other) {
                assert_same_bits(a, b, &format!("{format:?}"));
            }
        }
    }
}

#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn closing_gives_everything_back_and_the_plan_has_every_byte() {
    let turned = RopeConfig { theta: Some(1e4), window_theta: Some(1e3), ..RopeConfig::default() };
    for rope in [None, Some(turned)] {
        let spec = Spec { rope, ..spec(Format::Int8, ScaleKind::PerTokenHead) };
        let before = counter("live_bytes");
        let cache = spec.open();
        let info = cache.device_info();
        let workspace = cache.plan().cuda_workspace().expect("fits");
        assert_eq!(info.pool_bytes, cache.plan().pool_bytes);
        assert_eq!(info.workspace_bytes, workspace.device_bytes);
        let allocated = counter("live_bytes") - before;
        assert_eq!(allocated, info.pool_bytes.get() + info.workspace_bytes.get());
        drop(cache);
        assert_eq!(counter("live_bytes"), before, "something was kept");
    }
}

#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn tensors_that_the_kernels_cannot_read_are_refused() {
    driver::enter();
    let mut cache = spec(Format::F16, ScaleKind::PerTokenHead).open();
    let seq = begin(&mut cache, 0);
    let mut step = cache.reserve(&[(seq, 1)]).expect("fits");
    let memory = Memory::new(4096);
    let mut odd = Memory { address: memory.address + 4 };
    let error = step.append_device(LayerIdx(0), odd.tensor(128), memory.tensor(128)).unwrap_err();
    assert!(error.to_string().contains("no multiple of 16"), "{error}");
    odd.address = 0;
    let error = step.append_device(LayerIdx(0), memory.tensor(128), odd.tensor(128)).unwrap_err();
    assert!(error.to_string().contains("v lies at address 0x0"), "{error}");
    let error = step.append_device(LayerIdx(0), memory.tensor(64), memory.tensor(128)).unwrap_err();
    assert!(error.to_string().contains("k has 64 elements, expected 128"), "{error}");
    step.append_device(LayerIdx(0), memory.tensor(128), memory.tensor(128)).expect("fits");
    let mut attend = |lse: &Memory| {
        let (q, out) = (memory.tensor(512), memory.tensor(512));
        step.attend_device(LayerIdx(0), q, out, Some(lse.tensor(8)), None)
    };
    for address in [0, memory.address + 8] {
        let error = attend(&Memory { address }).unwrap_err();
        assert!(error.to_string().contains("lse lies at address"), "{error}");
    }
    attend(&memory).expect("fits");
}

#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn host_tensors_that_do_not_fit_the_buffers_go_in_parts() {
    // A row of K and V is 2 · 8 · 128 · 4 bytes: 600 rows are more than one buffer of 4 MiB.
    let spec = Spec {
        windows: vec![0],
        num_q_heads: 16,
        num_kv_heads: 8,
        head_dim: 128,
        max_seqs: 1,
        max_seq_len: 600,
        max_step_tokens: Some(600),
        ..spec(Format::Bf16, ScaleKind::PerTokenHead)
    };
    let (mut gpu, mut cpu) = (spec.open(), spec.open_on_cpu());
    let workspace = gpu.plan().cuda_workspace().expect("fits");
    assert!(workspace.tensor_rows < 600, "{}", workspace.tensor_rows);
    for cache in [&mut gpu, &mut cpu] {
        let seq = begin(cache, 0);
        append_step(cache, &[(seq, 600)], &tags(1, 600)).expect("fits");
    }
    assert_eq!(pool(&gpu), pool(&cpu));
}

#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn mixed_types_of_k_and_v_are_refused() {
    driver::enter();
    let mut cache = Spec::default().open();
    let seq = begin(&mut cache, 0);
    let mut step = cache.reserve(&[(seq, 1)]).expect("fits");
    let wide = [0.5; 8];
    let narrow = [half::f16::ONE; 8];
    let error =
        step.append(LayerIdx(0), TensorRef::F32(&wide), TensorRef::F16(&narrow)).unwrap_err();
    assert!(error.to_string().contains("k is of f32 and v of f16"), "{error}");
    let (wide_at, narrow_at) = (Memory::new(64), Memory::new(64));
    // SAFETY: the memory outlives the step, and nothing is launched.
    let narrow_at = unsafe { DeviceTensor::new(narrow_at.address, 8, DType::F16) };
    let error = step.append_device(LayerIdx(0), wide_at.tensor(8), narrow_at).unwrap_err();
    assert!(error.to_string().contains("k is of f32 and v of f16"), "{error}");
    step.append(LayerIdx(0), TensorRef::F16(&narrow), TensorRef::F16(&narrow)).expect("append");
    let mut out = [half::f16::NAN; 16];
    let q = [1.0; 16];
    let options = AttendOptions::default();
    step.attend(LayerIdx(0), TensorRef::F32(&q), TensorMut::F16(&mut out), options)
        .expect("attend");
    assert!(out.iter().all(|x| *x == half::f16::ONE), "one key: its own value");
}

#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn a_cache_goes_from_thread_to_thread_and_leaves_their_contexts_alone() {
    let spec = Spec { max_seq_len: 64, max_batch_tokens: 48, ..spec(Format::F16, FORMATS[1].1) };
    let want = drive(&mut spec.open());
    let mine = driver::current_context();
    let opened = std::thread::spawn(move || spec.open());
    let mut cache = opened.join().expect("opens");
    let got = std::thread::spawn(move || {
        driver::enter();
        let own = driver::current_context();
        assert_ne!(own, 0);
        let got = drive(&mut cache);
        assert_eq!(driver::current_context(), own, "it is current again");
        (got, cache)
    });
    let (got, cache) = got.join().expect("computes");
    drop(cache);
    assert_eq!(driver::current_context(), mine, "closing has entered and left");
    for (got, want) in got.out.iter().zip(&want.out) {
        assert_same_bits(got, want, "another thread");
    }
}

/// Elements that INT8 has met, as far as they have been told.
fn nonfinite(cache: &Cache) -> u64 {
    cache.stats().nonfinite
}

#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn counts_of_a_host_append_are_its_own() {
    driver::enter();
    let spec = Spec { windows: vec![0], max_seq_len: 64, ..spec(Format::Int8, FORMATS[3].1) };
    let mut cache = spec.open();
    let seq = begin(&mut cache, 0);
    // K and V: 5 elements each that are none.
    let clean = [1.0_f32; 128];
    let mut odd = clean;
    odd[..5].fill(f32::NAN);
    let memory = Memory::of(&odd);
    let in_device = |cache: &mut Cache| {
        let mut step = cache.reserve(&[(seq, 1)]).expect("fits");
        step.append_device(LayerIdx(0), memory.tensor(128), memory.tensor(128)).expect("append");
        step.commit().expect("whole");
    };
    let in_host = |cache: &mut Cache, values: &[f32], commit: bool| {
        let mut step = cache.reserve(&[(seq, 1)]).expect("fits");
        step.append(LayerIdx(0), TensorRef::F32(values), TensorRef::F32(values)).expect("append");
        if commit { step.commit().expect("whole") } else { step.cancel() }
    };
    in_device(&mut cache);
    in_host(&mut cache, &clean, false);
    cache.synchronize().expect("done");
    assert_eq!(nonfinite(&cache), 10, "another step's cancel takes nothing from a committed one");
    in_device(&mut cache);
    in_host(&mut cache, &odd, true);
    assert_eq!(nonfinite(&cache), 20, "a commit tells its own");
    in_host(&mut cache, &odd, false);
    assert_eq!(nonfinite(&cache), 20, "a cancelled step's are not told");
    cache.synchronize().expect("done");
    assert_eq!(nonfinite(&cache), 30, "the rest");
    cache.synchronize().expect("done");
    assert_eq!(nonfinite(&cache), 30, "once");
}

#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn an_append_that_is_repeated_is_counted_once() {
    // In two parts, as in `host_tensors_that_do_not_fit_the_buffers_go_in_parts`: what fails is the
    // last part's launch, or the reading of the counts.
    let spec = Spec {
        windows: vec![0],
        num_q_heads: 16,
        num_kv_heads: 8,
        head_dim: 128,
        max_seqs: 1,
        max_seq_len: 600,
        max_step_tokens: Some(600),
        ..spec(Format::Int8, FORMATS[3].1)
    };
    let mut k = vec![1.0_f32; 600 * 8 * 128];
    k[..7].fill(f32::INFINITY);
    for call in ["cuMemcpyDtoHAsync_v2:1", "cuLaunchKernel:2", "cuMemsetD8Async:1"] {
        let mut cache = spec.open();
        assert!(cache.plan().cuda_workspace().expect("fits").tensor_rows < 600);
        let seq = begin(&mut cache, 0);
        let mut step = cache.reserve(&[(seq, 600)]).expect("fits");
        // CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
        driver::fail(Some(&format!("{call}:701")));
        let failed = step.append(LayerIdx(0), TensorRef::F32(&k), TensorRef::F32(&k));
        driver::fail(None);
        assert!(failed.is_err(), "{call}");
        step.append(LayerIdx(0), TensorRef::F32(&k), TensorRef::F32(&k)).expect("append");
        step.commit().expect("whole");
        assert_eq!(nonfinite(&cache), 14, "{call}");
        cache.synchronize().expect("done");
        assert_eq!(nonfinite(&cache), 14, "{call}");
    }
}

#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn the_stream_of_whichever_thread_calls_is_refused() {
    driver::enter();
    let spec = Spec { max_seq_len: 64, max_batch_tokens: 48, ..spec(Format::F16, FORMATS[1].1) };
    let want = drive(&mut spec.open());
    let mut cache = spec.open();
    // SAFETY: constants of the driver's, which live as long as it does.
    let [legacy, of_thread] =
        [1, 2].map(|at| unsafe { CudaStream::new(std::ptr::without_provenance_mut(at)) });
    cache.set_stream(legacy).expect("the default stream");
    let error = cache.set_stream(of_thread).unwrap_err();
    assert!(error.to_string().contains("CU_STREAM_PER_THREAD"), "{error}");
    let got = drive(&mut cache);
    for (got, want) in got.out.iter().zip(&want.out) {
        assert_same_bits(got, want, "in the stream that was set before");
    }
}
