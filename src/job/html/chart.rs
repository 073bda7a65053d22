//! Charts as SVG: axes, curves and stacked areas, drawn by hand. Colours come from the page's
//! style, so that one file is right in light and in dark.

use std::fmt::Write as _;

use crate::job::meter::float;

/// The size of a chart in its own units, which are about pixels.
const WIDTH: f64 = 340.0;
const HEIGHT: f64 = 210.0;

/// Room for the numbers of the axes.
const LEFT: f64 = 54.0;
const BOTTOM: f64 = 36.0;
const TOP: f64 = 10.0;
const RIGHT: f64 = 14.0;

/// How wide a letter of a label is, about.
const LETTER: f64 = 6.2;

/// Colours; beyond these curves are dashed.
const COLORS: usize = 8;

/// The name of the n-th colour.
pub(super) fn color(index: usize) -> String {
    format!("s{}", index % COLORS)
}

/// How numbers lie along an axis.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scale {
    Linear,
    Log,
}

/// One axis: its range, the numbers that are written beside it, and how.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    label: &'static str,
    scale: Scale,
    min: f64,
    max: f64,
    ticks: Vec<f64>,
    write: fn(f64) -> String,
}

impl Axis {
    /// An axis from 0 to a round number above the largest.
    pub(super) fn from_zero(label: &'static str, max: f64, write: fn(f64) -> String) -> Self {
        let step = round_step(max);
        let max = if max > 0.0 { (max / step).ceil() * step } else { 1.0 };
        Self::linear(label, max, step, write)
    }

    /// An axis from 0 to just this number.
    pub(super) fn up_to(label: &'static str, max: f64, write: fn(f64) -> String) -> Self {
        Self::linear(label, if max > 0.0 { max } else { 1.0 }, round_step(max), write)
    }

    /// An axis of bytes, from 0 to just this number, with powers of two between.
    pub(super) fn bytes(label: &'static str, max: f64) -> Self {
        let max = max.max(1.0);
        let step = (max / 5.0).log2().ceil().exp2();
        Self::linear(label, max, step, super::number::bytes)
    }

    fn linear(label: &'static str, max: f64, step: f64, write: fn(f64) -> String) -> Self {
        let ticks = (0..=20).map(|i| f64::from(i) * step).take_while(|tick| *tick <= max * 1.001);
        Self { label, scale: Scale::Linear, min: 0.0, max, ticks: ticks.collect(), write }
    }

    /// A logarithmic axis around these numbers, of which those above 0 count.
    pub(super) fn log(
        label: &'static str,
        numbers: impl Iterator<Item = f64>,
        write: fn(f64) -> String,
    ) -> Self {
        let (mut min, mut max) = (f64::INFINITY, 0.0_f64);
        for number in numbers.filter(|number| *number > 0.0) {
            min = min.min(number);
            max = max.max(number);
        }
        if max <= 0.0 {
            (min, max) = (1.0, 10.0);
        }
        if max / min < 1.5 {
            (min, max) = (min / 1.5, max * 1.5);
        }
        let factors: &[f64] = match (max / min).log10() {
            d if d > 2.5 => &[1.0],
            d if d > 1.2 => &[1.0, 3.0],
            _ => &[1.0, 1.5, 2.0, 3.0, 5.0, 7.0],
        };
        let first = min.log10().floor();
        let ticks = (0..24)
            .flat_map(|i| factors.iter().map(move |f| f * 10_f64.powf(first + f64::from(i))))
            .filter(|tick| *tick >= min * 0.999 && *tick <= max * 1.001);
        Self { label, scale: Scale::Log, min, max, ticks: ticks.collect(), write }
    }

    /// A logarithmic axis with these numbers written beside it and no others.
    pub(super) fn log_at(
        label: &'static str,
        numbers: impl Iterator<Item = f64>,
        write: fn(f64) -> String,
    ) -> Self {
        let mut ticks: Vec<f64> = numbers.filter(|number| *number > 0.0).collect();
        ticks.sort_by(f64::total_cmp);
        ticks.dedup_by(|a, b| *a / *b < 1.02);
        Self { ticks: ticks.clone(), ..Self::log(label, ticks.into_iter(), write) }
    }

    /// Where a number lies, from 0 to 1.
    fn place(&self, number: f64) -> f64 {
        let place = match self.scale {
            Scale::Linear => (number - self.min) / (self.max - self.min),
            Scale::Log => (number.max(self.min) / self.min).ln() / (self.max / self.min).ln(),
        };
        place.clamp(0.0, 1.0)
    }
}

