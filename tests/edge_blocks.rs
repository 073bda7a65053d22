//! Edge cases 1–11 and 34, 38: blocks, references, handles, fork, rewind.

use kvpool::cache::{BeginOptions, Cache, SeqHandle};
use kvpool::config::{Admission, Capacity};
use kvpool::error::CacheError;
use kvpool::plan::{Kv, NO_BLOCK};
use kvpool::pool::{BlockState, BlockStore};
use kvpool::units::{BlockId, GroupIdx, LayerIdx};

use crate::common::{
    MODES, Rng, Spec, append_step, assert_refused, assert_same_bits, begin, begin_with, empty_step,
    run_step, vector,
};

#[test]
fn edge_01_zero_and_overflowing_requests() {
    let mut cache = Spec::default().open();
    let seq = begin(&mut cache, 0);
    let error = assert_refused(&mut cache, |cache| cache.reserve(&[(seq, 0)]).map(|_| ()));
    assert_eq!(error, CacheError::ZeroTokens { slot: 0 });
    let error = assert_refused(&mut cache, |cache| cache.reserve(&[(seq, u32::MAX)]).map(|_| ()));
    assert!(matches!(error, CacheError::StepTooLarge { wanted: 0xFFFF_FFFF, limit: 64, .. }));
    let other = begin(&mut cache, 0);
    let error =
        assert_refused(&mut cache, |cache| cache.reserve(&[(seq, 64), (other, 64)]).map(|_| ()));
    assert!(matches!(error, CacheError::StepTooLarge { wanted: 128, limit: 64, .. }));
    let options = BeginOptions {
        max_len: Some(u32::MAX),
        lookahead_tokens: u32::MAX,
        ..BeginOptions::default()
    };
    let error = assert_refused(&mut cache, |cache| cache.begin(&[], options).map(|_| ()));
    assert!(matches!(error, CacheError::SequenceTooLong { limit: 64, .. }));
    let options = BeginOptions { lookahead_tokens: u32::MAX, ..BeginOptions::default() };
    let third = cache.begin(&[], options).expect("look-ahead is cut at max_seq_len").sequence;
    assert_eq!(cache.seq_limit(third), Ok(64));
}

#[test]
fn edge_02_double_release_foreign_and_forged_handles() {
    let mut cache = Spec::default().open();
    let mut other = Spec::default().open();
    let foreign = begin(&mut other, 0);
    let seq = begin(&mut cache, 0);
    let (id, slot, generation) = seq.parts();
    for handle in [
        SeqHandle::from_parts(id, slot, generation + 1),
        SeqHandle::from_parts(id, slot, 0),
        SeqHandle::from_parts(id, 3, 1),
        SeqHandle::from_parts(id, 3, 0),
        SeqHandle::from_parts(id, u32::MAX, 1),
    ] {
        every_verb_refuses(&mut cache, handle, |e| matches!(e, CacheError::StaleHandle { .. }));
    }
    every_verb_refuses(&mut cache, foreign, |e| *e == CacheError::ForeignHandle);
    every_verb_refuses(&mut cache, SeqHandle::from_parts(0, 0, 0), |e| {
        *e == CacheError::ForeignHandle
    });
    cache.release(seq).expect("once");
    every_verb_refuses(&mut cache, seq, |e| matches!(e, CacheError::StaleHandle { .. }));
}

/// Every verb that takes a handle refuses this one and leaves no trace.
fn every_verb_refuses(
    cache: &mut Cache,
    handle: SeqHandle,
    expected: impl Fn(&CacheError) -> bool,
) {
    type Verb = fn(&mut Cache, SeqHandle) -> Result<(), CacheError>;
    let verbs: [Verb; 10] = [
        |cache, handle| cache.release(handle),
        |cache, handle| cache.truncate(handle, 0),
        |cache, handle| cache.fork(handle).map(|_| ()),
        |cache, handle| cache.reserve(&[(handle, 1)]).map(|_| ()),
        |cache, handle| cache.seq_len(handle).map(|_| ()),
        |cache, handle| cache.seq_limit(handle).map(|_| ()),
        |cache, handle| cache.seq_slot(handle).map(|_| ()),
        |cache, handle| cache.table_version(handle).map(|_| ()),
        |cache, handle| cache.block_of(handle, GroupIdx(0), 0).map(|_| ()),
        |cache, handle| cache.export(handle, LayerIdx(0), Kv::K, 0, 0, &mut []),
    ];
    for verb in verbs {
        let error = assert_refused(cache, |cache| verb(cache, handle));
        assert!(expected(&error), "{error}");
    }
}

