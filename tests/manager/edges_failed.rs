//! A device that fails in the middle of a verb: what was not copied is never given to anyone.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use kvpool::cache::{BeginOptions, Cache, Namespace};
use kvpool::config::{Admission, CacheMode};
use kvpool::error::{CacheError, DeviceError};

use super::asking::Asking;
use super::driver_step::skip;
use super::rig::{paged, tokens, up_to};
use crate::common::Spec;

/// A cache on a device that has no memory, and fails to copy and to write when it is told to.
pub(super) fn failing(spec: &Spec) -> (Cache, Arc<AtomicBool>) {
    let plan = spec.plan();
    let fails = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&fails);
    let ask = move |_| if told.load(Relaxed) { Err(DeviceError::BadLayout) } else { Ok(()) };
    let device = Asking::open(&plan, ask);
    (Cache::open(plan, device).expect("opens"), fails)
}

const FAILED: CacheError = CacheError::Device(DeviceError::BadLayout);

/// A fork whose look-ahead could not be copied publishes nothing of it.
#[test]
fn a_fork_that_fails_publishes_nothing() {
    let (mut cache, fails) = failing(&paged(16));
    let prompt = tokens(0, 17);
    let ahead = BeginOptions { lookahead_tokens: 8, ..up_to(32) };
    let begun = cache.begin(&prompt, ahead).expect("fits");
    skip(cache.reserve(&[(begun.sequence, 17)]).expect("promised")).expect("whole");
    let (found, digest) = (cache.probe(&prompt, &Namespace::default()), cache.state_digest());
    fails.store(true, Relaxed);
    assert_eq!(cache.fork(begun.sequence), Err(FAILED));
    cache.check_invariants().expect("invariants");
    assert_eq!(cache.probe(&prompt, &Namespace::default()), found);
    assert_eq!(cache.state_digest(), digest);
}

/// A slot that could not be copied gives no prefix.
#[test]
fn a_fork_that_fails_is_no_donor() {
    let (mut cache, fails) = failing(&Spec { max_seqs: 2, ..Spec::mode(CacheMode::Contiguous) });
    let prompt = tokens(0, 9);
    let begun = cache.begin(&prompt, up_to(32)).expect("fits");
    skip(cache.reserve(&[(begun.sequence, 9)]).expect("fits")).expect("whole");
    fails.store(true, Relaxed);
    assert_eq!(cache.fork(begun.sequence), Err(FAILED));
    cache.truncate(begun.sequence, 0).expect("no window");
    assert_eq!(cache.probe(&prompt, &Namespace::default()).cached_len, 0);
}

/// A sequence that could not begin has not ended: what a preemption asked for stays.
#[test]
fn what_fails_to_begin_ends_no_preemption() {
    let admission = Admission::MaxUtilization;
    let (mut cache, fails) = failing(&Spec { admission, ..paged(9) });
    // A block of which a part is of use.
    let old = cache.begin(&tokens(0, 8), up_to(8)).expect("fits");
    skip(cache.reserve(&[(old.sequence, 8)]).expect("fits")).expect("whole");
    cache.release(old.sequence).expect("alive");
    for seq in 0..4_u32 {
        let prompt = tokens(seq * 100 + 100, seq * 100 + 108);
        let begun = cache.begin(&prompt, up_to(40)).expect("fits");
        skip(cache.reserve(&[(begun.sequence, 8)]).expect("fits")).expect("whole");
    }
    cache.preempt_youngest().expect("somebody");
    let prompt = tokens(900, 932);
    let before = cache.check_admission(&prompt, &up_to(40));
    assert!(matches!(before, Err(CacheError::NotAdmitted { .. })), "{before:?}");
    fails.store(true, Relaxed);
    let part = [0, 1, 2, 77, 78];
    assert_eq!(cache.begin(&part, up_to(8)), Err(FAILED));
    assert_eq!(cache.check_admission(&prompt, &up_to(40)), before);
    let mut out = Vec::with_capacity(1);
    let refused = cache.begin_batch(&[(&part[..], up_to(8))], &mut out).expect_err("a copy");
    assert_eq!(refused.source, FAILED);
    assert_eq!(cache.check_admission(&prompt, &up_to(40)), before);
    cache.check_invariants().expect("invariants");
}

/// A step that could not be reserved was not cancelled.
#[test]
fn a_step_that_fails_to_open_is_no_step() {
    let (mut cache, fails) = failing(&paged(16));
    let begun = cache.begin(&tokens(0, 9), up_to(32)).expect("fits");
    skip(cache.reserve(&[(begun.sequence, 9)]).expect("promised")).expect("whole");
    let fork = cache.fork(begun.sequence).expect("fits");
    let digest = cache.state_digest();
    fails.store(true, Relaxed);
    let failed = cache.reserve(&[(begun.sequence, 1), (fork, 1)]).err();
    assert_eq!(failed, Some(FAILED));
    assert_eq!(cache.state_digest(), digest);
    assert_eq!(cache.stats().steps_cancelled, 0);
}
