//! The options of the static CPU policy (`policy_options.go`).

use std::collections::BTreeMap;

use super::super::{
    error::PinningError,
    gates::Gates,
    machine::{CpuTopology, Level},
    topology::flag,
};
use crate::devices::topology::TopologyPolicy;

const FULL_CORES: &str = "full-pcpus-only";
const DISTRIBUTE_NODES: &str = "distribute-cpus-across-numa";
const ALIGN_BY_SOCKET: &str = "align-by-socket";
const DISTRIBUTE_CORES: &str = "distribute-cpus-across-cores";
const STRICT: &str = "strict-cpu-reservation";
const ALIGN_BY_UNCORE: &str = "prefer-align-cpus-by-uncorecache";

/// Pairs of options that exclude each other.
const CONFLICTS: [(&str, &str); 4] = [
    (FULL_CORES, DISTRIBUTE_CORES),
    (DISTRIBUTE_NODES, DISTRIBUTE_CORES),
    (ALIGN_BY_UNCORE, DISTRIBUTE_CORES),
    (ALIGN_BY_UNCORE, DISTRIBUTE_NODES),
];

/// The options, each off by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StaticOptions {
    /// Claims only whole cores.
    pub full_cores: bool,
    /// Distributes the CPUs evenly if a single NUMA node has too few.
    pub distribute_nodes: bool,
    /// CPUs on the same socket count as near each other.
    pub align_by_socket: bool,
    /// Claims CPUs from as many cores as possible.
    pub distribute_cores: bool,
    /// Removes the reserved CPUs from the shared pool.
    pub strict: bool,
    /// Claims CPUs from as few L3 caches as possible.
    pub align_by_uncore: bool,
}

impl StaticOptions {
    /// Parses the options (`NewStaticPolicyOptions`).
    ///
    /// # Errors
    /// An option is unknown, its gate is off, its value is invalid, or two options exclude each other.
    pub fn read(options: &BTreeMap<String, String>, gates: Gates) -> Result<Self, PinningError> {
        let mut read = Self::default();
        for (name, value) in options {
            let gate = match name.as_str() {
                ALIGN_BY_SOCKET | DISTRIBUTE_CORES => ("Alpha", gates.cpu_alpha_options),
                DISTRIBUTE_NODES => ("Beta", gates.cpu_beta_options),
                FULL_CORES | STRICT | ALIGN_BY_UNCORE => ("", true),
                _ => return Err(PinningError::new(format!("unknown CPU Manager Policy option: {name:?}"))),
            };
            if let (level, false) = gate {
                let message = format!(
                    "CPU Manager Policy {level}-level Options not enabled, but option {name:?} provided"
                );
                return Err(PinningError::new(message));
            }
            *read.field(name) = flag(name, value)?;
        }
        let both = |(a, b): &&(&str, &str)| *read.field(a) && *read.field(b);
        match CONFLICTS.iter().find(both) {
            None => Ok(read),
            Some((a, b)) => {
                let message = format!("static policy options {a} and {b} can not be used at the same time");
                Err(PinningError::new(message))
            }
        }
    }

    fn field(&mut self, name: &str) -> &mut bool {
        match name {
            ALIGN_BY_SOCKET => &mut self.align_by_socket,
            DISTRIBUTE_CORES => &mut self.distribute_cores,
            DISTRIBUTE_NODES => &mut self.distribute_nodes,
            FULL_CORES => &mut self.full_cores,
            STRICT => &mut self.strict,
            _ => &mut self.align_by_uncore,
        }
    }

    /// Checks the options against the machine and the topology manager (`ValidateStaticPolicyOptions`).
    pub(crate) fn check(self, topology: &CpuTopology, policy: TopologyPolicy) -> Result<(), PinningError> {
        if !self.align_by_socket {
            return Ok(());
        }
        if policy == TopologyPolicy::SingleNumaNode {
            let message = format!(
                "topology manager policy single-numa-node excludes the CPU manager's option {ALIGN_BY_SOCKET}"
            );
            return Err(PinningError::new(message));
        }
        if topology.groups(Level::Socket).len() > topology.groups(Level::Node).len() {
            let message = format!("option {ALIGN_BY_SOCKET} needs at least as many NUMA nodes as sockets");
            return Err(PinningError::new(message));
        }
        Ok(())
    }
}
