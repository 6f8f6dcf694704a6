//! The parts that look after what pods have beside containers: volumes, images, logs, and what other programs
//! of the node ask about them. Each is started here; none decides what runs.

use std::{sync::Arc, time::Duration};

use beelet_api::{podresources, podsapi};
use beelet_base::blocking::blocking;
use beelet_cri::{mounts::Mounts, ownership::Ownership};
use beelet_images::folder::Folder;
use beelet_logs::links;
use beelet_pods::{expand, launch::Launcher, orphans, records::Records, refresh, republish, volume_stats};
use beelet_state::{State, events::NodeEvents};
use tokio_util::sync::CancellationToken;

use super::Node;
use crate::node::{builder::Handles, parts::Parts};

/// How often it is looked whether the locks are there.
const LOCKS_CHECKED: Duration = Duration::from_secs(60);
/// How often it is looked whether another runtime answers that does not see what is mounted.
const MOUNTS_CHECKED: Duration = Duration::from_secs(5);

/// What keeps other agents from this one's records and runtime.
pub(super) struct Locks {
    pub(super) state: Arc<State>,
    pub(super) runtime: Option<Arc<Ownership>>,
}

impl Locks {
    /// Makes locks again that somebody has removed, with the folder of state, until `cancel`: without them a
    /// second agent could start.
    pub(super) async fn keep(self, events: NodeEvents, cancel: CancellationToken) {
        let locks = Arc::new(self);
        let mut told = String::new();
        loop {
            tokio::select! {
                () = cancel.cancelled() => return,
                () = tokio::time::sleep(LOCKS_CHECKED) => {}
            }
            let looking = Arc::clone(&locks);
            match blocking("looking for the locks", move || looking.renew()).await {
                Ok(gone) => gone.iter().for_each(|sentence| events.warning("LockRestored", sentence)),
                Err(error) if error == told => {}
                Err(error) => {
                    events.warning("LockLost", &error);
                    told = error;
                }
            }
        }
    }

    /// A sentence for each that was gone; or why one can't be made again.
    fn renew(&self) -> Result<Vec<String>, String> {
        let mut gone = Vec::new();
        if self.state.renew().map_err(|error| error.to_string())? {
            gone.push(format!(
                "the lock of the state folder {} was gone from the disk, and is made again; records that were there are \
                 written again as they change",
                self.state.dir().display()
            ));
        }
        let runtime = self.runtime.as_ref().map_or(Ok(false), |runtime| runtime.renew());
        if runtime.map_err(|error| error.to_string())? {
            gone.push("the lock of the runtime was gone from the disk, and is made again".to_owned());
        }
        Ok(gone)
    }
}

/// Looks whether the runtime that answers sees what is mounted for pods, until `cancel`.
async fn watch_mounts(mounts: Arc<Mounts>, events: NodeEvents, cancel: CancellationToken) {
    let mut told = None;
    loop {
        tokio::select! {
            () = cancel.cancelled() => return,
            () = tokio::time::sleep(MOUNTS_CHECKED) => {}
        }
        let trouble = mounts.check().await;
        if trouble == told {
            continue;
        }
        match &trouble {
            Some(sentence) => events.warning("MountsNotShared", sentence),
            None => {
                events.normal("MountsShared", "The container runtime sees what is mounted for pods again");
            }
        }
        told = trouble;
    }
}

impl Node {
    /// What finds folders of pods that are not there any more.
    pub(super) fn sweep(&self, records: &Records, handles: &Handles) -> orphans::Sweep {
        orphans::Sweep {
            pods_dir: self.config.beelet.pods_dir.clone(),
            disks: self.disks.clone(),
            csi: self.csi.clone(),
            dra: self.dra.clone(),
            standalone: self.storage.is_none(),
            table: self.table.clone(),
            known: records.known(),
            desired: handles.desired.clone(),
            runtime: self.runtime.clone(),
            period: self.doors.orphan_check,
        }
    }

    /// Starts what pods' volumes need while they run, and after that.
    pub(super) fn keep_volumes(
        &self,
        tasks: &mut Parts,
        launcher: &Arc<Launcher>,
        sweep: orphans::Sweep,
        working: &CancellationToken,
    ) {
        let of = || (self.table.clone(), Arc::clone(launcher), working.clone());
        let (table, launcher, stop) = of();
        tasks.spawn("volumes", refresh::follow(table, launcher, self.doors.volume_check, stop));
        let (table, launcher, stop) = of();
        let asking = volume_stats::Asking { table, launcher, period: self.config.volume_stats_period };
        tasks.spawn("volume statistics", volume_stats::follow(asking, stop));
        let (table, launcher, stop) = of();
        tasks.spawn("volumes that grow", expand::follow(table, launcher, stop));
        let (table, launcher, stop) = of();
        tasks.spawn("volumes that are published again", republish::follow(table, launcher, stop));
        tasks.spawn("volumes of storage plugins", self.csi.clone().sweep(working.clone()));
        tasks.spawn("DRA drivers", self.dra.clone().follow(working.clone()));
        tasks.spawn("pod folders", orphans::sweep(sweep, working.clone()));
        if let Some(mounts) = self.health.mounts() {
            let events = NodeEvents::new(self.events.clone(), &self.config.node_name);
            tasks.spawn("mounts", watch_mounts(mounts, events, working.clone()));
        }
    }

    /// Starts what remembers who may have an image, and what takes in archives.
    pub(super) fn keep_images(&self, tasks: &mut Parts, working: &CancellationToken) {
        let access = Arc::clone(self.puller.access());
        tasks.spawn("records of pulls", access.keep(self.runtime.clone(), working.clone()));
        if let Some(path) = self.config.beelet.image_archives.clone() {
            let events = NodeEvents::new(self.events.clone(), &self.config.node_name);
            let folder = Folder { path, runtime: self.runtime.clone(), events };
            tasks.spawn("image archives", folder.run(working.clone()));
        }
    }

    /// Starts what rotates logs, and what links to them.
    pub(super) fn keep_logs(&self, tasks: &mut Parts, working: &CancellationToken) {
        tasks.spawn("log rotation", self.rotator().run(working.clone()));
        if let Some(folder) = &self.config.log_links {
            let (logs, table) = (self.config.pod_logs_dir.clone(), self.table.clone());
            tasks.spawn("links to logs", links::follow(table, folder.clone(), logs, working.clone()));
        }
    }

    /// Starts the kubelet's sockets for other programs of the node.
    pub(super) fn serve_beside(&self, tasks: &mut Parts, handles: &Handles, working: &CancellationToken) {
        let handed_out = (handles.devices.clone(), handles.dra.clone());
        let calls = self.metrics.pod_resources.clone();
        let served = podresources::serve(handed_out, self.table.clone(), calls, working.clone());
        tasks.spawn("pod resources", served);
        let folder = self.config.beelet.kubelet_dir.clone();
        let (pods, complete) = (self.table.clone(), Arc::clone(&self.health.complete));
        let inputs = podsapi::Inputs { folder, pods, complete };
        tasks.spawn("pods API", podsapi::serve(inputs, working.clone()));
    }
}
