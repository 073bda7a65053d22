//! A mutex whose waiters come in the order in which they began to wait.
//!
//! One of the standard library gives itself to whoever is awake when it is let go: a thread that
//! calls verb after verb would keep it from one that waits to read, for as long as it does.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};

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
    pub(super) const fn new(value: T) -> Self {
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

    fn lock_value(&self) -> MutexGuard<'_, T> {
        if self.waiting.load(Ordering::Relaxed) == 0 {
            match self.value.try_lock() {
                Ok(value) => return value,
                Err(TryLockError::Poisoned(value)) => return value.into_inner(),
                Err(TryLockError::WouldBlock) => {}
            }
        }
        self.wait()
    }

    #[cold]
    fn wait(&self) -> MutexGuard<'_, T> {
        let queue = || self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let rank = rank::take(Rank::Queue);
        let mut own = queue();
        let number = own.end;
        own.end += 1;
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let first = self.moved.wait_while(own, |queue| queue.first != number);
        drop(first.unwrap_or_else(PoisonError::into_inner));
        drop(rank);
        // The first waits for whoever has it, and for nobody else.
        let value = self.value.lock().unwrap_or_else(PoisonError::into_inner);
        let rank = rank::take(Rank::Queue);
        queue().first += 1;
        drop(rank);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        self.moved.notify_all();
        value
    }
}

#[cfg(test)]
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
