//! Reads a cgroup from its files. The sampler adds the data of the kernel programs; data in both come from
//! the files, which count from the cgroup's creation.
//!
//! The numbers of a missing file (an old kernel, a controller that is off, PSI switched off) are left out;
//! only a cgroup without memory and CPU time gives no reading.

use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use super::model::{Details, Gauges, Net, Reading, Stalls};
use super::parse;
use beelet_cgroups::read::{CgroupDirs, Controller};

/// Maximum number of a cgroup's files that each reading needs: those of version 1 next to cgroup2.
pub(super) const OFTEN: u64 = 10;

/// Maximum number of a cgroup's processes for counting their open files.
const MAX_PROCESSES: usize = 256;
/// Maximum number of open files to count.
const MAX_FILES: u64 = 4096;

/// Maximum number of a pod's interfaces to count.
const INTERFACES: usize = 32;
/// Maximum bytes of a network file to read.
const NETWORK_FILE: u64 = 64 << 10;

/// Depth of a cgroup's reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Depth {
    /// CPU time, memory and its limit.
    Usage,
    /// Numbers that change from second to second.
    Tick,
    /// Also limits and processes.
    Full,
    /// All numbers of a page.
    Page,
}

/// Reads the cgroup; gauges that [`Depth::Tick`] leaves out come from `last`. `None` if the cgroup was
/// removed.
pub(super) fn read(
    dirs: &mut CgroupDirs,
    depth: Depth,
    last: Option<&Gauges>,
    at_ns: u64,
    buffer: &mut Vec<u8>,
) -> Option<Reading> {
    let mut reading = Reading { at_ns, ..Reading::default() };
    let mut files = Files { dirs, often: true, buffer };
    if let Some(last) = last {
        reading.gauges = *last;
    }
    let cpu = files.cpu(&mut reading);
    let mut details = (depth == Depth::Page).then(Box::<Details>::default);
    let memory = files.memory(&mut reading, details.as_deref_mut());
    if cpu.is_none() && memory.is_none() {
        return None;
    }
    if depth == Depth::Usage {
        Files { often: false, ..files }.memory_limit(&mut reading.gauges);
        return Some(reading);
    }
    files.stalls(&mut reading);
    files.io(&mut reading, details.as_deref_mut());
    let mut seldom = Files { often: false, ..files };
    if depth >= Depth::Full || last.is_none() {
        seldom.limits(&mut reading.gauges);
    }
    if let Some(details) = &mut details {
        seldom.details(details);
    }
    reading.details = details;
    Some(reading)
}

struct Files<'a> {
    dirs: &'a mut CgroupDirs,
    /// True for files that each reading needs.
    often: bool,
    buffer: &'a mut Vec<u8>,
}