#[test]
fn edge_03_stale_handle_after_its_slot_was_reused() {
    for mode in MODES {
        let mut cache = Spec::mode(mode).open();
        let old = begin(&mut cache, 0);
        append_step(&mut cache, &[(old, 3)], &[1, 2, 3]).expect("fits");
        cache.release(old).expect("alive");
        let new = begin(&mut cache, 0);
        assert_eq!(new.slot(), old.slot(), "the slot is reused at once");
        every_verb_refuses(&mut cache, old, |e| matches!(e, CacheError::StaleHandle { .. }));
        append_step(&mut cache, &[(new, 2)], &[4, 5]).expect("fits");
        assert_eq!(cache.seq_len(new), Ok(2));
    }
}

#[test]
fn edge_05_a_failed_allocation_leaves_the_free_list_in_order() {
    let spec = Spec {
        capacity: Capacity::Blocks(5),
        admission: Admission::MaxUtilization,
        max_seq_len: 40,
        ..Spec::default()
    };
    let mut cache = spec.open();
    let (a, b) = (begin(&mut cache, 0), begin(&mut cache, 0));
    // Scatter the free list first.
    empty_step(&mut cache, &[(a, 9), (b, 9)]).expect("four blocks");
    cache.truncate(a, 0).expect("any length");
    let before = cache.free_blocks(GroupIdx(0)).expect("paged");
    let error = assert_refused(&mut cache, |cache| cache.reserve(&[(b, 7), (a, 25)]).map(|_| ()));
    assert_eq!(error, CacheError::PoolExhausted { group: GroupIdx(0), wanted: 4, available: 3 });
    assert_eq!(cache.free_blocks(GroupIdx(0)).expect("paged"), before);
    // A cancelled step puts them back in order too.
    cache.reserve(&[(b, 8), (a, 9)]).expect("three blocks").cancel();
    assert_eq!(cache.free_blocks(GroupIdx(0)).expect("paged"), before);
}

/// What is refused while a step is open ends the step, and leaves what there was before it.
#[test]
fn edge_05_a_refusal_beside_an_open_step_takes_nothing() {
    type Call = fn(&mut Cache, SeqHandle) -> Result<(), CacheError>;
    let calls: [Call; 6] = [
        |cache, _| cache.begin(&[0; 41], BeginOptions::default()).map(|_| ()),
        |cache, seq| cache.truncate(seq, 40),
        |cache, seq| cache.reserve(&[(seq, 32)]).map(|_| ()),
        |cache, seq| cache.reserve(&[(seq, 1), (seq, 1)]).map(|_| ()),
        |cache, _| {
            cache
                .fork(Spec::default().open().begin(&[], BeginOptions::default())?.sequence)
                .map(|_| ())
        },
        |cache, _| cache.reset(),
    ];
    let spec = Spec {
        capacity: Capacity::Blocks(5),
        admission: Admission::MaxUtilization,
        max_seq_len: 40,
        ..Spec::default()
    };
    let mut cache = spec.open();
    let (a, b) = (begin(&mut cache, 0), begin(&mut cache, 0));
    empty_step(&mut cache, &[(a, 9), (b, 9)]).expect("four blocks");
    let (before, free) = (cache.state_digest(), cache.free_blocks(GroupIdx(0)).expect("paged"));
    for call in calls {
        let step = cache.reserve(&[(a, 8)]).expect("the fifth block").detach();
        let error = call(&mut cache, b).expect_err("refused");
        assert!(!cache.has_open_step(), "{error}");
        assert!(matches!(cache.resume(step), Err(CacheError::StaleStep { .. })), "{error}");
        assert_eq!(cache.state_digest(), before, "{error}");
        assert_eq!(cache.free_blocks(GroupIdx(0)).expect("paged"), free, "{error}");
        cache.check_invariants().expect("invariants");
    }
}

