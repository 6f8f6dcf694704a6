//! The volume manager: the steps that make the volumes of a pod and remove them, and the tasks that keep
//! volumes current while their pods run.
//!
//! A pod's worker calls [`VolumeManager::prepare`] and [`VolumeManager::set_up`] before it makes the sandbox,
//! and [`VolumeManager::unpublish`] before it removes the volumes.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use beelet_base::{blocking::blocking, walk::remove_folder, work::Work};
use beelet_csi::Csi;
use beelet_model::{
    desired::Desired,
    objects::Objects,
    pod::NodeFacts,
    storage::{Claimed, Storage},
    table::PodTable,
};
use beelet_state::events::{Object, Recorder};
use futures::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    claims,
    csi::CsiVolumes,
    csi_republish,
    disks::Disks,
    error::Error,
    expand,
    metrics::Metrics,
    object_sync,
    plugin::{AttachFacts, Attachment, Prepared, Sources, Spec},
    plugins::Plugins,
    pod_volumes::{PodVolumes, Stop},
    resync::Resync,
    stats,
};

/// Parts of the node that the volume manager needs.
#[derive(Debug)]
pub struct Deps {
    /// Facts about the node.
    pub node: NodeFacts,
    /// Folder with a folder of volumes for each pod.
    pub pods_dir: PathBuf,
    /// Desired pods, with their ConfigMaps and Secrets.
    pub desired: watch::Receiver<Arc<Desired>>,
    /// Pods on the node.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// Claims and PersistentVolumes of the cluster. None on a standalone node.
    pub storage: Option<Arc<dyn Storage>>,
    /// Disks and flexVolume drivers.
    pub disks: Disks,
    /// Storage plugins.
    pub csi: Csi,
    /// Records events.
    pub events: Recorder,
    /// Counters and gauges.
    pub metrics: Metrics,
}

/// Periods of the tasks that keep volumes current.
#[derive(Clone, Copy, Debug)]
pub struct Periods {
    /// Time between two checks for volumes that were lost from the node's disk.
    pub check: Duration,
    /// Time between two measurements (`volumeStatsAggPeriod`).
    pub stats: Duration,
}

/// Prepares, maintains and releases the volumes of pods. Clones share the plugins.
#[derive(Clone, Debug)]
pub struct VolumeManager(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    deps: Deps,
    csi: CsiVolumes,
    plugins: Plugins,
}

impl VolumeManager {
    /// Makes the manager of the volumes of all pods of a node.
    #[must_use]
    pub fn new(deps: Deps) -> Self {
        let csi = CsiVolumes {
            csi: deps.csi.clone(),
            events: deps.events.clone(),
            node_name: deps.node.node_name.clone(),
        };
        let plugins = Plugins::new(csi.clone(), &deps.disks, deps.metrics.operations.clone());
        Self(Arc::new(Inner { deps, csi, plugins }))
    }

    /// Returns the volumes of a pod on disk.
    #[must_use]
    pub fn of_pod(&self, pod: &Pod) -> PodVolumes {
        PodVolumes::of(pod, &self.0.deps.pods_dir, &self.0.plugins)
    }

    /// Reads the claims of a pod, attaches the volumes that its containers use, and expands volumes that are
    /// smaller than their claims. Records events while the pod waits.
    ///
    /// # Errors
    /// A claim is not bound, a volume is not attached or cannot be expanded, or a Secret is missing.
    pub async fn prepare(&self, pod: &Pod) -> Result<Prepared, Error> {
        let Deps { storage, desired, events, .. } = &self.0.deps;
        let (storage, object) = (storage.as_deref(), || Object::pod(pod));
        let node = desired.borrow().node.clone();
        // On the heap: few pods have claims, and all pods would reserve memory for them.
        let claims = Box::pin(claims::read(storage, pod, node));
        let claims = events.while_waiting(object, "the PersistentVolumes of its claims", claims).await?;
        let objects = Arc::clone(&desired.borrow().objects);
        let attaching = Box::pin(self.attach(pod, &claims, &objects));
        let attachments = events.while_waiting(object, "its volumes to be attached", attaching).await?;
        let expanding = Box::pin(expand::at_mount(&self.0.plugins, storage, pod, &claims));
        events.while_waiting(object, "its volumes to be expanded", expanding).await?;
        Ok(Prepared { claims, attachments, objects })
    }

