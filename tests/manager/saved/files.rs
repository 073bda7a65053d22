//! The files of saves: forged ones, and writers that end in the middle.

use std::path::Path;
use std::process::Command;

use kvpool::cache::{Cache, RestoreOptions, SaveOptions, SavePoint, fail_saves};
use kvpool::config::CacheMode;
use kvpool::error::SaveError;
use xxhash_rust::xxh3::xxh3_64;

use super::{Folder, full, restore, rig, run, save, windowed};
use crate::common::{Rng, Spec};
use crate::manager::rig::{Rig, paged, tokens, up_to};
use crate::manager::text::Ns;

/// A small cache with chains, forks of them, salts and windows.
pub(super) fn some(mode: CacheMode) -> Rig {
    let mut rig = rig(&windowed(mode));
    rig.pass(&tokens(0, 25));
    rig.pass(&[tokens(0, 8), tokens(70, 87)].concat());
    let line = rig.run_in(&tokens(0, 17), Ns { salt: 2, salt_from: 8, ..Ns::default() });
    rig.release(&line);
    rig
}

/// Where the records of a file begin, the header first, and its end.
pub(super) fn records(bytes: &[u8]) -> Vec<usize> {
    let number = |at: usize, len: usize| {
        bytes[at..at + len].iter().rev().fold(0_usize, |all, byte| all << 8 | usize::from(*byte))
    };
    let mut starts = vec![0, number(12, 4)];
    while *starts.last().expect("two") < bytes.len() {
        let at = *starts.last().expect("two");
        starts.push(at + 16 + number(at + 8, 8) + 8);
    }
    starts
}

/// Gives the record of a place its checksum again.
pub(super) fn mend(bytes: &mut [u8], starts: &[usize], at: usize) {
    let record = starts.windows(2).find(|pair| (pair[0]..pair[1]).contains(&at)).expect("inside");
    let (start, end) = (record[0], record[1] - 8);
    let sum = xxh3_64(&bytes[start..end]);
    bytes[end..end + 8].copy_from_slice(&sum.to_le_bytes());
}

/// Numbers that no save has, under checksums that are right: refused or taken, but the cache is as
/// it must be, and nothing panics.
#[test]
fn edge_54_forged_files_do_no_harm() {
    let folder = Folder::new();
    let (whole, bad) = (folder.file("whole"), folder.file("bad"));
    let (mut taken, mut not) = (0, 0);
    for mode in crate::common::MODES {
        let old = some(mode);
        save(&old.cache, &whole);
        let bytes = std::fs::read(&whole).expect("there");
        let starts = records(&bytes);
        let mut rng = Rng(mode as u64);
        let mut new = windowed(mode).open();
        for _ in 0..400 {
            let mut changed = bytes.clone();
            for _ in 0..=rng.below(3) {
                // Mostly the numbers of a record, not its K and V.
                let record = rng.below(starts.len() as u64 - 1) as usize;
                let len = starts[record + 1] - starts[record] - 8;
                let at = starts[record] + rng.below(len.min(140) as u64) as usize;
                changed[at] = match rng.below(4) {
                    0 => 0,
                    1 => 0xFF,
                    2 => changed[at].wrapping_add(1),
                    _ => rng.next() as u8,
                };
                mend(&mut changed, &starts, at);
            }
            std::fs::write(&bad, &changed).expect("written");
            let before = (new.state_digest(), new.stats());
            match new.restore_prefixes(&bad, &RestoreOptions::default()) {
                Ok(_) => {
                    taken += 1;
                    new.check_invariants().expect("invariants");
                    new.clear_cached();
                    new.check_invariants().expect("invariants");
                    new.reset().expect("idle");
                }
                Err(_) => {
                    not += 1;
                    assert_eq!((new.state_digest(), new.stats()), before);
                }
            }
        }
    }
    assert!(taken > 50 && not > 300, "{taken} taken, {not} refused");
}

