//! Errors of preparing and unpreparing claims.

use beelet_model::storage::StorageError;
use beelet_policy::dra::ClaimError;

/// Error of this crate. Its text is the kubelet's if the kubelet has one.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The driver has no registered plugin.
    #[error("DRA driver {0} is not registered")]
    NotRegistered(String),
    /// The claim cannot be read from the API server.
    #[error("fetch ResourceClaim {name}: {cause}")]
    Unread {
        /// The claim's name.
        name: String,
        /// Cause.
        cause: StorageError,
    },
    /// The pod may not use the claim, or not yet.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// A node without an API server has no claims.
    #[error("this node has no API server")]
    NoApiServer,
    /// A container uses a claim that its pod does not name.
    #[error("a claim of the container is not among those of its pod")]
    NotOfPod,
    /// The driver refused a call or did not answer.
    #[error("{method}: rpc error: code = {code} desc = {message}")]
    Call {
        /// Called method.
        method: &'static str,
        /// Status code with its name in Go.
        code: String,
        /// Message of the driver.
        message: String,
    },
    /// The driver's response reports a failure for a claim, or is invalid.
    #[error("{method} {what}")]
    Answer {
        /// Called method.
        method: &'static str,
        /// Fault of the response.
        what: String,
    },
    /// The record cannot be written.
    #[error("checkpoint ResourceClaim state: {0}")]
    Record(#[from] beelet_state::StateError),
    /// The record cannot be encoded.
    #[error(transparent)]
    Checkpoint(#[from] beelet_policy::dra::checkpoint::CheckpointError),
}
