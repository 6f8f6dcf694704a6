//! Errors of requests to the API server and their classification.

use std::{fmt, time::Duration};

/// Failure of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// Method and path of the request.
    pub request: String,
    /// Kind of the failure.
    pub kind: Kind,
    /// The server's message, or the cause.
    pub message: String,
}

/// Kind of a failure, for callers' decisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// No valid answer: connection refused or reset, timeout, or an answer that does not fit the request.
    Unreachable,
    /// The server's certificate is not signed by the kubeconfig's authority, or is not valid now.
    Untrusted,
    /// The request contains an invalid name and was not sent, so the server may be fine.
    Unaskable,
    /// The server answered with this status.
    Status {
        /// The HTTP status.
        code: u16,
        /// Time that the server asks to wait before the next attempt.
        retry_after: Option<Duration>,
    },
}

impl Error {
    /// Returns true if the same request may succeed later without intervention.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self.kind {
            Kind::Unreachable | Kind::Untrusted => true,
            Kind::Status { code, .. } => code == 429 || code >= 500,
            Kind::Unaskable => false,
        }
    }

    /// Returns the error of a missing answer, or of an answer that does not fit the request.
    pub(crate) fn unreachable(request: &str, cause: &dyn fmt::Display) -> Self {
        Self { request: request.to_owned(), kind: Kind::Unreachable, message: cause.to_string() }
    }

    /// Returns true if no trusted server answered.
    pub(crate) fn is_absence(&self) -> bool {
        matches!(self.kind, Kind::Unreachable | Kind::Untrusted)
    }

    /// Returns the HTTP status, if the server answered.
    #[must_use]
    pub fn code(&self) -> Option<u16> {
        match self.kind {
            Kind::Status { code, .. } => Some(code),
            Kind::Unreachable | Kind::Untrusted | Kind::Unaskable => None,
        }
    }

    /// Returns true if the object does not exist, or can't exist because its name is invalid.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        self.code() == Some(404) || self.kind == Kind::Unaskable
    }

    /// Returns true if the object exists already, or has changed since it was read.
    #[must_use]
    pub fn is_conflict(&self) -> bool {
        self.code() == Some(409)
    }

    /// Returns true if the node lacks the permission, possibly only for now.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        self.code() == Some(403)
    }

    /// Returns true if the server can't begin a watch at the requested resource version: it is too old,
    /// invalid, or from an earlier run of the server. client-go's reflector lists again after these errors,
    /// too (`isExpiredError`, `isTooLargeResourceVersionError`).
    #[must_use]
    pub fn is_expired(&self) -> bool {
        match self.code() {
            Some(400 | 410) => true,
            Some(504) => self.message.contains("Too large resource version"),
            _ => false,
        }
    }

    /// Returns the time that the server asks to wait.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self.kind {
            Kind::Status { retry_after, .. } => retry_after,
            Kind::Unreachable | Kind::Untrusted | Kind::Unaskable => None,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { request, message, .. } = self;
        match self.kind {
            Kind::Unreachable => write!(f, "{request}: the API server did not answer: {message}"),
            Kind::Untrusted => write!(
                f,
                "{request}: the API server's certificate is not trusted: {message}; update the CA in the kubeconfig if the \
                 cluster's CA has changed, or set this machine's clock"
            ),
            Kind::Unaskable => write!(f, "{request}: invalid request: {message}"),
            Kind::Status { code, .. } => write!(f, "{request}: the API server answered {code}: {message}"),
        }
    }
}

impl std::error::Error for Error {}
