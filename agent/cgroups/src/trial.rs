//! A cgroup that is made to see whether cgroups can be made and used here, and leaves none behind.
//!
//! Must never make the configured root where CPU and memory are given: a misspelt root would then look well
//! to the next one that looks. On version 2 controllers that it enabled in ancestors stay enabled: another
//! process may rely on them a moment later.

use std::fs;
use std::path::{Path, PathBuf};

use super::{CgroupError, Cgroups, Files};

/// An empty cgroup right below the root, in every hierarchy. It is removed with the value.
#[derive(Debug)]
pub struct Trial {
    cgroups: Cgroups,
    path: String,
    /// The parts of the root that were made with it, in hierarchies that had none; children after parents.
    made: Vec<PathBuf>,
}

impl Cgroups {
    /// Makes the cgroup `name` below the root, as those of pods are made.
    ///
    /// # Errors
    /// The root is not there, and nothing was made; or the cgroup cannot be made, and what was made of it is
    /// gone again.
    pub fn trial(&self, name: &str) -> Result<Trial, CgroupError> {
        self.require_root()?;
        let path = format!("/{name}");
        let root = self.root_path();
        let absent = |mount: &Path| {
            let below = root.ancestors().filter(|part| !part.as_os_str().is_empty());
            below.map(|part| mount.join(part)).take_while(|folder| !folder.exists()).collect::<Vec<_>>()
        };
        let made = self.hierarchies().iter().flat_map(|hierarchy| absent(&hierarchy.mount).into_iter().rev());
        let trial = Trial { made: made.collect(), cgroups: self.clone(), path };
        // A value of its own by now: what is made of it goes also if this fails.
        trial.cgroups.ensure(&trial.path, &Files::new())?;
        Ok(trial)
    }
}

impl Trial {
    /// Where it is in the cgroup2 hierarchy; `None` if there is none.
    #[must_use]
    pub fn cgroup2(&self) -> Option<PathBuf> {
        self.cgroups.cgroup2_path(&self.path)
    }

    /// Removes it.
    ///
    /// # Errors
    /// As for [`Cgroups::remove`].
    pub fn remove(mut self) -> Result<(), CgroupError> {
        self.take_away()
    }

    fn take_away(&mut self) -> Result<(), CgroupError> {
        let removed = self.cgroups.remove(&self.path);
        let parts = std::mem::take(&mut self.made);
        for part in parts.iter().rev() {
            // The kernel keeps one that is in use by now.
            let _ = fs::remove_dir(part);
        }
        removed
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        // For a caller that went away early; the others call `remove`.
        let _ = self.take_away();
    }
}
