//! Why systemd or logind did not do what was asked.

/// The bus, or whoever was asked there, did not do it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{service} did not {action}: {why}")]
pub struct Error {
    /// Who was asked: `systemd`, `logind`.
    pub service: &'static str,
    /// For what: `start kubepods.slice`.
    pub action: String,
    /// Why not, as far as is known.
    pub why: String,
}

impl Error {
    /// The connection ended by itself.
    #[must_use]
    pub fn lost() -> Self {
        Self::new("the system bus", "stay", "the connection ended")
    }

    pub(crate) fn new(
        service: &'static str,
        action: impl Into<String>,
        why: &(impl std::fmt::Display + ?Sized),
    ) -> Self {
        Self { service, action: action.into(), why: why.to_string() }
    }
}
