//! Servers on sockets.
pub mod authority;
pub mod grpc;
pub mod local;
pub mod socket;
