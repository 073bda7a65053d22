//! The command line.
//!
//! - `kvpool run CONFIG` drives the file's workload through each of its variants; with the feature
//!   `model` it also completes the prompts of a file with `[generate]`.
//! - `kvpool compare CONFIG` runs the workload through each variant, replayed on a simulated clock
//!   or computed, and writes a report; `kvpool merge` puts its shards together.
//! - `kvpool recommend CONFIG` replays candidates, and prints the best settings as a file.
//! - `kvpool plan CONFIG` shows what a file will allocate, and allocates nothing.
//! - `kvpool config CONFIG` prints the settings in force.
//! - `kvpool presets` lists the built-in models.
//! - `kvpool doctor` shows what this build and this machine have: CPU, CUDA, GPUs.
//! - `kvpool bench` measures the kernels beside the speed of the memory, and
//!   `kvpool bench manager` what blocks, prefix index and steps cost.
//! - with the feature `model`, `kvpool generate` writes text with a real model, and
//!   `kvpool quality` measures what each cache format costs in perplexity.
//!
//! Results go to the standard output, errors and progress to the standard error. The exit status
//! is 0 when all is well, 1 when something failed while it ran, 2 for a wrong command line or
//! configuration, and 130 after a second Ctrl-C, which ends a job at once.

mod bench;
mod compare;
mod compare_computed;
#[cfg(feature = "model")]
mod completions;
mod costs;
mod doctor;
#[cfg(feature = "model")]
mod generate;
mod plan;
mod presets;
mod progress;
#[cfg(feature = "model")]
mod quality;
mod recommend;
mod run;
#[cfg(feature = "model")]
mod speed;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, LazyLock, Once};

use clap::{Args, Parser, Subcommand};
use signal_hook::{consts, flag};

use crate::bench::{
    BenchError, capi::CrossingError, isolation::IsolationError, manager::ManagerError,
};
use crate::config::{self, Compute, Format, Source, WorkloadConfig};
use crate::error::{ConfigError, JobError, OpenError, PlanError};
use crate::job::{computed, replay_output};

/// A static pooled KV cache: plan it, run a job through it.
#[derive(Debug, Parser)]
#[command(name = "kvpool", version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// What signals do, for the help of the commands that they do it to.
const INTERRUPTING: &str = "Where --resume goes on, Ctrl-C or SIGTERM keeps what is complete; a second one ends the \
     program at once, and keeps nothing more, as the first one does while the workload or model is loaded.";

#[derive(Debug, Subcommand)]
enum Command {
    /// Drive the file's workload through each of its variants, and check the answers; or have its
    /// model complete the prompts of [generate]
    #[command(after_help = INTERRUPTING)]
    Run {
        #[command(flatten)]
        file: File,
        /// Print one JSON document instead of a table
        #[arg(long)]
        json: bool,
        /// Also write results.json and results.csv into this folder; of [generate], which needs it,
        /// the completions and results.json
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        /// Go on with what the folder has of an interrupted run; only where the file has [generate]
        /// or workload.compute = "none"
        #[arg(long, requires = "out")]
        resume: bool,
    },
    /// Run the file's workload through each of its variants, replayed or computed, and compare them
    #[command(after_help = INTERRUPTING)]
    Compare {
        #[command(flatten)]
        file: File,
        /// Print one JSON document instead of a table
        #[arg(long)]
        json: bool,
        /// Also write results.json, results.csv and report.html into this folder
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        /// Take over what the folder has of the same variants, and run only the others
        #[arg(long, requires = "out")]
        resume: bool,
        /// Run only the K-th of N parts of the variants; `kvpool merge` puts them together
        #[arg(long, value_name = "K/N")]
        shard: Option<Shard>,
    },
    /// Replay candidates for the file's model, memory and workload, and print the best as a file
    Recommend {
        #[command(flatten)]
        file: File,
        /// The formats that may be chosen (default: the file's own)
        #[arg(long, value_delimiter = ',', value_name = "FORMATS", value_parser = bench::named::<Format>)]
        formats: Vec<Format>,
    },
    /// Put the results of shards together, as if the job had run in one piece
    Merge {
        /// The folders that `kvpool compare --shard K/N --out DIR` has written
        #[arg(value_name = "DIR", required = true)]
        shards: Vec<PathBuf>,
        /// Print one JSON document instead of a table
        #[arg(long)]
        json: bool,
        /// Also write results.json, results.csv and report.html into this folder
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
    /// Show what the file will allocate, to the byte; allocates nothing
    Plan {
        #[command(flatten)]
        file: File,
        /// Print one JSON document instead of text
        #[arg(long)]
        json: bool,
    },
    /// Print the settings in force as TOML
    Config {
        #[command(flatten)]
        file: File,
    },
    /// Measure decode attention, append or prefill beside the speed of the memory, or the manager
    Bench(bench::BenchArgs),
    /// Show what this build and this machine have: CPU features, CUDA kernels, driver, GPUs
    Doctor {
        /// Print one JSON document instead of text
        #[arg(long)]
        json: bool,
    },
    /// Write text with the model of model.file
    #[cfg(feature = "model")]
    Generate(generate::GenerateArgs),
    /// Measure what each cache format costs the model of model.file in perplexity
    #[cfg(feature = "model")]
    Quality(quality::QualityArgs),
    /// For programs without the model engine: says how to get one with it
    #[cfg(not(feature = "model"))]
    #[command(hide = true, aliases = ["quality"])]
    Generate {
        #[arg(allow_hyphen_values = true, trailing_var_arg = true, hide = true)]
        rest: Vec<String>,
    },
    /// List the built-in models
    Presets {
        /// Print one JSON document instead of a table
        #[arg(long)]
        json: bool,
    },
}

/// A configuration file and what the command line changes in it.
#[derive(Debug, Args)]
struct File {
    /// The configuration file
    #[arg(value_name = "CONFIG")]
    path: PathBuf,
    /// Replace a setting, such as --set limits.max_seqs=8, or take it out with an empty value; can
    /// be given more than once
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
}

/// One of several parts of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shard {
    /// Which, counted from 1.
    part: usize,
    /// Of how many.
    of: usize,
}

