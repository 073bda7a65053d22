//! The order in which locks are taken, and a check of it in builds with debug assertions and in
//! unit tests.
//!
//! | rank | lock | held for |
//! |---|---|---|
//! | 1 | `capi::gate`: a cache behind its handle | a verb, or a reader's look |
//! | 2 | `capi::turns`: the queue of those who wait for it | a number |
//! | 3 | `capi::dlpack`: views that nobody has | a view |
//! | 4 | `capi::registry`: the objects behind handles | a look-up |
//!
//! A thread that holds one takes none of the same or a lower rank, so no two threads can wait for
//! each other. A callback, during which its cache is held, takes views and the registry at most:
//! verbs and readers of every cache are refused in it.
//!
//! What is beside this needs no rank, because whoever holds it takes nothing else: the lock on
//! which the CPU device's workers sleep (`cpu/workers.rs`, on loom), the list of what is given back later
//! (`capi/later.rs`), and the one that shares out
//! memory at open (`cpu/memory.rs`). That in front of these threads (`cpu/threads.rs`) is only
//! tried, and nobody waits for it. Probers take no lock.

use std::marker::PhantomData;

/// A lock's place in the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rank {
    /// A cache behind its handle.
    Cache = 1,
    /// Those who wait for it.
    Queue = 2,
    /// Views of layers that nobody has.
    Views = 3,
    /// The objects behind handles.
    Objects = 4,
}

#[cfg(all(any(debug_assertions, test), not(loom)))]
thread_local! {
    /// The highest rank that this thread holds.
    static HELD: std::cell::Cell<u8> = const { std::cell::Cell::new(0) };
}

/// That a lock of some rank is held, until this is dropped. Nothing where it is not checked. (On loom all
/// threads of a model are one of the system's, which would hold what all of them do.)
#[derive(Debug)]
#[must_use = "the rank is held as long as this lives"]
pub(crate) struct Held {
    #[cfg(all(any(debug_assertions, test), not(loom)))]
    before: u8,
    /// Dropped by the thread that took it.
    not_send: PhantomData<*const ()>,
}

/// Notes that a lock is about to be taken.
///
/// # Panics
/// Where it is checked, when this thread holds one of the same or a later rank.
#[inline(always)]
pub(crate) fn take(rank: Rank) -> Held {
    #[cfg(all(any(debug_assertions, test), not(loom)))]
    let before = {
        let before = HELD.get();
        assert!(before < rank as u8, "{rank:?} is taken while a lock of rank {before} is held");
        HELD.set(rank as u8);
        before
    };
    let _ = rank;
    Held {
        #[cfg(all(any(debug_assertions, test), not(loom)))]
        before,
        not_send: PhantomData,
    }
}

#[cfg(all(any(debug_assertions, test), not(loom)))]
impl Drop for Held {
    fn drop(&mut self) {
        // Guards are dropped in the reverse order, or together.
        HELD.set(self.before);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::panic::catch_unwind;

    use super::*;

    #[test]
    fn the_order_is_kept() {
        let views = take(Rank::Views);
        drop(take(Rank::Objects));
        for rank in [Rank::Cache, Rank::Queue, Rank::Views] {
            assert!(catch_unwind(|| drop(take(rank))).is_err(), "{rank:?} comes before");
        }
        drop(views);
        drop(take(Rank::Views));
        drop(take(Rank::Cache));
    }
}
