//! Who may enter a cache, and what a panic or the end of it leaves for those who come later.
//!
//! One verb at a time, and another at the same time is refused, not kept waiting: it would be a
//! caller's mistake that shows only when it is slow. Readers wait for each other and for the verb.
//!
//! `loom` goes through the interleavings of small cases (`.ci/run`, or
//! `RUSTFLAGS="--cfg loom" cargo test --release --lib loom_`).

#[cfg(loom)]
use loom::sync::atomic::AtomicBool;
#[cfg(not(loom))]
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;

use super::failure::CallError;
use super::turns::{Turn, Turns};

/// What is behind it, and who may go there.
#[derive(Debug)]
pub(super) struct Gate<T> {
    value: Turns<T>,
    /// Whether a thread is in a verb, or waits to be.
    inside: AtomicBool,
    poisoned: AtomicBool,
    /// Whether its handle is gone, for a thread that had looked it up before.
    closed: AtomicBool,
}

/// A thread's stay in a verb.
#[derive(Debug)]
pub(super) struct Inside<'a>(&'a AtomicBool);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl<T> Gate<T> {
    pub(super) fn new(value: T) -> Self {
        Self {
            value: Turns::new(value),
            inside: AtomicBool::new(false),
            poisoned: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        }
    }

    fn claim(&self) -> Result<Inside<'_>, CallError> {
        let claimed =
            self.inside.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
        claimed.map(|_| Inside(&self.inside)).map_err(|_| CallError::Busy)
    }

    /// Enters for a verb: the value, once nobody reads it.
    ///
    /// # Errors
    /// [`CallError::Busy`] while another verb is inside, and those of [`Self::check_usable`].
    pub(super) fn enter(&self) -> Result<(Inside<'_>, Turn<'_, T>), CallError> {
        let inside = self.claim()?;
        let value = self.value.lock();
        self.check_usable()?;
        Ok((inside, value))
    }

    /// Looks at the value, once nobody is in it.
    ///
    /// # Errors
    /// Those of [`Self::check_usable`].
    pub(super) fn look(&self) -> Result<Turn<'_, T>, CallError> {
        let value = self.value.lock();
        // Only now: it was waited for, and may have met a panic meanwhile.
        self.check_usable()?;
        Ok(value)
    }

    /// The value, if nobody is in it or waits for it, and it can be used.
    pub(super) fn try_look(&self) -> Option<Turn<'_, T>> {
        self.value.try_lock().filter(|_| self.check_usable().is_ok())
    }

    /// Enters for the last time, also what met a panic before; whoever waits, or has looked it up,
    /// is told that it is gone.
    ///
    /// # Errors
    /// [`CallError::Busy`] while a verb is inside, [`CallError::StaleHandle`] if another has closed
    /// it.
    pub(super) fn close(&self) -> Result<(Inside<'_>, Turn<'_, T>), CallError> {
        let inside = self.claim()?;
        let value = self.value.lock();
        if self.closed.swap(true, Ordering::AcqRel) {
            return Err(CallError::StaleHandle { what: "cache" });
        }
        Ok((inside, value))
    }

    /// Notes that a panic was met: what it left is not to be trusted.
    pub(super) fn poison(&self) {
        self.poisoned.store(true, Ordering::Release);
    }

    /// Refuses a cache that was closed meanwhile, or met a panic before.
    pub(super) fn check_usable(&self) -> Result<(), CallError> {
        if self.closed.load(Ordering::Acquire) {
            return Err(CallError::StaleHandle { what: "cache" });
        }
        if self.poisoned.load(Ordering::Acquire) { Err(CallError::Poisoned) } else { Ok(()) }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// All interleavings in which threads are interrupted so often.
    fn model(check: impl Fn() + Send + Sync + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(check);
    }

    /// A verb: adds to the value, where another could come in. Whether it was let in.
    fn add(gate: &Gate<Option<u32>>) -> Result<(), CallError> {
        let (_inside, mut value) = gate.enter()?;
        let before = value.expect("not closed");
        thread::yield_now();
        *value = Some(before + 1);
        Ok(())
    }

    /// Verbs at the same time: what was let in has counted, and nothing else; the last one finds
    /// the gate free.
    #[test]
    fn loom_one_verb_at_a_time() {
        model(|| {
            let gate = Arc::new(Gate::new(Some(0)));
            let other = Arc::clone(&gate);
            let spawned = thread::spawn(move || add(&other).is_ok());
            let own = add(&gate).is_ok();
            let let_in = u32::from(own) + u32::from(spawned.join().expect("no panic"));
            assert!(let_in > 0);
            assert_eq!(*gate.look().expect("open"), Some(let_in));
            add(&gate).expect("nobody is inside");
        });
    }

    /// A verb and a reader beside one who closes: they come before, or are told.
    #[test]
    fn loom_nobody_enters_what_is_closed() {
        model(|| {
            let gate = Arc::new(Gate::new(Some(0)));
            let spawn = |act: fn(&Gate<Option<u32>>) -> Result<(), CallError>| {
                let gate = Arc::clone(&gate);
                thread::spawn(move || act(&gate))
            };
            let verb = spawn(add);
            let reader = spawn(|gate| {
                let value = gate.look()?;
                assert!(value.is_some(), "not closed");
                Ok(())
            });
            let closed = gate.close().map(|(_inside, mut value)| *value = None);
            let verb = verb.join().expect("no panic");
            reader.join().expect("no panic").or_else(stale).expect("stale or nothing");
            match closed {
                Ok(()) => {
                    assert!(matches!(add(&gate), Err(CallError::StaleHandle { .. })));
                    assert!(matches!(gate.close(), Err(CallError::StaleHandle { .. })));
                }
                Err(error) => {
                    assert!(matches!(error, CallError::Busy), "{error}");
                    assert!(verb.is_ok(), "who made it busy was let in");
                }
            }
        });
    }

    fn stale(error: CallError) -> Result<(), CallError> {
        if matches!(error, CallError::StaleHandle { .. }) { Ok(()) } else { Err(error) }
    }

    /// Who waits while another meets a panic is told.
    #[test]
    fn loom_a_panic_is_told_to_those_who_waited() {
        model(|| {
            let gate = Arc::new(Gate::new(Some(0)));
            let other = Arc::clone(&gate);
            let reader = thread::spawn(move || match other.look() {
                Ok(value) => assert_eq!(*value, Some(0), "half of a verb"),
                Err(error) => assert!(matches!(error, CallError::Poisoned), "{error}"),
            });
            if let Ok((_inside, mut value)) = gate.enter() {
                *value = Some(1);
                gate.poison();
            }
            reader.join().expect("no panic");
            assert!(matches!(gate.look().map(|_| ()), Err(CallError::Poisoned)));
            assert!(gate.close().is_ok());
        });
    }
}
