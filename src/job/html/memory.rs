//! What the pool's bytes were for: in the mean, over time, and block by block at the fullest
//! moment.

use std::fmt::Write as _;

use super::chart::{Axis, Chart, curve_legend, escaped, figure, legend};
use super::number::{bytes, percent, trimmed};
use crate::job::meter::float;
use crate::job::replay::{Picture, Point, VariantResult};
use crate::units::grouped;

/// The most variants whose memory and blocks are drawn, each in a picture of its own.
const MOST_DRAWN: usize = 24;

/// What is drawn of a point, and its name.
type Part = (fn(&Point) -> u64, &'static str);

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

/// The bytes of each of `KINDS` in the mean.
fn means(run: &VariantResult) -> [f64; 6] {
    let pool = float(run.pool_bytes);
    let taken = run.mean_held_bytes + run.mean_promised_bytes;
    let cached = run.mean_cached_bytes.min((pool - taken).max(0.0));
    [
        run.mean_used_bytes,
        run.mean_block_waste_bytes,
        run.mean_slot_waste_bytes,
        run.mean_promised_bytes,
        cached,
        (pool - taken - cached).max(0.0),
    ]
}

/// A bar for each variant: its pool, by what it was for while steps ran.
pub(super) fn bars(runs: &[&VariantResult]) -> String {
    if runs.is_empty() {
        return String::new();
    }
    let there = |kind: usize| runs.iter().any(|run| means(run)[kind] > 0.0);
    let mut text = "<h2>Where the memory went</h2><p>Each pool in the mean over the time in which steps ran. Promised \
         memory and waste are what no other request can have; what is kept for reuse is given up when it is needed.</p>"
        .to_owned();
    let kinds = KINDS.iter().enumerate().filter(|(kind, _)| there(*kind));
    text.push_str(&legend(kinds.map(|(_, (color, name, _))| ((*color).to_owned(), *name))));
    text.push_str("<div class=\"bars\">");
    for run in runs {
        let pool = float(run.pool_bytes).max(1.0);
        let _ = write!(text, "<div>{}</div><div class=\"bar\">", escaped(&run.variant));
        for ((color, name, _), part) in KINDS.iter().zip(means(run)) {
            let share = part / pool;
            if share < 5e-4 {
                continue;
            }
            let label = if share >= 0.08 {
                percent((share * 100.0).round() / 100.0)
            } else {
                String::new()
            };
            let _ = write!(
                text,
                "<i class=\"{color}\" style=\"width:{:.2}%\" title=\"{name}: {}\">{label}</i>",
                100.0 * share,
                bytes(part)
            );
        }
        let _ = write!(
            text,
            "</div><div>{} for {} at once</div>",
            bytes(float(run.pool_bytes)),
            trimmed(run.mean_running)
        );
    }
    text.push_str("</div>");
    text
}

/// What the pool's bytes were over time.
pub(super) fn over_time(runs: &[&VariantResult]) -> String {
    let drawn: Vec<_> = runs.iter().filter(|run| run.series.len() > 1).take(MOST_DRAWN).collect();
    if drawn.is_empty() {
        return String::new();
    }
    let mut text = "<h2>Memory over time</h2>".to_owned();
    let there = |part: fn(&Point) -> u64| {
        drawn.iter().any(|run| run.series.iter().any(|point| part(point) > 0))
    };
    let kinds = KINDS.iter().filter(|(_, _, part)| there(*part));
    text.push_str(&legend(kinds.map(|(color, name, _)| ((*color).to_owned(), *name))));
    let all = runs.iter().filter(|run| run.series.len() > 1).count();
    left_out(&mut text, drawn.len(), all, "variants");
    text.push_str("<div class=\"grid\">");
    for run in drawn {
        let at: Vec<f64> = run.series.iter().map(|point| point.at_s).collect();
        let end = at.last().copied().unwrap_or(1.0).max(1e-9);
        let about = format!("memory of {} over time", run.variant);
        let mut chart = Chart::new(
            Axis::up_to("seconds", end, trimmed),
            Axis::bytes("", float(run.pool_bytes)),
            &about,
        );
        let mut low = vec![0.0; at.len()];
        for (color, name, part) in &KINDS {
            let parts = low.iter().zip(&run.series);
            let high: Vec<f64> = parts.map(|(low, point)| low + float(part(point))).collect();
            if high != low {
                chart.band(&at, &low, &high, color, name);
            }
            low = high;
        }
        let (pool, most) = (bytes(float(run.pool_bytes)), run.peak_running);
        let note = format!("of {pool}, {most} at once at most");
        text.push_str(&figure(&run.variant, &note, &chart.finish()));
    }
    text.push_str("</div>");
    text
}

/// Says how many are not drawn.
pub(super) fn left_out(text: &mut String, drawn: usize, all: usize, what: &str) {
    if drawn < all {
        let _ = write!(text, "<p>The first {drawn} of {all} {what}.</p>");
    }
}

/// What is free beside the longest run of it, for what needs its memory in one piece.
pub(super) fn fragmentation(runs: &[&VariantResult]) -> String {
    let broken = |run: &&&VariantResult| {
        run.series.len() > 1 && run.series.iter().any(|point| point.largest_run < point.free)
    };
    let all = runs.iter().filter(broken).count();
    let drawn: Vec<_> = runs.iter().filter(broken).take(MOST_DRAWN).collect();
    if drawn.is_empty() {
        return String::new();
    }
    let mut text = "<h2>Fragmentation</h2><p>A request whose memory must lie in one piece waits when the largest piece is \
         too short, however much is free in all. Blocks can be anywhere, so paged variants have nothing to show here.</p>"
        .to_owned();
    text.push_str(&curve_legend(["free", "largest free piece"].into_iter()));
    left_out(&mut text, drawn.len(), all, "variants");
    text.push_str("<div class=\"grid\">");
    for run in drawn {
        let end = run.series.last().map_or(1.0, |point| point.at_s).max(1e-9);
        let most = run.series.iter().map(|point| point.free).max().unwrap_or(1);
        let mut chart = Chart::new(
            Axis::up_to("seconds", end, trimmed),
            Axis::bytes("", float(most)),
            &format!("free memory of {} over time", run.variant),
        );
        let parts: [Part; 2] =
            [(|point| point.free, "free"), (|point| point.largest_run, "largest free piece")];
        for (index, (of, name)) in parts.into_iter().enumerate() {
            let points: Vec<(f64, f64)> =
                run.series.iter().map(|point| (point.at_s, float(of(point)))).collect();
            chart.curve(&points, index, name, false);
        }
        let note =
            format!("{} waited with enough free in pieces", grouped(run.alloc_failures_with_room));
        text.push_str(&figure(&run.variant, &note, &chart.finish()));
    }
    text.push_str("</div>");
    text
}

/// The kinds of a cell, and what they are called.
const CELLS: [(&str, &str); 4] = [
    ("used", "tokens"),
    ("slots", "held, no token"),
    ("cached", "kept for reuse"),
    ("free", "free"),
];

/// The pool's blocks, slots or bytes at the fullest moment.
pub(super) fn pictures(runs: &[&VariantResult]) -> String {
    let all = runs.iter().filter_map(|run| Some((*run, run.picture.as_ref()?)));
    let drawn: Vec<(&VariantResult, &Picture)> = all.clone().take(MOST_DRAWN).collect();
    if drawn.is_empty() {
        return String::new();
    }
    let mut text = "<h2>The pool at its fullest moment</h2><p>The pool from its first byte to its last, in lines \
         from left to right.</p>"
        .to_owned();
    let there =
        |kind: usize| drawn.iter().any(|(_, picture)| parts(picture).any(|cell| cell[kind] > 0));
    let kinds = CELLS.iter().enumerate().filter(|(kind, _)| there(*kind));
    text.push_str(&legend(kinds.map(|(_, (color, name))| ((*color).to_owned(), *name))));
    left_out(&mut text, drawn.len(), all.count(), "variants");
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
        text.push_str(&figure(&run.variant, &note, &cells(picture, &run.variant)));
    }
    text.push_str("</div>");
    text
}

