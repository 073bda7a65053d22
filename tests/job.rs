//! The batch job as a library: whole workloads through every mode.

use std::path::{Path, PathBuf};

use kvpool::config::{Source, parse};
use kvpool::error::JobError;
use kvpool::job::{Observer, Outcome, Progress, Report, Run, RunReport, Silent, csv, json, run};
use kvpool::plan::Plan;
use kvpool::units::Bytes;

use crate::common::on_cuda;

/// A small model with full and windowed layers and sinks.
pub(crate) const MODEL: &str = "
    model = { num_layers = 3, num_q_heads = 4, num_kv_heads = 2, head_dim = 32, \
              attention_window = [24, 0], sink_tokens = 2 }
    limits = { max_seqs = 6, max_seq_len = 160, max_batch_tokens = 48, max_step_tokens = 16 }
    cache = { mode = 'paged', tokens_per_block = 8, format = 'f16' }
";

/// Twenty requests of mixed lengths, all of which can run in the whole pool.
const MIXED: &str = "
    [workload]
    kind = 'generator'
    seed = 3
    requests = 20
    prompt_tokens = { dist = 'lognormal', median = 30, sigma = 0.8, min = 1, max = 90 }
    output_tokens = { dist = 'uniform', min = 1, max = 60 }
    check_samples = 40
";

/// A job of some parts; on a CUDA device where the tests run on one.
pub(crate) fn source(parts: &[&str]) -> Source {
    let overrides = if on_cuda() { vec!["device.kind=cuda".to_owned()] } else { Vec::new() };
    parse(&parts.join("\n"), Path::new("job.toml"), &overrides)
        .unwrap_or_else(|error| panic!("{error}"))
}

/// As many requests, or a quarter of them on a CUDA device: the emulated one is a few hundred times
/// slower.
pub(crate) fn sized(requests: u64) -> u64 {
    if on_cuda() { requests / 4 } else { requests }
}

/// The mixed requests, as many as the device is fast enough for.
fn mixed() -> String {
    MIXED.replace("requests = 20", &format!("requests = {}", sized(20)))
}

/// A list of variants, one a line, without those that are about the CPU where the tests run on a
/// CUDA device.
pub(crate) fn for_the_device(variants: &str) -> String {
    let of_cpu = |line: &&str| line.contains("threads =") || line.contains("kernel =");
    let kept = variants.lines().filter(|line| !(on_cuda() && of_cpu(line)));
    kept.collect::<Vec<_>>().join("\n")
}

pub(crate) fn report(parts: &[&str]) -> Report {
    run(&source(parts), &mut Silent).unwrap_or_else(|error| panic!("{error}"))
}

/// The runs of a report in which nothing may have failed.
pub(crate) fn done(report: &Report) -> Vec<&RunReport> {
    assert_eq!(report.problems(), Vec::<String>::new());
    let runs = report.runs.iter().map(|run| match run {
        Run::Done(run) => &**run,
        Run::Failed(run) => panic!("{}", run.error),
    });
    runs.collect()
}

#[test]
fn outputs_are_equal_in_every_mode_and_right() {
    let variants = "
        variant = [
            { name = 'contiguous', mode = 'contiguous' },
            { name = 'paged', mode = 'paged' },
            { name = 'hybrid', mode = 'hybrid' },
            { name = 'blocks of 64', tokens_per_block = 64 },
            { name = 'few blocks', capacity = 'tokens:200' },
            { name = 'preempting', capacity = 'tokens:200', admission = 'max-utilization' },
            { name = 'three threads', threads = 3 },
            { name = 'f32', format = 'f32' },
            { name = 'f32 contiguous', format = 'f32', mode = 'contiguous' },
            { name = 'bf16', format = 'bf16' },
            { name = 'int8', format = 'int8' },
            { name = 'int8 hybrid', format = 'int8', mode = 'hybrid' },
            { name = 'int8 groups', format = 'int8', scale = 'per-group-32' },
            { name = 'reference', kernel = 'reference' },
        ]";
    let (requests, samples) = (sized(20), sized(36) - 1);
    let report = report(&[MODEL, &for_the_device(variants), &mixed()]);
    let runs = done(&report);
    for run in &runs {
        assert_eq!(run.planned_bytes, run.allocated_bytes, "{}", run.variant);
        assert_eq!(run.requests_completed, requests, "{}", run.variant);
        assert!(run.outputs_checked > samples, "{}", run.variant);
        // `problems` holds the errors against the formats' limits.
        println!("{:>16}: max_abs_error {:.1e}", run.variant, run.max_abs_error.unwrap());
        assert!(run.peak_used_bytes <= run.peak_held_bytes);
        assert!(run.peak_held_bytes <= run.planned_bytes);
    }
    let equal: Vec<usize> = report
        .comparisons
        .iter()
        .map(|comparison| {
            assert_eq!(comparison.outcome, Outcome::Equal);
            comparison.variants.len()
        })
        .collect();
    assert_eq!(equal, if on_cuda() { [6, 2, 2] } else { [7, 2, 2] }, "f16, f32, int8");
    // Different formats and kernels round differently.
    let mut checksums: Vec<&str> =
        runs.iter().map(|run| run.output_checksum.as_deref().expect("computed")).collect();
    checksums.sort_unstable();
    checksums.dedup();
    assert_eq!(checksums.len(), if on_cuda() { 5 } else { 6 });
    let preempting = runs.iter().find(|run| run.variant == "preempting").unwrap();
    assert!(preempting.preemptions > 0, "the comparison covers recomputed requests");
}

