//! INT8 through the cache: edge cases 47–49, 51, 52.

use kvpool::cache::{Cache, SeqHandle};
use kvpool::config::{Format, ScaleKind};
use kvpool::device::TensorRef;
use kvpool::plan::{Kv, SeqView};
use kvpool::units::{GroupIdx, LayerIdx};

use crate::common::{MODES, Rng, Spec, begin};

const DIM: u32 = 64;

fn spec(scale: ScaleKind) -> Spec {
    Spec {
        format: Format::Int8,
        scale,
        windows: vec![0],
        num_q_heads: 1,
        head_dim: DIM,
        max_seq_len: 128,
        max_batch_tokens: 128,
        ..Spec::default()
    }
}

/// Appends rows of K (V is the same) and reads K back.
fn through(cache: &mut Cache, seq: SeqHandle, rows: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let from = cache.seq_len(seq).expect("alive");
    let flat: Vec<f32> = rows.concat();
    let mut step = cache.reserve(&[(seq, rows.len() as u32)]).expect("fits");
    step.append(LayerIdx(0), TensorRef::F32(&flat), TensorRef::F32(&flat)).expect("append");
    step.commit().expect("whole");
    let mut out = vec![f32::NAN; flat.len()];
    let to = from + rows.len() as u32;
    cache.export(seq, LayerIdx(0), Kv::K, from, to, &mut out).expect("held");
    out.chunks(DIM as usize).map(<[f32]>::to_vec).collect()
}

#[test]
fn edge_47_extreme_inputs_are_defined_counted_and_confined() {
    let plain: Vec<f32> = (0..DIM).map(|d| (d as f32 - 30.0) / 8.0).collect();
    let with = |changes: &[(usize, f32)]| {
        let mut row = plain.clone();
        changes.iter().for_each(|(at, x)| row[*at] = *x);
        row
    };
    let f16_max = 65504.0;
    let rows = [
        vec![0.0; DIM as usize],
        with(&[(3, 1e4)]),
        vec![1e-40; DIM as usize],
        with(&[(0, f16_max), (1, -f16_max)]),
        with(&[(5, f32::NAN)]),
        with(&[(6, f32::INFINITY), (7, f32::NEG_INFINITY)]),
        with(&[(0, f32::MAX)]),
        vec![f32::NAN; DIM as usize],
    ];
    for kind in [ScaleKind::PerTokenHead, ScaleKind::PerGroup32] {
        let mut cache = spec(kind).open();
        let alone = begin(&mut cache, 0);
        let want = through(&mut cache, alone, std::slice::from_ref(&plain));
        for extreme in &rows {
            let seq = begin(&mut cache, 0);
            let before = cache.stats().nonfinite;
            // A plain row before and after, in the same block and in the same append.
            let got = through(&mut cache, seq, &[plain.clone(), extreme.clone(), plain.clone()]);
            assert_eq!(got[0], want[0], "confined to its token");
            assert_eq!(got[2], want[0], "confined to its token");
            assert!(got[1].iter().all(|x| x.is_finite()), "{extreme:?}");
            let nonfinite = extreme.iter().filter(|x| !x.is_finite()).count() as u64;
            // K and V each.
            assert_eq!(cache.stats().nonfinite - before, 2 * nonfinite);
            for (x, got) in extreme.iter().zip(&got[1]) {
                if x.is_nan() {
                    assert_eq!(*got, 0.0);
                } else if x.is_infinite() {
                    let largest = plain.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
                    assert!(got.signum() == x.signum() && got.abs() <= largest * 1.01, "{got}");
                }
            }
            cache.release(seq).expect("alive");
        }
        // A zero vector gives exact zeros.
        let seq = begin(&mut cache, 0);
        let got = through(&mut cache, seq, &rows[..1]);
        assert!(got[0].iter().all(|x| x.to_bits() == 0));
        cache.release(seq).expect("alive");
    }
    // Static scales: beyond the range is saturated and counted.
    let mut cache = spec(ScaleKind::PerTensor).open();
    let seq = begin(&mut cache, 0);
    let got = through(&mut cache, seq, &[with(&[(3, 1e4), (4, -1e4), (5, f32::NAN)])]);
    assert_eq!((got[0][3], got[0][4], got[0][5]), (4.0, -4.0, 0.0));
    let over = plain.iter().enumerate().filter(|(at, x)| x.abs() > 4.0 && ![3, 4, 5].contains(at));
    assert_eq!(cache.stats().saturated, 2 * (2 + over.count() as u64));
    assert_eq!(cache.stats().nonfinite, 2);
}

