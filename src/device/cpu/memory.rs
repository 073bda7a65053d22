//! The pool's memory: one anonymous mapping, made resident at open.
//!
//! Every page is written once while the device opens, so that no step ever waits for the
//! operating system to find one, and a machine that does not have the memory shows it then.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use memmap2::{MmapMut, MmapOptions};

use super::signals::Blocked;
use crate::error::DeviceError;
use crate::units::Bytes;

/// The smallest page of any system that we run on, in bytes: one write to each of these is a
/// write to every page, whatever its size.
const PAGE_BYTES: usize = 4096;

/// Bytes made resident between two reports of progress.
const PROGRESS_BYTES: usize = 256 << 20;

/// The pool.
///
/// The bytes are reached through `base` alone, never through `map`, so that a pointer that was
/// given to an engine's own kernels stays valid whatever slices are made here between its uses.
#[derive(Debug)]
pub(super) struct PoolMemory {
    /// Owns the mapping.
    map: MmapMut,
    base: *mut u8,
    huge_pages: bool,
}

// SAFETY: `base` points into the mapping that `map` owns, which moves with it and may be used from
// any thread; `&self` only reads and `&mut self` alone writes.
unsafe impl Send for PoolMemory {}
// SAFETY: as above: `&self` gives slices to read, and `base` only as a raw pointer.
unsafe impl Sync for PoolMemory {}

impl PoolMemory {
    /// Maps exactly `bytes` bytes of zeros, page aligned, and makes them resident with up to
    /// `threads` threads. `progress` is told the bytes done and the bytes in all.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub(super) fn open(
        bytes: Bytes,
        threads: usize,
        progress: &mut dyn FnMut(Bytes, Bytes),
    ) -> Result<Self, DeviceError> {
        let len = usize::try_from(bytes.get()).map_err(|_| out_of_memory(bytes, 0))?;
        let mut map = MmapOptions::new()
            .len(len)
            .map_anon()
            .map_err(|error| out_of_memory(bytes, error.raw_os_error().unwrap_or(0)))?;
        let huge_pages = advise_huge_pages(&map);
        let mut done = 0;
        progress(Bytes(0), bytes);
        for chunk in map.chunks_mut(PROGRESS_BYTES) {
            done += chunk.len() as u64;
            touch(chunk, threads);
            progress(Bytes(done), bytes);
        }
        let base = map.as_mut_ptr();
        Ok(Self { map, base, huge_pages })
    }

    /// Whether the operating system was asked for huge pages and accepted.
    pub(super) fn huge_pages(&self) -> bool {
        self.huge_pages
    }

    /// The pool's first byte.
    pub(super) fn base_ptr(&self) -> *mut u8 {
        self.base
    }

    /// The pool's bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: `base` and the length are those of the live mapping `map`; nothing writes while
        // `self` is borrowed, as `Device::base_ptr` asks of those who have the pointer.
        unsafe { std::slice::from_raw_parts(self.base, self.map.len()) }
    }

    /// The pool's bytes.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.map.len()) }
    }

    /// The range `offset..offset + len` as indices.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`].
    pub(super) fn range(
        &self,
        offset: u64,
        len: u64,
    ) -> Result<std::ops::Range<usize>, DeviceError> {
        let pool = self.map.len() as u64;
        let error = DeviceError::OutOfRange { offset, len, pool: Bytes(pool) };
        let end = offset.checked_add(len).filter(|end| *end <= pool).ok_or(error)?;
        let index = |at: u64| usize::try_from(at).map_err(|_| error);
        Ok(index(offset)?..index(end)?)
    }
}

/// The error of memory that the system refuses.
pub(super) fn out_of_memory(bytes: Bytes, code: i32) -> DeviceError {
    let available = available_memory().unwrap_or(Bytes::ZERO);
    DeviceError::OutOfMemory { bytes, code, available }
}

/// Asks for huge pages: fewer faults now, and fewer address translations at every step.
fn advise_huge_pages(map: &MmapMut) -> bool {
    #[cfg(target_os = "linux")]
    {
        map.advise(memmap2::Advice::HugePage).is_ok()
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = map;
        false
    }
}

/// Bytes that a thread touches before it looks for more.
const TOUCH_BYTES: usize = 4 << 20;

/// Writes to every page, so that it is there, with up to `threads` threads: with fewer where the
/// system starts no more.
fn touch(bytes: &mut [u8], threads: usize) {
    let threads = threads.min(bytes.len() / TOUCH_BYTES).max(1);
    let parts = Mutex::new(bytes.chunks_mut(TOUCH_BYTES));
    let next = || parts.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        while let Some(part) = next() {
            touch_pages(part);
        }
    };
    std::thread::scope(|scope| {
        let blocked = Blocked::new();
        for _ in 1..threads {
            if std::thread::Builder::new().spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        drop(blocked);
        work();
    });
}

/// Writes to every page, one after the other.
fn touch_pages(bytes: &mut [u8]) {
    for page in bytes.chunks_mut(PAGE_BYTES) {
        page[0] = 0;
    }
}

/// Memory that this process can still take: what the system has available, or what the control
/// group leaves where that is less. `None` where it cannot be told.
#[must_use]
pub fn available_memory() -> Option<Bytes> {
    available_in(Path::new("/"))
}

