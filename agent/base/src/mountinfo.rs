//! The table of mounts, `/proc/self/mountinfo` (proc_pid_mountinfo(5)). It is bytes: of all that is in a name
//! the kernel escapes space, tab, newline and backslash alone, and anybody may name what is bound or mounted
//! somewhere.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::propagation::Groups;

/// Where the kernel shows it.
pub const PATH: &str = "/proc/self/mountinfo";

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount<'a> {
    /// What of the file system is mounted, as it stands in the table.
    pub root: &'a [u8],
    /// Where it is mounted.
    pub point: PathBuf,
    /// The file system's type.
    pub fs_type: &'a [u8],
    /// The numbers of the device that the file system is on, major and minor: made up where it is on none.
    pub device: Option<(u32, u32)>,
    /// The peer groups that it passes mounts on to, and gets them from.
    pub groups: Groups,
    /// What was mounted: a device's path, a server's name or any other word.
    pub source: &'a [u8],
    /// The options of the file system.
    pub super_options: &'a [u8],
}

/// The table as it is now.
pub fn read() -> std::io::Result<Vec<u8>> {
    std::fs::read(PATH)
}

/// Returns true if something is mounted at `path`. A link in its place is not followed, and what is mounted
/// there is not looked at: its server may be away.
///
/// The table of mounts is not read, which may have a hundred thousand lines: this is asked for each mount of
/// each container. The kernel says it as it refuses to go from the folder above onto the mount (openat2(2),
/// `RESOLVE_NO_XDEV`), before it asks the file system that is mounted for anything.
pub fn is_mount_point(path: &Path) -> std::io::Result<bool> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Ok(path == Path::new("/"));
    };
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    let parent = match rustix::fs::open(parent, flags | OFlags::DIRECTORY, Mode::empty()) {
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(false),
        found => found?,
    };
    let flags = flags | OFlags::NOFOLLOW;
    match rustix::fs::openat2(parent, name, flags, Mode::empty(), ResolveFlags::NO_XDEV) {
        Err(Errno::XDEV) => Ok(true),
        Ok(_) | Err(Errno::NOENT) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// The mounts of a table, in the order of mounting.
pub fn mounts(table: &[u8]) -> impl Iterator<Item = Mount<'_>> {
    table.split(|byte| *byte == b'\n').filter_map(parse)
}

/// `ID PARENT DEV ROOT POINT OPTIONS [TAG…] - TYPE SOURCE SUPER_OPTIONS`
fn parse(line: &[u8]) -> Option<Mount<'_>> {
    let mut fields = line.split(|byte| *byte == b' ');
    let (device, root, point) = (fields.nth(2)?, fields.next()?, fields.next()?);
    let mut groups = Groups::default();
    loop {
        match fields.next()? {
            b"-" => break,
            tag => note_group(tag, &mut groups),
        }
    }
    let fs_type = fields.next()?;
    let source = fields.next().unwrap_or_default();
    let super_options = fields.next().unwrap_or_default();
    let device = std::str::from_utf8(device).ok().and_then(device_numbers);
    Some(Mount { root, point: unescape(point), fs_type, device, groups, source, super_options })
}

/// Takes in one of the optional fields; `propagate_from` and `unbindable` say nothing that is needed.
fn note_group(tag: &[u8], groups: &mut Groups) {
    let number = |tag: &[u8], name: &[u8]| std::str::from_utf8(tag.strip_prefix(name)?).ok()?.parse().ok();
    groups.shared = groups.shared.or_else(|| number(tag, b"shared:"));
    groups.master = groups.master.or_else(|| number(tag, b"master:"));
}

/// The mount in which `path` is, which must be absolute and without links: the one with the longest mount
/// point, and of those the one on top.
#[must_use]
pub fn mount_of<'a>(table: &'a [u8], path: &Path) -> Option<Mount<'a>> {
    mounts(table)
        .filter(|mount| path.starts_with(&mount.point))
        .max_by_key(|mount| mount.point.components().count())
}

