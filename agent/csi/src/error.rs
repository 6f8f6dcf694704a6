//! Why a volume of a storage plugin can't be used, or not be given back.

use std::{io, path::PathBuf};

use beelet_model::storage::StorageError;

/// A failure. Displayed, it is a whole sentence.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The driver has not registered, or is gone.
    #[error("driver name {0} not found in the list of registered CSI drivers")]
    NotRegistered(String),
    /// The driver refused, or gave no answer.
    #[error("rpc error: code = {code:?} desc = {message}")]
    Driver {
        /// The status code.
        code: tonic::Code,
        /// The driver's words.
        message: String,
    },
    /// The API server doesn't say what is needed.
    #[error("{what}: {cause}")]
    Storage {
        /// What was asked for.
        what: String,
        /// Why there is no answer.
        cause: StorageError,
    },
    /// The pod asks for what can't be, or can't be yet.
    #[error("{0}")]
    Unmet(String),
    /// The driver, or the volume's attachment, cannot be used.
    #[error(transparent)]
    Unusable(#[from] beelet_policy::volumes::csi::CsiError),
    /// The driver makes no volume larger on the node.
    #[error("NodeExpand is not supported by the CSI driver {0}")]
    NeverExpands(String),
    /// A folder can't be made or removed.
    #[error(transparent)]
    Folder(#[from] beelet_base::Error),
    /// A record can't be read or written.
    #[error(transparent)]
    Record(#[from] beelet_state::StateError),
    /// The file system refused.
    #[error("cannot {action} {}: {cause}", .path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// With what.
        path: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// The driver said that a volume is gone, and it is not.
    #[error("{} is mounted still, though the driver said that it gave it back", .0.display())]
    Mounted(PathBuf),
}

impl Error {
    /// For `map_err`: what was tried, and with what.
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |cause| Self::Io { action, path, cause }
    }

    /// For `map_err`: what was asked of the API server.
    pub(crate) fn asked(what: impl Into<String>) -> impl FnOnce(StorageError) -> Self {
        let what = what.into();
        move |cause| Self::Storage { what, cause }
    }

    /// Returns true if the driver certainly does no more about the call (`isFinalError`).
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

    /// Returns true if the driver says that what it was asked for can't be (`isInfeasibleError`).
    #[must_use]
    pub fn is_infeasible(&self) -> bool {
        use tonic::Code::{InvalidArgument, NotFound, OutOfRange};
        matches!(self, Self::Driver { code: InvalidArgument | OutOfRange | NotFound, .. })
    }

    /// Returns true if the driver can't do it while the volume is in use (`inUseError`).
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        matches!(self, Self::Driver { code: tonic::Code::FailedPrecondition, .. })
    }
}
