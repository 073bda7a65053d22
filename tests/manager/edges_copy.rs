//! Edge cases 7, 8, 29 and 34–39: sharing, copies, rewinds.

use kvpool::cache::SeqHandle;
use kvpool::config::{Admission, CacheMode, Capacity};
use kvpool::error::CacheError;
use kvpool::plan::{Kv, SCALE_BYTES};
use kvpool::units::GroupIdx;

use super::rig::{Line, Rig, paged, tokens, up_to};
use super::text::Ns;
use crate::common::{FORMATS, MODES, Spec, assert_refused};

fn in_mode(mode: CacheMode, blocks: u64) -> Spec {
    let capacity = match mode {
        CacheMode::Contiguous => Capacity::WorstCase,
        _ => Capacity::Blocks(blocks),
    };
    Spec { mode, capacity, ..paged(blocks) }
}

#[test]
fn edge_07_as_many_references_as_sequences() {
    let mut rig = Rig::new(&paged(64));
    let first = rig.run(&tokens(0, 17));
    let block = rig.cache.block_of(first.seq, GroupIdx(0), 0).expect("held");
    let mut lines = vec![first];
    for refs in 2..=8 {
        let line = rig.fork(&lines[refs as usize / 2 - 1]);
        assert_eq!(rig.cache.block_refs(block), Ok(refs));
        lines.push(line);
    }
    let seq = lines[0].seq;
    let error = assert_refused(&mut rig.cache, |cache| cache.fork(seq));
    assert!(matches!(error, CacheError::NoSeqSlot { .. }), "{error}");
    for (line, left) in lines.iter().zip((0..8).rev()) {
        rig.release(line);
        assert_eq!(rig.cache.block_refs(block).ok(), (left > 0).then_some(left));
    }
}

/// Aborted in every state: what was promised and held goes back once; what was published stays.
#[test]
fn edge_08_abort_in_every_state_with_reuse() {
    for mode in MODES {
        for admission in [Admission::Guaranteed, Admission::MaxUtilization] {
            let spec = Spec { admission, ..in_mode(mode, 60) };
            let mut rig = Rig::new(&spec);
            let prompt = tokens(0, 20);
            rig.pass(&prompt);
            let just_begun = rig.begin(&prompt, Ns::default(), up_to(30)).expect("fits");
            let mut half = rig.begin(&tokens(50, 70), Ns::default(), up_to(30)).expect("fits");
            rig.feed(&mut [(&mut half, &tokens(50, 61))]).expect("fits");
            let reserved = rig.begin(&prompt, Ns::default(), up_to(30)).expect("fits");
            let left = 20 - reserved.cached_len;
            rig.cache.reserve(&[(reserved.seq, left)]).expect("fits").cancel();
            let forked = rig.fork(&half);
            let mut copied = rig.fork(&half);
            rig.feed(&mut [(&mut copied, &[61])]).expect("copy-on-write");
            let mut rewound = rig.fork(&copied);
            rig.truncate(&mut rewound, 10);
            let held = rig.cache.can_admit(&prompt, &up_to(24)).expect("fits");
            rig.cache.cancel_reservation(held).expect("held");
            for line in [just_begun, half, reserved, forked, copied, rewound] {
                rig.release(&line);
                let error = assert_refused(&mut rig.cache, |cache| cache.release(line.seq));
                assert!(matches!(error, CacheError::StaleHandle { .. }));
            }
            let stats = rig.cache.stats();
            assert_eq!((stats.seqs, stats.held_bytes.0, stats.promised_bytes.0), (0, 0, 0));
            assert_eq!(stats.used_bytes.0, 0);
        }
    }
}

/// A vector and its scales, as they lie in a block of a group.
fn row_bytes(rig: &Rig, group: usize, place: (u32, u32, Kv, u32, u32)) -> Vec<u8> {
    let layout = &rig.cache.plan().groups[group].layout;
    let (block, layer, kv, head, token) = place;
    let mut row = vec![0; layout.row_bytes() as usize];
    rig.cache.read_bytes(layout.row(block, layer, kv, head, token), &mut row).expect("in the pool");
    let mut scales = vec![0; (layout.scales_per_row * SCALE_BYTES) as usize];
    if !scales.is_empty() {
        let at = layout.scales(block, layer, kv, head, token);
        rig.cache.read_bytes(at, &mut scales).expect("in the pool");
    }
    [row, scales].concat()
}

fn block_at(rig: &Rig, seq: SeqHandle, at: u32) -> u32 {
    block_in(rig, 0, seq, at)
}

fn block_in(rig: &Rig, group: usize, seq: SeqHandle, at: u32) -> u32 {
    let (table, row) = rig.cache.block_table(GroupIdx(group as u32)).expect("paged");
    table[(seq.slot() * row + at) as usize]
}

