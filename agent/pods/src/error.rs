//! Errors of a pod's steps.

use std::io;
use std::path::PathBuf;

use beelet_cgroups::CgroupError;
use beelet_images::pull::PullError;
use beelet_policy::pod::StartFailure;

/// Failure of a step of a pod.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A call of the container runtime failed.
    #[error(transparent)]
    Runtime(#[from] beelet_cri::Error),
    /// The node cannot run the pod's spec.
    #[error("{0}")]
    Spec(String),
    /// A cgroup cannot be created, written or removed.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// Files of the pod on this node (folders, volumes, logs) cannot be created or removed.
    #[error("{0}")]
    Files(String),
    /// The setup of a volume failed.
    #[error("volume {volume}: {why}")]
    Volume {
        /// Name of the volume.
        volume: String,
        /// Cause, as a sentence.
        why: String,
    },
    /// The runtime does not see the agent's mounts.
    #[error("volume {volume}: {why}")]
    UnseenMount {
        /// The first volume that would be empty.
        volume: String,
        /// Cause and remedy, as a sentence.
        why: String,
    },
    /// The volumes of the pod's claims are unknown, or forbidden for the pod. The message is the kubelet's.
    #[error("unmounted volumes=[{0}], unattached volumes=[], failed to process volumes=[{0}]: {why}", .volumes.join(" "))]
    Claims {
        /// Names of the volumes.
        volumes: Vec<String>,
        /// Cause.
        why: String,
    },
    /// The pod's resource claims cannot be prepared yet.
    #[error("prepare dynamic resources: {0}")]
    Unprepared(#[source] beelet_dra::Error),
    /// The pod's resource claims cannot be unprepared yet.
    #[error("unprepare dynamic resources: {0}")]
    StillPrepared(#[source] beelet_dra::Error),
    /// A container or a sandbox of the pod cannot be stopped.
    #[error("{0}")]
    Kill(Box<Error>),
    /// The runtime does not show the result of an action that it reported as successful.
    #[error("{0}")]
    Unseen(&'static str),
}

impl Error {
    /// Returns the error for a failure with files of the pod.
    pub(crate) fn of_files(error: impl std::fmt::Display) -> Self {
        Self::Files(error.to_string())
    }

    /// Returns the error for a failed setup of volumes.
    pub(crate) fn of_volumes(error: beelet_volumes::Error) -> Self {
        match error {
            beelet_volumes::Error::Volume { volume, cause } => {
                Self::Volume { volume, why: cause.to_string() }
            }
            beelet_volumes::Error::Claims { volumes, why } => Self::Claims { volumes, why },
            other => Self::of_files(other),
        }
    }

    /// Returns the error for a failed stop of a container or a sandbox.
    pub(crate) fn of_kill(error: Self) -> Self {
        Self::Kill(Box::new(error))
    }

    /// Returns the error for a spec that the node cannot run.
    pub(crate) fn of_spec(error: impl std::fmt::Display) -> Self {
        Self::Spec(error.to_string())
    }

    /// Returns true if the runtime was unreachable or did not answer in time: the pod itself may be valid.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Runtime(error) => error.is_transient(),
            Self::Kill(error) => error.is_transient(),
            _ => false,
        }
    }
}

/// Failure with a file that the agent keeps for a pod.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FileError {
    /// The file's folder cannot be created.
    #[error(transparent)]
    Folder(#[from] beelet_base::Error),
    /// The file cannot be read.
    #[error("cannot read {}: {cause}", .path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        cause: io::Error,
    },
    /// The file cannot be created or written.
    #[error("cannot write {}: {cause}", .path.display())]
    Write {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        cause: io::Error,
    },
}

/// Failed start of a container.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The container's configuration or files on the node cannot be created, or the node cannot run its spec.
    #[error(transparent)]
    Config(Error),
    /// An image cannot be pulled.
    #[error("{}", .0.message)]
    Pull(PullError),
    /// The runtime cannot create the container, or a query for its creation failed.
    #[error(transparent)]
    Create(beelet_cri::Error),
    /// The runtime cannot start the container.
    #[error(transparent)]
    Run(beelet_cri::Error),
}

impl StartError {
    /// Returns the kubelet's reason for the pod's status.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Config(_) => "CreateContainerConfigError",
            Self::Pull(error) => error.reason,
            Self::Create(_) => "CreateContainerError",
            Self::Run(_) => "RunContainerError",
        }
    }

    /// Returns the kind of the failure, which sets the back-off.
    pub(crate) fn failure(&self) -> StartFailure {
        match self {
            _ if self.is_transient() => StartFailure::Runtime,
            Self::Pull(_) | Self::Run(_) => StartFailure::Image,
            Self::Config(_) | Self::Create(_) => StartFailure::Making,
        }
    }

    /// Returns true if the runtime was unreachable or did not answer in time: the container itself may be
    /// valid.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Config(_) => false,
            Self::Pull(error) => error.is_transient(),
            Self::Create(error) | Self::Run(error) => error.is_transient(),
        }
    }
}

impl From<PullError> for StartError {
    fn from(error: PullError) -> Self {
        Self::Pull(error)
    }
}

impl From<Error> for StartError {
    fn from(error: Error) -> Self {
        Self::Config(error)
    }
}
