//! Edge cases 5, 27, 31 and pins: what goes, in which order, and what stays.

use kvpool::cache::{BeginOptions, Cache, PinHandle, Retention, Retentions};
use kvpool::config::Admission;
use kvpool::device::NullDevice;
use kvpool::error::CacheError;

use super::driver_step::skip;
use super::rig::{Line, Rig, paged, tokens, up_to};
use super::text::Ns;
use crate::common::{Spec, assert_refused};

/// Children go before their parents, one at a time.
#[test]
fn edge_27_children_are_evicted_before_their_parents() {
    let admission = Admission::MaxUtilization;
    let mut rig = Rig::new(&Spec { admission, ..paged(8) });
    let prompt = tokens(0, 41);
    rig.pass(&prompt);
    // Another leaf beside it, on the same two parents.
    rig.pass(&[&tokens(0, 16)[..], &tokens(70, 79)].concat());
    assert_eq!(rig.blocks(), (2, 0, 6, 0));
    let mut other = rig.begin(&tokens(100, 101), Ns::default(), up_to(64)).expect("fits");
    rig.feed(&mut [(&mut other, &tokens(100, 116))]).expect("two free blocks");
    for gone in 1..=6_u64 {
        let before = rig.blocks_found(&prompt);
        let from = 100 + other.text.len();
        rig.feed(&mut [(&mut other, &tokens(from, from + 8))]).expect("one block is evicted");
        assert_eq!(rig.cache.stats().evictions, gone);
        let after = rig.blocks_found(&prompt);
        assert!(after == before || after + 1 == before, "{before}, then {after}");
    }
    assert_eq!(rig.blocks_found(&prompt), 0);
    assert_eq!(rig.blocks(), (0, 8, 0, 0));
}

/// A long sequence evicts another, block by block, while its own blocks are published.
#[test]
fn edge_27_commits_of_thousands_of_blocks_evict_safely() {
    let spec = Spec {
        max_seqs: 2,
        max_seq_len: 16_384,
        max_batch_tokens: 16_384,
        max_step_tokens: Some(16_384),
        ..paged(2_500)
    };
    let plan = spec.plan();
    let device = Box::new(NullDevice::open(&plan));
    let mut cache = Cache::open(plan, device).expect("opens");
    for round in 0..12 {
        let prompt = tokens(round % 3 * 100_000, round % 3 * 100_000 + 16_000);
        let begun = cache.begin(&prompt, up_to(16_384)).expect("fits");
        let mut left = 16_000 - begun.cached_len;
        while left > 0 {
            let n = left.min(if round % 2 == 0 { 16_000 } else { 1_237 });
            skip(cache.reserve(&[(begun.sequence, n)]).expect("promised")).expect("whole");
            left -= n;
        }
        cache.check_invariants().expect("invariants");
        cache.release(begun.sequence).expect("alive");
        cache.check_invariants().expect("invariants");
    }
    assert!(cache.stats().evictions > 10_000);
}

fn kept(priority: u8, duration_ms: Option<u64>) -> Retentions {
    Retentions::new(&[Retention { from: 0, to: u32::MAX, priority, duration_ms }]).expect("valid")
}

/// Runs a prompt with a retention and releases it.
fn pass_with(rig: &mut Rig, prompt: &[u32], retention: Retentions) {
    let options = BeginOptions { retention, ..up_to(prompt.len() as u32) };
    let mut line = rig.begin(prompt, Ns::default(), options).expect("fits");
    rig.prefill(&mut line, prompt);
    rig.release(&line);
}

/// Takes blocks so that as many cached ones are evicted.
fn evict(rig: &mut Rig, blocks: u32) -> Line {
    let free = rig.blocks().0;
    let len = (free + blocks) * 8;
    let mut line = rig.begin(&[], Ns::default(), up_to(len)).expect("fits");
    let from = 10_000;
    rig.feed(&mut [(&mut line, &tokens(from, from + len))]).expect("promised");
    line
}

#[test]
fn edge_31_the_lowest_priority_goes_first() {
    let (a, b, c) = (tokens(0, 16), tokens(100, 116), tokens(200, 216));
    let mut rig = Rig::new(&paged(8));
    pass_with(&mut rig, &a, kept(90, None));
    pass_with(&mut rig, &b, Retentions::default());
    pass_with(&mut rig, &c, kept(10, None));
    // Youngest first, by priority alone: c, then b, then a.
    for (blocks, left) in [(1, [2, 2, 1]), (2, [2, 2, 0]), (3, [2, 1, 0]), (5, [1, 0, 0])] {
        let mut rig = rig_with(&[(&a, 90), (&b, 35), (&c, 10)]);
        let line = evict(&mut rig, blocks);
        let found = [&a, &b, &c].map(|prompt| rig.blocks_found(prompt));
        assert_eq!(found, left, "{blocks} evicted");
        let by_priority = rig.cache.evictions_by_priority();
        assert_eq!(by_priority.iter().sum::<u64>(), u64::from(blocks));
        assert_eq!(by_priority[10], u64::from(blocks.min(2)));
        rig.release(&line);
    }
}

