//! A save, of prefixes or of a sequence: one that a cache has written, or records that say
//! anything, with bytes changed under checksums that are right again. It is restored into a cache
//! of any mode and block size that may hold something already.
//!
//! What is refused changes nothing; what is taken breaks no invariant; and what is found by a
//! sequence that begins then has the K and V of its tokens. With `KVPOOL_FUZZ_SAY` set it tells
//! what became of each file.
//!
//! - `input.rs`: what an input is.
//! - `file.rs`, `record.rs`: the bytes of a save.
//! - `cache.rs`, `texts.rs`: the caches, and the texts that are in them.

mod cache;
mod file;
mod input;
mod record;
mod texts;

use std::sync::{LazyLock, Mutex};

use kvpool::cache::{Cache, Namespace, RestoreOptions, SeqHandle};

use crate::scratch::Scratch;

use cache::{MODELS, REWIND, check, fill, furnish, pass};
use file::{edit, saved, written};
use input::{File, Input, Name, Shape};

/// Opens a cache of each shape that an input can choose, and computes the longest sequence in it.
pub(super) fn open_all() {
    for shape in Shape::all() {
        for model in 0..MODELS {
            let mut cache = shape.open(model);
            let longest = cache.plan().limits.max_seq_len;
            let sequence = pass(&mut cache, 0, longest, Namespace::default(), true);
            let len = sequence.map(|sequence| cache.seq_len(sequence).expect("alive"));
            assert_eq!(len, Some(longest), "{shape:?} of model {model}");
        }
    }
}

/// Runs one input.
pub(super) fn run(input: &Input) {
    static FILE: LazyLock<Mutex<Scratch>> = LazyLock::new(|| Mutex::new(Scratch::new("save")));
    let mut scratch = FILE.lock().expect("one thread");
    let other = scratch.fill(&[]).with_extension("written");
    let file = match &input.file {
        File::Saved(texts) => saved((input.model, input.old, input.sequence), *texts, &other),
        File::Records(records) => Some(written(input, records, &other)),
    };
    let _ = std::fs::remove_file(&other);
    let Some(mut file) = file else { return };
    edit(&mut file, &input.edits);
    if let Some(cut) = input.cut {
        file.truncate(cut.into());
    }
    let path = scratch.fill(&file);
    let mut cache = input.new.open(input.model);
    furnish(&mut cache, input.before);
    check(&cache);
    let known = input.edits.is_empty();
    let options = RestoreOptions {
        key: input.key.map(u64::from),
        max_len: input.max_len.map(u32::from),
        ..RestoreOptions::default()
    };
    let digest = cache.state_digest();
    let taken = if input.sequence {
        cache.restore_sequence(path, &options).map(|begun| Some(begun.sequence))
    } else {
        cache.restore_prefixes(path, &options).map(|_| None)
    };
    check(&cache);
    if std::env::var_os("KVPOOL_FUZZ_SAY").is_some() {
        eprintln!("{taken:?}");
    }
    match taken {
        Err(error) => {
            assert!(!error.to_string().is_empty());
            assert_eq!(cache.state_digest(), digest, "{error}: it left a trace");
        }
        Ok(None) => {}
        Ok(Some(sequence)) => use_restored(&mut cache, sequence),
    }
    use_cache(&mut cache, known);
}

/// A sequence that was restored goes on, back, and ends.
fn use_restored(cache: &mut Cache, sequence: SeqHandle) {
    let len = cache.seq_len(sequence).expect("alive");
    if let Ok(fork) = cache.fork(sequence) {
        check(cache);
        fill(cache, fork, 1, len + 5);
        check(cache);
        cache.release(fork).expect("alive");
    }
    fill(cache, sequence, 0, len + 9);
    check(cache);
    let now = cache.seq_len(sequence).expect("alive");
    let _ = cache.truncate(sequence, now.saturating_sub(REWIND));
    check(cache);
    fill(cache, sequence, 2, len + 20);
    check(cache);
    cache.release(sequence).expect("alive");
    check(cache);
}

/// What is cached is found and evicted.
fn use_cache(cache: &mut Cache, known: bool) {
    let longest = cache.plan().limits.max_seq_len;
    for (of, name, salt_from) in [
        (0, [0, 0, 0], 0),
        (1, [1, 0, 0], 8),
        (2, [2, 1, 0], 5),
        (0, [1, 1, 0], 20),
        (1, [0, 2, 3], 0),
    ] {
        let namespace = Name(name).namespace(salt_from);
        // A damaged K or V is not told from a right one.
        if let Some(sequence) = pass(cache, of, longest, namespace, known) {
            cache.release(sequence).expect("alive");
            check(cache);
        }
        cache.set_time_ms(2000 + 10_000 * u64::from(of));
        check(cache);
    }
    cache.clear_cached();
    check(cache);
}
