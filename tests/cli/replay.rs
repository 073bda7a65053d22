//! The commands that replay: `compare`, `merge`, and `run` of such a job.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use serde_json::Value;

use super::{Config, bad, command, good, kvpool, text};

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
    // Half of the shards: nothing was interrupted, and the rest is named.
    let error = bad(&["merge", &at("2")], 1);
    assert!(
        error.contains("5 of 10 variants are in none of these folders: \"b8-guaranteed\", \"b16-"),
        "{error}"
    );
    assert!(!error.contains("interrupted") && !error.contains("--resume"), "{error}");
    // What a folder has of the same job stays there: a part does not replace the whole, and parts
    // that go into one folder come to the whole.
    bad(&["merge", &at("2"), "--out", &at("merged")], 1);
    let (both, merged) = (at("both"), at("merged"));
    for shard in ["1/2", "2/2"] {
        let half = with(&["--shard", shard, "--out", &both, "--json"]);
        let half: Value = serde_json::from_str(&good(&half)).expect("JSON");
        assert_eq!(half["runs"].as_array().map(Vec::len), Some(5), "what was asked for");
    }
    good(&with(&["--shard", "1/2", "--resume", "--out", &at("merged")]));
    for folder in ["merged", "both"] {
        for file in ["results.json", "results.csv", "report.html"] {
            assert_eq!(written(folder, file), written("whole", file), "{folder}/{file}");
        }
    }
    // Of another job nothing is taken over, and with --resume nothing of it is replaced.
    let other = with(&["--set", "workload.seed=99", "--out", &merged]);
    let error = bad(&[&other[..], &["--resume"]].concat(), 2);
    assert!(error.contains("the folder has the results of another job"), "{error}");
    assert_eq!(written("merged", "results.json"), written("whole", "results.json"));
    good(&other);
    assert_ne!(written("merged", "results.json"), written("whole", "results.json"));
    let file = format!("{}/results.json", at("2"));
    let error = bad(&["merge", &file], 2);
    let help = format!("is a file; give the folder that it is in, {}\n", at("2"));
    assert!(error.contains(&help), "{error}");
    assert!(bad(&with(&["--shard", "3/2"]), 2).contains("expected K/N"));
    // `run` replays such a file, too.
    let ran = good(&["run", job[1], job[2], job[3], "--json"]);
    assert_eq!(ran, written("whole", "results.json"));
}

/// A job of ten variants that takes a while.
const LONG: [&str; 4] =
    ["compare", "configs/claims/d-block-size.toml", "--set", "workload.requests=2000"];

/// Waits until a process has said what is to become of a signal, which ends it before that.
fn wait_until_it_listens(child: &mut Child, signal: i32) {
    let status = format!("/proc/{}/status", child.id());
    for _ in 0..1000 {
        let status = std::fs::read_to_string(&status).unwrap_or_default();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        let mask = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        if mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
            || child.try_wait().expect("a child").is_some()
        {
            return;
        }
        sleep(Duration::from_millis(10));
    }
}

/// The end of a pipe that a process reads, as soon as it does.
fn pipe_into(child: &mut Child, pipe: &Path) -> File {
    for _ in 0..3000 {
        // Without the flag this would wait for ever for a process that has ended.
        match OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(pipe) {
            Ok(file) => return file,
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ENXIO), "{error}"),
        }
        assert!(child.try_wait().expect("a child").is_none(), "it ended before it read the pipe");
        sleep(Duration::from_millis(10));
    }
    child.kill().expect("a child");
    panic!("it does not read the pipe");
}

/// Interrupts a job soon after it began, and gives what it says: what is complete is written. `None`
/// when it was faster.
fn interrupted(job: &[&str], folder: &Path, after: Duration) -> Option<String> {
    let out = folder.to_str().expect("UTF-8");
    let words = [job, &["--out", out]].concat();
    let mut child =
        command(&words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("runs");
    wait_until_it_listens(&mut child, libc::SIGTERM);
    sleep(after);
    let sent = Command::new("kill").args(["-TERM", &child.id().to_string()]).status();
    assert!(sent.is_ok_and(|status| status.success()));
    let output = child.wait_with_output().expect("ends");
    if output.status.code() == Some(0) {
        println!("skipped: it was faster than the signal");
        return None;
    }
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("interrupted: "), "{}", text(&output.stderr));
    Some(text(&output.stderr).to_owned())
}

