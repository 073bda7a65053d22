//! Prefix reuse in whole jobs: system prompts and conversations, with the same bits as without.

use kvpool::job::{Observer, Outcome, Progress, Run, RunReport, run};
use kvpool::units::Bytes;

use crate::common::on_cuda;
use crate::job::{MODEL, done, for_the_device, report, source};

/// Conversations of some turns that begin with one of two system prompts.
const CHAT: &str = "
    [workload]
    kind = 'generator'
    seed = 7
    requests = 30
    shared_prefix_tokens = { dist = 'uniform', min = 20, max = 45 }
    num_shared_prefixes = 2
    turns = { dist = 'uniform', min = 1, max = 4 }
    max_open_conversations = 3
    prompt_tokens = { dist = 'uniform', min = 1, max = 20 }
    output_tokens = { dist = 'uniform', min = 1, max = 14 }
    check_samples = 60
";

/// Every pair of variants that differ in `prefix_reuse` alone, the one with reuse first.
fn pairs(settings: &[&str]) -> String {
    let variants = settings.iter().flat_map(|setting| {
        [true, false].map(|reuse| {
            format!("{{ name = \"{setting} {reuse}\", prefix_reuse = {reuse}, {setting} }},\n")
        })
    });
    format!("variant = [\n{}]", variants.collect::<String>())
}

fn pair<'a>(runs: &[&'a RunReport], at: usize) -> [&'a RunReport; 2] {
    [runs[2 * at], runs[2 * at + 1]]
}

#[test]
fn outputs_are_the_same_bits_with_reuse_and_without() {
    let settings = [
        "mode = 'contiguous'",
        "mode = 'paged'",
        "mode = 'hybrid'",
        "tokens_per_block = 32",
        "admission = 'static-batch'",
        "threads = 3",
        "mode = 'contiguous', format = 'int8'",
        "mode = 'paged', format = 'int8'",
        "mode = 'hybrid', format = 'int8'",
        "format = 'int8', scale = 'per-group-32'",
        "format = 'bf16'",
        "format = 'f32', kernel = 'reference'",
    ];
    let requests = if on_cuda() { 10 } else { 30 };
    let chat = CHAT.replace("requests = 30", &format!("requests = {requests}"));
    let report = report(&[MODEL, &for_the_device(&pairs(&settings)), &chat]);
    let runs = done(&report);
    let of_cpu = |setting: &str| setting.contains("threads") || setting.contains("kernel");
    let kept: Vec<&str> =
        settings.into_iter().filter(|setting| !(on_cuda() && of_cpu(setting))).collect();
    assert_eq!(runs.len(), 2 * kept.len());
    for at in 0..kept.len() {
        let [on, off] = pair(&runs, at);
        assert!(on.prefix_reuse && !off.prefix_reuse);
        assert!(on.output_checksum.is_some(), "{}", on.variant);
        assert_eq!(on.output_checksum, off.output_checksum, "{}", on.variant);
        assert_eq!(on.prompt_tokens, off.prompt_tokens);
        assert_eq!((off.prefix_hit_tokens, off.saved_prefill_tokens, off.evictions), (0, 0, 0));
        assert_eq!((off.prefix_hit_rate, off.peak_cached_bytes), (0.0, Bytes(0)));
        assert_eq!(on.repeated_prompt_tokens, off.repeated_prompt_tokens);
        assert!(on.prefix_hit_tokens <= on.repeated_prompt_tokens, "{}", on.variant);
        // What was found was not computed, and nothing else was left out.
        assert_eq!(on.saved_prefill_tokens, on.prefix_hit_tokens, "nothing was preempted");
        assert_eq!(on.tokens_appended + on.saved_prefill_tokens, off.tokens_appended);
        println!("{:>60}: {} of {}", on.variant, on.prefix_hit_tokens, on.prompt_tokens);
    }
    assert!(report.comparisons.iter().all(|c| c.outcome == Outcome::Equal));
    // The paged ones have memory for everything that comes again.
    for (at, setting) in kept.iter().enumerate() {
        let of_slots = ["contiguous", "hybrid", "static-batch"];
        if of_slots.iter().any(|kind| setting.contains(kind)) {
            continue;
        }
        let [on, _] = pair(&runs, at);
        assert!(2 * on.prefix_hit_tokens > on.repeated_prompt_tokens, "{}", on.variant);
        assert!(on.prefix_hit_rate > 0.25 && on.peak_cached_bytes > Bytes(0), "{}", on.variant);
    }
}

