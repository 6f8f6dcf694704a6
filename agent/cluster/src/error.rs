//! Errors of requests to the API server, and all that callers decide by.

use std::{fmt, time::Duration};

/// Why a request failed. Displayed, it is a whole sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The method and path that were asked for.
    pub request: String,
    /// What kind of failure it was.
    pub kind: Kind,
    /// The server's words, or the cause.
    pub message: String,
}

/// All that a caller may decide by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// No answer: refused, reset, too late, or an answer that is no answer.
    Unreachable,
    /// The server's certificate is not one that the kubeconfig's authority signed, or is not valid now.
    Untrusted,
    /// The request can't be made: a name in it can't be one. Nobody was asked, so it says nothing of the
    /// server.
    Unaskable,
    /// The server answered with this status.
    Status {
        /// The HTTP status.
        code: u16,
        /// How long the server asks to wait before the next try.
        retry_after: Option<Duration>,
    },
}

impl Error {
    /// The same request may succeed later without anybody's help.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self.kind {
            Kind::Unreachable | Kind::Untrusted => true,
            Kind::Status { code, .. } => code == 429 || code >= 500,
            Kind::Unaskable => false,
        }
    }

    /// No answer came, or one that does not fit the request.
    pub(crate) fn unreachable(request: &str, cause: &dyn fmt::Display) -> Self {
        Self { request: request.to_owned(), kind: Kind::Unreachable, message: cause.to_string() }
    }

    /// There was no server that could be asked.
    pub(crate) fn is_absence(&self) -> bool {
        matches!(self.kind, Kind::Unreachable | Kind::Untrusted)
    }

    /// The HTTP status, if the server answered.
    #[must_use]
    pub fn code(&self) -> Option<u16> {
        match self.kind {
            Kind::Status { code, .. } => Some(code),
            Kind::Unreachable | Kind::Untrusted | Kind::Unaskable => None,
        }
    }

    /// Returns true if what was asked for is not there, or can't be: nothing has such a name.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        self.code() == Some(404) || self.kind == Kind::Unaskable
    }

    /// It is there already, or has changed meanwhile.
    #[must_use]
    pub fn is_conflict(&self) -> bool {
        self.code() == Some(409)
    }

    /// Whoever asks has no right to, or not yet.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        self.code() == Some(403)
    }

    /// A watch was asked to begin at a version that the server has forgotten, or can't know: one that an
    /// earlier life of it gave, or that is none. client-go lists again after these too
    /// (`isExpiredError`, `isTooLargeResourceVersionError` in its reflector).
    #[must_use]
    pub fn is_expired(&self) -> bool {
        match self.code() {
            Some(400 | 410) => true,
            Some(504) => self.message.contains("Too large resource version"),
            _ => false,
        }
    }

    /// The time that the server asks to wait.
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
                "{request}: the API server's certificate is not trusted: {message}. If the cluster's CA has changed, put the \
                 new one into the kubeconfig; if this machine's clock is wrong, set it"
            ),
            Kind::Unaskable => write!(f, "{request}: the API server can't be asked this: {message}"),
            Kind::Status { code, .. } => write!(f, "{request}: the API server says {code}: {message}"),
        }
    }
}

impl std::error::Error for Error {}
