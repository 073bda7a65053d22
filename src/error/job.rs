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
    #[error("{}: has no [workload] section, so there is nothing to run; add one (see configs/quickstart.toml), or use `kvpool plan`", path.display())]
    NoWorkload {
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
