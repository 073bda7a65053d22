//! Storing a step's K and V.
//!
//! The work is dealt out by place, not by token: an item is K or V, and of these the token slots
//! that fall into one of `parts` classes. Two items therefore never write the same byte, whatever
//! token slots the caller names; should it name one twice, the later token stays, for any number
//! of threads.
//!
//! An item goes through the tensor as it lies, token by token and in each head by head: that is
//! one stream of reads, which the hardware follows by itself. The writes are a stream for each
//! head, which it does not follow: a store to a line that no cache holds waits for the line.
//! Short steps therefore ask for the places a few tokens ahead, and what they stored is in the
//! cache when attention reads it. Long ones, of which the nearest caches could not hold
//! everything, write past them ([`Stores::Past`]).

use super::super::convert::Source;
use super::super::{AppendArgs, AppendCounts, TensorRef};
use super::disjoint::Disjoint;
use super::kernel::Kernel;
use super::lanes::Isa;
use super::memory::PoolMemory;
use super::places::Places;
use super::rope::{MAX_DIM, Rotation};
use super::store::Store;
use super::threads::Threads;
use super::workers::returns;
use crate::error::DeviceError;
use crate::plan::{GroupLayout, Kv, LayerScales};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// Below this many elements of K and V the caller stores them itself: waking a worker takes as
/// long as converting some ten thousand elements.
const MIN_PARALLEL_ELEMENTS: usize = 64 << 10;

/// Bytes of K and V from which on a step is written past the caches. They would take up half of
/// a cache of 1 MiB, and attention over so many new tokens takes far longer than to read them.
const MIN_PAST_BYTES: u64 = 512 << 10;

/// Tokens between the one that is stored and the one whose place is asked for.
const AHEAD: usize = 4;

/// How bytes are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stores {
    /// As ever.
    Cached,
    /// Past the caches, where whole cache lines are written. In between stores to the same place
    /// there is an [`Isa::fence`], and one after the last.
    Past,
}

/// An append that has been checked.
#[derive(Debug)]
pub(super) struct AppendJob<'a> {
    /// The whole pool.
    pub(super) pool: Disjoint<'a, u8>,
    pub(super) layout: &'a GroupLayout,
    pub(super) layer: u32,
    scales: LayerScales,
    token_slots: &'a [u64],
    /// How K is rotated, if it is.
    rotation: Option<Rotation<'a>>,
    k: TensorRef<'a>,
    v: TensorRef<'a>,
    /// Classes of token slots.
    parts: u64,
    pub(super) stores: Stores,
}

/// K or V, in one class of token slots. Whoever has one may write its vectors: it is
/// made by [`AppendJob::item`] only, and used up by [`store_item`].
#[derive(Debug)]
pub(super) struct AppendItem {
    kv: Kv,
    part: u64,
}

impl AppendJob<'_> {
    /// Items of work.
    fn items(&self) -> usize {
        usize::try_from(self.parts).unwrap_or(1) * 2
    }

    /// The item of an index.
    ///
    /// # Safety
    /// As long as the item is in use, no other of the same index is.
    unsafe fn item(&self, index: usize) -> AppendItem {
        let kv = if index.is_multiple_of(2) { Kv::K } else { Kv::V };
        AppendItem { kv, part: (index / 2) as u64 }
    }
}

/// Stores K and V of a step.
///
/// # Errors
/// [`DeviceError::OutOfRange`] before anything is written, [`DeviceError::WorkerPanicked`].
pub(super) fn append(
    kernel: &dyn Kernel,
    threads: &Threads,
    pool: &mut PoolMemory,
    args: &AppendArgs<'_>,
    rotation: Option<Rotation<'_>>,
) -> Result<AppendCounts, DeviceError> {
    check(pool, args)?;
    let layout = args.layout;
    let elements = args.k.len() + args.v.len();
    let num_threads = threads.count();
    let alone = num_threads == 1 || elements < MIN_PARALLEL_ELEMENTS;
    // A few items for each thread, so that one that is held up does not hold up all.
    let parts = if alone { 1 } else { 2 * num_threads as u64 };
    let bytes = elements as u64 * u64::from(layout.element_bytes);
    let stores = if bytes >= MIN_PAST_BYTES { Stores::Past } else { Stores::Cached };
    let job = AppendJob {
        pool: Disjoint::new(pool.bytes_mut()),
        layout,
        layer: args.layer,
        scales: args.scales,
        token_slots: args.token_slots,
        rotation,
        k: args.k,
        v: args.v,
        parts,
        stores,
    };
    let mut counts = AppendCounts::default();
    if alone {
        let done = returns(|| {
            for index in 0..job.items() {
                // SAFETY: the items are used one after the other.
                let item = unsafe { job.item(index) };
                counts.add(kernel.append(&job, item));
            }
        });
        return if done { Ok(counts) } else { Err(DeviceError::WorkerPanicked) };
    }
    let nonfinite = AtomicU64::new(0);
    let saturated = AtomicU64::new(0);
    threads.run(job.items(), &|_, index| {
        // SAFETY: `Threads::run` calls this once for each index.
        let item = unsafe { job.item(index) };
        let counts = kernel.append(&job, item);
        nonfinite.fetch_add(counts.nonfinite, Relaxed);
        saturated.fetch_add(counts.saturated, Relaxed);
    })?;
    counts
        .add(AppendCounts { nonfinite: nonfinite.into_inner(), saturated: saturated.into_inner() });
    Ok(counts)
}

