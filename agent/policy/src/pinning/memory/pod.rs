//! Memory of a pod with pod-level resources, under the pod scope (`AllocatePod`, KEP-5526): the pod gets its
//! memory as a whole from one set of nodes, and its containers share it.

use super::super::{
    error::{Reason, Refusal},
    hints::{Hint, ProviderHints},
    needs::{Bytes, ContainerNeeds, Kind, Needs, NotWhole},
};
use super::{MemoryManager, blocks, for_each, hints_of_blocks};

impl MemoryManager {
    /// Returns the sets of nodes that could provide all memory of a pod (`GetPodTopologyHints`). For memory
    /// that the pod already has, the hint is its nodes, as in 1.38 (k/k 141070); before, the kubelet compared
    /// one container's memory with the needs of all containers.
    #[must_use]
    pub fn pod_hints(&self, needs: &Needs) -> ProviderHints {
        let Ok(wanted) = &needs.memory else { return ProviderHints::new() };
        if self.machine.is_none() || !needs.guaranteed || needs.ignored {
            return ProviderHints::new();
        }
        if needs.pod_level && check_shared_pool(needs, wanted).is_err() {
            return wanted.keys().map(|resource| (resource.clone(), Some(Vec::new()))).collect();
        }
        if wanted.is_empty() {
            return ProviderHints::new();
        }
        match self.state.held_by_pod(needs) {
            Some(blocks) => hints_of_blocks(&blocks, wanted),
            None => for_each(wanted, &self.possible(&needs.uid, wanted)),
        }
    }

    /// Assigns memory to a pod, and divides it. A pod that already has its memory (after a restart) keeps it,
    /// as in 1.38 (k/k 141077).
    ///
    /// # Errors
    /// Too little memory is free, or no memory would remain for containers without their own.
    pub fn allocate_pod(&mut self, needs: &Needs, affinity: Hint) -> Result<(), Refusal> {
        let Ok(wanted) = &needs.memory else { return Ok(()) };
        if self.machine.is_none() || !needs.guaranteed {
            return Ok(());
        }
        check_shared_pool(needs, wanted)
            .map_err(|message| Refusal::new(Reason::EmptyPodSharedPool, message))?;
        if self.state.pods.contains_key(&needs.uid) {
            return Ok(());
        }
        let nodes = self.choose(&needs.uid, wanted, affinity)?;
        let divided = divide(needs, wanted).map_err(Refusal::unexpected)?;
        for (resource, size) in wanted {
            self.state.ledger.reserve(nodes, resource, *size);
        }
        self.state.pods.insert(needs.uid.clone(), blocks(nodes, wanted));
        let containers = self.state.containers.entry(needs.uid.clone()).or_default();
        containers.extend(divided.into_iter().map(|(name, sizes)| (name, blocks(nodes, &sizes))));
        Ok(())
    }
}

/// Divides a pod's memory among its containers. An init container gets all memory that the sidecars before it
/// leave; the shared containers get the memory that containers with their own memory leave.
fn divide(needs: &Needs, wanted: &Bytes) -> Result<Vec<(String, Bytes)>, NotWhole> {
    let mut left = wanted.clone();
    let mut divided = Vec::new();
    let mut sharing = Vec::new();
    let positive = |sizes: &Bytes| sizes.clone().into_iter().filter(|(_, size)| *size > 0).collect::<Bytes>();
    for container in &needs.containers {
        let own = container.memory.as_ref().map_err(|error| *error)?;
        match container.kind {
            Kind::Init if own.is_empty() => divided.push((container.name.clone(), positive(&left))),
            Kind::Init => divided.push((container.name.clone(), positive(own))),
            _ if own.is_empty() => sharing.push(container.name.clone()),
            _ => {
                for (resource, size) in own {
                    if let Some(left) = left.get_mut(resource) {
                        *left = left.saturating_sub(*size);
                    }
                }
                divided.push((container.name.clone(), positive(own)));
            }
        }
    }
    divided.extend(sharing.into_iter().map(|name| (name, positive(&left))));
    Ok(divided)
}

/// Checks that containers without their own memory have some of the pod's memory
/// (`validatePodScopeResources`).
fn check_shared_pool(needs: &Needs, wanted: &Bytes) -> Result<(), String> {
    let own = |container: &ContainerNeeds| container.memory.clone().map_err(|error| error.to_string());
    let (mut exclusive, mut sharing) = (Bytes::new(), false);
    let used_up = |exclusive: &Bytes| {
        wanted.iter().find(|(resource, size)| exclusive.get(*resource).copied().unwrap_or(0) >= **size)
    };
    for container in &needs.containers {
        let own = own(container)?;
        if container.kind == Kind::Init {
            if let Some((resource, _)) = used_up(&exclusive).filter(|_| own.is_empty()) {
                return Err(format!(
                    "pod rejected, pod has shared init containers but no {resource} available for them"
                ));
            }
            continue;
        }
        sharing |= own.is_empty();
        for (resource, size) in own {
            let sum = exclusive.entry(resource).or_default();
            *sum = sum.saturating_add(size);
        }
    }
    match used_up(&exclusive).filter(|_| sharing) {
        None => Ok(()),
        Some((resource, _)) => Err(format!(
            "pod rejected, sum of exclusive container {resource} requests equals pod budget, leaving no memory for shared containers"
        )),
    }
}
