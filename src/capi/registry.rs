//! Objects behind handles: configs, plans and caches of the process.

use std::sync::{Arc, PoisonError, RwLock};

use super::failure::CallError;
use super::handle::{Handle, Parts, pack, unpack};
use super::process;
use crate::device::rank::{self, Rank};

/// Objects of one kind that can be there at once.
const MAX_OBJECTS: usize = 1 << 16;

/// The objects of one kind. Whoever looks one up shares it until it is done with it, so that an
/// object that is taken out meanwhile is not freed under anybody.
#[derive(Debug)]
pub(super) struct Registry<T> {
    slots: RwLock<Slots<T>>,
}

#[derive(Debug)]
struct Slots<T> {
    entries: Vec<Entry<T>>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Entry<T> {
    /// That of the object, or of the next one. Raised when an object goes; the first has 1.
    generation: u64,
    object: Option<Arc<T>>,
}

impl<T> Registry<T> {
    pub(super) const fn new() -> Self {
        Self { slots: RwLock::new(Slots { entries: Vec::new(), free: Vec::new() }) }
    }

    /// Keeps an object and gives its handle.
    ///
    /// # Errors
    /// [`CallError::TooManyObjects`], [`CallError::Forked`].
    pub(super) fn insert<H: Handle>(&self, object: Arc<T>) -> Result<H, CallError> {
        check_no_fork()?;
        let _rank = rank::take(Rank::Objects);
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let place = match slots.free.pop() {
            Some(place) => place,
            None if slots.entries.len() < MAX_OBJECTS => {
                slots.entries.push(Entry { generation: 1, object: None });
                // Room for all of them, so that nothing is allocated when one goes.
                let room = slots.entries.capacity() - slots.free.len();
                slots.free.reserve(room);
                u32::try_from(slots.entries.len() - 1).unwrap_or(u32::MAX)
            }
            None => return Err(CallError::TooManyObjects { what: H::NAME, limit: MAX_OBJECTS }),
        };
        let entry = &mut slots.entries[place as usize];
        entry.object = Some(object);
        Ok(pack(Parts { owner: 0, place, generation: entry.generation }))
    }

    /// The object of a handle.
    ///
    /// # Errors
    /// [`CallError::BadHandle`], [`CallError::StaleHandle`], [`CallError::Forked`].
    pub(super) fn get<H: Handle>(&self, handle: H) -> Result<Arc<T>, CallError> {
        let parts = unpack(handle)?;
        check_no_fork()?;
        let _rank = rank::take(Rank::Objects);
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        match slots.entries.get(parts.place as usize) {
            Some(Entry { generation, object: Some(object) })
                if *generation == parts.generation && parts.owner == 0 =>
            {
                Ok(Arc::clone(object))
            }
            _ => Err(CallError::StaleHandle { what: H::NAME }),
        }
    }

    /// Takes the object of a handle out.
    ///
    /// # Errors
    /// As [`Registry::get`].
    pub(super) fn remove<H: Handle>(&self, handle: H) -> Result<Arc<T>, CallError> {
        let parts = unpack(handle)?;
        check_no_fork()?;
        let _rank = rank::take(Rank::Objects);
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let entry = slots.entries.get_mut(parts.place as usize);
        let object = entry
            .filter(|entry| entry.generation == parts.generation && parts.owner == 0)
            .and_then(|entry| {
                let object = entry.object.take()?;
                entry.generation += 1;
                Some(object)
            })
            .ok_or(CallError::StaleHandle { what: H::NAME })?;
        slots.free.push(parts.place);
        Ok(object)
    }
}

/// Refuses what was lost in a fork, before the lock is touched: a thread that is not here may have
/// held it.
fn check_no_fork() -> Result<(), CallError> {
    if process::is_forked() { Err(CallError::Forked) } else { Ok(()) }
}
