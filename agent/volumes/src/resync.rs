//! The schedule of periodic checks of pods' volumes: all pods once per period and whenever a storage plugin
//! registers or disappears; a new pod at once.

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

/// Periodic rounds over the pods whose volumes are mounted.
#[derive(Debug)]
pub(crate) struct Resync {
    table: watch::Receiver<Arc<PodTable>>,
    plugins: watch::Receiver<Arc<Drivers>>,
    period: Duration,
    is_wanted: fn(&Pod) -> bool,
    /// UIDs of the pods that exist and were checked.
    seen: BTreeSet<String>,
    /// Pods that are known not to be new.
    known: Pods,
    /// Time when all pods are due.
    due: Instant,
    /// The last round covered all pods.
    was_whole: bool,
}

impl Resync {
    /// Makes rounds over the wanted pods of `table`: the first at once, then one per `period`.
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

    /// Waits until pods are due. Cancel safe.
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

    /// Returns true if the pod with this UID existed when the last round began.
    pub(crate) fn knows(&self, uid: &str) -> bool {
        self.seen.contains(uid)
    }
}

/// Waits for a pod that was not checked yet. Only pods that differ from `known` can be new.
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
            // The table ends with the agent.
            return std::future::pending().await;
        }
    }
}

/// Returns true if a pod has volumes that are checked, and its volumes are set up.
fn is_due(entry: &PodEntry, is_wanted: fn(&Pod) -> bool) -> bool {
    is_wanted(&entry.pod) && has_volumes(entry)
}

fn of(table: &PodTable, is_wanted: fn(&Pod) -> bool) -> impl Iterator<Item = &Pod> {
    table.pods.values().filter(move |entry| is_due(entry, is_wanted)).map(|entry| &entry.pod)
}

/// Returns true if the volumes of a pod are set up: from before its sandbox is made until after its removal.
#[must_use]
pub fn has_volumes(entry: &PodEntry) -> bool {
    let conditions = entry.pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let mut sandbox = conditions.filter(|condition| condition.type_ == "PodReadyToStartContainers");
    !entry.cleared && sandbox.any(|condition| condition.status == "True")
}

/// Returns true if a pod runs with a volume for which `is_wanted` is true.
pub(crate) fn runs_with(pod: &Pod, is_wanted: impl Fn(&Volume) -> bool) -> bool {
    let runs = Ended::of(pod.status.as_ref(), false).is_none();
    pod.metadata.deletion_timestamp.is_none() && runs && has(pod, is_wanted)
}

/// Returns true if a pod has a volume for which `is_wanted` is true.
pub(crate) fn has(pod: &Pod, is_wanted: impl Fn(&Volume) -> bool) -> bool {
    pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()).any(is_wanted)
}

pub(crate) fn uid(pod: &Pod) -> &str {
    pod.metadata.uid.as_deref().unwrap_or_default()
}