#[test]
fn edge_54_forged_sequences_do_no_harm() {
    let folder = Folder::new();
    let (whole, bad) = (folder.file("whole"), folder.file("bad"));
    let (mut taken, mut not) = (0, 0);
    for mode in crate::common::MODES {
        let spec = windowed(mode);
        let mut old = spec.open();
        let seq = old.begin(&tokens(0, 30), up_to(50)).expect("admitted").sequence;
        run(&mut old, seq, 0..27);
        old.save_sequence(seq, &whole, &SaveOptions::default()).expect("written");
        let bytes = std::fs::read(&whole).expect("there");
        let starts = records(&bytes);
        let mut rng = Rng(mode as u64 + 10);
        let mut new = spec.open();
        for _ in 0..400 {
            let mut changed = bytes.clone();
            for _ in 0..=rng.below(2) {
                let record = rng.below(starts.len() as u64 - 1) as usize;
                let len = starts[record + 1] - starts[record] - 8;
                let at = starts[record] + rng.below(len.min(300) as u64) as usize;
                changed[at] =
                    [0, 0xFF, changed[at].wrapping_add(1), rng.next() as u8][rng.below(4) as usize];
                mend(&mut changed, &starts, at);
            }
            std::fs::write(&bad, &changed).expect("written");
            let before = new.state_digest();
            match new.restore_sequence(&bad, &RestoreOptions::default()) {
                Ok(begun) => {
                    taken += 1;
                    new.check_invariants().expect("invariants");
                    let len = new.seq_len(begun.sequence).expect("alive");
                    if len < begun.limit {
                        crate::manager::driver_step::skip(
                            new.reserve(&[(begun.sequence, 1)]).expect("promised"),
                        )
                        .expect("whole");
                    }
                    new.release(begun.sequence).expect("alive");
                    new.check_invariants().expect("invariants");
                    new.reset().expect("idle");
                }
                Err(_) => {
                    not += 1;
                    assert_eq!(new.state_digest(), before);
                }
            }
        }
    }
    assert!(taken > 50 && not > 300, "{taken} taken, {not} refused");
}

/// Names the file and the point of the child that is killed.
const CHILD: &str = "KVPOOL_TEST_KILLED_SAVE";

/// The caches whose saves replace each other.
fn first() -> Rig {
    let mut rig = rig(&paged(24));
    rig.pass(&tokens(0, 49));
    rig
}

fn second() -> Rig {
    let mut rig = first();
    (1..4).for_each(|n| _ = rig.pass(&tokens(100 * n, 100 * n + 33)));
    rig
}

/// Run by the test below, in a process of its own.
#[test]
#[ignore = "is a part of edge_54_a_writer_that_is_killed_leaves_the_old_file_or_the_new"]
fn the_writer_that_is_killed() {
    let Ok(value) = std::env::var(CHILD) else { return };
    let (point, path) = value.split_once(' ').expect("two words");
    let point = match point {
        "sync" => SavePoint::BeforeSync,
        "rename" => SavePoint::BeforeRename,
        "renamed" => SavePoint::AfterRename,
        byte => SavePoint::Byte(byte.parse().expect("a number")),
    };
    let cache = second().cache;
    fail_saves(Some((point, || std::process::abort())));
    let _ = cache.save_prefixes(Path::new(path), &SaveOptions::default());
    panic!("it was to be killed");
}

fn blocks_of(path: &Path) -> u64 {
    restore(&mut paged(24).open(), path).blocks
}

#[test]
fn edge_54_a_writer_that_is_killed_leaves_the_old_file_or_the_new() {
    let folder = Folder::new();
    let (path, other) = (folder.file("prefixes"), folder.file("other"));
    let old = first();
    save(&old.cache, &path);
    let before = std::fs::read(&path).expect("there");
    let all = save(&second().cache, &other).bytes.0;
    let after = std::fs::read(&other).expect("there");
    let tenths = (0..10).map(|tenth| (all * tenth / 10).to_string());
    let points =
        tenths.chain([(all - 1).to_string(), "sync".into(), "rename".into(), "renamed".into()]);
    for point in points {
        let status = Command::new(std::env::current_exe().expect("a path"))
            .args(["--ignored", "--exact", "manager::saved::files::the_writer_that_is_killed"])
            .env(CHILD, format!("{point} {}", path.display()))
            .output()
            .expect("starts")
            .status;
        #[cfg(unix)]
        {
            use std::os::unix::process::ExitStatusExt;
            // SIGABRT.
            assert_eq!(status.signal(), Some(6), "{point}: {status}");
        }
        let now = std::fs::read(&path).expect("there");
        assert_eq!(now == after, point == "renamed", "{point}");
        assert!(now == before || now == after, "{point}: a mixture");
        assert_eq!(blocks_of(&path), if point == "renamed" { 18 } else { 6 });
    }
    // What a killed one left is used again, and not kept.
    save(&old.cache, &path);
    assert_eq!(std::fs::read(&path).expect("there"), before);
    let files = std::fs::read_dir(path.parent().expect("a folder")).expect("a folder").count();
    assert_eq!(files, 2, "the two saves and nothing else");
}

