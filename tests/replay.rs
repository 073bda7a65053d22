//! Replays: jobs without K and V, on a simulated clock.

use std::fmt::Write as _;
use std::path::Path;

use kvpool::config::{Source, load, parse};
use kvpool::job::Silent;
use kvpool::job::replay::{Replay, ReplayOptions, Replayed, VariantResult, replay};
use kvpool::job::replay_output::{json, merge, problems};

const MODEL: &str = "
    model = { num_layers = 3, num_q_heads = 4, num_kv_heads = 2, head_dim = 32, \
              attention_window = [24, 0], sink_tokens = 2 }
    limits = { max_seqs = 8, max_seq_len = 256, max_batch_tokens = 64, max_step_tokens = 16 }
    cache = { mode = 'paged', tokens_per_block = 8, format = 'f16' }
    cost = { bandwidth = '1 GB', step_us = 100.0, token_us = 10.0, weight_bytes = 100_000 }
    goals = { first_token_ms = 50.0, token_ms = 5.0 }
";

const CHAT: &str = "
    [workload]
    kind = 'generator'
    compute = 'none'
    seed = 3
    requests = 60
    shared_prefix_tokens = { dist = 'fixed', value = 30 }
    num_shared_prefixes = 2
    prompt_tokens = { dist = 'lognormal', median = 30, sigma = 0.8, min = 1, max = 90 }
    output_tokens = { dist = 'uniform', min = 1, max = 60 }
    arrivals = 'poisson'
    requests_per_s = 100.0
";

const VARIANTS: &str = "
    [[sweep]]
    mode = ['contiguous', 'paged', 'hybrid', 'dynamic']
    capacity = ['budget:400 KiB', 'budget:2 MiB']
    admission = ['guaranteed', 'max-utilization']
";

fn source(parts: &[&str]) -> Source {
    parse(&parts.join("\n"), Path::new("job.toml"), &[]).unwrap_or_else(|error| panic!("{error}"))
}

fn run(source: &Source) -> Replay {
    replay(source, &ReplayOptions::default(), &Silent).unwrap_or_else(|error| panic!("{error}"))
}

fn done(report: &Replay) -> Vec<&VariantResult> {
    let done = report.runs.iter().map(|run| match run {
        Replayed::Done(run) => &**run,
        Replayed::Failed(failed) => panic!("{}", failed.error),
    });
    done.collect()
}

#[test]
fn a_replay_is_the_same_every_time_and_in_any_number_of_threads() {
    let threads =
        |n: u32| run(&source(&[MODEL, &format!("device = {{ threads = {n} }}"), CHAT, VARIANTS]));
    let (one, four) = (threads(1), threads(4));
    assert_eq!(json(&one).replace("threads = 1", ""), json(&four).replace("threads = 4", ""));
    assert!(problems(&one).is_empty(), "{:?}", problems(&one));
    let runs = done(&one);
    assert_eq!(runs.len(), 2 * 2 * 3 + 2);
    for run in runs {
        let name = &run.variant;
        assert_eq!(run.requests_completed, 60, "{name}");
        assert_eq!(run.output_tokens, one.workload.output_tokens, "{name}");
        assert!(run.pool_bytes <= 2 << 20 && run.peak_held_bytes <= run.pool_bytes, "{name}");
        assert!(run.utilization > 0.0 && run.utilization <= 1.0, "edge 33: {name}");
        assert!(run.hit_rate <= run.ceiling_hit_rate, "edge 33: {name}");
        assert!(run.mean_running <= f64::from(run.peak_running), "{name}");
        assert!(run.busy_s <= run.simulated_s && run.simulated_s >= one.workload.last_arrival_s);
        assert!(
            run.queue_ms.p50 <= run.first_token_ms.p50
                && run.first_token_ms.max <= run.latency_ms.max
        );
        assert!(run.preemptions == 0 || run.admission == "max-utilization", "{name}");
        for point in &run.series {
            assert!(
                point.used <= point.held
                    && point.held + point.promised + point.free == run.pool_bytes
                    || run
                        .mode
                        .is_some_and(|mode| mode.name() != "dynamic" && point.used <= point.held),
                "{name}: {point:?}"
            );
            assert!(point.largest_run <= point.free, "{name}");
        }
        assert!(run.picture.is_some());
        // Computed is what was not found, and what was lost with a preemption.
        let all = run.prompt_tokens + run.output_tokens - run.prefix_hit_tokens;
        assert!(
            run.computed_tokens >= all && (run.preemptions > 0 || run.computed_tokens == all),
            "{name}"
        );
    }
}

