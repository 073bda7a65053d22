//! Host memory and the host's cores.
//!
//! [`CpuDevice::open`] maps the pool, allocates the workspace and starts the workers; after that
//! no call allocates (P1). `reference.rs` is the truth, `fast.rs` what the fast kernels are
//! instances of; which one computes is decided at open and can be read from
//! [`super::DeviceInfo`].

#![cfg_attr(
    not(x86_kernels),
    allow(dead_code, reason = "the kernels for x86's vector instructions use more of the rest")
)]

mod append;
mod attend;
#[cfg(x86_kernels)]
mod avx2;
#[cfg(x86_kernels)]
mod avx2_store;
#[cfg(x86_kernels)]
mod avx2_tile;
#[cfg(x86_kernels)]
mod bf16;
#[cfg(x86_kernels)]
mod bf16_tile;
mod disjoint;
mod exp;
mod fast;
mod float_mode;
mod job;
mod kernel;
mod lanes;
#[cfg(x86_kernels)]
mod madd;
#[cfg(x86_kernels)]
mod madd_tile;
mod memory;
#[cfg(x86_kernels)]
mod packed;
mod places;
mod portion;
mod probe;
#[cfg(feature = "model")]
mod product;
mod reference;
mod rope;
mod scores;
mod signals;
mod store;
mod task;
#[cfg(test)]
mod tests;
mod threads;
mod tile;
mod values;
#[cfg(x86_kernels)]
mod vnni;
#[cfg(x86_kernels)]
mod vnni_tile;
#[cfg(x86_kernels)]
mod vnni_values;
mod workers;
mod workspace;
#[cfg(x86_kernels)]
mod x86;
#[cfg(x86_kernels)]
mod x86_store;
#[cfg(x86_kernels)]
mod x86_weights;

pub use memory::available_memory;
pub use probe::sum_words;
#[cfg(feature = "model")]
pub use product::{Products, WeightFormat, Weights};
pub use threads::Threads;

use float_mode::FloatMode;
use job::AttendJob;
use kernel::Chosen;
use memory::PoolMemory;
use rope::RopeTables;
use workspace::Workspace;

use super::{AppendArgs, AppendCounts, AttendArgs, Device, DeviceInfo};
use crate::config::{DeviceConfig, KernelChoice};
use crate::error::DeviceError;
use crate::plan::{GroupLayout, Plan};
use crate::units::Bytes;

/// The CPU as a device.
#[derive(Debug)]
pub struct CpuDevice {
    memory: PoolMemory,
    workspace: Workspace,
    rope: Option<RopeTables>,
    threads: Threads,
    kernel: Chosen,
    plan_fingerprint: u64,
}

impl CpuDevice {
    /// Allocates the pool and the workspace of a plan, and starts the workers. `progress` is told
    /// the bytes of the pool that are resident, and the bytes in all.
    ///
    /// # Errors
    /// [`DeviceError`] when the CPU lacks the kernels asked for, memory cannot be mapped or a
    /// thread cannot be started.
    pub fn open(
        plan: &Plan,
        config: &DeviceConfig,
        progress: Option<&mut dyn FnMut(Bytes, Bytes)>,
    ) -> Result<Self, DeviceError> {
        let kernel = kernel::choose(config.kernel)?;
        let num_threads = num_threads(config);
        let workspace = Workspace::open(plan.cpu_workspace(num_threads))?;
        let rope = plan.rope.as_ref().map(RopeTables::open).transpose()?;
        let mut silent = |_, _| {};
        let progress = progress.unwrap_or(&mut silent);
        let memory = PoolMemory::open(plan.pool_bytes, num_threads as usize, progress)?;
        let threads = Threads::start(num_threads as usize)?;
        let plan_fingerprint = plan.fingerprint();
        Ok(Self { memory, workspace, rope, threads, kernel, plan_fingerprint })
    }

    /// Refuses a layout whose rows could overlap or lie outside the pool: everything below writes
    /// to places that it computes.
    fn check_layout(&self, layout: &GroupLayout) -> Result<(), DeviceError> {
        if layout.is_consistent(self.memory.bytes().len() as u64) {
            Ok(())
        } else {
            Err(DeviceError::BadLayout)
        }
    }
}

