//! The parts of the page, each empty where there is nothing to show.

use std::fmt::Write as _;

use super::chart::{Axis, Chart, Scale, Size, escaped};
use crate::job::meter::float;
use crate::job::replay::{Picture, Point, VariantResult};
use crate::units::grouped;

/// Colours for variants; more than these would not be told apart.
const COLORS: usize = 8;
/// The most variants whose memory and blocks are drawn, each in a picture of its own.
const MOST_DRAWN: usize = 24;
const SMALL: Size = Size { width: 420.0, height: 220.0 };
const WIDE: Size = Size { width: 980.0, height: 320.0 };

/// The kinds of memory, from the bottom to the top: colour, name, and how much of it there is.
type Kind = (&'static str, &'static str, fn(&Point) -> u64);
const KINDS: [Kind; 6] = [
    ("used", "tokens", |p| p.used),
    ("blocks", "wasted in blocks", |p| p.held.saturating_sub(p.used).saturating_sub(p.slot_waste)),
    ("slots", "wasted in slots", |p| p.slot_waste),
    ("promised", "promised", |p| p.promised),
    ("cached", "kept for reuse", |p| p.cached.min(p.free)),
    ("free", "free", |p| p.free.saturating_sub(p.cached)),
];

fn color(index: usize) -> String {
    format!("s{}", index % COLORS)
}

fn bytes(number: f64) -> String {
    for (unit, name) in [(2_f64.powi(40), "TiB"), (2_f64.powi(30), "GiB"), (2_f64.powi(20), "MiB")]
    {
        if number >= unit {
            return format!("{} {name}", trimmed(number / unit));
        }
    }
    format!("{} KiB", trimmed(number / 1024.0))
}

/// A number to three digits, without zeros at its end.
fn trimmed(number: f64) -> String {
    let digits = match number.abs() {
        n if n >= 100.0 => 0,
        n if n >= 10.0 => 1,
        _ => 2,
    };
    let text = format!("{number:.digits$}");
    if !text.contains('.') {
        return text;
    }
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn ms(number: f64) -> String {
    if number >= 1000.0 {
        format!("{} s", trimmed(number / 1000.0))
    } else {
        format!("{} ms", trimmed(number))
    }
}

fn percent(number: f64) -> String {
    format!("{} %", trimmed(100.0 * number))
}

/// A legend: a colour and a name each.
fn legend<'a>(entries: impl Iterator<Item = (String, &'a str)>) -> String {
    let mut text = "<div class=\"legend\">".to_owned();
    for (color, name) in entries {
        let _ = write!(
            text,
            "<span><i style=\"background:var(--{color})\"></i>{}</span>",
            escaped(name)
        );
    }
    text.push_str("</div>");
    text
}

fn figure(class: &str, title: &str, note: &str, inside: &str) -> String {
    format!(
        "<figure class=\"{class}\"><figcaption>{} <span>{}</span></figcaption>{inside}</figure>",
        escaped(title),
        escaped(note)
    )
}

