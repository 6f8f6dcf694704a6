//! Paths of cgroups in every hierarchy, and questions about their existence.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use beelet_units::cgroup_driver::CgroupDriver;

use super::names::Names;
use super::{CgroupError, Files, Hierarchy, Layout, Version, checked};

/// The hierarchies, and the names of cgroups in them.
#[derive(Debug, Clone)]
pub struct Paths {
    pub(super) layout: Layout,
    pub(super) names: Names,
}

impl Paths {
    /// Returns the machine's version of cgroups.
    #[must_use]
    pub fn version(&self) -> Version {
        self.layout.version
    }

    /// Returns all hierarchies in use.
    #[must_use]
    pub fn hierarchies(&self) -> &[Hierarchy] {
        &self.layout.hierarchies
    }

    /// Returns the names of all controllers that are available to pods.
    #[must_use]
    pub fn controllers(&self) -> BTreeSet<String> {
        self.hierarchies().iter().flat_map(Hierarchy::names).collect()
    }

    /// Returns the driver that makes the cgroups.
    #[must_use]
    pub fn driver(&self) -> CgroupDriver {
        self.names.driver()
    }

    /// Converts `path` to a path relative to a hierarchy's mount point.
    pub(super) fn relative(&self, path: &str) -> Result<PathBuf, CgroupError> {
        if path == "/" {
            return Ok(self.root_path());
        }
        Ok(PathBuf::from(self.names.path(checked(path)?).trim_start_matches('/')))
    }

    /// Returns the root relative to a hierarchy's mount point.
    pub(super) fn root_path(&self) -> PathBuf {
        PathBuf::from(self.names.root_path().trim_start_matches('/'))
    }

    /// Returns the hierarchy with `controller`.
    pub(super) fn hierarchy_of(&self, controller: &str) -> Option<&Hierarchy> {
        self.hierarchies().iter().find(|hierarchy| hierarchy.has(controller))
    }

    /// Returns the hierarchy with `file`: `cpu.shares` belongs to the cpu controller, `cgroup.kill` to
    /// cgroup2.
    pub(super) fn hierarchy_of_file(&self, file: &str) -> Option<&Hierarchy> {
        match file.split('.').next()? {
            "cgroup" => self.hierarchies().iter().find(|hierarchy| hierarchy.is_v2),
            controller => self.hierarchy_of(controller),
        }
    }

    /// Returns the name of `path` for the runtime (CRI `cgroup_parent`): from the hierarchies' root, also
    /// with systemd (`ToSystemd` of the kubelet). Runtimes use the last component of a slice's path.
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

    /// Returns true if the cgroup `path` exists in each hierarchy that contains one of `files`.
    #[must_use]
    pub fn has_all(&self, path: &str, files: &Files) -> bool {
        self.relative(path).is_ok_and(|relative| {
            let mut hierarchies = files.keys().filter_map(|file| self.hierarchy_of_file(file));
            hierarchies.all(|h| h.mount.join(&relative).is_dir())
        })
    }

    /// Returns the cgroup2 directory of `path`, which may not exist; `None` without cgroup2.
    #[must_use]
    pub fn cgroup2_path(&self, path: &str) -> Option<PathBuf> {
        let hierarchy = self.hierarchies().iter().find(|hierarchy| hierarchy.is_v2)?;
        Some(hierarchy.mount.join(self.relative(path).ok()?))
    }

    /// Returns the kernel half's id of the cgroup `path`: the inode of its cgroup2 directory.
    #[must_use]
    pub fn cgroup_id(&self, path: &str) -> Option<u64> {
        Some(fs::metadata(self.cgroup2_path(path)?).ok()?.ino())
    }

    /// Checks that the root exists in the hierarchies of CPU and memory, so that a typing error does not move
    /// pods to another cgroup. The kubelet requires the same (`cgroupManager.Validate`,
    /// pkg/kubelet/cm/container_manager_linux.go).
    ///
    /// # Errors
    /// The root is missing.
    pub fn require_root(&self) -> Result<(), CgroupError> {
        for hierarchy in ["cpu", "memory"].into_iter().filter_map(|name| self.hierarchy_of(name)) {
            let missing = hierarchy.mount.join(self.root_path());
            if !missing.is_dir() {
                return Err(CgroupError::NoRoot { root: self.names.root().to_owned(), missing });
            }
        }
        Ok(())
    }
}

impl Hierarchy {
    /// Returns the names of the hierarchy's controllers; for cgroup2, those that its root offers now.
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
