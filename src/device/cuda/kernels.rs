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
use crate::plan::{KvFormat, SCALE_GROUP};

/// Threads of a block of the kernels that move bytes, and of those that attend.
const MOVE_THREADS: u32 = 256;
const ATTEND_THREADS: u32 = 128;
const WARP_THREADS: u32 = 32;

/// Blocks of a grid for each multiprocessor, at most: the kernels go through more work in strides.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 8;

/// The kernels of one plan, loaded.
#[derive(Debug)]
pub(super) struct Kernels {
    /// What the functions are of.
    #[expect(dead_code, reason = "kept loaded")]
    modules: Vec<Module>,
    /// For K and V in f32, f16 and bf16.
    append: [Function; 3],
    /// For items of few packed rows, and for those of twice as many where there is such a kernel.
    attend: [Attend; 2],
    path: Path,
    combine: Function,
    copy_pairs: Function,
    gather: Function,
    fill: Function,
    /// Blocks of a grid in x, at most.
    most_blocks: u32,
}

/// One attention kernel.
#[derive(Clone, Copy, Debug)]
struct Attend {
    function: Function,
    item_rows: u32,
    shared_bytes: u32,
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
        let f32 = format.element == Format::F32;
        if !f32 && head_dim.is_multiple_of(16) && head_dim <= 256 {
            return Self::Tensor(head_dim.next_power_of_two().max(64));
        }
        match head_dim {
            0..=128 if f32 => Self::Plain(128),
            0..=256 => Self::Plain(256),
            _ => Self::Plain(1024),
        }
    }

    /// Packed rows of an item (`KVPOOL_WIDE_ROWS`, or 16 and 32), of the two sizes that there are.
    const fn item_rows(self) -> [u32; 2] {
        match self {
            Self::Plain(..=256) => [8, 8],
            Self::Plain(_) => [2, 2],
            Self::Tensor(..=128) => [16, 32],
            Self::Tensor(_) => [16, 16],
        }
    }

    /// Dynamic shared bytes of a kernel of so many packed rows an item (`KVPOOL_WIDE_SHARED`,
    /// `KVPOOL_TENSOR_SHARED`).
    const fn shared_bytes(self, rows: u32, head_dim: u32, format: KvFormat) -> u32 {
        let units = crate::plan::SPLIT_TOKENS * 4;
        match self {
            Self::Plain(_) => 3 * rows * head_dim * 4 + 6 * rows * 4 + units,
            Self::Tensor(dim) => {
                let tile = if dim > 128 { 32 } else { 64 };
                // Two stages of K and of V.
                let tiles = 4 * tile * dim * format.element_bytes();
                let queries = 2 * rows * dim * 2;
                let weights = rows * (tile + 8) * 4;
                let scales_per_row = match format.scale {
                    Some(ScaleKind::PerGroup32) => dim / SCALE_GROUP,
                    _ => 1,
                };
                let scales = 4 * scales_per_row * tile * 4;
                tiles + queries + weights + scales + 9 * rows * 4 + units
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
    fn suffix(self, rows: u32) -> String {
        match self {
            Self::Plain(width) => format!("w{width}"),
            Self::Tensor(dim) => format!("t{dim}x{}", rows / 16),
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
        let attend = |item_rows: u32| {
            let name = format!("kvpool_attend_{}_{}", format_name(format), path.suffix(item_rows));
            let function = search.find("kvpool_attend_", &name)?;
            let shared_bytes = path.shared_bytes(item_rows, head_dim, format);
            Ok(Attend { function, item_rows, shared_bytes })
        };
        let [few, many] = path.item_rows();
        let kernels = Self {
            modules: Vec::new(),
            append: [append("f32")?, append("f16")?, append("bf16")?],
            attend: [attend(few)?, attend(many)?],
            path,
            combine: search.find("kvpool_combine", "kvpool_combine")?,
            copy_pairs: search.find("kvpool_copy_pairs", "kvpool_copy_pairs")?,
            gather: search.find("kvpool_gather_", &format!("kvpool_gather_{element}"))?,
            fill: search.find("kvpool_fill", "kvpool_fill")?,
            most_blocks: BLOCKS_PER_MULTIPROCESSOR * target.multiprocessors,
        };
        // Asking for an attribute also has a kernel loaded that the driver would load when it is
        // launched first.
        for attend in &kernels.attend {
            cx.allow_shared(attend.function, attend.shared_bytes)?;
        }
        let Self { combine, copy_pairs, gather, fill, .. } = kernels;
        for function in kernels.append.into_iter().chain([combine, copy_pairs, gather, fill]) {
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

    /// Packed rows of an item for a step whose sequences have so many packed rows on average:
    /// large items read the keys less often, and leave rows unused where there are few. The bits
    /// are the same.
    pub(super) const fn item_rows(&self, packed_rows_per_seq: u64) -> u32 {
        let [few, many] = &self.attend;
        if packed_rows_per_seq > few.item_rows as u64 { many.item_rows } else { few.item_rows }
    }

    /// So many items of attention, of so many packed rows at most.
    pub(super) fn attend(&self, item_rows: u32, items: u32, num_kv_heads: u32) -> Launch {
        let [few, many] = self.attend;
        let attend = if item_rows <= few.item_rows { few } else { many };
        Launch {
            function: attend.function,
            grid: (self.grid(items.into()), num_kv_heads),
            block: ATTEND_THREADS,
            shared_bytes: attend.shared_bytes,
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

    /// So many pairs of units, of so many bytes at most.
    pub(super) fn copy_pairs(&self, pairs: u32, bytes: u64) -> Launch {
        // Four 16-byte accesses a thread: each warp also reads the pair.
        let blocks = bytes.div_ceil(u64::from(MOVE_THREADS) * 16 * 4);
        let most = (self.most_blocks / pairs.max(1)).max(1);
        let grid = (self.grid(blocks).min(most), pairs);
        Launch { function: self.copy_pairs, grid, block: MOVE_THREADS, shared_bytes: 0 }
    }

    /// Widens so many vectors: a warp for each.
    pub(super) fn gather(&self, vectors: u32) -> Launch {
        let blocks = u64::from(vectors).div_ceil(u64::from(MOVE_THREADS / WARP_THREADS));
        let grid = (self.grid(blocks), 1);
        Launch { function: self.gather, grid, block: MOVE_THREADS, shared_bytes: 0 }
    }

    /// Sets so many ranges, of so many bytes at most.
    pub(super) fn fill(&self, ranges: u32, bytes: u64) -> Launch {
        let blocks = bytes.div_ceil(u64::from(MOVE_THREADS) * 16);
        let most = (self.most_blocks / ranges.max(1)).max(1);
        let grid = (self.grid(blocks).min(most), ranges.max(1));
        Launch { function: self.fill, grid, block: MOVE_THREADS, shared_bytes: 0 }
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
    use std::process::Command;

    use super::super::bindings::KVPOOL_SPLIT_TOKENS;
    use super::*;

    const F16: KvFormat = KvFormat { element: Format::F16, scale: None };

    /// What the macros of `params.h` say, a number a line.
    fn macros(lines: &[String]) -> Vec<u32> {
        let folder = tempfile::tempdir().expect("a folder");
        let (source, binary) = (folder.path().join("macros.cpp"), folder.path().join("macros"));
        let prints: String =
            lines.iter().map(|line| format!("std::printf(\"%u\\n\", {line});\n")).collect();
        let text = format!("#include <cstdio>\n#include \"params.h\"\nint main() {{\n{prints}}}\n");
        std::fs::write(&source, text).expect("a file");
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
        let built = Command::new(compiler)
            .args(["-std=c++17", "-Icsrc/kernels", "-o"])
            .args([&binary, &source])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .status()
            .expect("a C++ compiler");
        assert!(built.success());
        let output = Command::new(&binary).output().expect("runs");
        let text = String::from_utf8(output.stdout).expect("numbers");
        text.lines().map(|line| line.parse().expect("a number")).collect()
    }

    #[test]
    fn rows_and_shared_bytes_are_those_of_params_h() {
        assert_eq!(KVPOOL_SPLIT_TOKENS, crate::plan::SPLIT_TOKENS);
        let int8 = |scale| KvFormat { element: Format::Int8, scale: Some(scale) };
        let formats = [F16, int8(ScaleKind::PerTokenHead), int8(ScaleKind::PerGroup32)];
        let (mut lines, mut ours) = (Vec::new(), Vec::new());
        for (width, head_dim) in [(128, 128), (128, 40), (256, 200), (1024, 1000)] {
            let path = Path::Plain(width);
            let [rows, _] = path.item_rows();
            lines.push(format!("KVPOOL_WIDE_ROWS({width}u)"));
            ours.push(rows);
            lines.push(format!("KVPOOL_WIDE_SHARED({head_dim}u, {width}u)"));
            ours.push(path.shared_bytes(rows, head_dim, F16));
        }
        for dim in [64, 128, 256] {
            for format in formats {
                for rows in Path::Tensor(dim).item_rows() {
                    let groups = format.scale == Some(ScaleKind::PerGroup32);
                    let (bytes, tiles) = (format.element_bytes(), rows / 16);
                    lines.push(format!(
                        "KVPOOL_TENSOR_SHARED({bytes}u, {groups}, {dim}u, {tiles}u)"
                    ));
                    ours.push(Path::Tensor(dim).shared_bytes(rows, dim, format));
                }
            }
        }
        assert_eq!(macros(&lines), ours, "{lines:?}");
        // The plan makes room for the smallest items.
        assert!((8..=1024).step_by(8).all(|head_dim| {
            let [rows, _] = Path::of(F16, head_dim).item_rows();
            rows >= if head_dim <= 256 { 8 } else { 2 }
        }));
    }

    #[test]
    fn the_kernel_follows_from_format_and_head_dim() {
        for (head_dim, width) in [(8, 128), (128, 128), (136, 256), (256, 256), (264, 1024)] {
            let f32 = KvFormat { element: Format::F32, scale: None };
            assert_eq!(Path::of(f32, head_dim), Path::Plain(width), "{head_dim}");
        }
        let plain = |head_dim| Path::of(F16, head_dim);
        assert_eq!((plain(8), plain(264)), (Path::Plain(256), Path::Plain(1024)));
        for (head_dim, dim) in [(16, 64), (80, 128), (96, 128), (128, 128), (256, 256)] {
            assert_eq!(Path::of(F16, head_dim), Path::Tensor(dim), "{head_dim}");
        }
        let int8 = |scale| KvFormat { element: Format::Int8, scale: Some(scale) };
        assert_eq!(format_name(int8(ScaleKind::PerGroup32)), "i8g");
        assert_eq!(format_name(int8(ScaleKind::PerTensor)), "i8");
        assert_eq!(format_name(F16), "f16");
    }
}
