//! Servers on sockets, and clients of plugins' servers.
pub mod authority;
pub mod client;
pub mod grpc;
pub mod socket;
