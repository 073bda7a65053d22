//! `kvpool run`: its document, its table, its files.

use std::path::Path;

use serde_json::Value;

use super::{Config, SMALL, bad, command, good, kvpool, text, unread};

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
