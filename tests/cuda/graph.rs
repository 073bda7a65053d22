//! A decode step's launches, captured once and played again for later steps.

use std::ffi::c_void;

use cudarc::driver::sys;
use kvpool::cache::{Cache, SeqHandle, Step};
use kvpool::config::{Format, RopeConfig, ScaleKind, Scrub};
use kvpool::device::{CudaStream, DType, DeviceTensor};
use kvpool::units::LayerIdx;

use super::driver::{self, Memory, counter};
use crate::common::{MODES, Spec, append_step, assert_same_bits, begin, run_step, tensor};

/// Sequences that pass from one split of the keys to the next while they decode, in a layer that
/// sees everything and one with a window, K turned.
fn spec(format: Format) -> Spec {
    Spec {
        format,
        scale: ScaleKind::PerTokenHead,
        windows: vec![0, 24],
        sink_tokens: 3,
        num_q_heads: 8,
        num_kv_heads: 2,
        head_dim: 64,
        max_seqs: 3,
        max_seq_len: 560,
        max_batch_tokens: 510,
        max_step_tokens: Some(24),
        rope: Some(RopeConfig { theta: Some(1e4), ..RopeConfig::default() }),
        ..Spec::default()
    }
}

fn ok(result: sys::CUresult) {
    assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
}

/// A stream of the caller's.
struct Stream(sys::CUstream);

impl Stream {
    fn new() -> Self {
        let mut stream = std::ptr::null_mut();
        let flag = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a place for a handle.
        ok(unsafe { sys::cuStreamCreate(&raw mut stream, flag) });
        Self(stream)
    }

    fn put(&self, to: &Memory, values: &[f32]) {
        let (from, bytes) = (values.as_ptr().cast::<c_void>(), size_of_val(values));
        // SAFETY: the memory has room; what is not pinned is read before the call returns.
        ok(unsafe { sys::cuMemcpyHtoDAsync_v2(to.address, from, bytes, self.0) });
    }

    fn capture(&self) {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        ok(unsafe { sys::cuStreamBeginCapture_v2(self.0, mode) });
    }

    fn captured(&self) -> sys::CUgraphExec {
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the stream is being captured.
        ok(unsafe { sys::cuStreamEndCapture(self.0, &raw mut graph) });
        // SAFETY: the graph is whole.
        ok(unsafe { sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0) });
        executable
    }

    fn play(&self, graph: sys::CUgraphExec) {
        // SAFETY: both are alive.
        ok(unsafe { sys::cuGraphLaunch(graph, self.0) });
    }
}

/// Memory for the tensors of any step: K, V, Q and the result of each layer.
struct Tensors {
    layers: Vec<[Memory; 4]>,
}

impl Tensors {
    fn new(spec: &Spec) -> Self {
        let rows = (spec.max_seqs * spec.head_dim * 4) as usize;
        let (kv, q) = (rows * spec.num_kv_heads as usize, rows * spec.num_q_heads as usize);
        let layers = spec.windows.iter();
        Self { layers: layers.map(|_| [kv, kv, q, q].map(Memory::new)).collect() }
    }
}

/// Prompts of these lengths, on the way that waits.
fn prefill(cache: &mut Cache, lens: &[usize]) -> Vec<SeqHandle> {
    (1..)
        .zip(lens)
        .map(|(which, len)| {
            let seq = begin(cache, 0);
            let tags: Vec<u64> = (0..*len as u64).map(|at| which * 10_000 + at).collect();
            for chunk in tags.chunks(24) {
                append_step(cache, &[(seq, chunk.len() as u32)], chunk).expect("fits");
            }
            seq
        })
        .collect()
}

/// One decode step of these sequences: captured where there is no graph yet, and played. Gives the
/// outputs, `[layers]`.
fn step(
    cache: &mut Cache,
    stream: &Stream,
    tensors: &Tensors,
    graph: &mut Option<sys::CUgraphExec>,
    batch: &[SeqHandle],
    tags: &[u64],
) -> Vec<Vec<f32>> {
    let geometry = cache.plan().geometry.clone();
    let (kv_heads, q_heads, dim) = (geometry.num_kv_heads, geometry.num_q_heads, geometry.head_dim);
    let batch: Vec<_> = batch.iter().map(|seq| (*seq, 1)).collect();
    let mut step = cache.reserve(&batch).expect("fits");
    let positions = step.positions().to_vec();
    step.prepare().expect("uploads");
    let lens =
        [kv_heads, kv_heads, q_heads, q_heads].map(|heads| tags.len() * (heads * dim) as usize);
    for (layer, memory) in (0..).zip(&tensors.layers) {
        for (what, heads) in [(0, kv_heads), (1, kv_heads), (2, q_heads)] {
            let values = tensor(tags, &positions, layer, what, heads, dim);
            stream.put(&memory[what as usize], &values);
        }
    }
    let first = graph.is_none();
    if first {
        stream.capture();
    }
    for (layer, memory) in (0..).zip(&tensors.layers) {
        let layer = LayerIdx(layer);
        if !first {
            step.mark_appended(layer).expect("once");
            continue;
        }
        let at = |which: usize| {
            // SAFETY: the memory outlives the graph, and the stream orders what uses it.
            unsafe { DeviceTensor::new(memory[which].address, lens[which], DType::F32) }
        };
        step.append_device(layer, at(0), at(1)).expect("append");
        step.attend_device(layer, at(2), at(3), None, None).expect("attend");
    }
    let graph = *graph.get_or_insert_with(|| stream.captured());
    stream.play(graph);
    step.commit().expect("whole");
    cache.synchronize().expect("no kernel failed");
    tensors.layers.iter().map(|memory| memory[3].read(lens[3])).collect()
}

