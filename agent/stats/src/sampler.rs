//! Reads all containers' cgroups once per call. The sampler keeps their directories open and their histories,
//! and, while subscribers exist, also the files that each reading needs. Blocking: must run where blocking is
//! allowed, one reading at a time.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use jiff::Timestamp;
use rustix::process::{Resource, getrlimit};

use super::files::{self, Depth};
use super::history::History;
use super::inventory;
use super::model::{
    ContainerStats, Counters, Gauges, KernelCounters, Machine, Net, NetRates, NodeStats, PodStats, Reading,
    Stalls, State, WINDOWS,
};
use super::parse;
use super::rates::{grown, share};
use super::who::Names;
use crate::Scope;
use beelet_base::clock::monotonic_ns;
use beelet_base::{kernel_file, machine_memory};
use beelet_bpf::Interfering;
use beelet_cgroups::read::CgroupDirs;
use beelet_cgroups::{Cgroups, memory, search};
use beelet_model::disk::{DiskUse, Places, VolumesUse};
use beelet_model::table::PodTable;
use tokio::sync::watch;

/// Maximum time between two readings of limits, process counts and the like, in nanoseconds.
const FULL_EVERY: u64 = 10_000_000_000;
/// Time to the next search for a container's missing cgroup, in nanoseconds; it doubles up to the maximum.
const SEARCH_AGAIN: u64 = 250_000_000;
const SEARCH_LONGEST: u64 = 30_000_000_000;

/// Reading of the kernel programs.
#[derive(Debug, Clone, Default)]
pub struct KernelReading {
    /// Counters by cgroup id.
    pub counters: BTreeMap<u64, KernelCounters>,
    /// The cgroups that made others wait.
    pub interfering: Interfering,
}

/// Reader of the kernel programs; returns `None` if no program measures.
pub type Snapshot = Box<dyn FnMut() -> Option<KernelReading> + Send>;

/// Makes readings, and keeps the state for the next one.
pub(super) struct Sampler {
    cgroups: Arc<Cgroups>,
    snapshot: Snapshot,
    disk: Box<dyn DiskUse>,
    volumes: watch::Receiver<VolumesUse>,
    node: Arc<str>,
    /// Maximum number of containers to read.
    most: usize,
    containers: HashMap<String, Tracked>,
    /// Containers whose cgroup was not found: time of the next search, and the pause after that.
    lost: HashMap<String, (u64, u64)>,
    /// Pods' own cgroups and networks, by UID.
    pods: HashMap<String, TrackedPod>,
    /// Names of the holders of the CPUs.
    names: Names,
    machine: History<MachineCounters>,
    full_at: u64,
    buffer: Vec<u8>,
}

/// A container with a known cgroup.
struct Tracked {
    path: String,
    id: Option<u64>,
    dirs: CgroupDirs,
    last: Option<Reading>,
    history: History<Counters>,
}

#[derive(Default)]
struct TrackedPod {
    cgroup: Option<(String, CgroupDirs)>,
    net: History<Net>,
}

#[derive(Debug, Clone, Copy)]
struct MachineCounters {
    cpu_ns: u64,
    stalls: [Option<Stalls>; 3],
}

impl Sampler {
    pub(super) fn new(
        cgroups: Arc<Cgroups>,
        (snapshot, disk, volumes): (Snapshot, Box<dyn DiskUse>, watch::Receiver<VolumesUse>),
        node: Arc<str>,
        most: usize,
    ) -> Self {
        Self {
            cgroups,
            snapshot,
            disk,
            volumes,
            node,
            most,
            containers: HashMap::new(),
            lost: HashMap::new(),
            pods: HashMap::new(),
            names: Names::default(),
            machine: History::default(),
            full_at: 0,
            // Large enough for any cgroup's file, so that one read suffices.
            buffer: Vec::with_capacity(16 << 10),
        }
    }

