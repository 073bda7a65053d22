//! `kvpool bench`: the kernels' speed beside the memory's.

use std::io::{self, IsTerminal, Write};

use clap::Args;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde::de::value::{Error as ValueError, StrDeserializer};

use super::{CliError, print, table, text_of};
use crate::bench::{self, Measurement, Operation, Options};
use crate::config::{CacheMode, Format, KernelChoice};

/// What to measure, and how long.
#[derive(Debug, Args)]
pub(super) struct BenchArgs {
    /// decode, append or prefill
    #[arg(value_name = "OPERATION", value_parser = operation)]
    operation: Operation,
    /// Print one JSON document instead of a table
    #[arg(long)]
    json: bool,
    /// Only shapes whose name contains this
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,
    /// Seconds for each shape and thread count
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Thread counts, one after the other [default: 1 and one for each core]
    #[arg(long, value_name = "N", value_delimiter = ',')]
    threads: Vec<u32>,
    /// Formats, each in every mode
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_value = "f16,bf16,int8",
          value_parser = named::<Format>)]
    formats: Vec<Format>,
    /// Modes, each in every format
    #[arg(long, value_name = "NAME", value_delimiter = ',',
          default_value = "contiguous,paged,hybrid", value_parser = named::<CacheMode>)]
    modes: Vec<CacheMode>,
    /// Kernels
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = named::<KernelChoice>)]
    kernel: KernelChoice,
    /// MiB that the layers of each variant take at least, so that no cache holds them
    #[arg(long, value_name = "MIB", default_value_t = 512)]
    footprint: u64,
}

#[derive(Serialize)]
struct Results<'a> {
    results: &'a [Measurement],
}

pub(super) fn run(args: &BenchArgs) -> Result<(), CliError> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let mut threads = args.threads.clone();
    if threads.is_empty() {
        threads = vec![1, u32::try_from(cores).unwrap_or(1)];
        threads.dedup();
    }
    let options = Options {
        operation: args.operation,
        filter: args.filter.clone(),
        formats: args.formats.clone(),
        modes: args.modes.clone(),
        kernel: args.kernel,
        threads,
        seconds: args.seconds,
        footprint_bytes: args.footprint << 20,
    };
    let watched = io::stderr().is_terminal();
    let results = bench::run(&options, &mut |measured| {
        if let Some(first) = measured.first().filter(|_| watched) {
            // Only for whoever watches.
            let _ = writeln!(io::stderr(), "{} with {} threads", first.shape, first.threads);
        }
    })?;
    if args.json {
        let text = serde_json::to_string_pretty(&Results { results: &results });
        return print(&format!("{}\n", text.map_err(io::Error::other)?));
    }
    print(&text_of(&as_table(&results)))
}

fn as_table(results: &[Measurement]) -> comfy_table::Table {
    let header = [
        "shape",
        "mode",
        "format",
        "path",
        "threads",
        "median µs",
        "GB/s",
        "DRAM GB/s",
        "of DRAM",
        "GFLOP/s",
    ];
    let mut table = table(&header, 4..10);
    for one in results {
        table.add_row([
            one.shape.clone(),
            one.mode.to_owned(),
            one.format.to_owned(),
            one.path.to_owned(),
            one.threads.to_string(),
            format!("{:.1}", one.median_us),
            format!("{:.1}", one.gbps),
            format!("{:.1}", one.dram_gbps),
            format!("{:.0} %", one.fraction * 100.0),
            format!("{:.0}", one.gflops),
        ]);
    }
    table
}

fn operation(text: &str) -> Result<Operation, String> {
    match text {
        "decode" => Ok(Operation::Decode),
        "append" => Ok(Operation::Append),
        "prefill" => Ok(Operation::Prefill),
        _ => Err("expected decode, append or prefill".to_owned()),
    }
}

/// Reads a name as a configuration file would.
fn named<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    T::deserialize(StrDeserializer::<ValueError>::new(text)).map_err(|error| error.to_string())
}
