//! `kvpool bench`: the kernels' speed beside the memory's, and the manager's.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};

use clap::{Args, Subcommand, value_parser};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde::de::value::{Error as ValueError, StrDeserializer};

use super::{CliError, print, table, text_of};
use crate::bench::{self, Measurement, Operation, Options, capi, isolation, manager};
use crate::config::{CacheMode, Format, KernelChoice};
use crate::units::Bytes;

/// What to measure, and in what form it is printed.
#[derive(Debug, Args)]
#[command(
    subcommand_value_name = "decode|append|prefill|cores|manager|capi|cost|on-demand|salt|scrub"
)]
pub(super) struct BenchArgs {
    #[command(subcommand)]
    what: What,
    /// Print one JSON document instead of a table
    #[arg(long, global = true)]
    json: bool,
    /// Only shapes or cases whose name contains this
    #[arg(long, value_name = "TEXT", default_value = "", global = true)]
    filter: String,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Measure attention of one new token of each sequence
    Decode(KernelArgs),
    /// Measure storing K and V of new tokens
    Append(KernelArgs),
    /// Measure attention of many new tokens
    Prefill(KernelArgs),
    /// Measure how long a cache line takes between two cores: those of a chiplet share its way to
    /// memory
    Cores,
    /// Measure the manager alone: blocks, prefix index, steps; no K and V
    #[command(after_help = cases())]
    Manager(ManagerArgs),
    /// Measure the C interface beside the Rust API: reserve and commit of 256 sequences
    Capi(ManagerArgs),
    /// Measure the cache's part of a file's [cost] on this machine's CPU, and print it as TOML
    Cost(super::File),
    /// Measure steps over memory that is there beside steps that allocate it: time, page faults
    OnDemand(super::File),
    /// Measure whether the clock tells another tenant's salted prompt from a miss
    Salt(ManagerArgs),
    /// Measure what it costs to zero released bytes (pool.scrub), beside sequences without K and V
    Scrub(ManagerArgs),
    /// Measure how fast the model of model.file reads and writes, and how much of that is attention
    #[cfg(feature = "model")]
    Model(super::speed::SpeedArgs),
}

/// How to measure the manager, or the C interface.
#[derive(Debug, Args)]
struct ManagerArgs {
    /// Few rounds: shows that everything works, with rough figures
    #[arg(long)]
    quick: bool,
}

/// Which variants to measure, and how long.
#[derive(Debug, Args)]
struct KernelArgs {
    /// Seconds for each shape and thread count, above 0
    #[arg(long, default_value_t = 2.0, value_parser = seconds)]
    seconds: f64,
    /// Thread counts, one after the other [default: 1 and one for each core]
    #[arg(long, value_name = "N", value_delimiter = ',',
          value_parser = value_parser!(u32).range(1..=1024))]
    threads: Vec<u32>,
    /// Formats, each in every mode
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_value = "f16,bf16,int8",
          value_parser = named::<Format>)]
    formats: Vec<Format>,
    /// Modes, each in every format
    #[arg(long, value_name = "NAME", value_delimiter = ',',
          default_value = "contiguous,paged,hybrid", value_parser = measured_mode)]
    modes: Vec<CacheMode>,
    /// Kernels
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = named::<KernelChoice>)]
    kernel: KernelChoice,
    /// MiB that the layers of each variant take at least, so that no cache holds them; of prefill
    /// an eighth of it
    #[arg(long, value_name = "MIB", default_value_t = 512,
          value_parser = value_parser!(u64).range(1..=FOOTPRINT_MIB_MAX))]
    footprint: u64,
}

/// The largest footprint: 16 TiB.
const FOOTPRINT_MIB_MAX: u64 = 1 << 24;

/// What `--json` prints.
#[derive(Serialize)]
struct Document<'a, T> {
    /// The version of this program.
    version: &'static str,
    /// What the processor calls itself; `null` where the system does not say.
    cpu: Option<String>,
    /// Of the manager: whether the figures are rough.
    #[serde(skip_serializing_if = "Option::is_none")]
    quick: Option<bool>,
    results: &'a [T],
}

