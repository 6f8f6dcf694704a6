//! Reads the same cgroups repeatedly, by open directories.
//!
//! Must never write. An open directory identifies its cgroup permanently: after the cgroup's removal reads
//! fail, and a new cgroup of the same name is not mistaken for it. The same holds for an open file; and
//! opening a file takes the kernel three to ten times as long as reading it again.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};

use super::{Cgroups, Version};

/// Maximum size of a file: `memory.stat` has some 2 KiB, `io.stat` some 100 bytes per device.
const MAX_FILE: usize = 256 << 10;

/// Hierarchy of a file. On version 2 all are the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Controller {
    /// Shares and quota.
    Cpu,
    /// CPU time (only version 1).
    Cpuacct,
    /// Memory.
    Memory,
    /// Block devices: `io` on version 2.
    Blkio,
    /// Processes and threads.
    Pids,
    /// cgroup2 itself: PSI, also next to version 1.
    Unified,
}

const CONTROLLERS: [(Controller, &str); 5] = [
    (Controller::Cpu, "cpu"),
    (Controller::Cpuacct, "cpuacct"),
    (Controller::Memory, "memory"),
    (Controller::Blkio, "blkio"),
    (Controller::Pids, "pids"),
];

/// The open directories of a cgroup.
#[derive(Debug)]
pub struct CgroupDirs {
    version: Version,
    /// Directories by [`Controller`]; a shared mount has an entry for each of its controllers.
    v1: Vec<(Controller, OwnedFd)>,
    unified: Option<OwnedFd>,
    /// Files kept open; `None` if files are closed after each reading.
    kept: Option<Vec<(Controller, &'static str, OwnedFd)>>,
}

impl CgroupDirs {
    /// Opens the directories of the cgroup `path`.
    ///
    /// # Errors
    /// The cgroup does not exist (any more) in any hierarchy, or the path is invalid.
    pub fn open(cgroups: &Cgroups, path: &str) -> io::Result<Self> {
        let relative = cgroups.paths.relative(path).map_err(|error| io::Error::other(error.to_string()))?;
        let mut dirs = Self { version: cgroups.paths.version(), v1: Vec::new(), unified: None, kept: None };
        for hierarchy in cgroups.paths.hierarchies() {
            let dir = hierarchy.mount.join(&relative);
            if hierarchy.is_v2 {
                dirs.unified = open_dir(&dir).ok();
                continue;
            }
            for (controller, name) in CONTROLLERS {
                if hierarchy.controllers.contains(name) {
                    // Not every cgroup is in every hierarchy; reading a missing file reports that.
                    dirs.v1.extend(open_dir(&dir).ok().map(|fd| (controller, fd)));
                }
            }
        }
        if dirs.v1.is_empty() && dirs.unified.is_none() {
            return Err(io::Error::new(io::ErrorKind::NotFound, format!("cgroup {path} does not exist")));
        }
        Ok(dirs)
    }

    /// Returns the kernel half's id of this cgroup: the inode of its cgroup2 directory.
    #[must_use]
    pub fn id(&self) -> Option<u64> {
        Some(rustix::fs::fstat(self.unified.as_ref()?).ok()?.st_ino)
    }

    /// Returns true if the controllers are version 1's.
    #[must_use]
    pub fn is_v1(&self) -> bool {
        self.version != Version::V2
    }

    /// Sets whether files opened by [`Self::reread`] stay open or are closed after each reading. The kernel
    /// needs some 5 kB for each open file.
    pub fn keep_open(&mut self, keep: bool) {
        if keep {
            self.kept.get_or_insert_default();
        } else {
            self.kept = None;
        }
    }

