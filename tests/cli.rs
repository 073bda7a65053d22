//! The command `kvpool`: what it prints, where, and with which exit status.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// What `run --json` promises, in this order.
const KEYS: [&str; 16] = [
    "variant",
    "mode",
    "format",
    "device",
    "planned_bytes",
    "allocated_bytes",
    "peak_used_bytes",
    "mean_waste_bytes",
    "requests_completed",
    "tokens_appended",
    "tokens_per_s",
    "step_ms_p50",
    "step_ms_p99",
    "max_abs_error",
    "output_checksum",
    "allocations_after_open",
];

pub(crate) fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvpool"));
    command.args(arguments).current_dir(env!("CARGO_MANIFEST_DIR"));
    command
}

pub(crate) fn kvpool(arguments: &[&str]) -> Output {
    command(arguments).output().expect("the binary runs")
}

pub(crate) fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

/// Runs a command that must succeed and write nothing to the standard error.
pub(crate) fn good(arguments: &[&str]) -> String {
    let output = kvpool(arguments);
    assert_eq!(text(&output.stderr), "", "{arguments:?}");
    assert_eq!(output.status.code(), Some(0), "{arguments:?}");
    text(&output.stdout).to_owned()
}

/// Runs a command that must fail with a status, and gives its one error.
pub(crate) fn bad(arguments: &[&str], status: i32) -> String {
    let output = kvpool(arguments);
    assert_eq!(output.status.code(), Some(status), "{arguments:?}: {}", text(&output.stderr));
    let error = text(&output.stderr).to_owned();
    assert!(error.starts_with("error: "), "{error}");
    assert!(!error.contains("panicked") && !error.contains("RUST_BACKTRACE"), "{error}");
    error
}

/// The quickstart, cut down to a few requests.
const QUICK: [&str; 6] = [
    "configs/quickstart.toml",
    "--set",
    "workload.requests=6",
    "--set",
    "workload.check_samples=24",
    "--json",
];

#[test]
fn run_json_is_one_document_with_the_promised_keys() {
    let out = good(&[&["run"], &QUICK[..]].concat());
    let document: Value = serde_json::from_str(&out).expect("one JSON document and nothing else");
    let runs = document["runs"].as_array().expect("runs");
    assert_eq!(runs.len(), 6);
    // The order, too: a person reads it.
    let places: Vec<_> = KEYS
        .iter()
        .map(|key| out.find(&format!("\"{key}\":")).unwrap_or_else(|| panic!("{key}")))
        .collect();
    assert!(places.is_sorted(), "{places:?}");
    for run in runs {
        assert_eq!(run["planned_bytes"], run["allocated_bytes"]);
        assert_eq!(run["allocations_after_open"], 0, "{run}");
        assert_eq!(run["requests_completed"], 6);
        assert!(run["tokens_per_s"].as_f64().expect("a number") > 0.0);
        assert!(run["step_ms_p50"].as_f64() <= run["step_ms_p99"].as_f64());
        assert!(run["device"].as_str().expect("a text").starts_with("cpu/"));
        assert_eq!(run["output_checksum"].as_str().expect("a text").len(), 16);
        assert!(run["max_abs_error"].as_f64().expect("checked") < 0.25);
        assert!(run.get("problems").is_none());
    }
    let checksums = |format: &str| -> Vec<&str> {
        let of_format = runs.iter().filter(|run| run["format"] == format);
        of_format.map(|run| run["output_checksum"].as_str().expect("a text")).collect()
    };
    for format in ["f16", "int8"] {
        let checksums = checksums(format);
        assert_eq!(checksums.len(), 3);
        assert!(checksums.iter().all(|checksum| *checksum == checksums[0]), "{format}");
    }
    assert_ne!(checksums("f16")[0], checksums("int8")[0]);
}

