//! Opening the device that a configuration names, once it is sure that the plan fits it.

use super::Device;
use super::cpu::{CpuDevice, available_memory, num_threads};
use super::cuda::{CudaDevice, CudaGpu};
use crate::config::{Capacity, Config, DeviceConfig, DeviceKind};
use crate::error::{DeviceError, OpenError, PlanError};
use crate::plan::Plan;
use crate::units::Bytes;

/// What a capacity in percent came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResolvedBudget {
    /// The percent that were asked for.
    pub percent: u8,
    /// What they are of.
    pub available: Bytes,
    /// What they are: from now on `pool.capacity`.
    pub budget: Bytes,
}

impl std::fmt::Display for ResolvedBudget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { percent, available, budget } = self;
        write!(
            f,
            "pool.capacity = \"budget:{percent}%\" of {available} bytes that are free is \"budget:{}\"",
            budget.get()
        )
    }
}

/// Turns a `pool.capacity` in percent into bytes: of `device.memory_limit`, or else of what the
/// device has free. Nothing to do for any other capacity.
///
/// # Errors
/// [`DeviceError`] when the GPU that is asked for cannot be used.
pub fn resolve_budget(config: &mut Config) -> Result<Option<ResolvedBudget>, DeviceError> {
    let Capacity::BudgetPercent(percent) = config.pool.capacity else { return Ok(None) };
    let available = match (config.device.memory_limit, config.device.kind) {
        (Some(limit), _) => limit,
        (None, DeviceKind::Cpu) => available_memory().unwrap_or(Bytes::ZERO),
        (None, DeviceKind::Cuda) => CudaGpu::find(config.device.ordinal)?.memory()?.0,
    };
    // Hundredths first: the product could be too large.
    let budget = Bytes(available.get() / 100 * u64::from(percent));
    config.pool.capacity = Capacity::Budget(budget);
    Ok(Some(ResolvedBudget { percent, available, budget }))
}

/// Opens the device of a configuration for a plan. `progress` is told how many bytes of the pool
/// have been touched, and of how many.
///
/// # Errors
/// [`OpenError::Plan`] with the shortfall when the plan does not fit `device.memory_limit`, or else
/// what is available (nothing is allocated then); [`OpenError::Device`].
pub fn open(
    plan: &Plan,
    config: &DeviceConfig,
    progress: Option<&mut dyn FnMut(Bytes, Bytes)>,
) -> Result<Box<dyn Device>, OpenError> {
    match config.kind {
        DeviceKind::Cpu => Ok(Box::new(open_cpu(plan, config, progress)?)),
        DeviceKind::Cuda => {
            let device = open_cuda(plan, config)?;
            if let Some(progress) = progress {
                progress(plan.pool_bytes, plan.pool_bytes);
            }
            Ok(Box::new(device))
        }
    }
}

fn open_cpu(
    plan: &Plan,
    config: &DeviceConfig,
    progress: Option<&mut dyn FnMut(Bytes, Bytes)>,
) -> Result<CpuDevice, OpenError> {
    let workspace = plan.cpu_workspace_bytes(num_threads(config)).map_err(PlanError::from)?;
    match config.memory_limit {
        Some(limit) => plan.check_memory(workspace, limit, "device.memory_limit")?,
        None => {
            if let Some(available) = available_memory() {
                plan.check_memory(workspace, available, "what this machine has available")?;
            }
        }
    }
    Ok(CpuDevice::open(plan, config, progress)?)
}

fn open_cuda(plan: &Plan, config: &DeviceConfig) -> Result<CudaDevice, OpenError> {
    let gpu = CudaGpu::find(config.ordinal)?;
    let workspace = plan.cuda_workspace().map_err(PlanError::from)?.device_bytes;
    let fits = |available: Bytes, whose| plan.check_device_memory(workspace, available, whose);
    // Before anything is done, and again when the kernels are there, whatever the limit is.
    match config.memory_limit {
        Some(limit) => fits(limit, "device.memory_limit")?,
        None => fits(gpu.memory()?.0, "what the GPU has free")?,
    }
    CudaDevice::open(plan, &gpu, |free| Ok(fits(free, "what the GPU has free beside the kernels")?))
}
