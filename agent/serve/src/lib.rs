//! Servers on sockets.
pub mod authority;
pub mod grpc;
pub mod socket;
