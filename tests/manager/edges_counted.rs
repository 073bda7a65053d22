//! Counters, peaks and what leaves no trace.

use kvpool::cache::{BeginOptions, Begun, Cache};
use kvpool::config::{Admission, CacheMode};
use kvpool::device::NullDevice;
use kvpool::plan::GroupReuse;
use kvpool::units::GroupIdx;

use super::driver_step::skip;
use super::rig::{Rig, paged, tokens, up_to};
use super::text::Ns;
use crate::common::Spec;

fn null(spec: &Spec) -> Cache {
    let plan = spec.plan();
    let device = Box::new(NullDevice::open(&plan));
    Cache::open(plan, device).expect("opens")
}

/// A refusal of a batch is one refusal.
#[test]
fn a_refused_batch_counts_once() {
    let mut cache = null(&paged(8));
    let mut out: Vec<Begun> = Vec::with_capacity(4);
    let prompt = tokens(0, 9);
    cache.begin_batch(&[(&prompt[..], up_to(65))], &mut out).expect_err("too long");
    assert_eq!(cache.stats().refused_too_long, 1);
}

/// What is held at the most is never less than what is held.
#[test]
fn what_is_held_at_the_peak_is_no_less_than_what_is_held() {
    let mut rig = Rig::new(&paged(32));
    let p = tokens(0, 16);
    let ahead = BeginOptions { lookahead_tokens: 8, ..up_to(32) };
    let mut a = rig.begin(&p, Ns::default(), ahead).expect("fits");
    rig.prefill(&mut a, &p);
    rig.pass(&p);
    let _c = rig.fork(&a);
    for len in 16..24 {
        rig.feed(&mut [(&mut a, &tokens(len, len + 1))]).expect("promised");
        let stats = rig.cache.stats();
        assert!(stats.peak_held_bytes >= stats.held_bytes, "{stats:?}");
    }
}

/// What is used at the most is never less than what is used, and live tokens are used.
#[test]
fn what_is_used_at_the_peak_is_no_less_than_what_is_used() {
    let mut rig = Rig::new(&paged(32));
    let p = tokens(0, 9);
    let mut a = rig.begin(&p, Ns::default(), up_to(16)).expect("fits");
    rig.prefill(&mut a, &p);
    let forks = [rig.fork(&a), rig.fork(&a), rig.fork(&a)];
    rig.feed(&mut [(&mut a, &tokens(9, 15))]).expect("promised");
    for fork in &forks {
        rig.release(fork);
        let stats = rig.cache.stats();
        assert!(stats.peak_used_bytes >= stats.used_bytes, "{stats:?}");
    }
}

#[test]
fn live_tokens_are_used_bytes() {
    let mut rig = Rig::new(&paged(32));
    let p = tokens(0, 9);
    let mut a = rig.begin(&p, Ns::default(), up_to(16)).expect("fits");
    rig.prefill(&mut a, &p);
    let alone = rig.cache.stats().used_bytes;
    let _forks = [rig.fork(&a), rig.fork(&a), rig.fork(&a)];
    assert!(rig.cache.stats().used_bytes >= alone, "{:?}", rig.cache.stats());
}

/// A reservation that is cancelled leaves no trace.
#[test]
fn a_cancelled_reservation_leaves_no_trace() {
    let admission = Admission::MaxUtilization;
    let mut cache = null(&Spec { admission, ..paged(8) });
    let mut alive = Vec::new();
    for seq in 0..4_u32 {
        let prompt = tokens(seq * 100, seq * 100 + 8);
        let begun = cache.begin(&prompt, up_to(40)).expect("fits");
        skip(cache.reserve(&[(begun.sequence, 8)]).expect("fits")).expect("whole");
        alive.push(begun.sequence);
    }
    cache.preempt_youngest().expect("somebody");
    let prompt = tokens(900, 924);
    let before = cache.check_admission(&prompt, &up_to(40));
    let digest = cache.state_digest();
    let reservation = cache.can_admit(&[1], &up_to(8)).expect("room for one");
    cache.cancel_reservation(reservation).expect("held");
    assert_eq!(cache.check_admission(&prompt, &up_to(40)), before);
    assert_eq!(cache.state_digest(), digest);
}

