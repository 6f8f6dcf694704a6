//! Kubernetes quantities (`250m`, `1.5Gi`, `129e6`): parsed exactly, added exactly, rounded up once at the
//! end.
//!
//! Follows `k8s.io/apimachinery/pkg/api/resource`: suffixes n u m k M G T P E, Ki Mi Gi Ti Pi Ei and decimal
//! exponents; values are kept to a nano and a finer one is rounded away from zero; `Value` and `MilliValue`
//! round up; a binary quantity is capped at 2^63-1. Two deliberate differences: a number needs at least one
//! digit (the apimachinery reads `Ki` and `.` as 0, its own grammar doesn't allow them), and a number out of
//! range saturates where Go's accessors wrap around.
//!
//! `kube_quantity` 0.9 does not fit: it works in `rust_decimal` (28 digits), loses `u`, `n` and exponents such
//! as `1e-3`, multiplies by unchecked `i64::pow` (overflow panics on input such as `9Ei`), falls back to 0 on
//! a failed conversion and has no round-up accessors, so its sums would differ from the kubelet's. This module
//! must never panic on any input, nor use floats.

use std::{fmt, iter::Sum, ops::Add, str::FromStr};

use serde::de::{Deserialize, Deserializer, Visitor};

/// An exact amount: cores, bytes or a count, in billionths (nano), saturating far beyond what an `i64` of
/// units can hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Quantity {
    nanos: i128,
}

const NANOS: i128 = 1_000_000_000;
const NANOS_PER_MILLI: i128 = 1_000_000;
/// Longest accepted text, in bytes; bounds the work for a hostile one.
const LONGEST: usize = 256;

/// Error for a text that is not a quantity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a quantity (use e.g. 250m, 1.5 or 512Mi)")]
pub struct QuantityError {
    text: String,
}

impl QuantityError {
    fn new(text: &str) -> Self {
        let text = match text.char_indices().nth(64) {
            Some((cut, _)) => format!("{}...", &text[..cut]),
            None => text.to_owned(),
        };
        Self { text }
    }
}

impl Quantity {
    /// Zero.
    pub const ZERO: Self = Self { nanos: 0 };

    /// Returns a quantity of whole units (cores, bytes, counts).
    pub const fn from_units(units: i64) -> Self {
        Self { nanos: units as i128 * NANOS }
    }

    /// Returns a quantity of thousandths of a unit (millicores).
    pub const fn from_millis(millis: i64) -> Self {
        Self { nanos: millis as i128 * NANOS_PER_MILLI }
    }