impl std::str::FromStr for Shard {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text.split_once('/').and_then(|(part, of)| {
            Some(Self { part: part.trim().parse().ok()?, of: of.trim().parse().ok()? })
        });
        match numbers {
            Some(shard) if (1..=shard.of).contains(&shard.part) => Ok(shard),
            _ => Err("expected K/N with K from 1 to N, such as 2/8".to_owned()),
        }
    }
}

impl File {
    fn load(&self) -> Result<Source, ConfigError> {
        config::load(&self.path, &self.overrides)
    }
}

/// What ends the program early.
#[derive(Debug, thiserror::Error)]
enum CliError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("{0}")]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Job(#[from] JobError),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Manager(#[from] ManagerError),
    #[error(transparent)]
    Bench(#[from] BenchError),
    /// A measurement of isolation.
    #[error(transparent)]
    Isolation(#[from] IsolationError),
    #[error(transparent)]
    Crossing(#[from] CrossingError),
    #[cfg(feature = "model")]
    #[error(transparent)]
    Model(#[from] crate::error::ModelError),
    #[error("the standard output cannot be written: {0}")]
    Output(#[from] io::Error),
    /// The command line and the file do not go together.
    #[error("{0}")]
    Usage(String),
    /// The job ran, and this is not as it must be. A line each.
    #[error("{}", .0.join("\nerror: "))]
    Problems(Vec<String>),
}

impl CliError {
    /// Whether the reader has seen enough (`kvpool presets | head -3`).
    fn is_closed_pipe(&self) -> bool {
        #[cfg(feature = "model")]
        if let Self::Model(crate::error::ModelError::Output(error)) = self {
            return error.kind() == io::ErrorKind::BrokenPipe;
        }
        matches!(self, Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }

    /// Whether the command line or the file is at fault, and not the run.
    fn is_usage(&self) -> bool {
        #[cfg(feature = "model")]
        if let Self::Model(error) = self {
            return error.is_usage();
        }
        matches!(
            self,
            Self::Config(_)
                | Self::Usage(_)
                | Self::Plan(_)
                | Self::Job(
                    JobError::Config(_)
                        | JobError::NoWorkload { .. }
                        | JobError::Generates { .. }
                        | JobError::CpuAlone { .. }
                        | JobError::Computes { .. }
                        | JobError::Merge { .. }
                        | JobError::OtherJob
                )
                | Self::Manager(ManagerError::NoSuchCase { .. })
                | Self::Bench(BenchError::NoSuchShape { .. })
                | Self::Crossing(CrossingError::NoSuchCall { .. })
        )
    }
}

/// Runs the program with the process's arguments.
#[must_use]
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Also --help and --version. When nobody reads it, there is nobody to tell.
            let printed = error.print().map_err(CliError::Output);
            if printed.is_err_and(|error| !error.is_closed_pipe()) {
                return ExitCode::FAILURE;
            }
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    match dispatch(&cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is_closed_pipe() => ExitCode::SUCCESS,
        Err(error) => {
            // If not even this can be written, the status still tells.
            let _ = writeln!(io::stderr().lock(), "error: {error}");
            ExitCode::from(if error.is_usage() { 2 } else { 1 })
        }
    }
}

fn dispatch(command: &Command) -> Result<(), CliError> {
    match command {
        Command::Run { file, json, out, resume } => {
            run_job(&file.load()?, *json, out.as_deref(), *resume)
        }
        Command::Compare { file, json, out, resume, shard } => {
            let (out, resume) = (out.as_deref(), *resume);
            let options =
                compare::Options { json: *json, out, resume, shard: *shard, merged: false };
            compare::run(&file.load()?, &options)
        }
        Command::Recommend { file, formats } => recommend::run(&file.load()?, formats),
        Command::Merge { shards, json, out } => merge(shards, *json, out.as_deref()),
        Command::Plan { file, json } => plan::run(&file.load()?, *json),
        Command::Config { file } => print_config(&file.load()?),
        Command::Bench(args) => bench::run(args),
        #[cfg(feature = "model")]
        Command::Generate(args) => generate::run(args),
        #[cfg(not(feature = "model"))]
        Command::Generate { .. } => Err(CliError::Usage(format!("this command {NEEDS_MODEL}"))),
        #[cfg(feature = "model")]
        Command::Quality(args) => quality::run(args),
        Command::Doctor { json } => doctor::run(*json),
        Command::Presets { json } => presets::run(*json),
    }
}

/// What there is to say where the model engine is not there.
#[cfg(not(feature = "model"))]
const NEEDS_MODEL: &str =
    "needs the model engine, and this program was built without it; build it with --features model";

/// Runs the job of a file, whichever kind it is.
fn run_job(source: &Source, json: bool, out: Option<&Path>, resume: bool) -> Result<(), CliError> {
    if source.config.generate.is_some() {
        #[cfg(feature = "model")]
        return completions::run(source, json, out, resume);
        #[cfg(not(feature = "model"))]
        return Err(CliError::Usage(format!("[generate] {NEEDS_MODEL}")));
    }
    let replays = |workload: &WorkloadConfig| workload.compute == Compute::None;
    if source.config.workload.as_ref().is_some_and(replays) {
        let options = compare::Options { json, out, resume, ..Default::default() };
        return compare::run(source, &options);
    }
    if resume {
        return Err(CliError::Usage(
            "--resume is for files with [generate] or workload.compute = \"none\"; a job that \
             computes attention runs as a whole"
                .to_owned(),
        ));
    }
    run::run(source, json, out)
}

/// The status of a program that was ended by Ctrl-C, as shells have it.
const INTERRUPTED: i32 = 130;

/// Is set when the user presses Ctrl-C or the system asks the process to end, once [`catch_signals`]
/// was called.
fn stop_flag() -> &'static Arc<AtomicBool> {
    static STOP: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);
    &STOP
}

/// From the first call on, all that these signals do is to set [`stop_flag`]; the second time they
/// end the program, whatever it is doing. A signal that was ignored when the program began stays
/// ignored.
///
/// This is for when there is something to keep, and somebody who looks at the flag: while a trace or
/// a model is loaded, which may take long, a signal ends the program as it does any other.
///
/// No thread waits for signals: one that came to run late would allocate while a job is measured.
fn catch_signals() {
    static CAUGHT: Once = Once::new();
    CAUGHT.call_once(|| {
        let stop = stop_flag();
        let ignored = ignored_signals();
        let is_ignored = |signal: i32| ignored.is_some_and(|mask| mask >> (signal - 1) & 1 == 1);
        for signal in [consts::SIGINT, consts::SIGTERM] {
            if is_ignored(signal) {
                continue;
            }
            // In this order, so that the first one does not end the program. Where signals cannot
            // be caught, the default does.
            let _ = flag::register_conditional_shutdown(signal, INTERRUPTED, Arc::clone(stop));
            let _ = flag::register(signal, Arc::clone(stop));
        }
        // A terminal that is closed may send this one twice. Where the system does not say whether
        // `nohup` is to shield the program from it, it stays as it is.
        #[cfg(unix)]
        if ignored.is_some() && !is_ignored(consts::SIGHUP) {
            let _ = flag::register(consts::SIGHUP, Arc::clone(stop));
        }
    });
}

/// The signals that this process was started to ignore, a bit each, from 1 on: whoever started it
/// (`nohup`, a shell that runs it in the background) wants it so, and a handler would undo that.
/// `None` where the system does not say.
fn ignored_signals() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
    u64::from_str_radix(mask.trim(), 16).ok()
}

/// Reads the results of shards and shows them as one.
fn merge(shards: &[PathBuf], json: bool, out: Option<&Path>) -> Result<(), CliError> {
    let options = compare::Options { json, out, merged: true, ..Default::default() };
    if let Some(file) = shards.iter().find(|shard| shard.is_file()) {
        let folder = file.parent().filter(|parent| !parent.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        let (file, folder) = (file.display(), folder.display());
        let problem = format!("{file} is a file; give the folder that it is in, {folder}");
        return Err(JobError::Merge { problem }.into());
    }
    // What has no results is told as that, below.
    let there = || shards.iter().filter(|folder| folder.join("results.json").is_file());
    let kinds = there().map(|folder| computed::is_in(folder));
    let (computed, replayed): (Vec<_>, Vec<_>) = there().zip(kinds).partition(|(_, is)| *is);
    if let (Some((one, _)), Some((other, _))) = (computed.first(), replayed.first()) {
        let (one, other) = (one.display(), other.display());
        let problem = format!("{one} has the results of a job that computes, and {other} has not");
        return Err(JobError::Merge { problem }.into());
    }
    if !computed.is_empty() {
        let whole = computed::merge(read_all(shards, computed::read)?)?;
        return compare_computed::show(&whole, &options);
    }
    let whole = replay_output::merge(read_all(shards, replay_output::read)?)?;
    compare::show(&whole, &options)
}

/// Reads the results of every shard.
fn read_all<T>(
    shards: &[PathBuf],
    read: fn(&Path) -> Result<Option<T>, JobError>,
) -> Result<Vec<T>, CliError> {
    let one = |folder: &PathBuf| {
        read(folder)?.ok_or_else(|| {
            let problem = format!("{} has no results.json", folder.display());
            JobError::Merge { problem }.into()
        })
    };
    shards.iter().map(one).collect()
}

fn print_config(source: &Source) -> Result<(), CliError> {
    let text = toml::to_string_pretty(&source.config).map_err(io::Error::other)?;
    print(&text)
}

/// Writes a text to the standard output.
fn print(text: &str) -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Ends a job of which the files are written, or not: prints its document, warns, and says what is
/// not as it must be. Each of these is done whatever became of those before it: the result of hours
/// goes to whoever can take it, and no closed pipe makes a success of a problem.
fn conclude(
    written: Result<(), CliError>,
    document: &str,
    warnings: impl Iterator<Item = String>,
    mut problems: Vec<String>,
) -> Result<(), CliError> {
    let printed = print(document);
    for warning in warnings {
        // If this cannot be written, the report still says it.
        let _ = writeln!(io::stderr(), "warning: {warning}");
    }
    let told = |ended: &Result<(), CliError>| match ended {
        Err(error) if !error.is_closed_pipe() => Some(error.to_string()),
        _ => None,
    };
    let failed: Vec<String> = [&written, &printed].into_iter().filter_map(told).collect();
    if problems.is_empty() && failed.len() < 2 {
        return written.and(printed);
    }
    problems.extend(failed);
    Err(CliError::Problems(problems))
}

/// A table without lines, 120 columns wide at most. Columns named in `right` are numbers.
fn table(header: &[&str], right: std::ops::Range<usize>) -> comfy_table::Table {
    let mut table = comfy_table::Table::new();
    table
        .load_preset(comfy_table::presets::NOTHING)
        .set_content_arrangement(comfy_table::ContentArrangement::Dynamic)
        .set_width(120)
        .set_header(header);
    let last = header.len().saturating_sub(1);
    for (index, column) in table.column_iter_mut().enumerate() {
        // Behind the last one stands nothing.
        column.set_padding((0, if index == last { 0 } else { 2 }));
        if right.contains(&index) {
            column.set_cell_alignment(comfy_table::CellAlignment::Right);
        }
    }
    table
}

/// The most columns of a name that are kept in one piece.
const NAME_WIDTH: usize = 32;

/// Keeps the names in the first column of a table in one piece, as far as there is room for them.
fn keep_names<'a>(table: &mut comfy_table::Table, names: impl Iterator<Item = &'a str>) {
    let longest = names.map(|name| name.chars().count()).max().unwrap_or(0).min(NAME_WIDTH);
    // And two for the padding.
    let width = comfy_table::Width::Fixed(u16::try_from(longest + 2).unwrap_or(u16::MAX));
    if let Some(column) = table.column_mut(0) {
        column.set_constraint(comfy_table::ColumnConstraint::LowerBoundary(width));
    }
}

/// The table's text without the blanks at the ends of its lines.
fn text_of(table: &comfy_table::Table) -> String {
    table.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn overrides_repeat() {
        let cli = Cli::try_parse_from(["kvpool", "plan", "a.toml", "--set", "a=1", "--set", "b=2"]);
        let Ok(Cli { command: Command::Plan { file, json: false } }) = cli else {
            panic!("{cli:?}")
        };
        assert_eq!(file.overrides, ["a=1", "b=2"]);
    }
}
