//! Names the cgroups that made containers wait: those that had the CPUs during the waits, and those that
//! needed the memory. The kernel programs identify them by cgroup ids.

use std::collections::{BTreeMap, HashMap, HashSet};

use beelet_bpf::{Interfering, NOBODY, Reclaimers};
use beelet_cgroups::{Cgroups, search};
use beelet_policy::tuner::reclaim::{self, Freed, Place, ShortBelow, is_at_limit};

use super::model::{ContainerStats, Holder, PodStats, Reading, WaitedFor, Who};

/// Maximum number of names per container.
const MOST: usize = 3;
/// Minimum time between two searches of the machine's cgroups, in nanoseconds: a search visits thousands of
/// folders on a full node.
const SEARCH_AGAIN: u64 = 10_000_000_000;
/// Index of the 60 s average among the kernel's.
const MINUTE: usize = 1;

/// The names of the cgroups that had a CPU at the last reading.
#[derive(Debug, Default)]
pub(super) struct Names {
    known: HashMap<u64, Who>,
    searched_at: Option<u64>,
}

impl Names {
    /// Sets the holders for which each container waited.
    pub(super) fn assign(
        &mut self,
        pods: &mut [PodStats],
        interfering: &Interfering,
        cgroups: &Cgroups,
        now_ns: u64,
    ) {
        let growers = growers(pods, &interfering.reclaimers);
        let of = |container: &ContainerStats| interfering.waited_for.get(&container.cgroup_id?);
        let waiting = pods.iter().flat_map(|pod| &pod.containers).filter_map(of);
        let holders = waiting.flat_map(|of| of.held.iter().take(MOST)).map(|(id, _)| *id);
        let grown = growers.values().flatten().map(|(id, _)| *id);
        let named: HashSet<u64> = holders.chain(grown).collect();
        self.learn(&named, pods, cgroups, now_ns);
        for container in pods.iter_mut().flat_map(|pod| &mut pod.containers) {
            let Some(id) = container.cgroup_id else { continue };
            if let Some(of) = interfering.waited_for.get(&id) {
                let share = |part: u64| (part as f64 / of.waited_ns.max(1) as f64).min(1.0);
                let holders =
                    of.held.iter().take(MOST).map(|(id, held_ns)| self.holder(*id, share(*held_ns)));
                container.waited_for =
                    Some(WaitedFor { some: some(container, of), holders: holders.collect() });
            }
            if let Some(of) = growers.get(&id) {
                let (some, holders) = (some_for_memory(container), self.growers(container, of));
                container.waited_for_memory = Some(WaitedFor { some, holders });
            }
        }
    }

    /// Returns the holders for whose growth a container waited; its own limit, if the container is at the
    /// limit and was the only one that grew.
    fn growers(&self, container: &ContainerStats, of: &[(u64, f64)]) -> Vec<Holder> {
        match *of {
            [(only, share)]
                if container.cgroup_id == Some(only)
                    && short_below(container, None) == ShortBelow::Container =>
            {
                vec![Holder { who: Who::Nobody, share }]
            }
            _ => of.iter().map(|(id, share)| self.holder(*id, *share)).collect(),
        }
    }

    fn holder(&self, id: u64, share: f64) -> Holder {
        Holder { who: self.known.get(&id).cloned().unwrap_or(Who::Gone), share }
    }

    /// Finds the names of these cgroups. A removed cgroup keeps its former name.
    fn learn(&mut self, ids: &HashSet<u64>, pods: &[PodStats], cgroups: &Cgroups, now_ns: u64) {
        self.known.retain(|id, _| ids.contains(id));
        if ids.contains(&NOBODY) {
            self.known.insert(NOBODY, Who::Nobody);
        }
        for pod in pods {
            for container in &pod.containers {
                if let Some(id) = container.cgroup_id.filter(|id| ids.contains(id)) {
                    let who = Who::Pod { pod: pod.name.clone(), container: container.name.clone() };
                    self.known.insert(id, who);
                }
            }
        }
        let missing: HashSet<u64> = ids.iter().copied().filter(|id| !self.known.contains_key(id)).collect();
        let is_due = self.searched_at.is_none_or(|at| now_ns.saturating_sub(at) >= SEARCH_AGAIN);
        if missing.is_empty() || !is_due {
            return;
        }
        self.searched_at = Some(now_ns);
        for (id, path) in search::by_ids(cgroups, &missing) {
            self.known.insert(id, who_is_at(path, pods));
        }
    }
}

/// Returns the owner of a cgroup's path. A cgroup below a pod's that does not belong to a container belongs
/// to the sandbox.
fn who_is_at(path: String, pods: &[PodStats]) -> Who {
    let is_below = |pod: &&PodStats| {
        let own = pod.cgroup.as_deref().filter(|own| !own.is_empty());
        own.is_some_and(|own| path.strip_prefix(own).is_some_and(|rest| rest.starts_with('/')))
    };
    match pods.iter().find(is_below) {
        Some(pod) => Who::Pod { pod: pod.name.clone(), container: String::new() },
        None => Who::Machine(path),
    }
}