/// Random rows with magnitudes over many orders.
fn random_rows(rng: &mut Rng, count: usize) -> Vec<Vec<f32>> {
    (0..count)
        .map(|_| {
            let scale = 2.0_f32.powi(rng.below(60) as i32 - 30);
            (0..DIM).map(|_| (rng.below(1 << 20) as f32 / (1 << 19) as f32 - 1.0) * scale).collect()
        })
        .collect()
}

#[test]
fn edge_48_error_within_half_a_scale_and_requantising_changes_nothing() {
    let mut rng = Rng(1);
    for kind in [ScaleKind::PerTokenHead, ScaleKind::PerGroup32] {
        let mut cache = spec(kind).open();
        for _ in 0..20 {
            let rows = random_rows(&mut rng, 16);
            let seq = begin(&mut cache, 0);
            let once = through(&mut cache, seq, &rows);
            let group = if kind == ScaleKind::PerGroup32 { 32 } else { DIM as usize };
            for (row, got) in rows.iter().zip(&once) {
                for (row, got) in row.chunks(group).zip(got.chunks(group)) {
                    let largest = row.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
                    // The scale is largest / 127, rounded up by less than 1/256.
                    let half_scale = largest / 127.0 * (1.0 + 1.0 / 256.0) / 2.0;
                    for (x, x1) in row.iter().zip(got) {
                        assert!((x - x1).abs() <= half_scale * 1.000_001, "{x} {x1}");
                    }
                }
            }
            let bytes = raw(&cache, seq, 0, 16);
            let twice = through(&mut cache, seq, &once);
            assert_eq!(once, twice);
            assert_eq!(bytes, raw(&cache, seq, 16, 32), "not a byte, not a scale");
            for (q, _) in bytes {
                assert!(q.iter().all(|q| *q != 0x80), "-128 is never produced");
            }
            cache.release(seq).expect("alive");
        }
    }
}

/// The stored bytes of K of some tokens: elements and scales.
fn raw(cache: &Cache, seq: SeqHandle, from: u32, to: u32) -> Vec<(Vec<u8>, Vec<u8>)> {
    let layout = &cache.plan().groups[0].layout;
    let (table, row) = cache.block_table(GroupIdx(0)).expect("paged");
    let start = (seq.slot() * row) as usize;
    let view = SeqView { layout, table: &table[start..start + row as usize], slot: seq.slot() };
    (from..to)
        .map(|position| {
            let (unit, token) = view.place(position);
            let mut q = vec![0; layout.row_bytes() as usize];
            cache.read_bytes(layout.row(unit, 0, Kv::K, 0, token), &mut q).expect("in the pool");
            let mut scales = vec![0; layout.scales_per_row as usize * 2];
            cache
                .read_bytes(layout.scales(unit, 0, Kv::K, 0, token), &mut scales)
                .expect("in the pool");
            (q, scales)
        })
        .collect()
}

#[test]
fn edge_49_appending_changes_no_earlier_byte() {
    let mut rng = Rng(2);
    for kind in [ScaleKind::PerTokenHead, ScaleKind::PerGroup32, ScaleKind::PerTensor] {
        let mut cache = spec(kind).open();
        let seq = begin(&mut cache, 0);
        let mut before: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
        for _ in 0..30 {
            let count = 1 + rng.below(4) as usize;
            through(&mut cache, seq, &random_rows(&mut rng, count));
            let len = cache.seq_len(seq).expect("alive");
            let now = raw(&cache, seq, 0, len);
            assert_eq!(now[..before.len()], before[..]);
            before = now;
        }
    }
}

/// All that the default inputs of `Spec` are in the range of, static scales too.
const KINDS: [ScaleKind; 3] =
    [ScaleKind::PerTokenHead, ScaleKind::PerGroup32, ScaleKind::PerTensor];

/// Keys and values with the same statistics at every length: the error of the output must not
/// grow with the number of keys.
#[test]
fn edge_51_error_does_not_grow_with_128k_keys() {
    let (short, long) = (output_errors(1 << 10, 1.0), output_errors(1 << 17, 1.0));
    for (kind, (short, long)) in KINDS.iter().zip(short.into_iter().zip(long)) {
        println!("{}: {short:.2e} at 1k keys, {long:.2e} at 128k keys", kind.name());
        assert!(long <= short * 1.5, "{kind:?}: {short:e} {long:e}");
    }
}

