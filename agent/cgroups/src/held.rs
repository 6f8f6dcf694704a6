//! Settings that the tuner holds for a while, and what their owner would have there meanwhile.
//!
//! What is held is not written by [`Cgroups::ensure_all`] and [`Cgroups::adjust`], nor is it drift: they only
//! note the value that they would have written, which is the one that comes back on release.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{CgroupError, Cgroups, write};

/// By cgroup and file: what its owner would have there.
type Map = BTreeMap<(String, String), String>;

/// All that is held. Never locked while a file is read or written.
#[derive(Debug, Default)]
pub(super) struct HeldFiles(Mutex<Map>);

impl HeldFiles {
    fn map(&self) -> MutexGuard<'_, Map> {
        // Each change is one insertion or removal, so a thread that died has left nothing half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if the file is held; then `value` is what it gets back.
    pub(super) fn defers(&self, cgroup: &str, file: &str, value: &str) -> bool {
        let mut map = self.map();
        let Some(owners) = map.get_mut(&(cgroup.to_owned(), file.to_owned())) else { return false };
        value.clone_into(owners);
        true
    }

    /// What the owner would have, if the file is held.
    fn owners(&self, cgroup: &str, file: &str) -> Option<String> {
        self.map().get(&(cgroup.to_owned(), file.to_owned())).cloned()
    }
}

impl Cgroups {
    /// The value that the owner of a file has there, or would have while it is held; None if there is no such
    /// file.
    #[must_use]
    pub fn owners_value(&self, cgroup: &str, file: &str) -> Option<String> {
        self.held.owners(cgroup, file).or_else(|| self.read(cgroup, file))
    }

    /// Takes a file from its owner, whose value is `owners` ([`Cgroups::owners_value`]), and sets it to
    /// `value`; without one it is only not touched by anybody. Nothing but the process's memory knows of it:
    /// whoever holds a file keeps a record to undo it by.
    ///
    /// # Errors
    /// The kernel refuses the value, or keeps another one. The file is held all the same.
    pub fn hold(
        &self,
        cgroup: &str,
        file: &str,
        owners: &str,
        value: Option<&str>,
    ) -> Result<(), CgroupError> {
        self.held.map().entry((cgroup.to_owned(), file.to_owned())).or_insert_with(|| owners.to_owned());
        match value {
            Some(value) => self.set(cgroup, file, value),
            None => Ok(()),
        }
    }

    /// Gives a held file back to its owner, with its value; `otherwise` is that where this process doesn't
    /// hold it. A cgroup that is gone needs nothing.
    ///
    /// # Errors
    /// The kernel refuses the value, or keeps another one. The file is not held any more all the same.
    pub fn release(&self, cgroup: &str, file: &str, otherwise: &str) -> Result<(), CgroupError> {
        let owners = self.held.map().remove(&(cgroup.to_owned(), file.to_owned()));
        let value = owners.as_deref().unwrap_or(otherwise);
        match self.set(cgroup, file, value) {
            Err(error) if error.is_gone() => Ok(()),
            done => done,
        }
    }

    /// Stops to hold a file, and leaves in it what there is: somebody else has it now.
    pub fn let_go(&self, cgroup: &str, file: &str) {
        self.held.map().remove(&(cgroup.to_owned(), file.to_owned()));
    }

    fn set(&self, cgroup: &str, file: &str, value: &str) -> Result<(), CgroupError> {
        self.metrics.time("tune", || write::one(self, cgroup, file, value))
    }
}