#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn a_captured_step_is_played_for_later_ones() {
    driver::enter();
    for (format, mode) in
        MODES.into_iter().flat_map(|mode| [(Format::F16, mode), (Format::Int8, mode)])
    {
        let spec = Spec { mode, ..spec(format) };
        let (mut cache, mut host) = (spec.open(), spec.open());
        let stream = Stream::new();
        // Two beyond a split, or on the way there, and one that joins later.
        let lens = [508, 9, 30];
        let (seqs, others) = (prefill(&mut cache, &lens), prefill(&mut host, &lens));
        cache.synchronize().expect("done");
        // SAFETY: it lives until the process ends.
        cache.set_stream(unsafe { CudaStream::new(stream.0.cast()) }).expect("set");
        let tensors = Tensors::new(&spec);
        let (pool, mut graph) = (cache.pool_ptr(), None);
        let batches: [&[usize]; 10] = [
            &[0, 1],
            &[0, 1],
            &[0, 1, 2],
            &[2],
            &[1, 0, 2],
            &[0],
            &[0, 2],
            &[0, 1, 2],
            &[0, 1, 2],
            &[2, 1],
        ];
        for (at, batch) in (0_u64..).zip(batches) {
            let tags: Vec<u64> = batch.iter().map(|s| 90_000 + *s as u64 * 100 + at).collect();
            let chosen: Vec<SeqHandle> = batch.iter().map(|s| seqs[*s]).collect();
            let before = counter("allocations");
            let got = step(&mut cache, &stream, &tensors, &mut graph, &chosen, &tags);
            assert_eq!(counter("allocations"), before, "nothing is allocated");
            let chosen: Vec<_> = batch.iter().map(|s| (others[*s], 1)).collect();
            let want = run_step(&mut host, &chosen, &tags).expect("fits");
            for (layer, (got, want)) in got.iter().zip(&want.out).enumerate() {
                assert_same_bits(
                    got,
                    want,
                    &format!("{format:?} {mode:?} step {at} layer {layer}"),
                );
            }
            assert_eq!(cache.pool_ptr(), pool, "pointers stay");
        }
        let played = counter("graph_launches");
        assert!(played >= 10, "{played}");
        let bytes = |cache: &Cache| {
            let mut bytes = vec![0; cache.plan().pool_bytes.get() as usize];
            cache.read_bytes(0, &mut bytes).expect("inside");
            bytes
        };
        assert_eq!(bytes(&cache), bytes(&host), "{format:?} {mode:?}: bytes stored");
    }
}

#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn a_step_that_was_not_prepared_is_kept_out_of_a_capture() {
    driver::enter();
    let spec = spec(Format::F16);
    let mut cache = spec.open();
    let (stream, other) = (Stream::new(), Stream::new());
    // SAFETY: both live until the process ends.
    let [stream_of, other_of] = [&stream, &other].map(|s| unsafe { CudaStream::new(s.0.cast()) });
    cache.set_stream(stream_of).expect("set");
    let seqs = prefill(&mut cache, &[5]);
    let fork = cache.fork(seqs[0]).expect("shares");
    let tensors = Tensors::new(&spec);
    let at = |which: usize, heads: u32| {
        let len = (heads * spec.head_dim) as usize;
        // SAFETY: the memory outlives the test's steps.
        unsafe { DeviceTensor::new(tensors.layers[0][which].address, len, DType::F32) }
    };
    // Far more often than the rings have buffers: none may be lost.
    for _ in 0..40 {
        let mut step = cache.reserve(&[(seqs[0], 1)]).expect("fits");
        stream.capture();
        let refused = step.append_device(LayerIdx(0), at(0, 2), at(1, 2)).unwrap_err();
        assert!(refused.to_string().contains("Step::prepare"), "{refused}");
        assert!(step.prepare().is_err());
        step.cancel();
        // The fork's block must be copied, which is work that no graph may repeat.
        assert!(cache.reserve(&[(fork, 1)]).is_err());
        assert!(cache.set_stream(other_of).is_err());
        assert!(cache.synchronize().is_err() && cache.read_bytes(0, &mut [0]).is_err());
        stream.captured();
    }
    cache.synchronize().expect("as before");
    cache.check_invariants().expect("as before");
    let mut graph = None;
    step(&mut cache, &stream, &tensors, &mut graph, &seqs, &[7]);
    run_step(&mut cache, &[(fork, 1)], &[8]).expect("fits");
    cache.set_stream(other_of).expect("set");
}

