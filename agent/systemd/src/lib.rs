//! systemd's manager and logind over D-Bus: the only user of D-Bus.
//!
//! [`manager`] makes, changes and stops units, for threads that may block; [`logind`] holds up a shutdown
//! and reports it, for async callers. Which units with which properties, and what a shutdown means, is
//! decided by the callers.

mod error;
pub mod logind;
pub mod manager;

pub use error::Error;
