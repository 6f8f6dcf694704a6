//! The floor below the tests and the project's own commands: work folders, image archives, and the words for
//! what a machine lacks.
//!
//! The crate is small, so that `cargo xtask` builds in seconds. A server, a client or a type of the agent
//! belongs into `beelet-tests`, which shows these modules as its own.

pub mod images;
pub mod requires;
pub mod workdir;
