//! A mutex whose waiters come in the order in which they began to wait.
//!
//! One of the standard library gives itself to whoever is awake when it is let go: a thread that
//! calls verb after verb would keep it from one that waits to read, for as long as it does.
//!
//! `loom` goes through the interleavings of small cases (`.ci/run`, or
//! `RUSTFLAGS="--cfg loom" cargo test --release --lib loom_`).

#[cfg(loom)]
use loom::sync::atomic::AtomicU64;
#[cfg(loom)]
use loom::sync::{Condvar, Mutex, MutexGuard};
use std::ops::{Deref, DerefMut};
#[cfg(not(loom))]
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;
#[cfg(not(loom))]
use std::sync::{Condvar, Mutex, MutexGuard};
use std::sync::{PoisonError, TryLockError};

use crate::device::rank::{self, Rank};

/// The mutex. What a panic leaves in it is for its owner to know: it is not poisoned.
#[derive(Debug)]
pub(super) struct Turns<T> {
    value: Mutex<T>,
    queue: Mutex<Queue>,
    /// Told when another is the first to wait.
    moved: Condvar,
    /// How many wait. Those who come meanwhile do so too.
    waiting: AtomicU64,
}

/// Those who wait have numbers from `first` to `end`.
#[derive(Debug)]
struct Queue {
    first: u64,
    end: u64,
}

/// The value, until this is dropped.
#[derive(Debug)]
pub(super) struct Turn<'a, T> {
    value: MutexGuard<'a, T>,
    _rank: rank::Held,
}

impl<T> Deref for Turn<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Turn<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Turns<T> {
    pub(super) fn new(value: T) -> Self {
        Self {
            value: Mutex::new(value),
            queue: Mutex::new(Queue { first: 0, end: 0 }),
            moved: Condvar::new(),
            waiting: AtomicU64::new(0),
        }
    }

    /// The value, once nobody has it and those who waited before have had it.
    pub(super) fn lock(&self) -> Turn<'_, T> {
        let rank = rank::take(Rank::Cache);
        Turn { value: self.lock_value(), _rank: rank }
    }

    /// The value, if nobody has it or waits for it.
    pub(super) fn try_lock(&self) -> Option<Turn<'_, T>> {
        let value = self.try_lock_value()?;
        Some(Turn { value, _rank: rank::take(Rank::Cache) })
    }

    fn lock_value(&self) -> MutexGuard<'_, T> {
        self.try_lock_value().unwrap_or_else(|| self.wait())
    }

    fn try_lock_value(&self) -> Option<MutexGuard<'_, T>> {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            return None;
        }
        match self.value.try_lock() {
            Ok(value) => Some(value),
            Err(TryLockError::Poisoned(value)) => Some(value.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    #[cold]
    fn wait(&self) -> MutexGuard<'_, T> {
        let queue = || self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let rank = rank::take(Rank::Queue);
        let mut own = queue();
        let number = own.end;
        own.end += 1;
        self.waiting.fetch_add(1, Ordering::Relaxed);
        while own.first != number {
            own = self.moved.wait(own).unwrap_or_else(PoisonError::into_inner);
        }
        drop(own);
        drop(rank);
        // The first waits for whoever has it, and for nobody else.
        let value = self.value.lock().unwrap_or_else(PoisonError::into_inner);
        let rank = rank::take(Rank::Queue);
        queue().first += 1;
        drop(rank);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        // All: of those who sleep, `notify_one` may wake another than the first.
        self.moved.notify_all();
        value
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// All interleavings in which threads are interrupted so often.
    fn model(interruptions: usize, check: impl Fn(&Arc<Turns<u32>>) + Send + Sync + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(interruptions);
        model.check(move || {
            let turns = Arc::new(Turns::new(0));
            check(&turns);
            assert_eq!(turns.waiting.load(Ordering::Relaxed), 0);
            let queue = turns.queue.lock().expect("no panic");
            assert_eq!(queue.first, queue.end, "everyone who waited had a turn");
        });
    }

    /// Adds to the value so often, each time alone with it.
    fn add(turns: &Turns<u32>, times: u32) {
        for _ in 0..times {
            let mut turn = turns.lock();
            let before = *turn;
            // Where another could come in.
            thread::yield_now();
            *turn = before + 1;
        }
    }

    fn threads(interruptions: usize, others: u32, times: u32) {
        model(interruptions, move |turns| {
            let spawn = |_| {
                let turns = Arc::clone(turns);
                thread::spawn(move || add(&turns, times))
            };
            let spawned: Vec<_> = (0..others).map(spawn).collect();
            add(turns, times);
            spawned.into_iter().for_each(|thread| thread.join().expect("no panic"));
            assert_eq!(*turns.lock(), (others + 1) * times);
        });
    }

    #[test]
    fn loom_two_threads_take_turns() {
        threads(3, 1, 2);
    }

    #[test]
    fn loom_three_threads_take_turns() {
        threads(2, 2, 1);
    }

    /// Who waits comes before one who lets go and asks again.
    #[test]
    fn loom_who_waits_is_next() {
        model(2, |turns| {
            let mut turn = turns.lock();
            let waits = |own: u32| {
                let other = Arc::clone(turns);
                let waits = thread::spawn(move || {
                    let mut turn = other.lock();
                    *turn = *turn * 10 + own;
                });
                while turns.waiting.load(Ordering::Relaxed) < own.into() {
                    thread::yield_now();
                }
                waits
            };
            let spawned = [1, 2].map(waits);
            *turn = 0;
            drop(turn);
            assert_eq!(*turns.lock(), 12, "in the order in which they began to wait");
            spawned.into_iter().for_each(|thread| thread.join().expect("no panic"));
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;

    /// Those who wait come in their order, before those who have just let go.
    #[test]
    fn the_first_to_wait_is_the_first_to_get_it() {
        let turns = Turns::new(Vec::new());
        let until = |waiting| {
            while turns.waiting.load(Ordering::Relaxed) != waiting {
                thread::yield_now();
            }
        };
        thread::scope(|scope| {
            let mut got = turns.lock();
            for name in 1..=3 {
                let turns = &turns;
                scope.spawn(move || turns.lock().push(name));
                until(u64::from(name));
            }
            got.push(0_u32);
            // A mutex would give it to this thread again.
            for _ in 0..3 {
                drop(got);
                got = turns.lock();
            }
            assert_eq!(*got, [0, 1, 2, 3]);
        });
        let value = turns.lock();
        assert_eq!(turns.waiting.load(Ordering::Relaxed), 0);
        thread::scope(|scope| {
            scope.spawn(|| turns.lock().push(9));
            until(1);
            thread::sleep(Duration::from_millis(1));
            drop(value);
        });
        assert_eq!(turns.lock().last(), Some(&9));
    }
}
