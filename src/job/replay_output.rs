//! The results of a replay as files: `results.json`, `results.csv`, `report.html`; and back from
//! the first of them.

use std::path::Path;

use serde_json::Value;

use super::output::{self, Shard, cell, prepare, read_results, replace};
use super::replay::{Replay, Replayed};
use crate::error::JobError;

/// The columns of the CSV: keys of the JSON, in its order.
const COLUMNS: &[&str] = &[
    "variant",
    "index",
    "fingerprint",
    "mode",
    "format",
    "tokens_per_block",
    "admission",
    "prefix_reuse",
    "other_settings",
    "capacity",
    "pool_bytes",
    "host_bytes",
    "table_bytes",
    "bytes_per_token",
    "capacity_tokens",
    "requests_completed",
    "requests_refused_too_long",
    "requests_refused_never_fits",
    "preemptions",
    "forks",
    "simulated_s",
    "busy_s",
    "steps",
    "peak_running",
    "mean_running",
    "peak_used_bytes",
    "peak_held_bytes",
    "mean_used_bytes",
    "mean_held_bytes",
    "mean_promised_bytes",
    "mean_cached_bytes",
    "mean_block_waste_bytes",
    "mean_slot_waste_bytes",
    "utilization",
    "prompt_tokens",
    "prefix_hit_tokens",
    "hit_rate",
    "ceiling_hit_rate",
    "computed_tokens",
    "output_tokens",
    "output_tokens_per_s",
    "requests_per_s",
    "good_requests",
    "goodput_per_s",
    "evictions",
    "copied_bytes",
    "alloc_failures",
    "alloc_failures_with_room",
    "worst_free_bytes",
    "worst_largest_run",
    "free_without_1gb_run",
    "queue_ms",
    "first_token_ms",
    "token_ms",
    "latency_ms",
    "step_ms",
    "first_refusal",
    "error",
];

/// The keys of a result that are no columns: they have parts.
#[cfg(test)]
const NESTED: &[&str] = &["series", "picture", "problems"];

/// The keys whose values are distributions: a column for each of these parts.
const TIMES: &[&str] = &["queue_ms", "first_token_ms", "token_ms", "latency_ms", "step_ms"];
const PARTS: &[&str] = &["mean", "p50", "p90", "p99", "max"];

/// The report as one JSON document, with a line break at the end.
#[must_use]
pub fn json(report: &Replay) -> String {
    let mut text = serde_json::to_string_pretty(report).unwrap_or_default();
    text.push('\n');
    text
}

/// The report as CSV, a line a variant; a variant that was not replayed has only its name, its
/// mode and the error.
#[must_use]
pub fn csv(report: &Replay) -> String {
    let mut columns: Vec<(String, Vec<&str>)> = Vec::new();
    for key in COLUMNS {
        if TIMES.contains(key) {
            for part in PARTS {
                columns.push((format!("{key}_{part}"), vec![key, part]));
            }
        } else {
            columns.push(((*key).to_owned(), vec![key]));
        }
    }
    let names: Vec<&str> = columns.iter().map(|(name, _)| name.as_str()).collect();
    let mut text = names.join(",");
    text.push('\n');
    for run in &report.runs {
        let run = serde_json::to_value(run).unwrap_or_default();
        let at = |path: &[&str]| {
            path.iter().try_fold(&run, |value, key| value.get(*key)).unwrap_or(&Value::Null)
        };
        let cells: Vec<String> = columns.iter().map(|(_, path)| cell(at(path))).collect();
        text.push_str(&cells.join(","));
        text.push('\n');
    }
    text
}

/// Everything that is not as it must be, a line each.
#[must_use]
pub fn problems(report: &Replay) -> Vec<String> {
    let mut problems = Vec::new();
    for run in &report.runs {
        match run {
            Replayed::Failed(run) => problems.push(run.error.clone()),
            Replayed::Done(run) => {
                let named = |problem: &str| format!("variant {:?}: {problem}", run.variant);
                problems.extend(run.problems.iter().map(|problem| named(problem)));
                if run.requests_completed == 0 {
                    problems.push(named("no request was completed, so nothing was measured"));
                }
            }
        }
    }
    problems
}

/// Writes `results.json`, `results.csv` and `report.html` into a folder, which is created when it
/// is not there. A file is replaced as a whole or not at all. Variants of the same job that are
/// there already, and not among these, stay.
///
/// # Errors
/// [`JobError::Write`].
pub fn write(report: &Replay, folder: &Path) -> Result<(), JobError> {
    prepare(folder)?;
    let _lock = output::lock(folder);
    // What cannot be read has nothing that is missed.
    let report = &output::with_others(report, read(folder).unwrap_or_default());
    replace(&folder.join("results.json"), &json(report))?;
    replace(&folder.join("results.csv"), &csv(report))?;
    replace(&folder.join("report.html"), &super::html::html(report))
}

/// Reads what an earlier run wrote into a folder; `None` when there is nothing.
///
/// # Errors
/// [`JobError::Results`] for a file that is no result of a replay.
pub fn read(folder: &Path) -> Result<Option<Replay>, JobError> {
    read_results(folder)
}

/// Whether earlier results have every variant that newer ones have complete, and others.
#[must_use]
pub fn has_more(old: &Replay, new: &Replay) -> bool {
    output::has_more(done(&old.runs), done(&new.runs))
}

/// The fingerprints of the variants that were replayed to their end.
pub(super) fn done(runs: &[Replayed]) -> impl Iterator<Item = &str> {
    let done = runs.iter().filter(|run| matches!(run, Replayed::Done(_)));
    done.map(Replayed::fingerprint)
}