/// Each cell in ninths of used, held, kept and free.
fn parts(picture: &Picture) -> impl Iterator<Item = [u32; 4]> + '_ {
    let digit = |text: &str, at: usize| {
        text.as_bytes().get(at).map_or(0, |byte| u32::from(byte.saturating_sub(b'0')).min(9))
    };
    (0..picture.held.len()).map(move |at| {
        let held = digit(&picture.held, at);
        let used = digit(&picture.used, at).min(held);
        let cached = digit(&picture.cached, at).min(9 - held);
        [used, held - used, cached, 9 - held - cached]
    })
}

/// The cells of a picture. Those that are alike and stand in a row are one bar.
fn cells(picture: &Picture, name: &str) -> String {
    const HEIGHT: usize = 8;
    const WIDTH: usize = 5;
    let cells: Vec<[u32; 4]> = parts(picture).collect();
    // About four by three, in whole columns.
    let columns = (1..=64).find(|n| n * n * WIDTH * 3 >= cells.len() * HEIGHT * 4).unwrap_or(64);
    let columns = columns.max(8);
    let (width, height) = (columns * WIDTH, cells.len().div_ceil(columns) * HEIGHT);
    let mut svg = format!(
        "<svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"blocks of {}\">",
        escaped(name)
    );
    for (row, line) in cells.chunks(columns).enumerate() {
        let mut from = 0;
        for alike in line.chunk_by(|a, b| a == b) {
            let (x, len) = (from * WIDTH, alike.len() * WIDTH);
            from += alike.len();
            // From the bottom of the line to its top; a gap between lines is left.
            let high = float(HEIGHT as u64) - 1.5;
            let bottom = float((row * HEIGHT) as u64) + high;
            let mut below = 0.0;
            for ((color, _), part) in CELLS.iter().zip(alike[0]).filter(|(_, part)| *part > 0) {
                let part = high * f64::from(part) / 9.0;
                below += part;
                let _ = write!(
                    svg,
                    "<path class=\"{color}\" d=\"M{x} {:.1}h{len}v{part:.1}h-{len}z\"/>",
                    bottom - below
                );
            }
        }
    }
    svg.push_str("</svg>");
    svg
}
