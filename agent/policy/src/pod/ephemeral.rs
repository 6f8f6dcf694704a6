//! Ephemeral containers: containers added to a running pod to inspect it from inside (KEP-277). Each starts
//! once, and affects neither the pod's readiness nor its phase.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Container as ContainerSpec, EphemeralContainer, PodSpec};

use super::{ContainerState, Decision};

/// Returns a pod's ephemeral containers in the form of regular ones, without the fields that they must not
/// have (probes, ports, hooks, resources), even if the object sets them.
pub fn ephemeral_containers(spec: &PodSpec) -> Vec<ContainerSpec> {
    spec.ephemeral_containers.iter().flatten().map(as_container).collect()
}

fn as_container(spec: &EphemeralContainer) -> ContainerSpec {
    let spec = spec.clone();
    ContainerSpec {
        name: spec.name,
        image: spec.image,
        image_pull_policy: spec.image_pull_policy,
        command: spec.command,
        args: spec.args,
        working_dir: spec.working_dir,
        env: spec.env,
        env_from: spec.env_from,
        volume_mounts: spec.volume_mounts,
        security_context: spec.security_context,
        stdin: spec.stdin,
        stdin_once: spec.stdin_once,
        tty: spec.tty,
        termination_message_path: spec.termination_message_path,
        termination_message_policy: spec.termination_message_policy,
        ..ContainerSpec::default()
    }
}

impl Decision<'_> {
    /// Starts those that never ran, also during initialization (the kubelet's computePodActions).
    pub(super) fn start_ephemeral(&mut self) {
        let spec = self.facts.spec;
        for name in spec.ephemeral_containers.iter().flatten().map(|container| container.name.as_str()) {
            match self.facts.newest.get(name).map(|c| (&c.state, c.attempt)) {
                None => self.start(name, 0, Duration::ZERO, None),
                Some((ContainerState::Created, attempt)) => {
                    let newest = self.facts.newest.get(name).copied();
                    let here = newest.filter(|c| self.facts.current.is_some_and(|s| s.id == c.sandbox_id));
                    let here = here.map(|c| c.id.clone());
                    let attempt = if here.is_some() { attempt } else { attempt.saturating_add(1) };
                    self.start(name, attempt, Duration::ZERO, here);
                }
                Some(_) => {}
            }
        }
    }
}
