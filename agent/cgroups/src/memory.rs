//! A cgroup's memory: how much of it is really needed, and descriptors on which the kernel says that it gets
//! tight.
//!
//! A descriptor is only a reason to look: none of them says that anything is short. They end with the cgroup,
//! or when they are dropped.

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

/// Windows of a PSI trigger that are tried: any length for the privileged, multiples of 2 s for others
/// (kernel: Documentation/accounting/psi.rst, `WINDOW_MIN_US` and the check in `psi_trigger_create`).
const PSI_WINDOWS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(2)];
/// From here on a version 1 limit means none: the kernel rounds its largest number down to a page.
const NO_LIMIT: u64 = i64::MAX as u64 - (1 << 20);

/// What a cgroup's memory is like, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryUse {
    /// All that is charged to it.
    pub usage: u64,
    /// Without what the kernel would give back first: file pages that nobody touched lately. What the kubelet
    /// calls the working set.
    pub working_set: u64,
    /// The limit; None: none.
    pub limit: Option<u64>,
}

impl Cgroups {
    /// The memory of the cgroup `path` and all below it; None if it isn't there (any more).
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

    /// The machine's memory, of which `meminfo` is the text of `/proc/meminfo`; None if that lacks a line.
    #[must_use]
    pub fn machine_memory(&self, meminfo: &str) -> Option<MachineMemory> {
        MachineMemory::of(meminfo, self.root_memory_stat().as_deref())
    }

    /// The `memory.stat` of cgroup2's real root. A container with a cgroup namespace sees its own
    /// cgroup as the root: only the real one has no `memory.current`.
    fn root_memory_stat(&self) -> Option<String> {
        let root = &self.hierarchies().iter().find(|hierarchy| hierarchy.is_v2)?.mount;
        if root.join("memory.current").exists() {
            return None;
        }
        kernel_file::read_to_string(root.join("memory.stat")).ok()
    }

    /// The processes and threads in the cgroup `path` and below it; None where nobody counts them.
    #[must_use]
    pub fn pids_use(&self, path: &str) -> Option<u64> {
        self.read(path, "pids.current")?.parse().ok()
    }

    /// Readable (with priority) whenever tasks of `path` have waited for memory for `stall` within a second,
    /// or within two where this process lacks CAP_SYS_RESOURCE. Needs cgroup2 (hybrid will do) and PSI.
    ///
    /// # Errors
    /// There is no cgroup2, or the kernel has no PSI.
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

    /// Readable (with priority) whenever a counter of `path`'s `memory.events` moves. Version 2 only. Each
    /// time the file must be read, from its beginning.
    ///
    /// # Errors
    /// There is no such file.
    pub fn memory_events(&self, path: &str) -> Result<OwnedFd, CgroupError> {
        let file = self.memory_dir(path)?.join("memory.events");
        let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&file);
        opened.map(OwnedFd::from).map_err(|error| CgroupError::io("open", &file, error))
    }

    /// Readable whenever the memory charged to `path` crosses so many bytes, up or down. Version 1 only.
    ///
    /// # Errors
    /// The kernel has no such notification here (version 2, or an RT kernel).
    pub fn usage_threshold(&self, path: &str, bytes: u64) -> Result<OwnedFd, CgroupError> {
        let dir = self.memory_dir(path)?;
        let usage_file = dir.join("memory.usage_in_bytes");
        let control = dir.join("cgroup.event_control");
        let usage =
            fs::File::open(&usage_file).map_err(|error| CgroupError::io("open", &usage_file, error))?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| CgroupError::io("make an eventfd for", &usage_file, error.into()))?;
        // The kernel keeps its own reference to the eventfd; closing ours takes the notification back.
        let line = format!("{} {} {bytes}", event.as_raw_fd(), usage.as_raw_fd());
        fs::write(&control, line)
            .map_err(|error| CgroupError::io("ask for notifications in", &control, error))?;
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
    // One write, with the end that the kernel wants.
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
        assert_eq!(usage(), Some(30 << 10), "there is no file");
        let write = |file: &str, text: &str| fs::write(mount.path().join(file), text).unwrap();
        write("memory.stat", "anon 1\nfile 2\ninactive_file 1\n");
        assert_eq!(usage(), Some(3));
        write("memory.current", "9");
        assert_eq!(usage(), Some(30 << 10), "the root of a namespace");
    }
}
