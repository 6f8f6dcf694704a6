//! The only writer of cgroup files: version 1, hybrid and version 2, cgroupfs and systemd behind one set of
//! paths.
//!
//! A path in this crate starts at the configured cgroup root, e.g. `/kubepods/burstable/pod<uid>`, and names
//! the same cgroup in every hierarchy: each version 1 controller's, version 1's named ones and cgroup2,
//! because the runtime joins them all. Paths are the same with both drivers: only this crate knows that
//! systemd's cgroups are slices (`names`), made by systemd (`systemd`). Must never decide the values of files
//! (`beelet_policy::resources::cgroups` does), nor write outside the cgroup root, with one exception: on
//! version 2 every ancestor must pass a controller down, so the crate also enables it (never disables it) in
//! their `cgroup.subtree_control`.
//!
//! All calls are short and block. None retries: a failure is an error with its reason, and the caller's next
//! sync tries again. Only [`kill::destroy`] waits, at most two seconds, for the processes that it killed,
//! and with the systemd driver all writing calls wait for systemd's answer, at most 20 seconds.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::Arc;

use tokio::sync::watch;

mod error;
pub mod held;
pub mod kill;
pub mod layout;
pub mod memory;
pub mod metrics;
mod names;
pub mod notify;
pub mod order;
mod paths;
pub mod read;
pub mod reclaim;
pub mod search;
pub mod stats;
mod systemd;
mod tree;
mod trial;
mod write;

pub use error::CgroupError;
pub use layout::{Hierarchy, Layout, Version};
pub use memory::{MemoryParts, MemoryUse};
pub use metrics::Metrics;
pub use paths::Paths;
pub use stats::{CpuUse, Pressure, Stalled};
pub use trial::Trial;

use self::names::Names;
use self::order::Change;
use self::systemd::Slices;
use beelet_base::{kernel_file, mountinfo};
use beelet_units::cgroup_driver::CgroupDriver;

/// Required contents of a cgroup's files, by file name.
pub type Files = BTreeMap<String, String>;

/// The machine's cgroups below one root.
#[derive(Debug, Clone)]
pub struct Cgroups {
    /// Paths of cgroups in every hierarchy.
    pub paths: Paths,
    metrics: Metrics,
    store: Store,
    held: Arc<held::HeldFiles>,
}

/// Result of adjusting cgroups.
#[derive(Debug, Default)]
pub struct Adjusted {
    /// Written changes, in that order.
    pub changed: Vec<Change>,
    /// Failures, to be retried by the next sync.
    pub failed: Vec<CgroupError>,
}

/// Selection of the differences to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Adjust {
    /// Only differences that raise a limit, before the runtime raises the limits of cgroups below.
    Wider,
    /// All differences.
    All,
}

/// Kind of the hierarchies' directories.
#[derive(Debug, Clone)]
enum Store {
    /// The kernel makes and removes a cgroup's files.
    Kernel,
    /// Plain folders, whose files this crate makes and removes.
    Folders,
    /// As the kernel's, but systemd makes and removes slices.
    Systemd(Arc<Slices>),
}

impl Store {
    /// Sets a value that is about to be written as a property of systemd's unit, if the cgroup is a unit.
    fn keep(&self, relative: &Path, file: &str, value: &str) -> Result<(), CgroupError> {
        match self {
            Store::Systemd(slices) => slices.set(relative, file, value),
            Store::Kernel | Store::Folders => Ok(()),
        }
    }
}

/// Returns the table of mounts.
fn mounts() -> Result<Vec<u8>, CgroupError> {
    mountinfo::read().map_err(|error| CgroupError::io("read", Path::new(mountinfo::PATH), error))
}

impl Cgroups {
    /// Finds the machine's hierarchies. `cgroup_root` is `/` or a path.
    ///
    /// # Errors
    /// No hierarchy with the cpu and memory controllers is mounted, the path leads upwards, or systemd can't
    /// be the driver: it isn't process 1, or the controllers are version 1's.
    pub fn discover(cgroup_root: &str, driver: CgroupDriver) -> Result<Self, CgroupError> {
        Self::with_layout(layout::parse(&mounts()?).ok_or(CgroupError::NotMounted)?, cgroup_root)?
            .with_driver(driver)
    }