pub(super) fn run(args: &BenchArgs) -> Result<(), CliError> {
    let has_names = matches!(
        args.what,
        What::Decode(_) | What::Append(_) | What::Prefill(_) | What::Manager(_) | What::Capi(_)
    );
    if !has_names && !args.filter.is_empty() {
        return Err(CliError::Usage(
            "--filter chooses shapes of decode, append and prefill, and cases of manager and capi; this one has \
             neither: leave it out"
                .to_owned(),
        ));
    }
    match &args.what {
        What::Decode(kernels) => run_kernels(args, kernels, Operation::Decode),
        What::Append(kernels) => run_kernels(args, kernels, Operation::Append),
        What::Prefill(kernels) => run_kernels(args, kernels, Operation::Prefill),
        What::Cores => run_cores(args),
        What::Manager(manager) => run_manager(args, manager),
        What::Capi(options) => run_capi(args, options.quick),
        What::Cost(file) => super::costs::cost(file, args.json),
        What::OnDemand(file) => super::costs::on_demand(file, args.json),
        What::Salt(options) => run_salt(args, options.quick),
        What::Scrub(options) => run_scrub(args, options.quick),
        #[cfg(feature = "model")]
        What::Model(speed) => super::speed::run(speed, args.json),
    }
}

/// The cases of the manager, a line each.
fn cases() -> String {
    let width = manager::CASES.iter().map(|case| case.name.len()).max().unwrap_or(0);
    let mut text = "Cases, and the nanoseconds of what they are:\n".to_owned();
    for case in &manager::CASES {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "  {:width$}  per {}: {}", case.name, case.unit, case.what);
    }
    text
}

