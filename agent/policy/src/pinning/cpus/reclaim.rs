//! The CPUs of containers that run although the state file is lost.

use super::{
    super::{cpu_set::CpuSet, needs::Needs},
    CpuManager, Policy,
};

impl CpuManager {
    /// Assigns a container the CPUs that it runs on, if they are as many as it requests, and free. The shared
    /// pool keeps at least one CPU. Returns true if the container has these CPUs for itself now.
    pub fn reclaim(&mut self, needs: &Needs, container: &str, cpus: &CpuSet) -> bool {
        let Policy::Static(own) = &self.policy else { return false };
        let requested = needs.containers.iter().find(|other| other.name == container);
        let requested = requested.map_or(0, |container| container.cpus);
        let shared = self.state.shared.difference(cpus);
        let may = !needs.ignored && !needs.pod_level && requested > 0 && requested == cpus.len();
        let is_free = cpus.is_subset(&own.available(&self.state)) && !shared.is_empty();
        if !may || !is_free || self.of(&needs.uid, container).is_some() {
            return false;
        }
        self.state.shared = shared;
        let pod = self.state.containers.entry(needs.uid.clone()).or_default();
        pod.insert(container.to_owned(), cpus.clone());
        true
    }
}
