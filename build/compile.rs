//! Compiles the kernels, several at a time, and only those whose sources have changed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// What is compiled, and how.
pub(super) struct Job<'a> {
    pub(super) nvcc: &'a Path,
    /// Everything that decides what nvcc makes of the same sources: its version and all arguments.
    pub(super) arguments: Vec<String>,
    pub(super) version: &'a str,
    /// The headers that any instantiation may include.
    pub(super) headers: u64,
    /// Where the fatbins go.
    pub(super) out: &'a Path,
    /// Compilers that run at once.
    pub(super) parallel: usize,
}

/// Compiles every source to `<out>/<stem>.fatbin`; what nvcc and ptxas say of registers and spills
/// goes to `<stem>.log` beside it.
///
/// # Errors
/// What nvcc said of the first source that it refused.
pub(super) fn compile(job: &Job<'_>, sources: &[PathBuf]) -> Result<(), String> {
    let next = AtomicUsize::new(0);
    let failed = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..job.parallel.clamp(1, sources.len().max(1)) {
            scope.spawn(|| {
                while let Some(source) = sources.get(next.fetch_add(1, Relaxed)) {
                    if let Err(said) = one(job, source) {
                        // The others stop after what they have begun.
                        next.store(sources.len(), Relaxed);
                        failed.lock().expect("no compiler thread panics").get_or_insert(said);
                    }
                }
            });
        }
    });
    failed.into_inner().expect("no compiler thread panics").map_or(Ok(()), Err)
}

/// Compiles one source, unless its fatbin is of the same sources, compiler and arguments.
fn one(job: &Job<'_>, source: &Path) -> Result<(), String> {
    let refused = |what: &Path| {
        let what = what.display().to_string();
        move |error: io::Error| format!("{what}: {error}")
    };
    let text = fs::read(source).map_err(refused(source))?;
    let stem = stem(source);
    let key = [job.version, &job.arguments.join(" ")]
        .iter()
        .fold(hash(job.headers, &text), |sum, text| hash(sum, text.as_bytes()));
    let key = format!("{key:016x}");
    let [image, log, stamp] =
        ["fatbin", "log", "key"].map(|end| job.out.join(format!("{stem}.{end}")));
    if image.is_file() && fs::read_to_string(&stamp).is_ok_and(|known| known == key) {
        return Ok(());
    }
    // Before nvcc writes anything: an image that it was stopped at must not be taken for the one
    // that the stamp names, when the sources are what they were again.
    match fs::remove_file(&stamp) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(refused(&stamp)(error));
        }
        _ => {}
    }
    let output = Command::new(job.nvcc)
        .args(&job.arguments)
        .arg("-o")
        .arg(&image)
        .arg(source)
        .output()
        .map_err(refused(job.nvcc))?;
    let said = [output.stdout, output.stderr].concat();
    fs::write(&log, &said).map_err(refused(&log))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&said);
        return Err(format!("{} does not compile:\n{said}", source.display()));
    }
    fs::write(&stamp, key).map_err(refused(&stamp))
}

/// The name of a file without its folder and ending.
pub(super) fn stem(path: &Path) -> String {
    path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default()
}

/// The files of a folder and of those below it that have one of the endings, in order.
///
/// # Errors
/// A folder that exists and cannot be read.
pub(super) fn files(folder: &Path, endings: &[&str]) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(found),
        entries => entries?,
    };
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(files(&path, endings)?);
        } else if path.extension().is_some_and(|end| endings.iter().any(|known| end == *known)) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// A hash of the files' names and contents.
///
/// # Errors
/// A file that cannot be read.
pub(super) fn hash_of(files: &[PathBuf]) -> io::Result<u64> {
    files.iter().try_fold(hash(0, b"kvpool"), |sum, path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(hash(hash(sum, name.as_bytes()), &fs::read(path)?))
    })
}

/// Adds bytes to a hash (FNV-1a).
fn hash(sum: u64, bytes: &[u8]) -> u64 {
    let sum = (sum ^ bytes.len() as u64).wrapping_mul(0x0100_0000_01B3) ^ 0xCBF2_9CE4_8422_2325;
    bytes.iter().fold(sum, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01B3))
}
