//! Durations as Go writes them and Kubernetes' files have them: `300ms`, `1m30s`, `1.5h`.
//!
//! Follows `time.ParseDuration` and `time.Duration.String` (go.dev/src/time): whole nanoseconds, at most
//! 2^63-1 of them (292 years). Settings are never negative, so a minus sign is an error. This module must
//! never panic on any input.

use std::fmt::Write;
use std::time::Duration;

/// Error for a text that is not a duration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DurationError {
    /// The text does not have the form number, unit, number, unit, …
    #[error("{0:?} is not a duration (use e.g. 300ms, 90s or 1m30s)")]
    Malformed(String),
    /// A number has no unit.
    #[error("{0:?} has no unit (use e.g. 90s or 1m30s)")]
    NoUnit(String),
    /// The duration is below zero.
    #[error("{0:?} is negative; a duration here cannot be")]
    Negative(String),
    /// The duration exceeds 2^63-1 nanoseconds.
    #[error("{0:?} is longer than 292 years")]
    TooLong(String),
}

const UNITS: [(&str, u64); 8] = [
    ("ns", 1),
    ("us", 1_000),
    ("µs", 1_000), // U+00B5, micro sign
    ("μs", 1_000), // U+03BC, Greek letter mu
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

/// Reads a duration.
///
/// # Errors
/// Fails if the text is not a Go duration, is negative, or exceeds the range of Go's type.
pub fn parse(text: &str) -> Result<Duration, DurationError> {
    let shown = || text.chars().take(64).collect::<String>();
    let (negative, mut rest) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    if rest == "0" {
        return Ok(Duration::ZERO);
    }
    if rest.is_empty() {
        return Err(DurationError::Malformed(shown()));
    }
    let mut total: u64 = 0;
    while !rest.is_empty() {
        let (whole, fraction, tail) = number(rest).ok_or_else(|| DurationError::Malformed(shown()))?;
        let end = tail.find(|c: char| c == '.' || c.is_ascii_digit()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(end);
        if unit.is_empty() {
            return Err(DurationError::NoUnit(shown()));
        }
        let (_, nanos) =
            UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(|| DurationError::Malformed(shown()))?;
        total = part(whole, fraction, *nanos)
            .and_then(|part| total.checked_add(part))
            .filter(|total| i64::try_from(*total).is_ok())
            .ok_or_else(|| DurationError::TooLong(shown()))?;
        rest = tail;
    }
    if negative && total > 0 {
        return Err(DurationError::Negative(shown()));
    }
    Ok(Duration::from_nanos(total))
}

/// Splits off the digits before and after the point, and returns the rest; None without any digit.
fn number(text: &str) -> Option<(&str, &str, &str)> {
    let digits = |text: &str| text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (whole, tail) = text.split_at(digits(text));
    let (fraction, tail) = match tail.strip_prefix('.') {
        Some(tail) => tail.split_at(digits(tail)),
        None => ("", tail),
    };
    (!whole.is_empty() || !fraction.is_empty()).then_some((whole, fraction, tail))
}

/// Computes `whole.fraction` of a unit that has `nanos` nanoseconds, rounded down; None on overflow.
fn part(whole: &str, fraction: &str, nanos: u64) -> Option<u64> {
    let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    // Digits past the 18th are below a nanosecond for every unit.
    let fraction = &fraction[..fraction.len().min(18)];
    let scale = 10u128.pow(u32::try_from(fraction.len()).ok()?);
    let numerator: u128 = if fraction.is_empty() { 0 } else { fraction.parse().ok()? };
    let below = u64::try_from(numerator * u128::from(nanos) / scale).ok()?;
    whole.checked_mul(nanos)?.checked_add(below)
}

/// Writes a duration as Go prints it: `1m30s`, `1.5s`, `100ms`, `0s`.
#[must_use]
pub fn format(duration: Duration) -> String {
    let nanos = duration.as_nanos();
    let mut text = String::new();
    match nanos {
        0 => text.push_str("0s"),
        1..1_000 => unit(&mut text, nanos, 1, "ns"),
        1_000..1_000_000 => unit(&mut text, nanos, 1_000, "µs"),
        1_000_000..1_000_000_000 => unit(&mut text, nanos, 1_000_000, "ms"),
        _ => {
            let seconds = duration.as_secs();
            let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
            // Writing to a String cannot fail.
            if hours > 0 {
                let _ = write!(text, "{hours}h");
            }
            if hours > 0 || minutes > 0 {
                let _ = write!(text, "{minutes}m");
            }
            unit(&mut text, nanos % 60_000_000_000, 1_000_000_000, "s");
        }
    }
    text
}

fn unit(text: &mut String, nanos: u128, scale: u128, unit: &str) {
    let width = scale.ilog10() as usize;
    let fraction = format!("{:0width$}", nanos % scale);
    let fraction = if scale == 1 { "" } else { fraction.trim_end_matches('0') };
    let point = if fraction.is_empty() { "" } else { "." };
    let _ = write!(text, "{}{point}{fraction}{unit}", nanos / scale);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(text: &str, nanos: u64) {
        assert_eq!(parse(text), Ok(Duration::from_nanos(nanos)), "{text}");
    }

    fn refuse(text: &str, expected: fn(String) -> DurationError) {
        assert_eq!(parse(text), Err(expected(text.to_owned())), "{text}");
    }

    #[test]
    fn durations_are_read_as_go_reads_them() {
        check("0", 0);
        check("+0", 0);
        check("-0", 0);
        check("-0s", 0);
        check("0s", 0);
        check("5s", 5_000_000_000);
        check("1m30s", 90_000_000_000);
        check("1h1m1s", 3_661_000_000_000);
        check("1s1h", 3_601_000_000_000);
        check("100ms", 100_000_000);
        check("1.5s", 1_500_000_000);
        check(".5s", 500_000_000);
        check("5.s", 5_000_000_000);
        check("+2us3ns", 2_003);
        check("2µs", 2_000);
        check("2μs", 2_000);
        check("0.3333333333333333333h", 1_200_000_000_000 - 1);
        check("0.000000000000000000000001h", 0);
        check("9223372036854775807ns", i64::MAX as u64);
    }

    #[test]
    fn what_is_no_duration_is_said_to_be_none() {
        refuse("", DurationError::Malformed);
        refuse("-", DurationError::Malformed);
        refuse("s", DurationError::Malformed);
        refuse(".s", DurationError::Malformed);
        refuse("2 minutes", DurationError::Malformed);
        refuse("1d", DurationError::Malformed);
        refuse("1.2.3s", DurationError::NoUnit);
        refuse("120", DurationError::NoUnit);
        refuse("1m30", DurationError::NoUnit);
        refuse("-5s", DurationError::Negative);
        refuse("9223372036854775808ns", DurationError::TooLong);
        refuse("3000000h", DurationError::TooLong);
        refuse("99999999999999999999s", DurationError::TooLong);
    }

    fn check_format(nanos: u64, text: &str) {
        assert_eq!(format(Duration::from_nanos(nanos)), text);
    }

    #[test]
    fn durations_are_written_as_go_writes_them() {
        check_format(0, "0s");
        check_format(7, "7ns");
        check_format(1_100, "1.1µs");
        check_format(100_000_000, "100ms");
        check_format(1_500_000, "1.5ms");
        check_format(1_500_000_000, "1.5s");
        check_format(20_000_000_000, "20s");
        check_format(60_000_000_000, "1m0s");
        check_format(90_000_000_000, "1m30s");
        check_format(3_600_000_000_000, "1h0m0s");
        check_format(3_600_000_000_001, "1h0m0.000000001s");
    }

    proptest! {
        #[test]
        fn what_is_written_reads_back(nanos in 0..=i64::MAX as u64) {
            let duration = Duration::from_nanos(nanos);
            prop_assert_eq!(parse(&format(duration)), Ok(duration));
        }

        #[test]
        fn no_text_makes_it_panic(text in "[-+0-9.hmsuµn ]{0,60}|\\PC{0,30}") {
            let _ = parse(&text);
        }
    }
}
