//! Restarts containers on request.

use std::collections::BTreeSet;

use beelet_model::request::Request as PodRequest;
use beelet_model::status::runtime_id;
use beelet_model::table::{PodEntry, PodName};
use beelet_policy::pod::restarts;
use beelet_proto::beelet as proto;
use k8s_openapi::api::core::v1 as core;
use tonic::Status;

use super::{Service, not_found};

impl Service {
    /// Requests the restart and returns the containers.
    pub(super) async fn restart_containers(
        &self,
        request: proto::RestartRequest,
    ) -> Result<proto::RestartResponse, Status> {
        let target = request.target.unwrap_or_default();
        let (name, entry) = {
            let table = self.pods.borrow();
            let (name, entry) = table.find(&target.namespace, &target.pod).map_err(not_found)?;
            (name.clone(), entry.clone())
        };
        let chosen = choose(&name, &entry, &target.container)?;
        let Some(running) = self.running.get() else {
            return Err(Status::unavailable(
                "the container runtime has not answered yet: see `beelet doctor`",
            ));
        };
        let uid = entry.pod.metadata.uid.clone().unwrap_or_default();
        let containers = chosen.iter().filter_map(|status| runtime_id(status).map(str::to_owned));
        let containers: BTreeSet<String> = containers.collect();
        let restart = PodRequest::Restart { uid: uid.clone(), containers };
        running
            .requests
            .send(restart)
            .await
            .map_err(|_| Status::unavailable("the agent is shutting down"))?;
        let containers = chosen.iter().map(|status| proto::Restarted {
            name: status.name.clone(),
            id: runtime_id(status).unwrap_or_default().to_owned(),
        });
        Ok(proto::RestartResponse { pod: name.to_string(), uid, containers: containers.collect() })
    }
}

/// Returns the container of that name, or all containers that can be restarted.
#[allow(clippy::result_large_err)] // tonic's own error type
fn choose<'e>(
    name: &PodName,
    entry: &'e PodEntry,
    container: &str,
) -> Result<Vec<&'e core::ContainerStatus>, Status> {
    let status = entry.pod.status.as_ref();
    if let Some(reason) = status.and_then(|status| status.reason.as_deref()).filter(|_| entry.ending) {
        return Err(Status::failed_precondition(format!(
            "pod {name} has terminated ({reason}): apply its manifest again"
        )));
    }
    let main = status.and_then(|status| status.container_statuses.as_ref()).into_iter().flatten();
    let init = status.and_then(|status| status.init_container_statuses.as_ref()).into_iter().flatten();
    let mut chosen = Vec::new();
    let mut names = Vec::new();
    for status in init.chain(main) {
        names.push(status.name.as_str());
        if !container.is_empty() && status.name != container {
            continue;
        }
        match why_not(entry, status) {
            None => chosen.push(status),
            Some(why) if !container.is_empty() => {
                return Err(Status::failed_precondition(format!("container {container} of {name} {why}")));
            }
            Some(_) => {}
        }
    }
    match (chosen.is_empty(), container) {
        (false, _) => Ok(chosen),
        (true, "") => Err(Status::failed_precondition(format!(
            "no container of {name} restarts after it terminates: delete the pod and apply its manifest again"
        ))),
        (true, container) => Err(Status::not_found(format!(
            "{name} has no container {container:?}; it has {}",
            names.join(", ")
        ))),
    }
}

/// Returns the reason why a container cannot be restarted, if any.
fn why_not(entry: &PodEntry, status: &core::ContainerStatus) -> Option<&'static str> {
    let state = status.state.as_ref()?;
    if state.waiting.is_some() {
        return None;
    }
    if state.terminated.is_some() {
        return Some("has terminated permanently: delete the pod and apply its manifest again");
    }
    let spec = entry.pod.spec.as_ref()?;
    let init = spec.init_containers.iter().flatten();
    let is_init = init.clone().any(|one| one.name == status.name && one.restart_policy.is_none());
    let container = spec.containers.iter().chain(init).find(|one| one.name == status.name)?;
    (is_init || !restarts(spec, container, 0)).then_some(
        "does not restart after it completes (restartPolicy): delete the pod and apply its manifest again",
    )
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn check(policy: &str, container: &str, main: Value, expected: Result<&[&str], &str>) {
        let status = |name: &str, state: Value| {
            json!({"name": name, "image": "", "imageID": "", "ready": false, "restartCount": 2, "state": state,
                   "containerID": "fake://1"})
        };
        let entry = PodEntry::of(
            serde_json::from_value(json!({
                "metadata": {"name": "web-n1", "uid": "u"},
                "spec": {
                    "restartPolicy": policy,
                    "containers": [{"name": "main"}],
                    "initContainers": [{"name": "init"}, {"name": "side", "restartPolicy": "Always"}],
                },
                "status": {
                    "containerStatuses": [status("main", main)],
                    "initContainerStatuses": [
                        status("init", json!({"terminated": {"exitCode": 0}})),
                        status("side", json!({"running": {}})),
                    ],
                },
            }))
            .unwrap(),
        );
        let chosen = choose(&PodName::of(&entry.pod), &entry, container);
        match (chosen, expected) {
            (Ok(chosen), Ok(expected)) => {
                assert_eq!(chosen.iter().map(|one| one.name.as_str()).collect::<Vec<_>>(), expected);
            }
            (Err(error), Err(part)) => assert!(error.message().contains(part), "{error}"),
            (got, expected) => panic!("{got:?}, not {expected:?}"),
        }
    }

    #[test]
    fn what_is_started_again_when_it_ends_can_be_restarted() {
        let running = || json!({"running": {}});
        let waiting = || json!({"waiting": {"reason": "CrashLoopBackOff"}});
        check("Always", "", running(), Ok(&["side", "main"]));
        check("Always", "main", running(), Ok(&["main"]));
        check("Never", "", running(), Ok(&["side"]));
        check("Never", "main", running(), Err("does not restart after it completes"));
        check("OnFailure", "main", waiting(), Ok(&["main"]));
        check("Never", "main", json!({"terminated": {"exitCode": 1}}), Err("has terminated permanently"));
        check("Always", "init", running(), Err("has terminated permanently"));
        check("Always", "none", running(), Err("it has init, side, main"));
    }
}
