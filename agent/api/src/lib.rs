//! What others may ask the agent: gRPC on a unix socket for root, HTTP on loopback for health, metrics and
//! pods.
//!
//! Both read the pod table and never wait for the runtime; only gRPC changes anything, by wishes that it
//! passes on.

// A test hands its literals over.
#![cfg_attr(test, allow(clippy::needless_pass_by_value))]

pub mod grpc;
pub mod http;
pub mod podresources;
pub mod podsapi;
pub mod signals;