#[test]
fn variants_differ_where_they_must() {
    let report = run(&source(&[MODEL, CHAT, VARIANTS]));
    let runs = done(&report);
    let find = |name: &str| {
        *runs.iter().find(|run| run.variant == name).unwrap_or_else(|| panic!("{name}"))
    };
    let (small, large) = (find("paged-400KiB-guaranteed"), find("paged-2MiB-guaranteed"));
    // Who is served faster runs beside fewer others, so this says nothing about how many run.
    assert!(small.first_token_ms.p99 >= large.first_token_ms.p99);
    assert!(small.hit_rate <= large.hit_rate && large.hit_rate > 0.2);
    assert!(small.goodput_per_s <= large.goodput_per_s);
    let slots = find("contiguous-2MiB-guaranteed");
    assert!(slots.mean_slot_waste_bytes > large.mean_block_waste_bytes);
    assert!(slots.mean_block_waste_bytes < 1.0 && large.mean_slot_waste_bytes < 1.0);
    assert!(!find("dynamic-400KiB").prefix_reuse && find("dynamic-400KiB").hit_rate == 0.0);
    // When all come at once, some wait for a run of memory.
    let at_once = CHAT.replace("arrivals = 'poisson'\n    requests_per_s = 100.0", "");
    let variant = "variant = [{ name = 'd', mode = 'dynamic', capacity = 'budget:300 KiB' }]";
    let report = run(&source(&[variant, MODEL, &at_once]));
    let dynamic = done(&report)[0];
    assert!(dynamic.alloc_failures > 0 && dynamic.requests_completed == 60);
    assert!(dynamic.alloc_failures_with_room <= dynamic.alloc_failures);
    assert!(dynamic.alloc_failures_with_room > 0 && dynamic.worst_free_bytes > 0);
    assert_eq!(dynamic.free_without_1gb_run, 0, "the pool has no gigabyte");
}

#[test]
fn a_file_of_prompts_is_said_to_be_for_run() {
    let mut prompts = source(&[MODEL.split("cost =").next().expect("the rest")]);
    let plain = replay(&prompts, &ReplayOptions::default(), &Silent).expect_err("nothing to run");
    assert!(plain.to_string().contains("no [workload] section and no [generate]"), "{plain}");
    let generate = "{\"engine\": \"model\", \"prompts\": \"prompts.jsonl\"}";
    prompts.config.generate = Some(serde_json::from_str(generate).expect("a table"));
    let replayed = replay(&prompts, &ReplayOptions::default(), &Silent).expect_err("of a model");
    let computed = kvpool::job::run(&prompts, &mut Silent).expect_err("of a model");
    for error in [replayed, computed] {
        let error = error.to_string();
        assert!(error.contains("has [generate] and no [workload]; use `kvpool run`"), "{error}");
    }
}

/// A trace whose prompts share blocks, a line every `gap` milliseconds.
fn hashed_trace(gap: u32) -> String {
    let prompts: [(u32, &[u32]); 5] = [
        (1500, &[0, 1, 2]),
        (1500, &[0, 1, 2]),
        (1300, &[0, 1, 3]),
        (2100, &[0, 1, 2, 4, 5]),
        (600, &[6, 7]),
    ];
    let mut text = String::new();
    for (at, (tokens, ids)) in (0..).zip(prompts) {
        writeln!(
            text,
            "{{\"timestamp\": {}, \"input_length\": {tokens}, \"output_length\": 4, \"hash_ids\": {ids:?}}}",
            at * gap
        )
        .unwrap();
    }
    text
}

