//! Views of layers as DLPack tensors (<https://dmlc.github.io/dlpack/latest/c_api.html>).
//!
//! The descriptors are allocated when the cache is opened, and lent: a deleter puts its descriptor
//! back. One that is out shares the cache's object, so the pool's memory outlives the cache's
//! handle for as long as anybody looks at it.

use std::ffi::c_void;
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::{Arc, Mutex, PoisonError};

use super::bindings::*;
use super::caller::Caller;
use super::failure::{CallError, Failure};
use super::object::{Object, any};
use super::plan::layer_of;
use crate::config::DeviceKind;
use crate::device::rank::{self, Rank};
use crate::device::room;
use crate::error::DeviceError;

/// `DLDevice`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DLDevice {
    /// 1 = the host's memory, 2 = a CUDA GPU's.
    pub device_type: i32,
    pub device_id: i32,
}

/// `DLDataType`
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLDataType {
    /// 0 = int, 1 = uint, 2 = float, 4 = bfloat.
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}

/// `DLTensor`
#[repr(C)]
#[derive(Debug)]
pub struct DLTensor {
    pub data: *mut c_void,
    pub device: DLDevice,
    pub ndim: i32,
    pub dtype: DLDataType,
    pub shape: *mut i64,
    /// In elements.
    pub strides: *mut i64,
    pub byte_offset: u64,
}

/// `DLManagedTensor`
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensor {
    pub dl_tensor: DLTensor,
    pub manager_ctx: *mut c_void,
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}

/// Views of a layer that can be out at once.
const VIEWS_PER_LAYER: usize = 8;

/// One descriptor. The tensor comes first, so that its address is the descriptor's.
#[repr(C)]
#[derive(Debug)]
struct View {
    tensor: DLManagedTensor,
    shape: [i64; 4],
    strides: [i64; 4],
    /// While it is out.
    owner: Option<Arc<Object>>,
}

/// A view's own memory. (An array, since only of vectors and slices can a box be asked for that may
/// be refused.)
type OwnView = Box<[View; 1]>;

/// The descriptors of a cache. One that is out stays where it is, and is its box.
#[derive(Debug)]
pub(super) struct Views {
    idle: Mutex<Vec<OwnView>>,
    limit: usize,
}

// SAFETY: the pointers of a view are into itself and into the pool, and are followed by whoever
// has the view alone.
unsafe impl Send for View {}

impl View {
    /// One that shows nothing.
    fn in_a_box() -> Result<OwnView, DeviceError> {
        let mut view = room(1)?;
        view.push(Self {
            tensor: DLManagedTensor {
                dl_tensor: DLTensor {
                    data: null_mut(),
                    device: DLDevice { device_type: 0, device_id: 0 },
                    ndim: 0,
                    dtype: DLDataType { code: 0, bits: 0, lanes: 1 },
                    shape: null_mut(),
                    strides: null_mut(),
                    byte_offset: 0,
                },
                manager_ctx: null_mut(),
                deleter: None,
            },
            shape: [0; 4],
            strides: [0; 4],
            owner: None,
        });
        let view: Box<[Self]> = view.into();
        Ok(view.try_into().expect("one view"))
    }
}

impl Views {
    /// Views for so many layers, or the error of memory that is not there.
    pub(super) fn new(num_layers: u32) -> Result<Self, DeviceError> {
        let limit = VIEWS_PER_LAYER * num_layers as usize;
        let mut idle = room(limit)?;
        for _ in 0..limit {
            idle.push(View::in_a_box()?);
        }
        Ok(Self { idle: Mutex::new(idle), limit })
    }

    fn take(&self) -> Result<OwnView, CallError> {
        let _rank = rank::take(Rank::Views);
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.pop().ok_or(CallError::NoView { limit: self.limit })
    }

