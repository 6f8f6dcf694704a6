//! Data that is no Kubernetes object, but may hold some: records, scenarios, configuration.
//!
//! Its types belong to other crates, so these functions are generic. They use the reader and the writer that
//! [`crate::ApiType`] uses: what is made of them for the objects inside exists once, in this crate (rustc
//! shares generic code with the crates above where both are built with opt-level 0, 1 or s).

use std::fmt;

use serde::Serialize;
use serde::de::{self, Deserialize, DeserializeOwned, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::{decode, error::Problem, object::JsonError};

/// The value of a text in JSON.
///
/// # Errors
/// The text is not JSON, or an object has a key twice.
pub fn parse(text: &[u8]) -> Result<Value, serde_json::Error> {
    serde_json::from_slice(text).map(|Unambiguous(value)| value)
}

/// Reads data from a text in JSON.
///
/// # Errors
/// The text is not JSON, or holds something else.
pub fn from_json<T: DeserializeOwned>(text: &[u8]) -> Result<T, JsonError> {
    read(&parse(text).map_err(JsonError::Syntax)?).map_err(JsonError::Field)
}

/// Reads data.
///
/// # Errors
/// The first field that is wrong, with serde's message.
pub fn read<T: DeserializeOwned>(value: &Value) -> Result<T, Problem> {
    serde_path_to_error::deserialize(value)
        .map_err(|error| Problem::new(decode::path_text(error.path()), error.inner().to_string()))
}

/// Writes data.
///
/// # Errors
/// The data has a form that JSON lacks, such as a map whose keys are no text.
pub fn to_value<T: Serialize>(data: &T) -> Result<Value, serde_json::Error> {
    serde_json::to_value(data)
}

/// Writes data as JSON on one line.
///
/// # Errors
/// As [`to_value`].
pub fn to_json<T: Serialize>(data: &T) -> Result<String, serde_json::Error> {
    serde_json::to_string(data)
}

/// A value in which no object has a key twice. `Value` by itself would keep the last.
struct Unambiguous(Value);

impl<'de> Deserialize<'de> for Unambiguous {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UnambiguousVisitor).map(Unambiguous)
    }
}

struct UnambiguousVisitor;

impl<'de> Visitor<'de> for UnambiguousVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(Unambiguous(value)) = items.next_element()? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some((key, Unambiguous(value))) = entries.next_entry::<String, _>()? {
            if map.contains_key(&key) {
                return Err(de::Error::custom(format_args!("the key {key:?} is there twice")));
            }
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_text_in_json_gives_its_value() {
        let value = json!({"a": [1, -1, 1.5, "x\n", null, true, {}], "b": u64::MAX});
        assert_eq!(parse(value.to_string().as_bytes()).unwrap(), value);
        assert!(parse(b"{} {}").is_err());
        assert!(parse(b"1e999").is_err());
    }

    #[test]
    fn a_key_that_is_there_twice_is_refused() {
        let error = parse(br#"{"a": {"b": 1, "b": 1}}"#).unwrap_err();
        assert!(error.to_string().starts_with("the key \"b\" is there twice at line 1"), "{error}");
    }
}
