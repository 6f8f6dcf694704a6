//! A kind of volumes: one type that implements [`VolumePlugin`], in a file of its own, and its line in
//! `plugins`.
//!
//! The volume manager calls the same methods for all volumes: whether the plugin has the volume's kind, and
//! to attach, mount, expand, measure and unmount it. Each method that some kinds do not need has a default. A
//! plugin must never be called for a volume of another kind.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use beelet_csi::Usage;
use beelet_model::{
    objects::Objects,
    origin::Origin,
    pod::NodeFacts,
    storage::{Claimed, Published, Storage},
};
use beelet_policy::volumes::{
    content::{Allowance, TooMuch},
    csi,
};
use futures::future::{BoxFuture, ready};
use k8s_openapi::{
    ByteString,
    api::core::v1::{Node, PersistentVolumeSpec, Pod, Secret, Volume},
};
use tokio::time::timeout;

use crate::{error::Error, fs_group::FsGroup, loss::Loss};

/// Time that a volume may take to be attached before the pod's worker gets an error.
const ATTACH: Duration = Duration::from_secs(120);

/// A volume of a pod, with the PersistentVolume behind it once its claim was read (`volume.Spec` of the
/// kubelet).
#[derive(Clone, Copy)]
pub(crate) struct Spec<'a> {
    pub(crate) volume: &'a Volume,
    pub(crate) claimed: Option<&'a Claimed>,
}

impl<'a> Spec<'a> {
    /// Makes the spec of a volume whose claim was not read.
    pub(crate) fn of(volume: &'a Volume) -> Self {
        Self { volume, claimed: None }
    }

    /// Returns the spec of the PersistentVolume.
    pub(crate) fn persistent(&self) -> Option<&'a PersistentVolumeSpec> {
        self.claimed?.volume.spec.as_ref()
    }

    /// Returns true if the volume is of a kind: by its PersistentVolume if its claim was read, else by its
    /// own spec.
    pub(crate) fn is_kind(
        &self,
        of_claim: impl FnOnce(&PersistentVolumeSpec) -> bool,
        of_pod: impl FnOnce(&Volume) -> bool,
    ) -> bool {
        match self.claimed {
            Some(_) => self.persistent().is_some_and(of_claim),
            None => of_pod(self.volume),
        }
    }

    /// Returns true if the volume is a claim's, or a container mounts it: the rule of kinds that the agent
    /// mounts outside the pod's own path.
    pub(crate) fn is_claimed_or_mounted(&self, used: Use) -> bool {
        self.claimed.is_some() || used.mounted
    }
}

/// Returns the namespace of a pod.
pub(crate) fn namespace_of(pod: &Pod) -> &str {
    pod.metadata.namespace.as_deref().unwrap_or("default")
}

/// Sources of volumes in addition to their own spec.
#[derive(Clone, Copy)]
pub struct Sources<'a> {
    /// Pod with the volumes.
    pub pod: &'a Pod,
    /// ConfigMaps, Secrets and tokens.
    pub objects: &'a Objects,
    /// Facts about the node.
    pub node: &'a NodeFacts,
    /// PersistentVolumes and attachments of the volumes that containers use.
    pub prepared: &'a Prepared,
}

/// PersistentVolumes and attachments of a pod's volumes, by volume, and the objects that the pod refers to.
#[derive(Clone, Debug, Default)]
pub struct Prepared {
    /// PersistentVolumes that the pod's claims are bound to.
    pub claims: BTreeMap<String, Claimed>,
    /// Attachments of volumes whose kind has to be attached.
    pub attachments: BTreeMap<String, Attachment>,
    /// Objects as of the preparation.
    pub objects: Arc<Objects>,
}

/// Facts about a volume that only its attachment reveals.
#[derive(Clone, Default)]
pub struct Attachment {
    /// Content of the volume's Secret.
    pub secret: BTreeMap<String, Vec<u8>>,
    /// Device that a controller has attached to the node. None on a node without controllers.
    pub device: Option<String>,
    /// Folder where a storage plugin has published the volume.
    pub published: Option<Published>,
}

impl fmt::Debug for Attachment {
    /// Leaves the secret out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, published, .. } = self;
        f.debug_struct("Attachment")
            .field("device", device)
            .field("published", published)
            .finish_non_exhaustive()
    }
}

