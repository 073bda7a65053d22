//! Files of saves that end early, that have a bit flipped, that cannot be read, or that another
//! changes while they are restored: of prefixes, in blocks and in slots, and of a sequence.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use kvpool::cache::{Cache, RestoreOptions, SaveOptions, SavePoint, Saved, SeqHandle, fail_saves};
use kvpool::config::CacheMode;
use kvpool::device::Device;
use kvpool::error::SaveError;
use kvpool::plan::Plan;

use super::files::{mend, records, some};
use super::{Folder, full, run, windowed};
use crate::common::Rng;
use crate::manager::asking::{Asking, Call};
use crate::manager::rig::{tokens, up_to};

/// What a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holds {
    Blocks,
    Slots,
    Sequence,
}

pub(super) const ALL: [Holds; 3] = [Holds::Blocks, Holds::Slots, Holds::Sequence];

impl Holds {
    pub(super) fn mode(self) -> CacheMode {
        match self {
            Self::Blocks => CacheMode::Paged,
            Self::Slots => CacheMode::Contiguous,
            Self::Sequence => CacheMode::Hybrid,
        }
    }

    /// A small cache, and what of it is saved.
    pub(super) fn source(self) -> (Cache, Option<SeqHandle>) {
        if self != Self::Sequence {
            return (some(self.mode()).cache, None);
        }
        let mut cache = windowed(self.mode()).open();
        let seq = cache.begin(&tokens(0, 30), up_to(50)).expect("admitted").sequence;
        run(&mut cache, seq, 0..27);
        (cache, Some(seq))
    }

    /// Writes a small file.
    fn write(self, path: &Path) {
        let (cache, seq) = self.source();
        save_of(&cache, seq, path).expect("written");
    }

    pub(super) fn restore(
        self,
        cache: &mut Cache,
        path: &Path,
    ) -> Result<Option<SeqHandle>, SaveError> {
        let options = RestoreOptions::default();
        match self {
            Self::Sequence => Ok(Some(cache.restore_sequence(path, &options)?.sequence)),
            _ => cache.restore_prefixes(path, &options).map(|_| None),
        }
    }

    /// Asserts that a restore is refused and leaves no trace (P4).
    pub(super) fn refused(self, cache: &mut Cache, path: &Path) -> SaveError {
        let before = (cache.state_digest(), cache.stats());
        let error = self.restore(cache, path).expect_err("refused");
        assert_eq!((cache.state_digest(), cache.stats()), before, "{error}: it left a trace");
        cache.check_invariants().expect("invariants");
        error
    }
}

/// Saves a sequence, or all prefixes.
pub(super) fn save_of(
    cache: &Cache,
    seq: Option<SeqHandle>,
    path: &Path,
) -> Result<Saved, SaveError> {
    match seq {
        Some(seq) => cache.save_sequence(seq, path, &SaveOptions::default()),
        None => cache.save_prefixes(path, &SaveOptions::default()),
    }
}

#[test]
fn edge_54_truncated_at_any_byte() {
    let folder = Folder::new();
    let (whole, cut) = (folder.file("whole"), folder.file("cut"));
    for holds in ALL {
        holds.write(&whole);
        let bytes = std::fs::read(&whole).expect("there");
        let starts = records(&bytes);
        let mut new = windowed(holds.mode()).open();
        // Around each border of records, and here and there.
        let mut rng = Rng(1);
        let near =
            starts.iter().flat_map(|at| [-9_i64, -1, 0, 1, 15, 16, 17].map(|by| *at as i64 + by));
        let mut lengths: Vec<i64> =
            near.chain((0..40).map(|_| rng.below(bytes.len() as u64) as i64)).collect();
        lengths.retain(|len| (0..bytes.len() as i64).contains(len));
        for len in lengths {
            std::fs::write(&cut, &bytes[..len as usize]).expect("written");
            let error = holds.refused(&mut new, &cut);
            assert!(
                matches!(error, SaveError::Truncated { at, .. } if at == len as u64),
                "{holds:?}, {len}: {error}"
            );
            assert!(error.to_string().contains("cut off"), "{error}");
        }
        std::fs::write(&cut, [&bytes[..], &[0]].concat()).expect("written");
        let error = holds.refused(&mut new, &cut);
        let behind = matches!(error, SaveError::Damaged { problem: "bytes behind the end", .. });
        assert!(behind, "{holds:?}: {error}");
        holds.restore(&mut new, &whole).expect("taken");
    }
}

