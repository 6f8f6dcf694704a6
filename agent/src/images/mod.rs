//! The images on this node: getting them here, which are in use, which may go, and when.
//!
//! Everything goes through the container runtime: nothing here touches its storage. Must never remove an image that a
//! container has, is about to have ([`lease`]), or that is mounted as a volume.

pub mod credentials;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzz;
pub mod gc;
pub mod lease;
mod metrics;
pub mod pull;
mod records;
mod reference;
pub mod space;
mod usage;

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use self::records::Known;
pub use self::{
    gc::{Collected, Handle, ImageGc, Parts, Wish},
    lease::{Lease, Leases},
    metrics::Metrics,
    space::{Space, Statvfs},
};
