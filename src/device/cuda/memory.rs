//! Memory that is given back when it is dropped, and a ring of pinned buffers.

use std::sync::Arc;

use super::driver::{Context, Entered, Event, Stream};
use crate::device::room;
use crate::error::DeviceError;
use crate::units::Bytes;

/// One allocation of device memory.
#[derive(Debug)]
pub(super) struct DeviceMemory {
    context: Arc<Context>,
    address: u64,
    bytes: Bytes,
}

impl DeviceMemory {
    pub(super) fn allocate(
        context: &Arc<Context>,
        cx: &Entered<'_>,
        bytes: Bytes,
    ) -> Result<Self, DeviceError> {
        // The driver refuses an allocation of nothing.
        let address = cx.allocate(Bytes(bytes.get().max(1)))?;
        Ok(Self { context: Arc::clone(context), address, bytes })
    }

    /// Its first byte.
    pub(super) const fn address(&self) -> u64 {
        self.address
    }

    pub(super) const fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// The address of `offset`, when so many bytes from there on lie inside.
    pub(super) fn range(&self, offset: u64, len: u64) -> Result<u64, DeviceError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.bytes.get() => Ok(self.address + offset),
            _ => Err(DeviceError::OutOfRange { offset, len, pool: self.bytes }),
        }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if let Ok(cx) = self.context.enter() {
            // SAFETY: it was allocated once, and the owner has waited for what used it.
            unsafe { cx.free(self.address) };
        }
    }
}

/// One allocation of pinned host memory.
#[derive(Debug)]
pub(super) struct PinnedMemory {
    context: Arc<Context>,
    place: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory, of which this is the owner.
unsafe impl Send for PinnedMemory {}
// SAFETY: nothing is read or written through a shared reference but by the rings, each within its
// own part.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    pub(super) fn allocate(
        context: &Arc<Context>,
        cx: &Entered<'_>,
        bytes: Bytes,
    ) -> Result<Self, DeviceError> {
        let place = cx.allocate_host(bytes)?;
        let bytes = usize::try_from(bytes.get()).unwrap_or(usize::MAX);
        // SAFETY: so many bytes were allocated, and nobody else knows of them. From here on they
        // are initialised.
        unsafe { place.write_bytes(0, bytes) };
        Ok(Self { context: Arc::clone(context), place, bytes })
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if let Ok(cx) = self.context.enter() {
            // SAFETY: it was allocated once, and the owner has waited for what used it.
            unsafe { cx.free_host(self.place) };
        }
    }
}

/// Buffers of pinned memory that are used in turn. One whose copy to or from the GPU is under way
/// is never handed out: its event is waited for first.
#[derive(Debug)]
pub(super) struct Ring {
    memory: Arc<PinnedMemory>,
    /// Where the ring begins in the pinned memory.
    first: usize,
    slot_bytes: usize,
    /// Done when the buffer's copies are. `[slots]`
    events: Vec<Event>,
    next: usize,
    /// Times that a buffer had to be waited for.
    waits: u64,
}

impl Ring {
    /// A ring in the part of the memory that begins at `first`, which no other ring uses.
    pub(super) fn new(
        memory: &Arc<PinnedMemory>,
        cx: &Entered<'_>,
        first: u64,
        slots: u32,
        slot_bytes: u64,
    ) -> Result<Self, DeviceError> {
        let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let end = first.saturating_add(slot_bytes.saturating_mul(slots.into()));
        assert!(size(end) <= memory.bytes, "the plan's sum of pinned memory is its rings'");
        let mut ring = Self {
            memory: Arc::clone(memory),
            first: size(first),
            slot_bytes: size(slot_bytes),
            events: room(slots as usize)?,
            next: 0,
            waits: 0,
        };
        for _ in 0..slots {
            ring.events.push(Event::new(&memory.context, cx)?);
        }
        Ok(ring)
    }

    /// Times that a buffer had to be waited for: the host was a whole round ahead of the GPU.
    pub(super) const fn waits(&self) -> u64 {
        self.waits
    }

    /// Bytes of a buffer.
    pub(super) const fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Hands the next buffer to `work`, which puts copies from it or to it into the stream. Waits
    /// for the buffer's earlier copies. Gives what `work` gives, and the buffer's number.
    ///
    /// # Errors
    /// [`DeviceError::CudaCapturing`]; what `work` or the driver says.
    pub(super) fn with<T>(
        &mut self,
        cx: &Entered<'_>,
        stream: Stream,
        work: impl FnOnce(&mut [u8]) -> Result<T, DeviceError>,
    ) -> Result<(T, usize), DeviceError> {
        cx.no_capture(stream)?;
        let slot = self.next;
        if !cx.is_done(&self.events[slot])? {
            self.waits += 1;
            cx.wait_for(&self.events[slot])?;
        }
        self.next = (slot + 1) % self.events.len();
        let result = work(self.bytes(slot));
        // Also after a failure: some copies may be under way. That failure is the one to tell of.
        let recorded = cx.record(&self.events[slot], stream);
        if recorded.is_err() {
            // Nothing tells when the buffer's copies are done, but the end of all. Where that fails
            // too, the driver is broken, and every later call says so.
            let _ = cx.wait_for_stream(stream);
        }
        let value = result?;
        recorded?;
        Ok((value, slot))
    }

    /// Waits for the copies of a buffer, and gives it.
    pub(super) fn finished(&mut self, cx: &Entered<'_>, slot: usize) -> Result<&[u8], DeviceError> {
        cx.wait_for(&self.events[slot])?;
        Ok(self.bytes(slot))
    }

    /// A buffer. No copy is under way to or from it, which the callers have made sure of.
    fn bytes(&mut self, slot: usize) -> &mut [u8] {
        let at = self.first + slot * self.slot_bytes;
        // SAFETY: it lies in the pinned memory (asserted in `new`).
        let place = unsafe { self.memory.place.add(at) };
        // SAFETY: in this ring's own part, which `&mut self` has to itself.
        unsafe { std::slice::from_raw_parts_mut(place, self.slot_bytes) }
    }
}
