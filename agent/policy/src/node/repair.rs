//! Conditions of a Node that node repair acts on: faults of the machine, judged from measured facts, under
//! the names of a convention.
//!
//! - `EKS`: the names of the EKS node monitoring agent, which the repair policies of EKS and of Karpenter's
//!   AWS provider read. The condition is `False` while the fault lasts.
//! - `NodeProblemDetector`: the names of node-problem-detector's kernel monitor and health checker. The
//!   condition is `True` while the fault lasts.

use std::collections::BTreeMap;
use std::time::Duration;

/// Time without an answer after which the container runtime counts as hung: three of the longest periods
/// between two relists.
const SILENT: Duration = Duration::from_secs(15);
/// Time for which a lockup counts after its last message: the watchdog repeats the message each 20 to 30 s.
const LOCKUP: Duration = Duration::from_secs(90);
/// Percentage of a file system's bytes below which the file system is full.
const FULL_PERCENT: u64 = 1;
/// Maximum number of hung tasks and of failed file systems that are remembered.
const MOST: usize = 64;
/// Maximum length of a kernel message in a condition, in characters.
const LONGEST: usize = 200;

/// A set of condition names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Convention {
    /// The EKS node monitoring agent's.
    Eks,
    /// node-problem-detector's.
    NodeProblemDetector,
}

impl Convention {
    /// All conventions with their names in the configuration.
    pub const NAMES: [(&str, Self); 2] =
        [("EKS", Self::Eks), ("NodeProblemDetector", Self::NodeProblemDetector)];
}

/// Kind of a fault. The names are the conditions' reasons.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// The container runtime does not answer.
    ContainerRuntimeNotAnswering,
    /// A file system of the agent is mounted read-only.
    FilesystemIsReadOnly,
    /// The kernel has shut down a file system of the agent.
    FilesystemIsShutDown,
    /// A file system of the agent does not answer.
    FilesystemHangs,
    /// A file system of the agent fails.
    FilesystemFails,
    /// A file system of the agent has no room.
    FilesystemIsFull,
    /// The kernel has died in one of its threads.
    KernelOops,
    /// A CPU does not leave the kernel.
    CpuLockup,
    /// A task waits in the kernel for minutes.
    TaskHung,
    /// The agent cannot read the kernel's log, so lockups and hung tasks are unknown.
    KernelLogUnreadable,
    /// The pods' network is not ready.
    PodNetworkNotReady,
    /// The node has no address.
    NoAddress,
}

/// A fault of the machine.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fault {
    /// The kind.
    pub reason: Reason,
    /// A sentence with the place and the cause.
    pub message: String,
}

/// Measured state of the file system of one of the agent's folders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// The folder.
    pub folder: String,
    /// Name of the file system's device without `/dev/`; empty if unknown.
    pub device: String,
    /// The measurement.
    pub state: DiskState,
}

/// Measurement of a file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskState {
    /// The kernel measured it.
    Measured {
        /// True if the file system is mounted read-only.
        read_only: bool,
        /// Size in bytes.
        capacity: u64,
        /// Room for the agent in bytes.
        available: u64,
        /// Number of inodes; 0 if the file system has no fixed number.
        inodes: u64,
        /// Number of free inodes.
        inodes_free: u64,
    },
    /// The measurement did not return in time.
    Hangs,
    /// The measurement failed with this cause.
    Fails(String),
}

/// Returns the fault of a container runtime that has not answered for `silence`.
#[must_use]
pub fn runtime(silence: Duration) -> Option<Fault> {
    // The Node is written at each change of a message, so the message has no counter.
    let message = || format!("the container runtime has not answered for {} s or longer", SILENT.as_secs());
    (silence >= SILENT).then(|| Fault { reason: Reason::ContainerRuntimeNotAnswering, message: message() })
}

