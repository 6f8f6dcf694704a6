//! Readers and writers of data that may contain Kubernetes objects: records, scenarios, configuration.
//!
//! The types belong to other crates, so the functions are generic. They use the reader and the writer of
//! [`crate::ApiType`], so the code for the contained objects exists once, in this crate (rustc shares generic
//! code with the crates above if both are built with opt-level 0, 1 or s).

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::{
    decode,
    error::{JsonError, Problem},
    reader::Reading,
};

/// Parses a JSON text into a value.
///
/// # Errors
/// Fails if the text is not JSON, or an object repeats a key.
pub fn parse(text: &[u8]) -> Result<Value, serde_json::Error> {
    Reading::Whole.read(text)
}

/// Reads data from a JSON text.
///
/// # Errors
/// The text is not JSON, or holds something else.
pub fn from_json<T: DeserializeOwned>(text: &[u8]) -> Result<T, JsonError> {
    read(&parse(text).map_err(JsonError::Syntax)?).map_err(JsonError::Field)
}

/// Reads data.
///
/// # Errors
/// Fails with the first wrong field, and serde's message.
pub fn read<T: DeserializeOwned>(value: &Value) -> Result<T, Problem> {
    serde_path_to_error::deserialize(value)
        .map_err(|error| Problem::new(decode::path_text(error.path()), error.inner().to_string()))
}

/// Writes data.
///
/// # Errors
/// Fails for data that JSON lacks, such as a map with other keys than text.
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
        assert!(error.to_string().starts_with("duplicate key \"b\" at line 1"), "{error}");
    }
}
