//! What one tenant can learn of another's prompts from how much is done for its own: nothing behind
//! a salt. The counts are exact; `kvpool bench salt` looks at the clock.

use std::path::Path;

use super::prefix::work::{self, Work};
use super::{BeginOptions, Cache, KeyPart, Namespace};
use crate::config::parse;
use crate::device::NullDevice;
use crate::plan::Plan;

fn open(mode: &str, windows: &str) -> Cache {
    let hybrid = if mode == "hybrid" { ", hybrid = { contiguous_layers = [0] }" } else { "" };
    let text = format!(
        "model = {{ num_layers = 2, num_q_heads = 1, num_kv_heads = 1, head_dim = 8, attention_window = {windows} }}\n\
         limits = {{ max_seqs = 8, max_seq_len = 512, max_batch_tokens = 512, max_step_tokens = 64 }}\n\
         cache = {{ mode = '{mode}'{hybrid} }}"
    );
    let source = parse(&text, Path::new("tenants"), &[]).expect("a valid configuration");
    let plan = Plan::new(&source.config, &source.geometry).expect("a plan");
    let device = Box::new(NullDevice::open(&plan));
    Cache::open(plan, device).expect("opens")
}

fn of(salt: Option<u64>) -> BeginOptions {
    let namespace = Namespace { salt: salt.map(KeyPart::number), ..Namespace::default() };
    BeginOptions { namespace, ..BeginOptions::default() }
}

/// A prompt that is computed, and whose sequence ends or stays.
fn run(cache: &mut Cache, prompt: &[u32], options: BeginOptions, ends: bool) {
    let begun = cache.begin(prompt, options).expect("fits");
    for chunk in prompt[begun.cached_len as usize..].chunks(64) {
        let count = u32::try_from(chunk.len()).expect("few");
        let mut step = cache.reserve_tokens(&[(begun.sequence, count)], chunk).expect("fits");
        step.mark_all_appended();
        step.commit().expect("whole");
    }
    if ends {
        cache.release(begun.sequence).expect("alive");
    }
}

fn prompt(seed: u32) -> Vec<u32> {
    (0..401_u32).map(|at| (at * 31 + seed * 7919).wrapping_mul(2_654_435_761) >> 8).collect()
}

/// What is counted while a prompt is looked for and begun.
fn work_of(cache: &mut Cache, prompt: &[u32], options: BeginOptions) -> Work {
    work::take();
    let probed = cache.probe(prompt, &options.namespace);
    let begun = cache.begin(prompt, options).expect("fits");
    assert_eq!(begun.cached_len, probed.cached_len);
    cache.release(begun.sequence).expect("alive");
    work::take()
}

#[test]
fn behind_a_salt_anothers_prompt_costs_what_any_miss_costs() {
    for (mode, windows) in [
        ("paged", "[0, 0]"),
        ("paged", "[0, 64]"),
        ("contiguous", "[0, 0]"),
        ("contiguous", "[64, 0]"),
        ("hybrid", "[0, 0]"),
        ("hybrid", "[64, 0]"),
    ] {
        for ends in [true, false] {
            let mut cache = open(mode, windows);
            // Two tenants, each with prompts of its own.
            for seed in 0..2 {
                run(&mut cache, &prompt(seed), of(Some(1)), ends);
                run(&mut cache, &prompt(seed + 10), of(Some(2)), ends);
            }
            // What the second pays for the first one's, for a beginning of it, and for what is new.
            let theirs = work_of(&mut cache, &prompt(0), of(Some(2)));
            let part = [&prompt(1)[..200], &prompt(50)[200..]].concat();
            let partly = work_of(&mut cache, &part, of(Some(2)));
            let nobodys = work_of(&mut cache, &prompt(51), of(Some(2)));
            let what = format!("{mode} {windows}, ended: {ends}");
            assert_eq!(theirs, nobodys, "{what}");
            assert_eq!(partly, nobodys, "{what}");
            // And whoever has no salt.
            let without = work_of(&mut cache, &prompt(0), of(None));
            assert_eq!(without, work_of(&mut cache, &prompt(52), of(None)), "{what}");
            // The count would show it: its own prompts cost more.
            let own = work_of(&mut cache, &prompt(10), of(Some(2)));
            assert!(own.tokens > nobodys.tokens + 100, "{what}: {own:?}, {nobodys:?}");
        }
    }
}
