//! `kvpool bench`: how fast the device's kernels are, beside what the memory allows, and how fast
//! the manager is.
//!
//! All variants of a shape are open at once and take turns of a few calls, over enough layers that
//! no cache holds what is read; plain loads that read memory take turns with them, so that each
//! figure stands beside the limit of the same seconds on the same machine. Figures are medians. The
//! criterion groups in `benches/` call the same functions.

mod attention;
pub mod capi;
mod cores;
pub mod cost;
mod deviation;
mod dram;
mod error;
mod inputs;
pub mod isolation;
pub mod manager;
pub mod on_demand;

pub use attention::{Operation, Session, Shape, Variant, shapes};
pub use cores::line_ns;
pub use dram::read_gbps;
pub use error::BenchError;

use serde::Serialize;

use crate::config::{CacheMode, Format, KernelChoice};

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Decode, append or prefill.
    pub operation: Operation,
    /// Substring of the shapes' names; empty = all.
    pub filter: String,
    /// Formats, each in every mode.
    pub formats: Vec<Format>,
    /// Modes, each in every format.
    pub modes: Vec<CacheMode>,
    /// Kernels.
    pub kernel: KernelChoice,
    /// Thread counts, one after the other.
    pub threads: Vec<u32>,
    /// Seconds that the calls of one shape and thread count may take together.
    pub seconds: f64,
    /// Bytes that the layers of each variant take at least, so that none stays in a cache; of
    /// prefill an eighth of it.
    pub footprint_bytes: u64,
}

impl Options {
    /// Bytes that the layers of each variant take at least. Prefill computes on each byte for
    /// long; what the caches hold hardly matters.
    #[must_use]
    pub fn layer_bytes(&self) -> u64 {
        self.footprint_bytes / if self.operation == Operation::Prefill { 8 } else { 1 }
    }

    /// Every shape of an operation, one format and mode, on one thread for a second.
    #[must_use]
    pub fn of(operation: Operation, format: Format, mode: CacheMode) -> Self {
        Self {
            operation,
            filter: String::new(),
            formats: vec![format],
            modes: vec![mode],
            kernel: KernelChoice::Auto,
            threads: vec![1],
            seconds: 1.0,
            footprint_bytes: 512 << 20,
        }
    }
}

/// One measured variant.
#[derive(Clone, Debug, Serialize)]
pub struct Measurement {
    /// The shape, such as `decode/32x8x128/1x4096`.
    pub shape: String,
    /// `contiguous`, `paged` or `hybrid`.
    pub mode: &'static str,
    /// `f16`, `int8`, …
    pub format: &'static str,
    /// The kernels, such as `avx512`.
    pub path: &'static str,
    /// Threads that compute.
    pub threads: u32,
    /// Bytes that the layers take, over which the calls go. Less than [`Options::layer_bytes`]
    /// where the most layers and the longest sequence that are measured do not take as much.
    pub footprint_bytes: u64,
    /// Median time of one call for one layer, in microseconds.
    pub median_us: f64,
    /// The fastest call.
    pub min_us: f64,
    /// Bytes of K, V and scales that the call must read (decode, prefill) or write (append) once,
    /// divided by the median time: 10⁹ bytes a second.
    pub gbps: f64,
    /// The speed at which the same number of threads read memory with plain loads, in passes that
    /// took turns with the calls (of append and prefill: after them): the median.
    pub dram_gbps: f64,
    /// The fastest of these passes.
    pub dram_best_gbps: f64,
    /// `gbps / dram_gbps`.
    pub fraction: f64,
    /// Of several threads: [`line_ns`] before and after, which tells on a machine of two cores how
    /// much of the way to memory they share. Figures with another distance are not to be compared.
    pub line_ns: Option<[f64; 2]>,
    /// Multiplications and additions a second, in 10⁹, two for each pair; 0 for append.
    pub gflops: f64,
    /// Calls that the median is over.
    pub calls: usize,
    /// Of attention: how far it is off attention in f64 over the numbers before storage, at most,
    /// as a part of the largest number of the result; over the first and the last new token.
    pub error: Option<f64>,
    /// A hash of the outputs: equal between the modes of one format and shape.
    pub checksum: String,
}

/// Measures everything that the options ask for; `each` hears of every shape as it is done.
///
/// # Errors
/// A filter that no shape's name contains, or a variant that cannot be opened.
pub fn run(
    options: &Options,
    each: &mut dyn FnMut(&[Measurement]),
) -> Result<Vec<Measurement>, BenchError> {
    let mut chosen = shapes(options.operation);
    chosen.retain(|shape| shape.name().contains(&options.filter));
    if chosen.is_empty() {
        let filter = options.filter.clone();
        return Err(BenchError::NoSuchShape { operation: options.operation, filter });
    }
    // Before anything is measured: what is asked for last would lose it.
    for &threads in &options.threads {
        dram::check_memory(threads).map_err(|error| BenchError::of_probe(error, threads))?;
    }
    let mut all = Vec::new();
    for &threads in &options.threads {
        for shape in &chosen {
            let several = threads > 1;
            let line_before = several.then(line_ns).flatten();
            let mut measured = attention::measure(shape, options, threads)?;
            let line_after = several.then(line_ns).flatten();
            let line_ns = line_before.zip(line_after).map(|(before, after)| [before, after]);
            for one in &mut measured {
                one.line_ns = line_ns;
            }
            each(&measured);
            all.extend(measured);
        }
    }
    Ok(all)
}

/// What the processor calls itself; `None` where the system does not say.
#[must_use]
pub fn cpu_name() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}
