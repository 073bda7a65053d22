//! Edge cases 22–26, 30, 33, 37 and 42: what is found, and by whom.

use kvpool::cache::{Begun, KeyPart};
use kvpool::config::CacheMode;
use kvpool::device::{TensorMut, TensorRef};
use kvpool::units::{GroupIdx, LayerIdx};

use super::rig::{Rig, paged, tokens, up_to};
use super::text::{KEY_PARTS, Ns};
use crate::common::{Spec, assert_same_bits, tensor};

/// Each new namespace finds nothing of those before it, whole blocks or parts.
#[test]
fn edge_22_namespaces_never_share() {
    let mut rig = Rig::new(&paged(1200));
    let prompt = tokens(0, 21);
    for salt in 0..KEY_PARTS {
        for adapter in 0..KEY_PARTS {
            for model in 0..KEY_PARTS {
                let ns = Ns { salt, adapter, model, salt_from: 0 };
                let found = rig.cache.probe(&prompt, &ns.options());
                assert_eq!((found.cached_len, found.partial_tokens), (0, 0), "{ns:?}");
                let line = rig.run_in(&prompt, ns);
                assert_eq!(line.cached_len, 0);
                rig.release(&line);
                let found = rig.cache.probe(&prompt, &ns.options());
                assert_eq!(found.cached_len, 16, "{ns:?} finds its own");
                let part = rig.cache.probe(&prompt[..12], &ns.options());
                assert_eq!((part.full_blocks, part.partial_tokens), (1, 3));
            }
        }
    }
    assert_eq!(rig.cache.stats().prefix_hit_tokens, 0);
}

#[test]
fn edge_22_key_parts_are_told_apart() {
    let bytes = |bytes: &[u8]| KeyPart::bytes(bytes).expect("short enough");
    let parts = [
        bytes(b""),
        bytes(&[0]),
        bytes(&[0, 0]),
        bytes(&[0; 8]),
        bytes(b"a"),
        bytes(&[0; 47]),
        bytes(&97_u64.to_le_bytes()),
        KeyPart::number(0),
        KeyPart::number(97),
        KeyPart::number(u64::MAX),
    ];
    for (i, a) in parts.iter().enumerate() {
        for (j, b) in parts.iter().enumerate() {
            assert_eq!(a == b, i == j, "{a:?} and {b:?}");
        }
    }
    let error = KeyPart::bytes(&[1; 48]).expect_err("a part that is cut off would be another");
    assert_eq!(
        error.to_string(),
        "a salt, adapter or model id has 48 bytes, and 47 at most are kept; give a digest of it"
    );
}

/// A public system prompt, and private texts behind it that are the same tokens.
#[test]
fn edge_23_a_salt_may_cover_a_region() {
    let mut rig = Rig::new(&paged(64));
    let prompt = tokens(0, 33);
    let with = |salt, salt_from| Ns { salt, salt_from, ..Ns::default() };
    // 20 is inside the third block: its whole block is private.
    let first = rig.run_in(&prompt, with(2, 20));
    let other = rig.run_in(&prompt, with(6, 20));
    assert_eq!(other.cached_len, 16, "the public part, and no token more");
    let same = rig.run_in(&prompt, with(2, 16));
    assert_eq!(same.cached_len, 32, "16 and 20 are the same block");
    let plain = rig.run_in(&prompt, Ns::default());
    assert_eq!(plain.cached_len, 16);
    let earlier = rig.run_in(&prompt, with(2, 8));
    assert_eq!(earlier.cached_len, 8, "private from the second block on");
    let whole = rig.run_in(&prompt, with(2, 0));
    assert_eq!(whole.cached_len, 0);
    let adapter = rig.run_in(&prompt, Ns { adapter: 2, ..with(2, 20) });
    assert_eq!(adapter.cached_len, 0, "the public part belongs to an adapter too");
    for line in [first, other, same, plain, earlier, whole, adapter] {
        rig.check(&line);
        rig.release(&line);
    }
    let later = rig.cache.probe(&prompt, &with(6, 40).options());
    assert_eq!(later.cached_len, 32, "a salt behind the prompt changes nothing");
}