/// All variants and the numbers that matter most; the best of each column is bold.
pub(super) fn table(runs: &[&VariantResult]) -> String {
    type Column = (&'static str, fn(&VariantResult) -> f64, fn(f64) -> String, bool);
    let columns: [Column; 10] = [
        ("pool", |r| float(r.pool_bytes), bytes, false),
        ("at once, mean", |r| r.mean_running, trimmed, true),
        ("used of taken", |r| r.utilization, percent, true),
        (
            "wasted, mean",
            |r| r.mean_block_waste_bytes + r.mean_slot_waste_bytes + r.mean_promised_bytes,
            bytes,
            false,
        ),
        ("hit rate", |r| r.hit_rate, percent, true),
        ("good requests/s", |r| r.goodput_per_s.unwrap_or(r.requests_per_s), trimmed, true),
        ("output tokens/s", |r| r.output_tokens_per_s, trimmed, true),
        ("first token p50", |r| r.first_token_ms.p50, ms, false),
        ("first token p99", |r| r.first_token_ms.p99, ms, false),
        ("per token p50", |r| r.token_ms.p50, ms, false),
    ];
    if runs.is_empty() {
        return String::new();
    }
    let mut text = "<div class=\"scroll\"><table><tr><th>variant</th>".to_owned();
    for (name, ..) in &columns {
        let _ = write!(text, "<th>{name}</th>");
    }
    text.push_str("<th>preempted</th><th>refused</th></tr>");
    for run in runs {
        let _ = write!(text, "<tr><td>{}</td>", escaped(&run.variant));
        for (name, value, write, more) in &columns {
            let all = runs.iter().map(|run| value(run));
            let best =
                if *more { all.fold(f64::MIN, f64::max) } else { all.fold(f64::MAX, f64::min) };
            let is_best = *name != "pool" && runs.len() > 1 && value(run) == best;
            let class = if is_best { " class=\"best\"" } else { "" };
            let _ = write!(text, "<td{class}>{}</td>", write(value(run)));
        }
        let refused = run.requests_refused_too_long + run.requests_refused_never_fits;
        let _ =
            write!(text, "<td>{}</td><td>{}</td></tr>", grouped(run.preemptions), grouped(refused));
    }
    text.push_str("</table></div>");
    text
}

/// What the pool's bytes were over time.
pub(super) fn memory(runs: &[&VariantResult]) -> String {
    let drawn: Vec<_> = runs.iter().filter(|run| run.series.len() > 1).take(MOST_DRAWN).collect();
    if drawn.is_empty() {
        return String::new();
    }
    let mut text = "<h2>Memory over time</h2><p>What each byte of the pool was for. Promised memory and waste are \
         what no other request can have; what is kept for reuse is given up when it is needed.</p>"
        .to_owned();
    text.push_str(&legend(KINDS.iter().map(|(color, name, _)| ((*color).to_owned(), *name))));
    text.push_str("<div class=\"grid\">");
    for run in drawn {
        let at: Vec<f64> = run.series.iter().map(|point| point.at_s).collect();
        let end = at.last().copied().unwrap_or(1.0);
        let x = Axis {
            label: "seconds",
            scale: Scale::Linear,
            min: 0.0,
            max: end.max(1e-9),
            write: trimmed,
        };
        let pool = float(run.pool_bytes);
        let y = Axis { max: pool.max(1.0), ..Axis::from_zero("", pool, bytes) };
        let mut chart = Chart::new(SMALL, x, y, &format!("memory of {} over time", run.variant));
        let mut low = vec![0.0; at.len()];
        for (color, name, part) in &KINDS {
            let parts = low.iter().zip(&run.series);
            let high: Vec<f64> = parts.map(|(low, point)| low + float(part(point))).collect();
            chart.band(&at, &low, &high, color, name);
            low = high;
        }
        let note = format!(
            "{} at once, {} used of what was taken",
            trimmed(run.mean_running),
            percent(run.utilization)
        );
        text.push_str(&figure("", &run.variant, &note, &chart.finish()));
    }
    text.push_str("</div>");
    text
}

/// Which part of the requests was served within which time.
pub(super) fn latency(runs: &[&VariantResult]) -> String {
    type Of = fn(&VariantResult) -> &[f64];
    let kinds: [(&str, Of); 2] = [
        ("Time to the first token", |run| &run.first_token_ms.curve),
        ("Time from token to token", |run| &run.token_ms.curve),
    ];
    let drawn = &runs[..runs.len().min(COLORS)];
    if drawn.iter().all(|run| run.first_token_ms.curve.is_empty()) {
        return String::new();
    }
    let mut text = "<h2>Latency</h2><p>The part of the requests that waited no longer than this: further left is \
         better.</p>"
        .to_owned();
    text.push_str(&legend(
        drawn.iter().enumerate().map(|(i, run)| (color(i), run.variant.as_str())),
    ));
    if drawn.len() < runs.len() {
        let _ = write!(text, "<p>The first {COLORS} variants are drawn.</p>");
    }
    text.push_str("<div class=\"grid\">");
    for (title, of) in kinds {
        let numbers = drawn.iter().flat_map(|run| of(run).iter().copied());
        let x = Axis::log("", numbers, ms);
        let y = Axis { max: 1.0, ..Axis::from_zero("of requests", 1.0, percent) };
        let mut chart = Chart::new(Size { height: 280.0, ..SMALL }, x, y, title);
        for (index, run) in drawn.iter().enumerate() {
            let curve = of(run);
            let last = float(curve.len().saturating_sub(1).max(1) as u64);
            let points: Vec<(f64, f64)> =
                (0_u64..).zip(curve).map(|(i, time)| (*time, float(i) / last)).collect();
            chart.curve(&points, &color(index), &run.variant, false);
        }
        text.push_str(&figure("", title, "", &chart.finish()));
    }
    text.push_str("</div>");
    text
}

/// Variants with all settings equal but one, as curves over that one.
fn families<'a>(
    runs: &[&'a VariantResult],
    same: impl Fn(&VariantResult, &VariantResult) -> bool,
    over: impl Fn(&VariantResult) -> u64,
) -> Vec<Vec<&'a VariantResult>> {
    let mut families: Vec<Vec<&VariantResult>> = Vec::new();
    for run in runs {
        match families.iter_mut().find(|family| same(family[0], run)) {
            Some(family) => family.push(run),
            None => families.push(vec![run]),
        }
    }
    for family in &mut families {
        family.sort_by_key(|run| over(run));
    }
    families.retain(|family| family.len() > 1 && over(family[0]) != over(family[family.len() - 1]));
    families
}

