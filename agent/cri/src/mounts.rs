//! A check that the current runtime sees the agent's mounts for pods.
//!
//! A restarted runtime may have another mount namespace than its predecessor. This module must never judge
//! while no runtime answers: the agent can start no pods then, and the next runtime is unknown.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use beelet_base::blocking::blocking;
use beelet_base::propagation::{self, CONSEQUENCE, Finding, Reach};
use tokio::sync::{Mutex, watch};
use tokio::time::{Instant, timeout};

use crate::ownership;

/// The longest that a connection to the runtime's socket may take.
const CONNECT: Duration = Duration::from_secs(2);

/// The trouble with the mounts, and the time of its last change.
#[derive(Clone, Debug)]
pub struct MountState {
    /// The reason why mounts do not reach the runtime, and the remedy, as a sentence. None: the mounts reach
    /// the runtime, or that is unknown.
    pub trouble: Option<Arc<str>>,
    /// The time when `trouble` last changed.
    pub since: Instant,
}

/// The runtime's process with its mount namespace. Another identity means that the runtime was restarted.
type Identity = (u32, Option<(u64, u64)>);

/// The access to the machine: inspects the mounts of the process that listens.
type Looking = Arc<dyn Fn(&Path, u32) -> Finding + Send + Sync>;

/// The check of the runtime at a socket, repeated when the runtime may have been restarted.
pub struct Mounts {
    folder: PathBuf,
    socket: PathBuf,
    look: Looking,
    /// The lock that makes inspections exclusive, because each may mount something.
    seen: Mutex<Option<(Identity, Reach)>>,
    state: watch::Sender<MountState>,
}

impl fmt::Debug for Mounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mounts")
            .field("folder", &self.folder)
            .field("socket", &self.socket)
            .finish_non_exhaustive()
    }
}

impl Mounts {
    /// Returns the check of the mounts below `folder`, for the runtime at `socket`.
    #[must_use]
    pub fn new(folder: &Path, socket: &Path) -> Self {
        Self::with(
            folder,
            socket,
            Arc::new(|folder, pid| propagation::inspect(folder, std::process::id(), Some(pid))),
        )
    }

    fn with(folder: &Path, socket: &Path, look: Looking) -> Self {
        let state = watch::Sender::new(MountState { trouble: None, since: Instant::now() });
        Self { folder: folder.to_owned(), socket: socket.to_owned(), look, seen: Mutex::default(), state }
    }

    /// Returns the state as of the last check.
    #[must_use]
    pub fn state(&self) -> MountState {
        self.state.borrow().clone()
    }

    /// Inspects the mounts if another runtime answers, or if mounts did not reach the runtime before. Returns
    /// the sentence of [`MountState::trouble`] if they do not reach it.
    pub async fn check(&self) -> Option<Arc<str>> {
        let mut seen = self.seen.lock().await;
        let listener = timeout(CONNECT, ownership::listener(&self.socket)).await.ok().flatten();
        let Some(pid) = listener else { return self.state().trouble };
        let identity = (pid, propagation::namespace(pid).ok());
        if seen.is_some_and(|(known, reach)| known == identity && reach != Reach::No) {
            return None;
        }
        let (folder, look) = (self.folder.clone(), Arc::clone(&self.look));
        let found = blocking("looking for the mounts of pods", move || look(&folder, pid)).await;
        *seen = Some((identity, found.reach));
        let trouble = (found.reach == Reach::No).then(|| self.sentence(found, pid));
        self.state.send_if_modified(|state| {
            let is_new = state.trouble != trouble;
            if is_new {
                *state = MountState { trouble: trouble.clone(), since: Instant::now() };
            }
            is_new
        });
        trouble
    }

    fn sentence(&self, found: Finding, pid: u32) -> Arc<str> {
        let said = propagation::sentence(found, &self.folder.display().to_string(), Some(pid));
        let remedy = propagation::remedy(found.stranger);
        format!("{said}, and {CONSEQUENCE}; {remedy}").into()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use beelet_base::propagation::Stranger;

    use super::*;

    #[tokio::test]
    async fn a_runtime_that_stopped_seeing_mounts_is_checked_until_it_sees_them_again() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("runtime.sock");
        let (apart, looks) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicUsize::new(0)));
        let (of_runtime, counted) = (Arc::clone(&apart), Arc::clone(&looks));
        let look = move |_: &Path, _| {
            counted.fetch_add(1, Ordering::Relaxed);
            let reach = if of_runtime.load(Ordering::Relaxed) { Reach::No } else { Reach::Yes };
            Finding { reach, stranger: Stranger::Runtime }
        };
        let mounts = Mounts::with(dir.path(), &socket, Arc::new(look));
        // No process listens, so the check does not judge.
        assert_eq!((mounts.check().await, looks.load(Ordering::Relaxed)), (None, 0));
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        let trouble = mounts.check().await.unwrap();
        assert!(trouble.contains("the container runtime has a mount namespace of its own"), "{trouble}");
        assert!(trouble.contains("systemctl cat containerd"), "{trouble}");
        // The trouble stays while no runtime answers.
        drop(listener);
        std::fs::remove_file(&socket).unwrap();
        assert_eq!(mounts.check().await.as_ref(), Some(&trouble));
        let _listener = tokio::net::UnixListener::bind(&socket).unwrap();
        apart.store(false, Ordering::Relaxed);
        assert_eq!(mounts.check().await, None);
        assert!(mounts.state().trouble.is_none());
        // The check does not inspect the same process again after a good result.
        let before = looks.load(Ordering::Relaxed);
        assert_eq!((mounts.check().await, looks.load(Ordering::Relaxed)), (None, before));
    }
}
