//! The only writer of cgroup files: version 1, hybrid and version 2, cgroupfs and systemd behind one set of
//! paths.
//!
//! A path here is written from the configured cgroup root, e.g. `/kubepods/burstable/pod<uid>`, and names the
//! same cgroup in every hierarchy: each version 1 controller's, version 1's named ones and cgroup2, because
//! the runtime joins them all. It is the same with both drivers: only here it is known that systemd's cgroups
//! are slices (`names`), made by systemd and not by us (`systemd`). Which values belong into which files is
//! not decided here (`beelet_policy::resources::cgroups` does), nor is anything outside the cgroup root
//! written, with one exception: on version 2 a controller must be passed down by every ancestor, so it is
//! enabled (never disabled) in their `cgroup.subtree_control` too.
//!
//! All calls are short and block. None retries: what cannot be done now is an error that says why, and the
//! caller's next sync tries again. Only [`Cgroups::destroy`] waits, two seconds at most, for processes that
//! it killed, and with the systemd driver all that write wait for systemd's answer, 20 seconds at most.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::watch;

mod error;
mod held;
mod kill;
pub mod layout;
mod memory;
pub mod metrics;
mod names;
pub mod order;
pub mod read;
pub mod stats;
mod systemd;
mod tree;
mod trial;
mod write;

pub use error::CgroupError;
pub use layout::{Hierarchy, Layout, Version};
pub use memory::MemoryUse;
pub use metrics::Metrics;
pub use stats::{CpuUse, Pressure, Stalled};
pub use trial::Trial;

use self::names::Names;
use self::order::Change;
use self::systemd::Slices;
use beelet_base::{kernel_file, mountinfo};
use beelet_units::cgroup_driver::CgroupDriver;

/// What one cgroup's files must hold, by file name.
pub type Files = BTreeMap<String, String>;

/// The machine's cgroups below one root.
#[derive(Debug, Clone)]
pub struct Cgroups {
    layout: Layout,
    names: Names,
    metrics: Metrics,
    store: Store,
    held: Arc<held::HeldFiles>,
}

/// What came of adjusting cgroups.
#[derive(Debug, Default)]
pub struct Adjusted {
    /// What was written, in that order.
    pub changed: Vec<Change>,
    /// What could not be. The next sync tries it again.
    pub failed: Vec<CgroupError>,
}

/// Which of the differences are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Adjust {
    /// Only what leaves more room. Before something below gets wider that is somebody else's to write.
    Wider,
    /// All of them.
    All,
}

/// What the hierarchies are made of.
#[derive(Debug, Clone)]
enum Store {
    /// The kernel makes and removes a cgroup's files.
    Kernel,
    /// Plain folders: somebody else has to.
    Folders,
    /// The same as the kernel's, but slices are systemd's to make and remove.
    Systemd(Arc<Slices>),
}

/// The table of mounts.
fn mounts() -> Result<Vec<u8>, CgroupError> {
    mountinfo::read().map_err(|error| CgroupError::io("read", Path::new(mountinfo::PATH), error))
}

impl Cgroups {
    /// Finds the machine's hierarchies. `cgroup_root` is `/` or a path.
    ///
    /// # Errors
    /// No hierarchy with the cpu and memory controllers is mounted, the path leads upwards, or systemd can't
    /// be the driver here: it isn't process 1, or the controllers are version 1's.
    pub fn discover(cgroup_root: &str, driver: CgroupDriver) -> Result<Self, CgroupError> {
        Self::with_layout(layout::parse(&mounts()?).ok_or(CgroupError::NotMounted)?, cgroup_root)?
            .with_driver(driver)
    }

