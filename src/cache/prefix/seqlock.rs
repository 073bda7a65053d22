//! Readers beside one writer, without locks.
//!
//! The writer makes the version odd, changes what it guards, and makes it even again. A reader
//! notes an even version, reads, and asks for the version again: if it is the same, what it read
//! was all of one moment; if not, it reads again. The writer never waits. What is guarded consists
//! of atomics, read and written relaxed, so a reader that comes at the wrong time sees nonsense,
//! but never undefined behaviour; it must only make sure that nonsense leads it nowhere (bounded
//! loops, checked indices).
//!
//! The order of memory follows Boehm, "Can seqlocks get along with programming language memory
//! models?" (MSPC 2012), figures 5 and 6; `loom` goes through all interleavings of a small case
//! (`.ci/run`, or `RUSTFLAGS="--cfg loom" cargo test --release --lib loom_`).

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// The version of what it guards.
#[derive(Debug)]
pub(super) struct SeqLock(AtomicU64);

impl SeqLock {
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Changes what is guarded. There must be one writer at a time: whoever may call this holds
    /// the cache exclusively.
    #[inline]
    pub(super) fn write<R>(&self, change: impl FnOnce() -> R) -> R {
        let version = self.0.load(Ordering::Relaxed);
        self.0.store(version.wrapping_add(1), Ordering::Relaxed);
        // No change below becomes visible before the odd version.
        fence(Ordering::Release);
        let result = change();
        // Every change above is visible before the even version.
        self.0.store(version.wrapping_add(2), Ordering::Release);
        result
    }

    /// Reads once; `None` when a writer was at work meanwhile.
    #[inline]
    pub(super) fn try_read<R>(&self, read: impl FnOnce() -> R) -> Option<R> {
        let version = self.0.load(Ordering::Acquire);
        if version % 2 == 1 {
            return None;
        }
        let result = read();
        // No read above is made after the version is read again.
        fence(Ordering::Acquire);
        (self.0.load(Ordering::Relaxed) == version).then_some(result)
    }
}

#[cfg(all(test, loom))]
mod tests {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// Two values that are only ever equal between writes.
    #[test]
    fn loom_a_read_is_of_one_moment() {
        loom::model(|| {
            let shared = Arc::new((SeqLock::new(), AtomicU64::new(0), AtomicU64::new(0)));
            let writer = {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    for value in 1..=2 {
                        shared.0.write(|| {
                            shared.1.store(value, Ordering::Relaxed);
                            shared.2.store(value, Ordering::Relaxed);
                        });
                    }
                })
            };
            let seen = shared
                .0
                .try_read(|| (shared.1.load(Ordering::Relaxed), shared.2.load(Ordering::Relaxed)));
            if let Some((first, second)) = seen {
                assert_eq!(first, second);
            }
            writer.join().expect("the writer ends");
            let last = shared.0.try_read(|| shared.2.load(Ordering::Relaxed));
            assert_eq!(last, Some(2));
        });
    }
}