#[test]
fn a_pool_that_is_large_enough_hits_what_an_infinite_cache_hits() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("t.jsonl");
    let workload = format!(
        "[workload]\nkind = 'mooncake-jsonl'\ncompute = 'none'\npath = '{}'\narrivals = 'trace'\n",
        path.display()
    );
    let model = "
        model = { num_layers = 1, num_q_heads = 1, num_kv_heads = 1, head_dim = 16 }
        limits = { max_seqs = 4, max_seq_len = 4096, max_batch_tokens = 512 }
        cache = { mode = 'paged', tokens_per_block = 16 }
        cost = { bandwidth = '1 GB', step_us = 10.0, weight_bytes = 1 }
        variant = [{ name = 'large', capacity = 'tokens:16000' }, { name = 'small', capacity = 'tokens:2200' }]";
    std::fs::write(&path, hashed_trace(60_000)).expect("written");
    let report = run(&source(&[model, &workload]));
    let [large, small] = done(&report)[..] else { panic!("two") };
    // 1500 - 1 (the last token is computed), 1024, 1500; nothing of the first and the last.
    assert_eq!(report.workload.repeated_tokens, 1500 + 1024 + 1500);
    assert_eq!(large.prefix_hit_tokens, 1499 + 1024 + 1500);
    assert!(small.prefix_hit_tokens <= large.prefix_hit_tokens);
    assert!(small.evictions > 0 && large.evictions == 0, "{} {}", small.evictions, large.evictions);
    assert!(large.simulated_s > 240.0 && large.busy_s < 1.0, "it waits for who is to come");
    // All at the same time: who comes second finds nothing yet.
    std::fs::write(&path, hashed_trace(0)).expect("written");
    let report = run(&source(&[model, &workload]));
    assert!(done(&report)[0].prefix_hit_tokens < 1499 + 1024 + 1500);
}

#[test]
fn edge_12_what_cannot_fit_is_said_before_anything_runs_and_the_others_run() {
    let variants = "variant = [{ name = 'none', mode = 'contiguous', capacity = 'tokens:100' },
                               { name = 'tight', capacity = 'tokens:64' }, { name = 'fine' }]";
    let report = run(&source(&[variants, MODEL, CHAT]));
    let Replayed::Failed(none) = &report.runs[0] else { panic!("{:?}", report.runs[0].variant()) };
    assert!(none.error.contains("variant \"none\": pool.capacity: 100 tokens"), "{}", none.error);
    let Replayed::Done(tight) = &report.runs[1] else { panic!("it runs") };
    assert!(tight.requests_refused_never_fits > 0 && tight.requests_completed > 0);
    assert_eq!(tight.requests_refused_never_fits + tight.requests_completed, 60);
    assert!(tight.first_refusal.as_ref().is_some_and(|why| why.contains("raise pool.capacity")));
    let Replayed::Done(fine) = &report.runs[2] else { panic!("it runs") };
    assert_eq!(fine.requests_completed, 60);
    assert_eq!(problems(&report).len(), 1);
}

#[test]
fn shards_are_the_whole_and_what_is_done_is_not_done_again() {
    let source = source(&[MODEL, CHAT, VARIANTS]);
    let whole = run(&source);
    let shard = |k: usize| {
        let options = ReplayOptions { shard: Some((k, 3)), ..ReplayOptions::default() };
        replay(&source, &options, &Silent).expect("runs")
    };
    let shards: Vec<Replay> = (1..=3).map(shard).collect();
    assert!(shards.iter().all(|shard| shard.runs.len() >= whole.runs.len() / 3));
    assert_eq!(json(&merge(shards.clone()).expect("one job")), json(&whole));
    // A result that is there is taken over as it is, and only where its settings are the same.
    let mut before = shards[0].clone();
    for run in &mut before.runs {
        if let Replayed::Done(run) = run {
            run.evictions = 777_777;
        }
    }
    let resume = |source: &Source| {
        let options = ReplayOptions { done: &before.runs, ..ReplayOptions::default() };
        let report = replay(source, &options, &Silent).expect("runs");
        done(&report).iter().filter(|run| run.evictions == 777_777).count()
    };
    assert_eq!(resume(&source), before.runs.len());
    // Of another workload there is nothing to go on with.
    let other = CHAT.replace("requests = 60", "requests = 59");
    let options = ReplayOptions { done: &before.runs, ..ReplayOptions::default() };
    let error = replay(&self::source(&[MODEL, &other, VARIANTS]), &options, &Silent);
    assert!(matches!(error, Err(kvpool::error::JobError::OtherJob)), "{error:?}");
}

