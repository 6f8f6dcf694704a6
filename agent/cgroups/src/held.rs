//! Settings that the tuner holds for a while, and their owners' values during that time.
//!
//! [`Cgroups::ensure_all`] and [`Cgroups::adjust`] neither write held files nor report them as drift: they
//! only record the value that they would have written, which is restored on release.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{CgroupError, Cgroups, write};

/// Owners' values by cgroup and file.
type Map = BTreeMap<(String, String), String>;

/// All held files. Must never be locked while a file is read or written.
#[derive(Debug, Default)]
pub(super) struct HeldFiles(Mutex<Map>);

impl HeldFiles {
    fn map(&self) -> MutexGuard<'_, Map> {
        // Each change is a single insertion or removal, so a panicked thread has left nothing half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if the file is held, and records `value` as the one to restore.
    pub(super) fn defers(&self, cgroup: &str, file: &str, value: &str) -> bool {
        let mut map = self.map();
        let Some(owners) = map.get_mut(&(cgroup.to_owned(), file.to_owned())) else { return false };
        value.clone_into(owners);
        true
    }

    /// Returns the owner's value, if the file is held.
    fn owners(&self, cgroup: &str, file: &str) -> Option<String> {
        self.map().get(&(cgroup.to_owned(), file.to_owned())).cloned()
    }
}

/// Returns the owner's value of a file: its content, or the recorded value while it is held; `None` if
/// the file is missing.
#[must_use]
pub fn owners_value(cgroups: &Cgroups, cgroup: &str, file: &str) -> Option<String> {
    cgroups.held.owners(cgroup, file).or_else(|| cgroups.read(cgroup, file))
}

/// Holds a file against its owner, whose value is `owners` ([`owners_value`]), and sets the file
/// to `value`; without a value the file only stays as it is. The hold exists only in this process's
/// memory: the holder must keep a record to undo it.
///
/// # Errors
/// The kernel refuses the value, or keeps another one. The file is held nevertheless.
pub fn hold(
    cgroups: &Cgroups,
    cgroup: &str,
    file: &str,
    owners: &str,
    value: Option<&str>,
) -> Result<(), CgroupError> {
    cgroups.held.map().entry((cgroup.to_owned(), file.to_owned())).or_insert_with(|| owners.to_owned());
    match value {
        Some(value) => set(cgroups, cgroup, file, value),
        None => Ok(()),
    }
}

/// Releases a held file and restores its owner's value, or `otherwise` if this process doesn't hold the
/// file. Treats a removed cgroup as success.
///
/// # Errors
/// The kernel refuses the value, or keeps another one. The file is released nevertheless.
pub fn release(cgroups: &Cgroups, cgroup: &str, file: &str, otherwise: &str) -> Result<(), CgroupError> {
    let owners = cgroups.held.map().remove(&(cgroup.to_owned(), file.to_owned()));
    let value = owners.as_deref().unwrap_or(otherwise);
    match set(cgroups, cgroup, file, value) {
        Err(error) if error.is_gone() => Ok(()),
        done => done,
    }
}

/// Releases a file without changing it, because another part holds it now.
pub fn let_go(cgroups: &Cgroups, cgroup: &str, file: &str) {
    cgroups.held.map().remove(&(cgroup.to_owned(), file.to_owned()));
}

fn set(cgroups: &Cgroups, cgroup: &str, file: &str, value: &str) -> Result<(), CgroupError> {
    cgroups.metrics.time("tune", || write::one(cgroups, cgroup, file, value))
}
