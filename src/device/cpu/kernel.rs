//! The seam between the device and its kernels.
//!
//! A [`Kernel`] computes one split of one [`Task`](super::task::Task) (some rows of one KV head, or
//! one row of some KV heads), and stores what is appended; all that is around it (dealing out the
//! work, combining the splits, writing the result) is the same for all kernels and lives in
//! `attend.rs`. A tuned kernel is another implementation and another
//! line in [`choose`].

use std::fmt;

use super::super::AppendCounts;
use super::append::{AppendItem, AppendJob, store_item};
#[cfg(x86_kernels)]
use super::bf16::Bf16;
use super::fast::split_in_lanes;
use super::lanes::{ElementBf16, ElementF16, ElementF32, ElementI8, ElementI8Grouped, Portable};
use super::task::Split;
#[cfg(x86_kernels)]
use super::vnni::Vnni;
#[cfg(x86_kernels)]
use super::x86::{Avx2, Avx512};
use crate::config::{Format, KernelChoice, ScaleKind};
use crate::error::DeviceError;
use crate::plan::GroupLayout;

/// Computes one split, and stores one item of an append.
pub(super) trait Kernel: Send + Sync + fmt::Debug {
    /// `portable`, `avx2`, `avx512`, …
    fn name(&self) -> &'static str;

    /// Whether attention over such vectors is computed in f32 lanes, where queries have no other
    /// form. `group`: query heads that share a KV head.
    fn in_lanes(&self, layout: &GroupLayout, _group: usize) -> bool {
        layout.format.element != Format::Int8
    }

    /// Attention of a task's query heads over one split's visible keys. What comes
    /// out for a head depends on nothing but its queries, those keys and their positions.
    fn split(&self, work: &mut Split<'_, '_>);

    /// Stores one item of an append. The bytes are the same for every kernel.
    fn append(&self, job: &AppendJob<'_>, item: AppendItem) -> AppendCounts;
}

impl Kernel for Portable {
    fn name(&self) -> &'static str {
        "portable"
    }

    fn split(&self, work: &mut Split<'_, '_>) {
        let format = work.task.view.layout.format;
        match (format.element, format.scale) {
            (Format::F32, _) => split_in_lanes::<Self, ElementF32>(*self, work),
            (Format::F16, _) => split_in_lanes::<Self, ElementF16>(*self, work),
            (Format::Bf16, _) => split_in_lanes::<Self, ElementBf16>(*self, work),
            (Format::Int8, Some(ScaleKind::PerGroup32)) => {
                split_in_lanes::<Self, ElementI8Grouped>(*self, work);
            }
            (Format::Int8, _) => split_in_lanes::<Self, ElementI8>(*self, work),
        }
    }

    fn append(&self, job: &AppendJob<'_>, item: AppendItem) -> AppendCounts {
        store_item(*self, job, item)
    }
}

/// What the device computes with.
#[derive(Debug)]
pub(super) enum Chosen {
    /// The truth: whole rows in f64, no splits. It appends as `Portable` does.
    Reference,
    /// Split by split.
    Fast(Box<dyn Kernel>),
}

impl Chosen {
    /// The name that reports use.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Reference => "reference",
            Self::Fast(kernel) => kernel.name(),
        }
    }

    /// The kernel that stores what is appended.
    pub(super) fn appender(&self) -> &dyn Kernel {
        match self {
            Self::Reference => &Portable,
            Self::Fast(kernel) => &**kernel,
        }
    }
}

/// The kernels asked for, or the best that this CPU has.
///
/// # Errors
/// [`DeviceError::KernelUnsupported`] when the CPU lacks what was asked for.
pub(super) fn choose(choice: KernelChoice) -> Result<Chosen, DeviceError> {
    match choice {
        KernelChoice::Auto => [KernelChoice::Avx512, KernelChoice::Avx2]
            .into_iter()
            .find_map(|choice| choose(choice).ok())
            .map_or_else(|| choose(KernelChoice::Portable), Ok),
        KernelChoice::Reference => Ok(Chosen::Reference),
        KernelChoice::Portable => Ok(Chosen::Fast(Box::new(Portable))),
        #[cfg(x86_kernels)]
        KernelChoice::Avx2 => match Avx2::detect() {
            Some(kernel) => Ok(Chosen::Fast(Box::new(kernel))),
            None => Err(DeviceError::KernelUnsupported { kernel: "avx2", needs: Avx2::NEEDS }),
        },
        #[cfg(x86_kernels)]
        // BF16 and VNNI where the CPU has them: they change bfloat16 and INT8 alone.
        KernelChoice::Avx512 => match (Bf16::<2>::detect(), Vnni::detect(), Avx512::detect()) {
            (Some(kernel), _, _) => Ok(Chosen::Fast(Box::new(kernel))),
            (_, Some(kernel), _) => Ok(Chosen::Fast(Box::new(kernel))),
            (_, _, Some(kernel)) => Ok(Chosen::Fast(Box::new(kernel))),
            (None, None, None) => {
                Err(DeviceError::KernelUnsupported { kernel: "avx512", needs: Avx512::NEEDS })
            }
        },
        #[cfg(x86_kernels)]
        KernelChoice::Avx512Bf16 => match Bf16::<1>::detect() {
            Some(kernel) => Ok(Chosen::Fast(Box::new(kernel))),
            None => Err(DeviceError::KernelUnsupported {
                kernel: "avx512-bf16",
                needs: Bf16::<1>::NEEDS,
            }),
        },
        #[cfg(not(x86_kernels))]
        KernelChoice::Avx2 => {
            Err(DeviceError::KernelUnsupported { kernel: "avx2", needs: "an x86-64 processor" })
        }
        #[cfg(not(x86_kernels))]
        KernelChoice::Avx512 => {
            Err(DeviceError::KernelUnsupported { kernel: "avx512", needs: "an x86-64 processor" })
        }
        #[cfg(not(x86_kernels))]
        KernelChoice::Avx512Bf16 => Err(DeviceError::KernelUnsupported {
            kernel: "avx512-bf16",
            needs: "an x86-64 processor",
        }),
    }
}
