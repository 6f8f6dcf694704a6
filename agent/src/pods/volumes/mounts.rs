//! The mounts that are ours: file systems in memory and bound parts of volumes, all below the pods' folder.

use std::ffi::CString;
use std::fs;
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags};

/// Mounts a file system in memory on a folder, unless one is there already; `size` in bytes.
pub(super) fn mount_tmpfs(path: &Path, size: Option<i64>, mode: u32) -> Result<(), String> {
    if below(path)?.iter().any(|point| point == path) {
        return Ok(());
    }
    let mut options = format!("mode=0{mode:o}");
    if let Some(size) = size {
        options = format!("{options},size={size}");
    }
    let data = CString::new(options).map_err(|e| e.to_string())?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    rustix::mount::mount("tmpfs", path, "tmpfs", flags, data.as_c_str())
        .map_err(|e| format!("cannot mount a tmpfs on {}: {e}", path.display()))
}

/// Unmounts everything at and below `folder`, the innermost first.
pub(super) fn unmount_below(folder: &Path) -> Result<(), String> {
    let mut points = below(folder)?;
    // The last mounted comes off first: of two on one folder it is on top.
    points.reverse();
    points.sort_by_key(|point| std::cmp::Reverse(point.components().count()));
    for point in points {
        unmount(&point)?;
    }
    Ok(())
}

/// Unmounts what is mounted at `point`, which must be a mount point itself.
pub(super) fn unmount(point: &Path) -> Result<(), String> {
    rustix::mount::unmount(point, UnmountFlags::NOFOLLOW)
        .map_err(|e| format!("cannot unmount {}: {e}; something still uses it", point.display()))
}

/// The mount points at and below `folder`, in the order of mounting.
pub(super) fn below(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let table = fs::read_to_string("/proc/self/mountinfo")
        .map_err(|e| format!("cannot read the mount table: {e}"))?;
    // The kernel shows real paths; our own may lead through links (/var/run).
    let folder = match folder.canonicalize() {
        Ok(real) => real,
        Err(_) => folder.to_owned(),
    };
    let points = table.lines().filter_map(|line| line.split(' ').nth(4)).map(|p| PathBuf::from(unescape(p)));
    Ok(points.filter(|p| p.starts_with(&folder)).collect())
}

/// Undoes the octal escapes of mountinfo (proc_pid_mountinfo(5)): space, tab, newline, backslash.
fn unescape(field: &str) -> String {
    let escapes = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    escapes.iter().fold(field.to_owned(), |text, (code, plain)| text.replace(code, plain))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_with_spaces_are_read_right() {
        assert_eq!(unescape("/a\\040b\\134c"), "/a b\\c");
    }
}
