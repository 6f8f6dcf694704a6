//! What a pod has on the node's disk.

use std::{
    collections::{BTreeMap, BTreeSet},
    iter::Sum,
    path::{Path, PathBuf},
    sync::Arc,
};

use beelet_proto::cri;
use jiff::Timestamp;

/// Bytes on disk, and inodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Bytes of blocks.
    pub bytes: u64,
    /// Files, folders and all else that has an inode.
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

/// A kind of plain file in a pod's folder that is mounted into containers, which may write to it. Both
/// sides go by this list: a mount of such a file is made by [`Self::mount`] alone, and a measurement of a
/// pod's disk has each of [`Self::ALL`] in it. A file that is mounted but not counted is room without a limit
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

    /// Its name in messages.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Hosts => "/etc/hosts",
            Self::Hostname => "/etc/hostname",
            Self::Resolver => "/etc/resolv.conf",
            Self::TerminationMessage => "termination messages",
        }
    }

    /// Where those of a container are, below the pod's folder: a file, or a folder of files.
    #[must_use]
    pub fn place(self, container: &str) -> PathBuf {
        match self {
            Self::Hosts => PathBuf::from("etc-hosts"),
            Self::Hostname => PathBuf::from("etc-hostname"),
            Self::Resolver => PathBuf::from("etc-resolv.conf"),
            Self::TerminationMessage => Path::new("containers").join(container),
        }
    }

    /// The mount of such a file, which is at `host_path` on the node.
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

/// What a pod has on disk, as last measured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodDisk {
    /// emptyDir volumes on disk, by name.
    pub volumes: BTreeMap<String, Taken>,
    /// Logs by container.
    pub logs: BTreeMap<String, Taken>,
    /// Writable layers by container.
    pub rootfs: BTreeMap<String, Taken>,
    /// Files of the node that its containers may write.
    pub files: BTreeMap<WritableFile, Taken>,
    /// The volumes with folders deeper than a measurement goes: there may be any amount in those folders.
    pub too_deep: BTreeSet<String>,
}

impl PodDisk {
    /// All of it.
    #[must_use]
    pub fn whole(&self) -> Taken {
        let by_name = self.volumes.values().chain(self.logs.values()).chain(self.rootfs.values());
        by_name.chain(self.files.values()).copied().sum()
    }
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