#[test]
fn edge_06_smallest_pools() {
    // One block.
    let spec = Spec { capacity: Capacity::Blocks(1), ..Spec::default() };
    let mut cache = spec.open();
    let seq = begin_with(&mut cache, 0, Some(8)).expect("one block");
    for _ in 0..8 {
        empty_step(&mut cache, &[(seq, 1)]).expect("in the block");
    }
    let error = assert_refused(&mut cache, |cache| begin_with(cache, 0, Some(1)));
    assert!(matches!(error, CacheError::NotAdmitted { wanted: 1, available: 0, .. }), "{error}");
    let error = assert_refused(&mut cache, |cache| begin_with(cache, 0, Some(9)));
    assert!(matches!(error, CacheError::NeverFits { wanted: 2, total: 1, .. }), "{error}");
    let error = assert_refused(&mut cache, |cache| empty_step(cache, &[(seq, 1)]));
    assert!(matches!(error, CacheError::SequenceTooLong { wanted: 9, limit: 8, .. }), "{error}");

    // Exactly one full-length sequence, and one block less.
    for (blocks, admitted) in [(8, true), (7, false)] {
        let spec = Spec { capacity: Capacity::Blocks(blocks), ..Spec::default() };
        let mut cache = spec.open();
        assert_eq!(cache.plan().full_length_seqs, u32::from(admitted));
        match begin_with(&mut cache, 0, None) {
            Ok(seq) => {
                assert!(admitted);
                empty_step(&mut cache, &[(seq, 63)]).expect("promised");
                empty_step(&mut cache, &[(seq, 1)]).expect("the last token of the last block");
                assert_eq!(cache.free_blocks(GroupIdx(0)).expect("paged"), []);
            }
            Err(error) => {
                assert!(!admitted && matches!(error, CacheError::NeverFits { .. }), "{error}");
                begin_with(&mut cache, 0, Some(56)).expect("a shorter one fits");
            }
        }
    }
}

#[test]
fn edge_07_reference_limit() {
    let mut store = BlockStore::new(GroupIdx(0), 2, 3);
    let block = store.take().expect("free");
    store.add_ref(block).expect("2");
    store.add_ref(block).expect("3");
    let error = store.add_ref(block).expect_err("the limit");
    assert_eq!(error, CacheError::TooManyRefs { block: 0, limit: 3 });
    assert_eq!(store.get(block), Some((BlockState::Active, 3, 0)));
    for left in [2, 1] {
        store.drop_ref(block).expect("held");
        assert_eq!(store.get(block), Some((BlockState::Active, left, 0)));
    }
    store.drop_ref(block).expect("the last");
    assert_eq!(store.get(block), Some((BlockState::Free, 0, 1)));
    for error in [store.drop_ref(block), store.add_ref(block), store.drop_ref(BlockId(9))] {
        assert!(matches!(error, Err(CacheError::StaleBlock { .. })), "{error:?}");
    }
    store.check_invariants().expect("invariants");
}

#[test]
fn edge_08_abort_in_every_state_frees_exactly_once() {
    for mode in MODES {
        for admission in [Admission::Guaranteed, Admission::MaxUtilization] {
            let spec = Spec { admission, windows: vec![6, 0, 0], ..Spec::mode(mode) };
            let mut cache = spec.open();
            let empty = cache.stats();
            let just_begun = begin(&mut cache, 20);
            let half_prefilled = begin(&mut cache, 20);
            append_step(&mut cache, &[(half_prefilled, 5)], &[1, 2, 3, 4, 5]).expect("fits");
            let reserved = begin(&mut cache, 20);
            cache.reserve(&[(reserved, 6)]).expect("fits").cancel();
            let forked = cache.fork(half_prefilled).expect("fits");
            let finished = half_prefilled;
            append_step(&mut cache, &[(finished, 1)], &[6]).expect("fits");
            for seq in [just_begun, reserved, forked, finished] {
                cache.release(seq).expect("alive");
                cache.check_invariants().expect("invariants");
                let error = assert_refused(&mut cache, |cache| cache.release(seq));
                assert!(matches!(error, CacheError::StaleHandle { .. }));
            }
            let stats = cache.stats();
            assert_eq!(
                (stats.held_bytes, stats.promised_bytes, stats.used_bytes),
                (empty.held_bytes, empty.promised_bytes, empty.used_bytes)
            );
        }
    }
}

/// Released in the middle of a step that was put aside, copied on write and appended in part: the
/// step ends, and what it had goes back once.
#[test]
fn edge_08_a_release_within_an_open_step_frees_exactly_once() {
    for mode in MODES {
        for admission in [Admission::Guaranteed, Admission::MaxUtilization] {
            let spec = Spec { admission, windows: vec![6, 0, 0], ..Spec::mode(mode) };
            let mut cache = spec.open();
            let a = begin(&mut cache, 20);
            append_step(&mut cache, &[(a, 5)], &[1, 2, 3, 4, 5]).expect("fits");
            let forks = [a, a].map(|seq| cache.fork(seq).expect("fits"));
            let just_begun = begin(&mut cache, 20);
            let mut alive = vec![forks[0], just_begun, a, forks[1]];
            while let Some(gone) = alive.first().copied() {
                let batch: Vec<_> = alive.iter().map(|seq| (*seq, 2)).collect();
                let mut step = cache.reserve(&batch).expect("fits");
                let junk = vec![f32::NAN; step.num_tokens() * 8];
                step.append(LayerIdx(1), (&junk[..]).into(), (&junk[..]).into()).expect("fits");
                let step = step.detach();
                cache.release(gone).expect("alive");
                cache.check_invariants().expect("invariants");
                alive.remove(0);
                assert!(matches!(cache.resume(step), Err(CacheError::StaleStep { .. })));
                let error = assert_refused(&mut cache, |cache| cache.release(gone));
                assert!(matches!(error, CacheError::StaleHandle { .. }));
                for seq in alive.iter().filter(|seq| **seq != just_begun) {
                    check_contents(&cache, *seq, &[1, 2, 3, 4, 5]);
                }
            }
            let stats = cache.stats();
            assert_eq!((stats.seqs, stats.held_bytes.0, stats.promised_bytes.0), (0, 0, 0));
            assert_eq!(stats.used_bytes.0, 0);
        }
    }
}

