//! The memory of each NUMA node: its total, the reservation for the system, the amounts of containers
//! (`NUMANodeMap` of `memorymanager/state`).
//!
//! As in the kubelet, a node with less memory than its reservation has an allocatable amount just below 2^64,
//! and sums wrap around. [`Ledger::overdrawn`] names these nodes, so that no agent starts with one of them
//! silently.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::super::{
    hints::Hint,
    needs::Bytes,
    nodes::{NodeSet, Subsets},
};

/// A resource of a node, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Table {
    /// The node's total; for `memory`, including huge pages.
    pub total: u64,
    /// The reservation for the system.
    pub system_reserved: u64,
    /// The remaining amount, without huge pages.
    pub allocatable: u64,
    /// The allocatable amount that containers have.
    pub reserved: u64,
    /// The allocatable amount that is free.
    pub free: u64,
}

/// A NUMA node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeMemory {
    /// Number of assignments from this node, one per container and resource.
    pub assignments: i64,
    /// The amounts by resource.
    pub tables: BTreeMap<String, Table>,
    /// The group of nodes that provides memory together with this one; only this node if it is in no group.
    pub cells: NodeSet,
}

/// Memory of a container or a pod, from a set of nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// The nodes.
    pub nodes: NodeSet,
    /// The resource: `memory`, `hugepages-2Mi`, …
    pub resource: String,
    /// The size in bytes; zero if later containers reuse all of it.
    pub size: u64,
}

/// The memory of all nodes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ledger {
    /// The nodes by number.
    pub nodes: BTreeMap<u32, NodeMemory>,
}

impl Ledger {
    /// Returns the nodes that have less of a resource than their reservation.
    pub fn overdrawn(&self) -> impl Iterator<Item = (u32, &str)> {
        let tables =
            self.nodes.iter().flat_map(|(number, node)| node.tables.iter().map(|table| (*number, table)));
        let overdrawn = tables.filter(|(_, (_, table))| table.allocatable > table.total);
        overdrawn.map(|(number, (resource, _))| (number, resource.as_str()))
    }

    fn table(&self, node: u32, resource: &str) -> Table {
        self.nodes.get(&node).and_then(|node| node.tables.get(resource)).copied().unwrap_or_default()
    }

    /// Returns the free bytes of a resource on all of these nodes.
    pub(crate) fn free(&self, nodes: NodeSet, resource: &str) -> u64 {
        nodes.iter().fold(0, |sum: u64, node| sum.wrapping_add(self.table(node, resource).free))
    }

    /// Returns true if these nodes have all requested amounts (`isAffinitySatisfyRequest`).
    pub(crate) fn satisfies(&self, nodes: NodeSet, wanted: &Bytes) -> bool {
        wanted.iter().all(|(resource, size)| self.free(nodes, resource) >= *size)
    }

    /// Returns the sets of nodes that could satisfy a request (`calculateHints`): sets whose nodes already
    /// form a group, or provide no memory yet. `reusable` is the amount of a resource on a set that the pod's
    /// init containers leave.
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

    /// Returns true if one of these nodes is in a group.
    fn is_grouped(&self, nodes: NodeSet) -> bool {
        nodes.iter().filter_map(|node| self.nodes.get(&node)).any(|node| node.cells.len() > 1)
    }

    /// Returns true if several nodes cannot form a group because one of them provides memory alone, or in
    /// another group (`isAffinityViolatingNUMAAllocations`).
    pub(crate) fn violates(&self, nodes: NodeSet) -> bool {
        let used = nodes.iter().filter_map(|node| self.nodes.get(&node)).filter(|node| node.assignments > 0);
        nodes.len() > 1 && used.into_iter().any(|node| node.cells.len() == 1 || node.cells != nodes)
    }

    /// Reserves memory on these nodes, in order (`updateMachineState`). Returns the bytes that did not fit.
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