#[test]
fn edge_24_the_last_token_is_left_to_compute() {
    let mut rig = Rig::new(&paged(32));
    assert_eq!(rig.pass(&tokens(0, 33)), 0);
    for (len, found) in
        [(0, 0), (1, 0), (2, 1), (7, 6), (8, 7), (9, 8), (10, 9), (16, 15), (17, 16), (33, 32)]
    {
        assert_eq!(rig.found(&tokens(0, len)), found, "a prompt of {len}");
    }
    for len in [1, 8, 9, 16, 17, 24] {
        let line = rig.run(&tokens(0, len));
        assert_eq!(line.cached_len, len - 1);
        rig.release(&line);
    }
}

/// Nothing is visible until it is written and committed, to nobody.
#[test]
fn edge_25_identical_prompts_in_one_batch() {
    for copies in [2, 3] {
        let mut rig = Rig::new(&paged(32));
        let prompt = tokens(0, 20);
        let calls = vec![(&prompt[..], up_to(24)); copies];
        let mut begun: Vec<Begun> = Vec::with_capacity(copies);
        rig.cache.begin_batch(&calls, &mut begun).expect("there is room");
        assert!(begun.iter().all(|one| one.cached_len == 0), "nothing is written yet");
        // The first is aborted, half way through a step.
        let prober = rig.cache.prober().expect("paged, with reuse");
        let plain = Ns::default().options();
        let step = rig.cache.reserve(&[(begun[0].sequence, 20)]).expect("promised");
        assert_eq!(prober.probe(&prompt, &plain).cached_len, 0, "reserved is not written");
        step.cancel();
        rig.cache.release(begun[0].sequence).expect("alive");
        assert_eq!(rig.found(&prompt), 0);
        // The others fill the same blocks in one step: one copy of them is kept.
        let text = super::text::Text::new(Ns::default(), 0, 8);
        let mut lines: Vec<_> = begun[1..]
            .iter()
            .map(|one| super::rig::Line { seq: one.sequence, text: text.clone(), cached_len: 0 })
            .collect();
        let mut batch: Vec<_> = lines.iter_mut().map(|line| (line, &prompt[..])).collect();
        rig.feed(&mut batch).expect("promised");
        assert_eq!(rig.found(&prompt), 16);
        let stats = rig.cache.stats();
        assert_eq!(
            (stats.blocks_published, stats.blocks_deduplicated),
            (2, 2 * (copies as u64 - 2))
        );
        lines.iter().for_each(|line| rig.check(line));
        let late = rig.run(&prompt);
        assert_eq!(late.cached_len, 16);
    }
}

/// The first blocks of a sequence's row.
fn row(rig: &Rig, seq: kvpool::cache::SeqHandle, blocks: usize) -> Vec<u32> {
    let (table, row) = rig.cache.block_table(GroupIdx(0)).expect("paged");
    let start = seq.slot() as usize * row as usize;
    table[start..start + blocks].to_vec()
}

#[test]
fn edge_26_a_block_is_shared_when_full_and_kept_once() {
    let mut rig = Rig::new(&paged(32));
    let prompt = tokens(0, 24);
    let mut a = rig.begin(&prompt, Ns::default(), up_to(24)).expect("fits");
    let mut b = rig.begin(&prompt, Ns::default(), up_to(24)).expect("fits");
    for (chunk, full) in prompt.chunks(3).zip([0, 0, 1, 1, 1, 2, 2, 3]) {
        rig.feed(&mut [(&mut a, chunk)]).expect("promised");
        assert_eq!(rig.blocks_found(&prompt), full, "after {} tokens", a.text.len());
    }
    let version = rig.cache.table_version(b.seq).expect("alive");
    let active = rig.blocks().1;
    rig.prefill(&mut b, &prompt);
    assert_eq!(row(&rig, b.seq, 3), row(&rig, a.seq, 3), "the second copy was given back");
    assert_ne!(rig.cache.table_version(b.seq), Ok(version), "rows read before are stale");
    assert_eq!(rig.blocks().1, active, "and takes no room");
    assert_eq!(rig.cache.stats().blocks_deduplicated, 3);
    let block = rig.cache.block_of(a.seq, GroupIdx(0), 0).expect("held");
    assert_eq!(rig.cache.block_refs(block), Ok(2));
    rig.release(&a);
    assert_eq!(rig.cache.block_refs(block), Ok(1));
    rig.check(&b);
    rig.release(&b);
    assert_eq!(rig.blocks(), (29, 0, 3, 0));
}

