//! The file of a save: written beside its name and put in its place when it is whole; read record
//! by record.
//!
//! A writer that is killed leaves the old file or the new one, and at most one unfinished file
//! beside it, `NAME.kvpool-part`, which the next save to that name removes. A lock on it keeps two
//! saves to one name apart.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::fault::{self, Calls};
use super::format::{CHECKSUM, Checksums, FRAME, checksum, get32, get64, put32, put64};
use crate::error::SaveError;

/// The operating system's refusal.
fn refused(what: &'static str, help: &'static str, error: &std::io::Error) -> SaveError {
    SaveError::Io { what, code: error.raw_os_error().unwrap_or(0), help }
}

const PATH: &str =
    "check the path, whether its folder can be written to, and the limit of open files";
const ROOM: &str = "make room on the disk, or give a path on another; the old file is as it was";
const NAMED: &str = "the new file is in its place, and may not outlast a power cut; save again";
const COPY: &str = "check the path and the disk, and restore another copy, or start without";

/// A file that is being written.
#[derive(Debug)]
pub(super) struct Writer {
    file: File,
    part: PathBuf,
    path: PathBuf,
    /// Bytes written.
    pub(super) written: u64,
    done: bool,
}

impl Writer {
    /// Begins a file that will replace `path`.
    pub(super) fn create(path: &Path) -> Result<Self, SaveError> {
        // A device or a pipe is none of ours to replace, and a folder cannot be. A link is replaced itself.
        if let Ok(about) = std::fs::symlink_metadata(path)
            && !about.is_file()
            && !about.is_symlink()
        {
            let error = std::io::Error::from(ErrorKind::InvalidInput);
            return Err(refused("saving in the place of what is no file", PATH, &error));
        }
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(".kvpool-part");
        let part = path.with_file_name(name);
        let file = make_own(&part)?;
        Ok(Self { file, part, path: path.to_owned(), written: 0, done: false })
    }

    /// Writes bytes.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), SaveError> {
        let failed = |error: std::io::Error| refused("writing the file", ROOM, &error);
        let (before, faulty) = fault::cut(self.written, bytes);
        Calls(&self.file).write_all(before).map_err(failed)?;
        self.written += before.len() as u64;
        match faulty {
            Some(fault) => Err(failed(fault())),
            None => Ok(()),
        }
    }

    /// Begins a record: its payload follows, then [`seal`].
    pub(super) fn frame(out: &mut Vec<u8>, kind: u32) {
        out.clear();
        put32(out, kind);
        put32(out, 0);
        put64(out, 0);
    }

    /// Ends a record and writes it.
    pub(super) fn seal(&mut self, record: &mut Vec<u8>) -> Result<(), SaveError> {
        let len = (record.len() - FRAME) as u64;
        record[8..16].copy_from_slice(&len.to_le_bytes());
        let sum = checksum(record);
        put64(record, sum);
        self.write(record)
    }

    /// Puts the file in its place: from here on it is the one of that name, also after a power cut.
    /// Gives its bytes.
    pub(super) fn finish(mut self) -> Result<u64, SaveError> {
        fault::at(fault::Point::BeforeSync)
            .and_then(|()| self.file.sync_all())
            .map_err(|error| refused("flushing the file to disk", ROOM, &error))?;
        if !is_still(&self.file, &self.part) {
            // Where files have no locks, another save may have taken the name.
            self.done = true;
            return Err(SaveError::UnderWay);
        }
        fault::at(fault::Point::BeforeRename)
            .and_then(|()| std::fs::rename(&self.part, &self.path))
            .map_err(|error| refused("putting the file in its place", PATH, &error))?;
        self.done = true;
        fault::at(fault::Point::AfterRename)
            .and_then(|()| sync_folder(&self.path))
            .map_err(|error| refused("flushing the folder to disk", NAMED, &error))?;
        Ok(self.written)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if !self.done && is_still(&self.file, &self.part) {
            // What is left would be removed by the next save.
            let _ = std::fs::remove_file(&self.part);
        }
    }
}

/// Makes a new file and locks it. One that is there already was left by a writer that was killed,
/// or is being written: then its writer has the lock. It is never written to, whoever made it.
fn make_own(part: &Path) -> Result<File, SaveError> {
    let failed = |error: std::io::Error| refused("creating the file", PATH, &error);
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        // Prompts can be read off it: it is the owner's alone.
        options.mode(0o600);
    }
    let file = match options.open(part) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            let about = std::fs::symlink_metadata(part).map_err(failed)?;
            // What is neither file nor link is none of ours, and opening it could wait for ever.
            if !about.is_file() && !about.is_symlink() {
                return Err(failed(error));
            }
            if about.is_file() {
                // For writing, though nothing is written: some file systems lock no other.
                let mut options = OpenOptions::new();
                let options = without_waiting(options.write(true), false);
                let left = options.open(part).map_err(failed)?;
                lock(&left, part)?;
                std::fs::remove_file(part).map_err(failed)?;
            } else {
                std::fs::remove_file(part).map_err(failed)?;
            }
            options.open(part)
        }
        file => file,
    };
    let file = file.map_err(|error| match error.kind() {
        // Another was faster.
        ErrorKind::AlreadyExists => SaveError::UnderWay,
        _ => failed(error),
    })?;
    lock(&file, part)?;
    Ok(file)
}

/// What opens a file and waits for nothing: a pipe that lies there would be waited for, for ever.
/// `links`: whether they are followed.
fn without_waiting(options: &mut OpenOptions, links: bool) -> &mut OpenOptions {
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.custom_flags(libc::O_NONBLOCK | if links { 0 } else { libc::O_NOFOLLOW })
    }
    #[cfg(not(unix))]
    {
        let _ = links;
        options
    }
}

