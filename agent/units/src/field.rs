//! Path of a wrong value in the input: the error type for values in objects.
//!
//! Every function that reads text out of a Kubernetes object (quantities above all) reports the field's path
//! relative to its argument; each caller that holds a larger object prepends its own part with
//! [`FieldError::under`]. An error must only describe the input (no I/O errors, no time).

use std::fmt;

/// A wrong value: the field's path, and a sentence with the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldError {
    path: String,
    message: String,
}

impl FieldError {
    /// Creates an error at `path` (`spec.containers[0].resources.requests.cpu`; empty: the object as a whole).
    pub fn new(path: impl Into<String>, message: impl Into<String>) -> Self {
        Self { path: path.into(), message: message.into() }
    }

    /// Prepends the path of the object that holds this one: `under("pods[3]")` of `spec.x` is
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

    /// Returns the field's path, relative to the argument of the failing function.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the reason why the value is wrong, without the path.
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
