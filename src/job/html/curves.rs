//! Curves: latencies, and what block size and pool size do. Each part is empty where there is
//! nothing to show.

use super::chart::{Axis, Chart, curve_legend, figure};
use super::memory::left_out;
use super::number::{bytes, ms, percent, trimmed};
use super::overview::{capacity, rate};
use crate::job::meter::float;
use crate::job::replay::VariantResult;

/// The most curves in a chart.
const MOST_CURVES: usize = 24;

/// Which part of the requests was served within which time.
pub(super) fn latency(runs: &[&VariantResult]) -> String {
    type Of = fn(&VariantResult) -> &[f64];
    let kinds: [(&str, Of); 3] = [
        ("Until the first token", |run| &run.first_token_ms.curve),
        ("From token to token", |run| &run.token_ms.curve),
        ("Until the last token", |run| &run.latency_ms.curve),
    ];
    let drawn = &runs[..runs.len().min(MOST_CURVES)];
    if drawn.iter().all(|run| run.first_token_ms.curve.is_empty()) {
        return String::new();
    }
    let mut text = "<h2>Latency</h2><p>The part of the requests that waited no longer than this: further left is \
         better.</p>"
        .to_owned();
    text.push_str(&curve_legend(drawn.iter().map(|run| run.variant.as_str())));
    left_out(&mut text, drawn.len(), runs.len(), "variants");
    text.push_str("<div class=\"grid\">");
    for (title, of) in kinds {
        let numbers = drawn.iter().flat_map(|run| of(run).iter().copied());
        let (x, y) = (Axis::log("", numbers, ms), Axis::up_to("", 1.0, percent));
        let mut chart = Chart::new(x, y, title);
        for (index, run) in drawn.iter().enumerate() {
            let curve = of(run);
            let last = float(curve.len().saturating_sub(1).max(1) as u64);
            let points: Vec<(f64, f64)> =
                (0_u64..).zip(curve).map(|(i, time)| (*time, float(i) / last)).collect();
            chart.curve(&points, index, &run.variant, false);
        }
        text.push_str(&figure(title, "", &chart.finish()));
    }
    text.push_str("</div>");
    text
}

/// Variants with all settings equal but one, as curves over that one.
struct Families<'a> {
    names: Vec<String>,
    list: Vec<Vec<&'a VariantResult>>,
    /// How many there are, those included that are too many to be drawn.
    all: usize,
}

/// What a variant is called by, one word each, `but_for` one setting.
fn words(run: &VariantResult, but_for: &str) -> Vec<String> {
    let mode = run.mode.map_or("", crate::config::CacheMode::name).to_owned();
    let mut words = vec![mode, run.format.clone(), run.admission.clone()];
    words.push(if run.prefix_reuse { "reuse" } else { "no reuse" }.to_owned());
    words.push(run.other_settings.clone());
    match but_for {
        "block" => words.push(capacity(&run.capacity)),
        _ => words.push(match run.tokens_per_block {
            0 => "no blocks".to_owned(),
            tokens => format!("blocks of {tokens}"),
        }),
    }
    words
}

impl<'a> Families<'a> {
    fn of(
        runs: impl Iterator<Item = &'a VariantResult>,
        but_for: &str,
        over: fn(&VariantResult) -> u64,
    ) -> Self {
        let mut families: Vec<(Vec<String>, Vec<&VariantResult>)> = Vec::new();
        for run in runs {
            let words = words(run, but_for);
            match families.iter_mut().find(|(of, _)| *of == words) {
                Some((_, family)) => family.push(run),
                None => families.push((words, vec![run])),
            }
        }
        for (_, family) in &mut families {
            family.sort_by_key(|run| over(run));
        }
        families.retain_mut(|(_, family)| {
            // Two capacities may come to one pool, and then to one result. A curve that is at two
            // places at once would be of two settings.
            let figures = |run: &VariantResult| (run.mean_running, run.simulated_s);
            family.dedup_by(|a, b| over(a) == over(b) && figures(a) == figures(b));
            family.len() > 1 && family.windows(2).all(|pair| over(pair[0]) < over(pair[1]))
        });
        let all = families.len();
        families.truncate(MOST_CURVES);
        // What all have in common tells none from another.
        let common = |at: usize| families.iter().all(|(words, _)| words[at] == families[0].0[at]);
        let name = |words: &Vec<String>| {
            let own: Vec<&str> = (0..words.len())
                .filter(|at| families.len() == 1 && *at < 3 || !common(*at))
                .map(|at| words[at].as_str())
                .filter(|word| !word.is_empty())
                .collect();
            if own.is_empty() { words[..2].join(", ") } else { own.join(", ") }
        };
        let names = families.iter().map(|(words, _)| name(words)).collect();
        Self { names, list: families.into_iter().map(|(_, family)| family).collect(), all }
    }
}

