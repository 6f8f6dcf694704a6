//! The pods and containers of the node, from the pod table, with all data that cgroups lack. Pure.

use k8s_openapi::api::core::v1::{Container, ContainerState, ContainerStatus, Pod, PodStatus};

use super::model::{ContainerStats, PodStats, State};
use beelet_model::table::{PodEntry, PodName, PodTable};

/// Returns every pod of the table, without readings.
pub(super) fn pods(table: &PodTable) -> Vec<PodStats> {
    table.pods.iter().map(|(name, entry)| pod(name, entry)).collect()
}

fn pod(name: &PodName, entry: &PodEntry) -> PodStats {
    let pod = &entry.pod;
    let empty = PodStatus::default();
    let status = pod.status.as_ref().unwrap_or(&empty);
    let (ready, not_ready) = readiness(status);
    PodStats {
        name: name.clone(),
        uid: pod.metadata.uid.clone().unwrap_or_default(),
        qos: status.qos_class.clone().unwrap_or_default(),
        phase: state_of_pod(pod, status),
        ready,
        not_ready,
        started_at: status.start_time.as_ref().map(|time| time.0),
        host_network: pod.spec.as_ref().is_some_and(|spec| spec.host_network == Some(true)),
        netns: entry.netns.clone(),
        cgroup: None,
        reading: None,
        net: Vec::new(),
        net_windows: [None; 3],
        containers: containers(pod, status, ready.is_some()),
        disk: None,
        volumes: Vec::new(),
    }
}

/// Returns the state of a pod: `Terminating` for a deleted pod, else the reason of its status, else its
/// phase.
fn state_of_pod(pod: &Pod, status: &PodStatus) -> String {
    let has_ended = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"));
    if pod.metadata.deletion_timestamp.is_some() && !has_ended {
        return "Terminating".to_owned();
    }
    status.reason.clone().or_else(|| status.phase.clone()).unwrap_or_default()
}

/// Returns the condition Ready, and the reason if it isn't true, in one line.
fn readiness(status: &PodStatus) -> (Option<bool>, String) {
    let condition = status.conditions.iter().flatten().find(|condition| condition.type_ == "Ready");
    let Some(condition) = condition else { return (None, String::new()) };
    let ready = match condition.status.as_str() {
        "True" => return (Some(true), String::new()),
        "False" => Some(false),
        _ => None,
    };
    let words = [condition.reason.as_deref(), condition.message.as_deref()];
    let words: Vec<&str> = words.into_iter().flatten().filter(|word| !word.is_empty()).collect();
    (ready, words.join(": ").replace('\n', " "))
}

/// Returns all containers with a status, init containers first.
fn containers(pod: &Pod, status: &PodStatus, readiness_known: bool) -> Vec<ContainerStats> {
    let init_specs: &[Container] =
        pod.spec.as_ref().and_then(|spec| spec.init_containers.as_deref()).unwrap_or_default();
    let runs_to_its_end = |status: &&ContainerStatus| {
        !init_specs.iter().any(|c| c.name == status.name && c.restart_policy.as_deref() == Some("Always"))
    };
    let init = status.init_container_statuses.iter().flatten();
    let init = init.map(|status| container(status, runs_to_its_end(&status), readiness_known));
    let main = status.container_statuses.iter().flatten();
    // An ephemeral container is never ready, and its end does not affect the pod.
    let ephemeral = status.ephemeral_container_statuses.iter().flatten();
    let ephemeral = ephemeral.map(|status| container(status, true, false));
    init.chain(main.map(|status| container(status, false, readiness_known))).chain(ephemeral).collect()
}

fn container(status: &ContainerStatus, init: bool, readiness_known: bool) -> ContainerStats {
    let id = status.container_id.as_deref().unwrap_or_default();
    let running = status.state.as_ref().and_then(|state| state.running.as_ref());
    ContainerStats {
        name: status.name.clone(),
        // `containerd://<id>`
        id: id.rsplit_once("://").map_or(id, |(_, id)| id).to_owned(),
        image: status.image.clone(),
        init,
        restarts: u32::try_from(status.restart_count).unwrap_or(0),
        state: status.state.as_ref().map(state).unwrap_or_default(),
        ready: (readiness_known && !init).then_some(status.ready),
        started_at: running.and_then(|running| running.started_at.as_ref()).map(|time| time.0),
        ..ContainerStats::default()
    }
}