#[test]
fn edge_54_any_bit_flipped() {
    let folder = Folder::new();
    let (whole, bad) = (folder.file("whole"), folder.file("bad"));
    for holds in ALL {
        holds.write(&whole);
        let bytes = std::fs::read(&whole).expect("there");
        let starts = records(&bytes);
        let mut new = windowed(holds.mode()).open();
        let mut rng = Rng(2);
        // Every bit of the header (which is the same for all, so of one of them) and of the frames,
        // and some of the rest.
        let step = if holds == Holds::Blocks { 1 } else { 37 };
        let mut bits: Vec<usize> = (0..starts[1] * 8).step_by(step).collect();
        bits.extend(starts[1..starts.len() - 1].iter().flat_map(|at| at * 8..at * 8 + 128));
        bits.extend((0..300).map(|_| rng.below(bytes.len() as u64 * 8) as usize));
        for bit in bits {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            std::fs::write(&bad, &changed).expect("written");
            let error = holds.refused(&mut new, &bad);
            let named = match error {
                SaveError::NotASave => bit < 64,
                SaveError::OtherVersion { .. } => (64..96).contains(&bit),
                SaveError::Damaged { at, .. } => starts.contains(&(at as usize)),
                SaveError::Truncated { .. } => true,
                _ => false,
            };
            assert!(named, "{holds:?}, bit {bit}: {error}");
        }
        holds.restore(&mut new, &whole).expect("taken");
    }
}

/// A file that the system does not read.
#[test]
#[cfg(target_os = "linux")]
fn edge_54_a_file_that_cannot_be_read() {
    // Its first page is nobody's: reading there is an I/O error.
    let unreadable = Path::new("/proc/self/mem");
    for holds in ALL {
        let mut cache = windowed(holds.mode()).open();
        let error = holds.refused(&mut cache, unreadable);
        // EIO; or whoever reads the file looks at it first, and says what it is.
        assert!(!matches!(error, SaveError::Cache(_)), "{error}");
        let said = matches!(error, SaveError::Io { code: 5, .. } | SaveError::Truncated { .. });
        assert!(said, "{error}");
    }
}

/// The disk is full at any tenth of a sequence, and where it is flushed.
#[test]
fn edge_54_a_full_disk_leaves_the_old_sequence() {
    let folder = Folder::new();
    let (path, other) = (folder.file("sequence"), folder.file("other"));
    for mode in crate::common::MODES {
        let mut cache = windowed(mode).open();
        let seq = cache.begin(&tokens(0, 40), up_to(50)).expect("admitted").sequence;
        run(&mut cache, seq, 0..20);
        let options = SaveOptions::default();
        cache.save_sequence(seq, &path, &options).expect("written");
        let before = std::fs::read(&path).expect("there");
        run(&mut cache, seq, 20..40);
        let all = cache.save_sequence(seq, &other, &options).expect("written").bytes.0;
        let state = (cache.state_digest(), cache.stats());
        let bytes = (0..10).map(|tenth| SavePoint::Byte(all * tenth / 10));
        for point in bytes.chain([SavePoint::BeforeSync, SavePoint::BeforeRename]) {
            fail_saves(Some((point, full)));
            let error = cache.save_sequence(seq, &path, &options).expect_err("full");
            fail_saves(None);
            assert!(matches!(error, SaveError::Io { code: 28, .. }), "{point:?}: {error}");
            assert_eq!(std::fs::read(&path).expect("there"), before);
            assert_eq!((cache.state_digest(), cache.stats()), state);
            let files = std::fs::read_dir(path.parent().expect("a folder")).expect("a folder");
            assert_eq!(files.count(), 2, "{point:?}: nothing half done is left");
        }
        cache.save_sequence(seq, &path, &options).expect("written");
        assert_eq!(std::fs::read(&path).expect("there"), std::fs::read(&other).expect("there"));
    }
}