/// A pool of eight blocks with prompts that were run and released in this order.
fn rig_with(prompts: &[(&Vec<u32>, u8)]) -> Rig {
    let mut rig = Rig::new(&paged(8));
    for (prompt, priority) in prompts {
        pass_with(&mut rig, prompt, kept(*priority, None));
    }
    rig
}

/// Within a class the one that was released first goes first, and a hit makes it young again.
#[test]
fn edge_31_within_a_class_the_oldest_goes_first() {
    let (a, b) = (tokens(0, 16), tokens(100, 116));
    let mut rig = rig_with(&[(&a, 35), (&b, 35)]);
    let line = evict(&mut rig, 2);
    assert_eq!((rig.blocks_found(&a), rig.blocks_found(&b)), (0, 2));
    rig.release(&line);
    let mut rig = rig_with(&[(&a, 35), (&b, 35)]);
    rig.pass(&[&a[..], &[7]].concat());
    let line = evict(&mut rig, 2);
    assert_eq!((rig.blocks_found(&a), rig.blocks_found(&b)), (2, 0));
    rig.release(&line);
    // Probes do not make anything young.
    let mut rig = rig_with(&[(&a, 35), (&b, 35)]);
    rig.found(&a);
    evict(&mut rig, 2);
    assert_eq!((rig.blocks_found(&a), rig.blocks_found(&b)), (0, 2));
}

/// With a clock in hand: durations count from the last release, then the class is the default.
#[test]
fn edge_31_priorities_with_a_time_limit_decay() {
    let (a, b) = (tokens(0, 16), tokens(100, 116));
    for (now, a_left) in [(1_099, 2), (1_101, 0)] {
        let mut rig = Rig::new(&paged(8));
        rig.cache.set_time_ms(1_000);
        pass_with(&mut rig, &a, kept(80, Some(100)));
        pass_with(&mut rig, &b, Retentions::default());
        rig.cache.set_time_ms(now);
        // Time does not go back.
        rig.cache.set_time_ms(5);
        // Used after `a` fell back, so the younger of the two if it did.
        rig.pass(&[&b[..], &[7]].concat());
        let line = evict(&mut rig, 2);
        assert_eq!(rig.blocks_found(&a), a_left, "at {now}");
        assert_eq!(rig.blocks_found(&b), 2 - a_left, "at {now}");
        rig.release(&line);
    }
    // Used again in between, the time starts again.
    let mut rig = Rig::new(&paged(8));
    pass_with(&mut rig, &a, kept(80, Some(100)));
    pass_with(&mut rig, &b, Retentions::default());
    rig.cache.set_time_ms(90);
    pass_with(&mut rig, &[&a[..], &[7]].concat(), kept(80, Some(100)));
    rig.cache.set_time_ms(150);
    evict(&mut rig, 2);
    assert_eq!((rig.blocks_found(&a), rig.blocks_found(&b)), (2, 0));
}

#[test]
fn edge_31_ranges_that_make_no_sense_are_refused() {
    let range = |from, to, priority| Retention { from, to, priority, duration_ms: None };
    let four: Vec<_> = (0..4).map(|n| range(n * 10, n * 10 + 10, 50)).collect();
    Retentions::new(&four).expect("side by side");
    Retentions::new(&[range(30, 40, 1), range(0, 10, 100)]).expect("in any order");
    Retentions::new(&[]).expect("none");
    for wrong in [
        vec![range(10, 5, 50)],
        vec![range(5, 5, 50)],
        vec![range(0, 10, 101)],
        vec![range(0, 10, 50), range(9, 20, 50)],
        vec![range(9, 20, 50), range(0, 10, 50)],
        vec![range(0, u32::MAX, 50), range(40, 50, 50)],
        (0..5).map(|n| range(n * 10, n * 10 + 10, 50)).collect(),
    ] {
        Retentions::new(&wrong).expect_err("makes no sense");
    }
}

/// A range gives its priority to its blocks and leaves the others; it need not be aligned.
#[test]
fn edge_31_ranges_need_not_be_aligned_to_blocks() {
    let mut rig = Rig::new(&paged(8));
    let prompt = tokens(0, 33);
    let range = Retention { from: 0, to: 12, priority: 100, duration_ms: None };
    pass_with(&mut rig, &prompt, Retentions::new(&[range]).expect("valid"));
    let other = tokens(100, 116);
    rig.pass(&other);
    // The tail of the prompt is the oldest of the default class.
    let line = evict(&mut rig, 2);
    assert_eq!((rig.blocks_found(&prompt), rig.blocks_found(&other)), (2, 2));
    rig.release(&line);
    // Set later, on a live sequence.
    let mut rig = Rig::new(&paged(8));
    let line = rig.run(&prompt);
    rig.cache.set_retention(line.seq, kept(3, None)).expect("alive");
    rig.release(&line);
    rig.pass(&other);
    evict(&mut rig, 4);
    assert_eq!((rig.blocks_found(&prompt), rig.blocks_found(&other)), (0, 2));
}

