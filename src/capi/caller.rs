//! What the caller points to, checked as far as a pointer can be.

use std::ffi::{CStr, c_char};
use std::path::Path;

use super::bindings::{
    kvpool_attend_options_t, kvpool_begin_options_t, kvpool_begun_t, kvpool_device_info_t,
    kvpool_error_t, kvpool_estimate_t, kvpool_event_t, kvpool_group_info_t, kvpool_group_stats_t,
    kvpool_layer_t, kvpool_plan_info_t, kvpool_preempted_t, kvpool_probe_t,
    kvpool_restore_options_t, kvpool_restored_t, kvpool_save_options_t, kvpool_saved_t,
    kvpool_seq_info_t, kvpool_stats_t, kvpool_step_csr_t, kvpool_step_device_t,
    kvpool_step_group_t, kvpool_step_view_t,
};
use super::failure::{CallError, Failure};

/// Structs that open with their size.
pub(super) trait Versioned: Copy {
    fn size(&self) -> usize;
    fn set_size(&mut self);
}

macro_rules! sized {
    ($($type:ident),*) => {
        $(impl Versioned for $type {
            fn size(&self) -> usize {
                self.size
            }
            fn set_size(&mut self) {
                self.size = size_of::<Self>();
            }
        })*
    };
}

sized! {
    kvpool_attend_options_t, kvpool_begin_options_t, kvpool_begun_t, kvpool_device_info_t,
    kvpool_error_t, kvpool_estimate_t, kvpool_event_t, kvpool_group_info_t, kvpool_group_stats_t,
    kvpool_layer_t, kvpool_plan_info_t, kvpool_preempted_t, kvpool_probe_t, kvpool_seq_info_t,
    kvpool_restore_options_t, kvpool_restored_t, kvpool_save_options_t, kvpool_saved_t,
    kvpool_stats_t, kvpool_step_csr_t, kvpool_step_device_t, kvpool_step_group_t,
    kvpool_step_view_t
}

/// The caller of one function, who keeps to `kvpool.h`: what it points to is there, of the size
/// that it says, until the function returns, and nobody writes it meanwhile. NULL, alignment and
/// sizes are checked all the same.
pub(super) struct Caller(());

impl Caller {
    /// # Safety
    /// It is so, for the life of the value.
    pub(super) const unsafe fn trusted() -> Self {
        Self(())
    }

    fn check<T>(what: &'static str, pointer: *const T) -> Result<(), CallError> {
        if pointer.is_null() {
            return Err(CallError::NullPointer { what });
        }
        if !pointer.is_aligned() {
            return Err(CallError::Misaligned { what, align: align_of::<T>() });
        }
        Ok(())
    }

    /// `[len]`
    pub(super) fn slice<T>(
        &self,
        what: &'static str,
        pointer: *const T,
        len: usize,
    ) -> Result<&[T], CallError> {
        if len == 0 {
            return Ok(&[]);
        }
        Self::check(what, pointer)?;
        Self::check_len::<T>(what, len)?;
        // SAFETY: not NULL, aligned, of a length that can be, and what `Caller` promises.
        Ok(unsafe { std::slice::from_raw_parts(pointer, len) })
    }

