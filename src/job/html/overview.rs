//! The parts of the page that show all variants beside each other: what came out in a few
//! sentences, the table of the numbers that matter most, and all others.

use std::fmt::Write as _;

use super::chart::escaped;
use super::number::{bytes, figure, ms, percent, percent_figure, trimmed};
use crate::job::meter::float;
use crate::job::replay::VariantResult;
use crate::units::{counted, grouped};

type Value = fn(&VariantResult) -> f64;

/// What a variant can be first in: what it does, what is counted, the number, how it is written,
/// and whether more is better.
type Merit = (&'static str, &'static str, Value, fn(f64) -> String, bool);

/// What is wasted of a pool in the mean: held or promised, and without a token.
fn wasted(run: &VariantResult) -> f64 {
    run.mean_block_waste_bytes + run.mean_slot_waste_bytes + run.mean_promised_bytes
}

/// Requests a second: those that kept the goals, where there are goals.
pub(super) fn rate(run: &VariantResult) -> f64 {
    run.goodput_per_s.unwrap_or(run.requests_per_s)
}

fn refused(run: &VariantResult) -> u64 {
    run.requests_refused_too_long + run.requests_refused_never_fits
}

/// Whether a variant served anybody: what served nobody waited for nothing and wasted nothing.
fn served_any(run: &VariantResult) -> bool {
    run.requests_completed > 0
}

/// A few sentences: who is first in what matters, and by how much. Nothing where all are the same,
/// and nothing of those that served nobody.
pub(super) fn in_short(runs: &[&VariantResult]) -> String {
    let with_results: Vec<&VariantResult> =
        runs.iter().copied().filter(|run| served_any(run)).collect();
    let goals = runs.iter().any(|run| run.goodput_per_s.is_some());
    let served = if goals { "requests a second within the goals" } else { "requests a second" };
    let most: [Merit; 5] = [
        ("finds the most in the cache", "of the prompts’ tokens", |r| r.hit_rate, percent, true),
        ("runs the most at once", "requests, in the mean", |r| r.mean_running, trimmed, true),
        ("serves the most", served, rate, trimmed, true),
        ("wastes the least", "in the mean", wasted, bytes, false),
        (
            "has the first token soonest",
            "at the 99th percentile",
            |r| r.first_token_ms.p99,
            ms,
            false,
        ),
    ];
    let mut text = String::new();
    for (does, what, value, write, more) in most {
        let mut sorted = with_results.clone();
        sorted.sort_by(|a, b| {
            if more { value(b).total_cmp(&value(a)) } else { value(a).total_cmp(&value(b)) }
        });
        let (Some(best), Some(worst)) = (sorted.first(), sorted.last()) else { continue };
        let (top, bottom) = (write(value(best)), write(value(worst)));
        let ties = sorted.iter().filter(|run| write(value(run)) == top).count();
        // What differs by less than this is not worth a sentence.
        let alike = (value(best) - value(worst)).abs() <= 0.03 * value(best).max(value(worst));
        if alike || ties > 1 {
            continue;
        }
        let _ = write!(
            text,
            "<li><b>{}</b> {does}: {top} {what}; {} is last with {bottom}.</li>",
            escaped(&best.variant),
            escaped(&worst.variant)
        );
    }
    for run in runs.iter().filter(|run| run.alloc_failures > 0) {
        let _ = write!(
            text,
            "<li><b>{}</b>: {} waited for a run of memory that was long enough, {} of them while as much was \
             free in pieces; at worst {} were free and the largest piece had {}{}.</li>",
            escaped(&run.variant),
            counted(run.alloc_failures, "request"),
            grouped(run.alloc_failures_with_room),
            bytes(float(run.worst_free_bytes)),
            bytes(float(run.worst_largest_run)),
            if run.free_without_1gb_run > 0 {
                let free = bytes(float(run.free_without_1gb_run));
                format!("; {free} were free at most while no piece had 1 GB")
            } else {
                String::new()
            }
        );
    }
    if text.is_empty() { text } else { format!("<h2>In short</h2><ul>{text}</ul>") }
}

/// A part of one in hundredths; of what is not done at all there is none.
fn percent_or_off(number: f64) -> String {
    if number.is_nan() { "off".to_owned() } else { percent_figure(number) }
}

/// One column of a table: its heading, its numbers, how they are written, and whether the largest
/// (`Some(true)`) or the smallest is the best.
struct Column {
    name: &'static str,
    value: Value,
    write: fn(f64) -> String,
    best: Option<bool>,
}

/// All variants and the numbers that matter most; the best of each column is bold.
pub(super) fn table(runs: &[&VariantResult]) -> String {
    if runs.is_empty() {
        return String::new();
    }
    let column = |name, value, write, best| Column { name, value, write, best };
    let goals = runs.iter().any(|run| run.goodput_per_s.is_some());
    let mut columns = vec![
        column("pool", |r| float(r.pool_bytes), bytes, None),
        column("at once, mean", |r| r.mean_running, figure, Some(true)),
        column("at once, most", |r| f64::from(r.peak_running), trimmed, None),
        column("used of what is taken", |r| r.utilization, percent_figure, Some(true)),
        column("wasted, mean", wasted, bytes, Some(false)),
    ];
    if runs.iter().any(|run| run.prefix_reuse) {
        let hit: Value = |r| if r.prefix_reuse { r.hit_rate } else { f64::NAN };
        columns.push(column("tokens hit", hit, percent_or_off, Some(true)));
    }
    let name = if goals { "good requests/s" } else { "requests/s" };
    columns.push(column(name, rate, figure, Some(true)));
    columns.push(column("output tokens/s", |r| r.output_tokens_per_s, trimmed, Some(true)));
    columns.push(column("first token, p50", |r| r.first_token_ms.p50, ms, Some(false)));
    columns.push(column("first token, p99", |r| r.first_token_ms.p99, ms, Some(false)));
    columns.push(column("each token, p50", |r| r.token_ms.p50, ms, Some(false)));
    columns.push(column("each token, p99", |r| r.token_ms.p99, ms, Some(false)));
    for (name, value) in [
        ("preempted", (|r| float(r.preemptions)) as Value),
        ("refused", |r| float(refused(r))),
        ("waited for a run", |r| float(r.alloc_failures)),
    ] {
        if runs.iter().any(|run| value(run) > 0.0) {
            columns.push(column(name, value, trimmed, None));
        }
    }
    table_of(runs, &columns)
}

