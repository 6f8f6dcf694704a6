//! Starts the parts that maintain the pods' volumes, images and logs, and the sockets for other programs of
//! the node. None of these parts decides which pods run.

use std::{sync::Arc, time::Duration};

use beelet_api::{podresources, podsapi};
use beelet_base::blocking::{blocking, spawn_blocking};
use beelet_cri::{mounts::Mounts, ownership::Ownership};
use beelet_images::folder::Folder;
use beelet_logs::{
    links,
    rotate::{self, Rotator},
};
use beelet_pods::{orphans, records::Records};
use beelet_state::{State, events::NodeEvents};
use beelet_volumes::{Periods, VolumeManager};
use tokio_util::sync::CancellationToken;

use super::{handles::Handles, opened::Node, tasks::Tasks};

/// Interval of checks that the locks exist.
const LOCKS_CHECKED: Duration = Duration::from_secs(60);
/// Interval of checks that the runtime sees the mounts.
const MOUNTS_CHECKED: Duration = Duration::from_secs(5);
/// Interval of returning freed memory to the system.
const MEMORY_PERIOD: Duration = Duration::from_secs(60);

/// Locks that keep other agents from this one's records and runtime.
pub(super) struct Locks {
    pub(super) state: Arc<State>,
    pub(super) runtime: Option<Arc<Ownership>>,
}

impl Locks {
    /// Restores removed locks, and the state folder, until `cancel`: without locks a second agent could
    /// start.
    pub(super) async fn keep(self, events: NodeEvents, cancel: CancellationToken) {
        let locks = Arc::new(self);
        let mut reported = String::new();
        loop {
            tokio::select! {
                () = cancel.cancelled() => return,
                () = tokio::time::sleep(LOCKS_CHECKED) => {}
            }
            let looking = Arc::clone(&locks);
            match blocking("looking for the locks", move || looking.renew()).await {
                Ok(gone) => gone.iter().for_each(|sentence| events.warning("LockRestored", sentence)),
                Err(error) if error == reported => {}
                Err(error) => {
                    events.warning("LockLost", &error);
                    reported = error;
                }
            }
        }
    }

    /// Restores missing locks. Returns a message for each restored one, or the error of one that can't be
    /// restored.
    fn renew(&self) -> Result<Vec<String>, String> {
        let mut gone = Vec::new();
        if self.state.renew().map_err(|error| error.to_string())? {
            gone.push(format!(
                "restored the removed lock of the state folder {}; removed records are written again when they change",
                self.state.dir().display()
            ));
        }
        let runtime = self.runtime.as_ref().map_or(Ok(false), |runtime| runtime.renew());
        if runtime.map_err(|error| error.to_string())? {
            gone.push("restored the removed lock of the runtime".to_owned());
        }
        Ok(gone)
    }
}

/// Checks that the runtime sees the pods' mounts, until `cancel`.
async fn watch_mounts(mounts: Arc<Mounts>, events: NodeEvents, cancel: CancellationToken) {
    let mut reported = None;
    loop {
        tokio::select! {
            () = cancel.cancelled() => return,
            () = tokio::time::sleep(MOUNTS_CHECKED) => {}
        }
        let trouble = mounts.check().await;
        if trouble == reported {
            continue;
        }
        match &trouble {
            Some(sentence) => events.warning("MountsNotShared", sentence),
            None => {
                events.normal("MountsShared", "The container runtime sees the pods' mounts again");
            }
        }
        reported = trouble;
    }
}

/// Builds the sweep of folders of removed pods.
pub(super) fn orphan_sweep(
    node: &Node,
    records: &Records,
    handles: &Handles,
    volumes: VolumeManager,
) -> orphans::Sweep {
    let services = &node.services;
    orphans::Sweep {
        pods_dir: services.config.beelet.pods_dir.clone(),
        volumes,
        dra: services.dra.clone(),
        standalone: services.storage.is_none(),
        table: services.table.clone(),
        known: records.known(),
        desired: handles.desired.clone(),
        runtime: services.runtime.clone(),
        period: services.doors.orphan_check,
    }
}

/// Starts the parts that maintain volumes, while their pods run and after that.
pub(super) fn keep_volumes(node: &Node, tasks: &mut Tasks, volumes: &VolumeManager, orphans: orphans::Sweep) {
    let services = &node.services;
    let periods = Periods { check: services.doors.volume_check, stats: services.config.volume_stats_period };
    for (name, task) in volumes.tasks(periods, &tasks.stop()) {
        tasks.spawn(name, task);
    }
    tasks.spawn("volumes of storage plugins", services.csi.clone().sweep(tasks.stop()));
    tasks.spawn("DRA drivers", services.dra.clone().follow(tasks.stop()));
    tasks.spawn("pod folders", orphans::sweep(orphans, tasks.stop()));
    if let Some(mounts) = services.health.mounts() {
        tasks.spawn("mounts", watch_mounts(mounts, services.node_events(), tasks.stop()));
    }
}

/// Starts the part that records which pods may use an image, and the part that imports archives.
pub(super) fn keep_images(node: &Node, tasks: &mut Tasks) {
    let services = &node.services;
    let access = Arc::clone(node.puller.access());
    tasks.spawn("records of pulls", access.keep(services.runtime.clone(), tasks.stop()));
    if let Some(path) = services.config.beelet.image_archives.clone() {
        let folder = Folder { path, runtime: services.runtime.clone(), events: services.node_events() };
        tasks.spawn("image archives", folder.run(tasks.stop()));
    }
}

/// Starts the rotation of logs, and the maintenance of links to them.
pub(super) fn keep_logs(node: &Node, tasks: &mut Tasks) {
    let (config, table) = (&node.services.config, &node.services.table);
    let limits = rotate::Limits {
        max_size: config.container_log_max_size,
        max_files: config.container_log_max_files,
        interval: config.container_log_monitor_interval,
    };
    let logs = &config.pod_logs_dir;
    let rotator = Rotator::new(node.services.runtime.clone(), logs.clone(), limits, table.clone());
    tasks.spawn("log rotation", rotator.run(tasks.stop()));
    if let Some(folder) = &config.log_links {
        let links = links::follow(table.clone(), folder.clone(), logs.clone(), tasks.stop());
        tasks.spawn("links to logs", links);
    }
}

/// Starts the kubelet's sockets for other programs of the node.
pub(super) fn serve_local_sockets(node: &Node, tasks: &mut Tasks, handles: &Handles) {
    let services = &node.services;
    let handed_out = (handles.devices.clone(), services.dra.clone(), handles.pinning.clone());
    let calls = services.metrics.pod_resources.clone();
    let served = podresources::serve(handed_out, services.table.clone(), calls, tasks.stop());
    tasks.spawn("pod resources", served);
    let folder = services.config.beelet.kubelet_dir.clone();
    let (pods, complete) = (services.table.clone(), Arc::clone(&services.complete));
    let inputs = podsapi::Inputs { folder, pods, complete };
    tasks.spawn("pods API", podsapi::serve(inputs, tasks.stop()));
}

/// Returns free memory to the system every [`MEMORY_PERIOD`], e.g. after the agent's start or a burst (a
/// hundred pods that start at once).
pub(super) async fn release_memory(shutdown: CancellationToken) {
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(MEMORY_PERIOD) => {}
        }
        // The release may block.
        if spawn_blocking(beelet_bpf::release_memory).await.is_err() {
            return;
        }
    }
}
