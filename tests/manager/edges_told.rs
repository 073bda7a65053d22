//! What the manager says of itself: handles of blocks, counters, texts, the audit; and how long one
//! step may take.

use std::time::{Duration, Instant};

use kvpool::cache::{BeginOptions, Cache, KeyPart, Namespace, PinHandle};
use kvpool::config::CacheMode;
use kvpool::device::NullDevice;
use kvpool::error::CacheError;
use kvpool::units::GroupIdx;

use super::driver_step::skip;
use super::rig::{paged, tokens, up_to};
use crate::common::Spec;

fn null(spec: &Spec) -> Cache {
    let plan = spec.plan();
    let device = Box::new(NullDevice::open(&plan));
    Cache::open(plan, device).expect("opens")
}

/// A prompt comes and goes.
fn pass(cache: &mut Cache, prompt: &[u32], namespace: Namespace) {
    let options = BeginOptions { namespace, ..up_to(prompt.len() as u32) };
    let begun = cache.begin(prompt, options).expect("fits");
    let left = prompt.len() as u32 - begun.cached_len;
    skip(cache.reserve(&[(begun.sequence, left)]).expect("fits")).expect("whole");
    cache.release(begun.sequence).expect("alive");
}

/// Only a position that the sequence has, has a block.
#[test]
fn a_position_behind_the_end_has_no_block() {
    let mut cache = null(&paged(8));
    let begun = cache.begin(&tokens(0, 9), up_to(64)).expect("fits");
    skip(cache.reserve(&[(begun.sequence, 9)]).expect("promised")).expect("whole");
    let group = GroupIdx(0);
    assert!(cache.block_of(begun.sequence, group, 8).is_ok());
    for position in [9, 15, 16, 63, 64, u32::MAX - 1, u32::MAX] {
        let refused = cache.block_of(begun.sequence, group, position).expect_err("not held");
        assert!(matches!(refused, CacheError::NotHeld { .. }), "{position}: {refused}");
    }
}

/// A block that is taken over for another's tokens is not the one that its handle named.
#[test]
fn a_block_that_is_taken_over_is_another() {
    let mut cache = null(&paged(8));
    let first = cache.begin(&tokens(0, 8), up_to(8)).expect("fits");
    skip(cache.reserve(&[(first.sequence, 8)]).expect("promised")).expect("whole");
    let block = cache.block_of(first.sequence, GroupIdx(0), 0).expect("held");
    cache.release(first.sequence).expect("alive");
    let second = cache.begin(&[0, 1, 2, 3, 4, 77], up_to(8)).expect("fits");
    assert_eq!((second.cached_len, cache.stats().partial_takeovers), (5, 1));
    let refused = cache.block_refs(block).expect_err("other tokens");
    assert!(matches!(refused, CacheError::StaleBlock { .. }), "{refused}");
    let block = cache.block_of(second.sequence, GroupIdx(0), 0).expect("held");
    assert_eq!(cache.block_refs(block), Ok(1));
}

/// Nor is one that was given back and found again the one that its handle named, or one whose tokens,
/// which others could find, are written over.
#[test]
fn a_block_that_was_given_back_is_another() {
    let windowed = Spec { windows: vec![0, 24], max_rewind_tokens: 8, ..paged(8) };
    for (spec, groups) in [(paged(8), 1), (windowed, 2)] {
        let mut cache = null(&spec);
        let all = |cache: &Cache, sequence| -> Vec<_> {
            let of = |group| cache.block_of(sequence, GroupIdx(group), 0).expect("held");
            (0..groups).map(of).collect()
        };
        let first = cache.begin(&tokens(0, 8), up_to(16)).expect("fits");
        skip(cache.reserve(&[(first.sequence, 8)]).expect("promised")).expect("whole");
        let given_back = all(&cache, first.sequence);
        cache.release(first.sequence).expect("alive");
        let second = cache.begin(&tokens(0, 9), up_to(16)).expect("fits");
        assert_eq!(second.cached_len, 8);
        let held = all(&cache, second.sequence);
        assert!(held.iter().all(|block| cache.block_refs(*block) == Ok(1)));
        skip(cache.reserve(&[(second.sequence, 1)]).expect("promised")).expect("whole");
        cache.truncate(second.sequence, 3).expect("its own");
        skip(cache.reserve(&[(second.sequence, 1)]).expect("promised")).expect("whole");
        assert!(cache.stats().blocks_withdrawn > 0);
        for block in given_back.into_iter().chain(held) {
            let refused = cache.block_refs(block).expect_err("other tokens");
            assert!(matches!(refused, CacheError::StaleBlock { .. }), "{refused}");
        }
        assert!(all(&cache, second.sequence).iter().all(|b| cache.block_refs(*b) == Ok(1)));
    }
}

/// A cache that was reset is as after open: pins are given out in the same order.
#[test]
fn a_reset_gives_pins_in_the_order_of_a_fresh_cache() {
    let (mut used, mut fresh) = (null(&paged(8)), null(&paged(8)));
    let pinned = |cache: &mut Cache| {
        let begun = cache.begin(&tokens(0, 9), up_to(16)).expect("fits");
        let left = 9 - begun.cached_len;
        skip(cache.reserve(&[(begun.sequence, left)]).expect("promised")).expect("whole");
        let pins = [(); 2].map(|()| cache.pin(begun.sequence).expect("a block"));
        cache.release(begun.sequence).expect("alive");
        pins
    };
    for pin in pinned(&mut used) {
        used.unpin(pin).expect("pinned");
    }
    used.reset().expect("nothing is alive");
    let places = |pins: [PinHandle; 2]| pins.map(|pin| pin.parts().1);
    assert_eq!(places(pinned(&mut used)), places(pinned(&mut fresh)));
}

