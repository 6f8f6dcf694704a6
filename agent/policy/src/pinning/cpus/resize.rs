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

/// A change of one container's CPUs.
#[derive(Debug)]
pub(in crate::pinning) struct CpuChange<'a> {
    manager: &'a mut CpuManager,
    needs: &'a Needs,
    container: &'a ContainerNeeds,
    /// The CPUs that the container has.
    held: CpuSet,
}

impl<'a> CpuChange<'a> {
    pub(in crate::pinning) fn new(
        manager: &'a mut CpuManager,
        needs: &'a Needs,
        container: &'a ContainerNeeds,
    ) -> Self {
        let held = manager.of(&needs.uid, &container.name).cloned().unwrap_or_default();
        Self { manager, needs, container, held }
    }

    /// Returns the sets of nodes that could provide the CPUs of a container that grows: all have the nodes of
    /// the CPUs that the container has, or its pod.
    pub(in crate::pinning) fn growth_hints(&self, of_pod: bool) -> ProviderHints {
        let Policy::Static(own) = &self.manager.policy else { return ProviderHints::new() };
        let held = if of_pod { self.running() } else { self.held.clone() };
        let free = own.available(&self.manager.state).union(&self.left_by_init());
        let hints = own.hints(&free, &held, held.len().saturating_add(self.more()));
        ProviderHints::from([(CPU.to_owned(), Some(hints))])
    }

    /// Returns the sets of nodes from which a container that shrinks could keep its CPUs.
    pub(in crate::pinning) fn shrink_hints(&self) -> ProviderHints {
        let Policy::Static(own) = &self.manager.policy else { return ProviderHints::new() };
        let hints = own.hints(&self.held, &CpuSet::default(), self.container.cpus);
        ProviderHints::from([(CPU.to_owned(), Some(hints))])
    }

    /// Checks that the container's number of CPUs consists of whole cores, if the policy requires that.
    ///
    /// # Errors
    /// The number does not.
    pub(in crate::pinning) fn check_whole_cores(&self) -> Result<(), Refusal> {
        match &self.manager.policy {
            Policy::None => Ok(()),
            Policy::Static(own) => own.check_cores(&self.manager.state, self.container.cpus, 0),
        }
    }

    /// Gives the container the CPUs that it lacks, as far as possible from these nodes, or else from the
    /// nodes of its CPUs.
    ///
    /// # Errors
    /// Too few CPUs or whole cores are free.
    pub(in crate::pinning) fn grow(self, nodes: Option<NodeSet>) -> Result<(), Refusal> {
        let Policy::Static(own) = &self.manager.policy else { return Ok(()) };
        let (state, more) = (&self.manager.state, self.more());
        own.check_cores(state, self.container.cpus, more)?;
        let reusable = self.left_by_init();
        let free = own.available(state).union(&reusable);
        // The other threads of its cores come first: no other container should share these cores.
        let cores = own.topology.touched(Level::Core, &self.held);
        let siblings = cores.fold(CpuSet::default(), |all, (_, core)| all.union(core)).intersection(&free);
        let siblings = if own.options.distribute_cores { CpuSet::default() } else { siblings.first(more) };
        let mut rest = state.clone();
        rest.shared = rest.shared.difference(&siblings);
        let near = own.topology.touched(Level::Node, &self.held).map(|(node, _)| node).collect();
        let count = more.saturating_sub(siblings.len());
        let reusable = reusable.difference(&siblings);
        let claimed = own.claim_near(&rest, count, Some(nodes.unwrap_or(near)), &reusable);
        let added = claimed.map_err(Refusal::unexpected)?.union(&siblings);
        self.manager.state.shared = self.manager.state.shared.difference(&added);
        let cpus = self.held.union(&added);
        self.set(cpus);
        Ok(())
    }

    /// Takes the CPUs from the container that it requests no more; it keeps those of these nodes.
    ///
    /// # Errors
    /// The container would keep parts of cores that it must have as a whole.
    pub(in crate::pinning) fn shrink(self, nodes: Option<NodeSet>) -> Result<(), Refusal> {
        self.check_whole_cores()?;
        let Policy::Static(own) = &self.manager.policy else { return Ok(()) };
        let (held, count) = (&self.held, self.container.cpus);
        let near = nodes.map_or_else(|| held.clone(), |nodes| own.near(nodes).intersection(held));
        let claim = |cpus: &CpuSet, count: usize| own.claim(cpus, count, 0).map_err(Refusal::unexpected);
        let kept = claim(&near, count.min(near.len()))?;
        let kept = claim(&held.difference(&near), count.saturating_sub(kept.len()))?.union(&kept);
        // The CPUs of an ended init container stay with the pod.
        let others = self.manager.state.containers.get(&self.needs.uid).into_iter().flatten();
        let others = others.filter(|(name, _)| **name != self.container.name);
        let others = others.fold(CpuSet::default(), |all, (_, cpus)| all.union(cpus));
        let freed = held.difference(&kept).difference(&others);
        self.manager.state.shared = self.manager.state.shared.union(&freed);
        self.set(kept);
        Ok(())
    }

    fn more(&self) -> usize {
        self.container.cpus.saturating_sub(self.held.len())
    }

    fn set(self, cpus: CpuSet) {
        self.manager.hand_on(&self.needs.uid, self.container.kind, &cpus);
        self.manager.state.assign(&self.needs.uid, &self.container.name, cpus);
    }

    /// Returns the CPUs of the pod's containers that run beside each other.
    fn running(&self) -> CpuSet {
        self.of_kind(|kind| kind != Kind::Init)
    }

    /// Returns the CPUs of init containers that have ended when this container runs, and that no other
    /// container of the pod has. A sidecar may run beside init containers.
    fn left_by_init(&self) -> CpuSet {
        match self.container.kind {
            Kind::App => self.of_kind(|kind| kind == Kind::Init).difference(&self.running()),
            Kind::Init | Kind::Sidecar => CpuSet::default(),
        }
    }

    fn of_kind(&self, is_meant: impl Fn(Kind) -> bool) -> CpuSet {
        let meant = self.needs.containers.iter().filter(|own| is_meant(own.kind));
        let cpus = meant.filter_map(|own| self.manager.of(&self.needs.uid, &own.name));
        cpus.fold(CpuSet::default(), |all, cpus| all.union(cpus))
    }
}
