//! The one way to build an agent. `run` and `observe` take it as it is; tests give it other [`Doors`]; what
//! is built elsewhere (a cluster's part) adds sources of pods and parts of its own.

use std::{fmt, sync::Arc, time::Duration};

use anyhow::Result;
use futures::{FutureExt, future::BoxFuture};
use k8s_openapi::api::core::v1 as core;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::{facts::Machine, metrics::Metrics, observe, run};
use beelet_api::grpc::devices::NodeResources;
use beelet_base::filesystem::Space;
use beelet_cgroups::Cgroups;
use beelet_config::Config;
use beelet_cri::Runtime;
use beelet_csi::Csi;
use beelet_devices::{Devices, Store};
use beelet_dra::Dra;
use beelet_eviction::gauges::Gauge;
use beelet_kubelet_api::{Verbosity, auth::Reviewers};
use beelet_model::{
    accounts::ServiceAccounts,
    desired::Desired,
    pod::HostIps,
    request::Request,
    storage::Storage,
    table::{Complete, PodTable},
};
use beelet_pods::{qos_tree, refresh};
use beelet_state::{State, events::Recorder};

/// Builds an agent and runs it.
#[derive(Default)]
pub struct Builder {
    pub(super) doors: Doors,
    pub(super) sources: Vec<watch::Receiver<Arc<Desired>>>,
    pub(super) attached: Vec<Attached>,
    pub(super) reviewers: Reviewers,
    pub(super) verbosity: Option<Verbosity>,
    pub(super) accounts: Option<Arc<dyn ServiceAccounts>>,
    pub(super) storage: Option<Arc<dyn Storage>>,
}

/// The agent's ways to the machine. Where nothing is given, the machine's own is opened.
#[derive(Debug)]
pub struct Doors {
    /// The container runtime. Nobody else may drive it meanwhile; without this the agent makes sure of that
    /// itself.
    pub runtime: Option<Runtime>,
    /// The cgroup tree.
    pub cgroups: Option<Arc<Cgroups>>,
    /// What the machine has, and its address.
    pub machine: Option<Machine>,
    /// The file of the device checkpoint.
    pub checkpoint: Option<Arc<dyn Store>>,
    /// Measures file systems, for the collection of images and for eviction.
    pub space: Space,
    /// What eviction reads beside file systems: memory and process ids.
    pub gauges: Option<Vec<Gauge>>,
    /// This process is the agent's alone: its umask, its limits and its OOM score are set.
    pub own_process: bool,
    /// The time between two comparisons of the pods' cgroups with what they should hold.
    pub cgroup_check: Duration,
    /// The time between two searches for folders of pods that nobody knows.
    pub orphan_check: Duration,
    /// The time between two looks whether the volumes of pods that run are whole.
    pub volume_check: Duration,
}

impl Default for Doors {
    fn default() -> Self {
        Self {
            runtime: None,
            cgroups: None,
            machine: None,
            checkpoint: None,
            space: Space::by_statvfs(),
            gauges: None,
            own_process: true,
            cgroup_check: qos_tree::CHECK,
            orphan_check: Duration::from_secs(60),
            volume_check: refresh::CHECKED,
        }
    }
}

/// A part that is built elsewhere, by name.
pub(super) type Attached =
    (&'static str, Box<dyn FnOnce(Handles, CancellationToken) -> BoxFuture<'static, ()> + Send>);

