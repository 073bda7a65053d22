//! One bitwise-equal answer (P5), and nothing of others in it (P8): edge cases 43, 46, 50.

use kvpool::cache::{AttendOptions, Cache, SeqHandle};
use kvpool::config::{CacheMode, Format, KernelChoice, ScaleKind};
use kvpool::device::{TensorMut, TensorRef};
use kvpool::error::{CacheError, DeviceError};
use kvpool::units::LayerIdx;

use crate::common::{
    FORMATS, MODES, Outputs, Rng, Spec, append_step, assert_refused, assert_same_bits, begin,
    element, naive_attention, on_cuda, run_step, tensor,
};

/// A model with a full and two windowed layers, and sequences longer than one split of the keys.
fn spec(format: Format, scale: ScaleKind) -> Spec {
    Spec {
        format,
        scale,
        windows: vec![0, 40, 600],
        sink_tokens: 5,
        num_q_heads: 6,
        num_kv_heads: 2,
        head_dim: 32,
        max_seqs: 3,
        max_seq_len: 1200,
        max_batch_tokens: 256,
        max_step_tokens: Some(40),
        ..Spec::default()
    }
}

/// The tokens of sequence `which`.
fn tags(which: u64, len: u32) -> Vec<u64> {
    (0..u64::from(len)).map(|at| which * 10_000 + at).collect()
}

/// Runs one sequence of `len` tokens to its end in steps of the given size, `others` running along
/// in the same steps, and gives all its rows in order: `[layer][row][q heads * head_dim]`.
fn run_alone_or_not(spec: &Spec, len: u32, step: u32, others: u64) -> Vec<Vec<f32>> {
    let mut cache = spec.open();
    // Dirty the pool first: another owner's bytes, then NaN everywhere.
    let dirt = begin(&mut cache, 0);
    for chunk in tags(99, 200).chunks(40) {
        append_step(&mut cache, &[(dirt, chunk.len() as u32)], chunk).expect("fits");
    }
    cache.release(dirt).expect("alive");
    cache.poison_unused(0xFF).expect("poison");
    let other: Vec<SeqHandle> = (0..others).map(|_| begin(&mut cache, 0)).collect();
    let own = begin(&mut cache, 0);
    let all = tags(1, len);
    let layers = spec.windows.len();
    let mut rows = vec![Vec::new(); layers];
    let mut rng = Rng(others);
    for chunk in all.chunks(step as usize) {
        let mut batch = Vec::new();
        let mut step_tags = Vec::new();
        for (which, seq) in (0_u64..).zip(&other) {
            let now = cache.seq_len(*seq).expect("alive");
            let tokens = 1 + rng.below(7) as u32;
            batch.push((*seq, tokens));
            step_tags.extend(&tags(which + 2, now + tokens)[now as usize..]);
        }
        let before = step_tags.len();
        batch.push((own, chunk.len() as u32));
        step_tags.extend(chunk);
        let out = run_step(&mut cache, &batch, &step_tags).expect("fits");
        let width = (spec.num_q_heads * spec.head_dim) as usize;
        for (rows, out) in rows.iter_mut().zip(&out.out) {
            rows.extend_from_slice(&out[before * width..]);
        }
    }
    rows
}

fn assert_same_rows(a: &[Vec<f32>], b: &[Vec<f32>], what: &str) {
    assert_eq!(a.len(), b.len());
    for (layer, (a, b)) in a.iter().zip(b).enumerate() {
        assert_same_bits(a, b, &format!("{what}, layer {layer}"));
    }
}

#[test]
fn edge_43_one_answer_for_every_mode_block_size_batch_and_thread_count() {
    for (format, scale) in FORMATS {
        let base = Spec { threads: 2, ..spec(format, scale) };
        // The emulated GPU is a few hundred times slower: there every mode of every format, and
        // the rest in one format.
        let all = !on_cuda() || format == Format::F16;
        let (len, blocks): (u32, &[u32]) = match (on_cuda(), all) {
            (false, _) => (700, &[8, 16, 32, 64, 128]),
            (true, true) => (530, &[8, 64]),
            (true, false) => (530, &[16]),
        };
        let want = run_alone_or_not(&base, len, 40, 0);
        for layer in &want {
            assert!(layer.iter().all(|x| x.is_finite()), "NaN of an unused place came through");
        }
        for mode in MODES {
            for &tokens_per_block in blocks {
                if mode == CacheMode::Contiguous && tokens_per_block != blocks[0] {
                    continue;
                }
                let spec =
                    Spec { tokens_per_block, contiguous_layers: vec![1, 0], mode, ..base.clone() };
                let got = run_alone_or_not(&spec, len, 40, 0);
                assert_same_rows(&want, &got, &format!("{mode:?}, {tokens_per_block}, {format:?}"));
            }
        }
        let batches: &[(u32, u32, u64)] = match (on_cuda(), all) {
            (false, _) => &[(1, 40, 0), (3, 40, 2), (1, 7, 1), (2, 33, 2), (1, 1, 0)],
            (true, true) => &[(1, 33, 2), (1, 7, 1)],
            (true, false) => &[],
        };
        for &(threads, step, others) in batches {
            let len = if step == 1 { 560 } else { len };
            let spec = Spec { threads, ..base.clone() };
            let got = run_alone_or_not(&spec, len, step, others);
            let width = (spec.num_q_heads * spec.head_dim) as usize * len as usize;
            let want: Vec<Vec<f32>> = want.iter().map(|rows| rows[..width].to_vec()).collect();
            assert_same_rows(
                &want,
                &got,
                &format!("{threads} threads, steps of {step}, {others} others, {format:?}"),
            );
        }
    }
}

