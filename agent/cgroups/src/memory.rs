//! A cgroup's memory and its working set, and the machine's memory.

use beelet_base::kernel_file;
use beelet_base::machine_memory::MachineMemory;

use super::Cgroups;

/// Lower bound of version 1 limits that mean "no limit": the kernel rounds its largest number down to a page.
const NO_LIMIT: u64 = i64::MAX as u64 - (1 << 20);

/// Memory of a cgroup in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryUse {
    /// All memory charged to the cgroup.
    pub usage: u64,
    /// Usage without inactive file pages, which the kernel would reclaim first: the kubelet's working set.
    pub working_set: u64,
    /// The limit, if any.
    pub limit: Option<u64>,
    /// Parts of the usage.
    pub parts: MemoryParts,
}

/// Lines of a `memory.stat`, in bytes; 0 if the kernel lacks a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryParts {
    /// Active file pages.
    pub active_file: u64,
    /// Inactive file pages.
    pub inactive_file: u64,
    /// Dirty file pages, and those under writeback.
    pub unwritten_file: u64,
    /// Anonymous memory.
    pub anon: u64,
    /// Memory in swap.
    pub swap: u64,
    /// File pages that were read again after the kernel had dropped them, since the cgroup was made; `None`
    /// before Linux 5.9.
    pub refaulted_file: Option<u64>,
    /// Anonymous pages that were read again from swap, likewise.
    pub refaulted_anon: Option<u64>,
}

impl MemoryParts {
    /// Parses a `memory.stat`. On version 1 the lines without `total_` exclude the cgroup's children.
    #[must_use]
    pub fn of(stat: &str, is_v1: bool) -> Self {
        let mut parts = Self::default();
        let pages = |value: u64| Some(value.saturating_mul(rustix::param::page_size() as u64));
        for line in stat.lines() {
            let Some((name, value)) = line.split_once(' ') else { continue };
            let Ok(value) = value.parse::<u64>() else { continue };
            let name = if is_v1 { name.strip_prefix("total_").unwrap_or_default() } else { name };
            match name {
                "active_file" => parts.active_file = value,
                "inactive_file" => parts.inactive_file = value,
                "anon" | "rss" => parts.anon = value,
                "file_dirty" | "file_writeback" | "dirty" | "writeback" => {
                    parts.unwritten_file = parts.unwritten_file.saturating_add(value);
                }
                // Only version 1 has this line.
                "swap" => parts.swap = value,
                "workingset_refault_file" => parts.refaulted_file = pages(value),
                "workingset_refault_anon" => parts.refaulted_anon = pages(value),
                _ => {}
            }
        }
        parts
    }
}

/// Returns the memory of the cgroup `path` and those below it; `None` if it does not exist (any more).
#[must_use]
pub fn of(cgroups: &Cgroups, path: &str) -> Option<MemoryUse> {
    let number = |file: &str| cgroups.read(path, file)?.parse::<u64>().ok();
    let is_v2 = cgroups.paths.hierarchy_of("memory")?.is_v2;
    let (usage, limit) = if is_v2 {
        (number("memory.current")?, number("memory.max"))
    } else {
        let limit = number("memory.limit_in_bytes").filter(|limit| *limit < NO_LIMIT);
        (number("memory.usage_in_bytes")?, limit)
    };
    let parts = MemoryParts::of(&cgroups.read(path, "memory.stat")?, !is_v2);
    Some(MemoryUse { usage, working_set: usage.saturating_sub(parts.inactive_file), limit, parts })
}

/// Returns the memory of the cgroup `path` in swap, in bytes; `None` if it is not counted.
#[must_use]
pub fn swap(cgroups: &Cgroups, path: &str) -> Option<u64> {
    if cgroups.paths.hierarchy_of("memory")?.is_v2 {
        return cgroups.read(path, "memory.swap.current")?.parse().ok();
    }
    Some(MemoryParts::of(&cgroups.read(path, "memory.stat")?, true).swap)
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
    fn the_parts_of_a_cgroups_memory_include_its_children_on_both_versions() {
        let page = rustix::param::page_size() as u64;
        let v2 = "anon 5\nfile 9\nfile_dirty 2\nfile_writeback 1\ninactive_file 3\nactive_file 6\n\
                  workingset_refault_anon 2\nworkingset_refault_file 4\nswapcached 8\n";
        let v1 = "rss 1\ndirty 99\nactive_file 99\nworkingset_refault_file 99\ntotal_rss 5\ntotal_dirty 2\n\
                  total_writeback 1\ntotal_inactive_file 3\ntotal_active_file 6\ntotal_swap 7\n\
                  total_workingset_refault_anon 2\ntotal_workingset_refault_file 4\n";
        let expected = MemoryParts {
            active_file: 6,
            inactive_file: 3,
            unwritten_file: 3,
            anon: 5,
            swap: 0,
            refaulted_file: Some(4 * page),
            refaulted_anon: Some(2 * page),
        };
        assert_eq!(MemoryParts::of(v2, false), expected);
        assert_eq!(MemoryParts::of(v1, true), MemoryParts { swap: 7, ..expected });
        assert_eq!(MemoryParts::of("anon x\nactive_file -1\n\nfile", false), MemoryParts::default());
    }

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
