//! Published statuses: true, and never backwards.

use super::View;
use crate::ledger::Instance;
use crate::trace::{State, Status};

pub(super) fn check(view: &View<'_>, status: &Status) {
    let Some(pod) = view.ledger.pods.get(&status.uid).cloned() else { return };
    let name = &pod.spec.name;
    let mut broken = Vec::new();
    if let Some(before) = &pod.status {
        // A pod that ended by itself never comes back (kubelet: `updateStatusInternal` refuses it).
        let back = before.is_over() && before.reason.is_none() && status.phase != before.phase;
        // A new sandbox runs the init containers again (kubelet: `getPhase`).
        let sandboxes = view.ledger.sandboxes.values().filter(|sandbox| sandbox.uid == status.uid).count();
        let unstarted = before.phase == "Running" && status.phase == "Pending" && sandboxes < 2;
        // No client reads the status of a pod whose object is gone, and an agent that starts then has none.
        if pod.unwanted.is_none() && (back || unstarted) {
            broken.push(("statuses-go-forward", format!("{} after {}", status.phase, before.phase)));
        }
        for container in &status.containers {
            let earlier = before.containers.iter().find(|c| c.name == container.name);
            if let Some(earlier) = earlier.filter(|earlier| earlier.restarts > container.restarts) {
                let detail =
                    format!("{}: {} restarts after {}", container.name, container.restarts, earlier.restarts);
                broken.push(("restarts-are-counted", detail));
            }
        }
    }
    // The kubelet's getPhase counts running sidecars as running.
    if status.is_over() && status.reason.is_none() {
        let running: Vec<_> =
            view.ledger.of_pod(&status.uid).filter(|i| i.runs()).map(|i| i.name.clone()).collect();
        if !running.is_empty() {
            broken.push(("phases-are-true", format!("{} while {} runs", status.phase, running.join(", "))));
        }
    }
    for container in &status.containers {
        let Some(id) = &container.id else { continue };
        let runs = view.ledger.instance(id).is_some_and(Instance::runs);
        if runs && matches!(container.state, State::Terminated(_)) {
            broken.push(("statuses-are-true", format!("{} runs, but is Terminated", container.name)));
        }
        let starts = view.ledger.started(&status.uid, &container.name).count();
        if usize::try_from(container.restarts).unwrap_or(usize::MAX) > starts.max(1) {
            broken.push((
                "restarts-are-counted",
                format!("{}: {} restarts, {starts} starts", container.name, container.restarts),
            ));
        }
    }
    for (rule, detail) in broken {
        view.breaks(rule, format!("{name}: {detail}"));
    }
}
