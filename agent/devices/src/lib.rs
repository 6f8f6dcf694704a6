//! Devices: the kubelet's device plugin API, so that unmodified plugins work, and the assignment of devices
//! to containers.
//!
//! Plugins register on `<kubelet dir>/device-plugins/kubelet.sock` or are found in `<kubelet
//! dir>/plugins_registry`; each has a task that follows its list of devices. The ledger is `policy`'s
//! ([`beelet_policy::devices`]), behind a mutex that is held for computing only. For each resource, one pod
//! at a time is admitted: the plugin is called, and the kubelet's own checkpoint is written before the pod
//! may start. No container is started with a device that the checkpoint lacks. A container's devices are also
//! stored in an annotation of the container, from which a lost checkpoint is rebuilt.
//!
//! A faulty plugin affects only pods that want its devices: its messages are bounded, its calls have
//! deadlines, and it has its own tasks. Must never touch a pod or the runtime: pods are ended by requests to
//! `pods/`.

mod admit;
pub mod annotation;
mod checkpoint;
mod error;
mod folder;
mod follow;
mod ledger;
mod metrics;
pub mod options;
pub mod plugin;
mod refusals;
mod register;
mod registry;
mod turns;
mod view;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use beelet_policy::devices::{
    Remnant, admission::Aligner, container_requests, registration::is_extended_resource_name,
};
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1 as core;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use self::{admit::Admitter, ledger::Shared};
pub use self::{
    admit::Circumstances,
    annotation::remnants,
    checkpoint::{Store, StoreError},
    error::Error,
    metrics::Metrics,
    options::{ContainerOptions, cdi_by_annotation},
    refusals::DeviceRefusal,
    view::{DeviceView, Holder, ResourceView, View, WaitingView},
};
use beelet_config::defaults::PLUGIN_WAIT;
use beelet_model::{plugins::PluginHandler, request::Request};
use beelet_state::{
    ForeignFile,
    events::{Object, Recorder},
};

/// Capacity of the admission channel. Further workers wait until there is room in it.
const ADMISSIONS: usize = 64;

/// Settings of device management on this node.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The kubelet's folder, which contains `device-plugins`, `plugins_registry` and `pod-resources`.
    pub kubelet_dir: PathBuf,
    /// Time that a pod waits for a missing plugin.
    pub plugin_wait: Duration,
}

impl Settings {
    /// Returns the kubelet's defaults for this folder.
    #[must_use]
    pub fn new(kubelet_dir: PathBuf) -> Self {
        Self { kubelet_dir, plugin_wait: PLUGIN_WAIT }
    }

    fn plugins_dir(&self) -> PathBuf {
        self.kubelet_dir.join("device-plugins")
    }

    fn registry_dir(&self) -> PathBuf {
        self.kubelet_dir.join("plugins_registry")
    }

    /// Returns the checkpoint file, shared with the kubelet.
    #[must_use]
    pub fn checkpoint(&self) -> ForeignFile {
        ForeignFile::new(self.plugins_dir().join("kubelet_internal_checkpoint"))
    }

    /// Returns the socket of the registration API.
    #[must_use]
    pub fn registration_socket(&self) -> PathBuf {
        self.plugins_dir().join("kubelet.sock")
    }

    /// Returns the socket of the pod resources API.
    #[must_use]
    pub fn pod_resources_socket(&self) -> PathBuf {
        self.kubelet_dir.join("pod-resources/kubelet.sock")
    }
}

/// UIDs of the pods that may hold devices; `None` while they are unknown.
pub type Active = Option<Arc<BTreeSet<String>>>;

/// Dependencies of device management.
#[derive(Debug)]
pub struct Parts {
    /// Settings.
    pub settings: Settings,
    /// Storage of the checkpoint.
    pub store: Arc<dyn Store>,
    /// Pods that may hold devices.
    pub active: watch::Receiver<Active>,
    /// Requests to the pods' manager.
    pub requests: mpsc::Sender<Request>,
    /// Counters.
    pub metrics: Metrics,
    /// Records events.
    pub events: Recorder,
    /// Name of the node, for events about it.
    pub node_name: String,
}

/// Devices of the node, by extended resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeDevices {
    /// All devices.
    pub capacity: BTreeMap<String, usize>,
    /// Devices that can be assigned or are.
    pub allocatable: BTreeMap<String, usize>,
    /// Removed resources: their plugin has been away for too long.
    pub removed: BTreeSet<String>,
    /// Counts changes that a waiting pod may wait for.
    pub changes: u64,
    /// Counts changes of device health.
    pub health: u64,
}

/// Devices of this node; clones share them.
#[derive(Clone, Debug)]
pub struct Devices {
    shared: Arc<Shared>,
    admissions: mpsc::Sender<admit::Asked>,
}

/// Tasks that must run for [`Devices`] to work.
#[derive(Debug)]
pub struct Tasks {
    devices: Devices,
    admitter: Admitter,
    writer: checkpoint::Writer,
    handlers: registry::Handlers,
}

