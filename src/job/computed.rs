//! A job that computes, as `kvpool compare` runs it: some of its variants, what is done not again,
//! stopped between two steps; and its results as files, from files, and put together.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use serde::{Deserialize, Serialize};

use super::check::Checker;
use super::formula::Formula;
use super::output::{Shard, go_on, prepare, read_results, replace};
use super::replay::{WorkloadSummary, fingerprint, summarize};
use super::report::{Comparison, FailedRun, Report, Run};
use super::{Job, Observer, output, workload, workload_of};
use crate::config::{Compute, Config, Source};
use crate::error::JobError;
use crate::plan::KvFormat;

/// Which variants run, and how long.
#[derive(Debug, Default)]
pub struct ComputeOptions<'a> {
    /// Which part of the variants: the k-th of n, counted from 1. All of them without.
    pub shard: Option<(usize, usize)>,
    /// Results of an earlier run: a variant that is among them with the same settings and workload
    /// is not run again.
    pub done: &'a [ComputedRun],
    /// Set to stop: what is complete then is the result.
    pub stop: Option<&'a AtomicBool>,
}

/// A job that was computed. Times are measured; everything else is the same on every run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Computed {
    /// The version of kvpool.
    pub version: String,
    /// The settings in force, as `kvpool config` prints them.
    pub config: String,
    /// What the workload has.
    pub workload: WorkloadSummary,
    /// One entry a variant; those of other shards, and those that were interrupted, are not there.
    pub runs: Vec<ComputedRun>,
    /// Variants that must have given the same outputs, and whether they did.
    pub comparisons: Vec<Comparison>,
    /// How many variants the job has.
    pub variants: usize,
    /// What tells each of them from others; empty in results that were read.
    #[serde(skip)]
    pub fingerprints: Vec<String>,
}

/// One variant.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ComputedRun {
    /// Its place in the file, counted from 0.
    pub index: usize,
    /// What tells its settings and workload from others.
    pub fingerprint: String,
    /// What came out.
    #[serde(flatten)]
    pub run: Run,
}

/// Computes a job, or the part of it that is asked for.
///
/// # Errors
/// As [`super::run`]; [`JobError::OtherJob`] when the results to go on with have no variant of it.
pub fn compute(
    source: &Source,
    options: &ComputeOptions<'_>,
    observer: &mut dyn Observer,
) -> Result<Computed, JobError> {
    let workload = workload_of(source)?;
    if workload.compute == Compute::None {
        return Err(JobError::Replays { path: source.path.clone() });
    }
    let mut requests = workload::requests(workload)?;
    let summary = summarize(&requests);
    let formula = Formula::of(requests.take_tokens(workload.seed), &source.geometry);
    let requests = requests.list;
    let checker = Checker::new(
        &formula,
        &source.geometry,
        &requests,
        source.config.limits.max_seq_len,
        workload.seed,
        workload.check_samples,
    );
    let job = Job {
        geometry: &source.geometry,
        requests,
        open: workload.max_open_conversations,
        formula,
        checker,
        stop: options.stop,
    };
    let all = source.variants();
    let variants = all.len();
    let of = |(name, config): &(String, Config)| {
        // Times depend on the threads, outputs do not.
        let own_name = format!("{name}, {} threads", config.device.threads);
        fingerprint(&own_name, config, &source.geometry, &summary)
    };
    let fingerprints: Vec<String> = all.iter().map(of).collect();
    go_on(done(options.done), &fingerprints)?;
    let mut runs = Vec::new();
    for (index, (name, config)) in all.into_iter().enumerate() {
        if options.shard.is_some_and(|(k, n)| index % n != k - 1) {
            continue;
        }
        let fingerprint = fingerprints[index].clone();
        let before = (options.done.iter())
            .find(|done| matches!(done.run, Run::Done(_)) && done.fingerprint == fingerprint);
        if let Some(done) = before {
            runs.push(ComputedRun { index, ..done.clone() });
            continue;
        }
        // What is done is taken over behind this one too: the files are written anew.
        if options.stop.is_some_and(|stop| stop.load(Relaxed)) {
            continue;
        }
        observer.variant(&name, index, variants);
        let run = match job.run_variant(&name, &config, observer) {
            Ok(Some(run)) => Run::Done(Box::new(run)),
            Ok(None) => continue,
            Err(error) => Run::Failed(FailedRun {
                variant: name,
                mode: config.cache.mode,
                format: KvFormat::of(&config).name().to_owned(),
                error: error.to_string(),
            }),
        };
        observer.finished(&run);
        runs.push(ComputedRun { index, fingerprint, run });
    }
    let config = toml::to_string_pretty(&source.config).unwrap_or_default();
    let version = env!("CARGO_PKG_VERSION").to_owned();
    let comparisons = Vec::new();
    let workload = summary;
    let computed =
        Computed { version, config, workload, runs, comparisons, variants, fingerprints };
    Ok(computed.compared())
}

