//! Sets of files that change atomically: the files of ConfigMap, Secret, downward API and projected volumes.
//!
//! The layout is the kubelet's (`pkg/volume/util/atomic_writer.go`), which programs watch:
//!
//! ```text
//! ..2026_11_21_20_15_00.123456789/   a whole set of files
//! ..data -> ..2026_11_21_20_15_00.123456789
//! key    -> ..data/key               one link for each name at the top
//! ```
//!
//! The agent writes a new set next to the old one; renaming a link over `..data` replaces the old set. An
//! agent killed at any point leaves either the old or the new set in force, and the next change removes the
//! remains.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CString, OsStr, OsString};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path};

use jiff::Timestamp;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Uid};
use rustix::io::Errno;

use super::Error;
use super::fs_group::{Access, FsGroup, mask};
use beelet_base::walk::remove;
use beelet_policy::volumes::content;

/// Link to the set in force.
const DATA: &str = "..data";
const DATA_NEXT: &str = "..data_tmp";

/// A set of files by their relative path.
pub(super) type Payload<'o> = BTreeMap<String, PayloadFile<'o>>;

/// A file of a set.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct PayloadFile<'o> {
    /// Content.
    pub(super) bytes: Cow<'o, [u8]>,
    /// Permissions.
    pub(super) mode: u32,
    /// User id of the owner; None: the agent's own user.
    pub(super) owner: Option<u32>,
}

impl std::fmt::Debug for PayloadFile<'_> {
    /// Omits the content, which may be secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes, mode 0{:o}", self.bytes.len(), self.mode)
    }
}

/// Returns true if a folder has a set in force.
pub(super) fn is_set_up(root: &OwnedFd) -> bool {
    current(root).is_ok_and(|set| set.is_some())
}

/// Makes the open folder `root` show these files; `path` is the folder's name in errors. Returns true if
/// anything changed.
pub(super) fn write(
    path: &Path,
    root: &OwnedFd,
    payload: &Payload<'_>,
    group: Option<&FsGroup>,
) -> Result<bool, Error> {
    for file in payload.keys() {
        check_path(file)?;
    }
    let failed = |e: std::io::Error| Error::io("write to", path)(e);
    if group.is_some() {
        own(group, root, FileType::Directory).map_err(|e| failed(e.into()))?;
    }
    let current = current(root).map_err(|e| failed(e.into()))?;
    if let Some(current) = &current
        && holds(root, current, payload, group.is_some()).unwrap_or(false)
    {
        let is_whole = are_linked(root, payload).map_err(|e| failed(e.into()))?;
        if !is_whole {
            link_names(root, payload).map_err(|e| failed(e.into()))?;
        }
        return Ok(!is_whole);
    }
    let set = write_set(root, payload, group).map_err(failed)?;
    let finish = || -> Result<(), Errno> {
        publish(root, &set)?;
        link_names(root, payload)?;
        sweep(root, &set)
    };
    finish().map_err(|e| failed(e.into()))?;
    Ok(true)
}

/// Makes the mount points of other volumes in the open folder `root`; `path` is the folder's name in errors.
/// The runtime cannot make them, because containers see the volume read-only. Must run before the first
/// [`write`]: a name that is a folder gets no link, as under the kubelet.
pub(super) fn make_mount_points(
    path: &Path,
    root: &OwnedFd,
    wanted: &BTreeSet<String>,
    group: Option<&FsGroup>,
) -> Result<(), Error> {
    for way in wanted {
        content::check_path(way)?;
    }
    // Names that begin with `..` are reserved for sets and the link to them.
    for way in wanted.iter().filter(|way| !way.starts_with("..")) {
        match make_folders(root, Path::new(way), group) {
            // A link or a file has the name. The agent does not follow a link, and the runtime reports an
            // error if it cannot mount there.
            Ok(_) | Err(Errno::LOOP | Errno::NOTDIR) => {}
            Err(e) => return Err(Error::io("make a mount point in", path)(e)),
        }
    }
    Ok(())
}

/// Checks that a path in a volume is relative, has no `..` and does not begin with a reserved name.
fn check_path(path: &str) -> Result<(), Error> {
    content::check_path(path)?;
    let mut parts = Path::new(path).components();
    let normal = parts.clone().all(|part| matches!(part, Component::Normal(_)));
    let ours =
        matches!(parts.next(), Some(Component::Normal(name)) if name.as_encoded_bytes().starts_with(b".."));
    if path.is_empty() || !normal || ours || path.contains('\0') {
        return Err(Error::unmet(format!(
            "the path {path:?} must be relative, without '..', and must not begin with '..'"
        )));
    }
    Ok(())
}

