//! Save and restore: nothing of anybody else's shows, whatever fails.

use kvpool::cache::{
    BeginOptions, Cache, KeyPart, Namespace, RestoreOptions, SaveOptions, SavePoint, fail_saves,
};
use kvpool::config::{CacheMode, Scrub};
use kvpool::device::TensorRef;
use kvpool::error::SaveError;
use kvpool::units::LayerIdx;

use super::{Folder, exported, full, in_mode, run, save, windowed};
use crate::common::{MODES, Spec, assert_same_bits};
use crate::faults::{REACHED, faulty};
use crate::manager::rig::{tokens, up_to};

fn defaults() -> (SaveOptions, RestoreOptions) {
    (SaveOptions::default(), RestoreOptions::default())
}

/// A sequence goes into a file whole or, where it is private, not at all.
#[test]
fn edge_54_a_salted_sequence_is_no_public_file() {
    let folder = Folder::new();
    let file = folder.file("sequence");
    let public = SaveOptions { unsalted_only: true, ..SaveOptions::default() };
    for mode in MODES {
        for prefix_reuse in [true, false] {
            let mut cache = Spec { prefix_reuse, ..windowed(mode) }.open();
            let salt = Some(KeyPart::number(7));
            let namespace = Namespace { salt, salt_from: 8, ..Namespace::default() };
            let salted = BeginOptions { namespace, ..up_to(40) };
            let private = cache.begin(&tokens(0, 20), salted).expect("admitted").sequence;
            run(&mut cache, private, 0..20);
            let refused = cache.save_sequence(private, &file, &public);
            assert_eq!(refused, Err(SaveError::Salted), "{mode:?} {prefix_reuse}");
            assert!(!file.exists(), "nothing is written");
            let plain = cache.begin(&tokens(0, 20), up_to(40)).expect("admitted");
            run(&mut cache, plain.sequence, plain.cached_len..20);
            // Without reuse nobody keeps the salt, so nobody knows.
            let saved = cache.save_sequence(plain.sequence, &file, &public);
            assert_eq!(saved.is_ok(), prefix_reuse, "{mode:?}: {saved:?}");
            let _ = std::fs::remove_file(&file);
        }
    }
}

/// A ring has places for which a file has nothing.
#[test]
fn edge_43_a_slot_that_is_restored_has_nothing_of_the_one_before() {
    let folder = Folder::new();
    let file = folder.file("saved");
    let (save_options, restore_options) = defaults();
    let spec = Spec { max_seqs: 1, ..windowed(CacheMode::Contiguous) };
    let mut old = spec.open();
    let a = old.begin(&tokens(0, 50), up_to(60)).expect("admitted").sequence;
    run(&mut old, a, 0..45);
    for scrub in [Scrub::OnReuse, Scrub::OnRelease] {
        for prefixes in [false, true] {
            let mut new = Spec { scrub, ..spec.clone() }.open();
            let other = new.begin(&tokens(0, 60), up_to(60)).expect("admitted").sequence;
            run(&mut new, other, 0..60);
            new.release(other).expect("alive");
            if prefixes {
                // What is kept for others is in nobody's way.
                new.clear_cached();
                old.save_prefixes(&file, &save_options).expect("written");
                let restored = new.restore_prefixes(&file, &restore_options).expect("taken");
                assert_eq!(restored.slots, 1);
            } else {
                old.save_sequence(a, &file, &save_options).expect("written");
                let begun = new.restore_sequence(&file, &restore_options).expect("taken");
                assert_eq!(exported(&old, a), exported(&new, begun.sequence));
            }
            assert_eq!(new.find_residue(), Ok(None), "{scrub:?}, prefixes: {prefixes}");
            new.check_invariants().expect("invariants");
        }
    }
}

/// More sinks than any sequence has tokens: no block is left out, and so left as it was.
#[test]
fn edge_43_as_many_sinks_as_there_may_be() {
    let folder = Folder::new();
    let file = folder.file("sequence");
    let (save_options, restore_options) = defaults();
    let spec = Spec { sink_tokens: 16_777_216, windows: vec![16, 0], ..windowed(MODES[0]) };
    for from in MODES {
        let mut old = in_mode(&spec, from, 8).open();
        let a = old.begin(&tokens(0, 50), up_to(60)).expect("admitted").sequence;
        run(&mut old, a, 0..45);
        old.save_sequence(a, &file, &save_options).expect("written");
        for to in MODES {
            for per_block in [8, 128] {
                let mut new = in_mode(&spec, to, per_block).open();
                let other = new.begin(&tokens(0, 60), up_to(60)).expect("admitted").sequence;
                run(&mut new, other, 0..60);
                new.release(other).expect("alive");
                let begun = new.restore_sequence(&file, &restore_options).expect("taken");
                new.poison_unused(0xFF).expect("done");
                let what = format!("{from:?} to {to:?}/{per_block}");
                assert_eq!(exported(&old, a), exported(&new, begun.sequence), "{what}");
                let fork = old.fork(a).expect("admitted");
                let (x, y) = (run(&mut old, fork, 45..56), run(&mut new, begun.sequence, 45..56));
                assert_same_bits(&x, &y, &what);
                old.release(fork).expect("alive");
            }
        }
    }
}

