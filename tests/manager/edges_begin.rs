//! Edge cases 12, 14–18 and 28 with reuse: who gets in, and what is counted for it.

use std::collections::HashSet;

use kvpool::cache::{BeginOptions, Begun, ReservationRefused};
use kvpool::config::{Admission, CacheMode, Capacity};
use kvpool::error::CacheError;
use kvpool::units::GroupIdx;

use super::rig::{Line, Rig, paged, tokens, up_to};
use super::text::{Ns, Text};
use crate::common::{Rng, Spec, assert_refused};

#[test]
fn edge_12_what_never_fits_is_refused_although_its_beginning_is_cached() {
    for admission in [Admission::Guaranteed, Admission::MaxUtilization, Admission::StaticBatch] {
        let mut rig = Rig::new(&Spec { admission, ..paged(4) });
        let prompt = tokens(0, 33);
        rig.pass(&prompt[..32]);
        assert_eq!(rig.found(&prompt), 32);
        let call = |cache: &mut kvpool::cache::Cache| cache.begin(&prompt, up_to(33));
        let error = assert_refused(&mut rig.cache, call);
        assert_eq!(error, CacheError::NeverFits { group: GroupIdx(0), wanted: 5, total: 4 });
        let error = assert_refused(&mut rig.cache, |cache| cache.can_admit(&prompt, &up_to(33)));
        assert!(matches!(error, CacheError::NeverFits { .. }), "{error}");
        assert_eq!(rig.found(&prompt), 32, "nothing was evicted for it");
        rig.pass(&prompt[..32]);
    }
}

/// Edge 28 in slots: what an early request takes over still gives all that the later ones matched.
#[test]
fn edge_28_a_slot_that_is_taken_over_is_still_copied_from() {
    for windows in [vec![0, 0], vec![0, 12]] {
        let spec = Spec { windows, max_seqs: 5, ..Spec::mode(CacheMode::Contiguous) };
        let spec = Spec { max_step_tokens: Some(8), ..spec };
        let mut rig = Rig::new(&spec);
        let prompt = tokens(0, 17);
        rig.pass(&prompt);
        let early = [&prompt[..15], &[99, 98]].concat();
        let prompts = [&early[..], &prompt[..], &prompt[..]];
        let batch = prompts.map(|prompt| (prompt, up_to(24)));
        let mut out = Vec::with_capacity(3);
        rig.cache.begin_batch(&batch, &mut out).expect("slots");
        let found: Vec<u32> = out.iter().map(|begun| begun.cached_len).collect();
        assert_eq!(found, [15, 16, 16]);
        let stats = rig.cache.stats();
        assert_eq!((stats.donor_takeovers, stats.donor_copies), (1, 2));
        for (begun, prompt) in out.iter().zip(prompts) {
            let (seq, cached_len) = (begun.sequence, begun.cached_len);
            let text = Text::of(Ns::default(), 0, 8, &prompt[..cached_len as usize]);
            let mut line = Line { seq, text, cached_len };
            rig.check(&line);
            rig.prefill(&mut line, prompt);
        }
    }
}

/// A place that is kept does not keep others out of the next batch.
#[test]
fn a_reservation_alone_is_no_static_batch() {
    let mut rig = Rig::new(&Spec { admission: Admission::StaticBatch, ..paged(16) });
    let mut line = rig.begin(&tokens(0, 8), Ns::default(), up_to(16)).expect("fits");
    let kept = rig.cache.can_admit(&tokens(50, 58), &up_to(16)).expect("fits");
    rig.prefill(&mut line, &tokens(0, 8));
    let late = rig.cache.begin(&tokens(100, 108), up_to(16));
    assert_eq!(late, Err(CacheError::BatchUnderWay { live: 2 }));
    rig.release(&line);
    let next = rig.begin(&tokens(100, 108), Ns::default(), up_to(16));
    let mut next = next.expect("the batch is being made up");
    let begun = rig.cache.begin_reserved(kept).expect("kept");
    rig.prefill(&mut next, &tokens(100, 108));
    rig.release(&next);
    let late = rig.cache.begin(&tokens(100, 108), up_to(16));
    assert_eq!(late, Err(CacheError::BatchUnderWay { live: 1 }));
    rig.cache.release(begun.sequence).expect("alive");
    rig.begin(&[], Ns::default(), up_to(16)).expect("the batch has ended");
}