#[test]
fn run_prints_a_table_and_no_progress_when_piped() {
    // `good` sees to it that the standard error stays empty.
    let out = good(&[&["run"], &QUICK[..5]].concat());
    assert!(out.lines().all(|line| line.chars().count() <= 120), "{out}");
    assert!(!out.contains('\r') && !out.contains('\x1b'), "{out}");
    for words in [
        "output checksum",
        "equal outputs, bit for bit (f16): contiguous-f16, paged-f16, hybrid-f16",
        "equal outputs, bit for bit (int8): contiguous-int8, paged-int8, hybrid-int8",
        "computed by cpu/",
    ] {
        assert!(out.contains(words), "{words}: {out}");
    }
}

/// The job about prefix reuse, cut down to a few conversations.
const SHARED: [&str; 6] = [
    "configs/shared-prefix.toml",
    "--set",
    "workload.requests=16",
    "--set",
    "workload.check_samples=24",
    "--json",
];

#[test]
fn run_json_says_what_reuse_saves() {
    let out = good(&[&["run"], &SHARED[..]].concat());
    let document: Value = serde_json::from_str(&out).expect("one JSON document and nothing else");
    let runs = document["runs"].as_array().expect("runs");
    assert_eq!(runs.len(), 6);
    for run in runs {
        let number = |key: &str| run[key].as_u64().unwrap_or_else(|| panic!("{key}: {run}"));
        assert_eq!(number("allocations_after_open"), 0, "{run}");
        assert_eq!(run["output_checksum"], runs[0]["output_checksum"]);
        assert_eq!(number("prompt_tokens"), runs[0]["prompt_tokens"].as_u64().unwrap_or(0));
        assert_eq!(number("preemptions"), 0);
        let (hits, prompts) = (number("prefix_hit_tokens"), number("prompt_tokens"));
        assert!(hits <= number("repeated_prompt_tokens") && hits < prompts);
        assert_eq!(number("saved_prefill_tokens"), hits);
        let rate = run["prefix_hit_rate"].as_f64().expect("a number");
        assert!((rate - hits as f64 / prompts as f64).abs() < 1e-12, "{run}");
        for key in ["evictions", "resumed_tokens", "resumed_hit_tokens", "peak_cached_bytes"] {
            number(key);
        }
        let on = run["variant"].as_str().is_some_and(|name| name.ends_with("-on"));
        assert_eq!(run["prefix_reuse"], on);
        assert!(on || hits == 0, "{run}");
    }
    assert_eq!(document["comparisons"][0]["outcome"], "equal");
    assert_eq!(document["comparisons"][0]["variants"].as_array().map(Vec::len), Some(6));
    let paged = runs.iter().find(|run| run["variant"] == "paged-on").expect("there");
    assert!(paged["prefix_hit_rate"].as_f64() > Some(0.5), "{paged}");
}

#[test]
fn the_table_shows_reuse_where_there_is_something_to_reuse() {
    let out = good(&[&["run"], &SHARED[..5]].concat());
    assert!(out.lines().take(10).all(|line| line.chars().count() <= 110), "{out}");
    for words in ["(hit rate)", " off ", " %)  ", "prompt tokens", "blocks evicted", "ms a step"] {
        assert!(out.contains(words), "{words}: {out}");
    }
    let line = "equal outputs, bit for bit (f16): contiguous-off, contiguous-on, paged-off, paged-on, \
                hybrid-off, hybrid-on";
    assert!(out.contains(line), "{out}");
    let plain = good(&[&["run"], &QUICK[..5]].concat());
    assert!(plain.contains("tokens/s") && !plain.contains("hit rate"), "{plain}");
}

#[test]
fn run_out_writes_json_and_csv() {
    let folder = tempfile::tempdir().expect("a folder");
    let inner = folder.path().join("new/results");
    let inner_text = inner.to_str().expect("UTF-8");
    let out = good(&[&["run"], &QUICK[..], &["--out", inner_text]].concat());
    let written = std::fs::read_to_string(inner.join("results.json")).expect("written");
    assert_eq!(written, out, "the file is what --json prints");
    let csv = std::fs::read_to_string(inner.join("results.csv")).expect("written");
    assert!(csv.starts_with(&KEYS.join(",")), "{csv}");
    assert_eq!(csv.lines().count(), 7);
    assert_eq!(std::fs::read_dir(&inner).expect("there").count(), 2, "no temporary files");
}

