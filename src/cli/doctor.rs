//! `kvpool doctor`: what this build and this machine have.

use std::fmt::Write as _;
use std::io;

use serde::Serialize;

use super::{CliError, print};
use crate::config::KernelChoice;
use crate::device::cpu::{available_memory, features, kernel_name, num_threads};
use crate::device::cuda::{Build, CudaReport, GpuReport, report};
use crate::units::Bytes;

/// Everything that is looked at.
#[derive(Serialize)]
struct Document {
    version: &'static str,
    cpu: Cpu,
    cuda: CudaReport,
}

/// The host.
#[derive(Serialize)]
struct Cpu {
    /// The kernels that `device.kernel = "auto"` chooses.
    kernel: &'static str,
    /// Instruction sets that the kernels can make use of.
    features: Vec<&'static str>,
    threads: u32,
    available_bytes: Option<Bytes>,
    /// The operating system's setting for transparent huge pages; `None` where it tells none.
    huge_pages: Option<String>,
}

/// Prints the report.
pub(super) fn run(json: bool) -> Result<(), CliError> {
    let document = Document {
        version: env!("CARGO_PKG_VERSION"),
        cpu: Cpu {
            kernel: kernel_name(KernelChoice::Auto).unwrap_or("none"),
            features: features(),
            threads: num_threads(&Default::default()),
            available_bytes: available_memory(),
            huge_pages: huge_pages(),
        },
        cuda: report(),
    };
    if json {
        let mut text = serde_json::to_string_pretty(&document).map_err(io::Error::other)?;
        text.push('\n');
        return print(&text);
    }
    print(&text(&document))
}

/// The word in brackets of `always [madvise] never`.
fn huge_pages() -> Option<String> {
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok()?;
    let chosen = setting.split_once('[')?.1.split_once(']')?.0;
    Some(chosen.to_owned())
}

fn text(document: &Document) -> String {
    let Document { version, cpu, cuda } = document;
    let mut text = format!("kvpool      {version}\n");
    // Writing to a String cannot fail.
    let _ = writeln!(text, "cpu         {} threads, kernels {}", cpu.threads, cpu.kernel);
    let _ = writeln!(text, "            has {}", words(&cpu.features));
    if let Some(bytes) = cpu.available_bytes {
        let _ = writeln!(text, "            {} of memory available", bytes.human());
    }
    let pages = cpu.huge_pages.as_deref().unwrap_or("not known");
    let _ = writeln!(text, "            huge pages: {pages}");
    cuda_text(&mut text, cuda);
    text
}

fn words(list: &[&str]) -> String {
    if list.is_empty() { "nothing beyond the baseline".to_owned() } else { list.join(", ") }
}

fn cuda_text(text: &mut String, cuda: &CudaReport) {
    if cuda.driver.as_ref().is_some_and(|driver| driver.emulated) {
        text.push_str(
            "\n*** EMULATED: libcuda is kvpool's stand-in for tests. Its kernels run on the CPU, slowly. ***\n\n",
        );
    }
    match cuda.build {
        Build::With { nvcc, through, version: (major, minor), .. } => {
            let _ = writeln!(text, "cuda build  nvcc {major}.{minor}, {nvcc} (through {through})");
            let images: Vec<&str> = cuda.images.iter().map(|(name, _)| *name).collect();
            let bytes = Bytes(cuda.images.iter().map(|(_, bytes)| bytes).sum());
            let archs = cuda.architectures();
            let _ =
                writeln!(text, "            for {archs}: {}, {}", words(&images), bytes.human());
        }
        Build::Without(why) => {
            let _ = writeln!(text, "cuda build  without kernels: {why}");
        }
    }
    if let Some(driver) = &cuda.driver {
        let (major, minor) = driver.version;
        let name = if driver.emulated { "EMULATED, " } else { "" };
        let _ = writeln!(text, "cuda driver {name}CUDA {major}.{minor}");
    }
    if let Some(problem) = &cuda.driver_problem {
        let _ = writeln!(text, "cuda driver {problem}");
    }
    for gpu in &cuda.gpus {
        gpu_text(text, gpu);
    }
    if cuda.driver.is_some() && cuda.gpus.is_empty() {
        let _ = writeln!(text, "gpus        none");
    }
}

fn gpu_text(text: &mut String, gpu: &GpuReport) {
    let GpuReport { ordinal, name, capability: (major, minor), multiprocessors, .. } = gpu;
    let _ = writeln!(
        text,
        "gpu {ordinal}       {name}, compute capability {major}.{minor}, {multiprocessors} multiprocessors"
    );
    let free = gpu.free_bytes.map_or("unknown".to_owned(), Bytes::human);
    let _ = writeln!(text, "            {} of memory, {free} free", gpu.memory_bytes.human());
    if let Some(problem) = &gpu.problem {
        let _ = writeln!(text, "            cannot be used: {problem}");
    }
}
