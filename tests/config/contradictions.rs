//! Group 64: settings that contradict each other.

use kvpool::config::contiguous_set;
use kvpool::plan::Plan;

use super::{GOOD, INT8, JOB, read, refused, refused_line, with_line};

#[test]
fn edge_64_scales_for_a_cache_that_is_not_int8() {
    let text = with_line(INT8, 12, "format = \"f16\"");
    let parts = ["cache.format = \"f16\" has none", "; remove [cache.int8], or write"];
    refused(&text, "t.toml:13: cache.int8: holds scales", &parts);
    let parts = ["\"per-token-head\" computes its scales", "or write cache.int8.scale"];
    let text = with_line(INT8, 14, "");
    refused(&text, "t.toml:15: cache.int8.k_scale: ", &parts);
}

#[test]
fn edge_64_one_model_only() {
    let text = with_line(GOOD, 2, "num_layers = 4\npreset = \"llama-3-8b\"");
    refused(&text, "t.toml:2: model.num_layers: model.preset is given too", &["; remove"]);
    let line = "preset = \"gemma-3-1b\"\nhf_config = \"c.json\"";
    refused(&with_line(JOB, 2, line), "t.toml:3: model.hf_config: model.preset is given", &[]);
    refused(&with_line(JOB, 2, ""), "t.toml:1: model: names no model; give model.preset", &[]);
    let near = "there is no preset \"gemma-3-1B\"; did you mean \"gemma-3-1b\"?";
    refused_line(JOB, 2, "preset = \"gemma-3-1B\"", "model.preset", &[near, "llama-2-7b"]);
    let text = with_line(GOOD, 6, "sink_tokens = 4");
    refused(&text, "t.toml:6: model.sink_tokens: is 4, and no layer", &["; remove it"]);
}

/// The sinks in whole blocks are counted in 32 bits.
#[test]
fn edge_64_more_sinks_than_any_sequence_has_tokens() {
    let sinks = |count: u32| {
        with_line(GOOD, 6, &format!("attention_window = [16, 0]\nsink_tokens = {count}"))
    };
    for count in [16_777_217, u32::MAX - 7, u32::MAX] {
        let problem = format!("t.toml:7: model.sink_tokens: {count} is out of range");
        refused(&sinks(count), &problem, &["; expected a whole number of tokens from 0 to 16,777"]);
    }
    read(&sinks(16_777_216)).expect("the largest");
}

#[test]
fn edge_64_limits_that_exclude_each_other() {
    let line = "max_batch_tokens = 256\nmax_step_tokens = 257";
    let text = with_line(GOOD, 11, line);
    let parts = ["limits.max_batch_tokens is 256", "expected a whole number of tokens from 1"];
    refused(&text, "t.toml:12: limits.max_step_tokens: 257 is out of range", &parts);
    let text = with_line(GOOD, 11, "max_batch_tokens = 256\nmax_rewind_tokens = 513");
    let parts = ["limits.max_seq_len is 512", "expected a whole number of tokens from 0"];
    refused(&text, "t.toml:12: limits.max_rewind_tokens: 513 is out of range", &parts);
}