/// One chart over a setting: title, what is drawn, how it is written.
type Chartable = (&'static str, fn(&VariantResult) -> f64, fn(f64) -> String);

fn draw(
    families: &Families<'_>,
    kinds: &[Chartable],
    over: fn(&VariantResult) -> f64,
    (label, write_x): (&'static str, fn(f64) -> String),
    line: Option<f64>,
) -> String {
    let mut text = curve_legend(families.names.iter().map(String::as_str));
    left_out(&mut text, families.list.len(), families.all, "curves");
    text.push_str("<div class=\"grid\">");
    for (at, (title, of, write)) in kinds.iter().enumerate() {
        let runs = || families.list.iter().flatten();
        let x = Axis::log_at(label, runs().map(|run| over(run)), write_x);
        let line = line.filter(|_| at == 0);
        let most = runs().map(|run| of(run)).chain(line).fold(0.0, f64::max)
            * if line.is_some() { 1.12 } else { 1.04 };
        let in_bytes = write(2_f64.powi(30)) == bytes(2_f64.powi(30));
        let y = if in_bytes { Axis::bytes("", most) } else { Axis::from_zero("", most, *write) };
        let mut chart = Chart::new(x, y, title);
        for (index, (family, name)) in families.list.iter().zip(&families.names).enumerate() {
            let points: Vec<(f64, f64)> = family.iter().map(|run| (over(run), of(run))).collect();
            chart.curve(&points, index, name, true);
        }
        if let Some(line) = line {
            chart.line(line, &format!("a cache that forgets nothing: {}", percent(line)));
        }
        text.push_str(&figure(title, "", &chart.finish()));
    }
    text.push_str("</div>");
    text
}

/// What the size of blocks does.
pub(super) fn block_size(runs: &[&VariantResult]) -> String {
    let paged = runs.iter().copied().filter(|run| run.tokens_per_block > 0);
    let families = Families::of(paged, "block", |run| u64::from(run.tokens_per_block));
    if families.list.is_empty() {
        return String::new();
    }
    let kinds: [Chartable; 3] = [
        ("Capacity: requests at once, mean", |run| run.mean_running, trimmed),
        ("Wasted in blocks, mean", |run| run.mean_block_waste_bytes, bytes),
        ("Block tables", |run| float(run.table_bytes), bytes),
    ];
    let mut text = "<h2>Block size</h2><p>Small blocks waste less at the end of each sequence and need longer \
         tables.</p>"
        .to_owned();
    let over = |run: &VariantResult| f64::from(run.tokens_per_block);
    text.push_str(&draw(&families, &kinds, over, ("tokens of a block", trimmed), None));
    text
}

/// What the size of the pool does: for reuse, and for those who wait.
pub(super) fn pool_size(runs: &[&VariantResult], ceiling: f64) -> String {
    let families = Families::of(runs.iter().copied(), "pool", |run| run.pool_bytes);
    // Budgets are filled with whole blocks, so the pools of one budget differ a little.
    let differs = |family: &Vec<&VariantResult>| {
        family[family.len() - 1].pool_bytes > family[0].pool_bytes / 50 * 51
    };
    if !families.list.iter().any(differs) {
        return String::new();
    }
    let reuse = runs.iter().any(|run| run.prefix_reuse) && ceiling > 0.0;
    let goals = runs.iter().any(|run| run.goodput_per_s.is_some());
    let served = if goals { "Requests a second within the goals" } else { "Requests a second" };
    let mut kinds: Vec<Chartable> = vec![
        ("Capacity: requests at once, mean", |run| run.mean_running, trimmed),
        (served, rate, trimmed),
        ("First token, p50", |run| run.first_token_ms.p50, ms),
    ];
    if reuse {
        kinds[0] = ("Hit rate: prompt tokens found", |run| run.hit_rate, percent);
    }
    let mut text = "<h2>Pool size</h2>".to_owned();
    let over = |run: &VariantResult| float(run.pool_bytes);
    text.push_str(&draw(&families, &kinds, over, ("pool", bytes), reuse.then_some(ceiling)));
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::CacheMode;

    fn run(tokens_per_block: u32, settings: &str, mean_running: f64) -> VariantResult {
        let mut run = VariantResult {
            variant: format!("b{tokens_per_block} {settings}"),
            mode: Some(CacheMode::Hybrid),
            format: "f16".to_owned(),
            tokens_per_block,
            other_settings: settings.to_owned(),
            mean_running,
            requests_completed: 1,
            ..VariantResult::default()
        };
        run.first_token_ms.curve = vec![0.0, 1.0, 2.0];
        run
    }

    fn families<'a>(runs: &'a [VariantResult]) -> Families<'a> {
        Families::of(runs.iter(), "block", |run| u64::from(run.tokens_per_block))
    }

    #[test]
    fn a_curve_joins_variants_that_differ_in_one_setting() {
        let runs =
            [run(8, "", 1.0), run(16, "", 2.0), run(8, "first:4", 3.0), run(16, "first:4", 4.0)];
        let found = families(&runs);
        assert_eq!(found.list.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2]);
        assert_eq!(found.names, ["hybrid, f16", "first:4"]);
        // What differs in a way that is not in the results is no curve; what is the same is one
        // point.
        let runs = [run(8, "", 1.0), run(8, "", 5.0), run(16, "", 2.0)];
        assert!(families(&runs).list.is_empty());
        let runs = [run(8, "", 1.0), run(8, "", 1.0), run(16, "", 2.0)];
        assert_eq!(families(&runs).list[0].len(), 2);
    }

    #[test]
    fn what_is_too_much_to_draw_is_said() {
        let runs: Vec<_> =
            (0..30).flat_map(|i| [8, 16].map(|b| run(b, &format!("watermark {i}"), 1.0))).collect();
        let runs: Vec<_> = runs.iter().collect();
        assert!(block_size(&runs).contains("<p>The first 24 of 30 curves.</p>"));
        assert!(latency(&runs).contains("<p>The first 24 of 60 variants.</p>"));
        assert!(!latency(&runs[..24]).contains("The first"));
    }
}