/// Every kernel that this CPU has gives one answer in every mode, near to the reference.
#[test]
fn kernels_agree_with_the_reference() {
    let reference =
        Spec { kernel: KernelChoice::Reference, ..spec(Format::F16, ScaleKind::PerTokenHead) };
    let want = run_alone_or_not(&reference, 130, 40, 1);
    let mut ran = Vec::new();
    for kernel in
        [KernelChoice::Reference, KernelChoice::Portable, KernelChoice::Avx2, KernelChoice::Avx512]
    {
        let spec = Spec { kernel, ..reference.clone() };
        let opened =
            kvpool::device::cpu::CpuDevice::open(&spec.plan(), &spec.config().device, None);
        if let Err(DeviceError::KernelUnsupported { kernel, needs }) = opened {
            println!("skipped: this CPU lacks {needs} for the {kernel} kernels");
            continue;
        }
        let first = run_alone_or_not(&spec, 130, 40, 1);
        for mode in MODES {
            let got = run_alone_or_not(&Spec { mode, ..spec.clone() }, 130, 40, 1);
            assert_same_rows(&first, &got, &format!("{kernel:?} {mode:?}"));
        }
        for (want, got) in want.iter().flatten().zip(first.iter().flatten()) {
            assert!((want - got).abs() < 1e-4, "{kernel:?}: {got}, reference {want}");
        }
        ran.push(kernel);
    }
    assert!(ran.len() >= 2, "{ran:?}");
}

#[test]
fn edge_46_one_token_beside_a_full_sequence_and_other_batches() {
    for mode in MODES {
        let spec = Spec { mode, max_seq_len: 96, max_batch_tokens: 97, ..Spec::default() };
        let mut cache = spec.open();
        let (long, short) = (begin(&mut cache, 0), begin(&mut cache, 0));
        let long_tags = tags(1, 96);
        append_step(&mut cache, &[(long, 95)], &long_tags[..95]).expect("fits");
        let out =
            run_step(&mut cache, &[(short, 1), (long, 1)], &[7, long_tags[95]]).expect("fits");
        let geometry = spec.geometry();
        for (row, tags) in [(0, &[7][..]), (1, &long_tags[..])] {
            for head in 0..2 {
                let (want, _) = naive_attention(&geometry, tags, 1, head, |_, row| row.to_vec());
                let start = (row * 2 + head as usize) * 8;
                for (got, want) in out.out[1][start..start + 8].iter().zip(&want) {
                    assert!((f64::from(*got) - want).abs() < 1e-5);
                }
            }
        }
        // A sequence of one token attends to itself alone: the output is its own V, exactly.
        let v: Vec<f32> = (0..8).map(|d| element(7, 0, 1, 1, 0, d)).collect();
        assert_same_bits(&out.out[1][..8], &v, "one key");

        // The empty batch is a step like any other.
        let Outputs { out, .. } = run_step(&mut cache, &[], &[]).expect("no tokens");
        assert!(out.iter().all(Vec::is_empty));
        let error = assert_refused(&mut cache, |cache| {
            cache.reserve(&[(short, 1), (short, 1)]).map(|_| ())
        });
        assert_eq!(error, CacheError::SequenceTwice { slot: short.slot() });
    }
}

#[test]
fn edge_50_nan_in_the_unused_tail_of_int8_blocks() {
    for scale in [ScaleKind::PerTokenHead, ScaleKind::PerGroup32, ScaleKind::PerTensor] {
        for mode in MODES {
            let spec = Spec { mode, ..spec(Format::Int8, scale) };
            let mut cache = spec.open();
            cache.poison_unused(0xFF).expect("poison");
            let seq = begin(&mut cache, 0);
            for (at, tag) in tags(1, 21).into_iter().enumerate() {
                let out = run_step(&mut cache, &[(seq, 1)], &[tag]).expect("fits");
                let finite = out.out.iter().flatten().all(|x| x.is_finite());
                assert!(finite, "NaN at token {at}, {mode:?}, {scale:?}");
                cache.poison_unused(0xFF).expect("poison");
            }
        }
    }
}

