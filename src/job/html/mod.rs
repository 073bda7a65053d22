//! `report.html`: one file with its style and its pictures inside, for light, dark and paper.

mod chart;
mod sections;

use std::fmt::Write as _;

use chart::escaped;

use super::replay::{Replay, Replayed, VariantResult};
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
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" \
         content=\"width=device-width, initial-scale=1\"><title>kvpool compare</title><style>{STYLE}</style>\
         </head><body><main><h1>KV-cache variants compared</h1>"
    );
    let workload = &report.workload;
    // Writing to a String cannot fail, here and in the other files of this folder.
    let _ = write!(
        page,
        "<p class=\"facts\">{}, {} of prompts and {} of outputs; the last arrives after {:.0} s, the longest has \
         {}. A cache that forgets nothing hits {:.1} % of the prompts' tokens. Times are simulated from the \
         file's cost model; bytes are those of the planned pool.</p>",
        counted(workload.requests, "request"),
        counted(workload.prompt_tokens, "token"),
        grouped(workload.output_tokens),
        workload.last_arrival_s,
        counted(workload.longest_tokens, "token"),
        100.0 * workload.ceiling_hit_rate
    );
    if workload.damaged_lines > 0 {
        let _ = write!(
            page,
            "<p class=\"failed\">{} of the trace left out; the first: {}</p>",
            counted(workload.damaged_lines, "damaged line"),
            escaped(workload.first_damaged.as_deref().unwrap_or_default())
        );
    }
    page.push_str(&sections::table(&runs));
    for run in &report.runs {
        if let Replayed::Failed(failed) = run {
            let _ =
                write!(page, "<p class=\"failed\">not replayed: {}</p>", escaped(&failed.error));
        }
    }
    if runs.len() < report.variants - (report.runs.len() - runs.len()).min(report.variants) {
        let _ = write!(
            page,
            "<p class=\"failed\">{} of {} here: the others were interrupted or are in other shards.</p>",
            grouped(report.runs.len() as u64),
            counted(report.variants as u64, "variant")
        );
    }
    page.push_str(&sections::memory(&runs));
    page.push_str(&sections::latency(&runs));
    page.push_str(&sections::block_size(&runs));
    page.push_str(&sections::hit_rate(&runs, workload.ceiling_hit_rate));
    page.push_str(&sections::pictures(&runs));
    let _ = writeln!(
        page,
        "<h2>Settings</h2><pre>{}</pre><footer>kvpool {}. The same file and workload give the same numbers on \
         every machine.</footer></main></body></html>",
        escaped(&report.config),
        escaped(&report.version)
    );
    page
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
            workload: WorkloadSummary { ceiling_hit_rate: 0.4, ..WorkloadSummary::default() },
            runs: (0..4).map(run).collect(),
            variants: 4,
        };
        let page = html(&report);
        assert!(page.contains("&lt;v1&gt;") && !page.contains("<v1>"));
        for outside in ["http:", "https:", "src=", "@import", "url(", "<script"] {
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
        // Nothing at all is a page, too.
        let empty = Replay { runs: Vec::new(), variants: 0, ..report };
        assert!(html(&empty).contains("Settings"));
    }
}
