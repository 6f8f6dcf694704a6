//! beelet, a node agent: it runs a machine's pods and keeps them healthy at kernel speed.
//! ARCHITECTURE.md draws the house; each module's head says what it is for and what it never does.

// A test hands its literals over.
#![cfg_attr(test, allow(clippy::needless_pass_by_value))]
// A fuzz target says by a panic what it has found. What is shipped is checked without these.
#![cfg_attr(
    any(test, feature = "fuzzing"),
    allow(clippy::unwrap_used, clippy::panic, clippy::missing_panics_doc)
)]

pub mod admission;
#[cfg(test)]
mod again;
pub mod api;
pub mod cgroups;
pub mod cli;
mod clock;
pub mod config;
pub mod devices;
pub mod document;
pub mod events;
pub mod eviction;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod images;
pub mod kernel;
pub mod lifecycle;
mod mountinfo;
pub mod node;
pub mod observe;
pub mod pods;
pub mod pressure;
pub mod probes;
pub mod runtime;
pub mod state;
mod tls;
pub mod tuner;
mod walk;
