//! Volumes of claims that grow on the node, when a pod gets them and while it has them, as
//! `NodeExpandVolume` of the kubelet: the driver makes them larger, and the claim's status says so.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use beelet_base::work::Work;
use beelet_csi::{Error as CsiError, Source, Wanted};
use beelet_model::{
    storage::{Claimed, Storage},
    table::PodTable,
};
use beelet_policy::volumes::{
    claims::is_claim,
    growth::{self, Growth, Record},
};
use beelet_state::events::Object;
use beelet_units::quantity::Quantity;
use futures::{StreamExt, future::join_all, stream};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{CSIPersistentVolumeSource, PersistentVolumeClaim, Pod};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    claims,
    error::Error,
    launch::Launcher,
    rounds::{Rounds, runs_with, uid},
};

/// How often it is asked whether volumes should grow: about as often as the kubelet does.
const PERIOD: Duration = Duration::from_secs(60);
/// Pods at a time: a driver that hangs holds up few others.
const AT_A_TIME: usize = 16;

/// Has the volumes grow that a pod is about to get.
///
/// # Errors
/// One could not: the pod must not run on one that is smaller than its claim.
pub(crate) async fn at_mount(
    launcher: &Launcher,
    pod: &Pod,
    claims: &BTreeMap<String, Claimed>,
) -> Result<(), Error> {
    let Some(storage) = launcher.storage.as_deref() else { return Ok(()) };
    let all = claims.iter().map(async |(volume, claimed)| {
        let Some(source) = source(claimed) else { return Ok(()) };
        let claim = Claim { launcher, storage, pod, claimed, source };
        claim.grow(None).await.map_err(|why| Error::Volume { volume: volume.clone(), why })
    });
    join_all(all).await.into_iter().collect()
}

fn source(claimed: &Claimed) -> Option<&CSIPersistentVolumeSource> {
    claimed.volume.spec.as_ref()?.csi.as_ref()
}

/// Has the volumes of running pods grow, until `cancel`.
pub fn follow(
    table: watch::Receiver<Arc<PodTable>>,
    launcher: Arc<Launcher>,
    cancel: CancellationToken,
) -> Work {
    Box::pin(async move {
        let Some(storage) = launcher.storage.clone() else { return cancel.cancelled().await };
        let mut rounds = Rounds::new(table, &launcher.csi, PERIOD, |pod| runs_with(pod, is_claim));
        let work = async {
            loop {
                let all = rounds.next().await.into_iter().map(|pod| grow_all(&launcher, &*storage, pod));
                stream::iter(all).buffer_unordered(AT_A_TIME).collect::<Vec<()>>().await;
            }
        };
        cancel.run_until_cancelled(work).await;
    })
}

/// Has the volumes of a pod grow that drivers have brought to it, of drivers that can.
async fn grow_all(launcher: &Launcher, storage: &dyn Storage, pod: Arc<Pod>) {
    let mut brought = BTreeSet::new();
    for volume in launcher.csi.volumes_of(uid(&pod)).await {
        // One that isn't there is asked in the next round.
        if launcher.csi.expands(volume.driver()).await.unwrap_or(false) {
            brought.insert(volume.name().to_owned());
        }
    }
    if brought.is_empty() {
        return;
    }
    // Who gives no answer is asked again in the next round.
    let Ok(claims) = claims::read(Some(storage), &pod, None).await else { return };
    for claimed in claims.values() {
        let Some(source) = source(claimed) else { continue };
        if !brought.contains(claimed.name()) {
            continue;
        }
        let here = launcher.csi.size_of(&source.driver, &source.volume_handle);
        let claim = Claim { launcher, storage, pod: &pod, claimed, source };
        if let Err(why) = claim.grow(here).await {
            launcher.events.warning(Object::pod(&pod), "VolumeResizeFailed", why);
        }
    }
}

/// A claim's volume of a storage plugin.
struct Claim<'a> {
    launcher: &'a Launcher,
    storage: &'a dyn Storage,
    pod: &'a Pod,
    claimed: &'a Claimed,
    source: &'a CSIPersistentVolumeSource,
}

impl Claim<'_> {
    /// What events of the file system's growth are about, as the kubelet's: the pod, and the claim.
    fn objects(&self) -> [Object; 2] {
        [Object::pod(self.pod), Object::claim(&self.claimed.claim)]
    }

    /// Has it grow if it should; it has the size `here`, or, None, that of its claim's status.
    async fn grow(&self, here: Option<Quantity>) -> Result<(), String> {
        let Claimed { volume, claim, read_only } = self.claimed;
        match growth::growth(claim, volume, *read_only, here) {
            Growth::Nothing => {
                let (csi, source) = (&self.launcher.csi, self.source);
                if csi.size_of(&source.driver, &source.volume_handle).is_none() {
                    csi.note_size(&source.driver, &source.volume_handle, growth::size_of(claim));
                }
                Ok(())
            }
            Growth::ReadOnly => {
                let message = format!(
                    "MountVolume.NodeExpandVolume failed for volume {:?} requested read-only file system",
                    self.claimed.name()
                );
                for object in self.objects() {
                    self.launcher.events.warning(object, "FileSystemResizeFailed", message.clone());
                }
                Ok(())
            }
            Growth::Expand { size, record } => self.expand(claim, &size, record).await,
        }
    }

    async fn expand(&self, claim: &PersistentVolumeClaim, size: &str, record: Record) -> Result<(), String> {
        let (name, csi) = (self.claimed.name(), &self.launcher.csi);
        let failed = |why: String| format!("MountVolume.NodeExpandVolume failed for volume {name:?}: {why}");
        let bytes = Quantity::parse(size).map_err(|error| failed(error.to_string()))?;
        let mut claim = claim.clone();
        if record == Record::Steps {
            let begun = self.storage.patch_claim(&claim, &growth::begun()).await;
            claim = begun.map_err(|error| failed(error.to_string()))?;
        }
        let wanted = Wanted {
            pod: self.pod,
            name,
            source: Source::Persistent(&self.claimed.volume, self.source),
            read_only: self.claimed.read_only,
            group: None,
            again: true,
        };
        let done = || csi.note_size(&self.source.driver, &self.source.volume_handle, bytes);
        if let Err(error) = csi.expand(self.storage, wanted, bytes).await {
            if matches!(error, CsiError::NeverExpands(_)) && record != Record::Steps {
                done();
                return Ok(());
            }
            if error.is_final() && record != Record::Size {
                let (why, infeasible) = (error.to_string(), error.is_infeasible());
                let patch = growth::failed(&claim, size, &why, infeasible, Timestamp::now());
                self.storage.patch_claim(&claim, &patch).await.map_err(|error| failed(error.to_string()))?;
            }
            if error.is_in_use() {
                // It grows where nobody uses it: no reason to keep a pod from what it has.
                done();
                return Ok(());
            }
            return Err(failed(error.to_string()));
        }
        done();
        let node = &self.launcher.node.node_name;
        let message = format!("MountVolume.NodeExpandVolume succeeded for volume {name:?} {node}");
        for object in self.objects() {
            self.launcher.events.normal(object, "FileSystemResizeSuccessful", message.clone());
        }
        if record != Record::Nobody {
            let patch = growth::grown(&claim, size, record);
            self.storage.patch_claim(&claim, &patch).await.map_err(|error| failed(error.to_string()))?;
        }
        Ok(())
    }
}
