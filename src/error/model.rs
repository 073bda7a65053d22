//! What goes wrong between a model file and the text that it writes.

use std::path::{Path, PathBuf};

use super::{CacheError, ConfigError, DeviceError, OpenError, PlanError};

/// A model that cannot be loaded, or cannot run.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The configuration names no model file.
    #[error("{}: [model] names no file with weights; give model.file, the path of a GGUF or llama2.c model", path.display())]
    NoModelFile {
        /// The configuration.
        path: PathBuf,
    },
    /// A file of the model, or a line of a file of prompts or completions; 0 for the whole file.
    #[error("{}: {problem}", place(path, *line))]
    File {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: u64,
        /// What is wrong, and what was expected.
        problem: String,
    },
    /// A file of completions that cannot be written any further.
    #[error("{}: cannot be written: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The standard output.
    #[error("the standard output cannot be written: {0}")]
    Output(std::io::Error),
    /// A setting that the engine cannot do anything with.
    #[error("{0}")]
    Setting(String),
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The cache cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A verb of the cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The threads that multiply.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl From<PlanError> for ModelError {
    fn from(error: PlanError) -> Self {
        Self::Open(error.into())
    }
}

impl ModelError {
    /// Whether the command line or a file is at fault, and not the run.
    #[must_use]
    pub fn is_usage(&self) -> bool {
        !matches!(
            self,
            Self::Cache(_)
                | Self::Device(_)
                | Self::Open(OpenError::Device(_))
                | Self::Write { .. }
                | Self::Output(_)
        )
    }

    /// A file that cannot be written.
    pub(crate) fn write(path: &Path, source: std::io::Error) -> Self {
        Self::Write { path: path.to_owned(), source }
    }

    /// What is wrong with a file as a whole.
    pub(crate) fn file(path: &Path, problem: impl Into<String>) -> Self {
        Self::File { path: path.to_owned(), line: 0, problem: problem.into() }
    }
}

/// A file, and a line of it if one is meant.
fn place(path: &Path, line: u64) -> String {
    match line {
        0 => path.display().to_string(),
        line => format!("{}:{line}", path.display()),
    }
}
