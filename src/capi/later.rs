//! What was given back while it could not be taken: the calls whose names end in `_later`.
//!
//! A destructor cannot be refused. So these calls never are, for a step that is open or for another
//! thread's verb: what they name is written down, and goes as soon as nobody is in the cache and no
//! step is open, at the latest before the next verb or reader sees anything. They claim nothing, so
//! they make nobody's verb busy, and they wait for nobody.
//!
//! **Lock.** That of the list is held to put an entry in or to take all of them out; whoever holds
//! it takes no other.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::admission;
use super::bindings::kvpool_reservation_t;
use super::failure::CallError;
use super::object::Open;
use crate::cache::{PinHandle, SeqHandle, Step, StepId};
use crate::device::room;
use crate::error::DeviceError;
use crate::plan::Plan;

/// Entries beyond those that good handles can make: for handles that are given back twice.
const SPARE: usize = 64;

/// Entries that are kept for steps: whatever else waits, it waits for one of these.
const STEPS: usize = 8;

/// What was given back.
#[derive(Clone, Copy, Debug)]
pub(super) enum Ended {
    Step(StepId),
    Sequence(SeqHandle),
    Pin(PinHandle),
    Reservation(kvpool_reservation_t),
}

/// The list. All of its memory is allocated at open.
#[derive(Debug)]
pub(super) struct Later {
    list: Mutex<Vec<Ended>>,
    /// Entries that are in the list or taken out of it and not yet done.
    waiting: AtomicUsize,
    /// Of these, steps.
    steps: AtomicUsize,
    limit: usize,
}

impl Later {
    /// The list of a cache, and as much room again for those that are being done.
    pub(super) fn new(plan: &Plan) -> Result<(Self, Vec<Ended>), DeviceError> {
        // A slot has a sequence or a reservation.
        let limit = plan.seq_slots as usize + plan.max_pins() as usize + SPARE;
        let list = Mutex::new(room(limit + STEPS)?);
        let (waiting, steps) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Ok((Self { list, waiting, steps, limit }, room(limit + STEPS)?))
    }

    /// Writes one down.
    ///
    /// # Errors
    /// [`CallError::TooManyWait`].
    pub(super) fn add(&self, ended: Ended) -> Result<(), CallError> {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        let is_step = matches!(ended, Ended::Step(_));
        let (waiting, steps) =
            (self.waiting.load(Ordering::Relaxed), self.steps.load(Ordering::Relaxed));
        // Both change under the lock alone.
        let (used, limit) = if is_step { (steps, STEPS) } else { (waiting - steps, self.limit) };
        if used >= limit {
            return Err(CallError::TooManyWait { limit });
        }
        list.push(ended);
        self.steps.fetch_add(usize::from(is_step), Ordering::Release);
        self.waiting.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Whether something waits.
    #[inline]
    pub(super) fn is_some(&self) -> bool {
        self.waiting.load(Ordering::Acquire) > 0
    }

    /// Does what can be done now: a step that ended goes first, since it is in the way of all
    /// others, and these in their order, unless a step is open. Tells whether anything was.
    #[inline]
    pub(super) fn settle(&self, open: &mut Open) -> bool {
        self.is_some() && self.settle_some(open)
    }

    #[cold]
    fn settle_some(&self, open: &mut Open) -> bool {
        if self.steps.load(Ordering::Acquire) == 0 && open.cache.has_open_step() {
            return false;
        }
        let mut own = std::mem::take(&mut open.ended);
        std::mem::swap(&mut *self.list.lock().unwrap_or_else(PoisonError::into_inner), &mut own);
        let all = own.len();
        let mut steps = 0;
        own.retain(|ended| {
            let Ended::Step(step) = ended else { return true };
            // One that is not open any more has nothing to give back, and is not the open one.
            if let Ok(step) = open.cache.resume(*step) {
                Step::cancel(step);
            }
            steps += 1;
            false
        });
        if !open.cache.has_open_step() {
            // What is gone already needs nothing, and what is another cache's gets nothing.
            own.drain(..).for_each(|ended| give_back(open, ended));
        }
        // What stays, before what came meanwhile: no more than there is room for, as all of it counts.
        let left = own.len();
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        own.append(&mut list);
        std::mem::swap(&mut *list, &mut own);
        self.steps.fetch_sub(steps, Ordering::Release);
        self.waiting.fetch_sub(all - left, Ordering::Release);
        drop(list);
        open.ended = own;
        all > left
    }
}

fn give_back(open: &mut Open, ended: Ended) {
    let _ = match ended {
        // Those went before.
        Ended::Step(_) => return,
        Ended::Sequence(sequence) => open.cache.release(sequence).is_ok(),
        Ended::Pin(pin) => open.cache.unpin(pin).is_ok(),
        Ended::Reservation(handle) => admission::cancel(open, handle).is_ok(),
    };
}
