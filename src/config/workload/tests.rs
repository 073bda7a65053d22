//! Which keys of `[workload]` are refused beside which.

use super::check::*;
use super::*;

fn generator() -> WorkloadConfig {
    WorkloadConfig {
        requests: Some(8),
        prompt_tokens: Some(LengthDistribution::Fixed { value: 16 }),
        output_tokens: Some(LengthDistribution::Uniform { min: 1, max: 9 }),
        ..WorkloadConfig::new(WorkloadKind::Generator)
    }
}

fn trace(kind: WorkloadKind) -> WorkloadConfig {
    WorkloadConfig { path: Some("a.csv".into()), ..WorkloadConfig::new(kind) }
}

/// Checks a workload of which the file has these keys.
fn check(workload: &WorkloadConfig, given: &[&str]) -> Result<(), Complaint> {
    workload.check(&|key| given.iter().any(|own| key.strip_prefix("workload.") == Some(own)))
}

/// The key that is complained about.
fn refused(workload: &WorkloadConfig, given: &[&str]) -> String {
    check(workload, given).unwrap_err().key
}

#[test]
fn keys_of_the_other_kind_are_refused() {
    assert_eq!(check(&generator(), &[]), Ok(()));
    for (key, kinds) in OF_KINDS {
        for kind in [GENERATOR, FILES].concat() {
            let workload = match kind {
                WorkloadKind::Generator => generator(),
                _ => trace(kind),
            };
            let foreign = check(&workload, &[key]).is_err_and(|c| c.problem.contains("belong"));
            assert_eq!(foreign, !kinds.contains(&kind), "{key} {kind:?}");
        }
    }
    for scale in [0.0, -0.5, 1.5, f64::NAN, f64::INFINITY] {
        let scaled = WorkloadConfig { length_scale: scale, ..trace(WorkloadKind::AzureCsv) };
        assert_eq!(refused(&scaled, &["length_scale"]), "workload.length_scale");
    }
}

#[test]
fn what_a_kind_needs_is_named() {
    let none = WorkloadConfig { requests: None, ..generator() };
    assert_eq!(refused(&none, &[]), "workload.requests");
    let none = WorkloadConfig { output_tokens: None, ..generator() };
    assert_eq!(refused(&none, &[]), "workload.output_tokens");
    let zero = WorkloadConfig { requests: Some(0), ..generator() };
    assert_eq!(refused(&zero, &[]), "workload.requests");
    let samples = |check_samples| WorkloadConfig { check_samples, ..generator() };
    assert_eq!(check(&samples(MAX_CHECK_SAMPLES), &["check_samples"]), Ok(()));
    let many = samples(MAX_CHECK_SAMPLES + 1);
    assert_eq!(refused(&many, &["check_samples"]), "workload.check_samples");
    for kind in FILES {
        assert_eq!(refused(&WorkloadConfig::new(*kind), &[]), "workload.path");
    }
}

#[test]
fn counts_belong_to_what_they_count() {
    let four = Some(LengthDistribution::Fixed { value: 4 });
    let prefixes = WorkloadConfig { num_shared_prefixes: Some(2), ..generator() };
    assert_eq!(refused(&prefixes, &[]), "workload.num_shared_prefixes");
    let prefixes = WorkloadConfig { shared_prefix_tokens: four, ..prefixes };
    assert_eq!(check(&prefixes, &[]), Ok(()));
    for count in [0, MAX_SHARED_PREFIXES + 1] {
        let wrong = WorkloadConfig { num_shared_prefixes: Some(count), ..prefixes.clone() };
        assert_eq!(refused(&wrong, &[]), "workload.num_shared_prefixes");
    }
    let open = WorkloadConfig { max_open_conversations: Some(1), ..generator() };
    let complaint = check(&open, &[]).unwrap_err();
    assert_eq!(complaint.key, "workload.max_open_conversations");
    assert!(complaint.help.ends_with("or give workload.turns"), "{}", complaint.help);
    let open = WorkloadConfig { turns: four, ..open };
    assert_eq!(check(&open, &[]), Ok(()));
    let none = WorkloadConfig { max_open_conversations: Some(0), ..open };
    assert_eq!(refused(&none, &[]), "workload.max_open_conversations");
    let answers = WorkloadConfig { answers: four, compute: Compute::None, ..generator() };
    assert_eq!(check(&answers, &["answers"]), Ok(()));
    for wrong in [
        WorkloadConfig { compute: Compute::Attention, ..answers.clone() },
        WorkloadConfig { turns: four, ..answers.clone() },
        WorkloadConfig { shared_prefix_tokens: four, ..answers },
    ] {
        assert_eq!(refused(&wrong, &["answers"]), "workload.answers");
    }
    let agents = WorkloadConfig { tool_calls: four, ..generator() };
    assert_eq!(refused(&agents, &[]), "workload.tool_calls");
    let agents = WorkloadConfig { tool_tokens: four, ..agents };
    assert_eq!(check(&agents, &[]), Ok(()));
    let alone = WorkloadConfig { tool_tokens: four, ..generator() };
    assert_eq!(refused(&alone, &[]), "workload.tool_tokens");
}

