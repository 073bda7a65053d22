//! `kvpool recommend`.

use serde_json::Value;

use super::{Config, good};

#[test]
fn recommend_prints_a_file_that_can_be_run() {
    let job = ["configs/claims/e-system-prompt.toml", "--set", "workload.requests=60"];
    let out = good(&[&["recommend"], &job[..]].concat());
    for words in ["# kvpool recommend: ", "# Best: ", "# The runners-up", "\n[cache]\n"] {
        assert!(out.contains(words), "{words}: {out}");
    }
    assert!(out.contains("# INT8 would hold") && out.contains("--formats f16,int8"), "{out}");
    let config = Config::new(&out);
    let ran = good(&["run", config.path().to_str().expect("UTF-8"), "--json"]);
    let document: Value = serde_json::from_str(&ran).expect("JSON");
    assert_eq!(document["runs"][0]["requests_completed"], 60);
}

/// Candidates whose figures are each close to the next one's, and the first's not to the last's.
#[test]
fn recommend_ranks_candidates_that_are_nearly_alike() {
    let job = ["recommend", "configs/claims/h-hybrid.toml", "--formats", "f16,int8"];
    let cut = ["--set", "workload.requests=160", "--set", "workload.seed=8"];
    assert!(good(&[&job[..], &cut].concat()).contains("# Best: "));
}

#[test]
fn a_format_that_is_named_twice_counts_once() {
    let job = [
        "recommend",
        "configs/claims/e-system-prompt.toml",
        "--set",
        "workload.requests=20",
        "--formats",
        "f16,f16",
    ];
    let out = good(&job);
    assert!(out.contains("# Best: "), "{out}");
    assert!(out.contains("--formats f16,int8 allows it"), "{out}");
}

#[test]
fn static_scales_are_not_said_to_be_measured() {
    let job = |scale: &[&str]| {
        let words = [
            "recommend",
            "configs/claims/e-system-prompt.toml",
            "--set",
            "workload.requests=20",
            "--formats",
            "f16,int8",
            "--set",
            "cache.format=int8",
        ];
        good(&[&words[..], scale].concat())
    };
    let set = "--set";
    let of_tensors = job(&[
        set,
        "cache.int8.scale=per-tensor",
        set,
        "cache.int8.k_scale=0.1",
        set,
        "cache.int8.v_scale=0.1",
    ]);
    assert!(of_tensors.contains("#   f16: the largest error of "), "{of_tensors}");
    assert!(of_tensors.contains("#   int8/per-tensor: not measured"), "{of_tensors}");
    assert!(!of_tensors.contains("int8: the largest"), "{of_tensors}");
    let of_groups = job(&[set, "cache.int8.scale=per-group-32"]);
    assert!(of_groups.contains("#   int8/per-group-32: the largest error of "), "{of_groups}");
    assert!(!of_groups.contains("not measured"), "{of_groups}");
}

/// Where all candidates keep up with the arrivals, the one that needs the least memory is chosen,
/// whichever was the best with all of it; and goals that nobody keeps are said to be that.
#[test]
fn recommend_looks_for_the_least_memory_in_every_mode() {
    let job = [
        "recommend",
        "configs/claims/e-system-prompt.toml",
        "--set",
        "workload.requests=60",
        "--set",
        "limits.max_seqs=1",
    ];
    let out = good(&job);
    assert!(out.contains("# Best: contiguous-f16: "), "{out}");
    assert!(out.contains("#   contiguous-f16: more than 75 %"), "{out}");
    assert!(out.contains("#   paged-b16-guaranteed-f16: 50 %: "), "{out}");
    assert!(out.contains("# Chosen, for the least memory and then by rank: "), "{out}");
    assert!(out.contains("\nmode = \"paged\"\n"), "{out}");
    let goals = ["--set", "goals={first_token_ms=0.001,token_ms=0.001}"];
    let out = good(&[&job[..], &goals].concat());
    assert!(out.contains("# No candidate keeps [goals] with a single request"), "{out}");
    assert!(out.contains("the measure is requests a second."), "{out}");
    assert!(!out.contains(": 0.00/s"), "{out}");
}