fn table_of(runs: &[&VariantResult], columns: &[Column]) -> String {
    let mut text = "<div class=\"scroll\"><table><thead><tr><th>variant</th>".to_owned();
    for Column { name, .. } in columns {
        let _ = write!(text, "<th>{name}</th>");
    }
    text.push_str("</tr></thead><tbody>");
    for run in runs {
        let _ = write!(text, "<tr><td>{}</td>", escaped(&run.variant));
        for Column { value, write, best, .. } in columns {
            let all = || runs.iter().filter(|run| served_any(run)).map(|run| value(run));
            let (least, most) = (all().fold(f64::MAX, f64::min), all().fold(f64::MIN, f64::max));
            let written = write(value(run));
            let is_best = best.is_some_and(|more| {
                served_any(run)
                    && write(least) != write(most)
                    && written == write(if more { most } else { least })
            });
            let class = if is_best { " class=\"best\"" } else { "" };
            let _ = write!(text, "<td{class}>{written}</td>");
        }
        text.push_str("</tr>");
    }
    text.push_str("</tbody></table></div>");
    text
}

/// The settings of every variant, and the numbers that the first table has no room for.
pub(super) fn details(runs: &[&VariantResult]) -> String {
    if runs.is_empty() {
        return String::new();
    }
    let mut text =
        "<h2>The variants</h2><div class=\"scroll\"><table><thead><tr><th>variant</th>".to_owned();
    for name in [
        "mode",
        "format",
        "block",
        "admission",
        "reuse",
        "capacity",
        "tokens that fit",
        "bytes a token",
        "tables",
        "host memory",
        "used, most",
        "copied",
        "evicted",
        "computed, of all tokens",
    ] {
        let _ = write!(text, "<th>{name}</th>");
    }
    text.push_str("</tr></thead><tbody>");
    for run in runs {
        let dash = || "–".to_owned();
        let block =
            if run.tokens_per_block > 0 { run.tokens_per_block.to_string() } else { dash() };
        let computed = float(run.computed_tokens);
        let wanted = float(run.prompt_tokens + run.output_tokens).max(1.0);
        let cells = [
            run.mode.map_or("", crate::config::CacheMode::name).to_owned(),
            run.format.clone(),
            block,
            run.admission.clone(),
            if run.prefix_reuse { "on" } else { "off" }.to_owned(),
            capacity(&run.capacity),
            grouped(run.capacity_tokens),
            grouped(run.bytes_per_token),
            bytes(float(run.table_bytes)),
            bytes(float(run.host_bytes)),
            bytes(float(run.peak_used_bytes)),
            bytes(float(run.copied_bytes)),
            grouped(run.evictions),
            percent(computed / wanted),
        ];
        let _ = write!(text, "<tr><td>{}</td>", escaped(&run.variant));
        for cell in cells {
            let _ = write!(text, "<td>{}</td>", escaped(&cell));
        }
        text.push_str("</tr>");
    }
    text.push_str("</tbody></table></div>");
    text
}

/// A capacity in words that are short: the bytes of a budget.
pub(super) fn capacity(written: &str) -> String {
    let budget = written.strip_prefix("budget:").and_then(|bytes| bytes.parse::<u64>().ok());
    budget.map_or_else(|| written.to_owned(), |budget| bytes(float(budget)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(variant: &str, requests_completed: u64, waste: f64, p99: f64) -> VariantResult {
        let mut run = VariantResult {
            variant: variant.to_owned(),
            requests_completed,
            mean_block_waste_bytes: waste,
            ..VariantResult::default()
        };
        run.first_token_ms.p99 = p99;
        run
    }

    #[test]
    fn one_variant_is_not_compared_with_itself() {
        let (one, none) = (run("one", 5, 3e6, 7.0), run("none", 0, 0.0, 0.0));
        assert_eq!(in_short(&[&one]), "");
        assert_eq!(in_short(&[&one, &none]), "", "nor with one that served nobody");
        assert_eq!(in_short(&[]), "");
    }

    #[test]
    fn who_serves_nobody_is_best_in_nothing() {
        let (good, bad) = (run("good", 5, 3e6, 7.0), run("bad", 5, 9e6, 70.0));
        let none = run("none", 0, 0.0, 0.0);
        let text = in_short(&[&good, &none, &bad]);
        assert!(text.contains("<b>good</b> wastes the least"), "{text}");
        assert!(text.contains("bad is last with") && !text.contains("none"), "{text}");
        let table = table(&[&good, &none, &bad]);
        let row = |name: &str| {
            let (_, rest) = table.split_once(&format!("<tr><td>{name}</td>")).expect("a row");
            rest.split_once("</tr>").expect("its end").0.to_owned()
        };
        assert!(row("good").contains("class=\"best\""), "{table}");
        assert!(!row("none").contains("best") && !row("bad").contains("best"), "{table}");
    }
}
