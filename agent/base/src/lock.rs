//! Locks that say who holds them, and that the kernel gives back whatever happens to the holder.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// An exclusive lock on a file (flock), held until the value is dropped, which removes the file, or the process ends.
#[derive(Debug)]
pub struct Lock {
    path: PathBuf,
    _file: File,
}

/// How often, and how long apart, a holder is looked for that does not name itself yet.
const LOOKS: u32 = 20;
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Losing the race against a holder that removes its file, time after time, is no race any more.
const MAX_TRIES: usize = 100;

/// Why a lock could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process has it.
    #[error(
        "{what} is in use by another beelet{} (lock {}): stop that one first, or give this one another folder",
        holder(.pid), .path.display()
    )]
    Held {
        /// What the lock stands for.
        what: String,
        /// The lock file.
        path: PathBuf,
        /// The process that has it, if it could be told.
        pid: Option<u32>,
    },
    /// The lock file cannot be used.
    #[error("{what} cannot be locked: {}: {source}", .path.display())]
    Io {
        /// What the lock stands for.
        what: String,
        /// The lock file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

fn holder(pid: &Option<u32>) -> String {
    pid.map(|pid| format!(", process {pid}")).unwrap_or_default()
}

impl Lock {
    /// Takes the lock on `path` for `what` (the subject of an error's sentence), or says who has it. Does not wait for it.
    ///
    /// # Errors
    /// Another process holds it, or the file cannot be opened.
    pub fn take(path: &Path, what: &str) -> Result<Self, LockError> {
        let fail = |source| LockError::Io { what: what.to_owned(), path: path.to_owned(), source };
        for _ in 0..MAX_TRIES {
            let mut file = open(path).map_err(fail)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => {
                    let pid = holder_of(&mut file);
                    return Err(LockError::Held { what: what.to_owned(), path: path.to_owned(), pid });
                }
                Err(error) => return Err(fail(error.into())),
            }
            // A lock on a file that its former holder has removed keeps nobody out: the next one makes a new file.
            if is_at(&file, path) {
                // The process id only serves the message above: a full disk is no reason not to start.
                let _ = write_pid(&mut file);
                return Ok(Self { path: path.to_owned(), _file: file });
            }
        }
        Err(fail(io::Error::other("it keeps being replaced by others")))
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Removed while still locked; whoever waits for it looks again.
        let _ = fs::remove_file(&self.path);
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false) // whoever holds it has its process id in it
        .mode(0o600)
        .open(path)
}

/// Whether `file` is the one that `path` leads to now.
fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(open), Ok(there)) => (open.dev(), open.ino()) == (there.dev(), there.ino()),
        _ => false,
    }
}

fn write_pid(file: &mut File) -> io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "{}", std::process::id())
}

/// The process that has the lock. One that has just taken it needs a moment to write itself down: until then the file
/// names nobody, or one that is dead.
fn holder_of(file: &mut File) -> Option<u32> {
    for _ in 0..LOOKS {
        let pid = read_pid(file);
        if pid.is_some_and(|pid| Path::new("/proc").join(pid.to_string()).exists()) {
            return pid;
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    None
}

fn read_pid(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.rewind().ok()?;
    file.take(32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}