/// And is not counted among what was begun.
#[test]
fn a_cancelled_reservation_is_no_sequence() {
    let mut cache = null(&paged(8));
    let reservation = cache.can_admit(&tokens(0, 9), &up_to(16)).expect("fits");
    cache.cancel_reservation(reservation).expect("held");
    let stats = cache.stats();
    assert_eq!((stats.seqs_begun, stats.prefix_queries), (0, 0));
}

/// Refused forks are refused sequences.
#[test]
fn refused_forks_are_counted() {
    let mut cache = null(&Spec { max_seqs: 1, ..paged(8) });
    let begun = cache.begin(&[], up_to(8)).expect("fits");
    cache.fork(begun.sequence).expect_err("no slot");
    assert_eq!(cache.stats().refused_slots, 1);
}

/// What is forgotten at a rewind is withdrawn.
#[test]
fn what_a_rewind_takes_out_is_counted() {
    let mut rig = Rig::new(&paged(8));
    let mut line = rig.begin(&tokens(0, 16), Ns::default(), up_to(32)).expect("fits");
    rig.prefill(&mut line, &tokens(0, 16));
    assert_eq!(rig.blocks_found(&tokens(0, 16)), 2);
    rig.truncate(&mut line, 12);
    assert_eq!(rig.blocks_found(&tokens(0, 16)), 1);
    rig.feed(&mut [(&mut line, &[500])]).expect("promised");
    assert_eq!(rig.cache.stats().blocks_withdrawn, 1);
}

/// `reset` is as after open.
#[test]
fn reset_is_as_after_open() {
    let mut cache = null(&paged(8));
    cache.set_epoch(7).expect("idle");
    cache.set_time_ms(500);
    cache.reset().expect("idle");
    assert_eq!(cache.state_digest(), null(&paged(8)).state_digest());
}

/// The most that was cached at once stays known when it is gone.
#[test]
fn the_peak_of_cached_blocks_outlives_them() {
    let mut rig = Rig::new(&paged(8));
    rig.pass(&tokens(0, 17));
    let peak = |rig: &Rig| rig.cache.group_stats(GroupIdx(0)).expect("a group").peak_cached;
    assert_eq!(peak(&rig), 2);
    rig.cache.clear_cached();
    rig.pass(&tokens(100, 109));
    assert_eq!((peak(&rig), rig.blocks().2), (2, 1));
}

/// The statistics of a group say how it takes part in reuse, and that it takes none where the plan
/// declines.
#[test]
fn the_statistics_say_which_part_a_group_has_in_reuse() {
    let parts = |spec: &Spec| -> Vec<GroupReuse> {
        let cache = null(spec);
        (0..).map_while(|g| cache.group_stats(GroupIdx(g))).map(|group| group.reuse).collect()
    };
    let hybrid = Spec { windows: vec![0, 0, 16], ..Spec::mode(CacheMode::Hybrid) };
    assert_eq!(parts(&hybrid), [GroupReuse::Donor, GroupReuse::Index, GroupReuse::Attached]);
    let declined = Spec { prefix_reuse: false, ..hybrid };
    assert_eq!(parts(&declined), [GroupReuse::Off; 3]);
}

/// A copy that only keeps blocks in the index takes none that a later row of the step must have.
#[test]
fn a_copy_that_may_be_made_leaves_room_for_one_that_must() {
    let admission = Admission::MaxUtilization;
    let mut rig = Rig::new(&Spec { admission, ..paged(4) });
    let whole = tokens(0, 24);
    let mut a = rig.begin(&whole, Ns::default(), up_to(32)).expect("fits");
    rig.prefill(&mut a, &whole);
    let reader = rig.begin(&tokens(0, 25), Ns::default(), up_to(32)).expect("fits");
    assert_eq!(rig.blocks_found(&tokens(0, 25)), 3);
    rig.truncate(&mut a, 12);
    rig.release(&reader);
    // Its last block is its own now, and in the index with one behind it.
    assert_eq!(rig.blocks_found(&tokens(0, 25)), 3);
    let mut b = rig.begin(&tokens(100, 104), Ns::default(), up_to(8)).expect("fits");
    rig.prefill(&mut b, &tokens(100, 104));
    let _fork = rig.fork(&b);
    rig.feed(&mut [(&mut a, &[500]), (&mut b, &[501])])
        .expect("one block is left, one must be copied");
    let stats = rig.cache.stats();
    assert_eq!((stats.cow_copies, stats.blocks_withdrawn), (1, 2));
}
