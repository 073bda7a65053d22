//! Results as files: `results.json` and `results.csv`.

use std::collections::HashSet;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::report::{Report, Run};
use crate::error::JobError;

/// The columns of the CSV: keys of the JSON.
const COLUMNS: &[&str] = &[
    "variant",
    "mode",
    "format",
    "device",
    "planned_bytes",
    "allocated_bytes",
    "peak_used_bytes",
    "mean_waste_bytes",
    "requests_completed",
    "tokens_appended",
    "tokens_per_s",
    "step_ms_p50",
    "step_ms_p99",
    "max_abs_error",
    "output_checksum",
    "allocations_after_open",
    "threads",
    "tokens_per_block",
    "host_bytes",
    "capacity_tokens",
    "peak_held_bytes",
    "peak_promised_bytes",
    "prefix_reuse",
    "prefix_reuse_declined",
    "prompt_tokens",
    "prefix_hit_tokens",
    "prefix_hit_rate",
    "repeated_prompt_tokens",
    "resumed_tokens",
    "resumed_hit_tokens",
    "saved_prefill_tokens",
    "evictions",
    "peak_cached_bytes",
    "requests_refused_too_long",
    "requests_refused_never_fits",
    "first_refusal",
    "preemptions",
    "most_preemptions_of_one",
    "preemptions_without_progress",
    "steps",
    "peak_running",
    "mean_running",
    "outputs_checked",
    "error_limit",
    "nonfinite",
    "saturated",
    "cache_s",
    "wall_s",
    "error",
];

/// The report as one JSON document, with a line break at its end.
#[must_use]
pub fn json(report: &Report) -> String {
    // Strings, numbers and lists of them: nothing that JSON cannot express.
    let mut text = serde_json::to_string_pretty(report).unwrap_or_default();
    text.push('\n');
    text
}

/// The runs as CSV (RFC 4180, with plain line feeds). What a run does not have is empty.
#[must_use]
pub fn csv(report: &Report) -> String {
    let mut text = COLUMNS.join(",");
    text.push('\n');
    for run in &report.runs {
        let run = serde_json::to_value(run).unwrap_or_default();
        let cells: Vec<String> =
            COLUMNS.iter().map(|column| cell(run.get(column).unwrap_or(&Value::Null))).collect();
        text.push_str(&cells.join(","));
        text.push('\n');
    }
    text
}

pub(super) fn cell(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) if text.contains([',', '"', '\n', '\r']) => {
            format!("\"{}\"", text.replace('"', "\"\""))
        }
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Results that are put together from those of shards.
pub(super) trait Shard {
    /// Whether two are of the same job: file, workload, version.
    fn is_of_same_job(&self, other: &Self) -> bool;
    /// Takes the variants of another.
    fn take_runs(&mut self, other: Self);
    /// Puts the variants into the order of the file.
    fn sort(&mut self);
    /// The places in the file and the names of the variants.
    fn variants(&self) -> impl Iterator<Item = (usize, &str)>;
    /// The fingerprints of all variants of its job, in the order of the file; empty where these are
    /// results that were read.
    fn job(&self) -> &[String];
    /// Gives variants their places, told by fingerprint and the place that they had; leaves out those
    /// that get none.
    fn place(&mut self, place: impl Fn(&str, usize) -> Option<usize>);
}

/// Newer results, and of older ones the variants that these have not: those of the same settings
/// and workload, as `--resume` tells them. So shards that are written into one folder one after the
/// other come to the whole job.
pub(super) fn with_others<S: Shard + Clone>(new: &S, old: Option<S>) -> S {
    let mut all = new.clone();
    let Some(mut old) = old else { return all };
    let taken: HashSet<usize> = new.variants().map(|(index, _)| index).collect();
    let is_same = old.is_of_same_job(new);
    old.place(|fingerprint, index| {
        let own = new.job().iter().position(|own| own == fingerprint);
        let place = if new.job().is_empty() { is_same.then_some(index) } else { own };
        place.filter(|place| !taken.contains(place))
    });
    all.take_runs(old);
    all.sort();
    all
}

