//! The memory of each NUMA node: what there is, what is reserved for the system, what containers have
//! (`NUMANodeMap` of `memorymanager/state`).
//!
//! A node with less memory than is reserved on it has, as for the kubelet, an allocatable amount just below
//! 2^64, and sums wrap around. [`Ledger::overdrawn`] names such nodes, so that no agent starts with them in
//! silence.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::super::{
    hints::Hint,
    needs::Bytes,
    nodes::{NodeSet, Subsets},
};

/// One resource of one node, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Table {
    /// All of the node's; of `memory`, huge pages included.
    pub total: u64,
    /// Kept back for the system.
    pub system_reserved: u64,
    /// The rest, without huge pages.
    pub allocatable: u64,
    /// Of that, given to containers.
    pub reserved: u64,
    /// And not.
    pub free: u64,
}

/// One NUMA node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeMemory {
    /// One for each container and resource that has some of it.
    pub assignments: i64,
    /// By resource.
    pub tables: BTreeMap<String, Table>,
    /// The nodes that give memory together with this one; this one alone if there are none.
    pub cells: NodeSet,
}

/// Memory of a container or a pod, out of some nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// The nodes.
    pub nodes: NodeSet,
    /// `memory`, `hugepages-2Mi`, …
    pub resource: String,
    /// In bytes; zero where others have taken all of it over.
    pub size: u64,
}

/// The memory of all nodes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ledger {
    /// By the node's number.
    pub nodes: BTreeMap<u32, NodeMemory>,
}

impl Ledger {
    /// The nodes that have less of a resource than is reserved of it.
    pub fn overdrawn(&self) -> impl Iterator<Item = (u32, &str)> {
        let tables =
            self.nodes.iter().flat_map(|(number, node)| node.tables.iter().map(|table| (*number, table)));
        let overdrawn = tables.filter(|(_, (_, table))| table.allocatable > table.total);
        overdrawn.map(|(number, (resource, _))| (number, resource.as_str()))
    }

    fn table(&self, node: u32, resource: &str) -> Table {
        self.nodes.get(&node).and_then(|node| node.tables.get(resource)).copied().unwrap_or_default()
    }

    /// Free bytes of a resource on all of these nodes.
    pub(crate) fn free(&self, nodes: NodeSet, resource: &str) -> u64 {
        nodes.iter().fold(0, |sum: u64, node| sum.wrapping_add(self.table(node, resource).free))
    }

    /// Returns true if these nodes have all that is asked for (`isAffinitySatisfyRequest`).
    pub(crate) fn satisfies(&self, nodes: NodeSet, wanted: &Bytes) -> bool {
        wanted.iter().all(|(resource, size)| self.free(nodes, resource) >= *size)
    }

    /// The sets of nodes that could give all of it (`calculateHints`): those whose nodes give memory together
    /// already, or that give none. `reusable` is what the pod's init containers leave of a resource on a set.
    pub(crate) fn hints(&self, wanted: &Bytes, reusable: impl Fn(NodeSet, &str) -> u64) -> Vec<Hint> {
        let subsets = Subsets::of(self.nodes.keys().copied());
        let allocatable: Vec<(Vec<u64>, u64)> = wanted
            .iter()
            .map(|(resource, size)| (subsets.sums(|node| self.table(node, resource).allocatable), *size))
            .collect();
        let could = |(index, _): &(usize, NodeSet)| {
            allocatable.iter().all(|(sums, size)| sums.get(*index).is_some_and(|sum| sum >= size))
        };
        let candidates: Vec<(usize, NodeSet)> = subsets.iter().filter(could).collect();
        let least = candidates.iter().map(|(_, nodes)| nodes.len()).min();
        let least = least.map_or(subsets.nodes(), |least| least.min(subsets.nodes()));
        let has = |nodes: NodeSet, (resource, size): (&String, &u64)| {
            self.free(nodes, resource).wrapping_add(reusable(nodes, resource)) >= *size
        };
        let candidates = candidates.into_iter().map(|(_, nodes)| nodes);
        candidates
            .filter(|nodes| !self.splits_group(*nodes))
            .filter(|nodes| !self.violates(*nodes))
            .filter(|nodes| wanted.iter().all(|wish| has(*nodes, wish)))
            .map(|nodes| Hint { nodes: Some(nodes), preferred: nodes.len() == least })
            .collect()
    }