/// The matched tokens of every layer, K and V, head, with their scales, and not one byte more.
/// Gives the bytes that this takes.
fn check_partial_copy(rig: &Rig, group: usize, from: u32, to: u32, matched: u32) -> u64 {
    let layout = &rig.cache.plan().groups[group].layout;
    let mut bytes = 0;
    for layer in 0..layout.num_layers {
        for kv in [Kv::K, Kv::V] {
            for (head, token) in (0..2).flat_map(|head| (0..8).map(move |token| (head, token))) {
                let copy = row_bytes(rig, group, (to, layer, kv, head, token));
                if token < matched {
                    assert_eq!(copy, row_bytes(rig, group, (from, layer, kv, head, token)));
                    assert!(copy.iter().any(|byte| *byte != 0xFF));
                    bytes += copy.len() as u64;
                } else {
                    assert!(copy.iter().all(|byte| *byte == 0xFF), "token {token}: {copy:?}");
                }
            }
        }
    }
    bytes
}

/// In every format, and in two groups, one with a window.
#[test]
fn edge_29_partial_copies_byte_for_byte() {
    for ((format, scale), windows) in FORMATS
        .into_iter()
        .flat_map(|format| [vec![0, 0], vec![40, 0, 40]].map(|windows| (format, windows)))
    {
        for matched in 1..8 {
            let (num_kv_heads, num_q_heads) = (2, 2);
            let windows = windows.clone();
            let sizes = Spec { num_kv_heads, num_q_heads, head_dim: 64, windows, ..paged(32) };
            let spec = Spec { format, scale, ..sizes };
            let mut rig = Rig::on(&spec, spec.open());
            let source = fill_on_cpu(&mut rig, &tokens(0, 16));
            rig.cache.poison_unused(0xFF).expect("poison");
            let mut prompt = tokens(0, 8 + matched);
            prompt.extend([90, 91]);
            let begun = rig.cache.begin(&prompt, up_to(24)).expect("fits");
            assert_eq!(begun.cached_len, 8 + matched);
            let (mut bytes, groups) = (0, rig.cache.plan().groups.len());
            for group in 0..groups {
                let place = |seq, at| block_in(&rig, group, seq, at);
                let (from, to) = (place(source, 1), place(begun.sequence, 1));
                assert_eq!(place(source, 0), place(begun.sequence, 0), "shared");
                assert_ne!(from, to, "the source is alive: copied");
                bytes += check_partial_copy(&rig, group, from, to, matched);
            }
            let stats = rig.cache.stats();
            assert_eq!((stats.partial_copies, stats.partial_takeovers), (1, 0));
            assert_eq!(stats.copied_bytes.0, bytes);
        }
    }
}

/// A sequence of these tokens with some K and V, in any format.
fn fill_on_cpu(rig: &mut Rig, prompt: &[u32]) -> SeqHandle {
    let begun = rig.cache.begin(prompt, up_to(prompt.len() as u32)).expect("fits");
    let tags: Vec<u64> = prompt.iter().map(|token| (*token).into()).collect();
    crate::common::append_step(&mut rig.cache, &[(begun.sequence, prompt.len() as u32)], &tags)
        .expect("promised");
    begun.sequence
}

/// A leaf that nobody holds is taken over by one; whoever else needs it has a copy.
#[test]
fn edge_29_a_leaf_is_taken_over_only_if_nobody_else_needs_it() {
    let mut rig = Rig::new(&paged(16));
    let prompt = |tail: u32| [&tokens(0, 12)[..], &[tail, tail, tail]].concat();
    rig.pass(&tokens(0, 16));
    let line = rig.run(&prompt(50));
    assert_eq!(line.cached_len, 12);
    let stats = rig.cache.stats();
    assert_eq!((stats.partial_takeovers, stats.partial_copies), (1, 0));
    assert_eq!(rig.blocks_found(&tokens(0, 16)), 1, "the leaf became something else");
    rig.release(&line);

    // Two and three at once: every one has its tokens, and no one another's.
    for copies in [2, 3] {
        let mut rig = Rig::new(&paged(16));
        rig.pass(&tokens(0, 16));
        let prompts: Vec<Vec<u32>> = (0..copies).map(|n| prompt(60 + n)).collect();
        let calls: Vec<_> = prompts.iter().map(|prompt| (&prompt[..], up_to(20))).collect();
        let mut begun = Vec::with_capacity(3);
        rig.cache.begin_batch(&calls, &mut begun).expect("fits");
        rig.cache.check_invariants().expect("invariants");
        let mut lines = Vec::new();
        for (one, prompt) in begun.iter().zip(&prompts) {
            assert_eq!(one.cached_len, 12);
            let text = super::text::Text::of(Ns::default(), 0, 8, &prompt[..12]);
            lines.push(Line { seq: one.sequence, text, cached_len: 12 });
        }
        lines.iter().for_each(|line| rig.check(line));
        for (line, prompt) in lines.iter_mut().zip(&prompts) {
            rig.prefill(line, prompt);
        }
        lines.iter().for_each(|line| rig.check(line));
        let stats = rig.cache.stats();
        assert_eq!(stats.partial_takeovers + stats.partial_copies, u64::from(copies));
        assert!(stats.partial_takeovers <= 1);
    }
}

