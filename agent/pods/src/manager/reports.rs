//! Reports of workers: the observed state of a pod, and the stages of its termination.

use std::sync::Arc;

use beelet_model::ended::Ended;
use beelet_policy::pod::ContainerState;
use tokio::time::Instant;

use super::{Manager, PER_TURN, exits, failing, managed::Managed, pods::Pods, resuming::next_counts};
use crate::worker::{Stage, WorkerReport};

impl Manager {
    /// Handles this report, and further queued reports.
    pub(super) fn on_reports(&mut self, report: WorkerReport) {
        self.on_report(report);
        for _ in 1..PER_TURN {
            let Ok(report) = self.reports_in.try_recv() else { return };
            self.on_report(report);
        }
    }

    fn on_report(&mut self, report: WorkerReport) {
        if report.stage == Stage::Gone {
            self.on_gone(&report.uid);
        } else {
            on_stage(&mut self.pods, report);
        }
    }

    /// Forgets a removed pod.
    fn on_gone(&mut self, uid: &str) {
        let Some(managed) = self.pods.by_uid.remove(uid) else { return };
        let on_request = managed.record.leaving.is_some_and(|leaving| leaving.on_request);
        let status = managed.record.status.as_deref().filter(|_| !on_request);
        let counts = Arc::new(next_counts(status));
        self.gone.insert(uid.to_owned(), Instant::now());
        self.pods.records.remove(uid);
        self.pods.deps.reports.metrics.startup.forget(uid);
        if let Some(ended) = Ended::of(None, true) {
            self.pods.deps.released(uid, ended);
        }
        if let Some(runtime) = &mut self.runtime {
            Arc::make_mut(runtime).remove(uid);
        }
        self.pods.record_share(uid);
        self.pods.unpublish(&managed.name, uid);
        let due = &mut self.pods.due;
        (due.active, due.processes, due.reconcile) = (true, true, true);
        // The same pod may start again in this turn.
        self.left.insert(uid.to_owned(), counts);
    }
}

/// Applies the report of a pod that is not removed yet.
fn on_stage(pods: &mut Pods, report: WorkerReport) {
    let Some(managed) = pods.by_uid.get_mut(&report.uid) else { return };
    match report.stage {
        Stage::Cleared => return failing::on_cleared(pods, &report.uid),
        Stage::Stopped => {
            managed.record_stopped();
            if report.seen.pod.sandboxes.is_empty() && report.seen.pod.containers.is_empty() {
                return pods.publish(&report.uid);
            }
        }
        Stage::Here | Stage::Gone => {}
    }
    forget_ended(managed, &report);
    exits::record_unseen_oom(managed, &report.seen, &pods.deps.reports.events);
    managed.record.netns = report.seen.sandbox.as_ref().and_then(|sandbox| sandbox.netns.clone());
    managed.record.processes.clone_from(&report.seen.processes);
    let before = managed.seen.replace(report.seen);
    // The first processes of all pods are published together.
    pods.due.processes |= before.is_none_or(|before| before.processes != managed.record.processes);
    managed.waiting = report.waiting;
    managed.record.hooked = report.hooked;
    let known = |id: &String| managed.seen.as_ref().is_some_and(|s| s.containers.contains_key(id));
    managed.record.oom.retain(|id, _| known(id));
    managed.oom_events.retain(|id, _| known(id));
    pods.publish(&report.uid);
}

/// Forgets facts about removed and ended containers: results of probes, and reasons for their stops.
fn forget_ended(managed: &mut Managed, report: &WorkerReport) {
    let exists = |id: &String| report.seen.containers.contains_key(id);
    managed.record.probes.retain(|id, _| exists(id));
    managed.control.send_if_modified(|c| {
        let running = |id: &String| {
            let of_id = report.seen.pod.containers.iter().find(|c| c.id == *id);
            of_id.is_some_and(|c| matches!(c.state, ContainerState::Running { .. }))
        };
        // The reason for a stop decides whether the container restarts.
        c.verdicts.condemned.retain(|id, reason| {
            let counts = reason.is_for_a_restart() && exists(id);
            running(id) || counts && (!reason.is_of_probe() || report.stopped.contains(id))
        });
        c.exited.retain(|id, _| running(id));
        c.verdicts.hurried.retain(exists);
        c.verdicts.started.retain(exists);
        c.verdicts.hooked.clone_from(&report.hooked);
        // The worker has used the list, or can query it again. Keeping the lists of a thousand pods costs
        // memory.
        c.listed = None;
        false // the reporting worker knows these changes
    });
}
