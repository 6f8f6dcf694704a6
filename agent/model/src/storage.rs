//! The storage of a cluster: what claims are bound to, and who asks the API server for it.

use std::{fmt, future::Future, path::PathBuf, pin::Pin, sync::Arc};

use beelet_policy::{expansion::StatusPatch, references::TokenReference};
use k8s_openapi::api::{
    core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Secret},
    storage::v1::{CSIDriver, VolumeAttachment},
};
use tokio::sync::watch;

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
    /// Changes the status of a claim, if nobody has changed the claim since it was read; the claim then.
    fn patch_claim<'a>(
        &'a self,
        claim: &'a PersistentVolumeClaim,
        status: &'a StatusPatch,
    ) -> Answer<'a, PersistentVolumeClaim>;
    /// A PersistentVolume by its name.
    fn volume<'a>(&'a self, name: &'a str) -> Answer<'a, PersistentVolume>;
    /// Says whether a volume is attached to a node, by the attachment's name.
    fn attachment<'a>(&'a self, name: &'a str) -> Answer<'a, VolumeAttachment>;
    /// How a storage plugin is used, if anybody said so.
    fn driver<'a>(&'a self, name: &'a str) -> Answer<'a, Option<CSIDriver>>;
    /// A Secret that a PersistentVolume or a pod's volume names.
    fn secret<'a>(&'a self, namespace: &'a str, name: &'a str) -> Answer<'a, Secret>;
    /// A new token of a pod's service account.
    fn token<'a>(&'a self, of: &'a TokenReference) -> Answer<'a, Token>;
    /// This node's Node, as it is seen.
    fn node(&self) -> watch::Receiver<Option<Arc<Node>>>;
}

/// A token of a service account.
#[derive(Clone)]
pub struct Token {
    /// What is shown to others.
    pub token: String,
    /// When it ends, as the API server wrote it.
    pub expires: String,
}

impl fmt::Debug for Token {
    /// Not the token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token").field("expires", &self.expires).finish_non_exhaustive()
    }
}

/// A volume that a storage plugin has brought to a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    /// Where it is.
    pub path: PathBuf,
    /// The agent must give it to the pod's group.
    pub give_to_group: bool,
}

/// What a pod's volume is, once its claim is bound.
#[derive(Clone, Debug, PartialEq)]
pub struct Claimed {
    /// The PersistentVolume.
    pub volume: Arc<PersistentVolume>,
    /// The claim that is bound to it.
    pub claim: Arc<PersistentVolumeClaim>,
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
