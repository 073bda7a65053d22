//! Charts as SVG: axes, curves and stacked areas, drawn by hand. Colours come from the page's
//! style, so that one file is right in light and in dark.

use std::fmt::Write as _;

/// The size of a chart in its own units.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    pub(super) width: f64,
    pub(super) height: f64,
}

/// Room for the numbers of the axes.
const LEFT: f64 = 52.0;
const BOTTOM: f64 = 34.0;
const TOP: f64 = 8.0;
const RIGHT: f64 = 12.0;

/// How the numbers of an axis lie and look.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Scale {
    Linear,
    Log,
}

/// One axis: its range, and how a number is written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axis {
    pub(super) label: &'static str,
    pub(super) scale: Scale,
    pub(super) min: f64,
    pub(super) max: f64,
    pub(super) write: fn(f64) -> String,
}

impl Axis {
    /// An axis from 0 to a round number above the largest.
    pub(super) fn from_zero(label: &'static str, max: f64, write: fn(f64) -> String) -> Self {
        let step = step(max);
        let max = if max > 0.0 { (max / step).ceil() * step } else { 1.0 };
        Self { label, scale: Scale::Linear, min: 0.0, max, write }
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
        Self { label, scale: Scale::Log, min, max, write }
    }

    /// Where a number lies, from 0 to 1.
    fn place(&self, number: f64) -> f64 {
        let place = match self.scale {
            Scale::Linear => (number - self.min) / (self.max - self.min),
            Scale::Log => (number.max(self.min) / self.min).ln() / (self.max / self.min).ln(),
        };
        place.clamp(0.0, 1.0)
    }

    /// The numbers that are written beside it.
    fn ticks(&self) -> Vec<f64> {
        match self.scale {
            Scale::Linear => {
                let step = step(self.max - self.min);
                let count = ((self.max - self.min) / step).round();
                (0..=20)
                    .map(f64::from)
                    .take_while(|i| *i <= count)
                    .map(|i| self.min + i * step)
                    .collect()
            }
            Scale::Log => {
                let decades = (self.max / self.min).log10();
                let factors: &[f64] = match decades {
                    d if d > 3.5 => &[1.0],
                    d if d > 1.5 => &[1.0, 3.0],
                    _ => &[1.0, 1.5, 2.0, 3.0, 5.0, 7.0],
                };
                let first = self.min.log10().floor();
                (0..24)
                    .flat_map(|i| {
                        factors.iter().map(move |f| f * 10_f64.powf(first + f64::from(i)))
                    })
                    .filter(|tick| *tick >= self.min * 0.999 && *tick <= self.max * 1.001)
                    .collect()
            }
        }
    }
}

/// A round distance of which about five fit.
fn step(range: f64) -> f64 {
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
    size: Size,
    x: Axis,
    y: Axis,
}

impl Chart {
    /// An empty chart with its axes. `about` says what it shows to those who cannot see it.
    pub(super) fn new(size: Size, x: Axis, y: Axis, about: &str) -> Self {
        let Size { width, height } = size;
        let mut svg = format!(
            "<svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{}\">",
            escaped(about)
        );
        let (right, bottom) = (width - RIGHT, height - BOTTOM);
        for tick in y.ticks() {
            let at = bottom - y.place(tick) * (bottom - TOP);
            // Writing to a String cannot fail, here and below.
            let _ = write!(
                svg,
                "<path class=\"rule\" d=\"M{LEFT} {at:.1}H{right}\"/><text x=\"{:.1}\" y=\"{:.1}\" \
                 text-anchor=\"end\">{}</text>",
                LEFT - 6.0,
                at + 4.0,
                escaped(&(y.write)(tick))
            );
        }
        for tick in x.ticks() {
            let at = LEFT + x.place(tick) * (right - LEFT);
            let _ = write!(
                svg,
                "<path class=\"axis\" d=\"M{at:.1} {bottom}v4\"/><text x=\"{at:.1}\" y=\"{:.1}\" \
                 text-anchor=\"middle\">{}</text>",
                bottom + 15.0,
                escaped(&(x.write)(tick))
            );
        }
        let _ = write!(
            svg,
            "<path class=\"axis\" d=\"M{LEFT} {TOP}V{bottom}H{right}\"/><text x=\"{:.1}\" y=\"{:.1}\" \
             text-anchor=\"end\">{}</text><text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            right,
            height - 4.0,
            escaped(x.label),
            LEFT + 6.0,
            TOP + 10.0,
            escaped(y.label)
        );
        Self { svg, size, x, y }
    }

    fn point(&self, x: f64, y: f64) -> (f64, f64) {
        let Size { width, height } = self.size;
        let across = LEFT + self.x.place(x) * (width - RIGHT - LEFT);
        let up = height - BOTTOM - self.y.place(y) * (height - BOTTOM - TOP);
        (across, up)
    }

    /// A curve through these points, with a dot at each if `dots`.
    pub(super) fn curve(&mut self, points: &[(f64, f64)], color: &str, name: &str, dots: bool) {
        let mut path = String::new();
        for (index, (x, y)) in points.iter().enumerate() {
            let (x, y) = self.point(*x, *y);
            let _ = write!(path, "{}{x:.1} {y:.1}", if index == 0 { 'M' } else { 'L' });
        }
        let _ = write!(
            self.svg,
            "<path class=\"curve\" d=\"{path}\" stroke=\"var(--{color})\"><title>{}</title></path>",
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
        let mut path = String::new();
        let there = at.iter().zip(high);
        let back = at.iter().zip(low).rev();
        for (index, (x, y)) in there.chain(back).enumerate() {
            let (x, y) = self.point(*x, *y);
            let _ = write!(path, "{}{x:.1} {y:.1}", if index == 0 { 'M' } else { 'L' });
        }
        let _ = write!(
            self.svg,
            "<path d=\"{path}Z\" fill=\"var(--{color})\"><title>{}</title></path>",
            escaped(name)
        );
    }

    /// A dashed line across at a value.
    pub(super) fn line(&mut self, y: f64, label: &str) {
        let (right, (_, at)) = (self.size.width - RIGHT, self.point(self.x.min, y));
        let _ = write!(
            self.svg,
            "<path class=\"mark\" d=\"M{LEFT} {at:.1}H{right}\"/><text x=\"{right}\" y=\"{:.1}\" \
             text-anchor=\"end\">{}</text>",
            at - 4.0,
            escaped(label)
        );
    }

    /// The chart as an element.
    pub(super) fn finish(mut self) -> String {
        self.svg.push_str("</svg>");
        self.svg
    }
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
        assert_eq!((axis.max, axis.ticks()), (40.0, vec![0.0, 10.0, 20.0, 30.0, 40.0]));
        assert_eq!(Axis::from_zero("", 0.0, plain).max, 1.0);
        let axis = Axis::log("", [0.0, 2.0, 5000.0].into_iter(), plain);
        assert_eq!(axis.ticks(), [3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0].map(|t: f64| t));
        assert!((axis.place(100.0) - 0.5).abs() < 1e-9 && axis.place(0.0) == 0.0);
        assert!(Axis::log("", std::iter::empty(), plain).max > 1.0);
        let one = Axis::log("", [5.0].into_iter(), plain);
        assert!(one.min < 5.0 && one.max > 5.0);
    }

    #[test]
    fn texts_cannot_leave_their_place() {
        assert_eq!(escaped("<b a=\"1\">&"), "&lt;b a=&quot;1&quot;&gt;&amp;");
    }
}
