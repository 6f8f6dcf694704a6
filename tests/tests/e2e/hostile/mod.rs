//! Containers whose only job is to hurt the node that runs them. Each case is a pod, or some, that does one
//! thing as badly as it can; see `tests/app/src/hurt.rs` for what they do. After each case the same must hold
//! ([`scene::Scene::end`]): the pods go within their grace period and some seconds, the other pods have
//! noticed nothing, the agent used little more than when it was quiet, and nothing is left.
//!
//! What takes minutes is smaller by default, and whole with `cargo xtask test --long`.

#![allow(clippy::unwrap_used, clippy::panic)] // a test's helpers may panic as the test itself may

mod floods;
mod frozen;
mod mounts;
mod names;
mod planted;
mod probes;
mod scene;
mod trees;
