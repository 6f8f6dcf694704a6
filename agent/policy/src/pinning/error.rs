//! Why a configuration or a state file is not accepted, and why a pod is not.

/// A configuration or a state file that a manager can't start with.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct PinningError(String);

impl PinningError {
    /// An error with this text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

/// The reason of a refusal, as the pod's status has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The providers don't agree on NUMA nodes that the policy accepts.
    TopologyAffinity,
    /// `full-pcpus-only`: not whole cores, or too few of them.
    SmtAlignment,
    /// Exclusive containers leave nothing to the others of a pod with pod-level resources.
    EmptyPodSharedPool,
    /// Anything else, mostly: too little is free.
    Unexpected,
}

impl Reason {
    /// The kubelet's word.
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

/// A pod is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// For programs.
    pub reason: Reason,
    /// For people, in the kubelet's words.
    pub message: String,
}

impl Refusal {
    /// A refusal for a reason.
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into() }
    }

    /// An allocation failed (`unexpectedAdmissionError`).
    #[must_use]
    pub fn unexpected(cause: impl std::fmt::Display) -> Self {
        Self::new(Reason::Unexpected, format!("Allocate failed due to {cause}, which is unexpected"))
    }
}