/// Refuses what would be written outside the layer's units.
fn check(pool: &PoolMemory, args: &AppendArgs<'_>) -> Result<(), DeviceError> {
    let layout = args.layout;
    pool.range(layout.base, layout.bytes())?;
    let slots = u64::from(layout.units) * u64::from(layout.unit_tokens);
    let last = args.token_slots.iter().copied().max().unwrap_or(0);
    let inside = args.token_slots.is_empty() || last < slots;
    if inside && args.layer < layout.num_layers {
        return Ok(());
    }
    // The unit that the slot would be in, were there so many.
    let unit = last / u64::from(layout.unit_tokens);
    Err(DeviceError::OutOfRange {
        offset: layout.base.saturating_add(layout.unit_bytes.saturating_mul(unit)),
        len: layout.unit_bytes,
        pool: crate::units::Bytes(pool.bytes().len() as u64),
    })
}

/// Stores one item.
#[inline(always)]
#[expect(clippy::needless_pass_by_value, reason = "the right to write is used up")]
pub(super) fn store_item<I: Isa>(isa: I, job: &AppendJob<'_>, item: AppendItem) -> AppendCounts {
    let (tensor, scale) = match item.kv {
        Kv::K => (&job.k, job.scales.k),
        Kv::V => (&job.v, job.scales.v),
    };
    match tensor {
        TensorRef::F32(data) => store_vectors(isa, job, &item, data, scale),
        TensorRef::F16(data) => store_vectors(isa, job, &item, data, scale),
        TensorRef::Bf16(data) => store_vectors(isa, job, &item, data, scale),
    }
}

/// Stores one item's vectors. `data`: `[tokens, num_kv_heads, head_dim]`
#[inline(always)]
fn store_vectors<I: Isa, S: Source>(
    isa: I,
    job: &AppendJob<'_>,
    item: &AppendItem,
    data: &[S],
    static_scale: f32,
) -> AppendCounts {
    let per_token = (job.layout.num_kv_heads * job.layout.head_dim) as usize;
    if let Some(rotation) = job.rotation.filter(|_| item.kv == Kv::K) {
        return store_rotated(isa, job, item, data, &rotation);
    }
    let mut store = Store::new(isa, job, item.kv, static_scale);
    let mut places = Places::new(job.layout, job.token_slots, job.parts, item.part);
    let mut ahead = places.clone();
    for _ in 0..AHEAD {
        if let Some(place) = ahead.next() {
            store.prefetch(place.unit, place.token);
        }
    }
    while let Some(place) = places.next() {
        if let Some(place) = ahead.next() {
            store.prefetch(place.unit, place.token);
        }
        if place.jumps && job.stores == Stores::Past {
            // The place may be one that was written before.
            isa.fence();
        }
        let x = &data[place.index * per_token..][..per_token];
        // SAFETY: the caller has the item, of which the token is.
        unsafe { store.token(x, place.unit, place.token) };
    }
    if job.stores == Stores::Past {
        isa.fence();
    }
    store.counts
}

/// Stores one item's vectors of K, rotated first. `data`: `[tokens, num_kv_heads, head_dim]`
#[inline(always)]
fn store_rotated<I: Isa, S: Source>(
    isa: I,
    job: &AppendJob<'_>,
    item: &AppendItem,
    data: &[S],
    rotation: &Rotation<'_>,
) -> AppendCounts {
    let head_dim = job.layout.head_dim as usize;
    let per_token = job.layout.num_kv_heads as usize * head_dim;
    // One vector, as it is stored.
    let mut vector = [0.0; MAX_DIM];
    let vector = &mut vector[..head_dim];
    let mut store = Store::new(isa, job, item.kv, job.scales.k);
    let mut places = Places::new(job.layout, job.token_slots, job.parts, item.part);
    while let Some(place) = places.next() {
        if place.jumps && job.stores == Stores::Past {
            // The place may be one that was written before.
            isa.fence();
        }
        let x = &data[place.index * per_token..][..per_token];
        for (head, x) in x.chunks_exact(head_dim).enumerate() {
            rotation.rotate(place.index, x, vector);
            // SAFETY: the caller has the item, of which the token is.
            unsafe { store.head(vector, place.unit, place.token, head) };
        }
    }
    if job.stores == Stores::Past {
        isa.fence();
    }
    store.counts
}