#[test]
fn what_is_preempted_is_found_again_and_gives_the_same_bits() {
    let long = CHAT.replace("max = 14", "max = 60").replace("max_open_conversations = 3", "");
    let requests = if on_cuda() { 8 } else { 30 };
    let long = long.replace("requests = 30", &format!("requests = {requests}"));
    let mut found = 0;
    for seed in 0..if on_cuda() { 1 } else { 4 } {
        let workload = long.replace("seed = 7", &format!("seed = {seed}"));
        let settings = [
            "admission = 'max-utilization', capacity = 'tokens:200'",
            "admission = 'max-utilization', capacity = 'tokens:280', mode = 'hybrid'",
            "capacity = 'tokens:200'",
        ];
        let report = report(&[MODEL, &pairs(&settings), &workload]);
        let runs = done(&report);
        for at in 0..settings.len() {
            let [on, off] = pair(&runs, at);
            assert_eq!(on.output_checksum, off.output_checksum, "{}", on.variant);
            assert_eq!(on.preemptions_without_progress, 0, "{}", on.variant);
            let saved = on.prefix_hit_tokens + on.resumed_hit_tokens;
            assert_eq!(on.saved_prefill_tokens, saved);
            assert!(on.resumed_hit_tokens <= on.resumed_tokens);
            assert_eq!(on.resumed_tokens > 0, on.preemptions > 0, "{}", on.variant);
            found += on.resumed_hit_tokens;
        }
        assert!(report.comparisons.iter().all(|c| c.outcome == Outcome::Equal));
    }
    assert!(found > 0 || on_cuda(), "no preempted request found anything of itself");
}

#[test]
fn a_small_cache_forgets_and_is_right_all_the_same() {
    let long = CHAT.replace("max_open_conversations = 3", "").replace("s = 30", "s = 60");
    let settings = ["capacity = 'tokens:200'", "capacity = 'tokens:4000'"];
    let report = report(&[MODEL, &pairs(&settings), &long]);
    let runs = done(&report);
    let ([small, _], [large, _]) = (pair(&runs, 0), pair(&runs, 1));
    assert!(small.evictions > 0, "a pool of 200 tokens cannot keep everything");
    assert!(small.prefix_hit_tokens < large.prefix_hit_tokens);
    assert_eq!(report.comparisons[0].outcome, Outcome::Equal);
}

/// Notes how many run after each step.
#[derive(Default)]
struct Running(Vec<usize>);

impl Observer for Running {
    fn variant(&mut self, _: &str, _: usize, _: usize) {}
    fn opening(&mut self, _: Bytes, _: Bytes) {}
    fn step(&mut self, progress: &Progress) {
        self.0.push(progress.running);
    }
    fn finished(&mut self, _: &Run) {}
}

#[test]
fn nobody_joins_a_static_batch() {
    let variants = "variant = [{ name = 's', admission = 'static-batch' }]";
    let mut running = Running::default();
    let report = run(&source(&[MODEL, variants, CHAT]), &mut running).unwrap();
    assert_eq!(done(&report)[0].requests_completed, 30);
    let batches = running.0.iter().filter(|running| **running == 0).count();
    assert!(batches > 4, "{batches} batches: a turn waits for the batch of the turn before it");
    for pair in running.0.windows(2) {
        assert!(pair[0] == 0 || pair[1] <= pair[0], "{:?}", running.0);
    }
    // All places are filled at once, though a step has room for the prompts of three only.
    assert_eq!(done(&report)[0].peak_running, 3);
    let all = CHAT.replace("max_open_conversations = 3", "");
    let report = crate::job::report(&[MODEL, variants, &all]);
    assert_eq!(done(&report)[0].peak_running, 6, "limits.max_seqs");
}

#[test]
fn conversations_open_one_after_the_other() {
    for (open, most) in [(1, 1), (2, 2), (100, 6)] {
        let limit = format!("max_open_conversations = {open}");
        let workload = CHAT.replace("max_open_conversations = 3", &limit);
        let report = report(&[MODEL, &workload]);
        let ran = done(&report)[0];
        assert_eq!(ran.requests_completed, 30);
        assert_eq!(ran.peak_running, most, "{open}");
    }
}

#[test]
fn a_conversation_ends_where_it_gets_too_long() {
    let long = CHAT.replace("max = 4 }", "max = 12 }").replace("s = 30", "s = 60");
    let report = report(&[MODEL, &pairs(&["mode = 'paged'"]), &long]);
    for ran in done(&report) {
        assert!(ran.requests_refused_too_long > 0, "turns of more than 160 tokens");
        assert_eq!(ran.requests_completed + ran.requests_refused_too_long, 60);
    }
    assert_eq!(report.comparisons[0].outcome, Outcome::Equal);
}
