//! Usage of the node's files that a pod's containers may write: few files, so that the count is immediate.
//! Works on descriptors and follows no link.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, open, openat, openat2, statat},
    io::Errno,
};

use beelet_model::disk::{Taken, WritableFile};

/// Maximum number of names examined in a folder: the agent keeps two there.
const MOST: usize = 256;

/// Returns the space used by those files in the pod's `folder` for containers of these names. Blocks for a
/// moment.
pub(super) fn measure(folder: &Path, containers: &[String]) -> BTreeMap<WritableFile, Taken> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let Ok(folder) = open(folder, flags, Mode::empty()) else { return BTreeMap::new() };
    let of_kind = |kind: WritableFile| {
        let places: BTreeSet<PathBuf> = containers.iter().map(|name| kind.place(name)).collect();
        places.iter().filter_map(|place| at(&folder, place).ok()).sum()
    };
    let all = WritableFile::ALL.into_iter().map(|kind| (kind, of_kind(kind)));
    all.filter(|(_, taken)| *taken != Taken::default()).collect()
}

/// Returns the space used by a place: a file, or a folder of files.
fn at(folder: &OwnedFd, place: &Path) -> Result<Taken, Errno> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let found = openat2(folder, place, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), resolve)?;
    let stat = fstat(&found)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return Ok(of_file(&stat));
    }
    let names = openat(&found, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let entries = Dir::read_from(&names)?.take(MOST).flatten();
    let stats = entries.map(|entry| statat(names.as_fd(), entry.file_name(), AtFlags::SYMLINK_NOFOLLOW));
    Ok(stats.flatten().map(|stat| of_file(&stat)).sum())
}

/// Returns the space of a regular file; other kinds are not files that the agent mounted into a container.
fn of_file(stat: &Stat) -> Taken {
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Taken::default();
    }
    let blocks = u64::try_from(stat.st_blocks).unwrap_or(0);
    Taken { bytes: blocks.saturating_mul(512), inodes: 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regular_files_of_the_pods_containers_are_counted_and_links_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let pod = dir.path().join("pod");
        let words = |name: &str| pod.join(WritableFile::TerminationMessage.place(name));
        for name in ["main", "other", "gone"] {
            std::fs::create_dir_all(words(name)).unwrap();
            std::fs::write(words(name).join("1"), vec![1; 50_000]).unwrap();
        }
        std::fs::write(words("main").join("0"), "old").unwrap();
        std::os::unix::fs::symlink("/etc/passwd", words("main").join("link")).unwrap();
        let hosts = pod.join(WritableFile::Hosts.place("main"));
        std::fs::write(&hosts, vec![1; 200_000]).unwrap();
        let names = ["main", "other", "main", "none"].map(str::to_owned);
        let found = measure(&pod, &names);
        let Taken { bytes, inodes } = found[&WritableFile::TerminationMessage];
        assert_eq!(inodes, 3, "two of main, one of other");
        assert!((100_000..150_000).contains(&bytes), "{bytes}");
        let Taken { bytes, inodes } = found[&WritableFile::Hosts];
        assert!((200_000..250_000).contains(&bytes) && inodes == 1, "{bytes} in {inodes}");
        // A container replaced the files.
        std::fs::rename(&hosts, dir.path().join("big")).unwrap();
        std::os::unix::fs::symlink(dir.path().join("big"), &hosts).unwrap();
        std::fs::rename(words("other"), dir.path().join("elsewhere")).unwrap();
        std::os::unix::fs::symlink(dir.path().join("elsewhere"), words("other")).unwrap();
        let found = measure(&pod, &names);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[&WritableFile::TerminationMessage].inodes, 2);
        assert_eq!(measure(&dir.path().join("none"), &names), BTreeMap::new());
    }
}