    /// Formats the value, rounded up, in the largest exact binary unit: bytes measured in pages come out in
    /// `Ki`.
    #[must_use]
    pub fn binary(self) -> String {
        let value = self.value();
        let units = [(1_i64 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")];
        match units.iter().find(|(unit, _)| value != 0 && value % unit == 0) {
            Some((unit, name)) => format!("{}{name}", value / unit),
            None => value.to_string(),
        }
    }

    /// Reads a quantity as `ParseQuantity` does: no blanks, no underscores, at most one suffix.
    ///
    /// # Errors
    /// If the text doesn't follow the grammar; the error's text names it and gives examples.
    pub fn parse(text: &str) -> Result<Self, QuantityError> {
        parse_short(text.as_bytes()).or_else(|| parse_any(text)).ok_or_else(|| QuantityError::new(text))
    }

    /// Returns whole units, a fraction rounded up (away from zero), saturating at the `i64` range: Go's
    /// `Value()`.
    pub fn value(self) -> i64 {
        self.scaled(NANOS)
    }

    /// Returns thousandths, a fraction rounded up (away from zero), saturating at the `i64` range: Go's
    /// `MilliValue()`.
    pub fn milli_value(self) -> i64 {
        self.scaled(NANOS_PER_MILLI)
    }

    /// Returns true if the quantity is exactly zero.
    pub fn is_zero(self) -> bool {
        self.nanos == 0
    }

    /// Computes `self - other`, saturating; the result may be negative.
    #[must_use]
    pub fn saturating_sub(self, other: Self) -> Self {
        Self { nanos: self.nanos.saturating_sub(other.nanos) }
    }

    fn scaled(self, unit: i128) -> i64 {
        let (quotient, rest) = (self.nanos / unit, self.nanos % unit);
        let rounded = quotient + rest.signum();
        i64::try_from(rounded).unwrap_or(if rounded < 0 { i64::MIN } else { i64::MAX })
    }
}

/// Suffix of the digits: a power of two, or a power of ten.
enum Suffix {
    Binary(u32),
    Decimal(i64),
}

fn suffix(text: &[u8]) -> Option<Suffix> {
    Some(match text {
        b"" => Suffix::Decimal(0),
        b"n" => Suffix::Decimal(-9),
        b"u" => Suffix::Decimal(-6),
        b"m" => Suffix::Decimal(-3),
        b"k" => Suffix::Decimal(3),
        b"M" => Suffix::Decimal(6),
        b"G" => Suffix::Decimal(9),
        b"T" => Suffix::Decimal(12),
        b"P" => Suffix::Decimal(15),
        b"E" => Suffix::Decimal(18),
        b"Ki" => Suffix::Binary(10),
        b"Mi" => Suffix::Binary(20),
        b"Gi" => Suffix::Binary(30),
        b"Ti" => Suffix::Binary(40),
        b"Pi" => Suffix::Binary(50),
        b"Ei" => Suffix::Binary(60),
        [b'e' | b'E', exponent @ ..] => Suffix::Decimal(decimal_exponent(exponent)?),
        _ => return None,
    })
}

fn decimal_exponent(text: &[u8]) -> Option<i64> {
    let digits = text.strip_prefix(b"+").or_else(|| text.strip_prefix(b"-")).unwrap_or(text);
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let magnitude = digits
        .iter()
        .fold(0_i64, |sum, digit| sum.saturating_mul(10).saturating_add(i64::from(digit - b'0')));
    Some(if text[0] == b'-' { -magnitude } else { magnitude })
}

/// Parses the common case without allocation: at most 18 digits, no fraction, no sign, and a result far from
/// the limits.
fn parse_short(text: &[u8]) -> Option<Quantity> {
    let digits = text.iter().take_while(|b| b.is_ascii_digit()).count();
    if digits == 0 || digits > 18 {
        return None;
    }
    let number = text[..digits].iter().fold(0_i64, |sum, digit| sum * 10 + i64::from(digit - b'0'));
    let units = match suffix(&text[digits..])? {
        Suffix::Binary(shift) => number.checked_mul(1 << shift)?,
        Suffix::Decimal(-3) => return Some(Quantity::from_millis(number)),
        Suffix::Decimal(power @ 0..=18) => {
            number.checked_mul(10_i64.checked_pow(u32::try_from(power).ok()?)?)?
        }
        Suffix::Decimal(_) => return None,
    };
    Some(Quantity::from_units(units))
}

/// Parses every other form, exactly, with the number held as decimal digits.
fn parse_any(text: &str) -> Option<Quantity> {
    if text.len() > LONGEST {
        return None;
    }
    let bytes = text.as_bytes();
    let (negative, unsigned) = match bytes {
        [b'-', rest @ ..] => (true, rest),
        [b'+', rest @ ..] => (false, rest),
        rest => (false, rest),
    };
    let end = unsigned.iter().position(|b| !b.is_ascii_digit() && *b != b'.').unwrap_or(unsigned.len());
    let (number, suffix_text) = unsigned.split_at(end);
    let mut parts = number.split(|b| *b == b'.');
    let (whole, fraction) = (parts.next()?, parts.next().unwrap_or_default());
    if parts.next().is_some() || whole.len() + fraction.len() == 0 {
        return None;
    }
    let suffix = suffix(suffix_text)?;
    let mut digits: Vec<u8> = whole.iter().chain(fraction).map(|b| b - b'0').collect();
    let places = i64::try_from(fraction.len()).ok()?;
    let (power, capped) = match suffix {
        Suffix::Decimal(power) => (power, false),
        Suffix::Binary(shift) => {
            (0..shift).for_each(|_| double(&mut digits));
            (0, true)
        }
    };
    // nanos = digits * 10^(power + 9 - places), the fraction rounded away from zero
    let mut nanos = to_integer(&digits, power.saturating_add(9).saturating_sub(places));
    if capped {
        nanos = nanos.min(Quantity::from_units(i64::MAX).nanos);
    }
    Some(Quantity { nanos: if negative { -nanos } else { nanos } })
}

/// Doubles a number held as decimal digits, most significant first.
fn double(digits: &mut Vec<u8>) {
    let mut carry = 0;
    for digit in digits.iter_mut().rev() {
        let doubled = *digit * 2 + carry;
        (*digit, carry) = (doubled % 10, doubled / 10);
    }
    if carry > 0 {
        digits.insert(0, carry);
    }
}

/// Computes `digits` * 10^`power` as an integer: saturating above, rounded up below.
fn to_integer(digits: &[u8], power: i64) -> i128 {
    let cut = usize::try_from(power.min(0).unsigned_abs()).unwrap_or(usize::MAX);
    let (kept, dropped) = digits.split_at(digits.len().saturating_sub(cut));
    let mut value = 0_i128;
    for digit in kept {
        value = value.saturating_mul(10).saturating_add(i128::from(*digit));
    }
    if power > 0 && value > 0 {
        let factor =
            u32::try_from(power).ok().and_then(|power| 10_i128.checked_pow(power)).unwrap_or(i128::MAX);
        value = value.saturating_mul(factor);
    }
    if dropped.iter().any(|digit| *digit != 0) { value.saturating_add(1) } else { value }
}

impl FromStr for Quantity {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text)
    }
}

