//! The volume manager: attaches, mounts, expands, measures and releases the volumes of pods, through the
//! storage plugins of `csi` and for the kinds of volumes that the agent mounts itself.
//!
//! A pod's folder is `<pods>/<uid>`: `volumes/<name>` has the volumes that are made for the pod, and
//! `volume-subpaths/<volume>/<container>/<index>` has the parts of volumes that containers mount by
//! `subPath`. The removal of a pod removes the folder's content and nothing outside the folder. For a
//! PersistentVolume, `volumes/<name>` is a link to the volume's path, so that the start of a later container
//! reads no claim.
//!
//! [`VolumeManager`] runs the steps for a pod and the periodic tasks. [`PodVolumes`] has the work on disk for
//! one pod, all of which blocks. Each kind of volumes implements `plugin::VolumePlugin` in a file of its own
//! and has a line in `plugins`.
//!
//! Containers may have written to their volumes, so the content of a volume is never trusted: no symbolic
//! link in a volume is followed out of it, and no mount point in the folder is crossed when the folder is
//! removed.

// Tests pass literals by value.
#![cfg_attr(test, allow(clippy::needless_pass_by_value))]

mod atomic;
mod busy;
mod claims;
mod container_mounts;
mod content;
mod csi;
mod csi_republish;
mod disk;
mod disks;
mod empty_dir;
mod error;
mod expand;
mod flex;
mod fs_group;
mod host_path;
mod image;
mod local;
mod loss;
mod manager;
mod metrics;
pub mod mounts;
mod nfs;
mod object_sync;
mod operations;
mod persistent_volume;
mod plugin;
mod plugins;
mod pod_volumes;
mod records;
mod remote;
mod resync;
mod room;
mod stats;
mod sub_path;
mod top_folder;
mod unsupported;

pub use self::container_mounts::MountFacts;
pub use self::disks::Disks;
pub use self::error::Error;
pub use self::flex::FlexVolumes;
pub use self::local::LocalDisks;
pub use self::manager::{Deps, Periods, VolumeManager};
pub use self::metrics::Metrics;
pub use self::object_sync::CHECK_PERIOD;
pub use self::plugin::Prepared;
pub use self::plugins::{Plugins, plugin_name};
pub use self::pod_volumes::{PodVolumes, Stop, places};
pub use self::remote::RemoteDisks;
pub use self::resync::has_volumes;

/// Names of the folders in a pod's folder.
const VOLUMES: &str = "volumes";
const SUB_PATHS: &str = "volume-subpaths";

#[cfg(test)]
mod tests;
