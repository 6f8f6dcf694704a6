//! The daemon's pods against a runtime that goes wrong on demand: adoption, kill -9 anywhere, lost, slow and
//! failing calls, backoff, probes, manifests that change. Needs no root, no containerd and no BPF: cgroups
//! are plain folders.

#![allow(clippy::unwrap_used, clippy::panic)] // in the helpers, too, a failure is the test's

mod admission;
mod adoption;
mod api_server;
mod assigned;
mod debugging;
mod device_kills;
mod devices;
mod ended;
mod ephemeral;
mod every_call;
mod exits;
mod failing;
mod faults;
mod garbage;
mod hooks;
mod images;
mod kills;
mod manifests;
pub(crate) mod node;
mod probes;
mod records;
mod resize;
mod restarts;
mod users;
mod volumes;
mod wiring;