    /// Returns the same cgroups with another driver. Held files stay held, by their names.
    ///
    /// # Errors
    /// As for [`Cgroups::discover`].
    pub fn with_driver(self, driver: CgroupDriver) -> Result<Self, CgroupError> {
        if driver == self.paths.driver() {
            return Ok(self);
        }
        let names = Names::new(driver, self.paths.names.root());
        let store = match driver {
            CgroupDriver::Cgroupfs => Store::Kernel,
            CgroupDriver::Systemd if self.paths.version() != Version::V2 => {
                return Err(CgroupError::SystemdNeedsV2 { version: self.paths.version() });
            }
            CgroupDriver::Systemd => Store::Systemd(Arc::new(Slices::of_machine()?)),
        };
        Ok(Self { paths: Paths { names, ..self.paths }, store, held: self.held, metrics: self.metrics })
    }

    /// Finds the hierarchies only for reading. Unlike [`Cgroups::discover`], it accepts the tree of any
    /// driver, and the machine's hierarchies mounted in a container.
    ///
    /// # Errors
    /// As for [`Cgroups::discover`].
    pub fn for_reading(cgroup_root: &str) -> Result<Self, CgroupError> {
        Self::with_layout(layout::parse_for_reading(&mounts()?).ok_or(CgroupError::NotMounted)?, cgroup_root)
    }