/// How a family is called: what its variants have in common.
fn family_name(run: &VariantResult, with_blocks: bool) -> String {
    let mode = run.mode.map_or("", crate::config::CacheMode::name);
    let blocks = if with_blocks && run.tokens_per_block > 0 {
        format!(", blocks of {}", run.tokens_per_block)
    } else {
        String::new()
    };
    let reuse = if run.prefix_reuse { "" } else { ", no reuse" };
    format!("{mode}, {}, {}{blocks}{reuse}", run.format, run.admission)
}

fn alike(a: &VariantResult, b: &VariantResult) -> bool {
    (a.mode, &a.format, &a.admission, a.prefix_reuse)
        == (b.mode, &b.format, &b.admission, b.prefix_reuse)
}

/// What the size of blocks does.
pub(super) fn block_size(runs: &[&VariantResult]) -> String {
    type Chartable = (&'static str, fn(&VariantResult) -> f64, fn(f64) -> String);
    let mut paged: Vec<&VariantResult> =
        runs.iter().copied().filter(|r| r.tokens_per_block > 0).collect();
    // Budgets are filled with whole blocks, so their pools differ by less than a block or so.
    paged.sort_by_key(|run| run.index);
    let same = |a: &VariantResult, b: &VariantResult| alike(a, b) && a.capacity == b.capacity;
    let families = families(&paged, same, |run| u64::from(run.tokens_per_block));
    if families.is_empty() {
        return String::new();
    }
    let kinds: [Chartable; 3] = [
        ("Requests at once, mean", |run| run.mean_running, trimmed),
        ("Wasted in blocks, mean", |run| run.mean_block_waste_bytes, bytes),
        ("Block tables", |run| float(run.table_bytes), bytes),
    ];
    let mut text = "<h2>Block size</h2><p>Small blocks waste less at the end of each sequence and need longer \
         tables.</p>"
        .to_owned();
    let name = |family: &Vec<&VariantResult>| {
        format!("{}, {}", family_name(family[0], false), family[0].capacity)
    };
    let names: Vec<String> = families.iter().map(name).collect();
    text.push_str(&legend(names.iter().enumerate().map(|(i, name)| (color(i), name.as_str()))));
    text.push_str("<div class=\"grid\">");
    for (title, of, write) in kinds {
        let sizes = families.iter().flatten().map(|run| f64::from(run.tokens_per_block));
        let x = Axis::log("tokens of a block", sizes, trimmed);
        let most = families.iter().flatten().map(|run| of(run)).fold(0.0, f64::max);
        let mut chart = Chart::new(SMALL, x, Axis::from_zero("", most, write), title);
        for (index, (family, name)) in families.iter().zip(&names).enumerate() {
            let points: Vec<(f64, f64)> =
                family.iter().map(|run| (f64::from(run.tokens_per_block), of(run))).collect();
            chart.curve(&points, &color(index), name, true);
        }
        text.push_str(&figure("", title, "", &chart.finish()));
    }
    text.push_str("</div>");
    text
}

/// What the size of the pool does for reuse.
pub(super) fn hit_rate(runs: &[&VariantResult], ceiling: f64) -> String {
    let reusing: Vec<&VariantResult> =
        runs.iter().copied().filter(|run| run.prefix_reuse).collect();
    let same = |a: &VariantResult, b: &VariantResult| {
        alike(a, b) && a.tokens_per_block == b.tokens_per_block
    };
    let mut families = families(&reusing, same, |run| run.pool_bytes);
    families.truncate(COLORS);
    if families.is_empty() || ceiling <= 0.0 {
        return String::new();
    }
    let mut text = "<h2>Hit rate</h2><p>The part of the prompts' tokens that was in the cache, over the size of the \
         pool; the dashed line is a cache that forgets nothing.</p>"
        .to_owned();
    let names: Vec<String> = families.iter().map(|family| family_name(family[0], true)).collect();
    text.push_str(&legend(names.iter().enumerate().map(|(i, name)| (color(i), name.as_str()))));
    let sizes = families.iter().flatten().map(|run| float(run.pool_bytes));
    let x = Axis::log("pool", sizes, bytes);
    let y = Axis::from_zero("", ceiling * 1.05, percent);
    let mut chart = Chart::new(WIDE, x, y, "hit rate over the size of the pool");
    for (index, (family, name)) in families.iter().zip(&names).enumerate() {
        let points: Vec<(f64, f64)> =
            family.iter().map(|run| (float(run.pool_bytes), run.hit_rate)).collect();
        chart.curve(&points, &color(index), name, true);
    }
    chart.line(ceiling, &format!("at most {}", percent(ceiling)));
    text.push_str("<div class=\"grid\">");
    text.push_str(&figure("wide", "Hit rate against cache size", "", &chart.finish()));
    text.push_str("</div>");
    text
}

/// The pool's blocks, slots or bytes at the fullest moment.
pub(super) fn pictures(runs: &[&VariantResult]) -> String {
    let drawn: Vec<(&VariantResult, &Picture)> = runs
        .iter()
        .filter_map(|run| Some((*run, run.picture.as_ref()?)))
        .take(MOST_DRAWN)
        .collect();
    if drawn.is_empty() {
        return String::new();
    }
    let mut text = "<h2>The pool at its fullest moment</h2><p>Every cell is a piece of the pool, in the order in which \
         it lies in memory.</p>"
        .to_owned();
    let kinds = [
        ("used", "tokens"),
        ("slots", "held, no token"),
        ("cached", "kept for reuse"),
        ("free", "free"),
    ];
    text.push_str(&legend(kinds.iter().map(|(color, name)| ((*color).to_owned(), *name))));
    text.push_str("<div class=\"grid\">");
    for (run, picture) in drawn {
        let per_cell = if picture.unit == "byte" {
            bytes(float(picture.units_per_cell))
        } else if picture.units_per_cell == 1 {
            format!("one {}", picture.unit)
        } else {
            format!("{} {}s", grouped(picture.units_per_cell), picture.unit)
        };
        let note = format!("at {} s; a cell is {per_cell}", trimmed(float(picture.at_us) / 1e6));
        text.push_str(&figure("", &run.variant, &note, &cells(picture, &run.variant)));
    }
    text.push_str("</div>");
    text
}

/// The cells of a picture: full ones of one kind in a row are one bar, others are drawn in parts.
fn cells(picture: &Picture, name: &str) -> String {
    const SIDE: usize = 8;
    let digits = |text: &str| -> Vec<u32> { text.chars().filter_map(|c| c.to_digit(10)).collect() };
    let (held, used, cached) =
        (digits(&picture.held), digits(&picture.used), digits(&picture.cached));
    let count = held.len();
    // Four by three, as far as whole columns go.
    let columns = (1..=64).find(|columns| columns * columns * 3 >= count * 4).unwrap_or(64);
    let rows = count.div_ceil(columns);
    let (width, height) = (columns * SIDE, rows * SIDE);
    let mut svg = format!(
        "<svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"blocks of {}\" \
         shape-rendering=\"crispEdges\">",
        escaped(name)
    );
    for (index, held) in held.iter().enumerate() {
        let (x, y) = (index % columns * SIDE, index / columns * SIDE);
        let used = used.get(index).copied().unwrap_or(0).min(*held);
        let cached = cached.get(index).copied().unwrap_or(0);
        // From the bottom of the cell to its top, in ninths.
        let mut from = 0;
        let rest = 9_u32.saturating_sub(held + cached);
        for (color, part) in
            [("used", used), ("slots", held - used), ("cached", cached), ("free", rest)]
        {
            let part = part.min(9 - from);
            if part > 0 {
                let (low, high) = (f64::from(from) / 9.0, f64::from(from + part) / 9.0);
                let side = float(SIDE as u64) - 1.0;
                let _ = write!(
                    svg,
                    "<rect x=\"{x}\" y=\"{:.1}\" width=\"{side}\" height=\"{:.1}\" fill=\"var(--{color})\"/>",
                    float(y as u64) + side * (1.0 - high),
                    side * (high - low)
                );
            }
            from += part;
        }
    }
    svg.push_str("</svg>");
    svg
}