#[test]
fn edge_09_reset_while_sequences_live() {
    let mut cache = Spec::default().open();
    let seq = begin(&mut cache, 0);
    let error = assert_refused(&mut cache, Cache::reset);
    assert_eq!(error, CacheError::SequencesAlive { live: 1, reserved: 0 });
    append_step(&mut cache, &[(seq, 2)], &[1, 2]).expect("still alive");
    let block = cache.block_of(seq, GroupIdx(0), 0).expect("held");
    cache.release(seq).expect("alive");
    cache.reset().expect("idle");
    cache.check_invariants().expect("invariants");
    assert_eq!(cache.state_digest(), Spec::default().open().state_digest());
    assert!(cache.block_refs(block).is_err(), "handles from before are stale");
}

#[test]
fn edge_11_duplicate_key() {
    let mut cache = Spec::default().open();
    let with = |key| BeginOptions { key: Some(key), ..BeginOptions::default() };
    let first = cache.begin(&[], with(7)).expect("fits").sequence;
    let error = assert_refused(&mut cache, |cache| cache.begin(&[], with(7)).map(|_| ()));
    assert_eq!(error, CacheError::DuplicateKey { key: 7 });
    cache.begin(&[], with(0)).expect("another key");
    cache.begin(&[], BeginOptions::default()).expect("no key is not key 0");
    cache.release(first).expect("alive");
    cache.begin(&[], with(7)).expect("free again");
}

#[test]
fn edge_17_cached_blocks_count_once_as_capacity() {
    let mut store = BlockStore::new(GroupIdx(0), 3, 4);
    let blocks: Vec<BlockId> = (0..3).filter_map(|_| store.take()).collect();
    assert_eq!((store.available(), store.take()), (0, None));
    store.park(blocks[1]).expect("one holder");
    store.park(blocks[0]).expect("one holder");
    assert_eq!(store.available(), 2);
    store.promise(2).expect("two are available");
    assert!(matches!(store.promise(1), Err(CacheError::NotAdmitted { available: 0, .. })));
    assert_eq!(store.unpromised(), 0);
    let counts = store.counts();
    assert_eq!((counts.free, counts.active, counts.cached, counts.promised), (0, 1, 0, 2));
    store.unpromise(2);
    assert_eq!(store.cached_list().collect::<Vec<_>>(), [blocks[1], blocks[0]]);
    // A hit takes it out of what is available; it is not capacity any more.
    store.revive(blocks[1]).expect("cached");
    assert_eq!(store.available(), 1);
    assert!(store.revive(blocks[1]).is_err(), "not cached any more");
    store.check_invariants().expect("invariants");
    // No block is free before the oldest cached one is evicted; it cannot be revived after.
    assert_eq!((store.take(), store.victim()), (None, Some(blocks[0])));
    store.evict(blocks[0]).expect("cached");
    assert_eq!(store.take(), Some(blocks[0]));
    assert!(store.revive(blocks[0]).is_err());
    assert_eq!((store.available(), store.take()), (0, None));
    store.check_invariants().expect("invariants");
}

