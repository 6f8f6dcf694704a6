//! What can fail on a pod's way.

use std::io;
use std::path::PathBuf;

use beelet_cgroups::CgroupError;
use beelet_images::pull::PullError;
use beelet_policy::pod::StartFailure;

/// Why a step of a pod's life failed: a sentence.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The container runtime refused, or gave no answer.
    #[error(transparent)]
    Runtime(#[from] beelet_cri::Error),
    /// The pod's spec can't be carried out on this node.
    #[error("{0}")]
    Spec(String),
    /// A cgroup can't be made, written or removed.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// Files of the pod on this node (folders, volumes, logs) can't be made or removed.
    #[error("{0}")]
    Files(String),
    /// One of the pod's volumes can't be made.
    #[error("volume {volume}: {why}")]
    Volume {
        /// Its name.
        volume: String,
        /// Why: a sentence.
        why: String,
    },
    /// The runtime does not see what the agent mounts.
    #[error("volume {volume}: {why}")]
    UnseenMount {
        /// The first volume that would be empty.
        volume: String,
        /// Why, and what to do: a sentence.
        why: String,
    },
    /// What the pod's claims are bound to isn't known, or the pod may not have it: the kubelet's words.
    #[error("unmounted volumes=[{0}], unattached volumes=[], failed to process volumes=[{0}]: {why}", .volumes.join(" "))]
    Claims {
        /// The volumes.
        volumes: Vec<String>,
        /// Why.
        why: String,
    },
    /// The pod's claims to devices can't be prepared, or not yet.
    #[error("prepare dynamic resources: {0}")]
    Unprepared(#[source] beelet_dra::Error),
    /// What was prepared for the pod can't be given back, or not yet.
    #[error("unprepare dynamic resources: {0}")]
    StillPrepared(#[source] beelet_dra::Error),
    /// Something of the pod that should end can't be stopped.
    #[error("{0}")]
    Kill(Box<Error>),
    /// The runtime did not do what it said it did.
    #[error("{0}")]
    Unseen(&'static str),
}

impl Error {
    /// The error of files of the pod.
    pub(crate) fn of_files(error: impl std::fmt::Display) -> Self {
        Self::Files(error.to_string())
    }

    /// The error of volumes that can't be made.
    pub(crate) fn of_volumes(error: beelet_volumes::Error) -> Self {
        match error {
            beelet_volumes::Error::Volume { volume, cause } => {
                Self::Volume { volume, why: cause.to_string() }
            }
            beelet_volumes::Error::Claims { volumes, why } => Self::Claims { volumes, why },
            other => Self::of_files(other),
        }
    }

    /// The error of something that can't be stopped.
    pub(crate) fn of_kill(error: Self) -> Self {
        Self::Kill(Box::new(error))
    }

    /// The error of a spec that can't be carried out.
    pub(crate) fn of_spec(error: impl std::fmt::Display) -> Self {
        Self::Spec(error.to_string())
    }

    /// Returns true if the runtime couldn't be reached or didn't answer in time: nothing is known against the
    /// pod.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Runtime(error) => error.is_transient(),
            Self::Kill(error) => error.is_transient(),
            _ => false,
        }
    }
}

/// Why a file that the agent keeps for a pod can't be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FileError {
    /// Its folder can't be made.
    #[error(transparent)]
    Folder(#[from] beelet_base::Error),
    /// It can't be read.
    #[error("cannot read {}: {cause}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// It can't be made, or written.
    #[error("cannot write {}: {cause}", .path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        cause: io::Error,
    },
}

/// Why a container could not be started: a sentence.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// What it needs on the node can't be made, or its spec can't be carried out.
    #[error(transparent)]
    Config(Error),
    /// An image can't be pulled.
    #[error("{}", .0.message)]
    Pull(PullError),
    /// The runtime could not create it, or say what it needs for that.
    #[error(transparent)]
    Create(beelet_cri::Error),
    /// The runtime could not start it.
    #[error(transparent)]
    Run(beelet_cri::Error),
}

impl StartError {
    /// The word that the pod's status shows, the kubelet's.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Config(_) => "CreateContainerConfigError",
            Self::Pull(error) => error.reason,
            Self::Create(_) => "CreateContainerError",
            Self::Run(_) => "RunContainerError",
        }
    }

    /// What is known against the container.
    pub(crate) fn failure(&self) -> StartFailure {
        match self {
            _ if self.is_transient() => StartFailure::Runtime,
            Self::Pull(_) | Self::Run(_) => StartFailure::Image,
            Self::Config(_) | Self::Create(_) => StartFailure::Making,
        }
    }

    /// Returns true if the runtime couldn't be reached or didn't answer in time: nothing is known against the
    /// container.
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
