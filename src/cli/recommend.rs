//! `kvpool recommend`.

use std::fmt::Write as _;

use super::{CliError, print};
use crate::config::{Format, Source};
use crate::job::Silent;
use crate::job::recommend::{
    Measure, Recommendation, Smaller, best_of_kinds, different, recommend, share_of,
};
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
    let Recommendation { best, ranked, measure, smaller, refused, .. } = found;
    let words = match measure {
        Measure::WithinGoals => "requests a second within [goals]",
        Measure::Requests | Measure::GoalsOutOfReach => "requests a second",
    };
    let mut text = format!(
        "# kvpool recommend: {} candidates were replayed on this workload; the measure is {words}.\n#\n",
        grouped((ranked.len() + smaller.len()) as u64)
    );
    let Some(top) = ranked.first() else { return text };
    // Writing to a String cannot fail.
    if *measure == Measure::GoalsOutOfReach {
        text.push_str(
            "# No candidate keeps [goals] with a single request: they are out of reach of this workload, memory and\n\
             # [cost]. What follows is by requests a second alone.\n#\n",
        );
    }
    let _ = writeln!(text, "# Best: {}", sentence(*measure, top));
    let memory = Bytes(top.pool_bytes).human();
    let _ = writeln!(
        text,
        "# It takes {memory}. With 75, 50, 35 and 25 % of that, the least that keeps 99 % of the best:"
    );
    for kind in best_of_kinds(ranked) {
        let _ = writeln!(text, "#   {}", least(*measure, kind, top, smaller));
    }
    if best.index == top.index && best.variant == top.variant {
        text.push_str("# Chosen: the best, with all of it.\n");
    } else {
        let memory = Bytes(best.pool_bytes).human();
        let best = sentence(*measure, best);
        let _ = writeln!(text, "# Chosen, for the least memory and then by rank: {memory}, {best}");
    }
    text.push_str("#\n# The runners-up, in the file's capacity: the nearest, and the best of every other mode and format.\n");
    for run in runners_up(ranked) {
        let cost = cost(*measure, run, top);
        let cost = if cost.abs() < 0.05 { "as many".to_owned() } else { format!("{cost:+.1} %") };
        let _ = writeln!(text, "#   {cost:>8}  {}", sentence(*measure, run));
    }
    for error in refused {
        let _ = writeln!(text, "# Not possible: {error}");
    }
    text.push_str("#\n");
    accuracy(&mut text, found, formats);
    text.push_str("# Times are simulated from [cost].\n");
    text
}

/// How much of the memory a candidate needs.
fn least(
    measure: Measure,
    kind: &VariantResult,
    top: &VariantResult,
    smaller: &[Smaller],
) -> String {
    if !measure.keeps(kind, top) {
        return format!("{}: does not keep it in the file's capacity", kind.variant);
    }
    let own = |less: &&Smaller| less.of == kind.variant && measure.keeps(&less.result, top);
    let all = smaller.iter().filter(own).map(|less| &less.result).chain([kind]);
    match all.min_by_key(|result| result.pool_bytes).map(|result| (share_of(result, top), result)) {
        Some((share, result)) if share < 100 => {
            format!("{}: {share} %: {}", kind.variant, numbers(measure, result))
        }
        _ => format!("{}: more than 75 %", kind.variant),
    }
}

/// What it costs to have a candidate in the best one's place, in hundredths of the score.
fn cost(measure: Measure, run: &VariantResult, top: &VariantResult) -> f64 {
    100.0 * (measure.score(run) / measure.score(top).max(f64::MIN_POSITIVE) - 1.0)
}

/// Those that come next, and the best of each mode and format that is not among them.
fn runners_up(ranked: &[VariantResult]) -> Vec<&VariantResult> {
    let kinds: Vec<usize> = best_of_kinds(ranked).iter().map(|run| run.index).collect();
    let is_named =
        |(place, run): &(usize, &VariantResult)| *place <= NEXT || kinds.contains(&run.index);
    ranked.iter().enumerate().skip(1).filter(is_named).map(|(_, run)| run).collect()
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
        let cost = cost(found.measure, other, &found.ranked[0]);
        let other = sentence(found.measure, other);
        let _ = writeln!(text, "# The best without INT8 ({cost:+.1} %): {other}");
    }
}

fn sentence(measure: Measure, run: &VariantResult) -> String {
    format!("{}: {}", run.variant, numbers(measure, run))
}

fn numbers(measure: Measure, run: &VariantResult) -> String {
    let refused = run.requests_refused_too_long + run.requests_refused_never_fits;
    let mut text = format!(
        "{:.2}/s, {:.1} at once, first token {:.0} ms p50 / {:.0} ms p99, {:.1} ms a token, {:.0} % of what was \
         taken is used",
        measure.score(run),
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
