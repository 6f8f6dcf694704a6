//! Disks on iSCSI: `iscsiadm` logs in to the target, udev's links lead to the disk, and `iscsiadm` logs out
//! after the last disk of the target.

use std::{collections::BTreeMap, path::PathBuf, process::ExitStatus, time::Duration};

use beelet_base::program::{Ended, Program};
use beelet_policy::volumes::remote_disk::{self as policy, IscsiDisk};
use tracing::warn;

use super::machine::Machine;
use crate::{Error, disk};

/// Rounds over the portals that do not answer: maximum once two portals answer, and overall maximum.
const ROUNDS_FOR_TWO: usize = 2;
const ROUNDS: usize = 5;
/// Time limit for multipath to combine several devices.
const MULTIPATH: Duration = Duration::from_secs(10);
/// Maximum size of iscsiadm's output in bytes.
const SAID: usize = 16 << 10;
/// Exit codes of iscsiadm(8): session not found; session exists already; no records found.
const NO_SESSION: i32 = 2;
const EXISTS: i32 = 15;
const NOTHING: i32 = 21;

/// A disk whose target is logged in to or out from.
pub(crate) struct Login<'a> {
    pub(crate) machine: &'a Machine,
    pub(crate) disk: &'a IscsiDisk,
    /// Content of the volume's Secret.
    pub(crate) secret: &'a BTreeMap<String, String>,
}

