//! Why a log could not be made room for, or rotated.

use std::io;
use std::path::PathBuf;

/// A failure of one container's log. Displayed, it is a whole sentence.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Something stands in the place of a log that is to be made.
    #[error("cannot make room for the log {}: {cause}", .log.display())]
    Clear {
        /// The log.
        log: PathBuf,
        /// Why it can't be removed.
        cause: io::Error,
    },
    /// A log could not be renamed, or older ones not be compressed.
    #[error("cannot rotate {}: {cause}", .log.display())]
    Rotate {
        /// The log.
        log: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// The runtime did not open the log anew, so it was to get its name back.
    #[error("{error}{}", also(.back.as_ref()))]
    Reopen {
        /// The runtime's answer.
        error: beelet_cri::Error,
        /// Why the log did not get its name back, if it did not.
        back: Option<io::Error>,
    },
    /// Nobody listens any more to what is read.
    #[error("nobody listens any more")]
    Closed,
    /// A log can't be read.
    #[error(transparent)]
    Read(#[from] io::Error),
}

fn also(back: Option<&io::Error>) -> String {
    back.map(|cause| format!("; nor can it get its name back: {cause}")).unwrap_or_default()
}