#[test]
fn an_interrupted_compare_keeps_what_is_complete() {
    for (job, variants) in [
        (&["compare", "configs/claims/d-block-size.toml"][..], 10),
        (&["compare", "configs/quickstart.toml", "--set", "device.kernel=portable"], 6),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        if let Some(error) = interrupted(job, folder.path(), Duration::from_millis(100)) {
            assert!(error.contains("run it again with --out DIR --resume"), "{error}");
            let results = std::fs::read_to_string(folder.path().join("results.json"));
            let document: Value = serde_json::from_str(&results.expect("written")).expect("JSON");
            assert!(document["runs"].as_array().expect("runs").len() < variants);
            assert_eq!(document["variants"], variants);
        }
    }
}

/// While a trace is read nothing looks at signals, and there is nothing to keep: a pipe that nobody
/// writes to would be read for ever.
#[test]
fn a_signal_ends_a_job_that_is_still_loading() {
    let folder = tempfile::tempdir().expect("a folder");
    let pipe = folder.path().join("trace.jsonl");
    let made = Command::new("mkfifo").arg(&pipe).status().expect("mkfifo");
    assert!(made.success());
    let set = format!("workload.path={}", pipe.display());
    let mut child = command(&["compare", "configs/replay/mooncake.toml", "--set", &set])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("runs");
    let _writer = pipe_into(&mut child, &pipe);
    let kill = Command::new("kill").args(["-TERM", &child.id().to_string()]).status();
    assert!(kill.is_ok_and(|status| status.success()));
    for _ in 0..300 {
        if let Some(status) = child.try_wait().expect("a child") {
            assert_eq!(status.signal(), Some(libc::SIGTERM));
            return;
        }
        sleep(Duration::from_millis(100));
    }
    child.kill().expect("a child");
    panic!("it goes on after the signal");
}

/// A job that replays a table of lengths, which the test writes.
fn traced(folder: &Path, lengths: &str) -> Vec<String> {
    let (job, trace) = (folder.join("job.toml"), folder.join("lengths.csv"));
    std::fs::write(&trace, format!("prompt,output\n{lengths}")).expect("written");
    let text = format!(
        "model = {{ num_layers = 1, num_q_heads = 1, num_kv_heads = 1, head_dim = 16 }}
        limits = {{ max_seqs = 1, max_seq_len = 4096, max_batch_tokens = 256 }}
        cache = {{ mode = 'paged' }}
        cost = {{ bandwidth = '1 GB', step_us = 100.0, weight_bytes = 0 }}
        [workload]
        kind = 'lengths-csv'
        compute = 'none'
        path = '{}'
        columns = {{ prompt = 'prompt', output = 'output' }}",
        trace.display()
    );
    std::fs::write(&job, text).expect("written");
    ["compare", job.to_str().expect("UTF-8"), "--json"].map(str::to_owned).to_vec()
}

fn words(job: &[String]) -> Vec<&str> {
    job.iter().map(String::as_str).collect()
}

/// Two traces with the same sums: the order of their requests is what tells them apart.
#[test]
fn resume_takes_nothing_over_from_another_trace() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("out");
    let out = out.to_str().expect("UTF-8");
    let resumed = ["--out", out, "--resume"];
    let mut texts = Vec::new();
    for lengths in ["2000,1\n10,400\n", "10,400\n2000,1\n"] {
        let job = traced(folder.path(), lengths);
        let fresh = good(&words(&job));
        if texts.is_empty() {
            assert_eq!(good(&[&words(&job)[..], &resumed].concat()), fresh);
        } else {
            let error = bad(&[&words(&job)[..], &resumed].concat(), 2);
            assert!(error.contains("the folder has the results of another job"), "{error}");
            assert_eq!(good(&[&words(&job)[..], &resumed[..2]].concat()), fresh);
        }
        texts.push(fresh);
    }
    let [first, second] = [0, 1].map(|at| serde_json::from_str::<Value>(&texts[at]).expect("JSON"));
    for key in ["prompt_tokens", "output_tokens", "longest_tokens", "last_arrival_s"] {
        assert_eq!(first["workload"][key], second["workload"][key], "{key}");
    }
    let run = |document: &Value, key: &str| document["runs"][0][key].clone();
    assert_ne!(run(&first, "fingerprint"), run(&second, "fingerprint"));
    assert_ne!(run(&first, "latency_ms"), run(&second, "latency_ms"));
}

