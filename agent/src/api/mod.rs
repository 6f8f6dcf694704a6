//! What others may ask the agent: gRPC on a unix socket for root, HTTP on loopback for health, metrics and pods.
//!
//! Both read the pod table and never wait for the runtime; only gRPC changes anything, by wishes that it passes on.

pub mod authority;
pub mod client;
pub mod grpc;
pub mod http;
pub mod kubelet_counter;
pub mod local;
pub mod podresources;
pub mod signals;
mod socket;
