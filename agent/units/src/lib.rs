//! Values with a text form or a range that every floor shares: quantities, durations, times, label selectors,
//! CPU lists, and the few settings that `bpf` and `cgroups` read without a decision.
//!
//! A value has functions to read, write, compare and bound it. A rule about its use belongs in `policy`. This
//! crate must never read a clock, a file or the environment, nor panic on any input.
#![forbid(unsafe_code)]
// A test hands its literals over.
#![cfg_attr(test, allow(clippy::needless_pass_by_value))]

#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod bounds;
pub mod bpf_settings;
pub mod cgroup_driver;
pub mod cpu_list;
pub mod duration;
pub mod field;
pub mod fs_usage;
pub mod go_json;
#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod moment;
#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod object_name;
pub mod quantity;
pub mod scheduling;
pub mod selector;
#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod shorten;
