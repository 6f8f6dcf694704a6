//! Locks that say who holds them, and that the kernel gives back whatever happens to the holder.

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
    /// The file that is locked: another one once somebody has removed the first.
    file: Mutex<File>,
}

/// Losing the race against a holder that removes its file, time after time, is no race any more.
const MAX_TRIES: usize = 100;
/// How long a holder that may be ending is waited for.
const DYING: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };

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
    /// Takes the lock on `path` for `what` (the subject of an error's sentence), or says who has it. Blocks,
    /// for two seconds at most, while the holder ends: a process that was killed has its locks until the
    /// kernel has taken all of it away.
    ///
    /// # Errors
    /// Another process holds it, or the file cannot be opened.
    pub fn take(path: &Path, what: &str) -> Result<Self, LockError> {
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
            // A lock on a file that its former holder has removed keeps nobody out: the next one makes a new
            // file.
            if is_at(&file, path) {
                // The process id only serves the message above: a full disk is no reason not to start.
                let _ = write_pid(&mut file);
                return Ok(file);
            }
        }
        Err(fail(io::Error::other("it keeps being replaced by others")))
    }

    /// Makes the file again, and locks it, if somebody has removed it: a lock on a file that is not there
    /// keeps nobody out. Returns true if it was gone.
    ///
    /// # Errors
    /// It can't be made, or another process has taken the lock meanwhile.
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
        // Removed while still locked; whoever waits for it looks again. Another's stays.
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
        .truncate(false) // whoever holds it has its process id in it
        .mode(0o600)
        .open(path)
}

/// Returns true if `file` is the one that `path` leads to now.
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

/// The process that has the lock: by the kernel's list, or, where that hides it (a process outside our PID
/// namespace), by its own word in the file, which may be a dead one's until the holder has written.
fn holder_of(file: &mut File) -> Option<u32> {
    let inode = file.metadata().ok()?.ino();
    let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
    let alive = |pid: &u32| Path::new("/proc").join(pid.to_string()).exists();
    locks.lines().find_map(|line| flock_on(line, inode)).or_else(|| read_pid(file)).filter(alive)
}

/// The holder, if a line of `/proc/locks` (proc_locks(5)) is of a flock on the file of this inode. The device
/// is not compared: some file systems show another one there than in stat(2).
///
/// `1: FLOCK  ADVISORY  WRITE 4711 fe:01:262146 0 EOF`, and `1: -> FLOCK …` of one that waits.
fn flock_on(line: &str, inode: u64) -> Option<u32> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let [_, "FLOCK", _, _, pid, file, ..] = fields.as_slice() else { return None };
    let (_, number) = file.rsplit_once(':')?;
    (number.parse() == Ok(inode)).then(|| pid.parse().ok()).flatten()
}

/// Waits until another process has ended, for [`DYING`] at most. Returns true if it has.
fn ends_soon(pid: u32) -> bool {
    let other = Some(pid).filter(|pid| *pid != std::process::id());
    let other = other.and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
    match other.map(|pid| pidfd_open(pid, PidfdFlags::empty())) {
        Some(Ok(process)) => {
            // A process's descriptor can be read once all of its threads have ended.
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
        // The holder says when it has the lock, and ends soon after its input.
        let mut holder = Command::new("flock");
        let holder = holder.arg("-o").arg(&path).args(["sh", "-c", "echo locked; read line; sleep 0.5"]);
        let mut holder = holder.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut said = [0; 7];
        holder.stdout.take().unwrap().read_exact(&mut said).unwrap();
        assert!(matches!(Lock::take(&path, "the state"), Err(LockError::Held { .. })));
        drop(holder.stdin.take());
        let taken = Lock::take(&path, "the state");
        holder.wait().unwrap();
        taken.unwrap();
    }

    #[test]
    fn a_lock_whose_file_was_removed_is_taken_again_and_never_another_ones() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state/lock");
        fs::create_dir(dir.path().join("state")).unwrap();
        let lock = Lock::take(&path, "the state").unwrap();
        assert!(!lock.renew("the state").unwrap());
        fs::remove_dir_all(dir.path().join("state")).unwrap();
        assert!(lock.renew("the state").unwrap());
        assert!(matches!(Lock::take(&path, "the state"), Err(LockError::Held { .. })));
        // Another one was faster.
        fs::remove_file(&path).unwrap();
        let other = Lock::take(&path, "the state").unwrap();
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
        let Err(LockError::Held { pid, .. }) = Lock::take(&path, "the state") else { panic!() };
        assert_eq!(pid, Some(std::process::id()));
        drop(file);
        drop(Lock::take(&path, "the state").unwrap());
        assert!(!path.exists());
    }
}