#[test]
fn an_interrupted_replay_keeps_what_is_complete() {
    let stop = std::sync::atomic::AtomicBool::new(true);
    let options = ReplayOptions { stop: Some(&stop), ..ReplayOptions::default() };
    let report = replay(&source(&[MODEL, CHAT, VARIANTS]), &options, &Silent).expect("stops");
    assert_eq!((report.runs.len(), report.variants), (0, 14));
}

#[test]
fn think_time_passes_and_conversations_wait() {
    let turns = CHAT
        .replace(
            "arrivals = 'poisson'\n    requests_per_s = 100.0",
            "
        turns = { dist = 'fixed', value = 3 }
        think_ms = { dist = 'fixed', value = 1000 }
        max_open_conversations = 4",
        )
        .replace("max = 60", "max = 10");
    let report = run(&source(&[MODEL, &turns]));
    let run = done(&report)[0];
    assert!(run.requests_completed + run.requests_refused_too_long == 60);
    // Five rounds of four conversations, each with two pauses.
    assert!(run.simulated_s > 9.9 && run.simulated_s < 12.0, "{}", run.simulated_s);
    assert!(run.peak_running <= 4 && run.hit_rate > 0.4);
}

#[test]
fn other_answers_are_forks_that_share_their_prompt() {
    let answers = "
    [workload]
    kind = 'generator'
    compute = 'none'
    seed = 3
    requests = 80
    answers = { dist = 'uniform', min = 1, max = 4 }
    prompt_tokens = { dist = 'uniform', min = 20, max = 90 }
    output_tokens = { dist = 'uniform', min = 1, max = 60 }
    arrivals = 'poisson'
    requests_per_s = 100.0
    ";
    let large = VARIANTS.replace("['budget:400 KiB', 'budget:2 MiB']", "['budget:2 MiB']");
    let model = MODEL.replace("tokens_per_block = 8", "prefix_reuse = false, tokens_per_block = 8");
    let report = run(&source(&[&model, answers, &large]));
    assert!(problems(&report).is_empty(), "{:?}", problems(&report));
    for run in done(&report) {
        let name = &run.variant;
        assert_eq!(run.requests_completed, 80, "{name}");
        if name.starts_with("dynamic") {
            assert_eq!((run.forks, run.prefix_hit_tokens), (0, 0), "{name}");
            continue;
        }
        assert!(run.forks > 20, "{name}: {}", run.forks);
        // A prompt is computed once for all that were forked from it.
        assert!(run.prefix_hit_tokens >= 20 * run.forks, "{name}");
        assert_eq!(
            run.computed_tokens,
            run.prompt_tokens + run.output_tokens - run.prefix_hit_tokens,
            "{name}"
        );
        // Of a block that is shared each fork has a copy before it writes, and no more; of a slot
        // all is copied at once.
        let block = 8 * run.bytes_per_token;
        assert!(run.copied_bytes > 0, "{name}");
        if name.starts_with("paged") {
            assert!(run.copied_bytes <= 2 * block * run.forks, "{name}: {}", run.copied_bytes);
        }
    }
}

#[test]
fn answers_whose_first_is_refused_run_all_the_same() {
    // The first answer is the longest: of many prompts it is refused, and shorter ones are not.
    let answers = "
    [workload]
    kind = 'generator'
    compute = 'none'
    seed = 3
    requests = 80
    answers = { dist = 'fixed', value = 4 }
    prompt_tokens = { dist = 'uniform', min = 20, max = 90 }
    output_tokens = { dist = 'uniform', min = 100, max = 240 }
    arrivals = 'poisson'
    requests_per_s = 10.0
    ";
    let variants = "
    [[sweep]]
    mode = ['contiguous', 'paged', 'hybrid', 'dynamic']
    capacity = ['tokens:2048', 'tokens:1024']
    ";
    let report = run(&source(&[MODEL, answers, variants]));
    assert!(problems(&report).is_empty(), "{:?}", problems(&report));
    for run in done(&report) {
        let name = &run.variant;
        let refused = run.requests_refused_too_long + run.requests_refused_never_fits;
        assert_eq!(run.requests_completed + refused, 80, "{name}");
        assert!(refused > 5 && run.requests_completed > 40, "{name}: {refused}");
        assert_eq!(run.forks > 0, !name.starts_with("dynamic"), "{name}: {}", run.forks);
    }
}

