//! Disks on Fibre Channel: found by udev's links, after a look of the kernel's at its buses where they aren't
//! there yet.

use std::path::{Path, PathBuf};

use beelet_policy::volumes::remote_disk::{self as policy, FcDisk};
use tracing::debug;

use super::machine::Machine;
use crate::Error;

/// The disk's device: that of multipath, if it has several paths.
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

/// The links that lead to a disk.
fn links_of(machine: &Machine, disk: &FcDisk) -> Vec<PathBuf> {
    let is_it = |name: &str| match &disk.unit {
        Some((targets, unit)) => targets.iter().any(|target| policy::is_fc_path(name, target, *unit)),
        None => disk.names.iter().any(|own| policy::fc_id(own) == name),
    };
    let by = if disk.unit.is_some() { "by-path" } else { "by-id" };
    let links = machine.links(by).into_iter().filter(|(name, _)| is_it(name));
    links.map(|(_, path)| path).collect()
}

/// Has the kernel look for disks on all its buses.
fn scan_all(machine: &Machine) {
    let hosts = machine.sys.join("class/scsi_host");
    for host in machine.names(&hosts) {
        let scan = hosts.join(&host).join("scan");
        if let Err(why) = machine.tell(&scan, "- - -") {
            debug!(host, "a bus can't be looked at: {why}");
        }
    }
}

/// Has the kernel forget the disk that was this device.
pub(crate) fn forget(machine: &Machine, device: &Path) {
    let Some(name) = machine.name_of(device) else { return };
    if name.starts_with("dm-") {
        let parts = machine.names(&machine.sys.join("block").join(&name).join("slaves"));
        machine.forget(&parts, &[machine.dev.join(name)]);
    } else {
        machine.forget(&[name], &[]);
    }
}