/// At the n-th writing of the device, counted down from when this is set, a file gets other bytes.
type Trap = Arc<Mutex<Option<(u64, PathBuf, Vec<u8>)>>>;

/// A device that has no memory, at one of whose writings the file that is being restored becomes
/// another.
fn meddling(plan: &Plan, trap: &Trap) -> Box<dyn Device> {
    let trap = Arc::clone(trap);
    Asking::open(plan, move |call| {
        let mut trap = trap.lock().expect("no panic");
        if let Some((left, path, other)) = trap.as_mut().filter(|_| call == Call::Write) {
            *left -= 1;
            if *left == 0 {
                // The same file: whoever has it open reads what is there now.
                std::fs::write(path, other).expect("written");
                *trap = None;
            }
        }
        Ok(())
    })
}

/// Files like this one, whose records have other numbers under checksums that are right, or that
/// end early.
fn others(holds: Holds, bytes: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    let starts = records(bytes);
    let kind = |at: usize| bytes[at];
    let of_kind = |wanted: u8| {
        let all = starts[1..starts.len() - 1].iter().copied();
        all.filter(move |at| kind(*at) == wanted).collect::<Vec<_>>()
    };
    let (blocks, ends) = (of_kind(2), of_kind(4));
    let changed = |records: &[usize], by: usize, value: u8| {
        let mut other = bytes.to_vec();
        for at in records {
            other[at + 16 + by] = value;
            mend(&mut other, &starts, *at);
        }
        other
    };
    let mut damaged = bytes.to_vec();
    blocks.iter().for_each(|at| damaged[at + 16 + 40] ^= 1);
    let mut all = vec![
        ("half of it", bytes[..bytes.len() / 2].to_vec()),
        ("the header alone", bytes[..starts[1]].to_vec()),
        ("nothing", Vec::new()),
        ("wrong checksums", damaged),
        // A parent that no block has; one token of each block.
        ("other parents", changed(&blocks, 0, 0xFE)),
        ("no tokens", changed(&blocks, 8, 0)),
        ("ends", {
            let mut other = bytes.to_vec();
            for at in &blocks {
                other[*at] = 4;
                mend(&mut other, &starts, *at);
            }
            other
        }),
    ];
    assert!(!ends.is_empty() && !blocks.is_empty());
    if holds == Holds::Sequence {
        let heads = of_kind(3);
        assert_eq!(heads.len(), 1);
        let known = bytes[heads[0] + 16 + 16];
        all.push(("another number of tokens", changed(&heads, 16, known - 1)));
    }
    all
}

/// The file is another from some point of the restore on: the restore is refused and leaves no
/// trace, or had read everything; and the right file is taken afterwards.
#[test]
fn edge_54_a_file_that_is_changed_meanwhile() {
    let folder = Folder::new();
    let (whole, path) = (folder.file("whole"), folder.file("changing"));
    for holds in ALL {
        holds.write(&whole);
        let bytes = std::fs::read(&whole).expect("there");
        for (what, other) in others(holds, &bytes) {
            let mut refused = 0;
            for nth in 1.. {
                let plan = windowed(holds.mode()).plan();
                let trap = Trap::default();
                let device = meddling(&plan, &trap);
                let mut cache = Cache::open(plan, device).expect("opens");
                std::fs::write(&path, &bytes).expect("written");
                *trap.lock().expect("no panic") = Some((nth, path.clone(), other.clone()));
                let digest = cache.state_digest();
                let result = holds.restore(&mut cache, &path);
                cache.check_invariants().expect("invariants");
                let changed = trap.lock().expect("no panic").take().is_none();
                if let Err(error) = result {
                    let about_the_file =
                        matches!(error, SaveError::Damaged { .. } | SaveError::Truncated { .. });
                    assert!(changed && about_the_file, "{holds:?}, {what}, {nth}: {error}");
                    assert_eq!(cache.state_digest(), digest, "{holds:?}, {what}, {nth}: {error}");
                    refused += 1;
                    std::fs::write(&path, &bytes).expect("written");
                    holds.restore(&mut cache, &path).expect("taken");
                }
                if !changed {
                    break;
                }
            }
            assert!(refused > 0, "{holds:?}: {what} was never noticed");
        }
    }
}
