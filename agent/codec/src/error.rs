//! Reasons for refusing a manifest, each with its place in the file.

use std::fmt;

use crate::document::{Document, DocumentError};

/// Limit of reasons in one report.
const MAX_REASONS: usize = 10;

/// A problem of a field, before the lookup of its place in the file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Problem {
    /// Path of the field, such as `spec.containers[0].image`; empty for the whole manifest.
    pub path: String,
    /// Problem, and the correct form.
    pub message: String,
}

impl Problem {
    /// Creates a problem of the field at `path`; an empty path means the whole document.
    pub fn new(path: impl Into<String>, message: impl Into<String>) -> Self {
        Problem { path: path.into(), message: message.into() }
    }
}

/// Error of a JSON text. The cause is part of the sentence, so the error has no source.
#[derive(Debug, thiserror::Error)]
pub enum JsonError {
    /// The text is not JSON.
    #[error("is not JSON: {0}")]
    Syntax(serde_json::Error),
    /// A field is wrong.
    #[error("{0}")]
    Field(Problem),
}

/// Returns the path of `key` inside the mapping at `path`: `limits.cpu`, but `limits["nvidia.com/gpu"]`.
#[must_use]
pub fn field(path: &str, key: &str) -> String {
    let plain = !key.is_empty() && key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
    if plain { format!("{path}.{key}") } else { format!("{path}[{key:?}]") }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.path.as_str() {
            "" => f.write_str(&self.message),
            path => write!(f, "{path}: {}", self.message),
        }
    }
}

/// A reason for refusing a manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldError {
    /// Line and column (from 1) of the field, or of its nearest existing parent.
    pub at: Option<(u64, u64)>,
    /// Path of the field; empty for the whole manifest.
    pub field: String,
    /// Problem, and the correct form.
    pub message: String,
}

/// Error of a refused manifest. Its display has one line per reason, each starting with `file:line:column:`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestError {
    file: String,
    reasons: Vec<FieldError>,
    left_out: usize,
}

impl ManifestError {
    /// Creates the error of a manifest refused as a whole.
    pub fn whole(file: &str, message: impl Into<String>) -> Self {
        let reason = FieldError { at: None, field: String::new(), message: message.into() };
        ManifestError { file: file.to_owned(), reasons: vec![reason], left_out: 0 }
    }

    /// Creates the error of a file that is neither YAML nor JSON.
    pub fn syntax(file: &str, error: &DocumentError) -> Self {
        let at = Some((error.line, error.column));
        let reason = FieldError { at, field: String::new(), message: error.message.clone() };
        ManifestError { file: file.to_owned(), reasons: vec![reason], left_out: 0 }
    }

    /// Creates the error of a file without a document, or with several.
    pub fn not_one(file: &str, documents: &[Document]) -> Self {
        let Some(second) = documents.get(1) else {
            return Self::whole(file, "the file has no object; a manifest is a v1 Pod");
        };
        let message = format!("one pod per file: this is the second of {} documents", documents.len());
        let reason = FieldError { at: Some(second.start()), field: String::new(), message };
        ManifestError { file: file.to_owned(), reasons: vec![reason], left_out: 0 }
    }

    /// Creates the error of a document from its problems, each with its place; of many the first.
    pub fn new(file: &str, document: &Document, problems: Vec<Problem>) -> Self {
        let mut reasons: Vec<FieldError> = problems
            .into_iter()
            .map(|problem| FieldError {
                at: document.locate(&problem.path).or_else(|| Some(document.start())),
                field: problem.path,
                message: problem.message,
            })
            .collect();
        reasons.sort_by_key(|reason| reason.at);
        reasons.dedup();
        let left_out = reasons.len().saturating_sub(MAX_REASONS);
        reasons.truncate(MAX_REASONS);
        ManifestError { file: file.to_owned(), reasons, left_out }
    }

    /// Returns the reasons, in the order of the file.
    #[must_use]
    pub fn reasons(&self) -> &[FieldError] {
        &self.reasons
    }
}

impl fmt::Display for ManifestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, reason) in self.reasons.iter().enumerate() {
            let newline = if i > 0 { "\n" } else { "" };
            write!(f, "{newline}{}:", self.file)?;
            if let Some((line, column)) = reason.at {
                write!(f, "{line}:{column}:")?;
            }
            let colon = if reason.field.is_empty() { "" } else { ":" };
            let space = if reason.field.is_empty() { "" } else { " " };
            write!(f, "{space}{}{colon} {}", reason.field, reason.message)?;
        }
        match self.left_out {
            0 => Ok(()),
            more => write!(f, "\n{}: and {more} more", self.file),
        }
    }
}

impl std::error::Error for ManifestError {}