/// Where it lies is not part of what it is, also where a line of it is damaged and told of.
#[test]
fn a_trace_that_is_moved_is_the_same() {
    let folders = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
    let [first, second] = folders.each_ref().map(|folder| {
        let job = traced(folder.path(), "10,2\nten,2\n30,4\n");
        let skip = ["--set", "workload.skip_damaged_lines=true"];
        let output = kvpool(&[&words(&job)[..], &skip].concat());
        assert!(
            text(&output.stderr)
                .starts_with("warning: 1 damaged line of the trace left out; the first: ")
        );
        serde_json::from_str::<Value>(text(&output.stdout)).expect("JSON")
    });
    assert_eq!(first["workload"]["damaged_lines"], 1);
    assert_ne!(first["workload"]["first_damaged"], second["workload"]["first_damaged"]);
    assert_eq!(first["runs"], second["runs"]);
}

/// Figures of a clock that has come to its end are no figures.
#[test]
fn a_clock_that_ends_is_a_problem() {
    let folder = tempfile::tempdir().expect("a folder");
    let job = traced(folder.path(), &"10,2\n".repeat(20_000));
    let rare = ["workload.arrivals=poisson", "workload.requests_per_s=0.000001"];
    for mode in ["paged", "dynamic"] {
        let mode = format!("variant=[{{name='v',mode='{mode}'}}]");
        let set = ["--set", rare[0], "--set", rare[1], "--set", &mode];
        let error = bad(&[&words(&job)[..], &set].concat(), 1);
        assert!(error.contains("variant \"v\": the simulated clock reached its end"), "{error}");
    }
    let slow = ["--set", "cost.step_us=1000000000", "--set", "workload.requests=2000"];
    let error = bad(&[&words(&job)[..], &slow].concat(), 1);
    assert!(error.contains("of more than eleven days count as eleven days"), "{error}");
    // Nor is anything recommended for them.
    let slow = ["--set", "cost.step_us=1000000000", "--set", "workload.requests=800"];
    let error = bad(&[&["recommend", &job[1]], &slow[..]].concat(), 1);
    assert!(error.contains("of more than eleven days count as eleven days"), "{error}");
    let unit = bad(&[&words(&job)[..], &["--set", "cost.bandwidth=3350"]].concat(), 2);
    assert!(unit.contains("3,350 bytes a second are less than 1 MB"), "{unit}");
    let rare = ["--set", rare[0], "--set", "workload.requests_per_s=1e-300"];
    let error = bad(&[&words(&job)[..], &rare].concat(), 2);
    assert!(error.contains("workload.requests_per_s: "), "{error}");
    assert!(error.contains("expected how many arrive in a second, from 0.000001"), "{error}");
}

#[test]
fn an_interrupted_job_leaves_results_that_have_more() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("out");
    good(&[&LONG[..], &["--out", out.to_str().expect("UTF-8")]].concat());
    let results = || std::fs::read_to_string(out.join("results.json")).expect("written");
    let whole = results();
    // Soon after the handler: the first variants take longer than that.
    if let Some(error) = interrupted(&LONG, &out, Duration::from_millis(3)) {
        assert!(error.starts_with("error: interrupted: "), "{error}");
        let kept =
            format!("not run; {} keeps what an earlier run has, which is more\n", out.display());
        assert!(error.ends_with(&kept), "{error}");
    }
    assert_eq!(results(), whole);
}

