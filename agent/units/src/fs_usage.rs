//! Usage of a file system.

use serde::Deserialize;

/// Bytes of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FsUsage {
    /// Size of the file system, in bytes.
    pub capacity_bytes: u64,
    /// Bytes available to the agent's user.
    pub available_bytes: u64,
}
