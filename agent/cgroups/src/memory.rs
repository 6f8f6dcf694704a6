//! A cgroup's memory and its working set, and the machine's memory.

use beelet_base::kernel_file;
use beelet_base::machine_memory::{MachineMemory, memory_stat};

use super::Cgroups;

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

/// Returns the memory of the cgroup `path` and those below it; `None` if it does not exist (any more).
#[must_use]
pub fn of(cgroups: &Cgroups, path: &str) -> Option<MemoryUse> {
    let number = |file: &str| cgroups.read(path, file)?.parse::<u64>().ok();
    let (usage, limit, inactive) = if cgroups.paths.hierarchy_of("memory")?.is_v2 {
        (number("memory.current")?, number("memory.max"), "inactive_file")
    } else {
        let limit = number("memory.limit_in_bytes").filter(|limit| *limit < NO_LIMIT);
        (number("memory.usage_in_bytes")?, limit, "total_inactive_file")
    };
    let inactive = memory_stat(&cgroups.read(path, "memory.stat")?, inactive).unwrap_or(0);
    Some(MemoryUse { usage, working_set: usage.saturating_sub(inactive), limit })
}

/// Returns the machine's memory; `meminfo` is the text of `/proc/meminfo`. `None` if it lacks a line.
#[must_use]
pub fn of_machine(cgroups: &Cgroups, meminfo: &str) -> Option<MachineMemory> {
    MachineMemory::of(meminfo, root_memory_stat(cgroups).as_deref())
}

/// Returns the `memory.stat` of cgroup2's real root. A container with a cgroup namespace sees its own
/// cgroup as the root: only the real one has no `memory.current`.
fn root_memory_stat(cgroups: &Cgroups) -> Option<String> {
    let root = &cgroups.paths.hierarchies().iter().find(|hierarchy| hierarchy.is_v2)?.mount;
    if root.join("memory.current").exists() {
        return None;
    }
    kernel_file::read_to_string(root.join("memory.stat")).ok()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{Hierarchy, Layout, Version};

    #[test]
    fn the_machines_memory_is_that_of_the_real_root_only() {
        let mount = tempfile::tempdir().unwrap();
        fs::write(mount.path().join("cgroup.controllers"), "cpu memory").unwrap();
        let unified = Hierarchy { mount: mount.path().into(), is_v2: true, controllers: [].into() };
        let layout = Layout { version: Version::V2, hierarchies: vec![unified] };
        let cgroups = Cgroups::over_folders(layout, "/").unwrap();
        let meminfo = "MemTotal: 100 kB\nAnonPages: 10 kB\nCached: 20 kB\nBuffers: 0 kB\nSwapCached: 0 kB\n\
                       Inactive(file): 5 kB\n";
        let usage = || of_machine(&cgroups, meminfo).map(|memory| memory.usage);
        assert_eq!(usage(), Some(30 << 10), "the file is missing");
        let write = |file: &str, text: &str| fs::write(mount.path().join(file), text).unwrap();
        write("memory.stat", "anon 1\nfile 2\ninactive_file 1\n");
        assert_eq!(usage(), Some(3));
        write("memory.current", "9");
        assert_eq!(usage(), Some(30 << 10), "the root of a namespace");
    }
}