/// Layers that were in two groups, one of which had lost more, are one group here.
#[test]
fn edge_54_a_group_has_what_all_of_its_layers_have() {
    let folder = Folder::new();
    let file = folder.file("sequence");
    let (save_options, restore_options) = defaults();
    let spec = Spec { windows: vec![20, 20, 0], sink_tokens: 0, ..windowed(CacheMode::Hybrid) };
    let mut old = spec.open();
    assert_eq!(old.plan().groups.len(), 3, "a ring, a paged window, a paged layer");
    let a = old.begin(&tokens(0, 60), up_to(60)).expect("admitted").sequence;
    run(&mut old, a, 0..45);
    // The ring has given up more for a step that is undone.
    let ids: Vec<u32> = (45..53).collect();
    let mut step = old.reserve_tokens(&[(a, 8)], &ids).expect("fits");
    let row = vec![1.0; 8 * 8];
    for layer in 0..3 {
        let row = TensorRef::F32(&row);
        step.append(LayerIdx(layer), row, row).expect("appended");
    }
    step.cancel();
    old.save_sequence(a, &file, &save_options).expect("written");
    let mut new = in_mode(&spec, CacheMode::Paged, 8).open();
    let begun = new.restore_sequence(&file, &restore_options).expect("taken");
    assert_eq!(exported(&old, a), exported(&new, begun.sequence));
    new.release(begun.sequence).expect("alive");
    let mut fresh = in_mode(&spec, CacheMode::Paged, 8).open();
    for len in 30..45 {
        let prompt = tokens(0, len + 1);
        let found = new.begin(&prompt, up_to(60)).expect("admitted");
        let computed = fresh.begin(&prompt, up_to(60)).expect("admitted");
        run(&mut new, found.sequence, found.cached_len..len);
        run(&mut fresh, computed.sequence, computed.cached_len..len);
        let what = format!("{len}, of which {} were found", found.cached_len);
        // As far back as a rewind makes it be seen.
        for len in [len, len - 4] {
            new.truncate(found.sequence, len).expect("within the rewind");
            fresh.truncate(computed.sequence, len).expect("within the rewind");
            let got = exported(&new, found.sequence);
            assert_eq!(got, exported(&fresh, computed.sequence), "{what}");
        }
        new.release(found.sequence).expect("alive");
        fresh.release(computed.sequence).expect("alive");
    }
}

/// Where a file does not say whose a sequence is, it is nobody else's.
#[test]
fn edge_54_a_sequence_without_a_name_is_shared_with_nobody() {
    let folder = Folder::new();
    let file = folder.file("sequence");
    let (save_options, restore_options) = defaults();
    let spec = Spec { windows: vec![0, 0], ..Spec::default() };
    let mut old = Spec { prefix_reuse: false, ..spec.clone() }.open();
    let a = old.begin(&tokens(0, 20), up_to(40)).expect("admitted").sequence;
    run(&mut old, a, 0..20);
    old.save_sequence(a, &file, &save_options).expect("written");
    for mode in MODES {
        let mut new = in_mode(&spec, mode, 8).open();
        new.set_epoch(3).expect("no reservations");
        let error = new.restore_sequence(&file, &restore_options).expect_err("of epoch 0");
        assert!(matches!(error, SaveError::OtherEpoch { found: 0, expected: 3 }), "{error}");
        new.set_epoch(0).expect("no reservations");
        let b = new.restore_sequence(&file, &restore_options).expect("taken").sequence;
        new.truncate(b, 0).expect("no windows");
        run(&mut new, b, 0..20);
        let other = new.begin(&tokens(0, 20), up_to(40)).expect("admitted");
        assert_eq!(other.cached_len, 0, "{mode:?}");
        new.release(b).expect("alive");
        let later = new.begin(&tokens(0, 20), up_to(40)).expect("admitted");
        assert_eq!(later.cached_len, 0, "{mode:?}");
        new.check_invariants().expect("invariants");
    }
    // A cache that shares nothing has no epochs.
    let mut fifth = spec.open();
    fifth.set_epoch(5).expect("no reservations");
    let a = fifth.begin(&tokens(0, 20), up_to(40)).expect("admitted").sequence;
    run(&mut fifth, a, 0..20);
    fifth.save_sequence(a, &file, &save_options).expect("written");
    let mut off = Spec { prefix_reuse: false, ..spec }.open();
    off.restore_sequence(&file, &restore_options).expect("taken");
}

