//! A word that containers come or go, from the folders of the pods' cgroups: inotify(7) reports their making
//! and removal like that of any folder. It says that something happened, not what; where it can't, nothing is
//! said and the lists now and then have to do.

use std::collections::HashSet;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use futures::{FutureExt as _, StreamExt as _};
use inotify::{EventStream, Inotify, WatchMask, Watches};

use beelet_base::blocking::blocking;
use beelet_cgroups::Cgroups;

/// Room for some hundred events; more at a time come as an overflow, which is a word too.
const BUFFER: usize = 16 << 10;

/// Where the word comes from.
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

    /// Watches every folder that is there now. Words that came until now are forgotten: who calls this is
    /// about to look.
    pub(super) async fn watch(&mut self) {
        let Some((watches, events)) = &mut self.inotify else { return };
        while let Some(Some(Ok(_))) = events.next().now_or_never() {}
        let cgroups = Arc::clone(&self.cgroups);
        let folders = blocking("listing pods' cgroups", move || cgroups.pod_folders()).await;
        let now: HashSet<PathBuf> = folders.into_iter().collect();
        let mask = WatchMask::CREATE | WatchMask::DELETE | WatchMask::ONLYDIR;
        let mut watches = watches.clone();
        for new in now.difference(&self.watched) {
            match watches.add(new, mask) {
                // Gone since it was listed: its removal is reported where it was.
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

    /// Waits for a word; for ever where the cgroups are not watched.
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
        "pods' cgroups can't be watched: {error} (see fs.inotify.max_user_watches and max_user_instances); containers that \
         come or go are seen within 10 s"
    );
}
