//! The conditions of a pod.

use std::collections::BTreeMap;

use beelet_model::status::whole_second;
use beelet_policy::pod;
use beelet_spec::resize;
use k8s_openapi::{api::core::v1 as core, apimachinery::pkg::apis::meta::v1::Time};

use super::{Inputs, are_ready, pod_amounts};

/// Condition of a pod whose containers all restart; the kubelet's.
const ALL_RESTARTING: &str = "AllContainersRestarting";

pub(super) fn conditions(
    inputs: &Inputs<'_>,
    phase: &str,
    initialized: bool,
    inits: &[&core::Container],
    init_statuses: &[core::ContainerStatus],
    statuses: &[core::ContainerStatus],
) -> Vec<core::PodCondition> {
    let finished = phase == "Succeeded" || phase == "Failed";
    let sidecars = inits.iter().zip(init_statuses).filter(|(spec, _)| pod::is_sidecar(spec)).map(|(_, s)| s);
    let unready: Vec<&str> =
        statuses.iter().chain(sidecars).filter(|s| !s.ready).map(|s| s.name.as_str()).collect();
    let incomplete: Vec<&str> = init_statuses.iter().filter(|s| !s.ready).map(|s| s.name.as_str()).collect();
    let ready = if finished {
        Err(if phase == "Succeeded" { ("PodCompleted", String::new()) } else { ("PodFailed", String::new()) })
    } else {
        are_ready(&unready)
    };
    let init = if initialized || phase == "Succeeded" {
        Ok(())
    } else {
        let list = incomplete.join(" ");
        Err(("ContainersNotInitialized", format!("containers with incomplete status: [{list}]")))
    };
    let sandbox = if inputs.seen.sandbox.is_some() { Ok(()) } else { Err(("", String::new())) };
    let mut conditions = vec![
        condition(inputs, "PodReadyToStartContainers", sandbox),
        condition(inputs, "Initialized", init),
        condition(inputs, "Ready", ready.clone()),
        condition(inputs, "ContainersReady", ready),
        condition(inputs, "PodScheduled", Ok(())),
    ];
    conditions.extend(restart_condition(inputs, phase));
    conditions
}

/// Returns the condition of a restart of all containers, for a pod whose rules allow it.
fn restart_condition(inputs: &Inputs<'_>, phase: &str) -> Option<core::PodCondition> {
    let spec = inputs.pod.spec.as_ref().filter(|spec| pod::may_restart_all(spec))?;
    let state = match phase {
        "Succeeded" => Err(("PodCompleted", String::new())),
        "Failed" => Err(("PodFailed", String::new())),
        _ if pod::Round::of(spec, &inputs.seen.pod).begins => Ok(()),
        _ => Err(("", String::new())),
    };
    let begins = state.is_ok();
    let mut condition = condition(inputs, ALL_RESTARTING, state);
    if begins {
        condition.reason = Some("RestartAllContainersStarted".to_owned());
        condition.message = Some("container exited with restart policy rule".to_owned());
    }
    Some(condition)
}

/// Returns the conditions of a pending resize and of a resize in progress.
pub(super) fn resize_conditions(inputs: &Inputs<'_>, status: &core::PodStatus) -> Vec<core::PodCondition> {
    let spec = inputs.pod.spec.iter();
    let specs = spec.flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers));
    let statuses = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
    let statuses: BTreeMap<&str, _> = statuses.map(|status| (status.name.as_str(), status)).collect();
    let behind = |spec: &core::Container| {
        let status = statuses.get(spec.name.as_str());
        let runs = |status: &&&core::ContainerStatus| {
            status.state.as_ref().is_some_and(|state| state.running.is_some())
        };
        let wanted = || resize::amounts(spec).unwrap_or_default();
        status.filter(runs).is_some_and(|status| status.resources.clone().unwrap_or_default() != wanted())
    };
    let mut found = Vec::new();
    if let Some(pending) = &inputs.resize.pending {
        found.push(resize_condition(inputs, resize::PENDING, pending.reason, &pending.message));
    }
    let as_a_whole = status.phase.as_deref() == Some("Running")
        && resize::pod_amounts(inputs.pod).is_some()
        && status.resources != pod_amounts(inputs.pod);
    if as_a_whole || specs.into_iter().any(behind) {
        let error = inputs.resize.error.as_deref().unwrap_or_default();
        let reason = if error.is_empty() { "" } else { "Error" };
        found.push(resize_condition(inputs, resize::IN_PROGRESS, reason, error));
    }
    found
}

fn resize_condition(inputs: &Inputs<'_>, kind: &str, reason: &str, message: &str) -> core::PodCondition {
    let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let condition = condition(inputs, kind, Ok(()));
    core::PodCondition { reason: some(reason), message: some(message), ..condition }
}

/// Returns a condition whose transition time changes only with its status.
pub(super) fn condition(
    inputs: &Inputs<'_>,
    kind: &str,
    state: Result<(), (&str, String)>,
) -> core::PodCondition {
    let status = if state.is_ok() { "True" } else { "False" };
    let before = inputs.previous.iter().flat_map(|p| p.conditions.iter().flatten()).find(|c| c.type_ == kind);
    let since = before.filter(|c| c.status == status).and_then(|c| c.last_transition_time.clone());
    let (reason, message) = state.err().unwrap_or_default();
    core::PodCondition {
        type_: kind.to_owned(),
        status: status.to_owned(),
        last_transition_time: since.or(Some(Time(whole_second(inputs.now)))),
        reason: (!reason.is_empty()).then(|| reason.to_owned()),
        message: (!message.is_empty()).then_some(message),
        ..Default::default()
    }
}
