//! `kvpool recommend`.

use std::fmt::Write as _;

use super::{CliError, print};
use crate::config::{Format, Source};
use crate::job::Silent;
use crate::job::recommend::{Recommendation, different, recommend, score};
use crate::job::replay::VariantResult;
use crate::units::{Bytes, grouped};

/// Runners-up that are named for being next.
const NEXT: usize = 4;

/// Replays the candidates, and prints the best as a file with its reasons.
pub(super) fn run(source: &Source, formats: &[Format]) -> Result<(), CliError> {
    let own = [source.config.cache.format];
    let formats = &different(if formats.is_empty() { &own } else { formats })[..];
    let found = recommend(source, formats, &Silent)?;
    let settings = toml::to_string_pretty(&found.config).map_err(std::io::Error::other)?;
    print(&format!("{}\n{settings}", reasons(&found, formats)))
}

/// The reasons, as the comment of the file.
fn reasons(found: &Recommendation, formats: &[Format]) -> String {
    let Recommendation { best, ranked, smaller, refused, .. } = found;
    let goals = best.goodput_per_s.is_some();
    let measure = if goals { "requests a second within [goals]" } else { "requests a second" };
    let mut text = format!(
        "# kvpool recommend: {} candidates were replayed on this workload; the measure is {measure}.\n#\n",
        grouped((ranked.len() + smaller.len()) as u64)
    );
    let Some(top) = ranked.first() else { return text };
    // Writing to a String cannot fail.
    let _ = writeln!(text, "# Best: {}", sentence(top));
    for run in smaller {
        let _ = writeln!(text, "# With {}: {}", run.variant, numbers(run));
    }
    if best.pool_bytes == top.pool_bytes {
        let _ = writeln!(text, "# None of these keeps 99 % of it, so all of the memory is used.");
    } else {
        let _ = writeln!(
            text,
            "# The least that keeps 99 % of it, {}, is chosen.",
            Bytes(best.pool_bytes).human()
        );
    }
    text.push_str("#\n# The runners-up, in the file's capacity: the nearest, and the best of every other mode and format.\n");
    for run in runners_up(ranked) {
        let cost = 100.0 * (score(run) / score(top).max(f64::MIN_POSITIVE) - 1.0);
        let cost = if cost.abs() < 0.05 { "as many".to_owned() } else { format!("{cost:+.1} %") };
        let _ = writeln!(text, "#   {cost:>8}  {}", sentence(run));
    }
    for error in refused {
        let _ = writeln!(text, "# Not possible: {error}");
    }
    text.push_str("#\n");
    accuracy(&mut text, found, formats);
    text.push_str("# Times are simulated from [cost].\n");
    text
}

/// Those that come next, and the best of each mode and format that is not among them.
fn runners_up(ranked: &[VariantResult]) -> Vec<&VariantResult> {
    let mut kinds = Vec::new();
    let mut named = Vec::new();
    for (place, run) in ranked.iter().enumerate() {
        let kind = (run.mode, &run.format);
        let is_new = !kinds.contains(&kind);
        if is_new {
            kinds.push(kind);
        }
        if place > 0 && (place <= NEXT || is_new) {
            named.push(run);
        }
    }
    named
}

/// What formats cost in accuracy, measured where INT8 may be chosen; and how to allow it where not.
fn accuracy(text: &mut String, found: &Recommendation, formats: &[Format]) {
    if !formats.contains(&Format::Int8) {
        let own: Vec<&str> = formats.iter().map(|format| format.name()).collect();
        let _ = writeln!(
            text,
            "# INT8 would hold nearly twice the tokens of f16 and costs accuracy, so it is not chosen unasked: \
             --formats {},int8 allows it.",
            own.join(",")
        );
        return;
    }
    if found.errors.is_empty() {
        text.push_str(
            "# Every candidate is INT8, as the file says; what that costs in accuracy was not measured: --formats \
             f16,int8 does.\n",
        );
        return;
    }
    text.push_str("# Accuracy, measured here: one layer with these heads, 480 tokens of values of about ±4, outputs\n# compared with attention in f64.\n");
    for error in &found.errors {
        let _ = writeln!(
            text,
            "#   {}: the largest error of {} outputs is {:.1e}",
            error.format,
            grouped(error.outputs),
            error.max_abs_error
        );
    }
    if !found.errors.iter().any(|error| error.format.starts_with("int8")) {
        text.push_str(
            "#   int8/per-tensor: not measured, its scales are of your model's own K and V (`kvpool quality` \
             computes those)\n",
        );
    }
    let other = found.ranked.iter().find(|run| !run.format.starts_with("int8"));
    if found.best.format.starts_with("int8")
        && let Some(other) = other
    {
        let cost = 100.0 * (score(other) / score(&found.ranked[0]).max(f64::MIN_POSITIVE) - 1.0);
        let _ = writeln!(text, "# The best without INT8 ({cost:+.1} %): {}", sentence(other));
    }
}

fn sentence(run: &VariantResult) -> String {
    format!("{}: {}", run.variant, numbers(run))
}

fn numbers(run: &VariantResult) -> String {
    let refused = run.requests_refused_too_long + run.requests_refused_never_fits;
    let mut text = format!(
        "{:.2}/s, {:.1} at once, first token {:.0} ms p50 / {:.0} ms p99, {:.1} ms a token, {:.0} % of what was \
         taken is used",
        score(run),
        run.mean_running,
        run.first_token_ms.p50,
        run.first_token_ms.p99,
        run.token_ms.p50,
        100.0 * run.utilization
    );
    if run.prefix_reuse {
        let _ = write!(text, ", {:.1} % hit", 100.0 * run.hit_rate);
    }
    if run.preemptions > 0 {
        let _ = write!(text, ", {} preempted", grouped(run.preemptions));
    }
    if refused > 0 {
        let _ = write!(text, ", {} refused", grouped(refused));
    }
    text
}
