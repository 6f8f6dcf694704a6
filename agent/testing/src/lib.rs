//! Test support shared by several crates. Only a dev-dependency.

// Tests may panic.
#![allow(clippy::unwrap_used, clippy::panic)]
pub mod again;
pub mod folders;
pub mod hostile_pods;
pub mod http2;
pub mod logind;
pub mod page;
pub mod schema;
pub mod tls;
