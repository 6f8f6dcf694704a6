//! The three managers together: admission of a pod, start of its containers, removal (`scope_container.go`,
//! `scope_pod.go`).

use super::{
    cpus::CpuManager,
    devices::DeviceProvider,
    error::{Reason, Refusal},
    hints::{Hint, ProviderHints},
    memory::MemoryManager,
    needs::{ContainerNeeds, Kind, Needs},
    topology::TopologyManager,
};
use crate::devices::topology::{TopologyPolicy, TopologyScope};

/// The managers of a node.
#[derive(Debug, Clone)]
pub struct Pins {
    /// The policy for NUMA nodes.
    pub topology: TopologyManager,
    /// Exclusive CPUs.
    pub cpus: CpuManager,
    /// Memory.
    pub memory: MemoryManager,
}

/// The steps of a decision: the hints of each provider, and the merged result.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Alignment {
    /// The best hint, by container.
    pub affinities: Vec<(String, Hint)>,
    /// The hints of all providers, by container; of the whole pod under the empty name.
    pub hints: Vec<(String, Vec<ProviderHints>)>,
}

pub(super) const NO_LOCALITY: &str = "Resources cannot be allocated with Topology locality";
const NO_LOCALITY_OF_POD: &str =
    "Pod Scope pod with pod-level resources failed admission under pod-scope topology manager";
const NO_LOCALITY_OF_CONTAINER: &str =
    "Pod Scope pod with pod-level resources failed admission with a container-level topology manager";

impl Pins {
    /// Admits a pod: assigns devices, CPUs and memory to each of its containers, in order. Skips containers
    /// that already have theirs. The assignments of a rejected pod become free only after [`Self::release`].
    ///
    /// # Errors
    /// The providers do not agree, or too little is free.
    pub fn admit(
        &mut self,
        needs: &Needs,
        devices: &mut dyn DeviceProvider,
        alignment: &mut Alignment,
    ) -> Result<(), Refusal> {
        match (self.topology.policy(), self.topology.scope()) {
            (TopologyPolicy::None, _) => {
                let anywhere = Hint { nodes: None, preferred: false };
                needs
                    .containers
                    .iter()
                    .try_for_each(|container| self.allocate(needs, container, anywhere, devices))
            }
            (_, TopologyScope::Container) => needs
                .containers
                .iter()
                .try_for_each(|container| self.admit_container(needs, container, devices, alignment)),
            (_, TopologyScope::Pod) => self.admit_as_one(needs, devices, alignment),
        }
    }

    /// Admits one container of a pod. If all containers are aligned together, the first call admits all.
    ///
    /// # Errors
    /// As for [`Self::admit`].
    pub fn admit_next(
        &mut self,
        needs: &Needs,
        container: &str,
        devices: &mut dyn DeviceProvider,
        alignment: &mut Alignment,
    ) -> Result<(), Refusal> {
        if self.is_per_pod() {
            return self.admit(needs, devices, alignment);
        }
        let Some(container) = needs.containers.iter().find(|other| other.name == container) else {
            return Ok(());
        };
        if self.topology.policy() == TopologyPolicy::None {
            let anywhere = Hint { nodes: None, preferred: false };
            return self.allocate(needs, container, anywhere, devices);
        }
        self.admit_container(needs, container, devices, alignment)
    }

    /// Returns true if all containers of a pod are aligned together.
    #[must_use]
    pub fn is_per_pod(&self) -> bool {
        self.topology.policy() != TopologyPolicy::None && self.topology.scope() == TopologyScope::Pod
    }

    fn admit_container(
        &mut self,
        needs: &Needs,
        container: &ContainerNeeds,
        devices: &mut dyn DeviceProvider,
        alignment: &mut Alignment,
    ) -> Result<(), Refusal> {
        let hints = vec![
            devices.hints(Some(&container.name)),
            self.cpus.hints(needs, container),
            self.memory.hints(needs, container),
        ];
        let message = if needs.pod_level { NO_LOCALITY_OF_CONTAINER } else { NO_LOCALITY };
        let hint = self.align(&container.name, hints, alignment, message)?;
        alignment.affinities.push((container.name.clone(), hint));
        self.allocate(needs, container, hint, devices)
    }

