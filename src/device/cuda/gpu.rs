//! Finding a GPU that this build's kernels run on: each reason against it is an error of its own.

use std::sync::Arc;

use super::driver::{Context, Driver};
use super::images::{BUILD, Build, OLDEST_DRIVER, Served, serves};
use super::kernels::Target;
use crate::error::DeviceError;
use crate::units::Bytes;

/// What stands for the architectures of the emulator: its kernels are not compiled for any.
const EMULATED: Compiled = Compiled {
    toolkit: OLDEST_DRIVER,
    archs: &["80"],
    ptx: &["80"],
    list: "80+ptx (the emulator)",
};

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
        let compiled = Compiled::of(BUILD, emulated)?;
        let version = driver.version()?;
        compiled.check_driver(version)?;
        let count = driver.count()?;
        if ordinal >= count {
            return Err(DeviceError::CudaNoGpu { ordinal, count });
        }
        let gpu = driver.gpu(ordinal)?;
        let capability = gpu.capability()?;
        compiled.check_gpu(version, capability)?;
        let target = Target {
            emulated,
            capability,
            driver: version,
            toolkit: compiled.toolkit,
            compiled: compiled.list,
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

/// The kernels that there are.
#[derive(Clone, Copy, Debug)]
struct Compiled {
    /// The version of the toolkit that made them.
    toolkit: (u32, u32),
    archs: &'static [&'static str],
    ptx: &'static [&'static str],
    list: &'static str,
}

impl Compiled {
    fn of(build: Build, emulated: bool) -> Result<Self, DeviceError> {
        match build {
            _ if emulated => Ok(EMULATED),
            Build::With { version, archs, ptx, list, .. } => {
                Ok(Self { toolkit: version, archs, ptx, list })
            }
            Build::Without(why) => Err(DeviceError::CudaNotCompiled { why }),
        }
    }

    /// Machine code runs with every driver of the toolkit's major version and later ones.
    fn check_driver(&self, driver: (u32, u32)) -> Result<(), DeviceError> {
        let needed = (self.toolkit.0, 0).max(OLDEST_DRIVER);
        if driver < needed {
            return Err(DeviceError::CudaDriverTooOld { driver, needed });
        }
        Ok(())
    }

    /// PTX needs a driver as late as the toolkit.
    fn check_gpu(&self, driver: (u32, u32), capability: (u32, u32)) -> Result<(), DeviceError> {
        match serves(self.archs, self.ptx, capability) {
            Served::Code => Ok(()),
            Served::Ptx if driver >= self.toolkit => Ok(()),
            Served::Ptx => Err(DeviceError::CudaDriverTooOld { driver, needed: self.toolkit }),
            Served::No => {
                Err(DeviceError::CudaOtherArchitecture { capability, compiled: self.list })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUILT: Build = Build::With {
        nvcc: "nvcc",
        through: "PATH",
        version: (12, 6),
        archs: &["80", "90"],
        ptx: &["90"],
        list: "80,90+ptx",
    };

    #[test]
    fn edge_62_what_is_missing_is_named() {
        let error = Compiled::of(Build::Without("no nvcc"), false).unwrap_err();
        assert_eq!(error, DeviceError::CudaNotCompiled { why: "no nvcc" });
        assert!(error.to_string().contains("KVPOOL_CUDA=require"), "{error}");
        assert!(Compiled::of(Build::Without("no nvcc"), true).is_ok());

        let built = Compiled::of(BUILT, false).expect("kernels");
        assert_eq!(built.check_driver((12, 0)), Ok(()), "the same major version");
        assert_eq!(built.check_driver((13, 0)), Ok(()));
        let too_old = |needed| Err(DeviceError::CudaDriverTooOld { driver: (11, 8), needed });
        assert_eq!(built.check_driver((11, 8)), too_old((12, 0)));

        assert_eq!(built.check_gpu((12, 0), (8, 6)), Ok(()));
        assert_eq!(built.check_gpu((12, 6), (10, 0)), Ok(()), "from PTX");
        let too_old = DeviceError::CudaDriverTooOld { driver: (12, 0), needed: (12, 6) };
        assert_eq!(built.check_gpu((12, 0), (10, 0)), Err(too_old), "PTX that it does not know");
        let error = built.check_gpu((12, 6), (7, 5)).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("7.5") && text.contains("80,90+ptx"), "{text}");
        assert!(text.contains("KVPOOL_CUDA_ARCHS=75"), "{text}");
    }
}
