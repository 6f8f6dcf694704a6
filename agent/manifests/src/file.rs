//! Manifests of a folder: contents as read, and what is known of each file.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Amount;

use super::priority::{Priority, Written};
use beelet_model::objects;

/// A digest of a file's bytes.
pub(super) type Digest = [u8; 32];

/// What came of reading a file.
#[derive(Clone, Debug)]
pub enum Content {
    /// Its bytes, all of them, and when they were last changed.
    Bytes(Vec<u8>, SystemTime),
    /// It's there, but can't be read or isn't to be read: a sentence that says why.
    Unreadable(String),
}

/// An object that a manifest of a folder describes.
#[derive(Clone, Debug, PartialEq)]
pub struct Described {
    /// The manifest.
    pub file: PathBuf,
    /// What it describes; a pod with its identity on this node.
    pub object: super::Object,
}

/// One manifest.
#[derive(Debug)]
pub(super) struct File {
    /// Of the bytes; None where they couldn't be read.
    pub(super) digest: Option<Digest>,
    /// When the bytes were last changed.
    pub(super) modified: Option<SystemTime>,
    /// Why what is in it now can't be used.
    pub(super) error: Option<String>,
    /// The last valid content.
    pub(super) good: Option<Good>,
    /// It wasn't there when it was last looked for, and is looked for again before that counts.
    pub(super) missing: bool,
    /// How often it was deleted, where that counts.
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
    /// With the priority and the overhead that were last found for it, once any were.
    pub(super) pod: Arc<Pod>,
    pub(super) written: Written,
    pub(super) resolved: Option<(Priority, Overhead)>,
}

/// What a pod's runtime class costs.
pub(super) type Overhead = Option<BTreeMap<String, Amount>>;