impl Files<'_> {
    fn text(&mut self, controller: Controller, file: &'static str) -> Option<&str> {
        if self.often {
            self.dirs.reread(controller, file, self.buffer).ok()
        } else {
            self.dirs.read(controller, file, self.buffer).ok()
        }
    }

    fn number(&mut self, controller: Controller, file: &'static str) -> Option<u64> {
        self.text(controller, file).and_then(parse::number)
    }

    /// Reads CPU time and throttling. cgroup2's own `cpu.stat` has the times even without its controller, so
    /// next to version 1 it replaces the three files of cpuacct.
    fn cpu(&mut self, reading: &mut Reading) -> Option<()> {
        let counters = &mut reading.counters;
        let mut timed = false;
        for (name, value) in self.text(Controller::Unified, "cpu.stat").into_iter().flat_map(parse::keyed) {
            match name {
                "usage_usec" => (counters.cpu_ns, timed) = (value * 1000, true),
                "user_usec" => counters.cpu_user_ns = value * 1000,
                "system_usec" => counters.cpu_system_ns = value * 1000,
                "nr_periods" => counters.periods = value,
                "nr_throttled" => counters.throttled_periods = value,
                "throttled_usec" => counters.throttled_ns = value * 1000,
                _ => {}
            }
        }
        if !timed {
            counters.cpu_ns = self.number(Controller::Cpuacct, "cpuacct.usage")?;
            counters.cpu_user_ns = self.number(Controller::Cpuacct, "cpuacct.usage_user").unwrap_or(0);
            counters.cpu_system_ns = self.number(Controller::Cpuacct, "cpuacct.usage_sys").unwrap_or(0);
        }
        if self.dirs.is_v1() {
            for (name, value) in self.text(Controller::Cpu, "cpu.stat").into_iter().flat_map(parse::keyed) {
                match name {
                    "nr_periods" => counters.periods = value,
                    "nr_throttled" => counters.throttled_periods = value,
                    "throttled_time" => counters.throttled_ns = value,
                    _ => {}
                }
            }
        }
        Some(())
    }

    fn memory(&mut self, reading: &mut Reading, details: Option<&mut Details>) -> Option<()> {
        let v1 = self.dirs.is_v1();
        let mut unasked = Details::default();
        let details = details.unwrap_or(&mut unasked);
        let usage = if v1 { "memory.usage_in_bytes" } else { "memory.current" };
        let usage = self.number(Controller::Memory, usage)?;
        let (counters, gauges) = (&mut reading.counters, &mut reading.gauges);
        let stat = self.text(Controller::Memory, "memory.stat")?;
        for (name, value) in parse::keyed(stat) {
            // On version 1 the numbers without `total_` exclude the cgroup's children.
            let name = if v1 { name.strip_prefix("total_").unwrap_or_default() } else { name };
            match name {
                "active_file" => gauges.active_file = value,
                "inactive_file" => gauges.inactive_file = value,
                "anon" | "rss" => gauges.rss = value,
                "file" | "cache" => gauges.cache = value,
                "file_mapped" | "mapped_file" => gauges.mapped = value,
                "kernel" => details.memory_kernel = Some(value),
                "swap" => gauges.swap = Some(value),
                "pgfault" => counters.page_faults = value,
                "pgmajfault" => counters.major_faults = value,
                _ => {}
            }
        }
        gauges.memory_usage = usage;
        gauges.working_set = usage.saturating_sub(gauges.inactive_file);
        if !v1 {
            gauges.swap = self.number(Controller::Memory, "memory.swap.current");
        }
        let events = if v1 { "memory.oom_control" } else { "memory.events" };
        for (name, value) in self.text(Controller::Memory, events).into_iter().flat_map(parse::keyed) {
            match name {
                "oom_kill" => counters.oom_kills = value,
                "max" => details.limit_hits = Some(value),
                _ => {}
            }
        }
        Some(())
    }

    /// Reads the stalls, which cgroup2 has also next to version 1.
    fn stalls(&mut self, reading: &mut Reading) {
        let mut of =
            |file: &'static str| -> Option<Stalls> { parse::stalls(self.text(Controller::Unified, file)?) };
        let counters = &mut reading.counters;
        counters.cpu_stalls = of("cpu.pressure");
        counters.memory_stalls = of("memory.pressure");
        counters.io_stalls = of("io.pressure");
    }

    /// Reads the bytes of block devices: their sum, and in `details` by device, with the operations.
    fn io(&mut self, reading: &mut Reading, details: Option<&mut Details>) {
        let counters = &mut reading.counters;
        if self.dirs.is_v1() {
            let file = "blkio.throttle.io_service_bytes_recursive";
            let Some(bytes) = self.text(Controller::Blkio, file) else { return };
            counters.io_bytes = Some(parse::blkio(bytes));
            if let Some(details) = details {
                let bytes = bytes.to_owned();
                let operations = self.text(Controller::Blkio, "blkio.throttle.io_serviced_recursive");
                details.devices = parse::blkio_devices(&bytes, operations.unwrap_or_default());
            }
        } else if let Some(text) = self.text(Controller::Blkio, "io.stat") {
            counters.io_bytes = Some(parse::io_stat(text).0);
            if let Some(details) = details {
                details.devices = parse::io_stat_devices(text);
            }
        }
    }

    /// Reads the details with files of their own. Version 2 has the peak since Linux 5.19, and the rest among
    /// the numbers that [`Files::memory`] reads.
    fn details(&mut self, details: &mut Details) {
        let v1 = self.dirs.is_v1();
        if v1 {
            details.limit_hits = self.number(Controller::Memory, "memory.failcnt");
            details.memory_kernel = self.number(Controller::Memory, "memory.kmem.usage_in_bytes");
        }
        let peak = if v1 { "memory.max_usage_in_bytes" } else { "memory.peak" };
        details.memory_peak = self.number(Controller::Memory, peak);
    }

    fn memory_limit(&mut self, gauges: &mut Gauges) {
        let limit = if self.dirs.is_v1() { "memory.limit_in_bytes" } else { "memory.max" };
        gauges.memory_limit = self.text(Controller::Memory, limit).and_then(parse::limit);
    }

    fn limits(&mut self, gauges: &mut Gauges) {
        gauges.pids = self.number(Controller::Pids, "pids.current");
        gauges.pids_limit = self.text(Controller::Pids, "pids.max").and_then(parse::limit);
        self.memory_limit(gauges);
        if !self.dirs.is_v1() {
            let max = self.text(Controller::Cpu, "cpu.max");
            gauges.cpu_limit = max.and_then(parse::cpu_max);
            gauges.cpu_period = max.and_then(|text| text.trim().split_once(' ')?.1.parse().ok());
            gauges.cpu_shares = self.number(Controller::Cpu, "cpu.weight").map(shares);
            gauges.memory_reservation = self.text(Controller::Memory, "memory.high").and_then(parse::limit);
            gauges.swap_limit = self.text(Controller::Memory, "memory.swap.max").and_then(parse::limit);
            return;
        }
        gauges.cpu_shares = self.number(Controller::Cpu, "cpu.shares");
        let soft = self.text(Controller::Memory, "memory.soft_limit_in_bytes");
        gauges.memory_reservation = soft.and_then(parse::limit);
        let both = self.text(Controller::Memory, "memory.memsw.limit_in_bytes");
        gauges.swap_limit = both.and_then(parse::limit);
        let quota = self.text(Controller::Cpu, "cpu.cfs_quota_us").and_then(|text| text.trim().parse().ok());
        let period = self.number(Controller::Cpu, "cpu.cfs_period_us");
        gauges.cpu_period = period;
        gauges.cpu_limit = quota.zip(period).and_then(|(quota, period)| parse::quota_cores(quota, period));
    }
}

