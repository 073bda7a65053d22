//! `kvpool compare` of a job that is replayed, and `kvpool run` of such a job.

use std::fmt::Write as _;
use std::io::{self, IsTerminal as _};
use std::path::Path;
use std::sync::Mutex;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::{CliError, Shard, catch_signals, conclude, keep_names, stop_flag, table, text_of};
use crate::config::{self, Compute, Source, WorkloadConfig};
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
    /// Whether the results are those of shards, read from their folders.
    pub(super) merged: bool,
}

/// Variants that a message names, at most.
const NAMED: usize = 8;

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

    /// Writes the files, prints the document and ends the job: with a problem where variants are
    /// missing. `part` says what is there; `has_more` whether a folder has that already, and more.
    pub(super) fn conclude(
        &self,
        document: &str,
        part: &Part<'_>,
        has_more: impl FnOnce(&Path) -> bool,
        write: impl FnOnce(&Path) -> Result<(), JobError>,
        warnings: impl Iterator<Item = String>,
        mut problems: Vec<String>,
    ) -> Result<(), CliError> {
        let missing = part.missing(self.shard);
        // What an earlier run has completed is not given away for a part of it, but to whoever asks for
        // this part.
        let is_part = !missing.is_empty() && !self.merged;
        let kept = self.out.filter(|folder| is_part && has_more(folder));
        let written = match self.out {
            Some(folder) if kept.is_none() => write(folder).map_err(CliError::from),
            _ => Ok(()),
        };
        problems.extend(self.incomplete(part, &missing, kept));
        conclude(written, document, warnings, problems)
    }

    /// Says which of a job's variants are missing, and what to do.
    fn incomplete(
        &self,
        part: &Part<'_>,
        missing: &[usize],
        kept: Option<&Path>,
    ) -> Option<String> {
        let number = missing.len();
        if number == 0 {
            return None;
        }
        let all = counted((part.expected(self.shard).count()) as u64, "variant");
        if self.merged {
            let verb = if number == 1 { "is" } else { "are" };
            let names = part.names(missing);
            return Some(format!("{number} of {all} {verb} in none of these folders: {names}"));
        }
        Some(match kept {
            Some(folder) => format!(
                "interrupted: {number} of {all} not run; {} keeps what an earlier run has, which is more",
                folder.display()
            ),
            None => format!(
                "interrupted: {number} of {all} not run; run it again with --out DIR --resume"
            ),
        })
    }
}

/// The variants that a report has, of those of its job.
pub(super) struct Part<'a> {
    /// The job's settings, as the report has them.
    pub(super) config: &'a str,
    /// How many variants the job has.
    pub(super) variants: usize,
    /// The places in the file of those that are there.
    pub(super) there: Vec<usize>,
}

impl Part<'_> {
    /// The places of all, or of a shard's.
    fn expected(&self, shard: Option<Shard>) -> impl Iterator<Item = usize> {
        (0..self.variants)
            .filter(move |index| shard.is_none_or(|Shard { part, of }| index % of == part - 1))
    }

    fn missing(&self, shard: Option<Shard>) -> Vec<usize> {
        self.expected(shard).filter(|index| !self.there.contains(index)).collect()
    }

    /// The names of variants; their numbers where the settings cannot be read here, for files that
    /// they refer to.
    fn names(&self, places: &[usize]) -> String {
        let source = config::parse(self.config, Path::new("the job"), &[]).ok();
        let names = source.map_or_else(Vec::new, |source| source.variants());
        let name = |place: &usize| match names.get(*place) {
            Some((name, _)) => format!("{name:?}"),
            None => format!("number {}", place + 1),
        };
        let mut text = places.iter().take(NAMED).map(name).collect::<Vec<_>>().join(", ");
        if places.len() > NAMED {
            // Writing to a String cannot fail.
            let _ = write!(text, " and {} more", places.len() - NAMED);
        }
        text
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
    let asked = ReplayOptions { shard, done: &done, stop: Some(stop_flag()) };
    let bars = Bars::new();
    let report = replay(source, &asked, &bars);
    bars.end();
    show(&report?, options)
}

/// Prints a report, writes its files, and says what is missing or wrong.
pub(super) fn show(report: &Replay, options: &Options<'_>) -> Result<(), CliError> {
    let document = if options.json { output::json(report) } else { text(report) };
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
    let part = Part {
        config: &report.config,
        variants: report.variants,
        there: report.runs.iter().map(Replayed::index).collect(),
    };
    // What cannot be read has nothing that is missed.
    let has_more = |folder: &Path| {
        output::read(folder).is_ok_and(|old| old.is_some_and(|old| output::has_more(&old, report)))
    };
    let write = |folder: &Path| output::write(report, folder);
    let warnings = report.workload.warnings().into_iter().chain(refused);
    options.conclude(&document, &part, has_more, write, warnings, output::problems(report))
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
        "first\ntoken\ns p50",
        "first\ntoken\ns p99",
        "token\nms p50",
    ];
    let mut table = table(&header, 1..header.len());
    table.set_width(WIDTH);
    keep_names(&mut table, done(report).map(|run| run.variant.as_str()));
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

/// One bar over all variants, on the standard error, and only when that is a terminal. Signals are
/// caught from where it begins.
struct Bars {
    bar: ProgressBar,
    /// How many variants there are, and how many are done.
    count: Mutex<(usize, usize)>,
}

impl Bars {
    fn new() -> Self {
        let bar = ProgressBar::hidden();
        bar.set_length(1);
        if io::stderr().is_terminal() {
            bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(8));
        }
        // The template is ours; a bar in the default style would still be a bar.
        let template = "{prefix} [{bar:30}] {human_pos} of {human_len} requests, {eta} left";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        Self { bar, count: Mutex::new((0, 0)) }
    }

    fn end(&self) {
        self.bar.finish_and_clear();
    }
}

impl ReplayObserver for Bars {
    fn begins(&self, variants: usize, workload: &WorkloadSummary) {
        catch_signals();
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
