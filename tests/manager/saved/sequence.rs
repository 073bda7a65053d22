//! A sequence that is saved and restored.

use kvpool::cache::{BeginOptions, RestoreOptions, SaveOptions};
use kvpool::config::{Admission, CacheMode, Capacity};
use kvpool::error::{CacheError, SaveError};
use kvpool::units::Bytes;

use super::{Folder, exported, in_mode, last_rows, restore, rig, run, save, windowed};
use crate::common::{FORMATS, MODES, Spec, assert_same_bits, on_cuda};
use crate::manager::rig::{Line, paged, tokens, up_to};
use crate::manager::text::Ns;

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
    let spec = Spec { max_seqs: 2, ..paged(8) };
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