#[test]
fn pinned_blocks_stay_until_they_are_unpinned() {
    let mut rig = Rig::new(&paged(6));
    let prompt = tokens(0, 20);
    let line = rig.run(&prompt);
    let pin = rig.cache.pin(line.seq).expect("alive");
    let again = rig.cache.pin(line.seq).expect("alive");
    assert_ne!(pin, again);
    rig.release(&line);
    rig.cache.clear_cached();
    assert_eq!(rig.blocks_found(&prompt), 2);
    assert_eq!(rig.blocks(), (4, 2, 0, 0), "pinned blocks are in use");
    let error = assert_refused(&mut rig.cache, |cache| cache.begin(&[], up_to(33)));
    assert!(matches!(error, CacheError::NotAdmitted { wanted: 5, available: 4, .. }), "{error}");
    // With the pinned blocks of its own prompt it fits.
    let line = rig.run(&tokens(0, 48));
    assert_eq!(line.cached_len, 16);
    rig.release(&line);
    rig.cache.unpin(pin).expect("pinned");
    let rest = 4 - rig.blocks().0;
    let full = evict(&mut rig, rest);
    assert_eq!(rig.blocks_found(&prompt), 2, "the other pin holds them");
    rig.release(&full);
    rig.cache.unpin(again).expect("pinned");
    rig.cache.check_invariants().expect("invariants");
    every_unpin_is_refused(&mut rig, &[pin, again]);
    let rest = 6 - rig.blocks().0;
    evict(&mut rig, rest);
    assert_eq!(rig.blocks_found(&prompt), 0);
}

fn every_unpin_is_refused(rig: &mut Rig, pins: &[PinHandle]) {
    for pin in pins {
        assert_refused(&mut rig.cache, |cache| cache.unpin(*pin));
    }
    let mut other = Rig::new(&paged(6));
    let line = other.run(&tokens(0, 9));
    let foreign = other.cache.pin(line.seq).expect("alive");
    assert_refused(&mut rig.cache, |cache| cache.unpin(foreign));
}

/// A refused call evicts nothing, publishes nothing, and says nothing (edge 5).
#[test]
fn edge_05_a_refused_call_leaves_the_cache_and_its_events_alone() {
    let admission = Admission::MaxUtilization;
    let mut rig = Rig::new(&Spec { admission, event_buffer: 64, ..paged(7) });
    rig.pass(&tokens(0, 25));
    let mut line = rig.begin(&tokens(100, 101), Ns::default(), up_to(48)).expect("fits");
    rig.feed(&mut [(&mut line, &tokens(100, 117))]).expect("three free blocks");
    let mut last = 0;
    rig.cache.poll_events(&mut |event| last = event.number);
    let order = rig.cache.free_blocks(kvpool::units::GroupIdx(0)).expect("paged");
    let evictions = rig.cache.stats().evictions;
    let other = rig.begin(&tokens(0, 25), Ns::default(), up_to(25)).expect("fits");
    let before = rig.cache.state_digest();
    // Three blocks more, with one free and three in use by the other.
    let error = assert_refused(&mut rig.cache, |cache| {
        cache.reserve(&[(line.seq, 31)]).map(kvpool::cache::Step::cancel)
    });
    assert!(matches!(error, CacheError::PoolExhausted { .. }), "{error}");
    assert_eq!(rig.cache.state_digest(), before);
    assert_eq!(rig.cache.stats().evictions, evictions);
    assert_eq!(rig.cache.free_blocks(kvpool::units::GroupIdx(0)).expect("paged"), order);
    let polled = rig.cache.poll_events(&mut |event| panic!("{event:?} after {last}"));
    assert_eq!((polled.delivered, polled.lost), (0, 0));
    rig.check(&other);
}

/// Everything that nobody holds is forgotten, and what is held stays.
#[test]
fn clearing_forgets_what_nobody_holds() {
    let mut rig = Rig::new(&paged(16));
    let line = rig.run(&tokens(0, 17));
    rig.pass(&tokens(0, 33));
    rig.pass(&tokens(100, 117));
    rig.cache.clear_cached();
    rig.cache.check_invariants().expect("invariants");
    assert_eq!(rig.blocks_found(&tokens(0, 33)), 2, "the live sequence's");
    assert_eq!(rig.blocks_found(&tokens(100, 117)), 0);
    assert_eq!(rig.blocks(), (13, 3, 0, 0));
    rig.check(&line);
    rig.release(&line);
    rig.cache.reset().expect("idle");
    assert_eq!(rig.cache.state_digest(), Rig::new(&paged(16)).cache.state_digest());
}