/// Converts a weight of version 2 to shares, by the inverse of the runtimes' conversion (KEP-2254).
fn shares(weight: u64) -> u64 {
    2 + weight.saturating_sub(1).saturating_mul(262_142) / 9999
}

/// Number of a cgroup's processes, their open files, and their sockets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Opened {
    pub(super) processes: u64,
    /// Open files, and the sockets among them; `None` if too many to count.
    pub(super) files: Option<(u64, u64)>,
    /// Maximum number of open files of the first process; -1: any number.
    pub(super) limit: Option<i64>,
}

/// Counts the open files of the processes in the cgroup itself. `files` is `None` above [`MAX_PROCESSES`] or
/// [`MAX_FILES`]: a container must not delay a metrics page, and a partial count is useless.
pub(super) fn opened(dirs: &CgroupDirs, buffer: &mut Vec<u8>) -> Option<Opened> {
    let controllers = [Controller::Unified, Controller::Memory];
    let text = controllers.into_iter().find_map(|controller| {
        dirs.read(controller, "cgroup.procs", buffer).ok().filter(|text| !text.is_empty()).map(str::to_owned)
    })?;
    let pids: Vec<u32> = text.lines().filter_map(|line| line.parse().ok()).collect();
    let files = (pids.len() <= MAX_PROCESSES).then(|| open_files(&pids)).flatten();
    let limits = pids.first().and_then(|pid| std::fs::read_to_string(format!("/proc/{pid}/limits")).ok());
    let limit = limits.as_deref().and_then(parse::descriptors_limit);
    Some(Opened { processes: pids.len() as u64, files, limit })
}

/// Returns the numbers of open files and sockets of these processes; `None` if there are too many.
fn open_files(pids: &[u32]) -> Option<(u64, u64)> {
    let (mut files, mut sockets) = (0, 0);
    for pid in pids {
        // The process may have ended.
        let Ok(folder) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
        for file in folder.flatten() {
            files += 1;
            if files > MAX_FILES {
                return None;
            }
            let target = std::fs::read_link(file.path()).unwrap_or_default();
            sockets += u64::from(target.as_os_str().as_encoded_bytes().starts_with(b"socket:"));
        }
    }
    Some((files, sockets))
}