/// The error of each granularity when K has one outlier channel; `docs/accuracy.md` states it.
#[test]
fn edge_52_error_with_an_outlier_channel_by_granularity() {
    let (plain, outlier) = (output_errors(2048, 1.0), output_errors(2048, 20.0));
    for (kind, (plain, outlier)) in KINDS.iter().zip(plain.iter().zip(&outlier)) {
        println!("{}: {plain:.2e}, with one K channel 20 times larger {outlier:.2e}", kind.name());
    }
    // Bounds with room for other seeds.
    assert!(plain.iter().all(|error| *error < 0.02), "{plain:?}");
    assert!(outlier[0] < 0.2 && outlier[1] < 0.2, "{outlier:?}");
    assert!(outlier[1] < outlier[0], "a group of 32 confines the outlier: {outlier:?}");
    // Scales for a range of ±4 cut the channel off, which is counted; a scale for all of it is
    // as coarse for every element as it is for the largest.
    assert!(outlier[2] > outlier[0], "{outlier:?}");
}

/// The largest error of attention outputs over INT8, of each kind, against the same over f32, for
/// a few queries after `len` tokens of roughly normal K and V. One K channel is `outlier` times
/// larger.
fn output_errors(len: u32, outlier: f32) -> Vec<f32> {
    let mut rng = Rng(4);
    let mut normal = move || {
        let sum: u64 = (0..4).map(|_| rng.below(1 << 16)).sum();
        (sum as f32 / (1 << 16) as f32 - 2.0) * 1.73
    };
    let formats = [(Format::F32, ScaleKind::PerTokenHead)]
        .into_iter()
        .chain(KINDS.map(|kind| (Format::Int8, kind)));
    let mut caches: Vec<_> = formats
        .map(|(format, scale)| {
            let spec = Spec {
                format,
                max_seqs: 1,
                max_seq_len: len + 16,
                max_batch_tokens: 1024,
                ..spec(scale)
            };
            let mut cache = spec.open();
            let seq = begin(&mut cache, 0);
            (cache, seq)
        })
        .collect();
    let mut left = len;
    while left > 0 {
        let now = left.min(1024);
        let mut k: Vec<f32> = (0..now * DIM).map(|_| normal()).collect();
        k.chunks_mut(DIM as usize).for_each(|row| row[7] *= outlier);
        let v: Vec<f32> = (0..now * DIM).map(|_| normal()).collect();
        for (cache, seq) in &mut caches {
            let mut step = cache.reserve(&[(*seq, now)]).expect("fits");
            step.append(LayerIdx(0), TensorRef::F32(&k), TensorRef::F32(&v)).expect("append");
            step.commit().expect("whole");
        }
        left -= now;
    }
    let row =
        |normal: &mut dyn FnMut() -> f32| (0..16 * DIM).map(|_| normal()).collect::<Vec<f32>>();
    let (k, v, q) = (row(&mut normal), row(&mut normal), row(&mut normal));
    let mut outs = caches.into_iter().map(|(mut cache, seq)| {
        let mut step = cache.reserve(&[(seq, 16)]).expect("fits");
        step.append(LayerIdx(0), TensorRef::F32(&k), TensorRef::F32(&v)).expect("append");
        let mut out = vec![f32::NAN; q.len()];
        let options = kvpool::cache::AttendOptions::default();
        step.attend(LayerIdx(0), TensorRef::F32(&q), (&mut out[..]).into(), options)
            .expect("attend");
        step.commit().expect("whole");
        out
    });
    let exact = outs.next().expect("f32");
    let error = |out: Vec<f32>| {
        exact.iter().zip(&out).fold(0.0, |max, (a, b)| f32::max(max, (a - b).abs()))
    };
    outs.map(error).collect()
}

/// The whole-cache view of edge 49 and 43: equal bytes of K, V and scales in every mode.
#[test]
fn modes_store_the_same_int8_values() {
    let mut rng = Rng(6);
    let rows = random_rows(&mut rng, 20);
    let mut all = Vec::new();
    for mode in MODES {
        let spec = Spec { mode, windows: vec![0, 0], ..spec(ScaleKind::PerTokenHead) };
        let mut cache = spec.open();
        let seq = begin(&mut cache, 0);
        let flat = rows.concat();
        let mut step = cache.reserve(&[(seq, 20)]).expect("fits");
        for layer in 0..2 {
            step.append(LayerIdx(layer), TensorRef::F32(&flat), TensorRef::F32(&flat))
                .expect("append");
        }
        step.commit().expect("whole");
        let mut out = vec![0.0; flat.len()];
        cache.export(seq, LayerIdx(1), Kv::V, 0, 20, &mut out).expect("held");
        all.push(out);
    }
    assert_eq!(all[0], all[1]);
    assert_eq!(all[0], all[2]);
}
