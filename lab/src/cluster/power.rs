//! Power of a machine: off, on, and the end of the machine.

use std::fs;

use anyhow::{Context as _, Result, bail};
use beelet_tests::guards::CgroupRoot;
use beelet_tests::workdir;
use rustix::process::{Pid, Signal, kill_process};

use super::disk;
use super::machine::{Machine, PATIENCE, cgroup};

/// Cuts the power: kills every process of the machine, and removes what a machine loses then.
pub(super) fn off(machine: &Machine) -> Result<()> {
    let holder = machine.holder()?;
    let own = |pid: &Pid| fs::read_link(format!("/proc/{}/ns/mnt", pid.as_raw_nonzero())).ok();
    let namespace = own(&holder).context("the machine's mount namespace")?;
    if fs::read_link("/proc/self/ns/mnt").ok().as_ref() == Some(&namespace) {
        bail!("the machine {} has the host's mount namespace", machine.name);
    }
    let _ = machine.run(&["sh", "-c", "rm -f /run/units/*.want"]);
    // Daemons that a signal ends one by one start others meanwhile: repeat until none is left.
    workdir::wait_regardless("the machine's processes to end", PATIENCE, || {
        let left: Vec<Pid> = processes()
            .into_iter()
            .filter(|pid| *pid != holder && own(pid).as_ref() == Some(&namespace))
            .collect();
        for pid in &left {
            // The process may have ended just now.
            let _ = kill_process(*pid, Signal::KILL);
        }
        // Kills the containers and removes the cgroup.
        drop(CgroupRoot::new(&cgroup(&machine.name)).map_err(|error| error.to_string())?);
        if left.is_empty() { Ok(()) } else { Err(format!("{} processes", left.len())) }
    })
}

/// Starts a machine whose power was cut: mounts, sockets and the network of pods are lost, and the boot
/// has another id.
pub(super) fn on(machine: &Machine) -> Result<()> {
    machine.run(&["sh", "-c", LOST])?;
    std::mem::forget(CgroupRoot::new(&cgroup(&machine.name))?);
    machine.start_containerd()?;
    machine.run(&["systemctl", "start", "kubelet"]).map(drop)
}

/// Removes the machine.
pub(super) fn remove(machine: &Machine) -> Result<()> {
    if let Ok(holder) = machine.holder() {
        off(machine)?;
        let _ = kill_process(holder, Signal::KILL);
        let gone = || if machine.is_up() { Err("the holder still runs") } else { Ok(()) };
        workdir::wait_regardless("the machine's holder to end", PATIENCE, gone)?;
    }
    disk::remove(machine.dir())?;
    let removed = || fs::remove_dir_all(machine.dir());
    workdir::wait_regardless("the machine's folder to be removed", PATIENCE, removed)
}

/// The end of a boot, as a script: what only memory had.
const LOST: &str = r#"
for point in $(awk '$2 ~ "^(/run/containerd|/run/netns|/var/lib/kubelet/pods|/run/beelet)" { print $2 }' /proc/self/mounts | sort -r); do
    umount -l "$point"
done
rm -rf /run/containerd /run/netns /run/beelet /run/units /run/xtables.lock /sys/fs/bpf/* /var/lib/cni/*
mkdir -p /run/containerd /run/netns /run/units
ip link del cni0 2>/dev/null
for table in filter nat mangle; do iptables -t $table -F; iptables -t $table -X; done
umount /proc/sys/kernel/random/boot_id 2>/dev/null
cat /proc/sys/kernel/random/uuid > /run/boot_id
mount --bind /run/boot_id /proc/sys/kernel/random/boot_id
"#;

fn processes() -> Vec<Pid> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?)).collect()
}
