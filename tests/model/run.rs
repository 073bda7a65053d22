//! `kvpool run` of a file with `[generate]`: completions of prompts by stories260K.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use super::at_hand;

const F16: &str = "[[variant]]
    name = 'contiguous f16'
    mode = 'contiguous'
    [[variant]]
    name = 'paged-f16'
    [[variant]]
    name = 'hybrid-f16'
    mode = 'hybrid'
    contiguous_layers = 'first:2'
    [[variant]]
    name = 'no-reuse'
    prefix_reuse = false
    [[variant]]
    name = 'int8'
    format = 'int8'";

/// A folder with a configuration in it, and prompts.
struct Job {
    folder: tempfile::TempDir,
}

impl Job {
    fn new(prompts: &[String], generate: &str, rest: &str) -> Option<Self> {
        let model = at_hand("models/stories260K")?.canonicalize().expect("there");
        let folder = tempfile::tempdir().expect("a folder");
        let job = Self { folder };
        let content = format!(
            "model = {{ file = {:?}, tokenizer = {:?} }}
             limits = {{ max_seqs = 4, max_seq_len = 256, max_batch_tokens = 64 }}
             cache = {{ mode = 'paged', format = 'f16', tokens_per_block = 8 }}
             [generate]
             engine = 'model'
             prompts = {:?}
             {generate}
             {rest}",
            model.join("stories260K.bin"),
            model.join("tok512.bin"),
            job.at("prompts.jsonl"),
        );
        fs::write(job.at("job.toml"), content).expect("writes");
        fs::write(job.at("prompts.jsonl"), prompts.join("\n")).expect("writes");
        Some(job)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, out: &str, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvpool"));
        command.arg("run").arg(self.at("job.toml")).arg("--out").arg(self.at(out)).args(more);
        command
    }

    fn run(&self, out: &str, more: &[&str]) -> Output {
        self.command(out, more).output().expect("runs")
    }

