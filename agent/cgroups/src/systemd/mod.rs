//! Slices: the cgroups that systemd makes, changes and removes (cgroupDriver: systemd).
//!
//! Each slice is a transient unit. A value is first set as a property of the unit, so that systemd later
//! writes the same value, and then written to the file, so that it is in force when the call returns. All
//! cgroups below a pod belong to the runtime: its scopes also get properties, but must never be made or
//! stopped here.

pub(crate) mod properties;

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use beelet_systemd::manager::{Manager, Property};
use tokio::sync::watch;

use super::{CgroupError, Files, names};

/// Folder that exists if systemd is process 1 (sd_booted(3)).
const BOOTED: &str = "/run/systemd/system";

/// The used part of systemd's manager.
pub(crate) trait Units: Debug + Send + Sync {
    /// Makes and starts the transient unit; an existing unit is started and keeps its properties.
    fn start(&self, unit: &str, properties: &[Property]) -> Result<(), CgroupError>;
    /// Changes properties until the next boot. Skips properties unknown to this systemd.
    fn set(&self, unit: &str, properties: &[Property]) -> Result<(), CgroupError>;
    /// Stops the unit. Treats "not found" as success.
    fn stop(&self, unit: &str) -> Result<(), CgroupError>;
    /// Returns a channel that changes whenever systemd may have overwritten all values.
    fn rewrites(&self) -> watch::Receiver<u64>;
}

impl Units for Manager {
    fn start(&self, unit: &str, properties: &[Property]) -> Result<(), CgroupError> {
        Ok(Manager::start(self, unit, properties)?)
    }

    fn set(&self, unit: &str, properties: &[Property]) -> Result<(), CgroupError> {
        Ok(Manager::set(self, unit, properties)?)
    }

    fn stop(&self, unit: &str) -> Result<(), CgroupError> {
        Ok(Manager::stop(self, unit)?)
    }

    fn rewrites(&self) -> watch::Receiver<u64> {
        Manager::rewrites(self)
    }
}

/// The slices below the cgroup root.
#[derive(Debug)]
pub(crate) struct Slices {
    units: Box<dyn Units>,
    /// Slices that this process has started.
    started: Mutex<BTreeSet<String>>,
}

impl Slices {
    /// Returns the slices of this machine.
    pub(crate) fn of_machine() -> Result<Self, CgroupError> {
        if !Path::new(BOOTED).is_dir() {
            return Err(CgroupError::NoSystemd);
        }
        Ok(Self::new(Box::new(Manager::new()?)))
    }

    pub(crate) fn new(units: Box<dyn Units>) -> Self {
        Self { units, started: Mutex::default() }
    }

    /// Starts the slices of `relative` below `root`, the last one with the values of `files`.
    pub(crate) fn start(
        &self,
        mount: &Path,
        root: &Path,
        relative: &Path,
        files: &Files,
    ) -> Result<(), CgroupError> {
        let mut dir = mount.to_owned();
        let mut parent = None;
        for (depth, name) in relative.iter().enumerate() {
            dir.push(name);
            let Some(name) = name.to_str().filter(|name| name.ends_with(".slice")) else { return Ok(()) };
            let above = parent.replace(name);
            // The root belongs to another owner.
            if depth < root.iter().count() || self.is_started(name) && dir.is_dir() {
                continue;
            }
            let mut properties = properties::of_slice(above);
            if dir == mount.join(relative) {
                properties.extend(properties::of_files(files));
            }
            self.units.start(name, &properties)?;
            self.lock().insert(name.to_owned());
        }
        Ok(())
    }

    /// Sets the file's value as a property of the cgroup's unit, if the cgroup is a unit and the property
    /// exists.
    pub(crate) fn set(&self, relative: &Path, file: &str, value: &str) -> Result<(), CgroupError> {
        let Some(unit) = unit_of(relative) else { return Ok(()) };
        let properties = properties::of_file(file, value);
        if properties.is_empty() {
            return Ok(());
        }
        self.units.set(unit, &properties)
    }

    /// Stops the slice of `relative`.
    pub(crate) fn stop(&self, relative: &Path) -> Result<(), CgroupError> {
        let Some(unit) = unit_of(relative).filter(|unit| unit.ends_with(".slice")) else { return Ok(()) };
        self.units.stop(unit)?;
        self.lock().remove(unit);
        Ok(())
    }

    /// Returns a channel that changes whenever systemd may have overwritten all values.
    pub(crate) fn rewrites(&self) -> watch::Receiver<u64> {
        self.units.rewrites()
    }

    fn is_started(&self, unit: &str) -> bool {
        self.lock().contains(unit)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeSet<String>> {
        // Each change is a single insertion or removal.
        self.started.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the unit of a cgroup, if the cgroup is a unit.
fn unit_of(relative: &Path) -> Option<&str> {
    relative.file_name()?.to_str().filter(|name| names::is_unit(name))
}

#[cfg(test)]
mod tests;
