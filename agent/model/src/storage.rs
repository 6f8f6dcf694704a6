//! Storage of a cluster: claims (to devices too), their volumes, and the trait that reads them from the API
//! server.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    future::Future,
    path::PathBuf,
    pin::Pin,
    sync::Arc,
};

use beelet_policy::{pod::references::TokenReference, volumes::growth::StatusPatch};
use k8s_openapi::api::{
    core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Secret},
    resource::v1::ResourceClaim,
    storage::v1::{CSIDriver, VolumeAttachment},
};
use tokio::sync::watch;

/// A request under way.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, StorageError>> + Send + 'a>>;

/// Failure of a request; its display is a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorageError {
    /// Message of the API server, or the reason for a missing answer.
    pub message: String,
    /// True if the API server reports that the object does not exist.
    pub is_not_found: bool,
}

impl fmt::Display for StorageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for StorageError {}

/// Reads the storage of a cluster, and its claims to devices. Implementations cache nothing.
pub trait Storage: Send + Sync + fmt::Debug {
    /// Reads a claim by its namespace and name.
    fn claim<'a>(&'a self, namespace: &'a str, name: &'a str) -> Answer<'a, PersistentVolumeClaim>;
    /// Changes the status of a claim, if the claim has not changed since it was read, and returns the result.
    fn patch_claim<'a>(
        &'a self,
        claim: &'a PersistentVolumeClaim,
        status: &'a StatusPatch,
    ) -> Answer<'a, PersistentVolumeClaim>;
    /// Reads a PersistentVolume by its name.
    fn volume<'a>(&'a self, name: &'a str) -> Answer<'a, PersistentVolume>;
    /// Reads an attachment of a volume to a node, by the attachment's name.
    fn attachment<'a>(&'a self, name: &'a str) -> Answer<'a, VolumeAttachment>;
    /// Reads the CSIDriver of a storage plugin, if it exists.
    fn driver<'a>(&'a self, name: &'a str) -> Answer<'a, Option<CSIDriver>>;
    /// Reads a ResourceClaim by its namespace and name.
    fn resource_claim<'a>(&'a self, namespace: &'a str, name: &'a str) -> Answer<'a, ResourceClaim>;
    /// Reads a Secret that a PersistentVolume or a pod's volume names.
    fn secret<'a>(&'a self, namespace: &'a str, name: &'a str) -> Answer<'a, Secret>;
    /// Requests a new token of a pod's service account.
    fn token<'a>(&'a self, of: &'a TokenReference) -> Answer<'a, Token>;
    /// Returns this node's Node, as watched.
    fn node(&self) -> watch::Receiver<Option<Arc<Node>>>;
}

/// A token of a service account.
#[derive(Clone)]
pub struct Token {
    /// The bearer token itself.
    pub token: String,
    /// Expiry, in the API server's format.
    pub expires: String,
}

impl fmt::Debug for Token {
    /// Omits the token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token").field("expires", &self.expires).finish_non_exhaustive()
    }
}

/// Names of the volumes that pods use or will use, as in a Node's status, each with the pods' UIDs.
pub type InUse = Arc<BTreeMap<String, BTreeSet<String>>>;

/// Volumes that a controller has attached to the node, or will attach; it does not detach a volume in this
/// set. Clones share the set.
#[derive(Clone, Debug)]
pub struct VolumesInUse(Arc<watch::Sender<InUse>>);

impl Default for VolumesInUse {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::default()))
    }
}

impl VolumesInUse {
    /// Follows changes of the set.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<InUse> {
        self.0.subscribe()
    }

    /// Records that a pod uses a volume, or will; without a pod, that parts of the volume are still on the
    /// node.
    pub fn use_by(&self, name: &str, uid: Option<&str>) {
        self.0.send_if_modified(|all| {
            let is_known = all.get(name).is_some_and(|pods| uid.is_none_or(|uid| pods.contains(uid)));
            if !is_known {
                Arc::make_mut(all).entry(name.to_owned()).or_default().extend(uid.map(str::to_owned));
            }
            !is_known
        });
    }

    /// Records that a pod no longer uses the volumes for which `is_meant` is true. Their names stay until
    /// [`Self::forget`].
    pub fn leave(&self, uid: &str, is_meant: impl Fn(&str) -> bool) {
        self.0.send_if_modified(|all| {
            let is_left = |(name, pods): (&String, &BTreeSet<String>)| is_meant(name) && pods.contains(uid);
            if all.iter().any(is_left) {
                let left = Arc::make_mut(all).iter_mut().filter(|(name, _)| is_meant(name));
                left.for_each(|(_, pods)| {
                    pods.remove(uid);
                });
            }
            false
        });
    }

    /// Returns the names of unused volumes.
    #[must_use]
    pub fn unused(&self) -> Vec<String> {
        let all = Arc::clone(&self.0.borrow());
        all.iter().filter(|(_, pods)| pods.is_empty()).map(|(name, _)| name.clone()).collect()
    }

    /// Removes a volume that no pod uses, and that has no parts on the node.
    pub fn forget(&self, name: &str) {
        self.0.send_if_modified(|all| {
            let is_unused = all.get(name).is_some_and(BTreeSet::is_empty);
            if is_unused {
                Arc::make_mut(all).remove(name);
            }
            is_unused
        });
    }
}

/// A volume that a storage plugin has published for a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    /// Path of the volume.
    pub path: PathBuf,
    /// True if the agent must change the volume's group to the pod's.
    pub give_to_group: bool,
}

/// A pod's volume with a bound claim.
#[derive(Clone, Debug, PartialEq)]
pub struct Claimed {
    /// PersistentVolume.
    pub volume: Arc<PersistentVolume>,
    /// Claim that is bound to the volume.
    pub claim: Arc<PersistentVolumeClaim>,
    /// True if the pod only reads the volume.
    pub read_only: bool,
}

impl Claimed {
    /// Returns the PersistentVolume's name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.volume.metadata.name.as_deref().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_in_use_until_its_last_pod_has_left_and_it_is_forgotten() {
        let in_use = VolumesInUse::default();
        let mut seen = in_use.subscribe();
        let names = |in_use: &VolumesInUse| in_use.subscribe().borrow().keys().cloned().collect::<Vec<_>>();
        in_use.use_by("a", Some("u1"));
        assert!(seen.has_changed().unwrap());
        seen.mark_unchanged();
        in_use.use_by("a", Some("u1"));
        assert!(!seen.has_changed().unwrap(), "nothing is new");
        in_use.use_by("a", Some("u2"));
        in_use.use_by("b", None);
        in_use.leave("u1", |_| true);
        in_use.leave("u2", |name| name == "b");
        in_use.forget("a");
        assert_eq!((names(&in_use), in_use.unused()), (vec!["a".into(), "b".into()], vec!["b".to_owned()]));
        in_use.leave("u2", |name| name == "a");
        in_use.forget("a");
        in_use.forget("b");
        assert_eq!(names(&in_use), Vec::<String>::new());
    }
}
