//! Why a volume could not be made, mounted, changed or removed.

use std::io;
use std::path::PathBuf;

use rustix::io::Errno;

/// A failure of one of a pod's volumes. Displayed, it is a whole sentence.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// One of the pod's volumes.
    #[error("volume {volume}: {cause}")]
    Volume {
        /// Its name.
        volume: String,
        /// Why.
        cause: Box<Error>,
    },
    /// Claims whose PersistentVolumes are not known, or that the pod may not have: the kubelet's words.
    #[error("unmounted volumes=[{0}], unattached volumes=[], failed to process volumes=[{0}]: {why}", .volumes.join(" "))]
    Claims {
        /// The volumes.
        volumes: Vec<String>,
        /// Why.
        why: String,
    },
    /// A storage plugin cannot bring a volume, or cannot take it back.
    #[error(transparent)]
    Csi(#[from] beelet_csi::Error),
    /// One of a container's mounts.
    #[error("mount {path} of container {container}: {cause}")]
    Mount {
        /// Where it is in the container.
        path: String,
        /// The container.
        container: String,
        /// Why.
        cause: Box<Error>,
    },
    /// The pod asks for something that cannot be, or refers to something that is not there.
    #[error("{0}")]
    Unmet(String),
    /// The pod asks for more than the agent makes for one.
    #[error(transparent)]
    TooMuch(#[from] beelet_policy::volumes::content::TooMuch),
    /// The work was stopped: its pod is taken away, or another state of it is wanted.
    #[error("the volumes are not made, as the agent stopped the work before its end")]
    Stopped,
    /// A folder could not be made or removed.
    #[error(transparent)]
    Folder(#[from] beelet_base::Error),
    /// The file system or the kernel refused.
    #[error("cannot {action} {}: {cause}", .path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// With what.
        path: PathBuf,
        /// Why it failed.
        cause: io::Error,
    },
    /// A mount that is in use.
    #[error("cannot unmount {}: {cause}; something still uses it", .path.display())]
    Busy {
        /// The mount point.
        path: PathBuf,
        /// Why it failed.
        cause: Errno,
    },
    /// A volume's folder was removed by somebody while the agent made it.
    #[error("{} was taken away while it was made", .0.display())]
    Vanished(PathBuf),
    /// A path of the machine's that does not fit the volume's type.
    #[error("hostPath {} {why}", .path.display())]
    HostPath {
        /// The path.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// A part of a volume that can't be mounted.
    #[error("subPath {} of {}: {}", .part.display(), .volume.display(), sub_path(*.cause))]
    SubPath {
        /// The part.
        part: PathBuf,
        /// The volume's folder.
        volume: PathBuf,
        /// Why.
        cause: Errno,
    },
    /// A file of a volume that can't be read.
    #[error("cannot read {} of {}: {cause}", .part.display(), .volume.display())]
    Part {
        /// The file.
        part: PathBuf,
        /// The volume's folder.
        volume: PathBuf,
        /// Why.
        cause: Errno,
    },
    /// Files that could not be given to the pod's group.
    #[error("cannot give {} to the group {group}: {}", .path.display(), fs_group(*.cause))]
    FsGroup {
        /// The volume's folder.
        path: PathBuf,
        /// The group's id.
        group: u32,
        /// Why.
        cause: Errno,
    },
}

impl Error {
    pub(super) fn unmet(why: impl Into<String>) -> Self {
        Self::Unmet(why.into())
    }

    /// For `map_err`: what another part says.
    pub(super) fn unmet_of(why: impl std::fmt::Display) -> Self {
        Self::Unmet(why.to_string())
    }

    /// For `map_err`: what was tried, and with what.
    pub(super) fn io<E: Into<io::Error>>(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(E) -> Self {
        let path = path.into();
        move |cause| Self::Io { action, path, cause: cause.into() }
    }

    /// The error of one of the pod's volumes. The words of an error of claims name their volumes already.
    pub(super) fn of_volume(self, volume: &str) -> Self {
        if matches!(self, Self::Claims { .. }) {
            return self;
        }
        Self::Volume { volume: volume.to_owned(), cause: Box::new(self) }
    }
}

fn sub_path(cause: Errno) -> String {
    match cause {
        Errno::XDEV | Errno::LOOP => {
            "it leads out of the volume (a symbolic link?), and is refused".to_owned()
        }
        cause => cause.to_string(),
    }
}

fn fs_group(cause: Errno) -> String {
    match cause {
        Errno::NAMETOOLONG => format!("it has folders more than {} levels deep", beelet_base::walk::DEEPEST),
        Errno::STALE => "folders in it are moved meanwhile".to_owned(),
        cause => cause.to_string(),
    }
}
