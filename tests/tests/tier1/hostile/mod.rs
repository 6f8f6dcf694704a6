//! The daemon where everything around it is against it: a runtime that talks nonsense, disks without room,
//! clocks that jump, sudden ends between any two writes, damaged files, limits and privileges taken away. It
//! is `beelet run` as it is started on a node, on a fake runtime. What is asked of it is always the same: it
//! doesn't panic, it harms nothing that runs, it says what is wrong, and when that is over all is as it
//! should be, without anybody's help.
//!
//! The same on a real containerd: e2e/runtime_away.rs. One call that goes wrong: pods/every_call.rs. Kills
//! between two calls: pods/kills.rs, and in the midst of a write of the device checkpoint:
//! pods/device_kills.rs.

#![allow(clippy::unwrap_used, clippy::panic)] // in the helpers, too, a failure is the test's

mod author;
mod clock;
mod confined;
mod crowd;
mod damage;
mod kills;
mod nonsense;
mod room;
pub(crate) mod scene;
