//! Values with a text form or a range that every floor shares: quantities, durations, times, label selectors,
//! CPU lists, and the few settings that doors read without a decision.
//!
//! A value knows how to be read, written, compared and bounded. A rule that says what to do with one belongs
//! in `policy`. Must never read a clock, a file or the environment, nor panic on any input.
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
#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod moment;
#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod object_name;
pub mod quantity;
pub mod scheduling;
pub mod selector;
#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod shorten;
