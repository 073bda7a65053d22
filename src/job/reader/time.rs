//! Times of arrival as texts.

use super::shortened;
use crate::config::ArrivalUnit;

/// What a unit looks like.
pub(super) const fn expected(unit: ArrivalUnit) -> &'static str {
    match unit {
        ArrivalUnit::Nanoseconds => "a number of nanoseconds, 0 or more",
        ArrivalUnit::Microseconds => "a number of microseconds, 0 or more",
        ArrivalUnit::Milliseconds => "a number of milliseconds, 0 or more",
        ArrivalUnit::Seconds => "a number of seconds, 0 or more",
        ArrivalUnit::DateTime => "a date and time such as 2023-11-16 18:15:46.68",
    }
}

/// A time in nanoseconds, or what is wrong with it.
pub(super) fn nanoseconds(column: &str, text: &str, unit: ArrivalUnit) -> Result<i64, String> {
    let factor = match unit {
        ArrivalUnit::Nanoseconds => 1,
        ArrivalUnit::Microseconds => 1_000,
        ArrivalUnit::Milliseconds => 1_000_000,
        ArrivalUnit::Seconds => 1_000_000_000,
        ArrivalUnit::DateTime => 0,
    };
    let trimmed = text.trim();
    let time =
        if unit == ArrivalUnit::DateTime { date_time(trimmed) } else { number(trimmed, factor) };
    time.ok_or_else(|| format!("{column} is {:?}; expected {}", shortened(text), expected(unit)))
}

/// A number, not negative and of at most 290 years, times the unit.
fn number(text: &str, factor: i64) -> Option<i64> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) {
        return text.parse::<i64>().ok()?.checked_mul(factor);
    }
    let number: f64 = text.parse().ok()?;
    #[expect(clippy::cast_precision_loss, reason = "a power of ten below 10^15 is exact")]
    let scaled = (number * factor as f64).round();
    #[expect(clippy::cast_possible_truncation, reason = "its range is checked")]
    (0.0..9.2e18).contains(&scaled).then_some(scaled as i64)
}

/// `YYYY-MM-DD hh:mm:ss`, with a fraction or without, with `T` for the blank or without, and with
/// nothing behind it but a `Z`: nanoseconds since 1970.
fn date_time(text: &str) -> Option<i64> {
    let (date, clock) = text.split_once([' ', 'T'])?;
    let clock = clock.strip_suffix('Z').unwrap_or(clock);
    let clock = clock.strip_suffix("+00:00").unwrap_or(clock);
    let mut parts = date.split('-').map(digits);
    let (year, month, day) = (parts.next()??, parts.next()??, parts.next()??);
    let (clock, fraction) = clock.split_once('.').unwrap_or((clock, ""));
    let mut times = clock.split(':').map(digits);
    let (hour, minute, second) = (times.next()??, times.next()??, times.next()??);
    let in_range = (1970..=2200).contains(&year)
        && (1..=12).contains(&month)
        && (1..=days_of(year, month)).contains(&day)
        && hour < 24
        && minute < 60
        && second <= 60;
    if parts.next().is_some() || times.next().is_some() || !in_range || fraction.len() > 18 {
        return None;
    }
    // Nine digits of the fraction are nanoseconds; what is behind them is dropped.
    let nanos = fraction
        .chars()
        .chain("000000000".chars())
        .take(9)
        .try_fold(0, |sum, digit| Some(sum * 10 + i64::from(digit.to_digit(10)?)))?;
    let seconds = ((days(year, month, day) * 24 + hour) * 60 + minute) * 60 + second;
    Some(seconds * 1_000_000_000 + nanos)
}

/// A number of at most four digits and nothing else.
fn digits(text: &str) -> Option<i64> {
    let plain = (1..=4).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
    plain.then(|| text.parse().ok()).flatten()
}

/// Days of a month in the Gregorian calendar.
fn days_of(year: i64, month: i64) -> i64 {
    let (next_year, next) = if month == 12 { (year + 1, 1) } else { (year, month + 1) };
    days(next_year, next, 1) - days(year, month, 1)
}

/// Days since 1970-01-01 in the Gregorian calendar. Years begin in March here, so that the day
/// that leap years have more is their last.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month > 2 { year } else { year - 1 };
    let month = (month + 9) % 12;
    let of_year = (153 * month + 2) / 5 + day - 1;
    year * 365 + year / 4 - year / 100 + year / 400 + of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_counted_from_1970() {
        for (text, seconds, nanos) in [
            ("1970-01-01 00:00:00", 0, 0),
            ("1970-03-01T00:00:00Z", 59 * 86_400, 0),
            ("2000-02-29 23:59:59.5", 951_868_799, 500_000_000),
            ("2000-12-31 00:00:00", 978_220_800, 0),
            ("2023-11-16 18:15:46.6805900", 1_700_158_546, 680_590_000),
            ("2024-05-12 00:00:00.001163+00:00", 1_715_472_000, 1_163_000),
        ] {
            let expected = seconds * 1_000_000_000 + nanos;
            assert_eq!(nanoseconds("t", text, ArrivalUnit::DateTime), Ok(expected), "{text}");
        }
        for text in [
            "",
            "t",
            "2023-11-16",
            "2023-13-16 00:00:00",
            "2023-02-30 00:00:00",
            "2023-02-29 00:00:00",
            "2100-02-29 00:00:00",
            "2023-04-31 00:00:00",
            "2023-12-32 00:00:00",
            "2023-11-16 24:00:00",
            "2023-11-16 18:15",
            "2023-11-16 18:15:46.x",
            "2023-11-16-1 18:15:46",
            "2023-11-16 é",
        ] {
            let error = nanoseconds("t", text, ArrivalUnit::DateTime).unwrap_err();
            assert!(error.contains("expected a date and time"), "{error}");
        }
    }

    #[test]
    fn numbers_are_scaled_to_nanoseconds() {
        for (text, unit, expected) in [
            ("618518284", ArrivalUnit::Nanoseconds, 618_518_284),
            ("27482", ArrivalUnit::Milliseconds, 27_482_000_000),
            ("0.25", ArrivalUnit::Seconds, 250_000_000),
            (" 1e-3 ", ArrivalUnit::Seconds, 1_000_000),
        ] {
            assert_eq!(nanoseconds("t", text, unit), Ok(expected), "{text}");
        }
        for text in ["-1", "nan", "inf", "1e30", "99999999999999999999", "x", "-0.5"] {
            assert!(nanoseconds("t", text, ArrivalUnit::Seconds).is_err(), "{text}");
        }
    }
}