    /// The same cgroups with another driver. What is held stays held, by its name.
    ///
    /// # Errors
    /// As for [`Cgroups::discover`].
    pub fn with_driver(self, driver: CgroupDriver) -> Result<Self, CgroupError> {
        if driver == self.driver() {
            return Ok(self);
        }
        let names = Names::new(driver, self.names.root());
        let store = match driver {
            CgroupDriver::Cgroupfs => Store::Kernel,
            CgroupDriver::Systemd if self.version() != Version::V2 => {
                return Err(CgroupError::SystemdNeedsV2 { version: self.version() });
            }
            CgroupDriver::Systemd => Store::Systemd(Arc::new(Slices::of_machine()?)),
        };
        Ok(Self { names, store, ..self })
    }

    /// Finds the hierarchies for reading alone. Unlike [`Cgroups::discover`] it takes any driver's tree as it
    /// is, and the machine's hierarchies from inside a container that has them mounted.
    ///
    /// # Errors
    /// As for [`Cgroups::discover`].
    pub fn for_reading(cgroup_root: &str) -> Result<Self, CgroupError> {
        Self::with_layout(layout::parse_for_reading(&mounts()?).ok_or(CgroupError::NotMounted)?, cgroup_root)
    }

    /// The same for a layout that is known already.
    ///
    /// # Errors
    /// As for [`Cgroups::discover`].
    pub(crate) fn with_layout(layout: Layout, cgroup_root: &str) -> Result<Self, CgroupError> {
        let root = match cgroup_root.trim_end_matches('/') {
            "" => String::new(),
            root => checked(root)?.to_owned(),
        };
        let (metrics, held) = (Metrics::default(), Arc::default());
        let names = Names::new(CgroupDriver::Cgroupfs, &root);
        let cgroups = Self { layout, names, metrics, store: Store::Kernel, held };
        for controller in ["cpu", "memory"] {
            if cgroups.hierarchy_of(controller).is_none() {
                return Err(CgroupError::NoController { controller });
            }
        }
        Ok(cgroups)
    }

    /// The same over plain folders, for tests of what runs above this module on machines that lend them no
    /// cgroupfs: a new cgroup gets copies of its parent's files, and they go with it.
    ///
    /// # Errors
    /// As for [`Cgroups::with_layout`].
    pub fn over_folders(layout: Layout, cgroup_root: &str) -> Result<Self, CgroupError> {
        Ok(Self { store: Store::Folders, ..Self::with_layout(layout, cgroup_root)? })
    }

    /// Makes sure that the root is there, where pods get their CPU and memory: a typing mistake must not give
    /// them another place. The kubelet wants it so, too (`cgroupManager.Validate`,
    /// pkg/kubelet/cm/container_manager_linux.go).
    ///
    /// # Errors
    /// It is not.
    pub fn require_root(&self) -> Result<(), CgroupError> {
        for hierarchy in ["cpu", "memory"].into_iter().filter_map(|name| self.hierarchy_of(name)) {
            let missing = hierarchy.mount.join(self.root_path());
            if !missing.is_dir() {
                return Err(CgroupError::NoRoot { root: self.names.root().to_owned(), missing });
            }
        }
        Ok(())
    }

    /// The driver that makes the cgroups.
    #[must_use]
    pub fn driver(&self) -> CgroupDriver {
        self.names.driver()
    }

    /// Changes whenever somebody else may have written all values anew: systemd, once it has read its units
    /// again. None with the cgroupfs driver.
    #[must_use]
    pub fn rewrites(&self) -> Option<watch::Receiver<u64>> {
        match &self.store {
            Store::Systemd(slices) => Some(slices.rewrites()),
            Store::Kernel | Store::Folders => None,
        }
    }

    /// The version of cgroups that this machine mounts.
    #[must_use]
    pub fn version(&self) -> Version {
        self.layout.version
    }

    /// All hierarchies in use.
    #[must_use]
    pub fn hierarchies(&self) -> &[Hierarchy] {
        &self.layout.hierarchies
    }

    /// Metrics of the time that writing takes.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// The names of all controllers that pods can be given values for.
    #[must_use]
    pub fn controllers(&self) -> BTreeSet<String> {
        self.hierarchies().iter().flat_map(Hierarchy::names).collect()
    }

