//! `kvpool generate` and `kvpool quality` as commands, with stories260K.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use super::at_hand;

fn kvpool(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvpool")).args(args).output().expect("runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// A configuration in a folder.
fn config(folder: &Path) -> Option<String> {
    let model = at_hand("models/stories260K")?;
    let model = model.canonicalize().expect("there");
    let path = folder.join("stories.toml");
    let content = format!(
        "model = {{ file = {:?}, tokenizer = {:?} }}
         limits = {{ max_seqs = 4, max_seq_len = 256, max_batch_tokens = 64 }}
         cache = {{ mode = 'paged', format = 'f16' }}",
        model.join("stories260K.bin"),
        model.join("tok512.bin")
    );
    fs::write(&path, content).expect("writes");
    Some(path.to_str().expect("UTF-8").to_owned())
}

#[test]
fn generate_writes_a_text() {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(config) = config(folder.path()) else { return };
    let args = ["generate", &config, "--prompt", "Once upon a time", "--max-tokens", "20"];
    let out = kvpool(&args);
    assert!(out.status.success(), "{out:?}");
    assert!(text(&out.stdout).starts_with(", there was a little girl named Lily."), "{out:?}");
    assert!(text(&out.stderr).starts_with("20 new tokens in "), "{out:?}");

    let several =
        kvpool(&[&args[..], &["-n", "3", "--temperature", "0.8", "--seed", "4"]].concat());
    let several = text(&several.stdout);
    let answers: Vec<&str> = several.split("--- ").skip(1).map(|one| &one[2..]).collect();
    assert_eq!(answers.len(), 3);
    assert_ne!(answers[0], answers[1]);
    let wrong = kvpool(&[&args[..], &["--top-p", "0"]].concat());
    assert_eq!(wrong.status.code(), Some(2));
    assert_eq!(text(&wrong.stderr), "error: top_p is 0; expected more than 0, at most 1\n");
}

#[test]
fn a_batch_that_was_interrupted_goes_on_where_it_was() {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(config) = config(folder.path()) else { return };
    let at = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let mut lines: Vec<String> = (0..9)
        .map(|i| {
            format!(
                r#"{{"id": "r{i}", "prompt": "Once upon a time, there was a {}", "n": {}, "temperature": 0.7, "seed": {i}, "max_tokens": 30}}"#,
                ["dog", "cat", "boy"][i % 3],
                1 + i % 3
            )
        })
        .collect();
    lines.push(format!(r#"{{"prompt": "{}"}}"#, "too long ".repeat(300)));
    fs::write(at("prompts.jsonl"), lines.join("\n\n")).expect("writes");
    let run = |out: &str, more: &[&str]| {
        let args = ["generate", &config, "--batch", &at("prompts.jsonl"), "--out", &at(out)];
        kvpool(&[&args[..], more].concat())
    };
    assert!(run("all.jsonl", &[]).status.success());
    let read = |name: &str| fs::read_to_string(at(name)).expect("there");
    let lines = |name: &str| -> Vec<serde_json::Value> {
        read(name).lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    };
    let all = lines("all.jsonl");
    assert_eq!(all.len(), 10);
    assert!(all.is_sorted_by_key(|line| line["line"].as_u64()));
    assert_eq!(all[1]["completions"].as_array().map(Vec::len), Some(2));
    assert_eq!((&all[1]["id"], &all[1]["line"]), (&"r1".into(), &3.into()));
    assert!(
        all[9]["error"].as_str().is_some_and(|error| error.contains("max_seq_len")),
        "{}",
        all[9]
    );

    // Not without being asked to.
    let refused = run("all.jsonl", &[]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("; --resume goes on with it"), "{refused:?}");

    // Three lines and a half.
    let content = read("all.jsonl");
    let kept: usize = content.split_inclusive('\n').take(3).map(str::len).sum();
    fs::write(at("part.jsonl"), &content[..kept + 25]).expect("writes");
    assert!(run("part.jsonl", &["--resume"]).status.success());
    assert_eq!(read("part.jsonl"), content);

    // A line that is not as it must be is named before anything is run.
    fs::write(at("prompts.jsonl"), "{\"prompt\": \"a\"}\n{\"promt\": \"b\"}\n").expect("writes");
    let wrong = run("new.jsonl", &[]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(text(&wrong.stderr).contains("prompts.jsonl:2: unknown field `promt`"), "{wrong:?}");
    assert!(!folder.path().join("new.jsonl").exists());
}

#[test]
fn quality_orders_the_formats_as_their_bits_do() {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(config) = config(folder.path()) else { return };
    let Some(prose) = at_hand("text/tinyshakespeare/input.txt") else { return };
    let prose = prose.to_str().expect("UTF-8");
    let args = ["quality", &config, "--text", prose, "--windows", "2", "--window-tokens", "128"];
    let out = kvpool(&[&args[..], &["--json"]].concat());
    assert!(out.status.success(), "{out:?}");
    let report: serde_json::Value = serde_json::from_slice(&out.stdout).expect("JSON");
    // A story model that reads Shakespeare: far from good, and the same for all.
    let kl = |format: &str| {
        let formats = report["formats"].as_array().expect("a list");
        let one = formats.iter().find(|one| one["format"] == format).expect("measured");
        assert_eq!(one["modes_equal"], true, "{format}");
        let perplexity = one["perplexity"].as_f64().expect("a number");
        assert!((10.0..1e4).contains(&perplexity), "{perplexity}");
        one["mean_kl"].as_f64().expect("a number")
    };
    assert_eq!(report["predicted"], 2 * 127);
    assert_eq!(kl("f32"), 0.0);
    let (f16, bf16, int8) = (kl("f16"), kl("bf16"), kl("int8/per-token-head"));
    assert!(0.0 < f16 && f16 < bf16 && bf16 < 0.01, "{f16} {bf16}");
    assert!(f16 < int8 && int8 < 0.05, "{int8}");
    assert_eq!(report["left_out"][0][0], "int8/per-group-32");
}
