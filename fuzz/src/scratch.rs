//! What targets share that read files.

use std::fs::File;
use std::io::{Seek, Write};
use std::path::{Path, PathBuf};

/// A file in memory that targets fill with their input, since kvpool reads files by their paths.
pub(crate) struct Scratch {
    file: File,
    path: PathBuf,
}

impl Scratch {
    /// One file a process and name.
    ///
    /// # Panics
    /// It cannot be made.
    #[must_use]
    pub(crate) fn new(name: &str) -> Self {
        let path = Self::path_of(name);
        let file = File::create(&path).expect("a scratch file");
        Self { file, path }
    }

    /// Where such a file is, in memory.
    pub(crate) fn path_of(name: &str) -> PathBuf {
        let folder = Path::new("/dev/shm");
        let folder = if folder.is_dir() { folder.to_owned() } else { std::env::temp_dir() };
        folder.join(format!("kvpool-fuzz-{}-{name}", std::process::id()))
    }

    /// Puts the input into the file, and gives its path.
    ///
    /// # Panics
    /// It cannot be written.
    pub(crate) fn fill(&mut self, input: &[u8]) -> &Path {
        self.file.set_len(0).expect("emptied");
        self.file.rewind().expect("from the start");
        self.file.write_all(input).expect("written");
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Whether an input names a file of the system's that never ends, or that waits.
#[must_use]
pub(crate) fn names_a_device(input: &[u8]) -> bool {
    [&b"/dev"[..], b"/proc", b"/sys"]
        .iter()
        .any(|folder| input.windows(folder.len()).any(|part| part == *folder))
}