    /// Returns true if the set is one node that gives memory together with others.
    pub(crate) fn splits_group(&self, nodes: NodeSet) -> bool {
        nodes.len() == 1 && self.is_grouped(nodes)
    }

    /// One of these nodes gives memory together with others.
    fn is_grouped(&self, nodes: NodeSet) -> bool {
        nodes.iter().filter_map(|node| self.nodes.get(&node)).any(|node| node.cells.len() > 1)
    }

    /// Several nodes can't give memory together if one of them gives some by itself, or with others
    /// (`isAffinityViolatingNUMAAllocations`).
    pub(crate) fn violates(&self, nodes: NodeSet) -> bool {
        let used = nodes.iter().filter_map(|node| self.nodes.get(&node)).filter(|node| node.assignments > 0);
        nodes.len() > 1 && used.into_iter().any(|node| node.cells.len() == 1 || node.cells != nodes)
    }

    /// Reserves memory on these nodes, the first ones first (`updateMachineState`). Returns the bytes for
    /// which there was no room.
    pub(crate) fn reserve(&mut self, nodes: NodeSet, resource: &str, mut size: u64) -> u64 {
        for node in nodes.iter() {
            let Some(node) = self.nodes.get_mut(&node) else { continue };
            node.assignments = node.assignments.saturating_add(1);
            node.cells = nodes;
            if let Some(table) = node.tables.get_mut(resource) {
                let here = table.free.min(size);
                table.free = table.free.saturating_sub(here);
                table.reserved = table.reserved.saturating_add(here);
                size = size.saturating_sub(here);
            }
        }
        size
    }

    /// Frees blocks (`releaseMemory`).
    pub(crate) fn release(&mut self, blocks: &[Block]) {
        for block in blocks {
            let mut size = block.size;
            for number in block.nodes.iter() {
                let Some(node) = self.nodes.get_mut(&number) else { continue };
                node.assignments = node.assignments.saturating_sub(1);
                if node.assignments == 0 {
                    node.cells = NodeSet::of(number);
                }
                if let Some(table) = node.tables.get_mut(&block.resource) {
                    let here = table.reserved.min(size);
                    table.reserved = table.reserved.saturating_sub(here);
                    table.free = table.free.saturating_add(here);
                    size = size.saturating_sub(here);
                }
            }
        }
    }

    /// Returns true if a file's ledger agrees with the one that its blocks (on these `sets` of nodes) make
    /// (`areMachineStatesEqual`). Blocks that share nodes may have been given in any order, which decides the
    /// share of each node; and a node's group is that of the last block, even after its release. So only the
    /// sums must be right among nodes that are connected by blocks. The kubelet compares the groups too, with
    /// those of an order that changes at every start, and refuses its own file where a block of one node
    /// overlaps one of several nodes.
    pub(crate) fn agrees(&self, expected: &Self, sets: &[NodeSet]) -> bool {
        self.nodes.len() == expected.nodes.len()
            && self.nodes.iter().all(|(number, node)| {
                expected.nodes.get(number).is_some_and(|other| {
                    let connected = connected(*number, sets);
                    let mut tables = node.tables.iter().zip(&other.tables);
                    let same =
                        |((name, own), (other_name, other)): ((&String, &Table), (&String, &Table))| {
                            let totals =
                                |table: &Table| (table.total, table.system_reserved, table.allocatable);
                            let sums = |ledger: &Self| {
                                (ledger.free(connected, name), ledger.reserved(connected, name))
                            };
                            name == other_name && totals(own) == totals(other) && sums(self) == sums(expected)
                        };
                    node.assignments == other.assignments
                        && node.cells.contains(*number)
                        && node.cells.is_subset(connected)
                        && node.tables.len() == other.tables.len()
                        && tables.all(same)
                })
            })
    }

    fn reserved(&self, nodes: NodeSet, resource: &str) -> u64 {
        nodes.iter().fold(0, |sum: u64, node| sum.wrapping_add(self.table(node, resource).reserved))
    }
}

/// Returns the node and all nodes that `sets` connect with it.
fn connected(node: u32, sets: &[NodeSet]) -> NodeSet {
    let mut all = NodeSet::of(node);
    loop {
        let touching = sets.iter().filter(|set| !set.intersection(all).is_empty());
        let more = touching.fold(all, |all, set| all.union(*set));
        if more == all {
            return all;
        }
        all = more;
    }
}
