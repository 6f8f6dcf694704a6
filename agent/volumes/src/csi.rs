//! Adapts the storage plugins (CSI) to the volume manager. Also has the volumes of in-tree kinds that were
//! migrated to storage plugins (`migration`).

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use beelet_csi::{Csi, Error as CsiError, Source, Wanted};
use beelet_model::storage::{Claimed, Published, Storage};
use beelet_policy::volumes::{
    claims,
    content::Allowance,
    csi::PLUGIN,
    growth::{self, Growth, Record},
    migration,
};
use beelet_state::events::{Object, Recorder};
use beelet_units::quantity::Quantity;
use futures::future::BoxFuture;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{CSIPersistentVolumeSource, PersistentVolumeClaim, Volume};

use crate::{
    error::Error,
    fs_group::Access,
    plugin::{
        AttachFacts, Attachment, ExpandFacts, Location, Spec, Stats, Target, Use, VolumePlugin, namespace_of,
    },
};

/// Volumes of storage plugins. Clones share the plugins.
#[derive(Clone, Debug)]
pub(crate) struct CsiVolumes {
    pub(crate) csi: Csi,
    pub(crate) events: Recorder,
    pub(crate) node_name: String,
}

/// Returns the kubelet's name of the plugin for storage plugins' volumes. An unread claim counts as such a
/// volume.
pub(crate) fn plugin_name(spec: &Spec<'_>) -> Option<&'static str> {
    let is_ours = spec.is_kind(|claimed| claimed.csi.is_some(), claims::may_be_of_driver);
    is_ours.then_some("kubernetes.io/csi")
}

impl CsiVolumes {
    /// Makes the storage plugin publish a volume to a pod; with `again`, a volume that the pod has already.
    /// Returns None if the volume does not belong to a storage plugin.
    ///
    /// # Errors
    /// The plugin cannot publish the volume, or not yet.
    pub(crate) async fn publish(
        &self,
        spec: Spec<'_>,
        facts: AttachFacts<'_>,
        again: bool,
    ) -> Result<Option<Published>, Error> {
        let Some(storage) = facts.storage else { return Ok(None) };
        let (pod, volume) = (facts.pod, spec.volume);
        let context = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
        let group = context.and_then(|context| context.fs_group);
        if let Some(source) = &volume.csi {
            let (name, read_only) = (volume.name.as_str(), source.read_only == Some(true));
            let wanted = Wanted { pod, name, source: Source::Inline(source), read_only, group, again };
            return Ok(Some(self.csi.publish(storage, wanted).await?));
        }
        let migrated = migration::of_pod(volume, namespace_of(pod)).and_then(Result::ok);
        let (found, read_only) = match (&migrated, spec.claimed) {
            (Some(found), _) => (found, migration::is_read_only(volume)),
            (None, Some(claimed)) => (&*claimed.volume, claimed.read_only),
            (None, None) => return Ok(None),
        };
        let Some(source) = found.spec.as_ref().and_then(|spec| spec.csi.as_ref()) else { return Ok(None) };
        let source = Source::Persistent(found, source);
        let name = found.metadata.name.as_deref().unwrap_or_default();
        let wanted = Wanted { pod, name, source, read_only, group, again };
        Ok(Some(self.csi.publish(storage, wanted).await?))
    }
}

impl VolumePlugin for CsiVolumes {
    fn name(&self, spec: &Spec<'_>) -> Option<&'static str> {
        plugin_name(spec)
    }

    fn location(&self, _volume: &Volume) -> Location {
        Location::Linked
    }

    fn is_read_only(&self, volume: &Volume) -> bool {
        match (&volume.persistent_volume_claim, &volume.csi) {
            (Some(claim), _) => claim.read_only == Some(true),
            (_, Some(source)) => source.read_only == Some(true),
            _ => migration::is_migrated(volume) && migration::is_read_only(volume),
        }
    }

    fn is_due(&self, spec: &Spec<'_>, _used: Use, attachment: Option<&Attachment>) -> bool {
        spec.claimed.is_some() || attachment.is_some_and(|attachment| attachment.published.is_some())
    }

    fn attach<'a>(
        &'a self,
        spec: Spec<'a>,
        facts: AttachFacts<'a>,
    ) -> BoxFuture<'a, Result<Option<Attachment>, Error>> {
        Box::pin(async move {
            let published = self.publish(spec, facts, false).await?;
            Ok(published.map(|published| Attachment { published: Some(published), ..Attachment::default() }))
        })
    }

    fn set_up(
        &self,
        spec: &Spec<'_>,
        target: &Target<'_>,
        _left: &mut Allowance,
    ) -> Result<Option<PathBuf>, Error> {
        let Some(published) = target.attachment(spec).and_then(|attachment| attachment.published.as_ref())
        else {
            return Err(Error::unmet("beelet cannot mount PersistentVolumes of this kind"));
        };
        if let Some(group) = target.fs_group.filter(|_| published.give_to_group) {
            group.own(&published.path, Access::ReadWrite)?;
        }
        Ok(Some(published.path.clone()))
    }

    fn expandable<'a>(&'a self, uid: &'a str) -> BoxFuture<'a, BTreeSet<String>> {
        Box::pin(async move {
            let mut expandable = BTreeSet::new();
            for volume in self.csi.volumes_of(uid).await {
                // The next round queries a driver that is not registered now.
                if self.csi.expands(volume.driver()).await.unwrap_or(false) {
                    expandable.insert(volume.name().to_owned());
                }
            }
            expandable
        })
    }

    fn expand<'a>(
        &'a self,
        claimed: &'a Claimed,
        facts: ExpandFacts<'a>,
    ) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(async move {
            let source = claimed.volume.spec.as_ref().and_then(|spec| spec.csi.as_ref());
            let Some(source) = source else { return Ok(()) };
            let known = self.csi.size_of(&source.driver, &source.volume_handle).filter(|_| facts.mounted);
            Expansion { plugin: self, facts, claimed, source }.run(known).await
        })
    }

    fn unpublish<'a>(&'a self, uid: &'a str) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(async move { Ok(self.csi.release(uid).await?) })
    }

    fn name_of_place(&self, _folder: &Path, place: &Path) -> Option<&'static str> {
        place.components().any(|part| part.as_os_str() == PLUGIN).then_some("kubernetes.io/csi")
    }

    fn stats<'a>(&'a self, uid: &'a str, place: &'a Path) -> BoxFuture<'a, Option<(String, Stats<'a>)>> {
        Box::pin(async move {
            let all = self.csi.volumes_of(uid).await;
            let volume = all.into_iter().find(|volume| volume.path == place)?;
            let driver = volume.driver().to_owned();
            let stats: Stats<'a> =
                Box::pin(async move { self.csi.usage(&volume).await.map_err(|error| error.to_string()) });
            Some((driver, stats))
        })
    }
}

