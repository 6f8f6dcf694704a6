//! The kernel's inotify events to what has to be read again. Reading events is [`Watcher`]'s; what they mean
//! is pure, so that an overflow can be tested without causing one.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};

use futures::{FutureExt, StreamExt};
use inotify::{EventMask, EventStream, Inotify, WatchDescriptor, WatchMask};

/// Most events taken in one go before their files are read.
const BATCH: usize = 10_000;

/// Bytes of events read from the kernel at once.
const BUFFER: usize = 64 << 10;

/// Which watch an event came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum From<'a> {
    /// The folder's.
    Folder,
    /// That of the nearest folder above that exists; the name is the one that leads down to ours.
    Above(&'a OsStr),
    /// None that is still wanted (also: the kernel's own, without a watch).
    Elsewhere,
}

/// What an event asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change<'a> {
    /// Nothing.
    Nothing,
    /// This file may be another, or gone.
    File(&'a OsStr),
    /// This file was deleted. Another may have its name by now.
    Deleted(&'a OsStr),
    /// This file has a new name. If it is only just being written, its end of writing will be told.
    Created(&'a OsStr),
    /// Anything may be different.
    Everything,
}

/// What an event means.
pub(super) fn change<'a>(from: From<'_>, mask: EventMask, name: Option<&'a OsStr>) -> Change<'a> {
    if mask.contains(EventMask::Q_OVERFLOW) {
        return Change::Everything;
    }
    let lost = EventMask::IGNORED | EventMask::UNMOUNT | EventMask::DELETE_SELF | EventMask::MOVE_SELF;
    match (from, name) {
        (From::Folder, _) if mask.intersects(lost) => Change::Everything,
        (From::Folder, Some(name)) if mask.contains(EventMask::ISDIR) || !is_manifest_name(name) => {
            Change::Nothing
        }
        (From::Folder, Some(name)) if mask.contains(EventMask::CREATE) => Change::Created(name),
        (From::Folder, Some(name)) if mask.contains(EventMask::DELETE) => Change::Deleted(name),
        (From::Folder, Some(name)) => Change::File(name),
        (From::Above(_), _) if mask.intersects(lost) => Change::Everything,
        (From::Above(way), Some(name)) if way == name => Change::Everything,
        _ => Change::Nothing,
    }
}

/// Returns true if a file of that name may be a manifest. The kubelet reads every file whose name doesn't
/// begin with a dot, so a manifest may be called anything here too; but what editors, `sed -i` and package
/// managers leave beside the real one, and what is written for people, is none.
pub(super) fn is_manifest_name(name: &OsStr) -> bool {
    const NO_MANIFESTS: [&str; 25] = [
        "~",
        ".swp",
        ".swo",
        ".swx",
        ".tmp",
        ".part",
        ".bak",
        "-bak",
        "_bak",
        ".bkp",
        ".backup",
        ".disabled",
        ".off",
        ".old",
        ".save",
        ".orig",
        ".rej",
        ".md",
        ".txt",
        ".dpkg-new",
        ".dpkg-old",
        ".dpkg-dist",
        ".rpmnew",
        ".rpmorig",
        ".rpmsave",
    ];
    let name = name.to_string_lossy();
    // vim writes a file "4913" to see whether it may; emacs locks with ".#x" and saves to "#x#".
    !(name.starts_with('.')
        || name.starts_with('#')
        || name == "4913"
        || name.starts_with("README")
        || is_of_sed(&name)
        || NO_MANIFESTS.iter().any(|end| name.ends_with(end)))
}

/// `sed -i` writes to "sed" and six characters of mkstemp(3), and renames that. Nearly all such names have a
/// capital or a digit in them; a word such as "sedentary" has not, and may be a manifest.
fn is_of_sed(name: &str) -> bool {
    let made_up = name.strip_prefix("sed").unwrap_or_default();
    made_up.len() == 6
        && made_up.bytes().all(|byte| byte.is_ascii_alphanumeric())
        && !made_up.bytes().all(|byte| byte.is_ascii_lowercase())
}

/// What a batch of events asks for.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// Read the whole folder again.
    pub(super) everything: bool,
    /// Files that may be different.
    pub(super) files: BTreeSet<OsString>,
    /// Files of which only those count that aren't being written.
    pub(super) created: BTreeSet<OsString>,
    /// Files that were deleted; they are among `files` too.
    pub(super) deleted: BTreeSet<OsString>,
}

/// The watches on a folder and on what leads to it.
pub(super) struct Watcher {
    events: EventStream<Vec<u8>>,
    folder: Option<WatchDescriptor>,
    above: Option<(WatchDescriptor, OsString)>,
}

impl Watcher {
    pub(super) fn new() -> io::Result<Self> {
        let events = Inotify::init()?.into_event_stream(vec![0; BUFFER])?;
        Ok(Watcher { events, folder: None, above: None })
    }

    /// Watches `path`, a folder or a file, whatever has become of it. Cheap where nothing has changed. What
    /// changes after this is told; so watch first, then read.
    pub(super) fn arm(&mut self, path: &Path) -> io::Result<()> {
        // Twice is enough if the way to the folder grows while it is looked for; the periodic check does the
        // rest.
        for _ in 0..2 {
            let (above, way) = nearest_above(path);
            let mask = WatchMask::CREATE | WatchMask::DELETE | WatchMask::MOVE | WatchMask::ATTRIB;
            let selves = WatchMask::DELETE_SELF | WatchMask::MOVE_SELF | WatchMask::ONLYDIR;
            // A file instead of a folder is seen from above, where the end of its writing must count.
            let descriptor = self.events.watches().add(&above, mask | selves | WatchMask::CLOSE_WRITE)?;
            self.forget(self.above.as_ref().map(|(old, _)| old.clone()), &descriptor);
            self.above = Some((descriptor, way));
            if nearest_above(path).0 == above {
                break;
            }
        }
        let mask = WatchMask::CLOSE_WRITE | WatchMask::MOVE | WatchMask::DELETE | WatchMask::CREATE;
        let selves = WatchMask::DELETE_SELF | WatchMask::MOVE_SELF | WatchMask::ONLYDIR;
        match self.events.watches().add(path, mask | WatchMask::ATTRIB | selves) {
            Ok(descriptor) => {
                self.forget(self.folder.clone(), &descriptor);
                self.folder = Some(descriptor);
                Ok(())
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                self.folder = None;
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Removes an old watch that another has taken the place of.
    fn forget(&self, old: Option<WatchDescriptor>, new: &WatchDescriptor) {
        if let Some(old) = old.filter(|old| old != new) {
            // It fails where the kernel has dropped the watch by itself: its folder is gone.
            let _ = self.events.watches().remove(old);
        }
    }

    /// Waits for events, and takes all that are there.
    pub(super) async fn next(&mut self) -> io::Result<Changes> {
        let mut changes = Changes::default();
        let mut next = self.events.next().await;
        for _ in 0..BATCH {
            let event = match next {
                Some(event) => event?,
                None => return Err(io::Error::other("the kernel ended the stream of inotify events")),
            };
            self.record(&event, &mut changes);
            match self.events.next().now_or_never() {
                Some(more) => next = more,
                None => break,
            }
        }
        Ok(changes)
    }

    fn record(&self, event: &inotify::EventOwned, changes: &mut Changes) {
        let from = match &self.above {
            _ if self.folder.as_ref() == Some(&event.wd) => From::Folder,
            Some((above, way)) if *above == event.wd => From::Above(way),
            _ => From::Elsewhere,
        };
        match change(from, event.mask, event.name.as_deref()) {
            Change::Nothing => {}
            Change::File(name) => {
                changes.files.insert(name.to_owned());
            }
            Change::Deleted(name) => {
                changes.files.insert(name.to_owned());
                changes.deleted.insert(name.to_owned());
            }
            Change::Created(name) => {
                changes.created.insert(name.to_owned());
            }
            Change::Everything => changes.everything = true,
        }
    }
}

/// The nearest folder above `path` that exists, and the name in it that leads to `path`.
fn nearest_above(path: &Path) -> (PathBuf, OsString) {
    let mut way = path;
    loop {
        let name = way.file_name().unwrap_or_default().to_owned();
        match way.parent() {
            Some(parent) if parent.is_dir() => return (parent.to_owned(), name),
            Some(parent) => way = parent,
            None => return (PathBuf::from("/"), name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(from: From<'_>, mask: EventMask, name: Option<&str>, expected: Change<'_>) {
        assert_eq!(change(from, mask, name.map(OsStr::new)), expected, "{from:?} {mask:?} {name:?}");
    }

    #[test]
    fn an_event_asks_for_what_it_may_have_changed() {
        let web = Change::File(OsStr::new("web.yaml"));
        let folder = From::Folder;
        check(folder, EventMask::CLOSE_WRITE, Some("web.yaml"), web);
        check(folder, EventMask::MOVED_TO, Some("web.yaml"), web);
        check(folder, EventMask::MOVED_FROM, Some("web.yaml"), web);
        check(folder, EventMask::DELETE, Some("web.yaml"), Change::Deleted(OsStr::new("web.yaml")));
        check(folder, EventMask::ATTRIB, Some("web.yaml"), web);
        check(folder, EventMask::CREATE, Some("web.yaml"), Change::Created(OsStr::new("web.yaml")));
        check(folder, EventMask::CREATE | EventMask::ISDIR, Some("old"), Change::Nothing);
        check(folder, EventMask::CLOSE_WRITE, Some(".web.yaml.swp"), Change::Nothing);
        check(folder, EventMask::DELETE_SELF, None, Change::Everything);
        check(folder, EventMask::MOVE_SELF, None, Change::Everything);
        check(folder, EventMask::UNMOUNT, None, Change::Everything);
        check(folder, EventMask::IGNORED, None, Change::Everything);
        let above = From::Above(OsStr::new("manifests"));
        check(above, EventMask::CREATE | EventMask::ISDIR, Some("manifests"), Change::Everything);
        check(above, EventMask::MOVED_FROM | EventMask::ISDIR, Some("manifests"), Change::Everything);
        check(above, EventMask::CREATE, Some("other"), Change::Nothing);
        check(above, EventMask::DELETE_SELF, None, Change::Everything);
        check(From::Elsewhere, EventMask::IGNORED, None, Change::Nothing);
        check(From::Elsewhere, EventMask::DELETE, Some("web.yaml"), Change::Nothing);
    }

    #[test]
    fn an_overflow_asks_for_everything() {
        check(From::Elsewhere, EventMask::Q_OVERFLOW, None, Change::Everything);
        check(From::Folder, EventMask::Q_OVERFLOW, None, Change::Everything);
    }

    #[test]
    fn what_editors_leave_behind_is_no_manifest() {
        let check =
            |name: &str, expected: bool| assert_eq!(is_manifest_name(OsStr::new(name)), expected, "{name}");
        check("web.yaml", true);
        check("web.json", true);
        check("web", true);
        check("web.v2.yml", true);
        check("sedation", true);
        check("sed.yaml", true);
        check("sedentary", true);
        check("readme", true);
        check(".web.yaml", false);
        check("..data", false);
        check(".web.yaml.swp", false);
        check("web.yaml~", false);
        check("#web.yaml#", false);
        check(".#web.yaml", false);
        check("4913", false);
        check("web.yaml.bak", false);
        check("web.yaml.tmp", false);
        check("web.yaml.dpkg-old", false);
        check("sedaOFnQG", false);
        check("README", false);
        check("README.txt", false);
        check("NOTES.md", false);
        check("web.yaml.old", false);
        check("web.yaml-bak", false);
        check("web.yaml_bak", false);
        check("web.yaml.backup", false);
        check("web.yaml.bkp", false);
        check("web.yaml.disabled", false);
        check("web.off", false);
        check("etcd-backup", true);
        check("disabled", true);
    }
}
