//! The part of a pod's status that the agent writes to the API server, and its form.
//!
//! The node owns most of a pod's status, but not all: conditions of other controllers, claims and the like
//! stay as they are (kubelet: `pkg/kubelet/status/status_manager.go`, `mergePodStatus` and `TerminatePod`).
//! Differences are sent as a strategic merge patch of the `status` subresource that includes the UID: a later
//! pod of the same name refuses it.

use std::time::Duration;

use k8s_openapi::{
    api::core::v1::{
        ContainerState, ContainerStateTerminated, ContainerStatus, Pod, PodCondition, PodSpec, PodStatus,
    },
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time},
};
use serde_json::{Map, Value, json};

use crate::resources::critical::is_static;
use beelet_units::shorten::in_the_middle;

/// Conditions that the node alone writes (`pkg/kubelet/types/pod_status.go`).
const OWNED: &[&str] = &[
    "PodScheduled",
    READY,
    "Initialized",
    CONTAINERS_READY,
    SANDBOX,
    "PodResizePending",
    "PodResizeInProgress",
    "AllContainersRestarting",
];
const READY: &str = "Ready";
const CONTAINERS_READY: &str = "ContainersReady";
const SANDBOX: &str = "PodReadyToStartContainers";
/// Time for which a gap between two containers is withheld. The kubelet never shows it, however long a pull
/// takes; the agent writes a gap that lasts.
const BETWEEN_CONTAINERS: Duration = Duration::from_secs(2);
/// Time within which a container is usually created and started once its sandbox exists.
const SANDBOX_ONLY: Duration = Duration::from_millis(300);
/// Time within which a started container usually becomes ready, if it does at once.
const READY_AT_ONCE: Duration = Duration::from_millis(30);
/// Time within which most containers end after their stop signal, and their pod with them.
const ENDING: Duration = Duration::from_millis(500);
/// Time within which the API server normally removes a vanishing object. If the object stays longer, its
/// removal was interrupted.
pub const VANISHING: Duration = Duration::from_secs(2);
/// A condition that the node may set, and others may, too.
const DISRUPTION: &str = "DisruptionTarget";
/// Fields of a status that the node writes. All others belong to other components, and never appear in a
/// patch.
const FIELDS: &[&str] = &[
    "allocatedResources",
    "conditions",
    "containerStatuses",
    "ephemeralContainerStatuses",
    "hostIP",
    "hostIPs",
    "initContainerStatuses",
    "message",
    "observedGeneration",
    "phase",
    "podIP",
    "podIPs",
    "qosClass",
    "reason",
    "resources",
    "startTime",
];
/// Maximum bytes of termination messages that the API server keeps of one pod.
const MAX_LAST_WORDS: usize = 12 * 1024;
/// Maximum bytes of all waiting messages of one pod's containers, and the minimum for each. The API server
/// refuses a status of more than a few MB, and a pod may have thousands of containers, each with an error
/// that quotes its spec.
const MAX_SENTENCES: usize = 256 * 1024;
const LEAST_SENTENCE: usize = 64;
/// Maximum bytes of the pod's own message and of each condition's.
const MAX_SENTENCE: usize = 4096;

/// Returns true if the node alone writes this condition.
#[must_use]
pub fn is_owned(condition: &str) -> bool {
    OWNED.contains(&condition)
}

/// Returns true if all containers of a pod of this status have ended for good.
#[must_use]
pub fn is_terminal(status: &PodStatus) -> bool {
    matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"))
}

