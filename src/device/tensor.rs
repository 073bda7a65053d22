//! Borrowed tensors in the element types that callers have.

use half::{bf16, f16};

/// The element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
}

/// A dense tensor to read, in row-major order.
#[derive(Clone, Copy, Debug)]
pub enum TensorRef<'a> {
    /// IEEE single precision.
    F32(&'a [f32]),
    /// IEEE half precision.
    F16(&'a [f16]),
    /// bfloat16.
    Bf16(&'a [bf16]),
}

/// A dense tensor to write, in row-major order.
#[derive(Debug)]
pub enum TensorMut<'a> {
    /// IEEE single precision.
    F32(&'a mut [f32]),
    /// IEEE half precision.
    F16(&'a mut [f16]),
}

impl TensorRef<'_> {
    /// Elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        match self {
            Self::F32(data) => data.len(),
            Self::F16(data) => data.len(),
            Self::Bf16(data) => data.len(),
        }
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The element type.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::F16(_) => DType::F16,
            Self::Bf16(_) => DType::Bf16,
        }
    }

    /// Copies `out.len()` elements from element `start` on, widened to f32 exactly.
    #[inline]
    pub fn widen(&self, start: usize, out: &mut [f32]) {
        let end = start + out.len();
        match self {
            Self::F32(data) => out.copy_from_slice(&data[start..end]),
            Self::F16(data) => {
                for (out, x) in out.iter_mut().zip(&data[start..end]) {
                    *out = x.to_f32();
                }
            }
            Self::Bf16(data) => {
                for (out, x) in out.iter_mut().zip(&data[start..end]) {
                    *out = x.to_f32();
                }
            }
        }
    }
}

impl TensorMut<'_> {
    /// Elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        match self {
            Self::F32(data) => data.len(),
            Self::F16(data) => data.len(),
        }
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<'a> From<&'a [f32]> for TensorRef<'a> {
    fn from(data: &'a [f32]) -> Self {
        Self::F32(data)
    }
}

impl<'a> From<&'a [f16]> for TensorRef<'a> {
    fn from(data: &'a [f16]) -> Self {
        Self::F16(data)
    }
}

impl<'a> From<&'a [bf16]> for TensorRef<'a> {
    fn from(data: &'a [bf16]) -> Self {
        Self::Bf16(data)
    }
}

impl<'a> From<&'a mut [f32]> for TensorMut<'a> {
    fn from(data: &'a mut [f32]) -> Self {
        Self::F32(data)
    }
}

impl<'a> From<&'a mut [f16]> for TensorMut<'a> {
    fn from(data: &'a mut [f16]) -> Self {
        Self::F16(data)
    }
}
