//! What there is of CUDA on this machine and in this build, for `kvpool doctor`.

use serde::Serialize;

use super::CudaGpu;
use super::driver::{Driver, Gpu};
use super::images::{BUILD, Build, EMULATED_IMAGE, IMAGES};
use crate::error::DeviceError;
use crate::units::Bytes;

/// Build, driver and GPUs.
#[derive(Clone, Debug, Serialize)]
pub struct CudaReport {
    /// How the build came by its kernels.
    pub build: Build,
    /// The images of kernels, and their bytes.
    pub images: Vec<(&'static str, u64)>,
    /// The driver; `None` where there is none.
    pub driver: Option<DriverReport>,
    /// Why no driver can be used, where that is so.
    pub driver_problem: Option<String>,
    /// The GPUs that the driver sees.
    pub gpus: Vec<GpuReport>,
}

/// The driver's library.
#[derive(Clone, Debug, Serialize)]
pub struct DriverReport {
    /// The CUDA version that it supports.
    pub version: (u32, u32),
    /// Whether it is the stand-in that executes the kernels on the host, for tests.
    pub emulated: bool,
}

/// One GPU.
#[derive(Clone, Debug, Serialize)]
pub struct GpuReport {
    /// Its number, as `device.ordinal` counts.
    pub ordinal: u32,
    /// What its maker calls it.
    pub name: String,
    /// Its compute capability.
    pub capability: (u32, u32),
    /// Its multiprocessors.
    pub multiprocessors: u32,
    /// All of its memory.
    pub memory_bytes: Bytes,
    /// What of it is free; `None` where nothing could be asked.
    pub free_bytes: Option<Bytes>,
    /// Why kvpool cannot use it, where that is so.
    pub problem: Option<String>,
}

/// Looks at everything; fails nowhere.
#[must_use]
pub fn report() -> CudaReport {
    let mut report = CudaReport {
        build: BUILD,
        images: IMAGES.iter().map(|image| (image.name, image.bytes.len() as u64)).collect(),
        driver: None,
        driver_problem: None,
        gpus: Vec::new(),
    };
    if let Err(error) = look(&mut report) {
        report.driver_problem = Some(error.to_string());
    }
    report
}

fn look(report: &mut CudaReport) -> Result<(), DeviceError> {
    let driver = Driver::load()?;
    let emulated = driver.emulated();
    if emulated {
        report.images.push(("emulator", EMULATED_IMAGE.len() as u64));
    }
    report.driver = Some(DriverReport { version: driver.version()?, emulated });
    for ordinal in 0..driver.count()? {
        report.gpus.push(one(ordinal, driver.gpu(ordinal)?)?);
    }
    Ok(())
}

fn one(ordinal: u32, gpu: Gpu) -> Result<GpuReport, DeviceError> {
    let found = CudaGpu::find(ordinal);
    let free = found.as_ref().ok().and_then(|gpu| gpu.memory().ok());
    Ok(GpuReport {
        ordinal,
        name: gpu.name()?,
        capability: gpu.capability()?,
        multiprocessors: gpu.multiprocessors()?,
        memory_bytes: gpu.total_memory()?,
        free_bytes: free.map(|(free, _)| free),
        problem: found.err().map(|error| error.to_string()),
    })
}

impl CudaReport {
    /// The architectures that were compiled, as one text.
    #[must_use]
    pub fn architectures(&self) -> &'static str {
        match self.build {
            Build::With { list, .. } => list,
            Build::Without(_) => "none",
        }
    }
}
