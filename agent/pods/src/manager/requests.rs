//! Requests of other parts: relists, results of probes, and commands of users and policies.

use std::{collections::BTreeMap, sync::Arc};

use beelet_base::clock::monotonic_ns;
use beelet_model::{
    failure::PodFailure,
    request::{ProbeUpdate, Request, RuntimePods},
    table::ReadinessEdge,
};
use beelet_policy::{
    pod::KillReason,
    probe::{ProbeKind, ProbeResult},
};
use tracing::debug;

use super::{Manager, PER_TURN, debugging, deleting, exits, failing, pods::Pods, resizing};
use crate::runtime_view::Observation;

impl Manager {
    /// Handles this request, and further queued requests.
    pub(super) fn on_requests(&mut self, request: Request, stopping: bool) {
        self.on_request(request, stopping);
        for _ in 1..PER_TURN {
            let Ok(request) = self.requests.try_recv() else { return };
            self.on_request(request, stopping);
        }
    }

    fn on_request(&mut self, request: Request, stopping: bool) {
        let pods = &mut self.pods;
        match request {
            Request::Runtime(seen) => self.on_relist(seen, stopping),
            Request::Probe(update) => on_probe(pods, &update),
            Request::Fail { uid, reason, message, grace } => {
                failing::fail(pods, &uid, &PodFailure::new(reason, message, grace));
            }
            Request::Refuse { uid, reason, message, refusal } => {
                failing::fail(pods, &uid, &PodFailure::refused(reason, message, refusal));
            }
            Request::Retry { uid } => failing::retry(pods, &uid),
            Request::Delete { uid, grace, force } => deleting::delete(pods, &uid, grace, force),
            Request::Terminate { uid } => deleting::terminate_on_request(pods, &uid),
            Request::Restart { uid, containers } => failing::restart(pods, &uid, &containers),
            Request::Debug { uid, container } => debugging::debug(pods, &uid, *container),
            Request::Exited { uid, status } => exits::on_exited(pods, &uid, *status),
            Request::OomKilled(update) => exits::on_oom_killed(pods, update),
            Request::Enacted { uid, amounts } => resizing::on_enacted(pods, &uid, amounts),
        }
    }

    /// Applies a relist: wakes the workers of changed pods, and reconciles if the set of pods has changed.
    fn on_relist(&mut self, mut seen: RuntimePods, stopping: bool) {
        for (uid, managed) in &self.pods.by_uid {
            let had_any = managed.seen.as_ref().is_some_and(|s| !s.pod.sandboxes.is_empty());
            let cleared = managed.is_cleared();
            let lost = had_any && !cleared && !seen.pods.contains_key(uid);
            if lost || seen.recovered || seen.changed.contains(uid) {
                let listed = seen.listed.remove(uid).map(|l| (seen.asked_at, Arc::new(l)));
                managed.control.send_modify(|c| {
                    c.changes += 1;
                    c.listed = listed;
                });
            }
        }
        let is_first = self.runtime.is_none();
        // Only the first list is safe for a new worker: in a later one, the pod may be an earlier instance.
        self.listed = if is_first { seen.listed } else { BTreeMap::new() };
        self.present = seen.pods.keys().cloned().collect();
        self.gone.retain(|_, since| *since >= seen.asked_at);
        seen.pods.retain(|uid, _| !self.gone.contains_key(uid));
        let earlier = if is_first { self.pods.records.origins() } else { BTreeMap::new() };
        let in_runtime: BTreeMap<_, _> = earlier.into_iter().chain(seen.pods).collect();
        if self.runtime.as_deref() != Some(&in_runtime) {
            self.runtime = Some(Arc::new(in_runtime));
            self.pods.due.active = true;
            if !stopping {
                self.reconcile();
            }
        }
    }
}

fn on_probe(pods: &mut Pods, update: &ProbeUpdate) {
    let Some(managed) = pods.by_uid.get_mut(&update.uid) else { return };
    let facts = managed.record.probes.entry(update.container_id.clone()).or_default();
    let success = update.result == ProbeResult::Success;
    match update.kind {
        ProbeKind::Readiness => facts.ready = Some(success),
        ProbeKind::Startup => facts.started = Some(success),
        ProbeKind::Liveness => {}
    }
    // An ended container counts by its exit code.
    let has_exited = |seen: &Arc<Observation>| {
        seen.containers.contains_key(&update.container_id) && !seen.is_running(&update.container_id)
    };
    if update.restart && managed.seen.as_ref().is_some_and(has_exited) {
        debug!(pod = %managed.name, container = update.container, "ignoring failed probe of an ended container");
    } else if update.restart {
        let reason =
            if update.kind == ProbeKind::Startup { KillReason::Startup } else { KillReason::Liveness };
        managed.control.send_modify(|c| {
            c.verdicts.condemned.insert(update.container_id.clone(), reason);
        });
    } else if update.kind == ProbeKind::Startup && success {
        managed.control.send_modify(|c| {
            c.verdicts.started.insert(update.container_id.clone());
        });
    }
    if let (ProbeKind::Readiness, Some(kernel_ns)) = (update.kind, update.kernel_ns) {
        managed.record.edge = Some(ReadinessEdge {
            container: update.container.clone(),
            ready: success,
            kernel_ns,
            published_ns: monotonic_ns(),
        });
    }
    pods.publish(&update.uid);
}
