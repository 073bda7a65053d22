//! The commands that replay: `compare`, `merge`, `recommend`, and `run` of such a job.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::cli::{Config, bad, command, good, kvpool, text};

/// A job of ten variants, cut down to a few requests.
const BLOCK_SIZES: [&str; 4] =
    ["compare", "configs/claims/d-block-size.toml", "--set", "workload.requests=60"];

/// That job with more arguments.
fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&BLOCK_SIZES[..], more].concat()
}

#[test]
fn compare_writes_a_report_resumes_and_merges() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let job = BLOCK_SIZES;
    let out = good(&with(&["--out", &at("whole")]));
    assert!(out.lines().all(|line| line.chars().count() <= 100), "{out}");
    assert!(out.contains("b16-guaranteed") && out.contains("b128-max-util"), "{out}");
    let written = |name: &str, file: &str| {
        std::fs::read_to_string(Path::new(&at(name)).join(file)).expect("written")
    };
    let page = written("whole", "report.html");
    assert!(
        page.contains("prefers-color-scheme") && page.contains("<svg") && !page.contains("http")
    );
    assert_eq!(written("whole", "results.csv").lines().count(), 11);
    for shard in ["1/2", "2/2"] {
        let output = kvpool(&with(&["--shard", shard, "--out", &at(&shard[..1])]));
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    }
    good(&["merge", &at("1"), &at("2"), "--out", &at("merged")]);
    for file in ["results.json", "results.csv", "report.html"] {
        assert_eq!(written("merged", file), written("whole", file), "{file}");
    }
    // With the results of one shard, only the others are replayed; the result is the same.
    let resumed = good(&with(&["--resume", "--out", &at("1"), "--json"]));
    assert_eq!(resumed, written("whole", "results.json"));
    assert!(bad(&["merge", &at("whole"), &at("1")], 2).contains("is in two shards"));
    assert!(bad(&["merge", &at("none")], 2).contains("has no results.json"));
    assert!(bad(&with(&["--shard", "3/2"]), 2).contains("expected K/N"));
    let computes = bad(&["compare", "configs/quickstart.toml"], 2);
    assert!(
        computes.contains("computes attention") && computes.contains("kvpool run"),
        "{computes}"
    );
    // `run` replays such a file, too.
    let ran = good(&["run", job[1], job[2], job[3], "--json"]);
    assert_eq!(ran, written("whole", "results.json"));
}

#[test]
fn an_interrupted_compare_keeps_what_is_complete() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().to_str().expect("UTF-8");
    let job = ["compare", "configs/claims/d-block-size.toml", "--out", out];
    let child = command(&job).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("runs");
    // The first thing that is done is a file in the folder, which goes away again.
    std::thread::sleep(std::time::Duration::from_millis(300));
    let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(sent.is_ok_and(|status| status.success()));
    let output = child.wait_with_output().expect("ends");
    if output.status.code() == Some(0) {
        println!("skipped: it was faster than the signal");
        return;
    }
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("interrupted: "), "{}", text(&output.stderr));
    let results = std::fs::read_to_string(folder.path().join("results.json")).expect("written");
    let document: Value = serde_json::from_str(&results).expect("JSON");
    assert!(document["runs"].as_array().expect("runs").len() < 10);
}

#[test]
fn recommend_prints_a_file_that_can_be_run() {
    let job = ["configs/claims/e-system-prompt.toml", "--set", "workload.requests=60"];
    let out = good(&[&["recommend"], &job[..]].concat());
    for words in ["# kvpool recommend: ", "# Best: ", "# The runners-up", "\n[cache]\n"] {
        assert!(out.contains(words), "{words}: {out}");
    }
    let config = Config::new(&out);
    let ran = good(&["run", config.path().to_str().expect("UTF-8"), "--json"]);
    let document: Value = serde_json::from_str(&ran).expect("JSON");
    assert_eq!(document["runs"][0]["requests_completed"], 60);
}
