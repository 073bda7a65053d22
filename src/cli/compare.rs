//! `kvpool compare` of a job that is replayed, and `kvpool run` of such a job.

use std::fmt::Write as _;
use std::io::{self, IsTerminal as _, Write as _};
use std::path::Path;
use std::sync::Mutex;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::{CliError, Shard, print, stopped_by_signals, table, text_of};
use crate::config::{Compute, Source, WorkloadConfig};
use crate::error::JobError;
use crate::job::replay::{
    Replay, ReplayObserver, ReplayOptions, Replayed, VariantResult, WorkloadSummary, replay,
};
use crate::job::{self, replay_output as output};
use crate::units::{Bytes, counted, grouped};

/// The width of the table.
pub(super) const WIDTH: u16 = 100;

/// What the command line asks for beside the file.
#[derive(Debug, Default)]
pub(super) struct Options<'a> {
    pub(super) json: bool,
    pub(super) out: Option<&'a Path>,
    pub(super) resume: bool,
    pub(super) shard: Option<Shard>,
}

impl Options<'_> {
    /// Makes the folder, before the work and not after it, and reads what an earlier run has
    /// written there, if that is wanted.
    pub(super) fn before<T>(
        &self,
        read: fn(&Path) -> Result<Option<T>, JobError>,
    ) -> Result<Option<T>, CliError> {
        let Some(folder) = self.out else { return Ok(None) };
        job::prepare(folder)?;
        Ok(if self.resume { read(folder)? } else { None })
    }

    /// Says how many of a job's variants are missing.
    pub(super) fn interrupted(&self, variants: usize, done: usize) -> Option<String> {
        let expected = self.shard.map_or(variants, |Shard { part, of }| {
            (0..variants).filter(|index| index % of == part - 1).count()
        });
        let missing = expected.saturating_sub(done);
        (missing > 0).then(|| {
            let all = counted(expected as u64, "variant");
            format!("interrupted: {missing} of {all} not run; run it again with --out DIR --resume")
        })
    }

    /// Prints the document, writes the files, warns, and fails where something is not as it must
    /// be.
    pub(super) fn conclude(
        &self,
        document: &str,
        write: impl FnOnce(&Path) -> Result<(), JobError>,
        warnings: impl Iterator<Item = String>,
        problems: Vec<String>,
    ) -> Result<(), CliError> {
        print(document)?;
        if let Some(folder) = self.out {
            write(folder)?;
        }
        for warning in warnings {
            // If this cannot be written, the report still says it.
            let _ = writeln!(io::stderr(), "warning: {warning}");
        }
        if problems.is_empty() { Ok(()) } else { Err(CliError::Problems(problems)) }
    }
}

/// Runs the job of a file, prints what came out and writes it where it is wanted.
pub(super) fn run(source: &Source, options: &Options<'_>) -> Result<(), CliError> {
    let computes = |workload: &WorkloadConfig| workload.compute == Compute::Attention;
    if source.config.workload.as_ref().is_some_and(computes) {
        return super::compare_computed::run(source, options);
    }
    let done = options.before(output::read)?.map_or_else(Vec::new, |before| before.runs);
    let shard = options.shard.map(|shard| (shard.part, shard.of));
    let asked = ReplayOptions { shard, done: &done, stop: Some(stopped_by_signals()) };
    let report = match Bars::new() {
        Some(bars) => {
            let report = replay(source, &asked, &bars);
            bars.end();
            report?
        }
        None => replay(source, &asked, &job::Silent)?,
    };
    show(&report, options)
}

/// Prints a report, writes its files, and says what is missing or wrong.
pub(super) fn show(report: &Replay, options: &Options<'_>) -> Result<(), CliError> {
    let document = if options.json { output::json(report) } else { text(report) };
    let damaged = (report.workload.damaged_lines > 0).then(|| {
        let lines = counted(report.workload.damaged_lines, "damaged line");
        let first = report.workload.first_damaged.as_deref().unwrap_or_default();
        format!("{lines} left out; the first: {first}")
    });
    let refused = done(report).filter_map(|run| {
        let refused = run.requests_refused_too_long + run.requests_refused_never_fits;
        let all = counted(report.workload.requests, "request");
        let first = run.first_refusal.as_deref().unwrap_or("it is too long");
        (refused > 0).then(|| {
            format!(
                "variant {:?}: {} of {all} can never run; the first: {first}",
                run.variant,
                grouped(refused)
            )
        })
    });
    let mut problems = output::problems(report);
    problems.extend(options.interrupted(report.variants, report.runs.len()));
    let write = |folder: &Path| output::write(report, folder);
    options.conclude(&document, write, damaged.into_iter().chain(refused), problems)
}

fn done(report: &Replay) -> impl Iterator<Item = &VariantResult> {
    report.runs.iter().filter_map(|run| match run {
        Replayed::Done(run) => Some(&**run),
        Replayed::Failed(_) => None,
    })
}

