//! Pinning: exclusive CPUs, memory and NUMA nodes of containers.
//!
//! `beelet_policy::pinning` decides as the kubelet's CPU, memory and topology managers do; this crate owns
//! the one value that it decides on, behind a mutex that is held for computing only. A pod's worker opens a
//! [`Session`] before it starts anything: each container is aligned in its turn, with the hints of its
//! devices, and gets its CPUs and its memory at once. The state files (the kubelet's own) hold the decision
//! before a container may start. A session that is dropped before its end gives everything back.
//!
//! The CPUs of containers that run follow the shared pool through the runtime ([`Task`]). The CPUs of an
//! ended pod are free once the pods' manager names the pod no more. Where all three policies are off,
//! nothing of this runs.
//!
//! Must never end a pod by itself: it asks the pods' manager.

mod book;
mod error;
mod follow;
mod hardware;
pub mod machine;
mod metrics;
mod open;
mod reclaim;
mod report;
mod resize;
mod session;
mod signals;
mod view;

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use beelet_base::blocking::blocking;
use beelet_cgroups::Cgroups;
use beelet_cri::Runtime;
use beelet_model::{request::Request, table::PodTable};
use beelet_policy::{pinning::Gates, resources::cgroups::CgroupConfig};
use beelet_state::{ForeignFile, events::Recorder};
use tokio::sync::{mpsc, watch};

use self::book::Book;
pub use self::{
    error::OpenError,
    follow::Task,
    metrics::Metrics,
    report::{PinnedContainer, PinningReport},
    resize::NoResize,
    session::{Circumstances, PinRefusal, Session},
    signals::Watcher,
    view::{Held, MemoryBlock},
};

/// UIDs of the pods that may hold CPUs and memory; `None` while they are unknown.
pub type Active = Option<Arc<BTreeSet<String>>>;

/// Dependencies of pinning.
#[derive(Debug)]
pub struct Parts {
    /// Settings, with the reserved amounts of this machine.
    pub settings: beelet_config::Pinning,
    /// The machine; required if any policy is on.
    pub machine: Option<machine::Source>,
    /// The folder of the state files, the kubelet's own.
    pub folder: std::path::PathBuf,
    /// Changes containers.
    pub runtime: Runtime,
    /// The cgroups of containers, to compare with the decisions.
    pub cgroups: Arc<Cgroups>,
    /// The names of cgroups.
    pub cgroup_config: CgroupConfig,
    /// All pods.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// Pods that may hold pins.
    pub active: watch::Receiver<Active>,
    /// Requests to the pods' manager.
    pub requests: mpsc::Sender<Request>,
    /// Counters.
    pub metrics: Metrics,
    /// Records events.
    pub events: Recorder,
    /// The node's name, for events about it.
    pub node_name: String,
}

/// CPUs and memory of this node; clones share them.
#[derive(Clone, Debug, Default)]
pub struct Pinning(Option<Arc<Desk>>);

/// The owner of the pins.
#[derive(Debug)]
struct Desk {
    book: Mutex<Book>,
    /// Counts the changes of assignments.
    changes: watch::Sender<u64>,
    gates: Gates,
    period: Duration,
    hardware: hardware::Hardware,
    files: Files,
    active: watch::Receiver<Active>,
    requests: mpsc::Sender<Request>,
    metrics: Metrics,
    events: Recorder,
}

/// The state files, and their last written content.
#[derive(Debug)]
struct Files {
    cpus: ForeignFile,
    memory: ForeignFile,
    written: Mutex<[String; 2]>,
}

impl Desk {
    /// Runs `work` on the pins: the only access to them.
    fn with<T>(&self, work: impl FnOnce(&mut Book) -> T) -> T {
        work(&mut self.book.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Publishes a change of assignments.
    fn changed(&self) {
        self.with(|book| self.metrics.show(&book.pins));
        self.changes.send_modify(|changes| *changes = changes.wrapping_add(1));
    }

    /// Frees the pins of ended pods, except those of the requesting pod. Returns true if there were any.
    fn free_inactive(&self, asking: &str) -> bool {
        let Some(active) = self.active.borrow().clone() else { return false };
        self.with(|book| book.free_inactive(&active, asking))
    }

    /// Writes the state files if they differ from the last written content.
    async fn write(self: &Arc<Self>) -> Result<(), String> {
        let desk = Arc::clone(self);
        blocking("writing the state of CPUs and memory", move || {
            // The lock is for a single writer: an older state must not replace a newer one.
            let mut written = desk.files.written.lock().unwrap_or_else(PoisonError::into_inner);
            let now = desk.with(|book| [book.pins.cpus.file(), book.pins.memory.file()]);
            for ((file, now), before) in
                [&desk.files.cpus, &desk.files.memory].into_iter().zip(now).zip(written.iter_mut())
            {
                if *before != now {
                    file.replace(now.as_bytes()).map_err(|error| error.to_string())?;
                    *before = now;
                }
            }
            Ok(())
        })
        .await
    }
}