/// The pod of an attachment, and the objects that the attachment may read.
#[derive(Clone, Copy)]
pub(crate) struct AttachFacts<'a> {
    pub(crate) pod: &'a Pod,
    /// Cluster's storage. None on a standalone node.
    pub(crate) storage: Option<&'a dyn Storage>,
    /// Secrets of the node's manifests.
    pub(crate) objects: &'a Objects,
}

impl AttachFacts<'_> {
    /// Waits until a controller has attached a volume. Returns the volume's device.
    pub(crate) async fn attached(
        storage: &dyn Storage,
        volume: &str,
        unique_name: &str,
    ) -> Result<String, Error> {
        let mut node = storage.node();
        let device =
            |node: &Option<Arc<Node>>| Some(csi::attached_device(node.as_ref()?, unique_name)?.to_owned());
        let seen = timeout(ATTACH, node.wait_for(|node| device(node).is_some())).await;
        let seen = seen.ok().and_then(Result::ok).and_then(|node| device(&node));
        seen.ok_or_else(|| {
            Error::unmet(format!(
                "Volume not attached according to node status for volume {volume:?} (UniqueName: {unique_name:?})"
            ))
        })
    }

    /// Returns the pod's UID.
    pub(crate) fn uid(&self) -> &str {
        self.pod.metadata.uid.as_deref().unwrap_or_default()
    }

    /// Reads a volume's Secret. With `kind`, the Secret must have that type: a driver's Secrets have the
    /// driver's own type, so that no pod can pass another Secret to the driver.
    pub(crate) async fn secret(
        &self,
        kind: Option<&str>,
        (namespace, name): &(String, String),
    ) -> Result<BTreeMap<String, Vec<u8>>, Error> {
        let failed = |why: String| Error::unmet(format!("couldn't get secret {namespace}/{name} err: {why}"));
        let found = match self.storage.filter(|_| Origin::of(self.pod).is_api()) {
            Some(storage) => storage.secret(namespace, name).await.map_err(|why| failed(why.to_string()))?,
            None => {
                let found: Option<&Secret> = self.objects.secret(namespace, name);
                found.cloned().ok_or_else(|| failed(format!("secrets {name:?} not found")))?
            }
        };
        if let Some(kind) = kind.filter(|kind| found.type_.as_deref() != Some(*kind)) {
            return Err(failed(format!("cannot get secret of type {kind}")));
        }
        let data = found.data.unwrap_or_default().into_iter();
        Ok(data.map(|(key, ByteString(value))| (key, value)).collect())
    }
}

/// The pod of an expansion, and the storage that records the new size.
#[derive(Clone, Copy)]
pub(crate) struct ExpandFacts<'a> {
    pub(crate) pod: &'a Pod,
    pub(crate) storage: &'a dyn Storage,
    /// The pod runs with the volume, so the agent may know the volume's size.
    pub(crate) mounted: bool,
}

/// The path of a volume in its pod's folder, and the facts that the mount needs.
pub(crate) struct Target<'a> {
    /// `<pods>/<uid>`.
    pub(crate) folder: &'a Path,
    /// Volume's own path in that folder.
    pub(crate) path: &'a Path,
    pub(crate) fs_group: Option<&'a FsGroup>,
    pub(crate) sources: &'a Sources<'a>,
    /// Mount points that other volumes of the pod need inside this one.
    pub(crate) nested: Option<&'a Result<BTreeSet<String>, TooMuch>>,
}

impl Target<'_> {
    /// Returns the volume's attachment.
    pub(crate) fn attachment(&self, spec: &Spec<'_>) -> Option<&Attachment> {
        self.sources.prepared.attachments.get(&spec.volume.name)
    }
}

/// The location of a volume on the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Location {
    /// Volume's own path in the pod's folder.
    Own,
    /// Target of a link at the volume's own path.
    Linked,
    /// Path on the machine.
    Machine(PathBuf),
}

/// Use of a volume by the containers of its pod.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Use {
    /// A container mounts the volume.
    pub(crate) mounted: bool,
    /// A container has the volume as a block device.
    pub(crate) device: bool,
}

impl Use {
    /// Returns true if any container has the volume.
    pub(crate) fn is_any(self) -> bool {
        self.mounted || self.device
    }
}

/// Size and health of a volume as its plugin reports them. None if the plugin reports none.
pub(crate) type Stats<'a> = BoxFuture<'a, Result<Option<Usage>, String>>;

