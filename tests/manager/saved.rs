//! Save and restore: what is found after a restore, and that it is the same.

use std::path::{Path, PathBuf};

use kvpool::cache::{
    AttendOptions, BeginOptions, Cache, KeyPart, RestoreOptions, Restored, SaveOptions, Saved,
    SeqHandle,
};
use kvpool::config::{Admission, CacheMode, Capacity, Format, ScaleKind};
use kvpool::device::{TensorMut, TensorRef};
use kvpool::error::{CacheError, SaveError};
use kvpool::plan::Kv;
use kvpool::units::{Bytes, LayerIdx};

use super::rig::{Line, Rig, tokens, up_to};
use super::text::{Ns, vector};
use crate::common::{FORMATS, MODES, Spec, assert_same_bits, mix, on_cuda};

/// A folder for saves, gone with the value.
pub(super) struct Folder(tempfile::TempDir);

impl Folder {
    pub(super) fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

/// What a write comes to on a full disk: 28 is ENOSPC.
pub(super) fn full() -> std::io::Error {
    std::io::Error::from_raw_os_error(28)
}

pub(super) fn save(cache: &Cache, path: &Path) -> Saved {
    let digest = cache.state_digest();
    let saved = cache.save_prefixes(path, &SaveOptions::default()).expect("written");
    assert_eq!(cache.state_digest(), digest, "a save changes nothing");
    assert_eq!(std::fs::metadata(path).expect("there").len(), saved.bytes.0);
    saved
}

pub(super) fn restore(cache: &mut Cache, path: &Path) -> Restored {
    let restored = cache.restore_prefixes(path, &RestoreOptions::default()).expect("taken");
    cache.check_invariants().expect("invariants");
    restored
}

/// Asserts that a restore is refused and leaves no trace (P4).
pub(super) fn refused(cache: &mut Cache, path: &Path) -> SaveError {
    let before = (cache.state_digest(), cache.stats());
    let error = cache.restore_prefixes(path, &RestoreOptions::default()).expect_err("refused");
    assert_eq!((cache.state_digest(), cache.stats()), before, "{error}: it left a trace");
    cache.check_invariants().expect("invariants");
    error
}

/// Appends some tokens in every layer and gives what attention makes of them.
pub(super) fn attend(rig: &mut Rig, line: &mut Line, new: &[u32]) -> Vec<f32> {
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
pub(super) fn in_mode(spec: &Spec, mode: CacheMode, tokens_per_block: u32) -> Spec {
    let contiguous_layers = vec![0];
    Spec { mode, tokens_per_block, contiguous_layers, ..spec.clone() }
}

/// Three layers: two with windows, one without.
pub(super) fn windowed(mode: CacheMode) -> Spec {
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
pub(super) fn rig(spec: &Spec) -> Rig {
    Rig::on(spec, spec.open())
}

#[test]
fn edge_54_prefixes_come_back_bit_for_bit() {
    let folder = Folder::new();
    let file = folder.file("prefixes");
    for mode in MODES {
        for windows in [vec![0, 0, 0], vec![20, 0, 12]] {
            let spec = Spec { windows, ..windowed(mode) };
            let mut old = rig(&spec);
            let prompt = tokens(0, 41);
            old.pass(&prompt);
            let saved = save(&old.cache, &file);
            assert!(saved.tokens >= 40, "{mode:?}: {saved:?}");
            let mut new = rig(&spec);
            let restored = restore(&mut new.cache, &file);
            assert_eq!(restored.file_tokens, saved.tokens);
            let (of_save, of_restore) = (old.cache.stats(), new.cache.stats());
            assert_eq!((of_save.saves, of_save.saved_tokens), (1, saved.tokens));
            assert_eq!(
                (of_restore.restored_blocks, of_restore.restored_slots, of_restore.saves),
                (restored.blocks, restored.slots, 0)
            );
            let (before, after) = (old.found(&prompt), new.found(&prompt));
            assert!(before >= 32, "{mode:?}: {before}");
            assert_eq!(after, before, "{mode:?} {restored:?}");
            // The contents are checked when it begins.
            let mut a = old.begin(&prompt, Ns::default(), up_to(60)).expect("admitted");
            let mut b = new.begin(&prompt, Ns::default(), up_to(60)).expect("admitted");
            assert_eq!(a.cached_len, b.cached_len);
            let rest = &prompt[a.cached_len as usize..];
            for more in [rest, &[7, 8, 9], &[10]] {
                let (x, y) = (attend(&mut old, &mut a, more), attend(&mut new, &mut b, more));
                assert_same_bits(&x, &y, &format!("{mode:?}"));
            }
            old.check(&a);
            new.check(&b);
        }
    }
}

#[test]
fn edge_55_a_second_restore_changes_nothing() {
    let folder = Folder::new();
    let file = folder.file("prefixes");
    for mode in MODES {
        let spec = windowed(mode);
        let mut old = rig(&spec);
        old.pass(&tokens(0, 41));
        old.pass(&[tokens(0, 20), tokens(90, 110)].concat());
        save(&old.cache, &file);
        let mut new = rig(&spec);
        let first = restore(&mut new.cache, &file);
        assert!(first.blocks + first.slots > 0, "{mode:?}");
        let (digest, stats) = (new.cache.state_digest(), new.cache.stats());
        let second = restore(&mut new.cache, &file);
        assert_eq!((second.blocks, second.slots), (0, 0), "{mode:?}");
        assert_eq!(second.dropped_tokens, first.dropped_tokens, "{mode:?}");
        assert_eq!(new.cache.state_digest(), digest, "{mode:?}");
        assert_eq!(new.cache.stats(), stats, "{mode:?}");
        // And into the cache that it is of.
        let digest = old.cache.state_digest();
        let own = restore(&mut old.cache, &file);
        assert_eq!((own.blocks, own.slots, own.dropped_tokens), (0, 0, 0), "{mode:?}");
        assert_eq!(old.cache.state_digest(), digest, "{mode:?}");
    }
}

/// The order of eviction is the file's, and what was cached before stays longer.
#[test]
fn edge_55_the_order_of_eviction_is_kept() {
    let folder = Folder::new();
    let file = folder.file("prefixes");
    let spec = super::rig::paged(32);
    let mut old = rig(&spec);
    let prompts: Vec<Vec<u32>> = (0..4).map(|n| tokens(100 * n, 100 * n + 17)).collect();
    prompts.iter().for_each(|prompt| _ = old.pass(prompt));
    // The first is used again: it is the youngest now.
    old.pass(&prompts[0]);
    save(&old.cache, &file);
    let mut new = rig(&spec);
    let own = tokens(1000, 1017);
    new.pass(&own);
    assert_eq!(restore(&mut new.cache, &file).blocks, 8);
    // 10 of 32 blocks are cached; sequences of seven blocks push them out, the oldest first.
    let holds = |rig: &Rig| -> Vec<bool> {
        let all = prompts.iter().chain([&own]);
        all.map(|prompt| rig.blocks_found(prompt) == 2).collect()
    };
    assert_eq!(holds(&new), [true; 5]);
    let mut lost = Vec::new();
    let mut held = Vec::new();
    for n in 0..16_u32 {
        let line = new.begin(&tokens(2000 + 100 * n, 2016 + 100 * n), Ns::default(), up_to(16));
        let Ok(mut line) = line else { break };
        let prompt = tokens(2000 + 100 * n, 2016 + 100 * n);
        new.prefill(&mut line, &prompt);
        held.push(line);
        for (at, there) in holds(&new).into_iter().enumerate() {
            if !there && !lost.contains(&at) {
                lost.push(at);
            }
        }
        if held.len() == 8 {
            held.iter().for_each(|line| new.release(line));
            held.clear();
        }
    }
    assert_eq!(lost[..5.min(lost.len())], [1, 2, 3, 0, 4][..5.min(lost.len())]);
    assert!(lost.len() >= 3, "{lost:?}");
}

/// Free blocks all over the place; live sequences; what is in use or cached stays.
#[test]
fn edge_55_into_a_fragmented_pool_and_a_full_one() {
    let folder = Folder::new();
    let file = folder.file("prefixes");
    let spec = super::rig::paged(24);
    let mut old = rig(&spec);
    let prompts: Vec<Vec<u32>> = (0..4).map(|n| tokens(100 * n, 100 * n + 33)).collect();
    prompts.iter().for_each(|prompt| _ = old.pass(prompt));
    save(&old.cache, &file);

    let mut new = rig(&spec);
    // Every second block stays taken.
    let lines: Vec<Line> = (0..8).map(|n| new.run(&tokens(3000 + 50 * n, 3016 + 50 * n))).collect();
    lines.iter().step_by(2).for_each(|line| new.release(line));
    new.cache.clear_cached();
    let (free, active, ..) = new.blocks();
    assert_eq!((free, active), (16, 8));
    let restored = restore(&mut new.cache, &file);
    assert_eq!(restored.blocks, 16);
    assert_eq!(restored.dropped_tokens, 0);
    for prompt in &prompts {
        assert_eq!(new.blocks_found(prompt), 4);
    }
    lines.iter().skip(1).step_by(2).for_each(|line| new.check(line));
    // What it restored is what it was.
    lines.iter().skip(1).step_by(2).for_each(|line| new.release(line));
    for prompt in &prompts {
        let line = new.begin(prompt, Ns::default(), up_to(33)).expect("admitted");
        assert_eq!(line.cached_len, 32);
        new.release(&line);
    }

    // Full of what is cached: nothing of it goes. Room for five: the youngest chain, and a block.
    let mut full = rig(&spec);
    (0..4).for_each(|n| _ = full.pass(&tokens(4000 + 100 * n, 4033 + 100 * n)));
    full.pass(&tokens(4900, 4925));
    let before = full.cache.stats();
    assert_eq!(full.blocks(), (5, 0, 19, 0));
    let restored = restore(&mut full.cache, &file);
    assert_eq!((restored.blocks, restored.dropped_tokens), (5, 88));
    assert_eq!(full.cache.stats().evictions, before.evictions);
    assert_eq!(full.blocks(), (0, 0, 24, 0));
    assert_eq!(prompts.iter().map(|p| full.blocks_found(p)).collect::<Vec<_>>(), [0, 0, 1, 4]);
    (0..4).for_each(|n| assert_eq!(full.blocks_found(&tokens(4000 + 100 * n, 4032 + 100 * n)), 4));
    assert_eq!(restore(&mut full.cache, &file).blocks, 0);
}

/// A chain of which the first part is held, and one of which it is cached, go on behind it.
#[test]
fn edge_55_chains_go_on_behind_what_is_there() {
    let folder = Folder::new();
    let file = folder.file("prefixes");
    let spec = super::rig::paged(24);
    let mut old = rig(&spec);
    let prompts = [tokens(0, 49), [tokens(0, 16), tokens(500, 533)].concat(), tokens(800, 833)];
    prompts.iter().for_each(|prompt| _ = old.pass(prompt));
    save(&old.cache, &file);
    let mut new = rig(&spec);
    new.pass(&prompts[2][..17]);
    let held = new.run(&prompts[0][..17]);
    let restored = restore(&mut new.cache, &file);
    assert_eq!((restored.blocks_present, restored.dropped_tokens), (4, 0));
    for prompt in &prompts {
        assert_eq!(new.blocks_found(prompt), prompt.len() as u32 / 8);
    }
    new.release(&held);
    prompts.iter().for_each(|prompt| _ = new.pass(prompt));
}

#[test]
fn edge_54_namespaces_priorities_and_time_limits_come_back() {
    use kvpool::cache::{Retention, Retentions};
    let folder = Folder::new();
    let file = folder.file("prefixes");
    let spec = super::rig::paged(32);
    let mut old = rig(&spec);
    let prompt = tokens(0, 33);
    let salted = Ns { salt: 2, salt_from: 16, ..Ns::default() };
    let adapted = Ns { adapter: 3, model: 4, ..Ns::default() };
    for ns in [Ns::default(), salted, adapted] {
        let range = Retention { from: 0, to: 33, priority: 80, duration_ms: Some(1000) };
        let retention = match ns.adapter {
            3 => Retentions::new(&[range]).expect("right"),
            _ => Retentions::default(),
        };
        let options = BeginOptions { retention, ..up_to(33) };
        let mut line = old.begin(&prompt, ns, options).expect("admitted");
        old.prefill(&mut line, &prompt);
        old.release(&line);
    }
    old.cache.set_time_ms(400);
    save(&old.cache, &file);
    let mut new = rig(&spec);
    new.cache.set_time_ms(5000);
    assert_eq!(restore(&mut new.cache, &file).blocks, 4 + 2 + 4);
    for ns in [Ns::default(), salted, adapted] {
        assert_eq!(new.cache.probe(&prompt, &ns.options()).cached_len, 32);
    }
    let other = Ns { salt: 5, salt_from: 16, ..Ns::default() };
    assert_eq!(new.cache.probe(&prompt, &other.options()).cached_len, 16);
    // The priority of what was kept ends when it would have.
    let counts = |rig: &Rig| rig.cache.evictions_by_priority().to_vec();
    let before = counts(&new);
    new.cache.set_time_ms(5599);
    new.cache.clear_cached();
    assert_eq!(counts(&new), before);
    let mut later = rig(&spec);
    restore(&mut later.cache, &file);
    let mut sooner = rig(&spec);
    restore(&mut sooner.cache, &file);
    sooner.cache.set_time_ms(599);
    later.cache.set_time_ms(600);
    let first_to_go = |rig: &mut Rig| {
        let mut lines = Vec::new();
        for n in 0..8_u32 {
            let Ok(mut line) =
                rig.begin(&tokens(9000 + 100 * n, 9025 + 100 * n), Ns::default(), up_to(25))
            else {
                break;
            };
            let prompt = tokens(9000 + 100 * n, 9025 + 100 * n);
            rig.prefill(&mut line, &prompt);
            lines.push(line);
        }
        rig.cache.evictions_by_priority()[80]
    };
    assert_eq!(first_to_go(&mut later), 0, "they are of the usual priority");
    assert!(first_to_go(&mut sooner) > 0 || sooner.blocks_found(&prompt) == 0);

    // Without what is private.
    let options = SaveOptions { unsalted_only: true, ..SaveOptions::default() };
    old.cache.save_prefixes(&file, &options).expect("written");
    let mut public = rig(&spec);
    assert_eq!(restore(&mut public.cache, &file).blocks, 8);
    assert_eq!(public.cache.probe(&prompt, &salted.options()).cached_len, 16);
}

/// Only what could be found is saved.
#[test]
fn edge_54_other_epochs_stay_behind() {
    let folder = Folder::new();
    let file = folder.file("prefixes");
    for mode in MODES {
        let mut old = rig(&windowed(mode));
        old.pass(&tokens(0, 41));
        old.cache.set_epoch(7).expect("idle");
        old.epoch = 7;
        old.pass(&tokens(500, 541));
        let saved = save(&old.cache, &file);
        assert!(saved.tokens <= 41, "{saved:?}");
        let mut new = rig(&windowed(mode));
        let error = refused(&mut new.cache, &file);
        assert_eq!(error, SaveError::OtherEpoch { found: 7, expected: 0 });
        new.cache.set_epoch(7).expect("idle");
        new.epoch = 7;
        restore(&mut new.cache, &file);
        assert_eq!(new.found(&tokens(0, 41)), 0);
        assert_eq!(new.found(&tokens(500, 541)), old.found(&tokens(500, 541)));
        new.pass(&tokens(500, 541));
    }
}

#[test]
fn edge_54_another_plan_or_model_is_refused_by_name() {
    let folder = Folder::new();
    let (prefixes, sequence) = (folder.file("prefixes"), folder.file("sequence"));
    let spec = Spec { format: Format::Int8, head_dim: 32, ..Spec::default() };
    let mut old = Rig { stored: None, ..rig(&spec) };
    let seq = old.cache.begin(&tokens(0, 20), up_to(30)).expect("admitted").sequence;
    super::driver_step::skip(old.cache.reserve(&[(seq, 20)]).expect("fits")).expect("whole");
    save(&old.cache, &prefixes);
    old.cache.save_sequence(seq, &sequence, &SaveOptions::default()).expect("written");
    let others = [
        ("element format", Spec { format: Format::F16, ..spec.clone() }),
        ("scale form", Spec { scale: ScaleKind::PerGroup32, ..spec.clone() }),
        ("number of layers", Spec { windows: vec![0; 3], ..spec.clone() }),
        ("query heads", Spec { num_q_heads: 4, ..spec.clone() }),
        ("KV heads", Spec { num_kv_heads: 2, ..spec.clone() }),
        ("head_dim", Spec { head_dim: 64, ..spec.clone() }),
        ("sink tokens", Spec { sink_tokens: 1, windows: vec![0, 32], ..spec.clone() }),
        ("attention window", Spec { windows: vec![0, 32], ..spec.clone() }),
        (
            "rotation",
            Spec {
                rope: Some(kvpool::config::RopeConfig {
                    theta: Some(1e4),
                    ..kvpool::config::RopeConfig::default()
                }),
                ..spec.clone()
            },
        ),
    ];
    for (what, other) in others {
        let mut new = other.open();
        for file in [&prefixes, &sequence] {
            let error = if file == &prefixes {
                refused(&mut new, file)
            } else {
                let digest = new.state_digest();
                let error = new.restore_sequence(file, &RestoreOptions::default());
                assert_eq!(new.state_digest(), digest);
                error.expect_err("refused")
            };
            assert!(matches!(error, SaveError::Differs { .. }), "{what}: {error}");
            assert!(error.to_string().contains(what), "{what}: {error}");
        }
    }
    let mut new = spec.open();
    let model = KeyPart::bytes(b"other weights").ok();
    let options = RestoreOptions { model, ..RestoreOptions::default() };
    assert_eq!(new.restore_prefixes(&prefixes, &options), Err(SaveError::OtherModel));
    assert_eq!(new.restore_sequence(&sequence, &options), Err(SaveError::OtherModel));
    assert!(matches!(refused(&mut new, &sequence), SaveError::OtherKind { .. }));
    let error = new.restore_sequence(&prefixes, &RestoreOptions::default());
    assert!(matches!(error, Err(SaveError::OtherKind { .. })));
    assert!(matches!(refused(&mut new, &folder.file("none")), SaveError::Io { code: 2, .. }));
    assert!(matches!(refused(&mut new, folder.0.path()), SaveError::Io { .. }));
    // The same model, and everything goes.
    let options = SaveOptions { model, unsalted_only: false };
    old.cache.save_prefixes(&prefixes, &options).expect("written");
    let options = RestoreOptions { model, ..RestoreOptions::default() };
    assert_eq!(new.restore_prefixes(&prefixes, &options).expect("taken").blocks, 2);
    assert_eq!(refused(&mut spec.open(), &prefixes), SaveError::OtherModel);
    let off = Spec { prefix_reuse: false, ..spec };
    let mut new = off.open();
    assert_eq!(refused(&mut new, &prefixes), SaveError::Cache(CacheError::ReuseOff));
    let error = new.save_prefixes(&folder.file("x"), &SaveOptions::default());
    assert_eq!(error, Err(SaveError::Cache(CacheError::ReuseOff)));
}

/// Every format, with its scales.
#[test]
fn edge_54_every_format_comes_back_bit_for_bit() {
    let folder = Folder::new();
    let file = folder.file("saved");
    for (format, scale) in FORMATS {
        for (from, to) in
            [(CacheMode::Paged, CacheMode::Contiguous), (CacheMode::Contiguous, CacheMode::Paged)]
        {
            let spec = |mode| Spec {
                format,
                scale,
                head_dim: 32,
                num_kv_heads: 2,
                sink_tokens: 0,
                ..windowed(mode)
            };
            let (mut old, mut new) = (spec(from).open(), in_mode(&spec(to), to, 8).open());
            let prompt = tokens(0, 39);
            let a = old.begin(&prompt, up_to(60)).expect("admitted").sequence;
            run(&mut old, a, 0..39);
            old.save_sequence(a, &file, &SaveOptions::default()).expect("written");
            let b =
                new.restore_sequence(&file, &RestoreOptions::default()).expect("taken").sequence;
            new.check_invariants().expect("invariants");
            assert_eq!(exported(&old, a), exported(&new, b), "{format:?} {scale:?} {from:?}");
            let (x, y) = (run(&mut old, a, 39..47), run(&mut new, b, 39..47));
            assert_same_bits(&x, &y, &format!("{format:?} {scale:?} {from:?}"));
            old.release(a).expect("alive");
            save(&old, &file);
            new.release(b).expect("alive");
            new.clear_cached();
            restore(&mut new, &file);
            let longer = tokens(0, 48);
            let c = new.begin(&longer, up_to(60)).expect("admitted");
            assert!(c.cached_len >= 32, "{from:?}: {}", c.cached_len);
            let d = old.begin(&longer, up_to(60)).expect("admitted");
            let (x, y) = (
                run(&mut old, d.sequence, d.cached_len..48),
                run(&mut new, c.sequence, c.cached_len..48),
            );
            let rows = (48 - c.cached_len.max(d.cached_len)) as usize;
            assert_same_bits(&last_rows(&old, &x, rows), &last_rows(&new, &y, rows), "prefixes");
        }
    }
}

/// The last rows of each layer of an output.
fn last_rows(cache: &Cache, out: &[f32], rows: usize) -> Vec<f32> {
    let geometry = &cache.plan().geometry;
    let row = (geometry.num_q_heads * geometry.head_dim) as usize;
    let layer = out.len() / geometry.num_layers as usize;
    out.chunks(layer).flat_map(|layer| layer[layer.len() - rows * row..].to_vec()).collect()
}

/// Appends positions whose contents follow from them, and attends. `[layers][rows, heads, dim]`
pub(super) fn run(cache: &mut Cache, seq: SeqHandle, positions: std::ops::Range<u32>) -> Vec<f32> {
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
pub(super) fn exported(cache: &Cache, seq: SeqHandle) -> Vec<u32> {
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

/// A sequence in any state, into every mode and block size.
#[test]
fn edge_54_a_sequence_goes_on_where_it_was() {
    let folder = Folder::new();
    let file = folder.file("sequence");
    for from in MODES {
        // The emulated GPU is a few hundred times slower.
        let lens: &[u32] = if on_cuda() { &[9, 45] } else { &[0, 1, 7, 8, 9, 16, 31, 45, 60] };
        for &len in lens {
            let mut old = windowed(from).open();
            let begun = old.begin(
                &tokens(0, 50),
                BeginOptions { lookahead_tokens: 3, key: Some(9), ..up_to(61) },
            );
            let a = begun.expect("admitted").sequence;
            run(&mut old, a, 0..len);
            let saved = old.save_sequence(a, &file, &SaveOptions::default()).expect("written");
            assert_eq!(saved.tokens, u64::from(len));
            for (to, per_block) in targets() {
                let mut new = in_mode(&windowed(to), to, per_block).open();
                let options = RestoreOptions { key: Some(4), ..RestoreOptions::default() };
                let begun = new.restore_sequence(&file, &options).expect("taken");
                new.check_invariants().expect("invariants");
                let what = format!("{from:?} to {to:?}/{per_block}, {len} tokens");
                assert_eq!((begun.cached_len, begun.limit), (len, 64), "{what}");
                assert_eq!((new.stats().restored_seqs, new.stats().seqs_begun), (1, 1), "{what}");
                new.poison_unused(0xFF).expect("done");
                assert_eq!(exported(&old, a), exported(&new, begun.sequence), "{what}");
                let fork = old.fork(a).expect("admitted");
                let end = 64.min(len + 11);
                let (x, y) =
                    (run(&mut old, fork, len..end), run(&mut new, begun.sequence, len..end));
                assert_same_bits(&x, &y, &what);
                old.release(fork).expect("alive");
                // The prompt's tokens are known.
                if len < 50 {
                    let wrong = new
                        .restore_sequence(&file, &RestoreOptions { key: Some(5), ..options })
                        .expect("taken");
                    let error = new.reserve_tokens(&[(wrong.sequence, 1)], &[len + 1]).map(drop);
                    assert!(matches!(error, Err(CacheError::TokenMismatch { .. })), "{what}");
                }
                let error = new.restore_sequence(&file, &options);
                assert_eq!(error, Err(SaveError::Cache(CacheError::DuplicateKey { key: 4 })));
                new.release(begun.sequence).expect("alive");
                new.check_invariants().expect("invariants");
            }
        }
    }
}

/// Modes and block sizes to restore into.
fn targets() -> impl Iterator<Item = (CacheMode, u32)> {
    let sizes: &[u32] = if on_cuda() { &[16] } else { &[8, 16, 32] };
    MODES.into_iter().flat_map(|to| sizes.iter().map(move |size| (to, *size)))
}

/// What a restored sequence leaves can be found by others, and is right.
#[test]
fn edge_54_a_restored_sequence_shares_what_it_has() {
    let folder = Folder::new();
    let file = folder.file("sequence");
    for from in MODES {
        for (to, per_block) in targets() {
            let mut old = rig(&windowed(from));
            let prompt = tokens(0, 48);
            let line = old.run(&prompt);
            old.cache.save_sequence(line.seq, &file, &SaveOptions::default()).expect("written");
            let mut new = rig(&in_mode(&windowed(to), to, per_block));
            let begun =
                new.cache.restore_sequence(&file, &RestoreOptions::default()).expect("taken");
            let restored = Line { seq: begun.sequence, ..line.clone() };
            new.check(&restored);
            // While it lives, when it is gone, and shorter: whatever is found is right (checked
            // when it begins), also where everything that nobody owns is poisoned.
            for round in 0..2 {
                new.cache.poison_unused(0xFF).expect("done");
                for len in [10, 17, 30, 33, 47, 48] {
                    let mut prompt = tokens(0, len);
                    prompt.push(9999);
                    let mut line = new.begin(&prompt, Ns::default(), up_to(60)).expect("admitted");
                    if to == CacheMode::Paged
                        && len == 48
                        && from == CacheMode::Paged
                        && per_block == 8
                    {
                        assert_eq!(line.cached_len, 48);
                    }
                    new.prefill(&mut line, &prompt);
                    let mut fork = new.fork(&line);
                    new.feed(&mut [(&mut fork, &[5, 6, 7])]).expect("room");
                    new.release(&fork);
                    new.release(&line);
                }
                if round == 0 {
                    new.release(&restored);
                }
            }
        }
    }
}

/// Where there is no room, nothing is taken; a cache full of prefixes makes room for a sequence.
#[test]
fn edge_55_a_sequence_is_admitted_like_any_other() {
    let folder = Folder::new();
    let file = folder.file("sequence");
    let spec = Spec { max_seqs: 2, ..super::rig::paged(8) };
    let mut old = rig(&spec);
    let line = old.run(&tokens(0, 40));
    old.cache.save_sequence(line.seq, &file, &SaveOptions::default()).expect("written");
    let options = RestoreOptions::default();
    for admission in [Admission::Guaranteed, Admission::MaxUtilization] {
        let mut new = rig(&Spec { admission, ..spec.clone() });
        let held = new.run(&tokens(100, 132));
        let digest = new.cache.state_digest();
        let error = new.cache.restore_sequence(&file, &options).expect_err("too few blocks");
        assert!(matches!(error, SaveError::Cache(CacheError::NotAdmitted { .. })), "{error}");
        assert_eq!(new.cache.state_digest(), digest);
        new.release(&held);
        // Four blocks are cached and four free: one must go.
        let begun = new.cache.restore_sequence(&file, &options).expect("room");
        new.cache.check_invariants().expect("invariants");
        new.check(&Line { seq: begun.sequence, ..line.clone() });
        assert_eq!(new.cache.stats().evictions, 1);
        let other = new.cache.begin(&tokens(300, 301), up_to(8)).expect("admitted").sequence;
        let error = new.cache.restore_sequence(&file, &options);
        let refused = error.expect_err("full");
        assert!(matches!(refused, SaveError::Cache(_)), "{refused}");
        new.cache.release(other).expect("alive");
    }
    let short = Spec { max_seq_len: 32, ..spec.clone() };
    let error = short.open().restore_sequence(&file, &options).expect_err("too long");
    assert!(
        matches!(error, SaveError::Cache(CacheError::SequenceTooLong { wanted: 40, .. })),
        "{error}"
    );
    let small = Spec { capacity: Capacity::Blocks(4), ..spec };
    let error = small.open().restore_sequence(&file, &options).expect_err("never fits");
    assert!(matches!(error, SaveError::Cache(CacheError::NeverFits { .. })), "{error}");
    let bytes = old.cache.plan().save_bytes().expect("fits");
    assert!(bytes < Bytes(4 << 20), "{bytes}");
}
