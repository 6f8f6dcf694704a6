//! Why a claim can't be used, or not be given back.

use beelet_model::storage::StorageError;
use beelet_policy::dra::ClaimError;

/// A failure. Displayed, it is the kubelet's sentence where it has one.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The driver has not registered, or is gone.
    #[error("DRA driver {0} is not registered")]
    NotRegistered(String),
    /// The API server doesn't say what the claim is.
    #[error("fetch ResourceClaim {name}: {cause}")]
    Unread {
        /// The claim's name.
        name: String,
        /// Why there is no answer.
        cause: StorageError,
    },
    /// The pod may not have the claim, or not yet.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// A node without an API server has no claims.
    #[error("this node has no API server")]
    NoApiServer,
    /// A container uses a claim that its pod does not name.
    #[error("a claim of the container is not among those of its pod")]
    NotOfPod,
    /// The driver refused a call, or gave no answer.
    #[error("{method}: rpc error: code = {code} desc = {message}")]
    Call {
        /// What was called.
        method: &'static str,
        /// The status code, in Go's words.
        code: String,
        /// The driver's words.
        message: String,
    },
    /// The driver says of a claim that it can't, or what it says can't be.
    #[error("{method} {what}")]
    Answer {
        /// What was called.
        method: &'static str,
        /// What is wrong.
        what: String,
    },
    /// The record can't be written.
    #[error("checkpoint ResourceClaim state: {0}")]
    Record(#[from] beelet_state::StateError),
    /// The record can't be made.
    #[error(transparent)]
    Checkpoint(#[from] beelet_policy::dra::checkpoint::CheckpointError),
}
