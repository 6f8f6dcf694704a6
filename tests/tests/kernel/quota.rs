//! Disk usage by project, on file systems of the test's own: which files join a volume's project, and the
//! kernel's count of them. Marks need a file system with projects; counts also need a kernel with project
//! quotas.
#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use std::fs::File;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use beelet_bpf::quota::{adopt, measure, project_of};
use beelet_tests::guards::Mount;
use beelet_tests::require;
use beelet_tests::requires::{self, Missing};

/// Commands and options for file systems with projects, and their minimum sizes (XFS: 300 MiB; the files are
/// sparse).
const EXT4: (&[&str], u64) =
    (&["mkfs.ext4", "-q", "-F", "-O", "quota,project", "-E", "quotatype=prjquota"], 64 << 20);
const XFS: (&[&str], u64) = (&["mkfs.xfs", "-q", "-f"], 320 << 20);

/// A disk of its own with a volume on it.
struct Disk {
    volume: PathBuf,
    _mount: Mount,
    _dir: tempfile::TempDir,
}

impl Disk {
    /// Mounts the first file system that this kernel accepts with these options.
    fn new(options: &str) -> Result<Disk, Missing> {
        let mut refused = Vec::new();
        for (make, bytes) in [EXT4, XFS] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("disk");
            match Mount::in_file(&path, &dir.path().join("file"), bytes, make, options) {
                Ok(mount) => {
                    let volume = path.join("volume");
                    std::fs::create_dir(&volume).unwrap();
                    return Ok(Disk { volume, _mount: mount, _dir: dir });
                }
                // The folder's own name is left out, so that lists of reasons can merge equal ones.
                Err(error) => {
                    refused.push(format!("{error:#}").replace(&*dir.path().to_string_lossy(), "DIR"));
                }
            }
        }
        Err(requires::missing(
            format!("no file system here has projects: {}", refused.join("; ")),
            "use a kernel with CONFIG_QFMT_V2 or CONFIG_XFS_QUOTA; on Debian, install e2fsprogs and xfsprogs",
        ))
    }

    /// Creates a disk on which files can have projects.
    fn with_projects() -> Result<Disk, Missing> {
        Disk::new("loop")
    }

    /// Creates a disk on which the kernel counts usage by project.
    fn that_counts() -> Result<Disk, Missing> {
        let disk = Disk::new("loop,prjquota")?;
        if measure(&disk.volume).is_none() {
            return Err(requires::missing(
                "the kernel does not count usage by project",
                "use a kernel with project quotas",
            ));
        }
        Ok(disk)
    }
}

/// Returns the disk, or prints a skip and ends the test.
macro_rules! disk {
    ($made:expr) => {
        match $made {
            Ok(disk) => disk,
            Err(missing) => return requires::skip(&missing),
        }
    };
}

fn write(path: &Path, bytes: usize) {
    std::fs::write(path, vec![b'x'; bytes]).unwrap();
    File::open(path).unwrap().sync_all().unwrap();
}

/// Creates the contents of a volume in use: folders, files, a link that leads out of the volume, a pipe.
fn fill(volume: &Path) -> Vec<PathBuf> {
    let outside = volume.parent().unwrap().join("outside");
    write(&outside, 10);
    std::fs::create_dir_all(volume.join("a/b")).unwrap();
    write(&volume.join("top"), 1 << 20);
    write(&volume.join("a/middle"), 1 << 20);
    write(&volume.join("a/b/deep"), 1 << 20);
    symlink(&outside, volume.join("a/link")).unwrap();
    let pipe = volume.join("a/pipe");
    rustix::fs::mknodat(rustix::fs::CWD, pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    ["", "a", "a/b", "top", "a/middle", "a/b/deep"].iter().map(|name| volume.join(name)).collect()
}

#[test]
fn a_volume_and_later_files_are_in_its_project() {
    require!(root);
    let disk = disk!(Disk::with_projects());
    let volume = &disk.volume;
    let filled = fill(volume);
    let project = adopt(volume).unwrap();
    write(&volume.join("a/b/later"), 10);
    std::fs::create_dir(volume.join("folder")).unwrap();
    write(&volume.join("folder/in"), 10);
    let later = ["a/b/later", "folder", "folder/in"].map(|name| volume.join(name));
    for path in filled.iter().chain(&later) {
        assert_eq!(project_of(path).unwrap(), project, "{}", path.display());
    }
    assert_eq!(
        project_of(&volume.parent().unwrap().join("outside")).unwrap(),
        0,
        "a link was followed out of the volume"
    );
    assert_eq!(adopt(volume).unwrap(), project);
}

#[test]
fn a_volume_that_can_not_be_marked_whole_is_not_marked() {
    require!(root);
    let disk = disk!(Disk::with_projects());
    let volume = &disk.volume;
    let filled = fill(volume);
    // A second file system is mounted inside the volume.
    let other = Mount::tmpfs(&volume.join("a/b/other"), 1 << 20).unwrap();
    adopt(volume).unwrap_err();
    assert_eq!(project_of(volume).unwrap(), 0, "a partly marked volume has a project");
    // The obstacle is removed and a file is added: the next attempt marks the whole volume.
    drop(other);
    write(&volume.join("a/b/other/new"), 10);
    let project = adopt(volume).unwrap();
    for path in filled.iter().chain([&volume.join("a/b/other/new")]) {
        assert_eq!(project_of(path).unwrap(), project, "{}", path.display());
    }
}

#[test]
fn a_project_that_a_volume_inherited_is_left_alone() {
    require!(root);
    let disk = disk!(Disk::with_projects());
    let admins = adopt(disk.volume.parent().unwrap()).unwrap();
    let inner = disk.volume.join("inner");
    std::fs::create_dir(&inner).unwrap();
    write(&inner.join("file"), 10);
    adopt(&inner).unwrap_err();
    assert_eq!(measure(&inner), None, "the count covers more than the inner volume");
    assert_eq!([project_of(&inner).unwrap(), project_of(&inner.join("file")).unwrap()], [admins; 2]);
}

#[test]
fn the_kernel_counts_the_volumes_files_as_they_change() {
    require!(root);
    let disk = disk!(Disk::that_counts());
    // The disk's own volume already has a project.
    let volume = disk.volume.with_file_name("other");
    std::fs::create_dir(&volume).unwrap();
    let filled = fill(&volume);
    let check = |mebibytes: u64, inodes: usize| {
        let counted = measure(&volume).unwrap();
        // Folders and block maps use some space as well.
        let bytes = mebibytes << 20..(mebibytes << 20) + (256 << 10);
        assert!(counted.inodes == inodes as u64 && bytes.contains(&counted.bytes), "{counted:?}");
    };
    check(3, filled.len());
    write(&volume.join("a/b/more"), 1 << 20);
    check(4, filled.len() + 1);
    std::fs::remove_file(volume.join("top")).unwrap();
    check(3, filled.len());
}
