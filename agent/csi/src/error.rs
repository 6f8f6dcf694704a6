//! Errors of publishing, expanding and releasing volumes of storage plugins.

use std::{io, path::PathBuf};

use beelet_model::storage::StorageError;

/// A failure of a storage plugin's volume.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The driver is not registered. The text is the kubelet's.
    #[error("driver name {0} not found in the list of registered CSI drivers")]
    NotRegistered(String),
    /// The driver refused the call or did not answer.
    #[error("rpc error: code = {code:?} desc = {message}")]
    Driver {
        /// Status code.
        code: tonic::Code,
        /// Driver's message.
        message: String,
    },
    /// The API server does not return a needed object.
    #[error("{what}: {cause}")]
    Storage {
        /// Requested object.
        what: String,
        /// Cause.
        cause: StorageError,
    },
    /// The pod asks for something that is impossible, or not possible yet.
    #[error("{0}")]
    Unmet(String),
    /// The driver, or the volume's attachment, cannot be used.
    #[error(transparent)]
    Unusable(#[from] beelet_policy::volumes::csi::CsiError),
    /// The driver does not expand volumes on the node. The text is the kubelet's.
    #[error("NodeExpand is not supported by the CSI driver {0}")]
    NeverExpands(String),
    /// A folder cannot be made or removed.
    #[error(transparent)]
    Folder(#[from] beelet_base::Error),
    /// A record cannot be read or written.
    #[error(transparent)]
    Record(#[from] beelet_state::StateError),
    /// The file system refused.
    #[error("cannot {action} {}: {cause}", .path.display())]
    Io {
        /// Action that failed.
        action: &'static str,
        /// Path that the action was for.
        path: PathBuf,
        /// Cause.
        cause: io::Error,
    },
    /// The driver reported success for an unmount, but the volume is still mounted.
    #[error("{} is still mounted, although the driver reported success for the unmount", .0.display())]
    Mounted(PathBuf),
}

impl Error {
    /// Returns a function that adds the action and the path to an I/O error, for `map_err`.
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |cause| Self::Io { action, path, cause }
    }

    /// Returns a function that adds the requested object to an error of the API server, for `map_err`.
    pub(crate) fn asked(what: impl Into<String>) -> impl FnOnce(StorageError) -> Self {
        let what = what.into();
        move |cause| Self::Storage { what, cause }
    }

    /// Returns true if the driver certainly no longer works on the call (`isFinalError`).
    #[must_use]
    pub fn is_final(&self) -> bool {
        use tonic::Code::{Aborted, Cancelled, DeadlineExceeded, ResourceExhausted, Unavailable};
        match self {
            Self::Driver { code, .. } => {
                !matches!(code, Cancelled | DeadlineExceeded | Unavailable | ResourceExhausted | Aborted)
            }
            Self::NeverExpands(_) => true,
            _ => false,
        }
    }

    /// Returns true if the driver reports that the request is impossible (`isInfeasibleError`).
    #[must_use]
    pub fn is_infeasible(&self) -> bool {
        use tonic::Code::{InvalidArgument, NotFound, OutOfRange};
        matches!(self, Self::Driver { code: InvalidArgument | OutOfRange | NotFound, .. })
    }

    /// Returns true if the driver refuses the request while the volume is in use (`inUseError`).
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        matches!(self, Self::Driver { code: tonic::Code::FailedPrecondition, .. })
    }
}
