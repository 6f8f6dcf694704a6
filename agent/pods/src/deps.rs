//! Dependencies of pod workers, grouped by use. Each step of a worker receives only the groups that it needs.

use std::{path::PathBuf, sync::Arc, time::Duration};

use beelet_admission::Admission;
use beelet_cgroups::Cgroups;
use beelet_cri::{Runtime, mounts::Mounts};
use beelet_devices::Devices;
use beelet_dra::Dra;
use beelet_images::{Leases, pull::Puller};
use beelet_model::{
    desired::Desired, ended::Ended, objects::Objects, pod::NodeFacts, storage::Storage, table::PodTable,
};
use beelet_pinning::Pinning;
use beelet_policy::resources::cgroups::CgroupConfig;
use beelet_state::events::Recorder;
use beelet_volumes::VolumeManager;
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::watch;

use crate::{metrics::Metrics, records::WrittenRecords, user_namespaces::UserNamespaces};

/// Dependencies of pod workers.
#[derive(Clone, Debug)]
pub struct Deps {
    /// The container runtime.
    pub runtime: RuntimeDeps,
    /// Facts about the node, and its cgroups.
    pub node: NodeDeps,
    /// Images.
    pub images: ImageDeps,
    /// Devices of plugins and of claims.
    pub devices: DeviceDeps,
    /// Gives containers exclusive CPUs and memory.
    pub pinning: Pinning,
    /// Sets up and removes volumes.
    pub volumes: VolumeManager,
    /// Decides which pods may run on this node.
    pub admission: Arc<Admission>,
    /// The desired and the published pods.
    pub pods: PodDeps,
    /// Events and metrics.
    pub reports: Reports,
}

/// The container runtime, and settings of its containers.
#[derive(Clone, Debug)]
pub struct RuntimeDeps {
    /// The runtime.
    pub cri: Runtime,
    /// Checks that the runtime sees the agent's mounts. None if the check is disabled.
    pub mounts: Option<Arc<Mounts>>,
    /// Allocates ID ranges for user namespaces.
    pub users: Arc<UserNamespaces>,
    /// Longest restart delay of a crashing container.
    pub max_restart_delay: Duration,
}

/// The node, its cgroups and its folders.
#[derive(Clone, Debug)]
pub struct NodeDeps {
    /// Facts about the node.
    pub facts: NodeFacts,
    /// The cgroup tree.
    pub cgroups: Arc<Cgroups>,
    /// Parameters of cgroup values.
    pub cgroup_config: CgroupConfig,
    /// Parent folder of all pods' folders.
    pub pods_dir: PathBuf,
}

/// Images, and the leases that keep them on the node.
#[derive(Clone, Debug)]
pub struct ImageDeps {
    /// Pulls images.
    pub puller: Arc<Puller>,
    /// Leases of images for containers that are being created.
    pub leases: Leases,
}

/// Devices of plugins, and devices of resource claims.
#[derive(Clone, Debug)]
pub struct DeviceDeps {
    /// Devices of device plugins.
    pub plugins: Devices,
    /// Drivers that prepare resource claims.
    pub claims: Dra,
    /// The cluster's claims. None on a standalone node.
    pub storage: Option<Arc<dyn Storage>>,
    /// CDI devices are passed by annotation too, because the runtime does not support the CRI field.
    pub cdi_by_annotation: bool,
}

/// The desired pods, the published pods, and the records on disk.
#[derive(Clone, Debug)]
pub struct PodDeps {
    /// The desired pods, with ConfigMaps, Secrets and RuntimeClasses.
    pub desired: watch::Receiver<Arc<Desired>>,
    /// The published pod table.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// Records on disk for the next agent.
    pub written: WrittenRecords,
}

/// Events and metrics.
#[derive(Clone, Debug)]
pub struct Reports {
    /// Records events.
    pub events: Recorder,
    /// Counters and gauges.
    pub metrics: Metrics,
}

impl Deps {
    /// Releases the room of an ended pod, after its CPUs and its memory: pods that wait for the room need
    /// these too.
    pub(crate) fn released(&self, uid: &str, ended: Ended) {
        self.pinning.released(uid, ended);
        self.admission.released(uid, ended);
    }
}

impl PodDeps {
    /// Returns the current objects that pods may refer to.
    pub(crate) fn objects(&self) -> Arc<Objects> {
        Arc::clone(&self.desired.borrow().objects)
    }

    /// Returns true if the API server has yet to answer for an object that the pod refers to.
    pub(crate) fn waits_for_objects(&self, pod: &Pod) -> bool {
        self.desired.borrow().objects.is_unread(pod)
    }

    /// Waits until the API server has answered for all objects that the pod refers to.
    pub(crate) async fn objects_answered(&self, pod: &Pod) {
        let mut desired = self.desired.clone();
        if desired.wait_for(|desired| !desired.objects.is_unread(pod)).await.is_err() {
            // The source of pods has ended: no answer will arrive.
            std::future::pending::<()>().await;
        }
    }
}