    /// Makes the cgroup `path` and its ancestors in every hierarchy and its files hold `values`.
    ///
    /// # Errors
    /// As for [`Cgroups::ensure_all`].
    pub fn ensure(&self, path: &str, values: &Files) -> Result<(), CgroupError> {
        self.ensure_all(&[(path.to_owned(), values.clone())].into())
    }

    /// Makes all these cgroups (by path) in every hierarchy and their files hold the given values, in an
    /// order that never holds any of them tighter than both the old and the new values do. A file that holds
    /// its value already is not written; what is written is read back.
    ///
    /// # Errors
    /// A directory or file cannot be written, the kernel keeps another value, a memory limit would kill at
    /// once, or a value other than "no limit" is for a controller this machine doesn't have.
    pub fn ensure_all(&self, cgroups: &BTreeMap<String, Files>) -> Result<(), CgroupError> {
        self.metrics.time("update", || {
            // Parents come before their children in the order of paths.
            for (path, files) in cgroups {
                let relative = self.relative(path)?;
                for hierarchy in self.hierarchies() {
                    if let Store::Systemd(slices) = &self.store {
                        slices.start(&hierarchy.mount, &self.root_path(), &relative, files)?;
                    }
                    // With slices: what is left to do is to pass controllers down that systemd knows nothing
                    // of.
                    tree::make(hierarchy, self.version(), &relative, &self.store)?;
                }
            }
            let report = write::all(self, cgroups, Adjust::All);
            report.failed.into_iter().next().map_or(Ok(()), Err)
        })
    }

    /// Makes the files of those of these cgroups that exist hold the given values, in the same order. One
    /// that can't be written doesn't keep the others.
    #[must_use]
    pub fn adjust(&self, cgroups: &BTreeMap<String, Files>, how: Adjust) -> Adjusted {
        self.metrics.time("adjust", || write::all(self, cgroups, how))
    }

    /// The files of one cgroup that differ from `values`, and errors for those that can't be compared. Of a
    /// cgroup that is gone nothing.
    #[must_use]
    pub fn differences(&self, path: &str, values: &Files) -> (Vec<Change>, Vec<CgroupError>) {
        write::changed(self, path, values)
    }

