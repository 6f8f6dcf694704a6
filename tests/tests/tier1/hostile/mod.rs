//! Tests of the daemon in a hostile environment: a runtime with nonsensical answers, full disks, clocks that
//! jump, kills between any two writes, damaged files, reduced limits and privileges. The daemon is
//! `beelet run`, started as on a node, on a fake runtime. All tests have the same expectations: the daemon
//! does not panic, harms no running pod, reports the fault, and recovers by itself when the fault is over.
//!
//! Tests with a real containerd: e2e/runtime_away.rs. Single failing calls: pods/every_call.rs. Kills between
//! two calls: pods/kills.rs, and during a write of the device checkpoint: pods/device_kills.rs.

#![allow(clippy::unwrap_used, clippy::panic)] // a failure in a helper fails the test

mod author;
mod clock;
mod confined;
mod crowd;
mod damage;
mod kills;
mod nonsense;
mod room;
pub(crate) mod scene;