#[test]
fn edge_64_contiguous_layers_belong_to_a_hybrid() {
    let hybrid = |mode: &str, layers: &str| {
        let text = with_line(GOOD, 14, &format!("mode = \"{mode}\""));
        format!("{text}\n[cache.hybrid]\ncontiguous_layers = {layers}\n")
    };
    let start =
        "t.toml:23: cache.hybrid: names contiguous layers, and cache.mode = \"paged\"; remove";
    refused(&hybrid("paged", "\"first:1\""), start, &["cache.mode = \"hybrid\""]);
    for (layers, problem) in [
        ("\"all\"", "\"all\" names no layers; expected \"windowed\""),
        ("\"first:5\"", "\"first:5\" is out of range; the model has 4 layers; expected"),
        ("\"2..2\"", "\"2..2\" is an empty range of layers; expected"),
        ("[]", "is an empty list; expected"),
        ("[1, 1]", "layer 1 is listed twice; expected"),
        ("[4]", "layer 4 does not exist; the model has 4, counted from 0; expected"),
        ("7", "found the integer 7; expected \"windowed\""),
        (
            "\"first:4\"",
            "\"first:4\" names all 4 layers, so none would be paged; name fewer layers, or write cache.mode = \"contiguous\"",
        ),
        ("[0, 1, 2, 3]", "the list names all 4 layers"),
    ] {
        let start = format!("t.toml:24: cache.hybrid.contiguous_layers: {problem}");
        refused(&hybrid("hybrid", layers), &start, &[]);
    }
    let source = read(&hybrid("hybrid", "\"1..3\"")).unwrap();
    assert_eq!(contiguous_set(&source.config, &source.geometry), [false, true, true, false]);
    let none = with_line(&with_line(GOOD, 6, ""), 14, "mode = \"hybrid\"");
    refused(
        &none,
        "t.toml:13: cache.hybrid.contiguous_layers: \"windowed\" names no layer",
        &["write cache.mode = \"paged\""],
    );
}

#[test]
fn edge_64_workload_keys_of_another_kind() {
    let of_generator = "does not belong to workload.kind = \"generator\"; remove it";
    refused_line(JOB, 11, "path = \"t.csv\"", "workload.path", &[of_generator]);
    refused_line(JOB, 11, "length_scale = 1.0", "workload.length_scale", &[of_generator]);
    let text = with_line(JOB, 11, "");
    refused(&text, "t.toml:9: workload.requests: is missing; workload.kind = \"generator\"", &[]);
    let text = with_line(&with_line(JOB, 10, "kind = \"azure-csv\""), 11, "path = \"t.csv\"");
    refused(&text, "t.toml:12: workload.prompt_tokens: does not belong to workload.kind", &[]);
    let text = with_line(&with_line(&text, 12, "length_scale = 0.5"), 13, "requests = 9");
    assert!(read(&text).is_ok());
    refused_line(
        &text,
        12,
        "length_scale = 2.0",
        "workload.length_scale",
        &["2 is out of range", "at most 1"],
    );

    for (distribution, key, problem) in [
        ("{ dist = \"uniform\", min = 9, max = 8 }", ".min", "is 9, more than max = 8"),
        ("{ dist = \"uniform\", min = 0, max = 8 }", ".min", "is 0"),
        ("{ dist = \"uniform\", min = 1 }", ".max", "is missing"),
        ("{ dist = \"fixed\", value = 8, min = 1 }", ".min", "does not belong to dist = \"fixed\""),
        ("{ dist = \"fixed\", value = 8.5 }", ".value", "found the float 8.5"),
        ("{ dist = \"normal\" }", ".dist", "found the string \"normal\""),
        (
            "{ dist = \"lognormal\", median = 9, sigma = -1.0, min = 1, max = 9 }",
            ".sigma",
            "-1 is not",
        ),
        ("8", "", "found the integer 8"),
    ] {
        let line = format!("prompt_tokens = {distribution}");
        let key = format!("workload.prompt_tokens{key}");
        refused_line(JOB, 12, &line, &key, &[problem, "; expected "]);
    }
}

#[test]
fn edge_64_events_of_a_cache_that_reuses_nothing() {
    let text = with_line(GOOD, 16, "prefix_reuse = false\nevent_buffer = 64");
    let parts = ["; remove it, or write cache.prefix_reuse = true"];
    let start = "t.toml:17: cache.event_buffer: is 64, and cache.prefix_reuse = false has no";
    refused(&text, start, &parts);
    assert!(read(&text.replace("= false", "= true")).is_ok());
    assert!(read(&text.replace("event_buffer = 64", "event_buffer = 0")).is_ok());
    // In a variant: what it says itself is refused, what it has from the file is dropped.
    let text = with_line(JOB, 16, "prefix_reuse = false\nevent_buffer = 64");
    refused(&text, "t.toml:17: variant.0.event_buffer: is 64, and cache.prefix", &parts);
    let text = with_line(JOB, 8, "mode = \"hybrid\"\nevent_buffer = 64");
    let text = with_line(&text, 17, "prefix_reuse = false");
    let variants = read(&text).unwrap().variants();
    let sharing: Vec<_> = variants
        .iter()
        .map(|(_, config)| (config.cache.prefix_reuse, config.cache.event_buffer))
        .collect();
    assert_eq!(sharing, [(false, 0), (true, 64)]);
}

