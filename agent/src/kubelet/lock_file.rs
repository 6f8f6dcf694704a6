//! `--lock-file` and `--exit-on-lock-contention`: agents that take turns on a node. An agent waits for the
//! lock before it starts; with the second flag it ends as soon as another process opens or removes the file,
//! as a kubelet does (cmd/kubelet/app/server.go and server_linux.go).

use std::{
    fs::{File, OpenOptions},
    io,
    mem::MaybeUninit,
    os::{fd::OwnedFd, unix::fs::OpenOptionsExt as _},
    path::{Path, PathBuf},
    thread,
};

use rustix::{
    fs::{FlockOperation, flock, inotify},
    process::{Signal, getpid, kill_process},
};
use tracing::{info, warn};

/// Values of both flags.
#[derive(Debug)]
pub(super) struct LockFile {
    /// Path of the file.
    pub(super) path: PathBuf,
    /// True to end the agent when another process wants the lock.
    pub(super) exit_on_contention: bool,
}

impl LockFile {
    /// Waits for the lock, which the agent holds until the returned file is closed. Blocks.
    ///
    /// # Errors
    /// The file cannot be opened, locked or watched.
    pub(super) fn acquire(&self) -> Result<File, String> {
        let path = self.path.display();
        info!("acquiring the file lock {path}");
        let file =
            lock(&self.path).map_err(|error| format!("unable to acquire file lock on {path}: {error}"))?;
        if self.exit_on_contention {
            let events =
                watch(&self.path).map_err(|error| format!("unable to watch lockfile {path}: {error}"))?;
            let path = self.path.clone();
            // The thread ends with the process.
            thread::spawn(move || end_at_event(&events, &path));
        }
        Ok(file)
    }
}

fn lock(path: &Path) -> io::Result<File> {
    let file =
        OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
    flock(&file, FlockOperation::LockExclusive)?;
    Ok(file)
}

fn watch(path: &Path) -> io::Result<OwnedFd> {
    let events = inotify::init(inotify::CreateFlags::CLOEXEC)?;
    inotify::add_watch(&events, path, inotify::WatchFlags::OPEN | inotify::WatchFlags::DELETE_SELF)?;
    Ok(events)
}

/// Waits for an event of the file, and then ends the agent as SIGTERM does.
fn end_at_event(events: &OwnedFd, path: &Path) {
    let path = path.display();
    let mut buffer = [MaybeUninit::uninit(); 512];
    match inotify::Reader::new(events, &mut buffer).next() {
        Ok(_) => info!("another process wants the file lock {path}: ending"),
        Err(error) => warn!("cannot watch the file lock {path}: {error}; ending"),
    }
    if let Err(error) = kill_process(getpid(), Signal::TERM) {
        warn!("cannot end the agent: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_agent_waits_for_the_lock_and_the_first_sees_that() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let first = lock(&path).unwrap();
        let events = watch(&path).unwrap();
        let second = thread::spawn({
            let path = path.clone();
            move || lock(&path).map(drop)
        });
        let mut buffer = [MaybeUninit::uninit(); 512];
        let event = inotify::Reader::new(&events, &mut buffer).next().unwrap().events();
        assert!(event.contains(inotify::ReadFlags::OPEN));
        let other = File::open(&path).unwrap();
        assert!(flock(&other, FlockOperation::NonBlockingLockExclusive).is_err());
        drop(first);
        second.join().unwrap().unwrap();
    }
}