#[test]
fn edge_54_a_full_disk_leaves_the_old_file() {
    let folder = Folder::new();
    let path = folder.file("prefixes");
    let (old, new) = (first(), second());
    save(&old.cache, &path);
    let before = std::fs::read(&path).expect("there");
    let all = save(&new.cache, &folder.file("other")).bytes.0;
    for byte in (0..10).map(|tenth| all * tenth / 10) {
        fail_saves(Some((SavePoint::Byte(byte), full)));
        let error = new.cache.save_prefixes(&path, &SaveOptions::default()).expect_err("full");
        fail_saves(None);
        assert!(matches!(error, SaveError::Io { code: 28, .. }), "{error}");
        assert!(error.to_string().contains("make room"), "{error}");
        assert_eq!(std::fs::read(&path).expect("there"), before);
        let files = std::fs::read_dir(path.parent().expect("a folder")).expect("a folder").count();
        assert_eq!(files, 2, "nothing half done is left");
    }
    let error = new.cache.save_prefixes(&folder.file("no/such/folder"), &SaveOptions::default());
    assert!(matches!(error, Err(SaveError::Io { code: 2, .. })), "{error:?}");
    save(&new.cache, &path);
}

/// Two at a time to one name: one writes, the other is told.
#[test]
fn two_saves_to_one_name_do_not_mix() {
    let folder = Folder::new();
    let path = folder.file("prefixes");
    let (a, b) = (first().cache, second().cache);
    let path = &path;
    let done: Vec<u32> = std::thread::scope(|scope| {
        let threads = [a, b].map(|cache: Cache| {
            scope.spawn(move || {
                let mut done = 0;
                for _ in 0..40 {
                    match cache.save_prefixes(path, &SaveOptions::default()) {
                        Ok(_) => done += 1,
                        Err(error) => assert_eq!(error, SaveError::UnderWay),
                    }
                }
                done
            })
        });
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    assert!(done.iter().sum::<u32>() > 0, "{done:?}");
    assert!([6, 18].contains(&blocks_of(path)));
}

/// The owner's alone: there are prompts in it.
#[test]
#[cfg(unix)]
fn a_save_is_readable_by_its_owner_alone() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new();
    let path = folder.file("prefixes");
    save(&first().cache, &path);
    let mode = std::fs::metadata(&path).expect("there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

/// A device that fails in the middle of a restore leaves everything as it was.
#[test]
fn a_device_that_fails_leaves_no_trace() {
    use crate::manager::edges_failed::failing;
    use std::sync::atomic::Ordering::Relaxed;
    let folder = Folder::new();
    let (prefixes, sequence) = (folder.file("prefixes"), folder.file("sequence"));
    for spec in [
        paged(24),
        windowed(CacheMode::Paged),
        windowed(CacheMode::Hybrid),
        windowed(CacheMode::Contiguous),
    ] {
        let (mut old, _) = failing(&spec);
        let begin = |cache: &mut Cache, tokens: &[u32]| {
            let seq = cache.begin(tokens, up_to(40)).expect("admitted").sequence;
            let mut left = tokens.len() as u32 - cache.seq_len(seq).expect("alive");
            while left > 0 {
                let n = left.min(8);
                crate::manager::driver_step::skip(cache.reserve(&[(seq, n)]).expect("fits"))
                    .expect("whole");
                left -= n;
            }
            seq
        };
        let seq = begin(&mut old, &tokens(0, 33));
        old.save_sequence(seq, &sequence, &SaveOptions::default()).expect("written");
        old.save_prefixes(&prefixes, &SaveOptions::default()).expect("written");
        let event_buffer = if spec.mode == CacheMode::Contiguous { 0 } else { 8 };
        let (mut new, fails) = failing(&Spec { event_buffer, ..spec });
        let other = begin(&mut new, &tokens(0, 9));
        let digest = new.state_digest();
        fails.store(true, Relaxed);
        let options = RestoreOptions::default();
        assert!(matches!(new.restore_prefixes(&prefixes, &options), Err(SaveError::Cache(_))));
        assert_eq!(new.state_digest(), digest);
        assert!(matches!(new.restore_sequence(&sequence, &options), Err(SaveError::Cache(_))));
        new.check_invariants().expect("invariants");
        fails.store(false, Relaxed);
        let restored = new.restore_prefixes(&prefixes, &options).expect("taken");
        assert!(restored.blocks + restored.slots > 0);
        new.restore_sequence(&sequence, &options).expect("taken");
        new.check_invariants().expect("invariants");
        new.release(other).expect("alive");
    }
}