    /// Reads the node.
    pub(super) fn read(&mut self, table: &PodTable, scope: Scope) -> NodeStats {
        let full = scope == Scope::Everything;
        let at_ns = monotonic_ns();
        let due = at_ns.saturating_sub(self.full_at) >= FULL_EVERY;
        let depth = match (full, due) {
            (true, _) => Depth::Page,
            (false, true) => Depth::Full,
            (false, false) => Depth::Tick,
        };
        if depth >= Depth::Full {
            self.full_at = at_ns;
        }
        let mut pods = inventory::pods(table);
        let left_out = self.track(&pods, at_ns);
        if scope == Scope::Containers {
            let keep = self.may_keep_open();
            self.containers.values_mut().for_each(|tracked| tracked.dirs.keep_open(keep));
        }
        let kernel = (self.snapshot)();
        for pod in &mut pods {
            for container in &mut pod.containers {
                self.read_container(container, kernel.as_ref().map(|kernel| &kernel.counters), depth);
                if full {
                    self.count_files(container);
                }
            }
            self.read_pod(pod, scope, kernel.is_some());
            if full {
                pod.disk = self.disk.of(&pod.uid);
                pod.volumes = self.volumes.borrow().get(&pod.uid).cloned().unwrap_or_default();
            }
        }
        if let Some(kernel) = &kernel {
            self.names.assign(&mut pods, &kernel.interfering, &self.cgroups, at_ns);
        }
        let machine = self.machine(at_ns, full);
        if machine.swap.is_none() {
            without_swap(&mut pods);
        }
        NodeStats {
            at: Timestamp::now(),
            at_ns,
            node: Arc::clone(&self.node),
            by_kernel: kernel.is_some(),
            machine,
            places: if full { self.disk.places() } else { Places::default() },
            pods,
            left_out,
        }
    }

    /// Drops the histories and closes the files after the last subscriber: the histories would be too old for
    /// the next one.
    pub(super) fn rest(&mut self) {
        for tracked in self.containers.values_mut() {
            tracked.history = History::default();
            tracked.dirs.keep_open(false);
        }
        self.pods.values_mut().for_each(|pod| pod.net = History::default());
        self.machine = History::default();
    }

    /// Returns true if files may stay open: enough descriptors are left for the agent's other files.
    fn may_keep_open(&self) -> bool {
        let files = files::OFTEN * self.containers.len() as u64;
        getrlimit(Resource::Nofile).current.is_none_or(|limit| files <= limit / 2)
    }

    /// Returns true if the sampler keeps any cgroup's directories open.
    pub(super) fn tracks(&self) -> bool {
        !self.containers.is_empty() || !self.pods.is_empty()
    }

    /// Closes the directories of removed containers and pods.
    pub(super) fn forget_gone(&mut self, table: &PodTable) {
        self.retain(&inventory::pods(table));
    }