impl TryFrom<&k8s_openapi::apimachinery::pkg::api::resource::Quantity> for Quantity {
    type Error = QuantityError;

    /// Reads the API object, whose JSON form may have surrounding blanks (Go's `UnmarshalJSON` trims them).
    fn try_from(text: &k8s_openapi::apimachinery::pkg::api::resource::Quantity) -> Result<Self, Self::Error> {
        Self::parse(text.0.trim())
    }
}

impl Add for Quantity {
    type Output = Self;

    /// Adds exactly within ±1.7×10^29 units, saturating there.
    fn add(self, other: Self) -> Self {
        Self { nanos: self.nanos.saturating_add(other.nanos) }
    }
}

impl Sum for Quantity {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self::ZERO, Add::add)
    }
}

impl fmt::Display for Quantity {
    /// Writes a text that parses back to the same amount: the coarsest of units, m, u and n without loss.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, suffix) = [(NANOS, ""), (NANOS_PER_MILLI, "m"), (1_000, "u")]
            .into_iter()
            .find(|(unit, _)| self.nanos % unit == 0)
            .unwrap_or((1, "n"));
        write!(f, "{}{suffix}", self.nanos / unit)
    }
}

impl<'de> Deserialize<'de> for Quantity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(QuantityVisitor)
    }
}

struct QuantityVisitor;

