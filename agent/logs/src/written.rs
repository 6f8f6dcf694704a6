//! A file of a log that may still be written, and the sign that its last line is there.
//!
//! A runtime that rotates a log opens the next file first, and writes what it has buffered to the old one
//! until it closes that (containerd: `ReopenContainerLog` swaps the loggers, and the old ones drain on their
//! own). So a file is complete once another one follows it *and* its writer has closed it.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use beelet_base::clock::After as _;
use beelet_base::own_file;

/// How long a file must stand still to be taken for complete, where no notice of its end can come: the kernel
/// sends none, or the file was closed before anybody looked.
pub(crate) const STILL: Duration = Duration::from_secs(1);
/// The same, where a notice is expected. A runtime that never closes its files would hold up readers for
/// good.
const NEVER_CLOSED: Duration = Duration::from_secs(10);

/// What is known of those who write to the logs of a folder.
#[derive(Clone, Debug)]
pub(crate) enum Writer {
    /// The kernel sends a notice when a file is closed; the names of the files that were closed last.
    Watched(Arc<VecDeque<OsString>>),
    /// The kernel sends no notices.
    Unwatched,
    /// The writer has ended, or the reader waits for nothing.
    Ended,
}

/// Whether a file is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Completion {
    /// The file is the newest one: it has the log's name.
    Newest,
    /// No file has the log's name. This one was renamed, and the next one is not made yet: lines still come.
    Unnamed,
    /// Another one follows, and the writer may have lines left for this one: until then, if it stands still.
    Until(Instant),
    /// No more lines come.
    Complete,
}

/// An open file, as far as it has been read.
pub(crate) struct Written {
    pub(crate) file: BufReader<File>,
    length: u64,
    still_since: Instant,
    was_newest: bool,
}

impl Written {
    pub(crate) fn new(file: File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        let age = SystemTime::now().duration_since(metadata.modified()?).unwrap_or_default();
        let now = Instant::now();
        let still_since = now.checked_sub(age.min(NEVER_CLOSED)).unwrap_or(now);
        Ok(Self { file: BufReader::new(file), length: metadata.len(), still_since, was_newest: false })
    }

    /// The file's name in its folder by now.
    pub(crate) fn name(&self) -> io::Result<OsString> {
        own_file::name(self.file.get_ref())
    }

    /// Judges the file of the log at `log`. To be asked before the file is read to its end.
    pub(crate) fn completion(&mut self, log: &Path, writer: &Writer) -> io::Result<Completion> {
        let ours = self.file.get_ref().metadata()?;
        if ours.len() != self.length {
            (self.length, self.still_since) = (ours.len(), Instant::now());
        }
        match fs::metadata(log) {
            Ok(there) if (ours.dev(), ours.ino()) == (there.dev(), there.ino()) => {
                self.was_newest = true;
                return Ok(Completion::Newest);
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Completion::Unnamed),
            Err(e) => return Err(e),
            Ok(_) if std::mem::take(&mut self.was_newest) => self.still_since = Instant::now(),
            Ok(_) => {}
        }
        let still = match writer {
            Writer::Ended => return Ok(Completion::Complete),
            Writer::Watched(closed) if closed.contains(&self.name()?) => return Ok(Completion::Complete),
            // The kernel sends no notice of a file that has no name any more.
            Writer::Watched(_) if ours.nlink() > 0 => NEVER_CLOSED,
            Writer::Watched(_) | Writer::Unwatched => STILL,
        };
        let until = self.still_since.after(still);
        Ok(if until <= Instant::now() { Completion::Complete } else { Completion::Until(until) })
    }
}
