//! Devices: the kubelet's device plugin API, so that unmodified plugins work, and who has which device.
//!
//! Plugins register on `<kubelet dir>/device-plugins/kubelet.sock` or are found in `<kubelet
//! dir>/plugins_registry`; each has a task that follows its list of devices. The ledger is `policy`'s
//! ([`beelet_policy::devices`]), behind a mutex that is held for computing only. Of each resource one pod at
//! a time is admitted: its plugin is asked, and the kubelet's own checkpoint written before the answer is
//! yes. No container is started with a device that isn't in the checkpoint. What a container was given is
//! also an annotation of it, from which a lost checkpoint is rebuilt.
//!
//! A plugin that misbehaves hurts only those who ask for its devices: what it sends is bounded, what is asked
//! of it has a deadline, and its tasks are its own. Must never touch a pod or the runtime: pods are ended by
//! requests to `pods/`.

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
    Remnant, container_requests,
    registration::is_extended_resource_name,
    topology::{TopologyPolicy, TopologyScope},
};
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1 as core;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use self::{admit::Admitter, ledger::Shared};
pub use self::{
    admit::{Circumstances, DeviceRefusal},
    annotation::remnants,
    checkpoint::{Store, StoreError},
    error::Error,
    metrics::Metrics,
    options::{ContainerOptions, cdi_by_annotation},
    view::{DeviceView, Holder, ResourceView, WaitingView},
};
use beelet_config::defaults::PLUGIN_WAIT;
use beelet_model::{plugins::PluginHandler, request::Request};
use beelet_state::{
    ForeignFile,
    events::{Object, Recorder},
};

/// Questions that haven't been looked at. A pod's worker waits while there are this many before it.
const ADMISSIONS: usize = 64;

/// How devices are handed out on this node.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The kubelet's folder: `device-plugins`, `plugins_registry` and `pod-resources` are in it.
    pub kubelet_dir: PathBuf,
    /// How long a pod waits for a plugin that isn't there.
    pub plugin_wait: Duration,
    /// How strictly a container's devices must be near each other.
    pub policy: TopologyPolicy,
    /// What is aligned together.
    pub scope: TopologyScope,
}

impl Settings {
    /// The kubelet's defaults, in this folder.
    #[must_use]
    pub fn new(kubelet_dir: PathBuf) -> Self {
        let (policy, scope) = (TopologyPolicy::None, TopologyScope::Container);
        Self { kubelet_dir, plugin_wait: PLUGIN_WAIT, policy, scope }
    }

    fn plugins_dir(&self) -> PathBuf {
        self.kubelet_dir.join("device-plugins")
    }

    fn registry_dir(&self) -> PathBuf {
        self.kubelet_dir.join("plugins_registry")
    }

    /// The checkpoint that a kubelet would read and write.
    #[must_use]
    pub fn checkpoint(&self) -> ForeignFile {
        ForeignFile::new(self.plugins_dir().join("kubelet_internal_checkpoint"))
    }

    /// The socket of the registration API.
    #[must_use]
    pub fn registration_socket(&self) -> PathBuf {
        self.plugins_dir().join("kubelet.sock")
    }

    /// The socket of the pod resources API.
    #[must_use]
    pub fn pod_resources_socket(&self) -> PathBuf {
        self.kubelet_dir.join("pod-resources/kubelet.sock")
    }
}

/// The pods that may hold devices, by uid; `None` while it isn't known which those are.
pub type Active = Option<Arc<BTreeSet<String>>>;

/// What the devices need from the rest of the node.
#[derive(Debug)]
pub struct Parts {
    /// How.
    pub settings: Settings,
    /// Where the checkpoint is.
    pub store: Arc<dyn Store>,
    /// The pods that may hold devices.
    pub active: watch::Receiver<Active>,
    /// Requests to the pods' manager.
    pub requests: mpsc::Sender<Request>,
    /// Counters.
    pub metrics: Metrics,
    /// Where is told what went wrong.
    pub events: Recorder,
    /// The node, of which some events tell.
    pub node_name: String,
}

/// What the node has of each extended resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeDevices {
    /// All devices.
    pub capacity: BTreeMap<String, usize>,
    /// Those that can be given away.
    pub allocatable: BTreeMap<String, usize>,
    /// Resources that were there, and are no more: their plugin has been gone for too long.
    pub removed: BTreeSet<String>,
    /// Counts the changes of anything that a waiting pod may wait for.
    pub changes: u64,
    /// Counts the changes of devices' health.
    pub health: u64,
}

