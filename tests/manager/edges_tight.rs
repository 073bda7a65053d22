//! Pools with no block to spare: what was promised is there, and nothing that a match needs is
//! missing.

use kvpool::cache::{BeginOptions, Cache};
use kvpool::config::{Admission, CacheMode, Capacity};
use kvpool::device::NullDevice;

use super::driver::{Checks, Driver};
use super::driver_step::skip;
use super::rig::{Rig, paged, tokens, up_to};
use super::text::Ns;
use crate::common::{Spec, on_cuda};

fn null(spec: &Spec) -> Cache {
    let plan = spec.plan();
    let device = Box::new(NullDevice::open(&plan));
    Cache::open(plan, device).expect("opens")
}

/// In a plan with a window, in a pool of exactly its size: the second run of the same prompt.
#[test]
fn windowed_prompts_run_again_in_a_pool_of_their_size() {
    for window in 9..20 {
        for len in 17..=24_u32 {
            for admission in [Admission::Guaranteed, Admission::MaxUtilization] {
                let spec = Spec {
                    windows: vec![0, window],
                    admission,
                    max_seqs: 2,
                    max_step_tokens: Some(8),
                    ..paged(3)
                };
                let mut rig = Rig::new(&spec);
                let prompt = tokens(0, 24);
                let mut line = rig.begin(&prompt, Ns::default(), up_to(24)).expect("fits");
                rig.prefill(&mut line, &prompt);
                rig.release(&line);
                let prompt = &prompt[..len as usize];
                let estimate = rig.cache.check_admission(prompt, &up_to(24));
                let line = rig.begin(prompt, Ns::default(), up_to(24));
                assert_eq!(
                    estimate.map(|e| e.cached_len),
                    line.as_ref().map(|l| l.cached_len).map_err(|e| *e)
                );
                let mut line = line.expect("the whole pool is there");
                rig.prefill(&mut line, prompt);
            }
        }
    }
}

/// The same, with what the estimate says being what happens.
#[test]
fn edge_16_the_estimate_is_the_act_in_a_full_pool() {
    let spec = Spec { windows: vec![0, 12], max_seqs: 2, max_step_tokens: Some(8), ..paged(3) };
    let mut rig = Rig::new(&spec);
    let prompt = tokens(0, 24);
    rig.pass(&prompt);
    let estimate = rig.cache.check_admission(&prompt, &up_to(24)).expect("fits");
    let begun = rig.cache.begin(&prompt, up_to(24)).expect("fits");
    assert_eq!(estimate.cached_len, begun.cached_len);
}

/// What that would lead to on the CPU: attention over a row that lacks a block of the window.
#[test]
fn a_windowed_prompt_run_again_attends_to_the_same() {
    let spec = Spec { windows: vec![0, 12], max_seqs: 2, max_step_tokens: Some(8), ..paged(3) };
    let mut rig = Rig::on(&spec, spec.open());
    let prompt = tokens(0, 24);
    let outputs = |rig: &mut Rig| {
        let begun = rig.cache.begin(&prompt, up_to(24)).expect("fits");
        let (mut from, mut outs) = (begun.cached_len, Vec::new());
        while from < 24 {
            let n = 8.min(24 - from);
            let now = &prompt[from as usize..(from + n) as usize];
            let tags: Vec<u64> = now.iter().map(|token| (*token).into()).collect();
            let mut step = rig.cache.reserve_tokens(&[(begun.sequence, n)], now).expect("promised");
            let positions = step.positions().to_vec();
            for layer in 0..2 {
                let input =
                    |what, heads| crate::common::tensor(&tags, &positions, layer, what, heads, 8);
                let (k, v, q) = (input(0, 1), input(1, 1), input(2, 2));
                let mut out = vec![f32::NAN; q.len()];
                let layer = kvpool::units::LayerIdx(layer);
                step.append(layer, (&k[..]).into(), (&v[..]).into()).expect("fits");
                let all = kvpool::device::TensorMut::F32(&mut out);
                step.attend(layer, (&q[..]).into(), all, Default::default()).expect("all is there");
                outs = out;
            }
            step.commit().expect("whole");
            from += n;
        }
        rig.cache.release(begun.sequence).expect("alive");
        outs[outs.len() - 16..].to_vec()
    };
    let first = outputs(&mut rig);
    let second = outputs(&mut rig);
    assert_eq!(first, second);
}

