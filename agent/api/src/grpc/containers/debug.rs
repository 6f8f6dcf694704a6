//! Adds an ephemeral container to a running pod.

use beelet_manifests::pull_policy;
use beelet_model::origin::Origin;
use beelet_model::request::Request as PodRequest;
use beelet_model::status::has_ended;
use beelet_proto::beelet as proto;
use k8s_openapi::api::core::v1 as core;
use tonic::Status;

use super::Service;

/// Prefix of generated names.
const NAME: &str = "debugger";
/// Maximum ephemeral containers of a pod, which cannot be removed again.
const MOST: usize = 64;

impl Service {
    /// Requests the container and returns its name.
    pub(super) async fn debug_pod(
        &self,
        request: proto::DebugRequest,
    ) -> Result<proto::DebugResponse, Status> {
        let target = request.target.clone().unwrap_or_default();
        let (name, pod) = {
            let table = self.pods.borrow();
            let (name, entry) = table.find(&target.namespace, &target.pod).map_err(super::not_found)?;
            if entry.ending || has_ended(entry.pod.status.as_ref()) {
                return Err(Status::failed_precondition(format!(
                    "pod {name} has terminated or is terminating"
                )));
            }
            (name.clone(), entry.pod.clone())
        };
        if Origin::of(&pod).is_api() {
            return Err(Status::failed_precondition(format!(
                "pod {name} comes from the API server: use `kubectl debug`"
            )));
        }
        let container = container(&pod, request)?;
        let Some(running) = self.running.get() else {
            return Err(Status::unavailable(
                "the container runtime has not answered yet: see `beelet doctor`",
            ));
        };
        let uid = pod.metadata.uid.unwrap_or_default();
        let answer = proto::DebugResponse {
            pod: name.to_string(),
            uid: uid.clone(),
            container: container.name.clone(),
        };
        let debug = PodRequest::Debug { uid, container: Box::new(container) };
        running.requests.send(debug).await.map_err(|_| Status::unavailable("the agent is shutting down"))?;
        Ok(answer)
    }
}

/// Validates the request and returns the new container.
#[allow(clippy::result_large_err)] // tonic's own error type
fn container(pod: &core::Pod, request: proto::DebugRequest) -> Result<core::EphemeralContainer, Status> {
    let spec = pod.spec.clone().unwrap_or_default();
    let usual =
        || spec.containers.iter().chain(spec.init_containers.iter().flatten()).map(|c| c.name.as_str());
    let ephemeral = || spec.ephemeral_containers.iter().flatten().map(|c| c.name.as_str());
    let is_taken = |name: &str| usual().chain(ephemeral()).any(|other| other == name);
    if request.image.is_empty() {
        return Err(Status::invalid_argument("missing image"));
    }
    if ephemeral().count() >= MOST {
        return Err(Status::failed_precondition(format!(
            "the pod already has {MOST} ephemeral containers, which can only be removed with the pod"
        )));
    }
    let target = request.target.unwrap_or_default().container;
    if !target.is_empty() && !usual().any(|name| name == target) {
        let names: Vec<&str> = usual().collect();
        return Err(Status::not_found(format!(
            "the pod has no container {target:?}; it has {}",
            names.join(", ")
        )));
    }
    let name = match request.name {
        name if name.is_empty() => {
            let mut names = (1..).map(|n| if n == 1 { NAME.to_owned() } else { format!("{NAME}-{n}") });
            names.find(|name| !is_taken(name)).unwrap_or_default()
        }
        name if is_taken(&name) => {
            return Err(Status::already_exists(format!("the pod already has a container {name}")));
        }
        name if is_label(&name) => name,
        name => {
            return Err(Status::invalid_argument(format!(
                "invalid container name {name:?}: use up to 63 of a-z, 0-9 and '-'"
            )));
        }
    };
    Ok(core::EphemeralContainer {
        name,
        image_pull_policy: Some(pull_policy(&request.image).to_owned()),
        image: Some(request.image),
        command: Some(request.command).filter(|command| !command.is_empty()),
        stdin: Some(request.stdin),
        tty: Some(request.tty),
        target_container_name: Some(target).filter(|target| !target.is_empty()),
        termination_message_path: Some("/dev/termination-log".to_owned()),
        termination_message_policy: Some("File".to_owned()),
        ..core::EphemeralContainer::default()
    })
}

/// Returns true for a label of RFC 1123.
fn is_label(name: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    name.len() <= 63 && name.bytes().all(inner) && !name.starts_with('-') && !name.ends_with('-')
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod() -> core::Pod {
        serde_json::from_value(json!({
            "metadata": {"name": "web"},
            "spec": {"containers": [{"name": "main"}], "ephemeralContainers": [{"name": "debugger"}]},
        }))
        .unwrap()
    }

    fn request(target: &str, name: &str, image: &str) -> proto::DebugRequest {
        let target = proto::ContainerTarget { container: target.to_owned(), ..Default::default() };
        let (name, image) = (name.to_owned(), image.to_owned());
        proto::DebugRequest { target: Some(target), name, image, ..Default::default() }
    }

    #[test]
    fn a_container_gets_a_name_that_is_free() {
        let made = container(&pod(), request("main", "", "busybox")).unwrap();
        assert_eq!((made.name.as_str(), made.target_container_name.as_deref()), ("debugger-2", Some("main")));
        assert_eq!(container(&pod(), request("", "look", "busybox")).unwrap().name, "look");
    }

    #[test]
    fn what_can_not_be_is_refused_with_words() {
        let check = |request: proto::DebugRequest, expected: &str| {
            let refused = container(&pod(), request).unwrap_err();
            assert!(refused.message().contains(expected), "{refused}");
        };
        check(request("", "", ""), "missing image");
        check(request("other", "", "busybox"), "it has main");
        check(request("", "main", "busybox"), "already has a container main");
        check(request("", "Look", "busybox"), "invalid container name");
    }
}