#[test]
fn a_job_is_the_same_every_time() {
    let variants = "variant = [{ name = 'a', admission = 'max-utilization' }, { name = 'b' }]";
    let capacity = "pool.capacity = 'tokens:200'";
    let first = report(&[capacity, MODEL, variants, &mixed()]);
    let second = report(&[capacity, MODEL, variants, &mixed()]);
    // All but the times.
    let fixed = |run: &RunReport| {
        (
            run.output_checksum.clone(),
            (run.steps, run.preemptions, run.tokens_appended, run.peak_running),
            (run.peak_used_bytes, run.peak_held_bytes, run.peak_promised_bytes),
            (run.mean_waste_bytes.to_bits(), run.mean_running.to_bits()),
            run.max_abs_error.map(f64::to_bits),
        )
    };
    for (first, second) in done(&first).iter().zip(done(&second)) {
        assert_eq!(fixed(first), fixed(second));
    }
    let other = report(&[capacity, MODEL, variants, &mixed().replace("seed = 3", "seed = 4")]);
    assert_ne!(done(&first)[0].output_checksum, done(&other)[0].output_checksum);
}

/// A workload in which all requests have the same lengths.
fn fixed(requests: u32, prompt: u32, output: u32) -> String {
    format!(
        "[workload]\nkind = 'generator'\nrequests = {requests}\n\
         prompt_tokens = {{ dist = 'fixed', value = {prompt} }}\n\
         output_tokens = {{ dist = 'fixed', value = {output} }}\ncheck_samples = 8"
    )
}

#[test]
fn edge_12_what_can_never_fit_is_refused_and_the_rest_runs() {
    let variants = "variant = [
        { name = 'guaranteed', capacity = 'tokens:64' },
        { name = 'max-utilization', capacity = 'tokens:64', admission = 'max-utilization' },
        { name = 'roomy' },
    ]";
    let mixed = "
        [workload]
        kind = 'generator'
        seed = 5
        requests = 40
        prompt_tokens = { dist = 'uniform', min = 10, max = 150 }
        output_tokens = { dist = 'uniform', min = 1, max = 40 }";
    let report = report(&[MODEL, variants, mixed]);
    let runs = done(&report);
    for run in &runs[..2] {
        assert!(run.requests_refused_never_fits > 0, "longer than 64 tokens, within 160");
        assert!(run.requests_refused_too_long > 0, "longer than max_seq_len = 160");
        assert!(run.requests_completed > 0);
        let refused = run.requests_refused_never_fits + run.requests_refused_too_long;
        assert_eq!(run.requests_completed + refused, 40, "none waits for ever");
    }
    assert_eq!(runs[2].requests_refused_never_fits, 0);
    let outcomes: Vec<_> = report.comparisons.iter().map(|c| c.outcome).collect();
    assert_eq!(outcomes, [Outcome::Equal, Outcome::NotComparable], "two sets of requests");
}