fn state(state: &ContainerState) -> State {
    if state.running.is_some() {
        return State::Running;
    }
    if let Some(waiting) = &state.waiting {
        return State::Waiting(waiting.reason.clone().unwrap_or_default());
    }
    let Some(ended) = &state.terminated else { return State::Unknown };
    let reason = ended.reason.clone().filter(|reason| !reason.is_empty());
    State::Ended(reason.unwrap_or_else(|| format!("exit code {}", ended.exit_code)))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;
    use beelet_model::table::Pods;

    fn of(pod: serde_json::Value) -> PodStats {
        let pod: Pod = serde_json::from_value(pod).unwrap();
        let entry = PodEntry::of(pod);
        let table =
            PodTable { pods: Pods::unit(PodName::of(&entry.pod), Arc::new(entry)), ..Default::default() };
        pods(&table).remove(0)
    }

    #[test]
    fn a_pod_that_is_deleted_is_terminating_until_it_has_ended() {
        let state = |phase: &str| {
            let metadata = json!({"name": "web-n", "deletionTimestamp": "2026-01-01T00:00:00Z"});
            of(json!({"metadata": metadata, "spec": {"containers": []}, "status": {"phase": phase}})).phase
        };
        assert_eq!(["Running", "Pending", "Failed"].map(state), ["Terminating", "Terminating", "Failed"]);
    }

    #[test]
    fn a_pod_has_the_data_of_its_status() {
        let pod = of(json!({
            "metadata": {"name": "web-n", "namespace": "shop", "uid": "u-1"},
            "spec": {"containers": [{"name": "app"}], "initContainers": [{"name": "init"}, {"name": "mesh", "restartPolicy": "Always"}]},
            "status": {
                "phase": "Running", "qosClass": "Burstable",
                "conditions": [{"type": "Ready", "status": "False", "reason": "ContainersNotReady", "message": "containers with\nunready status: [app]"}],
                "initContainerStatuses": [
                    {"name": "init", "image": "i", "imageID": "", "ready": true, "restartCount": 0, "containerID": "containerd://aa", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}},
                    {"name": "mesh", "image": "m", "imageID": "", "ready": true, "restartCount": 0, "containerID": "containerd://bb", "state": {"running": {}}},
                ],
                "containerStatuses": [
                    {"name": "app", "image": "a", "imageID": "", "ready": false, "restartCount": 3, "state": {"waiting": {"reason": "CrashLoopBackOff"}}},
                ],
                "ephemeralContainerStatuses": [
                    {"name": "debugger", "image": "b", "imageID": "", "ready": false, "restartCount": 0, "state": {"terminated": {"exitCode": 3, "reason": "Error"}}},
                ],
            },
        }));
        assert_eq!((pod.uid.as_str(), pod.qos.as_str(), pod.phase.as_str()), ("u-1", "Burstable", "Running"));
        assert_eq!(pod.ready, Some(false));
        assert_eq!(pod.not_ready, "ContainersNotReady: containers with unready status: [app]");
        let [init, mesh, app, debugger] = &pod.containers[..] else { panic!("{:?}", pod.containers) };
        assert_eq!((init.init, init.ready, init.id.as_str()), (true, None, "aa"));
        assert_eq!(init.state, State::Ended("Completed".into()));
        assert_eq!((mesh.init, mesh.ready, mesh.state.clone()), (false, Some(true), State::Running));
        assert_eq!((app.restarts, app.ready, app.id.as_str()), (3, Some(false), ""));
        assert_eq!(app.state, State::Waiting("CrashLoopBackOff".into()));
        assert_eq!((debugger.init, debugger.ready), (true, None));
        assert_eq!(debugger.state, State::Ended("Error".into()));
    }

    #[test]
    fn without_probes_the_readiness_is_unknown() {
        let pod = of(json!({
            "metadata": {"name": "p"},
            "status": {
                "conditions": [{"type": "Ready", "status": "Unknown", "reason": "Observed"}],
                "containerStatuses": [{"name": "c", "image": "a", "imageID": "", "ready": true, "restartCount": 0, "state": {"running": {}}}],
            },
        }));
        assert_eq!((pod.ready, pod.containers[0].ready), (None, None));
        assert_eq!(of(json!({"metadata": {"name": "p"}})).ready, None);
    }
}
