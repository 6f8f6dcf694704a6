//! Whether the runtime that answers now sees what the agent mounts for pods.
//!
//! A runtime that was started again may have another mount namespace than the one before. Must never judge
//! while no runtime answers: nothing can be made then, and nothing is known of the next one.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use beelet_base::blocking::blocking;
use beelet_base::propagation::{self, CONSEQUENCE, Look, Reach};
use tokio::sync::{Mutex, watch};
use tokio::time::{Instant, timeout};

use crate::ownership;

/// The longest that a connection to the runtime's socket may take.
const CONNECT: Duration = Duration::from_secs(2);

/// What is wrong with the mounts, and since when.
#[derive(Clone, Debug)]
pub struct MountState {
    /// Why mounts do not reach the runtime, and what to do: a sentence. None: they do, or that is not known.
    pub trouble: Option<Arc<str>>,
    /// When that last changed.
    pub since: Instant,
}

/// The runtime's process with its mount namespace: another one was started anew.
type Identity = (u32, Option<(u64, u64)>);

/// The door to the machine: who listens, and what it sees.
type Looking = Arc<dyn Fn(&Path, u32) -> Look + Send + Sync>;

/// Looks at the runtime behind one socket whenever it may be another one.
pub struct Mounts {
    folder: PathBuf,
    socket: PathBuf,
    look: Looking,
    /// One at a time: each look may mount something.
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
    /// The mounts below `folder`, and the runtime at `socket`.
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

    /// The state as of the last look.
    #[must_use]
    pub fn state(&self) -> MountState {
        self.state.borrow().clone()
    }

    /// Looks again if another runtime answers, or mounts did not reach it; the sentence if they do not.
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

    fn sentence(&self, found: Look, pid: u32) -> Arc<str> {
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
    async fn a_runtime_that_stopped_seeing_mounts_is_looked_at_until_it_sees_them_again() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("runtime.sock");
        let (apart, looks) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicUsize::new(0)));
        let (of_runtime, counted) = (Arc::clone(&apart), Arc::clone(&looks));
        let look = move |_: &Path, _| {
            counted.fetch_add(1, Ordering::Relaxed);
            let reach = if of_runtime.load(Ordering::Relaxed) { Reach::No } else { Reach::Yes };
            Look { reach, stranger: Stranger::Runtime }
        };
        let mounts = Mounts::with(dir.path(), &socket, Arc::new(look));
        // Nobody listens: nothing is judged.
        assert_eq!((mounts.check().await, looks.load(Ordering::Relaxed)), (None, 0));
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        let trouble = mounts.check().await.unwrap();
        assert!(trouble.contains("the container runtime has a mount namespace of its own"), "{trouble}");
        assert!(trouble.contains("systemctl cat containerd"), "{trouble}");
        // It stays while no runtime answers.
        drop(listener);
        std::fs::remove_file(&socket).unwrap();
        assert_eq!(mounts.check().await.as_ref(), Some(&trouble));
        let _listener = tokio::net::UnixListener::bind(&socket).unwrap();
        apart.store(false, Ordering::Relaxed);
        assert_eq!(mounts.check().await, None);
        assert!(mounts.state().trouble.is_none());
        // The same process is not looked at again once it was well.
        let before = looks.load(Ordering::Relaxed);
        assert_eq!((mounts.check().await, looks.load(Ordering::Relaxed)), (None, before));
    }
}