/// What parts that are built elsewhere may use of a running node. Clones share it.
#[derive(Clone)]
pub struct Handles {
    /// What runs: one value, replaced at each change.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// Set once all that runs is in the table.
    pub complete: Complete,
    /// What should run, of all sources together.
    pub desired: watch::Receiver<Arc<Desired>>,
    /// To the pods' manager.
    pub requests: mpsc::Sender<Request>,
    /// The node's events: record some, or subscribe and pass them on.
    pub events: Recorder,
    /// The only writer of what must survive the agent.
    pub state: Arc<State>,
    /// The container runtime.
    pub runtime: Runtime,
    /// The node's own addresses.
    pub host: HostIps,
    /// Capacity and allocatable, without devices.
    pub resources: NodeResources,
    /// The devices of the node.
    pub devices: Devices,
    /// Storage plugins and their volumes.
    pub csi: Csi,
    /// Drivers that claims to devices are prepared by.
    pub dra: Dra,
    /// The node's conditions as of now, as a v1.Node's status has them.
    pub conditions: Arc<dyn Fn() -> Vec<core::NodeCondition> + Send + Sync>,
    /// Asks the probes.
    pub probes: beelet_probes::Handle,
    /// Signs that a container may have ended, beside the kernel's and the runtime's.
    pub exits: mpsc::Sender<beelet_pleg::ExitHint>,
    /// Since when the machine has been going down, if it is.
    pub shutdown: watch::Receiver<beelet_shutdown::Since>,
    /// A part that writes the pods' statuses elsewhere publishes here the newest table of which all is
    /// written: a shutdown waits for it. None: nobody writes any.
    pub written: watch::Sender<Option<Arc<PodTable>>>,
    /// Counters.
    pub metrics: Metrics,
}

impl Builder {
    /// Other ways to the machine than its own.
    #[must_use]
    pub fn doors(self, doors: Doors) -> Self {
        Self { doors, ..self }
    }

    /// Adds a source of pods beside the static manifests.
    #[must_use]
    pub fn source(mut self, desired: watch::Receiver<Arc<Desired>>) -> Self {
        self.sources.push(desired);
        self
    }

    /// Adds a part that runs beside the others. It is made once the container runtime has answered, and must
    /// end when its token is cancelled, and not before: that ends the agent. The token is cancelled after the
    /// pods' manager has ended, so that the last changes of the pod table can still be passed on.
    #[must_use]
    pub fn attach<F>(
        mut self,
        name: &'static str,
        part: impl FnOnce(Handles, CancellationToken) -> F + Send + 'static,
    ) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.attached.push((name, Box::new(|handles, working| part(handles, working).boxed())));
        self
    }

    /// Authorizes the clients of the node's HTTPS server: the API server, on a node of a cluster. With them
    /// it is served on 10250 unless the configuration says something else; without them only where the
    /// configuration says so.
    #[must_use]
    pub fn reviewers(self, reviewers: Reviewers) -> Self {
        Self { reviewers, ..self }
    }

    /// Who knows the pods' service accounts: the API server, on a node of a cluster.
    #[must_use]
    pub fn accounts(self, accounts: Arc<dyn ServiceAccounts>) -> Self {
        Self { accounts: Some(accounts), ..self }
    }

    /// Who knows what claims are bound to: the API server, on a node of a cluster.
    #[must_use]
    pub fn storage(self, storage: Arc<dyn Storage>) -> Self {
        Self { storage: Some(storage), ..self }
    }

    /// Lets clients of the node's HTTPS server set the log's level.
    #[must_use]
    pub fn verbosity(self, verbosity: Verbosity) -> Self {
        Self { verbosity: Some(verbosity), ..self }
    }

    /// Runs the pods of a node until `shutdown`.
    ///
    /// # Errors
    /// A required resource is unavailable, or a part failed; the sentence says which, and what to do.
    pub async fn run(self, config: Config, shutdown: CancellationToken) -> Result<()> {
        run::run(self, config, shutdown).await
    }

    /// Observes the pods of another kubelet until `shutdown`. Sources and attached parts have no place here.
    ///
    /// # Errors
    /// As for [`Builder::run`].
    pub async fn observe(self, options: observe::Options, shutdown: CancellationToken) -> Result<()> {
        observe::observe(self.doors, options, shutdown).await
    }
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let attached: Vec<&str> = self.attached.iter().map(|(name, _)| *name).collect();
        f.debug_struct("Builder")
            .field("doors", &self.doors)
            .field("sources", &self.sources.len())
            .field("attached", &attached)
            .finish()
    }
}