/// Each call of the device fails once while prefixes are restored: what had been written into slots
/// by then is zeroed, and the next verb does not hear of it.
#[test]
fn edge_61_a_restore_that_fails_leaves_nothing_behind() {
    let folder = Folder::new();
    let file = folder.file("prefixes");
    for (mode, reached) in MODES.into_iter().flat_map(|mode| REACHED.map(|how| (mode, how))) {
        let spec = Spec { scrub: Scrub::OnRelease, sink_tokens: 2, ..windowed(mode) };
        let mut old = spec.open_on_cpu();
        for first in [0, 100] {
            let prompt = tokens(first, first + 30);
            let a = old.begin(&prompt, up_to(60)).expect("admitted").sequence;
            let ids: Vec<u32> = prompt.clone();
            append(&mut old, a, &ids);
            old.release(a).expect("alive");
        }
        save(&old, &file);
        let (mut calls, mut failed) = (1, 0);
        loop {
            let (mut cache, counter) = faulty(&spec, reached);
            let a = cache.begin(&tokens(900, 960), up_to(60)).expect("admitted").sequence;
            append(&mut cache, a, &tokens(900, 960));
            cache.release(a).expect("alive");
            cache.clear_cached();
            let digest = cache.state_digest();
            counter.fail_after(calls);
            let restored = cache.restore_prefixes(&file, &RestoreOptions::default());
            let happened = counter.has_failed();
            counter.never();
            cache.check_invariants().expect("invariants");
            if let Err(error) = &restored {
                failed += 1;
                assert_eq!(cache.state_digest(), digest, "{mode:?}, call {calls}: {error}");
                if cache.stats().scrub_failures == 0 {
                    assert_eq!(cache.find_residue(), Ok(None), "{mode:?}, call {calls}");
                }
            }
            cache.begin(&tokens(700, 720), up_to(40)).expect("what failed is over");
            if !happened {
                assert!(restored.is_ok() && failed > 10, "{mode:?}: {failed} failed");
                break;
            }
            calls += 1;
        }
    }
}

/// Appends tokens, a step at a time.
fn append(cache: &mut Cache, seq: kvpool::cache::SeqHandle, ids: &[u32]) {
    for ids in ids.chunks(8) {
        let mut step = cache.reserve_tokens(&[(seq, ids.len() as u32)], ids).expect("fits");
        let row: Vec<f32> = (0..ids.len() * 8).map(|n| 1.0 + n as f32).collect();
        for layer in 0..3 {
            step.append(LayerIdx(layer), TensorRef::F32(&row), TensorRef::F32(&row)).expect("done");
        }
        step.commit().expect("whole");
    }
}

/// Whoever has made a file of that name before does not get to read what is saved.
#[cfg(unix)]
#[test]
fn edge_54_the_file_is_its_owners_alone() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let folder = Folder::new();
    let (file, part) = (folder.file("saved"), folder.file("saved.kvpool-part"));
    let victim = folder.file("victim");
    let cache = windowed(CacheMode::Paged).open();
    let rights = || std::fs::metadata(&file).expect("there").permissions().mode() & 0o777;
    std::fs::write(&part, "before").expect("written");
    std::fs::set_permissions(&part, std::fs::Permissions::from_mode(0o666)).expect("ours");
    save(&cache, &file);
    assert_eq!(rights(), 0o600);
    std::fs::write(&victim, "somebody's").expect("written");
    symlink(&victim, &part).expect("made");
    save(&cache, &file);
    assert_eq!(rights(), 0o600);
    assert_eq!(std::fs::read_to_string(&victim).expect("there"), "somebody's");
    assert!(!part.exists() && std::fs::symlink_metadata(&file).expect("there").is_file());
    std::fs::create_dir(&part).expect("made");
    let error = cache.save_prefixes(&file, &SaveOptions::default()).expect_err("in the way");
    assert!(matches!(error, SaveError::Io { .. }), "{error}");
    assert!(part.is_dir());
}

/// What fails when the new file has its name does not say that the old one is there.
#[test]
fn edge_54_a_late_failure_says_what_is_there() {
    let folder = Folder::new();
    let file = folder.file("saved");
    let cache = windowed(CacheMode::Paged).open();
    for (point, there) in [
        (SavePoint::BeforeSync, false),
        (SavePoint::BeforeRename, false),
        (SavePoint::AfterRename, true),
    ] {
        fail_saves(Some((point, full)));
        let error = cache.save_prefixes(&file, &SaveOptions::default()).expect_err("full");
        fail_saves(None);
        assert_eq!(error.to_string().contains("the new file is in its place"), there, "{error}");
        assert_eq!(file.exists(), there, "{error}");
    }
}