/// A file that the test writes.
pub(crate) struct Config {
    folder: tempfile::TempDir,
}

impl Config {
    pub(crate) fn new(text: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("c.toml"), text).expect("written");
        Self { folder }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path().join("c.toml")
    }
}

const SMALL: &str = "
    model = { num_layers = 1, num_q_heads = 1, num_kv_heads = 1, head_dim = 16 }
    limits = { max_seqs = 2, max_seq_len = 64, max_batch_tokens = 32 }
    cache = { mode = 'paged' }
    variant = [{ name = 'small', capacity = 'tokens:32' },
               { name = 'none', mode = 'contiguous', capacity = 'tokens:32' }]
    [workload]
    kind = 'generator'
    requests = 2
    prompt_tokens = { dist = 'fixed', value = 10 }
    output_tokens = { dist = 'fixed', value = 10 }
";

#[test]
fn a_variant_that_fails_fails_the_run_but_not_the_others() {
    let config = Config::new(SMALL);
    let path = config.path();
    let arguments = ["run", path.to_str().expect("UTF-8"), "--json"];
    let error = bad(&arguments, 1);
    assert!(error.contains("variant \"none\": pool.capacity: 32 tokens"), "{error}");
    let output = kvpool(&arguments);
    let document: Value = serde_json::from_slice(&output.stdout).expect("JSON all the same");
    assert_eq!(document["runs"][0]["requests_completed"], 2);
    assert!(document["runs"][1]["error"].as_str().is_some_and(|error| error.contains("none")));
}