/// [`available_memory`] with the system's files looked up below `root`.
fn available_in(root: &Path) -> Option<Bytes> {
    let meminfo = std::fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let kib = field(&meminfo, "MemAvailable:")?;
    let system = kib.checked_mul(1024)?;
    Some(Bytes(group_limit(root).map_or(system, |group| group.min(system))))
}

/// What the control groups of this process leave, the tightest of them.
fn group_limit(root: &Path) -> Option<u64> {
    let groups = std::fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let mut tightest = None;
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(number), Some(controllers), Some(path)) =
            (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        let files = if number == "0" && controllers.is_empty() {
            Files { mount: "sys/fs/cgroup", limit: "memory.max", usage: "memory.current" }
        } else if controllers.split(',').any(|controller| controller == "memory") {
            Files {
                mount: "sys/fs/cgroup/memory",
                limit: "memory.limit_in_bytes",
                usage: "memory.usage_in_bytes",
            }
        } else {
            continue;
        };
        let left = files.left(root, path.trim_start_matches('/'));
        tightest = tightest.into_iter().chain(left).min();
    }
    tightest
}

/// Where one version of control groups keeps its numbers.
struct Files {
    mount: &'static str,
    limit: &'static str,
    usage: &'static str,
}

impl Files {
    /// What the group at `path` and those around it leave: each limits all below it. A container
    /// may see its own group as the mount itself, which the walk ends at.
    fn left(&self, root: &Path, path: &str) -> Option<u64> {
        let mount = root.join(self.mount);
        let mut tightest = None;
        for ancestor in Path::new(path).ancestors() {
            tightest = tightest.into_iter().chain(self.left_at(&mount.join(ancestor))).min();
        }
        tightest
    }

    /// What the limit of one folder leaves; `None` without a limit.
    fn left_at(&self, folder: &Path) -> Option<u64> {
        let number = |file: &str| -> Option<u64> {
            std::fs::read_to_string(folder.join(file)).ok()?.trim().parse().ok()
        };
        // "max" is no number, and version 1 says "none" with one close to 2⁶³.
        let limit = number(self.limit).filter(|limit| *limit < 1 << 62)?;
        let stat: PathBuf = folder.join("memory.stat");
        // File pages that nobody has used lately are given back before anything fails.
        let idle = std::fs::read_to_string(stat)
            .ok()
            .and_then(|stat| field(&stat, "inactive_file"))
            .unwrap_or(0);
        Some(limit.saturating_sub(number(self.usage)?.saturating_sub(idle)))
    }
}

/// The number that follows `name` at the start of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some(name)).then(|| words.next()?.parse().ok()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mapping_is_exact_aligned_zero_and_reported() {
        let mut seen = Vec::new();
        let bytes = Bytes((300 << 20) + 64);
        let memory = PoolMemory::open(bytes, 2, &mut |done, total| seen.push((done, total)))
            .expect("300 MiB are there");
        assert_eq!(memory.bytes().len() as u64, bytes.get());
        assert_eq!(memory.bytes().as_ptr().addr() % PAGE_BYTES, 0);
        assert_eq!(memory.bytes()[12345], 0);
        assert_eq!(seen, [(Bytes(0), bytes), (Bytes(256 << 20), bytes), (bytes, bytes)]);
    }

    #[test]
    fn what_cannot_be_mapped_is_an_error() {
        let error = PoolMemory::open(Bytes(1 << 62), 1, &mut |_, _| {}).expect_err("too large");
        assert!(matches!(error, DeviceError::OutOfMemory { bytes: Bytes(b), .. } if b == 1 << 62));
    }

    #[test]
    fn ranges_are_checked_without_wrapping() {
        let memory = PoolMemory::open(Bytes(8192), 1, &mut |_, _| {}).expect("two pages");
        assert_eq!(memory.range(8192, 0), Ok(8192..8192));
        assert!(memory.range(8191, 2).is_err());
        assert!(memory.range(u64::MAX, 2).is_err());
    }

    fn system(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a folder");
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
            std::fs::write(path, text).expect("a file");
        }
        root
    }

    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n");

    #[test]
    fn available_memory_is_the_systems_or_the_groups() {
        assert_eq!(available_in(system(&[]).path()), None);
        assert_eq!(available_in(system(&[MEMINFO]).path()), Some(Bytes(8000 * 1024)));
        let second = [
            MEMINFO,
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/memory.max", "5000000\n"),
            ("sys/fs/cgroup/a/memory.current", "2000000\n"),
            ("sys/fs/cgroup/a/memory.stat", "anon 7\ninactive_file 500000\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
        ];
        assert_eq!(available_in(system(&second).path()), Some(Bytes(3_500_000)));
        let first = [
            MEMINFO,
            ("proc/self/cgroup", "5:devices:/\n4:memory:/x\n0::/\n"),
            ("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "1000000\n"),
            ("sys/fs/cgroup/memory/x/memory.usage_in_bytes", "400000\n"),
        ];
        assert_eq!(available_in(system(&first).path()), Some(Bytes(600_000)));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_machine_has_some() {
        assert!(available_memory().is_some_and(|bytes| bytes > Bytes(1 << 20)));
    }
}