impl Computed {
    /// With the comparisons worked out for the variants that are there.
    fn compared(mut self) -> Self {
        self.sort();
        self.comparisons = self.report().comparisons;
        self
    }

    /// What each format costs in accuracy, a sentence each.
    #[must_use]
    pub fn errors(&self) -> Vec<String> {
        let done = |run: &ComputedRun| match &run.run {
            Run::Done(run) => Some((**run).clone()),
            Run::Failed(_) => None,
        };
        let runs: Vec<_> = self.runs.iter().filter_map(done).collect();
        super::html::errors(&runs.iter().collect::<Vec<_>>())
    }

    /// The variants as `kvpool run` reports them.
    #[must_use]
    pub fn report(&self) -> Report {
        Report::new(self.runs.iter().map(|run| run.run.clone()).collect())
    }
}

/// The results as one JSON document, with a line break at the end.
#[must_use]
pub fn json(computed: &Computed) -> String {
    let mut text = serde_json::to_string_pretty(computed).unwrap_or_default();
    text.push('\n');
    text
}

/// Writes `results.json`, `results.csv` and `report.html` into a folder, which is created when it
/// is not there. A file is replaced as a whole or not at all. Variants of the same job that are
/// there already, and not among these, stay.
///
/// # Errors
/// [`JobError::Write`].
pub fn write(computed: &Computed, folder: &Path) -> Result<(), JobError> {
    prepare(folder)?;
    let _lock = output::lock(folder);
    // What cannot be read has nothing that is missed.
    let computed = &output::with_others(computed, read(folder).unwrap_or_default()).compared();
    replace(&folder.join("results.json"), &json(computed))?;
    replace(&folder.join("results.csv"), &output::csv(&computed.report()))?;
    replace(&folder.join("report.html"), &super::html::computed(computed))
}

/// Whether a folder has the results of a job that computes, and not those of a replay.
#[must_use]
pub fn is_in(folder: &Path) -> bool {
    let text = std::fs::read_to_string(folder.join("results.json")).unwrap_or_default();
    let document = serde_json::from_str::<serde_json::Value>(&text);
    document.is_ok_and(|document| document.get("comparisons").is_some())
}

/// Reads what an earlier run wrote into a folder; `None` when there is nothing.
///
/// # Errors
/// [`JobError::Results`] for a file that is no result of such a job.
pub fn read(folder: &Path) -> Result<Option<Computed>, JobError> {
    read_results(folder)
}

/// Whether earlier results have every variant that newer ones have complete, and others.
#[must_use]
pub fn has_more(old: &Computed, new: &Computed) -> bool {
    output::has_more(done(&old.runs), done(&new.runs))
}

/// The fingerprints of the variants that ran to their end.
fn done(runs: &[ComputedRun]) -> impl Iterator<Item = &str> {
    let done = runs.iter().filter(|run| matches!(run.run, Run::Done(_)));
    done.map(|run| run.fingerprint.as_str())
}

/// Puts the shards of a job together.
///
/// # Errors
/// [`JobError::Merge`]: shards of different jobs, a variant twice, or none at all.
pub fn merge(shards: Vec<Computed>) -> Result<Computed, JobError> {
    output::merge(shards).map(Computed::compared)
}

impl Shard for Computed {
    fn is_of_same_job(&self, other: &Self) -> bool {
        self.version == other.version
            && self.config == other.config
            && self.workload == other.workload
            && self.variants == other.variants
    }

    fn take_runs(&mut self, other: Self) {
        self.runs.extend(other.runs);
    }