    /// Attaches the volumes that containers of the pod use, all at the same time.
    async fn attach(
        &self,
        pod: &Pod,
        claims: &BTreeMap<String, Claimed>,
        objects: &Objects,
    ) -> Result<BTreeMap<String, Attachment>, Error> {
        let facts = AttachFacts { pod, storage: self.0.deps.storage.as_deref(), objects };
        let attach = claims::used_volumes(pod).map(async |volume| {
            let spec = Spec { volume, claimed: claims.get(&volume.name) };
            let attached = self.0.plugins.of(&spec).1.attach(spec, facts).await;
            let attached = attached.map_err(|error| error.of_volume(&volume.name))?;
            Ok(attached.map(|attachment| (volume.name.clone(), attachment)))
        });
        let attached: Result<Vec<_>, Error> = join_all(attach).await.into_iter().collect();
        Ok(attached?.into_iter().flatten().collect())
    }

    /// Sets up the prepared volumes of a pod in its folder. Blocks.
    ///
    /// # Errors
    /// A volume that a container uses cannot be made, or `stop` returned true.
    pub fn set_up(
        &self,
        pod: &Pod,
        volumes: &PodVolumes,
        prepared: &Prepared,
        stop: Stop<'_>,
    ) -> Result<(), Error> {
        let sources = Sources { pod, objects: &prepared.objects, node: &self.0.deps.node, prepared };
        volumes.set_up(&sources, stop)
    }

    /// Makes lost volumes of a pod again and records an event for each. The pod's volumes must be set up.
    /// Blocks.
    ///
    /// # Errors
    /// A lost volume cannot be made.
    pub fn restore(&self, pod: &Pod, volumes: &PodVolumes, objects: &Objects) -> Result<(), Error> {
        object_sync::restore((pod, volumes), &self.0.deps.node, objects, &self.0.deps.events)
    }

    /// Makes storage plugins unpublish the volumes of the pod with this UID.
    ///
    /// # Errors
    /// A plugin is not registered or fails: the pod cannot be removed yet.
    pub async fn unpublish(&self, uid: &str) -> Result<(), Error> {
        for plugin in self.0.plugins.all() {
            plugin.unpublish(uid).await?;
        }
        Ok(())
    }

    /// Removes the folder of a pod, with all volumes in it. Needs only the pod's UID.
    ///
    /// # Errors
    /// A plugin cannot unpublish a volume, or a mount is in use.
    pub async fn remove(&self, uid: &str) -> Result<(), Error> {
        self.unpublish(uid).await?;
        let (folder, plugins) = (self.0.deps.pods_dir.join(uid), self.0.plugins.clone());
        let remove = move || {
            plugins.unmount_all(&folder)?;
            Ok(remove_folder(&folder)?)
        };
        blocking("removing a folder of volumes", remove).await
    }

    /// Returns the tasks that keep volumes current until `cancel`, with their names.
    #[must_use]
    pub fn tasks(&self, periods: Periods, cancel: &CancellationToken) -> Vec<(&'static str, Work)> {
        let Inner { deps, csi, plugins } = &*self.0;
        let resync = |period, is_checked| Resync::new(deps.table.clone(), &deps.csi, period, is_checked);
        let objects = object_sync::Deps {
            table: deps.table.clone(),
            desired: deps.desired.clone(),
            events: deps.events.clone(),
            node: deps.node.clone(),
            pods_dir: deps.pods_dir.clone(),
            plugins: plugins.clone(),
        };
        let expansion = expand::Deps {
            plugins: plugins.clone(),
            storage: deps.storage.clone(),
            events: deps.events.clone(),
        };
        let statistics = stats::Deps {
            pods_dir: deps.pods_dir.clone(),
            plugins: plugins.clone(),
            events: deps.events.clone(),
            metrics: deps.metrics.stats.clone(),
        };
        let expansions = resync(expand::PERIOD, expand::is_checked);
        let republished = resync(csi_republish::PERIOD, csi_republish::is_checked);
        let measured = resync(periods.stats, stats::is_measured);
        let storage = deps.storage.clone();
        vec![
            ("volume contents", object_sync::follow(objects, periods.check, cancel.clone())),
            ("volume statistics", stats::follow(statistics, measured, cancel.clone())),
            ("volume expansion", expand::follow(expansion, expansions, cancel.clone())),
            ("CSI republish", csi_republish::follow(csi.clone(), storage, republished, cancel.clone())),
        ]
    }
}
