//! What a pod has on the node's disk.

use std::{collections::BTreeMap, path::PathBuf};

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
