//! `kvpool recommend`.

use std::fmt::Write as _;

use super::{CliError, print};
use crate::config::{Format, Source};
use crate::job::Silent;
use crate::job::recommend::{Recommendation, recommend, score};
use crate::job::replay::VariantResult;
use crate::units::{Bytes, grouped};

/// Runners-up that are named.
const RUNNERS_UP: usize = 8;

/// Replays the candidates, and prints the best as a file with its reasons.
pub(super) fn run(source: &Source, formats: &[Format]) -> Result<(), CliError> {
    let own = [source.config.cache.format];
    let formats = if formats.is_empty() { &own } else { formats };
    let found = recommend(source, formats, &Silent)?;
    let settings = toml::to_string_pretty(&found.config).map_err(std::io::Error::other)?;
    print(&format!("{}\n{settings}", reasons(&found)))
}

/// The reasons, as the comment of the file.
fn reasons(found: &Recommendation) -> String {
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
    text.push_str("#\n# The runners-up, in the file's capacity:\n");
    for run in ranked.iter().skip(1).take(RUNNERS_UP) {
        let cost = 100.0 * (score(run) / score(top).max(f64::MIN_POSITIVE) - 1.0);
        let _ = writeln!(text, "#   {cost:+.1} %  {}", sentence(run));
    }
    if let Some(last) = ranked.last().filter(|_| ranked.len() > RUNNERS_UP + 1) {
        let _ = writeln!(text, "#   the last of them: {}", sentence(last));
    }
    for error in refused {
        let _ = writeln!(text, "# Not possible: {error}");
    }
    text.push_str("#\n# Times are simulated from [cost]; accuracy of INT8 is not: `kvpool run` computes it.\n");
    text
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
