//! The tables of host memory, allocated at open; large ones in huge pages; hints to the memory
//! system.
//!
//! Whoever makes a table here is told when there is no memory for it: a service that cannot open a
//! cache goes on without it.
//!
//! A manager of millions of blocks looks into tables of hundreds of megabytes at random. With
//! pages of 4 KB nearly every look also misses the address translation; huge pages spare that.

use crate::error::DeviceError;
use crate::units::Bytes;

/// Tables from this size on are worth huge pages, in bytes.
const WORTH_BYTES: usize = 4 << 20;

/// An empty vector with room for exactly `len` elements.
///
/// # Errors
/// [`DeviceError::OutOfMemory`].
pub fn room<T>(len: usize) -> Result<Vec<T>, DeviceError> {
    let mut table = Vec::new();
    match table.try_reserve_exact(len) {
        Ok(()) => Ok(table),
        Err(_) => Err(out_of_memory(len.saturating_mul(size_of::<T>()))),
    }
}

/// A vector of exactly `len` times the same element.
///
/// # Errors
/// [`DeviceError::OutOfMemory`].
pub fn table_of<T: Clone>(len: usize, element: T) -> Result<Vec<T>, DeviceError> {
    let mut table = room(len)?;
    table.resize(len, element);
    Ok(table)
}

/// The items, in a vector that is exactly as long; the first error, if one fails. (What collects
/// results does not know how many there will be, and takes too much.)
///
/// # Errors
/// That of an item; [`DeviceError::OutOfMemory`].
pub fn all_of<T>(
    items: impl ExactSizeIterator<Item = Result<T, DeviceError>>,
) -> Result<Vec<T>, DeviceError> {
    let mut all = room(items.len())?;
    for item in items {
        all.push(item?);
    }
    Ok(all)
}

/// The error of an allocation of so many bytes.
fn out_of_memory(bytes: usize) -> DeviceError {
    let available = super::cpu::available_memory().unwrap_or(Bytes::ZERO);
    DeviceError::OutOfMemory { bytes: Bytes(bytes as u64), code: 0, available }
}

/// A vector of exactly `len` elements, made by `init` from their indices. Large ones are put in
/// huge pages where the operating system has them.
///
/// # Errors
/// [`DeviceError::OutOfMemory`].
pub fn huge_vec<T>(len: usize, init: impl FnMut(usize) -> T) -> Result<Vec<T>, DeviceError> {
    let mut table = room(len)?;
    if len.saturating_mul(size_of::<T>()) >= WORTH_BYTES {
        advise_huge_pages(&mut table);
    }
    table.extend((0..len).map(init));
    Ok(table)
}

/// Asks for huge pages for a table that was not written yet. A refusal costs nothing but speed.
#[cfg(target_os = "linux")]
fn advise_huge_pages<T>(table: &mut Vec<T>) {
    /// What `madvise` wants its start to be a multiple of, on every system that we run on.
    const PAGE_BYTES: usize = 4096;
    let spare = table.spare_capacity_mut();
    let bytes = size_of_val(spare);
    let start = spare.as_mut_ptr().cast::<u8>();
    let skipped = start.align_offset(PAGE_BYTES);
    if skipped >= bytes {
        return;
    }
    let len = (bytes - skipped) & !(PAGE_BYTES - 1);
    let aligned = start.wrapping_add(skipped);
    // SAFETY: the range lies in the allocation that `table` owns; the advice changes no byte.
    let _ = unsafe { libc::madvise(aligned.cast(), len, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn advise_huge_pages<T>(_table: &mut Vec<T>) {}

/// Tells the processor that a value will be read soon.
#[inline(always)]
pub fn prefetch<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint; it cannot fault, and the address is that of a live reference anyway.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(value).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exactly_as_long_as_asked() {
        for len in [0, 1, 1000, 3 << 20] {
            let table = huge_vec(len, |at| at * 3).expect("memory");
            assert_eq!((table.len(), table.capacity()), (len, len));
            assert!(table.iter().enumerate().all(|(at, value)| at * 3 == *value));
            table.first().inspect(|value| prefetch(*value));
        }
    }
    #[test]
    fn edge_61_what_cannot_be_allocated_is_told() {
        let error = huge_vec(usize::MAX / 16, |at| at as u64).expect_err("no machine has it");
        let DeviceError::OutOfMemory { bytes, available, .. } = error else {
            panic!("{error}");
        };
        assert_eq!(bytes, Bytes((usize::MAX / 16 * 8) as u64));
        assert!(available > Bytes::ZERO, "{error}");
        assert!(table_of(usize::MAX, 1_u8).is_err() && room::<u64>(usize::MAX).is_err());
        assert_eq!(table_of(3, 7_u8).expect("memory"), [7; 3]);
    }
}
