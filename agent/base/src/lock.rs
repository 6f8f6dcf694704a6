//! Lock files that name their holder, and that the kernel releases when the holder ends for any reason.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// An exclusive lock on a file (flock), held until the value is dropped, which removes the file, or the
/// process ends.
#[derive(Debug)]
pub struct Lock {
    path: PathBuf,
    /// The locked file; replaced by [`Lock::renew`] if another process removed it.
    file: Mutex<File>,
}

/// Maximum number of lost races against holders that remove their files.
const MAX_TRIES: usize = 100;
/// Maximum wait for a holder that may be ending.
const DYING: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };

/// Reason for failing to acquire a lock.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process holds the lock.
    #[error(
        "{what} is in use by another beelet{} (lock {}): stop that one first, or configure another folder for this one",
        holder(.pid), .path.display()
    )]
    Held {
        /// The locked resource.
        what: String,
        /// The lock file.
        path: PathBuf,
        /// Pid of the holder, if known.
        pid: Option<u32>,
    },
    /// The lock file cannot be used.
    #[error("{what} cannot be locked: {}: {source}", .path.display())]
    Io {
        /// The locked resource.
        what: String,
        /// The lock file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

fn holder(pid: &Option<u32>) -> String {
    pid.map(|pid| format!(", process {pid}")).unwrap_or_default()
}

impl Lock {
    /// Acquires the lock on `path` for `what` (the subject of the error's sentence). Waits up to two seconds
    /// for a holder that is ending: a killed process keeps its locks until the kernel has freed all its
    /// resources.
    ///
    /// # Errors
    /// Another process holds the lock, or the file cannot be opened.
    pub fn acquire(path: &Path, what: &str) -> Result<Self, LockError> {
        let file = match Self::lock(path, what) {
            Err(LockError::Held { pid, .. }) if pid.is_none_or(ends_soon) => Self::lock(path, what),
            taken => taken,
        };
        Ok(Self { path: path.to_owned(), file: Mutex::new(file?) })
    }

    fn lock(path: &Path, what: &str) -> Result<File, LockError> {
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
            // A lock on a file that its former holder has removed protects nothing: the next process makes a
            // new file.
            if is_at(&file, path) {
                // The process id only serves the message above, so a full disk must not prevent the start.
                let _ = write_pid(&mut file);
                return Ok(file);
            }
        }
        Err(fail(io::Error::other("other processes keep replacing the file")))
    }

    /// Makes and locks the file again if another process has removed it: a lock on a removed file protects
    /// nothing. Returns true if the file was missing.
    ///
    /// # Errors
    /// The file can't be made, or another process has acquired the lock.
    pub fn renew(&self, what: &str) -> Result<bool, LockError> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        if is_at(&file, &self.path) {
            return Ok(false);
        }
        if let Some(folder) = self.path.parent() {
            let failed = |source| LockError::Io { what: what.to_owned(), path: self.path.clone(), source };
            DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)?;
        }
        *file = Self::lock(&self.path, what)?;
        Ok(true)
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Removed while still locked, so that a waiting process opens the file again. Another process's file
        // stays.
        let file = self.file.get_mut().unwrap_or_else(PoisonError::into_inner);
        if is_at(file, &self.path) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false) // the file has the holder's process id
        .mode(0o600)
        .open(path)
}

/// Returns true if `path` still leads to `file`.
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

/// Returns the holder of the lock: from the kernel's list, or, if that hides it (a process outside our PID
/// namespace), from the file, which may name a former holder until the current one has written to it.
fn holder_of(file: &mut File) -> Option<u32> {
    let inode = file.metadata().ok()?.ino();
    let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
    let alive = |pid: &u32| Path::new("/proc").join(pid.to_string()).exists();
    locks.lines().find_map(|line| flock_on(line, inode)).or_else(|| read_pid(file)).filter(alive)
}

