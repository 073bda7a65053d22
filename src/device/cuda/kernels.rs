//! The kernels that a plan needs: their names, and how they are launched.
//!
//! Names and launch rules are those of `csrc/kernels/params.h`. Which kernel attends follows from
//! format and `head_dim` alone (P5).

use std::ffi::CString;
use std::sync::Arc;

use super::driver::{
    Context, Entered, Function, Launch, Module, beyond_this_driver, not_for_this_gpu,
};
use super::images::{EMULATED_IMAGE, IMAGES};
use crate::config::{Format, ScaleKind};
use crate::device::DType;
use crate::error::DeviceError;
use crate::plan::KvFormat;

/// Threads of a block of the kernels that move bytes, and of those that attend.
const MOVE_THREADS: u32 = 256;
const ATTEND_THREADS: u32 = 128;
const WARP_THREADS: u32 = 32;

/// Blocks of a grid for each multiprocessor, at most: the kernels go through more work in strides.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 8;

/// Whether the kernels for the tensor cores are there.
const TENSOR_CORES: bool = false;

/// The kernels of one plan, loaded.
#[derive(Debug)]
pub(super) struct Kernels {
    /// What the functions are of.
    #[expect(dead_code, reason = "kept loaded")]
    modules: Vec<Module>,
    /// For K and V in f32, f16 and bf16.
    append: [Function; 3],
    attend: Function,
    path: Path,
    attend_shared: u32,
    combine: Function,
    copy_pairs: Function,
    /// Blocks of a grid in x, at most.
    most_blocks: u32,
}

/// What kind of attention kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Path {
    /// Scalar arithmetic, vectors of at most so many elements.
    Plain(u32),
    /// Matrix instructions, vectors padded to so many elements.
    Tensor(u32),
}

impl Path {
    /// Follows from format and `head_dim` alone.
    pub(super) fn of(format: KvFormat, head_dim: u32) -> Self {
        let fits = format.element != Format::F32 && head_dim.is_multiple_of(16) && head_dim <= 256;
        if TENSOR_CORES && fits {
            return Self::Tensor(head_dim.next_power_of_two().max(64));
        }
        match head_dim {
            0..=128 => Self::Plain(128),
            129..=256 => Self::Plain(256),
            _ => Self::Plain(1024),
        }
    }

    /// Packed rows of an item (`KVPOOL_WIDE_ROWS`).
    pub(super) const fn item_rows(self) -> u32 {
        match self {
            Self::Plain(..=256) => 8,
            Self::Plain(_) => 2,
            Self::Tensor(_) => 16,
        }
    }

    /// Dynamic shared bytes (`KVPOOL_WIDE_SHARED`, `KVPOOL_TENSOR_SHARED`).
    pub(super) const fn shared_bytes(self, head_dim: u32, element_bytes: u32) -> u32 {
        let units = crate::plan::SPLIT_TOKENS * 4;
        let rows = self.item_rows();
        match self {
            Self::Plain(_) => 3 * rows * head_dim * 4 + 6 * rows * 4 + units,
            Self::Tensor(dim) => {
                let tile = if dim > 128 { 32 } else { 64 };
                let tiles = 4 * tile * dim * element_bytes;
                let queries = 2 * rows * dim * 2;
                let weights = 2 * rows * tile * 2;
                let scales = 2 * tile * (dim / 32) * 4;
                tiles + queries + weights + scales + rows * 4 * 4 + units
            }
        }
    }

    /// As [`crate::device::DeviceInfo::kernel`].
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Plain(_) => "plain",
            Self::Tensor(_) => "tensor-cores",
        }
    }

    /// The end of the kernel's name.
    fn suffix(self) -> String {
        match self {
            Self::Plain(width) => format!("w{width}"),
            Self::Tensor(dim) => format!("t{dim}x1"),
        }
    }
}

/// A format as the names of the attention kernels have it.
const fn format_name(format: KvFormat) -> &'static str {
    match (format.element, format.scale) {
        (Format::F32, _) => "f32",
        (Format::F16, _) => "f16",
        (Format::Bf16, _) => "bf16",
        (Format::Int8, Some(ScaleKind::PerGroup32)) => "i8g",
        (Format::Int8, _) => "i8",
    }
}

/// Images that are searched for kernels.
struct Search {
    modules: Vec<Module>,
    format: KvFormat,
    head_dim: u32,
}

impl Search {
    /// A kernel of any of the modules. `stem` is the beginning of its name, for the error.
    fn find(&self, stem: &'static str, name: &str) -> Result<Function, DeviceError> {
        let name = CString::new(name).expect("names have no NUL");
        for module in &self.modules {
            if let Some(function) = module.function(&name)? {
                return Ok(function);
            }
        }
        let (format, head_dim) = (self.format.name(), self.head_dim);
        Err(DeviceError::CudaNoKernel { stem, format, head_dim })
    }
}

/// What the GPU is, for errors of loading.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    pub(super) emulated: bool,
    pub(super) capability: (u32, u32),
    pub(super) driver: (u32, u32),
    /// The version of the toolkit that made the kernels.
    pub(super) toolkit: (u32, u32),
    /// As [`DeviceError::CudaOtherArchitecture`] has it.
    pub(super) compiled: &'static str,
    pub(super) multiprocessors: u32,
}

