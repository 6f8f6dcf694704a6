//! Errors of making, mounting, changing and removing volumes.

use std::io;
use std::path::PathBuf;

use rustix::io::Errno;

/// A failure of a pod's volumes.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A volume of the pod failed.
    #[error("volume {volume}: {cause}")]
    Volume {
        /// Volume's name.
        volume: String,
        /// Cause.
        cause: Box<Error>,
    },
    /// Claims whose PersistentVolumes are unknown, or that the pod may not use. The text is the kubelet's.
    #[error("unmounted volumes=[{0}], unattached volumes=[], failed to process volumes=[{0}]: {why}", .volumes.join(" "))]
    Claims {
        /// Names of the volumes.
        volumes: Vec<String>,
        /// Cause.
        why: String,
    },
    /// A storage plugin cannot publish or unpublish a volume.
    #[error(transparent)]
    Csi(#[from] beelet_csi::Error),
    /// A mount of a container failed.
    #[error("mount {path} of container {container}: {cause}")]
    Mount {
        /// Path in the container.
        path: String,
        /// Container's name.
        container: String,
        /// Cause.
        cause: Box<Error>,
    },
    /// The pod asks for something impossible or refers to a missing object.
    #[error("{0}")]
    Unmet(String),
    /// The pod's volumes exceed the agent's limits per pod.
    #[error(transparent)]
    TooMuch(#[from] beelet_policy::volumes::content::TooMuch),
    /// The agent interrupted the work: the pod is being removed or its desired state changed.
    #[error("the agent interrupted the setup of the volumes")]
    Stopped,
    /// A folder could not be made or removed.
    #[error(transparent)]
    Folder(#[from] beelet_base::Error),
    /// The file system or the kernel refused.
    #[error("cannot {action} {}: {cause}", .path.display())]
    Io {
        /// Action that failed.
        action: &'static str,
        /// Path that the action was for.
        path: PathBuf,
        /// Cause.
        cause: io::Error,
    },
    /// A mount that is in use.
    #[error("cannot unmount {}: {cause}; something still uses it", .path.display())]
    Busy {
        /// Mount point.
        path: PathBuf,
        /// Cause.
        cause: Errno,
    },
    /// Another process removed a volume's folder while the agent was making it.
    #[error("another process removed {} while the agent was making it", .0.display())]
    Vanished(PathBuf),
    /// A path of the machine does not match the volume's type.
    #[error("hostPath {} {why}", .path.display())]
    HostPath {
        /// Path on the machine.
        path: PathBuf,
        /// Cause.
        why: String,
    },
    /// A part of a volume cannot be mounted.
    #[error("subPath {} of {}: {}", .part.display(), .volume.display(), sub_path(*.cause))]
    SubPath {
        /// Path of the part in the volume.
        part: PathBuf,
        /// Volume's folder.
        volume: PathBuf,
        /// Cause.
        cause: Errno,
    },
    /// A file of a volume cannot be read.
    #[error("cannot read {} of {}: {cause}", .part.display(), .volume.display())]
    Part {
        /// Path of the file in the volume.
        part: PathBuf,
        /// Volume's folder.
        volume: PathBuf,
        /// Cause.
        cause: Errno,
    },
    /// The group of a volume's files cannot be changed to the pod's group.
    #[error("cannot change the group of {} to {group}: {}", .path.display(), fs_group(*.cause))]
    FsGroup {
        /// Volume's folder.
        path: PathBuf,
        /// Id of the group.
        group: u32,
        /// Cause.
        cause: Errno,
    },
}

impl Error {
    pub(super) fn unmet(why: impl Into<String>) -> Self {
        Self::Unmet(why.into())
    }

    /// Wraps the message of another crate's error, for `map_err`.
    pub(super) fn unmet_of(why: impl std::fmt::Display) -> Self {
        Self::Unmet(why.to_string())
    }

    /// Returns a function that adds the action and the path to an I/O error, for `map_err`.
    pub(super) fn io<E: Into<io::Error>>(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(E) -> Self {
        let path = path.into();
        move |cause| Self::Io { action, path, cause: cause.into() }
    }

    /// Adds the name of the volume. The text of an error of claims has the names of its volumes already.
    pub(super) fn of_volume(self, volume: &str) -> Self {
        if matches!(self, Self::Claims { .. }) {
            return self;
        }
        Self::Volume { volume: volume.to_owned(), cause: Box::new(self) }
    }
}

fn sub_path(cause: Errno) -> String {
    match cause {
        Errno::XDEV | Errno::LOOP => "the path leads out of the volume (a symbolic link?)".to_owned(),
        cause => cause.to_string(),
    }
}

fn fs_group(cause: Errno) -> String {
    match cause {
        Errno::NAMETOOLONG => {
            format!("folders are nested more than {} levels deep", beelet_base::walk::DEEPEST)
        }
        Errno::STALE => "another process moved folders at the same time".to_owned(),
        cause => cause.to_string(),
    }
}
