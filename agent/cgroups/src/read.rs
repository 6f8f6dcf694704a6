//! Reads the same cgroups repeatedly: finds containers' cgroups, and reads their files by open directories.
//!
//! Must never write. An open directory identifies its cgroup permanently: after the cgroup's removal reads
//! fail, and a new cgroup of the same name is not mistaken for it. The same holds for an open file; and
//! opening a file takes the kernel three to ten times as long as reading it again.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use super::{Cgroups, Hierarchy, Version};

/// Maximum depth of a search; no runtime nests containers that deep.
const MAX_DEPTH: usize = 10;
/// Maximum number of folders that a search visits.
const MAX_FOLDERS: usize = 100_000;
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

impl Cgroups {
    /// Opens the directories of the cgroup `path`.
    ///
    /// # Errors
    /// The cgroup does not exist (any more) in any hierarchy, or the path is invalid.
    pub fn open(&self, path: &str) -> io::Result<CgroupDirs> {
        let relative = self.relative(path).map_err(|error| io::Error::other(error.to_string()))?;
        let mut dirs = CgroupDirs { version: self.version(), v1: Vec::new(), unified: None, kept: None };
        for hierarchy in self.hierarchies() {
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

    /// Returns the cgroups of these containers below the root, by the runtimes' ids. Runtimes name a
    /// container's cgroup by its id, bare (cgroupfs) or as in `cri-containerd-<id>.scope` (systemd).
    /// Containers without a cgroup are left out.
    #[must_use]
    pub fn find_containers(&self, ids: &HashSet<&str>) -> BTreeMap<String, String> {
        let mut search = Search { ids, found: BTreeMap::new(), folders: MAX_FOLDERS };
        if let (Some(hierarchy), Ok(root)) = (self.searched(), self.relative("/")) {
            search.descend(&hierarchy.mount.join(root), "", MAX_DEPTH);
        }
        search.found
    }

    /// Returns the cgroups with these ids of the kernel half, of pods and of the machine: their paths from
    /// the root of cgroup2. Removed cgroups and very deeply nested ones are left out.
    #[must_use]
    pub fn find_ids(&self, ids: &HashSet<u64>) -> BTreeMap<u64, String> {
        use std::os::unix::fs::{DirEntryExt as _, MetadataExt as _};
        let mut found = BTreeMap::new();
        let Some(hierarchy) = self.hierarchies().iter().find(|hierarchy| hierarchy.is_v2) else {
            return found;
        };
        if let Ok(root) = fs::metadata(&hierarchy.mount)
            && ids.contains(&root.ino())
        {
            found.insert(root.ino(), "/".to_owned());
        }
        let mut looked_at = 0;
        let mut ahead = VecDeque::from([(hierarchy.mount.clone(), String::new(), 0)]);
        while let Some((dir, path, depth)) = ahead.pop_front() {
            for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
                if looked_at == MAX_FOLDERS || found.len() == ids.len() {
                    return found;
                }
                if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    continue;
                }
                looked_at += 1;
                let below = format!("{path}/{}", entry.file_name().to_string_lossy());
                if ids.contains(&entry.ino()) {
                    found.insert(entry.ino(), below.clone());
                }
                if depth < MAX_DEPTH {
                    ahead.push_back((entry.path(), below, depth + 1));
                }
            }
        }
        found
    }

    /// Returns the absolute paths of the folders in which containers' cgroups appear: `kubepods`
    /// (`kubepods.slice`), its QoS classes and the pods' own. For a watch; containers' own folders are left
    /// out.
    #[must_use]
    pub fn pod_folders(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        if let (Some(hierarchy), Ok(root)) = (self.searched(), self.relative("/")) {
            let root = hierarchy.mount.join(root);
            for path in self.pods_roots() {
                collect_folders(&root.join(path.trim_start_matches('/')), 2, &mut found);
            }
        }
        found
    }

    /// Returns the cgroups above all pods, usually a single one: `/kubepods` or `/kubepods.slice`, or deeper
    /// if a kubelet has a cgroup root of its own.
    #[must_use]
    pub fn pods_roots(&self) -> Vec<String> {
        let mut found = Vec::new();
        if let (Some(hierarchy), Ok(root)) = (self.searched(), self.relative("/")) {
            find_pods_roots(&hierarchy.mount.join(root), "", 2, &mut found);
        }
        found
    }

    /// Returns a hierarchy that contains every container.
    fn searched(&self) -> Option<&Hierarchy> {
        self.hierarchies().iter().find(|h| h.is_v2 || h.controllers.contains("memory"))
    }
}

struct Search<'a> {
    ids: &'a HashSet<&'a str>,
    found: BTreeMap<String, String>,
    folders: usize,
}

impl Search<'_> {
    fn descend(&mut self, dir: &Path, path: &str, depth: usize) {
        let Ok(entries) = fs::read_dir(dir) else { return };
        for entry in entries.flatten() {
            if self.folders == 0 || self.found.len() == self.ids.len() {
                return;
            }
            // Most entries are files; the kernel reports their kind without another call.
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            self.folders -= 1;
            let name = entry.file_name();
            let Some(name) = name.to_str() else { continue };
            let below = format!("{path}/{name}");
            match container_of(name, self.ids) {
                Some(id) => {
                    self.found.insert(id.to_owned(), below);
                }
                // Another container's folder has some ninety files and nothing to find.
                None if depth > 0 && !is_container(name) => self.descend(&entry.path(), &below, depth - 1),
                None => {}
            }
        }
    }
}