/// Returns the status to write: the node's, with other owners' parts as the API server has them.
///
/// A pod does not become `Succeeded` or `Failed` on the API server while any of its containers still runs:
/// clients that wait for the end treat the pod's resources as free.
#[must_use]
pub fn merged(in_api: &PodStatus, ours: &PodStatus) -> PodStatus {
    let mut status = ours.clone();
    let ends = !is_terminal(in_api) && is_terminal(ours);
    let delayed = ends && any_running(ours);
    if delayed {
        status.phase.clone_from(&in_api.phase);
        status.reason.clone_from(&in_api.reason);
        status.message.clone_from(&in_api.message);
    } else if is_terminal(in_api) && !is_terminal(ours) {
        // An ended pod never continues, even if the node has lost its state.
        status.phase.clone_from(&in_api.phase);
    }
    let theirs = in_api.conditions.iter().flatten();
    let mut conditions: Vec<PodCondition> = theirs.filter(|c| !is_owned(&c.type_)).cloned().collect();
    for condition in ours.conditions.iter().flatten() {
        let before = in_api.conditions.iter().flatten().find(|c| c.type_ == condition.type_);
        let mut condition = condition.clone();
        if let Some(before) = before.filter(|before| before.status == condition.status) {
            condition.last_transition_time.clone_from(&before.last_transition_time);
        }
        if condition.type_ == DISRUPTION {
            // Written once, with the phase that it explains.
            if ends && !delayed {
                conditions.retain(|c| c.type_ != DISRUPTION);
                conditions.push(condition);
            }
        } else if is_owned(&condition.type_) {
            conditions.push(condition);
        }
    }
    if is_terminal(&status) {
        let reason = if status.phase.as_deref() == Some("Succeeded") { "PodCompleted" } else { "PodFailed" };
        let ready =
            |c: &&mut PodCondition| c.status == "True" && (c.type_ == READY || c.type_ == CONTAINERS_READY);
        for condition in conditions.iter_mut().filter(ready) {
            condition.status = "False".to_owned();
            condition.reason = Some(reason.to_owned());
            condition.message = None;
        }
    }
    status.conditions = Some(conditions);
    if in_api.start_time.is_some() {
        status.start_time.clone_from(&in_api.start_time);
    }
    status.resource_claim_statuses.clone_from(&in_api.resource_claim_statuses);
    status.extended_resource_claim_status.clone_from(&in_api.extended_resource_claim_status);
    shorten_last_words(&mut status);
    shorten_sentences(&mut status);
    status
}

/// Returns true if the API server is removing this object right now: it first writes the deletion without any
/// grace and then removes the object (`Store.Delete` of the registry); a watch sees both, in this order.
#[must_use]
pub fn vanishes(pod: &Pod) -> bool {
    let ObjectMeta { deletion_timestamp, deletion_grace_period_seconds, finalizers, .. } = &pod.metadata;
    deletion_timestamp.is_some()
        && *deletion_grace_period_seconds == Some(0)
        && finalizers.as_ref().is_none_or(Vec::is_empty)
}

/// Returns the time for which a status may wait for a successor that usually follows at once; `None` to write
/// it now. `pod` is the API server's object.
#[must_use]
pub fn patience(pod: &Pod, ours: &PodStatus) -> Option<Duration> {
    let none = PodStatus::default();
    let in_api = pod.status.as_ref().unwrap_or(&none);
    if is_between_containers(in_api, ours) {
        Some(BETWEEN_CONTAINERS)
    } else if is_only_the_sandbox(in_api, ours) {
        Some(SANDBOX_ONLY)
    } else if urgency(in_api, ours) == Urgency::Traffic {
        None
    } else if pod.metadata.deletion_timestamp.is_some() {
        // Readiness changes next, and then the pod ends.
        Some(ENDING)
    } else if has_just_begun(in_api, ours) {
        Some(READY_AT_ONCE)
    } else {
        None
    }
}

/// Returns true if all containers run, which the API server does not know yet, and only the readiness of some
/// is missing: their probes run at once.
fn has_just_begun(in_api: &PodStatus, ours: &PodStatus) -> bool {
    let own = ours.container_statuses.as_deref().unwrap_or_default();
    in_api.phase.as_deref() == Some("Pending")
        && ours.phase.as_deref() == Some("Running")
        && !own.is_empty()
        && own.iter().all(|c| runs(c) && c.started == Some(true))
}

/// Returns true if a container that the API server knows as running has ended and its successor is about to
/// start: after a change of its image or a resize that needs a restart. The kubelet stops the old container
/// and starts the new one in one step (`SyncPod`), and its status does not show the state in between.
fn is_between_containers(in_api: &PodStatus, ours: &PodStatus) -> bool {
    let ended = |c: &ContainerStatus| c.last_state.as_ref()?.terminated.as_ref()?.container_id.clone();
    let ran = |id: &String| all_statuses(in_api).any(|c| c.container_id.as_ref() == Some(id) && runs(c));
    all_statuses(ours).filter(|c| is_begun(c)).filter_map(ended).any(|id| ran(&id))
}

