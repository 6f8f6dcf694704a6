//! Tests of a cluster's node: `beelet run --kubeconfig`, started as on a node, on a fake runtime, with a
//! fake API server that fails on demand. Tests with a real API server: e2e/cluster.rs.

#![allow(clippy::unwrap_used, clippy::panic)] // a failure in a helper fails the test

mod autonomy;
mod away;
mod csi;
mod dra;
mod drain;
mod grace;
mod hostile;
mod node;
mod plugin;
mod repair;
pub(crate) mod scene;
mod serving;
pub(crate) mod storage;
pub(crate) mod workload;