/// Sharing counts once: two sequences of four blocks with two in common take six.
#[test]
fn edge_14_shared_blocks_are_promised_once_and_both_finish() {
    let mut rig = Rig::new(&paged(6));
    let shared = tokens(0, 16);
    let mut a = rig.begin(&shared, Ns::default(), up_to(32)).expect("four blocks");
    rig.prefill(&mut a, &shared);
    let prompt = [&shared[..], &[99]].concat();
    let options = BeginOptions { lookahead_tokens: 3, ..up_to(29) };
    let mut b = rig.begin(&prompt, Ns::default(), options).expect("two more blocks");
    assert_eq!(b.cached_len, 16);
    assert_refused(&mut rig.cache, |cache| cache.begin(&[], up_to(1)));
    rig.feed(&mut [(&mut b, &[99])]).expect("promised");
    for at in 0..16 {
        rig.feed(&mut [(&mut a, &[100 + at])]).expect("promised");
        if b.text.len() < 29 {
            rig.feed(&mut [(&mut b, &[200 + at])]).expect("promised");
            // Three draft tokens, all rejected.
            let len = b.text.len();
            rig.feed(&mut [(&mut b, &[1, 2, 3])]).expect("look-ahead is promised");
            rig.truncate(&mut b, len);
        }
        assert_refused(&mut rig.cache, |cache| cache.begin(&[], up_to(1)));
    }
    rig.release(&a);
    rig.check(&b);
    rig.release(&b);
}

/// Around every block boundary, fresh and over its own leavings, in a pool of exactly its size.
#[test]
fn edge_15_the_estimate_is_what_happens_for_reused_prompts() {
    for len in 1..=33 {
        let blocks = u64::from(len).div_ceil(8);
        let mut rig = Rig::new(&paged(blocks));
        let prompt = tokens(0, len);
        for round in 0..4 {
            let estimate = rig.cache.check_admission(&prompt, &up_to(len)).expect("it fits");
            let want = if round == 0 { 0 } else { len - 1 };
            // The tokens behind the last whole block were not shared.
            let want = want.min(len / 8 * 8);
            assert_eq!((estimate.limit, estimate.cached_len), (len, want), "{len}, round {round}");
            let mut line = rig.begin(&prompt, Ns::default(), up_to(len)).expect("it fits");
            assert_eq!(line.cached_len, want);
            let (free, active, cached, promised) = rig.blocks();
            assert_eq!(u64::from(active + promised), blocks, "{free} free, {cached} cached");
            rig.prefill(&mut line, &prompt);
            assert_eq!(rig.blocks(), (0, blocks as u32, 0, 0));
            rig.release(&line);
        }
    }
}

/// The same with windowed layers, alone and beside others. In blocks of each group.
#[test]
fn edge_15_the_estimate_is_what_happens_for_reused_prompts_with_windows() {
    let mut hits = 0;
    for windows in [vec![9, 9], vec![0, 9], vec![17, 0, 9]] {
        for len in 1..=33 {
            let spec = Spec { windows: windows.clone(), max_step_tokens: Some(9), ..paged(64) };
            let mut rig = Rig::new(&spec);
            let prompt = tokens(0, len);
            for round in 0..4 {
                let estimate = rig.cache.check_admission(&prompt, &up_to(len)).expect("it fits");
                let mut line = rig.begin(&prompt, Ns::default(), up_to(len)).expect("it fits");
                let what = format!("{windows:?} {len}, round {round}");
                assert_eq!(estimate.cached_len, line.cached_len, "{what}");
                assert_eq!(estimate.limit, len, "{what}");
                hits += u32::from(line.cached_len > 0);
                let counts = |rig: &Rig| -> Vec<u32> {
                    let groups = 0..rig.cache.plan().groups.len() as u32;
                    let blocks = |at| rig.cache.group_stats(GroupIdx(at)).expect("exists").blocks;
                    groups.map(|at| blocks(at).active + blocks(at).promised).collect()
                };
                let groups = 0..rig.cache.plan().groups.len() as u32;
                let planned: Vec<u32> =
                    groups.map(|at| rig.cache.plan().blocks_for(GroupIdx(at), len)).collect();
                assert_eq!(counts(&rig), planned, "{what}");
                let from = line.text.tokens.len();
                for chunk in prompt[from..].chunks(5) {
                    rig.feed(&mut [(&mut line, chunk)]).expect("promised");
                    assert_eq!(counts(&rig), planned, "{what}");
                }
                rig.release(&line);
            }
        }
    }
    assert!(hits > 100, "only {hits} prompts found anything");
}

