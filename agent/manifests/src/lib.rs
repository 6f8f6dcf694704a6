//! Reads manifests into pods: parses them, sets the API server's defaults and validates them, and reports all
//! faults at once.
//!
//! A file has one object, as for the kubelet: a v1 Pod, or an object for the pods of the same folder that a
//! cluster has in its API server: a PriorityClass, a ConfigMap, a Secret, a RuntimeClass. [`source`] watches
//! the folder.
//!
//! The agent can run every accepted pod as specified: this crate rejects unsupported fields
//! ([`beelet_spec::support`]) instead of silently ignoring them. Must never touch the runtime, and never
//! panic on any text.

// A test hands its literals over.
#![cfg_attr(test, allow(clippy::needless_pass_by_value))]

mod defaults;
mod file;
pub mod folder;
mod identity;
mod names;
mod objects;
mod owners;
mod priority;
mod reading;
pub mod source;
mod standing;
mod validate;
mod watch;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::Value;

use beelet_codec::ApiType as _;
use beelet_codec::document::{self, Document, Limits};

pub use beelet_codec::error::{FieldError, ManifestError};
pub use beelet_model::desired::Desired;
pub use beelet_model::labels::{ANNOTATION_HASH, ANNOTATION_MANIFEST, ANNOTATION_SEEN, ANNOTATION_SOURCE};
use beelet_model::objects::Object as Kept;
pub use defaults::pull_policy;

use beelet_codec::error::Problem;

/// An object of a manifest.
#[derive(Clone, Debug, PartialEq)]
pub enum Object {
    /// A pod, complete and valid, still without its identity on this node and its priority.
    Pod(Box<Pod>),
    /// A priority that pods may refer to by name.
    PriorityClass(Box<PriorityClass>),
    /// Any other object that pods may refer to by name.
    Other(beelet_model::objects::Object),
}

impl Object {
    /// Returns the kind.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Pod(_) => "Pod",
            Self::PriorityClass(_) => "PriorityClass",
            Self::Other(object) => object.kind(),
        }
    }

    /// Returns the whole object as JSON.
    pub fn to_value(&self) -> Value {
        match self {
            Self::Pod(pod) => pod.to_value(),
            Self::PriorityClass(class) => class.to_value(),
            Self::Other(Kept::ConfigMap(map)) => map.to_value(),
            Self::Other(Kept::Secret(secret)) => secret.to_value(),
            Self::Other(Kept::RuntimeClass(class)) => class.to_value(),
        }
    }

    /// Returns the metadata as written.
    pub fn metadata(&self) -> &ObjectMeta {
        match self {
            Self::Pod(pod) => &pod.metadata,
            Self::PriorityClass(class) => &class.metadata,
            Self::Other(object) => object.metadata(),
        }
    }
}

/// A valid manifest.
#[derive(Clone, Debug, PartialEq)]
pub struct Manifest {
    /// The object.
    pub object: Object,
    /// Digest of the content, without defaults, comments and layout, for the pod's identity.
    pub content: [u8; 32],
    /// Messages about fields without an effect.
    pub warnings: Vec<String>,
}

/// Reads the text of a manifest. Errors contain the name `file`.
///
/// # Errors
/// All faults that prevent the agent from running the pod, with their positions in the text.
pub fn read(text: &str, file: &str) -> Result<Manifest, ManifestError> {
    let documents =
        document::parse_within(text, Limits::MANIFEST).map_err(|e| ManifestError::syntax(file, &e))?;
    match <[Document; 1]>::try_from(documents) {
        Ok([document]) => read_document(&document, file),
        Err(documents) => Err(ManifestError::not_one(file, &documents)),
    }
}

/// Reads a parsed document, like [`read`].
///
/// # Errors
/// As for [`read`].
pub fn read_document(document: &Document, file: &str) -> Result<Manifest, ManifestError> {
    let locate = |problems| ManifestError::new(file, document, problems);
    let (kind, api_version) = (text_of(&document.value, "kind"), text_of(&document.value, "apiVersion"));
    match (api_version, kind) {
        (Some("v1"), Some("Pod")) => read_pod(document).map_err(locate),
        (Some("scheduling.k8s.io/v1"), Some("PriorityClass")) => {
            priority::read(&document.value).map_err(locate)
        }
        (Some("v1"), Some("ConfigMap")) => objects::config_map(&document.value).map_err(locate),
        (Some("v1"), Some("Secret")) => objects::secret(&document.value).map_err(locate),
        (Some("node.k8s.io/v1"), Some("RuntimeClass")) => {
            objects::runtime_class(document.value.clone()).map_err(locate)
        }
        _ => Err(locate(vec![unknown_kind(&document.value, api_version, kind)])),
    }
}

fn text_of<'v>(value: &'v Value, field: &str) -> Option<&'v str> {
    value.get(field).and_then(Value::as_str)
}

fn unknown_kind(value: &Value, api_version: Option<&str>, kind: Option<&str>) -> Problem {
    let wanted = "a manifest is a v1 Pod (or a v1 ConfigMap or Secret, a scheduling.k8s.io/v1 PriorityClass, a \
                  node.k8s.io/v1 RuntimeClass)";
    if !value.is_object() {
        return Problem::new("", format!("{wanted}, a mapping; this is {}", beelet_codec::name_of(value)));
    }
    match (api_version, kind) {
        (_, None) => Problem::new("kind", format!("must be set to a string: {wanted}")),
        (None, Some(_)) => Problem::new("apiVersion", format!("must be set to a string: {wanted}")),
        (Some(_), Some("List" | "PodList")) => {
            Problem::new("kind", "lists are not supported; split the list into one file per pod")
        }
        (Some(version), Some("Pod" | "PriorityClass" | "ConfigMap" | "Secret" | "RuntimeClass")) => {
            Problem::new(
                "apiVersion",
                format!("{} is unknown for this kind: {wanted}", names::quoted(version)),
            )
        }
        (Some(_), Some(kind)) => {
            Problem::new("kind", format!("{} is not supported: {wanted}", names::quoted(kind)))
        }
    }
}

fn read_pod(document: &Document) -> Result<Manifest, Vec<Problem>> {
    let mut value = document.value.clone();
    beelet_codec::normalize(&mut value);
    let found = beelet_spec::support::check(&value);
    let mut problems = found.refused;
    let (mut pod, unknown) = match Pod::read(&value) {
        Ok(read) => read,
        // With type errors, further validation is impossible, but unsupported fields are reported, too.
        Err(errors) => return Err(errors.into_iter().chain(problems).collect()),
    };
    identity::keep_what_a_manifest_says(&mut pod);
    let content = identity::content_digest(&pod);
    defaults::apply(&mut pod);
    problems.extend(validate::pod(&pod));
    if !problems.is_empty() {
        // A missing field may be misspelled: report unknown fields as well.
        return Err(unknown.into_iter().chain(problems).collect());
    }
    let place =
        |path: &str| document.locate(path).map_or_else(String::new, |(line, _)| format!("line {line}: "));
    let warnings = unknown.into_iter().chain(found.ignored);
    let warnings = warnings.map(|p| format!("{}{}: {}", place(&p.path), p.path, p.message)).collect();
    Ok(Manifest { object: Object::Pod(Box::new(pod)), content, warnings })
}

#[cfg(test)]
mod hostile;
#[cfg(test)]
mod tests;
