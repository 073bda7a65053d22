//! The command `kvpool`: what it prints, where, and with which exit status. Here is what the tests of
//! it share, and what concerns files and command lines themselves.

mod bench;
mod recommend;
mod replay;
mod run;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvpool"));
    command.args(arguments).current_dir(env!("CARGO_MANIFEST_DIR"));
    command
}

fn kvpool(arguments: &[&str]) -> Output {
    command(arguments).output().expect("the binary runs")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

/// Runs a command that must succeed and write nothing to the standard error.
fn good(arguments: &[&str]) -> String {
    let output = kvpool(arguments);
    assert_eq!(text(&output.stderr), "", "{arguments:?}");
    assert_eq!(output.status.code(), Some(0), "{arguments:?}");
    text(&output.stdout).to_owned()
}

/// Runs a command that must fail with a status, and gives its one error.
fn bad(arguments: &[&str], status: i32) -> String {
    let output = kvpool(arguments);
    assert_eq!(output.status.code(), Some(status), "{arguments:?}: {}", text(&output.stderr));
    let error = text(&output.stderr).to_owned();
    assert!(error.starts_with("error: "), "{error}");
    assert!(!error.contains("panicked") && !error.contains("RUST_BACKTRACE"), "{error}");
    error
}

/// A command whose standard output nobody reads; its status and what it says of errors.
fn unread(arguments: &[&str]) -> (Option<i32>, String) {
    let mut child = command(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("ends");
    (output.status.code(), text(&output.stderr).to_owned())
}

/// A file that the test writes.
struct Config {
    folder: tempfile::TempDir,
}

impl Config {
    fn new(text: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("c.toml"), text).expect("written");
        Self { folder }
    }

    fn path(&self) -> PathBuf {
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
    assert!(error.starts_with("error: configs/paged.toml: pool.capacity gives"), "{error}");
    let error = bad(&["plan", "configs/paged.toml", "--set", "pool.capacity=tokens:1e300"], 2);
    assert!(!error.contains("000000"), "{error}");
    #[cfg(not(feature = "model"))]
    for words in [&["generate", "x.toml", "--prompt", "a"][..], &["quality", "x.toml"]] {
        let error = bad(words, 2);
        assert!(error.contains("needs the model engine") && error.contains("--features model"));
    }
    let config = Config::new(SMALL);
    let output = kvpool(&["plan", config.path().to_str().expect("UTF-8")]);
    assert_eq!(output.status.code(), Some(2), "a variant is as much of the file");
    let error = text(&output.stderr);
    let variant = "c.toml: variant \"none\": pool.capacity: 32 tokens";
    assert!(error.starts_with("error: ") && error.contains(variant), "{error}");
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
    // Nor does that make one of what is wrong.
    let config = Config::new(SMALL);
    for more in [&[][..], &["--json"]] {
        let (status, error) =
            unread(&[&["plan", config.path().to_str().expect("UTF-8")], more].concat());
        assert_eq!(status, Some(2), "{error}");
        assert!(error.contains("c.toml: variant \"none\": "), "{error}");
    }
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
    assert!(notes.starts_with("without its variants: workspace of "), "{out}");
    let line = notes.lines().nth(1).expect("a note");
    assert!(line.starts_with("          variant \"big\": workspace of "), "{out}");
    assert!(line.contains("it will be refused") && !notes.contains("\"small\""), "{out}");
    // A replay has no pool, however large it is planned.
    let replay = ["plan", "configs/claims/d-block-size.toml", "--set"];
    let out = good(&[&replay[..], &["pool.capacity=budget:1000000 GiB"]].concat());
    assert!(out.contains(" B, nothing of the pool; it fits\n"), "{out}");
    assert!(!out.contains("it will be refused"), "{out}");
    let out = good(&[&replay[..], &["device.memory_limit=1 MiB"]].concat());
    assert!(out.contains(" B, nothing of the pool; it will be refused: "), "{out}");
}
