//! A global allocator that counts, so that "nothing is allocated after open" (P1) is a number in
//! every report and not a claim.
//!
//! The library installs no allocator. A program that wants the count declares one:
//!
//! ```
//! #[global_allocator]
//! static ALLOCATOR: kvpool::device::CountingAllocator = kvpool::device::CountingAllocator;
//! # fn main() {}
//! ```

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static ALLOCATED_BYTES: AtomicU64 = AtomicU64::new(0);
static FREED_BYTES: AtomicU64 = AtomicU64::new(0);

/// The system's allocator, counted.
#[derive(Clone, Copy, Debug, Default)]
pub struct CountingAllocator;

/// What the process has asked of [`CountingAllocator`] so far; zeros where it is not installed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocationCounts {
    /// Calls that obtain memory: allocations and reallocations.
    pub allocations: u64,
    /// Bytes obtained.
    pub allocated_bytes: u64,
    /// Bytes given back.
    pub freed_bytes: u64,
}

/// The counts of all threads up to now.
#[must_use]
pub fn counts() -> AllocationCounts {
    AllocationCounts {
        allocations: ALLOCATIONS.load(Relaxed),
        allocated_bytes: ALLOCATED_BYTES.load(Relaxed),
        freed_bytes: FREED_BYTES.load(Relaxed),
    }
}

fn obtained(bytes: usize) {
    ALLOCATIONS.fetch_add(1, Relaxed);
    ALLOCATED_BYTES.fetch_add(bytes as u64, Relaxed);
}

// SAFETY: every call goes to `System` with the caller's own arguments; counting touches no memory
// but three atomics and does not unwind.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        obtained(layout.size());
        // SAFETY: the caller keeps `GlobalAlloc::alloc`'s contract, which is `System`'s too.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        obtained(layout.size());
        // SAFETY: as in `alloc`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        FREED_BYTES.fetch_add(layout.size() as u64, Relaxed);
        // SAFETY: `ptr` came from `System` through this allocator with the same layout.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        obtained(new_size);
        FREED_BYTES.fetch_add(layout.size() as u64, Relaxed);
        // SAFETY: `ptr` came from `System` through this allocator with the same layout.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}
