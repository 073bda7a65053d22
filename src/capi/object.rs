//! A cache behind its handle: who may enter, and what a panic leaves.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::bindings::{
    KVPOOL_OK, kvpool_cache_t, kvpool_plan_info_t, kvpool_status_t, kvpool_step_t,
};
use super::dlpack::Views;
use super::failure::{CallError, Failure};
#[cfg(test)]
use super::fault;
use super::gate::Gate;
use super::handle;
use super::last_error::note;
use super::later::{Ended, Later};
use super::plan::info_of;
use super::process;
use super::registry::Registry;
use crate::cache::{BeginOptions, Begun, Cache, Prober, Reservation, Step};
use crate::config::Config;
use crate::device::{DeviceInfo, room};
use crate::error::DeviceError;
use crate::plan::Plan;

/// The caches of the process.
pub(super) static CACHES: Registry<Object> = Registry::new();

/// An open cache. What does not change is beside the mutex.
#[derive(Debug)]
pub(super) struct Object {
    pub(super) plan: Plan,
    pub(super) config: Config,
    /// Of the plan as it was opened: to work it out asks the system, which allocates.
    pub(super) info: kvpool_plan_info_t,
    pub(super) device: DeviceInfo,
    /// The pool's first byte, in the device's memory.
    pub(super) base: usize,
    pub(super) prober: Option<Prober>,
    pub(super) views: Views,
    /// The cache's own number, which its handles have.
    id: u32,
    later: Later,
    open: Gate<Open>,
}

/// The cache itself, and what its functions need room for: all of it allocated at open.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) cache: Cache,
    /// What a batch begins, during the call. `[seq_slots]`
    pub(super) batch: Vec<(&'static [u32], BeginOptions)>,
    /// `[seq_slots]`
    pub(super) begun: Vec<Begun>,
    /// By the slot of their sequence. `[seq_slots]`
    pub(super) reservations: Vec<Option<Reservation>>,
    /// What is being given back, for that time.
    pub(super) ended: Vec<Ended>,
}

impl Open {
    fn new(cache: Cache, ended: Vec<Ended>) -> Result<Self, DeviceError> {
        let slots = cache.plan().seq_slots as usize;
        let mut reservations = room(slots)?;
        reservations.resize_with(slots, || None);
        Ok(Self { cache, batch: room(slots)?, begun: room(slots)?, reservations, ended })
    }
}

thread_local! {
    /// Whether the thread is in a function of the caller's that a verb calls.
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// Calls a function of the caller's from within a verb. It may call what never waits, and no verb
/// or reader of any cache: two threads that waited for each other's caches would do so for ever.
pub(super) fn call_back(callback: impl FnOnce()) {
    let outer = IN_CALLBACK.replace(true);
    callback();
    IN_CALLBACK.set(outer);
}

/// Refuses a verb or reader from within a callback: it would wait for this cache's readers while
/// the callback's own are kept waiting.
fn check_no_callback() -> Result<(), CallError> {
    if IN_CALLBACK.get() { Err(CallError::InCallback) } else { Ok(()) }
}

impl Object {
    pub(super) fn new(cache: Cache, plan: Plan, config: Config) -> Result<Arc<Self>, Failure> {
        let device = cache.device_info();
        let workspace_bytes = device.workspace_bytes.get();
        let (later, ended) = Later::new(&plan)?;
        Ok(Arc::new(Self {
            info: kvpool_plan_info_t { workspace_bytes, ..info_of(&plan, &config)? },
            device,
            base: cache.pool_ptr().expose_provenance(),
            prober: cache.prober(),
            views: Views::new(plan.geometry.num_layers)?,
            id: cache.id(),
            later,
            open: Gate::new(Open::new(cache, ended)?),
            plan,
            config,
        }))
    }

    /// Runs what may panic, after which the cache is not to be trusted.
    fn run(&self, call: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
        catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|payload| {
            self.open.poison();
            Err(of_panic(payload.as_ref()))
        })
    }

    fn verb(&self, call: impl FnOnce(&mut Open) -> Result<(), Failure>) -> Result<(), Failure> {
        check_no_callback()?;
        let entered = self.open.enter()?;
        let result = {
            let (_inside, mut open) = entered;
            self.run(|| {
                #[cfg(test)]
                fault::point();
                self.later.settle(&mut open);
                call(&mut open)
            })
        };
        self.settle();
        result
    }

    fn read(&self, call: impl FnOnce(&Open) -> Result<(), Failure>) -> Result<(), Failure> {
        check_no_callback()?;
        let mut open = self.open.look()?;
        let result = self.run(|| {
            self.later.settle(&mut open);
            call(&open)
        });
        drop(open);
        self.settle();
        result
    }

    /// Gives back what was written down while others were in the cache, unless somebody is again: who
    /// leaves does it, and looks again, for what came while it did.
    #[inline]
    fn settle(&self) {
        while self.later.is_some()
            && let Some(mut open) = self.open.try_look()
        {
            let mut any = false;
            // A panic poisons the cache, which all who come later are told.
            let _ = self.run(|| {
                any = self.later.settle(&mut open);
                Ok(())
            });
            if !any {
                // A step is open.
                break;
            }
        }
    }

    /// Whether something waits to be given back.
    #[cfg(test)]
    pub(super) fn keeps_for_later(&self) -> bool {
        self.later.is_some()
    }
}

