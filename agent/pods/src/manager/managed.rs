//! The manager's state of a pod with a worker.

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
    /// Record for the next agent, with the pod's status.
    pub(super) record: PodRecord,
    /// The version of the pod that the record has.
    pub(super) record_of: Option<Arc<core::Pod>>,
    /// Events of OOM kills, by container.
    pub(super) oom_events: BTreeMap<String, OomEvent>,
    /// Active time of the pod.
    pub(super) lifetime: Option<Lifetime>,
    /// The pod runs again once its failure is cleared.
    pub(super) retry: bool,
    /// Deletion that the API server requests. The pod's object exists until the pod is removed.
    pub(super) deletion: Option<Deletion>,
    /// The API server's last version of the pod.
    pub(super) assigned: Option<Arc<core::Pod>>,
    /// State of a resize of the pod.
    pub(super) resize: ResizeFacts,
    /// Time since which accepted amounts are being applied.
    pub(super) enacting: Option<Instant>,
    /// Resize that the pod waits for.
    pub(super) wanted: Option<WantedAmounts>,
    /// Number of restores of the pod's manifest before the pod's start.
    pub(super) manifest_restores: u64,
    /// Grace period that a user requested for the pod's termination.
    pub(super) asked_grace: Option<Duration>,
    /// The pod of the same name that waits for the removal of this force-deleted pod.
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

/// Requested resource amounts that differ from the pod's own.
#[derive(Debug)]
pub(super) struct WantedAmounts {
    /// The pod with the requested amounts.
    pub(super) pod: Arc<core::Pod>,
    /// Time of the request.
    pub(super) since: Instant,
}

impl Managed {
    /// Returns true if the pod is deleted or dropped.
    pub(super) fn terminating(&self) -> bool {
        self.deletion.is_some() || self.is_dropped()
    }

    /// Returns true if the pod may wait for an object: it has no status yet, or its phase is Pending.
    pub(super) fn is_pending(&self) -> bool {
        self.record.status.as_ref().is_none_or(|status| status.phase.as_deref() == Some("Pending"))
    }

    /// Returns true if the manager forgets the pod after its removal, because the pod is no longer in any
    /// source.
    pub(super) fn is_dropped(&self) -> bool {
        self.control.borrow().terminate.is_some()
    }

    /// Returns the pod's share of the totals of all pods.
    pub(super) fn share(&self) -> Share {
        Share { counted: self.counted(), is_active: self.ended().is_none(), deadline: self.deadline() }
    }

    /// Returns the pod's labels in the gauges of pods.
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

    /// Returns the source of the pod.
    pub(super) fn origin(&self) -> Origin {
        Origin::of(&self.pod)
    }

    /// Returns true if the pod's cpu and memory may change in place. A failed pod is replaced instead.
    pub(super) fn may_resize(&self) -> bool {
        !self.terminating() && self.record.failure.is_none()
    }

    /// Returns true if the pod failed or was deleted, and all of its containers have stopped.
    pub(super) fn has_stopped(&self) -> bool {
        self.deletion.is_some_and(|deletion| deletion.stopped)
            || self.record.failure.as_ref().is_some_and(PodFailure::has_stopped)
    }

    /// Returns true if the pod failed or was deleted, and is removed except for its logs.
    pub(super) fn is_cleared(&self) -> bool {
        self.deletion.is_some_and(|deletion| deletion.cleared)
            || self.record.failure.as_ref().is_some_and(|failure| failure.cleared)
    }

    /// Returns true if the phase is final: no container of the pod starts again.
    pub(super) fn is_over(&self) -> bool {
        has_ended(self.record.status.as_deref())
    }

    /// Returns the proof that none of the pod's containers runs, if that is so.
    pub(super) fn ended(&self) -> Option<Ended> {
        Ended::of(self.record.status.as_deref(), self.has_stopped() || self.is_cleared())
    }

    /// Returns the proof that the pod's resources are free, if they are. A failed or deleted pod holds its
    /// resources until it is cleared.
    pub(super) fn gone(&self) -> Option<Ended> {
        let is_ending = self.terminating() || self.record.failure.is_some();
        self.ended().filter(|_| self.is_cleared() || !is_ending)
    }

    /// Records that all containers of a failed or deleted pod have stopped.
    pub(super) fn record_stopped(&mut self) {
        self.record.failure.iter_mut().for_each(|failure| failure.stopped = true);
        self.deletion.iter_mut().for_each(|deletion| deletion.stopped = true);
    }

    /// Returns the deadline of the pod, if it has one and is active.
    fn deadline(&self) -> Option<Instant> {
        if self.record.failure.is_some() || self.terminating() || self.is_over() {
            return None;
        }
        self.lifetime.as_ref()?.end(pod::active_limit(self.pod.spec.as_ref()?)?)
    }

    /// Updates the pod's lifetime from the start time in its status.
    pub(super) fn record_start(&mut self) {
        let start =
            self.record.status.as_ref().and_then(|status| status.start_time.as_ref()).map(|time| time.0);
        if self.lifetime.as_ref().map(|lifetime| lifetime.start) != start {
            self.lifetime = start.map(|start| Lifetime::new(start, Timestamp::now()));
        }
    }
}

/// Returns the number of restores of a pod's manifest so far.
pub(super) fn manifest_restores(desired: &Desired, uid: &str) -> u64 {
    desired.put_back.get(uid).copied().unwrap_or_default()
}

/// Returns the path of a pod's manifest.
pub(super) fn manifest_of(pod: &core::Pod) -> Option<PathBuf> {
    pod.metadata.annotations.as_ref()?.get(beelet_model::labels::MANIFEST).map(PathBuf::from)
}

/// Returns the digest of a pod's manifest.
pub(super) fn hash_of(pod: &core::Pod) -> Option<String> {
    pod.metadata.annotations.as_ref()?.get(ANNOTATION_HASH).cloned()
}

/// Returns the hash that the agent derives from the manifest of an adopted static pod.
pub(super) fn manifest_hash_of(pod: &core::Pod) -> Option<String> {
    pod.metadata.annotations.as_ref()?.get(beelet_model::labels::MANIFEST_HASH).cloned()
}
