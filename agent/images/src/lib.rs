//! Images of this node: pulls, import and export, use, and garbage collection of images and dead containers.
//!
//! All operations go through the container runtime; its storage is never touched directly. Must never remove
//! an image that a container has, is about to have ([`lease`]), or that is mounted as a volume.

// Test helpers take literals by value.
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
mod pull_metrics;
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