/// The step refuses what an engine may get wrong, and says what it wanted.
#[test]
fn steps_refuse_wrong_calls() {
    let mut cache = Spec::default().open();
    let seq = begin(&mut cache, 0);
    let call = |cache: &mut Cache, what: &str| -> Result<(), CacheError> {
        let mut step = cache.reserve(&[(seq, 2)])?;
        let (k, q) = (vec![0.0; 16], vec![0.0; 32]);
        let (mut out, mut lse) = (vec![0.0; 32], vec![0.0; 4]);
        let (k, q) = (TensorRef::F32(&k), TensorRef::F32(&q));
        let layer = LayerIdx(0);
        let none = AttendOptions::default;
        match what {
            "no such layer" => step.append(LayerIdx(2), k, k),
            "short k" => step.append(layer, TensorRef::F32(&[0.0; 15]), k),
            "two types" => step.append(layer, k, TensorRef::F16(&[half::f16::ONE; 16])),
            "long v" => step.append(layer, k, TensorRef::F32(&[0.0; 17])),
            "attend first" => step.attend(layer, q, TensorMut::F32(&mut out), none()),
            "twice" => step.append(layer, k, k).and_then(|()| step.append(layer, k, k)),
            "commit early" => step.append(layer, k, k).and_then(|()| step.commit()),
            _ => {
                step.append(layer, k, k)?;
                match what {
                    "short q" => step.attend(layer, k, TensorMut::F32(&mut out), none()),
                    "short out" => step.attend(layer, q, TensorMut::F32(&mut out[..31]), none()),
                    "short lse" => {
                        let options = AttendOptions { lse: Some(&mut lse[..3]), ..none() };
                        step.attend(layer, q, TensorMut::F32(&mut out), options)
                    }
                    scale => {
                        let softmax_scale = Some(scale.parse().expect("a number"));
                        let options = AttendOptions { softmax_scale, lse: None };
                        step.attend(layer, q, TensorMut::F32(&mut out), options)
                    }
                }
            }
        }
    };
    for (what, says) in [
        ("no such layer", "layer 2 does not exist; the model has 2"),
        ("short k", "k has 15 elements, expected 16"),
        ("long v", "v has 17 elements, expected 16"),
        ("two types", "k is of f32 and v of f16; give both in one element type"),
        ("attend first", "layer 0 is attended before"),
        ("twice", "layer 0 was already appended"),
        ("commit early", "1 layer was not appended in this step, the first is 1"),
        ("short q", "q has 16 elements, expected 32"),
        ("short out", "out has 31 elements, expected 32"),
        ("short lse", "lse has 3 elements, expected 4"),
        ("NaN", "softmax scale"),
        ("0", "softmax scale"),
        ("-1", "softmax scale"),
        ("inf", "softmax scale"),
    ] {
        let error = assert_refused(&mut cache, |cache| call(cache, what));
        assert!(error.to_string().contains(says), "{what}: {error}");
    }
}

/// Input in f16 and bf16, output in f16: the same numbers as f32 where they are exact.
#[test]
fn tensors_of_other_types_give_the_same_answer() {
    use half::{bf16, f16};
    for format in [Format::F32, Format::F16, Format::Bf16, Format::Int8] {
        let spec = Spec { format, ..Spec::default() };
        let mut cache = spec.open();
        let seqs: Vec<SeqHandle> = (0..3).map(|_| begin(&mut cache, 0)).collect();
        let want = run_step(&mut cache, &[(seqs[0], 9)], &tags(1, 9)).expect("fits");
        for (seq, narrow) in [(seqs[1], false), (seqs[2], true)] {
            let mut step = cache.reserve(&[(seq, 9)]).expect("fits");
            let positions = step.positions().to_vec();
            for layer in 0..2 {
                let input = |what, heads| tensor(&tags(1, 9), &positions, layer, what, heads, 8);
                let (k, v, q) = (input(0, 1), input(1, 1), input(2, 2));
                let half = |x: &[f32]| x.iter().map(|x| f16::from_f32(*x)).collect::<Vec<_>>();
                let brain = |x: &[f32]| x.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>();
                let mut out = vec![f16::NAN; q.len()];
                let layer = LayerIdx(layer);
                if narrow {
                    let (k, v, q) = (brain(&k), brain(&v), brain(&q));
                    step.append(layer, (&k[..]).into(), (&v[..]).into()).expect("append");
                    let out = TensorMut::F16(&mut out);
                    step.attend(layer, (&q[..]).into(), out, AttendOptions::default())
                        .expect("attend");
                } else {
                    let (k, v, q) = (half(&k), half(&v), half(&q));
                    step.append(layer, (&k[..]).into(), (&v[..]).into()).expect("append");
                    let out = TensorMut::F16(&mut out);
                    step.attend(layer, (&q[..]).into(), out, AttendOptions::default())
                        .expect("attend");
                }
                for (got, want) in out.iter().zip(&want.out[layer.index()]) {
                    assert_eq!(got.to_bits(), f16::from_f32(*want).to_bits());
                }
            }
            step.commit().expect("all layers");
        }
    }
}
