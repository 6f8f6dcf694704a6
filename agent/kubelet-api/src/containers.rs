//! Finds the pod and container of a path, and reports missing ones as the kubelet does.

use std::sync::Arc;

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use k8s_openapi::api::core::v1 as core;
use tokio::sync::watch;

use beelet_model::status::runtime_id;
use beelet_model::table::{PodEntry, PodName, PodTable};

/// Reason why a request cannot be served: status and message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure(pub(crate) StatusCode, pub(crate) String);

impl Failure {
    pub(crate) fn new(status: StatusCode, sentence: impl Into<String>) -> Self {
        Self(status, sentence.into())
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        (self.0, self.1).into_response()
    }
}

impl From<beelet_cri::Error> for Failure {
    fn from(error: beelet_cri::Error) -> Self {
        let status = match error.kind {
            beelet_cri::Kind::NotFound | beelet_cri::Kind::Unimplemented => StatusCode::NOT_FOUND,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, error.to_string())
    }
}

/// Parts of a path: `{namespace}/{pod}[/{uid}][/{container}]`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Target {
    pub(crate) namespace: String,
    pub(crate) pod: String,
    pub(crate) uid: Option<String>,
    pub(crate) container: String,
}

impl Target {
    /// Finds the pod.
    pub(crate) fn find(&self, table: &PodTable) -> Result<(PodName, Arc<PodEntry>), Failure> {
        let name = PodName { namespace: self.namespace.clone(), name: self.pod.clone() };
        let entry = table
            .pods
            .get(&name)
            .filter(|entry| self.uid.is_none() || entry.pod.metadata.uid.as_deref() == self.uid.as_deref());
        let missing = || Failure::new(StatusCode::NOT_FOUND, "pod does not exist");
        let entry = Arc::clone(entry.ok_or_else(missing)?);
        Ok((name, entry))
    }

    /// Returns the runtime's ID of the running instance of the container.
    pub(crate) fn running<'a>(&self, pod: &'a core::Pod) -> Result<&'a str, Failure> {
        let running = status_of(pod, &self.container)
            .filter(|status| status.state.as_ref().is_some_and(|state| state.running.is_some()));
        running.and_then(runtime_id).ok_or_else(|| {
            let sentence = format!("container not found ({:?})", self.container);
            Failure::new(StatusCode::NOT_FOUND, sentence)
        })
    }
}

/// Returns the statuses of all kinds of containers: main, init and ephemeral.
fn statuses(pod: &core::Pod) -> impl Iterator<Item = &core::ContainerStatus> {
    pod.status.iter().flat_map(|status| {
        let usual = status.container_statuses.iter().chain(&status.init_container_statuses);
        usual.chain(&status.ephemeral_container_statuses).flatten()
    })
}

/// Returns the status of the container with this name.
pub(crate) fn status_of<'a>(pod: &'a core::Pod, container: &str) -> Option<&'a core::ContainerStatus> {
    statuses(pod).find(|status| status.name == container)
}

/// Returns true if the pod's spec has a container with this name, of any kind.
pub(crate) fn has_container(pod: &core::Pod, name: &str) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let plain = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    plain.map(|container| container.name.as_str()).any(|one| one == name)
        || spec.ephemeral_containers.iter().flatten().any(|container| container.name == name)
}

/// Returns true if the container has a terminal according to the pod's spec.
pub(crate) fn has_terminal(pod: &core::Pod, name: &str) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let plain = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let plain = plain.map(|container| (&container.name, container.tty));
    let ephemeral =
        spec.ephemeral_containers.iter().flatten().map(|container| (&container.name, container.tty));
    plain.chain(ephemeral).any(|(one, tty)| one == name && tty == Some(true))
}

/// Waits until the instance no longer runs; without an instance, until the pod has terminated.
pub(crate) async fn ended(
    mut pods: watch::Receiver<Arc<PodTable>>,
    name: PodName,
    uid: Option<String>,
    instance: Option<String>,
) {
    let over = |table: &Arc<PodTable>| {
        let Some(entry) = table.pods.get(&name).filter(|entry| entry.pod.metadata.uid == uid) else {
            return true;
        };
        match &instance {
            None => entry.ended().is_some(),
            Some(id) => !statuses(&entry.pod).any(|status| {
                runtime_id(status) == Some(id)
                    && status.state.as_ref().is_some_and(|state| state.running.is_some())
            }),
        }
    };
    // The table is dropped only when the agent is shutting down.
    let _ = pods.wait_for(over).await;
}