/// The expansion of a claim's volume on the node (`NodeExpandVolume` of the kubelet).
struct Expansion<'a> {
    plugin: &'a CsiVolumes,
    facts: ExpandFacts<'a>,
    claimed: &'a Claimed,
    source: &'a CSIPersistentVolumeSource,
}

impl Expansion<'_> {
    fn storage(&self) -> &dyn Storage {
        self.facts.storage
    }

    /// Records an event of the pod and one of the claim, as the kubelet does.
    fn record(&self, record: impl Fn(Object)) {
        [Object::pod(self.facts.pod), Object::claim(&self.claimed.claim)].into_iter().for_each(record);
    }

    /// Expands the volume if its claim asks for more than the volume's size: `known`, or else the size in the
    /// claim's status.
    async fn run(&self, known: Option<Quantity>) -> Result<(), String> {
        let Claimed { volume, claim, read_only } = self.claimed;
        match growth::growth(claim, volume, *read_only, known) {
            Growth::Nothing => {
                let (csi, source) = (&self.plugin.csi, self.source);
                if csi.size_of(&source.driver, &source.volume_handle).is_none() {
                    csi.record_size(&source.driver, &source.volume_handle, growth::size_of(claim));
                }
                Ok(())
            }
            Growth::ReadOnly => {
                let message = format!(
                    "MountVolume.NodeExpandVolume failed for volume {:?} requested read-only file system",
                    self.claimed.name()
                );
                let events = &self.plugin.events;
                self.record(|object| events.warning(object, "FileSystemResizeFailed", message.clone()));
                Ok(())
            }
            Growth::Expand { size, record } => self.expand(claim, &size, record).await,
        }
    }

    async fn expand(&self, claim: &PersistentVolumeClaim, size: &str, record: Record) -> Result<(), String> {
        let (name, csi) = (self.claimed.name(), &self.plugin.csi);
        let failed = |why: String| format!("MountVolume.NodeExpandVolume failed for volume {name:?}: {why}");
        let bytes = Quantity::parse(size).map_err(|error| failed(error.to_string()))?;
        let mut claim = claim.clone();
        if record == Record::Steps {
            let begun = self.storage().patch_claim(&claim, &growth::begun()).await;
            claim = begun.map_err(|error| failed(error.to_string()))?;
        }
        let wanted = Wanted {
            pod: self.facts.pod,
            name,
            source: Source::Persistent(&self.claimed.volume, self.source),
            read_only: self.claimed.read_only,
            group: None,
            again: true,
        };
        let done = || csi.record_size(&self.source.driver, &self.source.volume_handle, bytes);
        if let Err(error) = csi.expand(self.storage(), wanted, bytes).await {
            if matches!(error, CsiError::NeverExpands(_)) && record != Record::Steps {
                done();
                return Ok(());
            }
            if error.is_final() && record != Record::Size {
                let (why, infeasible) = (error.to_string(), error.is_infeasible());
                let patch = growth::failed(&claim, size, &why, infeasible, Timestamp::now());
                self.storage()
                    .patch_claim(&claim, &patch)
                    .await
                    .map_err(|error| failed(error.to_string()))?;
            }
            if error.is_in_use() {
                // The volume is expanded once no pod uses it, and the pod keeps its present size.
                done();
                return Ok(());
            }
            return Err(failed(error.to_string()));
        }
        done();
        let node = &self.plugin.node_name;
        let message = format!("MountVolume.NodeExpandVolume succeeded for volume {name:?} {node}");
        let events = &self.plugin.events;
        self.record(|object| events.normal(object, "FileSystemResizeSuccessful", message.clone()));
        if record != Record::Nobody {
            let patch = growth::grown(&claim, size, record);
            self.storage().patch_claim(&claim, &patch).await.map_err(|error| failed(error.to_string()))?;
        }
        Ok(())
    }
}