    /// How many are lent.
    pub(super) fn out(&self) -> usize {
        let _rank = rank::take(Rank::Views);
        self.limit - self.idle.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    fn put_back(&self, view: OwnView) {
        // There is room: it was taken from here.
        let _rank = rank::take(Rank::Views);
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(view);
    }
}

/// The deleter of a view.
///
/// # Safety
/// `tensor` came from [`kvpool_cache_dlpack`] and was not deleted yet.
unsafe extern "C" fn delete(tensor: *mut DLManagedTensor) {
    if tensor.is_null() {
        return;
    }
    // SAFETY: the tensor is the first field of the view that it was lent with, whose box was turned
    // into this pointer.
    let mut view = unsafe { Box::from_raw(tensor.cast::<[View; 1]>()) };
    let Some(owner) = view[0].owner.take() else {
        // Deleted twice, as far as that can be seen: not ours to free.
        let _ = Box::into_raw(view);
        return;
    };
    owner.views.put_back(view);
    // Here the cache's memory may go.
    drop(owner);
}

/// The element type of a part, and its dimensions and strides in elements.
fn shape_of(
    layer: &kvpool_layer_t,
    part: kvpool_part_t,
) -> Result<(u64, DLDataType, [u64; 4], [u64; 4]), Failure> {
    let dtype = |code, bits| DLDataType { code, bits, lanes: 1 };
    let bad = |problem| CallError::BadArgument { what: "part", problem };
    let (offset, of_scales) = match part {
        KVPOOL_K => (layer.k_offset, false),
        KVPOOL_V => (layer.v_offset, false),
        KVPOOL_K_SCALES => (layer.k_scales_offset, true),
        KVPOOL_V_SCALES => (layer.v_scales_offset, true),
        _ => return Err(bad("does not exist").into()),
    };
    let (dtype, last, head_stride, token_stride) = if of_scales {
        if layer.scales_per_row == 0 {
            return Err(bad("asks for scales, and this layer keeps none in the cache").into());
        }
        let (head, token) = (layer.scale_head_stride, layer.scale_token_stride);
        (dtype(1, 16), layer.scales_per_row, head, token)
    } else {
        let dtype = match layer.format {
            KVPOOL_FORMAT_F32 => dtype(2, 32),
            KVPOOL_FORMAT_F16 => dtype(2, 16),
            KVPOOL_FORMAT_BF16 => dtype(4, 16),
            _ => dtype(0, 8),
        };
        (dtype, layer.head_dim, layer.head_stride, layer.token_stride)
    };
    let shape = [layer.units, layer.num_kv_heads, layer.unit_tokens, last].map(u64::from);
    let bytes = u64::from(dtype.bits / 8);
    // Units are aligned to far more than an element, and rows consist of elements.
    let strides = [layer.unit_stride / bytes, head_stride / bytes, token_stride / bytes, 1];
    Ok((offset, dtype, shape, strides))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvpool_cache_dlpack(
    cache: kvpool_cache_t,
    layer: u32,
    part: kvpool_part_t,
    out: *mut *mut DLManagedTensor,
) -> kvpool_status_t {
    // SAFETY: the caller keeps to kvpool.h.
    let caller = unsafe { Caller::trusted() };
    any(cache, |object| {
        let out = caller.place("out", out)?;
        let (offset, dtype, shape, strides) = shape_of(&layer_of(&object.plan, layer)?, part)?;
        let mut view = object.views.take()?;
        // None is near the largest number: they count elements of the pool.
        let signed = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        view[0].shape = shape.map(signed);
        view[0].strides = strides.map(signed);
        view[0].owner = Some(Arc::clone(object));
        let device = &object.config.device;
        let (device_type, device_id) = match device.kind {
            DeviceKind::Cpu => (1, 0),
            DeviceKind::Cuda => (2, i32::try_from(device.ordinal).unwrap_or(i32::MAX)),
        };
        let start = object.base + usize::try_from(offset).unwrap_or_default();
        let view = Box::into_raw(view).cast::<View>();
        let tensor = DLManagedTensor {
            dl_tensor: DLTensor {
                // Some readers do not look at `byte_offset`.
                data: with_exposed_provenance_mut(start),
                device: DLDevice { device_type, device_id },
                ndim: 4,
                dtype,
                // SAFETY: the view was just a box.
                shape: unsafe { &raw mut (*view).shape }.cast(),
                // SAFETY: as above.
                strides: unsafe { &raw mut (*view).strides }.cast(),
                byte_offset: 0,
            },
            manager_ctx: null_mut(),
            deleter: Some(delete),
        };
        // SAFETY: as above.
        unsafe { (*view).tensor = tensor };
        out.set(view.cast());
        Ok(())
    })
}
