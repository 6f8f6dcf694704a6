//! Error of a configuration that does not fit this machine.

/// Error of a configuration that does not fit this machine.
#[derive(Debug, thiserror::Error)]
#[error("{field}: {message}")]
pub struct OpenError {
    field: &'static str,
    message: String,
}

impl OpenError {
    /// Creates the error of a field.
    pub(super) fn new(field: &'static str, message: impl Into<String>) -> Self {
        Self { field, message: message.into() }
    }
}