/// The table, and what there is to say around it.
pub(super) fn text(report: &Replay) -> String {
    let workload = &report.workload;
    let mut text = format!(
        "{}, {} in, {} out\nthe last arrives after {}; the longest has {}\n\n",
        counted(workload.requests, "request"),
        counted(workload.prompt_tokens, "token"),
        counted(workload.output_tokens, "token"),
        seconds(workload.last_arrival_s),
        counted(workload.longest_tokens, "token"),
    );
    // Writing to a String cannot fail.
    if let Some(about) = workload.about_outputs() {
        let _ = writeln!(text, "{about}\n");
    }
    let goals = done(report).any(|run| run.goodput_per_s.is_some());
    let rate = if goals { "good\nreq/s" } else { "req/s" };
    let header = [
        "variant",
        "pool",
        "at once\nmean",
        "used of\ntaken",
        "wasted",
        "hit\nrate",
        rate,
        "first\ntoken s\np50",
        "first\ntoken s\np99",
        "token\nms p50",
    ];
    let mut table = table(&header, 1..header.len());
    table.set_width(WIDTH);
    for run in done(report) {
        let wasted =
            run.mean_block_waste_bytes + run.mean_slot_waste_bytes + run.mean_promised_bytes;
        let hit = if run.prefix_reuse { percent(run.hit_rate) } else { "off".to_owned() };
        table.add_row([
            run.variant.clone(),
            short(run.pool_bytes),
            format!("{:.1}", run.mean_running),
            percent(run.utilization),
            short(whole(wasted)),
            hit,
            format!("{:.2}", run.goodput_per_s.unwrap_or(run.requests_per_s)),
            figure(run.first_token_ms.p50 / 1e3),
            figure(run.first_token_ms.p99 / 1e3),
            figure(run.token_ms.p50),
        ]);
    }
    text.push_str(&text_of(&table));
    if done(report).any(|run| run.prefix_reuse) {
        let ceiling = percent(workload.ceiling_hit_rate);
        let _ =
            writeln!(text, "\na cache that forgets nothing hits {ceiling} of the prompts' tokens");
    }
    for run in done(report) {
        if let Some(note) = note(run) {
            let _ = writeln!(text, "{}: {note}", run.variant);
        }
    }
    for run in &report.runs {
        if let Replayed::Failed(failed) = run {
            let _ = writeln!(text, "not replayed: {}", failed.error);
        }
    }
    text
}

/// What the table has no room for.
fn note(run: &VariantResult) -> Option<String> {
    let mut notes = Vec::new();
    let refused = run.requests_refused_too_long + run.requests_refused_never_fits;
    if refused > 0 {
        notes.push(format!("{} refused", counted(refused, "request")));
    }
    if run.preemptions > 0 {
        notes.push(counted(run.preemptions, "preemption"));
    }
    if run.forks > 0 {
        notes.push(format!(
            "{} forked, {} copied within the pool",
            counted(run.forks, "answer"),
            short(run.copied_bytes)
        ));
    }
    if run.alloc_failures > 0 {
        notes.push(format!(
            "{} waited for a run of memory, {} of them with enough free in pieces (at worst {} free, \
             the largest piece {})",
            counted(run.alloc_failures, "request"),
            grouped(run.alloc_failures_with_room),
            short(run.worst_free_bytes),
            short(run.worst_largest_run)
        ));
        if run.free_without_1gb_run > 0 {
            notes.push(format!(
                "{} were free at most while no piece had 1 GB",
                short(run.free_without_1gb_run)
            ));
        }
    }
    (!notes.is_empty()).then(|| notes.join("; "))
}

pub(super) fn percent(part: f64) -> String {
    format!("{:.1} %", 100.0 * part)
}

/// A number to three digits or so.
pub(super) fn figure(number: f64) -> String {
    match number {
        n if n >= 100.0 => format!("{n:.0}"),
        n if n >= 10.0 => format!("{n:.1}"),
        n => format!("{n:.2}"),
    }
}

fn seconds(seconds: f64) -> String {
    format!("{} s", figure(seconds))
}

/// Bytes to four digits or so.
pub(super) fn short(bytes: u64) -> String {
    for (unit, name) in [(1_u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")]
    {
        if bytes >= unit {
            let hundredths = (u128::from(bytes) * 100 + u128::from(unit) / 2) / u128::from(unit);
            return format!("{}.{:02} {name}", hundredths / 100, hundredths % 100);
        }
    }
    Bytes(bytes).human()
}

pub(super) fn whole(number: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "not negative, and `as` saturates"
    )]
    let whole = number.round() as u64;
    whole
}

/// One bar over all variants, on the standard error, and only when that is a terminal.
struct Bars {
    bar: ProgressBar,
    /// How many variants there are, and how many are done.
    count: Mutex<(usize, usize)>,
}

impl Bars {
    fn new() -> Option<Self> {
        if !io::stderr().is_terminal() {
            return None;
        }
        let bar = ProgressBar::new(1);
        bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(8));
        // The template is ours; a bar in the default style would still be a bar.
        let template = "{prefix} [{bar:30}] {human_pos} of {human_len} requests, {eta} left";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        Some(Self { bar, count: Mutex::new((0, 0)) })
    }

    fn end(&self) {
        self.bar.finish_and_clear();
    }
}

impl ReplayObserver for Bars {
    fn begins(&self, variants: usize, workload: &WorkloadSummary) {
        self.bar.set_length(workload.requests * variants as u64);
        if let Ok(mut count) = self.count.lock() {
            count.0 = variants;
        }
    }

    fn requests(&self, _variant: &str, done: u64, _of: u64) {
        self.bar.inc(done);
    }

    fn finished(&self, _run: &Replayed) {
        if let Ok(mut count) = self.count.lock() {
            count.1 += 1;
            self.bar.set_prefix(format!("{} of {} variants", count.1, count.0));
        }
    }
}