#[test]
fn edge_34_forks_of_forks_released_in_every_order() {
    for mode in MODES {
        for order in 0..24_usize {
            let mut rig = Rig::new(&in_mode(mode, 40));
            let mut a = rig.run(&[]);
            rig.release(&a);
            a = rig.begin(&tokens(0, 11), Ns::default(), up_to(40)).expect("fits");
            rig.prefill(&mut a, &tokens(0, 11));
            let mut b = rig.fork(&a);
            rig.feed(&mut [(&mut a, &[100, 101]), (&mut b, &[200, 201])]).expect("promised");
            let mut c = rig.fork(&b);
            let mut d = rig.fork(&c);
            rig.feed(&mut [(&mut d, &tokens(300, 309)), (&mut b, &[400])]).expect("promised");
            rig.feed(&mut [(&mut c, &[500])]).expect("promised");
            let mut left = vec![a, b, c, d];
            let mut order = order;
            while !left.is_empty() {
                left.iter().for_each(|line| rig.check(line));
                rig.cache.poison_unused(0xFF).expect("poison");
                let gone = left.remove(order % left.len());
                order /= left.len() + 1;
                rig.release(&gone);
                if let Some(line) = left.first_mut() {
                    rig.feed(&mut [(line, &[600])]).expect("promised");
                }
            }
        }
    }
}

/// The first that writes has the copy; the last one left writes in place.
#[test]
fn edge_34_copy_on_write_copies_once_per_divergence() {
    let mut rig = Rig::new(&paged(32));
    let mut a = rig.begin(&tokens(0, 12), Ns::default(), up_to(32)).expect("fits");
    rig.prefill(&mut a, &tokens(0, 12));
    let mut b = rig.fork(&a);
    assert_eq!(rig.cache.stats().copied_bytes.0, 0, "a fork of blocks copies nothing");
    rig.feed(&mut [(&mut b, &[50])]).expect("promised");
    assert_eq!(rig.cache.stats().cow_copies, 1);
    rig.feed(&mut [(&mut a, &[60])]).expect("promised");
    assert_eq!(rig.cache.stats().cow_copies, 1, "nobody shares it any more");
    assert_eq!(block_at(&rig, a.seq, 0), block_at(&rig, b.seq, 0));
    assert_ne!(block_at(&rig, a.seq, 1), block_at(&rig, b.seq, 1));
    // On the boundary nothing is copied at all.
    let mut rig = Rig::new(&paged(32));
    let mut a = rig.begin(&tokens(0, 16), Ns::default(), up_to(32)).expect("fits");
    rig.prefill(&mut a, &tokens(0, 16));
    let mut b = rig.fork(&a);
    rig.feed(&mut [(&mut b, &[50]), (&mut a, &[60])]).expect("promised");
    assert_eq!(rig.cache.stats().cow_copies, 0);
}

#[test]
fn edge_35_copy_on_write_in_a_full_pool() {
    let admission = Admission::MaxUtilization;
    let mut rig = Rig::new(&Spec { admission, ..paged(2) });
    let mut a = rig.begin(&tokens(0, 12), Ns::default(), up_to(16)).expect("fits");
    rig.prefill(&mut a, &tokens(0, 12));
    let mut b = rig.fork(&a);
    let before = rig.cache.state_digest();
    let error = rig.feed(&mut [(&mut b, &[50])]).expect_err("no block for the copy");
    assert!(matches!(error, CacheError::PoolExhausted { wanted: 1, available: 0, .. }), "{error}");
    assert_eq!(rig.cache.state_digest(), before);
    let error = rig.feed(&mut [(&mut a, &[60]), (&mut b, &[50])]).expect_err("nor for both");
    assert!(matches!(error, CacheError::PoolExhausted { .. }), "{error}");
    rig.check(&a);
    rig.check(&b);
    rig.release(&a);
    rig.feed(&mut [(&mut b, &[50])]).expect("alone, in place");
    assert_eq!(rig.cache.stats().cow_copies, 0);

    // Under guaranteed admission the fork itself is refused: its copy could not be promised.
    let mut rig = Rig::new(&paged(3));
    let mut a = rig.begin(&tokens(0, 12), Ns::default(), up_to(24)).expect("fits");
    rig.prefill(&mut a, &tokens(0, 12));
    let error = assert_refused(&mut rig.cache, |cache| cache.fork(a.seq));
    assert!(matches!(error, CacheError::NotAdmitted { .. }), "{error}");
    rig.feed(&mut [(&mut a, &tokens(50, 62))]).expect("promised");
}

