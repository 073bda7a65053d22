//! The configuration file as its author meets it: every mistake is reported with its file, line,
//! key, and what was expected.

mod contradictions;
mod files;
mod mistakes;
mod model;
mod model_file;
mod replays;

use std::path::Path;

use kvpool::config::{
    CacheMode, Config, Format, LengthDistribution, Source, contiguous_set, parse,
};
use kvpool::error::ConfigError;

/// A valid file to break. Its lines are numbered in the tests.
const GOOD: &str = "\
[model]
num_layers = 4
num_q_heads = 8
num_kv_heads = 2
head_dim = 64
attention_window = [128, 0]

[limits]
max_seqs = 4
max_seq_len = 512
max_batch_tokens = 256

[cache]
mode = \"paged\"
tokens_per_block = 16
format = \"f16\"

[pool]
capacity = \"worst-case\"

[device]
threads = 2
";

/// An INT8 file with static scales.
const INT8: &str = "\
[model]
num_layers = 2
num_q_heads = 8
num_kv_heads = 2
head_dim = 64
[limits]
max_seqs = 4
max_seq_len = 512
max_batch_tokens = 256
[cache]
mode = \"paged\"
format = \"int8\"
[cache.int8]
scale = \"per-tensor\"
k_scale = 0.5
v_scale = [
  0.25,
  0.125,
]
";

/// A file with a workload and variants.
const JOB: &str = "\
[model]
preset = \"gemma-3-1b\"
[limits]
max_seqs = 4
max_seq_len = 512
max_batch_tokens = 256
[cache]
mode = \"hybrid\"
[workload]
kind = \"generator\"
requests = 8
prompt_tokens = { dist = \"uniform\", min = 16, max = 64 }
output_tokens = { dist = \"fixed\", value = 8 }
[[variant]]
name = \"a\"
mode = \"paged\"
[[variant]]
name = \"b\"
format = \"int8\"
scale = \"per-group-32\"
";

fn read(text: &str) -> Result<Source, ConfigError> {
    parse(text, Path::new("t.toml"), &[])
}

/// The text with one line replaced, which is counted from 1.
fn with_line(text: &str, line: usize, replacement: &str) -> String {
    let mut lines: Vec<&str> = text.lines().collect();
    lines[line - 1] = replacement;
    lines.join("\n")
}

/// Asserts that the message names file and line, key, problem and expectation.
#[track_caller]
fn refused(text: &str, start: &str, parts: &[&str]) {
    let message = match read(text) {
        Err(error) => error.to_string(),
        Ok(_) => panic!("accepted: {text}"),
    };
    assert!(message.starts_with(start), "{message}\nshould start with\n{start}");
    for part in parts {
        assert!(message.contains(part), "{message}\nshould contain\n{part}");
    }
}

/// [`refused`] for a file of which one line is replaced.
#[track_caller]
fn refused_line(text: &str, line: usize, replacement: &str, key: &str, parts: &[&str]) {
    refused(&with_line(text, line, replacement), &format!("t.toml:{line}: {key}: "), parts);
}

#[test]
fn a_good_file_is_read_as_it_stands() {
    let source = read(JOB).unwrap();
    let workload = source.config.workload.clone().unwrap();
    assert_eq!((workload.seed, workload.check_samples), (0, 64));
    let prompts = LengthDistribution::Uniform { min: 16, max: 64 };
    assert_eq!(workload.prompt_tokens, Some(prompts));

    let variants = source.variants();
    let names: Vec<&str> = variants.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["a", "b"]);
    assert_eq!(variants[0].1.cache.mode, CacheMode::Paged);
    assert_eq!(variants[1].1.cache.format, Format::Int8);
    assert_eq!(contiguous_set(&variants[0].1, &source.geometry), [false; 26]);
    let windowed = contiguous_set(&variants[1].1, &source.geometry);
    assert_eq!(windowed.iter().filter(|contiguous| **contiguous).count(), 22);

    let good = read(GOOD).unwrap();
    let variants = good.variants();
    assert_eq!(variants, [("default".to_owned(), good.config)]);
}

/// `kvpool config` prints these, so that nobody has to know what is left out.
#[test]
fn what_is_left_out_is_written() {
    let text = toml::to_string_pretty(&read(GOOD).unwrap().config).unwrap();
    for line in [
        "admission = \"guaranteed\"",
        "watermark_blocks = 0",
        "prefix_reuse = true",
        "event_buffer = 0",
    ] {
        assert!(text.lines().any(|written| written == line), "{line}: {text}");
    }
}

#[test]
fn a_config_is_written_as_toml_that_reads_back() {
    let more = [
        "device.memory_limit=24 GiB",
        "pool.capacity=budget:1.5 GiB",
        "limits.max_step_tokens=64",
        "model.sink_tokens=4",
        "workload.seed=9223372036854775807",
        "workload.output_tokens={ dist='lognormal', median=0.1, sigma=0.3, min=1, max=9 }",
        "variant.1.contiguous_layers=[0, 7]",
        "variant.0.capacity=tokens:4096",
        "cache.prefix_reuse=false",
        "variant.0.prefix_reuse=true",
        "variant.0.event_buffer=64",
        "variant.1.admission=max-utilization",
        "variant.1.watermark_blocks=3",
        "workload.shared_prefix_tokens={ dist='uniform', min=8, max=64 }",
        "workload.num_shared_prefixes=3",
        "workload.turns={ dist='lognormal', median=2.5, sigma=0.3, min=1, max=9 }",
        "workload.max_open_conversations=2",
    ];
    let full = parse(JOB, Path::new("t.toml"), &more.map(str::to_owned)).unwrap();
    let odd_scale = read(&with_line(INT8, 15, "k_scale = 0.1")).unwrap();
    for source in [full, odd_scale, read(GOOD).unwrap()] {
        for config in std::iter::once(source.config.clone())
            .chain(source.variants().into_iter().map(|(_, config)| config))
        {
            let text = toml::to_string_pretty(&config).unwrap();
            let again: Config =
                read(&text).unwrap_or_else(|error| panic!("{error}\n{text}")).config;
            assert_eq!(again, config, "{text}");
        }
    }
}
