//! CPUs and memory that containers have for themselves, for the pod resources API.

use std::collections::BTreeMap;

use super::Pinning;
use beelet_policy::pinning::{CpuSet, Needs, cpus::view};
use k8s_openapi::api::core::v1::Pod;

/// Memory of one or several NUMA nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryBlock {
    /// `memory`, `hugepages-2Mi`, …
    pub resource: String,
    /// In bytes.
    pub size: u64,
    /// NUMA nodes.
    pub nodes: Vec<u32>,
}

/// CPUs and memory of a container, or of the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Exclusive CPUs.
    pub cpus: Vec<u32>,
    /// Memory.
    pub memory: Vec<MemoryBlock>,
}

impl Pinning {
    /// Returns what a pod's containers have for themselves.
    #[must_use]
    pub fn held_by(&self, uid: &str) -> BTreeMap<String, Held> {
        let Some(desk) = &self.0 else { return BTreeMap::new() };
        desk.with(|book| {
            let block = |block: &beelet_policy::pinning::memory::ledger::Block| MemoryBlock {
                resource: block.resource.clone(),
                size: block.size,
                nodes: block.nodes.iter().collect(),
            };
            let of = |container: String| {
                let cpus = book.pins.cpus.of(uid, &container).into_iter().flat_map(CpuSet::iter);
                let blocks =
                    book.pins.memory.state().of(uid, &container).iter().filter(|block| block.size > 0);
                let held = Held { cpus: cpus.collect(), memory: blocks.map(block).collect() };
                (container, held)
            };
            book.holders(uid).into_iter().map(of).collect()
        })
    }

    /// Returns the CPUs and the memory that the node has for containers (`GetAllocatableResources`).
    #[must_use]
    pub fn allocatable(&self) -> Held {
        let Some(desk) = &self.0 else { return Held::default() };
        desk.with(|book| {
            let nodes = &book.pins.memory.state().ledger.nodes;
            let tables = nodes.iter().flat_map(|(node, of)| of.tables.iter().map(|table| (*node, table)));
            let memory = tables.filter(|(_, (_, table))| table.allocatable > 0);
            let memory = memory.map(|(node, (resource, table))| MemoryBlock {
                resource: resource.clone(),
                size: table.allocatable,
                nodes: vec![node],
            });
            Held { cpus: book.pins.cpus.allocatable().iter().collect(), memory: memory.collect() }
        })
    }

    /// Returns the kubelet's label and message for a pod that can't be resized while it runs: the amounts of
    /// a Guaranteed pod are pinned (KEP-5554 is not there yet).
    #[must_use]
    pub fn refused_resize(&self, pod: &Pod) -> Option<(&'static str, &'static str)> {
        let desk = self.0.as_ref()?;
        if !Needs::read(pod, desk.gates).is_ok_and(|needs| needs.guaranteed) {
            return None;
        }
        desk.with(|book| match (!book.pins.cpus.allocatable().is_empty(), book.pins.memory.is_static()) {
            (true, _) => Some((
                "guaranteed_pod_cpu_manager_static_policy",
                "Resize is infeasible for Guaranteed Pods alongside CPU Manager policy \"static\"",
            )),
            (_, true) => Some((
                "guaranteed_pod_memory_manager_static_policy",
                "Resize is infeasible for Guaranteed Pods alongside Memory Manager policy \"Static\"",
            )),
            _ => None,
        })
    }

    /// Returns the CPUs that containers have for themselves, and the shared pool, as lists.
    #[must_use]
    pub fn cpus(&self) -> (String, String) {
        let Some(desk) = &self.0 else { return Default::default() };
        desk.with(|book| {
            (view::given(&book.pins.cpus).to_string(), book.pins.cpus.state().shared.to_string())
        })
    }
}