/// Returns the fault of a file system, with the kernel's messages about it.
#[must_use]
pub fn disk(disk: &Disk, log: &KernelLog) -> Option<Fault> {
    let Disk { folder, device, state } = disk;
    let kernel = log.file_systems.get(device).filter(|_| !device.is_empty());
    let said = |words: &str| kernel.map_or_else(|| words.to_owned(), |line| format!("{words}: {line}"));
    let (reason, words) = match state {
        DiskState::Hangs => (Reason::FilesystemHangs, "does not answer".to_owned()),
        DiskState::Fails(cause) => (Reason::FilesystemFails, format!("fails: {cause}")),
        DiskState::Measured { read_only: true, .. } => (Reason::FilesystemIsReadOnly, said("is read-only")),
        DiskState::Measured { .. } if kernel.is_some_and(|line| line.contains(SHUT_DOWN)) => {
            (Reason::FilesystemIsShutDown, said("was shut down by the kernel"))
        }
        DiskState::Measured { capacity, available, inodes, inodes_free, .. } => {
            let is_full = *available < capacity / 100 * FULL_PERCENT;
            match (is_full, *inodes > 0 && *inodes_free == 0) {
                (true, _) => (
                    Reason::FilesystemIsFull,
                    format!("is full: less than {FULL_PERCENT} % of {capacity} bytes is available"),
                ),
                (false, true) => {
                    (Reason::FilesystemIsFull, format!("is full: none of {inodes} inodes is free"))
                }
                (false, false) => return None,
            }
        }
    };
    Some(Fault { reason, message: format!("the file system of {folder} {words}") })
}

/// Returns the faults of the network: of the pods', as the runtime reports it, and of the node's own.
#[must_use]
pub fn network(not_ready: Option<&str>, has_address: bool) -> Vec<Fault> {
    let pods = not_ready.map(|why| Fault { reason: Reason::PodNetworkNotReady, message: why.to_owned() });
    let own = (!has_address).then(|| Fault {
        reason: Reason::NoAddress,
        message: "no interface has an address of the node".to_owned(),
    });
    pods.into_iter().chain(own).collect()
}

/// XFS' words for a file system that fails every request from now on.
const SHUT_DOWN: &str = "Shutting down filesystem";
/// The words of ext4, and of btrfs, for a file system that takes no writes from now on.
const READ_ONLY: [&str; 2] = ["Remounting filesystem read-only", "forced readonly"];

/// Faults in the kernel's log. The log is not a state: an oops counts until the next boot, a hung task as
/// long as it hangs, a lockup for a while after its last message, and a file system's shutdown until the file
/// system is mounted again. A message of the kernel can contain a name that a program has chosen (of itself,
/// of a mapped file), so each form is recognized by its start and its end, which a chosen name cannot fake.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelLog {
    oops: Option<String>,
    /// Time of the last message since boot, and the message.
    lockup: Option<(Duration, String)>,
    hung: BTreeMap<u32, String>,
    /// The last message about a failed file system, by device.
    file_systems: BTreeMap<String, String>,
}

impl KernelLog {
    /// Adds a record of `/dev/kmsg` (Documentation/ABI/testing/dev-kmsg). Only the kernel's own records
    /// count: the kernel marks those that a program has written.
    pub fn add(&mut self, record: &str) {
        let Some((prefix, line)) = record.split_once(';') else { return };
        let mut fields = prefix.split(',');
        let number = |field: Option<&str>| field.and_then(|text| text.parse::<u64>().ok());
        let (Some(priority), Some(_), Some(micros)) =
            (number(fields.next()), number(fields.next()), number(fields.next()))
        else {
            return;
        };
        // The facility is above the three bits of the level; the kernel's own is 0.
        if priority >> 3 == 0 {
            self.add_line(line, Duration::from_micros(micros));
        }
    }

    fn add_line(&mut self, line: &str, at: Duration) {
        let text: String = line.chars().filter(|c| !c.is_control()).take(LONGEST).collect();
        if let Some(tid) = hung_task(line) {
            if self.hung.len() < MOST {
                self.hung.insert(tid, text);
            }
        } else if is_lockup(line) {
            self.lockup = Some((at, text));
        } else if is_oops(line) {
            self.oops.get_or_insert(text);
        } else if let Some(device) = mounted_device(line) {
            self.file_systems.remove(device);
        } else if let Some(device) = failed_device(line)
            && (self.file_systems.len() < MOST || self.file_systems.contains_key(device))
        {
            self.file_systems.insert(device.to_owned(), text);
        }
    }

