//! CPUs and memory that containers have for themselves, for the pod resources API.

use std::collections::BTreeMap;

use super::Pinning;
use beelet_policy::pinning::{CpuSet, cpus::view};

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

    /// Returns the CPUs that a container has for itself.
    pub(super) fn exclusive(&self, uid: &str, container: &str) -> Option<CpuSet> {
        self.0.as_ref()?.with(|book| book.pins.cpus.of(uid, container).cloned())
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