    /// Returns the cgroups of a known layout.
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
        let cgroups = Self { paths: Paths { layout, names }, metrics, store: Store::Kernel, held };
        for controller in ["cpu", "memory"] {
            if cgroups.paths.hierarchy_of(controller).is_none() {
                return Err(CgroupError::NoController { controller });
            }
        }
        Ok(cgroups)
    }

    /// Returns cgroups over plain folders, for tests of higher layers on machines without a usable cgroupfs:
    /// a new cgroup gets copies of its parent's files, which are removed with it.
    ///
    /// # Errors
    /// As for [`Cgroups::with_layout`].
    pub fn over_folders(layout: Layout, cgroup_root: &str) -> Result<Self, CgroupError> {
        Ok(Self { store: Store::Folders, ..Self::with_layout(layout, cgroup_root)? })
    }

    /// Returns a channel that changes whenever systemd, after reloading its units, may have overwritten all
    /// values. `None` with the cgroupfs driver.
    #[must_use]
    pub fn rewrites(&self) -> Option<watch::Receiver<u64>> {
        match &self.store {
            Store::Systemd(slices) => Some(slices.rewrites()),
            Store::Kernel | Store::Folders => None,
        }
    }

    /// Returns the metrics of write durations.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Makes the cgroup `path` and its ancestors in every hierarchy and its files hold `values`.
    ///
    /// # Errors
    /// As for [`Cgroups::ensure_all`].
    pub fn ensure(&self, path: &str, values: &Files) -> Result<(), CgroupError> {
        self.ensure_all(&[(path.to_owned(), values.clone())].into())
    }

    /// Makes all these cgroups (by path) in every hierarchy and their files hold the given values, in an
    /// order that never limits any of them more tightly than both the old and the new values do. Skips files
    /// that already hold their value, and reads back the others.
    ///
    /// # Errors
    /// A directory or file cannot be written, the kernel keeps another value, a memory limit would make the
    /// kernel kill at once, or a value other than "no limit" belongs to a missing controller.
    pub fn ensure_all(&self, cgroups: &BTreeMap<String, Files>) -> Result<(), CgroupError> {
        self.metrics.time("update", || {
            // Parents come before their children in the order of paths.
            for (path, files) in cgroups {
                let relative = self.paths.relative(path)?;
                for hierarchy in self.paths.hierarchies() {
                    if let Store::Systemd(slices) = &self.store {
                        slices.start(&hierarchy.mount, &self.paths.root_path(), &relative, files)?;
                    }
                    // With slices, this only passes down the controllers that systemd does not manage.
                    tree::make(hierarchy, self.paths.version(), &relative, &self.store)?;
                }
            }
            let report = write::all(self, cgroups, Adjust::All);
            report.failed.into_iter().next().map_or(Ok(()), Err)
        })
    }

    /// Makes the files of the existing ones of these cgroups hold the given values, in the same order. A
    /// failed write does not prevent the others.
    #[must_use]
    pub fn adjust(&self, cgroups: &BTreeMap<String, Files>, how: Adjust) -> Adjusted {
        self.metrics.time("adjust", || write::all(self, cgroups, how))
    }

    /// Returns the files of a cgroup that differ from `values`, and errors for those that can't be compared;
    /// nothing for a removed cgroup.
    #[must_use]
    pub fn differences(&self, path: &str, values: &Files) -> (Vec<Change>, Vec<CgroupError>) {
        write::changed(self, path, values)
    }

    /// Resets the burst of a quota, if the kernel supports bursts.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn clear_burst(&self, path: &str) -> Result<(), CgroupError> {
        let file = if self.paths.version() == Version::V2 { "cpu.max.burst" } else { "cpu.cfs_burst_us" };
        match self.read(path, file) {
            Some(burst) if burst != "0" => write::one(self, path, file, "0"),
            _ => Ok(()),
        }
    }

    /// Removes the cgroup `path` and those below it from every hierarchy. Treats "not found" as success.
    ///
    /// # Errors
    /// The cgroup has processes (nothing is removed then; the error names them), or the kernel still counts
    /// some that just ended.
    pub fn remove(&self, path: &str) -> Result<(), CgroupError> {
        self.metrics.time("destroy", || {
            let relative = self.paths.relative(path)?;
            let pids = self.pids(path)?;
            if !pids.is_empty() {
                return Err(CgroupError::NotEmpty { cgroup: path.to_owned(), pids });
            }
            if let Store::Systemd(slices) = &self.store {
                slices.stop(&relative)?;
            }
            // A failure in a hierarchy must not prevent the removal in the others.
            let results: Vec<_> = self
                .paths
                .hierarchies()
                .iter()
                .map(|h| tree::remove(&h.mount.join(&relative), &self.store))
                .collect();
            results.into_iter().collect()
        })
    }

    /// Returns the processes in `path` and below it, in any hierarchy.
    ///
    /// # Errors
    /// The path is invalid, or a list of processes cannot be read.
    pub fn pids(&self, path: &str) -> Result<Vec<u32>, CgroupError> {
        let relative = self.paths.relative(path)?;
        let mut pids = BTreeSet::new();
        for hierarchy in self.paths.hierarchies() {
            tree::pids(&hierarchy.mount.join(&relative), &mut pids)?;
        }
        Ok(pids.into_iter().collect())
    }

    /// Returns the content of `file` of the cgroup `path`, without the final newline; `None` if it is
    /// missing.
    #[must_use]
    pub fn read(&self, path: &str, file: &str) -> Option<String> {
        let hierarchy = self.paths.hierarchy_of_file(file)?;
        let path = hierarchy.mount.join(self.paths.relative(path).ok()?).join(checked_file(file)?);
        Some(kernel_file::read_to_string(path).ok()?.trim_end().to_owned())
    }
}

/// Returns `path` if it is absolute and only leads downwards.
fn checked(path: &str) -> Result<&str, CgroupError> {
    let well_formed = path.strip_prefix('/').is_some_and(|rest| {
        rest.split('/').all(|part| !matches!(part, "" | "." | "..") && !part.contains(['\0', '\n']))
    });
    if well_formed { Ok(path) } else { Err(CgroupError::Path(path.to_owned())) }
}

/// Returns `file` if it is a file's name and not a path.
fn checked_file(file: &str) -> Option<&str> {
    Some(file).filter(|file| !file.contains('/') && !file.is_empty() && *file != "..")
}

/// Returns true if `error` means that the file does not exist (any more).
fn is_gone(error: &io::Error) -> bool {
    // ENODEV: a cgroup's file that was opened before the cgroup was removed.
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV)
}

#[cfg(test)]
mod tests;