/// A kind of volumes.
pub(crate) trait VolumePlugin: Send + Sync + fmt::Debug {
    /// Returns the kubelet's name of the plugin if the volume is of this kind.
    fn name(&self, spec: &Spec<'_>) -> Option<&'static str>;

    /// Returns the location of the pod's volumes of this kind.
    fn location(&self, volume: &Volume) -> Location;

    /// Returns true if containers must not write to the volume.
    fn is_read_only(&self, _volume: &Volume) -> bool {
        false
    }

    /// Returns true if the volume has to be set up, according to its use and its attachment.
    fn is_due(&self, _spec: &Spec<'_>, _used: Use, _attachment: Option<&Attachment>) -> bool {
        true
    }

    /// Attaches the volume to the node, or waits until it is attached. Returns None for kinds without
    /// attachments.
    ///
    /// # Errors
    /// The volume is not attached in time, or a referenced object is missing.
    fn attach<'a>(
        &'a self,
        _spec: Spec<'a>,
        _facts: AttachFacts<'a>,
    ) -> BoxFuture<'a, Result<Option<Attachment>, Error>> {
        Box::pin(ready(Ok(None)))
    }

    /// Makes the volume available to the pod. Idempotent. Returns the path of a volume whose location is a
    /// link. Blocks.
    ///
    /// # Errors
    /// The volume cannot be made or mounted.
    fn set_up(
        &self,
        spec: &Spec<'_>,
        target: &Target<'_>,
        left: &mut Allowance,
    ) -> Result<Option<PathBuf>, Error>;

    /// Returns the names of the PersistentVolumes of a running pod that this plugin can expand on the node.
    fn expandable<'a>(&'a self, _uid: &'a str) -> BoxFuture<'a, BTreeSet<String>> {
        Box::pin(ready(BTreeSet::new()))
    }

    /// Expands a claim's volume to the size of the claim.
    ///
    /// # Errors
    /// The volume is smaller than its claim.
    fn expand<'a>(
        &'a self,
        _claimed: &'a Claimed,
        _facts: ExpandFacts<'a>,
    ) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(ready(Ok(())))
    }

    /// Writes the newest content into a volume that is set up. Returns true if the content has changed.
    /// Blocks.
    ///
    /// # Errors
    /// An object that the volume shows is missing.
    fn refresh(&self, _spec: &Spec<'_>, _target: &Target<'_>, _left: &mut Allowance) -> Result<bool, Error> {
        Ok(false)
    }

    /// Returns true if the volume shows objects, which change while the pod runs.
    fn has_content(&self) -> bool {
        false
    }

    /// Returns true if a lost volume of this kind can be made again.
    fn is_restorable(&self) -> bool {
        false
    }

    /// Returns the part of a volume that is missing on the node. Blocks.
    ///
    /// # Errors
    /// The volume cannot be read.
    fn loss(&self, _spec: &Spec<'_>, _path: &Path) -> Result<Option<Loss>, Error> {
        Ok(None)
    }

    /// Makes programs outside the agent unpublish the volumes of a pod, before the agent unmounts anything.
    ///
    /// # Errors
    /// A program fails or is not ready yet.
    fn unpublish<'a>(&'a self, _uid: &'a str) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(ready(Ok(())))
    }

    /// Unmounts the volumes of this kind in a pod's folder, and releases disks that no other pod uses.
    /// Blocks.
    ///
    /// # Errors
    /// A mount is in use.
    fn tear_down(&self, _folder: &Path) -> Result<(), Error> {
        Ok(())
    }

    /// Returns the kubelet's name of the plugin if the place of a linked volume belongs to it.
    fn name_of_place(&self, _folder: &Path, _place: &Path) -> Option<&'static str> {
        None
    }

    /// Returns true if the place must be a mount point while the pod has the volume.
    fn must_be_mounted(&self, _folder: &Path, _place: &Path) -> bool {
        false
    }

    /// Returns true if the files at the place may get the SELinux label of containers.
    fn may_relabel(&self, _folder: &Path, _place: &Path) -> bool {
        true
    }

    /// Returns true if the volume at the place may be measured.
    fn is_measured(&self, _folder: &Path, _place: &Path) -> bool {
        true
    }

    /// Returns the statistics of the volume at the place, with the name of their source. None: the kernel has
    /// the statistics.
    fn stats<'a>(&'a self, _uid: &'a str, _place: &'a Path) -> BoxFuture<'a, Option<(String, Stats<'a>)>> {
        Box::pin(ready(None))
    }
}
