//! One slice that many workers write, each to places of its own.

use std::marker::PhantomData;

/// A mutable slice from which threads take parts that do not overlap.
///
/// It borrows the slice for `'a`, so nothing else can touch it meanwhile; that no two parts in
/// use overlap is what the callers of [`Disjoint::part`] promise.
#[derive(Debug)]
pub(super) struct Disjoint<'a, T> {
    first: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: a shared `Disjoint` gives out nothing but non-overlapping `&mut [T]` (the contract of
// `part`), so sharing it among threads is sending parts of `&mut [T]` to them: fine for `T: Send`.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    /// Takes the slice over for as long as it is borrowed.
    pub(super) fn new(slice: &'a mut [T]) -> Self {
        Self { first: slice.as_mut_ptr(), len: slice.len(), borrow: PhantomData }
    }

    /// The address of an element, to be asked for and not to be used. Any index will do.
    #[inline(always)]
    pub(super) fn address(&self, index: usize) -> *const T {
        self.first.wrapping_add(index)
    }

    /// The elements `start..start + len`.
    ///
    /// # Panics
    /// When they do not lie in the slice.
    ///
    /// # Safety
    /// As long as the part is in use, no other part that overlaps it is.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "the contract of the function: parts do not overlap")]
    pub(super) unsafe fn part(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start, "a part beyond the slice");
        // SAFETY: `start` is at most `self.len`, so the pointer stays in the borrowed slice or at
        // its end.
        let first = unsafe { self.first.add(start) };
        // SAFETY: the assertion keeps the part inside the slice borrowed for `'a`; the caller
        // promises that nothing else uses it.
        unsafe { std::slice::from_raw_parts_mut(first, len) }
    }
}
