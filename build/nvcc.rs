//! Where nvcc is, which one it is, and what it can compile for.
//!
//! Everything here but [`ask`] is a function of what it is given, so that the tests can give it a
//! machine of their own (`tests/build_script.rs` includes this file).

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The variables that name a toolkit's folder, in the order in which they are asked.
pub(super) const TOOLKIT_VARS: [&str; 4] =
    ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CUDA_TOOLKIT_ROOT_DIR"];

/// The oldest toolkit that knows what the kernels use: sm_90 and C++17.
pub(super) const OLDEST: Version = Version { major: 11, minor: 8 };

/// What the search sees of a machine.
pub(super) struct Machine<'a> {
    /// An environment variable, `None` where it is not set or empty.
    pub(super) var: &'a dyn Fn(&str) -> Option<OsString>,
    /// Whether a path is a file.
    pub(super) is_file: &'a dyn Fn(&Path) -> bool,
    /// The entries of a folder, in any order; none where it does not exist.
    pub(super) entries: &'a dyn Fn(&Path) -> Vec<PathBuf>,
}

/// An nvcc, and what led to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) path: PathBuf,
    /// `KVPOOL_NVCC`, `CUDA_HOME`, …, `PATH`, `usual folder` or `VIRTUAL_ENV`.
    pub(super) through: &'static str,
}

/// Looks for nvcc: `KVPOOL_NVCC`, the toolkit variables, `PATH`, the usual folder, and the wheels
/// of an active virtual environment. The first that is there is taken.
///
/// # Errors
/// `KVPOOL_NVCC` names no file: who sets it wants that one and no other.
pub(super) fn find(machine: &Machine<'_>) -> Result<Option<Found>, String> {
    let name = format!("nvcc{}", std::env::consts::EXE_SUFFIX);
    let found =
        |path: PathBuf, through| (machine.is_file)(&path).then_some(Found { path, through });
    if let Some(named) = (machine.var)("KVPOOL_NVCC") {
        let path = PathBuf::from(&named);
        return match found(path, "KVPOOL_NVCC") {
            Some(found) => Ok(Some(found)),
            None => Err(format!("KVPOOL_NVCC={} names no file", named.to_string_lossy())),
        };
    }
    let in_toolkit = |folder: &OsStr| Path::new(folder).join("bin").join(&name);
    for var in TOOLKIT_VARS {
        let there = (machine.var)(var).and_then(|folder| found(in_toolkit(&folder), var));
        if there.is_some() {
            return Ok(there);
        }
    }
    let path = (machine.var)("PATH").unwrap_or_default();
    let in_path = std::env::split_paths(&path).map(|folder| folder.join(&name));
    let wheels = (machine.var)("VIRTUAL_ENV")
        .map(|environment| wheels(machine, Path::new(&environment), &name))
        .unwrap_or_default();
    Ok(in_path
        .filter_map(|path| found(path, "PATH"))
        .chain(found(in_toolkit(OsStr::new("/usr/local/cuda")), "usual folder"))
        .chain(wheels.into_iter().filter_map(|path| found(path, "VIRTUAL_ENV")))
        .next())
}

/// The places of a virtual environment where wheels put nvcc: `nvidia/cu13` (since CUDA 13) and
/// `nvidia/cuda_nvcc`, below the `site-packages` of each Python; the highest names first.
fn wheels(machine: &Machine<'_>, environment: &Path, name: &str) -> Vec<PathBuf> {
    let mut places = Vec::new();
    let mut pythons = (machine.entries)(&environment.join("lib"));
    pythons.push(environment.join("Lib"));
    for python in pythons {
        let mut packages = (machine.entries)(&python.join("site-packages").join("nvidia"));
        packages.sort();
        places.extend(packages.into_iter().rev().map(|package| package.join("bin").join(name)));
    }
    places
}

/// A toolkit's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version {
    pub(super) major: u32,
    pub(super) minor: u32,
}

/// The version in what `nvcc --version` prints: `Cuda compilation tools, release 13.0, V13.0.88`.
pub(super) fn version(printed: &str) -> Option<Version> {
    let behind = printed.split_once("release ")?.1;
    let number = behind.split([',', ' ', '\n']).next()?;
    let (major, minor) = number.split_once('.')?;
    Some(Version { major: major.parse().ok()?, minor: minor.parse().ok()? })
}

/// The GPU codes in what `nvcc --list-gpu-code` prints, a line each: `sm_80` gives `80`.
pub(super) fn codes(printed: &str) -> Vec<String> {
    printed.lines().filter_map(|line| line.trim().strip_prefix("sm_")).map(str::to_owned).collect()
}

/// Runs nvcc with one argument.
///
/// # Errors
/// It cannot be started, or says that it failed.
pub(super) fn ask(nvcc: &Path, argument: &str) -> Result<String, String> {
    let output = Command::new(nvcc)
        .arg(argument)
        .output()
        .map_err(|error| format!("{} cannot be started: {error}", nvcc.display()))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{} {argument} failed: {}", nvcc.display(), said.trim()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