#[test]
fn edge_16_held_plus_promised_never_changes_in_a_decode() {
    let spec = Spec { windows: vec![0, 9], max_rewind_tokens: 5, ..paged(64) };
    let mut rig = Rig::new(&spec);
    let shared = tokens(0, 19);
    let options = BeginOptions { lookahead_tokens: 4, ..up_to(50) };
    let mut lines: Vec<Line> = Vec::new();
    for _ in 0..2 {
        let mut line = rig.begin(&shared, Ns::default(), options).expect("there is room");
        rig.prefill(&mut line, &shared);
        lines.push(line);
    }
    lines.push(rig.fork(&lines[1]));
    assert_quotas(&rig, &lines);
    let mut rng = Rng(16);
    for round in 0..200 {
        let at = rng.below(3) as usize;
        let line = &mut lines[at];
        let len = line.text.len();
        match rng.below(3) {
            // Back to where the shared prefix ends, at most.
            0 if len > 24 => {
                // As far as the windows allow, which two in a row can exceed.
                let to = len - rng.below(5) as u32;
                if rig.cache.truncate(line.seq, to).is_ok() {
                    line.text.truncate(to);
                }
            }
            1 if len < 46 => {
                let new = tokens(1000 * round, 1000 * round + 1 + rng.below(3) as u32);
                rig.feed(&mut [(line, &new)]).expect("promised");
            }
            _ => {
                let _ = rig.cache.reserve(&[(line.seq, 1)]).map(kvpool::cache::Step::cancel);
            }
        }
        assert_quotas(&rig, &lines);
    }
}

/// What is held and what is still promised are what the sequences were admitted with; a full block
/// that several hold without a window is there once for good, so it counts once.
fn assert_quotas(rig: &Rig, lines: &[Line]) {
    let plan = rig.cache.plan();
    for (g, layers) in (0..).zip(&plan.groups) {
        let limit = |line: &Line| rig.cache.seq_limit(line.seq).expect("alive");
        let quotas = lines.iter().map(|line| plan.blocks_for(GroupIdx(g), limit(line)));
        let (table, row) = rig.cache.block_table(GroupIdx(g)).expect("paged");
        let full = lines.iter().flat_map(|line| {
            let start = line.seq.slot() as usize * row as usize;
            &table[start..start + line.text.len() as usize / 8]
        });
        let (mut rows, mut blocks) = (0, HashSet::new());
        full.for_each(|block| (rows, _) = (rows + 1, blocks.insert(*block)));
        let shared = if layers.window.is_none() { rows - blocks.len() as u32 } else { 0 };
        let counts = rig.cache.group_stats(GroupIdx(g)).expect("exists").blocks;
        assert_eq!(counts.active + counts.promised, quotas.sum::<u32>() - shared, "group {g}");
    }
}

/// A cached block is a hit or it is free capacity, never both.
#[test]
fn edge_17_a_hit_is_not_free_capacity_too() {
    let mut rig = Rig::new(&paged(4));
    let prompt = tokens(0, 25);
    rig.pass(&prompt);
    assert_eq!(rig.blocks(), (1, 0, 3, 0));
    // Three hits and the one free block.
    let line = rig.begin(&prompt, Ns::default(), up_to(32)).expect("exactly enough");
    assert_eq!(line.cached_len, 24);
    assert_eq!(rig.blocks(), (0, 3, 0, 1));
    assert_refused(&mut rig.cache, |cache| cache.begin(&[], up_to(1)));
    rig.release(&line);
    // With the free block gone, three hits and nothing for the fourth block.
    let other = rig.begin(&[], Ns::default(), up_to(8)).expect("one block");
    assert_refused(&mut rig.cache, |cache| cache.begin(&prompt, up_to(32)));
    let line = rig.begin(&tokens(100, 101), Ns::default(), up_to(24)).expect("three to evict");
    rig.release(&other);
    rig.release(&line);
    assert_eq!(rig.blocks().1, 0);
}

