//! The storage of a cluster: what claims are bound to, and who asks the API server for it.

use std::{fmt, future::Future, pin::Pin, sync::Arc};

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};

/// A question under way.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, StorageError>> + Send + 'a>>;

/// Why there is no answer. Displayed, it is a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorageError {
    /// The API server's words, or why it gave none.
    pub message: String,
    /// The API server says that there is no such object.
    pub is_not_found: bool,
}

impl fmt::Display for StorageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for StorageError {}

/// Knows the storage of a cluster. Nothing is kept: each question is asked anew.
pub trait Storage: Send + Sync + fmt::Debug {
    /// A claim by its namespace and name.
    fn claim<'a>(&'a self, namespace: &'a str, name: &'a str) -> Answer<'a, PersistentVolumeClaim>;
    /// A PersistentVolume by its name.
    fn volume<'a>(&'a self, name: &'a str) -> Answer<'a, PersistentVolume>;
}

/// What a pod's volume is, once its claim is bound.
#[derive(Clone, Debug, PartialEq)]
pub struct Claimed {
    /// The PersistentVolume.
    pub volume: Arc<PersistentVolume>,
    /// The pod only reads it.
    pub read_only: bool,
}

impl Claimed {
    /// The PersistentVolume's name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.volume.metadata.name.as_deref().unwrap_or_default()
    }
}
