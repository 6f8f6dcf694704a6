//! systemd's manager and logind over D-Bus: the only user of D-Bus.
//!
//! [`manager`] starts, changes and stops units, for threads that may block; [`logind`] delays a shutdown
//! and reports it, for async callers. The callers decide on units, properties and the reaction to a shutdown.

mod error;
pub mod logind;
pub mod manager;

pub use error::Error;
