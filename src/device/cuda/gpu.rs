//! Finding a GPU that this build's kernels run on: each reason against it is an error of its own.

use std::sync::Arc;

use super::driver::{Context, Driver};
use super::images::{BUILD, Build, OLDEST_DRIVER, Served, serves};
use super::kernels::Target;
use crate::error::DeviceError;
use crate::units::Bytes;

/// What stands for the architectures of the emulator: its kernels are not compiled for any.
const EMULATED: (&[&str], &[&str]) = (&["80"], &["80"]);

/// A GPU that can run the kernels, with its context.
#[derive(Debug)]
pub struct CudaGpu {
    pub(super) context: Arc<Context>,
    pub(super) target: Target,
    name: String,
}

impl CudaGpu {
    /// The GPU of a number, counted from 0.
    ///
    /// # Errors
    /// [`DeviceError::CudaNoDriver`], [`DeviceError::CudaNotCompiled`],
    /// [`DeviceError::CudaDriverTooOld`], [`DeviceError::CudaNoGpu`] or
    /// [`DeviceError::CudaOtherArchitecture`]: five things that are mended in five ways; and
    /// whatever else the driver says.
    pub fn find(ordinal: u32) -> Result<Self, DeviceError> {
        let driver = Driver::load()?;
        let emulated = driver.emulated();
        let (toolkit, archs, ptx) = match BUILD {
            _ if emulated => (OLDEST_DRIVER, EMULATED.0, EMULATED.1),
            Build::With { version, archs, ptx, .. } => (version, archs, ptx),
            Build::Without(why) => return Err(DeviceError::CudaNotCompiled { why }),
        };
        let version = driver.version()?;
        let too_old = |needed| DeviceError::CudaDriverTooOld { driver: version, needed };
        // Machine code runs with every driver of the toolkit's major version and later ones.
        let needed = (toolkit.0, if toolkit.0 == OLDEST_DRIVER.0 { OLDEST_DRIVER.1 } else { 0 });
        if version < needed {
            return Err(too_old(needed));
        }
        let count = driver.count()?;
        if ordinal >= count {
            return Err(DeviceError::CudaNoGpu { ordinal, count });
        }
        let gpu = driver.gpu(ordinal)?;
        let capability = gpu.capability()?;
        let compiled = compiled();
        match serves(archs, ptx, capability) {
            Served::Code => {}
            Served::Ptx if version >= toolkit => {}
            Served::Ptx => return Err(too_old(toolkit)),
            Served::No => {
                return Err(DeviceError::CudaOtherArchitecture { capability, compiled });
            }
        }
        let target = Target {
            emulated,
            capability,
            driver: version,
            toolkit,
            compiled,
            multiprocessors: gpu.multiprocessors()?,
        };
        Ok(Self { context: gpu.context()?, target, name: gpu.name()? })
    }

    /// What its maker calls it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Free and total bytes of its memory.
    ///
    /// # Errors
    /// What the driver says.
    pub fn memory(&self) -> Result<(Bytes, Bytes), DeviceError> {
        self.context.enter()?.memory()
    }
}

/// The architectures that were compiled, as one text.
pub(super) fn compiled() -> &'static str {
    match BUILD {
        Build::With { list, .. } => list,
        Build::Without(_) => "the emulator",
    }
}