/// Tokens that are decoded are found by who continues the conversation; unknown ones by nobody.
#[test]
fn edge_26_decoded_tokens_are_shared_when_their_ids_are_known() {
    let mut rig = Rig::new(&paged(32));
    let mut line = rig.begin(&tokens(0, 10), Ns::default(), up_to(40)).expect("fits");
    rig.prefill(&mut line, &tokens(0, 10));
    for token in 10..24 {
        rig.feed(&mut [(&mut line, &[token])]).expect("promised");
    }
    assert_eq!(rig.blocks_found(&tokens(0, 24)), 3);
    let step = rig.cache.reserve(&[(line.seq, 8)]).expect("promised");
    super::driver_step::skip(step).expect("whole");
    assert_eq!(rig.blocks_found(&tokens(0, 32)), 3, "the engine did not say which tokens");
    let step = rig.cache.reserve_tokens(&[(line.seq, 8)], &tokens(32, 40)).expect("promised");
    super::driver_step::skip(step).expect("whole");
    let (_, active, ..) = rig.blocks();
    assert_eq!(active, 5);
    rig.release(&line);
    assert_eq!(rig.blocks(), (29, 0, 3, 0), "behind unknown tokens nothing is shared");
}

#[test]
fn edge_30_an_epoch_makes_old_blocks_unreachable() {
    let mut rig = Rig::new(&paged(32));
    let prompt = tokens(0, 25);
    let mut old = rig.begin(&prompt, Ns::default(), up_to(40)).expect("fits");
    rig.prefill(&mut old, &prompt);
    rig.cache.set_epoch(1).expect("nothing is reserved");
    rig.epoch = 1;
    rig.cache.check_invariants().expect("invariants");
    assert_eq!(rig.found(&prompt), 0);
    let new = rig.run(&prompt);
    assert_eq!(new.cached_len, 0);
    // What is in use goes on, and its new blocks are not found either.
    rig.feed(&mut [(&mut old, &tokens(25, 40))]).expect("promised");
    let forked = rig.fork(&old);
    assert_eq!(rig.found(&tokens(0, 41)), 24, "the new epoch's own");
    for line in [&old, &new, &forked] {
        rig.check(line);
        rig.release(line);
    }
    assert_eq!(rig.found(&tokens(0, 41)), 24);
}

/// An adapter alone has new weights, and with them another name. The adapter before it is found by
/// who still names that, and what runs goes on; the model's own and other adapters' are untouched.
#[test]
fn edge_30_an_adapter_with_new_weights_is_another_adapter() {
    let mut rig = Rig::new(&paged(64));
    let with = |adapter| Ns { adapter, ..Ns::default() };
    let (before, after, other) = (with(2), with(6), with(4));
    let prompt = tokens(0, 25);
    let mut old = rig.begin(&prompt, before, up_to(40)).expect("fits");
    rig.prefill(&mut old, &prompt);
    let rest = [rig.run(&prompt), rig.run_in(&prompt, other)];
    let found =
        |rig: &Rig, ns: Ns, prompt: &[u32]| rig.cache.probe(prompt, &ns.options()).cached_len;
    assert_eq!(found(&rig, after, &prompt), 0);
    let new = rig.run_in(&prompt, after);
    assert_eq!(new.cached_len, 0);
    rig.feed(&mut [(&mut old, &tokens(25, 40))]).expect("promised");
    let forked = rig.fork(&old);
    assert_eq!(found(&rig, after, &tokens(0, 41)), 24, "the new weights' own");
    assert_eq!(found(&rig, before, &tokens(0, 41)), 40);
    for ns in [Ns::default(), other] {
        assert_eq!(found(&rig, ns, &tokens(0, 41)), 24);
    }
    // The epoch of everything ends them all.
    rig.cache.set_epoch(1).expect("nothing is reserved");
    rig.epoch = 1;
    for ns in [Ns::default(), other, before, after] {
        assert_eq!(found(&rig, ns, &tokens(0, 41)), 0);
    }
    for line in rest.iter().chain([&old, &new, &forked]) {
        rig.check(line);
        rig.release(line);
    }
}

