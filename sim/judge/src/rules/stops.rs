//! Stops of containers: each has a cause, and gives the whole grace period.

use std::time::Duration;

use super::{ROUNDING, View, describe};
use crate::ledger::{Instance, PodState};
use crate::trace::{ProbeKind, Role};

pub(super) fn check(view: &View<'_>, id: &str, grace: i64) {
    let Some(instance) = view.ledger.instance(id).filter(|instance| instance.runs()).cloned() else {
        return;
    };
    let Some(pod) = view.ledger.pods.get(&instance.uid).cloned() else { return };
    let Some((since, seconds)) = reason_to_stop(view, &pod, &instance) else {
        let detail = format!("{} {} with {grace} s", pod.spec.name, describe(&instance));
        return view.breaks("stops-have-a-cause", detail);
    };
    // The longest grace period cannot be longer than a year (the agent's own bound); a first stop gets the
    // rest of the grace period (kubelet: `killContainer`).
    let passed = view.now.saturating_sub(since).as_secs();
    let due = seconds.min(366 * 24 * 3600).saturating_sub(passed).saturating_sub(ROUNDING);
    if instance.stop.is_none() && u64::try_from(grace).unwrap_or(0) < due {
        let detail = format!("{} {}: {grace} s, not {due}", pod.spec.name, describe(&instance));
        view.breaks("grace-is-given", detail);
    }
}

/// Returns the time since which a container has a reason to be stopped, and its grace period in seconds.
fn reason_to_stop(view: &View<'_>, pod: &PodState, instance: &Instance) -> Option<(Duration, u64)> {
    if let Some(since) = pod.ends_since() {
        return Some((since, pod.deleting.map_or(pod.spec.grace, |(_, grace)| grace)));
    }
    // The deadline counts from the status's startTime, which follows the creation, by the wall clock; the API
    // has seconds (kubelet: `pastActiveDeadline`).
    let ahead = view.ledger.steps_forward(pod.created).saturating_add(1);
    let over = |limit: u64| pod.created + Duration::from_secs(limit.saturating_sub(ahead));
    if let Some(since) = pod.spec.deadline.map(over).filter(|since| view.now >= *since) {
        return Some((since, pod.spec.grace));
    }
    if let Some(since) = condemned_by(pod, instance) {
        return Some((since, pod.spec.grace));
    }
    let sandbox = view.ledger.sandboxes.get(&instance.sandbox)?;
    if let Some(stopped) = sandbox.stopped {
        return Some((stopped, 0));
    }
    // Sidecars end after the last of the pod's containers (KEP-753), or with a failed init container.
    let role = pod.container(&instance.name)?.role;
    (role == Role::Sidecar && super::end::has_ended(view, pod)).then_some((view.now, pod.spec.grace))
}

/// Returns the time since which a probe demands the container's end (kubelet: `prober.worker.doProbe`).
pub(super) fn condemned_by(pod: &PodState, instance: &Instance) -> Option<Duration> {
    let spec = pod.container(&instance.name)?;
    spec.probes.iter().find_map(|(kind, threshold)| {
        let (count, _, latest) = instance.failures.get(kind)?;
        (*kind != ProbeKind::Readiness && count >= threshold).then_some(*latest)
    })
}

/// A process ends by force only after its grace period (kubelet: `killContainer` before
/// `StopPodSandbox`).
pub(super) fn grace_is_given(view: &View<'_>, id: &str) {
    let Some(instance) = view.ledger.instance(id).filter(|instance| instance.runs()).cloned() else {
        return;
    };
    let Some(pod) = view.ledger.pods.get(&instance.uid) else { return };
    let since = instance.stop.map(|(at, grace)| at + Duration::from_secs(u64::try_from(grace).unwrap_or(0)));
    if since.is_none_or(|due| view.now + Duration::from_secs(ROUNDING) < due) {
        let detail = format!("{} {}: killed before its grace period", pod.spec.name, describe(&instance));
        view.breaks("grace-is-given", detail);
    }
}