/// A device's major and minor number as the kernel writes them: `8:16`.
#[must_use]
pub fn device_numbers(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Undoes the kernel's `\040` for a space and its like.
fn unescape(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, tail)) = rest.split_first() {
        let octal = tail
            .get(..3)
            .filter(|digits| first == b'\\' && digits.iter().all(u8::is_ascii_digit))
            .and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        bytes.push(octal.unwrap_or(first));
        rest = if octal.is_some() { &tail[3..] } else { tail };
    }
    OsString::from_vec(bytes).into()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::ffi::OsStrExt;

    use rustix::mount::{MountFlags, UnmountFlags};

    use super::*;

    #[test]
    fn no_mount_is_looked_for_in_the_table_of_all_mounts() {
        let own_mounts = ["unshare", "--mount", "--propagation", "private"];
        let name = "no_mount_is_looked_for_in_the_table_of_all_mounts";
        if !rustix::process::geteuid().is_root()
            || !beelet_testing::again::in_child(module_path!(), name, &own_mounts)
        {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for folder in ["mounted", "bound", "plain", "way"] {
            fs::create_dir(at(folder)).unwrap();
        }
        for file in ["file", "bound-file"] {
            fs::write(at(file), "").unwrap();
        }
        std::os::unix::fs::symlink("mounted", at("link")).unwrap();
        std::os::unix::fs::symlink(dir.path(), at("way/link")).unwrap();
        let mount = |point: &Path| rustix::mount::mount("none", point, "tmpfs", MountFlags::empty(), None);
        mount(&at("mounted")).unwrap();
        fs::create_dir(at("mounted/inner")).unwrap();
        // On the same file system.
        rustix::mount::mount_bind(at("plain"), at("bound")).unwrap();
        rustix::mount::mount_bind(at("file"), at("bound-file")).unwrap();
        // Without it no process can read the table.
        mount(Path::new("/proc")).unwrap();
        assert!(read().is_err());
        let check = |path: &str, expected: bool| {
            assert_eq!(is_mount_point(&at(path)).unwrap(), expected, "{path}");
        };
        for mounted in ["mounted", "bound", "bound-file", "way/link/mounted", "plain/../mounted"] {
            check(mounted, true);
        }
        for other in ["plain", "file", "link", "mounted/inner", "missing", "missing/x", "file/x", ""] {
            check(other, false);
        }
        assert!(is_mount_point(Path::new("/")).unwrap() && is_mount_point(Path::new("/proc")).unwrap());
        rustix::mount::unmount("/proc", UnmountFlags::DETACH).unwrap();
        for point in ["mounted", "bound", "bound-file"] {
            rustix::mount::unmount(at(point), UnmountFlags::DETACH).unwrap();
        }
    }

    #[test]
    fn a_mount_is_read_whatever_its_optional_fields() {
        let table = b"29 23 0:26 /a /b rw,relatime shared:1 master:2 - ext4 /dev/x rw,y\n30 23 0:27 / /c rw - tmpfs t\n";
        let all: Vec<_> = mounts(table).collect();
        assert_eq!(all[0].point, PathBuf::from("/b"));
        assert_eq!(
            (all[0].root, all[0].fs_type, all[0].super_options),
            (&b"/a"[..], &b"ext4"[..], &b"rw,y"[..])
        );
        assert_eq!((all.len(), all[1].fs_type, all[1].super_options), (2, &b"tmpfs"[..], &b""[..]));
    }

    #[test]
    fn the_groups_of_a_mount_are_read_from_its_tags() {
        let check = |tags: &str, shared: Option<u64>, master: Option<u64>| {
            let table = format!("29 23 0:26 / /b rw {tags}- ext4 shared:8 rw\n");
            let mount = mounts(table.as_bytes()).next().unwrap();
            assert_eq!(mount.groups, Groups { shared, master }, "{tags}");
        };
        check("", None, None);
        check("shared:1 ", Some(1), None);
        check("master:2 propagate_from:3 ", None, Some(2));
        check("shared:1 master:2 new:4 ", Some(1), Some(2));
        check("unbindable ", None, None);
        check("shared:x master: ", None, None);
    }

    #[test]
    fn a_path_is_in_the_mount_on_top_with_the_longest_point() {
        let table = b"1 0 0:1 / / rw shared:1 - ext4 a rw\n2 1 0:2 / /var rw - ext4 b rw\n3 2 0:3 / /var rw - tmpfs c rw\n\
                      4 1 0:4 / /variety rw - tmpfs d rw\n";
        let check = |path: &str, source: &str| {
            let mount = mount_of(table, Path::new(path)).unwrap();
            assert_eq!(mount.source, source.as_bytes(), "{path}");
        };
        check("/var/lib/pods", "c");
        check("/etc", "a");
        check("/variety", "d");
        assert_eq!(mount_of(b"", Path::new("/")), None);
    }

    #[test]
    fn names_are_bytes_and_every_escape_is_undone() {
        let point = |name: &[u8]| {
            let line = [b"1 2 0:3 /\xff ", name, b" rw - ext4 s rw"].concat();
            let mount = mounts(&line).next().unwrap();
            mount.point.as_os_str().as_bytes().to_vec()
        };
        assert_eq!(point(b"/a\\040b\\011c\\012d\\134e"), b"/a b\tc\nd\\e");
        assert_eq!(point(b"/a\xff\xfeb\\377"), b"/a\xff\xfeb\xff");
        // A backslash that was escaped begins no other escape.
        assert_eq!(point(b"/tmp/a\\040b\\134040\xff"), b"/tmp/a b\\040\xff");
        assert_eq!(point(b"/a\\9\\04"), b"/a\\9\\04");
        assert_eq!(point(b"/\\400"), b"/\\400");
        assert_eq!(point(b"/\\+12"), b"/\\+12");
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_make_it_panic(table: Vec<u8>, line in "([0-9:/ a-z-]|\\\\| - |\n){0,200}") {
            let _ = mounts(&table).count() + mounts(line.as_bytes()).count();
        }
    }
}
