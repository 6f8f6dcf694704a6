//! Conversion of a pod's spec into CRI requests. Pure.

// A test hands its literals over.
#![cfg_attr(test, allow(clippy::needless_pass_by_value))]

pub mod app_armor;
pub mod cri_config;
pub mod definition;
pub mod downward;
pub mod env;
mod error;
#[cfg(any(test, feature = "test-util"))]
pub mod fixtures;
#[cfg(test)]
mod hostile;
pub mod resize;
pub mod services;
pub mod signals;
pub mod support;
pub mod sysctls;

pub use error::Error;