    /// Reads `file` into `buffer` and returns its text.
    ///
    /// # Errors
    /// The file or hierarchy is missing, or the cgroup was removed.
    pub fn read<'a>(
        &self,
        controller: Controller,
        file: &str,
        buffer: &'a mut Vec<u8>,
    ) -> io::Result<&'a str> {
        read_all(&self.open_file(controller, file)?, buffer)
    }

    /// Reads a file that will be read again soon, as [`Self::read`] does.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn reread<'a>(
        &mut self,
        controller: Controller,
        file: &'static str,
        buffer: &'a mut Vec<u8>,
    ) -> io::Result<&'a str> {
        let kept = self.kept.iter().flatten().find(|(of, name, _)| (*of, *name) == (controller, file));
        if let Some((_, _, fd)) = kept {
            return read_all(fd, buffer);
        }
        let fd = self.open_file(controller, file)?;
        let text = read_all(&fd, buffer)?;
        if let Some(kept) = &mut self.kept {
            kept.push((controller, file, fd));
        }
        Ok(text)
    }

    fn open_file(&self, controller: Controller, file: &str) -> io::Result<OwnedFd> {
        let dir = self.dir(controller).ok_or(io::ErrorKind::NotFound)?;
        Ok(rustix::fs::openat(dir.as_fd(), file, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }

    fn dir(&self, controller: Controller) -> Option<&OwnedFd> {
        if controller == Controller::Unified || self.version == Version::V2 {
            return self.unified.as_ref();
        }
        self.v1.iter().find(|(one, _)| *one == controller).map(|(_, fd)| fd)
    }
}

fn open_dir(path: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

/// Reads the whole file from its beginning, where the kernel generates its text again. With a large enough
/// buffer this takes a single call.
fn read_all<'a>(fd: &OwnedFd, buffer: &'a mut Vec<u8>) -> io::Result<&'a str> {
    // Only new bytes of the buffer are zeroed: the rest of an earlier file may stay.
    buffer.resize(buffer.capacity().max(4096), 0);
    let mut length = 0;
    loop {
        let read = rustix::io::pread(fd, &mut buffer[length..], length as u64)?;
        length += read;
        // A short read is the end: the kernel generated the whole text.
        if read == 0 || length < buffer.len() {
            return std::str::from_utf8(&buffer[..length])
                .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error));
        }
        if length >= MAX_FILE {
            return Err(io::Error::other("a cgroup's file is unexpectedly large"));
        }
        buffer.resize(buffer.len() * 2, 0);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::{Hierarchy, Layout};
    use super::*;
    use std::fs;

    /// Hierarchies as plain folders.
    pub(crate) fn cgroups(dir: &Path, version: Version) -> Cgroups {
        let v1 = |name: &str| Hierarchy {
            mount: dir.join(name),
            is_v2: false,
            controllers: [name.to_owned()].into(),
        };
        let unified = Hierarchy { mount: dir.join("unified"), is_v2: true, controllers: [].into() };
        fs::create_dir_all(&unified.mount).unwrap();
        fs::write(unified.mount.join("cgroup.controllers"), "cpu memory").unwrap();
        let hierarchies = match version {
            Version::V2 => vec![unified],
            _ => vec![v1("cpu"), v1("memory"), unified],
        };
        Cgroups::over_folders(Layout { version, hierarchies }, "/").unwrap()
    }

    #[test]
    fn files_are_read_from_the_hierarchy_they_are_in() {
        let dir = tempfile::tempdir().unwrap();
        let cgroups = cgroups(dir.path(), Version::Hybrid);
        for (place, file, text) in [
            ("memory", "memory.stat", "cache 1\n".repeat(2000)),
            ("unified", "cpu.pressure", "some\n".to_owned()),
        ] {
            fs::create_dir_all(dir.path().join(place).join("p/c")).unwrap();
            fs::write(dir.path().join(place).join("p/c").join(file), text).unwrap();
        }
        let dirs = CgroupDirs::open(&cgroups, "/p/c").unwrap();
        let mut buffer = Vec::new();
        assert_eq!(dirs.read(Controller::Memory, "memory.stat", &mut buffer).unwrap().len(), 16_000);
        assert_eq!(dirs.read(Controller::Unified, "cpu.pressure", &mut buffer).unwrap(), "some\n");
        assert!(dirs.read(Controller::Cpu, "cpu.stat", &mut buffer).is_err());
        assert!(dirs.id().is_some() && dirs.is_v1());
        assert!(CgroupDirs::open(&cgroups, "/p/none").is_err());
    }

    #[test]
    fn a_file_that_stays_open_returns_its_current_content() {
        let dir = tempfile::tempdir().unwrap();
        let cgroups = cgroups(dir.path(), Version::V2);
        let file = dir.path().join("unified/c/cpu.stat");
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        let mut dirs = CgroupDirs::open(&cgroups, "/c").unwrap();
        let mut buffer = Vec::new();
        let mut read = |dirs: &mut CgroupDirs| {
            dirs.reread(Controller::Cpu, "cpu.stat", &mut buffer).map(str::to_owned).ok()
        };
        dirs.keep_open(true);
        // A missing file is looked up again.
        assert_eq!(read(&mut dirs), None);
        for text in ["usage_usec 10\n", "usage_usec 7\n"] {
            fs::write(&file, text).unwrap();
            assert_eq!(read(&mut dirs).as_deref(), Some(text));
        }
        // The open file stays the same: a new file of its name belongs to another cgroup.
        fs::remove_file(&file).unwrap();
        fs::write(&file, "usage_usec 1\n").unwrap();
        assert_eq!(read(&mut dirs).as_deref(), Some("usage_usec 7\n"));
        dirs.keep_open(false);
        assert_eq!(read(&mut dirs).as_deref(), Some("usage_usec 1\n"));
    }
}
