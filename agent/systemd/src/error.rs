//! Failed calls to systemd or logind.

/// A failed call to the bus, systemd or logind.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{service} did not {action}: {why}")]
pub struct Error {
    /// Service that got the call: `systemd`, `logind`.
    pub service: &'static str,
    /// Requested action: `start kubepods.slice`.
    pub action: String,
    /// Cause, as far as known.
    pub why: String,
}

impl Error {
    /// Returns the error for a closed connection.
    #[must_use]
    pub fn lost() -> Self {
        Self::new("the system bus", "keep the connection", "the connection was closed")
    }

    pub(crate) fn new(
        service: &'static str,
        action: impl Into<String>,
        why: &(impl std::fmt::Display + ?Sized),
    ) -> Self {
        Self { service, action: action.into(), why: why.to_string() }
    }
}