/// The tables of a step are there when one of its calls has been made before the capture; its
/// later calls would be captured with its own numbers all the same.
#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn a_step_whose_tables_are_there_already_is_kept_out_of_a_capture() {
    driver::enter();
    // Both layers in one group.
    for (format, mode) in
        MODES.into_iter().flat_map(|mode| [(Format::F16, mode), (Format::Int8, mode)])
    {
        let spec = Spec { mode, windows: vec![0, 0], sink_tokens: 0, ..spec(format) };
        let mut cache = spec.open();
        let stream = Stream::new();
        // SAFETY: it lives until the process ends.
        cache.set_stream(unsafe { CudaStream::new(stream.0.cast()) }).expect("set");
        let seqs = prefill(&mut cache, &[5]);
        let tensors = Tensors::new(&spec);
        let at = |which: usize, heads: u32| {
            let len = (heads * spec.head_dim) as usize;
            // SAFETY: the memory outlives the test's steps.
            unsafe { DeviceTensor::new(tensors.layers[0][which].address, len, DType::F32) }
        };
        let attend =
            |step: &mut Step<'_>| step.attend_device(LayerIdx(0), at(2, 8), at(3, 8), None, None);
        let mut step = cache.reserve(&[(seqs[0], 1)]).expect("fits");
        step.append_device(LayerIdx(0), at(0, 2), at(1, 2)).expect("uploads the slots");
        attend(&mut step).expect("uploads the lists");
        let launches = counter("launches");
        stream.capture();
        let what = format!("{format:?} {mode:?}");
        // The second layer of a hybrid is of another group, and nothing of that is there.
        for _ in 0..2 {
            let refused = step.append_device(LayerIdx(1), at(0, 2), at(1, 2)).unwrap_err();
            assert!(refused.to_string().contains("Step::prepare"), "{what}: {refused}");
            let refused = attend(&mut step).unwrap_err();
            assert!(refused.to_string().contains("Step::prepare"), "{what}: {refused}");
            // Nor does a preparation that is refused change that.
            step.prepare().unwrap_err();
        }
        stream.captured();
        assert_eq!(counter("launches"), launches, "{what}: nothing was captured");
        // Once it is prepared, a graph may have it.
        step.prepare().expect("uploads");
        stream.capture();
        step.append_device(LayerIdx(1), at(0, 2), at(1, 2)).expect("prepared");
        attend(&mut step).expect("prepared");
        stream.play(stream.captured());
        step.commit().expect("whole");
        cache.synchronize().expect("no kernel failed");
        cache.check_invariants().expect("whole");
    }
}

/// A graph would zero whatever lies there whenever it is played.
#[test]
#[ignore = "started by cuda::the_tests_of_the_device_run_on_the_emulated_device"]
fn what_is_zeroed_is_kept_out_of_a_capture() {
    driver::enter();
    for mode in MODES {
        let spec =
            Spec { mode, scrub: Scrub::OnRelease, max_rewind_tokens: 8, ..spec(Format::F16) };
        let mut cache = spec.open();
        let stream = Stream::new();
        // SAFETY: it lives until the process ends.
        cache.set_stream(unsafe { CudaStream::new(stream.0.cast()) }).expect("set");
        let seqs = prefill(&mut cache, &[40, 21]);
        cache.synchronize().expect("done");
        let failures = cache.stats().scrub_failures;
        let (fills, launches) = (counter("fills"), counter("launches"));
        stream.capture();
        cache.truncate(seqs[0], 35).expect("within the rewind");
        cache.release(seqs[1]).expect("alive");
        assert!(cache.stats().scrub_failures >= failures + 2, "{mode:?}: the device refused");
        assert_eq!((counter("fills"), counter("launches")), (fills, launches), "{mode:?}");
        stream.captured();
        // What could not be zeroed then is when somebody takes it.
        cache.check_invariants().expect("dirty blocks are known");
        let next = begin(&mut cache, 0);
        append_step(&mut cache, &[(next, 3)], &[1, 2, 3]).expect("fits");
        assert!(counter("fills") + counter("launches") > fills + launches, "{mode:?}");
        cache.check_invariants().expect("clean");
    }
}
