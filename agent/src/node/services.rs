//! Services of a node by the time at which they exist: [`Services`] from the start, before the container
//! runtime answers; [`Late`] holds cells that the servers read and the running node fills.

use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result};
use tokio::sync::{SetOnce, watch};

use super::{doors::Doors, health::Health, metrics::Metrics, stats::Stats};
use beelet_api::grpc::{self, garbage::Collectors, manifests::Running};
use beelet_base::blocking::spawn_blocking;
use beelet_config::Config;
use beelet_cri::Runtime;
use beelet_csi::Csi;
use beelet_dra::Dra;
use beelet_model::{
    accounts::ServiceAccounts,
    storage::{Storage, VolumesInUse},
    table::{Complete, PodTable},
};
use beelet_state::{
    State,
    events::{NodeEvents, Recorder},
};
use beelet_volumes::{Disks, FlexVolumes, LocalDisks, RemoteDisks};

/// Services that exist before the container runtime answers. Clones share them.
#[derive(Clone)]
pub struct Services {
    /// The pod table: one value, replaced at each change.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// Set once all running pods are in the table.
    pub complete: Complete,
    /// The node's events: record some, or subscribe and pass them on.
    pub events: Recorder,
    /// The only writer of durable state.
    pub state: Arc<State>,
    /// The container runtime.
    pub runtime: Runtime,
    /// Storage plugins and their volumes.
    pub csi: Csi,
    /// DRA drivers, which prepare resource claims.
    pub dra: Dra,
    /// Handle of the probes.
    pub probes: beelet_probes::Handle,
    /// Metrics of all parts.
    pub metrics: Metrics,
    pub(super) config: Arc<Config>,
    pub(super) doors: Arc<Doors>,
    pub(super) health: Health,
    pub(super) stats: Stats,
    pub(super) disks: Disks,
    /// Service accounts of the API server, on a cluster's node.
    pub(super) accounts: Option<Arc<dyn ServiceAccounts>>,
    /// Storage objects of the API server, on a cluster's node.
    pub(super) storage: Option<Arc<dyn Storage>>,
}

/// Clients of the API server; None on a standalone node.
#[derive(Default)]
pub(super) struct ApiServer {
    /// Client for the pods' service accounts.
    pub(super) accounts: Option<Arc<dyn ServiceAccounts>>,
    /// Client for storage objects.
    pub(super) storage: Option<Arc<dyn Storage>>,
}

/// Inner ends of the services, each for a single part.
pub(super) struct Ends {
    pub(super) table: watch::Sender<Arc<PodTable>>,
    pub(super) stats: beelet_stats::Inbox,
    pub(super) probes: beelet_probes::Commands,
}

/// Services that exist only once the node runs, in cells that are set once.
#[derive(Default)]
pub(super) struct Late {
    /// Devices, resources and conditions.
    pub(super) devices: grpc::devices::Slot,
    /// Desired pods and the inbox of the pods' manager.
    pub(super) running: Arc<SetOnce<Running>>,
    /// The garbage collectors.
    pub(super) collectors: Arc<OnceLock<Collectors>>,
    /// The tuner's newest view.
    pub(super) tuner: watch::Sender<Arc<beelet_tuner::View>>,
}

impl Services {
    /// Opens the services over `state` and `runtime`, whose locks the agent holds.
    pub(super) async fn open(
        config: Config,
        doors: Doors,
        (state, runtime): (Arc<State>, Runtime),
        ApiServer { accounts, storage }: ApiServer,
    ) -> Result<(Self, Ends)> {
        let (table_out, table) = watch::channel(Arc::new(PodTable::default()));
        let (stats, inbox) = Stats::new();
        let (probes, commands) = beelet_probes::handle();
        let metrics = Metrics::of_node(&config.node_name);
        let (csi, disks) = open_volumes(&config, &metrics).await?;
        let events = Recorder::load(&state);
        let dra = open_dra(&config, &metrics, events.clone()).await?;
        let health = Health::new(&config.runtime_endpoint);
        let services = Self {
            table,
            complete: Arc::clone(&health.complete),
            events,
            state,
            runtime,
            csi,
            dra,
            probes,
            metrics,
            config: Arc::new(config),
            doors: Arc::new(doors),
            health,
            stats,
            disks,
            accounts,
            storage,
        };
        Ok((services, Ends { table: table_out, stats: inbox, probes: commands }))
    }

    /// Records events of the node itself.
    pub(super) fn node_events(&self) -> NodeEvents {
        NodeEvents::new(self.events.clone(), &self.config.node_name)
    }
}

/// Opens storage plugins, and disks and drivers, with the state of their volumes on disk.
async fn open_volumes(config: &Config, metrics: &Metrics) -> Result<(Csi, Disks)> {
    let (node, metrics) = (config.node_name.clone(), metrics.csi.clone());
    let (kubelet_dir, pods_dir) = (config.beelet.kubelet_dir.clone(), config.beelet.pods_dir.clone());
    let drivers = config.volume_plugin_dir.clone();
    let open = move || {
        let (dirs, in_use) = ((&*kubelet_dir, &*pods_dir), VolumesInUse::default());
        let csi = Csi::open(&node, dirs, in_use.clone(), metrics);
        let flex = FlexVolumes::open(&node, dirs, &drivers, in_use.clone());
        let remote = RemoteDisks::open(dirs, in_use);
        (csi, Disks::new(LocalDisks::new(&kubelet_dir, &pods_dir), flex, remote))
    };
    spawn_blocking(open).await.context("the volumes of storage plugins")
}

/// Opens DRA drivers, with the record of the claims that they have prepared.
async fn open_dra(config: &Config, metrics: &Metrics, events: Recorder) -> Result<Dra> {
    let (dir, metrics) = (config.beelet.kubelet_dir.clone(), metrics.dra.clone());
    let events = NodeEvents::new(events, &config.node_name);
    let open = move || Dra::open(&dir, metrics, |reason, message| events.warning(reason, &message));
    spawn_blocking(open).await.context("the record of resource claims")
}
