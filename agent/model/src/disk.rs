//! What a pod has on the node's disk.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use jiff::Timestamp;

/// Bytes on disk, and inodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Bytes of blocks.
    pub bytes: u64,
    /// Files, folders and all else that has an inode.
    pub inodes: u64,
}

/// What a pod has on disk, as last measured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodDisk {
    /// emptyDir volumes on disk, by name.
    pub volumes: BTreeMap<String, Taken>,
    /// Logs by container.
    pub logs: BTreeMap<String, Taken>,
    /// Writable layers by container.
    pub rootfs: BTreeMap<String, Taken>,
}

/// The room in a volume that has a file system, or a device, of its own; 0 where whoever was asked does not
/// say it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// Bytes in all.
    pub capacity_bytes: u64,
    /// Bytes that may still be written.
    pub available_bytes: u64,
    /// Bytes that are taken.
    pub used_bytes: u64,
    /// Inodes in all.
    pub inodes: u64,
    /// Inodes that are free.
    pub inodes_free: u64,
    /// Inodes that are taken.
    pub inodes_used: u64,
}

/// What a pod's volume was found to have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeUse {
    /// The pod's name of the volume.
    pub volume: String,
    /// The namespace and name of the claim; None of a volume that is the pod's own.
    pub claim: Option<(String, String)>,
    /// When.
    pub at: Timestamp,
    /// The room in it.
    pub room: Room,
    /// Its storage plugin says that something is wrong with it; None if the plugin says nothing of that.
    pub abnormal: Option<bool>,
}

/// The volumes of pods, by the pods' UIDs, as last asked.
pub type VolumesUse = Arc<BTreeMap<String, Vec<VolumeUse>>>;

/// Paths in the node's file systems; None where nobody has said which it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places {
    /// That of volumes and logs.
    pub node: Option<PathBuf>,
    /// That of images.
    pub images: Option<PathBuf>,
    /// That of writable layers.
    pub containers: Option<PathBuf>,
    /// What the images take, as the runtime says.
    pub all_images: Option<Taken>,
}

/// Tells what was measured on disk; measures nothing itself.
pub trait DiskUse: Send {
    /// What the pod of this UID has, once that was measured.
    fn of(&self, uid: &str) -> Option<PodDisk>;

    /// Where the node's file systems are.
    fn places(&self) -> Places;
}

/// Nobody measures.
#[derive(Clone, Copy, Debug)]
pub struct Unmeasured;

impl DiskUse for Unmeasured {
    fn of(&self, _uid: &str) -> Option<PodDisk> {
        None
    }

    fn places(&self) -> Places {
        Places::default()
    }
}
