//! The CPUs of containers that run although the state file is lost.

use super::{
    super::{cpu_set::CpuSet, needs::Needs},
    CpuManager, Policy,
};

/// Assigns a container the CPUs that it runs on, if they are as many as it requests, and free. The shared
/// pool keeps at least one CPU. Returns true if the container has these CPUs for itself now.
pub fn reclaim(manager: &mut CpuManager, needs: &Needs, container: &str, cpus: &CpuSet) -> bool {
    let Policy::Static(own) = &manager.policy else { return false };
    let requested = needs.containers.iter().find(|other| other.name == container);
    let requested = requested.map_or(0, |container| container.cpus);
    let shared = manager.state.shared.difference(cpus);
    let may = !needs.ignored && !needs.pod_level && requested > 0 && requested == cpus.len();
    let is_free = cpus.is_subset(&own.available(&manager.state)) && !shared.is_empty();
    if !may || !is_free || manager.of(&needs.uid, container).is_some() {
        return false;
    }
    manager.state.shared = shared;
    manager.state.assign(&needs.uid, container, cpus.clone());
    true
}