    fn sort(&mut self) {
        self.runs.sort_by_key(|run| run.index);
    }

    fn job(&self) -> &[String] {
        &self.fingerprints
    }

    fn place(&mut self, place: impl Fn(&str, usize) -> Option<usize>) {
        self.runs.retain_mut(|run| {
            let place = place(&run.fingerprint, run.index);
            run.index = place.unwrap_or(run.index);
            place.is_some()
        });
    }

    fn variants(&self) -> impl Iterator<Item = (usize, &str)> {
        self.runs.iter().map(|run| (run.index, run.run.variant()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::run;
    use super::*;

    fn computed(indexes: &[usize]) -> Computed {
        let run = |index: &usize| ComputedRun {
            index: *index,
            fingerprint: format!("f{index}"),
            run: if *index == 2 {
                Run::Failed(FailedRun {
                    variant: "v2".to_owned(),
                    mode: crate::config::CacheMode::Paged,
                    format: "f16".to_owned(),
                    error: "no memory".to_owned(),
                })
            } else {
                run(&format!("v{index}"), "f16", "1", 5)
            },
        };
        Computed {
            version: "1".to_owned(),
            config: "c".to_owned(),
            workload: WorkloadSummary::default(),
            runs: indexes.iter().map(run).collect(),
            comparisons: Vec::new(),
            variants: 4,
            fingerprints: Vec::new(),
        }
        .compared()
    }

    /// Results of an earlier run are kept where the job is stopped before it comes to them.
    #[test]
    fn what_is_done_is_taken_over_after_a_stop() {
        let text = "
            model = { num_layers = 1, num_q_heads = 1, num_kv_heads = 1, head_dim = 16 }
            limits = { max_seqs = 2, max_seq_len = 64, max_batch_tokens = 32 }
            cache = { mode = 'paged' }
            variant = [{ name = 'a' }, { name = 'b', format = 'int8' }, { name = 'c', mode = 'contiguous' }]
            [workload]
            kind = 'generator'
            requests = 2
            prompt_tokens = { dist = 'fixed', value = 10 }
            output_tokens = { dist = 'fixed', value = 10 }";
        let source = crate::config::parse(text, Path::new("t"), &[]).expect("fine");
        let whole = compute(&source, &ComputeOptions::default(), &mut super::super::Silent);
        let whole = whole.expect("runs");
        assert_eq!(whole.runs.len(), 3);
        let stop = AtomicBool::new(true);
        let asked = ComputeOptions {
            done: &whole.runs[1..],
            stop: Some(&stop),
            ..ComputeOptions::default()
        };
        let rest = compute(&source, &asked, &mut super::super::Silent).expect("stops");
        let names: Vec<_> = rest.runs.iter().map(|run| (run.index, run.run.variant())).collect();
        assert_eq!(names, [(1, "b"), (2, "c")]);
    }

    #[test]
    fn shards_merge_to_the_whole_and_are_read_as_they_were_written() {
        let whole = computed(&[0, 1, 2, 3]);
        assert_eq!(whole.comparisons[0].variants, ["v0", "v1", "v3"]);
        let folders: Vec<_> = (0..2).map(|_| tempfile::tempdir().expect("a folder")).collect();
        let mut shards = Vec::new();
        for (folder, part) in folders.iter().zip([&[3, 1][..], &[0, 2]]) {
            assert!(read(folder.path()).expect("nothing there").is_none());
            write(&computed(part), folder.path()).expect("written");
            assert!(is_in(folder.path()));
            shards.push(read(folder.path()).expect("a result").expect("there"));
        }
        assert_eq!(json(&merge(shards.clone()).expect("one job")), json(&whole));
        let twice = merge(vec![shards[0].clone(), shards[0].clone()]).expect_err("twice");
        assert!(twice.to_string().contains("variant \"v1\" is in two shards"), "{twice}");
        let other = Computed { config: "d".to_owned(), ..shards[1].clone() };
        assert!(merge(vec![shards[0].clone(), other]).is_err() && merge(Vec::new()).is_err());
        std::fs::write(folders[0].path().join("results.json"), "{\"runs\": []}").expect("written");
        assert!(read(folders[0].path()).is_err() && !is_in(folders[0].path()));
    }
}