    /// Returns the threads that hung when they were last reported.
    pub fn hung_tasks(&self) -> impl Iterator<Item = u32> {
        self.hung.keys().copied()
    }

    /// Forgets the threads that do not hang any more.
    pub fn retain_hung(&mut self, hangs: impl Fn(u32) -> bool) {
        self.hung.retain(|tid, _| hangs(*tid));
    }

    /// Returns the kernel's faults at this time since boot. The kernel `has_oopsed` by its own mark
    /// (`TAINT_DIE`, Documentation/admin-guide/tainted-kernels.rst): the log adds only the line, which may be
    /// lost. `unreadable` is the reason why the log cannot be read.
    #[must_use]
    pub fn faults(&self, now: Duration, has_oopsed: bool, unreadable: Option<&str>) -> Vec<Fault> {
        let fault = |reason, line: &String| Fault { reason, message: format!("kernel: {line}") };
        let marked = || "the kernel's taint flags show an oops since boot".to_owned();
        let oops = has_oopsed.then(|| match &self.oops {
            Some(line) => fault(Reason::KernelOops, line),
            None => Fault { reason: Reason::KernelOops, message: marked() },
        });
        let lockup = self.lockup.as_ref().filter(|(at, _)| now.saturating_sub(*at) < LOCKUP);
        let lockup = lockup.map(|(_, line)| fault(Reason::CpuLockup, line));
        let hung = self.hung.values().next().map(|line| fault(Reason::TaskHung, line));
        let unreadable = unreadable.map(|why| Fault {
            reason: Reason::KernelLogUnreadable,
            message: format!("the kernel's log cannot be read, so its faults are unknown: {why}"),
        });
        oops.into_iter().chain(lockup).chain(hung).chain(unreadable).collect()
    }
}

/// Returns the thread of a message of the hung task detector (kernel/hung_task.c).
fn hung_task(line: &str) -> Option<u32> {
    let (task, rest) = line.strip_prefix("INFO: task ")?.split_once(" blocked ")?;
    let waits = rest.starts_with("for more than ") || rest.starts_with("in I/O wait for more than ");
    // A name may contain colons.
    task.rsplit_once(':').filter(|_| waits && rest.ends_with(" seconds."))?.1.parse().ok()
}

/// Returns true for a message of the watchdogs (kernel/watchdog.c, kernel/watchdog_perf.c).
fn is_lockup(line: &str) -> bool {
    let line = line.strip_prefix("NMI ").unwrap_or(line);
    let Some(message) = line.strip_prefix("watchdog: ") else { return false };
    // Newer kernels name the CPU that has found the lockup.
    let finder = message.strip_prefix("CPU").and_then(|rest| rest.split_once(": "));
    let found = finder.filter(|(cpu, _)| cpu.parse::<u32>().is_ok()).map_or(message, |(_, rest)| rest);
    found.starts_with("BUG: soft lockup - CPU#") || found.starts_with("Watchdog detected hard LOCKUP on cpu ")
}

/// Returns true for the line of an oops: each architecture's `die` writes the number of the oops since boot
/// in this form (arch/x86/kernel/dumpstack.c, arch/arm64/kernel/traps.c).
fn is_oops(line: &str) -> bool {
    line.split("[#").skip(1).any(|rest| {
        rest.split_once(']').is_some_and(|(number, _)| {
            !number.is_empty() && number.len() <= 9 && number.bytes().all(|byte| byte.is_ascii_digit())
        })
    })
}

/// Returns the device and the words of a message about a file system: `EXT4-fs (sda1): …`, `XFS (dm-0): …`,
/// `BTRFS info (device sdb state EA): …`.
fn of_file_system(line: &str) -> Option<(&str, &str)> {
    let (kind, rest) = line.split_once(" (")?;
    let (named, words) = rest.split_once("): ")?;
    let is_known = matches!(kind, "XFS" | "EXT4-fs") || kind.starts_with("BTRFS ");
    let device = named.strip_prefix("device ").unwrap_or(named).split(' ').next()?;
    (is_known && !device.is_empty()).then_some((device, words))
}