    /// Drops the state of all but these pods' running containers, and returns the ids of those.
    fn retain<'a>(&mut self, pods: &'a [PodStats]) -> HashSet<&'a str> {
        let wanted: HashSet<&str> = running(pods).take(self.most).collect();
        self.containers.retain(|id, _| wanted.contains(id.as_str()));
        self.lost.retain(|id, _| wanted.contains(id.as_str()));
        let uids: HashSet<&str> = pods.iter().map(|pod| pod.uid.as_str()).collect();
        self.pods.retain(|uid, _| uids.contains(uid.as_str()));
        wanted
    }

    /// Finds the cgroups of new containers, and drops those of ended ones. Returns the number of running
    /// containers without a cgroup.
    fn track(&mut self, pods: &[PodStats], now: u64) -> usize {
        let wanted = self.retain(pods);
        let due = |id: &&str| self.lost.get(*id).is_none_or(|(again, _)| *again <= now);
        let missing: HashSet<&str> =
            wanted.iter().copied().filter(|id| !self.containers.contains_key(*id)).filter(due).collect();
        if !missing.is_empty() {
            self.find(&missing, now);
        }
        running(pods).count() - self.containers.len()
    }

    fn find(&mut self, missing: &HashSet<&str>, now: u64) {
        let mut found = search::containers(&self.cgroups, missing);
        for id in missing {
            // The cgroup may have been removed by now.
            let opened =
                found.remove(*id).and_then(|path| Some((CgroupDirs::open(&self.cgroups, &path).ok()?, path)));
            let Some((dirs, path)) = opened else {
                let (_, wait) = self.lost.get(*id).copied().unwrap_or((0, SEARCH_AGAIN));
                self.lost
                    .insert((*id).to_owned(), (now.saturating_add(wait), (wait * 2).min(SEARCH_LONGEST)));
                continue;
            };
            self.lost.remove(*id);
            let tracked = Tracked { path, id: dirs.id(), dirs, last: None, history: History::default() };
            self.containers.insert((*id).to_owned(), tracked);
        }
    }

    fn read_container(
        &mut self,
        container: &mut ContainerStats,
        kernel: Option<&BTreeMap<u64, KernelCounters>>,
        depth: Depth,
    ) {
        let Some(tracked) = self.containers.get_mut(&container.id) else { return };
        let last = tracked.last.as_ref().map(|last| &last.gauges);
        // Each reading has its own time: with many containers the last is read some milliseconds after the
        // first.
        let reading = files::read(&mut tracked.dirs, depth, last, monotonic_ns(), &mut self.buffer);
        let Some(mut reading) = reading else { return };
        if let Some(kernel) = kernel {
            // A container that has not run since the programs were attached has no entry: its counters are 0.
            let counters = tracked.id.and_then(|id| kernel.get(&id)).copied().unwrap_or_default();
            reading.counters.kernel = Some(Box::new(counters));
        }
        tracked.history.push(reading.at_ns, reading.counters.clone());
        container.windows = tracked.history.rates();
        container.cgroup = Some(tracked.path.clone());
        container.cgroup_id = tracked.id;
        tracked.last = Some(reading.clone());
        container.reading = Some(reading);
    }

    fn count_files(&mut self, container: &mut ContainerStats) {
        let Some(tracked) = self.containers.get(&container.id) else { return };
        let Some(reading) = &mut container.reading else { return };
        let Some(opened) = files::opened(&tracked.dirs, &mut self.buffer) else { return };
        reading.gauges.processes = Some(opened.processes);
        reading.gauges.descriptors = opened.files.map(|(files, _)| files);
        reading.gauges.sockets = opened.files.map(|(_, sockets)| sockets);
        if let Some(details) = &mut reading.details {
            details.descriptors_limit = opened.limit;
        }
    }

    /// Reads the pod's own cgroup, the parent of its containers' cgroups, and its network from any of its
    /// processes, for a full reading or if no program counts.
    fn read_pod(&mut self, pod: &mut PodStats, scope: Scope, by_kernel: bool) {
        let Some(container) = pod.containers.iter().find(|container| container.cgroup.is_some()) else {
            return;
        };
        let path =
            container.cgroup.as_deref().and_then(|path| path.rsplit_once('/')).map(|(parent, _)| parent);
        // Without a parent for the pod (a sandbox made by hand) the pod has no cgroup.
        let Some(path) = path.filter(|path| !path.is_empty()) else { return };
        pod.cgroup = Some(path.to_owned());
        if pod.qos.is_empty() {
            qos_of(path).clone_into(&mut pod.qos);
        }
        let tracked = self.pods.entry(pod.uid.clone()).or_default();
        let depth = match scope {
            Scope::Containers => None,
            Scope::Usage => Some(Depth::Usage),
            Scope::Everything => Some(Depth::Page),
        };
        if let Some(depth) = depth {
            if tracked.cgroup.as_ref().is_none_or(|(known, _)| known != path) {
                tracked.cgroup =
                    CgroupDirs::open(&self.cgroups, path).ok().map(|dirs| (path.to_owned(), dirs));
            }
            if let Some((_, dirs)) = &mut tracked.cgroup {
                pod.reading = files::read(dirs, depth, None, monotonic_ns(), &mut self.buffer);
            }
        }
        if pod.host_network || scope < Scope::Everything && by_kernel {
            return;
        }
        let Some(dirs) = self.containers.get(&container.id).map(|tracked| &tracked.dirs) else { return };
        let pid = files::first_pid(dirs, &mut self.buffer);
        // A process may have made a network namespace of its own, which is not the pod's.
        let pid =
            pid.filter(|pid| pod.netns.as_deref().is_none_or(|netns| files::is_in_network(*pid, netns)));
        let Some(interfaces) = pid.and_then(files::network) else { return };
        tracked.net.push(monotonic_ns(), sum(&interfaces));
        pod.net_windows = tracked.net.windows(|then, now, over| NetRates {
            rx_bytes: grown(then.rx_bytes, now.rx_bytes) as f64 / over.as_secs_f64(),
            tx_bytes: grown(then.tx_bytes, now.tx_bytes) as f64 / over.as_secs_f64(),
            retransmits: grown(then.retransmits, now.retransmits) as f64 / over.as_secs_f64(),
        });
        pod.net = interfaces;
    }

    fn machine(&mut self, at_ns: u64, full: bool) -> Machine {
        let read = |file: &str| kernel_file::read_to_string(format!("/proc/{file}")).unwrap_or_default();
        let (stat, meminfo) = (read("stat"), read("meminfo"));
        let (cpu_ns, booted) = parse::machine_cpu(&stat, rustix::param::clock_ticks_per_second());
        let stalls = ["cpu", "memory", "io"].map(|kind| parse::stalls(&read(&format!("pressure/{kind}"))));
        let of_meminfo = |name| machine_memory::meminfo(&meminfo, name);
        let memory = memory::of_machine(&self.cgroups, &meminfo).unwrap_or_default();
        let vmstat = if full { read("vmstat") } else { String::new() };
        self.machine.push(at_ns, MachineCounters { cpu_ns: cpu_ns.unwrap_or(0), stalls });
        let cpu = self
            .machine
            .windows(|then, now, over| grown(then.cpu_ns, now.cpu_ns) as f64 / over.as_nanos() as f64);
        let stalled = self.machine.windows(|then, now, over| {
            [0, 1, 2].map(|kind| share(then.stalls[kind], now.stalls[kind], over))
        });
        // Ten seconds: the second of the windows.
        const { assert!(WINDOWS[1].as_secs() == 10) };
        let machine = Machine {
            cpus: u32::try_from(stat.lines().filter(|line| is_cpu(line)).count()).unwrap_or(0),
            cpu_ns: cpu_ns.unwrap_or(0),
            cpu,
            load: parse::load(&read("loadavg")),
            memory_total: memory.total,
            memory_available: of_meminfo("MemAvailable").unwrap_or(0),
            working_set: memory.working_set,
            memory_usage: memory.usage,
            stalls,
            stalled: stalled[1].unwrap_or([None; 3]),
            booted_at: booted.and_then(|seconds| Timestamp::from_second(seconds).ok()),
            rss: of_meminfo("AnonPages"),
            faults: parse::faults(&vmstat),
            // Not this process's own namespace: `beelet observe` may run in a pod.
            net: if full { files::network(1).map(of_the_machine).unwrap_or_default() } else { Vec::new() },
            swap: Some(["SwapTotal", "SwapFree"].map(|name| of_meminfo(name).unwrap_or(0)))
                .filter(|[total, _]| *total > 0),
            all_pods: if full { self.all_pods() } else { None },
            reading: None,
            disks: if full { parse::disks(&read("diskstats")) } else { Vec::new() },
        };
        let reading = full.then(|| whole(at_ns, &machine, (&stat, &meminfo, &vmstat)));
        Machine { reading, ..machine }
    }

    fn all_pods(&mut self) -> Option<(String, Reading)> {
        let root = search::pods_roots(&self.cgroups).into_iter().next()?;
        let mut dirs = CgroupDirs::open(&self.cgroups, &root).ok()?;
        let reading = files::read(&mut dirs, Depth::Page, None, monotonic_ns(), &mut self.buffer)?;
        Some((root, reading))
    }

    /// Returns the number of containers with a cgroup.
    pub(super) fn tracked(&self) -> usize {
        self.containers.len()
    }
}