    fn check_len<T>(what: &'static str, len: usize) -> Result<(), CallError> {
        let bytes = len.checked_mul(size_of::<T>());
        if bytes.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
            return Err(CallError::BadArgument { what, problem: "is longer than memory can be" });
        }
        Ok(())
    }

    /// `[len]`, to be written.
    #[expect(clippy::mut_from_ref, reason = "the caller's memory, not `self`'s")]
    pub(super) fn slice_mut<T>(
        &self,
        what: &'static str,
        pointer: *mut T,
        len: usize,
    ) -> Result<&mut [T], CallError> {
        if len == 0 {
            return Ok(&mut []);
        }
        Self::check(what, pointer)?;
        Self::check_len::<T>(what, len)?;
        // SAFETY: as in `slice`; an output overlaps no input.
        Ok(unsafe { std::slice::from_raw_parts_mut(pointer, len) })
    }

    /// A struct without a size.
    pub(super) fn plain<T>(&self, what: &'static str, pointer: *const T) -> Result<&T, CallError> {
        Self::check(what, pointer)?;
        // SAFETY: not NULL, aligned, and what `Caller` promises.
        Ok(unsafe { &*pointer })
    }

    /// A struct that says its size, or `None` for NULL.
    pub(super) fn options<T: Versioned>(
        &self,
        what: &'static str,
        pointer: *const T,
    ) -> Result<Option<&T>, CallError> {
        if pointer.is_null() {
            return Ok(None);
        }
        Self::check(what, pointer)?;
        // SAFETY: not NULL, aligned; the size opens the struct, whatever version it is of.
        let got = unsafe { pointer.cast::<usize>().read() };
        Self::check_size::<T>(what, got)?;
        // SAFETY: the caller says that it is as long as this version's.
        let options = unsafe { &*pointer };
        debug_assert_eq!(options.size(), got);
        Ok(Some(options))
    }

    fn check_size<T>(what: &'static str, got: usize) -> Result<(), CallError> {
        let expected = size_of::<T>();
        if got == expected { Ok(()) } else { Err(CallError::BadSize { what, got, expected }) }
    }

    /// Refuses what a later version may give a meaning.
    pub(super) const fn unused(what: &'static str, reserved: u32) -> Result<(), CallError> {
        if reserved == 0 {
            return Ok(());
        }
        let problem =
            "has a member `reserved` that is not 0: a later version may give it a meaning";
        Err(CallError::BadArgument { what, problem })
    }

    /// Where a struct that says its size is written.
    pub(super) fn out<T: Versioned>(
        &self,
        what: &'static str,
        pointer: *mut T,
        size: usize,
    ) -> Result<Out<'_, T>, CallError> {
        Self::check(what, pointer.cast_const())?;
        Self::check_size::<T>(what, size)?;
        Ok(Out { pointer, of: std::marker::PhantomData })
    }

    /// Where several of them are written.
    pub(super) fn outs<T: Versioned>(
        &self,
        what: &'static str,
        pointer: *mut T,
        len: usize,
        size: usize,
    ) -> Result<&mut [T], CallError> {
        Self::check_size::<T>(what, size)?;
        self.slice_mut(what, pointer, len)
    }

    /// Where a handle or a number is written.
    pub(super) fn place<T: Copy>(
        &self,
        what: &'static str,
        pointer: *mut T,
    ) -> Result<Place<'_, T>, CallError> {
        Self::check(what, pointer.cast_const())?;
        Ok(Place { pointer: Some(pointer), of: std::marker::PhantomData })
    }

    /// The same, or nowhere for NULL.
    pub(super) fn maybe_place<T: Copy>(
        &self,
        what: &'static str,
        pointer: *mut T,
    ) -> Result<Place<'_, T>, CallError> {
        if pointer.is_null() {
            return Ok(Place { pointer: None, of: std::marker::PhantomData });
        }
        self.place(what, pointer)
    }

    /// A C string.
    pub(super) fn text(
        &self,
        what: &'static str,
        pointer: *const c_char,
    ) -> Result<&str, CallError> {
        Self::check(what, pointer)?;
        // SAFETY: not NULL; it ends with a NUL, as `Caller` promises.
        let text = unsafe { CStr::from_ptr(pointer) };
        text.to_str().map_err(|_| CallError::BadArgument { what, problem: "is not UTF-8" })
    }

    /// C strings. `[len]`
    pub(super) fn texts(
        &self,
        what: &'static str,
        pointer: *const *const c_char,
        len: usize,
    ) -> Result<Vec<String>, Failure> {
        let all = self.slice(what, pointer, len)?.iter().enumerate();
        let one = |(index, text): (usize, &*const c_char)| {
            let text = self.text(what, *text).map(str::to_owned);
            text.map_err(|error| Failure::Item { index, error })
        };
        all.map(one).collect()
    }

    /// A path.
    pub(super) fn path(
        &self,
        what: &'static str,
        pointer: *const c_char,
    ) -> Result<&Path, CallError> {
        Ok(Path::new(self.text(what, pointer)?))
    }
}

/// A place for an output struct.
pub(super) struct Out<'a, T> {
    pointer: *mut T,
    of: std::marker::PhantomData<&'a mut T>,
}

impl<T: Versioned> Out<'_, T> {
    /// Writes it.
    pub(super) fn set(self, mut value: T) {
        value.set_size();
        // SAFETY: checked when the place was made, and what `Caller` promises.
        unsafe { self.pointer.write(value) }
    }
}

/// A place for an output.
pub(super) struct Place<'a, T> {
    pointer: Option<*mut T>,
    of: std::marker::PhantomData<&'a mut T>,
}

impl<T: Copy> Place<'_, T> {
    /// Writes it, if it is wanted.
    pub(super) fn set(self, value: T) {
        if let Some(pointer) = self.pointer {
            // SAFETY: as in `Out::set`.
            unsafe { pointer.write(value) }
        }
    }
}