/// What is kept free beside those who run: the watermark, and after a preemption a block for each
/// of them until one ends. Whoever is alone may have everything.
#[test]
fn edge_18_what_is_kept_free_for_those_who_run() {
    let admission = Admission::MaxUtilization;
    let refused = |rig: &mut Rig, blocks: u32, wanted: u64| {
        let (prompt, available) = (tokens(500, 500 + 8 * blocks), 3);
        let call = |cache: &mut kvpool::cache::Cache| cache.begin(&prompt, up_to(8 * blocks));
        let error = assert_refused(&mut rig.cache, call);
        let group = GroupIdx(0);
        assert_eq!(error, CacheError::NotAdmitted { group, wanted, available });
    };
    let mut rig = Rig::new(&Spec { admission, watermark_blocks: 2, ..paged(4) });
    let line = rig.begin(&tokens(0, 32), Ns::default(), up_to(32)).expect("alone");
    rig.release(&line);
    rig.run(&tokens(0, 8));
    refused(&mut rig, 2, 4);
    rig.run(&tokens(100, 108));

    let mut rig = Rig::new(&Spec { admission, ..paged(4) });
    rig.run(&tokens(0, 8));
    let youngest = rig.run(&tokens(100, 108));
    let gone = rig.cache.preempt_youngest().expect("two run");
    assert_eq!((gone.sequence, gone.len), (youngest.seq, 8));
    refused(&mut rig, 3, 4);
    let back = rig.begin(&tokens(200, 216), Ns::default(), up_to(16)).expect("one is left free");
    rig.release(&back);
    rig.begin(&tokens(300, 324), Ns::default(), up_to(24)).expect("somebody has ended");
}

/// Preempting by release and computing again comes to an end.
#[test]
fn edge_18_preemption_comes_to_an_end() {
    for (watermark_blocks, preemptions) in [(0, 6), (2, 3)] {
        let admission = Admission::MaxUtilization;
        let mut rig = Rig::new(&Spec { admission, watermark_blocks, ..paged(9) });
        let prompts: Vec<Vec<u32>> = (0..6).map(|n| tokens(n * 100, n * 100 + 10)).collect();
        let mut waiting: Vec<(usize, Vec<u32>)> = prompts.into_iter().enumerate().collect();
        waiting.reverse();
        let mut running: Vec<(usize, Line)> = Vec::new();
        let (mut finished, mut preempted) = (0, 0);
        for _ in 0..2000 {
            while let Some((which, prompt)) = waiting.last() {
                match rig.begin(prompt, Ns::default(), up_to(40)) {
                    Ok(mut line) => {
                        let left = &prompt[line.text.tokens.len()..];
                        if rig.feed(&mut [(&mut line, left)]).is_err() {
                            rig.release(&line);
                            break;
                        }
                        running.push((*which, line));
                        waiting.pop();
                    }
                    Err(_) => break,
                }
            }
            let mut failed = false;
            for (which, line) in &mut running {
                let token = *which as u32 * 100 + line.text.len();
                failed |= rig.feed(&mut [(line, &[token])]).is_err();
            }
            if failed && let Some(gone) = rig.cache.preempt_youngest() {
                let at = running.iter().position(|(_, line)| line.seq == gone.sequence);
                let (which, line) = running.remove(at.expect("running"));
                let so_far = line.text.tokens.iter().map(|token| *token as u32).collect();
                waiting.push((which, so_far));
                preempted += 1;
            }
            let done = |line: &Line| line.text.len() == 40;
            running.iter().filter(|(_, line)| done(line)).for_each(|(_, line)| rig.release(line));
            finished += running.iter().filter(|(_, line)| done(line)).count();
            running.retain(|(_, line)| !done(line));
            if finished == 6 {
                break;
            }
        }
        assert_eq!(finished, 6, "{preempted} preempted");
        // Two begin at once, and reach the length at which both cannot go on. What comes back then
        // waits until somebody has ended, so nobody goes twice before the next end.
        assert_eq!(preempted, preemptions, "watermark {watermark_blocks}");
        assert_eq!(rig.cache.stats().preemptions, preempted);
    }
}