/// A round distance of which about five fit.
fn round_step(range: f64) -> f64 {
    if range <= 0.0 {
        return 1.0;
    }
    let power = 10_f64.powf((range / 5.0).log10().floor());
    let rough = range / 5.0 / power;
    let round = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().find(|r| rough <= *r).unwrap_or(10.0);
    round * power
}

/// A chart that is being drawn.
#[derive(Debug)]
pub(super) struct Chart {
    svg: String,
    x: Axis,
    y: Axis,
}

impl Chart {
    /// An empty chart with its axes. `about` says what it shows to those who cannot see it.
    pub(super) fn new(x: Axis, y: Axis, about: &str) -> Self {
        let svg = format!(
            "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">",
            escaped(about)
        );
        let mut chart = Self { svg, x, y };
        chart.draw_y();
        chart.draw_x();
        chart
    }

    fn draw_y(&mut self) {
        let Self { svg, y, .. } = self;
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for tick in &y.ticks {
            let at = bottom - y.place(*tick) * (bottom - TOP);
            // Writing to a String cannot fail, here and below.
            let _ = write!(
                svg,
                "<path class=\"rule\" d=\"M{LEFT} {at:.1}H{right}\"/><text x=\"{:.1}\" y=\"{:.1}\" \
                 text-anchor=\"end\">{}</text>",
                LEFT - 6.0,
                at + 4.0,
                escaped(&(y.write)(*tick))
            );
        }
    }

    /// The axis below; of numbers that would run into each other every second or third is written.
    fn draw_x(&mut self) {
        let Self { svg, x, .. } = self;
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        let labels: Vec<(f64, f64, String)> = (x.ticks.iter())
            .map(|tick| {
                let (at, text) = (LEFT + x.place(*tick) * (right - LEFT), (x.write)(*tick));
                // A label at the end of the axis stays within the picture.
                let half = float(text.chars().count() as u64) * LETTER / 2.0;
                (at, half, text)
            })
            .collect();
        let middle = |(at, half, _): &(f64, f64, String)| at.min(WIDTH - half);
        let fits = |every: &usize| {
            let written: Vec<_> = labels.iter().step_by(*every).collect();
            written
                .windows(2)
                .all(|pair| middle(pair[0]) + pair[0].1 + 6.0 <= middle(pair[1]) - pair[1].1)
        };
        let every = (1..labels.len()).find(fits).unwrap_or(labels.len().max(1));
        for (index, label) in labels.iter().enumerate() {
            let _ = write!(svg, "<path class=\"axis\" d=\"M{:.1} {bottom}v4\"/>", label.0);
            if index % every == 0 {
                let _ = write!(
                    svg,
                    "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                    middle(label),
                    bottom + 15.0,
                    escaped(&label.2)
                );
            }
        }
        let _ = write!(
            svg,
            "<path class=\"axis\" d=\"M{LEFT} {TOP}V{bottom}H{right}\"/><text x=\"{:.1}\" y=\"{:.1}\" \
             text-anchor=\"middle\">{}</text>",
            f64::midpoint(LEFT, right),
            HEIGHT - 5.0,
            escaped(x.label)
        );
    }

    fn point(&self, x: f64, y: f64) -> (f64, f64) {
        let across = LEFT + self.x.place(x) * (WIDTH - RIGHT - LEFT);
        let up = HEIGHT - BOTTOM - self.y.place(y) * (HEIGHT - BOTTOM - TOP);
        (across, up)
    }

    fn path(&self, points: impl Iterator<Item = (f64, f64)>) -> String {
        let mut path = String::new();
        let mut last = String::new();
        for (x, y) in points {
            let (x, y) = self.point(x, y);
            let place = format!("{x:.1} {y:.1}");
            if place != last {
                let _ = write!(path, "{}{place}", if path.is_empty() { 'M' } else { 'L' });
                last = place;
            }
        }
        path
    }

    /// The `index`-th curve, through these points, with a dot at each if `dots`.
    pub(super) fn curve(&mut self, points: &[(f64, f64)], index: usize, name: &str, dots: bool) {
        let (path, color) = (self.path(points.iter().copied()), color(index));
        let dash = match index / COLORS {
            0 => "",
            1 => " stroke-dasharray=\"6 3\"",
            _ => " stroke-dasharray=\"2 2\"",
        };
        let _ = write!(
            self.svg,
            "<path class=\"curve\" d=\"{path}\" stroke=\"var(--{color})\"{dash}><title>{}</title></path>",
            escaped(name)
        );
        for (x, y) in points.iter().filter(|_| dots) {
            let (across, up) = self.point(*x, *y);
            let _ = write!(
                self.svg,
                "<circle cx=\"{across:.1}\" cy=\"{up:.1}\" r=\"3.5\" fill=\"var(--{color})\"><title>{}: {}, \
                 {}</title></circle>",
                escaped(name),
                escaped(&(self.x.write)(*x)),
                escaped(&(self.y.write)(*y))
            );
        }
    }