/// A block that several hold is swapped for one that is a tail of somebody else.
#[test]
fn publishing_costs_no_promised_block() {
    let mut pools = 0;
    for pool in 8..30 {
        let spec = Spec { max_seqs: 8, max_step_tokens: Some(64), ..paged(pool) };
        let mut rig = Rig::new(&spec);
        let p = tokens(0, 16);
        // A: looks 8 ahead, so its second block is not published.
        let ahead = BeginOptions { lookahead_tokens: 8, ..up_to(32) };
        let Ok(mut a) = rig.begin(&p, Ns::default(), ahead) else { continue };
        rig.prefill(&mut a, &p);
        // D: publishes both; then E makes a child, and D goes back into its second block.
        let Ok(mut d) = rig.begin(&p, Ns::default(), up_to(24)) else { continue };
        rig.prefill(&mut d, &p);
        let whole = tokens(0, 24);
        let Ok(mut e) = rig.begin(&whole, Ns::default(), up_to(24)) else { continue };
        rig.prefill(&mut e, &whole);
        rig.release(&e);
        if rig.cache.truncate(d.seq, 12).is_err() {
            continue;
        }
        d.text.truncate(12);
        // C holds A's block.
        let Ok(c) = rig.cache.fork(a.seq) else { continue };
        let _ = c;
        // Fill the rest of the pool.
        let mut fillers = Vec::new();
        while fillers.len() < 3 {
            let room = rig.blocks();
            let left = room.0 + room.2;
            if left == 0 {
                break;
            }
            match rig.cache.begin(&[], up_to((left * 8).min(64))) {
                Ok(one) => fillers.push(one),
                Err(_) => break,
            }
        }
        // Now A's second block is settled.
        rig.feed(&mut [(&mut a, &tokens(16, 24))]).expect("promised");
        pools += 1;
    }
    assert!(pools > 10, "only {pools} pools had room for all of it");
}

/// What that would lead to: a step that was promised is refused.
#[test]
fn promises_hold_whatever_is_published() {
    let mut rig = Rig::new(&Spec { max_seqs: 8, max_step_tokens: Some(64), ..paged(11) });
    let p = tokens(0, 16);
    let ahead = BeginOptions { lookahead_tokens: 8, ..up_to(32) };
    let mut a = rig.begin(&p, Ns::default(), ahead).expect("fits");
    rig.prefill(&mut a, &p);
    let mut d = rig.begin(&p, Ns::default(), up_to(24)).expect("fits");
    rig.prefill(&mut d, &p);
    let whole = tokens(0, 24);
    let mut e = rig.begin(&whole, Ns::default(), up_to(24)).expect("fits");
    rig.prefill(&mut e, &whole);
    rig.release(&e);
    rig.cache.truncate(d.seq, 12).expect("room");
    let c = rig.cache.fork(a.seq).expect("room");
    skip(rig.cache.reserve_tokens(&[(a.seq, 8)], &tokens(16, 24)).expect("promised"))
        .expect("whole");
    // Everybody takes what was promised.
    for (seq, len) in [(a.seq, 8), (c, 16), (d.seq, 12)] {
        skip(rig.cache.reserve(&[(seq, len)]).expect("promised")).expect("whole");
    }
}

/// A rewind of the declared look-ahead is never refused, as `truncate` says.
#[test]
fn a_look_ahead_is_rewound_after_a_fork() {
    for pool in 4..12 {
        let mut rig = Rig::new(&paged(pool));
        let options = BeginOptions { lookahead_tokens: 8, ..up_to(24) };
        let Ok(mut a) = rig.begin(&tokens(0, 16), Ns::default(), options) else { continue };
        rig.prefill(&mut a, &tokens(0, 16));
        rig.feed(&mut [(&mut a, &tokens(100, 104))]).expect("look-ahead");
        let Ok(_b) = rig.cache.fork(a.seq) else { continue };
        let back = rig.cache.truncate(a.seq, 15);
        assert_eq!(back, Ok(()), "pool {pool}");
    }
}

