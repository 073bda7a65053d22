//! Numbers as people read them.

use crate::units::grouped;

/// Bytes in the largest unit of 1024 that they fill.
pub(super) fn bytes(number: f64) -> String {
    for (unit, name) in [(2_f64.powi(40), "TiB"), (2_f64.powi(30), "GiB"), (2_f64.powi(20), "MiB")]
    {
        if number >= unit {
            return format!("{} {name}", trimmed(number / unit));
        }
    }
    if number > 0.0 { format!("{} KiB", trimmed(number / 1024.0)) } else { "0".to_owned() }
}

/// A number to three digits, without zeros at its end; thousands in groups.
pub(super) fn trimmed(number: f64) -> String {
    let digits = match number.abs() {
        n if n >= 99.95 => 0,
        n if n >= 9.995 => 1,
        _ => 2,
    };
    let text = format!("{number:.digits$}");
    if !text.contains('.') {
        return text.parse::<u64>().map_or(text, grouped);
    }
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// A number to three digits, zeros included, so that a column of them lines up.
pub(super) fn figure(number: f64) -> String {
    match number.abs() {
        n if n >= 99.95 => trimmed(number),
        n if n >= 9.995 => format!("{number:.1}"),
        _ => format!("{number:.2}"),
    }
}

/// A time of so many milliseconds.
pub(super) fn ms(number: f64) -> String {
    if number >= 1000.0 {
        format!("{} s", trimmed(number / 1000.0))
    } else {
        format!("{} ms", trimmed(number))
    }
}

/// A part of one, in hundredths.
pub(super) fn percent(number: f64) -> String {
    format!("{} %", trimmed(100.0 * number))
}

/// A part of one, in hundredths, with one digit behind the point.
pub(super) fn percent_figure(number: f64) -> String {
    format!("{:.1} %", 100.0 * number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_not_wrong() {
        let written = [0.0, 0.5, 2.0, 9.999, 68.95, 99.96, 3197.4, 1e7].map(trimmed);
        assert_eq!(written, ["0", "0.5", "2", "10", "69", "100", "3,197", "10,000,000"]);
        assert_eq!([2.0, 69.0, 123.4].map(figure), ["2.00", "69.0", "123"]);
        let sizes = [0.0, 512.0, 1536.0 * 1024.0, 74.5 * 2_f64.powi(30), 2_f64.powi(44)];
        assert_eq!(sizes.map(bytes), ["0", "0.5 KiB", "1.5 MiB", "74.5 GiB", "16 TiB"]);
        assert_eq!([0.25, 999.0, 1500.0].map(ms), ["0.25 ms", "999 ms", "1.5 s"]);
        assert_eq!((percent(0.374), percent_figure(0.89)), ("37.4 %".into(), "89.0 %".into()));
    }
}