/// Keeps other programs from writing results into a folder for as long as this lives: who reads
/// what is there and adds to it must not do so while another does. Where a folder cannot be locked,
/// the later one wins.
pub(super) fn lock(folder: &Path) -> Option<fs::File> {
    fs::File::open(folder).ok().filter(|folder| folder.lock().is_ok())
}

/// Whether earlier results have anything to do with a job: some variant with the same fingerprint,
/// or nothing at all.
///
/// # Errors
/// [`JobError::OtherJob`].
pub(super) fn go_on<'a>(
    done: impl Iterator<Item = &'a str>,
    own: &[String],
) -> Result<(), JobError> {
    let mut of_others = false;
    for fingerprint in done {
        if own.iter().any(|own| own == fingerprint) {
            return Ok(());
        }
        of_others = true;
    }
    if of_others { Err(JobError::OtherJob) } else { Ok(()) }
}

/// Whether earlier results have every complete variant of newer ones, and others. Both are told by
/// the fingerprints of variants that ran to their end.
pub(super) fn has_more<'a>(
    old: impl Iterator<Item = &'a str>,
    new: impl Iterator<Item = &'a str>,
) -> bool {
    let old: HashSet<&str> = old.collect();
    let new: HashSet<&str> = new.collect();
    new.is_subset(&old) && new.len() < old.len()
}

/// Puts the shards of a job together: the result is the one of the whole job.
///
/// # Errors
/// [`JobError::Merge`]: shards of different jobs, a variant twice, or none at all.
pub(super) fn merge<S: Shard>(shards: Vec<S>) -> Result<S, JobError> {
    let refused = |problem: String| JobError::Merge { problem };
    let mut shards = shards.into_iter();
    let mut whole = shards.next().ok_or_else(|| refused("there are no shards".to_owned()))?;
    for shard in shards {
        if !whole.is_of_same_job(&shard) {
            return Err(refused(
                "the shards are not of the same job (another file, workload or version)".to_owned(),
            ));
        }
        whole.take_runs(shard);
    }
    whole.sort();
    let mut before = None;
    for (index, name) in whole.variants() {
        if before.replace(index) == Some(index) {
            return Err(refused(format!("variant {name:?} is in two shards")));
        }
    }
    Ok(whole)
}

/// Makes a folder for results, and makes sure that files can be written there.
///
/// # Errors
/// [`JobError::Write`].
pub fn prepare(folder: &Path) -> Result<(), JobError> {
    if folder.exists() && !folder.is_dir() {
        let problem = "it is no folder, which is what is expected here".to_owned();
        return Err(JobError::Write { path: folder.to_owned(), problem });
    }
    fs::create_dir_all(folder).map_err(|error| refused(folder, &error))?;
    let probe = folder.join(format!(".kvpool.{}.tmp", std::process::id()));
    fresh(&probe).map_err(|error| refused(&probe, &error))?;
    fs::remove_file(&probe).map_err(|error| refused(&probe, &error))
}

/// Writes `results.json` and `results.csv` into a folder, which is created when it is not there.
/// A file is replaced as a whole or not at all.
///
/// # Errors
/// [`JobError::Write`].
pub fn write(report: &Report, folder: &Path) -> Result<(), JobError> {
    prepare(folder)?;
    replace(&folder.join("results.json"), &json(report))?;
    replace(&folder.join("results.csv"), &csv(report))
}

fn refused(path: &Path, error: &io::Error) -> JobError {
    JobError::Write { path: path.to_owned(), problem: error.to_string() }
}

/// A new file. What an earlier process has left of that name goes; a link is not followed.
fn fresh(path: &Path) -> io::Result<fs::File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => fs::File::create_new(path),
    }
}

/// Writes a file beside its place and moves it there.
pub(super) fn replace(path: &Path, text: &str) -> Result<(), JobError> {
    replace_bytes(path, text.as_bytes()).map_err(|error| refused(path, &error))
}

/// Writes a file beside its place and moves it there. After an error nothing is left of it.
pub(super) fn replace_bytes(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.tmp", std::process::id()));
    let beside: PathBuf = path.with_file_name(name);
    let written = fresh(&beside)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&beside, path));
    written.inspect_err(|_| {
        // What is left of it is of no use; that it cannot be removed changes nothing.
        let _ = fs::remove_file(&beside);
    })
}