#[test]
fn mistakes_in_the_command_or_the_file_are_status_2() {
    for arguments in [&["frobnicate"][..], &[], &["plan"], &["run", "a.toml", "--nonsense"]] {
        let output = kvpool(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert_eq!(text(&output.stdout), "");
    }
    let error = bad(&["run", "no/such.toml"], 2);
    assert!(error.contains("no/such.toml: cannot be read"), "{error}");
    let config = Config::new("model.preset = 'llama-3-8b'\n[limits]\nmax_sqs = 1\n");
    let error = bad(&["plan", config.path().to_str().expect("UTF-8")], 2);
    assert!(error.contains("c.toml:3: limits.max_sqs: unknown key"), "{error}");
    let error = bad(&["run", "configs/paged.toml"], 2);
    assert!(error.contains("has no [workload] section"), "{error}");
    let error = bad(&["plan", "configs/paged.toml", "--set", "limits.max_seqs=0"], 2);
    assert!(error.contains("--set: limits.max_seqs"), "{error}");
    let error = bad(&["plan", "configs/paged.toml", "--set", "pool.capacity=budget:1 KiB"], 2);
    assert!(error.contains("bytes short"), "{error}");
    let config = Config::new(SMALL);
    let output = kvpool(&["plan", config.path().to_str().expect("UTF-8")]);
    assert_eq!(output.status.code(), Some(2), "a variant is as much of the file");
    let error = text(&output.stderr);
    assert!(error.starts_with("error: variant \"none\": pool.capacity: 32 tokens"), "{error}");
}

#[test]
fn the_azure_job_says_where_its_trace_is() {
    let error = bad(&["run", "configs/azure-chat.toml"], 1);
    for words in ["AzureLLMInferenceTrace_conv.csv", "Azure/AzurePublicDataset", "CC-BY-4.0"] {
        assert!(error.contains(words), "{error}");
    }
    let config = Config::new("TIMESTAMP,ContextTokens,GeneratedTokens\nt,1,1\nt,1,-1\n");
    let set = format!("workload.path={}", config.path().display());
    let error = bad(&["run", "configs/azure-chat.toml", "--set", &set], 1);
    assert!(error.contains("c.toml:3: GeneratedTokens is \"-1\""), "{error}");
}

#[test]
fn plan_shows_the_textbook_number() {
    let file = "configs/llama-2-7b-one-sequence.toml";
    let out = good(&["plan", file]);
    assert!(out.contains("pool      1,073,741,824 B (1.000 GiB)"), "{out}");
    let out = good(&["plan", file, "--json", "--set", "limits.max_seqs=8"]);
    let plan: Value = serde_json::from_str(&out).expect("one JSON document");
    assert_eq!(plan["pool_bytes"], 8_u64 << 30);
    assert!(plan.get("variants").is_none());
    let out = good(&["plan", "configs/quickstart.toml", "--json"]);
    let plan: Value = serde_json::from_str(&out).expect("one JSON document");
    assert_eq!(plan["variants"].as_array().map(Vec::len), Some(6));
    assert_eq!(plan["variants"][1]["plan"]["mode"], "paged");
    let out = good(&["plan", "configs/quickstart.toml"]);
    assert!(out.contains("variants of this file:") && out.contains("hybrid-int8"), "{out}");
}

#[test]
fn config_prints_what_is_in_force_and_can_be_read_again() {
    let out = good(&["config", "configs/quickstart.toml", "--set", "limits.max_seqs=3"]);
    assert!(out.contains("max_seqs = 3\n"), "{out}");
    let config = Config::new(&out);
    assert_eq!(good(&["config", config.path().to_str().expect("UTF-8")]), out);
}

#[test]
fn presets_are_listed() {
    let out = good(&["presets"]);
    assert!(out.lines().count() > 20 && out.contains("gemma-3-4b"), "{out}");
    let json: Value = serde_json::from_str(&good(&["presets", "--json"])).expect("JSON");
    let presets = json.as_array().expect("a list");
    let llama = presets.iter().find(|preset| preset["name"] == "llama-2-7b").expect("there");
    assert_eq!(llama["f16_bytes_per_token"], 524_288);
}

#[test]
fn a_reader_that_stops_is_no_error() {
    assert_eq!(unread(&["presets", "--json"]), (Some(0), String::new()));
}

/// A command whose standard output nobody reads; its status and what it says of errors.
pub(crate) fn unread(arguments: &[&str]) -> (Option<i32>, String) {
    let mut child = command(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("ends");
    (output.status.code(), text(&output.stderr).to_owned())
}

/// The files of a job are for whoever reads them, whoever reads the standard output.
#[test]
fn files_are_written_and_problems_told_where_nobody_reads_the_output() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let computed = ["configs/quickstart.toml", "--set", "workload.requests=2"];
    let replayed = ["configs/claims/d-block-size.toml", "--set", "workload.requests=20"];
    let jobs = [("run", computed), ("compare", computed), ("compare", replayed)];
    for (index, (verb, job)) in jobs.into_iter().enumerate() {
        let out = at(&index.to_string());
        let ended = unread(&[&[verb], &job[..], &["--out", &out]].concat());
        assert_eq!(ended, (Some(0), String::new()), "{verb} {job:?}");
        let files: &[&str] = &["results.json", "results.csv", "report.html"];
        for file in &files[..if verb == "run" { 2 } else { 3 }] {
            assert!(Path::new(&out).join(file).is_file(), "{verb} {job:?}: {file}");
        }
    }
    // One variant cannot run: that is status 1, read or not.
    let config = Config::new(SMALL);
    for verb in ["run", "compare"] {
        let ended = unread(&[verb, config.path().to_str().expect("UTF-8"), "--out", &at(verb)]);
        assert_eq!(ended.0, Some(1), "{}", ended.1);
        assert!(ended.1.starts_with("error: variant \"none\": "), "{}", ended.1);
        assert!(!ended.1.contains("standard output"), "{}", ended.1);
        assert!(Path::new(&at(verb)).join("results.json").is_file());
    }
}

/// A disk that is full is told, and the files are written before.
#[cfg(target_os = "linux")]
#[test]
fn files_are_written_where_the_output_cannot_be() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("out");
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("a device");
    let config = Config::new(SMALL);
    let path = config.path();
    let words = ["run", path.to_str().expect("UTF-8"), "--out", out.to_str().expect("UTF-8")];
    let output = command(&words).stdout(full).output().expect("the binary runs");
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("\nerror: the standard output cannot be written: "), "{error}");
    assert!(error.starts_with("error: variant \"none\": "), "{error}");
    assert!(out.join("results.csv").is_file());
}

