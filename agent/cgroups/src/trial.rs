//! A trial cgroup, which checks that cgroups can be made and used on this machine, and is removed afterwards.
//!
//! Must never make the configured root in the hierarchies of CPU and memory: a misspelt root would then look
//! correct to the next check. On version 2, controllers that the trial enabled in ancestors stay enabled:
//! another process may rely on them a moment later.

use std::fs;
use std::path::{Path, PathBuf};

use super::{CgroupError, Cgroups, Files};

/// An empty cgroup right below the root, in every hierarchy; removed on drop.
#[derive(Debug)]
pub struct Trial {
    cgroups: Cgroups,
    path: String,
    /// Components of the root made with the cgroup, in hierarchies that lacked them; children after parents.
    made: Vec<PathBuf>,
}

impl Trial {
    /// Makes the cgroup `name` below the root, in the same way as the cgroups of pods.
    ///
    /// # Errors
    /// The root is missing, and nothing was made; or the cgroup cannot be made, and its finished parts were
    /// removed again.
    pub fn make(cgroups: &Cgroups, name: &str) -> Result<Self, CgroupError> {
        cgroups.paths.require_root()?;
        let path = format!("/{name}");
        let root = cgroups.paths.root_path();
        let absent = |mount: &Path| {
            let below = root.ancestors().filter(|part| !part.as_os_str().is_empty());
            below.map(|part| mount.join(part)).take_while(|folder| !folder.exists()).collect::<Vec<_>>()
        };
        let made = cgroups
            .paths
            .hierarchies()
            .iter()
            .flat_map(|hierarchy| absent(&hierarchy.mount).into_iter().rev());
        let trial = Trial { made: made.collect(), cgroups: cgroups.clone(), path };
        // The value exists before the cgroup, so that its drop removes the finished parts after a failure.
        trial.cgroups.ensure(&trial.path, &Files::new())?;
        Ok(trial)
    }

    /// Returns the cgroup's directory in the cgroup2 hierarchy; `None` without cgroup2.
    #[must_use]
    pub fn cgroup2(&self) -> Option<PathBuf> {
        self.cgroups.paths.cgroup2_path(&self.path)
    }

    /// Removes the cgroup.
    ///
    /// # Errors
    /// As for [`Cgroups::remove`].
    pub fn remove(mut self) -> Result<(), CgroupError> {
        self.clear()
    }

    fn clear(&mut self) -> Result<(), CgroupError> {
        let removed = self.cgroups.remove(&self.path);
        let parts = std::mem::take(&mut self.made);
        for part in parts.iter().rev() {
            // The kernel keeps a cgroup that is in use by now.
            let _ = fs::remove_dir(part);
        }
        removed
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        // For a caller that returned early; the others call `remove`.
        let _ = self.clear();
    }
}