/// Collects `dir` and its folders down to `depth`, without containers' own.
fn collect_folders(dir: &Path, depth: usize, found: &mut Vec<PathBuf>) {
    if found.len() >= MAX_FOLDERS {
        return;
    }
    found.push(dir.to_owned());
    // A pod's folder is not searched: its entries are containers.
    if depth > 0 {
        for child in folders(dir).iter().filter(|child| !is_container(child)) {
            collect_folders(&dir.join(child), depth - 1, found);
        }
    }
}

/// Returns true if a folder of this name belongs to any container: an id of 64 digits, or a scope.
fn is_container(name: &str) -> bool {
    name.ends_with(".scope") || name.len() >= 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn find_pods_roots(dir: &Path, path: &str, depth: usize, found: &mut Vec<String>) {
    for name in folders(dir) {
        let below = format!("{path}/{name}");
        // With a cgroup root the systemd driver prefixes the root's name.
        if name == "kubepods" || name == "kubepods.slice" || name.ends_with("-kubepods.slice") {
            found.push(below);
        } else if depth > 0 {
            find_pods_roots(&dir.join(name), &below, depth - 1, found);
        }
    }
}

fn folders(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let dirs = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    dirs.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// Returns the container of a cgroup by the cgroup's name.
fn container_of<'a>(name: &'a str, ids: &HashSet<&str>) -> Option<&'a str> {
    if ids.contains(name) {
        return Some(name);
    }
    let name = name.strip_suffix(".scope").unwrap_or(name);
    // CRI-O's monitor process has a scope of its own, also named after the container.
    if name.contains("conmon") {
        return None;
    }
    name.rsplit(['-', ':']).next().filter(|id| ids.contains(id))
}

/// Returns true if a cgroup of this name is the container `id`'s.
pub(super) fn is_of(name: &str, id: &str) -> bool {
    container_of(name, &HashSet::from([id])).is_some()
}

impl CgroupDirs {
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
mod tests {
    use super::super::Layout;
    use super::*;

    /// Hierarchies as plain folders.
    fn cgroups(dir: &Path, version: Version) -> Cgroups {
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
    fn containers_are_found_by_their_ids_under_any_runtimes_names() {
        let dir = tempfile::tempdir().unwrap();
        let cgroups = cgroups(dir.path(), Version::V2);
        let ids = ["a".repeat(64), "b".repeat(64), "c".repeat(64), "d".repeat(64)];
        let paths = [
            format!("/kubepods/burstable/pod1/{}", ids[0]),
            format!(
                "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod2.slice/cri-containerd-{}.scope",
                ids[1]
            ),
            format!("/system.slice:cri-containerd:{}", ids[2]),
        ];
        for path in &paths {
            fs::create_dir_all(dir.path().join(format!("unified{path}"))).unwrap();
        }
        fs::create_dir_all(dir.path().join(format!("unified/x/crio-conmon-{}.scope", ids[3]))).unwrap();
        let found = cgroups.find_containers(&ids.iter().map(String::as_str).collect());
        let expected: BTreeMap<String, String> = ids.iter().cloned().zip(paths).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn cgroups_of_the_machine_are_found_by_their_ids() {
        use std::os::unix::fs::MetadataExt as _;
        let dir = tempfile::tempdir().unwrap();
        let cgroups = cgroups(dir.path(), Version::Hybrid);
        let root = dir.path().join("unified");
        fs::create_dir_all(root.join("system.slice/containerd.service/inner")).unwrap();
        let id = |path: &str| fs::metadata(root.join(path)).unwrap().ino();
        let ids = HashSet::from([id(""), id("system.slice/containerd.service"), u64::MAX]);
        let found: Vec<(u64, String)> = cgroups.find_ids(&ids).into_iter().collect();
        let mut expected = [
            (id(""), "/".to_owned()),
            (id("system.slice/containerd.service"), "/system.slice/containerd.service".to_owned()),
        ];
        expected.sort();
        assert_eq!(found, expected);
    }

    #[test]
    fn the_folders_in_which_containers_appear_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let cgroups = cgroups(dir.path(), Version::V2);
        let id = "a".repeat(64);
        fs::create_dir_all(dir.path().join(format!("unified/my/kubepods/burstable/pod1/{id}"))).unwrap();
        fs::create_dir_all(dir.path().join("unified/system.slice/x.service")).unwrap();
        assert_eq!(cgroups.pods_roots(), ["/my/kubepods"]);
        let root = dir.path().join("unified/my/kubepods");
        let expected = [root.clone(), root.join("burstable"), root.join("burstable/pod1")];
        assert_eq!(cgroups.pod_folders(), expected);
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
        let dirs = cgroups.open("/p/c").unwrap();
        let mut buffer = Vec::new();
        assert_eq!(dirs.read(Controller::Memory, "memory.stat", &mut buffer).unwrap().len(), 16_000);
        assert_eq!(dirs.read(Controller::Unified, "cpu.pressure", &mut buffer).unwrap(), "some\n");
        assert!(dirs.read(Controller::Cpu, "cpu.stat", &mut buffer).is_err());
        assert!(dirs.id().is_some() && dirs.is_v1());
        assert!(cgroups.open("/p/none").is_err());
    }

    #[test]
    fn a_file_that_stays_open_returns_its_current_content() {
        let dir = tempfile::tempdir().unwrap();
        let cgroups = cgroups(dir.path(), Version::V2);
        let file = dir.path().join("unified/c/cpu.stat");
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        let mut dirs = cgroups.open("/c").unwrap();
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
