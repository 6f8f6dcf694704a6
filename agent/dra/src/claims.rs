//! The claims in use, and the kubelet's own record of them on disk.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::{Arc, Mutex},
};

use beelet_base::blocking::blocking;
use beelet_policy::dra::{ClaimKey, Ledger, checkpoint};
use beelet_state::ForeignFile;
use tokio::sync::OwnedMutexGuard;
use tracing::warn;

use crate::{Error, Metrics, lock, unsaved::Unsaved};

/// Name of the record, as the kubelet's.
const RECORD: &str = "dra_manager_state";

/// The ledger of claims and its record.
#[derive(Debug)]
pub(crate) struct Claims {
    pub(crate) ledger: Mutex<Ledger>,
    /// Lock of each claim in use by an operation.
    busy: Mutex<BTreeMap<ClaimKey, Arc<tokio::sync::Mutex<()>>>>,
    record: ForeignFile,
    /// The record was lost when the agent started: running pods may use claims and be missing from the
    /// ledger.
    pub(crate) lost: bool,
    /// Pods that the record may contain and the ledger no longer does. Locked after the ledger, if both are.
    pub(crate) unsaved: Mutex<Unsaved>,
    /// Held during a write of the record.
    writing: Arc<tokio::sync::Mutex<()>>,
    metrics: Metrics,
}

impl Claims {
    /// Loads the record. Moves an invalid record aside and passes a reason and message to `report`. Blocks.
    pub(crate) fn open(kubelet_dir: &Path, metrics: Metrics, report: impl Fn(&str, String)) -> Self {
        let record = ForeignFile::of_node(kubelet_dir.join(RECORD));
        let (ledger, lost) = load(&record, report);
        metrics.in_use(&ledger);
        Self {
            ledger: Mutex::new(ledger),
            busy: Mutex::default(),
            record,
            lost,
            unsaved: Mutex::default(),
            writing: Arc::default(),
            metrics,
        }
    }

    /// Returns the UIDs of pods that still hold claims.
    pub(crate) fn pods(&self) -> BTreeSet<String> {
        let mut pods = lock(&self.ledger).pods();
        pods.extend(lock(&self.unsaved).pods());
        pods
    }

    /// Returns true while the pod holds claims, or the record still says so.
    pub(crate) fn has(&self, uid: &str) -> bool {
        !lock(&self.ledger).of_pod(uid).is_empty() || lock(&self.unsaved).has(uid)
    }

    /// Changes the ledger.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut Ledger) -> T) -> T {
        let mut ledger = lock(&self.ledger);
        let changed = change(&mut ledger);
        self.metrics.in_use(&ledger);
        changed
    }

    /// Locks these claims. All callers use the same order, so no two wait for each other.
    pub(crate) async fn hold(&self, keys: &BTreeSet<ClaimKey>) -> Vec<OwnedMutexGuard<()>> {
        let all: Vec<_> = {
            let mut busy = lock(&self.busy);
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
    pub(crate) async fn save(&self) -> Result<(), Error> {
        let turn = Arc::clone(&self.writing).lock_owned().await;
        let (ledger, unsaved) = {
            let ledger = lock(&self.ledger);
            (ledger.clone(), lock(&self.unsaved).clone())
        };
        let record = self.record.clone();
        // The lock is held until the write ends, even if the caller no longer waits.
        let write = move || {
            let _turn = turn;
            record.replace(&checkpoint::write(&ledger)?)?;
            Ok(record.settle()?)
        };
        blocking("writing the record of resource claims", write).await.inspect(|()| {
            lock(&self.unsaved).saved(&unsaved);
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
