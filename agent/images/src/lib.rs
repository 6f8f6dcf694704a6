//! The images on this node: getting them here, which are in use, which may go, and when.
//!
//! Everything goes through the container runtime: nothing here touches its storage. Must never remove an
//! image that a container has, is about to have ([`lease`]), or that is mounted as a volume.

// A test hands its literals over.
#![cfg_attr(test, allow(clippy::needless_pass_by_value))]

pub mod access;
pub mod collector;
pub mod containers;
pub mod credentials;
mod error;
pub mod export;
pub mod folder;
pub mod gc;
pub mod import;
mod layout;
pub mod lease;
mod metrics;
pub mod providers;
pub mod pull;
mod records;
pub mod reference;
mod usage;

pub use self::{
    collector::Collector,
    error::Error,
    gc::{Collected, Handle, ImageGc, ImageGcRequest, Parts},
    lease::{Lease, Leases},
    metrics::Metrics,
    records::ImageRecords,
};
pub use beelet_base::filesystem::{Space, Statvfs};
