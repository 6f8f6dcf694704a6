//! What can be wrong with a configuration file, said with the file, the line and the field.

use std::fmt;
use std::path::{Path, PathBuf};

/// Why a configuration cannot be used. Prints as `FILE:LINE:COLUMN: FIELD: what is wrong`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{}{}", .place, Field(.field), .message)]
pub struct ConfigError {
    /// Where it is.
    pub place: FilePlace,
    /// The field, from its document's root, e.g. `evictionHard.memory.available`; empty where no field is to
    /// blame.
    pub field: String,
    /// What is wrong and what would be right.
    pub message: String,
}

/// Why settings cannot be used: every fault that was found, and everything that has no effect, so that a
/// person who moves a kubelet's file here sees the whole list at once. Prints as one line per fault.
#[derive(Debug, Clone, Default, PartialEq, Eq, thiserror::Error)]
#[error("{}", lines(.errors))]
pub struct ConfigFaults {
    /// The faults; at least one. A fault may hide others in the same field.
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

/// Something in a configuration that has no effect, or not the whole effect. Prints like a [`ConfigError`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// Where it is.
    pub place: FilePlace,
    /// The field, from its document's root.
    pub field: String,
    /// Why it has no effect, or which effect it has instead.
    pub message: String,
}

impl Warning {
    /// Of a flag of the command line.
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
    /// The file, as it was named to us.
    pub file: PathBuf,
    /// Line and column.
    pub position: Option<(u64, u64)>,
}

impl FilePlace {
    /// A place in `file`.
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

/// A bad value, before it is known where in which file its field stands.
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
