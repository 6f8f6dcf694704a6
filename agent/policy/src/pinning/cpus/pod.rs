//! CPUs of a pod with pod-level resources, under the pod scope (`AllocatePod`, KEP-5526): the pod gets its
//! CPUs as a whole, and its containers share them.

use super::super::{
    cpu_set::CpuSet,
    error::{Reason, Refusal},
    hints::ProviderHints,
    needs::{ContainerNeeds, Kind, Needs},
    nodes::NodeSet,
};
use super::{CPU, CpuManager, Policy, Static};

impl CpuManager {
    /// Returns the sets of nodes that could provide all CPUs of a pod (`GetPodTopologyHints`).
    #[must_use]
    pub fn pod_hints(&self, needs: &Needs) -> ProviderHints {
        let Policy::Static(own) = &self.policy else { return ProviderHints::new() };
        if needs.cpus == 0 || needs.ignored {
            return ProviderHints::new();
        }
        let hints = |hints| ProviderHints::from([(CPU.to_owned(), Some(hints))]);
        let held = || needs.containers.iter().filter_map(|c| Some((c, self.of(&needs.uid, &c.name)?)));
        let changed = held().any(|(container, cpus)| cpus.len() != container.cpus);
        if changed || (needs.pod_level && check_shared_pool(needs).is_err()) {
            return hints(Vec::new());
        }
        let held = held().fold(CpuSet::default(), |all, (_, cpus)| all.union(cpus));
        if held.len() == needs.cpus {
            return hints(own.hints(&held, &CpuSet::default(), needs.cpus));
        }
        let reusable = self.reusable(&needs.uid).union(&held);
        hints(own.hints(&own.available(&self.state), &reusable, needs.cpus))
    }

    /// Assigns CPUs to a pod, and divides them. A pod that already has its CPUs (after a restart) keeps them,
    /// as in 1.38 (k/k 141041).
    ///
    /// # Errors
    /// Too few CPUs or whole cores are free, or no CPUs would remain for containers without exclusive CPUs.
    pub fn allocate_pod(&mut self, needs: &Needs, nodes: Option<NodeSet>) -> Result<(), Refusal> {
        let Policy::Static(own) = &self.policy else { return Ok(()) };
        if needs.cpus == 0 {
            return Ok(());
        }
        check_shared_pool(needs).map_err(|message| Refusal::new(Reason::EmptyPodSharedPool, message))?;
        let held = self.state.pods.get(&needs.uid).filter(|held| held.len() == needs.cpus).cloned();
        let of_pod = match held {
            Some(held) => held,
            None => {
                own.check_cores(&self.state, needs.cpus, needs.cpus)?;
                let claimed = own.claim_near(&self.state, needs.cpus, nodes, &CpuSet::default());
                claimed.map_err(Refusal::unexpected)?
            }
        };
        let divided = own.divide(needs, &of_pod, |name| self.of(&needs.uid, name).cloned())?;
        self.state.shared = self.state.shared.difference(&of_pod);
        self.state.pods.insert(needs.uid.clone(), of_pod);
        let containers = self.state.containers.entry(needs.uid.clone()).or_default();
        containers.extend(divided);
        Ok(())
    }
}

impl Static {
    /// Divides a pod's CPUs among its containers; containers that already have their CPUs keep them. An init
    /// container gets all CPUs that the sidecars before it leave; the shared containers get the CPUs that
    /// exclusive containers leave.
    fn divide(
        &self,
        needs: &Needs,
        of_pod: &CpuSet,
        held: impl Fn(&str) -> Option<CpuSet>,
    ) -> Result<Vec<(String, CpuSet)>, Refusal> {
        let held = |name: &str| held(name).filter(|cpus| cpus.is_subset(of_pod));
        let claim = |container: &ContainerNeeds, free: &CpuSet| match held(&container.name) {
            Some(cpus) => Ok(cpus),
            None => self.claim(free, container.cpus, 0).map_err(Refusal::unexpected),
        };
        let mut left = of_pod.clone();
        let mut divided = Vec::new();
        let mut sharing = Vec::new();
        for container in &needs.containers {
            match container.kind {
                Kind::Init if container.cpus > 0 => {
                    divided.push((container.name.clone(), claim(container, &left)?));
                }
                Kind::Init => divided.push((container.name.clone(), left.clone())),
                Kind::Sidecar | Kind::App if container.cpus > 0 => {
                    let cpus = claim(container, &left)?;
                    left = left.difference(&cpus);
                    divided.push((container.name.clone(), cpus));
                }
                Kind::Sidecar | Kind::App => sharing.push(container.name.clone()),
            }
        }
        divided.extend(sharing.into_iter().map(|name| (name, left.clone())));
        Ok(divided)
    }
}

/// Checks that containers without exclusive CPUs have some of the pod's CPUs (`validatePodScopeResources`).
fn check_shared_pool(needs: &Needs) -> Result<(), &'static str> {
    let (mut exclusive, mut sharing) = (0_usize, false);
    for container in &needs.containers {
        match container.kind {
            Kind::Init if container.cpus == 0 && exclusive >= needs.cpus => {
                return Err("pod rejected, pod has shared init containers but no cpus available for them");
            }
            Kind::Init => {}
            Kind::Sidecar | Kind::App => {
                exclusive = exclusive.saturating_add(container.cpus);
                sharing |= container.cpus == 0;
            }
        }
    }
    if sharing && exclusive >= needs.cpus {
        let message = "pod rejected, sum of exclusive container cpu requests equals pod budget, leaving no cpus for shared containers";
        return Err(message);
    }
    Ok(())
}
