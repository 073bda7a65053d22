//! Save and restore. Here is what the tests of it share.
//!
//! - `prefixes`, `sequence`: what is found after a restore, and that it is the same.
//! - `files`, `limits`, `changed`: files that are damaged, or strange, or change meanwhile.
//! - `calls`: what the operating system makes of reads and writes.
//! - `private`: nothing of anybody else's shows.
//! - `random`: all of it in turns.

mod calls;
mod changed;
mod files;
mod limits;
mod prefixes;
mod private;
mod random;
mod sequence;

use std::path::{Path, PathBuf};

use kvpool::cache::{
    AttendOptions, Cache, RestoreOptions, Restored, SaveOptions, Saved, SeqHandle,
};
use kvpool::config::CacheMode;
use kvpool::device::{TensorMut, TensorRef};
use kvpool::error::SaveError;
use kvpool::plan::Kv;
use kvpool::units::LayerIdx;

use super::rig::{Line, Rig};
use super::text::vector;
use crate::common::{Spec, mix};

/// A folder for saves, gone with the value.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

/// What a write comes to on a full disk: 28 is ENOSPC.
fn full() -> std::io::Error {
    std::io::Error::from_raw_os_error(28)
}

fn save(cache: &Cache, path: &Path) -> Saved {
    let digest = cache.state_digest();
    let saved = cache.save_prefixes(path, &SaveOptions::default()).expect("written");
    assert_eq!(cache.state_digest(), digest, "a save changes nothing");
    assert_eq!(std::fs::metadata(path).expect("there").len(), saved.bytes.0);
    saved
}

fn restore(cache: &mut Cache, path: &Path) -> Restored {
    let restored = cache.restore_prefixes(path, &RestoreOptions::default()).expect("taken");
    cache.check_invariants().expect("invariants");
    restored
}

/// Asserts that a restore is refused and leaves no trace (P4).
fn refused(cache: &mut Cache, path: &Path) -> SaveError {
    let before = (cache.state_digest(), cache.stats());
    let error = cache.restore_prefixes(path, &RestoreOptions::default()).expect_err("refused");
    assert_eq!((cache.state_digest(), cache.stats()), before, "{error}: it left a trace");
    cache.check_invariants().expect("invariants");
    error
}

/// Appends some tokens in every layer and gives what attention makes of them.
fn attend(rig: &mut Rig, line: &mut Line, new: &[u32]) -> Vec<f32> {
    let geometry = rig.cache.plan().geometry.clone();
    let (heads, dim) = (geometry.num_kv_heads as usize, geometry.head_dim as usize);
    let before = line.text.hashes.len();
    new.iter().for_each(|token| line.text.push((*token).into()));
    let hashes = line.text.hashes[before..].to_vec();
    let mut step = rig.cache.reserve_tokens(&[(line.seq, new.len() as u32)], new).expect("fits");
    let mut all = Vec::new();
    for layer in 0..geometry.num_layers {
        let tensor = |heads: usize, layer: u32, kv| {
            let mut tensor = vec![0.0; hashes.len() * heads * dim];
            for (hash, out) in hashes.iter().zip(tensor.chunks_mut(heads * dim)) {
                vector(*hash, layer, kv, out);
            }
            tensor
        };
        let (k, v) = (tensor(heads, layer, Kv::K), tensor(heads, layer, Kv::V));
        let q = tensor(geometry.num_q_heads as usize, layer + 100, Kv::K);
        step.append(LayerIdx(layer), TensorRef::F32(&k), TensorRef::F32(&v)).expect("appended");
        let mut out = vec![f32::NAN; q.len()];
        let to = TensorMut::F32(&mut out);
        step.attend(LayerIdx(layer), TensorRef::F32(&q), to, AttendOptions::default())
            .expect("attended");
        all.extend_from_slice(&out);
    }
    step.commit().expect("whole");
    rig.cache.check_invariants().expect("invariants");
    all
}