impl Login<'_> {
    /// Finds the disk's device by all portals that answer: the multipath device, if multipath made one.
    pub(crate) fn find(&self) -> Result<PathBuf, Error> {
        let Self { machine, disk, .. } = self;
        let shown = succeed(&interface(self.machine, &disk.base_interface).setting("-o", "show"))?;
        let transport = policy::transport(&shown)
            .ok_or_else(|| Error::unmet(format!("could not parse iface file for {}", disk.base_interface)))?;
        if let Some(initiator) = &disk.initiator {
            self.make_interface(&shown, initiator)?;
        }
        let (mut found, mut last): (BTreeMap<&str, PathBuf>, _) = (BTreeMap::new(), None);
        for round in 1..=ROUNDS {
            for portal in &disk.portals {
                if !found.contains_key(portal.as_str()) {
                    match self.reach(portal, &transport) {
                        Ok(path) => drop(found.insert(portal, path)),
                        Err(why) => last = Some(why),
                    }
                }
            }
            let is_enough = found.len() == disk.portals.len() || (found.len() > 1 && round >= ROUNDS_FOR_TWO);
            if found.is_empty() || is_enough {
                break;
            }
        }
        let Some(first) = found.values().next().cloned() else {
            self.remove_interface();
            let why = last.map(|why| why.to_string()).unwrap_or_default();
            return Err(Error::unmet(format!(
                "failed to get any path for iscsi disk, last err seen:\n{why}"
            )));
        };
        let patience = if disk.portals.len() > 1 { MULTIPATH.min(machine.patience) } else { Duration::ZERO };
        let made = machine.wait_for(patience, || found.values().find_map(|path| machine.multipath(path)));
        Ok(made.unwrap_or(first))
    }

    /// Returns the link to the disk by a portal, after logging in to the portal if necessary.
    fn reach(&self, portal: &str, transport: &str) -> Result<PathBuf, Error> {
        let Self { machine, disk, .. } = self;
        let mut hosts = hosts(machine, &disk.target);
        if !hosts.contains_key(portal) {
            self.login(portal)?;
            hosts = self::hosts(machine, &disk.target);
        }
        let host = hosts.get(portal).ok_or_else(|| {
            Error::unmet(format!("could not get SCSI host number for portal {portal} after logging in"))
        })?;
        // Scans only this unit: other units would appear too, and stay after their removal from the target.
        let scan = machine.sys.join(format!("class/scsi_host/host{host}/scan"));
        machine.write(&scan, &format!("0 0 {}", disk.unit))?;
        let link = || {
            let mut links = machine.links("by-path").into_iter();
            let link = links.find(|(name, _)| policy::is_iscsi_path(name, disk, portal, transport));
            link.filter(|(_, path)| path.exists()).map(|(_, path)| path)
        };
        machine.wait_for(machine.patience, link).ok_or_else(|| {
            let seconds = machine.patience.as_secs();
            Error::unmet(format!("Timed out waiting for the device of portal {portal} after {seconds}s"))
        })
    }

    fn login(&self, portal: &str) -> Result<(), Error> {
        let interface = &self.disk.interface;
        let discovery = iscsiadm(self.machine, "discoverydb").setting("-t", "sendtargets");
        let discovery = discovery.setting("-p", portal).setting("-I", interface);
        let any_interface = self.node(portal);
        let node = any_interface.clone().setting("-I", interface);
        // An existing record is sufficient.
        let _ = run(&discovery.clone().setting("-o", "new"));
        if self.disk.chap_discovery {
            self.chap(&discovery, "discovery.sendtargets.auth.authmethod", false)?;
        }
        if let Err(why) = succeed(&discovery.clone().flag("--discover")) {
            let _ = run(&discovery.setting("-o", "delete"));
            return Err(Error::unmet(format!("iscsi: failed to sendtargets to portal {portal}: {why}")));
        }
        // Otherwise the kernel scans all units of the target, including units of other users.
        wish(&updated(&node, "node.session.scan", "manual"));
        if self.disk.chap_session {
            self.chap(&node, "node.session.auth.authmethod", true)?;
        }
        if let Err(why) = succeed(&node.clone().flag("--login")) {
            let _ = run(&node.setting("-o", "delete"));
            return Err(Error::unmet(format!("iscsi: failed to attach disk: {why}")));
        }
        // The machine must not wait for the target at boot.
        wish(&updated(&any_interface, "node.startup", "manual"));
        Ok(())
    }

    /// Returns the call of iscsiadm for the record of the target at a portal.
    fn node(&self, portal: &str) -> Program {
        iscsiadm(self.machine, "node").setting("-p", portal).setting("-T", &self.disk.target)
    }

    /// Sets the credentials (CHAP).
    fn chap(&self, to: &Program, method: &str, of_session: bool) -> Result<(), Error> {
        let settings = [(method, "CHAP")].into_iter().chain(policy::chap(of_session, self.secret));
        for (key, value) in settings {
            let set = succeed(&updated(to, key, value));
            // Omits iscsiadm's output, which may contain the value.
            set.map_err(|_| Error::unmet(format!("iscsi: failed to update {key:?} for CHAP")))?;
        }
        Ok(())
    }

    /// Makes a copy of the shown interface with its own initiator name.
    fn make_interface(&self, shown: &str, initiator: &str) -> Result<(), Error> {
        let settings = policy::interface_like(shown, initiator).map_err(Error::unmet_of)?;
        let interface = interface(self.machine, &self.disk.interface);
        let (status, said) = run(&interface.clone().setting("-o", "new"))?;
        if !status.success() && status.code() != Some(EXISTS) {
            return Err(Error::unmet(format!("iscsi: failed to create new iface: {}", said.trim())));
        }
        for (key, value) in &settings {
            if let Err(why) = succeed(&updated(&interface, key, value)) {
                self.remove_interface();
                return Err(Error::unmet(format!("iscsi: failed to update iface records: {why}")));
            }
        }
        Ok(())
    }

    /// Removes the interface that was made for the initiator.
    fn remove_interface(&self) {
        if self.disk.initiator.is_some() {
            wish(&interface(self.machine, &self.disk.interface).setting("-o", "delete"));
        }
    }

    /// Deletes the disk from the kernel. Logs out if the disk is the last one of its target.
    pub(crate) fn forget(&self, is_last: bool) -> Result<(), Error> {
        let Self { machine, disk, .. } = self;
        let devices = devices_of(machine, disk);
        let made = devices.iter().filter_map(|name| machine.multipath(&machine.dev.join(name)));
        let mut made: Vec<PathBuf> = made.collect();
        made.sort();
        made.dedup();
        machine.forget(&devices, &made);
        if !is_last || sessions(machine, &disk.target).is_empty() {
            return Ok(());
        }
        for portal in &disk.portals {
            let node = self.node(portal).setting("-I", &disk.interface);
            let_go(&node.clone().flag("--logout"))?;
            let_go(&node.setting("-o", "delete"))?;
        }
        self.remove_interface();
        Ok(())
    }
}