#[test]
fn every_config_has_a_plan() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs");
    for entry in std::fs::read_dir(folder).expect("there") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            continue;
        }
        let out = good(&["plan", path.to_str().expect("UTF-8")]);
        assert!(out.contains("pool "), "{}", path.display());
    }
}

#[test]
fn bench_json_has_its_keys_and_equal_answers_in_every_mode() {
    let out = good(&[
        "bench",
        "decode",
        "--json",
        "--filter",
        "kv8d128/1x4096",
        "--seconds",
        "0.01",
        "--threads",
        "1",
        "--formats",
        "f16,int8",
        "--footprint",
        "1",
    ]);
    let document: Value = serde_json::from_str(&out).expect("one JSON document");
    let results = document["results"].as_array().expect("results");
    assert_eq!(results.len(), 6);
    for one in results {
        for key in ["median_us", "gbps", "dram_gbps", "dram_best_gbps", "fraction"] {
            assert!(one[key].as_f64().is_some_and(|x| x > 0.0), "{key}: {one}");
        }
        assert!(one["line_ns"].is_null(), "one thread is near itself: {one}");
        for key in ["shape", "mode", "format", "path"] {
            assert!(one[key].is_string(), "{key}: {one}");
        }
        assert_eq!(one["threads"], 1);
        let first = results.iter().find(|other| other["format"] == one["format"]);
        assert_eq!(one["checksum"], first.expect("itself")["checksum"], "{one}");
    }
    assert!(bad(&["bench", "decode", "--formats", "f17"], 2).contains("f17"));
    assert!(
        bad(&["bench", "sideways"], 2)
            .contains("<decode|append|prefill|cores|manager|capi|cost|on-demand|salt|scrub>")
    );
}

#[test]
fn bench_cores_says_how_near_they_are() {
    let out = good(&["bench", "cores", "--json"]);
    let document: Value = serde_json::from_str(&out).expect("one JSON document");
    let line_ns = &document["results"][0]["line_ns"];
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    assert!(line_ns.as_f64().is_some_and(|ns| ns > 1.0) || line_ns.is_null(), "{out}");
    assert!(cores > 1 || line_ns.is_null(), "{out}");
    let text = good(&["bench", "cores"]);
    assert!(text.contains(" ns from one core to another") || text.contains("one core"), "{text}");
}

#[test]
fn bench_capi_compares_both_ways() {
    let out = good(&["bench", "capi", "--quick", "--json"]);
    let document: Value = serde_json::from_str(&out).expect("one JSON document");
    let results = document["results"].as_array().expect("results");
    let names: Vec<_> = results.iter().map(|one| one["name"].as_str().expect("a name")).collect();
    assert_eq!(names, ["reserve_256", "commit_256", "step_256"]);
    for one in results {
        for key in ["rust_ns", "c_ns", "ratio"] {
            assert!(one[key].as_f64().is_some_and(|x| x > 0.0), "{key}: {one}");
        }
    }
    let error = bad(&["bench", "capi", "--filter", "release"], 2);
    assert!(error.contains("reserve_256, commit_256, step_256"), "{error}");
}

