//! Containers that try to hurt the node that runs them. Each case is one or some pods that do one kind of
//! harm as much as they can; see `tests/app/src/hurt.rs` for the kinds. The same must hold after each case
//! ([`scene::Scene::end`]): the pods end within their grace period and some seconds, the other pods are
//! unaffected, the agent used little more than when idle, and nothing is left.
//!
//! Cases that take minutes are smaller by default, and whole with `cargo xtask test --long`.

#![allow(clippy::unwrap_used, clippy::panic)] // a failure in a helper fails the test

mod exec;
mod floods;
mod frozen;
mod mounts;
mod names;
mod planted;
mod probes;
mod scene;
mod trees;
