//! Rotary position encoding on the way into the cache: the same bits on every device, in every
//! mode.

use std::path::Path;

use kvpool::cache::{BeginOptions, Cache, SeqHandle};
use kvpool::config::{CacheMode, Format, RopeConfig, RopeScaling, RopeStyle, parse};
use kvpool::device::{TensorMut, TensorRef};
use kvpool::plan::{Kv, Rope};
use kvpool::units::LayerIdx;

use crate::common::{FORMATS, MODES, Spec, assert_same_bits, begin, tensor};

/// Two layers with a window, whose angles are others, and one without; 48 of 64 elements turn.
fn spec(style: RopeStyle) -> Spec {
    Spec {
        windows: vec![0, 20, 0],
        sink_tokens: 2,
        num_q_heads: 4,
        num_kv_heads: 2,
        head_dim: 64,
        max_seqs: 3,
        max_seq_len: 96,
        max_batch_tokens: 48,
        max_step_tokens: Some(16),
        rope: Some(RopeConfig {
            theta: Some(10_000.0),
            dims: Some(48),
            style,
            scaling: Some(RopeScaling::Linear { factor: 4.0 }),
            window_theta: Some(500.0),
        }),
        ..Spec::default()
    }
}

fn tags(which: u64, len: u32) -> Vec<u64> {
    (0..u64::from(len)).map(|at| which * 10_000 + at).collect()
}

/// Appends the tokens of a sequence from its length on in steps of up to 13, K turned by `turn`
/// beforehand, and attends with queries that are turned; gives the last step's outputs, `[layers]`.
fn run(cache: &mut Cache, seq: SeqHandle, all: &[u64], rope: &Rope, turn: bool) -> Vec<Vec<f32>> {
    let geometry = cache.plan().geometry.clone();
    let dim = geometry.head_dim;
    let mut outputs = Vec::new();
    let from = cache.seq_len(seq).expect("alive") as usize;
    for chunk in all[from..].chunks(13) {
        let mut step = cache.reserve(&[(seq, chunk.len() as u32)]).expect("fits");
        let positions = step.positions().to_vec();
        outputs.clear();
        for layer in 0..geometry.num_layers {
            let input = |what, heads| tensor(chunk, &positions, layer, what, heads, dim);
            let turned = |mut x: Vec<f32>| {
                let row = x.len() / positions.len();
                let table = rope.table_of(geometry.windows[layer as usize] > 0);
                for (x, position) in x.chunks_mut(row).zip(&positions) {
                    rope.rotate(table, *position, dim, x);
                }
                x
            };
            let (k, v) = (input(0, geometry.num_kv_heads), input(1, geometry.num_kv_heads));
            let k = if turn { turned(k) } else { k };
            let q = turned(input(2, geometry.num_q_heads));
            let mut out = vec![f32::NAN; q.len()];
            let layer = LayerIdx(layer);
            step.append(layer, TensorRef::F32(&k), TensorRef::F32(&v)).expect("append");
            let options = kvpool::cache::AttendOptions::default();
            step.attend(layer, TensorRef::F32(&q), TensorMut::F32(&mut out), options)
                .expect("attend");
            outputs.push(out);
        }
        step.commit().expect("whole");
    }
    outputs
}

fn pool(cache: &Cache) -> Vec<u8> {
    let mut bytes = vec![0; cache.plan().pool_bytes.get() as usize];
    cache.read_bytes(0, &mut bytes).expect("inside");
    bytes
}

/// What is stored is what a cache without RoPE stores of K that was turned before; and so it is in
/// every mode, on every device.
#[test]
fn k_is_turned_by_its_position_and_then_stored_as_ever() {
    for style in [RopeStyle::Halves, RopeStyle::Pairs] {
        for (format, scale) in FORMATS {
            let mut outputs = Vec::new();
            for mode in MODES {
                let spec = Spec { format, scale, mode, ..spec(style) };
                let rope = spec.plan().rope.expect("asked for");
                let (mut inside, mut before) =
                    (spec.open(), Spec { rope: None, ..spec.clone() }.open());
                let (a, b) = (begin(&mut inside, 0), begin(&mut before, 0));
                let got = run(&mut inside, a, &tags(1, 60), &rope, false);
                let want = run(&mut before, b, &tags(1, 60), &rope, true);
                let what = format!("{style:?} {format:?} {scale:?} {mode:?}");
                assert_eq!(pool(&inside), pool(&before), "{what}");
                for (got, want) in got.iter().zip(&want) {
                    assert_same_bits(got, want, &what);
                }
                outputs.push(got);
            }
            for other in &outputs[1..] {
                for (a, b) in outputs[0].iter().zip(other) {
                    assert_same_bits(a, b, &format!("modes, {style:?} {format:?}"));
                }
            }
        }
    }
}

