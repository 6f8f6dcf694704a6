//! The CPUs of a machine, and the groups that share hardware (`cpumanager/topology`).

use std::collections::BTreeMap;

use super::{
    cpu_set::CpuSet,
    error::PinningError,
    nodes::{NODE_NUMBERS, NodeSet},
};

/// An online CPU, with the platform's numbers of its groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cpu {
    /// Its number.
    pub cpu: u32,
    /// Number of its core, which may also occur on other sockets and NUMA nodes.
    pub core: u32,
    /// Its socket.
    pub socket: u32,
    /// Its NUMA node.
    pub numa: u32,
    /// Number of its L3 cache; None: the number of its socket.
    pub uncore: Option<u32>,
}

/// A kind of group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    Core,
    Socket,
    Node,
    Uncore,
}

/// Groups of CPUs by number; a core's number is its lowest CPU.
pub(crate) type Groups = BTreeMap<u32, CpuSet>;

/// The CPUs of a machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CpuTopology {
    all: CpuSet,
    cores: Groups,
    sockets: Groups,
    nodes: Groups,
    uncores: Groups,
    node_of: BTreeMap<u32, u32>,
}

impl CpuTopology {
    /// Returns the topology of these CPUs (`Discover`).
    ///
    /// # Errors
    /// The list has no CPU, has a CPU twice, or has a NUMA node whose number is too large for a mask.
    pub fn new(cpus: &[Cpu]) -> Result<Self, PinningError> {
        let mut topology = Self::default();
        let mut cores: BTreeMap<(u32, u32, u32), CpuSet> = BTreeMap::new();
        for cpu in cpus {
            if cpu.numa >= NODE_NUMBERS {
                return Err(PinningError::new(format!(
                    "CPU {} is on NUMA node {}: 63 is the highest",
                    cpu.cpu, cpu.numa
                )));
            }
            if topology.all.contains(cpu.cpu) {
                return Err(PinningError::new(format!("CPU {} is there twice", cpu.cpu)));
            }
            topology.all.insert(cpu.cpu);
            topology.node_of.insert(cpu.cpu, cpu.numa);
            cores.entry((cpu.numa, cpu.socket, cpu.core)).or_default().insert(cpu.cpu);
            topology.sockets.entry(cpu.socket).or_default().insert(cpu.cpu);
            topology.nodes.entry(cpu.numa).or_default().insert(cpu.cpu);
            topology.uncores.entry(cpu.uncore.unwrap_or(cpu.socket)).or_default().insert(cpu.cpu);
        }
        if topology.all.is_empty() {
            return Err(PinningError::new("could not detect number of cpus"));
        }
        let lowest = |cpus: CpuSet| {
            let number = cpus.iter().next().unwrap_or(0);
            (number, cpus)
        };
        topology.cores = cores.into_values().map(lowest).collect();
        Ok(topology)
    }

    /// Returns all CPUs.
    #[must_use]
    pub fn all(&self) -> &CpuSet {
        &self.all
    }

    /// Returns the NUMA nodes that have CPUs.
    pub fn nodes(&self) -> impl Iterator<Item = u32> + '_ {
        self.nodes.keys().copied()
    }

    /// Returns the CPUs of some NUMA nodes.
    #[must_use]
    pub fn of_nodes(&self, nodes: NodeSet) -> CpuSet {
        nodes
            .iter()
            .filter_map(|node| self.nodes.get(&node))
            .fold(CpuSet::default(), |all, own| all.union(own))
    }

    /// Returns the NUMA node of a CPU.
    #[must_use]
    pub fn node_of(&self, cpu: u32) -> Option<u32> {
        self.node_of.get(&cpu).copied()
    }

    pub(crate) fn groups(&self, level: Level) -> &Groups {
        match level {
            Level::Core => &self.cores,
            Level::Socket => &self.sockets,
            Level::Node => &self.nodes,
            Level::Uncore => &self.uncores,
        }
    }

    /// Returns the average number of CPUs in a group of this kind, rounded down (`CPUsPerCore`).
    pub(crate) fn average(&self, level: Level) -> usize {
        self.all.len().checked_div(self.groups(level).len()).unwrap_or(0)
    }

    /// Returns the groups of a kind that have one of these CPUs.
    pub(crate) fn touched(&self, level: Level, cpus: &CpuSet) -> impl Iterator<Item = (u32, &CpuSet)> {
        let groups = self.groups(level).iter().map(|(number, group)| (*number, group));
        groups.filter(move |(_, group)| group.common(cpus) > 0)
    }
}