#[test]
fn bench_refuses_what_measures_nothing() {
    for (operation, name) in [
        ("decode", "decode/q32kv8d128/1x4096, decode/q32kv8d128/1x32768"),
        ("append", "append/q32kv8d128/16, append/q32kv8d128/512"),
        ("prefill", "prefill/q32kv8d128/0+512, prefill/q32kv8d128/4096+512"),
    ] {
        let error = bad(&["bench", operation, "--filter", "9x9"], 2);
        assert!(error.contains("no shape's name contains \"9x9\"") && error.contains(name));
    }
    for seconds in ["0", "-1", "nan", "inf", "1e999", "two"] {
        let error = bad(&["bench", "append", &format!("--seconds={seconds}")], 2);
        assert!(error.contains("a finite number of seconds above 0"), "{error}");
    }
    for (option, range) in [("--footprint=0", "1..=16777216"), ("--threads=0", "1..=1024")] {
        let error = bad(&["bench", "append", option], 2);
        assert!(error.contains(range), "{error}");
    }
    // The baseline of replays computes nothing, and 256 GiB are read by nobody.
    for operation in ["decode", "append", "prefill"] {
        let error = bad(&["bench", operation, "--modes", "paged,dynamic"], 2);
        assert!(error.contains("\"dynamic\" is a baseline of replays"), "{error}");
    }
    for what in ["cores", "salt", "scrub"] {
        let error = bad(&["bench", what, "--filter", "zzz"], 2);
        assert!(error.contains("--filter chooses shapes of decode"), "{error}");
    }
    let long = "x".repeat(100_000);
    for what in ["decode", "manager"] {
        let error = bad(&["bench", what, "--filter", &long], 2);
        assert!(error.len() < 500, "{} bytes", error.len());
        assert!(error.contains("\"xxxxxxxx") && error.contains("…; there are "), "{error}");
    }
}

/// Every thread of the plain loads has memory of its own; whether there is as much is asked before
/// it is taken, and before anything is measured.
#[test]
fn bench_asks_for_memory_before_it_takes_it() {
    let doctor: Value = serde_json::from_str(&good(&["doctor", "--json"])).expect("JSON");
    let Some(available) =
        doctor["cpu"]["available_bytes"].as_u64().filter(|bytes| *bytes < 200 << 30)
    else {
        println!("skipped: this machine may have the memory");
        return;
    };
    let started = std::time::Instant::now();
    let error = bad(&["bench", "append", "--threads", "1,1024"], 1);
    assert!(error.contains("plain loads with 1024 threads"), "{available}: {error}");
    assert!(error.contains("need 256.000 GiB of memory, and "), "{error}");
    assert!(error.ends_with("are available; lower --threads\n"), "{error}");
    assert!(started.elapsed().as_secs() < 60);
}

/// What the machine cannot give is said in the command's own options.
#[cfg(target_os = "linux")]
#[test]
fn bench_says_which_option_takes_less_memory() {
    let program = env!("CARGO_BIN_EXE_kvpool");
    let command = format!(
        "ulimit -v 2000000; exec '{program}' bench append --footprint 100000 --threads 1 \
         --formats f16 --modes paged --filter /16"
    );
    let output = Command::new("sh").args(["-c", &command]).output().expect("a shell");
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    let start = "error: append/q32kv8d128/16, paged in f16, needs ";
    assert!(error.starts_with(start), "{error}");
    assert!(error.contains("lower --footprint (97.656 GiB now)"), "{error}");
    assert!(!error.contains("pool.") && !error.contains("limits."), "{error}");
}

#[test]
fn bench_manager_json_has_its_keys_and_counts_no_allocation() {
    // The options that all benches have may stand before the name too.
    let out = good(&["bench", "--json", "manager", "--quick", "--filter", "4096"]);
    let document: Value = serde_json::from_str(&out).expect("one JSON document");
    let results = document["results"].as_array().expect("results");
    let names: Vec<_> = results.iter().map(|one| one["name"].as_str().expect("a name")).collect();
    let expected = [
        "hit_4096_runs1",
        "hit_4096_runs16",
        "miss_4096",
        "probe_4096",
        "release_4096",
        "fork_4096",
        "decode_step_4096",
    ];
    assert_eq!(names, expected);
    for one in results {
        assert_eq!(one.as_object().expect("an object").len(), 4, "{one}");
        assert!(one["ns_per_unit"].as_f64().is_some_and(|ns| ns > 0.0), "{one}");
        assert!(["lookup", "sequence"].contains(&one["unit"].as_str().expect("a unit")), "{one}");
        assert_eq!(one["allocations"], 0, "{one}");
    }
    assert_eq!(document["quick"], true);
    assert_eq!(document["version"], env!("CARGO_PKG_VERSION"));
    assert!(document["cpu"].is_string() || document["cpu"].is_null());
}