impl Devices {
    /// Reads the checkpoint; if it is missing or invalid, rebuilds the ledger from `remnants` (see
    /// [`remnants`]). Blocks. No task runs before the futures of [`Tasks::named`] do.
    #[must_use]
    pub fn open(parts: Parts, remnants: impl FnOnce() -> Vec<Remnant>) -> (Self, Tasks) {
        let report = |reason: &str, message: String| {
            parts.events.warning(Object::node(&parts.node_name), reason, message);
        };
        let ledger = checkpoint::load(&*parts.store, remnants, report);
        let shared = Arc::new(Shared::new(ledger, parts.settings, parts.metrics));
        let (admissions, asked) = mpsc::channel(ADMISSIONS);
        let devices = Self { shared: Arc::clone(&shared), admissions };
        let (writer, written) = checkpoint::writer(Arc::clone(&shared), parts.store);
        let admitter =
            Admitter::new(Arc::clone(&shared), asked, written, parts.active, parts.requests, parts.events);
        (devices.clone(), Tasks { devices, admitter, writer, handlers: BTreeMap::new() })
    }

    /// Subscribes to the node's devices.
    #[must_use]
    pub fn node(&self) -> watch::Receiver<Arc<NodeDevices>> {
        self.shared.node.subscribe()
    }

    /// Returns the settings.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.shared.settings
    }

    /// Assigns a pod its devices before its first container starts; returns at once if the pod wants none. On
    /// success the checkpoint contains them. The aligner decides which NUMA nodes they should come from.
    ///
    /// # Errors
    /// The pod cannot have its devices at present, or has been refused permanently.
    pub async fn admit(
        &self,
        pod: &Arc<core::Pod>,
        circumstances: Circumstances,
        aligner: Option<Box<dyn Aligner>>,
    ) -> Result<(), DeviceRefusal> {
        admit::ask(&self.shared, &self.admissions, pod, circumstances, aligner).await
    }

    /// Returns the options that make a container's devices visible to it. Calls the plugins that require a
    /// call before each start.
    ///
    /// # Errors
    /// A plugin refused the start.
    pub async fn container_options(&self, pod_uid: &str, container: &str) -> Result<ContainerOptions, Error> {
        options::of_container(&self.shared, pod_uid, container).await
    }

    /// Releases the devices of a permanently terminated container, except those that another container of the
    /// pod holds.
    pub fn release(&self, pod_uid: &str, container: &str) {
        self.shared.change(|ledger| ledger.devices.holders.release(pod_uid, container));
    }

    /// Releases all devices of a removed pod.
    pub fn forget(&self, pod_uid: &str) {
        self.shared.change(|ledger| {
            ledger.waiting.remove(pod_uid);
            ledger.entering.remove(pod_uid);
            ledger.devices.holders.forget(pod_uid);
        });
    }

    /// Returns the UIDs of the pods that hold devices.
    #[must_use]
    pub fn holders(&self) -> Vec<String> {
        self.shared.with_ledger(|ledger| ledger.devices.holders.pods().map(str::to_owned).collect())
    }

    /// Returns true if a pod holds all devices that it requests, not counting `ended` init containers.
    #[must_use]
    pub fn has_all(&self, pod: &core::Pod, ended: &BTreeSet<String>) -> bool {
        let Ok(wishes) = container_requests(pod) else { return false };
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        self.shared.with_ledger(|ledger| {
            let held = ledger.devices.holders.held(uid);
            let has = |container: &str, resource: &str| {
                held.is_some_and(|pod| pod.get(container).is_some_and(|held| held.contains_key(resource)))
            };
            let needed = wishes.iter().filter(|wish| !ended.contains(wish.container));
            needed.into_iter().all(|wish| {
                let mut devices = wish.limits.iter().filter(|(resource, count)| {
                    *count > 0 && (is_extended_resource_name(resource) || ledger.devices.knows(resource))
                });
                devices.all(|(resource, _)| has(wish.container, resource))
            })
        })
    }

    /// Returns true if a container holds devices.
    #[must_use]
    pub fn holds(&self, pod_uid: &str, container: &str) -> bool {
        self.shared
            .with_ledger(|l| l.devices.holders.held(pod_uid).is_some_and(|pod| pod.contains_key(container)))
    }
}

impl Tasks {
    /// Registers `handler` for another kind of plugin found in the registry.
    #[must_use]
    pub fn with_handler(mut self, kind: &'static str, handler: Arc<dyn PluginHandler>) -> Self {
        self.handlers.insert(kind, handler);
        self
    }

    /// Returns the tasks that must run until `shutdown`, by name. They admit pods, write the checkpoint,
    /// follow the plugins' lists and serve registrations.
    #[must_use]
    pub fn named(self, shutdown: &CancellationToken) -> [(&'static str, BoxFuture<'static, ()>); 5] {
        let shared = &self.devices.shared;
        [
            ("device checkpoint", Box::pin(self.writer.run(shutdown.clone()))),
            ("device admission", Box::pin(self.admitter.run(shutdown.clone()))),
            ("device expiry", Box::pin(ledger::expire(Arc::clone(shared), shutdown.clone()))),
            ("device plugins", Box::pin(register::serve(Arc::clone(shared), shutdown.clone()))),
            (
                "device plugin registry",
                Box::pin(registry::watch(Arc::clone(shared), self.handlers, shutdown.clone())),
            ),
        ]
    }
}

#[cfg(test)]
mod tests;
