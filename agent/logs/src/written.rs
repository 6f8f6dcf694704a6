//! A log file that may still be written to, and the detection of its last line.
//!
//! A runtime that rotates a log opens the next file first, and writes buffered lines to the old file until it
//! closes it (containerd: `ReopenContainerLog` swaps the loggers, and the old ones drain on their own).
//! Therefore a file is complete once another one follows it *and* its writer has closed it.

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

/// Time without growth after which a file counts as complete if no close notice can arrive: the kernel sends
/// none, or the file was closed before the watch.
pub(crate) const STILL: Duration = Duration::from_secs(1);
/// Time without growth if a close notice is expected. A runtime that never closes its files would block
/// readers permanently.
const NEVER_CLOSED: Duration = Duration::from_secs(10);

/// Knowledge about the writers of the logs in a directory.
#[derive(Clone, Debug)]
pub(crate) enum Writer {
    /// The kernel sends close notices; these are the names of the last closed files.
    Watched(Arc<VecDeque<OsString>>),
    /// The kernel sends no notices.
    Unwatched,
    /// The writer has ended, or the reader does not wait for more lines.
    Ended,
}

/// Completeness of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Completion {
    /// The file has the log's name and is the newest one.
    Newest,
    /// No file has the log's name: this file was renamed, the next one does not exist yet, and lines may
    /// still arrive.
    Unnamed,
    /// Another file follows, and the writer may still add lines to this one until then, unless the file
    /// grows.
    Until(Instant),
    /// No more lines will arrive.
    Complete,
}

/// An open file and its reading position.
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

    /// Returns the file's current name in its directory.
    pub(crate) fn name(&self) -> io::Result<OsString> {
        own_file::name(self.file.get_ref())
    }

    /// Returns the completeness of this file of the log at `log`. Must be called before reading to the file's
    /// end.
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
            // The kernel sends no notice for a file without a name.
            Writer::Watched(_) if ours.nlink() > 0 => NEVER_CLOSED,
            Writer::Watched(_) | Writer::Unwatched => STILL,
        };
        let until = self.still_since.after(still);
        Ok(if until <= Instant::now() { Completion::Complete } else { Completion::Until(until) })
    }
}
