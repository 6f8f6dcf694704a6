//! What one look at a container gave.

use beelet_policy::probe::Outcome;

/// The most of an application's answer that is read or reported (`maxRespBodyLength` in pkg/probe).
pub(super) const MAX_OUTPUT: usize = 10 << 10;

/// What a probe found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    /// What it counts as.
    pub outcome: Outcome,
    /// A sentence, or what the application said, for the person who asks why.
    pub detail: String,
    /// It counts as a success, and is still worth an event.
    pub warning: bool,
}

impl Answer {
    /// The container answered as it should.
    pub(super) fn success(detail: impl Into<String>) -> Self {
        Self::new(Outcome::Success, detail.into())
    }

    /// It answered, with something that is worth an event.
    pub(super) fn warning(detail: impl Into<String>) -> Self {
        Self { warning: true, ..Self::success(detail) }
    }

    /// It did not.
    pub(super) fn failure(detail: impl Into<String>) -> Self {
        Self::new(Outcome::Failure, detail.into())
    }

    /// The probe could not be run.
    pub(super) fn error(detail: impl Into<String>) -> Self {
        Self::new(Outcome::Error, detail.into())
    }

    fn new(outcome: Outcome, detail: String) -> Self {
        Self { outcome, detail: cut(detail), warning: false }
    }
}

/// Not more than [`MAX_OUTPUT`] bytes, and no half characters.
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
