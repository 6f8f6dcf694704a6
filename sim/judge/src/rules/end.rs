//! Rules that come about: checked once the node had time to converge.

use super::{BACK_OFF_MAX, REACTION, View, describe, short};
use crate::ledger::{Instance, PodState};
use crate::trace::{Restart, Role, State, Status};

/// Nothing of a deleted pod is left (kubelet: `HandlePodCleanups`).
pub(super) fn ended_pods_leave_nothing(view: &View<'_>, pod: &PodState) {
    let uid = &pod.spec.uid;
    let mut rests: Vec<String> = view
        .ledger
        .of_pod(uid)
        .filter(|i| !i.removed)
        .map(|i| format!("container {}", describe(i)))
        .collect();
    let sandboxes =
        view.ledger.sandboxes.iter().filter(|(_, sandbox)| sandbox.uid == *uid && !sandbox.removed);
    rests.extend(sandboxes.map(|(id, _)| format!("sandbox {}", short(id))));
    rests.extend(view.ledger.left.iter().filter(|(left, _)| left == uid).map(|(_, place)| place.clone()));
    // The node deletes the object of a pod that it has ended (kubelet: `syncBatch` in status_manager.go).
    if pod.deleting.is_some() && pod.unwanted.is_none() {
        rests.push("its object".to_owned());
    }
    if !rests.is_empty() {
        view.breaks("ended-pods-leave-nothing", format!("{}: {}", pod.spec.name, rests.join(", ")));
    }
}

/// The API server has the newest published status of each pod, and a ready Node (kubelet: the status manager
/// tries again until each status is written).
pub(super) fn the_api_server_is_up_to_date(view: &View<'_>) {
    for (uid, stored) in &view.ledger.stored {
        let pod = view.ledger.pods.get(uid).filter(|pod| pod.ends_since().is_none());
        let Some((pod, newest)) = pod.and_then(|pod| Some((pod, pod.status.as_ref()?))) else { continue };
        if stored != newest && pod.published.is_none_or(|at| at + REACTION < view.now) {
            let detail = format!("{}: {} instead of {}", pod.spec.name, stored.phase, newest.phase);
            view.breaks("statuses-are-written", detail);
        }
    }
    if view.ledger.node_ready == Some(false) {
        view.breaks("the-node-is-ready", "the condition Ready is not true".to_owned());
    }
}

/// A wanted pod runs, or has ended by its policy, or waits for something that has a name.
pub(super) fn wanted_pods_run(view: &View<'_>, pod: &PodState) {
    let uid = &pod.spec.uid;
    let Some(status) = &pod.status else {
        return view.breaks("wanted-pods-run", format!("{}: no status", pod.spec.name));
    };
    if status.reason.is_some() {
        // Refused, evicted or past its deadline: the status names the reason.
        return;
    }
    if has_ended(view, pod) {
        let expected = if has_failed(view, pod) { "Failed" } else { "Succeeded" };
        if status.phase != expected && !view.ledger.of_pod(uid).any(Instance::runs) {
            let detail = format!("{}: {}, not {expected}", pod.spec.name, status.phase);
            view.breaks("phases-are-true", detail);
        }
        return;
    }
    let waits = |status: &Status| {
        status.containers.iter().any(|c| matches!(&c.state, State::Waiting(why) if why == "CrashLoopBackOff"))
    };
    for container in pod.spec.containers.iter().filter(|c| c.role != Role::Init) {
        let newest = view.ledger.started(uid, &container.name).next_back();
        let over = newest.is_some_and(|i| ends_for_good(pod, i));
        let in_back_off = newest
            .and_then(|i| i.exited)
            .is_some_and(|(ended, ..)| ended + BACK_OFF_MAX + REACTION > view.now);
        if over || in_back_off || newest.is_some_and(Instance::runs) || waits(status) {
            continue;
        }
        let states: Vec<String> =
            status.containers.iter().map(|c| format!("{} {:?}", c.name, c.state)).collect();
        let detail = format!(
            "{}: {} does not run: {} {}",
            pod.spec.name,
            container.name,
            status.phase,
            states.join(", ")
        );
        return view.breaks("wanted-pods-run", detail);
    }
    restarts_are_counted(view, pod, status);
    amounts_are_in_force(view, pod);
}

/// The count of a running container has all its restarts (kubelet: `restartCount`).
fn restarts_are_counted(view: &View<'_>, pod: &PodState, status: &Status) {
    let missing = status.containers.iter().find_map(|container| {
        let starts = view.ledger.started(&pod.spec.uid, &container.name).count();
        let counted = usize::try_from(container.restarts).unwrap_or(usize::MAX).saturating_add(1);
        (container.state == State::Running && counted < starts)
            .then(|| format!("{}: {} restarts, {starts} starts", container.name, container.restarts))
    });
    if let Some(missing) = missing {
        view.breaks("restarts-are-counted", format!("{}: {missing}", pod.spec.name));
    }
}

/// A resize that fits is in force (KEP-1287: a deferred resize is tried again when room appears).
fn amounts_are_in_force(view: &View<'_>, pod: &PodState) {
    let others = view.ledger.pods.iter().filter(|(uid, _)| **uid != pod.spec.uid);
    let held: u64 = others.map(|(uid, other)| promised(view, uid, other)).sum();
    if held + pod.cpu() > view.node.cpu {
        return;
    }
    let late = pod.spec.containers.iter().find_map(|container| {
        let newest = view.ledger.started(&pod.spec.uid, &container.name).next_back().filter(|i| i.runs())?;
        let cpu = newest.cpu?;
        (cpu != container.cpu).then(|| format!("{}: {cpu}m, not {}m", container.name, container.cpu))
    });
    if let Some(late) = late {
        view.breaks("resizes-come-about", format!("{}: {late} ({held}m held by others)", pod.spec.name));
    }
}

/// Returns the CPU that a pod holds: a pod whose containers wait for their restarts holds its whole request.
fn promised(view: &View<'_>, uid: &str, pod: &PodState) -> u64 {
    let stays = pod.ends_since().is_none() && !pod.status.as_ref().is_none_or(Status::is_over);
    if stays { pod.cpu() } else { super::given::held(view, uid, pod) }
}

/// Returns true if all of the pod's containers ended for good, or an init container failed for good.
pub(super) fn has_ended(view: &View<'_>, pod: &PodState) -> bool {
    let newest = |name: &str| view.ledger.started(&pod.spec.uid, name).next_back();
    let mut inits = pod.spec.containers.iter().filter(|c| c.role == Role::Init);
    let init_failed = inits.any(|c| {
        newest(&c.name).is_some_and(|i| {
            pod.spec.restart == Restart::Never && i.exited.is_some_and(|(_, code, _)| code != 0)
        })
    });
    let mut mains = pod.spec.containers.iter().filter(|c| c.role == Role::Main);
    init_failed || mains.all(|c| newest(&c.name).is_some_and(|i| ends_for_good(pod, i)))
}

fn has_failed(view: &View<'_>, pod: &PodState) -> bool {
    let ran = pod.spec.containers.iter().filter(|c| c.role != Role::Sidecar);
    let mut newest = ran.filter_map(|c| view.ledger.started(&pod.spec.uid, &c.name).next_back());
    newest.any(|i| i.exited.is_none_or(|(_, code, _)| code != 0))
}

fn ends_for_good(pod: &PodState, instance: &Instance) -> bool {
    instance.exited.is_some_and(|(_, code, _)| match pod.spec.restart {
        Restart::Always => false,
        Restart::OnFailure => code == 0,
        Restart::Never => true,
    })
}