/// Locks a file that a path names.
fn lock(file: &File, path: &Path) -> Result<(), SaveError> {
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => return Err(SaveError::UnderWay),
        // Or a file system without locks.
        Ok(()) | Err(TryLockError::Error(_)) => {}
    }
    // It may have got its final name in between, or have been taken for one that was left.
    if is_still(file, path) { Ok(()) } else { Err(SaveError::UnderWay) }
}

/// Whether a path still names an open file.
fn is_still(file: &File, path: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let (Ok(own), Ok(named)) = (file.metadata(), std::fs::metadata(path)) else { return false };
        (own.dev(), own.ino()) == (named.dev(), named.ino())
    }
    #[cfg(not(unix))]
    {
        let _ = file;
        path.exists()
    }
}

/// Makes a new name in a folder last.
fn sync_folder(path: &Path) -> std::io::Result<()> {
    #[cfg(unix)]
    {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
    }
    #[cfg(not(unix))]
    {
        let _ = path;
        Ok(())
    }
}

/// A file that is being read.
#[derive(Debug)]
pub(super) struct Reader {
    file: File,
    len: u64,
    /// Where the next byte comes from.
    at: u64,
}

/// The frame of a record.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame {
    /// Where in the file it begins.
    pub(super) at: u64,
    pub(super) kind: u32,
    /// Bytes of its payload.
    pub(super) len: u64,
}

impl Frame {
    /// Where the record behind it begins.
    pub(super) const fn end(&self) -> u64 {
        self.at + (FRAME + CHECKSUM) as u64 + self.len
    }

    pub(super) const fn damaged(&self, problem: &'static str) -> SaveError {
        SaveError::Damaged { at: self.at, problem }
    }
}

impl Reader {
    pub(super) fn open(path: &Path) -> Result<Self, SaveError> {
        let failed = |error: std::io::Error| refused("opening the file", COPY, &error);
        let mut options = OpenOptions::new();
        let opened = without_waiting(options.read(true), true).open(path);
        let file = match opened {
            // A file that another has a lease on: this one is worth waiting for.
            Err(error) if error.kind() == ErrorKind::WouldBlock => File::open(path),
            opened => opened,
        };
        let file = file.map_err(failed)?;
        let about = file.metadata().map_err(failed)?;
        if about.is_dir() {
            let error = std::io::Error::from(ErrorKind::IsADirectory);
            return Err(refused("reading a folder as a file", COPY, &error));
        }
        if !about.is_file() {
            let error = std::io::Error::from(ErrorKind::InvalidInput);
            return Err(refused("reading what is no file", COPY, &error));
        }
        Ok(Self { file, len: about.len(), at: 0 })
    }

    pub(super) const fn len(&self) -> u64 {
        self.len
    }

    /// Goes to a place of the file.
    pub(super) fn seek(&mut self, at: u64) -> Result<(), SaveError> {
        if self.at != at {
            let sought = Calls(&self.file).seek(SeekFrom::Start(at));
            sought.map_err(|error| refused("reading the file", COPY, &error))?;
            self.at = at;
        }
        Ok(())
    }

    /// Reads bytes of some part.
    pub(super) fn read(&mut self, out: &mut [u8], part: &'static str) -> Result<(), SaveError> {
        let read = Calls(&self.file).read_exact(out);
        read.map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => SaveError::Truncated { at: self.len, part },
            _ => refused("reading the file", COPY, &error),
        })?;
        self.at += out.len() as u64;
        Ok(())
    }

    /// Reads the frame at a place, and leaves its bytes in `record`.
    pub(super) fn frame(&mut self, at: u64, record: &mut Vec<u8>) -> Result<Frame, SaveError> {
        self.seek(at)?;
        record.clear();
        record.resize(FRAME, 0);
        self.read(record, "a record's frame")?;
        let frame = Frame { at, kind: get32(record, 0), len: get64(record, 8) };
        let room = self.len - self.at.min(self.len);
        if frame.len.checked_add(CHECKSUM as u64).is_none_or(|end| end > room) {
            // A damaged length looks like this too, unless more follows than any record has.
            return Err(SaveError::Truncated { at: self.len, part: "a record" });
        }
        if get32(record, 4) != 0 {
            return Err(frame.damaged("a number that should be 0"));
        }
        Ok(frame)
    }

    /// Reads the payload of a frame that was just read, and its checksum, which must be right.
    /// `record` then holds frame and payload.
    pub(super) fn payload(&mut self, frame: &Frame, record: &mut Vec<u8>) -> Result<(), SaveError> {
        let len = usize::try_from(frame.len).map_err(|_| frame.damaged("an impossible length"))?;
        record.resize(FRAME + len + CHECKSUM, 0);
        self.read(&mut record[FRAME..], "a record")?;
        let sum = get64(record, FRAME + len);
        record.truncate(FRAME + len);
        if checksum(record) == sum {
            return Ok(());
        }
        Err(frame.damaged("a wrong checksum"))
    }

    /// Reads past the payload of a frame that was just read, `most` bytes at a time, to see whether
    /// its checksum is right. `record` then holds nothing of use.
    pub(super) fn skim(
        &mut self,
        frame: &Frame,
        record: &mut Vec<u8>,
        most: usize,
    ) -> Result<(), SaveError> {
        let mut sums = Checksums::new();
        sums.update(record);
        let mut left = frame.len;
        while left > 0 {
            let len = usize::try_from(left).unwrap_or(usize::MAX).min(most.max(1));
            record.resize(len, 0);
            self.read(record, "a record")?;
            sums.update(record);
            left -= len as u64;
        }
        record.resize(CHECKSUM, 0);
        self.read(record, "a record")?;
        if sums.digest() == get64(record, 0) {
            return Ok(());
        }
        Err(frame.damaged("a wrong checksum"))
    }
}
