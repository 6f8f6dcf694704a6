//! Dynamic Resource Allocation (KEP-4381): drivers register, prepare the claims of a pod before its sandbox
//! is made, and take back what they made once no pod uses a claim any more.
//!
//! Who uses which claim, and what was prepared for it, is in the kubelet's own record (`dra_manager_state`)
//! before a driver is asked: claims are taken back also by an agent that knows nothing else. A driver may be
//! hostile: each call has a deadline, each answer a largest size, and only pods with its claims wait for it.
//! Must never touch a container, a device or a CDI file.

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

/// The kubelet's name of the record.
const RECORD: &str = "dra_manager_state";

/// Drivers, and the claims that they have prepared. Clones share them.
#[derive(Clone, Debug)]
pub struct Dra(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// Of each driver those that have registered, the newest last: there are two while one is replaced.
    plugins: Mutex<BTreeMap<String, Vec<Plugin>>>,
    known: watch::Sender<Arc<Presences>>,
    /// A connection has come or gone.
    wake: Arc<Notify>,
    ledger: Mutex<Ledger>,
    /// One lock per claim that somebody works on.
    busy: Mutex<BTreeMap<ClaimKey, Arc<tokio::sync::Mutex<()>>>>,
    record: ForeignFile,
    /// The record was lost when the agent began: pods that run since before may use claims and not be in the
    /// ledger.
    lost: bool,
    /// The pods that the record may have and the ledger has no more. Locked after the ledger, if both are.
    unsaved: Mutex<Unsaved>,
    /// The number of the newest plugin.
    registered: watch::Sender<u64>,
    /// What drivers report of their devices. Locked before the ledger, if both are.
    health: Mutex<HealthBook>,
    /// The pods whose devices' health has changed, until somebody takes them.
    changed_health: Mutex<BTreeSet<String>>,
    health_changes: Notify,
    began: Instant,
    /// Held by whoever writes the record.
    writing: Arc<tokio::sync::Mutex<()>>,
    metrics: Metrics,
}

impl Dra {
    /// What an earlier agent, or a kubelet, has left. A record that can't be trusted is set aside: `tell` is
    /// told so. Blocks.
    #[must_use]
    pub fn open(kubelet_dir: &Path, metrics: Metrics, tell: impl Fn(&str, String)) -> Self {
        let record = ForeignFile::of_node(kubelet_dir.join(RECORD));
        let (ledger, lost) = load(&record, tell);
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

    /// The drivers that have registered since the agent began, and since when those are away that are.
    #[must_use]
    pub fn drivers(&self) -> watch::Receiver<Arc<Presences>> {
        self.0.known.subscribe()
    }

    /// The UIDs of the pods whose claims are not given back.
    #[must_use]
    pub fn pods(&self) -> BTreeSet<String> {
        let mut pods = lock(&self.0.ledger).pods();
        pods.extend(lock(&self.0.unsaved).pods());
        pods
    }

    /// Returns true while a pod has not given back all of its claims, or the record says so.
    #[must_use]
    pub fn has(&self, uid: &str) -> bool {
        !lock(&self.0.ledger).of_pod(uid).is_empty() || lock(&self.0.unsaved).has(uid)
    }

    /// The plugin of a driver: the newest that is connected, or else the newest (`GetPlugin`).
    fn plugin(&self, driver: &str) -> Result<Plugin, Error> {
        let plugins = lock(&self.0.plugins);
        let all = plugins.get(driver).map(Vec::as_slice).unwrap_or_default();
        let connected = all.iter().rev().find(|plugin| plugin.is_connected());
        connected.or(all.last()).cloned().ok_or_else(|| Error::NotRegistered(driver.to_owned()))
    }

    /// Changes what is known of claims.
    fn change<T>(&self, change: impl FnOnce(&mut Ledger) -> T) -> T {
        let mut ledger = lock(&self.0.ledger);
        let changed = change(&mut ledger);
        self.0.metrics.in_use(&ledger);
        changed
    }

    /// Waits until nobody else works on these claims. All come in one order, so no two wait for each other.
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

    /// Writes the record as of now, and waits for the disk.
    async fn save(&self) -> Result<(), Error> {
        let turn = Arc::clone(&self.0.writing).lock_owned().await;
        let (ledger, unsaved) = {
            let ledger = lock(&self.0.ledger);
            (ledger.clone(), lock(&self.0.unsaved).clone())
        };
        let record = self.0.record.clone();
        // The turn ends with the write, also where nobody waits for it any more.
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

/// The record, or nothing in place of one that can't be trusted; true if it was lost.
fn load(record: &ForeignFile, tell: impl Fn(&str, String)) -> (Ledger, bool) {
    let reason = match record.read() {
        Ok(None) => return (Ledger::default(), false),
        Ok(Some(bytes)) => match checkpoint::read(&bytes) {
            Ok(ledger) => return (ledger, false),
            Err(reason) => reason.to_string(),
        },
        Err(error) => error.to_string(),
    };
    let message = match record.set_aside() {
        Ok(moved_to) => format!("{reason}; it was set aside as {}", moved_to.display()),
        Err(error) => format!("{reason}; and it can't be set aside: {error}"),
    };
    warn!("{message}; claims are prepared again as pods need them");
    tell("ResourceClaimRecordCorrupt", message);
    (Ledger::default(), true)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
