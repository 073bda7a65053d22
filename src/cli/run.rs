//! `kvpool run`.

use std::fmt::Write as _;
use std::path::Path;

use super::progress::{Bars, NoBars};
use super::{CliError, conclude, keep_names, table, text_of};
use crate::config::Source;
use crate::job::computed::{ComputeOptions, compute};
use crate::job::report::devices;
use crate::job::{self, Report, Run, RunReport};
use crate::units::{Bytes, counted, grouped};

/// Runs the job of a file and prints what came out.
pub(super) fn run(source: &Source, json: bool, out: Option<&Path>) -> Result<(), CliError> {
    if let Some(folder) = out {
        // Before the work, not after it.
        job::prepare(folder)?;
    }
    let asked = ComputeOptions::default();
    let computed = match Bars::new() {
        Some(mut bars) => compute(source, &asked, &mut bars)?,
        None => compute(source, &asked, &mut NoBars)?,
    };
    let report = computed.report();
    let document = if json { job::json(&report) } else { text(&report) };
    let written = out.map_or(Ok(()), |folder| job::write(&report, folder)).map_err(CliError::from);
    let mut problems = report.problems();
    problems.extend(report.runs.iter().filter_map(allocated));
    let refused = report.runs.iter().filter_map(warning);
    let warnings = computed.workload.warnings().into_iter().chain(refused);
    conclude(written, &document, warnings, problems)
}

/// What a run leaves out: requests that can never run, the first one's reason and what to change.
pub(super) fn warning(run: &Run) -> Option<String> {
    let Run::Done(run) = run else { return None };
    let refused = run.requests_refused_too_long + run.requests_refused_never_fits;
    let first = run.first_refusal.as_ref()?;
    let were = if refused == 1 { "was" } else { "were" };
    let all = counted(run.requests_completed + refused, "request");
    let refused = grouped(refused);
    Some(format!(
        "variant {:?}: {refused} of {all} {were} refused; the first: {first}",
        run.variant
    ))
}

/// What breaks the promise that nothing is allocated after open. Only the program itself can say
/// so: elsewhere other threads may allocate.
pub(super) fn allocated(run: &Run) -> Option<String> {
    let Run::Done(run) = run else { return None };
    match run.allocations_after_open {
        Some(0) => None,
        Some(count) => Some(format!("variant {:?}: {count} allocations after open", run.variant)),
        None => Some(format!("variant {:?}: allocations were not counted", run.variant)),
    }
}

/// The table, and what there is to say below it.
fn text(report: &Report) -> String {
    let done: Vec<&RunReport> = (report.runs.iter())
        .filter_map(|run| match run {
            Run::Done(run) => Some(&**run),
            Run::Failed(_) => None,
        })
        .collect();
    let columns = columns(&done);
    let mut text = String::new();
    if !done.is_empty() {
        let header: Vec<&str> = columns.iter().map(|column| column.header).collect();
        let mut table = table(&header, 1..header.len());
        keep_names(&mut table, done.iter().map(|run| run.variant.as_str()));
        for run in &done {
            table.add_row(columns.iter().map(|column| (column.cell)(run)));
        }
        text = text_of(&table);
        // Writing to a String cannot fail.
        let _ = writeln!(text, "\ncomputed by {}", devices(&done));
    }
    for run in &done {
        let _ = writeln!(text, "{}", sentence(run, &columns));
    }
    for comparison in &report.comparisons {
        let _ = writeln!(text, "{comparison}");
    }
    text
}

/// One column of the table.
struct Column {
    header: &'static str,
    cell: fn(&RunReport) -> String,
    shown: Shown,
}

/// When a column is shown. The table has room for one pair of columns or the other.
#[derive(PartialEq)]
enum Shown {
    Always,
    /// When there was something to reuse and a variant that reuses.
    WithReuse,
    /// Otherwise.
    WithoutReuse,
}

