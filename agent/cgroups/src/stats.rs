//! What cgroups use and how they suffer, as numbers with one unit on both versions.

use std::path::PathBuf;

use beelet_base::kernel_file;

use super::{Cgroups, Version};

/// CPU time of a cgroup since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuUse {
    /// Nanoseconds that it ran.
    pub used_ns: u64,
    /// Nanoseconds that its quota held it back; 0 without one.
    pub throttled_ns: u64,
}

/// What pressure stall information counts (kernel: Documentation/accounting/psi.rst).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pressure {
    /// Tasks that are ready and wait for a CPU.
    Cpu,
    /// Tasks that wait for memory to be reclaimed or read back.
    Memory,
}

/// How long tasks of a cgroup stalled for something, in microseconds (Documentation/accounting/psi.rst).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stalled {
    /// One at least.
    pub some_us: u64,
    /// All that could have done something; None where that is not counted (CPUs, on older kernels).
    pub full_us: Option<u64>,
}

impl Cgroups {
    /// CPU time of `path`; None if the cgroup is gone.
    #[must_use]
    pub fn cpu_use(&self, path: &str) -> Option<CpuUse> {
        let stat = self.text("cpu", path, "cpu.stat")?;
        let used_ns = if self.version() == Version::V2 {
            field(&stat, "usage_usec")?.saturating_mul(1000)
        } else {
            self.text("cpuacct", path, "cpuacct.usage")?.trim().parse().ok()?
        };
        Some(CpuUse { used_ns, throttled_ns: self.throttled_in(&stat) })
    }

    /// Nanoseconds that the quota of `path` has held it back since it was made: [`CpuUse::throttled_ns`]
    /// alone, which one file tells on both versions. None if the cgroup is gone.
    #[must_use]
    pub fn throttled_ns(&self, path: &str) -> Option<u64> {
        let stat = self.text("cpu", path, "cpu.stat")?;
        Some(self.throttled_in(&stat))
    }

    /// What a `cpu.stat` says of it.
    fn throttled_in(&self, stat: &str) -> u64 {
        if self.version() == Version::V2 {
            field(stat, "throttled_usec").unwrap_or(0).saturating_mul(1000)
        } else {
            field(stat, "throttled_time").unwrap_or(0)
        }
    }

    /// How long tasks of `path` stalled, since it was made; None where the kernel doesn't count it. On a
    /// hybrid machine the cgroup2 side has it.
    #[must_use]
    pub fn stalled(&self, path: &str, pressure: Pressure) -> Option<Stalled> {
        let file = match pressure {
            Pressure::Cpu => "cpu.pressure",
            Pressure::Memory => "memory.pressure",
        };
        let text = kernel_file::read_to_string(self.cgroup2_path(path)?.join(file)).ok()?;
        Some(Stalled { some_us: total(&text, "some ")?, full_us: total(&text, "full ") })
    }

    fn text(&self, controller: &str, path: &str, file: &str) -> Option<String> {
        let hierarchy = match self.version() {
            // All controllers are in the one hierarchy: nothing to look up.
            Version::V2 => self.hierarchies().last()?,
            Version::V1 | Version::Hybrid => {
                self.hierarchies().iter().find(|h| h.controllers.contains(controller))?
            }
        };
        let dir: PathBuf = hierarchy.mount.join(self.relative(path).ok()?);
        kernel_file::read_to_string(dir.join(file)).ok()
    }
}

/// The number behind `name ` at the start of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

/// The total of the line that begins with `kind`: `some avg10=… avg60=… avg300=… total=…`.
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
    fn the_total_of_some_is_told_from_that_of_full() {
        let text = "some avg10=0.12 avg60=0.00 avg300=0.00 total=1234\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=9\n";
        assert_eq!((total(text, "some "), total(text, "full ")), (Some(1234), Some(9)));
        assert_eq!(total("full avg10=0.00 avg60=0.00 avg300=0.00 total=9\n", "some "), None);
    }
}
