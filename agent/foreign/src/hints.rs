//! Hints that containers were created or removed, from inotify(7) on the folders of the pods' cgroups. A hint
//! does not name the container. Without inotify only the periodic lists find changes.

use std::collections::HashSet;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use futures::{FutureExt as _, StreamExt as _};
use inotify::{EventStream, Inotify, WatchMask, Watches};

use beelet_base::blocking::blocking;
use beelet_cgroups::{Cgroups, search};

/// Buffer size, for some hundred events; more at a time arrive as an overflow, which is a hint too.
const BUFFER: usize = 16 << 10;

/// Watches on the pods' cgroup folders.
pub(super) struct Hints {
    cgroups: Arc<Cgroups>,
    watched: HashSet<PathBuf>,
    inotify: Option<(Watches, EventStream<Vec<u8>>)>,
}

impl std::fmt::Debug for Hints {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hints").field("watched", &self.watched.len()).finish_non_exhaustive()
    }
}

impl Hints {
    pub(super) fn new(cgroups: Arc<Cgroups>) -> Self {
        let opened = Inotify::init().and_then(|inotify| {
            let watches = inotify.watches();
            Ok((watches, inotify.into_event_stream(vec![0; BUFFER])?))
        });
        let inotify = opened.inspect_err(trouble).ok();
        Self { cgroups, watched: HashSet::new(), inotify }
    }

    /// Watches every existing folder. Earlier hints are dropped: the caller lists the runtime next.
    pub(super) async fn watch(&mut self) {
        let Some((watches, events)) = &mut self.inotify else { return };
        while let Some(Some(Ok(_))) = events.next().now_or_never() {}
        let cgroups = Arc::clone(&self.cgroups);
        let folders = blocking("listing pods' cgroups", move || search::pod_folders(&cgroups)).await;
        let now: HashSet<PathBuf> = folders.into_iter().collect();
        let mask = WatchMask::CREATE | WatchMask::DELETE | WatchMask::ONLYDIR;
        let mut watches = watches.clone();
        for new in now.difference(&self.watched) {
            match watches.add(new, mask) {
                // Removed since the listing: its parent folder reports the removal.
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    trouble(&error);
                    break;
                }
            }
        }
        // The kernel drops the watches of folders that are removed.
        self.watched = now;
    }

    /// Waits for a hint; forever if the cgroups are not watched.
    pub(super) async fn next(&mut self) {
        let Some((_, events)) = &mut self.inotify else { return std::future::pending().await };
        if let Some(Err(error)) = events.next().await {
            trouble(&error);
            self.inotify = None;
        }
    }
}

fn trouble(error: &io::Error) {
    tracing::warn!(
        "cannot watch the pods' cgroups: {error} (see fs.inotify.max_user_watches and max_user_instances); containers that \
         come or go are seen within 10 s"
    );
}
