//! More or fewer exclusive CPUs for a container that runs (KEP-5554). A container that grows keeps the CPUs
//! that it has; a container that shrinks keeps some of them.

use super::{
    super::{
        cpu_set::CpuSet,
        error::Refusal,
        hints::ProviderHints,
        machine::Level,
        needs::{ContainerNeeds, Kind, Needs},
        nodes::NodeSet,
    },
    CPU, CpuManager, Policy,
};

impl CpuManager {
    /// Returns the sets of nodes that could provide the CPUs of a container that grows: all have the nodes of
    /// the CPUs that the container has, or its pod.
    pub(in crate::pinning) fn growth_hints(
        &self,
        needs: &Needs,
        container: &ContainerNeeds,
        of_pod: bool,
    ) -> ProviderHints {
        let Policy::Static(own) = &self.policy else { return ProviderHints::new() };
        let own_cpus = self.of(&needs.uid, &container.name).cloned().unwrap_or_default();
        let held = if of_pod { self.running(needs) } else { own_cpus.clone() };
        let more = container.cpus.saturating_sub(own_cpus.len());
        let free = own.available(&self.state).union(&self.left_by_init(needs, container));
        let hints = own.hints(&free, &held, held.len().saturating_add(more));
        ProviderHints::from([(CPU.to_owned(), Some(hints))])
    }

    /// Gives a container the CPUs that it lacks, as far as possible from these nodes, or else from the nodes
    /// of its CPUs.
    ///
    /// # Errors
    /// Too few CPUs or whole cores are free.
    pub(in crate::pinning) fn grow(
        &mut self,
        needs: &Needs,
        container: &ContainerNeeds,
        nodes: Option<NodeSet>,
    ) -> Result<(), Refusal> {
        let Policy::Static(own) = &self.policy else { return Ok(()) };
        let held = self.of(&needs.uid, &container.name).cloned().unwrap_or_default();
        let more = container.cpus.saturating_sub(held.len());
        own.check_cores(&self.state, container.cpus, more)?;
        let reusable = self.left_by_init(needs, container);
        let free = own.available(&self.state).union(&reusable);
        // The other threads of its cores come first: no other container should share these cores.
        let cores = own.topology.touched(Level::Core, &held);
        let siblings = cores.fold(CpuSet::default(), |all, (_, core)| all.union(core)).intersection(&free);
        let siblings = if own.options.distribute_cores { CpuSet::default() } else { siblings.first(more) };
        let mut rest = self.state.clone();
        rest.shared = rest.shared.difference(&siblings);
        let near = own.topology.touched(Level::Node, &held).map(|(node, _)| node).collect();
        let count = more.saturating_sub(siblings.len());
        let reusable = reusable.difference(&siblings);
        let claimed = own.claim_near(&rest, count, Some(nodes.unwrap_or(near)), &reusable);
        let added = claimed.map_err(Refusal::unexpected)?.union(&siblings);
        self.state.shared = self.state.shared.difference(&added);
        self.set(needs, container, held.union(&added));
        Ok(())
    }

    /// Returns the sets of nodes from which a container that shrinks could keep its CPUs.
    pub(in crate::pinning) fn shrink_hints(
        &self,
        needs: &Needs,
        container: &ContainerNeeds,
    ) -> ProviderHints {
        let Policy::Static(own) = &self.policy else { return ProviderHints::new() };
        let held = self.of(&needs.uid, &container.name).cloned().unwrap_or_default();
        let hints = own.hints(&held, &CpuSet::default(), container.cpus);
        ProviderHints::from([(CPU.to_owned(), Some(hints))])
    }

    /// Takes the CPUs from a container that it requests no more; it keeps those of these nodes.
    ///
    /// # Errors
    /// The container would keep parts of cores that it must have as a whole.
    pub(in crate::pinning) fn shrink(
        &mut self,
        needs: &Needs,
        container: &ContainerNeeds,
        nodes: Option<NodeSet>,
    ) -> Result<(), Refusal> {
        let Policy::Static(own) = &self.policy else { return Ok(()) };
        own.check_cores(&self.state, container.cpus, 0)?;
        let held = self.of(&needs.uid, &container.name).cloned().unwrap_or_default();
        let near = nodes.map_or_else(|| held.clone(), |nodes| own.near(nodes).intersection(&held));
        let claim = |cpus: &CpuSet, count: usize| own.claim(cpus, count, 0).map_err(Refusal::unexpected);
        let kept = claim(&near, container.cpus.min(near.len()))?;
        let kept = claim(&held.difference(&near), container.cpus.saturating_sub(kept.len()))?.union(&kept);
        // The CPUs of an ended init container stay with the pod.
        let others = self.state.containers.get(&needs.uid).into_iter().flatten();
        let others = others.filter(|(name, _)| **name != container.name);
        let others = others.fold(CpuSet::default(), |all, (_, cpus)| all.union(cpus));
        self.state.shared = self.state.shared.union(&held.difference(&kept).difference(&others));
        self.set(needs, container, kept);
        Ok(())
    }

    /// Checks that a number of CPUs consists of whole cores, where that is required.
    ///
    /// # Errors
    /// The number does not.
    pub(in crate::pinning) fn check_whole_cores(&self, count: usize) -> Result<(), Refusal> {
        match &self.policy {
            Policy::None => Ok(()),
            Policy::Static(own) => own.check_cores(&self.state, count, 0),
        }
    }

    fn set(&mut self, needs: &Needs, container: &ContainerNeeds, cpus: CpuSet) {
        self.hand_on(&needs.uid, container.kind, &cpus);
        let pod = self.state.containers.entry(needs.uid.clone()).or_default();
        pod.insert(container.name.clone(), cpus);
    }

    /// Returns the CPUs of the pod's containers that run beside each other.
    fn running(&self, needs: &Needs) -> CpuSet {
        let running = needs.containers.iter().filter(|own| own.kind != Kind::Init);
        let cpus = running.filter_map(|own| self.of(&needs.uid, &own.name));
        cpus.fold(CpuSet::default(), |all, cpus| all.union(cpus))
    }

    /// Returns the CPUs of init containers that have ended when this container runs, and that no other
    /// container of the pod has. A sidecar may run beside init containers.
    fn left_by_init(&self, needs: &Needs, container: &ContainerNeeds) -> CpuSet {
        if container.kind != Kind::App {
            return CpuSet::default();
        }
        let ended = needs.containers.iter().filter(|own| own.kind == Kind::Init);
        let ended = ended.filter_map(|own| self.of(&needs.uid, &own.name));
        ended.fold(CpuSet::default(), |all, cpus| all.union(cpus)).difference(&self.running(needs))
    }
}
