//! Volumes of storage plugins (CSI, the Container Storage Interface): drivers register, volumes are staged
//! once for the node and published once per pod, with the kubelet's paths and records.
//!
//! The agent writes a record to disk before it calls a driver: `vol_data.json` next to each staged and each
//! published volume. These records suffice to release all volumes, even for an agent without any other state.
//! A driver may be hostile: each call has a deadline, each answer a maximum size, and only the pods of the
//! driver's own volumes wait for the driver. Must never touch the content of a volume.
// Computes with numbers from outside the agent.
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
    /// Notified when a pod has released its volumes.
    released: Notify,
    /// Volumes that this run of the agent has staged.
    staged: Mutex<BTreeSet<VolumeId>>,
    /// Known sizes of volumes on this node.
    sizes: Mutex<BTreeMap<VolumeId, Quantity>>,
    locks: VolumeLocks,
    metrics: Metrics,
}

/// A volume, by its driver and the driver's handle of the volume.
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
    /// Opens the storage plugins of the node with this name. Marks recorded volumes as `in_use`. Blocks.
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

    /// Returns the node's properties by registered drivers.
    #[must_use]
    pub fn drivers(&self) -> watch::Receiver<Arc<Drivers>> {
        self.0.known.subscribe()
    }

    /// Returns the volumes, of all kinds, that pods use or will use.
    #[must_use]
    pub fn in_use(&self) -> watch::Receiver<InUse> {
        self.0.in_use.subscribe()
    }

    /// Returns the drivers of a pod's published volumes.
    pub async fn drivers_of(&self, uid: &str) -> BTreeSet<String> {
        let folder = self.0.folders.pods_dir.join(uid);
        let all = blocking("looking for published volumes", move || records::of_pod(&folder)).await;
        all.into_iter().map(|(_, record)| record.driver_name).collect()
    }

    /// Returns a registered driver.
    fn driver(&self, name: &str) -> Result<Driver, Error> {
        lock(&self.0.drivers).get(name).cloned().ok_or_else(|| Error::NotRegistered(name.to_owned()))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
