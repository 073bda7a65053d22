//! Slices of numbers as bytes and the other way round.

use half::{bf16, f16};

/// Types without padding for which every pattern of bits is a value.
///
/// # Safety
/// It is so.
pub(super) unsafe trait Plain: Copy + 'static {}

macro_rules! plain {
    ($($name:ty),*) => {
        $(
            // SAFETY: a number: no padding, and all its patterns of bits are values.
            unsafe impl Plain for $name {}
        )*
    };
}

plain!(u8, u32, u64, f32, f16, bf16);

/// The bytes of some values.
pub(super) fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: `T` has no padding, so all its bytes are initialised.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// The bytes of some values, to be written.
pub(super) fn bytes_of_mut<T: Plain>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: `T` has no padding, and whatever is written is a value of it.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

/// As many values as there are in some bytes.
///
/// # Panics
/// The bytes are not aligned for `T`.
pub(super) fn values_of_mut<T: Plain>(bytes: &mut [u8]) -> &mut [T] {
    // SAFETY: whatever the bytes are, they are values of `T`, and the other way round.
    let (before, values, _) = unsafe { bytes.align_to_mut::<T>() };
    assert!(before.is_empty(), "aligned for the type");
    values
}
