//! The errors for a rejected configuration or state file, and for a rejected pod.

/// The error of a configuration or a state file with which a manager cannot start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct PinningError(String);

impl PinningError {
    /// Creates an error with this text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

/// The reason of a rejection, as in the pod's status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The providers do not agree on NUMA nodes that the policy accepts.
    TopologyAffinity,
    /// `full-pcpus-only`: the request is not for whole cores, or too few are free.
    SmtAlignment,
    /// Exclusive containers leave nothing for the other containers of a pod with pod-level resources.
    EmptyPodSharedPool,
    /// Any other reason, mostly that too little is free.
    Unexpected,
}

impl Reason {
    /// Returns the kubelet's name of the reason.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::TopologyAffinity => "TopologyAffinityError",
            Self::SmtAlignment => "SMTAlignmentError",
            Self::EmptyPodSharedPool => "EmptyPodSharedPoolError",
            Self::Unexpected => "UnexpectedAdmissionError",
        }
    }
}

/// The rejection of a pod.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// The reason, for programs.
    pub reason: Reason,
    /// The message, in the kubelet's words.
    pub message: String,
}

impl Refusal {
    /// Creates a rejection.
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into() }
    }

    /// Creates the rejection for a failed allocation (`unexpectedAdmissionError`).
    #[must_use]
    pub fn unexpected(cause: impl std::fmt::Display) -> Self {
        Self::new(Reason::Unexpected, format!("Allocate failed due to {cause}, which is unexpected"))
    }
}
