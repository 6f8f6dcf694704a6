//! Notifies the followers of a log when its directory changes. All followers share one inotify instance: the
//! kernel limits the instances of each user (`fs.inotify.max_user_instances`, 128 by default), and other
//! daemons of root and other parts of the agent need some of them.

use std::{
    collections::{HashMap, VecDeque},
    ffi::OsString,
    io, mem,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use inotify::{EventMask, Inotify, WatchDescriptor, WatchMask, Watches};
use tokio::sync::watch;

use crate::rotate;
use crate::written::Writer;

/// Polling interval of a follower without inotify.
const CHECK_PERIOD: Duration = Duration::from_secs(1);
/// Maximum names of closed files per directory. A log is rotated at most once per second, and a reader waits
/// 10 s for the end of a file.
const CLOSED: usize = 16;
/// Bytes per read of inotify events.
const EVENTS: usize = 16 << 10;

/// The instance of this process, created for the first directory and recreated after a failure.
static SHARED: Mutex<Option<Arc<Shared>>> = Mutex::new(None);

struct Shared(Mutex<Folders>);

struct Folders {
    watches: Watches,
    all: HashMap<WatchDescriptor, Folder>,
}

struct Folder {
    followers: usize,
    /// Names of the rotated logs in the directory that their writer has closed last; sent with every change.
    closed: watch::Sender<Arc<VecDeque<OsString>>>,
}

/// Source of change notifications for a directory.
pub(crate) enum Changes {
    Told(Follower),
    /// The kernel has no inotify instance or watch left: polls every [`CHECK_PERIOD`].
    Looked,
}

pub(crate) struct Follower {
    shared: Arc<Shared>,
    descriptor: WatchDescriptor,
    closed: watch::Receiver<Arc<VecDeque<OsString>>>,
}

impl Changes {
    pub(crate) fn of(folder: &Path) -> Self {
        match shared().and_then(|shared| shared.follow(folder)) {
            Ok(follower) => Self::Told(follower),
            Err(error) => {
                let folder = folder.display();
                tracing::debug!("cannot watch {folder} with inotify; polling it once per second: {error}");
                Self::Looked
            }
        }
    }

    /// Returns the current knowledge about the writers in the directory.
    pub(crate) fn writer(&self) -> Writer {
        match self {
            Self::Told(follower) => Writer::Watched(Arc::clone(&follower.closed.borrow())),
            Self::Looked => Writer::Unwatched,
        }
    }

    /// Waits for a change.
    pub(crate) async fn next(&mut self) {
        if let Self::Told(follower) = self {
            if follower.closed.changed().await.is_ok() {
                return;
            }
            *self = Self::Looked;
        }
        tokio::time::sleep(CHECK_PERIOD).await;
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        let mut folders = self.shared.lock();
        let Some(folder) = folders.all.get_mut(&self.descriptor) else { return };
        folder.followers = folder.followers.saturating_sub(1);
        if folder.followers == 0 {
            folders.all.remove(&self.descriptor);
            // The directory and its watch may already be removed.
            let _ = folders.watches.remove(self.descriptor.clone());
        }
    }
}

impl Shared {
    fn follow(self: &Arc<Self>, folder: &Path) -> io::Result<Follower> {
        let mask = WatchMask::MODIFY | WatchMask::CREATE | WatchMask::MOVED_TO | WatchMask::CLOSE_WRITE;
        // The lock precedes the watch, so that the first event finds the directory in the map.
        let mut folders = self.lock();
        let descriptor = folders.watches.add(folder, mask)?;
        let known = folders.all.entry(descriptor.clone());
        let folder = known.or_insert_with(|| Folder { followers: 0, closed: watch::Sender::default() });
        folder.followers += 1;
        let closed = folder.closed.subscribe();
        drop(folders);
        Ok(Follower { shared: Arc::clone(self), descriptor, closed })
    }

    /// Reads events until an error; after that followers poll.
    fn run(self: &Arc<Self>, inotify: &mut Inotify) {
        let mut buffer = vec![0; EVENTS];
        loop {
            let events = match inotify.read_events_blocking(&mut buffer) {
                Ok(events) => events,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    tracing::warn!("inotify failed for logs; polling them once per second: {error}");
                    break;
                }
            };
            let mut folders = self.lock();
            for event in events {
                if event.mask.contains(EventMask::Q_OVERFLOW) {
                    folders.all.values().for_each(|folder| folder.closed.send_modify(|_| ()));
                } else if event.mask.contains(EventMask::IGNORED) {
                    // The directory was removed; its followers poll from now on.
                    folders.all.remove(&event.wd);
                } else if let Some(folder) = folders.all.get(&event.wd) {
                    let closed = event.mask.contains(EventMask::CLOSE_WRITE);
                    let name = event.name.filter(|name| closed && rotate::is_rotated(name));
                    folder.closed.send_modify(|names| {
                        let Some(name) = name else { return };
                        let names = Arc::make_mut(names);
                        names.push_back(name.to_owned());
                        if names.len() > CLOSED {
                            names.pop_front();
                        }
                    });
                }
            }
        }
        *lock(&SHARED) = None;
        mem::take(&mut self.lock().all);
    }

    fn lock(&self) -> MutexGuard<'_, Folders> {
        lock(&self.0)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the instance, and starts the thread that reads its events until the process exits.
fn shared() -> io::Result<Arc<Shared>> {
    let mut shared = lock(&SHARED);
    if let Some(shared) = &*shared {
        return Ok(Arc::clone(shared));
    }
    let mut inotify = Inotify::init()?;
    let folders = Folders { watches: inotify.watches(), all: HashMap::new() };
    let made = Arc::new(Shared(Mutex::new(folders)));
    let reading = Arc::clone(&made);
    thread::Builder::new().name("log-changes".to_owned()).spawn(move || reading.run(&mut inotify))?;
    *shared = Some(Arc::clone(&made));
    Ok(made)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    /// Returns the number of inotify instances of this process.
    fn instances() -> usize {
        let links = fs::read_dir("/proc/self/fd").unwrap().flatten();
        links
            .filter(|link| fs::read_link(link.path()).is_ok_and(|to| to.ends_with("anon_inode:inotify")))
            .count()
    }

    #[tokio::test]
    async fn many_followers_share_one_instance_and_each_hears_of_its_folder() {
        let dir = tempfile::tempdir().unwrap();
        let folders: Vec<_> = (0..300).map(|number| dir.path().join(number.to_string())).collect();
        let mut followers = Vec::new();
        for folder in &folders {
            fs::create_dir(folder).unwrap();
            followers.push([Changes::of(folder), Changes::of(folder)]);
        }
        assert!(followers.iter().flatten().all(|changes| matches!(changes, Changes::Told(_))));
        assert_eq!(instances(), 1);
        // A dropped follower does not affect the other one, which is still notified.
        let [first, mut second] = followers.pop().unwrap();
        drop(first);
        fs::write(folders[299].join("0.log"), "x").unwrap();
        tokio::time::timeout(PATIENCE, second.next()).await.unwrap();
        fs::write(folders[0].join("0.log"), "x").unwrap();
        for changes in &mut followers[0] {
            tokio::time::timeout(PATIENCE, changes.next()).await.unwrap();
        }
        // A follower misses no change of a directory that is removed and recreated.
        fs::remove_dir_all(&folders[1]).unwrap();
        let mut left = followers.swap_remove(1);
        let looks = async {
            while !matches!(left[0], Changes::Looked) {
                left[0].next().await;
            }
        };
        tokio::time::timeout(PATIENCE, looks).await.unwrap();
        drop((followers, left, second));
        assert!(shared().unwrap().lock().all.is_empty());
    }
}
