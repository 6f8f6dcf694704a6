//! A pod with a worker, as the manager knows it.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use beelet_model::{
    desired::Desired, ended::Ended, failure::PodFailure, labels::ANNOTATION_HASH, origin::Origin,
    status::has_ended, table::PodName,
};
use beelet_policy::pod;
use beelet_spec::resize::ResizeFacts;
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use tokio::{sync::watch, task::JoinHandle, time::Instant};

use super::{
    deletion::{Deletion, Successor},
    lifetime::Lifetime,
    totals::Share,
};
use crate::{
    metrics::{Counted, Lifecycle},
    records::PodRecord,
    runtime_view::Observation,
    status::Waiting,
    worker::Control,
};

/// A pod with a worker.
#[derive(Debug)]
pub(super) struct Managed {
    pub(super) name: PodName,
    pub(super) pod: Arc<core::Pod>,
    pub(super) control: watch::Sender<Control>,
    pub(super) task: JoinHandle<()>,
    pub(super) seen: Option<Arc<Observation>>,
    pub(super) waiting: BTreeMap<String, Waiting>,
    /// Record that the next instance of the agent will find, with the pod's status.
    pub(super) record: PodRecord,
    /// The pod that the record was made of.
    pub(super) record_of: Option<Arc<core::Pod>>,
    /// Events of OOM kills, by container.
    pub(super) oom_events: BTreeMap<String, OomEvent>,
    /// Time since when the pod has been active.
    pub(super) lifetime: Option<Lifetime>,
    /// The pod may run again once its failure is cleared.
    pub(super) retry: bool,
    /// Deletion, if the API server wants the pod deleted: its object is there until nothing is left of the
    /// pod.
    pub(super) deletion: Option<Deletion>,
    /// The pod as the API server last had it.
    pub(super) assigned: Option<Arc<core::Pod>>,
    /// State of a change of its amounts, and the change that the pod waits for.
    pub(super) resize: ResizeFacts,
    pub(super) wanted: Option<WantedAmounts>,
    /// Number of times that its manifest had been put back when the pod began.
    pub(super) manifest_restores: u64,
    /// Grace period that a person has asked for, once the pod is terminated.
    pub(super) asked_grace: Option<Duration>,
    /// The pod of its name that waits until this one, which was deleted by force, is gone.
    pub(super) successor: Option<Successor>,
}

/// The last event of a container's OOM kills.
#[derive(Debug)]
pub(super) struct OomEvent {
    pub(super) recorded: Instant,
    /// Time of the last kill.
    pub(super) last: Instant,
    /// Number of kills since the event.
    pub(super) unrecorded: u32,
}

/// Other amounts that are wanted of a pod.
#[derive(Debug)]
pub(super) struct WantedAmounts {
    /// The pod with them.
    pub(super) pod: Arc<core::Pod>,
    /// Time since when they are wanted.
    pub(super) since: Instant,
}

impl Managed {
    /// Returns true if the pod is deleted or dropped.
    pub(super) fn terminating(&self) -> bool {
        self.deletion.is_some() || self.is_dropped()
    }

    /// Returns true if the pod may have waited for an object that has come.
    pub(super) fn is_pending(&self) -> bool {
        self.record.status.as_ref().is_none_or(|status| status.phase.as_deref() == Some("Pending"))
    }

    /// Returns true if no source has the pod any more: once nothing is left of it, it is forgotten.
    pub(super) fn is_dropped(&self) -> bool {
        self.control.borrow().terminate.is_some()
    }

    /// The pod's share of the totals of all pods.
    pub(super) fn share(&self) -> Share {
        Share { counted: self.counted(), is_active: self.ended().is_none(), deadline: self.deadline() }
    }

    /// The pod's place in the gauges of pods.
    fn counted(&self) -> Counted {
        let lifecycle = if self.gone().is_some() {
            Lifecycle::Terminated
        } else if self.terminating() || self.record.failure.is_some() {
            Lifecycle::Terminating
        } else {
            Lifecycle::Sync
        };
        Counted { is_static: !self.origin().is_api(), is_desired: !self.is_dropped(), lifecycle }
    }

    /// The source of the pod.
    pub(super) fn origin(&self) -> Origin {
        Origin::of(&self.pod)
    }

    /// Returns true if other amounts of cpu and memory don't make it another pod. A pod that was ended for
    /// good is another one.
    pub(super) fn may_resize(&self) -> bool {
        !self.terminating() && self.record.failure.is_none()
    }

    /// Returns true if the pod was ended, and none of its containers runs any more.
    pub(super) fn has_stopped(&self) -> bool {
        self.deletion.is_some_and(|deletion| deletion.stopped)
            || self.record.failure.as_ref().is_some_and(PodFailure::has_stopped)
    }

    /// Returns true if the pod was ended, and only its logs are left.
    pub(super) fn is_cleared(&self) -> bool {
        self.deletion.is_some_and(|deletion| deletion.cleared)
            || self.record.failure.as_ref().is_some_and(|failure| failure.cleared)
    }

    /// Returns true if the phase is final: no container is started again.
    pub(super) fn is_over(&self) -> bool {
        has_ended(self.record.status.as_deref())
    }

    /// The proof that none of its containers runs any more.
    pub(super) fn ended(&self) -> Option<Ended> {
        Ended::of(self.record.status.as_deref(), self.has_stopped() || self.is_cleared())
    }

    /// The proof that its room is free: a pod that was ended needs its room until it has given everything
    /// back.
    pub(super) fn gone(&self) -> Option<Ended> {
        let is_ending = self.terminating() || self.record.failure.is_some();
        self.ended().filter(|_| self.is_cleared() || !is_ending)
    }

    /// Records that no container of a pod runs any more that was ended for good, or deleted.
    pub(super) fn record_stopped(&mut self) {
        self.record.failure.iter_mut().for_each(|failure| failure.stopped = true);
        self.deletion.iter_mut().for_each(|deletion| deletion.stopped = true);
    }

    /// The time at which the pod must have ended, if it has a deadline and is active.
    fn deadline(&self) -> Option<Instant> {
        if self.record.failure.is_some() || self.terminating() || self.is_over() {
            return None;
        }
        self.lifetime.as_ref()?.end(pod::active_limit(self.pod.spec.as_ref()?)?)
    }

    /// Follows the time since when the pod has been active, by its status.
    pub(super) fn record_start(&mut self) {
        let start =
            self.record.status.as_ref().and_then(|status| status.start_time.as_ref()).map(|time| time.0);
        if self.lifetime.as_ref().map(|lifetime| lifetime.start) != start {
            self.lifetime = start.map(|start| Lifetime::new(start, Timestamp::now()));
        }
    }
}

/// Number of times that a pod's manifest was put back so far.
pub(super) fn manifest_restores(desired: &Desired, uid: &str) -> u64 {
    desired.put_back.get(uid).copied().unwrap_or_default()
}

/// The manifest's file of a pod.
pub(super) fn manifest_of(pod: &core::Pod) -> Option<PathBuf> {
    pod.metadata.annotations.as_ref()?.get(beelet_model::labels::MANIFEST).map(PathBuf::from)
}

/// The digest of a pod's manifest.
pub(super) fn hash_of(pod: &core::Pod) -> Option<String> {
    pod.metadata.annotations.as_ref()?.get(ANNOTATION_HASH).cloned()
}