#[test]
fn edge_34_fork_inside_a_block() {
    for mode in MODES {
        let mut cache = Spec { windows: vec![0, 0, 0], ..Spec::mode(mode) }.open();
        let a = begin(&mut cache, 0);
        let prefix: Vec<u64> = (0..11).collect();
        append_step(&mut cache, &[(a, 11)], &prefix).expect("fits");
        let b = cache.fork(a).expect("fits");
        append_step(&mut cache, &[(a, 2), (b, 2)], &[100, 101, 200, 201]).expect("fits");
        let c = cache.fork(b).expect("a fork of a fork");
        append_step(&mut cache, &[(b, 1), (c, 1)], &[300, 400]).expect("fits");
        let tags = |tail: &[u64]| [&prefix[..], tail].concat();
        let mut alive =
            vec![(a, tags(&[100, 101])), (b, tags(&[200, 201, 300])), (c, tags(&[200, 201, 400]))];
        // Released in another order in each mode; what is left stays as it is.
        let mut rng = Rng(mode as u64);
        while !alive.is_empty() {
            cache.poison_unused(0xFF).expect("poison");
            for (seq, tags) in &alive {
                check_contents(&cache, *seq, tags);
            }
            let (seq, _) = alive.swap_remove(rng.below(alive.len() as u64) as usize);
            cache.release(seq).expect("alive");
            cache.check_invariants().expect("invariants");
        }
    }
}

/// Every K and V of a sequence, byte for byte.
fn check_contents(cache: &Cache, seq: SeqHandle, tags: &[u64]) {
    let geometry = &cache.plan().geometry;
    let (heads, dim) = (geometry.num_kv_heads, geometry.head_dim);
    for layer in 0..geometry.num_layers {
        for kv in [Kv::K, Kv::V] {
            let mut got = vec![0.0; tags.len() * (heads * dim) as usize];
            let len = tags.len() as u32;
            cache.export(seq, LayerIdx(layer), kv, 0, len, &mut got).expect("held");
            let want: Vec<f32> = (0..)
                .zip(tags)
                .flat_map(|(p, tag)| vector(*tag, p, layer, kv as u64, heads, dim))
                .collect();
            assert_same_bits(&got, &want, "contents");
        }
    }
}

#[test]
fn edge_38_rewind_across_a_block_boundary() {
    let mut cache = Spec::default().open();
    let seq = begin(&mut cache, 0);
    let tags: Vec<u64> = (0..17).collect();
    append_step(&mut cache, &[(seq, 17)], &tags).expect("fits");
    let third = cache.block_of(seq, GroupIdx(0), 16).expect("held");
    let second = cache.block_of(seq, GroupIdx(0), 15).expect("held");
    let version = cache.table_version(seq).expect("alive");
    assert_eq!(cache.block_refs(third), Ok(1));
    cache.truncate(seq, 16).expect("any length");
    assert!(matches!(cache.block_refs(third), Err(CacheError::StaleBlock { .. })));
    assert_eq!(cache.block_refs(second), Ok(1));
    assert_ne!(cache.table_version(seq), Ok(version), "rows read before are stale");
    let (table, row) = cache.block_table(GroupIdx(0)).expect("paged");
    assert_eq!(table[(seq.slot() * row + 2) as usize], NO_BLOCK);
    // Within a block nothing moves.
    let version = cache.table_version(seq).expect("alive");
    cache.truncate(seq, 9).expect("any length");
    assert_eq!(cache.table_version(seq), Ok(version));
    let error = assert_refused(&mut cache, |cache| cache.truncate(seq, 10));
    assert_eq!(error, CacheError::TruncateBeyondEnd { wanted: 10, len: 9 });
    // What is appended after a rewind is what counts.
    append_step(&mut cache, &[(seq, 1)], &[99]).expect("fits");
    check_contents(&cache, seq, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 99]);
    cache.truncate(seq, 0).expect("to nothing");
    assert_eq!(cache.stats().held_bytes.0, 0);
    assert!(cache.block_refs(second).is_err());
    append_step(&mut cache, &[(seq, 2)], &[5, 6]).expect("and on");
    check_contents(&cache, seq, &[5, 6]);
}

/// After a rewind the outputs are what a fresh run of the same tokens gives, in every mode.
#[test]
fn edge_38_outputs_after_a_rewind_equal_a_fresh_run() {
    for mode in MODES {
        let spec = Spec { windows: vec![7, 0, 0], max_rewind_tokens: 10, ..Spec::mode(mode) };
        let mut cache = spec.open();
        let (a, b) = (begin(&mut cache, 0), begin(&mut cache, 0));
        for at in 0..20_u64 {
            append_step(&mut cache, &[(a, 1)], &[at]).expect("fits");
        }
        cache.truncate(a, 10).expect("ten tokens back");
        for at in 0..10_u64 {
            append_step(&mut cache, &[(b, 1)], &[at]).expect("fits");
        }
        cache.poison_unused(0xFF).expect("poison");
        for at in 0..9_u64 {
            let out = run_step(&mut cache, &[(a, 1), (b, 1)], &[50 + at, 50 + at]).expect("fits");
            for layer in &out.out {
                let (first, second) = layer.split_at(layer.len() / 2);
                assert_same_bits(first, second, "rewound and fresh");
            }
        }
    }
}