#[test]
fn bench_manager_says_what_its_cases_are() {
    let error = bad(&["bench", "manager", "--filter", "none"], 2);
    let help = good(&["bench", "manager", "--help"]);
    for name in ["alloc_free_1", "hit_4096_runs1", "publish_evict_1e7", "decode_step_4096"] {
        assert!(error.contains(name), "{error}");
        let line = help.lines().find(|line| line.trim_start().starts_with(name));
        assert!(line.is_some_and(|line| line.contains(": ") && line.len() <= 100), "{help}");
    }
    let listed = help.lines().filter(|line| line.contains("  per ")).count();
    assert_eq!(listed, 16, "{help}");
}

/// A job in which nothing ran has not shown anything.
#[test]
fn a_job_that_completes_nothing_fails() {
    let long = "workload.prompt_tokens={dist='fixed',value=2000}";
    let out = kvpool(&[&["run"], &QUICK[..], &["--set", long]].concat());
    assert_eq!(out.status.code(), Some(1));
    let error = text(&out.stderr);
    assert!(error.contains("no request was completed"), "{error}");
}

/// Outputs that nobody computed are not equal, and have no checksum.
#[test]
fn a_job_that_computes_nothing_compares_nothing() {
    let file = "configs/shared-prefix.toml";
    let prefixes = "workload.shared_prefix_tokens={dist=\"uniform\",min=2000,max=99999}";
    for set in [prefixes, "pool.capacity=tokens:16"] {
        let folder = tempfile::tempdir().expect("a folder");
        let place = folder.path().to_str().expect("UTF-8");
        let out = kvpool(&["run", file, "--set", set, "--out", place]);
        assert_eq!(out.status.code(), Some(1), "{set}");
        let table = text(&out.stdout);
        assert!(!table.contains("equal outputs") && !table.contains("00000000"), "{table}");
        let said = "outputs not compared (f16): nothing was computed by ";
        assert!(table.contains(said), "{table}");
        assert!(table.contains("paged-on: nothing was computed; 120 refused: "), "{table}");
        let row = table.lines().find(|line| line.starts_with("paged-on ")).expect("a row");
        assert_eq!(row.split_whitespace().rev().nth(1), Some("-"), "{row}");
        let error = text(&out.stderr);
        let all = "warning: variant \"paged-on\": 120 of 120 requests were refused; the first: ";
        assert!(error.contains(all) && error.contains("no request was completed"), "{error}");

        let json = std::fs::read_to_string(folder.path().join("results.json")).expect("written");
        let document: Value = serde_json::from_str(&json).expect("JSON");
        let runs = document["runs"].as_array().expect("runs");
        let ran: Vec<_> = runs.iter().filter(|run| run.get("error").is_none()).collect();
        assert!(ran.len() >= 4 && ran.iter().all(|run| run["output_checksum"].is_null()));
        assert_eq!(document["comparisons"][0]["outcome"], "nothing-computed");
        let csv = std::fs::read_to_string(folder.path().join("results.csv")).expect("written");
        let at = KEYS.iter().position(|key| *key == "output_checksum").expect("there");
        assert!(csv.lines().skip(1).all(|line| line.split(',').nth(at) == Some("")), "{csv}");
    }
}

