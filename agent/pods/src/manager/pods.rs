//! The pods with a worker, and their published state: the pod table, the first processes, the pods that may
//! hold devices, records and gauges.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use beelet_base::process::FirstProcess;
use beelet_devices::Active;
use beelet_model::{
    desired::Desired,
    processes::{self, Process, Processes},
    request::RuntimePod,
    table::{PodEntry, PodName, PodTable},
};
use beelet_policy::resources::cgroups as values;
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use tokio::sync::watch;

use super::{
    keeping::update_record,
    managed::{Managed, hash_of},
    resuming::remember,
    status_now::{complete_status, status_now},
    totals::Totals,
};
use crate::{deps::Deps, records::Records};

/// The pods with a worker.
#[derive(Debug)]
pub(super) struct Pods {
    pub(super) deps: Deps,
    pub(super) records: Records,
    pub(super) runtime_name: String,
    /// By UID.
    pub(super) by_uid: BTreeMap<String, Managed>,
    /// The table for publication at the end of the turn.
    pub(super) table: Arc<PodTable>,
    pub(super) totals: Totals,
    pub(super) due: Due,
    pub(super) outputs: Outputs,
}

/// Channels to the readers.
#[derive(Debug)]
pub(super) struct Outputs {
    /// The pod table.
    pub(super) table: watch::Sender<Arc<PodTable>>,
    /// First processes of containers.
    pub(super) processes: watch::Sender<processes::Shared>,
    /// Pods that may hold devices.
    pub(super) active: watch::Sender<Active>,
}

/// Work that is due once at the end of a turn.
#[derive(Debug, Default)]
pub(super) struct Due {
    /// The table has changed.
    pub(super) table: bool,
    /// The set of first processes may have changed.
    pub(super) processes: bool,
    /// A removed pod may have blocked another pod of the same name.
    pub(super) reconcile: bool,
    /// The set of pods that may hold devices may have changed.
    pub(super) active: bool,
    /// Pending resizes may have room now.
    pub(super) resizes: bool,
}

impl Pods {
    /// Computes a pod's status, and publishes it if it changed.
    pub(super) fn publish(&mut self, uid: &str) {
        if !self.is_shadowed(uid) {
            self.publish_status(uid);
        }
        self.record_share(uid);
    }

    /// Updates the totals with a pod that may have changed or may be removed.
    pub(super) fn record_share(&mut self, uid: &str) {
        let share = self.by_uid.get(uid).map(Managed::share);
        self.due.active |= self.totals.set(uid, share);
    }

    fn publish_status(&mut self, uid: &str) {
        let Some(managed) = self.by_uid.get_mut(uid) else { return };
        let mut status = status_now(managed, &self.deps, &self.runtime_name);
        if managed.seen.is_some() {
            self.deps.devices.plugins.view().annotate(uid, &mut status);
            self.deps.devices.claims.annotate(&managed.pod, &mut status);
            remember(&managed.control, &status);
        }
        complete_status(managed, &mut status);
        self.deps.reports.metrics.startup.record(uid, &managed.pod, &status, Timestamp::now());
        managed.record.status = Some(Arc::new(status.clone()));
        managed.record_start();
        if managed.is_over() && managed.record.failure.is_none() {
            // The worker must not start the pod again after the runtime has removed its records.
            managed.control.send_if_modified(|c| !std::mem::replace(&mut c.ended, true));
        }
        if let Some(ended) = managed.gone() {
            self.deps.released(uid, ended);
        }
        update_record(managed);
        let entry = PodEntry {
            pod: core::Pod { status: Some(status), ..(*managed.pod).clone() },
            readiness_edge: managed.record.edge.clone(),
            netns: managed.record.netns.clone(),
            ending: managed.terminating() || managed.record.failure.is_some(),
            stopped: managed.has_stopped(),
            cleared: managed.is_cleared(),
            abandoned: managed.record.abandoned,
            successor: managed.successor.as_ref().map(|successor| Arc::clone(&successor.entry)),
            refusal: managed.record.failure.as_ref().and_then(|failure| failure.refusal),
        };
        if self.table.pods.get(&managed.name).is_none_or(|known| **known != entry) {
            Arc::make_mut(&mut self.table).pods.insert(managed.name.clone(), Arc::new(entry));
            self.due.table = true;
        }
        self.records.set(uid, managed.record.clone());
    }

