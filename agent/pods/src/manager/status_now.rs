//! The current status of a pod, from all facts that the manager has.

use beelet_model::status::{has_ended, whole_second};
use beelet_policy::pod::api_status;
use jiff::Timestamp;
use k8s_openapi::{api::core::v1 as core, apimachinery::pkg::apis::meta::v1::Time};

use super::managed::Managed;
use crate::{deps::Deps, runtime_view::Observation, status::Inputs};

/// Returns the current status of a pod. Until the first observation, the recorded status applies.
pub(super) fn status_now(managed: &Managed, deps: &Deps, runtime_name: &str) -> core::PodStatus {
    let Managed { record, seen, .. } = managed;
    let nothing = Observation::default();
    let control = managed.control.borrow();
    let inputs = Inputs {
        pod: &managed.pod,
        seen: seen.as_deref().unwrap_or(&nothing),
        waiting: &managed.waiting,
        condemned: &control.verdicts.condemned,
        last_codes: &control.verdicts.last_codes,
        probes: &record.probes,
        oom: &record.oom,
        previous: record.status.as_deref(),
        failure: record.failure.as_ref(),
        holds_claims: managed.pod.metadata.uid.as_deref().is_some_and(|uid| deps.devices.claims.has(uid)),
        resize: &managed.resize,
        node: &deps.node.facts,
        runtime_name,
        now: Timestamp::now(),
    };
    match (seen, &record.status) {
        (None, Some(known)) => inputs.known(known),
        (Some(seen), Some(known)) if record.failure.is_none() && is_forgotten(known, seen) => {
            inputs.as_forgotten(known)
        }
        _ => inputs.status(),
    }
}

/// Completes a status with data that only the API server has: claims, readiness gates and the generation.
pub(super) fn complete_status(managed: &Managed, status: &mut core::PodStatus) {
    add_claims(managed, status);
    add_gates(managed, status);
    add_generation(managed, status);
}

/// Completes a status with the claims that controllers have created for the pod.
fn add_claims(managed: &Managed, status: &mut core::PodStatus) {
    let Some(of) = managed.assigned.as_ref().and_then(|pod| pod.status.as_ref()) else { return };
    status.resource_claim_statuses.clone_from(&of.resource_claim_statuses);
    status.extended_resource_claim_status.clone_from(&of.extended_resource_claim_status);
}

/// Completes a status with the state of the pod's readiness gates. Other clients of the API server open the
/// gates; until then the pod is not ready.
fn add_gates(managed: &Managed, status: &mut core::PodStatus) {
    let Some(assigned) = &managed.assigned else { return };
    let gates = assigned.spec.iter().flat_map(|spec| spec.readiness_gates.iter().flatten());
    let gates: Vec<&str> = gates.map(|gate| gate.condition_type.as_str()).collect();
    if gates.is_empty() {
        return;
    }
    let in_api = assigned.status.clone().unwrap_or_default();
    let others = in_api.conditions.iter().flatten().filter(|c| gates.contains(&c.type_.as_str()));
    let others: Vec<_> = others.filter(|c| !api_status::is_owned(&c.type_)).cloned().collect();
    api_status::open_gates(assigned, &in_api, status, &Time(whole_second(Timestamp::now())));
    let find = |status: &core::PodStatus| {
        let mut all = status.conditions.iter().flatten();
        all.find(|c| c.type_ == "Ready" && c.status == "False").and_then(|c| c.last_transition_time.clone())
    };
    // An unchanged Ready condition keeps its transition time.
    let since = managed.record.status.as_deref().and_then(find);
    let conditions = status.conditions.get_or_insert_default();
    for ready in conditions.iter_mut().filter(|c| c.type_ == "Ready" && c.status == "False") {
        ready.last_transition_time = since.clone().or(ready.last_transition_time.take());
    }
    conditions.retain(|c| others.iter().all(|other| other.type_ != c.type_));
    conditions.extend(others);
}

/// Completes a status with the generation of its pod.
fn add_generation(managed: &Managed, status: &mut core::PodStatus) {
    let Some(generation) = managed.assigned.as_ref().and_then(|pod| pod.metadata.generation) else { return };
    status.observed_generation = Some(generation);
    for condition in status.conditions.iter_mut().flatten() {
        condition.observed_generation = Some(generation);
    }
}

/// Returns true if the runtime has lost a container of an ended pod: the recorded status has more facts than
/// an observation.
fn is_forgotten(known: &core::PodStatus, seen: &Observation) -> bool {
    let usual = known.init_container_statuses.iter().chain(&known.container_statuses);
    let statuses = usual.chain(&known.ephemeral_container_statuses).flatten();
    let mut ran = statuses.filter(|status| status.container_id.is_some());
    has_ended(Some(known))
        && (seen.containers.is_empty() || ran.any(|status| seen.newest(&status.name).is_none()))
}
