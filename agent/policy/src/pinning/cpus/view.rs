//! CPUs by NUMA node, for people and monitors.

use std::collections::BTreeMap;

use super::{super::machine::Level, CpuManager, CpuSet, Policy, options::StaticOptions};

/// CPUs that can be given away now, by NUMA node; none without the static policy.
#[must_use]
pub fn free_by_node(manager: &CpuManager) -> BTreeMap<u32, usize> {
    match &manager.policy {
        Policy::None => BTreeMap::new(),
        Policy::Static(own) => by_node(manager, &own.available(&manager.state)),
    }
}

/// CPUs that containers and pods have for themselves, by NUMA node; none without the static policy.
#[must_use]
pub fn given_by_node(manager: &CpuManager) -> BTreeMap<u32, usize> {
    by_node(manager, &given(manager))
}

/// CPUs that containers and pods have for themselves.
#[must_use]
pub fn given(manager: &CpuManager) -> CpuSet {
    let state = &manager.state;
    let sets = state.containers.values().flat_map(BTreeMap::values).chain(state.pods.values());
    sets.fold(CpuSet::default(), |all, set| all.union(set))
}

/// The options of the static policy; the defaults without it.
#[must_use]
pub fn options(manager: &CpuManager) -> StaticOptions {
    match &manager.policy {
        Policy::None => StaticOptions::default(),
        Policy::Static(own) => own.options,
    }
}

fn by_node(manager: &CpuManager, cpus: &CpuSet) -> BTreeMap<u32, usize> {
    let Policy::Static(own) = &manager.policy else { return BTreeMap::new() };
    own.topology.groups(Level::Node).iter().map(|(node, own)| (*node, own.common(cpus))).collect()
}
