//! Manifests of a folder: contents, and the state of each file.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Amount;

use super::priority::{Priority, Written};
use beelet_model::objects;

/// Digest of a file's bytes.
pub(super) type Digest = [u8; 32];

/// Result of reading a file.
#[derive(Clone, Debug)]
pub enum Content {
    /// All bytes and their modification time.
    Bytes(Vec<u8>, SystemTime),
    /// The file exists but can't or must not be read; with the cause.
    Unreadable(String),
}

/// An object of a folder's manifest.
#[derive(Clone, Debug, PartialEq)]
pub struct Described {
    /// The manifest.
    pub file: PathBuf,
    /// The object; a pod has its identity on this node.
    pub object: super::Object,
}

/// State of a manifest.
#[derive(Debug)]
pub(super) struct File {
    /// Digest of the bytes; None if unreadable.
    pub(super) digest: Option<Digest>,
    /// Modification time of the bytes.
    pub(super) modified: Option<SystemTime>,
    /// Error of the current content, if invalid.
    pub(super) error: Option<String>,
    /// The last valid content.
    pub(super) good: Option<Good>,
    /// True if the file was missing at the last check; a second check confirms its removal.
    pub(super) missing: bool,
    /// Number of deletions, if these are counted.
    pub(super) deletions: u64,
}

#[derive(Debug)]
pub(super) enum Good {
    Pod(Box<GoodPod>),
    Class(Box<PriorityClass>),
    Other(objects::Object),
}

#[derive(Debug)]
pub(super) struct GoodPod {
    pub(super) content: Digest,
    /// The pod with its last resolved priority and overhead, if any.
    pub(super) pod: Arc<Pod>,
    pub(super) written: Written,
    pub(super) resolved: Option<(Priority, Overhead)>,
}

/// Overhead of a pod's runtime class.
pub(super) type Overhead = Option<BTreeMap<String, Amount>>;
