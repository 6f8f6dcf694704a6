//! Ephemeral containers of static pods (KEP-277): a manifest may not have them, and a person adds them to
//! look into a pod. They stay with the pod, over restarts of the agent too, and go with it.

use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;
use tracing::info;

use super::pods::Pods;

/// A static pod with ephemeral containers.
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
    info!(pod = %managed.name, uid, container = container.name, "an ephemeral container is added on request");
    managed.record.debuggers.push(container);
    managed.pod = with_debuggers(Arc::clone(&managed.pod), &managed.record.debuggers);
    let pod = Arc::clone(&managed.pod);
    managed.control.send_modify(|c| c.updated = Some(pod));
    pods.publish(uid);
}
