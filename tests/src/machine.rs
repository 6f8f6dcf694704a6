//! Values from the kernel's files about the machine, a process or a cgroup, for comparison in tests and
//! benches.

use crate::guards::CgroupRoot;
use crate::workdir;
use anyhow::{Context as _, Result};
use std::path::Path;
use std::time::Duration;

/// Returns the machine's memory in KiB (`MemTotal`).
///
/// # Errors
/// /proc/meminfo has an unexpected format.
pub fn memory_kib() -> Result<u64> {
    kib("/proc/meminfo", "MemTotal:")
}

/// Returns the resident memory of a process in KiB (`VmRSS`).
///
/// # Errors
/// The process has ended.
pub fn resident_kib(pid: u32) -> Result<u64> {
    kib(&format!("/proc/{pid}/status"), "VmRSS:")
}

/// Returns the proportional memory of a process in KiB (`Pss`): shared pages count in part.
///
/// # Errors
/// The process has ended.
pub fn proportional_kib(pid: u32) -> Result<u64> {
    kib(&format!("/proc/{pid}/smaps_rollup"), "Pss:")
}

/// Returns the peak resident memory of a process in KiB (`VmHWM`).
///
/// # Errors
/// The process has ended.
pub fn peak_kib(pid: u32) -> Result<u64> {
    kib(&format!("/proc/{pid}/status"), "VmHWM:")
}

/// Returns the CPU time of a process, user and system, of all its threads.
///
/// # Errors
/// The process has ended.
pub fn cpu_of(pid: u32) -> Result<Duration> {
    let stat = workdir::read(Path::new(&format!("/proc/{pid}/stat")))?;
    // The name in parentheses may contain blanks; utime and stime are the 14th and 15th field (proc(5)).
    let rest = stat.rsplit_once(')').map(|(_, rest)| rest).unwrap_or_default();
    let field = |n: usize| rest.split_whitespace().nth(n - 3).and_then(|word| word.parse::<f64>().ok());
    let ticks = field(14).zip(field(15)).map(|(user, system)| user + system);
    let seconds =
        ticks.context("/proc has an unexpected format")? / rustix::param::clock_ticks_per_second() as f64;
    Ok(Duration::from_secs_f64(seconds))
}

/// Returns the CPU time of a cgroup in seconds, by the controller that counts it on this machine; `path` is
/// relative to `root`'s own.
///
/// # Errors
/// The cgroup has been removed.
pub fn cpu_seconds_of(root: &CgroupRoot, path: &str) -> Result<f64> {
    let v1 = root.folder("cpuacct", path).map(|dir| dir.join("cpuacct.usage"));
    if let Some(file) = v1.filter(|file| file.exists()) {
        return Ok(workdir::read(&file)?.trim().parse::<f64>()? / 1e9);
    }
    let dir = root.folder("unified", path).context("no cgroup2 hierarchy")?;
    let stat = workdir::read(&dir.join("cpu.stat"))?;
    let micros = stat.lines().find_map(|line| line.strip_prefix("usage_usec "));
    Ok(micros.context("no usage in cpu.stat")?.trim().parse::<f64>()? / 1e6)
}

/// Returns the seconds of CPU time since boot that a hypervisor gave to others while tasks of this machine
/// wanted it.
///
/// # Errors
/// /proc/stat has an unexpected format.
pub fn stolen_seconds() -> Result<f64> {
    let stat = workdir::read(Path::new("/proc/stat"))?;
    let ticks = stat.split_whitespace().nth(8).and_then(|word| word.parse::<f64>().ok());
    Ok(ticks.context("/proc/stat has an unexpected format")? / rustix::param::clock_ticks_per_second() as f64)
}

/// Parses a line `NAME N kB` of a file.
fn kib(file: &str, name: &str) -> Result<u64> {
    let text = workdir::read(Path::new(file))?;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse().ok());
    kib.with_context(|| format!("{file} has no {name}"))
}