/// Returns the share of the last minute in which some thread waited.
fn some(container: &ContainerStats, of: &beelet_bpf::WaitedFor) -> f64 {
    let stalls = container.reading.as_ref().and_then(|reading| reading.counters.cpu_stalls);
    match stalls {
        Some(stalls) => f64::from(stalls.averages[0][MINUTE]) / 10_000.0,
        None => (of.waited_ns as f64 / of.over_ns.max(1) as f64).min(1.0),
    }
}

/// Returns the share of the last minute in which some thread waited for memory.
fn some_for_memory(container: &ContainerStats) -> f64 {
    let stalls = container.reading.as_ref().and_then(|reading| reading.counters.memory_stalls);
    match stalls {
        Some(stalls) => f64::from(stalls.averages[0][MINUTE]) / 10_000.0,
        None => container.windows[2].and_then(|rates| rates.reclaim).map_or(0.0, |reclaim| reclaim.min(1.0)),
    }
}

/// Returns, for each container that waited for memory, the three cgroups whose growth made it wait; by the
/// container's cgroup2 id.
fn growers(pods: &[PodStats], reclaimers: &Reclaimers) -> BTreeMap<u64, Vec<(u64, f64)>> {
    let freed = Freed { machine: &reclaimers.direct, limits: &reclaimers.memcg };
    if freed.machine.is_empty() && freed.limits.is_empty() {
        return BTreeMap::new();
    }
    let mut places = BTreeMap::new();
    for pod in pods {
        for container in &pod.containers {
            if let Some(id) = container.cgroup_id {
                let short = short_below(container, pod.reading.as_ref());
                places.insert(id, Place { pod: pod.uid.as_str(), short });
            }
        }
    }
    let waiting = pods.iter().flat_map(|pod| &pod.containers).filter(|one| some_for_memory(one) > 0.0);
    let of = |id: u64| {
        let mut growers = reclaim::growers(id, freed, &places);
        growers.truncate(MOST);
        Some((id, growers)).filter(|(_, growers)| !growers.is_empty())
    };
    waiting.filter_map(|one| of(one.cgroup_id?)).collect()
}

