//! `kvpool run` of a file with `[generate]`: a model completes a file of prompts.

use std::fmt::Write as _;
use std::io::{self, IsTerminal as _};
use std::path::Path;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::{CliError, catch_signals, conclude, stop_flag, table, text_of};
use crate::config::Source;
use crate::error::ModelError;
use crate::job;
use crate::job::model::completions::{self, CompletionReport, Observer, Options, VariantRun};
use crate::units::{counted, grouped};

/// Runs the job of a file, prints what came out, and writes it.
pub(super) fn run(
    source: &Source,
    json: bool,
    out: Option<&Path>,
    resume: bool,
) -> Result<(), CliError> {
    let Some(out) = out else {
        let problem = "give --out DIR, the folder for the completions";
        return Err(CliError::Usage(problem.to_owned()));
    };
    job::prepare(out)?;
    let options = Options { out, resume, stop: stop_flag() };
    let mut bar = Bar::new();
    let report = completions::run(source, options, &mut bar);
    bar.0.finish_and_clear();
    let report = report?;
    let text = serde_json::to_string_pretty(&report).map_err(io::Error::other)? + "\n";
    let path = out.join("results.json");
    let written = std::fs::write(&path, &text)
        .map_err(|source| CliError::from(ModelError::Write { path, source }));
    let refusal = |run: &VariantRun| {
        let first = run.first_refusal.as_ref()?;
        Some(format!(
            "variant {:?}: {} of {} can never run; {} says why; the first, {first}",
            run.variant,
            grouped(run.refused),
            counted(report.prompts as u64, "prompt"),
            run.completions.display()
        ))
    };
    let all_refused = |run: &&VariantRun| run.refused == report.prompts as u64;
    let refused = report.runs.iter().filter(|run| !all_refused(run)).filter_map(refusal);
    let mut problems: Vec<String> =
        report.runs.iter().filter(all_refused).filter_map(refusal).collect();
    let done: usize = report.runs.iter().map(|run| run.requests).sum();
    let all = report.prompts * report.variants;
    let interrupted = report.interrupted.then(|| {
        format!(
            "interrupted: {} of {} done; run it again with --resume",
            grouped(done as u64),
            counted(all as u64, "completion")
        )
    });
    let document = if json { text } else { table_of(&report) };
    problems.extend(interrupted);
    conclude(written, &document, refused, problems)
}

/// The table, and what there is to say below it.
fn table_of(report: &CompletionReport) -> String {
    let header = [
        "variant",
        "bytes a\ntoken",
        "requests",
        "at once\nat most",
        "prompt\ntokens",
        "in the\ncache",
        "reading\ns",
        "new\ntokens",
        "writing\ns",
        "attention\ns",
        "wall\ns",
        "texts",
    ];
    let mut table = table(&header, 1..11);
    for run in &report.runs {
        table.add_row([
            run.variant.clone(),
            grouped(run.bytes_per_token),
            grouped(run.requests as u64),
            run.peak_running.to_string(),
            grouped(run.prompt_tokens),
            grouped(run.cached_tokens),
            format!("{:.2}", run.reading_s),
            grouped(run.new_tokens),
            format!("{:.2}", run.writing_s),
            format!("{:.2}", run.attention_s),
            format!("{:.2}", run.wall_s),
            run.checksum.as_deref().map_or("-", |sum| &sum[..8]).to_owned(),
        ]);
    }
    let mut text = text_of(&table);
    text.push('\n');
    for run in &report.runs {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{}", sentence(run));
    }
    text
}

/// What the table has no room for.
fn sentence(run: &VariantRun) -> String {
    let mut text = format!("{}: {}", run.variant, run.completions.display());
    if run.requests_before > 0 {
        let _ = write!(
            text,
            "; {} were there before, the figures are of the others",
            grouped(run.requests_before as u64)
        );
    }
    if run.preemptions > 0 {
        let _ = write!(text, "; {}", counted(run.preemptions, "preemption"));
    }
    if let (Some((same, of)), Some(until)) = (run.same_as_first, run.same_until) {
        let _ = write!(
            text,
            "; {} of {} are the first variant's, {:.1} % of the text until the first difference",
            grouped(same as u64),
            counted(of as u64, "answer"),
            100.0 * until
        );
    }
    text
}

/// A bar on the standard error, when that is a terminal.
struct Bar(ProgressBar);

impl Bar {
    fn new() -> Self {
        let bar = ProgressBar::new(1);
        let watched = io::stderr().is_terminal();
        bar.set_draw_target(if watched {
            ProgressDrawTarget::stderr_with_hz(8)
        } else {
            ProgressDrawTarget::hidden()
        });
        let template = "{prefix} [{bar:30}] {human_pos} of {human_len} requests, {eta} left";
        // The template is ours; a bar in the default style would still be a bar.
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        Self(bar)
    }
}

impl Observer for Bar {
    fn variant(&mut self, name: &str, index: usize, of: usize, requests: usize) {
        catch_signals();
        self.0.reset();
        self.0.set_length(requests as u64);
        self.0.set_prefix(format!("{name} ({} of {of})", index + 1));
    }

    fn request(&mut self) {
        self.0.inc(1);
    }
}