#[test]
fn edge_13_as_many_full_length_sequences_run_as_the_plan_says() {
    let mut runs = 0;
    for mode in ["contiguous", "paged", "hybrid"] {
        let capacities = ["tokens:500", "worst-case", "budget:200 KiB"];
        for capacity in &capacities[..if on_cuda() { 1 } else { 3 }] {
            let settings = format!(
                "pool.capacity = '{capacity}'\n{MODEL}\nvariant = [{{ name = 'v', mode = '{mode}' }}]"
            );
            let planned = source(&[&settings]);
            let (_, config) = planned.variants().remove(0);
            let plan = Plan::new(&config, &planned.geometry).unwrap();
            let certain = plan.full_length_seqs;
            assert!(certain > 0, "{mode}, {capacity}");
            // Long outputs, so that all of them are alive at once.
            let report = report(&[&settings, &fixed(certain, 10, 150)]);
            let run = done(&report)[0];
            assert_eq!(run.peak_running, certain, "{mode}, {capacity}");
            assert_eq!(run.requests_completed, u64::from(certain));
            assert_eq!(run.preemptions, 0);
            runs += 1;
        }
    }
    assert_eq!(runs, if on_cuda() { 3 } else { 9 });
}

#[test]
fn edge_18_preempt_and_resume_do_not_ping_pong() {
    let mut preempting = 0;
    for mode in ["paged", "hybrid"] {
        for tokens in [168, 200, 320] {
            for seed in 0..4 {
                let settings = format!(
                    "pool.capacity = 'tokens:{tokens}'\n{MODEL}\nvariant = [\n\
                     {{ name = 'max', mode = '{mode}', admission = 'max-utilization' }},\n\
                     {{ name = 'guaranteed', mode = '{mode}' }}]"
                );
                let workload = format!(
                    "[workload]\nkind = 'generator'\nrequests = 16\nseed = {seed}\n\
                     prompt_tokens = {{ dist = 'uniform', min = 1, max = 60 }}\n\
                     output_tokens = {{ dist = 'fixed', value = 100 }}\ncheck_samples = 8"
                );
                let report = report(&[&settings, &workload]);
                let [max, guaranteed] = done(&report)[..] else { panic!("two variants") };
                assert_eq!(report.comparisons[0].outcome, Outcome::Equal);
                assert_eq!((max.requests_completed, guaranteed.preemptions), (16, 0));
                // Every admission ends in a new token, so no request is preempted more often than
                // it has output tokens; and what is computed twice stays within reason.
                assert_eq!(max.preemptions_without_progress, 0, "{mode}, {tokens}, {seed}");
                assert!(max.most_preemptions_of_one <= 100);
                assert!(
                    max.tokens_appended <= 4 * guaranteed.tokens_appended,
                    "{mode}, {tokens}, {seed}: {} of {} tokens",
                    max.tokens_appended,
                    guaranteed.tokens_appended
                );
                assert!(max.steps <= guaranteed.steps, "it is there to be faster");
                preempting += u32::from(max.preemptions > 0);
            }
        }
    }
    assert!(preempting >= 12, "only {preempting} of 24 jobs preempted");
}

#[test]
fn a_step_may_be_smaller_than_the_number_of_sequences() {
    // Six sequences, four tokens a step: decoding alone would fill it.
    let small = MODEL
        .replace("max_batch_tokens = 48", "max_batch_tokens = 4")
        .replace("max_step_tokens = 16", "max_step_tokens = 3");
    let variants = "variant = [{ name = 'a' }, { name = 'b', admission = 'max-utilization' },
        { name = 'c', mode = 'contiguous' }]";
    let report = report(&[&small, variants, &mixed()]);
    assert!(done(&report).iter().all(|run| run.requests_completed == sized(20)));
    assert_eq!(report.comparisons[0].outcome, Outcome::Equal);
}

#[test]
fn a_variant_that_cannot_run_is_reported_and_the_others_run() {
    let variants = "variant = [
        { name = 'too small', mode = 'contiguous', capacity = 'tokens:100' },
        { name = 'fine' },
    ]";
    let report = report(&[MODEL, variants, &fixed(2, 5, 5)]);
    let [Run::Failed(failed), Run::Done(fine)] = &report.runs[..] else { panic!("{report:?}") };
    assert!(failed.error.contains("variant \"too small\": pool.capacity"), "{}", failed.error);
    assert_eq!(fine.requests_completed, 2);
    assert_eq!(report.problems(), std::slice::from_ref(&failed.error));
    assert!(json(&report).contains("\"error\": \"variant"));
    assert_eq!(csv(&report).lines().count(), 3);
}

