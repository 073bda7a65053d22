//! Jobs that are replayed: `[cost]`, `[goals]`, `[[sweep]]`, arrivals, and the baseline.

use super::{JOB, read, refused, refused_line, with_line};

/// [`JOB`] without its variants, replayed; `[cost]` begins in line 15.
fn replayed() -> String {
    let job: Vec<&str> = JOB.lines().take(13).collect();
    format!(
        "{}\ncompute = \"none\"\n[cost]\nbandwidth = \"3.35 TB\"\nstep_us = 500\ntoken_us = 1.5\n\
         weight_bytes = 1_000_000\n[goals]\nfirst_token_ms = 2000\ntoken_ms = 50\n[[sweep]]\nmode = \
         [\"paged\", \"hybrid\"]\ntokens_per_block = [16, 32]\n",
        job.join("\n")
    )
}

#[test]
fn a_replay_is_read_and_written_again() {
    let source = read(&replayed()).unwrap_or_else(|error| panic!("{error}"));
    let names: Vec<String> = source.variants().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["paged-b16", "paged-b32", "hybrid-b16", "hybrid-b32"]);
    let written = toml::to_string_pretty(&source.config).expect("TOML");
    assert_eq!(read(&written).expect("its own text").config, source.config);
}

#[test]
fn edge_63_numbers_of_the_clock() {
    let text = replayed();
    for (line, key, problem) in [
        ("bandwidth = \"3.35 TBs\"", "cost.bandwidth", "\"3.35 TBs\" is not a size"),
        ("bandwidth = 0", "cost.bandwidth", "0 is out of range"),
        ("bandwidth = 1.5", "cost.bandwidth", "found the float 1.5"),
        ("bandwidth = 3350", "cost.bandwidth", "3,350 bytes a second are less than 1 MB; a plain"),
    ] {
        refused_line(&text, 16, line, key, &[problem]);
    }
    refused_line(
        &text,
        17,
        "step_us = -1",
        "cost.step_us",
        &["-1 is out of range; expected a number"],
    );
    refused_line(&text, 17, "step_us = \"1 ms\"", "cost.step_us", &["found the string \"1 ms\""]);
    refused_line(&text, 18, "tokens_us = 1", "cost.tokens_us", &["did you mean token_us?"]);
    refused_line(&text, 21, "first_token_ms = 0", "goals.first_token_ms", &["0 is out of range"]);
    refused(&with_line(&text, 16, ""), "t.toml:15: cost.bandwidth: is missing", &["3.35 TB"]);
    refused(
        &with_line(&text, 25, "tokens_per_block = [16, 12]"),
        "t.toml:23: sweep.0: with variant \"paged-b12\", cache.tokens_per_block: 12 is not a size",
        &["expected 8, 16"],
    );
}

/// The lines of README's list of the workload's keys, each in a job that has what goes with it.
#[test]
fn the_distributions_of_the_readme_are_accepted() {
    let readme = std::fs::read_to_string("README.md").expect("there");
    let mut keys = Vec::new();
    for line in readme.lines() {
        let Some((key, value)) = line.trim().split_once(" = { dist = ") else { continue };
        let Some((value, _)) = value.split_once('}') else { continue };
        let fixed = |key: &str| format!("{key} = {{ dist = \"fixed\", value = 2 }}");
        let beside: &[&str] = match key {
            "answers" => &[],
            "tool_calls" => &["turns", "tool_tokens"],
            "turns" => &["tool_calls", "tool_tokens"],
            _ => &["turns", "tool_calls", "tool_tokens"],
        };
        let mut lines: Vec<String> = beside.iter().map(|key| fixed(key)).collect();
        lines.push(format!("{key} = {{ dist = {value}}}"));
        let job: Vec<String> = replayed()
            .lines()
            .filter(|line| !line.starts_with(key))
            .map(|line| {
                if line.starts_with("requests = ") {
                    format!("{line}\n{}", lines.join("\n"))
                } else {
                    line.to_owned()
                }
            })
            .collect();
        if let Err(error) = read(&job.join("\n")) {
            panic!("{line}: {error}");
        }
        keys.push(key);
    }
    for key in ["prompt_tokens", "answers", "think_ms", "tool_calls"] {
        assert!(keys.contains(&key), "{keys:?}");
    }
}

