//! The machine's memory, from `/proc/meminfo` and the `memory.stat` of cgroup2's root: a single formula, the
//! kubelet's, for all parts that report usage.
//!
//! Must never count memory that belongs to no process and that no pod's end frees: slab, page tables, kernel
//! stacks and reserved huge pages are in neither sum.

/// Returns the value of the line `name` of `/proc/meminfo`, in bytes; `None` if the line is missing or its
/// value is not a number of kB.
#[must_use]
pub fn meminfo<'a>(text: &'a str, name: &str) -> Option<u64> {
    let value = |line: &'a str| line.strip_prefix(name)?.strip_prefix(':');
    let kib: u64 = text.lines().find_map(value)?.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// The machine's memory, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MachineMemory {
    /// Total memory.
    pub total: u64,
    /// Anonymous pages and the page cache.
    pub usage: u64,
    /// Usage without inactive file pages.
    pub working_set: u64,
}

impl MachineMemory {
    /// Computes the memory from `meminfo` (the text of `/proc/meminfo`) and `root_stat` (the text of
    /// `memory.stat` of cgroup2's root, if it exists); `None` if a line is missing.
    ///
    /// The root cgroup of version 2 has no `memory.current`: `anon` and `file` of its `memory.stat` replace
    /// it (opencontainers/cgroups, `rootStatsFromMeminfo` since runc #3933), as version 1's kernel computes
    /// the usage of its root (mm/memcontrol-v1.c, `mem_cgroup_usage`). The same pages in `/proc/meminfo` are
    /// `AnonPages`, and `Cached`, `Buffers` and `SwapCached` (fs/proc/meminfo.c: these three are all file
    /// pages).
    #[must_use]
    pub fn of(meminfo_text: &str, root_stat: Option<&str>) -> Option<Self> {
        let of_meminfo = |name| meminfo(meminfo_text, name);
        let by_meminfo = || {
            let parts = ["AnonPages", "Cached", "Buffers", "SwapCached"].map(of_meminfo);
            let usage = parts.into_iter().try_fold(0_u64, |sum, part| Some(sum.saturating_add(part?)))?;
            Some((usage, of_meminfo("Inactive(file)")?))
        };
        let (usage, inactive) = root_stat.and_then(of_root).or_else(by_meminfo)?;
        Some(Self { total: of_meminfo("MemTotal")?, usage, working_set: usage.saturating_sub(inactive) })
    }

    /// Returns the available memory: the kubelet's `memory.available`.
    #[must_use]
    pub fn available(&self) -> u64 {
        self.total.saturating_sub(self.working_set)
    }
}

/// Returns the value of a line of a cgroup's `memory.stat` by its name; `None` without that line or a number.
#[must_use]
pub fn memory_stat(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

/// Returns the usage and the inactive file pages of a root cgroup; `None` if a line is missing.
fn of_root(stat: &str) -> Option<(u64, u64)> {
    let [anon, file, inactive] = ["anon", "file", "inactive_file"].map(|name| memory_stat(stat, name));
    Some((anon?.saturating_add(file?), inactive?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;
    /// A machine of 64 GB, of which 20 GB are slab: dentries and inodes that a backup has left.
    const SLAB: &str = include_str!("../testdata/machine_memory/slab.meminfo");
    const SLAB_ROOT: &str = include_str!("../testdata/machine_memory/slab.memory.stat");
    /// The same machine with 16 GiB of huge pages reserved at boot, all unused.
    const HUGE: &str = include_str!("../testdata/machine_memory/huge.meminfo");
    const HUGE_ROOT: &str = include_str!("../testdata/machine_memory/huge.memory.stat");

    #[track_caller]
    fn check(meminfo: &str, root: Option<&str>, expected: [u64; 3]) {
        let memory = MachineMemory::of(meminfo, root).unwrap();
        assert_eq!([memory.total, memory.usage, memory.working_set], expected);
        assert_eq!(memory.available(), expected[0] - expected[2]);
    }

    #[test]
    fn memory_equals_the_kubelets_figures_of_the_root_cgroup() {
        let total = 62_500_000 * 1024;
        // anon 8 GB, file 6 GB, 4 GB of it inactive.
        check(SLAB, Some(SLAB_ROOT), [total, 14 * GB, 10 * GB]);
        check(HUGE, Some(HUGE_ROOT), [total, 14 * GB, 10 * GB]);
        // The same by meminfo alone: version 1, a cgroup namespace, a kernel without the file.
        for (meminfo, incomplete) in [(SLAB, None), (HUGE, None), (SLAB, Some("anon 1\nfile 2\n"))] {
            check(meminfo, incomplete, [total, 14 * GB, 10 * GB]);
        }
    }

    #[test]
    fn slab_and_reserved_huge_pages_do_not_count_as_used() {
        for text in [SLAB, HUGE] {
            let memory = MachineMemory::of(text, None).unwrap();
            let free_and_inactive =
                meminfo(text, "MemFree").unwrap() + meminfo(text, "Inactive(file)").unwrap();
            assert!(memory.available() > free_and_inactive + 15 * GB, "{memory:?}");
        }
    }

    #[test]
    fn a_line_of_meminfo_is_found_by_its_whole_name_and_may_be_missing() {
        assert_eq!(meminfo("Active(file): 7 kB\nActive: 1 kB\n", "Active"), Some(1024));
        assert_eq!(meminfo(&format!("MemFree: {} kB\n", u64::MAX), "MemFree"), None);
        assert_eq!(meminfo("HugePages_Total: 3\n", "HugePages_Total"), None);
        assert_eq!(MachineMemory::of("MemTotal: 1 kB\n", None), None);
        assert_eq!(MachineMemory::of("", Some(SLAB_ROOT)), None);
    }

    #[test]
    fn a_line_of_memory_stat_is_found_by_its_whole_name() {
        let text = "anon 10\ninactive_file 20\ntotal_inactive_file 30\n";
        assert_eq!(memory_stat(text, "inactive_file"), Some(20));
        assert_eq!(memory_stat(text, "total_inactive_file"), Some(30));
        assert_eq!(memory_stat(text, "inactive"), None);
    }

    #[test]
    fn this_machine_has_memory_and_uses_some_of_it() {
        let text = crate::kernel_file::read_to_string("/proc/meminfo").unwrap();
        let memory = MachineMemory::of(&text, None).unwrap();
        assert!(memory.working_set <= memory.usage && memory.usage < memory.total, "{memory:?}");
        assert!(memory.available() >= meminfo(&text, "MemFree").unwrap(), "{memory:?}");
    }
}
