//! `kvpool compare` of a job that computes attention: measured modes side by side.

use std::fmt::Write as _;
use std::path::Path;

use super::compare::{Options, Part, WIDTH, figure, percent, short, whole};
use super::progress::{Bars, CatchingSignals, NoBars};
use super::run::{allocated, reuses, warning};
use super::{CliError, keep_names, stop_flag, table, text_of};
use crate::config::Source;
use crate::job::computed::{self, ComputeOptions, Computed};
use crate::job::report::devices;
use crate::job::{Run, RunReport};
use crate::units::{counted, grouped};

/// Computes the job of a file, prints what came out and writes it where it is wanted.
pub(super) fn run(source: &Source, options: &Options<'_>) -> Result<(), CliError> {
    let done = options.before(computed::read)?.map_or_else(Vec::new, |before| before.runs);
    let shard = options.shard.map(|shard| (shard.part, shard.of));
    let asked = ComputeOptions { shard, done: &done, stop: Some(stop_flag()) };
    let report = match Bars::new() {
        Some(mut bars) => computed::compute(source, &asked, &mut CatchingSignals(&mut bars))?,
        None => computed::compute(source, &asked, &mut CatchingSignals(&mut NoBars))?,
    };
    show(&report, options)
}

/// Prints a report, writes its files, and says what is missing or wrong.
pub(super) fn show(report: &Computed, options: &Options<'_>) -> Result<(), CliError> {
    let document = if options.json { computed::json(report) } else { text(report) };
    let runs = || report.runs.iter().map(|run| &run.run);
    let mut problems = report.report().problems();
    problems.extend(runs().filter_map(allocated));
    let part = Part {
        config: &report.config,
        variants: report.variants,
        there: report.runs.iter().map(|run| run.index).collect(),
    };
    // What cannot be read has nothing that is missed.
    let has_more = |folder: &Path| {
        computed::read(folder)
            .is_ok_and(|old| old.is_some_and(|old| computed::has_more(&old, report)))
    };
    let write = |folder: &Path| computed::write(report, folder);
    let warnings = report.workload.warnings().into_iter().chain(runs().filter_map(warning));
    options.conclude(&document, &part, has_more, write, warnings, problems)
}

/// The table, and what there is to say below it.
fn text(report: &Computed) -> String {
    let done: Vec<&RunReport> = (report.runs.iter())
        .filter_map(|run| match &run.run {
            Run::Done(run) => Some(&**run),
            Run::Failed(_) => None,
        })
        .collect();
    let workload = &report.workload;
    let mut text = format!(
        "{}, {} in, {} out; the longest has {}\n\n",
        counted(workload.requests, "request"),
        counted(workload.prompt_tokens, "token"),
        counted(workload.output_tokens, "token"),
        counted(workload.longest_tokens, "token"),
    );
    // Writing to a String cannot fail.
    if let Some(about) = workload.about_outputs() {
        let _ = writeln!(text, "{about}\n");
    }
    // Tokens a second count what was computed: who finds tokens in the cache has fewer of them.
    let reuses = reuses(&done);
    let speed = if reuses { "cache\ntime s" } else { "tokens/s" };
    let header = [
        "variant",
        "pool",
        "used,\nmost",
        "wasted,\nmean",
        "at\nonce",
        "hit\nrate",
        speed,
        "step\nms p50",
        "step\nms p99",
        "max\nerror",
    ];
    let mut table = table(&header, 1..header.len());
    table.set_width(WIDTH);
    keep_names(&mut table, done.iter().map(|run| run.variant.as_str()));
    for run in &done {
        table.add_row([
            run.variant.clone(),
            short(run.planned_bytes.get()),
            short(run.peak_used_bytes.get()),
            short(whole(run.mean_waste_bytes)),
            format!("{:.1}", run.mean_running),
            if run.prefix_reuse { percent(run.prefix_hit_rate) } else { "off".to_owned() },
            if reuses { format!("{:.3}", run.cache_s) } else { grouped(whole(run.tokens_per_s)) },
            figure(run.step_ms_p50),
            figure(run.step_ms_p99),
            run.max_abs_error.map_or_else(|| "-".to_owned(), |error| format!("{error:.1e}")),
        ]);
    }
    if !done.is_empty() {
        text.push_str(&text_of(&table));
        let _ = writeln!(text, "\ncomputed by {}; times are measured", devices(&done));
    }
    for comparison in &report.comparisons {
        let _ = writeln!(text, "{comparison}");
    }
    for line in report.errors() {
        let _ = writeln!(text, "{line}");
    }
    for run in &report.runs {
        if let Run::Failed(failed) = &run.run {
            let _ = writeln!(text, "not run: {}", failed.error);
        }
    }
    text
}