/// A step that is long enough to be dealt out to several threads, and written past the caches.
#[test]
fn long_steps_are_turned_too() {
    for (format, scale) in FORMATS {
        let spec = Spec {
            format,
            scale,
            windows: vec![0],
            sink_tokens: 0,
            num_q_heads: 8,
            num_kv_heads: 8,
            head_dim: 128,
            max_seqs: 1,
            max_seq_len: 500,
            max_batch_tokens: 500,
            max_step_tokens: None,
            rope: Some(RopeConfig { theta: Some(1e4), ..RopeConfig::default() }),
            threads: 3,
            ..spec(RopeStyle::Halves)
        };
        let rope = spec.plan().rope.expect("asked for");
        let positions: Vec<u32> = (0..500).collect();
        let input = |what| tensor(&tags(1, 500), &positions, 0, what, 8, 128);
        let (k, v) = (input(0), input(1));
        let mut turned = k.clone();
        for (x, position) in turned.chunks_mut(8 * 128).zip(&positions) {
            rope.rotate(0, *position, 128, x);
        }
        let mut pools = Vec::new();
        for (spec, k) in [(spec.clone(), &k), (Spec { rope: None, ..spec }, &turned)] {
            let mut cache = spec.open();
            let seq = begin(&mut cache, 0);
            let mut step = cache.reserve(&[(seq, 500)]).expect("fits");
            step.append(LayerIdx(0), TensorRef::F32(k), TensorRef::F32(&v)).expect("append");
            step.commit().expect("whole");
            pools.push(pool(&cache));
        }
        assert_eq!(pools[0], pools[1], "{format:?} {scale:?}");
    }
}

/// The numbers themselves, from the definition in f64; and the same bits as the CPU's reference.
#[test]
fn k_is_turned_as_the_definition_says() {
    for style in [RopeStyle::Halves, RopeStyle::Pairs] {
        let spec = Spec { format: Format::F32, ..spec(style) };
        let rope = spec.plan().rope.expect("asked for");
        let (mut cache, mut cpu) = (spec.open(), spec.open_on_cpu());
        let (seq, other) = (begin(&mut cache, 0), begin(&mut cpu, 0));
        run(&mut cache, seq, &tags(1, 60), &rope, false);
        run(&mut cpu, other, &tags(1, 60), &rope, false);
        assert_eq!(pool(&cache), pool(&cpu), "{style:?}: the devices differ");
        let planned = cpu.plan().cpu_workspace_bytes(1).expect("fits");
        assert_eq!(cpu.device_info().workspace_bytes, planned, "the tables are in the plan");
        for (layer, theta, factor) in [(0, 10_000.0_f64, 4.0), (1, 500.0, 1.0), (2, 10_000.0, 4.0)]
        {
            let mut got = vec![f32::NAN; 128];
            cache.export(seq, LayerIdx(layer), Kv::K, 59, 60, &mut got).expect("held");
            let x = tensor(&tags(1, 60)[59..], &[59], layer, 0, 2, 64);
            for (x, got) in x.chunks(64).zip(got.chunks(64)) {
                for pair in 0..24 {
                    let (a, b) = match style {
                        RopeStyle::Halves => (pair, pair + 24),
                        RopeStyle::Pairs => (2 * pair, 2 * pair + 1),
                    };
                    let angle = 59.0 / factor * theta.powf(-(pair as f64) / 24.0);
                    let (x, y) = (f64::from(x[a]), f64::from(x[b]));
                    let want =
                        [x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()];
                    for (got, want) in [got[a], got[b]].iter().zip(want) {
                        let error = (f64::from(*got) - want).abs();
                        assert!(error < 2e-6, "{style:?} layer {layer} pair {pair}: {got}, {want}");
                    }
                }
                assert_same_bits(&got[48..], &x[48..], "what is not turned");
            }
        }
    }
}

