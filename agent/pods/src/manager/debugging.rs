//! Ephemeral containers of static pods (KEP-277): what a manifest may not have, and a person adds to look
//! into a pod. They stay with the pod, over restarts of the agent too, and go with it.

use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;
use tracing::info;

use super::{Managed, Manager};

impl Managed {
    /// The pod as its manifest has it, with the ephemeral containers that were added to it.
    pub(super) fn with_debuggers(&self, pod: &Arc<core::Pod>) -> Arc<core::Pod> {
        with_debuggers(Arc::clone(pod), &self.kept.debuggers)
    }
}

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

impl Manager {
    /// See [`beelet_model::request::Request::Debug`].
    pub(super) fn debug(&mut self, uid: &str, container: core::EphemeralContainer) {
        let Some(managed) = self.pods.get_mut(uid) else { return };
        let known = managed.kept.has_debugger(&container.name);
        if managed.origin().is_api() || managed.terminating() || managed.kept.failure.is_some() || known {
            return;
        }
        info!(pod = %managed.name, uid, container = container.name, "an ephemeral container is added on request");
        managed.kept.debuggers.push(container);
        managed.pod = managed.with_debuggers(&managed.pod);
        let pod = Arc::clone(&managed.pod);
        managed.control.send_modify(|c| c.updated = Some(pod));
        self.publish(uid);
    }
}
