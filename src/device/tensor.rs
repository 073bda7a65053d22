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
    /// bfloat16.
    Bf16(&'a mut [bf16]),
}

/// A dense tensor in a GPU's memory, in row-major order, to read or to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceTensor {
    address: u64,
    len: usize,
    dtype: DType,
}

impl DeviceTensor {
    /// The tensor of `len` elements whose first one lies at `address`, a multiple of 16.
    ///
    /// # Safety
    /// From the call that the tensor is given to until the device's stream has come past it, the
    /// memory is there, nothing but that call writes it, and, if the call writes it, nothing reads
    /// it.
    #[must_use]
    pub const unsafe fn new(address: u64, len: usize, dtype: DType) -> Self {
        Self { address, len, dtype }
    }

    /// The first element's address.
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The element type.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.dtype
    }
}

/// A stream of the CUDA driver (`CUstream`, `cudaStream_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaStream(*mut std::ffi::c_void);

impl CudaStream {
    /// A stream that the caller made in the GPU's primary context; null is the default stream.
    /// `CU_STREAM_PER_THREAD` will be refused: it is another one in each thread.
    ///
    /// # Safety
    /// It lives until the device that it is given to has got another, or is closed.
    #[must_use]
    pub const unsafe fn new(stream: *mut std::ffi::c_void) -> Self {
        Self(stream)
    }

    /// The driver's handle.
    #[must_use]
    pub const fn as_ptr(self) -> *mut std::ffi::c_void {
        self.0
    }
}

impl DType {
    /// As errors have it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    /// Bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
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
            Self::Bf16(data) => data.len(),
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

impl<'a> From<&'a mut [bf16]> for TensorMut<'a> {
    fn from(data: &'a mut [bf16]) -> Self {
        Self::Bf16(data)
    }
}
