//! `kvpool bench`: the kernels' speed beside the memory's, and the manager's.

use std::io::{self, IsTerminal, Write};

use clap::{Args, Subcommand};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde::de::value::{Error as ValueError, StrDeserializer};

use super::{CliError, print, table, text_of};
use crate::bench::{self, Measurement, Operation, Options, manager};
use crate::config::{CacheMode, Format, KernelChoice};

/// What to measure, and how long.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(super) struct BenchArgs {
    #[command(subcommand)]
    other: Option<Other>,
    #[command(flatten)]
    kernels: KernelArgs,
}

/// What is not a kernel.
#[derive(Debug, Subcommand)]
enum Other {
    /// Measure the manager alone: blocks, prefix index, steps; no K and V
    Manager(ManagerArgs),
}

/// How to measure the manager.
#[derive(Debug, Args)]
struct ManagerArgs {
    /// Print one JSON document instead of a table
    #[arg(long)]
    json: bool,
    /// Few rounds: shows that everything works, with rough figures
    #[arg(long)]
    quick: bool,
    /// Only cases whose name contains this
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,
}

/// Which kernels to measure, and how long.
#[derive(Debug, Args)]
struct KernelArgs {
    /// decode, append or prefill
    #[arg(value_name = "OPERATION", value_parser = operation, required = true)]
    operation: Option<Operation>,
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
struct Results<'a, T> {
    results: &'a [T],
}

pub(super) fn run(args: &BenchArgs) -> Result<(), CliError> {
    match (&args.other, args.kernels.operation) {
        (Some(Other::Manager(args)), _) => run_manager(args),
        (None, Some(operation)) => run_kernels(&args.kernels, operation),
        // The parser asks for one of the two.
        (None, None) => Ok(()),
    }
}

fn run_manager(args: &ManagerArgs) -> Result<(), CliError> {
    let options = if args.quick { manager::Options::quick() } else { manager::Options::full() };
    let options = manager::Options { filter: args.filter.clone(), ..options };
    let watched = io::stderr().is_terminal();
    let results = manager::run(&options, &mut |note| {
        // What is left out is said to everybody, progress only to whoever watches.
        if watched || matches!(note, manager::Note::LeftOut { .. }) {
            let _ = writeln!(io::stderr(), "{note}");
        }
    })?;
    if args.json {
        return print_json(&results);
    }
    let header = ["case", "ns", "per", "allocations"];
    let mut table = table(&header, 1..2);
    for one in &results {
        table.add_row([
            one.name.to_owned(),
            format!("{:.1}", one.ns_per_unit),
            one.unit.to_owned(),
            one.allocations.map_or("not counted".to_owned(), |count| count.to_string()),
        ]);
    }
    print(&text_of(&table))
}

fn print_json<T: Serialize>(results: &[T]) -> Result<(), CliError> {
    let text = serde_json::to_string_pretty(&Results { results });
    print(&format!("{}\n", text.map_err(io::Error::other)?))
}

fn run_kernels(args: &KernelArgs, operation: Operation) -> Result<(), CliError> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let mut threads = args.threads.clone();
    if threads.is_empty() {
        threads = vec![1, u32::try_from(cores).unwrap_or(1)];
        threads.dedup();
    }
    let options = Options {
        operation,
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
        return print_json(&results);
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
        _ => Err("expected decode, append or prefill, or the command manager".to_owned()),
    }
}

/// Reads a name as a configuration file would.
fn named<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    T::deserialize(StrDeserializer::<ValueError>::new(text)).map_err(|error| error.to_string())
}
