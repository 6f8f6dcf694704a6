//! Foundation of the tests and the project's own commands: work folders, image archives, and skip reasons.
//!
//! The crate is small, so that `cargo xtask` builds in seconds. Servers, clients and types of the agent
//! belong into `beelet-tests`, which re-exports these modules.

pub mod images;
pub mod requires;
pub mod workdir;