/// A rewind into a published block that has a cached child: the copy that it needs is promised.
#[test]
fn a_rewind_into_a_parent_takes_nothing_that_was_promised() {
    let mut rig = Rig::new(&paged(5));
    let whole = tokens(0, 24);
    let mut d = rig.begin(&whole[..16], Ns::default(), up_to(16)).expect("two blocks");
    rig.prefill(&mut d, &whole[..16]);
    rig.pass(&whole);
    let f = rig.begin(&[], Ns::default(), up_to(24)).expect("three blocks, one of them cached");
    let mut f = f;
    rig.truncate(&mut d, 12);
    rig.feed(&mut [(&mut f, &tokens(100, 124)), (&mut d, &[7])]).expect("promised");
}

/// The oldest always ends: also beside a reservation.
#[test]
fn the_oldest_ends_beside_a_reservation() {
    let admission = Admission::MaxUtilization;
    let mut cache = null(&Spec { admission, ..paged(6) });
    let first = cache.begin(&[], up_to(48)).expect("fits");
    skip(cache.reserve(&[(first.sequence, 8)]).expect("fits")).expect("whole");
    let p = tokens(0, 25);
    let begun = cache.begin(&p, up_to(32)).expect("fits");
    skip(cache.reserve(&[(begun.sequence, 25)]).expect("fits")).expect("whole");
    cache.release(begun.sequence).expect("alive");
    let _held = cache.can_admit(&p, &up_to(32)).expect("fits");
    for _ in 1..6 {
        loop {
            match cache.reserve(&[(first.sequence, 8)]).and_then(skip) {
                Ok(()) => break,
                Err(error) => {
                    cache.preempt_youngest().unwrap_or_else(|| panic!("nobody gives way: {error}"));
                }
            }
        }
    }
}

/// Contiguous, paged and windowed groups in one plan, every verb, contents checked.
#[test]
fn contiguous_paged_and_windowed_groups_in_one_plan() {
    for (seed, admission) in
        [(1, Admission::Guaranteed), (2, Admission::MaxUtilization), (3, Admission::StaticBatch)]
    {
        for windows in [vec![0, 0, 12], vec![12, 0, 17], vec![0, 17, 0, 12], vec![9, 0, 20]] {
            for blocks in [5, 7, 9, 12] {
                let spec = Spec {
                    mode: CacheMode::Hybrid,
                    windows: windows.clone(),
                    admission,
                    capacity: Capacity::Blocks(blocks),
                    prefix_reuse: true,
                    max_seqs: 4,
                    max_seq_len: 40,
                    max_batch_tokens: 32,
                    max_step_tokens: Some(8),
                    ..Spec::default()
                };
                let mut driver = Driver::new(&spec, seed);
                driver.checks = Checks::default();
                driver.run(if on_cuda() { 200 } else { 8_000 });
                driver.finish();
            }
        }
    }
}

/// Windowed plans with many seeds, small pools.
#[test]
fn windows_in_small_pools() {
    for seed in 0..if on_cuda() { 1 } else { 12 } {
        for admission in [Admission::Guaranteed, Admission::MaxUtilization] {
            for windows in [vec![0, 12], vec![0, 15], vec![12, 0, 20], vec![0, 10]] {
                for (blocks, rewind, sinks) in [(3, 0, 0), (5, 0, 0), (6, 3, 3), (8, 0, 9)] {
                    let spec = Spec {
                        windows: windows.clone(),
                        admission,
                        capacity: Capacity::Blocks(blocks),
                        max_rewind_tokens: rewind,
                        sink_tokens: sinks,
                        max_seqs: 4,
                        max_seq_len: 40,
                        max_batch_tokens: 32,
                        max_step_tokens: Some(8),
                        ..Spec::default()
                    };
                    let mut driver = Driver::new(&spec, seed);
                    driver.run(if on_cuda() { 150 } else { 1_500 });
                    driver.finish();
                }
            }
        }
    }
}

/// Forks, look-aheads and rewinds in tight pools of one group.
#[test]
fn forks_and_rewinds_in_tight_pools() {
    for seed in 0..60 {
        for blocks in [4, 5, 6, 7, 8, 10, 13, 16] {
            let spec = Spec {
                windows: vec![0],
                max_seqs: 6,
                max_seq_len: 40,
                max_batch_tokens: 48,
                max_step_tokens: Some(9),
                ..paged(blocks)
            };
            let plan = spec.plan();
            let device = Box::new(NullDevice::open(&plan));
            let mut driver = Driver::on(&spec, Cache::open(plan, device).expect("opens"), seed);
            driver.checks = Checks { contents: false, poison: false, ..Checks::default() };
            driver.run(4_000);
            driver.finish();
        }
    }
}