/// Returns the holder if a line of `/proc/locks` (proc_locks(5)) is about a flock on the file of this inode.
/// Ignores the device: some file systems show another one there than in stat(2).
///
/// `1: FLOCK  ADVISORY  WRITE 4711 fe:01:262146 0 EOF`, and `1: -> FLOCK …` for a waiting process.
fn flock_on(line: &str, inode: u64) -> Option<u32> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let [_, "FLOCK", _, _, pid, file, ..] = fields.as_slice() else { return None };
    let (_, number) = file.rsplit_once(':')?;
    (number.parse() == Ok(inode)).then(|| pid.parse().ok()).flatten()
}

/// Waits up to [`DYING`] for the end of another process. Returns true if it has ended.
fn ends_soon(pid: u32) -> bool {
    let other = Some(pid).filter(|pid| *pid != std::process::id());
    let other = other.and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
    match other.map(|pid| pidfd_open(pid, PidfdFlags::empty())) {
        Some(Ok(process)) => {
            // A process's descriptor is readable once all of its threads have ended.
            poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&DYING)).is_ok_and(|ended| ended > 0)
        }
        Some(Err(error)) => error == Errno::SRCH,
        None => false,
    }
}

fn read_pid(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.rewind().ok()?;
    file.take(32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_holder_is_found_in_the_kernels_list_of_locks() {
        let check =
            |line: &str, expected: Option<u32>| assert_eq!(flock_on(line, 262_146), expected, "{line}");
        check("1: FLOCK  ADVISORY  WRITE 4711 fe:01:262146 0 EOF", Some(4711));
        check("12: FLOCK  ADVISORY  READ  4712 00:2f:262146 0 EOF", Some(4712));
        check("1: -> FLOCK  ADVISORY  WRITE 4713 fe:01:262146 0 EOF", None);
        check("1: FLOCK  ADVISORY  WRITE 4714 fe:01:26214 0 EOF", None);
        check("1: POSIX  ADVISORY  WRITE 4715 fe:01:262146 0 EOF", None);
        check("1: FLOCK  ADVISORY  WRITE -1 fe:01:262146 0 EOF", None);
        check("1: FLOCK", None);
        check("", None);
    }

    #[test]
    fn a_holder_that_ends_is_waited_for_and_one_that_lives_is_named() {
        use std::process::{Command, Stdio};
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        // The holder prints a line when it has the lock, and ends soon after its input.
        let mut holder = Command::new("flock");
        let holder = holder.arg("-o").arg(&path).args(["sh", "-c", "echo locked; read line; sleep 0.5"]);
        let mut holder = holder.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut said = [0; 7];
        holder.stdout.take().unwrap().read_exact(&mut said).unwrap();
        assert!(matches!(Lock::acquire(&path, "the state"), Err(LockError::Held { .. })));
        drop(holder.stdin.take());
        let taken = Lock::acquire(&path, "the state");
        holder.wait().unwrap();
        taken.unwrap();
    }

    #[test]
    fn a_lock_whose_file_was_removed_is_taken_again_and_never_another_ones() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state/lock");
        fs::create_dir(dir.path().join("state")).unwrap();
        let lock = Lock::acquire(&path, "the state").unwrap();
        assert!(!lock.renew("the state").unwrap());
        fs::remove_dir_all(dir.path().join("state")).unwrap();
        assert!(lock.renew("the state").unwrap());
        assert!(matches!(Lock::acquire(&path, "the state"), Err(LockError::Held { .. })));
        // Another process was faster.
        fs::remove_file(&path).unwrap();
        let other = Lock::acquire(&path, "the state").unwrap();
        assert!(matches!(lock.renew("the state"), Err(LockError::Held { .. })));
        drop(lock);
        assert!(path.exists());
        drop(other);
        assert!(!path.exists());
    }

    #[test]
    fn a_holder_that_has_not_written_itself_down_yet_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let file = open(&path).unwrap();
        flock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
        let Err(LockError::Held { pid, .. }) = Lock::acquire(&path, "the state") else { panic!() };
        assert_eq!(pid, Some(std::process::id()));
        drop(file);
        drop(Lock::acquire(&path, "the state").unwrap());
        assert!(!path.exists());
    }
}