#[test]
fn edge_33_hit_rates_from_nothing_to_all() {
    let mut rig = Rig::new(&paged(32));
    let rate = |rig: &Rig| {
        let stats = rig.cache.stats();
        assert!(stats.prefix_hit_tokens <= stats.prefix_query_tokens);
        (stats.prefix_hit_tokens, stats.prefix_query_tokens, stats.prefix_queries)
    };
    assert_eq!(rate(&rig), (0, 0, 0));
    let block = tokens(0, 8);
    rig.pass(&block);
    assert_eq!(rate(&rig), (0, 8, 1));
    // One block in all, nearly all of it.
    rig.pass(&block);
    let stats = rig.cache.stats();
    assert_eq!(rate(&rig), (7, 16, 2));
    assert_eq!((stats.prefix_hit_blocks, stats.prefix_partial_hits), (0, 1));
    assert_eq!(stats.prefix_partial_tokens, 7);
    // Shared by three at once.
    let long = tokens(0, 17);
    let lines: Vec<_> = (0..3).map(|_| rig.run(&long)).collect();
    assert_eq!(rig.cache.stats().prefix_hit_blocks, 1 + 2 + 2);
    assert_eq!(rate(&rig), (7 + 8 + 16 + 16, 16 + 3 * 17, 5));
    // Refused calls and probes ask for nothing.
    rig.found(&long);
    rig.cache.begin(&long, up_to(65)).expect_err("too long");
    assert_eq!(rate(&rig).2, 5);
    // Two whole blocks that are there once, and a token of each in a block of its own.
    let (stats, plan) = (rig.cache.stats(), rig.cache.plan());
    assert_eq!(stats.used_bytes.0, (16 + 3) * plan.bytes_per_token.0);
    assert_eq!(stats.held_bytes.0, (2 + 3) * plan.groups[0].layout.unit_bytes);
    lines.iter().for_each(|line| rig.release(line));
}

/// A donor that goes on decoding changes nothing for who shares with it, in every mode.
#[test]
fn edge_37_the_donor_goes_on_and_nobody_sees_it() {
    for mode in [CacheMode::Paged, CacheMode::Hybrid, CacheMode::Contiguous] {
        for windows in [vec![0, 0], vec![12, 0]] {
            let capacity = match mode {
                CacheMode::Contiguous => kvpool::config::Capacity::WorstCase,
                _ => kvpool::config::Capacity::Blocks(40),
            };
            let spec = Spec { mode, windows, capacity, max_rewind_tokens: 4, ..paged(40) };
            let mut rig = Rig::new(&spec);
            let prompt = tokens(0, 12);
            let mut donor = rig.begin(&prompt, Ns::default(), up_to(50)).expect("fits");
            rig.prefill(&mut donor, &prompt);
            let mut lines = vec![];
            for at in 0..4 {
                let mut line = rig.begin(&prompt, Ns::default(), up_to(50)).expect("fits");
                rig.feed(&mut [(&mut donor, &[100 + at])]).expect("promised");
                rig.prefill(&mut line, &prompt);
                rig.feed(&mut [(&mut line, &[200 + at, 201]), (&mut donor, &[300])])
                    .expect("promised");
                lines.push(line);
                lines.iter().for_each(|line| rig.check(line));
            }
            rig.release(&donor);
            rig.pass(&tokens(500, 540));
            lines.iter().for_each(|line| rig.check(line));
        }
    }
}

/// Prompt and decode on the CPU, with attention: the outputs of the last step.
fn outputs(rig: &mut Rig, prompt: &[u32]) -> (u32, Vec<f32>) {
    let geometry = rig.cache.plan().geometry.clone();
    let (heads, q_heads, dim) = (geometry.num_kv_heads, geometry.num_q_heads, geometry.head_dim);
    let begun = rig.cache.begin(prompt, up_to(48)).expect("fits");
    let mut last = Vec::new();
    let whole = [prompt, &tokens(90, 94)].concat();
    let most = rig.cache.plan().limits.max_step_tokens as usize;
    let (mut from, mut left) = (begun.cached_len, &whole[begun.cached_len as usize..]);
    while !left.is_empty() {
        let n = if from < prompt.len() as u32 { most.min(prompt.len() - from as usize) } else { 1 };
        let (now, later) = left.split_at(n);
        let tags: Vec<u64> = now.iter().map(|token| (*token).into()).collect();
        let mut step = rig.cache.reserve_tokens(&[(begun.sequence, n as u32)], now).expect("fits");
        let positions = step.positions().to_vec();
        assert_eq!(positions[0], from);
        last.clear();
        for layer in 0..geometry.num_layers {
            let input = |what, heads| tensor(&tags, &positions, layer, what, heads, dim);
            let (k, v, q) = (input(0, heads), input(1, heads), input(2, q_heads));
            let mut out = vec![f32::NAN; q.len()];
            step.append(LayerIdx(layer), TensorRef::F32(&k), TensorRef::F32(&v)).expect("fits");
            let (q, all) = (TensorRef::F32(&q), TensorMut::F32(&mut out));
            step.attend(LayerIdx(layer), q, all, Default::default()).expect("fits");
            last.extend(out);
        }
        step.commit().expect("whole");
        (from, left) = (from + n as u32, later);
    }
    rig.cache.release(begun.sequence).expect("alive");
    rig.cache.poison_unused(0xFF).expect("poison");
    (begun.cached_len, last)
}

