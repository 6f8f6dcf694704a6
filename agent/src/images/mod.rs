//! The images on this node: which are in use, which may go, and when.
//!
//! Everything goes through the container runtime: nothing here touches its storage. Must never remove an image that a
//! container has, is about to have ([`lease`]), or that is mounted as a volume.

pub mod gc;
pub mod lease;
mod metrics;
mod records;
pub mod space;
mod usage;

pub use self::{
    gc::{Collected, Handle, ImageGc, Parts, Wish},
    lease::{Lease, Leases},
    metrics::Metrics,
    space::{Space, Statvfs},
};