/// A prompt has a token; an agent may call no tool, and the tool may take no time.
#[test]
fn only_times_and_calls_may_be_none() {
    let four = Some(LengthDistribution::Fixed { value: 4 });
    let none = Some(LengthDistribution::Fixed { value: 0 });
    let some = Some(LengthDistribution::Uniform { min: 0, max: 6 });
    let agents = WorkloadConfig {
        compute: Compute::None,
        turns: four,
        think_ms: none,
        tool_calls: some,
        tool_tokens: four,
        tool_ms: none,
        ..generator()
    };
    assert_eq!(check(&agents, &[]), Ok(()));
    let refuse = |wrong: WorkloadConfig, key: &str| {
        let complaint = check(&wrong, &[]).unwrap_err();
        assert_eq!(complaint.key, format!("workload.{key}"));
        assert_eq!(complaint.problem, "is 0, and must be at least 1");
    };
    refuse(WorkloadConfig { prompt_tokens: none, ..agents.clone() }, "prompt_tokens.value");
    refuse(WorkloadConfig { output_tokens: some, ..agents.clone() }, "output_tokens.min");
    refuse(WorkloadConfig { turns: some, ..agents.clone() }, "turns.min");
    refuse(WorkloadConfig { tool_tokens: none, ..agents.clone() }, "tool_tokens.value");
    refuse(WorkloadConfig { shared_prefix_tokens: some, ..agents }, "shared_prefix_tokens.min");
    let answers = WorkloadConfig { answers: some, compute: Compute::None, ..generator() };
    refuse(answers, "answers.min");
}

#[test]
fn what_needs_a_clock_needs_a_replay() {
    let replay = WorkloadConfig { compute: Compute::None, ..generator() };
    let arriving = |arrivals, base: &WorkloadConfig| WorkloadConfig { arrivals, ..base.clone() };
    let poisson =
        WorkloadConfig { requests_per_s: Some(2.0), ..arriving(Arrivals::Poisson, &replay) };
    assert_eq!(check(&poisson, &["requests_per_s"]), Ok(()));
    let timeless = WorkloadConfig { compute: Compute::Attention, ..poisson.clone() };
    assert_eq!(refused(&timeless, &["requests_per_s"]), "workload.arrivals");
    assert_eq!(refused(&poisson, &[]), "workload.requests_per_s");
    for key in ["time_scale", "burst_requests"] {
        assert_eq!(refused(&poisson, &[key, "requests_per_s"]), format!("workload.{key}"));
    }
    let rare = WorkloadConfig { requests_per_s: Some(1e-6), ..poisson.clone() };
    assert_eq!(check(&rare, &["requests_per_s"]), Ok(()));
    for rate in [0.0, 1e-300, 9e-7, 1e7, -1.0, f64::NAN, f64::INFINITY] {
        let wrong = WorkloadConfig { requests_per_s: Some(rate), ..poisson.clone() };
        assert_eq!(refused(&wrong, &["requests_per_s"]), "workload.requests_per_s");
    }
    let traced = arriving(Arrivals::Trace, &replay);
    assert_eq!(refused(&traced, &[]), "workload.arrivals");
    assert_eq!(refused(&replay, &["check_samples"]), "workload.check_samples");
}

#[test]
fn columns_and_hashes_are_whole() {
    let csv = trace(WorkloadKind::LengthsCsv);
    let columns = |columns| WorkloadConfig { columns, ..csv.clone() };
    let arrival = ColumnsConfig { arrival: Some("t".to_owned()), ..ColumnsConfig::default() };
    assert_eq!(refused(&columns(arrival.clone()), &[]), "workload.columns.arrival_unit");
    let unit = Some(ArrivalUnit::Seconds);
    let both = ColumnsConfig { arrival_unit: unit, ..arrival };
    assert_eq!(check(&columns(both), &[]), Ok(()));
    let unit = ColumnsConfig { arrival_unit: unit, ..ColumnsConfig::default() };
    assert_eq!(refused(&columns(unit), &[]), "workload.columns.arrival");
    let empty = ColumnsConfig { prompt: Some(" ".to_owned()), ..ColumnsConfig::default() };
    assert_eq!(refused(&columns(empty), &[]), "workload.columns.prompt");

    let hashed = trace(WorkloadKind::MooncakeJsonl);
    let scaled = WorkloadConfig { length_scale: 0.25, ..hashed.clone() };
    assert_eq!((check(&scaled, &[]), scaled.scaled_hash_block()), (Ok(()), 128));
    let broken = WorkloadConfig { length_scale: 0.3, ..hashed };
    assert_eq!(refused(&broken, &[]), "workload.length_scale");
}