/// `nohup` starts a program with SIGHUP ignored.
#[cfg(target_os = "linux")]
#[test]
fn a_signal_that_is_ignored_at_the_start_stays_ignored() {
    // Sends the signal when the program has said what is to become of another one.
    let signalled = |job: &mut Command, signal: &str, when: i32| {
        let mut child = job.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("runs");
        wait_until_it_listens(&mut child, when);
        let kill = Command::new("kill").args([signal, &child.id().to_string()]).status();
        assert!(kill.is_ok_and(|status| status.success()));
        child.wait_with_output().expect("ends")
    };
    for (name, when) in [("HUP", libc::SIGTERM), ("INT", libc::SIGTERM), ("TERM", libc::SIGINT)] {
        let script = format!("trap '' {name}; exec \"$0\" \"$@\"");
        let mut shell = Command::new("sh");
        shell.args(["-c", &script, env!("CARGO_BIN_EXE_kvpool")]).args(LONG);
        shell.current_dir(env!("CARGO_MANIFEST_DIR"));
        let output = signalled(&mut shell, &format!("-{name}"), when);
        assert_eq!(output.status.code(), Some(0), "{name}: {}", text(&output.stderr));
    }
    let own = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let mask = own.lines().find_map(|line| line.strip_prefix("SigIgn:")).expect("a mask");
    if u64::from_str_radix(mask.trim(), 16).expect("a number") & 1 == 1 {
        println!("skipped: the tests themselves were started with SIGHUP ignored");
        return;
    }
    let output = signalled(&mut command(&LONG), "-HUP", libc::SIGHUP);
    if output.status.code() == Some(0) {
        println!("skipped: it was faster than the signal");
        return;
    }
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("interrupted: "), "{}", text(&output.stderr));
}

/// A job of six variants that computes, cut down to a few requests.
const COMPUTED: [&str; 8] = [
    "compare",
    "configs/quickstart.toml",
    "--set",
    "workload.requests=3",
    "--set",
    "workload.check_samples=4",
    "--set",
    "device.kernel=portable",
];

