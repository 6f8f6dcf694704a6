//! Disk usage of a pod.

use std::{
    collections::{BTreeMap, BTreeSet},
    iter::Sum,
    path::{Path, PathBuf},
    sync::Arc,
};

use beelet_proto::cri;
use jiff::Timestamp;

/// Used bytes and inodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Bytes of blocks.
    pub bytes: u64,
    /// Files, folders and other objects with an inode.
    pub inodes: u64,
}

impl Sum for Taken {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, one| Self {
            bytes: sum.bytes.saturating_add(one.bytes),
            inodes: sum.inodes.saturating_add(one.inodes),
        })
    }
}

/// A kind of plain file in a pod's folder that is mounted into containers, which may write to it. Mounts and
/// measurements share this list: only [`Self::mount`] mounts these files, and a measurement of a pod's disk
/// includes each of [`Self::ALL`]. A file that is mounted but not counted is room without a limit
/// (CVE-2020-8557).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WritableFile {
    /// `/etc/hosts`, one for all containers.
    Hosts,
    /// `/etc/hostname`, one for all containers of a sandbox.
    Hostname,
    /// `/etc/resolv.conf`, one for all containers of a sandbox.
    Resolver,
    /// The termination messages of a container's instances.
    TerminationMessage,
}

impl WritableFile {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::Hosts, Self::Hostname, Self::Resolver, Self::TerminationMessage];

    /// Returns the name of the kind in messages.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Hosts => "/etc/hosts",
            Self::Hostname => "/etc/hostname",
            Self::Resolver => "/etc/resolv.conf",
            Self::TerminationMessage => "termination messages",
        }
    }

    /// Returns a container's path of this kind, below the pod's folder: a file, or a folder of files.
    #[must_use]
    pub fn place(self, container: &str) -> PathBuf {
        match self {
            Self::Hosts => PathBuf::from("etc-hosts"),
            Self::Hostname => PathBuf::from("etc-hostname"),
            Self::Resolver => PathBuf::from("etc-resolv.conf"),
            Self::TerminationMessage => Path::new("containers").join(container),
        }
    }

    /// Returns the mount of a file of this kind, which is at `host_path` on the node.
    #[must_use]
    pub fn mount(self, host_path: &Path, container_path: &str, readonly: bool) -> cri::Mount {
        cri::Mount {
            container_path: container_path.to_owned(),
            host_path: host_path.to_string_lossy().into_owned(),
            readonly,
            selinux_relabel: true,
            ..Default::default()
        }
    }
}

/// Last measured disk usage of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodDisk {
    /// emptyDir volumes on disk, by name.
    pub volumes: BTreeMap<String, Taken>,
    /// Logs by container.
    pub logs: BTreeMap<String, Taken>,
    /// Writable layers by container.
    pub rootfs: BTreeMap<String, Taken>,
    /// Files of the node that containers may write.
    pub files: BTreeMap<WritableFile, Taken>,
    /// Volumes with folders deeper than a measurement goes, which may contain any amount.
    pub too_deep: BTreeSet<String>,
}

impl PodDisk {
    /// Returns the total.
    #[must_use]
    pub fn whole(&self) -> Taken {
        let by_name = self.volumes.values().chain(self.logs.values()).chain(self.rootfs.values());
        by_name.chain(self.files.values()).copied().sum()
    }
}

/// Room in a volume with its own file system or device; 0 for unknown values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// Bytes in all.
    pub capacity_bytes: u64,
    /// Writable bytes.
    pub available_bytes: u64,
    /// Used bytes.
    pub used_bytes: u64,
    /// Inodes in all.
    pub inodes: u64,
    /// Free inodes.
    pub inodes_free: u64,
    /// Used inodes.
    pub inodes_used: u64,
}

/// Measured usage of a pod's volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeUse {
    /// Name of the volume in the pod.
    pub volume: String,
    /// Namespace and name of the claim; None for a volume in the pod's own spec.
    pub claim: Option<(String, String)>,
    /// Time of the measurement.
    pub at: Timestamp,
    /// Room in the volume.
    pub room: Room,
    /// True if the storage plugin reports a problem with the volume; None if the plugin reports no health.
    pub abnormal: Option<bool>,
}

/// Last measured volumes of pods, by pod UID.
pub type VolumesUse = Arc<BTreeMap<String, Vec<VolumeUse>>>;

/// Paths in the node's file systems; None if unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places {
    /// Path in the file system of volumes and logs.
    pub node: Option<PathBuf>,
    /// Path in the file system of images.
    pub images: Option<PathBuf>,
    /// Path in the file system of writable layers.
    pub containers: Option<PathBuf>,
    /// Usage of all images, from the runtime.
    pub all_images: Option<Taken>,
}

/// Reports measured disk usage; does not measure.
pub trait DiskUse: Send {
    /// Returns the usage of the pod with this UID, once measured.
    fn of(&self, uid: &str) -> Option<PodDisk>;

    /// Returns paths in the node's file systems.
    fn places(&self) -> Places;
}

/// A [`DiskUse`] without measurements.
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
