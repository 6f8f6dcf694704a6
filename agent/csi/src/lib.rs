//! Volumes of storage plugins (CSI, the Container Storage Interface): drivers register, volumes are staged
//! once for the node and published once per pod, with the kubelet's paths and records.
//!
//! What is under way is on disk before a driver is asked: `vol_data.json` beside each staged and each
//! published volume. From these alone everything is taken back, also by an agent that knows nothing else. A
//! driver may be hostile: each call has a deadline, each answer a largest size, and only pods of its own
//! volumes wait for it. Must never touch what is in a volume.
// What this adds up comes from outside.
#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

mod driver;
mod error;
mod expand;
mod folders;
mod locks;
mod metrics;
mod publish;
mod records;
mod registration;
mod release;
mod usage;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use beelet_base::blocking::blocking;
use beelet_model::storage::{InUse, VolumesInUse};
use beelet_policy::volumes::csi::{self as policy, Drivers};
use beelet_units::quantity::Quantity;
use tokio::sync::{Notify, watch};

use self::{driver::Driver, folders::Folders, locks::VolumeLocks, records::VolumeRecord};
pub use self::{
    error::Error,
    metrics::Metrics,
    publish::{Source, Wanted},
    registration::KIND,
    usage::{Brought, Usage},
};

/// Storage plugins and their volumes. Clones share them.
#[derive(Clone, Debug)]
pub struct Csi(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    node: String,
    folders: Folders,
    drivers: Mutex<BTreeMap<String, Driver>>,
    known: watch::Sender<Arc<Drivers>>,
    in_use: VolumesInUse,
    /// A pod has given volumes back.
    released: Notify,
    /// The volumes that are staged since this agent began.
    staged: Mutex<BTreeSet<VolumeId>>,
    /// The sizes that volumes are known to have here.
    sizes: Mutex<BTreeMap<VolumeId, Quantity>>,
    locks: VolumeLocks,
    metrics: Metrics,
}

/// A volume by its driver and its name there.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct VolumeId {
    driver: String,
    handle: String,
}

impl VolumeId {
    fn new(driver: &str, handle: &str) -> Self {
        Self { driver: driver.to_owned(), handle: handle.to_owned() }
    }

    fn of(record: &VolumeRecord) -> Self {
        Self::new(&record.driver_name, &record.volume_handle)
    }

    fn unique_name(&self) -> String {
        policy::unique_name(&self.driver, &self.handle)
    }
}

impl Csi {
    /// The plugins of the node of this name, and what is on disk of their volumes, which are `in_use` then.
    /// Blocks.
    #[must_use]
    pub fn open(
        node: &str,
        (kubelet_dir, pods_dir): (&Path, &Path),
        in_use: VolumesInUse,
        metrics: Metrics,
    ) -> Self {
        let staging = kubelet_dir.join("plugins/kubernetes.io/csi");
        for (uid, _, record) in records::published(pods_dir) {
            if record.is_attached() {
                in_use.use_by(&VolumeId::of(&record).unique_name(), Some(&uid));
            }
        }
        for (_, record) in records::staged(&staging) {
            in_use.use_by(&VolumeId::of(&record).unique_name(), None);
        }
        Self(Arc::new(Inner {
            node: node.to_owned(),
            folders: Folders { pods_dir: pods_dir.to_owned(), staging },
            drivers: Mutex::default(),
            known: watch::Sender::default(),
            in_use,
            released: Notify::new(),
            staged: Mutex::default(),
            sizes: Mutex::default(),
            locks: VolumeLocks::default(),
            metrics,
        }))
    }

    /// The node's properties by registered drivers.
    #[must_use]
    pub fn drivers(&self) -> watch::Receiver<Arc<Drivers>> {
        self.0.known.subscribe()
    }

    /// The volumes that pods use or will use; those of other kinds too.
    #[must_use]
    pub fn in_use(&self) -> watch::Receiver<InUse> {
        self.0.in_use.subscribe()
    }

    /// The drivers of the volumes that a pod has.
    pub async fn drivers_of(&self, uid: &str) -> BTreeSet<String> {
        let folder = self.0.folders.pods_dir.join(uid);
        let all = blocking("looking for published volumes", move || records::of_pod(&folder)).await;
        all.into_iter().map(|(_, record)| record.driver_name).collect()
    }

    /// A driver that has registered.
    fn driver(&self, name: &str) -> Result<Driver, Error> {
        lock(&self.0.drivers).get(name).cloned().ok_or_else(|| Error::NotRegistered(name.to_owned()))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