/// Returns the device of a file system that the kernel has taken out of use.
fn failed_device(line: &str) -> Option<&str> {
    let (device, words) = of_file_system(line)?;
    let is_shut_down = words.trim_end_matches('.').ends_with(SHUT_DOWN);
    (is_shut_down || READ_ONLY.contains(&words)).then_some(device)
}

/// Returns the device of a file system that is mounted again, or not mounted any more (fs/xfs/xfs_log.c,
/// fs/xfs/xfs_super.c). A file system that was shut down takes no requests until then.
fn mounted_device(line: &str) -> Option<&str> {
    let (device, words) = of_file_system(line)?;
    let is_anew = ["Mounting V", "Unmounting Filesystem"].iter().any(|start| words.starts_with(start));
    is_anew.then_some(device)
}

/// A condition of the Node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// The type.
    pub name: &'static str,
    /// The status: None for `Unknown`.
    pub holds: Option<bool>,
    /// The reason.
    pub reason: String,
    /// The message.
    pub message: String,
}

/// A condition of a convention: name, status without a fault, reason and message without a fault, and the
/// faults, in the order of their weight.
type Row = (&'static str, bool, &'static str, &'static str, &'static [Reason]);

const EKS: [Row; 4] = [
    (
        "ContainerRuntimeReady",
        true,
        "ContainerRuntimeIsReady",
        "the container runtime answers",
        &[Reason::ContainerRuntimeNotAnswering],
    ),
    ("StorageReady", true, "StorageIsReady", "the agent's file systems take writes", &STORAGE),
    (
        "KernelReady",
        true,
        "KernelIsReady",
        "the kernel reports no fault",
        &[Reason::KernelOops, Reason::CpuLockup, Reason::TaskHung, Reason::KernelLogUnreadable],
    ),
    (
        "NetworkingReady",
        true,
        "NetworkingIsReady",
        "the node has an address, and the pods' network is ready",
        &[Reason::NoAddress, Reason::PodNetworkNotReady],
    ),
];
const STORAGE: [Reason; 5] = [
    Reason::FilesystemIsReadOnly,
    Reason::FilesystemIsShutDown,
    Reason::FilesystemHangs,
    Reason::FilesystemFails,
    Reason::FilesystemIsFull,
];
/// Source: config/kernel-monitor.json, config/readonly-monitor.json and config/health-checker-containerd.json
/// of node-problem-detector. An oops and a full disk are events there, and no conditions.
const NODE_PROBLEM_DETECTOR: [Row; 3] = [
    (
        "KernelDeadlock",
        false,
        "KernelHasNoDeadlock",
        "kernel has no deadlock",
        &[Reason::CpuLockup, Reason::TaskHung, Reason::KernelLogUnreadable],
    ),
    (
        "ReadonlyFilesystem",
        false,
        "FilesystemIsNotReadOnly",
        "Filesystem is not read-only",
        &[Reason::FilesystemIsReadOnly, Reason::FilesystemIsShutDown],
    ),
    (
        "ContainerRuntimeUnhealthy",
        false,
        "ContainerRuntimeIsHealthy",
        "Container runtime on the node is functioning properly",
        &[Reason::ContainerRuntimeNotAnswering],
    ),
];

/// Returns the conditions of a convention for these faults.
#[must_use]
pub fn conditions(convention: Convention, faults: &[Fault]) -> Vec<Condition> {
    let rows: &[Row] = match convention {
        Convention::Eks => &EKS,
        Convention::NodeProblemDetector => &NODE_PROBLEM_DETECTOR,
    };
    let condition = |(name, healthy, reason, message, reasons): &Row| {
        let found = reasons.iter().find_map(|one| faults.iter().find(|fault| fault.reason == *one));
        match found {
            None => Condition {
                name,
                holds: Some(*healthy),
                reason: (*reason).to_owned(),
                message: (*message).to_owned(),
            },
            Some(fault) => Condition {
                name,
                holds: (fault.reason != Reason::KernelLogUnreadable).then_some(!healthy),
                reason: format!("{:?}", fault.reason),
                message: fault.message.clone(),
            },
        }
    };
    rows.iter().map(condition).collect()
}

#[cfg(test)]
mod tests;
