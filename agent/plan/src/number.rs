//! Deserializers for durations and plain numbers of a scenario, which may be JSON numbers or strings: for
//! `#[serde(deserialize_with)]`.

use std::{fmt, marker::PhantomData, time::Duration};

use serde::de::{Deserialize, Deserializer, Error as _, Unexpected, Visitor};

use beelet_units::duration;

/// A type of number in a scenario.
pub(crate) trait Number: Sized {
    /// Expected type, for error messages.
    const EXPECTED: &'static str;
    fn from_text(text: &str) -> Option<Self>;
    fn from_signed(number: i64) -> Option<Self>;
    fn from_unsigned(number: u64) -> Option<Self>;
    fn from_float(number: f64) -> Option<Self>;
}

impl Number for i64 {
    const EXPECTED: &'static str = "a whole number";

    fn from_text(text: &str) -> Option<Self> {
        text.parse().ok()
    }

    fn from_signed(number: i64) -> Option<Self> {
        Some(number)
    }

    fn from_unsigned(number: u64) -> Option<Self> {
        Self::try_from(number).ok()
    }

    fn from_float(number: f64) -> Option<Self> {
        // 2^53: a float represents every whole number up to it exactly.
        (number.fract() == 0.0 && number.abs() <= 9_007_199_254_740_992.0).then_some(number as i64)
    }
}

impl Number for u64 {
    const EXPECTED: &'static str = "a whole number, not negative";

    fn from_text(text: &str) -> Option<Self> {
        text.parse().ok()
    }

    fn from_signed(number: i64) -> Option<Self> {
        Self::try_from(number).ok()
    }

    fn from_unsigned(number: u64) -> Option<Self> {
        Some(number)
    }

    fn from_float(number: f64) -> Option<Self> {
        i64::from_float(number).and_then(Self::from_signed)
    }
}

impl Number for f64 {
    const EXPECTED: &'static str = "a number";

    fn from_text(text: &str) -> Option<Self> {
        text.parse().ok().filter(|number: &f64| number.is_finite())
    }

    fn from_signed(number: i64) -> Option<Self> {
        Some(number as f64)
    }

    fn from_unsigned(number: u64) -> Option<Self> {
        Some(number as f64)
    }

    fn from_float(number: f64) -> Option<Self> {
        Some(number).filter(|number| number.is_finite())
    }
}

struct Flexible<N>(N);

impl<'de, N: Number> Deserialize<'de> for Flexible<N> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NumberVisitor(PhantomData))
    }
}

struct NumberVisitor<N>(PhantomData<N>);

impl<N: Number> Visitor<'_> for NumberVisitor<N> {
    type Value = Flexible<N>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(N::EXPECTED)
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
        N::from_text(text.trim()).map(Flexible).ok_or_else(|| E::invalid_value(Unexpected::Str(text), &self))
    }

    fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<Self::Value, E> {
        N::from_signed(number)
            .map(Flexible)
            .ok_or_else(|| E::invalid_value(Unexpected::Signed(number), &self))
    }

    fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<Self::Value, E> {
        N::from_unsigned(number)
            .map(Flexible)
            .ok_or_else(|| E::invalid_value(Unexpected::Unsigned(number), &self))
    }

    fn visit_f64<E: serde::de::Error>(self, number: f64) -> Result<Self::Value, E> {
        N::from_float(number).map(Flexible).ok_or_else(|| E::invalid_value(Unexpected::Float(number), &self))
    }
}

/// Reads a required number: `#[serde(deserialize_with = "number::required")]`.
pub(crate) fn required<'de, D: Deserializer<'de>, N: Number>(deserializer: D) -> Result<N, D::Error> {
    Flexible::deserialize(deserializer).map(|Flexible(number)| number)
}

/// Reads a number that may be absent or null: `#[serde(default, deserialize_with = "number::optional")]`.
pub(crate) fn optional<'de, D: Deserializer<'de>, N: Number>(deserializer: D) -> Result<Option<N>, D::Error> {
    Option::<Flexible<N>>::deserialize(deserializer).map(|number| number.map(|Flexible(number)| number))
}

/// Reads a Go duration that may be absent or null: `#[serde(default, deserialize_with =
/// "number::duration")]`.
pub(crate) fn duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    text.map(|text| duration::parse(&text).map_err(D::Error::custom)).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[derive(serde::Deserialize)]
    struct Fields {
        #[serde(deserialize_with = "required")]
        must: u64,
        #[serde(default, deserialize_with = "optional")]
        may: Option<f64>,
    }

    fn read(value: Value) -> Result<(u64, Option<f64>), String> {
        serde_json::from_value::<Fields>(value)
            .map(|fields| (fields.must, fields.may))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn numbers_and_strings_are_the_same() {
        assert_eq!(read(json!({"must": 7, "may": 0.5})), Ok((7, Some(0.5))));
        assert_eq!(read(json!({"must": "7", "may": "0.5"})), Ok((7, Some(0.5))));
        assert_eq!(read(json!({"must": 7.0, "may": null})), Ok((7, None)));
        assert_eq!(read(json!({"must": "18446744073709551615"})), Ok((u64::MAX, None)));
    }

    #[test]
    fn what_is_no_such_number_is_refused() {
        for bad in [
            json!(-1),
            json!(0.5),
            json!("seven"),
            json!(""),
            json!(true),
            json!(null),
            json!([1]),
            json!(1e300),
        ] {
            let error = read(json!({"must": bad})).unwrap_err();
            assert!(error.contains("a whole number, not negative"), "{error}");
        }
    }
}
