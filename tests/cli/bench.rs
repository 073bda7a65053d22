//! `kvpool bench`: its keys, and what it refuses.

use std::process::Command;

use serde_json::Value;

use super::{bad, good, text};

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
