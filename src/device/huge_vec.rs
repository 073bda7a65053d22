//! Large tables in huge pages, and hints to the memory system.
//!
//! A manager of millions of blocks looks into tables of hundreds of megabytes at random. With
//! pages of 4 KB nearly every look also misses the address translation; huge pages spare that.

/// Tables from this size on are worth huge pages, in bytes.
const WORTH_BYTES: usize = 4 << 20;

/// A vector of exactly `len` elements, made by `init` from their indices. Large ones are put in
/// huge pages where the operating system has them.
pub fn huge_vec<T>(len: usize, init: impl FnMut(usize) -> T) -> Vec<T> {
    let mut table = Vec::with_capacity(len);
    if len.saturating_mul(size_of::<T>()) >= WORTH_BYTES {
        advise_huge_pages(&mut table);
    }
    table.extend((0..len).map(init));
    table
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
            let table = huge_vec(len, |at| at * 3);
            assert_eq!((table.len(), table.capacity()), (len, len));
            assert!(table.iter().enumerate().all(|(at, value)| at * 3 == *value));
            table.first().inspect(|value| prefetch(*value));
        }
    }
}
