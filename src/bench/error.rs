//! Why there are no figures, in the words of the command line: the configurations that are measured
//! are the benchmark's own, so no setting of a file is of use.

use super::{Operation, Options, Shape, Variant, shapes};
use crate::config::{CacheMode, Format};
use crate::error::{DeviceError, OpenError, PlanError};
use crate::units::Bytes;

/// Why a kernel has no figure.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// No shape of the operation has such a name.
    #[error("no shape's name contains {}; there are {}", shown(filter), names(*operation))]
    NoSuchShape {
        /// What should have been measured.
        operation: Operation,
        /// What was asked for.
        filter: String,
    },
    /// A variant does not fit into the machine's memory beside those of its shape that are open.
    #[error(
        "{shape}, {mode} in {format}, needs {} of memory beside the variants that are open already, and {}; \
         lower --footprint ({} now), or choose fewer --formats and --modes or a smaller shape (--filter)",
        needed.human(),
        available.map_or("the system did not give it".to_owned(), |a| format!("{} are available", a.human())),
        footprint.human()
    )]
    Memory {
        /// The shape.
        shape: String,
        /// The variant's mode.
        mode: CacheMode,
        /// The variant's format.
        format: Format,
        /// What it takes.
        needed: Bytes,
        /// What there is; `None` where the system has refused.
        available: Option<Bytes>,
        /// What the layers of a variant take at least.
        footprint: Bytes,
    },
    /// The plain loads beside the kernels do not fit into the machine's memory.
    #[error(
        "plain loads with {threads} threads, which figures are held against, need {} of memory, and {}; lower --threads",
        needed.human(),
        available.map_or("the system did not give it".to_owned(), |a| format!("{} are available", a.human())),
    )]
    Probe {
        /// Each reads memory of its own.
        threads: u32,
        /// What they take together, or, of a system that has refused it, one of them.
        needed: Bytes,
        /// What there is; `None` where the system has refused.
        available: Option<Bytes>,
    },
    /// Kernels that this machine cannot run.
    #[error("--kernel {kernel} needs {needs}, which this CPU does not have; use --kernel auto")]
    Kernel {
        /// The kernels.
        kernel: &'static str,
        /// The instructions.
        needs: &'static str,
    },
    /// A thread could not be started.
    #[error(
        "worker thread {index} could not be started (system error {code}); lower --threads ({threads} now)"
    )]
    Thread {
        /// Which.
        index: u32,
        /// The operating system's error number, 0 when it gave none.
        code: i32,
        /// How many were asked for.
        threads: u32,
    },
    /// Anything else that keeps a cache from opening: a defect.
    #[error(transparent)]
    Open(OpenError),
}

impl BenchError {
    /// The refusal of the memory that plain loads read.
    pub(super) fn of_probe(error: DeviceError, threads: u32) -> Self {
        match error {
            DeviceError::OutOfMemory { bytes, code, available } => {
                Self::Probe { threads, needed: bytes, available: (code == 0).then_some(available) }
            }
            other => Self::Open(other.into()),
        }
    }

    /// The refusal of one variant, with the option that was meant in place of the setting.
    pub(super) fn of(
        error: OpenError,
        shape: &Shape,
        variant: Variant,
        options: &Options,
        threads: u32,
    ) -> Self {
        let memory = |needed, available| Self::Memory {
            shape: shape.name(),
            mode: variant.mode,
            format: variant.format,
            needed,
            available,
            footprint: Bytes(options.footprint_bytes),
        };
        match error {
            OpenError::Plan(PlanError::MemoryTooSmall { needed, available, .. }) => {
                memory(needed, Some(available))
            }
            OpenError::Device(DeviceError::OutOfMemory { bytes, .. }) => memory(bytes, None),
            OpenError::Device(DeviceError::KernelUnsupported { kernel, needs }) => {
                Self::Kernel { kernel, needs }
            }
            OpenError::Device(DeviceError::Thread { index, code }) => {
                Self::Thread { index, code, threads }
            }
            other => Self::Open(other),
        }
    }
}

/// The names of an operation's shapes.
fn names(operation: Operation) -> String {
    let names: Vec<String> = shapes(operation).iter().map(Shape::name).collect();
    names.join(", ")
}

/// The most characters of a filter that a message repeats.
const SHOWN: usize = 60;

/// A filter in a message: a long one is cut.
pub(super) fn shown(filter: &str) -> String {
    match filter.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{:?}…", &filter[..end]),
        None => format!("{filter:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_name_the_options_of_the_command() {
        let variant = Variant { format: Format::F16, mode: CacheMode::Paged };
        let options = Options::of(Operation::Decode, variant.format, variant.mode);
        let shape = shapes(Operation::Decode)[0];
        let text = |error| BenchError::of(error, &shape, variant, &options, 7).to_string();
        let plan = PlanError::MemoryTooSmall {
            needed: Bytes(3 << 30),
            pool: Bytes(2 << 30),
            host: Bytes(1 << 29),
            workspace: Bytes(1 << 29),
            available: Bytes(1 << 30),
            source_of_limit: "what this machine has available",
            worst_case: true,
        };
        let memory = [
            text(OpenError::Plan(plan)),
            text(OpenError::Device(DeviceError::OutOfMemory {
                bytes: Bytes(3 << 30),
                code: 12,
                available: Bytes(1 << 30),
            })),
        ];
        for (message, rest) in memory.iter().zip(["1.000 GiB are available", "did not give it"]) {
            let start = "decode/q32kv8d128/1x4096, paged in f16, needs 3.000 GiB of memory";
            assert!(message.starts_with(start) && message.contains(rest), "{message}");
            assert!(message.contains("lower --footprint (512.000 MiB now)"), "{message}");
            for setting in ["limits.", "pool.", "device.", "cache.", "budget:"] {
                assert!(!message.contains(setting), "{message}");
            }
        }
        let thread = text(OpenError::Device(DeviceError::Thread { index: 3, code: 11 }));
        assert!(thread.ends_with("lower --threads (7 now)"), "{thread}");
        let probe = |code| {
            let (bytes, available) = (Bytes(256 << 30), Bytes(4 << 30));
            let error = DeviceError::OutOfMemory { bytes, code, available };
            BenchError::of_probe(error, 1024).to_string()
        };
        assert_eq!(
            probe(0),
            "plain loads with 1024 threads, which figures are held against, need 256.000 GiB of memory, and 4.000 \
             GiB are available; lower --threads"
        );
        assert!(probe(12).ends_with("the system did not give it; lower --threads"));
        let (kernel, needs) = ("avx512", "AVX-512");
        let kernel = text(OpenError::Device(DeviceError::KernelUnsupported { kernel, needs }));
        assert!(kernel.starts_with("--kernel avx512 needs AVX-512"), "{kernel}");
        assert!(text(OpenError::Device(DeviceError::BadLayout)).contains("layout"));
    }

    #[test]
    fn long_filters_are_cut() {
        assert_eq!(shown("a\"b"), "\"a\\\"b\"");
        let long = shown(&"é".repeat(100_000));
        assert_eq!(long.chars().count(), SHOWN + 3);
        assert_eq!(shown(&"é".repeat(SHOWN)).chars().count(), SHOWN + 2);
    }
}
