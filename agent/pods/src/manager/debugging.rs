//! Ephemeral containers of static pods (KEP-277). A manifest may not have ephemeral containers; a user adds
//! them to debug a pod. Ephemeral containers survive restarts of the agent, and are removed with their pod.

use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;
use tracing::info;

use super::pods::Pods;

/// Returns a static pod with these ephemeral containers added.
pub(super) fn with_debuggers(
    mut pod: Arc<core::Pod>,
    debuggers: &[core::EphemeralContainer],
) -> Arc<core::Pod> {
    if !debuggers.is_empty() {
        let spec = &mut Arc::make_mut(&mut pod).spec;
        spec.get_or_insert_default().ephemeral_containers = Some(debuggers.to_vec());
    }
    pod
}

/// See [`beelet_model::request::Request::Debug`].
pub(super) fn debug(pods: &mut Pods, uid: &str, container: core::EphemeralContainer) {
    let Some(managed) = pods.by_uid.get_mut(uid) else { return };
    let known = managed.record.has_debugger(&container.name);
    if managed.origin().is_api() || managed.terminating() || managed.record.failure.is_some() || known {
        return;
    }
    info!(pod = %managed.name, uid, container = container.name, "adding ephemeral container on request");
    managed.record.debuggers.push(container);
    managed.pod = with_debuggers(Arc::clone(&managed.pod), &managed.record.debuggers);
    let pod = Arc::clone(&managed.pod);
    managed.control.send_modify(|c| c.updated = Some(pod));
    pods.publish(uid);
}