/// Returns the call of iscsiadm in a mode.
fn iscsiadm(machine: &Machine, mode: &'static str) -> Program {
    machine.program("iscsiadm").setting("-m", mode)
}

/// Returns the call of iscsiadm for the record of an interface.
fn interface(machine: &Machine, name: &str) -> Program {
    iscsiadm(machine, "iface").setting("-I", name)
}

/// Returns the call that changes a setting of a record.
fn updated(of: &Program, key: &str, value: &str) -> Program {
    of.clone().setting("-o", "update").setting("-n", key).setting("-v", value)
}

/// Runs a call that releases a session or a record. Treats "not found" as success.
fn let_go(program: &Program) -> Result<(), Error> {
    let (status, said) = run(program)?;
    if status.success() || matches!(status.code(), Some(NO_SESSION | NOTHING)) {
        return Ok(());
    }
    Err(Error::unmet(format!("iscsi: failed to detach disk: {} ({status})", said.trim())))
}

/// Runs an optional call; a failure is only logged.
fn wish(program: &Program) {
    if let Err(why) = succeed(program) {
        warn!("{why}");
    }
}

/// Runs iscsiadm and returns its output, or an error with the output if it fails.
fn succeed(program: &Program) -> Result<String, Error> {
    match run(program)? {
        (status, said) if status.success() => Ok(said),
        (status, said) => Err(Error::unmet(format!("iscsiadm failed ({status}): {}", said.trim()))),
    }
}

fn run(program: &Program) -> Result<(ExitStatus, String), Error> {
    let Ended { status, output, .. } = disk::run(program, disk::SHORT, SAID)?;
    Ok((status, String::from_utf8_lossy(&output).into_owned()))
}

/// Returns the sessions with a target: the number of the SCSI host and the path in sysfs.
fn sessions(machine: &Machine, target: &str) -> Vec<(u32, PathBuf)> {
    let all = machine.sys.join("class/iscsi_host");
    let mut found = Vec::new();
    for host in machine.names(&all) {
        let Some(number) = host.strip_prefix("host").and_then(|number| number.parse().ok()) else { continue };
        let device = all.join(&host).join("device");
        for session in machine.names(&device).into_iter().filter(|name| name.starts_with("session")) {
            let place = device.join(&session);
            let name = machine.text(&place.join("iscsi_session").join(&session).join("targetname"));
            if name.as_deref() == Some(target) {
                found.push((number, place));
            }
        }
    }
    found
}

/// Returns the SCSI hosts of a target's sessions, by portal.
fn hosts(machine: &Machine, target: &str) -> BTreeMap<String, u32> {
    let mut hosts = BTreeMap::new();
    for (number, session) in sessions(machine, target) {
        let connections = machine.names(&session).into_iter().filter(|name| name.starts_with("connection"));
        for connection in connections {
            let place = session.join(&connection).join("iscsi_connection").join(&connection);
            for kind in ["", "persistent_"] {
                let text = |what: &str| machine.text(&place.join(format!("{kind}{what}")));
                if let (Some(address), Some(port)) = (text("address"), text("port")) {
                    hosts.insert(policy::portal(&address, &port), number);
                }
            }
        }
    }
    hosts
}

/// Returns the kernel's names of a disk, one for each session with its target.
fn devices_of(machine: &Machine, disk: &IscsiDisk) -> Vec<String> {
    let unit = |(number, session): (u32, PathBuf)| {
        let place = format!("target{number}:0:0/{number}:0:0:{}/block", disk.unit);
        machine.names(&session.join(place)).into_iter().next()
    };
    sessions(machine, &disk.target).into_iter().filter_map(unit).collect()
}