fn of_panic(payload: &(dyn Any + Send)) -> Failure {
    let said = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let said = said.or_else(|| payload.downcast_ref::<String>().cloned());
    Failure::Panic(said.unwrap_or_default())
}

/// The status of a call: no panic passes.
pub(super) fn guarded(call: impl FnOnce() -> Result<(), Failure>) -> kvpool_status_t {
    let result = catch_unwind(AssertUnwindSafe(call))
        .unwrap_or_else(|payload| Err(of_panic(payload.as_ref())));
    match result {
        Ok(()) => KVPOOL_OK,
        Err(failure) => note(&failure),
    }
}

/// A verb that may be called while a step is open.
pub(super) fn verb_beside_step(
    cache: kvpool_cache_t,
    call: impl FnOnce(&mut Open) -> Result<(), Failure>,
) -> kvpool_status_t {
    guarded(|| CACHES.get(cache)?.verb(call))
}

/// A verb that is not of a step.
pub(super) fn verb(
    cache: kvpool_cache_t,
    call: impl FnOnce(&mut Open) -> Result<(), Failure>,
) -> kvpool_status_t {
    verb_beside_step(cache, |open| {
        if open.cache.has_open_step() {
            return Err(CallError::StepOpen.into());
        }
        call(open)
    })
}

/// A verb of an open step, which stays open.
pub(super) fn step_verb(
    cache: kvpool_cache_t,
    step: kvpool_step_t,
    call: impl FnOnce(&mut Step<'_>) -> Result<(), Failure>,
) -> kvpool_status_t {
    verb_beside_step(cache, |open| {
        let mut step = open.cache.resume(handle::step(step)?)?;
        let result = call(&mut step);
        let _ = step.detach();
        result
    })
}

/// Gives back what a handle of the cache with that number names, now or as soon as it can go.
pub(super) fn give_back_later(
    cache: kvpool_cache_t,
    what: impl FnOnce() -> Result<(u32, Ended), CallError>,
) -> kvpool_status_t {
    guarded(|| {
        let object = CACHES.get(cache)?;
        object.open.check_usable()?;
        let (owner, ended) = what()?;
        if owner != object.id {
            let what = match ended {
                Ended::Step(_) => "step",
                Ended::Sequence(_) => "sequence",
                Ended::Pin(_) => "pin",
                Ended::Reservation(_) => "reservation",
            };
            return Err(CallError::ForeignHandle { what }.into());
        }
        object.later.add(ended)?;
        // In a callback a cache is held, this one or another.
        if !IN_CALLBACK.get() {
            object.settle();
        }
        Ok(())
    })
}

/// A function that changes nothing, and waits while a verb is under way.
pub(super) fn reader(
    cache: kvpool_cache_t,
    call: impl FnOnce(&Open) -> Result<(), Failure>,
) -> kvpool_status_t {
    guarded(|| CACHES.get(cache)?.read(call))
}

/// A function that looks at what does not change.
pub(super) fn any(
    cache: kvpool_cache_t,
    call: impl FnOnce(&Arc<Object>) -> Result<(), Failure>,
) -> kvpool_status_t {
    guarded(|| {
        let object = CACHES.get(cache)?;
        object.open.check_usable()?;
        call(&object)
    })
}

/// Takes a cache out, unless a verb is under way. Waits for its readers, and for those who have
/// looked it up and are about to learn that it is closed: its memory and threads are gone when this
/// returns, unless a view is out.
pub(super) fn close(cache: kvpool_cache_t) -> kvpool_status_t {
    guarded(|| {
        if process::is_forked() {
            // What the child has of it goes with the child.
            return Ok(());
        }
        let object = CACHES.get(cache)?;
        check_no_callback()?;
        let (_inside, mut open) = object.open.close()?;
        // A view that is out keeps the device, but the caller's stream may go now. What the driver
        // says to that concerns nobody any more.
        let _ = object.run(|| Ok(open.cache.leave_stream()?));
        drop(open);
        drop(CACHES.remove(cache)?);
        // A view that is put back meanwhile is counted as one more holder, until it is.
        for tries in 0_u32.. {
            if Arc::strong_count(&object) <= 1 + object.views.out() {
                break;
            }
            if tries < 100 {
                thread::yield_now();
            } else {
                // Yielding lets nobody run whose priority is lower.
                thread::sleep(Duration::from_micros(50));
            }
        }
        Ok(())
    })
}
