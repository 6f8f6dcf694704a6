//! Descriptors with which the kernel signals that memory becomes scarce.
//!
//! A descriptor is only a reason to measure: none of them means that memory is short. Descriptors end with
//! the cgroup, or when they are dropped.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

use super::{CgroupError, Cgroups, Hierarchy};

/// Windows of a PSI trigger to try: any length for privileged processes, multiples of 2 s for others
/// (kernel: Documentation/accounting/psi.rst, `WINDOW_MIN_US` and the check in `psi_trigger_create`).
const PSI_WINDOWS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(2)];
/// Returns a descriptor that becomes readable (with priority) whenever tasks of `path` have waited for
/// memory for `stall` within a second, or within two if this process lacks CAP_SYS_RESOURCE. Requires
/// cgroup2 (also on a hybrid machine) and PSI.
///
/// # Errors
/// cgroup2 is not mounted, or the kernel has no PSI.
pub fn pressure(cgroups: &Cgroups, path: &str, stall: Duration) -> Result<OwnedFd, CgroupError> {
    let file = cgroups
        .paths
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
pub fn memory_events(cgroups: &Cgroups, path: &str) -> Result<OwnedFd, CgroupError> {
    let file = memory_dir(cgroups, path)?.join("memory.events");
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&file);
    opened.map(OwnedFd::from).map_err(|error| CgroupError::io("open", &file, error))
}

/// Returns a descriptor that becomes readable whenever the memory charged to `path` crosses `bytes`, up
/// or down. Version 1 only.
///
/// # Errors
/// The kernel lacks this notification (version 2, or an RT kernel).
pub fn usage_threshold(cgroups: &Cgroups, path: &str, bytes: u64) -> Result<OwnedFd, CgroupError> {
    let dir = memory_dir(cgroups, path)?;
    let usage_file = dir.join("memory.usage_in_bytes");
    let control = dir.join("cgroup.event_control");
    let usage = fs::File::open(&usage_file).map_err(|error| CgroupError::io("open", &usage_file, error))?;
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(|error| CgroupError::io("make an eventfd for", &usage_file, error.into()))?;
    // The kernel keeps its own reference to the eventfd; closing ours cancels the notification.
    let line = format!("{} {} {bytes}", event.as_raw_fd(), usage.as_raw_fd());
    fs::write(&control, line)
        .map_err(|error| CgroupError::io("request notifications in", &control, error))?;
    Ok(event)
}

fn memory_dir(cgroups: &Cgroups, path: &str) -> Result<PathBuf, CgroupError> {
    let hierarchy: &Hierarchy =
        cgroups.paths.hierarchy_of("memory").ok_or(CgroupError::NoController { controller: "memory" })?;
    Ok(hierarchy.mount.join(cgroups.paths.relative(path)?))
}

fn trigger(file: &std::path::Path, stall: Duration, window: Duration) -> io::Result<OwnedFd> {
    let mut opened = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(file)?;
    let stall = stall.min(window);
    // A single write, with the terminator that the kernel requires.
    opened.write_all(format!("some {} {}\0", stall.as_micros(), window.as_micros()).as_bytes())?;
    Ok(opened.into())
}
