//! `kvpool run`.

use std::fmt::Write as _;
use std::path::Path;

use super::progress::Bars;
use super::{CliError, print, table, text_of};
use crate::config::Source;
use crate::job::{self, Report, Run, RunReport, Silent};
use crate::units::{Bytes, grouped};

/// Runs the job of a file and prints what came out.
pub(super) fn run(source: &Source, json: bool, out: Option<&Path>) -> Result<(), CliError> {
    if let Some(folder) = out {
        // Before the work, not after it.
        job::prepare(folder)?;
    }
    let report = match Bars::new() {
        Some(mut bars) => job::run(source, &mut bars)?,
        None => job::run(source, &mut Silent)?,
    };
    print(&if json { job::json(&report) } else { text(&report) })?;
    if let Some(folder) = out {
        job::write(&report, folder)?;
    }
    let mut problems = report.problems();
    problems.extend(report.runs.iter().filter_map(allocated));
    if problems.is_empty() { Ok(()) } else { Err(CliError::Problems(problems)) }
}

/// What breaks the promise that nothing is allocated after open. Only the program itself can say
/// so: elsewhere other threads may allocate.
fn allocated(run: &Run) -> Option<String> {
    let Run::Done(run) = run else { return None };
    match run.allocations_after_open {
        Some(0) => None,
        Some(count) => Some(format!("variant {:?}: {count} allocations after open", run.variant)),
        None => Some(format!("variant {:?}: allocations were not counted", run.variant)),
    }
}

/// The table, and what there is to say below it.
fn text(report: &Report) -> String {
    let header = [
        "variant",
        "pool bytes,\nplanned =\nallocated",
        "peak use",
        "mean\nwaste",
        "tokens/s",
        "step ms\np50 / p99",
        "max\nerror",
        "output checksum",
        "allocs\nafter\nopen",
    ];
    let done: Vec<&RunReport> = (report.runs.iter())
        .filter_map(|run| match run {
            Run::Done(run) => Some(&**run),
            Run::Failed(_) => None,
        })
        .collect();
    let mut text = String::new();
    if !done.is_empty() {
        let mut table = table(&header, 1..header.len());
        for run in &done {
            table.add_row(row(run));
        }
        text = text_of(&table);
        // Writing to a String cannot fail.
        let _ = writeln!(text, "\ncomputed by {}", devices(&done));
    }
    for run in &done {
        let _ = writeln!(text, "{}", sentence(run));
    }
    for comparison in &report.comparisons {
        let _ = writeln!(text, "{comparison}");
    }
    text
}

fn row(run: &RunReport) -> Vec<String> {
    let pool = if run.planned_bytes == run.allocated_bytes {
        run.planned_bytes.to_string()
    } else {
        format!("{} ≠ {}", run.planned_bytes, run.allocated_bytes)
    };
    vec![
        run.variant.clone(),
        pool,
        run.peak_used_bytes.human(),
        Bytes(rounded(run.mean_waste_bytes)).human(),
        grouped(rounded(run.tokens_per_s)),
        format!("{:.2} / {:.2}", run.step_ms_p50, run.step_ms_p99),
        run.max_abs_error.map_or_else(|| "-".to_owned(), |error| format!("{error:.1e}")),
        run.output_checksum.clone(),
        run.allocations_after_open.map_or_else(|| "?".to_owned(), grouped),
    ]
}

/// What computed, each device once.
fn devices(runs: &[&RunReport]) -> String {
    let mut devices: Vec<String> = Vec::new();
    for run in runs {
        let plural = if run.threads == 1 { "" } else { "s" };
        let device = format!("{} with {} thread{plural}", run.device, run.threads);
        if !devices.contains(&device) {
            devices.push(device);
        }
    }
    devices.join(", ")
}

/// What the table has no room for.
fn sentence(run: &RunReport) -> String {
    let mut text = format!(
        "{}: {} requests, {} tokens, {} steps of {:.1} requests, {} outputs checked",
        run.variant,
        grouped(run.requests_completed),
        grouped(run.tokens_appended),
        grouped(run.steps),
        run.mean_running,
        grouped(run.outputs_checked),
    );
    if let (Some(error), Some(limit)) = (run.max_abs_error, run.error_limit) {
        let _ = write!(text, ", error {error:.1e} of {limit} allowed");
    }
    for (count, what) in [
        (run.nonfinite, "elements were NaN or infinite"),
        (run.saturated, "elements were beyond the static scales and cut off"),
    ] {
        if count > 0 {
            let _ = write!(text, "; {} {what}", grouped(count));
        }
    }
    if run.preemptions > 0 {
        let _ = write!(text, "; {} preemptions", grouped(run.preemptions));
    }
    for (count, why) in [
        (run.requests_refused_too_long, "longer than limits.max_seq_len"),
        (run.requests_refused_never_fits, "larger than the whole pool"),
    ] {
        if count > 0 {
            let _ = write!(text, "; {} refused: {why}", grouped(count));
        }
    }
    text
}

/// A number that is not negative, without its fraction.
fn rounded(number: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "not negative, and `as` saturates"
    )]
    let whole = number.round() as u64;
    whole
}