#[test]
fn edge_64_a_watermark_where_blocks_are_promised() {
    let parts = ["; remove it, or write cache.admission = \"max-utilization\""];
    for (admission, shown) in [
        ("", "\"guaranteed\" promises every block"),
        ("admission = \"guaranteed\"", "\"guaranteed\" promises every block"),
        ("admission = \"static-batch\"", "\"static-batch\" promises every block"),
    ] {
        let text = with_line(GOOD, 16, &format!("{admission}\nwatermark_blocks = 8"));
        let start =
            format!("t.toml:17: cache.watermark_blocks: is 8, and cache.admission = {shown}");
        refused(&text, &start, &parts);
    }
    let text = with_line(GOOD, 16, "admission = \"max-utilization\"\nwatermark_blocks = 8");
    assert_eq!(read(&text).unwrap().config.cache.watermark_blocks, 8);
    let text = with_line(JOB, 16, "watermark_blocks = 8");
    refused(&text, "t.toml:16: variant.0.watermark_blocks: is 8, and", &parts);
    let line = "mode = \"hybrid\"\nadmission = \"max-utilization\"\nwatermark_blocks = 8";
    let text = with_line(&with_line(JOB, 8, line), 18, "admission = \"static-batch\"");
    let variants = read(&text).unwrap().variants();
    let marks: Vec<u32> = variants.iter().map(|(_, c)| c.cache.watermark_blocks).collect();
    assert_eq!(marks, [0, 8]);
}

#[test]
fn edge_64_blocks_and_events_of_contiguous_layers() {
    let contiguous = GOOD.replace("\"paged\"", "\"contiguous\"");
    let text = with_line(
        &contiguous,
        16,
        "admission = \"max-utilization\"\nwatermark_blocks = 8\nevent_buffer = 0",
    );
    let start = "t.toml:17: cache.watermark_blocks: is 8, and cache.mode = \"contiguous\" has no";
    refused(&text, start, &["; remove it, or write cache.mode = \"paged\" or \"hybrid\""]);
    let parts = ["no prefix index", "; remove it, or make the layers without a window paged"];
    let start = "t.toml:16: cache.event_buffer: is 64, and ";
    let contiguous = with_line(&contiguous, 16, "event_buffer = 64");
    refused(&contiguous, &format!("{start}cache.mode = \"contiguous\" has no blocks"), &parts);
    // Paged layers that all have a window, which is one as long as it is shorter than a sequence.
    let windows = GOOD.replace("[128, 0]", "[128, 256]");
    let windows = with_line(&windows, 16, "event_buffer = 64");
    refused(&windows, &format!("{start}every paged layer has a window"), &parts);
    let rings = windows.replace("256]", "0]").replace("\"paged\"", "\"hybrid\"");
    let swapped = format!("{rings}\n[cache.hybrid]\ncontiguous_layers = [1, 3]\n");
    refused(&swapped, &format!("{start}every paged layer has a window"), &parts);
    for good in [rings, windows.replace("256]", "512]"), windows.replace("256]", "0]")] {
        let source = read(&good).unwrap();
        let plan = Plan::new(&source.config, &source.geometry).unwrap();
        assert!(plan.reuse.lead.is_some() && plan.event_buffer == 64, "{good}");
    }
    // A variant that is contiguous leaves out what the file says for the others.
    let line = "mode = \"hybrid\"\nadmission = \"max-utilization\"\nwatermark_blocks = 8\n\
                event_buffer = 64";
    let text = with_line(&with_line(JOB, 8, line), 19, "mode = \"contiguous\"");
    let variants = read(&text).unwrap().variants();
    let both: Vec<_> = variants
        .iter()
        .map(|(_, config)| (config.cache.watermark_blocks, config.cache.event_buffer))
        .collect();
    assert_eq!(both, [(0, 0), (8, 64)]);
}

