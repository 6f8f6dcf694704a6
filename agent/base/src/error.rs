//! Errors of folders and file systems.

use std::path::PathBuf;
use std::time::Duration;

use rustix::io::Errno;

/// A failure on the node's disk. Its text is a whole sentence with the path.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A folder could not be made.
    #[error("cannot create the folder {}: {cause}", .path.display())]
    MakeFolder {
        /// The folder, or one of its parents.
        path: PathBuf,
        /// The cause.
        cause: Errno,
    },
    /// A folder, or an entry in it, could not be removed.
    #[error("cannot remove the folder {}: {}", .path.display(), removal(*.cause))]
    RemoveFolder {
        /// The folder.
        path: PathBuf,
        /// The cause.
        cause: Errno,
    },
    /// A path without a name at its end: the root, or a path that ends in `..`.
    #[error("{} is not a folder that can be removed", .0.display())]
    NotRemovable(PathBuf),
    /// A file system's size could not be read.
    #[error("cannot read the size of the file system of {}: {cause}", .path.display())]
    Measure {
        /// A path in the file system.
        path: PathBuf,
        /// The cause.
        cause: Errno,
    },
    /// A file system took too long to report its size.
    #[error(
        "the file system of {} did not report its size within {} s; is it a hanging network mount?",
        .path.display(), .after.as_secs()
    )]
    Hangs {
        /// A path in the file system.
        path: PathBuf,
        /// The timeout.
        after: Duration,
    },
}

fn removal(cause: Errno) -> String {
    match cause {
        Errno::XDEV | Errno::BUSY => "a file system is still mounted in it; unmount it".to_owned(),
        Errno::NOTEMPTY | Errno::STALE => {
            "another process keeps changing its content; find and stop that process".to_owned()
        }
        cause => cause.to_string(),
    }
}
