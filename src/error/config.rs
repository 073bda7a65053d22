//! Files that cannot be used.

use std::fmt;
use std::path::PathBuf;

/// Where in the input a setting was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A line of a file, counted from 1; 0 when the file as a whole is meant.
    File {
        /// The file.
        path: PathBuf,
        /// The line.
        line: usize,
    },
    /// A `--set key=value` of the command line.
    Override,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { path, line: 0 } => write!(f, "{}", path.display()),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Override => f.write_str("--set"),
        }
    }
}

/// A configuration file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: cannot be read: {problem}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        problem: String,
    },
    /// The file is no TOML (or, for `hf_config`, no JSON).
    #[error("{origin}: {problem}")]
    Syntax {
        /// Where.
        origin: Origin,
        /// What the parser says.
        problem: String,
    },
    /// A setting is missing, unknown, of the wrong type or out of its range.
    #[error("{origin}: {key}: {problem}; {help}")]
    Key {
        /// Where.
        origin: Origin,
        /// The dotted key, such as `limits.max_seqs`.
        key: String,
        /// What is wrong with it.
        problem: String,
        /// What was expected, or what to do.
        help: String,
    },
    /// A `--set` argument that is not `key=value`.
    #[error(
        "--set {argument:?}: {problem}; write --set key=value, such as --set limits.max_seqs=8"
    )]
    Override {
        /// The argument.
        argument: String,
        /// What is wrong with it.
        problem: String,
    },
}
