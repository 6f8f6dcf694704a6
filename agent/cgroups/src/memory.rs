//! A cgroup's memory: its working set, and descriptors with which the kernel signals that memory becomes
//! scarce.
//!
//! A descriptor is only a reason to measure: none of them means that memory is short. Descriptors end with
//! the cgroup, or when they are dropped.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::Duration;

use beelet_base::kernel_file;
use beelet_base::machine_memory::{MachineMemory, memory_stat};
use rustix::event::{EventfdFlags, eventfd};

use super::{CgroupError, Cgroups, Hierarchy};

/// Windows of a PSI trigger to try: any length for privileged processes, multiples of 2 s for others
/// (kernel: Documentation/accounting/psi.rst, `WINDOW_MIN_US` and the check in `psi_trigger_create`).
const PSI_WINDOWS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(2)];
/// Lower bound of version 1 limits that mean "no limit": the kernel rounds its largest number down to a page.
const NO_LIMIT: u64 = i64::MAX as u64 - (1 << 20);

/// Memory of a cgroup in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryUse {
    /// All memory charged to the cgroup.
    pub usage: u64,
    /// Usage without inactive file pages, which the kernel would reclaim first: the kubelet's working set.
    pub working_set: u64,
    /// The limit, if any.
    pub limit: Option<u64>,
}

impl Cgroups {
    /// Returns the memory of the cgroup `path` and those below it; `None` if it does not exist (any more).
    #[must_use]
    pub fn memory_use(&self, path: &str) -> Option<MemoryUse> {
        let number = |file: &str| self.read(path, file)?.parse::<u64>().ok();
        let (usage, limit, inactive) = if self.hierarchy_of("memory")?.is_v2 {
            (number("memory.current")?, number("memory.max"), "inactive_file")
        } else {
            let limit = number("memory.limit_in_bytes").filter(|limit| *limit < NO_LIMIT);
            (number("memory.usage_in_bytes")?, limit, "total_inactive_file")
        };
        let inactive = memory_stat(&self.read(path, "memory.stat")?, inactive).unwrap_or(0);
        Some(MemoryUse { usage, working_set: usage.saturating_sub(inactive), limit })
    }

    /// Returns the machine's memory; `meminfo` is the text of `/proc/meminfo`. `None` if it lacks a line.
    #[must_use]
    pub fn machine_memory(&self, meminfo: &str) -> Option<MachineMemory> {
        MachineMemory::of(meminfo, self.root_memory_stat().as_deref())
    }

    /// Returns the `memory.stat` of cgroup2's real root. A container with a cgroup namespace sees its own
    /// cgroup as the root: only the real one has no `memory.current`.
    fn root_memory_stat(&self) -> Option<String> {
        let root = &self.hierarchies().iter().find(|hierarchy| hierarchy.is_v2)?.mount;
        if root.join("memory.current").exists() {
            return None;
        }
        kernel_file::read_to_string(root.join("memory.stat")).ok()
    }

    /// Returns the number of processes and threads in the cgroup `path` and below it; `None` if they are not
    /// counted.
    #[must_use]
    pub fn pids_use(&self, path: &str) -> Option<u64> {
        self.read(path, "pids.current")?.parse().ok()
    }

    /// Returns a descriptor that becomes readable (with priority) whenever tasks of `path` have waited for
    /// memory for `stall` within a second, or within two if this process lacks CAP_SYS_RESOURCE. Requires
    /// cgroup2 (also on a hybrid machine) and PSI.
    ///
    /// # Errors
    /// cgroup2 is not mounted, or the kernel has no PSI.
    pub fn pressure_trigger(&self, path: &str, stall: Duration) -> Result<OwnedFd, CgroupError> {
        let file = self
            .cgroup2_path(path)
            .ok_or(CgroupError::NoController { controller: "memory.pressure" })?
            .join("memory.pressure");
        let mut refused = None;
        for window in PSI_WINDOWS {
            match trigger(&file, stall, window) {
                Ok(fd) => return Ok(fd),
                Err(error) => refused = Some(error),
            }
        }
        let error = refused.unwrap_or_else(|| io::ErrorKind::InvalidInput.into());
        Err(CgroupError::io("set a pressure trigger in", &file, error))
    }

    /// Returns a descriptor that becomes readable (with priority) whenever a counter of `path`'s
    /// `memory.events` changes. Version 2 only. Each time the caller must read the file from its beginning.
    ///
    /// # Errors
    /// The file is missing.
    pub fn memory_events(&self, path: &str) -> Result<OwnedFd, CgroupError> {
        let file = self.memory_dir(path)?.join("memory.events");
        let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&file);
        opened.map(OwnedFd::from).map_err(|error| CgroupError::io("open", &file, error))
    }

    /// Returns a descriptor that becomes readable whenever the memory charged to `path` crosses `bytes`, up
    /// or down. Version 1 only.
    ///
    /// # Errors
    /// The kernel lacks this notification (version 2, or an RT kernel).
    pub fn usage_threshold(&self, path: &str, bytes: u64) -> Result<OwnedFd, CgroupError> {
        let dir = self.memory_dir(path)?;
        let usage_file = dir.join("memory.usage_in_bytes");
        let control = dir.join("cgroup.event_control");
        let usage =
            fs::File::open(&usage_file).map_err(|error| CgroupError::io("open", &usage_file, error))?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| CgroupError::io("make an eventfd for", &usage_file, error.into()))?;
        // The kernel keeps its own reference to the eventfd; closing ours cancels the notification.
        let line = format!("{} {} {bytes}", event.as_raw_fd(), usage.as_raw_fd());
        fs::write(&control, line)
            .map_err(|error| CgroupError::io("request notifications in", &control, error))?;
        Ok(event)
    }

    fn memory_dir(&self, path: &str) -> Result<PathBuf, CgroupError> {
        let hierarchy: &Hierarchy =
            self.hierarchy_of("memory").ok_or(CgroupError::NoController { controller: "memory" })?;
        Ok(hierarchy.mount.join(self.relative(path)?))
    }
}

fn trigger(file: &std::path::Path, stall: Duration, window: Duration) -> io::Result<OwnedFd> {
    let mut opened = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(file)?;
    let stall = stall.min(window);
    // A single write, with the terminator that the kernel requires.
    opened.write_all(format!("some {} {}\0", stall.as_micros(), window.as_micros()).as_bytes())?;
    Ok(opened.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Layout, Version};

    #[test]
    fn the_machines_memory_is_that_of_the_real_root_only() {
        let mount = tempfile::tempdir().unwrap();
        fs::write(mount.path().join("cgroup.controllers"), "cpu memory").unwrap();
        let unified = Hierarchy { mount: mount.path().into(), is_v2: true, controllers: [].into() };
        let layout = Layout { version: Version::V2, hierarchies: vec![unified] };
        let cgroups = Cgroups::over_folders(layout, "/").unwrap();
        let meminfo = "MemTotal: 100 kB\nAnonPages: 10 kB\nCached: 20 kB\nBuffers: 0 kB\nSwapCached: 0 kB\n\
                       Inactive(file): 5 kB\n";
        let usage = || cgroups.machine_memory(meminfo).map(|memory| memory.usage);
        assert_eq!(usage(), Some(30 << 10), "the file is missing");
        let write = |file: &str, text: &str| fs::write(mount.path().join(file), text).unwrap();
        write("memory.stat", "anon 1\nfile 2\ninactive_file 1\n");
        assert_eq!(usage(), Some(3));
        write("memory.current", "9");
        assert_eq!(usage(), Some(30 << 10), "the root of a namespace");
    }
}