/// Returns true if only the pod's sandbox is new: its first container usually runs a moment later.
fn is_only_the_sandbox(in_api: &PodStatus, ours: &PodStatus) -> bool {
    let sandbox = |status: &PodStatus| {
        let mut conditions = status.conditions.iter().flatten();
        conditions.find(|c| c.type_ == SANDBOX).is_some_and(|c| c.status == "True")
    };
    let pending = |status: &PodStatus| status.phase.as_deref() == Some("Pending");
    let waits_only =
        |c: &ContainerStatus| waits(c) && !has_ended_before(c) && (is_begun(c) || is_behind_inits(c));
    pending(in_api)
        && pending(ours)
        && !sandbox(in_api)
        && sandbox(ours)
        && all_statuses(in_api).chain(all_statuses(ours)).all(waits_only)
}

/// Returns true if a container is about to start.
fn is_begun(status: &ContainerStatus) -> bool {
    waits_for(status) == Some("ContainerCreating")
}

/// Returns true if a container waits for init containers.
fn is_behind_inits(status: &ContainerStatus) -> bool {
    waits_for(status) == Some("PodInitializing")
}

fn waits_for(status: &ContainerStatus) -> Option<&str> {
    status.state.as_ref()?.waiting.as_ref()?.reason.as_deref()
}

fn any_running(status: &PodStatus) -> bool {
    all_statuses(status).any(runs)
}

fn runs(status: &ContainerStatus) -> bool {
    status.state.as_ref().is_some_and(|state| state.running.is_some())
}

fn all_statuses(status: &PodStatus) -> impl Iterator<Item = &ContainerStatus> {
    let inits = status.init_container_statuses.iter().flatten();
    let own = status.container_statuses.iter().flatten();
    inits.chain(own).chain(status.ephemeral_container_statuses.iter().flatten())
}

/// Limits the total bytes of all containers' termination messages.
fn shorten_last_words(status: &mut PodStatus) {
    let containers = all_statuses(status).count();
    let each = MAX_LAST_WORDS / containers.max(1);
    let inits = status.init_container_statuses.iter_mut().flatten();
    let own = status.container_statuses.iter_mut().flatten();
    let ephemeral = status.ephemeral_container_statuses.iter_mut().flatten();
    for container in inits.chain(own).chain(ephemeral) {
        for state in [&mut container.state, &mut container.last_state].into_iter().flatten() {
            let message = state.terminated.as_mut().and_then(|ended| ended.message.as_mut());
            if let Some(message) = message.filter(|message| message.len() > each) {
                message.truncate(message.floor_char_boundary(each));
            }
        }
    }
}

/// Limits the agent's own messages: they may quote a pod's spec. The first words say what failed, the last
/// ones why.
fn shorten_sentences(status: &mut PodStatus) {
    let each = MAX_SENTENCES / all_statuses(status).count().max(1);
    let each = each.clamp(LEAST_SENTENCE, MAX_SENTENCE);
    let inits = status.init_container_statuses.iter_mut().flatten();
    let own = status.container_statuses.iter_mut().flatten();
    let ephemeral = status.ephemeral_container_statuses.iter_mut().flatten();
    for container in inits.chain(own).chain(ephemeral) {
        let waiting = container.state.as_mut().and_then(|state| state.waiting.as_mut());
        shorten(waiting.and_then(|waiting| waiting.message.as_mut()), each);
    }
    shorten(status.message.as_mut(), MAX_SENTENCE);
    let own = status.conditions.iter_mut().flatten().filter(|condition| is_owned(&condition.type_));
    for condition in own {
        shorten(condition.message.as_mut(), MAX_SENTENCE);
    }
}

fn shorten(text: Option<&mut String>, most: usize) {
    if let Some(text) = text {
        in_the_middle(text, most);
    }
}