/// The source of a copy is given back and written by another before the device came to the copy.
#[test]
fn edge_36_the_source_is_released_behind_the_copy() {
    let admission = Admission::MaxUtilization;
    let mut rig = Rig::new(&Spec { admission, ..paged(5) });
    for round in 0..50 {
        let from = round * 100;
        let mut a = rig.begin(&tokens(from, from + 12), Ns::default(), up_to(24)).expect("fits");
        rig.prefill(&mut a, &tokens(from, from + 12));
        let mut b = rig.fork(&a);
        // No reading in between: the device has not come to anything yet.
        let batch = [(b.seq, 1)];
        let step = rig.cache.reserve_tokens(&batch, &[7]).expect("fits");
        drop(step);
        rig.feed(&mut [(&mut b, &[50])]).expect("fits");
        rig.release(&a);
        let mut c = rig.begin(&[], Ns::default(), up_to(16)).expect("fits");
        rig.feed(&mut [(&mut c, &tokens(from + 50, from + 62))]).expect("fits");
        rig.check(&b);
        rig.check(&c);
        rig.release(&c);
        rig.release(&b);
    }
}

/// A rewind into what others share: the others keep it.
#[test]
fn edge_38_rewind_past_the_shared_prefix() {
    for mode in MODES {
        let mut rig = Rig::new(&in_mode(mode, 40));
        let shared = tokens(0, 24);
        let first = rig.run(&shared);
        let mut second = rig.begin(&shared, Ns::default(), up_to(40)).expect("fits");
        rig.prefill(&mut second, &shared);
        for (len, new) in [(20, 3_u32), (16, 9), (11, 2), (8, 5), (3, 14), (0, 6)] {
            rig.truncate(&mut second, len);
            let new = tokens(len * 100, len * 100 + new);
            let step = rig.cache.reserve(&[(second.seq, 1)]).map(kvpool::cache::Step::cancel);
            step.expect("promised");
            feed_new(&mut rig, &mut second, &new);
            rig.check(&first);
            rig.check(&second);
        }
        let third = rig.run(&[&shared[..], &[99]].concat());
        assert_eq!(third.cached_len, 24, "{mode:?}: still there for others");
        rig.check(&third);
    }
}

/// Feeds tokens that are not those of the prompt.
fn feed_new(rig: &mut Rig, line: &mut Line, new: &[u32]) {
    rig.feed(&mut [(line, new)]).expect("promised");
}

/// A beam of 8: one context, private tails, the worst replaced by copies of the best.
#[test]
fn edge_39_a_beam_of_eight() {
    for mode in MODES {
        for context in [19, 23, 24, 25] {
            let mut rig = Rig::new(&in_mode(mode, 64));
            let prompt = tokens(0, context);
            let mut first = rig.begin(&prompt, Ns::default(), up_to(56)).expect("fits");
            rig.prefill(&mut first, &prompt);
            let mut beam = vec![first];
            for _ in 1..8 {
                beam.push(rig.fork(&beam[0]));
            }
            if mode == CacheMode::Paged {
                assert_eq!(rig.blocks().1, context.div_ceil(8), "the context is there once");
            }
            for round in 0..20_u32 {
                let new: Vec<[u32; 1]> = (0..8).map(|n| [1000 + round * 8 + n]).collect();
                let mut batch: Vec<(&mut Line, &[u32])> =
                    beam.iter_mut().zip(&new).map(|(line, new)| (line, &new[..])).collect();
                rig.feed(&mut batch).expect("promised");
                // Three of the eight give way to forks of others.
                for worst in 0..3 {
                    let gone = beam.remove((round as usize * 5 + worst) % beam.len());
                    rig.release(&gone);
                    let best = &beam[(round as usize * 3 + worst) % beam.len()];
                    let copy = rig.fork(best);
                    beam.push(copy);
                }
                rig.cache.poison_unused(0xFF).expect("poison");
                beam.iter().for_each(|line| rig.check(line));
            }
            beam.iter().for_each(|line| rig.release(line));
            assert_eq!(rig.cache.stats().held_bytes.0, 0);
        }
    }
}