#[test]
fn edge_64_counts_of_what_the_workload_does_not_share() {
    let of = |line: &str, key: &str, parts: &[&str]| {
        let text = with_line(JOB, 11, &format!("requests = 8\n{line}"));
        refused(&text, &format!("t.toml:12: {key}: "), parts);
    };
    let key = "workload.num_shared_prefixes";
    of("num_shared_prefixes = 4", key, &["without workload.shared_prefix_tokens; remove it, or"]);
    let key = "workload.max_open_conversations";
    of("max_open_conversations = 4", key, &["means nothing without workload.turns; remove it, or"]);
    let shared = "requests = 8\nshared_prefix_tokens = { dist = \"fixed\", value = 32 }\n\
                  turns = { dist = \"uniform\", min = 1, max = 4 }";
    let with = |line: &str| with_line(JOB, 11, &format!("{shared}\n{line}"));
    assert!(read(&with("num_shared_prefixes = 4\nmax_open_conversations = 2")).is_ok());
    for (line, problem) in [
        ("num_shared_prefixes = 0", "workload.num_shared_prefixes: 0 is out of range; expected"),
        ("num_shared_prefixes = 1_000_001", "workload.num_shared_prefixes: 1000001 is out of"),
        ("max_open_conversations = 0", "workload.max_open_conversations: 0 is out of range; exp"),
    ] {
        refused(&with(line), &format!("t.toml:14: {problem}"), &[]);
    }
    let line = "turns = { dist = \"uniform\", min = 0, max = 4 }";
    of(line, "workload.turns.min", &["is 0, and must be at least 1; expected"]);
    of("turns = 4", "workload.turns", &["found the integer 4; expected how many turns"]);
    of("shared_prefix_tokens = 4", "workload.shared_prefix_tokens", &["found the integer 4"]);
    of("shared_prefix_token = 4", "workload.shared_prefix_token", &["mean shared_prefix_tokens?"]);
    // A trace has its own lengths.
    let trace = "[workload]\nkind = \"azure-csv\"\npath = \"t.csv\"\n\
                 turns = { dist = \"fixed\", value = 2 }\n";
    let start = "t.toml:26: workload.turns: does not belong to workload.kind = \"azure-csv\"";
    refused(&format!("{GOOD}{trace}"), start, &["; remove it"]);
}

#[test]
fn edge_64_variants_are_checked_like_files() {
    let scale = ["the variant's format is f32, which has no scales", "or give the variant format"];
    let text = with_line(JOB, 19, "format = \"f32\"");
    refused(&text, "t.toml:20: variant.1.scale: ", &scale);
    let text = with_line(JOB, 16, "mode = \"paged\"\ncontiguous_layers = [0]");
    let parts = ["the variant's mode is paged", "or give the variant mode = \"hybrid\""];
    refused(&text, "t.toml:17: variant.0.contiguous_layers: ", &parts);
    refused_line(JOB, 16, "threads = 1025", "variant.0.threads", &["out of range", "to 1024"]);
    refused_line(
        JOB,
        16,
        "capacity = \"24\"",
        "variant.0.capacity",
        &["is no capacity", "tokens:N"],
    );
    refused_line(JOB, 16, "tokens_per_block = 12", "variant.0.tokens_per_block", &["expected 8"]);
    refused_line(
        JOB,
        16,
        "contiguous_layers = [26]",
        "variant.0.contiguous_layers",
        &["26 does not"],
    );
    refused_line(JOB, 18, "name = \"a\"", "variant.1.name", &["is the name of variant.0 too"]);
    refused_line(JOB, 18, "name = \"\"", "variant.1.name", &["is empty; expected a name"]);
    // What the variant does not set itself, but breaks.
    let text = with_line(JOB, 20, "scale = \"per-tensor\"");
    let start = "t.toml:17: variant.1: with variant \"b\", cache.int8.k_scale: is missing";
    refused(&text, start, &["expected a finite number"]);
}