/// Returns the status of a pod of which the node has nothing left: its last one, with an end for every
/// container that lacks one, and a final phase. A static pod keeps its phase: its mirror does not end by
/// itself.
#[must_use]
pub fn finished(pod: &Pod, last: &PodStatus) -> PodStatus {
    let mut status = last.clone();
    let spec = pod.spec.as_ref();
    if has_initialized(spec, last) {
        status.container_statuses.iter_mut().flatten().for_each(end_unseen);
    }
    let inits = status.init_container_statuses.as_deref_mut().unwrap_or_default();
    let began = |c: &ContainerStatus| !waits(c) || has_ended_before(c);
    // Init containers after the last started one never ran; the first always counts.
    let begun = inits.iter().rposition(began).map_or(1, |last| last + 1).min(inits.len());
    inits[..begun].iter_mut().for_each(end_unseen);
    if !is_terminal(&status) && !is_static(pod) {
        let all: Vec<Option<i32>> = status.container_statuses.iter().flatten().map(exit_code).collect();
        let well = !all.is_empty() && all.iter().all(|code| *code == Some(0));
        status.phase = Some(if well { "Succeeded" } else { "Failed" }.to_owned());
    }
    status
}

fn exit_code(status: &ContainerStatus) -> Option<i32> {
    status.state.as_ref()?.terminated.as_ref().map(|ended| ended.exit_code)
}

fn waits(status: &ContainerStatus) -> bool {
    let state = status.state.as_ref();
    state.is_none_or(|state| state.running.is_none() && state.terminated.is_none())
}

fn has_ended_before(status: &ContainerStatus) -> bool {
    status.last_state.as_ref().is_some_and(|state| state.terminated.is_some())
}

/// Returns true if the pod's own containers may have run.
fn has_initialized(spec: Option<&PodSpec>, status: &PodStatus) -> bool {
    if spec.is_none_or(|spec| spec.init_containers.as_ref().is_none_or(Vec::is_empty)) {
        return true;
    }
    let mut own = status.container_statuses.iter().flatten();
    let well = |state: &Option<ContainerState>| {
        let ended = state.as_ref().and_then(|state| state.terminated.as_ref());
        ended.is_some_and(|ended| ended.exit_code == 0)
    };
    own.any(|c| has_ended_before(c) || !waits(c))
        || status
            .init_container_statuses
            .iter()
            .flatten()
            .next_back()
            .is_some_and(|last| well(&last.state) || well(&last.last_state))
}

/// Marks a container whose end was not observed: it must not count as a success.
fn end_unseen(status: &mut ContainerStatus) {
    if status.state.as_ref().is_some_and(|state| state.terminated.is_some()) {
        return;
    }
    status.state = Some(ContainerState {
        terminated: Some(ContainerStateTerminated {
            reason: Some("ContainerStatusUnknown".to_owned()),
            message: Some("The container could not be located when the pod was terminated".to_owned()),
            exit_code: 137,
            ..Default::default()
        }),
        ..Default::default()
    });
    (status.ready, status.started) = (false, Some(false));
}

/// Withholds readiness from a pod with closed readiness gates: conditions that other components set
/// (`pkg/kubelet/status/generate.go`, `GeneratePodReadyCondition`).
pub fn open_gates(pod: &Pod, in_api: &PodStatus, status: &mut PodStatus, now: &Time) {
    let gates = pod.spec.iter().flat_map(|spec| spec.readiness_gates.iter().flatten());
    let shut: Vec<String> = gates
        .filter_map(|gate| {
            let name = &gate.condition_type;
            match in_api.conditions.iter().flatten().find(|c| c.type_ == *name) {
                None => {
                    Some(format!("corresponding condition of pod readiness gate \"{name}\" does not exist."))
                }
                Some(c) if c.status != "True" => Some(format!(
                    "the status of pod readiness gate \"{name}\" is not \"True\", but {}",
                    c.status
                )),
                Some(_) => None,
            }
        })
        .collect();
    let ready = status.conditions.iter_mut().flatten().find(|c| c.type_ == READY && c.status == "True");
    if let Some(ready) = ready.filter(|_| !shut.is_empty()) {
        ready.status = "False".to_owned();
        ready.reason = Some("ReadinessGatesNotReady".to_owned());
        ready.message = Some(shut.join(", "));
        ready.last_transition_time = Some(now.clone());
    }
}

/// Importance of a status change for its readers; greater values are written first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// Any other change.
    Detail,
    /// A change of the pod's phase, or a container that started or ended.
    Phase,
    /// A change that starts or stops traffic to the pod, or the pod's end.
    Traffic,
}

