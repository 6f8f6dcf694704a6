//! Maps the kernel's inotify events to the files to read again. [`Watcher`] reads events; their
//! interpretation is pure, so that tests need not cause an overflow.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};

use futures::{FutureExt, StreamExt};
use inotify::{EventMask, EventStream, Inotify, WatchDescriptor, WatchMask};

/// Maximum number of events handled at once before their files are read.
const BATCH: usize = 10_000;

/// Size of the buffer for events, in bytes.
const BUFFER: usize = 64 << 10;

/// The watch of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum From<'a> {
    /// The folder's watch.
    Folder,
    /// The watch of the nearest existing ancestor, with the name of the entry that leads to the folder.
    Above(&'a OsStr),
    /// An obsolete watch, or none (an event of the kernel itself).
    Elsewhere,
}

/// Effect of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change<'a> {
    /// No effect.
    Nothing,
    /// This file may have changed or been removed.
    File(&'a OsStr),
    /// This file was deleted. Another file may have its name by now.
    Deleted(&'a OsStr),
    /// This file was created. If it is still being written, a later event reports its close.
    Created(&'a OsStr),
    /// Any file may have changed.
    Everything,
}

/// Interprets an event.
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

/// Returns true if a file of this name may be a manifest. Like the kubelet, accepts every file whose name
/// doesn't begin with a dot, except for documentation and for files that editors, `sed -i` and package
/// managers leave behind.
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
    // vim writes a file "4913" to test its permissions; emacs locks with ".#x" and saves to "#x#".
    !(name.starts_with('.')
        || name.starts_with('#')
        || name == "4913"
        || name.starts_with("README")
        || is_of_sed(&name)
        || NO_MANIFESTS.iter().any(|end| name.ends_with(end)))
}

/// Returns true for a temporary file of `sed -i`: "sed" and six characters of mkstemp(3). Nearly all of these
/// names contain a capital or a digit; a word such as "sedentary" does not, and may be a manifest.
fn is_of_sed(name: &str) -> bool {
    let made_up = name.strip_prefix("sed").unwrap_or_default();
    made_up.len() == 6
        && made_up.bytes().all(|byte| byte.is_ascii_alphanumeric())
        && !made_up.bytes().all(|byte| byte.is_ascii_lowercase())
}

/// Effect of a batch of events.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// True to read the whole folder again.
    pub(super) everything: bool,
    /// Files that may have changed.
    pub(super) files: BTreeSet<OsString>,
    /// Created files, to read unless they are still being written.
    pub(super) created: BTreeSet<OsString>,
    /// Deleted files, which are also in `files`.
    pub(super) deleted: BTreeSet<OsString>,
}

/// Watches of a folder and of its nearest existing ancestor.
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

    /// Watches `path`, a folder or a file, even if it was replaced or is missing. Cheap without a change.
    /// Later changes cause events, so callers arm the watches before they read.
    pub(super) fn arm(&mut self, path: &Path) -> io::Result<()> {
        // Two rounds suffice if ancestors are created meanwhile; otherwise the periodic check finds the
        // change.
        for _ in 0..2 {
            let (above, way) = nearest_above(path);
            let mask = WatchMask::CREATE | WatchMask::DELETE | WatchMask::MOVE | WatchMask::ATTRIB;
            let selves = WatchMask::DELETE_SELF | WatchMask::MOVE_SELF | WatchMask::ONLYDIR;
            // The ancestor's watch covers a file instead of a folder, so it must include the end of writing.
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

    /// Removes a replaced watch.
    fn forget(&self, old: Option<WatchDescriptor>, new: &WatchDescriptor) {
        if let Some(old) = old.filter(|old| old != new) {
            // The removal fails if the kernel has dropped the watch together with its deleted folder.
            let _ = self.events.watches().remove(old);
        }
    }

    /// Waits for events and returns the effect of all pending ones.
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

/// Returns the nearest existing ancestor folder of `path`, and the name of its entry that leads to `path`.
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
