//! Errors and warnings of a configuration file, with file, line and field.

use std::fmt;
use std::path::{Path, PathBuf};

/// Error of a configuration. Prints as `FILE:LINE:COLUMN: FIELD: MESSAGE`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{}{}", .place, Field(.field), .message)]
pub struct ConfigError {
    /// File and position.
    pub place: FilePlace,
    /// Path of the field from its document's root, e.g. `evictionHard.memory.available`; empty for a fault of
    /// the file.
    pub field: String,
    /// The fault and its remedy.
    pub message: String,
}

/// All faults of a configuration and all settings without an effect, so that users who migrate a kubelet's
/// file see the whole list at once. Prints as one line per fault.
#[derive(Debug, Clone, Default, PartialEq, Eq, thiserror::Error)]
#[error("{}", lines(.errors))]
pub struct ConfigFaults {
    /// At least one fault. A fault may hide others in the same field.
    pub errors: Vec<ConfigError>,
    /// Settings without an effect.
    pub warnings: Vec<Warning>,
}

impl From<ConfigError> for ConfigFaults {
    fn from(error: ConfigError) -> Self {
        Self { errors: vec![error], warnings: Vec::new() }
    }
}

fn lines(errors: &[ConfigError]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

/// A setting without an effect, or with a partial effect. Prints like a [`ConfigError`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// File and position.
    pub place: FilePlace,
    /// Path of the field from its document's root.
    pub field: String,
    /// Reason for the missing effect, or the actual effect.
    pub message: String,
}

impl Warning {
    /// Returns the warning of a command-line flag.
    #[must_use]
    pub fn of_flag(name: &str, message: String) -> Self {
        Self { place: FilePlace::new(Path::new(&format!("--{name}")), None), field: String::new(), message }
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{}", self.place, Field(&self.field), self.message)
    }
}

/// A file and, where known, a line and column (both from 1).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilePlace {
    /// The file, as given by the user.
    pub file: PathBuf,
    /// Line and column.
    pub position: Option<(u64, u64)>,
}

impl FilePlace {
    /// Creates a place in `file`.
    pub(crate) fn new(file: &Path, position: Option<(u64, u64)>) -> Self {
        Self { file: file.to_owned(), position }
    }
}

impl fmt::Display for FilePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.file.display())?;
        if let Some((line, column)) = self.position {
            write!(f, "{line}:{column}:")?;
        }
        f.write_str(" ")
    }
}

struct Field<'a>(&'a str);

impl fmt::Display for Field<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, "{}: ", self.0) }
    }
}

/// A bad value whose file and position are not known yet.
#[derive(Debug)]
pub(super) struct Problem {
    pub(super) field: String,
    pub message: String,
}

impl Problem {
    pub(super) fn new(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { field: field.into(), message: message.into() }
    }
}
