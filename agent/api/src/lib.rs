//! The agent's interfaces for clients: gRPC on a unix socket for root, HTTP on loopback for health, metrics
//! and pods.
//!
//! Both read the pod table and never wait for the runtime; only gRPC requests changes, which it forwards to
//! other parts.

// Tests pass literals by value.
#![cfg_attr(test, allow(clippy::needless_pass_by_value))]

pub mod grpc;
pub mod http;
pub mod podresources;
pub mod podsapi;
pub mod signals;