#[test]
fn edge_33_rates_are_0_for_nothing_and_never_above_the_ceiling() {
    // Every prompt is the same: all but the first are found, up to their last token.
    let same = CHAT.replace("'fixed', value = 30", "'fixed', value = 80").replace(
        "{ dist = 'lognormal', median = 30, sigma = 0.8, min = 1, max = 90 }",
        "{ dist = 'fixed', value = 1 }",
    );
    let same = same.replace("num_shared_prefixes = 2", "num_shared_prefixes = 1");
    let variants = "
    [[variant]]
    name = 'on'
    [[variant]]
    name = 'off'
    prefix_reuse = false
    [[variant]]
    name = 'one-block-more'
    capacity = 'tokens:160'
    ";
    let report = run(&source(&[MODEL, &same, variants]));
    let [on, off, tight] = done(&report)[..] else { panic!("three") };
    assert!(on.hit_rate > 0.9 && on.hit_rate <= on.ceiling_hit_rate, "{}", on.hit_rate);
    assert_eq!((off.hit_rate, off.prefix_hit_tokens), (0.0, 0));
    assert!(tight.hit_rate <= tight.ceiling_hit_rate && tight.requests_completed == 60);
    // Nothing was admitted: nothing hit, nothing used, and no rate is a fraction of nothing.
    let none = "variant = [{ name = 'none', capacity = 'tokens:64' }]";
    let report = run(&source(&[none, MODEL, &same]));
    let none = done(&report)[0];
    assert_eq!((none.requests_completed, none.hit_rate, none.utilization), (0, 0.0, 0.0));
    assert!(!json(&report).contains("null,\n  \"hit_rate\"") && none.requests_per_s == 0.0);
}

#[test]
fn dynamic_allocation_comes_to_free_gigabytes_without_a_piece_of_one() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/claims/b-fragmentation.toml");
    let report = run(&load(&path, &["workload.requests=2500".to_owned()]).expect("there"));
    let [dynamic, paged] = done(&report)[..] else { panic!("two") };
    assert!(dynamic.free_without_1gb_run > 20_000_000_000, "{}", dynamic.free_without_1gb_run);
    assert!(dynamic.alloc_failures_with_room > 50, "{}", dynamic.alloc_failures_with_room);
    assert_eq!((paged.alloc_failures, paged.free_without_1gb_run), (0, 0));
    assert!(paged.mean_running > dynamic.mean_running);
}

#[test]
fn the_claims_can_be_replayed() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/claims");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).expect("there") {
        let path = entry.expect("an entry").path();
        let few: &[String] =
            if path.ends_with("a-bytes.toml") { &[] } else { &["workload.requests=40".to_owned()] };
        let source = load(&path, few).unwrap_or_else(|error| panic!("{error}"));
        let report = run(&source);
        assert!(problems(&report).is_empty(), "{}: {:?}", path.display(), problems(&report));
        assert!(done(&report).len() > 1, "{}", path.display());
        count += 1;
    }
    assert!(count >= 10, "(a) to (j)");
}

#[test]
fn mooncakes_ceiling_is_counted_exactly() {
    let trace = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../shared/data/traces/mooncake/conversation_trace.jsonl");
    if !trace.exists() {
        println!("skipped: {} is not there", trace.display());
        return;
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/replay/mooncake.toml");
    let overrides = [
        format!("workload.path={}", trace.display()),
        "sweep=".to_owned(),
        "workload.requests=300".to_owned(),
    ];
    let report = run(&load(&path, &overrides).unwrap_or_else(|error| panic!("{error}")));
    let run = done(&report)[0];
    assert_eq!((report.workload.requests, run.requests_completed), (300, 300));
    assert!(
        run.ceiling_hit_rate - run.hit_rate < 0.05,
        "{} of {}",
        run.hit_rate,
        run.ceiling_hit_rate
    );
}