/// What is left out of a job is said on lines of its own, with the first cause and the knob; what
/// ran makes it a success.
#[test]
fn refused_requests_are_a_warning() {
    let arguments = [&["run"], &SHARED[..5], &["--set", "workload.turns={dist='fixed',value=16}"]];
    let out = kvpool(&arguments.concat());
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let lines: Vec<&str> = text(&out.stderr).lines().collect();
    assert_eq!(lines.len(), 6, "{lines:?}");
    for (line, name) in lines.iter().zip(["contiguous-off", "contiguous-on", "paged-off"]) {
        let start = format!("warning: variant {name:?}: ");
        let refused = line.strip_prefix(&start).unwrap_or_else(|| panic!("{line}"));
        let number = refused.split(' ').next().and_then(|count| count.parse::<u32>().ok());
        assert!(number.is_some_and(|count| count > 0 && count < 16), "{line}");
        for part in [
            " of 16 requests were refused; the first: request number ",
            "limits.max_seq_len is 1,024; raise it, or shorten the workload's requests",
        ] {
            assert!(line.contains(part), "{part}: {line}");
        }
    }
    // A pool that is too small names itself.
    let small =
        ["run", "configs/shared-prefix.toml", "--set", "pool.capacity=tokens:256", "--json"];
    let out = kvpool(&[&small[..], &["--set", "workload.requests=16"]].concat());
    let error = text(&out.stderr);
    let line = error.lines().find(|line| line.starts_with("warning: variant \"paged-on\""));
    let line = line.unwrap_or_else(|| panic!("{error}"));
    assert!(line.contains("the whole pool has 16; raise pool.capacity"), "{line}");
    let document: Value = serde_json::from_slice(&out.stdout).expect("JSON");
    let run = &document["runs"][3];
    assert!(line.ends_with(run["first_refusal"].as_str().expect("a text")), "{run}");
}

#[test]
fn results_are_refused_before_the_work() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("taken");
    std::fs::write(&file, "x").expect("a file");
    let started = std::time::Instant::now();
    // Enough work to take minutes, if it were done first.
    let error = bad(
        &[
            "run",
            "configs/quickstart.toml",
            "--set",
            "workload.requests=100000",
            "--out",
            file.to_str().expect("UTF-8"),
        ],
        1,
    );
    assert!(error.contains("cannot be written"), "{error}");
    assert!(started.elapsed().as_secs() < 60);
}

#[test]
fn counts_and_names_beyond_reason_are_refused() {
    let file = "configs/quickstart.toml";
    let error = bad(&["run", file, "--set", "workload.requests=4000000000"], 2);
    assert!(error.contains("1 to 10,000,000"), "{error}");
    let error = bad(&["plan", file, "--set", "variant.0.name='a\u{1b}[31m'"], 2);
    assert!(error.contains("variant.0.name") || error.contains("control character"), "{error}");
}

/// `plan` says beforehand what `run` would refuse, and what to change.
#[test]
fn plan_says_whether_it_fits() {
    let out = good(&["plan", "configs/paged.toml", "--set", "device.memory_limit=1 GiB"]);
    assert!(out.contains("it will be refused") && out.contains("lower pool.capacity"), "{out}");
    let out = good(&["plan", "configs/paged.toml", "--set", "device.memory_limit=4 GiB"]);
    assert!(out.contains("it fits in 4.000 GiB of device.memory_limit"), "{out}");
    // What is said of the file is not said of its variants.
    let variants =
        "variant=[{name='small',capacity='budget:1 GiB'},{name='big',capacity='budget:9 GiB'}]";
    let limit = "device.memory_limit=4 GiB";
    let out = good(&["plan", "configs/paged.toml", "--set", limit, "--set", variants]);
    let notes = out.split_once("\nmemory    ").expect("a note").1;
    assert!(notes.starts_with("without its variants the file has a workspace of "), "{out}");
    let line = notes.lines().nth(1).expect("a note");
    assert!(line.starts_with("          variant \"big\": workspace of "), "{out}");
    assert!(line.contains("it will be refused") && !notes.contains("\"small\""), "{out}");
}