/// Every column, from left to right.
const COLUMNS: [Column; 11] = [
    Column { header: "variant", cell: |run| run.variant.clone(), shown: Shown::Always },
    Column { header: "pool bytes,\nplanned =\nallocated", cell: pool, shown: Shown::Always },
    Column { header: "peak use", cell: |run| run.peak_used_bytes.human(), shown: Shown::Always },
    Column {
        header: "mean\nwaste",
        cell: |run| Bytes(rounded(run.mean_waste_bytes)).human(),
        shown: Shown::Always,
    },
    Column {
        header: "tokens/s",
        cell: |run| grouped(rounded(run.tokens_per_s)),
        shown: Shown::WithoutReuse,
    },
    Column { header: "step ms\np50 / p99", cell: step_ms, shown: Shown::WithoutReuse },
    Column { header: "saved\nprefill\n(hit rate)", cell: saved, shown: Shown::WithReuse },
    Column {
        header: "cache\ntime s",
        cell: |run| format!("{:.3}", run.cache_s),
        shown: Shown::WithReuse,
    },
    Column {
        header: "max\nerror",
        cell: |run| {
            run.max_abs_error.map_or_else(|| "-".to_owned(), |error| format!("{error:.1e}"))
        },
        shown: Shown::Always,
    },
    Column {
        header: "output checksum",
        cell: |run| run.output_checksum.clone().unwrap_or_else(|| "-".to_owned()),
        shown: Shown::Always,
    },
    Column {
        header: "allocs\nafter\nopen",
        cell: |run| run.allocations_after_open.map_or_else(|| "?".to_owned(), grouped),
        shown: Shown::Always,
    },
];

/// Whether prompts repeat what earlier ones had, and a variant reuses it.
pub(super) fn reuses(runs: &[&RunReport]) -> bool {
    runs.iter().any(|run| run.prefix_reuse && run.repeated_prompt_tokens > 0)
}

/// The columns to show. A job in which prompts repeat what earlier ones had, and a variant reuses
/// it, is about what that saves: tokens per second count only what was computed, so its place is
/// taken by the time.
fn columns(runs: &[&RunReport]) -> Vec<Column> {
    let hidden = if reuses(runs) { Shown::WithoutReuse } else { Shown::WithReuse };
    COLUMNS.into_iter().filter(|column| column.shown != hidden).collect()
}

fn pool(run: &RunReport) -> String {
    if run.planned_bytes == run.allocated_bytes {
        run.planned_bytes.to_string()
    } else {
        format!("{} ≠ {}", run.planned_bytes, run.allocated_bytes)
    }
}

fn step_ms(run: &RunReport) -> String {
    format!("{:.2} / {:.2}", run.step_ms_p50, run.step_ms_p99)
}

/// How many tokens were not computed because the cache had them, and for how many of a hundred
/// prompt tokens that was so.
fn saved(run: &RunReport) -> String {
    if !run.prefix_reuse {
        return "off".to_owned();
    }
    let percent = 100.0 * run.prefix_hit_rate;
    format!("{} ({percent:.0} %)", grouped(run.saved_prefill_tokens))
}

/// What the table has no room for.
fn sentence(run: &RunReport, columns: &[Column]) -> String {
    let mut text = format!(
        "{}: {}, {}, {} of {:.1} requests, {} checked",
        run.variant,
        counted(run.requests_completed, "request"),
        counted(run.tokens_appended, "token"),
        counted(run.steps, "step"),
        run.mean_running,
        counted(run.outputs_checked, "output"),
    );
    if run.requests_completed == 0 {
        text = format!("{}: nothing was computed", run.variant);
    } else if columns.iter().any(|column| column.shown == Shown::WithReuse) {
        // These have made room for the columns about reuse.
        let tokens_per_s = grouped(rounded(run.tokens_per_s));
        let _ = write!(text, ", {tokens_per_s} tokens/s, {} ms a step", step_ms(run));
    }
    if let (Some(error), Some(limit)) = (run.max_abs_error, run.error_limit) {
        let _ = write!(text, ", error {error:.1e} of {limit} allowed");
    }
    for (count, what) in [
        (run.nonfinite, "NaN or infinite"),
        (run.saturated, "beyond the static scales and cut off"),
    ] {
        if count > 0 {
            let were = if count == 1 { "was" } else { "were" };
            let _ = write!(text, "; {} {were} {what}", counted(count, "element"));
        }
    }
    if run.preemptions > 0 {
        let _ = write!(text, "; {}", counted(run.preemptions, "preemption"));
    }
    if let Some(why) = run.prefix_reuse_declined.as_ref().filter(|_| run.repeated_prompt_tokens > 0)
    {
        let _ = write!(text, "; prefixes not shared: {why}");
    }
    if run.prefix_reuse && run.repeated_prompt_tokens > 0 {
        let _ = write!(
            text,
            "; of {} {} were in the cache ({} at most), {} evicted",
            counted(run.prompt_tokens, "prompt token"),
            grouped(run.prefix_hit_tokens),
            grouped(run.repeated_prompt_tokens),
            counted(run.evictions, "block"),
        );
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
