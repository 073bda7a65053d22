//! Caches that cannot be opened, and jobs that cannot run.

use std::path::{Path, PathBuf};

use super::{CacheError, ConfigError, DeviceError, PlanError};

/// A cache that cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The plan does not fit the machine.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// A batch job that cannot run or did not finish.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The file names no workload.
    #[error("{}: has no [workload] section and no [generate], so there is nothing to run; add one (see configs/quickstart.toml), or use `kvpool plan`", path.display())]
    NoWorkload {
        /// The file.
        path: PathBuf,
    },
    /// The file computes attention where only a replay is meant.
    #[error("{}: computes attention; give its [workload] compute = \"none\" and add [cost] (see configs/claims), or use `kvpool run`", path.display())]
    Computes {
        /// The file.
        path: PathBuf,
    },
    /// The file has prompts to complete, and no workload.
    #[error("{}: has [generate] and no [workload]; use `kvpool run`, which completes its prompts", path.display())]
    Generates {
        /// The file.
        path: PathBuf,
    },
    /// A measurement that is of the CPU alone.
    #[error("{}: device.kind is \"cuda\", and `kvpool bench cost` measures the CPU alone; give --set device.kind=cpu for the CPU's, and take a GPU's [cost] from its data sheet", path.display())]
    CpuAlone {
        /// The file.
        path: PathBuf,
    },
    /// The file is to be replayed, not computed.
    #[error("{}: computes nothing (workload.compute = \"none\"); use job::replay", path.display())]
    Replays {
        /// The file.
        path: PathBuf,
    },
    /// A variant's plan.
    #[error("variant {variant:?}: {source}")]
    Open {
        /// The variant's name.
        variant: String,
        /// What is wrong.
        source: OpenError,
    },
    /// A verb failed where the scheduler had made sure that it would not.
    #[error("variant {variant:?}: {source}")]
    Cache {
        /// The variant's name.
        variant: String,
        /// What failed.
        source: CacheError,
    },
    /// A line of a trace.
    #[error("{}: {problem}", place(path, *line))]
    Trace {
        /// The trace.
        path: PathBuf,
        /// The line, counted from 1; 0 for the file as a whole.
        line: u64,
        /// What is wrong, and what was expected.
        problem: String,
    },
    /// Results of an earlier run.
    #[error("{}: is no result of `kvpool compare`: {problem}; remove it, or choose another folder", path.display())]
    Results {
        /// The file.
        path: PathBuf,
        /// Why.
        problem: String,
    },
    /// A file of results that cannot be read.
    #[error("{}: cannot be read: {problem}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        problem: String,
    },
    /// Results to go on with that have nothing of the job.
    #[error(
        "the folder has the results of another job: none of its variants has the settings, workload and version of one of this job's, so that there is nothing to go on with; choose another folder, or leave out --resume to have these replaced"
    )]
    OtherJob,
    /// Shards that do not make a whole.
    #[error("the results cannot be merged: {problem}")]
    Merge {
        /// Why.
        problem: String,
    },
    /// Nothing to recommend.
    #[error("{}: no candidate can run{}", path.display(), first.as_ref().map_or(String::new(), |why| format!("; the first: {why}")))]
    NoCandidate {
        /// The file.
        path: PathBuf,
        /// Why the first cannot.
        first: Option<String>,
    },
    /// A file of results.
    #[error("{}: cannot be written: {problem}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        problem: String,
    },
}

/// A file, and a line of it if one is meant.
fn place(path: &Path, line: u64) -> String {
    match line {
        0 => path.display().to_string(),
        line => format!("{}:{line}", path.display()),
    }
}