    /// Takes back what a quota may be exceeded by, where the kernel knows such a thing.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn clear_burst(&self, path: &str) -> Result<(), CgroupError> {
        let file = if self.version() == Version::V2 { "cpu.max.burst" } else { "cpu.cfs_burst_us" };
        match self.read(path, file) {
            Some(burst) if burst != "0" => write::one(self, path, file, "0"),
            _ => Ok(()),
        }
    }

    /// Removes the cgroup `path` and what is below it from every hierarchy. It is no error if there is none.
    ///
    /// # Errors
    /// Processes are in it (nothing is removed then; the error names them), or the kernel still counts some
    /// that just ended.
    pub fn remove(&self, path: &str) -> Result<(), CgroupError> {
        self.metrics.time("destroy", || {
            let relative = self.relative(path)?;
            let pids = self.pids(path)?;
            if !pids.is_empty() {
                return Err(CgroupError::NotEmpty { cgroup: path.to_owned(), pids });
            }
            if let Store::Systemd(slices) = &self.store {
                slices.stop(&relative)?;
            }
            // One hierarchy's failure must not keep the others.
            let results: Vec<_> = self
                .hierarchies()
                .iter()
                .map(|h| tree::remove(&h.mount.join(&relative), &self.store))
                .collect();
            results.into_iter().collect()
        })
    }

    /// The processes in `path` and below it, in any hierarchy.
    ///
    /// # Errors
    /// The path is bad, or a list of processes cannot be read.
    pub fn pids(&self, path: &str) -> Result<Vec<u32>, CgroupError> {
        let relative = self.relative(path)?;
        let mut pids = BTreeSet::new();
        for hierarchy in self.hierarchies() {
            tree::pids(&hierarchy.mount.join(&relative), &mut pids)?;
        }
        Ok(pids.into_iter().collect())
    }

    /// Sends SIGKILL to every process that is left in a pod's cgroup `path`, and gives their ids. They may
    /// take a moment to be gone. For the end of a pod, when the runtime has nothing more to stop.
    ///
    /// # Errors
    /// The path is not a pod's, or a list of processes cannot be read.
    pub fn kill_remaining(&self, path: &str) -> Result<Vec<u32>, CgroupError> {
        kill::pod(self, path)
    }

    /// Ends a pod's cgroup `path`: sends SIGKILL to every process that is left in it, waits (two seconds at
    /// most) until they are gone, and removes it. Gives their ids.
    ///
    /// # Errors
    /// The path is not a pod's, or the processes don't end: they sit in the kernel.
    pub fn destroy(&self, path: &str) -> Result<Vec<u32>, CgroupError> {
        kill::destroy(self, path)
    }

    /// The cgroup that the runtime made for the container `id` of the pod with the cgroup `pod`: containerd
    /// names it by the id alone, CRI-O `crio-<id>`, and with systemd it is a scope. None if there is none
    /// (yet).
    #[must_use]
    pub fn container_path(&self, pod: &str, id: &str) -> Option<String> {
        let dir = self.hierarchy_of("cpu")?.mount.join(self.relative(pod).ok()?);
        if !id.is_empty() && checked_file(id).is_some() && dir.join(id).is_dir() {
            return Some(format!("{pod}/{id}"));
        }
        let names = tree::children(&dir).ok()?;
        let name = names.into_iter().find(|name| read::is_of(name, id))?;
        Some(format!("{pod}/{name}"))
    }

    /// The content of `file` of the cgroup `path`, without the last line's end; None if there is none.
    #[must_use]
    pub fn read(&self, path: &str, file: &str) -> Option<String> {
        let hierarchy = self.hierarchy_of_file(file)?;
        let path = hierarchy.mount.join(self.relative(path).ok()?).join(checked_file(file)?);
        Some(kernel_file::read_to_string(path).ok()?.trim_end().to_owned())
    }

    /// The id by which the kernel half knows the cgroup `path`: the inode of its cgroup2 directory.
    #[must_use]
    pub fn cgroup_id(&self, path: &str) -> Option<u64> {
        Some(fs::metadata(self.cgroup2_path(path)?).ok()?.ino())
    }

    /// The cgroup2 directory of `path`, whether it exists or not; None without cgroup2.
    #[must_use]
    pub fn cgroup2_path(&self, path: &str) -> Option<PathBuf> {
        let hierarchy = self.hierarchies().iter().find(|hierarchy| hierarchy.is_v2)?;
        Some(hierarchy.mount.join(self.relative(path).ok()?))
    }

    /// The name of `path` for the runtime (CRI `cgroup_parent`): from the hierarchies' root, with systemd too
    /// (`ToSystemd` of the kubelet). Runtimes take the last part of a slice's.
    #[must_use]
    pub fn cri_parent(&self, path: &str) -> String {
        self.names.path(path)
    }

    /// Returns true if the cgroup `path` exists in every hierarchy.
    #[must_use]
    pub fn exists(&self, path: &str) -> bool {
        self.relative(path)
            .is_ok_and(|relative| self.hierarchies().iter().all(|h| h.mount.join(&relative).is_dir()))
    }

    /// Returns true if the cgroup `path` exists in any hierarchy.
    #[must_use]
    pub fn exists_anywhere(&self, path: &str) -> bool {
        self.relative(path)
            .is_ok_and(|relative| self.hierarchies().iter().any(|h| h.mount.join(&relative).is_dir()))
    }

    /// Returns true if the cgroup `path` exists in each hierarchy that one of `files` is in.
    #[must_use]
    pub fn has_all(&self, path: &str, files: &Files) -> bool {
        self.relative(path).is_ok_and(|relative| {
            let mut hierarchies = files.keys().filter_map(|file| self.hierarchy_of_file(file));
            hierarchies.all(|h| h.mount.join(&relative).is_dir())
        })
    }

    /// The pods' cgroups that exist in any hierarchy, e.g. `/kubepods/besteffort/pod<uid>`.
    ///
    /// # Errors
    /// A directory cannot be listed.
    pub fn list_pods(&self) -> Result<Vec<String>, CgroupError> {
        let mut found = BTreeSet::new();
        for parent in ["/kubepods", "/kubepods/burstable", "/kubepods/besteffort"] {
            let relative = self.relative(parent)?;
            for hierarchy in self.hierarchies() {
                let names = tree::children(&hierarchy.mount.join(&relative))?;
                let uids = names.iter().filter_map(|name| self.names.pod_uid(parent, name));
                found.extend(uids.map(|uid| format!("{parent}/pod{uid}")));
            }
        }
        Ok(found.into_iter().collect())
    }

    /// `path` below a hierarchy's mount point.
    fn relative(&self, path: &str) -> Result<PathBuf, CgroupError> {
        if path == "/" {
            return Ok(self.root_path());
        }
        Ok(PathBuf::from(self.names.path(checked(path)?).trim_start_matches('/')))
    }

    /// The root below a hierarchy's mount point.
    fn root_path(&self) -> PathBuf {
        PathBuf::from(self.names.root_path().trim_start_matches('/'))
    }

    /// Has systemd keep a value that is about to be written, where the cgroup is a unit of its.
    fn keep(&self, path: &str, file: &str, value: &str) -> Result<(), CgroupError> {
        match &self.store {
            Store::Systemd(slices) => slices.set(&self.relative(path)?, file, value),
            Store::Kernel | Store::Folders => Ok(()),
        }
    }

    /// The hierarchy that has `controller`.
    fn hierarchy_of(&self, controller: &str) -> Option<&Hierarchy> {
        self.hierarchies().iter().find(|hierarchy| hierarchy.has(controller))
    }

    /// The hierarchy that `file` is in: `cpu.shares` is the cpu controller's, `cgroup.kill` is cgroup2's own.
    fn hierarchy_of_file(&self, file: &str) -> Option<&Hierarchy> {
        match file.split('.').next()? {
            "cgroup" => self.hierarchies().iter().find(|hierarchy| hierarchy.is_v2),
            controller => self.hierarchy_of(controller),
        }
    }
}

