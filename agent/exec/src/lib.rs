//! Commands of exec probes in containers, without the runtime (docs/decisions/0029-exec.md): the helper
//! `beelet-exec`, a process of its own outside the agent's confinement, and the agent's client of it.
//!
//! The helper reproduces what the runtime's `ExecSync` gives a command: the identity in the container's OCI
//! spec, the container's namespaces and cgroups, and what runc inherits from the shim. Where it cannot, the
//! runtime runs the command, and `beelet probe ls` gives the reason.
//!
//! Must never hold data of two containers in one process, or do anything in a container's namespaces before
//! the process has the container's identity, except to take it.

mod client;
mod enter;
mod places;
mod plan;
mod seccomp;
mod server;
mod supervise;
mod sys;
mod wire;

pub use client::{Away, Entrance, Helper};
pub use plan::{Described, Plan, Unsupported};
pub use server::serve;
pub use wire::Reply;
