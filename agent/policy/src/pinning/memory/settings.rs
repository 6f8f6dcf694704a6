//! The settings of the memory manager, and the resulting ledger of the machine (`memory_manager.go`,
//! `getDefaultMachineState`).

use std::collections::{BTreeMap, BTreeSet};

use beelet_units::quantity::Quantity;

use super::super::{
    error::PinningError,
    nodes::{MOST_NODES, NODE_NUMBERS, NodeSet},
};
use super::ledger::{Ledger, NodeMemory, Table};
use crate::resources::{MEMORY, huge_pages::PREFIX};

/// A NUMA node's memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryNode {
    /// Its number.
    pub id: u32,
    /// All of its memory in bytes, huge pages included.
    pub memory: u64,
    /// Number of its huge pages, by the size of a page in bytes.
    pub huge_pages: BTreeMap<u64, u64>,
}

/// Amounts by resource.
pub(crate) type Amounts = BTreeMap<String, Quantity>;

/// `reservedMemory`: the reservation of a NUMA node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reservation {
    /// The node's number.
    pub node: u32,
    /// Amounts by resource.
    pub limits: Amounts,
}

/// The settings, in the words of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemorySettings {
    /// `memoryManagerPolicy`
    pub policy: String,
    /// `reservedMemory`
    pub reserved_memory: Vec<Reservation>,
    /// Amounts that Node Allocatable reserves: kube + system + hard eviction.
    pub reserved: Amounts,
}

/// Returns the resource name of a size of huge pages.
fn huge_pages_of(size: u64) -> String {
    let size = i64::try_from(size).unwrap_or(i64::MAX);
    format!("{PREFIX}{}", Quantity::from_units(size).binary())
}

impl MemorySettings {
    /// Returns the machine without assignments; None if the policy is `None`.
    pub(super) fn machine(&self, nodes: &[MemoryNode]) -> Result<Option<Ledger>, PinningError> {
        match self.policy.as_str() {
            "None" => return Ok(None),
            "Static" => {}
            "BestEffort" => {
                return Err(PinningError::new(
                    "policy \"BestEffort\" is not available for platform \"linux\"",
                ));
            }
            other => return Err(PinningError::new(format!("unknown policy: {other:?}"))),
        }
        check_nodes(nodes)?;
        self.check_reserved(nodes)?;
        let mut reserved: BTreeMap<(u32, &str), u64> = BTreeMap::new();
        for reservation in &self.reserved_memory {
            for (resource, amount) in &reservation.limits {
                let bytes = u64::try_from(amount.value()).ok();
                let bytes = bytes.filter(|_| Quantity::from_units(amount.value()) == *amount);
                let bytes = bytes.ok_or_else(|| {
                    let node = reservation.node;
                    PinningError::new(format!(
                        "the {resource} reserved on NUMA node {node} is not a number of bytes"
                    ))
                })?;
                reserved.insert((reservation.node, resource), bytes);
            }
        }
        let memory = reserved.iter().filter(|((_, resource), _)| *resource == MEMORY);
        if memory.map(|(_, bytes)| *bytes).max().unwrap_or(0) == 0 {
            return Err(PinningError::new("[memorymanager] you should specify the system reserved memory"));
        }
        let of = |node: u32, resource: &str| reserved.get(&(node, resource)).copied().unwrap_or(0);
        let nodes = nodes.iter().map(|node| (node.id, node_memory(node, &of)));
        Ok(Some(Ledger { nodes: nodes.collect() }))
    }

    /// Checks that the sum of the nodes' reservations equals the amount of Node Allocatable
    /// (`validateReservedMemory`).
    fn check_reserved(&self, nodes: &[MemoryNode]) -> Result<(), PinningError> {
        let mut total = Amounts::new();
        for reservation in &self.reserved_memory {
            let node = reservation.node;
            if !nodes.iter().any(|other| other.id == node) {
                let message = format!(
                    "the reserved memory configuration references a NUMA node {node} that does not exist on this machine"
                );
                return Err(PinningError::new(message));
            }
            for (resource, amount) in &reservation.limits {
                let sum = total.entry(resource.clone()).or_default();
                *sum = [*sum, *amount].into_iter().sum();
            }
        }
        let is_memory = |resource: &&String| *resource == MEMORY || resource.starts_with(PREFIX);
        let resources: BTreeSet<&String> =
            total.keys().chain(self.reserved.keys().filter(is_memory)).collect();
        // Node Allocatable also has a CPU reservation, but not per node; the kubelet compares it too.
        for resource in resources {
            let of = |amounts: &Amounts| amounts.get(resource).copied().unwrap_or_default();
            let (own, expected) = (of(&total), of(&self.reserved));
            if own != expected {
                let (own, expected) = (own.value(), expected.value());
                let message = format!(
                    "the total amount \"{own}\" of type {resource:?} is not equal to the value \"{expected}\" determined by Node Allocatable feature"
                );
                return Err(PinningError::new(message));
            }
        }
        Ok(())
    }
}

fn check_nodes(nodes: &[MemoryNode]) -> Result<(), PinningError> {
    let distinct: BTreeSet<u32> = nodes.iter().map(|node| node.id).collect();
    if distinct.len() < nodes.len() {
        return Err(PinningError::new("a NUMA node is there twice"));
    }
    if let Some(node) = distinct.iter().find(|node| **node >= NODE_NUMBERS) {
        return Err(PinningError::new(format!("NUMA node {node}: 63 is the highest that fits into a mask")));
    }
    if nodes.len() > MOST_NODES {
        let message = format!("memory can't be managed on machines with more than {MOST_NODES} NUMA nodes");
        return Err(PinningError::new(message));
    }
    Ok(())
}

fn node_memory(node: &MemoryNode, reserved: &impl Fn(u32, &str) -> u64) -> NodeMemory {
    let table = |resource: &str, total: u64, others: u64| {
        let system_reserved = reserved(node.id, resource);
        let allocatable = total.wrapping_sub(system_reserved).wrapping_sub(others);
        Table { total, system_reserved, allocatable, reserved: 0, free: allocatable }
    };
    let mut tables = BTreeMap::new();
    let mut huge = 0_u64;
    for (size, count) in &node.huge_pages {
        let (name, total) = (huge_pages_of(*size), size.wrapping_mul(*count));
        huge = huge.wrapping_add(total);
        tables.insert(name.clone(), table(&name, total, 0));
    }
    tables.insert(MEMORY.to_owned(), table(MEMORY, node.memory, huge));
    NodeMemory { assignments: 0, tables, cells: NodeSet::of(node.id) }
}
