//! Every decision of the agent, as pure functions of data: no async, no I/O, no clock, no randomness.
//!
//! Each subject has a folder, whose head names its decisions. Shared values (quantities, durations, times)
//! are in `units`.
#![forbid(unsafe_code)]
// Tests pass literals by value.
#![cfg_attr(test, allow(clippy::needless_pass_by_value))]

#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod admission;
pub mod devices;
pub mod dra;
pub mod eviction;
#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod handover;
pub mod images;
pub mod node;
#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod pinning;
#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod pod;
#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod probe;
pub mod resources;
pub mod tuner;
pub mod volumes;
