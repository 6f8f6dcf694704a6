//! Result of a single check of a container.

use beelet_policy::probe::Outcome;

/// Maximum bytes of an application's answer to read or report (`maxRespBodyLength` in pkg/probe).
pub(super) const MAX_OUTPUT: usize = 10 << 10;

/// Result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    /// Outcome of the check.
    pub outcome: Outcome,
    /// Explanation for the user: a sentence, or the application's output.
    pub detail: String,
    /// True for a success that still deserves an event.
    pub warning: bool,
}

impl Answer {
    /// Returns a success: the container answered as expected.
    pub(super) fn success(detail: impl Into<String>) -> Self {
        Self::new(Outcome::Success, detail.into())
    }

    /// Returns a success that deserves an event.
    pub(super) fn warning(detail: impl Into<String>) -> Self {
        Self { warning: true, ..Self::success(detail) }
    }

    /// Returns a failure: the container did not answer as expected.
    pub(super) fn failure(detail: impl Into<String>) -> Self {
        Self::new(Outcome::Failure, detail.into())
    }

    /// Returns an error: the probe could not be run.
    pub(super) fn error(detail: impl Into<String>) -> Self {
        Self::new(Outcome::Error, detail.into())
    }

    fn new(outcome: Outcome, detail: String) -> Self {
        Self { outcome, detail: cut(detail), warning: false }
    }
}

/// Cuts a text to at most [`MAX_OUTPUT`] bytes, between characters.
fn cut(mut text: String) -> String {
    if text.len() > MAX_OUTPUT {
        text.truncate(text.floor_char_boundary(MAX_OUTPUT));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_output_is_cut_between_characters() {
        assert_eq!(Answer::failure("é".repeat(8000)).detail, "é".repeat(MAX_OUTPUT / 2));
        assert_eq!(Answer::success("x".repeat(MAX_OUTPUT + 1)).detail.len(), MAX_OUTPUT);
        assert_eq!(Answer::success("short").detail, "short");
    }
}