/// Returns the network of the process `pid`: its interfaces, with the TCP retransmits in the first of them.
/// `None` if the process has ended.
///
/// The process may have made any number of interfaces with any names in a namespace of its own: only the
/// first ones are read.
pub(super) fn network(pid: u32) -> Option<Vec<(String, Net)>> {
    let read = |file: &str| {
        let mut text = Vec::new();
        let file = std::fs::File::open(format!("/proc/{pid}/net/{file}")).ok()?;
        file.take(NETWORK_FILE).read_to_end(&mut text).ok()?;
        Some(String::from_utf8_lossy(&text).into_owned())
    };
    let mut interfaces = parse::interfaces(&read("dev")?, INTERFACES);
    let retransmits = read("snmp").as_deref().and_then(parse::retransmits);
    if let Some((_, first)) = interfaces.first_mut() {
        first.retransmits = retransmits.unwrap_or(0);
    }
    Some(interfaces)
}

/// Returns true if a process is in that network namespace, or if that is unknown.
pub(super) fn is_in_network(pid: u32, netns: &Path) -> bool {
    let of = |path: &Path| std::fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let (its, pods) = (of(Path::new(&format!("/proc/{pid}/ns/net"))), of(netns));
    its.zip(pods).is_none_or(|(its, pods)| its == pods)
}

