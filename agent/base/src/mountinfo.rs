//! The table of mounts, `/proc/self/mountinfo` (proc_pid_mountinfo(5)). Its content is bytes, not text: in
//! names the kernel escapes only space, tab, newline and backslash, and any user may choose the name of a
//! bound or mounted file.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::propagation::Groups;

/// Path of the table.
pub const PATH: &str = "/proc/self/mountinfo";

/// A mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount<'a> {
    /// The mounted part of the file system, as written in the table.
    pub root: &'a [u8],
    /// The mount point.
    pub point: PathBuf,
    /// The file system's type.
    pub fs_type: &'a [u8],
    /// Major and minor number of the file system's device; made up by the kernel if it has no device.
    pub device: Option<(u32, u32)>,
    /// Peer groups for sending and receiving mounts.
    pub groups: Groups,
    /// Mount source: a device's path, a server's name or any other word.
    pub source: &'a [u8],
    /// Options of the file system.
    pub super_options: &'a [u8],
}

/// Reads the current table.
pub fn read() -> std::io::Result<Vec<u8>> {
    std::fs::read(PATH)
}

/// Returns true if `path` is a mount point. Follows no link in its place, and does not access the mounted
/// file system, whose server may be unreachable.
///
/// The function does not read the table of mounts, which may have a hundred thousand lines: it is called for
/// each mount of each container. Instead the kernel refuses to cross from the folder above onto the mount
/// (openat2(2), `RESOLVE_NO_XDEV`), before it accesses the mounted file system.
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

/// Returns the mounts of a table, in the order of mounting.
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
            tag => parse_group(tag, &mut groups),
        }
    }
    let fs_type = fields.next()?;
    let source = fields.next().unwrap_or_default();
    let super_options = fields.next().unwrap_or_default();
    let device = std::str::from_utf8(device).ok().and_then(device_numbers);
    Some(Mount { root, point: unescape(point), fs_type, device, groups, source, super_options })
}

/// Parses an optional field; `propagate_from` and `unbindable` are ignored.
fn parse_group(tag: &[u8], groups: &mut Groups) {
    let number = |tag: &[u8], name: &[u8]| std::str::from_utf8(tag.strip_prefix(name)?).ok()?.parse().ok();
    groups.shared = groups.shared.or_else(|| number(tag, b"shared:"));
    groups.master = groups.master.or_else(|| number(tag, b"master:"));
}

/// Returns the mount that contains `path`, which must be absolute and without links: the mount with the
/// longest mount point, and of those the one on top.
#[must_use]
pub fn mount_of<'a>(table: &'a [u8], path: &Path) -> Option<Mount<'a>> {
    mounts(table)
        .filter(|mount| path.starts_with(&mount.point))
        .max_by_key(|mount| mount.point.components().count())
}

/// Parses a device's major and minor number in the kernel's form, `8:16`.
#[must_use]
pub fn device_numbers(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Decodes the kernel's octal escapes, such as `\040` for a space.
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
    fn a_mount_point_is_found_without_the_table_of_all_mounts() {
        let own_mounts = ["unshare", "--mount", "--propagation", "private"];
        let name = "a_mount_point_is_found_without_the_table_of_all_mounts";
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
        // Without /proc no process can read the table.
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
    fn a_mount_is_parsed_with_any_optional_fields() {
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
        // An escaped backslash does not begin another escape.
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
