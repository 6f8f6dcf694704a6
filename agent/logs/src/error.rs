//! Errors of preparing and rotating logs.

use std::io;
use std::path::PathBuf;

/// A failure of one container's log. Its text is a complete sentence.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file that blocks a new log cannot be removed.
    #[error("cannot remove what blocks the log {}: {cause}", .log.display())]
    Clear {
        /// The log.
        log: PathBuf,
        /// Cause of the failed removal.
        cause: io::Error,
    },
    /// A log could not be renamed, or older logs could not be compressed.
    #[error("cannot rotate {}: {cause}", .log.display())]
    Rotate {
        /// The log.
        log: PathBuf,
        /// Cause of the failure.
        cause: io::Error,
    },
    /// The runtime did not reopen the log, whose rename is undone.
    #[error("{error}{}", also(.back.as_ref()))]
    Reopen {
        /// Error of the runtime.
        error: beelet_cri::Error,
        /// Error of undoing the rename, if any.
        back: Option<io::Error>,
    },
    /// The receiver of the log is closed.
    #[error("the reader of the log disconnected")]
    Closed,
    /// A log cannot be read.
    #[error(transparent)]
    Read(#[from] io::Error),
}

fn also(back: Option<&io::Error>) -> String {
    back.map(|cause| format!("; cannot rename the log back: {cause}")).unwrap_or_default()
}