/// What is told of unused bytes ends a step that was put aside, as every verb does that changes
/// anything.
#[test]
fn a_step_that_was_put_aside_is_not_poisoned() {
    let mut cache = null(&paged(8));
    let begun = cache.begin(&tokens(0, 8), up_to(8)).expect("fits");
    let step = cache.reserve(&[(begun.sequence, 8)]).expect("promised").detach();
    cache.poison_unused(0xFF).expect("memory");
    assert!(cache.resume(step).is_err(), "it would commit what was poisoned");
}

/// A prompt that nobody had before misses no donor.
#[test]
fn a_new_prompt_misses_no_donor() {
    let mut cache = null(&Spec::mode(CacheMode::Contiguous));
    cache.begin(&tokens(0, 9), up_to(32)).expect("fits");
    assert_eq!(cache.stats().donor_misses, 0);
}

/// Errors name what they are about.
#[test]
fn errors_name_what_they_are_about() {
    let (mut cache, mut other) = (null(&paged(8)), null(&paged(8)));
    let begun = cache.begin(&tokens(0, 9), up_to(64)).expect("fits");
    skip(cache.reserve(&[(begun.sequence, 9)]).expect("promised")).expect("whole");
    let pin = cache.pin(begun.sequence).expect("a block");
    let foreign = other.unpin(pin).expect_err("of another cache").to_string();
    assert!(!foreign.contains("sequence"), "{foreign}");
    let step = cache.reserve(&[]).expect("empty");
    let group = step.token_slots(GroupIdx(7)).expect_err("one group").to_string();
    assert_eq!(group, "layer group 7 does not exist; the plan has 1");
    let table = step.block_table(GroupIdx(7)).expect_err("one group").to_string();
    assert_eq!(table, "layer group 7 does not exist, or is not paged; the plan has 1");
}

/// More tenants than numbers for them: who finds the public part of its prompt and gets no number
/// for the private one is as sound as anyone.
#[test]
fn a_salt_without_a_number_breaks_no_invariant() {
    let mut cache = null(&Spec {
        max_seqs: 2,
        max_seq_len: 1024,
        max_batch_tokens: 1024,
        max_step_tokens: Some(1024),
        ..paged(80_000)
    });
    let tenant =
        |number| Namespace { adapter: Some(KeyPart::number(number)), ..Namespace::default() };
    // The oldest blocks are of one tenant, and more than one sequence evicts for a number.
    let long = tokens(0, 801);
    for chunk in [400, 800] {
        pass(&mut cache, &long[..chunk], tenant(0));
    }
    let public = tokens(0, 8);
    let held = cache.begin(&public, up_to(8)).expect("fits");
    skip(cache.reserve(&[(held.sequence, 8)]).expect("fits")).expect("whole");
    let numbers = u64::from(cache.plan().max_namespaces());
    for number in 1..numbers - 1 {
        pass(&mut cache, &public, tenant(number));
    }
    let salt = Some(KeyPart::number(7));
    let namespace = Namespace { salt, salt_from: 8, ..Namespace::default() };
    let options = BeginOptions { namespace, ..up_to(24) };
    assert_eq!(cache.stats().namespaces_refused, 0);
    let begun = cache.begin(&tokens(0, 24), options).expect("fits");
    assert_eq!((begun.cached_len, cache.stats().namespaces_refused), (8, 1));
    cache.check_invariants().expect("invariants");
    skip(cache.reserve(&[(begun.sequence, 16)]).expect("fits")).expect("whole");
    cache.check_invariants().expect("invariants");
    cache.release(begun.sequence).expect("alive");
    cache.check_invariants().expect("invariants");
}

/// A long tail of blocks that must go because their first is written takes time with its length,
/// not with its square.
#[test]
fn a_long_tail_goes_quickly() {
    let blocks = 1 << 16;
    let len = blocks * 8;
    let spec = Spec {
        max_seq_len: len,
        max_batch_tokens: len,
        max_step_tokens: Some(len),
        max_seqs: 3,
        ..paged(blocks.into())
    };
    let mut cache = null(&spec);
    let whole = tokens(0, len);
    let first = cache.begin(&whole[..16], up_to(16)).expect("fits");
    skip(cache.reserve(&[(first.sequence, 16)]).expect("promised")).expect("whole");
    pass(&mut cache, &whole, Namespace::default());
    let _rest = cache.begin(&[], up_to(len - 16)).expect("all that is left");
    cache.truncate(first.sequence, 12).expect("its own");
    let began = Instant::now();
    skip(cache.reserve(&[(first.sequence, 1)]).expect("promised")).expect("whole");
    let took = began.elapsed();
    assert_eq!(cache.stats().blocks_withdrawn, u64::from(blocks) - 1);
    assert!(took < Duration::from_secs(1), "{took:?}");
}