/// Another plan of the same model.
fn in_mode(spec: &Spec, mode: CacheMode, tokens_per_block: u32) -> Spec {
    let contiguous_layers = vec![0];
    Spec { mode, tokens_per_block, contiguous_layers, ..spec.clone() }
}

/// Three layers: two with windows, one without.
fn windowed(mode: CacheMode) -> Spec {
    Spec {
        mode,
        windows: vec![20, 0, 12],
        sink_tokens: 2,
        max_seqs: 6,
        max_rewind_tokens: 4,
        max_step_tokens: Some(8),
        contiguous_layers: vec![0],
        ..Spec::default()
    }
}

/// A rig on the device that computes.
fn rig(spec: &Spec) -> Rig {
    Rig::on(spec, spec.open())
}

/// The last rows of each layer of an output.
fn last_rows(cache: &Cache, out: &[f32], rows: usize) -> Vec<f32> {
    let geometry = &cache.plan().geometry;
    let row = (geometry.num_q_heads * geometry.head_dim) as usize;
    let layer = out.len() / geometry.num_layers as usize;
    out.chunks(layer).flat_map(|layer| layer[layer.len() - rows * row..].to_vec()).collect()
}

/// Appends positions whose contents follow from them, and attends. `[layers][rows, heads, dim]`
fn run(cache: &mut Cache, seq: SeqHandle, positions: std::ops::Range<u32>) -> Vec<f32> {
    let geometry = cache.plan().geometry.clone();
    let dim = geometry.head_dim as usize;
    let mut all = vec![Vec::new(); geometry.num_layers as usize];
    let most = cache.plan().limits.max_step_tokens;
    let mut from = positions.start;
    while from < positions.end {
        let ids: Vec<u32> = (from..positions.end.min(from + most)).collect();
        let mut step = cache.reserve_tokens(&[(seq, ids.len() as u32)], &ids).expect("fits");
        assert_eq!(step.positions(), ids);
        for layer in 0..geometry.num_layers {
            let tensor = |heads: u32, what: u64| -> Vec<f32> {
                let row = heads as usize * dim;
                let value = |n: usize| {
                    let word =
                        mix(&[u64::from(ids[n / row]), layer.into(), what, (n % row) as u64]);
                    (word >> 40) as f32 / 3e6 - 2.5
                };
                (0..ids.len() * row).map(value).collect()
            };
            let (k, v) = (tensor(geometry.num_kv_heads, 0), tensor(geometry.num_kv_heads, 1));
            let q = tensor(geometry.num_q_heads, 2);
            step.append(LayerIdx(layer), TensorRef::F32(&k), TensorRef::F32(&v)).expect("appended");
            let mut out = vec![f32::NAN; q.len()];
            let to = TensorMut::F32(&mut out);
            step.attend(LayerIdx(layer), TensorRef::F32(&q), to, AttendOptions::default())
                .expect("attended");
            all[layer as usize].extend_from_slice(&out);
        }
        step.commit().expect("whole");
        from += ids.len() as u32;
    }
    all.concat()
}

/// The bits of everything that a sequence's next query may see.
fn exported(cache: &Cache, seq: SeqHandle) -> Vec<u32> {
    let geometry = &cache.plan().geometry;
    let (len, row) =
        (cache.seq_len(seq).expect("alive"), geometry.num_kv_heads * geometry.head_dim);
    let mut all = Vec::new();
    for layer in 0..geometry.num_layers {
        let window = geometry.windows[layer as usize];
        let from = if window == 0 { 0 } else { (len + 1).saturating_sub(window) };
        let sinks = if window == 0 { 0 } else { geometry.sink_tokens.min(from) };
        for kv in [Kv::K, Kv::V] {
            for (from, to) in [(0, sinks), (from, len)] {
                let mut out = vec![0.0; ((to - from) * row) as usize];
                cache.export(seq, LayerIdx(layer), kv, from, to, &mut out).expect("held");
                all.extend(out.iter().map(|x| x.to_bits()));
            }
        }
    }
    all
}
