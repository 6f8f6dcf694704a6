//! Dynamic Resource Allocation (KEP-4381): drivers register, prepare the claims of a pod before its sandbox
//! is created, and unprepare them when no pod uses them any more.
//!
//! The users and prepared devices of each claim are written to the kubelet's own record (`dra_manager_state`)
//! before a driver is called, so that an agent with no other state can unprepare them. A driver may be
//! hostile: each call has a deadline, each response a maximum size, and only pods with its claims wait for
//! it. Must never touch a container, a device or a CDI file.

pub mod answer;
mod claims;
mod error;
mod health;
mod metrics;
mod plugin;
mod prepare;
mod registration;
mod unsaved;
mod view;

use std::{
    collections::BTreeSet,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use beelet_model::plugins::Presences;
use beelet_policy::dra as policy;
use tokio::sync::watch;

use self::{claims::Claims, health::DeviceHealth, plugin::Plugin, registration::Drivers};
pub use self::{
    error::Error,
    metrics::Metrics,
    registration::KIND,
    view::{ClaimView, DeviceView},
};

/// DRA drivers and the claims that they have prepared. Clones share them.
#[derive(Clone, Debug)]
pub struct Dra(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    drivers: Drivers,
    claims: Claims,
    health: DeviceHealth,
    metrics: Metrics,
}

impl Dra {
    /// Loads the record of an earlier agent or a kubelet. Moves an invalid record aside and passes a reason
    /// and message to `report`. Blocks.
    #[must_use]
    pub fn open(kubelet_dir: &Path, metrics: Metrics, report: impl Fn(&str, String)) -> Self {
        Self(Arc::new(Inner {
            drivers: Drivers::new(metrics.clone()),
            claims: Claims::open(kubelet_dir, metrics.clone(), report),
            health: DeviceHealth::default(),
            metrics,
        }))
    }

    /// Returns the UIDs of pods that still hold claims.
    #[must_use]
    pub fn pods(&self) -> BTreeSet<String> {
        self.0.claims.pods()
    }

    /// Returns true while the pod holds claims, or the record still says so.
    #[must_use]
    pub fn has(&self, uid: &str) -> bool {
        self.0.claims.has(uid)
    }

    /// Subscribes to the drivers that have registered since the agent's start, with the time since which
    /// absent ones are away.
    #[must_use]
    pub fn drivers(&self) -> watch::Receiver<Arc<Presences>> {
        self.0.drivers.known.subscribe()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