    /// Aligns all containers together.
    fn admit_as_one(
        &mut self,
        needs: &Needs,
        devices: &mut dyn DeviceProvider,
        alignment: &mut Alignment,
    ) -> Result<(), Refusal> {
        let hints = vec![devices.hints(None), self.cpus.pod_hints(needs), self.memory.pod_hints(needs)];
        let message = if needs.pod_level { NO_LOCALITY_OF_POD } else { NO_LOCALITY };
        let hint = self.align("", hints, alignment, message)?;
        alignment.affinities = needs.containers.iter().map(|c| (c.name.clone(), hint)).collect();
        if !needs.pod_level {
            return needs.containers.iter().try_for_each(|c| self.allocate(needs, c, hint, devices));
        }
        devices.allocate_pod(hint.nodes)?;
        self.cpus.allocate_pod(needs, hint.nodes)?;
        self.memory.allocate_pod(needs, hint)
    }

    fn align(
        &self,
        container: &str,
        hints: Vec<ProviderHints>,
        alignment: &mut Alignment,
        message: &str,
    ) -> Result<Hint, Refusal> {
        let merged = self.topology.merge(&hints);
        alignment.hints.push((container.to_owned(), hints));
        if merged.admitted { Ok(merged.hint) } else { Err(Refusal::new(Reason::TopologyAffinity, message)) }
    }

    fn allocate(
        &mut self,
        needs: &Needs,
        container: &ContainerNeeds,
        hint: Hint,
        devices: &mut dyn DeviceProvider,
    ) -> Result<(), Refusal> {
        devices.allocate(&container.name, hint.nodes)?;
        self.cpus.allocate(needs, container, hint.nodes)?;
        self.memory.allocate(needs, container, hint)
    }

    /// Returns true if the state files have everything that a pod needs now. Such a pod continues without
    /// admission after any change of the node; the kubelet admits it again, and may terminate it.
    #[must_use]
    pub fn holds(&self, needs: &Needs) -> bool {
        let static_cpus = !self.cpus.allocatable().is_empty();
        let cpus = |container: &ContainerNeeds| {
            let held = self.cpus.of(&needs.uid, &container.name);
            container.cpus == 0 || held.is_some_and(|held| held.len() == container.cpus)
        };
        // An ended init container has released its memory.
        let memory = |container: &ContainerNeeds| {
            let named = container.memory.as_ref().is_ok_and(|memory| !memory.is_empty());
            container.kind == Kind::Init
                || !named
                || !self.memory.state().of(&needs.uid, &container.name).is_empty()
        };
        let nothing = needs.ignored || !needs.guaranteed;
        let all = |held: &dyn Fn(&ContainerNeeds) -> bool| needs.containers.iter().all(held);
        nothing || ((!static_cpus || all(&cpus)) && (!self.memory.is_static() || all(&memory)))
    }

    /// Returns true if the static policies have anything for a pod.
    #[must_use]
    pub fn has_something_for(&self, needs: &Needs) -> bool {
        let is_managed = !self.cpus.allocatable().is_empty() || self.memory.is_static();
        let names = |container: &ContainerNeeds| {
            container.cpus > 0 || container.memory.as_ref().is_ok_and(|memory| !memory.is_empty())
        };
        is_managed && needs.guaranteed && !needs.ignored && needs.containers.iter().any(names)
    }

    /// Updates the managers before a container starts.
    pub fn container_starts(&mut self, needs: &Needs, container: &str) {
        self.memory.container_starts(needs, container);
    }

    /// Frees all CPUs and all memory of a pod.
    pub fn release(&mut self, uid: &str) {
        self.cpus.release(uid);
        self.memory.release(uid);
    }

    /// Frees all CPUs and all memory of pods and containers that are no longer active (`removeStaleState`).
    pub fn retain(&mut self, wanted: impl Fn(&str, &str) -> bool) {
        let pods = self.cpus.state().containers.keys().chain(self.memory.state().containers.keys());
        let pods: Vec<String> = pods
            .chain(self.cpus.state().pods.keys())
            .chain(self.memory.state().pods.keys())
            .cloned()
            .collect();
        for uid in pods {
            self.cpus.retain(&uid, |container| wanted(&uid, container));
            self.memory.retain(&uid, |container| wanted(&uid, container));
        }
    }
}
