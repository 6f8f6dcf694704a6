//! Reader of JSON values.

use std::fmt;

use serde::de::{
    Deserialize as _, DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor,
};
use serde_json::{Map, Value};

/// Limit of nested arrays and objects in an answer; the reader of values stops at 128. An
/// object of the API that a node reads has some 20.
pub(crate) const LEVELS: u8 = 100;
/// Replacement of deeper values. No field with nested values accepts a text, so the object
/// is unreadable, without hiding the other objects of its list.
pub(crate) const TOO_DEEP: &str = "(nested too deeply to be read)";

/// Mode of reading a value.
#[derive(Clone, Copy)]
pub(crate) enum Reading {
    /// Reads the whole value, and refuses an object with a repeated key: `Value` alone would keep the last.
    Whole,
    /// Reads an API server's answer, without the `managedFields` of any metadata, and with a text instead of
    /// values beyond [`LEVELS`] levels.
    Answer {
        /// True inside the metadata of an object.
        is_metadata: bool,
        /// Number of enclosing arrays and objects.
        level: u8,
    },
}

impl Reading {
    /// Mode at the beginning of an API server's answer.
    pub(crate) const ANSWER: Self = Self::Answer { is_metadata: false, level: 0 };

    /// Reads the only value of a text.
    pub(crate) fn read(self, text: &[u8]) -> Result<Value, serde_json::Error> {
        let mut reader = serde_json::Deserializer::from_slice(text);
        let value = self.deserialize(&mut reader)?;
        reader.end()?;
        Ok(value)
    }

    /// Returns the mode for an element, or for the value of a key.
    fn inside(self, key: Option<&str>) -> Self {
        match self {
            Self::Whole => Self::Whole,
            Self::Answer { level, .. } => {
                Self::Answer { is_metadata: key == Some("metadata"), level: level.saturating_add(1) }
            }
        }
    }
}

impl<'de> DeserializeSeed<'de> for Reading {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        if matches!(self, Self::Answer { level, .. } if level > LEVELS) {
            IgnoredAny::deserialize(deserializer)?;
            return Ok(TOO_DEEP.into());
        }
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Reading {
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
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = list.next_element_seed(self.inside(None))? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut values = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            match self {
                Self::Answer { is_metadata: true, .. } if key == "managedFields" => {
                    map.next_value::<IgnoredAny>()?;
                    continue;
                }
                Self::Whole if values.contains_key(&key) => {
                    return Err(A::Error::custom(format_args!("duplicate key {key:?}")));
                }
                Self::Answer { .. } | Self::Whole => {}
            }
            let value = map.next_value_seed(self.inside(Some(&key)))?;
            values.insert(key, value);
        }
        Ok(Value::Object(values))
    }
}
