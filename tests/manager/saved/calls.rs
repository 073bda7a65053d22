//! Reads and writes of saves that take less than was asked for, that a signal interrupts, or that
//! fail: each in turn.

use kvpool::cache::{Cache, FileCalls, SeqHandle, disturb_files};
use kvpool::config::CacheMode;
use kvpool::error::SaveError;

use super::changed::{ALL, Holds, save_of};
use super::{Folder, windowed};
use crate::common::{MODES, on_cuda};
use crate::manager::driver_step::skip;
use crate::manager::rig::{tokens, up_to};

/// What reads and writes may be like when nothing is wrong.
const LIKE: [FileCalls; 4] = [
    FileCalls { most: 1, interrupted: false, fails: 0, calls: 0 },
    FileCalls { most: 7, interrupted: true, fails: 0, calls: 0 },
    FileCalls { most: 100, interrupted: false, fails: 0, calls: 0 },
    FileCalls { most: 0, interrupted: true, fails: 0, calls: 0 },
];

/// Calls a verb while the calls for its files are like this. Gives how many there were, too.
fn disturbed<T>(like: FileCalls, verb: impl FnOnce() -> T) -> (T, u64) {
    disturb_files(Some(like));
    let result = verb();
    (result, disturb_files(None).expect("as it was set").calls)
}

/// A call that fails.
fn failing(nth: u64) -> FileCalls {
    FileCalls { fails: nth, ..FileCalls::default() }
}

/// Empty, or with a sequence and something that is cached.
fn receiver(holds: Holds, mode: CacheMode, busy: bool) -> Cache {
    let mut cache = windowed(mode).open();
    if busy {
        // Of prefixes, some that the file has.
        let first = if holds == Holds::Sequence { 200 } else { 0 };
        for (from, len) in [(first, 16), (300, 9)] {
            let seq = cache.begin(&tokens(from, from + len), up_to(20)).expect("fits").sequence;
            for n in [8, len - 8] {
                skip(cache.reserve(&[(seq, n)]).expect("fits")).expect("whole");
            }
            if from == first {
                cache.release(seq).expect("alive");
            }
        }
    }
    cache
}

/// The bytes of what was restored, with K and V, as a save has them.
fn contents(cache: &Cache, seq: Option<SeqHandle>, folder: &Folder) -> Vec<u8> {
    let path = folder.file("contents");
    save_of(cache, seq, &path).expect("written");
    std::fs::read(path).expect("there")
}

/// Short and interrupted reads and writes end in the same bytes, and the same cache.
#[test]
fn edge_61_short_and_interrupted_calls_change_nothing() {
    let folder = Folder::new();
    let (whole, path) = (folder.file("whole"), folder.file("again"));
    for holds in ALL {
        let (source, seq) = holds.source();
        let (saved, plain) = disturbed(FileCalls::default(), || save_of(&source, seq, &whole));
        let bytes = std::fs::read(&whole).expect("there");
        for like in LIKE {
            let (again, calls) = disturbed(like, || save_of(&source, seq, &path));
            assert_eq!(again, saved, "{holds:?}, {like:?}");
            assert!(calls > plain, "{calls} writes, {plain} plain ones");
            assert_eq!(std::fs::read(&path).expect("there"), bytes, "{holds:?}, {like:?}");
        }
        for mode in MODES {
            let restored = |like: FileCalls| {
                let mut cache = receiver(holds, mode, false);
                let (seq, calls) = disturbed(like, || holds.restore(&mut cache, &whole));
                let seq = seq.expect("taken");
                cache.check_invariants().expect("invariants");
                let state = (cache.state_digest(), cache.stats());
                (state, contents(&cache, seq, &folder), calls)
            };
            let (state, held, plain) = restored(FileCalls::default());
            for like in LIKE {
                let (again, same, calls) = restored(like);
                assert!(again == state && same == held, "{holds:?} in {mode:?}, {like:?}");
                assert!(calls > plain, "{calls} reads, {plain} plain ones");
            }
        }
    }
}

/// Any read of a restore, or seek, fails: the restore is refused and leaves no trace, and the next
/// one works.
#[test]
fn edge_61_any_read_that_fails_leaves_no_trace() {
    let folder = Folder::new();
    let whole = folder.file("whole");
    for holds in ALL {
        let (source, seq) = holds.source();
        save_of(&source, seq, &whole).expect("written");
        let bytes = std::fs::read(&whole).expect("there");
        for (mode, busy) in MODES.into_iter().flat_map(|mode| [(mode, false), (mode, true)]) {
            let mut plain = receiver(holds, mode, busy);
            let (seq, calls) =
                disturbed(FileCalls::default(), || holds.restore(&mut plain, &whole));
            let held = contents(&plain, seq.expect("taken"), &folder);
            assert!(calls > 10, "{holds:?} in {mode:?}: {calls} calls");
            // The emulated device takes its time to open.
            let few = if on_cuda() { calls as usize / 5 } else { 1 };
            for nth in (1..=calls).step_by(few) {
                let mut cache = receiver(holds, mode, busy);
                let (error, made) = disturbed(failing(nth), || holds.refused(&mut cache, &whole));
                let said = matches!(error, SaveError::Io { what: "reading the file", code: 5, .. });
                assert!(said, "{holds:?} in {mode:?}, {nth}: {error}");
                assert_eq!(made, nth, "{holds:?} in {mode:?}: reads on behind the failure");
                let seq = holds.restore(&mut cache, &whole).expect("taken");
                cache.check_invariants().expect("invariants");
                let same = cache.state_digest() == plain.state_digest();
                assert!(same, "{holds:?} in {mode:?}, {nth}: another state");
                // A save is flushed to the disk, which takes longer than all the rest.
                if nth % 16 == 1 {
                    assert!(contents(&cache, seq, &folder) == held, "{holds:?} in {mode:?}, {nth}");
                }
            }
        }
        assert_eq!(std::fs::read(&whole).expect("there"), bytes, "a restore has written");
    }
}

/// Any write of a save fails: the old file is as it was, and nothing is left beside it.
#[test]
fn edge_61_any_write_that_fails_leaves_the_old_file() {
    let folder = Folder::new();
    let path = folder.file("file");
    for holds in ALL {
        let (source, seq) = holds.source();
        let (saved, calls) = disturbed(FileCalls::default(), || save_of(&source, seq, &path));
        saved.expect("written");
        let bytes = std::fs::read(&path).expect("there");
        std::fs::write(&path, "the old one").expect("written");
        let state = (source.state_digest(), source.stats());
        assert!(calls > 5, "{holds:?}: {calls} calls");
        for nth in 1..=calls {
            let (error, made) = disturbed(failing(nth), || save_of(&source, seq, &path));
            let error = error.expect_err("a write failed");
            let said = matches!(error, SaveError::Io { what: "writing the file", code: 5, .. });
            assert!(said && made == nth, "{holds:?}, {nth}, {made}: {error}");
            assert_eq!(std::fs::read(&path).expect("there"), b"the old one");
            assert_eq!((source.state_digest(), source.stats()), state);
            let files = std::fs::read_dir(path.parent().expect("a folder")).expect("a folder");
            assert_eq!(files.count(), 1, "{nth}: something half done is left");
        }
        save_of(&source, seq, &path).expect("written");
        assert_eq!(std::fs::read(&path).expect("there"), bytes);
    }
}
