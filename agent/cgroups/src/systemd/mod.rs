//! Slices: what of the cgroups is systemd's to make, to change and to remove (cgroupDriver: systemd).
//!
//! Each slice is a transient unit. A value goes to systemd as a property, so that it writes nothing else
//! there later, and then into the file, so that it holds when the call returns. Below a pod everything is the
//! runtime's: its scopes are given properties too, but never made or stopped here.

pub(crate) mod properties;

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use beelet_systemd::manager::{Manager, Property};
use tokio::sync::watch;

use super::{CgroupError, Files, names};

/// Where systemd says that it is process 1 (sd_booted(3)).
const BOOTED: &str = "/run/systemd/system";

/// systemd's manager, as far as it is needed.
pub(crate) trait Units: Debug + Send + Sync {
    /// Makes and starts the transient unit; one that exists is started and keeps its properties.
    fn start(&self, unit: &str, properties: &[Property]) -> Result<(), CgroupError>;
    /// Changes properties until the next boot. Those that this systemd doesn't know are passed over.
    fn set(&self, unit: &str, properties: &[Property]) -> Result<(), CgroupError>;
    /// Stops the unit. It is no error if there is none.
    fn stop(&self, unit: &str) -> Result<(), CgroupError>;
    /// Changes whenever systemd may have written all values anew.
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
    /// Those that this process has started.
    started: Mutex<BTreeSet<String>>,
}

impl Slices {
    /// Those of this machine.
    pub(crate) fn of_machine() -> Result<Self, CgroupError> {
        if !Path::new(BOOTED).is_dir() {
            return Err(CgroupError::NoSystemd);
        }
        Ok(Self::new(Box::new(Manager::new()?)))
    }

    pub(crate) fn new(units: Box<dyn Units>) -> Self {
        Self { units, started: Mutex::default() }
    }

    /// Starts the slices of `relative` that are below `root`, the last one with the values of `files`.
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
            // The root is somebody else's.
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

    /// Makes the file's value a property of the unit that the cgroup is, if it is one and there is such a
    /// property.
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

    /// Changes whenever systemd may have written all values anew.
    pub(crate) fn rewrites(&self) -> watch::Receiver<u64> {
        self.units.rewrites()
    }

    fn is_started(&self, unit: &str) -> bool {
        self.lock().contains(unit)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeSet<String>> {
        // Each change is one insertion or removal.
        self.started.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The unit that a cgroup is.
fn unit_of(relative: &Path) -> Option<&str> {
    relative.file_name()?.to_str().filter(|name| names::is_unit(name))
}

#[cfg(test)]
mod tests;
