//! Dynamic Resource Allocation (KEP-4381): drivers register, prepare the claims of a pod before its sandbox
//! is created, and unprepare them when no pod uses them any more.
//!
//! The users and prepared devices of each claim are written to the kubelet's own record (`dra_manager_state`)
//! before a driver is called, so that an agent with no other state can unprepare them. A driver may be
//! hostile: each call has a deadline, each response a maximum size, and only pods with its claims wait for
//! it. Must never touch a container, a device or a CDI file.

pub mod answer;
mod error;
mod health;
mod metrics;
mod plugin;
mod prepare;
mod registration;
mod unsaved;
mod view;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use beelet_base::blocking::blocking;
use beelet_model::plugins::Presences;
use beelet_policy::dra::{self as policy, ClaimKey, Ledger, checkpoint, health::HealthBook};
use beelet_state::ForeignFile;
use futures::future::{join, join_all};
use tokio::{
    sync::{Notify, OwnedMutexGuard, watch},
    time::Instant,
};
use tracing::{info, warn};

pub use self::{
    error::Error,
    metrics::Metrics,
    registration::KIND,
    view::{ClaimView, DeviceView},
};
use self::{plugin::Plugin, unsaved::Unsaved};

/// Name of the record, as the kubelet's.
const RECORD: &str = "dra_manager_state";

/// DRA drivers and the claims that they have prepared. Clones share them.
#[derive(Clone, Debug)]
pub struct Dra(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// Registered plugins of each driver, the newest last: there are two while one is replaced.
    plugins: Mutex<BTreeMap<String, Vec<Plugin>>>,
    known: watch::Sender<Arc<Presences>>,
    /// Notified when a connection is made or lost.
    wake: Arc<Notify>,
    ledger: Mutex<Ledger>,
    /// Lock of each claim in use by an operation.
    busy: Mutex<BTreeMap<ClaimKey, Arc<tokio::sync::Mutex<()>>>>,
    record: ForeignFile,
    /// The record was lost when the agent started: running pods may use claims and be missing from the
    /// ledger.
    lost: bool,
    /// Pods that the record may contain and the ledger no longer does. Locked after the ledger, if both are.
    unsaved: Mutex<Unsaved>,
    /// Number of the newest plugin.
    registered: watch::Sender<u64>,
    /// Device health as reported by drivers. Locked before the ledger, if both are.
    health: Mutex<HealthBook>,
    /// Pods whose devices changed health and that have not been returned yet.
    changed_health: Mutex<BTreeSet<String>>,
    health_changes: Notify,
    began: Instant,
    /// Held during a write of the record.
    writing: Arc<tokio::sync::Mutex<()>>,
    metrics: Metrics,
}

impl Dra {
    /// Loads the record of an earlier agent or a kubelet. Moves an invalid record aside and passes a reason
    /// and message to `report`. Blocks.
    #[must_use]
    pub fn open(kubelet_dir: &Path, metrics: Metrics, report: impl Fn(&str, String)) -> Self {
        let record = ForeignFile::of_node(kubelet_dir.join(RECORD));
        let (ledger, lost) = load(&record, report);
        metrics.in_use(&ledger);
        Self(Arc::new(Inner {
            plugins: Mutex::default(),
            known: watch::Sender::default(),
            wake: Arc::default(),
            ledger: Mutex::new(ledger),
            busy: Mutex::default(),
            record,
            lost,
            unsaved: Mutex::default(),
            registered: watch::Sender::default(),
            health: Mutex::default(),
            changed_health: Mutex::default(),
            health_changes: Notify::new(),
            began: Instant::now(),
            writing: Arc::default(),
            metrics,
        }))
    }

    /// Subscribes to the drivers that have registered since the agent's start, with the time since which
    /// absent ones are away.
    #[must_use]
    pub fn drivers(&self) -> watch::Receiver<Arc<Presences>> {
        self.0.known.subscribe()
    }

    /// Returns the UIDs of pods that still hold claims.
    #[must_use]
    pub fn pods(&self) -> BTreeSet<String> {
        let mut pods = lock(&self.0.ledger).pods();
        pods.extend(lock(&self.0.unsaved).pods());
        pods
    }

    /// Returns true while the pod holds claims, or the record still says so.
    #[must_use]
    pub fn has(&self, uid: &str) -> bool {
        !lock(&self.0.ledger).of_pod(uid).is_empty() || lock(&self.0.unsaved).has(uid)
    }

    /// Returns the plugin of a driver: the newest connected one, otherwise the newest (`GetPlugin`).
    fn plugin(&self, driver: &str) -> Result<Plugin, Error> {
        let plugins = lock(&self.0.plugins);
        let all = plugins.get(driver).map(Vec::as_slice).unwrap_or_default();
        let connected = all.iter().rev().find(|plugin| plugin.is_connected());
        connected.or(all.last()).cloned().ok_or_else(|| Error::NotRegistered(driver.to_owned()))
    }

    /// Changes the ledger.
    fn change<T>(&self, change: impl FnOnce(&mut Ledger) -> T) -> T {
        let mut ledger = lock(&self.0.ledger);
        let changed = change(&mut ledger);
        self.0.metrics.in_use(&ledger);
        changed
    }

    /// Locks these claims. All callers use the same order, so no two wait for each other.
    async fn hold(&self, keys: &BTreeSet<ClaimKey>) -> Vec<OwnedMutexGuard<()>> {
        let all: Vec<_> = {
            let mut busy = lock(&self.0.busy);
            busy.retain(|_, one| Arc::strong_count(one) > 1);
            keys.iter().map(|key| Arc::clone(busy.entry(key.clone()).or_default())).collect()
        };
        let mut held = Vec::with_capacity(all.len());
        for one in all {
            held.push(one.lock_owned().await);
        }
        held
    }

    /// Writes the record and waits until it is on disk.
    async fn save(&self) -> Result<(), Error> {
        let turn = Arc::clone(&self.0.writing).lock_owned().await;
        let (ledger, unsaved) = {
            let ledger = lock(&self.0.ledger);
            (ledger.clone(), lock(&self.0.unsaved).clone())
        };
        let record = self.0.record.clone();
        // The lock is held until the write ends, even if the caller no longer waits.
        let write = move || {
            let _turn = turn;
            record.replace(&checkpoint::write(&ledger)?)?;
            Ok(record.settle()?)
        };
        blocking("writing the record of resource claims", write).await.inspect(|()| {
            lock(&self.0.unsaved).saved(&unsaved);
        })
    }
}

/// Reads the record; an invalid one is replaced by an empty ledger. Returns true if the record was lost.
fn load(record: &ForeignFile, report: impl Fn(&str, String)) -> (Ledger, bool) {
    let reason = match record.read() {
        Ok(None) => return (Ledger::default(), false),
        Ok(Some(bytes)) => match checkpoint::read(&bytes) {
            Ok(ledger) => return (ledger, false),
            Err(reason) => reason.to_string(),
        },
        Err(error) => error.to_string(),
    };
    let message = match record.set_aside() {
        Ok(moved_to) => format!("{reason}; moved it to {}", moved_to.display()),
        Err(error) => format!("{reason}; cannot move it aside: {error}"),
    };
    warn!("{message}; preparing claims again as pods need them");
    report("ResourceClaimRecordCorrupt", message);
    (Ledger::default(), true)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
