//! When the volumes of pods are looked at: those of all pods once per period, and as soon as a storage plugin
//! comes or goes; those of a pod that is new at once.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use beelet_base::clock::After as _;
use beelet_csi::Csi;
use beelet_model::{
    ended::Ended,
    table::{PodChanges, PodEntry, PodTable, Pods},
};
use beelet_policy::volumes::csi::Drivers;
use k8s_openapi::api::core::v1::{Pod, Volume};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use crate::in_table::has_volumes;

/// Rounds over the pods whose volumes are mounted.
#[derive(Debug)]
pub(crate) struct Rounds {
    table: watch::Receiver<Arc<PodTable>>,
    plugins: watch::Receiver<Arc<Drivers>>,
    period: Duration,
    is_wanted: fn(&Pod) -> bool,
    /// The UIDs of the pods that are here and were looked at.
    seen: BTreeSet<String>,
    /// The pods among which nobody is new.
    known: Pods,
    /// When all pods are due.
    due: Instant,
    /// The last round was one of all pods.
    was_whole: bool,
}

impl Rounds {
    /// Rounds over the pods of `table` that are wanted, the first at once, then one per `period`.
    pub(crate) fn new(
        table: watch::Receiver<Arc<PodTable>>,
        plugins: &Csi,
        period: Duration,
        is_wanted: fn(&Pod) -> bool,
    ) -> Self {
        let mut plugins = plugins.drivers();
        plugins.mark_changed();
        let (seen, known, due) = (BTreeSet::new(), Pods::new(), Instant::now());
        Self { table, plugins, period, is_wanted, seen, known, due, was_whole: false }
    }

    /// Waits until pods are due. May be dropped at any time.
    pub(crate) async fn next(&mut self) -> Vec<Arc<Pod>> {
        if self.was_whole {
            self.due = Instant::now().after(self.period);
        }
        self.was_whole = tokio::select! {
            biased;
            Ok(()) = self.plugins.changed() => true,
            () = sleep_until(self.due) => true,
            () = new_one(&mut self.table, &mut self.known, self.is_wanted, &self.seen) => false,
        };
        let is_wanted = self.is_wanted;
        let table = self.table.borrow_and_update();
        let is_due = |pod: &&Pod| self.was_whole || !self.seen.contains(uid(pod));
        let pods = of(&table, is_wanted).filter(is_due).map(|pod| Arc::new(pod.clone())).collect();
        self.seen = of(&table, is_wanted).map(|pod| uid(pod).to_owned()).collect();
        self.known = table.pods.clone();
        pods
    }

    /// Returns true if the pod of this UID was here when the last round began.
    pub(crate) fn knows(&self, uid: &str) -> bool {
        self.seen.contains(uid)
    }
}

/// Waits for a pod that was not looked at. Only pods that have changed are asked: of the others `known` says
/// that there is none.
async fn new_one(
    table: &mut watch::Receiver<Arc<PodTable>>,
    known: &mut Pods,
    is_wanted: fn(&Pod) -> bool,
    seen: &BTreeSet<String>,
) {
    loop {
        let now = table.borrow_and_update().pods.clone();
        let mut changed = PodChanges::between(known, &now).changed.into_iter();
        if changed.any(|(_, entry)| is_due(entry, is_wanted) && !seen.contains(uid(&entry.pod))) {
            return;
        }
        *known = now;
        if table.changed().await.is_err() {
            // The table goes with the agent.
            return std::future::pending().await;
        }
    }
}

/// Returns true if a pod has its volumes, and such as are looked at.
fn is_due(entry: &PodEntry, is_wanted: fn(&Pod) -> bool) -> bool {
    is_wanted(&entry.pod) && has_volumes(entry)
}

fn of(table: &PodTable, is_wanted: fn(&Pod) -> bool) -> impl Iterator<Item = &Pod> {
    table.pods.values().filter(move |entry| is_due(entry, is_wanted)).map(|entry| &entry.pod)
}

/// Returns true if a pod runs, and has such volumes.
pub(crate) fn runs_with(pod: &Pod, is_wanted: impl Fn(&Volume) -> bool) -> bool {
    let runs = Ended::of(pod.status.as_ref(), false).is_none();
    pod.metadata.deletion_timestamp.is_none() && runs && has(pod, is_wanted)
}

/// Returns true if a pod has such volumes.
pub(crate) fn has(pod: &Pod, is_wanted: impl Fn(&Volume) -> bool) -> bool {
    pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()).any(is_wanted)
}

pub(crate) fn uid(pod: &Pod) -> &str {
    pod.metadata.uid.as_deref().unwrap_or_default()
}
