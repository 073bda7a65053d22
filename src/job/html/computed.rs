//! The page of a job that computes: what was measured, and what must be equal and is.

use std::fmt::Write as _;

use super::chart::{color, escaped, legend};
use super::number::{bytes, figure, ms, percent, trimmed};
use super::{foot, head};
use crate::job::computed::Computed;
use crate::job::meter::float;
use crate::job::report::{Outcome, Run, RunReport, devices};
use crate::units::{counted, grouped};

/// One measure: its heading, its value (`None` where there is none) and how that is written.
type Measure = (&'static str, fn(&RunReport) -> Option<f64>, fn(f64) -> String);

const MEASURES: [Measure; 10] = [
    ("pool", |r| Some(float(r.planned_bytes.get())), bytes),
    ("used, most", |r| Some(float(r.peak_used_bytes.get())), bytes),
    ("wasted, mean", |r| Some(r.mean_waste_bytes), bytes),
    ("at once, mean", |r| Some(r.mean_running), figure),
    ("tokens hit", |r| r.prefix_reuse.then_some(r.prefix_hit_rate), percent),
    ("computed tokens/s", |r| Some(r.tokens_per_s), trimmed),
    ("step, p50", |r| Some(r.step_ms_p50), ms),
    ("step, p99", |r| Some(r.step_ms_p99), ms),
    ("time in the cache", |r| Some(1e3 * r.cache_s), ms),
    ("largest error", |r| r.max_abs_error, error),
];

/// Of these measures one is drawn: where tokens are found in the cache, fewer are computed in a
/// second, and the time is what is saved.
const SPEED: usize = 5;
const CACHE_TIME: usize = 8;

/// The measures that are drawn, each on a scale of its own.
const DRAWN: [(&str, usize); 7] = [
    ("Requests at once, mean", 3),
    ("Memory used at the peak", 1),
    ("Memory wasted, mean", 2),
    ("Tokens a second (measured)", SPEED),
    ("Time in the cache (measured)", CACHE_TIME),
    ("99th percentile of a step (measured)", 7),
    ("Largest error against attention in f64", 9),
];

fn error(number: f64) -> String {
    format!("{number:.1e}")
}

/// The report as a page that needs nothing else.
#[must_use]
pub(in crate::job) fn html(report: &Computed) -> String {
    let runs: Vec<&RunReport> = report
        .runs
        .iter()
        .filter_map(|run| match &run.run {
            Run::Done(run) => Some(&**run),
            Run::Failed(_) => None,
        })
        .collect();
    let mut page = head("KV-cache variants compared");
    let workload = &report.workload;
    let _ = write!(
        page,
        "<p>{}: {} of prompts, {} of outputs, the longest {} in all; computed in every layer{}. {}Times and what follows \
         from them are measured; everything else is the same on every run.</p>",
        counted(workload.requests, "request"),
        counted(workload.prompt_tokens, "token"),
        grouped(workload.output_tokens),
        grouped(workload.longest_tokens),
        if runs.is_empty() { String::new() } else { format!(" by {}", escaped(&devices(&runs))) },
        workload.about_outputs().map_or_else(String::new, |about| format!("{}. ", escaped(&about)))
    );
    for warning in workload.warnings() {
        let _ = write!(page, "<p class=\"failed\">{}</p>", escaped(&warning));
    }
    page.push_str("<h2>One answer</h2><ul>");
    for comparison in &report.comparisons {
        let class = if comparison.outcome == Outcome::Different { " class=\"failed\"" } else { "" };
        let _ = write!(page, "<li{class}>{}</li>", escaped(&comparison.to_string()));
    }
    for line in errors(&runs) {
        let _ = write!(page, "<li>{}</li>", escaped(&line));
    }
    page.push_str("</ul>");
    table(&mut page, &runs);
    for run in &report.runs {
        if let Run::Failed(failed) = &run.run {
            let _ = write!(page, "<p class=\"failed\">not run: {}</p>", escaped(&failed.error));
        }
    }
    for problem in report.report().problems() {
        let _ = write!(page, "<p class=\"failed\">{}</p>", escaped(&problem));
    }
    if report.runs.len() < report.variants {
        let _ = write!(
            page,
            "<p class=\"failed\">{} of {} here: the others were interrupted or are in other shards.</p>",
            grouped(report.runs.len() as u64),
            counted(report.variants as u64, "variant")
        );
    }
    bars(&mut page, &runs);
    foot(&mut page, &report.config, &report.version, "Times depend on the machine.");
    page
}

/// What each format costs in accuracy, a sentence each.
pub(in crate::job) fn errors(runs: &[&RunReport]) -> Vec<String> {
    let mut formats: Vec<(&str, f64, u64)> = Vec::new();
    for run in runs {
        let Some(error) = run.max_abs_error else { continue };
        match formats.iter_mut().find(|(format, ..)| *format == run.format) {
            Some((_, most, checked)) => {
                *most = most.max(error);
                *checked += run.outputs_checked;
            }
            None => formats.push((&run.format, error, run.outputs_checked)),
        }
    }
    let sentence = |(format, error, checked): &(&str, f64, u64)| {
        let checked = counted(*checked, "output");
        format!(
            "{format}: {checked} compared with attention in f64 over values of about ±4; the largest error is {error:.1e}"
        )
    };
    formats.iter().map(sentence).collect()
}

/// The measures that some variant has.
fn there(runs: &[&RunReport]) -> Vec<usize> {
    let reuse = runs.iter().any(|run| run.prefix_hit_tokens > 0);
    (0..MEASURES.len())
        .filter(|at| runs.iter().any(|run| MEASURES[*at].1(run).is_some()))
        .filter(|at| MEASURES[*at].0 != "tokens hit" || reuse)
        .collect()
}

fn table(page: &mut String, runs: &[&RunReport]) {
    if runs.is_empty() {
        return;
    }
    page.push_str(
        "<div class=\"scroll\"><table><thead><tr><th>variant</th><th>mode</th><th>format</th>",
    );
    let columns = there(runs);
    for at in &columns {
        let _ = write!(page, "<th>{}</th>", MEASURES[*at].0);
    }
    page.push_str("<th>preempted</th><th>refused</th></tr></thead><tbody>");
    for run in runs {
        let (name, format) = (escaped(&run.variant), escaped(&run.format));
        let _ = write!(page, "<tr><td>{name}</td><td>{}</td><td>{format}</td>", run.mode.name());
        for at in &columns {
            let (_, value, write) = MEASURES[*at];
            let cell = value(run).map_or_else(|| "–".to_owned(), write);
            let _ = write!(page, "<td>{cell}</td>");
        }
        let refused = run.requests_refused_too_long + run.requests_refused_never_fits;
        let (preempted, refused) = (grouped(run.preemptions), grouped(refused));
        let _ = write!(page, "<td>{preempted}</td><td>{refused}</td></tr>");
    }
    page.push_str("</tbody></table></div>");
}

/// A bar for each variant and measure; colours are formats.
fn bars(page: &mut String, runs: &[&RunReport]) {
    let mut formats: Vec<&str> = Vec::new();
    for run in runs {
        if !formats.contains(&run.format.as_str()) {
            formats.push(&run.format);
        }
    }
    if runs.is_empty() {
        return;
    }
    page.push_str("<h2>Side by side</h2>");
    page.push_str(&legend(formats.iter().enumerate().map(|(i, format)| (color(i), *format))));
    page.push_str("<div class=\"grid\">");
    let reuse = runs.iter().any(|run| run.prefix_hit_tokens > 0);
    let hidden = if reuse { SPEED } else { CACHE_TIME };
    for (title, at) in DRAWN.into_iter().filter(|(_, at)| *at != hidden) {
        let (_, value, write_value) = MEASURES[at];
        let most = runs.iter().filter_map(|run| value(run)).fold(0.0, f64::max);
        if most <= 0.0 {
            continue;
        }
        let _ = write!(page, "<figure><figcaption>{title}</figcaption><div class=\"bars thin\">");
        for run in runs {
            let Some(value) = value(run) else { continue };
            let format = formats.iter().position(|format| *format == run.format).unwrap_or(0);
            let _ = write!(
                page,
                "<div>{}</div><div class=\"bar\"><i style=\"width:{:.1}%;background:var(--{})\"></i></div><div>{}</div>",
                escaped(&run.variant),
                100.0 * value / most,
                color(format),
                write_value(value)
            );
        }
        page.push_str("</div></figure>");
    }
    page.push_str("</div>");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::computed::ComputedRun;
    use crate::job::replay::WorkloadSummary;
    use crate::job::report::tests::run;

    #[test]
    fn what_was_measured_is_on_the_page() {
        let mut runs =
            [run("a<b", "f16", "1", 5), run("c", "int8", "2", 5), run("d", "f16", "1", 5)];
        let Run::Done(of_another) = &mut runs[1] else { panic!("it ran") };
        (of_another.device, of_another.threads) = ("cpu/portable".to_owned(), 7);
        let Run::Done(first) = &runs[0] else { panic!("it ran") };
        let by = format!(
            " by {} with {}, cpu/portable with 7 threads. ",
            first.device,
            counted(first.threads.into(), "thread")
        );
        let one = |(index, run)| ComputedRun { index, fingerprint: String::new(), run };
        let mut report = Computed {
            version: "1".to_owned(),
            config: "c = \"<\"".to_owned(),
            workload: WorkloadSummary::default(),
            runs: runs.into_iter().enumerate().map(one).collect(),
            comparisons: Vec::new(),
            variants: 4,
            fingerprints: Vec::new(),
        };
        report.comparisons = report.report().comparisons;
        let page = html(&report);
        for words in [
            "equal outputs, bit for bit (f16): a&lt;b, d",
            "int8: 1 output compared",
            "3 of 4 variants here",
            "c = &quot;&lt;&quot;",
            "var(--s1)",
            &by,
        ] {
            assert!(page.contains(words), "{words}");
        }
        assert!(!page.contains("a<b") && !page.contains("http") && !page.contains("NaN"));
    }
}