impl Hierarchy {
    /// Its controllers by name; cgroup2's as its root offers them now.
    fn names(&self) -> BTreeSet<String> {
        if !self.is_v2 {
            return self.controllers.clone();
        }
        let offered = fs::read_to_string(self.mount.join("cgroup.controllers")).unwrap_or_default();
        offered.split_whitespace().map(str::to_owned).collect()
    }

    fn has(&self, controller: &str) -> bool {
        if self.is_v2 { self.names().contains(controller) } else { self.controllers.contains(controller) }
    }
}

/// `path`, if it is absolute and leads nowhere but down.
fn checked(path: &str) -> Result<&str, CgroupError> {
    let well_formed = path.strip_prefix('/').is_some_and(|rest| {
        rest.split('/').all(|part| !matches!(part, "" | "." | "..") && !part.contains(['\0', '\n']))
    });
    if well_formed { Ok(path) } else { Err(CgroupError::Path(path.to_owned())) }
}

/// `file`, if it is a file's name and not a path.
fn checked_file(file: &str) -> Option<&str> {
    Some(file).filter(|file| !file.contains('/') && !file.is_empty() && *file != "..")
}

/// Returns true if `error` only says that the thing is not there (any more).
fn is_gone(error: &io::Error) -> bool {
    // ENODEV: a cgroup's file that was opened before the cgroup was removed.
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV)
}

#[cfg(test)]
mod tests;
