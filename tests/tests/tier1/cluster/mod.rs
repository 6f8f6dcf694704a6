//! The node of a cluster: `beelet run --kubeconfig` as it is started on a node, on a fake runtime, with a
//! fake API server that goes wrong as it is told. A real API server: e2e/cluster.rs.

#![allow(clippy::unwrap_used, clippy::panic)] // in the helpers, too, a failure is the test's

mod autonomy;
mod away;
mod csi;
mod dra;
mod grace;
mod hostile;
mod node;
mod plugin;
pub(crate) mod scene;
mod serving;
pub(crate) mod storage;
pub(crate) mod workload;