    fn read(&self, path: &str) -> String {
        fs::read_to_string(self.at(path)).expect("there")
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// Prompts that begin alike, greedy and sampled, with one answer and with several.
fn prompts(count: usize, max_tokens: usize) -> Vec<String> {
    let of = |i: usize| {
        format!(
            r#"{{"id": {i}, "prompt": "Once upon a time, there was a little {}", "n": {}, "temperature": {}, "seed": {i}, "max_tokens": {max_tokens}}}"#,
            ["dog", "cat", "boy", "girl named Lily"][i % 4],
            1 + i % 3,
            (i % 2) as f32 * 0.8
        )
    };
    (0..count).map(of).collect()
}

#[test]
fn every_variant_of_a_format_writes_the_same_file() {
    let Some(job) = Job::new(&prompts(9, 40), "stop = ['. ']", F16) else { return };
    let out = job.run("out", &[]);
    assert!(out.status.success(), "{out:?}");
    let expected = job.read("out/completions-paged-f16.jsonl");
    for other in ["completions-contiguous-f16-1.jsonl", "completions-hybrid-f16.jsonl"] {
        assert_eq!(job.read(&format!("out/{other}")), expected, "{other}");
    }
    assert_eq!(job.read("out/completions-no-reuse.jsonl"), expected);
    let int8 = job.read("out/completions-int8.jsonl");
    assert_ne!(int8, expected, "what it was made from is in it");
    for (number, line) in (1_u64..).zip(expected.lines()) {
        let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
        assert_eq!(line["line"], number);
        let answers = line["completions"].as_array().expect("a list");
        assert_eq!(answers.len() as u64, 1 + (number - 1) % 3);
        for one in answers {
            assert!(!one["text"].as_str().expect("a text").contains(". "), "{one}");
        }
    }
    let report: serde_json::Value =
        serde_json::from_str(&job.read("out/results.json")).expect("JSON");
    let runs = report["runs"].as_array().expect("a list");
    assert!(runs[1]["cached_tokens"].as_u64() > runs[3]["cached_tokens"].as_u64(), "{report}");
    assert_eq!(runs[0]["checksum"], runs[2]["checksum"]);
    assert_eq!(runs[2]["same_as_first"], serde_json::json!([18, 18]));
    assert!(text(&out.stdout).contains("18 of 18 answers are the first variant's"), "{out:?}");
}

#[test]
fn the_documented_story_comes_out_of_a_job() {
    let prompts = [r#"{"prompt": "", "max_tokens": 256}"#.to_owned()];
    let Some(job) = Job::new(&prompts, "", "") else { return };
    assert!(job.run("out", &[]).status.success());
    let line: serde_json::Value =
        serde_json::from_str(&job.read("out/completions-default.jsonl")).expect("JSON");
    let page = fs::read_to_string(at_hand("models/stories260K/stories260K.md").expect("there"));
    let written = line["completions"][0]["text"].as_str().expect("a text").trim_end();
    // 256 positions, one of them the token that texts begin with.
    assert!(written.len() > 500 && page.expect("a text").contains(written), "{written}");
}

#[test]
fn spread_keys_and_values_write_the_same_text_and_are_another_setting() {
    let prompts = [r#"{"prompt": "Once upon a time", "max_tokens": 60}"#.to_owned()];
    let Some(job) = Job::new(&prompts, "", "") else { return };
    let text = |folder: &str| {
        let line: serde_json::Value =
            serde_json::from_str(&job.read(&format!("{folder}/completions-default.jsonl")))
                .expect("JSON");
        line["completions"][0]["text"].as_str().expect("a text").to_owned()
    };
    assert!(job.run("plain", &[]).status.success());
    let spread = ["--set", "generate.spread=true"];
    for (folder, mode) in [("paged", "paged"), ("contiguous", "contiguous")] {
        let mode = format!("cache.mode='{mode}'");
        let out = job.run(folder, &[&spread[..], &["--set", &mode]].concat());
        assert!(out.status.success(), "{out:?}");
        assert_eq!(text(folder), text("plain"), "f16 has room for both");
    }
    let int8 = [&spread[..], &["--set", "cache.format='int8'"]].concat();
    assert!(job.run("int8", &int8).status.success());
    assert!(text("int8").starts_with(&text("plain")[..20]), "{}", text("int8"));
    let other = job.run("plain", &[&spread[..], &["--resume"]].concat());
    assert_eq!(other.status.code(), Some(2), "{other:?}");
}

#[test]
fn a_file_of_prompts_may_come_from_an_editor_of_windows() {
    let prompt = r#"{"prompt": "Once upon a time", "max_tokens": 4}"#;
    let mut files = Vec::new();
    for content in [format!("{prompt}\n"), format!("\u{feff}{prompt}\r\n\r\n")] {
        let Some(job) = Job::new(&[content], "", "") else { return };
        let out = job.run("out", &[]);
        assert!(out.status.success(), "{out:?}");
        files.push(job.read("out/completions-default.jsonl"));
    }
    let texts = |file: &str| {
        let line: serde_json::Value = serde_json::from_str(file).expect("JSON");
        line["completions"].clone()
    };
    assert_eq!(texts(&files[0]), texts(&files[1]));
}

/// Sends a process the signal of Ctrl-C.
fn interrupt(pid: u32) {
    let sent = Command::new("kill").args(["-INT", &pid.to_string()]).status().expect("runs");
    assert!(sent.success());
}

#[test]
#[cfg(unix)]
fn ctrl_c_keeps_what_is_done_and_resume_writes_the_file_of_an_uninterrupted_run() {
    let Some(job) = Job::new(&prompts(200, 200), "", "") else { return };
    let whole = job.run("whole", &[]);
    assert!(whole.status.success(), "{whole:?}");
    let whole = job.read("whole/completions-default.jsonl");
    assert_eq!(whole.lines().count(), 200);

    let file = job.at("part/completions-default.jsonl");
    let count = |file: &Path| fs::read_to_string(file).map_or(0, |text| text.lines().count());
    for round in 0..2 {
        let before = count(&file);
        let resume: &[&str] = if round == 0 { &[] } else { &["--resume"] };
        let child = job
            .command("part", resume)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("runs");
        let began = Instant::now();
        while count(&file) < before + 3 {
            assert!(began.elapsed() < Duration::from_secs(120), "it writes nothing");
            std::thread::sleep(Duration::from_millis(2));
        }
        interrupt(child.id());
        let out = child.wait_with_output().expect("ends");
        assert_eq!(out.status.code(), Some(1), "{out:?}");
        let said = text(&out.stderr);
        assert!(said.contains("interrupted: ") && said.contains("--resume"), "{said}");
        let (kept, part) = (count(&file), fs::read_to_string(&file).expect("there"));
        assert!(kept >= before + 3 && kept < 200, "{kept}");
        // Whole lines, and each one of the uninterrupted run's.
        assert!(part.lines().all(|line| whole.lines().any(|other| other == line)));
    }
    let resumed = job.run("part", &["--resume"]);
    assert!(resumed.status.success(), "{resumed:?}");
    assert!(text(&resumed.stdout).contains(" were there before"), "{resumed:?}");
    assert_eq!(fs::read_to_string(&file).expect("there"), whole);

    // Once more there is nothing to do, and nothing changes.
    assert!(job.run("part", &["--resume"]).status.success());
    assert_eq!(fs::read_to_string(&file).expect("there"), whole);
}

#[test]
fn what_does_not_go_together_is_refused_before_anything_is_computed() {
    let Some(job) = Job::new(&prompts(2, 5), "", "") else { return };
    let refused = |out: &Output, says: &str| {
        assert_eq!(out.status.code(), Some(2), "{out:?}");
        assert!(text(&out.stderr).contains(says), "{says}: {out:?}");
    };
    let config = job.at("job.toml");
    let config = config.to_str().expect("UTF-8");
    let kvpool = |args: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_kvpool")).args(args).output().expect("runs")
    };
    refused(&kvpool(&["run", config]), "give --out DIR");
    for (set, says) in [
        (
            "generate.answers=0",
            "generate.answers: 0 is out of range; expected a whole number from 1",
        ),
        ("generate.top_p=1.5", "generate.top_p: 1.5 is out of range"),
        ("generate.temperature=-1", "generate.temperature: -1 is out of range"),
        ("generate.engine='oracle'", "generate.engine"),
        ("generate.prompt='a.jsonl'", "did you mean prompts?"),
        ("generate.prompts='none.jsonl'", "none.jsonl: "),
        ("cache.mode='dynamic'", "cache.mode"),
    ] {
        refused(&job.run("new", &["--set", set]), says);
        assert!(!job.at("new/completions-default.jsonl").exists(), "{set}");
    }
    fs::write(job.at("empty.jsonl"), "\n\n").expect("writes");
    let empty = format!("generate.prompts={:?}", job.at("empty.jsonl"));
    refused(&job.run("new", &["--set", &empty]), "empty.jsonl: has no prompts; expected lines");
    refused(
        &job.run("new", &["--set", "generate.prompts='none.jsonl'"]),
        "the path begins at the current directory",
    );
    assert!(job.run("out", &[]).status.success());
    refused(&job.run("out", &[]), "--resume goes on with it");
    for set in ["generate.temperature=0.5", "cache.format='bf16'", "generate.max_tokens=4"] {
        // Lines that say all of it themselves are the same lines.
        let out = job.run("out", &["--resume", "--set", set]);
        if set.starts_with("cache") {
            refused(&out, "completions-default.jsonl:1: was made from another prompt");
        } else {
            assert!(out.status.success(), "{out:?}");
        }
    }
    fs::write(job.at("prompts.jsonl"), prompts(3, 6).join("\n")).expect("writes");
    refused(&job.run("out", &["--resume"]), "was made from another prompt than line 1 is now");
    fs::write(job.at("out/completions-default.jsonl"), "{\"a\": 1}\n").expect("writes");
    refused(&job.run("out", &["--resume"]), "completions-default.jsonl:1: is no completion");
}

/// Two programs that go on with one file would write lines twice. What an older version has written
/// twice is mended.
#[test]
#[cfg(unix)]
fn one_program_at_a_time_writes_a_file() {
    let Some(job) = Job::new(&prompts(200, 200), "", "") else { return };
    let file = job.at("out/completions-default.jsonl");
    let read = || fs::read_to_string(&file).unwrap_or_default();
    let first = job.command("out", &[]).stderr(Stdio::piped()).spawn().expect("runs");
    let began = Instant::now();
    while read().lines().count() < 3 {
        assert!(began.elapsed() < Duration::from_secs(120), "it writes nothing");
        std::thread::sleep(Duration::from_millis(2));
    }
    let second = job.run("out", &["--resume"]);
    interrupt(first.id());
    assert_eq!(first.wait_with_output().expect("ends").status.code(), Some(1), "interrupted");
    assert_eq!(second.status.code(), Some(2), "{second:?}");
    assert!(text(&second.stderr).contains("another program is writing it"), "{second:?}");

    let part = read();
    let (last, count) = (part.lines().last().expect("a line"), part.lines().count());
    fs::write(&file, format!("{part}{last}\n{last}\n")).expect("writes");
    let resumed = job.run("out", &["--resume"]);
    assert!(resumed.status.success(), "{resumed:?}");
    assert!(count < 200, "{count}");
    let number = |line: &str| {
        serde_json::from_str::<serde_json::Value>(line).expect("JSON")["line"].as_u64()
    };
    let lines: Vec<_> = read().lines().map(number).collect();
    assert_eq!(lines, (1..=200).map(Some).collect::<Vec<_>>());
}

#[test]
fn prompts_without_completions_are_not_passed_over_in_silence() {
    let long = format!(r#"{{"prompt": "{}"}}"#, "a little dog ".repeat(200));
    let short = r#"{"prompt": "Once", "max_tokens": 4}"#.to_owned();
    let Some(job) = Job::new(&[long.clone(), short, long.clone()], "", "") else { return };
    let config = job.at("job.toml");
    let generate = |prompts: &str, out: &str, more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvpool"));
        command.arg("generate").arg(&config).arg("--batch").arg(job.at(prompts));
        command.arg("--out").arg(job.at(out)).args(more).output().expect("runs")
    };
    for (out, is_warning) in [
        (generate("prompts.jsonl", "some.jsonl", &[]), true),
        // Also when an earlier run has written them.
        (generate("prompts.jsonl", "some.jsonl", &["--resume"]), true),
        (job.run("some", &[]), true),
        (job.run("some", &["--resume"]), true),
        {
            fs::write(job.at("prompts.jsonl"), format!("{long}\n\n\n{long}\n{long}"))
                .expect("writes");
            (generate("prompts.jsonl", "none.jsonl", &[]), false)
        },
        (job.run("none", &[]), false),
        (job.run("none", &["--resume"]), false),
    ] {
        let said = text(&out.stderr);
        assert_eq!(out.status.code(), Some(i32::from(!is_warning)), "{out:?}");
        let (kind, count) = if is_warning { ("warning: ", 2) } else { ("error: ", 3) };
        let line =
            said.lines().find(|line| line.starts_with(kind)).unwrap_or_else(|| panic!("{out:?}"));
        assert!(line.contains(&format!("{count} of 3 prompts can never run")), "{said}");
        assert!(line.contains("the first, line 1: "), "{said}");
        assert!(line.contains("limits.max_seq_len"), "{said}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_is_no_mistake_of_the_command_line() {
    let Some(job) = Job::new(&prompts(2, 5), "", "") else { return };
    let generate = |to: Stdio| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvpool"));
        let once = ["--prompt", "Once", "--max-tokens", "9"];
        command.arg("generate").arg(job.at("job.toml")).args(once).stdout(to);
        command.stderr(Stdio::piped()).spawn().expect("runs")
    };
    let full = fs::File::options().write(true).open("/dev/full").expect("opens");
    let out = generate(full.into()).wait_with_output().expect("ends");
    assert_eq!(out.status.code(), Some(1), "{out:?}");
    assert!(text(&out.stderr).contains("the standard output cannot be written: "), "{out:?}");
    // Whoever stops reading has seen enough.
    let mut child = generate(Stdio::piped());
    drop(child.stdout.take());
    let out = child.wait_with_output().expect("ends");
    assert_eq!((out.status.code(), text(&out.stderr)), (Some(0), String::new()));
    // What is no file is not written into, and not taken for one that is there already.
    let batch = ["--batch", "prompts.jsonl", "--out", "/dev/full"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvpool"));
    command.current_dir(job.folder.path()).arg("generate").arg("job.toml").args(batch);
    let out = command.output().expect("runs");
    assert_eq!(out.status.code(), Some(2), "{out:?}");
    assert!(text(&out.stderr).contains("/dev/full: is no file; expected"), "{out:?}");
}
