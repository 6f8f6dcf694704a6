//! The change of agents under running pods: reads who created which sandbox and container, and adopts the
//! pods of a kubelet at the agent's start. `beelet_policy::handover` decides.
//!
//! Must never change anything in the runtime: an adopted pod is changed by the parts that run pods, like any
//! other.

pub mod adoption;
pub mod found;
mod manifests;

pub use manifests::manifest_changes;