impl Run {
    /// The variant's name.
    #[must_use]
    pub fn variant(&self) -> &str {
        match self {
            Self::Done(run) => &run.variant,
            Self::Failed(run) => &run.variant,
        }
    }
}

/// Reads `results.json` of a folder; `None` where there is none.
///
/// # Errors
/// [`JobError::Results`] for a file that is no result of this kind.
pub(super) fn read_results<T: DeserializeOwned>(folder: &Path) -> Result<Option<T>, JobError> {
    let path = folder.join("results.json");
    let refused = |problem: String| JobError::Results { path: path.clone(), problem };
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(JobError::Read { path, problem: error.to_string() }),
    };
    serde_json::from_str(&text).map(Some).map_err(|error| refused(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::run;
    use super::super::report::{FailedRun, Report, Run};
    use super::*;
    use crate::config::CacheMode;

    fn report() -> Report {
        let failed = FailedRun {
            variant: "x, \"y\"".to_owned(),
            mode: CacheMode::Hybrid,
            format: "int8".to_owned(),
            error: "two\nlines".to_owned(),
        };
        Report::new(vec![run("a", "f16", "1f", 5), Run::Failed(failed)])
    }

    #[test]
    fn the_columns_are_the_keys() {
        let value = serde_json::to_value(run("a", "f16", "1f", 5)).expect("plain");
        let keys = value.as_object().expect("an object");
        for key in keys.keys() {
            assert!(COLUMNS.contains(&key.as_str()), "{key} is no column");
        }
        assert_eq!(keys.len() + 1, COLUMNS.len(), "all but `error`");
    }

    #[test]
    fn csv_is_quoted_where_it_must_be() {
        let csv = csv(&report());
        let lines: Vec<&str> = csv.lines().collect();
        assert!(lines[0].starts_with("variant,mode,format,device,planned_bytes,"));
        assert!(lines[1].starts_with("a,paged,f16,cpu/portable,64,64,32,1.5,5,3,1000.0,"));
        assert!(lines[2].starts_with("\"x, \"\"y\"\"\",hybrid,int8,,,"), "{}", lines[2]);
        assert!(csv.ends_with(",\"two\nlines\"\n"));
    }

    #[test]
    fn a_part_is_less_than_the_whole() {
        let more = |old: &[&str], new: &[&str]| has_more(old.iter().copied(), new.iter().copied());
        assert!(more(&["a", "b", "c"], &["b"]) && more(&["a"], &[]));
        assert!(!more(&["a", "b"], &["b", "a"]), "all of it is new");
        assert!(!more(&["a", "b", "c"], &["d"]), "of another job");
        assert!(!more(&[], &[]));
    }

    #[test]
    fn files_are_written_whole_into_a_new_folder() {
        let folder = tempfile::tempdir().expect("a folder");
        let inner = folder.path().join("a/b");
        write(&report(), &inner).expect("written");
        write(&report(), &inner).expect("written again");
        let mut names: Vec<_> = fs::read_dir(&inner)
            .expect("there")
            .map(|e| e.expect("an entry").file_name())
            .collect();
        names.sort();
        assert_eq!(names, ["results.csv", "results.json"]);
        let text = fs::read_to_string(inner.join("results.json")).expect("there");
        let value: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(value["runs"][0]["output_checksum"], "1f");
        #[cfg(unix)]
        {
            let victim = folder.path().join("victim");
            fs::write(&victim, "precious").expect("written");
            let name = format!("results.csv.{}.tmp", std::process::id());
            std::os::unix::fs::symlink(&victim, inner.join(name)).expect("made");
            write(&report(), &inner).expect("written, but not through the link");
            assert_eq!(fs::read(&victim).expect("there"), b"precious");
        }
        // A file where the folder should be.
        let error = write(&report(), &inner.join("results.csv")).expect_err("no folder");
        assert!(error.to_string().contains("results.csv: cannot be written"), "{error}");
    }
}