#[test]
fn memory_is_checked_before_anything_is_allocated() {
    let limited = format!("device.memory_limit = '64 KiB'\n{MODEL}");
    let report = report(&[&limited, &fixed(1, 5, 5)]);
    let Run::Failed(failed) = &report.runs[0] else { panic!("{report:?}") };
    assert!(
        failed.error.contains("bytes short") && failed.error.contains("device.memory_limit"),
        "{}",
        failed.error
    );
}

#[test]
fn a_file_without_workload_is_no_job() {
    let error = run(&source(&[MODEL]), &mut Silent).expect_err("nothing to run");
    assert!(matches!(error, JobError::NoWorkload { .. }), "{error}");
    assert!(error.to_string().starts_with("job.toml: has no [workload]"), "{error}");
}

/// Notes what it is told.
#[derive(Default)]
struct Notes {
    variants: Vec<String>,
    opened: Option<(Bytes, Bytes)>,
    last: Option<Progress>,
    steps: u64,
    finished: usize,
}

impl Observer for Notes {
    fn variant(&mut self, name: &str, index: usize, of: usize) {
        self.variants.push(format!("{name} {index}/{of}"));
    }
    fn opening(&mut self, done: Bytes, total: Bytes) {
        self.opened = Some((done, total));
    }
    fn step(&mut self, progress: &Progress) {
        let before = self.last.map_or(0, |last| last.tokens_done);
        assert!(progress.tokens_done >= before || progress.steps == 1);
        self.last = Some(*progress);
        self.steps += 1;
    }
    fn finished(&mut self, run: &Run) {
        assert!(self.variants.last().is_some_and(|name| name.starts_with(run.variant())));
        self.finished += 1;
    }
}

#[test]
fn the_observer_sees_everything_come_to_its_end() {
    let mut notes = Notes::default();
    let variants = "variant = [{ name = 'x' }, { name = 'y' }]";
    let report = run(&source(&[MODEL, variants, MIXED]), &mut notes).unwrap();
    assert_eq!(notes.variants, ["x 0/2", "y 1/2"]);
    assert_eq!(notes.finished, 2);
    let (opened, total) = notes.opened.expect("opened");
    assert_eq!(opened, total);
    let last = notes.last.expect("steps");
    assert_eq!((last.running, last.waiting), (0, 0));
    assert_eq!(last.tokens_done, last.tokens_total);
    assert_eq!(notes.steps, done(&report).iter().map(|run| run.steps).sum::<u64>());
}

fn trace_job(path: &Path, more: &str) -> Result<Report, JobError> {
    let workload = format!("[workload]\nkind = 'azure-csv'\npath = '{}'\n{more}", path.display());
    run(&source(&[MODEL, &workload]), &mut Silent)
}

#[test]
fn traces_run_and_their_mistakes_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.csv");
    let header = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
    std::fs::write(&path, format!("{header}t,400,40\nt,3,1\nt,1000,200\nt,4,x\n")).unwrap();
    // The fourth line is not reached.
    let report = trace_job(&path, "requests = 3\nlength_scale = 0.1").unwrap();
    let ran = done(&report)[0];
    assert_eq!((ran.requests_completed, ran.tokens_appended), (3, 44 + 2 + 120));
    let error = trace_job(&path, "length_scale = 0.1").expect_err("the fourth line");
    assert!(
        error.to_string().contains("trace.csv:5: GeneratedTokens is \"x\"; expected"),
        "{error}"
    );
    let error = trace_job(&folder.path().join("none.csv"), "").expect_err("no such file");
    assert!(error.to_string().contains("Azure/AzurePublicDataset"), "{error}");
}

#[test]
fn real_requests_run_in_every_mode() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/data/traces/azure2023");
    let trace: Option<PathBuf> = std::fs::read_dir(&folder).ok().and_then(|entries| {
        let mut paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
        paths.find(|path| path.extension().is_some_and(|ext| ext == "csv"))
    });
    let Some(trace) = trace else {
        println!("skipped: no trace in {}", folder.display());
        return;
    };
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/azure-chat.toml");
    let overrides = [
        format!("workload.path={}", trace.display()),
        "workload.requests=12".to_owned(),
        "workload.length_scale=0.1".to_owned(),
    ];
    let source = kvpool::config::load(&config, &overrides).unwrap();
    let report = run(&source, &mut Silent).unwrap();
    assert!(done(&report).iter().all(|run| run.requests_completed == 12));
    assert_eq!(report.comparisons.len(), 1);
    assert_eq!(report.comparisons[0].outcome, Outcome::Equal);
    assert_eq!(report.comparisons[0].variants.len(), 4);
}