/// Returns the level at which a container's memory is short. A tick doesn't read a pod's own cgroup.
fn short_below(container: &ContainerStats, pod: Option<&Reading>) -> ShortBelow {
    let is_at = |reading: &Reading| is_at_limit(reading.gauges.memory_usage, reading.gauges.memory_limit);
    match (container.reading.as_ref().is_some_and(is_at), pod.is_some_and(is_at)) {
        (true, _) => ShortBelow::Container,
        (false, true) => ShortBelow::Pod,
        (false, false) => ShortBelow::Pods,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Counters, Gauges, Stalls};
    use beelet_cgroups::{Hierarchy, Layout, Version};
    use beelet_model::table::PodName;
    use std::os::unix::fs::MetadataExt as _;

    fn pod(name: &str, cgroup: &str, containers: &[(&str, u64)]) -> PodStats {
        PodStats {
            name: PodName { namespace: "shop".to_owned(), name: name.to_owned() },
            uid: name.to_owned(),
            qos: String::new(),
            phase: String::new(),
            ready: None,
            not_ready: String::new(),
            started_at: None,
            host_network: false,
            netns: None,
            cgroup: Some(cgroup.to_owned()),
            reading: None,
            net: Vec::new(),
            net_windows: [None; 3],
            containers: containers
                .iter()
                .map(|(name, id)| ContainerStats {
                    name: (*name).to_owned(),
                    cgroup_id: Some(*id),
                    ..ContainerStats::default()
                })
                .collect(),
            disk: None,
            volumes: Vec::new(),
        }
    }

    /// Cgroups of version 2 in a folder.
    fn over(dir: &std::path::Path) -> Cgroups {
        std::fs::write(dir.join("cgroup.controllers"), "cpu memory").unwrap();
        let hierarchies = vec![Hierarchy { mount: dir.to_owned(), is_v2: true, controllers: [].into() }];
        Cgroups::over_folders(Layout { version: Version::V2, hierarchies }, "/").unwrap()
    }

    #[test]
    fn holders_of_the_cpus_are_named_while_they_are_known() {
        let dir = tempfile::tempdir().unwrap();
        for path in ["system.slice/containerd.service", "kubepods/podb/sandbox"] {
            std::fs::create_dir_all(dir.path().join(path)).unwrap();
        }
        let id = |path: &str| std::fs::metadata(dir.path().join(path)).unwrap().ino();
        let cgroups = over(dir.path());
        let (web, batch) = (u64::MAX - 2, u64::MAX - 3);
        let held = vec![(batch, 620), (id("system.slice/containerd.service"), 210), (web, 100), (5, 70)];
        let waited = |waited_ns, over_ns, held| beelet_bpf::WaitedFor { waited_ns, over_ns, held };
        let waited_for = [(web, waited(1000, 2000, held))].into();
        let mut interfering = Interfering { waited_for, reclaimers: Reclaimers::default() };
        let mut pods = [
            pod("web", "/kubepods/podw", &[("app", web)]),
            pod("batch", "/kubepods/podb", &[("main", batch)]),
        ];
        let mut names = Names::default();
        names.assign(&mut pods, &interfering, &cgroups, 1);
        let in_pod = |name: &str, container: &str| Who::Pod {
            pod: PodName { namespace: "shop".to_owned(), name: name.to_owned() },
            container: container.to_owned(),
        };
        let containerd = Who::Machine("/system.slice/containerd.service".to_owned());
        let found = pods[0].containers[0].waited_for.clone().unwrap();
        let expected = [(in_pod("batch", "main"), 0.62), (containerd, 0.21), (in_pod("web", "app"), 0.1)];
        assert_eq!(found.holders, expected.map(|(who, share)| Holder { who, share }));
        assert!((found.some - 0.5).abs() < 1e-9, "without PSI: {}", found.some);
        assert_eq!(pods[1].containers[0].waited_for, None);

        // The batch container was removed, but its name is known; the sandbox is found at the next search.
        let sandbox = id("kubepods/podb/sandbox");
        let held = vec![(batch, 4), (sandbox, 3), (NOBODY, 2), (web, 1)];
        interfering.waited_for.insert(web, waited(10, 20, held));
        let stalls = Stalls { averages: [[0, 1400, 0], [0; 3]], ..Stalls::default() };
        let counters = Counters { cpu_stalls: Some(stalls), ..Counters::default() };
        pods[0].containers[0].reading = Some(Reading { counters, ..Reading::default() });
        pods[1].containers.clear();
        for (at, of_sandbox) in [(2, Who::Gone), (SEARCH_AGAIN + 1, in_pod("batch", ""))] {
            names.assign(&mut pods, &interfering, &cgroups, at);
            let found = pods[0].containers[0].waited_for.clone().unwrap();
            assert!((found.some - 0.14).abs() < 1e-9, "{}", found.some);
            let who: Vec<Who> = found.holders.into_iter().map(|holder| holder.who).collect();
            assert_eq!(who, [in_pod("batch", "main"), of_sandbox, Who::Nobody]);
        }
    }

    fn stalled(usage: u64, limit: Option<u64>) -> Option<Reading> {
        let stalls = Stalls { averages: [[0, 800, 0], [0; 3]], ..Stalls::default() };
        Some(Reading {
            counters: Counters { memory_stalls: Some(stalls), ..Counters::default() },
            gauges: Gauges { memory_usage: usage, memory_limit: limit, ..Gauges::default() },
            ..Reading::default()
        })
    }

    #[test]
    fn growers_are_named_for_containers_that_waited_for_memory() {
        let dir = tempfile::tempdir().unwrap();
        let cgroups = over(dir.path());
        let mut pods = [
            pod("web", "/kubepods/podw", &[("app", 1), ("idle", 2)]),
            pod("batch", "/kubepods/podb", &[("main", 3)]),
            pod("full", "/kubepods/podf", &[("main", 4)]),
        ];
        pods[0].containers[0].reading = stalled(10, None);
        pods[2].containers[0].reading = stalled(100, Some(100));
        let reclaimers = Reclaimers { direct: Vec::new(), memcg: vec![(4, 5000), (3, 75), (1, 25)] };
        let interfering = Interfering { waited_for: BTreeMap::new(), reclaimers };
        Names::default().assign(&mut pods, &interfering, &cgroups, 1);
        let found = |pod: usize, container: usize| pods[pod].containers[container].waited_for_memory.clone();
        let in_pod = |name: &str, container: &str, share| Holder {
            who: Who::Pod {
                pod: PodName { namespace: "shop".to_owned(), name: name.to_owned() },
                container: container.to_owned(),
            },
            share,
        };
        let of_web = WaitedFor {
            some: 0.08,
            holders: vec![in_pod("batch", "main", 0.75), in_pod("web", "app", 0.25)],
        };
        assert_eq!(found(0, 0), Some(of_web));
        assert_eq!((found(0, 1), found(1, 0)), (None, None), "they did not wait");
        let own_limit = Holder { who: Who::Nobody, share: 1.0 };
        assert_eq!(found(2, 0), Some(WaitedFor { some: 0.08, holders: vec![own_limit] }));
    }
}