/// Layers that see everything have more than those with a window: what all have counts. How much
/// that is, of the same prompt time and again, and of another that has its first 20 tokens.
#[test]
fn edge_42_later_runs_of_a_prompt_give_the_same_output() {
    use CacheMode::{Contiguous, Hybrid, Paged};
    // Where every layer has a window, nothing is shared in blocks. Slots keep single tokens, until
    // another takes them over.
    for (mode, windows, again, others) in [
        (Paged, vec![9, 0], [32; 4], 20),
        (Paged, vec![0, 0], [32; 4], 20),
        (Paged, vec![9, 17], [0; 4], 0),
        (Paged, vec![9, 9], [0; 4], 0),
        (Hybrid, vec![9, 0], [32; 4], 0),
        (Hybrid, vec![0, 0], [32, 20, 20, 20], 20),
        (Hybrid, vec![9, 17], [0; 4], 0),
        (Contiguous, vec![9, 0], [34; 4], 0),
        (Contiguous, vec![0, 0], [34, 20, 20, 20], 20),
        (Contiguous, vec![9, 17], [34; 4], 0),
    ] {
        let capacity = match mode {
            Contiguous => kvpool::config::Capacity::WorstCase,
            _ => kvpool::config::Capacity::Blocks(20),
        };
        let spec = Spec { mode, windows, capacity, sink_tokens: 0, ..paged(20) };
        let what = format!("{mode:?} {:?}", spec.windows);
        let mut rig = Rig::on(&spec, spec.open());
        let prompt = tokens(0, 35);
        let (first, want) = outputs(&mut rig, &prompt);
        assert_eq!(first, 0);
        for (run, again) in (2..6).zip(again) {
            let (cached, got) = outputs(&mut rig, &prompt);
            assert_eq!(cached, again, "{what}, run {run}");
            assert_same_bits(&got, &want, "a later run");
            // Others pass through in between and evict some of it.
            outputs(&mut rig, &tokens(run * 50, run * 50 + 20));
            let half = [&prompt[..20], &tokens(70, 80)].concat();
            let (cached, _) = outputs(&mut rig, &half);
            if run == 2 {
                assert_eq!(cached, others, "{what}");
            }
        }
    }
}

/// Windowed layers have fewer blocks, and what they had of a prompt is evicted while the others
/// still have all of it. Less is found than those have, it is counted, and the outputs are the
/// same, four times over.
#[test]
fn edge_42_a_beginning_that_windowed_layers_lack() {
    let mut misses = 0;
    for fillers in 0..6 {
        let run = |windows: Vec<u32>| {
            // Of a windowed layer as many blocks as its sequences hold at once, and no more.
            let capacity = kvpool::config::Capacity::WorstCase;
            let spec = Spec { windows, capacity, max_seqs: 3, ..paged(20) };
            let mut rig = Rig::on(&spec, spec.open());
            let prompt = tokens(0, 35);
            let (_, want) = outputs(&mut rig, &prompt);
            for filler in 1..=fillers {
                outputs(&mut rig, &tokens(filler * 100, filler * 100 + 30));
            }
            let before = rig.cache.stats().window_misses;
            let mut found = Vec::new();
            for _ in 0..4 {
                let (cached, got) = outputs(&mut rig, &prompt);
                assert_same_bits(&got, &want, "a later run");
                found.push(cached);
            }
            (found, rig.cache.stats().window_misses - before)
        };
        let ((full, none), (both, missed)) = (run(vec![0, 0]), run(vec![9, 0]));
        println!("{fillers}: {full:?} {both:?} {missed}");
        assert_eq!(none, 0);
        assert!(both[0] <= full[0] && both[1..] == [32; 3]);
        assert_eq!(missed > 0, both[0] < full[0]);
        misses += missed;
    }
    assert!(misses > 0, "no window was short of anything");
}
