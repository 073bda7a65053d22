//! `report.html`: one file with its style and its pictures inside, for light, dark and paper.

mod chart;
mod computed;
mod curves;
mod memory;
mod number;
mod overview;

use std::fmt::Write as _;

use chart::escaped;
pub(super) use computed::{errors, html as computed};
use number::{percent, trimmed};

use super::replay::{Replay, Replayed, VariantResult, WorkloadSummary};
use crate::units::{counted, grouped};

/// The page's style.
const STYLE: &str = include_str!("page.css");

/// The report as a page that needs nothing else.
#[must_use]
pub(super) fn html(report: &Replay) -> String {
    let runs: Vec<&VariantResult> = report
        .runs
        .iter()
        .filter_map(|run| match run {
            Replayed::Done(run) => Some(&**run),
            Replayed::Failed(_) => None,
        })
        .collect();
    let mut page = head("KV-cache variants compared");
    facts(&mut page, &report.workload, &runs);
    page.push_str(&overview::in_short(&runs));
    page.push_str(&overview::table(&runs));
    missing(&mut page, report);
    page.push_str(&memory::bars(&runs));
    page.push_str(&curves::pool_size(&runs, report.workload.ceiling_hit_rate));
    page.push_str(&curves::block_size(&runs));
    page.push_str(&curves::latency(&runs));
    page.push_str(&memory::over_time(&runs));
    page.push_str(&memory::fragmentation(&runs));
    page.push_str(&memory::pictures(&runs));
    page.push_str(&overview::details(&runs));
    let note = "The same file and workload give the same numbers on every machine.";
    foot(&mut page, &report.config, &report.version, note);
    page
}

/// The beginning of a page.
fn head(title: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" \
         content=\"width=device-width, initial-scale=1\"><title>kvpool: {title}</title><style>{STYLE}</style>\
         </head><body><main><h1>{title}</h1>"
    )
}

/// The end of a page: the settings, and the version.
fn foot(page: &mut String, config: &str, version: &str, note: &str) {
    // Writing to a String cannot fail, here and in the other files of this folder.
    let _ = writeln!(
        page,
        "<h2>Settings</h2><pre>{}</pre><footer>kvpool {}. {note}</footer></main></body></html>",
        escaped(config.trim_end()),
        escaped(version)
    );
}

/// What was replayed.
fn facts(page: &mut String, workload: &WorkloadSummary, runs: &[&VariantResult]) {
    let _ = write!(
        page,
        "<p>{}: {} of prompts, {} of outputs, the longest {} in all",
        counted(workload.requests, "request"),
        counted(workload.prompt_tokens, "token"),
        grouped(workload.output_tokens),
        grouped(workload.longest_tokens)
    );
    if workload.last_arrival_s > 0.0 {
        let _ = write!(page, "; the last arrives after {} s", trimmed(workload.last_arrival_s));
    } else {
        page.push_str("; all are there at the start");
    }
    if workload.ceiling_hit_rate > 0.0 && runs.iter().any(|run| run.prefix_reuse) {
        let rate = percent(workload.ceiling_hit_rate);
        let _ = write!(page, ". A cache that forgets nothing finds {rate} of the prompts’ tokens");
    }
    if let Some(about) = workload.about_outputs() {
        let _ = write!(page, ". {}", escaped(&about));
    }
    page.push_str(
        ". Times are simulated from the file’s cost model; bytes are those of the planned pool.</p>",
    );
    for warning in workload.warnings() {
        let _ = write!(page, "<p class=\"failed\">{}</p>", escaped(&warning));
    }
}

/// Variants that could not run, or have not yet; and what is not as it must be.
fn missing(page: &mut String, report: &Replay) {
    for run in &report.runs {
        match run {
            Replayed::Failed(failed) => {
                let error = escaped(&failed.error);
                let _ = write!(page, "<p class=\"failed\">not replayed: {error}</p>");
            }
            Replayed::Done(run) => {
                for problem in run.first_refusal.iter().chain(&run.problems) {
                    let (name, problem) = (escaped(&run.variant), escaped(problem));
                    let _ = write!(page, "<p class=\"failed\">{name}: {problem}</p>");
                }
            }
        }
    }
    if report.runs.len() < report.variants {
        let _ = write!(
            page,
            "<p class=\"failed\">{} of {} here: the others were interrupted or are in other shards.</p>",
            grouped(report.runs.len() as u64),
            counted(report.variants as u64, "variant")
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::replay::{Picture, Point, Summary, WorkloadSummary};
    use super::*;

    #[test]
    fn a_page_stands_alone_and_is_well_formed() {
        let times = Summary {
            p50: 3.0,
            p99: 9.0,
            curve: (0..=50).map(f64::from).collect(),
            ..Summary::default()
        };
        let run = |index: u32| {
            Replayed::Done(Box::new(VariantResult {
                variant: format!("<v{index}>"),
                pool_bytes: 1 << (30 + index / 2),
                tokens_per_block: 16 << (index % 2),
                prefix_reuse: true,
                hit_rate: 0.1 * f64::from(index),
                first_token_ms: times.clone(),
                token_ms: times.clone(),
                series: (0..9)
                    .map(|at| Point {
                        at_s: f64::from(at),
                        used: 1 << 20,
                        held: 3 << 20,
                        ..Point::default()
                    })
                    .collect(),
                picture: Some(Picture {
                    units: 3,
                    units_per_cell: 1,
                    held: "905".to_owned(),
                    used: "904".to_owned(),
                    cached: "090".to_owned(),
                    ..Picture::default()
                }),
                ..VariantResult::default()
            }))
        };
        let report = Replay {
            version: "1".to_owned(),
            config: "a = \"<&>\"".to_owned(),
            workload: WorkloadSummary {
                ceiling_hit_rate: 0.4,
                capped_outputs: 7,
                ..WorkloadSummary::default()
            },
            runs: (0..4).map(run).collect(),
            variants: 4,
            fingerprints: Vec::new(),
        };
        let page = html(&report);
        assert!(page.contains("&lt;v1&gt;") && !page.contains("<v1>"));
        for outside in ["http:", "https:", "src=", "@import", "url(", "<script", "<link"] {
            assert!(!page.contains(outside), "{outside}");
        }
        assert!(!page.contains("NaN") && !page.contains("inf"), "a number is missing");
        for tag in ["svg", "figure", "table", "div", "tr", "h2", "pre"] {
            let opened = page.matches(&format!("<{tag} ")).count()
                + page.matches(&format!("<{tag}>")).count();
            assert_eq!(opened, page.matches(&format!("</{tag}>")).count(), "{tag}");
        }
        for section in
            ["Memory over time", "Latency", "Block size", "Hit rate", "fullest moment", "Settings"]
        {
            assert!(page.contains(section), "{section}");
        }
        assert!(page.contains(". 7 answers are counted as long as max_tokens lets them become"));
        // Nothing at all is a page, too.
        let empty = Replay { runs: Vec::new(), variants: 0, ..report };
        assert!(html(&empty).contains("Settings"));
    }
}
