//! gRPC servers on unix sockets, and clients of plugins.
pub mod authority;
pub mod client;
pub mod grpc;
pub mod socket;