    /// Publishes the rejected manifests.
    pub(super) fn publish_rejected(&mut self, desired: &Desired) {
        if *self.table.rejected != desired.rejected {
            Arc::make_mut(&mut self.table).rejected = Arc::new(desired.rejected.clone());
            self.due.table = true;
        }
        let rejected = i64::try_from(desired.rejected.len()).unwrap_or(i64::MAX);
        self.deps.reports.metrics.rejected_manifests.set(rejected);
    }

    /// Publishes the changes of this turn.
    pub(super) fn publish_changes(&mut self) {
        if std::mem::take(&mut self.due.processes) {
            self.publish_processes();
        }
        if std::mem::take(&mut self.due.table) {
            self.outputs.table.send_replace(Arc::clone(&self.table));
            self.deps.reports.metrics.show(&self.table);
            self.deps.reports.metrics.count(self.totals.working());
        }
        debug_assert_eq!(self.totals, self.whole(), "a pod's share was not updated");
    }

    /// Returns the totals, computed from all pods.
    fn whole(&self) -> Totals {
        let mut totals = Totals::default();
        for (uid, managed) in &self.by_uid {
            totals.set(uid, Some(managed.share()));
        }
        totals
    }

    /// Returns true if a pod is terminating while another pod has its name: readers see the other pod.
    fn is_shadowed(&self, uid: &str) -> bool {
        let Some(managed) = self.by_uid.get(uid).filter(|m| m.terminating()) else { return false };
        self.by_uid.iter().any(|(other, m)| other != uid && m.name == managed.name && !m.terminating())
    }

    /// Removes a pod from the table.
    pub(super) fn unpublish(&mut self, name: &PodName, uid: &str) {
        // Another pod may have the name by now.
        let is_its = |entry: &Arc<PodEntry>| entry.pod.metadata.uid.as_deref() == Some(uid);
        if self.table.pods.get(name).is_some_and(is_its) {
            Arc::make_mut(&mut self.table).pods.remove(name);
            self.due.table = true;
        }
    }

    /// Returns the UID of the pod for a manifest with this UID. A pod that was resized in place keeps its
    /// original UID.
    pub(super) fn known_as(&self, uid: &str) -> String {
        let of_manifest = |managed: &Managed| hash_of(&managed.pod).as_deref() == Some(uid);
        let resized = || self.by_uid.iter().find(|(_, managed)| of_manifest(managed)).map(|(known, _)| known);
        let resized = if self.by_uid.contains_key(uid) { None } else { resized() };
        resized.cloned().unwrap_or_else(|| uid.to_owned())
    }

    /// Publishes the first processes of containers, if they changed.
    fn publish_processes(&self) {
        let config = &self.deps.node.cgroup_config;
        let known = self.outputs.processes.borrow().clone();
        let mut now = Processes::new();
        for (uid, managed) in &self.by_uid {
            let Some(seen) = &managed.seen else { continue };
            for (id, FirstProcess { pid, .. }) in &seen.processes {
                // A known process keeps its entry, which saves computing its cgroup again.
                if let Some(same) = known.get(pid).filter(|process| process.id == *id) {
                    now.insert(*pid, Arc::clone(same));
                    continue;
                }
                let sandbox = seen.sandbox.as_ref().is_some_and(|sandbox| sandbox.id == *id);
                let of_pod = if sandbox { None } else { values::pod_cgroup(&managed.pod, config).ok() };
                let cgroup = of_pod.map(|pod| format!("{}/{id}", pod.path)).unwrap_or_default();
                let process = Process { uid: uid.clone(), id: id.clone(), sandbox, cgroup };
                now.insert(*pid, Arc::new(process));
            }
        }
        if *known != now {
            self.outputs.processes.send_replace(Arc::new(now));
        }
    }

    /// Publishes the pods that may hold devices: every pod of which a container may run, and the pods in the
    /// runtime without a worker. Publishes None while the runtime's pods or the desired pods are unknown.
    pub(super) fn publish_active(&mut self, in_runtime: Option<&BTreeMap<String, RuntimePod>>) {
        if !std::mem::take(&mut self.due.active) {
            return;
        }
        let active = in_runtime.map(|in_runtime| {
            let left_alone = in_runtime.keys().filter(|uid| !self.by_uid.contains_key(*uid));
            self.totals.active().iter().chain(left_alone).cloned().collect::<BTreeSet<String>>()
        });
        self.outputs.active.send_if_modified(|published| {
            if published.as_deref() == active.as_ref() {
                return false;
            }
            *published = active.map(Arc::new);
            true
        });
    }

    /// Returns the static pod with this UID.
    pub(super) fn static_pod(&mut self, uid: &str) -> Option<&mut Managed> {
        self.by_uid.get_mut(uid).filter(|managed| !managed.origin().is_api())
    }
}
