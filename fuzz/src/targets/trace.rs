//! A trace of each kind. The first byte chooses the kind and how it is read; the rest is the file.

use std::path::Path;
use std::sync::{LazyLock, Mutex};

use kvpool::config::parse;
use kvpool::job::workload::requests;
use libfuzzer_sys::Corpus;

use crate::scratch::Scratch;

static FILE: LazyLock<Mutex<Scratch>> = LazyLock::new(|| Mutex::new(Scratch::new("trace")));

/// A job that reads a trace and computes nothing.
const JOB: &str = "
model = { num_layers = 1, num_q_heads = 1, num_kv_heads = 1, head_dim = 8 }
limits = { max_seqs = 4, max_seq_len = 4096, max_batch_tokens = 4096 }
cache = { mode = 'paged' }
cost = { bandwidth = '1 TB', step_us = 100.0, weight_bytes = '1 GB' }
";

/// Runs one input.
pub(super) fn run(input: &[u8]) -> Corpus {
    let Some((choice, file)) = input.split_first() else { return Corpus::Reject };
    let kind =
        ["azure-csv", "lengths-csv", "mooncake-jsonl", "openai-jsonl"][usize::from(choice & 3)];
    let mut workload =
        format!("workload = {{ kind = '{kind}', compute = 'none', requests = 64, path = 'x'");
    if choice & 4 != 0 {
        workload += ", skip_damaged_lines = true";
    }
    if choice & 8 != 0 {
        workload += ", arrivals = 'trace'";
        if choice & 16 != 0 {
            workload += ", time_scale = 0.5";
        }
    }
    if choice & 32 != 0 && kind == "lengths-csv" {
        workload +=
            ", columns = { prompt = 'p', output = 'o', arrival = 'a', arrival_unit = 'ms' }";
    }
    if choice & 64 != 0 {
        workload += ", length_scale = 0.25";
    }
    if choice & 128 != 0 && kind == "openai-jsonl" {
        workload += ", output_tokens = { dist = 'uniform', min = 1, max = 9 }";
    }
    workload += " }\n";
    let Ok(source) = parse(&format!("{JOB}{workload}"), Path::new("fuzz.toml"), &[]) else {
        // Settings that do not go together.
        return Corpus::Reject;
    };
    let mut config = source.config.workload.expect("a workload");
    let mut scratch = FILE.lock().expect("one thread");
    config.path = Some(scratch.fill(file).to_owned());
    match requests(&config) {
        Ok(requests) => {
            let whole =
                |r: &kvpool::job::workload::Request| r.prompt_tokens > 0 && r.output_tokens > 0;
            assert!(requests.list.iter().all(whole));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    Corpus::Keep
}