#[test]
fn edge_64_what_needs_a_clock_and_what_has_none() {
    let none = "remove it, or give a [workload] with compute = \"none\"";
    let text = replayed();
    refused(&with_line(&text, 14, ""), "t.toml:15: cost: is about simulated time", &[none]);
    let text = with_line(&text, 10, "kind = \"generator\"\narrivals = \"poisson\"");
    refused(&text, "t.toml:9: workload.requests_per_s: is missing", &["arrivals = \"poisson\""]);
    let timed = with_line(
        JOB,
        11,
        "requests = 8\narrivals = \"bursts\"\nrequests_per_s = 1\nburst_requests = 2",
    );
    refused(
        &timed,
        "t.toml:12: workload.arrivals: needs a clock",
        &["compute = \"none\" and [cost]"],
    );
    let rate = "does not belong to workload.arrivals = \"at-once\"";
    refused(
        &with_line(JOB, 11, "requests = 8\nrequests_per_s = 2"),
        "t.toml:12: workload.requests_per_s: ",
        &[rate],
    );
    refused_line(
        JOB,
        16,
        "mode = \"dynamic\"",
        "variant.0.mode",
        &["\"dynamic\" is a baseline", none],
    );
    let lines: Vec<String> =
        replayed().lines().filter(|line| !is_cost(line)).map(str::to_owned).collect();
    refused(
        &lines.join("\n"),
        "t.toml: cost: is missing; workload.compute = \"none\" needs it",
        &[],
    );
}

fn is_cost(line: &str) -> bool {
    ["[cost]", "bandwidth", "step_us", "token_us", "weight_bytes"]
        .iter()
        .any(|key| line.starts_with(key))
}

#[test]
fn what_the_command_line_takes_out_is_not_there() {
    let text = with_line(
        &replayed(),
        10,
        "kind = \"generator\"\narrivals = \"poisson\"\nrequests_per_s = 2.0",
    );
    let out = ["workload.arrivals=", "workload.requests_per_s=", "sweep="].map(str::to_owned);
    let source = kvpool::config::parse(&text, "t.toml".as_ref(), &out);
    let source = source.unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(source.variants().len(), 1);
    // What has no weights of its own reads none.
    let none = "weight_bytes = 0";
    let text = replayed().replace("weight_bytes = 1_000_000", none);
    assert!(text.contains(none) && read(&text).is_ok());
    let below = replayed().replace("weight_bytes = 1_000_000", "weight_bytes = -1");
    let error = read(&below).expect_err("out of range").to_string();
    assert!(error.contains("0 or more") && !error.contains("above 0"), "{error}");
}

#[test]
fn edge_64_sweeps_are_checked_like_variants() {
    let text = replayed();
    refused_line(
        &text,
        24,
        "mode = [\"pagd\"]",
        "sweep.0.mode.0",
        &["found the string \"pagd\"; expected"],
    );
    let help = "expected a list, such as mode = [\"paged\"]";
    refused_line(&text, 24, "mode = \"paged\"", "sweep.0.mode", &["found the string", help]);
    let help = "is an empty list; give it values, or leave it out for the file's own";
    refused_line(&text, 24, "mode = []", "sweep.0.mode", &[help]);
    refused_line(&text, 24, "modes = [\"paged\"]", "sweep.0.modes", &["did you mean mode?"]);
    let twice =
        format!("{text}[[sweep]]\ntokens_per_block = [32, 64]\nmode = [\"paged\", \"hybrid\"]\n");
    let start = "t.toml:26: sweep.1: \"paged-b32\" is the name of another variant too";
    refused(&twice, start, &["give the sweep a name of its own"]);
    let empty = format!("{text}[[sweep]]\nname = \"x\"\n");
    refused(&empty, "t.toml:26: sweep.1: has no list", &["tokens_per_block = [16, 32, 64]"]);
    let wrong = with_line(&text, 25, "contiguous_layers = [\"first:99\"]");
    refused(
        &wrong,
        "t.toml:23: sweep.0: with variant \"hybrid\", cache.hybrid.contiguous_layers",
        &[],
    );
}
