//! Names those that had the CPUs while containers waited: the kernel programs know them by cgroup ids.

use std::collections::{BTreeMap, HashMap, HashSet};

use beelet_bpf::NOBODY;
use beelet_cgroups::Cgroups;

use super::model::{ContainerStats, Holder, PodStats, WaitedFor, Who};

/// So many are named of each container.
const MOST: usize = 3;
/// A search of the machine's cgroups is followed by the next after this long at the earliest, in nanoseconds:
/// it looks at thousands of folders on a full node.
const SEARCH_AGAIN: u64 = 10_000_000_000;
/// The place of the 60 s average among the kernel's.
const MINUTE: usize = 1;

/// The names that were found, of those that had a CPU at the last reading.
#[derive(Debug, Default)]
pub(super) struct Names {
    known: HashMap<u64, Who>,
    searched_at: Option<u64>,
}

impl Names {
    /// Says of each container whom it waited for.
    pub(super) fn name_holders(
        &mut self,
        pods: &mut [PodStats],
        waited_for: &BTreeMap<u64, beelet_bpf::WaitedFor>,
        cgroups: &Cgroups,
        now_ns: u64,
    ) {
        let of = |container: &ContainerStats| waited_for.get(&container.cgroup_id?);
        let waiting = pods.iter().flat_map(|pod| &pod.containers).filter_map(of);
        let holders: HashSet<u64> =
            waiting.flat_map(|of| of.held.iter().take(MOST)).map(|(id, _)| *id).collect();
        self.learn(&holders, pods, cgroups, now_ns);
        for container in pods.iter_mut().flat_map(|pod| &mut pod.containers) {
            let Some(of) = container.cgroup_id.and_then(|id| waited_for.get(&id)) else { continue };
            let share = |part: u64| (part as f64 / of.waited_ns.max(1) as f64).min(1.0);
            let holder = |(id, held_ns): &(u64, u64)| Holder {
                who: self.known.get(id).cloned().unwrap_or(Who::Gone),
                share: share(*held_ns),
            };
            container.waited_for = Some(WaitedFor {
                some: some(container, of),
                holders: of.held.iter().take(MOST).map(holder).collect(),
            });
        }
    }

    /// Finds the names of these cgroups. One that is gone keeps the name that it had.
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
        for (id, path) in cgroups.find_ids(&missing) {
            self.known.insert(id, who_is_at(path, pods));
        }
    }
}

/// A cgroup below a pod's that is no container's is its sandbox's.
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

/// The share of the last minute in which some thread waited.
fn some(container: &ContainerStats, of: &beelet_bpf::WaitedFor) -> f64 {
    let stalls = container.reading.as_ref().and_then(|reading| reading.counters.cpu_stalls);
    match stalls {
        Some(stalls) => f64::from(stalls.averages[0][MINUTE]) / 10_000.0,
        None => (of.waited_ns as f64 / of.over_ns.max(1) as f64).min(1.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Counters, Reading, Stalls};
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

    #[test]
    fn who_had_the_cpus_is_named_as_long_as_it_is_known() {
        let dir = tempfile::tempdir().unwrap();
        for path in ["system.slice/containerd.service", "kubepods/podb/sandbox"] {
            std::fs::create_dir_all(dir.path().join(path)).unwrap();
        }
        std::fs::write(dir.path().join("cgroup.controllers"), "cpu memory").unwrap();
        let id = |path: &str| std::fs::metadata(dir.path().join(path)).unwrap().ino();
        let hierarchies =
            vec![Hierarchy { mount: dir.path().to_owned(), is_v2: true, controllers: [].into() }];
        let cgroups = Cgroups::over_folders(Layout { version: Version::V2, hierarchies }, "/").unwrap();
        let (web, batch) = (u64::MAX - 2, u64::MAX - 3);
        let held = vec![(batch, 620), (id("system.slice/containerd.service"), 210), (web, 100), (5, 70)];
        let mut waited_for: BTreeMap<u64, beelet_bpf::WaitedFor> =
            [(web, beelet_bpf::WaitedFor::of(1000, 2000, held))].into();
        let mut pods = [
            pod("web", "/kubepods/podw", &[("app", web)]),
            pod("batch", "/kubepods/podb", &[("main", batch)]),
        ];
        let mut names = Names::default();
        names.name_holders(&mut pods, &waited_for, &cgroups, 1);
        let in_pod = |name: &str, container: &str| Who::Pod {
            pod: PodName { namespace: "shop".to_owned(), name: name.to_owned() },
            container: container.to_owned(),
        };
        let containerd = Who::Machine("/system.slice/containerd.service".to_owned());
        let told = pods[0].containers[0].waited_for.clone().unwrap();
        let expected = [(in_pod("batch", "main"), 0.62), (containerd, 0.21), (in_pod("web", "app"), 0.1)];
        assert_eq!(told.holders, expected.map(|(who, share)| Holder { who, share }));
        assert!((told.some - 0.5).abs() < 1e-9, "without PSI: {}", told.some);
        assert_eq!(pods[1].containers[0].waited_for, None);

        // The batch is gone, but was known; the sandbox is found once a search is due again.
        let sandbox = id("kubepods/podb/sandbox");
        let held = vec![(batch, 4), (sandbox, 3), (NOBODY, 2), (web, 1)];
        waited_for.insert(web, beelet_bpf::WaitedFor::of(10, 20, held));
        let stalls = Stalls { averages: [[0, 1400, 0], [0; 3]], ..Stalls::default() };
        let counters = Counters { cpu_stalls: Some(stalls), ..Counters::default() };
        pods[0].containers[0].reading = Some(Reading { counters, ..Reading::default() });
        pods[1].containers.clear();
        for (at, of_sandbox) in [(2, Who::Gone), (SEARCH_AGAIN + 1, in_pod("batch", ""))] {
            names.name_holders(&mut pods, &waited_for, &cgroups, at);
            let told = pods[0].containers[0].waited_for.clone().unwrap();
            assert!((told.some - 0.14).abs() < 1e-9, "{}", told.some);
            let who: Vec<Who> = told.holders.into_iter().map(|holder| holder.who).collect();
            assert_eq!(who, [in_pod("batch", "main"), of_sandbox, Who::Nobody]);
        }
    }
}
