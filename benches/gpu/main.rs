//! The CUDA device's speed: `benches/gpu.sh` builds and calls this.
//!
//! Everything is timed with the GPU's own events. Beside each figure stands what fraction it is of
//! a copy from device memory to device memory in the same run, whose bytes count twice: read and
//! written. First the answers are held against the CPU's reference, and bit for bit the three modes
//! against each other, and a row alone against the same row among others.
//!
//! `--tiny` takes sizes that the emulated driver of `csrc/emulator` gets through in seconds; the
//! figures then mean nothing, and the report says so.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal")]
#![allow(clippy::unwrap_used, reason = "what goes wrong ends the benchmark")]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "figures for people"
)]

mod answers;
mod cases;
mod driver;

use std::path::Path;

use cases::{Case, Operation, Shape};
use driver::{Memory, Stream};
use kvpool::config::{CacheMode, Format};
use serde_json::{Value, json};

/// How much is measured.
struct Sizes {
    tiny: bool,
    /// Bytes of the copy that everything is compared with.
    copy_bytes: usize,
    /// Bytes of K and V that a shape's layers take together at least, so that no cache holds them.
    footprint: u64,
    /// Times that each figure is the median of.
    rounds: usize,
}

impl Sizes {
    fn new(tiny: bool) -> Self {
        if tiny {
            Self { tiny, copy_bytes: 1 << 20, footprint: 0, rounds: 2 }
        } else {
            Self { tiny, copy_bytes: 1 << 30, footprint: 1 << 30, rounds: 20 }
        }
    }

    /// All shapes of the benchmark.
    fn shapes(&self) -> Vec<Shape> {
        let shape = |operation, batch, context, rows, group| {
            let kv_heads = if self.tiny { 2 } else { 8 };
            Shape { operation, batch, context, rows, kv_heads, group }
        };
        let (batches, contexts, groups): (&[u32], &[u32], &[u32]) = if self.tiny {
            (&[1, 3], &[40, 600], &[1, 4])
        } else {
            (&[1, 16, 64], &[1 << 10, 4 << 10, 32 << 10], &[1, 4, 8])
        };
        let mut all = Vec::new();
        for &group in groups {
            for &context in contexts {
                for &batch in batches {
                    all.push(shape(Operation::Decode, batch, context, 1, group));
                }
            }
        }
        let (short, long) = if self.tiny { (4, 40) } else { (64, 4096) };
        for rows in [1, short, long] {
            all.push(shape(Operation::Append, 1, rows, rows, 1));
        }
        let (chunk, behind) = if self.tiny { (24, 40) } else { (512, 4096) };
        for context in [chunk, behind + chunk] {
            all.push(shape(Operation::Prefill, 1, context, chunk, 4));
        }
        for pairs in if self.tiny { [1, 3] } else { [1, 64] } {
            all.push(shape(Operation::Copy, pairs, 64, 64, 1));
        }
        all
    }
}

/// The median of some times.
fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Bytes a second, read and written, of a copy in device memory, in 10⁹.
fn copy_rate(stream: &Stream, sizes: &Sizes) -> f64 {
    let (from, to) = (Memory::new(sizes.copy_bytes), Memory::new(sizes.copy_bytes));
    let copy = || stream.copy(&to, &from, sizes.copy_bytes);
    stream.time(copy);
    let times = (0..sizes.rounds).map(|_| stream.time(copy)).collect();
    2.0 * sizes.copy_bytes as f64 / median(times) / 1e3
}

/// One shape in one format and mode; gives what the report says of it.
fn measure(
    shape: &Shape,
    format: Format,
    mode: CacheMode,
    stream: &Stream,
    sizes: &Sizes,
    copy_gbps: f64,
) -> Result<Value, String> {
    let mut case = Case::open(shape, format, mode, stream, sizes.footprint)?;
    case.time(stream)?;
    let times = (0..sizes.rounds).map(|_| case.time(stream)).collect::<Result<Vec<_>, _>>()?;
    let us = median(times);
    let gbps = case.bytes() / us / 1e3;
    let name = format!("{} {} {}", shape.name(), format.name(), mode.name());
    println!(
        "{name:<58} {us:>10.1} us {gbps:>8.1} GB/s {:>6.3} of a copy {:>8.1} TFLOP/s",
        gbps / copy_gbps,
        shape.flops() / us / 1e6
    );
    Ok(json!({
        "shape": shape.name(),
        "format": format.name(),
        "mode": mode.name(),
        "microseconds": us,
        "gbps": gbps,
        "fraction_of_copy": gbps / copy_gbps,
        "tflops": shape.flops() / us / 1e6,
    }))
}

/// What was asked for on the command line.
struct Asked {
    tiny: bool,
    filter: String,
    out: Option<String>,
}

fn asked() -> Asked {
    let mut asked = Asked { tiny: false, filter: String::new(), out: None };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().unwrap_or_else(|| usage(&argument));
        match argument.as_str() {
            "--tiny" => asked.tiny = true,
            "--filter" => asked.filter = value(),
            "--out" => asked.out = Some(value()),
            // What `cargo bench` adds.
            "--bench" => {}
            _ => usage(&argument),
        }
    }
    asked
}

fn usage(argument: &str) -> ! {
    eprintln!("gpu: {argument:?}; expected [--tiny] [--filter TEXT] [--out FILE.json]");
    std::process::exit(2);
}

fn main() {
    let Asked { tiny, filter, out } = asked();
    let sizes = Sizes::new(tiny);
    // Says what is missing, before any call that needs the driver.
    if let Err(error) = kvpool::device::cuda::CudaGpu::find(0) {
        eprintln!("gpu: {error}");
        std::process::exit(3);
    }
    driver::enter(0);
    let report = serde_json::to_value(kvpool::device::cuda::report()).unwrap();
    let (gpu, emulated) = (&report["gpus"][0], &report["driver"]["emulated"]);
    println!("{}; {} bytes free", gpu["name"], driver::free_bytes());
    if *emulated == true {
        println!("*** EMULATED: what follows are no figures of any GPU ***");
    }
    let mut checks = answers::check_answers(tiny);
    checks.extend(answers::check_rows_alone(tiny));
    for line in &checks {
        println!("{line}");
    }
    let stream = Stream::new();
    let copy_gbps = copy_rate(&stream, &sizes);
    println!("a copy from device to device moves {copy_gbps:.1} GB/s, read and written");
    let mut rows = Vec::new();
    for shape in sizes.shapes().iter().filter(|shape| shape.name().contains(&filter)) {
        for format in [Format::F16, Format::Int8] {
            for mode in [CacheMode::Contiguous, CacheMode::Paged, CacheMode::Hybrid] {
                match measure(shape, format, mode, &stream, &sizes, copy_gbps) {
                    Ok(row) => rows.push(row),
                    Err(why) => {
                        println!(
                            "{} {} {}: skipped: {why}",
                            shape.name(),
                            format.name(),
                            mode.name()
                        );
                    }
                }
            }
        }
    }
    let after = copy_rate(&stream, &sizes);
    println!("a copy moves {after:.1} GB/s at the end");
    let document = json!({
        "gpu": gpu,
        "emulated": emulated,
        "copy_gbps": copy_gbps,
        "copy_gbps_at_the_end": after,
        "checks": checks,
        "measurements": rows,
    });
    if let Some(out) = out {
        std::fs::write(Path::new(&out), format!("{document:#}\n")).unwrap();
        println!("written to {out}");
    }
}