impl Kernels {
    /// Loads the kernels of a plan. Nothing is loaded later.
    pub(super) fn load(
        context: &Arc<Context>,
        cx: &Entered<'_>,
        target: &Target,
        format: KvFormat,
        head_dim: u32,
    ) -> Result<Self, DeviceError> {
        let mut search = Search { modules: Vec::new(), format, head_dim };
        let load =
            |image| Module::load(context, cx, image).map_err(|error| of_image(error, target));
        if target.emulated {
            search.modules.push(load(EMULATED_IMAGE)?);
        } else {
            for image in IMAGES {
                search.modules.push(load(image.bytes)?);
            }
        }
        let kernels = Self::find(cx, &search, target)?;
        Ok(Self { modules: search.modules, ..kernels })
    }

    fn find(cx: &Entered<'_>, search: &Search, target: &Target) -> Result<Self, DeviceError> {
        let Search { format, head_dim, .. } = *search;
        let element = match format.element {
            Format::Int8 => "i8",
            _ => format_name(format),
        };
        let append = |source: &str| {
            search.find("kvpool_append_", &format!("kvpool_append_{source}_{element}"))
        };
        let path = Path::of(format, head_dim);
        let attend = format!("kvpool_attend_{}_{}", format_name(format), path.suffix());
        let kernels = Self {
            modules: Vec::new(),
            append: [append("f32")?, append("f16")?, append("bf16")?],
            attend: search.find("kvpool_attend_", &attend)?,
            path,
            attend_shared: path.shared_bytes(head_dim, format.element_bytes()),
            combine: search.find("kvpool_combine", "kvpool_combine")?,
            copy_pairs: search.find("kvpool_copy_pairs", "kvpool_copy_pairs")?,
            most_blocks: BLOCKS_PER_MULTIPROCESSOR * target.multiprocessors,
        };
        // Asking for an attribute also has a kernel loaded that the driver would load when it is
        // launched first.
        cx.allow_shared(kernels.attend, kernels.attend_shared)?;
        for function in kernels.append.into_iter().chain([kernels.combine, kernels.copy_pairs]) {
            cx.allow_shared(function, 0)?;
        }
        Ok(kernels)
    }

    pub(super) const fn path(&self) -> Path {
        self.path
    }

    /// As many blocks as the work fills, but no more than the GPU has places for.
    fn grid(&self, blocks: u64) -> u32 {
        u32::try_from(blocks).unwrap_or(u32::MAX).clamp(1, self.most_blocks)
    }

    /// Stores K and V of so many tokens: a warp for the K or the V of each.
    pub(super) fn append(&self, source: DType, tokens: u32) -> Launch {
        let function = match source {
            DType::F32 => self.append[0],
            DType::F16 => self.append[1],
            DType::Bf16 => self.append[2],
        };
        let warps = u64::from(tokens) * 2;
        let blocks = warps.div_ceil(u64::from(MOVE_THREADS / WARP_THREADS));
        Launch { function, grid: (self.grid(blocks), 1), block: MOVE_THREADS, shared_bytes: 0 }
    }

    /// So many items of attention.
    pub(super) fn attend(&self, items: u32, num_kv_heads: u32) -> Launch {
        Launch {
            function: self.attend,
            grid: (self.grid(items.into()), num_kv_heads),
            block: ATTEND_THREADS,
            shared_bytes: self.attend_shared,
        }
    }

    /// So many items of the combination.
    pub(super) fn combine(&self, items: u32, num_kv_heads: u32) -> Launch {
        Launch {
            function: self.combine,
            grid: (self.grid(items.into()), num_kv_heads),
            block: ATTEND_THREADS,
            shared_bytes: 0,
        }
    }

    /// One pair of units of so many bytes.
    pub(super) fn copy_pair(&self, bytes: u64) -> Launch {
        let blocks = bytes.div_ceil(u64::from(MOVE_THREADS) * 16);
        let function = self.copy_pairs;
        Launch { function, grid: (self.grid(blocks), 1), block: MOVE_THREADS, shared_bytes: 0 }
    }
}

/// The error of an image that could not be loaded.
fn of_image(error: DeviceError, target: &Target) -> DeviceError {
    if not_for_this_gpu(error) {
        let Target { capability, compiled, .. } = *target;
        return DeviceError::CudaOtherArchitecture { capability, compiled };
    }
    if beyond_this_driver(error) {
        return DeviceError::CudaDriverTooOld { driver: target.driver, needed: target.toolkit };
    }
    error
}

#[cfg(test)]
mod tests {
    use super::super::bindings::KVPOOL_SPLIT_TOKENS;
    use super::*;

    const F16: KvFormat = KvFormat { element: Format::F16, scale: None };

    #[test]
    fn the_constants_are_those_of_params_h() {
        assert_eq!(KVPOOL_SPLIT_TOKENS, crate::plan::SPLIT_TOKENS);
        // KVPOOL_WIDE_SHARED(128, 128)
        assert_eq!(Path::Plain(128).shared_bytes(128, 2), 3 * 8 * 128 * 4 + 6 * 8 * 4 + 512 * 4);
    }

    #[test]
    fn the_kernel_follows_from_format_and_head_dim() {
        for (head_dim, width) in [(8, 128), (128, 128), (136, 256), (256, 256), (264, 1024)] {
            let f32 = KvFormat { element: Format::F32, scale: None };
            assert_eq!(Path::of(f32, head_dim), Path::Plain(width), "{head_dim}");
        }
        let int8 = |scale| KvFormat { element: Format::Int8, scale: Some(scale) };
        assert_eq!(format_name(int8(ScaleKind::PerGroup32)), "i8g");
        assert_eq!(format_name(int8(ScaleKind::PerTensor)), "i8");
        assert_eq!(format_name(F16), "f16");
    }
}