/// Puts the shards of a job together: the result is the one of the whole job.
///
/// # Errors
/// [`JobError::Merge`]: shards of different jobs, a variant twice, or none at all.
pub fn merge(shards: Vec<Replay>) -> Result<Replay, JobError> {
    output::merge(shards)
}

impl Shard for Replay {
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
        self.runs.sort_by_key(Replayed::index);
    }

    fn job(&self) -> &[String] {
        &self.fingerprints
    }

    fn place(&mut self, place: impl Fn(&str, usize) -> Option<usize>) {
        self.runs.retain_mut(|run| {
            let place = place(run.fingerprint(), run.index());
            run.set_index(place.unwrap_or(run.index()));
            place.is_some()
        });
    }

    fn variants(&self) -> impl Iterator<Item = (usize, &str)> {
        self.runs.iter().map(|run| (run.index(), run.variant()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::replay::{VariantFailure, VariantResult, WorkloadSummary};
    use super::*;
    use crate::config::CacheMode;

    fn report(indexes: &[usize]) -> Replay {
        let run = |index: &usize| {
            let variant = format!("v{index}");
            if *index == 1 {
                return Replayed::Failed(VariantFailure {
                    variant,
                    index: 1,
                    fingerprint: "f".to_owned(),
                    mode: CacheMode::Paged,
                    error: "no, \"really\"".to_owned(),
                });
            }
            let index = *index;
            Replayed::Done(Box::new(VariantResult { variant, index, ..VariantResult::default() }))
        };
        Replay {
            version: "1".to_owned(),
            config: "c".to_owned(),
            workload: WorkloadSummary::default(),
            runs: indexes.iter().map(run).collect(),
            variants: 4,
            fingerprints: Vec::new(),
        }
    }

    #[test]
    fn results_are_read_as_they_were_written() {
        let report = report(&[0, 1, 2, 3]);
        let folder = tempfile::tempdir().expect("a folder");
        assert!(read(folder.path()).expect("nothing there").is_none());
        write(&report, folder.path()).expect("written");
        let again = read(folder.path()).expect("a result").expect("there");
        assert_eq!(json(&again), json(&report));
        std::fs::write(folder.path().join("results.json"), "{\"runs\": 3}").expect("written");
        let error = read(folder.path()).expect_err("no result").to_string();
        assert!(error.contains("results.json: is no result of `kvpool compare`"), "{error}");
    }

    #[test]
    fn csv_has_a_column_for_every_number() {
        let csv = csv(&report(&[0, 1]));
        let lines: Vec<&str> = csv.lines().collect();
        assert!(lines[0].starts_with("variant,index,fingerprint,mode,format"), "{}", lines[0]);
        assert!(lines[0].contains(",first_token_ms_p99,") && !lines[0].contains("series"));
        assert!(
            lines[2].starts_with("v1,1,f,paged,") && lines[2].ends_with("\"no, \"\"really\"\"\"")
        );
        assert_eq!(lines[0].split(',').count(), lines[1].split(',').count());
        let keys = serde_json::to_value(VariantResult::default()).expect("plain");
        for key in keys.as_object().expect("an object").keys() {
            let key = key.as_str();
            assert!(COLUMNS.contains(&key) != NESTED.contains(&key), "{key}");
        }
    }

    /// Told by what they were made from, wherever they stood: a file may have got a variant more.
    #[test]
    fn what_a_folder_has_of_the_same_job_stays() {
        let named = |fingerprint: &str, index: usize| {
            let fingerprint = fingerprint.to_owned();
            Replayed::Done(Box::new(VariantResult {
                fingerprint,
                index,
                ..VariantResult::default()
            }))
        };
        let old = Replay {
            config: "another text".to_owned(),
            runs: vec![named("a", 0), named("b", 1), named("gone", 2), named("c", 3)],
            ..report(&[])
        };
        let new = Replay {
            runs: vec![named("b", 2)],
            fingerprints: ["z", "a", "b", "c"].map(str::to_owned).to_vec(),
            ..report(&[])
        };
        let folder = tempfile::tempdir().expect("a folder");
        write(&old, folder.path()).expect("written");
        write(&new, folder.path()).expect("written");
        let all = read(folder.path()).expect("a result").expect("there");
        let runs: Vec<_> = all.runs.iter().map(|run| (run.index(), run.fingerprint())).collect();
        assert_eq!(runs, [(1, "a"), (2, "b"), (3, "c")]);
        assert_eq!(all.config, new.config);
        // Of another job nothing stays.
        let other = Replay { fingerprints: vec!["q".to_owned()], ..report(&[]) };
        write(&other, folder.path()).expect("written");
        assert!(read(folder.path()).expect("a result").expect("there").runs.is_empty());
    }

    #[test]
    fn shards_merge_to_the_whole() {
        let whole = report(&[0, 1, 2, 3]);
        let merged = merge(vec![report(&[1, 3]), report(&[0, 2])]).expect("one job");
        assert_eq!(json(&merged), json(&whole));
        let twice = merge(vec![report(&[0, 1]), report(&[1])]).expect_err("twice").to_string();
        assert!(twice.contains("variant \"v1\" is in two shards"), "{twice}");
        let other = Replay { config: "d".to_owned(), ..report(&[1]) };
        assert!(merge(vec![report(&[0]), other]).is_err());
        assert!(merge(Vec::new()).is_err());
    }
}
