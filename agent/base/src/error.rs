//! Why a folder or a file system could not be used as asked.

use std::path::PathBuf;
use std::time::Duration;

use rustix::io::Errno;

/// A failure on the node's disk. Displayed, it is a whole sentence with the path.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A folder could not be made.
    #[error("cannot create the folder {}: {cause}", .path.display())]
    MakeFolder {
        /// The folder, or one on the way to it.
        path: PathBuf,
        /// Why.
        cause: Errno,
    },
    /// A folder, or something in it, could not be removed.
    #[error("cannot remove the folder {}: {}", .path.display(), removal(*.cause))]
    RemoveFolder {
        /// The folder.
        path: PathBuf,
        /// Why.
        cause: Errno,
    },
    /// A path without a name at its end: the root, or one that ends in `..`.
    #[error("{} is not a folder that can be removed", .0.display())]
    NotRemovable(PathBuf),
    /// A file system did not tell its size.
    #[error("the size of the file system of {} cannot be read: {cause}", .path.display())]
    Measure {
        /// Something in the file system.
        path: PathBuf,
        /// Why.
        cause: Errno,
    },
    /// A file system took too long to tell its size.
    #[error(
        "the file system of {} has not said its size for {} s; is it a network mount that hangs?",
        .path.display(), .after.as_secs()
    )]
    Hangs {
        /// Something in the file system.
        path: PathBuf,
        /// How long it was waited for.
        after: Duration,
    },
}

fn removal(cause: Errno) -> String {
    match cause {
        Errno::XDEV | Errno::BUSY => "something is still mounted in it; unmount it".to_owned(),
        Errno::NOTEMPTY | Errno::STALE => {
            "somebody changes what is in it meanwhile; find out which process does".to_owned()
        }
        cause => cause.to_string(),
    }
}
