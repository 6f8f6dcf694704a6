//! Disks on Fibre Channel: found by udev's links, after the kernel has rescanned its buses if the links do
//! not exist yet.

use std::path::{Path, PathBuf};

use beelet_policy::volumes::remote_disk::{self as policy, FcDisk};
use tracing::debug;

use super::machine::Machine;
use crate::Error;

/// Finds the disk's device: the multipath device if the disk has several paths.
pub(crate) fn find(machine: &Machine, disk: &FcDisk) -> Result<PathBuf, Error> {
    let mut single = None;
    for scan in [false, true] {
        if scan {
            scan_all(machine);
        }
        for link in links_of(machine, disk) {
            if let Some(made) = machine.multipath(&link) {
                return Ok(made);
            }
            single = machine.name_of(&link).map(|name| machine.dev.join(name)).or(single);
        }
    }
    single.ok_or_else(|| Error::unmet("no fc disk found"))
}

/// Returns the links that lead to a disk.
fn links_of(machine: &Machine, disk: &FcDisk) -> Vec<PathBuf> {
    let is_it = |name: &str| match &disk.unit {
        Some((targets, unit)) => targets.iter().any(|target| policy::is_fc_path(name, target, *unit)),
        None => disk.names.iter().any(|own| policy::fc_id(own) == name),
    };
    let by = if disk.unit.is_some() { "by-path" } else { "by-id" };
    let links = machine.links(by).into_iter().filter(|(name, _)| is_it(name));
    links.map(|(_, path)| path).collect()
}

/// Makes the kernel rescan all its buses for disks.
fn scan_all(machine: &Machine) {
    let hosts = machine.sys.join("class/scsi_host");
    for host in machine.names(&hosts) {
        let scan = hosts.join(&host).join("scan");
        if let Err(why) = machine.write(&scan, "- - -") {
            debug!(host, "cannot rescan a bus: {why}");
        }
    }
}

/// Deletes the disk with this device from the kernel.
pub(crate) fn forget(machine: &Machine, device: &Path) {
    let Some(name) = machine.name_of(device) else { return };
    if name.starts_with("dm-") {
        let parts = machine.names(&machine.sys.join("block").join(&name).join("slaves"));
        machine.forget(&parts, &[machine.dev.join(name)]);
    } else {
        machine.forget(&[name], &[]);
    }
}