/// Returns the machine as a cgroup, for readers of the cgroup `/`, of whose memory version 2's kernel has no
/// numbers.
fn whole(at_ns: u64, machine: &Machine, (stat, meminfo, vmstat): (&str, &str, &str)) -> Reading {
    let memory = |name| machine_memory::meminfo(meminfo, name).unwrap_or(0);
    let [cpu_user_ns, cpu_system_ns] = parse::machine_modes(stat, rustix::param::clock_ticks_per_second());
    let [cpu_stalls, memory_stalls, io_stalls] = machine.stalls;
    let [page_faults, major_faults] = machine.faults.unwrap_or_default();
    let killed = parse::keyed(vmstat).find(|(name, _)| *name == "oom_kill");
    let counters = Counters {
        cpu_ns: machine.cpu_ns,
        cpu_user_ns,
        cpu_system_ns,
        cpu_stalls,
        memory_stalls,
        io_stalls,
        page_faults,
        major_faults,
        oom_kills: killed.map_or(0, |(_, kills)| kills),
        ..Counters::default()
    };
    let gauges = Gauges {
        memory_usage: machine.memory_usage,
        working_set: machine.working_set,
        rss: machine.rss.unwrap_or(0),
        cache: memory("Cached"),
        mapped: memory("Mapped"),
        active_file: memory("Active(file)"),
        inactive_file: memory("Inactive(file)"),
        swap: Some(machine.swap.map_or(0, |[total, free]| total.saturating_sub(free))),
        memory_limit: Some(machine.memory_total),
        ..Gauges::default()
    };
    Reading { at_ns, counters, gauges, details: None }
}