fn run_manager(args: &BenchArgs, manager: &ManagerArgs) -> Result<(), CliError> {
    let options = if manager.quick { manager::Options::quick() } else { manager::Options::full() };
    let options = manager::Options { filter: args.filter.clone(), ..options };
    let bar = io::stderr().is_terminal().then(|| ProgressBar::new(1));
    let results = manager::run(&options, &mut |note| show(note, bar.as_ref()));
    if let Some(bar) = &bar {
        bar.finish_and_clear();
    }
    let results = results?;
    if args.json {
        return print_json(&results, Some(manager.quick));
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

/// What `bench cores` finds.
#[derive(Serialize)]
struct Cores {
    line_ns: Option<f64>,
}

fn run_cores(args: &BenchArgs) -> Result<(), CliError> {
    let line_ns = bench::line_ns();
    if args.json {
        return print_json(&[Cores { line_ns }], None);
    }
    print(&line_ns.map_or_else(
        || "one core, or too busy to tell\n".to_owned(),
        |ns| format!("a cache line takes {ns:.0} ns from one core to another and back\n"),
    ))
}

fn run_capi(args: &BenchArgs, quick: bool) -> Result<(), CliError> {
    let results = capi::run(quick, &args.filter)?;
    if args.json {
        return print_json(&results, Some(quick));
    }
    let mut table = table(&["call", "Rust ns", "C ns", "C / Rust"], 1..4);
    for one in &results {
        table.add_row([
            one.name.to_owned(),
            format!("{:.0}", one.rust_ns),
            format!("{:.0}", one.c_ns),
            format!("{:.3}", one.ratio),
        ]);
    }
    print(&text_of(&table))
}

fn run_salt(args: &BenchArgs, quick: bool) -> Result<(), CliError> {
    let results = isolation::salt(quick)?;
    if args.json {
        return print_json(&results, Some(quick));
    }
    let header = ["mode", "case", "ns p10/p50/p90", "a miss", "t", "calls"];
    let mut table = table(&header, 2..6);
    let three = |ns: &[f64; 3]| format!("{:.0} / {:.0} / {:.0}", ns[0], ns[1], ns[2]);
    for one in &results {
        table.add_row([
            one.mode.to_owned(),
            one.case.to_owned(),
            three(&one.case_ns),
            three(&one.miss_ns),
            format!("{:.1}", one.t),
            one.calls.to_string(),
        ]);
    }
    print(&text_of(&table))
}

fn run_scrub(args: &BenchArgs, quick: bool) -> Result<(), CliError> {
    let results = isolation::scrub(quick)?;
    if args.json {
        return print_json(&results, Some(quick));
    }
    let header = ["mode", "pool.scrub", "us a sequence\nwithout K, V", "MiB zeroed", "GB/s"];
    let mut table = table(&header, 2..5);
    for one in &results {
        table.add_row([
            one.mode.to_owned(),
            one.scrub.to_owned(),
            format!("{:.0}", one.sequence_us),
            format!("{:.1}", one.zeroed_bytes / f64::from(1 << 20)),
            format!("{:.1}", one.zeroed_gbps),
        ]);
    }
    print(&text_of(&table))
}

/// Shows how far a run of the manager is, to whoever watches. What is left out is said to
/// everybody.
fn show(note: &manager::Note, bar: Option<&ProgressBar>) {
    let style = |bar: &ProgressBar, template: &str| {
        // The templates are ours; a bar in the default style would still be a bar.
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
    };
    match (note, bar) {
        (manager::Note::LeftOut { .. }, None) => {
            let _ = writeln!(io::stderr(), "{note}");
        }
        (manager::Note::LeftOut { .. }, Some(bar)) => bar.println(note.to_string()),
        (_, None) => {}
        (manager::Note::Opening(name), Some(bar)) => {
            style(bar, "filling the pool of {msg} [{bar:30}] {human_pos} of {human_len} blocks");
            bar.reset();
            bar.set_message(*name);
        }
        (manager::Note::Filling { done, of, .. }, Some(bar)) => {
            bar.set_length((*of).into());
            bar.set_position((*done).into());
        }
        (manager::Note::Round { round, of }, Some(bar)) => {
            style(bar, "measuring [{bar:30}] round {human_pos} of {human_len}");
            bar.set_length((*of).into());
            bar.set_position((*round).into());
        }
    }
}

fn print_json<T: Serialize>(results: &[T], quick: Option<bool>) -> Result<(), CliError> {
    let version = env!("CARGO_PKG_VERSION");
    let document = Document { version, cpu: bench::cpu_name(), quick, results };
    let text = serde_json::to_string_pretty(&document);
    print(&format!("{}\n", text.map_err(io::Error::other)?))
}

fn run_kernels(
    args: &BenchArgs,
    kernels: &KernelArgs,
    operation: Operation,
) -> Result<(), CliError> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let mut threads = kernels.threads.clone();
    if threads.is_empty() {
        threads = vec![1, u32::try_from(cores).unwrap_or(1)];
        threads.dedup();
    }
    let options = Options {
        operation,
        filter: args.filter.clone(),
        formats: kernels.formats.clone(),
        modes: kernels.modes.clone(),
        kernel: kernels.kernel,
        threads,
        seconds: kernels.seconds,
        footprint_bytes: kernels.footprint << 20,
    };
    let watched = io::stderr().is_terminal();
    let results = bench::run(&options, &mut |measured| {
        if let Some(first) = measured.first().filter(|_| watched) {
            // Only for whoever watches.
            let _ = writeln!(io::stderr(), "{} with {} threads", first.shape, first.threads);
        }
    })?;
    if args.json {
        return print_json(&results, None);
    }
    print(&(text_of(&as_table(&results)) + &smaller(&results, options.layer_bytes())))
}

/// Which variants take less than was asked for: there are no more layers and no longer sequences
/// than these.
fn smaller(results: &[Measurement], asked: u64) -> String {
    let mut text = String::new();
    for one in results {
        // A whole number of tokens is a little less.
        if one.footprint_bytes < asked / 10 * 9 {
            let (shape, mode, format) = (&one.shape, one.mode, one.format);
            let [took, asked] = [one.footprint_bytes, asked].map(|bytes| Bytes(bytes).human());
            // Writing to a String cannot fail.
            let _ = writeln!(
                text,
                "{shape}, {mode} in {format}: its layers take {took} at most, less than the {asked} asked for"
            );
        }
    }
    text
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
        "DRAM",
        "of DRAM",
        "GFLOP/s",
    ];
    let mut table = table(&header, 4..10);
    // Names of shapes stay in one piece, also beside a distance of cores that moved.
    table.set_width(140);
    for one in results {
        table.add_row([
            one.shape.clone(),
            one.mode.to_owned(),
            one.format.to_owned(),
            one.path.to_owned(),
            threads(one),
            format!("{:.1}", one.median_us),
            format!("{:.1}", one.gbps),
            format!("{:.1}", one.dram_gbps),
            format!("{:.0} %", one.fraction * 100.0),
            format!("{:.0}", one.gflops),
        ]);
    }
    table
}

/// How many threads; of several, how far from each other before and after, or once where that is
/// alike.
fn threads(one: &Measurement) -> String {
    let Some([before, after]) = one.line_ns else { return one.threads.to_string() };
    let (least, most) = (before.min(after), before.max(after));
    if most < 1.5 * least {
        format!("{}, {least:.0} ns", one.threads)
    } else {
        format!("{}, {before:.0}-{after:.0} ns", one.threads)
    }
}

/// Reads a time that ends.
fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds.is_finite() && seconds > 0.0 => Ok(seconds),
        _ => Err("expected a finite number of seconds above 0, such as 0.5".to_owned()),
    }
}

/// Reads the name of a mode that computes.
fn measured_mode(text: &str) -> Result<CacheMode, String> {
    match named(text)? {
        CacheMode::Dynamic => {
            Err("\"dynamic\" is a baseline of replays, which computes nothing; expected \
                                   \"contiguous\", \"paged\" or \"hybrid\""
                .to_owned())
        }
        mode => Ok(mode),
    }
}

/// Reads a name as a configuration file would.
pub(super) fn named<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    T::deserialize(StrDeserializer::<ValueError>::new(text)).map_err(|error| error.to_string())
}
