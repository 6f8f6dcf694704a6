//! How full a file system is.

use serde::Deserialize;

/// Bytes of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FsUsage {
    /// Its size in bytes.
    pub capacity_bytes: u64,
    /// What is free for us, in bytes.
    pub available_bytes: u64,
}