/// Returns the first process of the cgroup.
pub(super) fn first_pid(dirs: &CgroupDirs, buffer: &mut Vec<u8>) -> Option<u32> {
    // Next to version 1 the runtime may not have joined cgroup2.
    [Controller::Unified, Controller::Memory].into_iter().find_map(|controller| {
        dirs.read(controller, "cgroup.procs", buffer).ok()?.lines().next()?.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::model::Counters;
    use super::*;
    use beelet_cgroups::{Cgroups, Hierarchy, Layout, Version};

    /// Makes a cgroup `/c` with these files, as plain files.
    fn dirs(dir: &Path, version: Version, files: &[(&str, &str, &str)]) -> CgroupDirs {
        let v1 = ["cpu", "cpuacct", "memory", "blkio", "pids"];
        let hierarchy = |name: &str, is_v2, controllers: &[&str]| Hierarchy {
            mount: dir.join(name),
            is_v2,
            controllers: controllers.iter().map(|name| (*name).to_owned()).collect(),
        };
        let mut hierarchies = vec![hierarchy("v2", true, &[])];
        if version == Version::V2 {
            std::fs::create_dir_all(dir.join("v2/c")).unwrap();
            std::fs::write(dir.join("v2/cgroup.controllers"), "cpu memory io pids").unwrap();
        } else {
            hierarchies = v1.iter().map(|name| hierarchy(name, false, &[name])).collect();
        }
        for (place, file, text) in files {
            std::fs::create_dir_all(dir.join(place).join("c")).unwrap();
            std::fs::write(dir.join(place).join("c").join(file), text).unwrap();
        }
        let layout = Layout { version, hierarchies };
        CgroupDirs::open(&Cgroups::over_folders(layout, "/").unwrap(), "/c").unwrap()
    }

    const V1: &[(&str, &str, &str)] = &[
        ("cpuacct", "cpuacct.usage", "5000000\n"),
        ("cpuacct", "cpuacct.usage_user", "3000000\n"),
        ("cpuacct", "cpuacct.usage_sys", "2000000\n"),
        ("cpu", "cpu.stat", "nr_periods 10\nnr_throttled 4\nthrottled_time 700000\n"),
        ("cpu", "cpu.cfs_quota_us", "50000\n"),
        ("cpu", "cpu.cfs_period_us", "100000\n"),
        ("memory", "memory.usage_in_bytes", "1000\n"),
        (
            "memory",
            "memory.stat",
            "cache 1\nrss 1\ninactive_file 1\ntotal_cache 400\ntotal_rss 500\ntotal_mapped_file 30\ntotal_pgfault 7\ntotal_pgmajfault 3\ntotal_inactive_file 100\ntotal_active_file 60\n",
        ),
        ("memory", "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
        ("memory", "memory.limit_in_bytes", "4096\n"),
        ("memory", "memory.failcnt", "9\n"),
        ("memory", "memory.max_usage_in_bytes", "2000\n"),
        ("memory", "memory.kmem.usage_in_bytes", "50\n"),
        ("blkio", "blkio.throttle.io_service_bytes_recursive", "8:0 Read 10\n8:0 Write 20\nTotal 30\n"),
        ("blkio", "blkio.throttle.io_serviced_recursive", "8:0 Read 1\n8:0 Write 2\nTotal 3\n"),
        ("pids", "pids.current", "6\n"),
        ("pids", "pids.max", "max\n"),
    ];
    const V2: &[(&str, &str, &str)] = &[
        (
            "v2",
            "cpu.stat",
            "usage_usec 5000\nuser_usec 3000\nsystem_usec 2000\nnr_periods 10\nnr_throttled 4\nthrottled_usec 700\n",
        ),
        ("v2", "cpu.max", "50000 100000\n"),
        ("v2", "memory.current", "1000\n"),
        (
            "v2",
            "memory.stat",
            "anon 500\nfile 400\nkernel 50\nfile_mapped 30\ninactive_file 100\nactive_file 60\npgfault 7\npgmajfault 3\n",
        ),
        ("v2", "memory.events", "low 0\nhigh 0\nmax 9\noom 3\noom_kill 2\noom_group_kill 0\n"),
        ("v2", "memory.max", "4096\n"),
        ("v2", "memory.peak", "2000\n"),
        ("v2", "io.stat", "8:0 rbytes=10 wbytes=20 rios=1 wios=2 dbytes=0 dios=0\n"),
        ("v2", "pids.current", "6\n"),
        ("v2", "pids.max", "max\n"),
    ];

    #[test]
    fn both_versions_of_cgroups_give_the_same_reading_of_the_same_container() {
        let dir = tempfile::tempdir().unwrap();
        let mut buffer = Vec::new();
        let mut of = |version, name: &str, files| {
            let mut dirs = dirs(&dir.path().join(name), version, files);
            read(&mut dirs, Depth::Page, None, 1, &mut buffer).unwrap()
        };
        let (v1, v2) = (of(Version::V1, "1", V1), of(Version::V2, "2", V2));
        assert_eq!(v1.counters, v2.counters);
        assert_eq!(v1.gauges, v2.gauges);
        assert_eq!(v1.details, v2.details);
        let details = v1.details.unwrap();
        assert_eq!((details.limit_hits, details.memory_peak), (Some(9), Some(2000)));
        assert_eq!(
            details.devices.iter().map(|one| (one.device, one.bytes)).collect::<Vec<_>>(),
            [((8, 0), [10, 20])]
        );
        assert_eq!((v1.gauges.cpu_period, v1.gauges.active_file), (Some(100_000), 60));
        let Counters { cpu_ns, throttled_ns, oom_kills, major_faults, .. } = v1.counters;
        assert_eq!((cpu_ns, throttled_ns, oom_kills, major_faults), (5_000_000, 700_000, 2, 3));
        let Gauges { working_set, rss, memory_limit, cpu_limit, pids, pids_limit, .. } = v1.gauges;
        assert_eq!((working_set, rss, memory_limit), (900, 500, Some(4096)));
        assert_eq!((cpu_limit, pids, pids_limit), (Some(0.5), Some(6), None));
    }

    #[test]
    fn gauges_that_a_tick_leaves_out_stay_as_they_were() {
        let dir = tempfile::tempdir().unwrap();
        let mut dirs = dirs(dir.path(), Version::V2, V2);
        let mut buffer = Vec::new();
        let last = Gauges { pids: Some(1), memory_usage: 1, ..Gauges::default() };
        let tick = read(&mut dirs, Depth::Tick, Some(&last), 1, &mut buffer).unwrap().gauges;
        assert_eq!((tick.pids, tick.memory_usage, tick.memory_limit), (Some(1), 1000, None));
        let full = read(&mut dirs, Depth::Full, Some(&last), 1, &mut buffer).unwrap().gauges;
        assert_eq!((full.pids, full.memory_limit), (Some(6), Some(4096)));
        let read = read(&mut dirs, Depth::Full, Some(&last), 1, &mut buffer).unwrap();
        assert_eq!(read.details, None, "only a page needs them");
    }

    #[test]
    fn a_cgroup_without_files_gives_no_reading() {
        let dir = tempfile::tempdir().unwrap();
        let mut dirs = dirs(dir.path(), Version::V2, &[]);
        assert_eq!(read(&mut dirs, Depth::Full, None, 1, &mut Vec::new()), None);
    }
}