impl Visitor<'_> for QuantityVisitor {
    type Value = Quantity;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a quantity (e.g. 250m, 1.5 or 512Mi)")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Quantity, E> {
        Quantity::parse(text.trim()).map_err(E::custom)
    }

    fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<Quantity, E> {
        Ok(Quantity::from_units(number))
    }

    fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<Quantity, E> {
        Ok(Quantity { nanos: i128::from(number) * NANOS })
    }

    fn visit_f64<E: serde::de::Error>(self, number: f64) -> Result<Quantity, E> {
        // Goes through the shortest decimal text of this float, so that 0.1 is a tenth.
        self.visit_str(&number.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn check(text: &str, nanos: i128) {
        assert_eq!(Quantity::parse(text).map(|q| q.nanos), Ok(nanos), "{text}");
    }

    #[test]
    fn a_binary_amount_has_the_largest_unit_that_says_it_exactly() {
        let check = |text: &str, expected: &str| {
            assert_eq!(Quantity::parse(text).unwrap().binary(), expected, "{text}");
        };
        check("0", "0");
        check("1", "1");
        check("1023", "1023");
        check("1Ki", "1Ki");
        check("1536Ki", "1536Ki");
        check("2048Ki", "2Mi");
        check("1500m", "2");
        check("1Ti", "1024Gi");
    }

    #[test]
    fn every_suffix_means_what_kubernetes_says() {
        for (text, nanos) in [
            ("0", 0),
            ("1n", 1),
            ("1u", 1_000),
            ("1m", 1_000_000),
            ("1", NANOS),
            ("1k", 1_000 * NANOS),
            ("1M", 1_000_000 * NANOS),
            ("1G", 1_000_000_000 * NANOS),
            ("1T", 1_000_000_000_000 * NANOS),
            ("1P", 1_000_000_000_000_000 * NANOS),
            ("1E", 1_000_000_000_000_000_000 * NANOS),
            ("1Ki", 1024 * NANOS),
            ("1Mi", (1 << 20) * NANOS),
            ("1Gi", (1 << 30) * NANOS),
            ("1Ti", (1 << 40) * NANOS),
            ("1Pi", (1 << 50) * NANOS),
            ("1Ei", (1 << 60) * NANOS),
        ] {
            check(text, nanos);
        }
    }

    #[test]
    fn every_form_of_a_number_is_read() {
        check("129e6", 129_000_000 * NANOS);
        check("129E6", 129_000_000 * NANOS);
        check("1e-3", NANOS / 1000);
        check("1e+3", 1000 * NANOS);
        check("+1.5", 1_500_000_000);
        check("-1.5Ki", -1536 * NANOS);
        check(".5", 500_000_000);
        check("5.", 5 * NANOS);
        check("1.G", 1_000_000_000 * NANOS);
        check("0000000000000000000000000001", NANOS);
        check("0.25Mi", (1 << 18) * NANOS);
        check("1.123456789012345678901234Ei", 1_295_257_491_548_890_609_765_523_773);
    }

    #[test]
    fn what_is_finer_than_a_nano_rounds_away_from_zero() {
        check("0.1n", 1);
        check("1.1n", 2);
        check("-0.1n", -1);
        check("1e-400", 1);
        check("0e-400", 0);
        check("0.00000000001Ki", 11);
    }

    #[test]
    fn the_range_saturates() {
        check("8Ei", i128::from(i64::MAX) * NANOS);
        check("-100Ei", -i128::from(i64::MAX) * NANOS);
        check("18446744073709551616", 18_446_744_073_709_551_616 * NANOS);
        assert_eq!(Quantity::parse("1e400").map(Quantity::value), Ok(i64::MAX));
        assert_eq!(Quantity::parse("-1e99999999999999999999").map(Quantity::milli_value), Ok(i64::MIN));
        assert_eq!(Quantity::parse("9E").map(Quantity::milli_value), Ok(i64::MAX));
    }

    #[test]
    fn accessors_round_up_and_sums_round_once() {
        let tenth = Quantity::parse("0.1m").unwrap();
        assert_eq!(tenth.milli_value(), 1);
        assert_eq!((0..10).map(|_| tenth).sum::<Quantity>().milli_value(), 1);
        assert_eq!(Quantity::parse("100m").unwrap().value(), 1);
        assert_eq!(Quantity::parse("-100m").unwrap().value(), -1);
        assert_eq!(Quantity::parse("1500m").unwrap().value(), 2);
    }

    #[test]
    fn what_is_no_quantity_is_refused_with_an_example() {
        for text in [
            "", " ", "1 ", " 1", "abc", "1i", "1mi", "0.1mi", "0.1am", "aoeu", ".5i", "-3.01i", "-3.01e-",
            "1.1.M", "1+1.0M", "Ki", ".", "+", "-", "--1", "1e", "1ee3", "1e3k", "1_000", "0x10", "1kk",
            "1K", "1B", "1e1.5", "٣",
        ] {
            let error = Quantity::parse(text).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{text:?} is not a quantity")), "{error}");
        }
        assert!(Quantity::parse(&"1".repeat(10_000)).unwrap_err().to_string().len() < 200);
    }

    #[test]
    fn json_numbers_and_strings_are_the_same() {
        for (json, text) in
            [("2", "2"), ("\"2\"", "2"), ("0.1", "100m"), ("1e3", "1k"), ("\" 1Gi \"", "1Gi"), ("-1", "-1")]
        {
            let quantity: Quantity = serde_json::from_str(json).unwrap();
            assert_eq!(quantity, Quantity::parse(text).unwrap());
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in ".{0,40}") {
            let _ = Quantity::parse(&text);
        }

        #[test]
        fn no_number_makes_it_panic(text in "[+-]?[0-9.]{0,40}[eEinumkKMGTP]{0,3}[+-]?[0-9]{0,25}") {
            if let Ok(quantity) = Quantity::parse(&text) {
                let _ = (quantity.value(), quantity.milli_value(), quantity + quantity, quantity.saturating_sub(quantity));
            }
        }

        #[test]
        fn the_short_way_agrees_with_the_exact_one(number in 0..999_999_999_999_999_999_i64, suffix in "|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei") {
            let text = format!("{number}{suffix}");
            if let Some(short) = parse_short(text.as_bytes()) {
                prop_assert_eq!(Some(short), parse_any(&text));
            }
        }

        #[test]
        fn what_it_prints_it_reads(nanos in any::<i64>()) {
            let quantity = Quantity { nanos: i128::from(nanos) };
            prop_assert_eq!(Quantity::parse(&quantity.to_string()), Ok(quantity));
        }
    }
}