/// The devices of this node; clones share them.
#[derive(Clone, Debug)]
pub struct Devices {
    shared: Arc<Shared>,
    admissions: mpsc::Sender<admit::Asked>,
}

/// What must run for [`Devices`] to work.
#[derive(Debug)]
pub struct Tasks {
    devices: Devices,
    admitter: Admitter,
    writer: checkpoint::Writer,
    handlers: registry::Handlers,
}

impl Devices {
    /// Reads the checkpoint; where there is none that can be read, `remnants` tell who holds what (see
    /// [`remnants`]). Blocks. Nothing runs before [`Tasks::spawn`].
    #[must_use]
    pub fn open(parts: Parts, remnants: impl FnOnce() -> Vec<Remnant>) -> (Self, Tasks) {
        let tell = |reason: &str, message: String| {
            parts.events.warning(Object::node(&parts.node_name), reason, message);
        };
        let ledger = checkpoint::load(&*parts.store, remnants, tell);
        let shared = Arc::new(Shared::new(ledger, parts.settings, parts.metrics));
        let (admissions, asked) = mpsc::channel(ADMISSIONS);
        let devices = Self { shared: Arc::clone(&shared), admissions };
        let (writer, written) = checkpoint::writer(Arc::clone(&shared), parts.store);
        let admitter =
            Admitter::new(Arc::clone(&shared), asked, written, parts.active, parts.requests, parts.events);
        (devices.clone(), Tasks { devices, admitter, writer, handlers: BTreeMap::new() })
    }

    /// The node's devices, as they change.
    #[must_use]
    pub fn node(&self) -> watch::Receiver<Arc<NodeDevices>> {
        self.shared.node.subscribe()
    }

    /// The settings by which devices are handed out.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.shared.settings
    }

    /// Gives a pod its devices, before its first container is started; at once where it asks for none. When
    /// this says yes they are in the checkpoint.
    ///
    /// # Errors
    /// It can't have them now, or has been refused for good.
    pub async fn admit(
        &self,
        pod: &Arc<core::Pod>,
        circumstances: Circumstances,
    ) -> Result<(), DeviceRefusal> {
        admit::ask(&self.shared, &self.admissions, pod, circumstances).await
    }

    /// The options that make a container's devices visible to it. Calls the plugins that want to know of each
    /// start.
    ///
    /// # Errors
    /// A plugin doesn't let it start.
    pub async fn container_options(&self, pod_uid: &str, container: &str) -> Result<ContainerOptions, Error> {
        options::of_container(&self.shared, pod_uid, container).await
    }

    /// A container has ended and will not start again: what nobody else of its pod has of its devices is
    /// free.
    pub fn release(&self, pod_uid: &str, container: &str) {
        self.shared.change(|ledger| ledger.devices.release(pod_uid, container));
    }

    /// A pod is gone: all it had is free.
    pub fn forget(&self, pod_uid: &str) {
        self.shared.change(|ledger| {
            ledger.waiting.remove(pod_uid);
            ledger.entering.remove(pod_uid);
            ledger.devices.forget(pod_uid);
        });
    }

    /// The uids of the pods that hold devices.
    #[must_use]
    pub fn holders(&self) -> Vec<String> {
        self.shared.look(|ledger| ledger.devices.pods().map(str::to_owned).collect())
    }

    /// Returns true if a pod has all the devices that it asks for, those of `ended` init containers left out.
    #[must_use]
    pub fn has_all(&self, pod: &core::Pod, ended: &BTreeSet<String>) -> bool {
        let Ok(wishes) = container_requests(pod) else { return false };
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        self.shared.look(|ledger| {
            let held = ledger.devices.held(uid);
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
        self.shared.look(|l| l.devices.held(pod_uid).is_some_and(|pod| pod.contains_key(container)))
    }
}

impl Tasks {
    /// Has `handler` take in the plugins of another kind that are found in the registry.
    #[must_use]
    pub fn with_handler(mut self, kind: &'static str, handler: Arc<dyn PluginHandler>) -> Self {
        self.handlers.insert(kind, handler);
        self
    }

    /// The tasks that must run until `shutdown`, by name: it admits pods, writes the checkpoint, follows
    /// plugins' lists, serves them.
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