#[test]
fn compare_measures_modes_side_by_side() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let with = |more: &[&str]| -> Vec<String> {
        COMPUTED.iter().chain(more).map(|word| (*word).to_owned()).collect()
    };
    let run = |more: &[&str]| {
        let words = with(more);
        good(&words.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let out = run(&["--out", &at("whole")]);
    assert!(out.lines().take(12).all(|line| line.chars().count() <= 100), "{out}");
    for words in ["hybrid-int8", "equal outputs, bit for bit (f16)", "int8: 12 outputs compared"] {
        assert!(out.contains(words), "{words}: {out}");
    }
    let written = |name: &str, file: &str| {
        std::fs::read_to_string(Path::new(&at(name)).join(file)).expect("written")
    };
    let page = written("whole", "report.html");
    assert!(page.contains("prefers-color-scheme") && page.contains("largest error"));
    assert!(!page.contains("http") && !page.contains("NaN"));
    // Shards, resumed and merged: the same variants and outputs, with times of their own.
    for shard in ["1/2", "2/2"] {
        run(&["--shard", shard, "--out", &at(&shard[..1])]);
    }
    let merged = good(&["merge", &at("1"), &at("2"), "--json"]);
    let resumed = run(&["--resume", "--out", &at("1"), "--json"]);
    let read = |text: &str| serde_json::from_str::<Value>(text).expect("JSON");
    let (whole, merged, resumed) =
        (read(&written("whole", "results.json")), read(&merged), read(&resumed));
    for other in [&merged, &resumed] {
        assert_eq!(other["comparisons"], whole["comparisons"]);
        for (own, run) in other["runs"]
            .as_array()
            .expect("runs")
            .iter()
            .zip(whole["runs"].as_array().expect("runs"))
        {
            for key in
                ["variant", "index", "fingerprint", "output_checksum", "max_abs_error", "steps"]
            {
                assert_eq!(own[key], run[key], "{key}");
            }
        }
    }
    assert_eq!(resumed["runs"][0], merged["runs"][0], "what is done is not done again");
    assert!(bad(&["merge", &at("1"), &at("2")], 2).contains("is in two shards"));
}

#[test]
fn prompts_in_openais_form_are_a_workload() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("batch.jsonl");
    let tokens: Vec<u32> = (0..300).collect();
    let line = |id: u32| {
        format!(
            "{{\"custom_id\": \"{id}\", \"method\": \"POST\", \"url\": \"/v1/completions\", \"body\": {{\"prompt\": \
             {:?}, \"max_tokens\": 8}}}}\n",
            &tokens[..tokens.len() - id as usize]
        )
    };
    let lines: String = (0..8).map(line).chain(["{\"prompt\": 3}\n".to_owned()]).collect();
    std::fs::write(&path, lines).expect("written");
    let set = format!("workload.path={}", path.display());
    let job = |more: &[&str]| -> Vec<String> {
        let words = [
            "compare",
            "configs/openai-batch.toml",
            "--set",
            &set,
            "--set",
            "workload.tokenizer=",
            "--set",
            "workload.arrivals=",
            "--set",
            "workload.requests_per_s=",
        ];
        words.iter().chain(more).map(|word| (*word).to_owned()).collect()
    };
    let words = job(&[]);
    let error = bad(&words.iter().map(String::as_str).collect::<Vec<_>>(), 1);
    assert!(
        error.contains("batch.jsonl:9: ") && error.contains("expected {\"messages\""),
        "{error}"
    );
    let words = job(&["--set", "workload.skip_damaged_lines=true", "--json"]);
    let output = kvpool(&words.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let document: Value = serde_json::from_str(text(&output.stdout)).expect("JSON");
    assert_eq!(document["workload"]["requests"], 8);
    assert_eq!(document["workload"]["output_tokens"], 8 * 8, "cut off at max_tokens");
    let words =
        job(&["--set", "workload.skip_damaged_lines=true", "--set", "workload.output_tokens="]);
    let output = kvpool(&words.iter().map(String::as_str).collect::<Vec<_>>());
    let capped = text(&output.stdout);
    let row = capped.lines().find(|line| line.starts_with("contiguous-no-reuse  "));
    let row = row.unwrap_or_else(|| panic!("names stay in one piece: {capped}"));
    assert!(row.contains(" GiB  ") && row.chars().count() <= 100, "{capped}");
    assert!(capped.contains("8 answers are counted as long as max_tokens lets them"), "{capped}");
    assert_eq!(document["workload"]["damaged_lines"], 1);
    // Each prompt is the one before it without its last token, so its whole runs were there.
    assert!(document["workload"]["ceiling_hit_rate"].as_f64().expect("a number") > 0.8);
}

#[test]
fn costs_are_measured_in_a_form_that_a_file_takes() {
    let out = good(&["bench", "cost", "configs/quickstart.toml"]);
    let table = &out[out.find("\n[cost]").expect("a table") + 1..];
    let job = std::fs::read_to_string("configs/claims/a-bytes.toml").expect("there");
    let (before, rest) = job.split_once("[cost]").expect("a table");
    let config =
        Config::new(&format!("{before}{table}{}", &rest[rest.find("[[sweep]]").expect("one")..]));
    good(&["compare", config.path().to_str().expect("UTF-8")]);
}

/// What has nothing to run says so; it is no table of zeros.
#[test]
fn a_trace_without_requests_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("out");
    let job = traced(folder.path(), "");
    let error = bad(&[&words(&job)[..], &["--out", out.to_str().expect("UTF-8")]].concat(), 1);
    assert!(error.ends_with("lengths.csv: has no requests\n"), "{error}");
    assert!(!out.join("results.json").exists());
    let job = traced(folder.path(), "ten,2\n");
    let skip = ["--set", "workload.skip_damaged_lines=true"];
    let error = bad(&[&words(&job)[..], &skip].concat(), 1);
    assert!(
        error.contains("has no requests that can be read: 1 damaged line left out;"),
        "{error}"
    );
    // One that has fewer than asked for is used, and said.
    let job = traced(folder.path(), "10,2\n20,3\n");
    let output = kvpool(&[&words(&job)[..], &["--set", "workload.requests=5"]].concat());
    let said = "warning: the trace has 2 requests, and workload.requests asks for 5\n";
    assert_eq!(text(&output.stderr), said);
    let same = "columns={prompt='prompt',output='prompt'}";
    let error = bad(&[&words(&job)[..], &["--set", &format!("workload.{same}")]].concat(), 1);
    assert!(error.contains("are both \"prompt\"; expected two columns"), "{error}");
}

/// The baseline has its memory from the same device as the others, and no plan.
#[test]
fn the_baseline_keeps_to_the_device_too() {
    let job = ["configs/claims/b-fragmentation.toml", "--set", "workload.requests=20"];
    let out = good(&["plan", job[0]]);
    assert!(
        out.contains("\nwithout a plan, as dynamic is a baseline that replays simulate: "),
        "{out}"
    );
    let limit = ["--set", "device.memory_limit=1 GB"];
    let error = bad(&[&["compare"], &job[..], &limit].concat(), 1);
    assert!(error.contains("variant \"dynamic\": "), "{error}");
    assert!(error.contains("device.memory_limit"), "{error}");
}