/// In one batch, an early sequence does not evict what a later one matched.
#[test]
fn edge_28_a_batch_claims_its_matches_first() {
    for admission in [Admission::Guaranteed, Admission::MaxUtilization] {
        let mut rig = Rig::new(&Spec { admission, ..paged(8) });
        let cached = tokens(0, 25);
        rig.pass(&cached);
        rig.pass(&tokens(500, 533));
        // Four fresh blocks, and three hits with one more: the whole pool.
        let fresh = tokens(100, 132);
        let calls = [(&fresh[..], up_to(32)), (&cached[..], up_to(32))];
        let mut begun: Vec<Begun> = Vec::with_capacity(2);
        rig.cache.begin_batch(&calls, &mut begun).expect("exactly enough");
        assert_eq!((begun[0].cached_len, begun[1].cached_len), (0, 24), "{admission:?}");
        rig.cache.check_invariants().expect("invariants");
        let mut lines: Vec<Line> = Vec::new();
        for (begun, prompt) in begun.iter().zip([&fresh, &cached]) {
            let text = &prompt[..begun.cached_len as usize];
            let text = Text::of(Ns::default(), 0, 8, text);
            lines.push(Line { seq: begun.sequence, text, cached_len: begun.cached_len });
        }
        rig.prefill(&mut lines[0], &fresh);
        rig.prefill(&mut lines[1], &cached);
        lines.iter().for_each(|line| rig.check(line));
    }
}

/// All of a batch or nothing, and which one it was.
#[test]
fn edge_28_a_batch_is_refused_as_a_whole() {
    let mut rig = Rig::new(&paged(8));
    let cached = tokens(0, 25);
    rig.pass(&cached);
    let before = rig.cache.state_digest();
    let keyed = BeginOptions { key: Some(1), ..up_to(8) };
    for (calls, index) in [
        (vec![(&cached[..], up_to(32)), (&cached[..8], up_to(65))], 1),
        (vec![(&cached[..], up_to(32)), (&[], up_to(32)), (&[], up_to(8))], 2),
        (vec![(&[], keyed), (&cached[..], up_to(25)), (&[], keyed)], 2),
    ] {
        let mut begun: Vec<Begun> = Vec::with_capacity(3);
        let refused = rig.cache.begin_batch(&calls, &mut begun).expect_err("does not fit");
        assert_eq!((refused.index, begun.len()), (index, 0), "{refused}");
        assert_eq!(rig.cache.state_digest(), before, "{refused}");
        rig.cache.check_invariants().expect("invariants");
    }
}

#[test]
fn a_reservation_holds_what_begin_takes() {
    let mut rig = Rig::new(&paged(4));
    let prompt = tokens(0, 25);
    rig.pass(&prompt);
    let reservation = rig.cache.can_admit(&prompt, &up_to(32)).expect("the whole pool");
    rig.cache.check_invariants().expect("invariants");
    assert_refused(&mut rig.cache, |cache| cache.begin(&[], up_to(1)));
    rig.cache.clear_cached();
    let begun = rig.cache.begin_reserved(reservation).expect("reserved");
    assert_eq!((begun.cached_len, begun.limit), (24, 32));
    rig.cache.release(begun.sequence).expect("alive");
    let reservation = rig.cache.can_admit(&prompt, &up_to(32)).expect("the whole pool");
    rig.cache.cancel_reservation(reservation).expect("reserved");
    rig.cache.check_invariants().expect("invariants");
    assert_eq!(rig.blocks().1, 0);
    let other = rig.begin(&tokens(100, 132), Ns::default(), up_to(32)).expect("all is free again");
    rig.release(&other);
}

