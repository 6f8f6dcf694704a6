//! The storage of a cluster: what claims are bound to (those to devices too), and who asks the API server for
//! it.

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

/// Knows the storage of a cluster, and its claims to devices. Nothing is kept: each question is asked anew.
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
    /// A ResourceClaim by its namespace and name.
    fn resource_claim<'a>(&'a self, namespace: &'a str, name: &'a str) -> Answer<'a, ResourceClaim>;
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

/// The names of volumes that pods use or will use, as a Node's status has them, each with those pods' UIDs.
pub type InUse = Arc<BTreeMap<String, BTreeSet<String>>>;

/// The volumes that a controller has attached to the node, or is to attach: it detaches none that is in here.
/// Clones share them.
#[derive(Clone, Debug)]
pub struct VolumesInUse(Arc<watch::Sender<InUse>>);

impl Default for VolumesInUse {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::default()))
    }
}

impl VolumesInUse {
    /// The volumes, as they change.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<InUse> {
        self.0.subscribe()
    }

    /// A pod uses a volume, or will; without a pod, something of it is still on the node.
    pub fn use_by(&self, name: &str, uid: Option<&str>) {
        self.0.send_if_modified(|all| {
            let is_known = all.get(name).is_some_and(|pods| uid.is_none_or(|uid| pods.contains(uid)));
            if !is_known {
                Arc::make_mut(all).entry(name.to_owned()).or_default().extend(uid.map(str::to_owned));
            }
            !is_known
        });
    }

    /// A pod uses the volumes of which this is true no more. Their names stay until they are forgotten.
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

    /// The names that no pod uses.
    #[must_use]
    pub fn unused(&self) -> Vec<String> {
        let all = Arc::clone(&self.0.borrow());
        all.iter().filter(|(_, pods)| pods.is_empty()).map(|(name, _)| name.clone()).collect()
    }

    /// Forgets a volume that no pod uses, and of which nothing is on the node.
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
