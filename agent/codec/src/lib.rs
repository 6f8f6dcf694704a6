//! Text to Kubernetes objects and back, with the line and the path of each error.
//!
//! There is one way in each direction: text becomes a [`serde_json::Value`] ([`document`] keeps the place of
//! each node), and the value becomes an object; an object becomes a value, and the value JSON
//! ([`std::fmt::Display`] of `Value`) or YAML ([`yaml`]). The serde code of the Kubernetes types is generic:
//! every reader and every writer that it meets is another copy of it, for more than a hundred types. So it
//! meets one of each, and only here: [`ApiType`] is implemented by a table. Data that holds objects (records,
//! scenarios) goes through [`data`], with the same reader and the same writer. [`protobuf`] walks over the
//! value for those who expect Kubernetes' own bytes.
//!
//! This crate must never read a file, and never know what the fields mean.

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

/// A value as one YAML document, without the leading `---`.
///
/// # Errors
/// The library's reason. None is known for a tree of JSON.
pub fn yaml(value: &Value) -> Result<String, YamlError> {
    serde_saphyr::to_string(value).map_err(|error| YamlError(error.to_string()))
}

/// Why a value cannot be written as YAML.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot be written as YAML: {0}")]
pub struct YamlError(String);
