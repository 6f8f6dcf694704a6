//! What others may ask the agent: gRPC on a unix socket for root, HTTP on loopback for health, metrics and pods.
//!
//! Both read the pod table and nothing else: a request never waits for the runtime, and never changes anything.

pub mod authority;
pub mod client;
pub mod grpc;
pub mod http;
pub mod local;
pub mod podresources;
mod socket;
