//! Tests of the daemon's pods on a runtime that fails on demand: adoption, kill -9 anywhere, lost, slow and
//! failing calls, back-off, probes, changing manifests. They need neither root, containerd nor BPF: cgroups
//! are plain folders.

#![allow(clippy::unwrap_used, clippy::panic)] // a failure in a helper fails the test

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
mod handover;
mod hooks;
mod images;
mod kills;
mod manifests;
pub(crate) mod node;
mod pinning;
mod probe_changes;
mod probes;
mod records;
mod resize;
mod restarts;
mod users;
mod volumes;
mod wiring;