/// A sequence that continues a cached prefix is turned by its own positions: the same outputs as
/// computed from the start.
#[test]
fn a_shared_prefix_is_turned_once() {
    let spec = Spec { windows: vec![0, 0], sink_tokens: 0, ..spec(RopeStyle::Halves) };
    let spec =
        Spec { rope: Some(RopeConfig { theta: Some(1e4), ..RopeConfig::default() }), ..spec };
    let rope = spec.plan().rope.expect("asked for");
    for mode in [CacheMode::Paged, CacheMode::Hybrid] {
        let mut cache = Spec { mode, ..spec.clone() }.open();
        let prompt: Vec<u32> = (0..40).collect();
        let all: Vec<u64> = (0..40).collect();
        let mut outputs = Vec::new();
        for cached in [0, 32] {
            let begun = cache.begin(&prompt, BeginOptions::default()).expect("admitted");
            // Whole blocks, and in part the one that the last token is in.
            assert!(begun.cached_len >= cached && (cached > 0) == (begun.cached_len > 0));
            outputs.push(run(&mut cache, begun.sequence, &all, &rope, false));
        }
        let row = 4 * 64;
        for (a, b) in outputs[0].iter().zip(&outputs[1]) {
            assert_same_bits(&a[a.len() - row..], &b[b.len() - row..], "the last row");
        }
    }
}

/// What cannot be turned is refused by name, and a preset knows its own angles.
#[test]
fn settings_that_make_no_sense_are_refused_by_name() {
    let base = "limits = { max_seqs = 1, max_seq_len = 64, max_batch_tokens = 64 }\n\
                cache = { mode = 'paged' }\n";
    let numbers = "model = { num_layers = 2, num_q_heads = 2, num_kv_heads = 2, head_dim = 40 }\n";
    let read = |model: &str, rope: &str| {
        let text = format!("{model}{base}rope = {{ {rope} }}\n");
        parse(&text, Path::new("r.toml"), &[]).map_err(|error| error.to_string())
    };
    for (rope, says) in [
        ("", "rope.theta: is missing; only a model.preset knows its own"),
        ("theta = 1.0", "rope.theta: is 1; expected a finite number above 1"),
        ("theta = nan", "rope.theta: is NaN"),
        ("theta = 1e4", "rope.dims: 40 elements of 40 cannot be rotated in halves"),
        ("theta = 1e4, dims = 48", "rope.dims: 48 elements of 40"),
        ("theta = 1e4, dims = 4, style = 'pairs'", "rope.dims: 4 elements of 40"),
        ("theta = 1e4, style = 'thirds'", "rope.style: "),
        ("theta = 1e4, dims = 32, window_theta = 1e4", "rope.window_theta: is 10000, and no layer"),
        ("theta = 1e4, dims = 32, scaling = { kind = 'linear', factor = 0.5 }", "factor: is 0.5"),
        ("theta = 1e4, dims = 32, scaling = { kind = 'magic' }", "rope.scaling"),
        (
            "theta = 1e4, dims = 32, scaling = { kind = 'yarn', factor = 8.0, \
             original_max_position = 64, beta_fast = 1.0, beta_slow = 2.0 }",
            "rope.scaling.beta_fast: is 1; expected a finite number above beta_slow, which is 2",
        ),
    ] {
        let error = read(numbers, rope).expect_err(rope);
        assert!(error.contains(says), "{rope}: {error}");
    }
    assert!(read(numbers, "theta = 1e4, style = 'pairs'").is_ok());
    let error = read("model.preset = 'llama-3-8b'\n", "dims = 64").expect_err("which theta?");
    assert!(error.contains("rope: changes what model.preset has"), "{error}");
    let error = read("model.preset = 'phi-3-mini-128k'\n", "").expect_err("a list");
    assert!(error.contains("rope.theta: is missing, and what"), "{error}");
    let source = read("model.preset = 'gemma-3-4b'\n", "").expect("knows its own");
    let plan = kvpool::plan::Plan::new(&source.config, &source.geometry).expect("fits");
    let rope = plan.rope.as_ref().expect("asked for");
    assert_eq!((rope.tables.len(), rope.dims, rope.positions), (2, 256, 64));
    assert_eq!(
        (plan.rope_table_of(LayerIdx(0)), plan.rope_table_of(LayerIdx(5))),
        (Some(1), Some(0))
    );
    let job = format!(
        "{numbers}{base}rope = {{ theta = 1e4, style = 'pairs' }}\n[workload]\nkind = 'generator'\n\
         requests = 1\nprompt_tokens = {{ dist = 'fixed', value = 3 }}\n\
         output_tokens = {{ dist = 'fixed', value = 3 }}\n"
    );
    let error = parse(&job, Path::new("r.toml"), &[]).expect_err("a job").to_string();
    assert!(error.contains("rope: rotates K, and a [workload] makes up K"), "{error}");
}
