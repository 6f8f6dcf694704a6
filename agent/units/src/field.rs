//! Where in the input a value is wrong: the one error type of this crate.
//!
//! Every function that reads text out of a Kubernetes object (quantities above all) reports the field's path
//! relative to what it was given; each caller that holds a larger object puts its own part in front with
//! [`FieldError::under`]. Must never carry anything that isn't a property of the input (no I/O errors, no
//! time).

use std::fmt;

/// A value that could not be understood: the field's path, and a sentence that says why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldError {
    path: String,
    message: String,
}

impl FieldError {
    /// An error at `path` (`spec.containers[0].resources.requests.cpu`; empty: the object as a whole).
    pub fn new(path: impl Into<String>, message: impl Into<String>) -> Self {
        Self { path: path.into(), message: message.into() }
    }

    /// The same error seen from the object that holds this one: `under("pods[3]")` of `spec.x` is
    /// `pods[3].spec.x`.
    #[must_use]
    pub fn under(mut self, parent: &str) -> Self {
        self.path = match self.path.as_str() {
            "" => parent.to_owned(),
            _ if parent.is_empty() => self.path,
            path if path.starts_with('[') => format!("{parent}{path}"),
            path => format!("{parent}.{path}"),
        };
        self
    }

    /// The field's path from the object that the failing function was given.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The reason why the value is wrong, without the path.
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.path.is_empty() {
            f.write_str(&self.message)
        } else {
            write!(f, "{}: {}", self.path, self.message)
        }
    }
}

impl std::error::Error for FieldError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_grow_from_the_inside_out() {
        let error = FieldError::new("requests", "no").under("spec").under("pods[3]");
        assert_eq!(error.to_string(), "pods[3].spec.requests: no");
        assert_eq!(FieldError::new("[2].spec", "no").under("pods").path(), "pods[2].spec");
        assert_eq!(FieldError::new("", "no").under("pods[0]").path(), "pods[0]");
        assert_eq!(FieldError::new("a", "no").under("").to_string(), "a: no");
        assert_eq!(FieldError::new("", "no").to_string(), "no");
    }
}
