//! An API server's JSON, read without what says who set which field: nobody on a node asks for that, and it
//! can be most of an object.

use std::fmt;

use serde::de::{Deserialize as _, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// Most levels of arrays and objects that are read; the reader of values gives up at 128. An object of the
/// API that a node reads has some 20.
const LEVELS: u8 = 100;
/// The value in place of what has more levels: no field with levels below it takes a text, so that the object
/// can't be read, and no other object of its list is hidden.
const TOO_DEEP: &str = "(nested too deeply to be read)";

/// The value of an API server's JSON, without the `managedFields` of any `metadata`.
///
/// They are skipped, not read: they may have any depth (an API server stores what an author of pods writes
/// there). A value with more than [`LEVELS`] levels is a text instead. Else one such pod would hide all
/// others of its list.
///
/// # Errors
/// The text is not JSON.
pub fn answer(text: &[u8]) -> Result<Value, serde_json::Error> {
    let mut reader = serde_json::Deserializer::from_slice(text);
    let value = Place { is_metadata: false, level: 0 }.deserialize(&mut reader)?;
    reader.end()?;
    Ok(value)
}

/// What is being read, and how many levels are around it.
#[derive(Clone, Copy)]
struct Place {
    is_metadata: bool,
    level: u8,
}

impl Place {
    fn inside(self, is_metadata: bool) -> Self {
        Self { is_metadata, level: self.level.saturating_add(1) }
    }
}

impl<'de> DeserializeSeed<'de> for Place {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        if self.level > LEVELS {
            IgnoredAny::deserialize(deserializer)?;
            return Ok(TOO_DEEP.into());
        }
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Place {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any valid JSON value")
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
        while let Some(value) = list.next_element_seed(self.inside(false))? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut values = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            if self.is_metadata && key == "managedFields" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let value = map.next_value_seed(self.inside(key == "metadata"))?;
            values.insert(key, value);
        }
        Ok(Value::Object(values))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_answer_is_read_without_its_managed_fields() {
        let check =
            |text: &str, expected: &Value| assert_eq!(answer(text.as_bytes()).unwrap(), *expected, "{text}");
        let pod = r#"{"metadata":{"name":"a","managedFields":[{"manager":"x"}],"labels":{"managedFields":"kept"}}}"#;
        let read = json!({ "metadata": { "name": "a", "labels": { "managedFields": "kept" } } });
        check(pod, &read);
        check(
            &format!(r#"{{"kind":"PodList","items":[{pod}]}}"#),
            &json!({ "kind": "PodList", "items": [read] }),
        );
        check(&format!(r#"{{"type":"ADDED","object":{pod}}}"#), &json!({ "type": "ADDED", "object": read }));
        for plain in
            ["null", "true", "-7", "18446744073709551615", "1.5", r#""text""#, r#"["a",{"b":{"c":[]}}]"#]
        {
            check(plain, &serde_json::from_str(plain).unwrap());
        }
    }

    #[test]
    fn managed_fields_of_any_depth_hide_nothing() {
        let deep = format!("{}1{}", r#"{"f:a":"#.repeat(10_000), "}".repeat(10_000));
        let list = format!(
            r#"{{"items":[{{"metadata":{{"name":"a","managedFields":[{{"fieldsV1":{deep}}}]}}}},{{"metadata":{{"name":"b"}}}}]}}"#
        );
        let names: Vec<Value> =
            [json!({ "metadata": { "name": "a" } }), json!({ "metadata": { "name": "b" } })].into();
        assert_eq!(answer(list.as_bytes()).unwrap(), json!({ "items": names }));
        // Elsewhere they are read as far as the bound.
        let mut read = &answer(deep.as_bytes()).unwrap();
        let mut levels = 0;
        while let Some(inner) = read.get("f:a") {
            (read, levels) = (inner, levels + 1);
        }
        assert_eq!((read.as_str(), levels), (Some(TOO_DEEP), usize::from(LEVELS) + 1));
    }

    #[test]
    fn what_is_no_json_is_an_error() {
        for text in ["", "{", "nothing", r#"{"metadata":{"managedFields":[}}"#, "{} {}", "[1,]"] {
            assert!(answer(text.as_bytes()).is_err(), "{text}");
        }
    }
}