/// A reservation that was dropped still holds its room; one of another cache comes back.
#[test]
fn reservations_that_are_lost_or_foreign_can_be_recovered() {
    let (mut rig, mut other) = (Rig::new(&paged(4)), Rig::new(&paged(4)));
    drop(rig.cache.can_admit(&[1], &up_to(32)).expect("the whole pool"));
    assert_refused(&mut rig.cache, |cache| cache.begin(&[], up_to(1)));
    let alive = CacheError::SequencesAlive { live: 1, reserved: 1 };
    assert_eq!(rig.cache.reset(), Err(alive));
    assert_eq!((rig.cache.reservations(), rig.cache.cancel_reservations()), (1, 1));
    assert_eq!((rig.cache.reservations(), rig.cache.cancel_reservations()), (0, 0));
    rig.cache.reset().expect("nothing is alive");
    assert_eq!(rig.cache.stats().seqs, 0);

    let held = rig.cache.can_admit(&[1], &up_to(32)).expect("the whole pool");
    let Err(ReservationRefused::Foreign(held)) = other.cache.begin_reserved(held) else {
        panic!("another cache's");
    };
    let Err(ReservationRefused::Foreign(held)) = other.cache.cancel_reservation(held) else {
        panic!("another cache's");
    };
    let begun = rig.cache.begin_reserved(held).expect("its own");
    rig.cache.release(begun.sequence).expect("alive");
    let held = rig.cache.can_admit(&[1], &up_to(32)).expect("the whole pool");
    assert_eq!(rig.cache.cancel_reservations(), 1);
    let refused = rig.cache.begin_reserved(held).expect_err("cancelled");
    assert_eq!(refused.to_string(), "the reservation has been cancelled");
    rig.cache.check_invariants().expect("invariants");
}

/// The rules of admission differ in what they promise.
#[test]
fn static_batch_admits_no_one_into_a_running_batch() {
    let admission = Admission::StaticBatch;
    let mut rig = Rig::new(&Spec { admission, ..paged(16) });
    let mut a = rig.begin(&tokens(0, 9), Ns::default(), up_to(16)).expect("a new batch");
    let mut b = rig.begin(&tokens(0, 9), Ns::default(), up_to(16)).expect("not running yet");
    rig.feed(&mut [(&mut a, &tokens(0, 9)), (&mut b, &tokens(0, 9))]).expect("promised");
    assert_refused(&mut rig.cache, |cache| cache.begin(&[1], up_to(8)));
    rig.release(&a);
    assert_refused(&mut rig.cache, |cache| cache.begin(&[1], up_to(8)));
    assert!(rig.cache.stats().refused_static_batch >= 2);
    rig.release(&b);
    rig.begin(&[1], Ns::default(), up_to(8)).expect("a new batch");
}

#[test]
fn refusals_are_counted_by_cause() {
    let spec = Spec { max_seqs: 2, capacity: Capacity::Blocks(6), ..paged(6) };
    let mut rig = Rig::new(&spec);
    let refused = |rig: &Rig| {
        let stats = rig.cache.stats();
        (stats.refused_slots, stats.refused_blocks, stats.refused_never, stats.refused_too_long)
    };
    assert_eq!(refused(&rig), (0, 0, 0, 0));
    assert_refused(&mut rig.cache, |cache| cache.begin(&[], up_to(65)));
    assert_eq!(refused(&rig), (0, 0, 0, 1));
    assert_refused(&mut rig.cache, |cache| cache.begin(&[], up_to(49)));
    assert_eq!(refused(&rig), (0, 0, 1, 1));
    let a = rig.begin(&[], Ns::default(), up_to(24)).expect("three");
    assert_refused(&mut rig.cache, |cache| cache.begin(&[], up_to(25)));
    assert_eq!(refused(&rig), (0, 1, 1, 1));
    let _b = rig.begin(&[], Ns::default(), up_to(8)).expect("one");
    assert_refused(&mut rig.cache, |cache| cache.begin(&[], up_to(8)));
    assert_eq!(refused(&rig), (1, 1, 1, 1));
    rig.release(&a);
}