/// Returns true if a link leads to a set in the same folder. A container with a hostPath may have replaced
/// the link.
fn is_set(target: &OsStr) -> bool {
    let mut parts = Path::new(target).components();
    let first = parts.next();
    let ours = matches!(first, Some(Component::Normal(name)) if name.as_encoded_bytes().starts_with(b".."));
    ours && parts.next().is_none()
}

/// Returns the name of the set in force.
fn current(root: &OwnedFd) -> Result<Option<OsString>, Errno> {
    match rustix::fs::readlinkat(root, DATA, Vec::new()) {
        Ok(target) => Ok(Some(OsString::from_vec(target.into_bytes())).filter(|set| is_set(set))),
        Err(Errno::NOENT) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Returns true if a set has exactly these files, with their contents, modes and owners: an ephemeral
/// container may change the mode and the owner. `for_group`: the pod has a group, which may read the files.
fn holds(
    root: &OwnedFd,
    set: &OsStr,
    payload: &Payload<'_>,
    for_group: bool,
) -> Result<bool, std::io::Error> {
    let folder = open_folder(root, set)?;
    if count(&folder, payload)? != Some(payload.len()) {
        return Ok(false);
    }
    let more = if for_group { mask(FileType::RegularFile, Access::ReadOnly).bits() } else { 0 };
    for (path, wanted) in payload {
        let file = File::from(open_beneath(&folder, path)?);
        let stat = rustix::fs::fstat(&file)?;
        let owner = wanted.owner.map_or_else(rustix::process::geteuid, Uid::from_raw);
        if stat.st_mode & 0o7777 != wanted.mode & 0o777 | more || stat.st_uid != owner.as_raw() {
            return Ok(false);
        }
        let mut bytes = Vec::new();
        file.take(wanted.bytes.len() as u64 + 1).read_to_end(&mut bytes)?;
        if wanted.bytes != bytes {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Counts the files in a folder and below it. Returns None at the first entry that is not in `payload`: a
/// container may have added a huge number of entries. Each folder is opened by its path, which is a path of
/// the payload: two thousand nested folders need neither as many open files nor as many calls.
fn count(top: &OwnedFd, payload: &Payload<'_>) -> Result<Option<usize>, Errno> {
    let (mut files, mut ahead) = (0, vec![String::new()]);
    while let Some(prefix) = ahead.pop() {
        let folder = match prefix.as_str() {
            "" => open_folder(top, OsStr::new("."))?,
            prefix => open_beneath(top, prefix)?,
        };
        for name in entries(&folder)? {
            let path = format!("{prefix}{}", name.to_string_lossy());
            if kind(&folder, &name)? == FileType::Directory {
                let below = format!("{path}/");
                let first = payload.range(below.clone()..).next();
                if !first.is_some_and(|(file, _)| file.starts_with(&below)) {
                    return Ok(None);
                }
                ahead.push(below);
            } else if payload.contains_key(&path) {
                files += 1;
            } else {
                return Ok(None);
            }
        }
    }
    Ok(Some(files))
}

/// Writes a new set and returns its name.
fn write_set(
    root: &OwnedFd,
    payload: &Payload<'_>,
    group: Option<&FsGroup>,
) -> Result<OsString, std::io::Error> {
    let name = loop {
        let now = Timestamp::now().strftime("..%Y_%m_%d_%H_%M_%S.%9f").to_string();
        match rustix::fs::mkdirat(root, &now, Mode::from_raw_mode(0o755)) {
            Ok(()) => break OsString::from(now),
            Err(Errno::EXIST) => {} // two changes in a nanosecond: the clock has stopped
            Err(e) => return Err(e.into()),
        }
    };
    let set = open_folder(root, &name)?;
    rustix::fs::fchmod(&set, Mode::from_raw_mode(0o755))?;
    own(group, &set, FileType::Directory)?;
    for (path, content) in payload {
        let path = Path::new(path);
        let folder = make_folders(&set, path.parent().unwrap_or(Path::new("")), group)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let name = path.file_name().unwrap_or_default();
        let mut file = File::from(rustix::fs::openat(&folder, name, flags, Mode::from_raw_mode(0o600))?);
        file.write_all(&content.bytes)?;
        if let Some(owner) = content.owner {
            rustix::fs::fchown(&file, Some(Uid::from_raw(owner)), None)?;
        }
        rustix::fs::fchmod(&file, Mode::from_raw_mode(content.mode & 0o777))?;
        own(group, &file, FileType::RegularFile)?;
    }
    Ok(name)
}

fn make_folders(set: &OwnedFd, way: &Path, group: Option<&FsGroup>) -> Result<OwnedFd, Errno> {
    let mut folder = open_folder(set, OsStr::new("."))?;
    for name in way.components() {
        let name = name.as_os_str();
        match rustix::fs::mkdirat(&folder, name, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(e),
        }
        folder = open_folder(&folder, name)?;
        rustix::fs::fchmod(&folder, Mode::from_raw_mode(0o755))?;
        own(group, &folder, FileType::Directory)?;
    }
    Ok(folder)
}

fn own(group: Option<&FsGroup>, file: impl AsFd, kind: FileType) -> Result<(), Errno> {
    group.map_or(Ok(()), |group| group.own_file(file, kind, Access::ReadOnly))
}

/// Puts a set in force.
fn publish(root: &OwnedFd, set: &OsStr) -> Result<(), Errno> {
    match rustix::fs::unlinkat(root, DATA_NEXT, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(e) => return Err(e),
    }
    rustix::fs::symlinkat(set, root, DATA_NEXT)?;
    rustix::fs::renameat(root, DATA_NEXT, root, DATA)
}

/// Returns true if each name at the top exists.
fn are_linked(root: &OwnedFd, payload: &Payload) -> Result<bool, Errno> {
    for path in payload.keys() {
        let Some(name) = Path::new(path).components().next() else { continue };
        match kind(root, name.as_os_str()) {
            Ok(_) => {}
            Err(Errno::NOENT) => return Ok(false),
            Err(e) => return Err(e),
        }
    }
    Ok(true)
}

/// Makes a link for each name at the top and removes the links of names that are no longer wanted. Leaves
/// other entries (a folder that a `subPath` made) alone.
fn link_names(root: &OwnedFd, payload: &Payload<'_>) -> Result<(), Errno> {
    let wanted: BTreeSet<&OsStr> = payload
        .keys()
        .filter_map(|path| Path::new(path).components().next())
        .map(Component::as_os_str)
        .collect();
    for name in entries(root)? {
        let is_name = !name.as_encoded_bytes().starts_with(b"..");
        if is_name && !wanted.contains(&*name) && kind(root, &name)? == FileType::Symlink {
            rustix::fs::unlinkat(root, &name, AtFlags::empty())?;
        }
    }
    for name in wanted {
        let target = Path::new(DATA).join(name);
        match rustix::fs::symlinkat(&target, root, name) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Removes all sets except the one in force.
fn sweep(root: &OwnedFd, in_force: &OsStr) -> Result<(), Errno> {
    for name in entries(root)? {
        let set = name.as_encoded_bytes().starts_with(b"..") && name != DATA && *name != *in_force;
        if set {
            let name = CString::new(name.into_vec()).map_err(|_| Errno::INVAL)?;
            remove(root.as_fd(), &name)?;
        }
    }
    Ok(())
}

/// Returns the names in a folder that only the agent writes to, without `.` and `..`.
fn entries(folder: &OwnedFd) -> Result<Vec<OsString>, Errno> {
    let mut names = Vec::new();
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        if name != c"." && name != c".." {
            names.push(OsStr::from_bytes(name.to_bytes()).to_owned());
        }
    }
    Ok(names)
}

/// Returns the file type of an entry, without following a link.
fn kind(parent: impl AsFd, name: &OsStr) -> Result<FileType, Errno> {
    let stat = rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(FileType::from_raw_mode(stat.st_mode))
}

fn open_folder(parent: impl AsFd, name: &OsStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(parent, name, flags, Mode::empty())
}

fn open_beneath(folder: &OwnedFd, path: &str) -> Result<OwnedFd, Errno> {
    use rustix::fs::ResolveFlags;
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    rustix::fs::openat2(folder, path, flags, Mode::empty(), resolve)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;

    fn payload(files: &[(&str, &str)]) -> Payload<'static> {
        let file =
            |text: &str| PayloadFile { bytes: text.as_bytes().to_vec().into(), mode: 0o644, owner: None };
        files.iter().map(|(path, text)| ((*path).to_owned(), file(text))).collect()
    }

    fn write(dir: &Path, payload: &Payload<'_>, group: Option<&FsGroup>) -> Result<bool, String> {
        super::write(dir, &File::open(dir).unwrap().into(), payload, group).map_err(|e| e.to_string())
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn sets(dir: &Path) -> usize {
        names(dir).iter().filter(|name| name.starts_with("..20")).count()
    }

    #[test]
    fn files_are_seen_through_links_and_change_all_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let read = |name: &str| fs::read_to_string(dir.path().join(name)).ok();
        assert_eq!(
            write(dir.path(), &payload(&[("a", "1"), ("deep/b", "2"), ("deep/c", "3")]), None),
            Ok(true)
        );
        assert_eq!(
            (read("a"), read("deep/b"), read("deep/c")),
            (Some("1".into()), Some("2".into()), Some("3".into()))
        );
        assert_eq!(fs::read_link(dir.path().join("a")).unwrap(), Path::new("..data/a"));
        assert_eq!(fs::read_link(dir.path().join("deep")).unwrap(), Path::new("..data/deep"));
        let before = fs::read_link(dir.path().join(DATA)).unwrap();
        assert_eq!(
            write(dir.path(), &payload(&[("a", "1"), ("deep/b", "2"), ("deep/c", "3")]), None),
            Ok(false)
        );
        assert_eq!(fs::read_link(dir.path().join(DATA)).unwrap(), before);
        assert_eq!(write(dir.path(), &payload(&[("a", "new")]), None), Ok(true));
        assert_eq!((read("a"), read("deep/b")), (Some("new".into()), None));
        assert_eq!(names(dir.path())[1..], ["..data", "a"]);
        assert_eq!(sets(dir.path()), 1);
    }

    #[test]
    fn modes_do_not_depend_on_the_umask() {
        let dir = tempfile::tempdir().unwrap();
        let file = PayloadFile { bytes: vec![].into(), mode: 0o466, owner: None };
        write(dir.path(), &[("a".to_owned(), file)].into(), None).unwrap();
        let mode = |path: &str| fs::metadata(dir.path().join(path)).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode("a"), mode("..data/")), (0o466, 0o755));
    }

    #[test]
    fn files_with_a_wrong_mode_or_owner_are_rewritten() {
        let dir = tempfile::tempdir().unwrap();
        // An ordinary user may give files to itself and its group alone.
        let root = rustix::process::geteuid().is_root();
        let (uid, gid) =
            (if root { 1234 } else { rustix::process::geteuid().as_raw() }, rustix::process::getgid());
        let context = serde_json::from_value(serde_json::json!({"fsGroup": gid.as_raw()})).unwrap();
        let group = FsGroup::of(Some(&context));
        let check = |mode: u32, owner: Option<u32>, group: Option<&FsGroup>, expected: (bool, u32, u32)| {
            let files =
                [("token".to_owned(), PayloadFile { bytes: b"t".as_slice().into(), mode, owner })].into();
            let changed = write(dir.path(), &files, group).unwrap();
            let found = fs::metadata(dir.path().join("token")).unwrap();
            assert_eq!((changed, found.mode() & 0o7777, found.uid()), expected);
            assert_eq!(write(dir.path(), &files, group), Ok(false), "a second time");
        };
        let own = rustix::process::geteuid().as_raw();
        check(0o644, None, None, (true, 0o644, own));
        check(0o600, None, None, (true, 0o600, own));
        check(0o600, Some(uid), None, (root, 0o600, uid));
        check(0o600, Some(uid), group.as_ref(), (true, 0o640, uid));
        check(0o644, None, None, (true, 0o644, own));
    }

    #[test]
    fn links_out_of_the_folder_are_not_sets_and_stay() {
        let dir = tempfile::tempdir().unwrap();
        let (volume, outside) = (dir.path().join("v"), dir.path().join("outside"));
        fs::create_dir(&volume).unwrap();
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("a"), "1").unwrap();
        for target in ["../outside", outside.to_str().unwrap(), "/", "a", "..x/y"] {
            let _ = fs::remove_file(volume.join(DATA)); // of the case before
            std::os::unix::fs::symlink(target, volume.join(DATA)).unwrap();
            assert!(!is_set_up(&File::open(&volume).unwrap().into()), "{target}");
            assert_eq!(write(&volume, &payload(&[("a", "1")]), None), Ok(true), "{target}");
            assert_eq!(fs::read_to_string(volume.join("a")).unwrap(), "1");
        }
        assert_eq!((names(&outside), sets(&volume)), (vec!["a".to_owned()], 1));
    }

    #[test]
    fn comparison_of_a_set_stops_at_a_foreign_file() {
        let dir = tempfile::tempdir().unwrap();
        let files = payload(&[("a", "1"), ("deep/b", "2")]);
        write(dir.path(), &files, None).unwrap();
        let set = dir.path().join(fs::read_link(dir.path().join(DATA)).unwrap());
        for more in ["other/folder", "deep/other"] {
            fs::create_dir_all(set.join(more)).unwrap();
            let root = File::open(dir.path()).unwrap().into();
            assert!(!holds(&root, set.file_name().unwrap(), &files, false).unwrap(), "{more}");
            fs::remove_dir(set.join(more)).unwrap();
        }
        fs::remove_dir(set.join("other")).unwrap();
        assert_eq!(write(dir.path(), &files, None), Ok(false));
    }

    #[test]
    fn remains_of_a_killed_writer_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("..2020_01_01_00_00_00.000000000/x")).unwrap();
        std::os::unix::fs::symlink("nowhere", dir.path().join(DATA_NEXT)).unwrap();
        write(dir.path(), &payload(&[("a", "1")]), None).unwrap();
        assert_eq!(sets(dir.path()), 1);
        assert!(!dir.path().join(DATA_NEXT).is_symlink());
    }

    #[test]
    fn a_folder_that_a_sub_path_made_stays() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &payload(&[("a", "1")]), None).unwrap();
        fs::create_dir(dir.path().join("made")).unwrap();
        write(dir.path(), &payload(&[("b", "1")]), None).unwrap();
        assert_eq!(names(dir.path())[1..], ["..data", "b", "made"]);
    }

    #[test]
    fn mount_points_stay_over_changes_and_are_never_made_through_links() {
        let dir = tempfile::tempdir().unwrap();
        let (volume, outside) = (dir.path().join("v"), dir.path().join("outside"));
        fs::create_dir(&volume).unwrap();
        fs::create_dir(&outside).unwrap();
        let make = |wanted: &[&str]| {
            let wanted = wanted.iter().map(|way| (*way).to_owned()).collect();
            make_mount_points(&volume, &File::open(&volume).unwrap().into(), &wanted, None).unwrap();
        };
        let mode = |path: &str| fs::symlink_metadata(volume.join(path)).unwrap().permissions().mode();
        make(&["cache", "deep/er", "..data"]);
        for files in [[("a", "1"), ("cache/x", "1")], [("a", "2"), ("cache/x", "2")]] {
            assert_eq!(write(&volume, &payload(&files), None), Ok(true));
            assert_eq!(fs::read_to_string(volume.join("a")).unwrap(), files[0].1);
            for made in ["cache", "deep", "deep/er"] {
                assert_eq!(mode(made), 0o40755, "{made}");
            }
        }
        // A link of a container with a hostPath, and the link of a key.
        std::os::unix::fs::symlink(&outside, volume.join("way")).unwrap();
        make(&["way/x", "way", "a", "a/b", "cache"]);
        assert!(names(&outside).is_empty());
        assert!(volume.join("a").is_symlink());
    }

    #[test]
    fn paths_that_lead_elsewhere_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        for path in ["", "/a", "../a", "a/../b", "..data", "..x", "a\0b"] {
            assert!(write(dir.path(), &payload(&[(path, "1")]), None).is_err(), "{path:?}");
        }
        for path in ["a", ".hidden", "a/b", "...a".trim_start_matches('.'), "a..b"] {
            assert!(write(dir.path(), &payload(&[(path, "1")]), None).is_ok(), "{path:?}");
        }
    }

    #[test]
    fn two_thousand_levels_are_made_found_again_and_removed_and_five_thousand_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let deep = |levels: usize| format!("{}x", "a/".repeat(levels));
        assert_eq!(write(dir.path(), &payload(&[(&deep(2000), "1")]), None), Ok(true));
        assert_eq!(write(dir.path(), &payload(&[(&deep(2000), "1")]), None), Ok(false));
        assert_eq!(write(dir.path(), &payload(&[("a/x", "2")]), None), Ok(true));
        assert_eq!(
            (fs::read_to_string(dir.path().join("a/x")).unwrap().as_str(), sets(dir.path())),
            ("2", 1)
        );
        let refused = write(dir.path(), &payload(&[(&deep(5000), "1")]), None).unwrap_err();
        assert!(
            refused.contains("of 10001 bytes is longer than the 4096 bytes that Linux allows"),
            "{refused}"
        );
        let points = dir.path().join("points");
        fs::create_dir(&points).unwrap();
        let make = |levels: usize| {
            make_mount_points(&points, &File::open(&points).unwrap().into(), &[deep(levels)].into(), None)
        };
        let refused = make(5000).unwrap_err().to_string();
        assert!(
            refused.contains("of 10001 bytes is longer than the 4096 bytes that Linux allows"),
            "{refused}"
        );
        assert!(names(&points).is_empty());
        make(1900).unwrap(); // in addition to the test's own folder
        assert!(points.join(deep(1900)).is_dir());
    }
}
