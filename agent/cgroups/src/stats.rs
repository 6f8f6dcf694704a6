//! CPU usage, pressure and processes of cgroups, in the same units on both versions.

use std::path::PathBuf;

use beelet_base::kernel_file;

use super::{Cgroups, Version};

/// CPU time of a cgroup since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuUse {
    /// Run time in nanoseconds.
    pub used_ns: u64,
    /// Time throttled by the quota in nanoseconds; 0 without one.
    pub throttled_ns: u64,
}

/// Resources of pressure stall information (kernel: Documentation/accounting/psi.rst).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pressure {
    /// Runnable tasks that wait for a CPU.
    Cpu,
    /// Tasks that wait for memory to be reclaimed or read back.
    Memory,
}

/// Stall time of a cgroup's tasks for a resource, in microseconds (Documentation/accounting/psi.rst).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stalled {
    /// Time with at least one stalled task.
    pub some_us: u64,
    /// Time with all non-idle tasks stalled; `None` if not counted (CPUs, on older kernels).
    pub full_us: Option<u64>,
}

/// Returns the CPU time of `path`; `None` if the cgroup does not exist.
#[must_use]
pub fn cpu(cgroups: &Cgroups, path: &str) -> Option<CpuUse> {
    let stat = text(cgroups, "cpu", path, "cpu.stat")?;
    let used_ns = if cgroups.paths.version() == Version::V2 {
        field(&stat, "usage_usec")?.saturating_mul(1000)
    } else {
        text(cgroups, "cpuacct", path, "cpuacct.usage")?.trim().parse().ok()?
    };
    Some(CpuUse { used_ns, throttled_ns: throttled_in(cgroups, &stat) })
}

/// Returns only [`CpuUse::throttled_ns`] of `path`, which takes a single file on both versions. `None` if
/// the cgroup does not exist.
#[must_use]
pub fn throttled_ns(cgroups: &Cgroups, path: &str) -> Option<u64> {
    let stat = text(cgroups, "cpu", path, "cpu.stat")?;
    Some(throttled_in(cgroups, &stat))
}

/// Parses the throttled time in a `cpu.stat`.
fn throttled_in(cgroups: &Cgroups, stat: &str) -> u64 {
    if cgroups.paths.version() == Version::V2 {
        field(stat, "throttled_usec").unwrap_or(0).saturating_mul(1000)
    } else {
        field(stat, "throttled_time").unwrap_or(0)
    }
}

/// Returns the stall time of the tasks of `path` since the cgroup was made; `None` if the kernel doesn't
/// count it. On a hybrid machine the cgroup2 hierarchy has it.
#[must_use]
pub fn stalled(cgroups: &Cgroups, path: &str, pressure: Pressure) -> Option<Stalled> {
    let file = match pressure {
        Pressure::Cpu => "cpu.pressure",
        Pressure::Memory => "memory.pressure",
    };
    let text = kernel_file::read_to_string(cgroups.paths.cgroup2_path(path)?.join(file)).ok()?;
    Some(Stalled { some_us: total(&text, "some ")?, full_us: total(&text, "full ") })
}

fn text(cgroups: &Cgroups, controller: &str, path: &str, file: &str) -> Option<String> {
    let hierarchy = match cgroups.paths.version() {
        // All controllers are in a single hierarchy.
        Version::V2 => cgroups.paths.hierarchies().last()?,
        Version::V1 | Version::Hybrid => {
            cgroups.paths.hierarchies().iter().find(|h| h.controllers.contains(controller))?
        }
    };
    let dir: PathBuf = hierarchy.mount.join(cgroups.paths.relative(path).ok()?);
    kernel_file::read_to_string(dir.join(file)).ok()
}

/// Returns the number of processes and threads in the cgroup `path` and below it; `None` if they are not
/// counted.
#[must_use]
pub fn pids(cgroups: &Cgroups, path: &str) -> Option<u64> {
    cgroups.read(path, "pids.current")?.parse().ok()
}

/// Returns the number after `name ` at the start of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

/// Returns the total of the line that begins with `kind`: `some avg10=… avg60=… avg300=… total=…`.
fn total(text: &str, kind: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(kind))?;
    line.split(' ').find_map(|word| word.strip_prefix("total=")?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_by_their_whole_name() {
        let stat = "usage_usec 12\nnr_throttled 3\nthrottled_usec 45\n";
        assert_eq!(field(stat, "throttled_usec"), Some(45));
        assert_eq!(field(stat, "throttled"), None);
        assert_eq!(field("", "usage_usec"), None);
    }

    #[test]
    fn the_totals_of_some_and_full_are_distinguished() {
        let text = "some avg10=0.12 avg60=0.00 avg300=0.00 total=1234\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=9\n";
        assert_eq!((total(text, "some "), total(text, "full ")), (Some(1234), Some(9)));
        assert_eq!(total("full avg10=0.00 avg60=0.00 avg300=0.00 total=9\n", "some "), None);
    }
}