/// Sets the swap usage to 0 if the kernel does not count it: the machine has no swap.
fn without_swap(pods: &mut [PodStats]) {
    for pod in pods {
        let containers = pod.containers.iter_mut().filter_map(|container| container.reading.as_mut());
        for reading in containers.chain(pod.reading.as_mut()) {
            reading.gauges.swap.get_or_insert(0);
        }
    }
}

/// Returns the ids of the running containers.
fn running(pods: &[PodStats]) -> impl Iterator<Item = &str> {
    let containers = pods.iter().flat_map(|pod| &pod.containers);
    containers.filter(|c| c.state == State::Running && !c.id.is_empty()).map(|c| c.id.as_str())
}

/// Removes the interfaces that cAdvisor leaves out: the host's ends of the pods' links, and the bridges of
/// container engines.
fn of_the_machine(interfaces: Vec<(String, Net)>) -> Vec<(String, Net)> {
    let is_ours = |name: &str| ["veth", "docker", "nerdctl"].iter().any(|prefix| name.starts_with(prefix));
    interfaces.into_iter().filter(|(name, _)| !is_ours(name)).collect()
}

/// Returns the QoS class of a pod's cgroup; empty if it is in none.
fn qos_of(path: &str) -> &'static str {
    let parent = path.rsplit_once('/').map_or("", |(parent, _)| parent);
    match parent.rsplit('/').next().unwrap_or_default().trim_end_matches(".slice").rsplit('-').next() {
        Some("besteffort") => "BestEffort",
        Some("burstable") => "Burstable",
        Some("kubepods") => "Guaranteed",
        _ => "",
    }
}

/// Returns true for a line of `/proc/stat` about a single CPU: `cpu0`, `cpu1`, ….
fn is_cpu(line: &str) -> bool {
    line.strip_prefix("cpu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

fn sum(interfaces: &[(String, Net)]) -> Net {
    interfaces.iter().fold(Net::default(), |sum, (_, net)| Net {
        rx_bytes: sum.rx_bytes + net.rx_bytes,
        rx_packets: sum.rx_packets + net.rx_packets,
        rx_errors: sum.rx_errors + net.rx_errors,
        rx_dropped: sum.rx_dropped + net.rx_dropped,
        tx_bytes: sum.tx_bytes + net.tx_bytes,
        tx_packets: sum.tx_packets + net.tx_packets,
        tx_errors: sum.tx_errors + net.tx_errors,
        tx_dropped: sum.tx_dropped + net.tx_dropped,
        retransmits: sum.retransmits + net.retransmits,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_qos_class_is_in_the_path_of_a_pods_cgroup() {
        for (path, class) in [
            ("/kubepods/besteffort/podx", "BestEffort"),
            ("/my/kubepods/burstable/podx", "Burstable"),
            ("/kubepods/podx", "Guaranteed"),
            ("/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podx.slice", "Burstable"),
            ("/kubepods.slice/kubepods-podx.slice", "Guaranteed"),
            ("/system.slice/x", ""),
            ("/x", ""),
        ] {
            assert_eq!(qos_of(path), class, "{path}");
        }
    }
}