/// Returns the urgency of sending `after` to a server that knows `before`.
#[must_use]
pub fn urgency(before: &PodStatus, after: &PodStatus) -> Urgency {
    let ready = |status: &PodStatus| {
        let conditions = status.conditions.iter().flatten();
        conditions.into_iter().find(|c| c.type_ == READY).map(|c| c.status == "True").unwrap_or_default()
    };
    if ready(before) != ready(after) || is_terminal(before) != is_terminal(after) {
        Urgency::Traffic
    } else if before.phase != after.phase {
        Urgency::Phase
    } else {
        Urgency::Detail
    }
}

/// Returns the patch that turns the status `before` into `after`, both as JSON; `None` if no field of the
/// node differs.
#[must_use]
pub fn patch(uid: &str, before: &Value, after: &Value) -> Option<Value> {
    let mut status = Map::new();
    for field in FIELDS {
        let (before, after) = (before.get(field), after.get(field));
        if before == after {
            continue;
        }
        let changed = match (*field, after) {
            ("conditions", after) => conditions(before, after),
            // The API server merges these lists by address: an address that the pod no longer has would stay.
            // If no list exists yet, older servers take the directive for an address (mergeMap of
            // strategicpatch).
            ("podIPs" | "hostIPs", Some(Value::Array(list))) if before.is_some() => {
                let mut list = list.clone();
                list.push(json!({"$patch": "replace"}));
                Some(Value::Array(list))
            }
            (_, Some(after)) => Some(after.clone()),
            (_, None) => Some(Value::Null),
        };
        if let Some(changed) = changed {
            status.insert((*field).to_owned(), changed);
        }
    }
    (!status.is_empty()).then(|| json!({"metadata": {"uid": uid}, "status": status}))
}

/// Patches conditions by type: the differing fields of each, and a deletion mark for removed ones.
fn conditions(before: Option<&Value>, after: Option<&Value>) -> Option<Value> {
    let list = |list: Option<&Value>| list.and_then(Value::as_array).cloned().unwrap_or_default();
    let (before, after) = (list(before), list(after));
    let of_type = |list: &[Value], kind: &Value| list.iter().find(|c| c.get("type") == Some(kind)).cloned();
    let mut changed = Vec::new();
    for condition in &after {
        let Some(kind) = condition.get("type") else { continue };
        match of_type(&before, kind) {
            None => changed.push(condition.clone()),
            Some(before) if before == *condition => {}
            Some(before) => changed.push(fields(&before, condition, kind)),
        }
    }
    for condition in &before {
        let Some(kind) = condition.get("type") else { continue };
        if of_type(&after, kind).is_none() {
            changed.push(json!({"$patch": "delete", "type": kind}));
        }
    }
    (!changed.is_empty()).then_some(Value::Array(changed))
}

/// Returns the fields of a condition that differ.
fn fields(before: &Value, after: &Value, kind: &Value) -> Value {
    let mut changed = Map::from_iter([("type".to_owned(), kind.clone())]);
    let empty = Map::new();
    let (before, after) = (before.as_object().unwrap_or(&empty), after.as_object().unwrap_or(&empty));
    for (field, value) in after.iter().filter(|(field, value)| before.get(*field) != Some(*value)) {
        changed.insert(field.clone(), value.clone());
    }
    for field in before.keys().filter(|field| !after.contains_key(*field)) {
        changed.insert(field.clone(), Value::Null);
    }
    Value::Object(changed)
}

/// Returns the status of a pod that the node never admitted: only the reason (`pkg/kubelet/kubelet.go`,
/// `rejectPod`).
#[must_use]
pub fn rejected(pod: &Pod, reason: &str, message: &str, now: Time) -> PodStatus {
    PodStatus {
        phase: Some("Failed".to_owned()),
        reason: Some(reason.to_owned()),
        message: Some(format!("Pod was rejected: {message}")),
        qos_class: crate::resources::qos::qos_class(pod).ok().map(|class| class.to_string()),
        start_time: Some(now),
        observed_generation: pod.metadata.generation,
        ..Default::default()
    }
}

#[cfg(test)]
mod tests;
