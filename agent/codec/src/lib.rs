//! Conversion of text to Kubernetes objects and back, with the line and the path of each error.
//!
//! Each direction has one way: text becomes a [`serde_json::Value`] ([`document`] keeps the place of
//! each node), and the value becomes an object; an object becomes a value, and the value JSON
//! ([`std::fmt::Display`] of `Value`) or YAML ([`yaml`]). The serde code of the Kubernetes types is generic:
//! every reader and every writer instantiates another copy, for more than a hundred types. So this crate uses
//! one of each: a table implements [`ApiType`]. Data that contains objects (records, scenarios) goes through
//! [`data`], with the same reader and the same writer. [`protobuf`] writes a value in Kubernetes' own format.
//!
//! This crate must never read a file or interpret the fields.

mod answer;
pub mod data;
mod decode;
pub mod document;
pub mod error;
mod object;
pub mod parts;
pub mod protobuf;
mod reader;

pub use answer::answer;
pub use decode::{name_of, normalize};
pub use error::{JsonError, field};
pub use object::{ApiType, list};

use serde_json::Value;

/// Writes a value as one YAML document, without the leading `---`.
///
/// # Errors
/// Fails with the library's error; no failure is known for a tree of JSON.
pub fn yaml(value: &Value) -> Result<String, YamlError> {
    serde_saphyr::to_string(value).map_err(|error| YamlError(error.to_string()))
}

/// Error of a value that cannot be written as YAML.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot be written as YAML: {0}")]
pub struct YamlError(String);
