//! Volumes: a pod's claims and disks, the attachment, mount, growth and removal of a disk, and the bounds of
//! a volume's content.

#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod claims;
pub mod content;
#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod csi;
mod error;
pub mod file_system;
pub mod flex_volume;
#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod growth;
pub mod migration;
pub mod mount_points;
pub mod mounted;
pub mod remote_disk;
pub mod removed_kinds;
pub mod trust_bundles;

pub use error::VolumeError;
