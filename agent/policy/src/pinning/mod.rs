//! The CPUs, memory and NUMA nodes of containers: the kubelet's CPU manager, memory manager and topology
//! manager (`pkg/kubelet/cm/{cpumanager,memorymanager,topologymanager}`, Kubernetes 1.36.2), with the fixes
//! of 1.38.
//!
//! [`Pins`] owns all three managers and decides on admission: each provider (devices, CPUs, memory) returns
//! its hints, the [`topology`] merges them into an affinity, and each provider allocates by that affinity.
//! [`cpus`] owns the exclusive CPUs and the shared pool, [`memory`] the reservations of each NUMA node; both
//! read and write the kubelet's state files. [`Needs`] has a pod's requests, parsed once.
//!
//! This module touches neither cgroups nor files: the caller writes the state file and the resulting cpusets.
//! A CPU must never be in two exclusive sets, and a reserved CPU in none.
//!
//! The kubelet also claims whole cores and sockets that are not free if cores or sockets differ in size; this
//! module claims a group only if all of its CPUs are free.

pub mod cpu_set;
pub mod cpus;
pub mod devices;
pub mod error;
pub mod explain;
pub mod gates;
pub mod hints;
pub mod machine;
pub mod memory;
pub mod needs;
pub mod nodes;
pub mod pins;
pub mod resize;
pub mod signals;
mod state_file;
pub mod topology;

pub use cpu_set::CpuSet;
pub use error::{PinningError, Reason, Refusal};
pub use gates::Gates;
pub use hints::Hint;
pub use machine::{Cpu, CpuTopology};
pub use needs::Needs;
pub use nodes::NodeSet;
pub use pins::Pins;

#[cfg(test)]
mod tests;
