//! Tensors of the caller.

use half::{bf16, f16};

use super::bindings::*;
use super::caller::Caller;
use super::failure::{CallError, Failure};
use crate::device::{DType, DeviceTensor, TensorMut, TensorRef};
use crate::plan::Plan;

/// A tensor's description, checked but for its memory.
#[derive(Clone, Copy)]
pub(super) struct Given {
    what: &'static str,
    data: *mut std::ffi::c_void,
    len: usize,
    dtype: DType,
    pub(super) on_device: bool,
}

impl Given {
    pub(super) fn of(
        caller: &Caller,
        what: &'static str,
        tensor: *const kvpool_tensor_t,
    ) -> Result<Self, CallError> {
        Self::of_struct(what, caller.plain(what, tensor)?)
    }

    pub(super) fn of_struct(
        what: &'static str,
        tensor: &kvpool_tensor_t,
    ) -> Result<Self, CallError> {
        let bad = |problem| Err(CallError::BadArgument { what, problem });
        let dtype = match tensor.dtype {
            KVPOOL_F32 => DType::F32,
            KVPOOL_F16 => DType::F16,
            KVPOOL_BF16 => DType::Bf16,
            _ => return bad("has a dtype that does not exist"),
        };
        let on_device = match tensor.memory {
            KVPOOL_HOST => false,
            KVPOOL_DEVICE_MEMORY => true,
            _ => return bad("has a memory that does not exist"),
        };
        let bytes = tensor.len.checked_mul(dtype.bytes() as u64);
        let (Ok(len), true) = (
            usize::try_from(tensor.len),
            bytes.is_some_and(|bytes| isize::try_from(bytes).is_ok()),
        ) else {
            return bad("is longer than memory can be");
        };
        if tensor.data.is_null() && len > 0 {
            return Err(CallError::NullPointer { what });
        }
        Ok(Self { what, data: tensor.data, len, dtype, on_device })
    }

    /// Refuses a tensor that is not where the first of a call is.
    pub(super) fn beside(self, first: &Self) -> Result<Self, CallError> {
        if self.on_device == first.on_device {
            return Ok(self);
        }
        Err(CallError::MixedMemory { first: first.what, what: self.what })
    }

    /// In host memory, to be read.
    pub(super) fn host<'a>(&self, caller: &'a Caller) -> Result<TensorRef<'a>, CallError> {
        let Self { what, data, len, .. } = *self;
        Ok(match self.dtype {
            DType::F32 => TensorRef::F32(caller.slice(what, data.cast::<f32>(), len)?),
            DType::F16 => TensorRef::F16(caller.slice(what, data.cast::<f16>(), len)?),
            DType::Bf16 => TensorRef::Bf16(caller.slice(what, data.cast::<bf16>(), len)?),
        })
    }

    /// In host memory, to be written.
    pub(super) fn host_mut<'a>(&self, caller: &'a Caller) -> Result<TensorMut<'a>, CallError> {
        let Self { what, data, len, .. } = *self;
        Ok(match self.dtype {
            DType::F32 => TensorMut::F32(caller.slice_mut(what, data.cast::<f32>(), len)?),
            DType::F16 => TensorMut::F16(caller.slice_mut(what, data.cast::<f16>(), len)?),
            DType::Bf16 => TensorMut::Bf16(caller.slice_mut(what, data.cast::<bf16>(), len)?),
        })
    }

    /// In host memory, f32, to be written.
    pub(super) fn host_f32<'a>(&self, caller: &'a Caller) -> Result<&'a mut [f32], CallError> {
        if self.dtype != DType::F32 {
            let problem = "must be of dtype KVPOOL_F32";
            return Err(CallError::BadArgument { what: self.what, problem });
        }
        caller.slice_mut(self.what, self.data.cast::<f32>(), self.len)
    }

    /// In the device's memory.
    pub(super) fn device(&self) -> DeviceTensor {
        // SAFETY: the caller keeps to kvpool.h: the memory is there until the stream has come past
        // the call, and nobody else writes it, or reads what the call writes.
        unsafe { DeviceTensor::new(self.data.addr() as u64, self.len, self.dtype) }
    }

    fn bytes(&self) -> (usize, usize) {
        let start = self.data.addr();
        (start, start.saturating_add(self.len.saturating_mul(self.dtype.bytes())))
    }

    /// Refuses an output that overlaps another tensor.
    pub(super) fn apart_from(&self, other: &Self) -> Result<(), CallError> {
        self.apart_from_bytes(other.bytes(), other.what)
    }

    /// Refuses an output that overlaps some bytes.
    pub(super) fn apart_from_bytes(
        &self,
        (start, end): (usize, usize),
        other: &'static str,
    ) -> Result<(), CallError> {
        apart((self.what, self.bytes()), (other, (start, end)))
    }
}

/// Where something begins and ends, under its name.
pub(super) type Place = (&'static str, (usize, usize));

/// Where so many values lie.
pub(super) fn bytes_of<T>(data: *const T, len: usize) -> (usize, usize) {
    let start = data.addr();
    (start, start.saturating_add(len.saturating_mul(size_of::<T>())))
}

/// Where a pool lies: in host memory, or in the device's, whose addresses host memory does not have.
/// Tensors of either may be held against it.
pub(super) fn pool_bytes(plan: &Plan, base: *const u8) -> (usize, usize) {
    bytes_of(base, usize::try_from(plan.pool_bytes.get()).unwrap_or(usize::MAX))
}

/// Refuses an output that overlaps something else.
pub(super) fn apart(
    (out, (own_start, own_end)): Place,
    (other, (start, end)): Place,
) -> Result<(), CallError> {
    if own_start < end && start < own_end {
        return Err(CallError::Overlap { out, other });
    }
    Ok(())
}

/// The softmax scale and the lse of attention.
pub(super) struct Attend {
    pub(super) softmax_scale: Option<f32>,
    pub(super) lse: Option<Given>,
}

impl Attend {
    pub(super) fn of(
        caller: &Caller,
        options: *const kvpool_attend_options_t,
    ) -> Result<Self, Failure> {
        let Some(options) = caller.options("options", options)? else {
            return Ok(Self { softmax_scale: None, lse: None });
        };
        Caller::unused("options", options.reserved)?;
        let lse = if options.lse.data.is_null() {
            None
        } else {
            Some(Given::of_struct("lse", &options.lse)?)
        };
        // Anything but 0, also what is no number, is checked as a scale.
        let softmax_scale = (options.softmax_scale != 0.0).then_some(options.softmax_scale);
        Ok(Self { softmax_scale, lse })
    }
}