    /// A band between two rows of values over the same places.
    pub(super) fn band(&mut self, at: &[f64], low: &[f64], high: &[f64], color: &str, name: &str) {
        let pairs = |values: &[f64]| -> Vec<(f64, f64)> {
            at.iter().copied().zip(values.iter().copied()).collect()
        };
        let (there, back) = (pairs(high), pairs(low));
        let path = self.path(there.into_iter().chain(back.into_iter().rev()));
        let _ = write!(
            self.svg,
            "<path d=\"{path}Z\" fill=\"var(--{color})\"><title>{}</title></path>",
            escaped(name)
        );
    }

    /// A dashed line across at a value, named above it.
    pub(super) fn line(&mut self, y: f64, label: &str) {
        let (right, (_, at)) = (WIDTH - RIGHT, self.point(self.x.min, y));
        let _ = write!(
            self.svg,
            "<path class=\"mark\" d=\"M{LEFT} {at:.1}H{right}\"/><text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            LEFT + 6.0,
            at - 5.0,
            escaped(label)
        );
    }

    /// The chart as an element.
    pub(super) fn finish(mut self) -> String {
        self.svg.push_str("</svg>");
        self.svg
    }
}

/// A legend: a colour and a name each.
pub(super) fn legend<'a>(entries: impl Iterator<Item = (String, &'a str)>) -> String {
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

/// A legend of curves, which are dashed where colours come again.
pub(super) fn curve_legend<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let mut text = "<div class=\"legend\">".to_owned();
    for (index, name) in names.enumerate() {
        let style = ["solid", "dashed", "dotted"][(index / COLORS).min(2)];
        let _ = write!(
            text,
            "<span><b style=\"border-top:3px {style} var(--{})\"></b>{}</span>",
            color(index),
            escaped(name)
        );
    }
    text.push_str("</div>");
    text
}

/// A picture with its title.
pub(super) fn figure(title: &str, note: &str, inside: &str) -> String {
    format!(
        "<figure><figcaption>{} <span>{}</span></figcaption>{inside}</figure>",
        escaped(title),
        escaped(note)
    )
}

/// A text as it may stand in a page.
pub(super) fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            c => safe.push(c),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_round_numbers() {
        let plain = |number: f64| format!("{number}");
        let axis = Axis::from_zero("", 37.0, plain);
        assert_eq!((axis.max, axis.ticks), (40.0, vec![0.0, 10.0, 20.0, 30.0, 40.0]));
        assert_eq!(Axis::from_zero("", 0.0, plain).max, 1.0);
        let axis = Axis::up_to("", 37.0, plain);
        assert_eq!((axis.max, axis.ticks), (37.0, vec![0.0, 10.0, 20.0, 30.0]));
        let axis = Axis::bytes("", 74.5 * 2_f64.powi(30));
        let labels: Vec<String> = axis.ticks.iter().map(|tick| (axis.write)(*tick)).collect();
        assert_eq!(labels, ["0", "16 GiB", "32 GiB", "48 GiB", "64 GiB"]);
        let axis = Axis::log("", [0.0, 2.0, 5000.0].into_iter(), plain);
        assert_eq!(axis.ticks, [10.0, 100.0, 1000.0]);
        assert!((axis.place(100.0) - 0.5).abs() < 1e-9 && axis.place(0.0) == 0.0);
        assert!(Axis::log("", std::iter::empty(), plain).max > 1.0);
        let one = Axis::log("", [5.0].into_iter(), plain);
        assert!(one.min < 5.0 && one.max > 5.0);
        let blocks = Axis::log_at("", [64.0, 16.0, 16.0, 32.0].into_iter(), plain);
        assert_eq!(blocks.ticks, [16.0, 32.0, 64.0]);
    }

    #[test]
    fn labels_do_not_run_into_each_other() {
        let write = |number: f64| format!("{number} of a long name");
        let numbers = (1..=16).map(f64::from);
        let chart = Chart::new(Axis::log_at("", numbers, write), Axis::bytes("", 1.0), "");
        let drawn = chart.finish().matches("of a long name").count();
        assert!((1..=3).contains(&drawn), "{drawn}");
    }

    #[test]
    fn texts_cannot_leave_their_place() {
        assert_eq!(escaped("<b a=\"1\">&"), "&lt;b a=&quot;1&quot;&gt;&amp;");
    }
}