/// The name of the kernels that a choice leads to on this CPU.
///
/// # Errors
/// [`DeviceError::KernelUnsupported`].
pub fn kernel_name(choice: KernelChoice) -> Result<&'static str, DeviceError> {
    Ok(kernel::choose(choice)?.name())
}

/// The instruction sets that this CPU has, of those that kernels make use of.
#[must_use]
pub fn features() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    let known = [
        ("sse4.1", std::arch::is_x86_feature_detected!("sse4.1")),
        ("avx2", std::arch::is_x86_feature_detected!("avx2")),
        ("fma", std::arch::is_x86_feature_detected!("fma")),
        ("f16c", std::arch::is_x86_feature_detected!("f16c")),
        ("avx512f", std::arch::is_x86_feature_detected!("avx512f")),
        ("avx512bw", std::arch::is_x86_feature_detected!("avx512bw")),
        ("avx512vl", std::arch::is_x86_feature_detected!("avx512vl")),
        ("avx512vnni", std::arch::is_x86_feature_detected!("avx512vnni")),
        ("avx512bf16", std::arch::is_x86_feature_detected!("avx512bf16")),
    ];
    #[cfg(not(target_arch = "x86_64"))]
    let known: [(&str, bool); 0] = [];
    known.into_iter().filter(|(_, has)| *has).map(|(name, _)| name).collect()
}

/// Threads that a configuration asks for: 0 stands for one a core.
#[must_use]
pub fn num_threads(config: &DeviceConfig) -> u32 {
    if config.threads > 0 {
        return config.threads;
    }
    std::thread::available_parallelism()
        .ok()
        .and_then(|cores| u32::try_from(cores.get()).ok())
        .unwrap_or(1)
}

impl Device for CpuDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            kind: "cpu",
            kernel: self.kernel.name(),
            threads: self.workspace.sizes().threads,
            pool_bytes: Bytes(self.memory.bytes().len() as u64),
            workspace_bytes: Bytes(
                self.workspace.bytes().get() + self.rope.as_ref().map_or(0, RopeTables::bytes),
            ),
            huge_pages: self.memory.huge_pages(),
        }
    }

    fn plan_fingerprint(&self) -> u64 {
        self.plan_fingerprint
    }

    fn threads(&self) -> Option<&Threads> {
        Some(&self.threads)
    }

    fn base_ptr(&self) -> *mut u8 {
        self.memory.base_ptr()
    }

    fn append(&mut self, args: &AppendArgs<'_>) -> Result<AppendCounts, DeviceError> {
        self.check_layout(args.layout)?;
        let _mode = FloatMode::standard();
        let rotation = match (args.rope, &self.rope) {
            (None, _) => None,
            (Some(table), Some(rope)) => {
                Some(rope.rotation(table, args.positions, args.token_slots.len())?)
            }
            (Some(_), None) => return Err(DeviceError::BadLayout),
        };
        append::append(self.kernel.appender(), &self.threads, &mut self.memory, args, rotation)
    }

    fn attend(&mut self, args: &mut AttendArgs<'_>) -> Result<(), DeviceError> {
        self.check_layout(args.layout)?;
        let _mode = FloatMode::standard();
        let job = AttendJob::new(self.memory.bytes(), args)?;
        match &self.kernel {
            Chosen::Reference => reference::attend(&mut self.workspace, &self.threads, &job),
            Chosen::Fast(kernel) => {
                attend::attend(&**kernel, &mut self.workspace, &self.threads, &job)
            }
        }
    }

    fn copy(&mut self, src: u64, dst: u64, len: u64) -> Result<(), DeviceError> {
        let from = self.memory.range(src, len)?;
        let to = self.memory.range(dst, len)?;
        self.memory.bytes_mut().copy_within(from, to.start);
        Ok(())
    }

    fn fill(&mut self, offset: u64, len: u64, byte: u8) -> Result<(), DeviceError> {
        let range = self.memory.range(offset, len)?;
        self.memory.bytes_mut()[range].fill(byte);
        Ok(())
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let range = self.memory.range(offset, bytes.len() as u64)?;
        self.memory.bytes_mut()[range].copy_from_slice(bytes);
        Ok(())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        let range = self.memory.range(offset, out.len() as u64)?;
        out.copy_from_slice(&self.memory.bytes()[range]);
        Ok(())
    }
}
