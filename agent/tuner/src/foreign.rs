//! The pods for the tuner on a kubelet's node, from the observed pod table and the cgroups themselves.
//!
//! CRI reports a pod's containers, but not its requests. The cgroup's path shows the class; its weight shows
//! the requested CPU, by the kubelet's formula inverted and rounded up; requested memory is visible only with
//! memory QoS. An unknown request counts as more than the usage, so that its pod is not restricted.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use beelet_policy::resources::{
    cgroups::{shares_to_millis, weight_to_millis},
    qos::QosClass,
};

use super::targets::{Target, TargetContainer};
use beelet_cgroups::{Cgroups, Version, held, search};
use beelet_model::{
    pod::running,
    table::{PodEntry, PodName, PodTable},
};

/// Interval of searches for containers without a cgroup; a new container is searched for at once.
const SEARCH_AGAIN: Duration = Duration::from_secs(10);

/// A finder of pods that caches their cgroups. Blocking.
#[derive(Debug)]
pub(super) struct Foreign {
    cgroups: Arc<Cgroups>,
    /// Cgroups of containers, by container id.
    found: BTreeMap<String, String>,
    /// Containers without a cgroup at the last search.
    missing: HashSet<String>,
    searched: Option<Instant>,
}

impl Foreign {
    /// Creates an empty cache.
    pub(super) fn new(cgroups: Arc<Cgroups>) -> Self {
        Self { cgroups, found: BTreeMap::new(), missing: HashSet::new(), searched: None }
    }

    /// Returns the pods below the kubelet's root that have running containers.
    pub(super) fn targets(&mut self, table: &PodTable, now: Instant) -> Vec<Target> {
        let ids: HashSet<&str> =
            table.pods.values().flat_map(|entry| running(&entry.pod).map(|(id, _)| id)).collect();
        self.search(&ids, now);
        table.pods.values().filter_map(|entry| self.target(entry)).collect()
    }

    /// Returns the cgroup of the kubelet's BestEffort pods.
    pub(super) fn best_effort(&self) -> Option<String> {
        let root = search::pods_roots(&self.cgroups).into_iter().next()?;
        let last = root.rsplit('/').next().unwrap_or_default();
        Some(match last.strip_suffix(".slice") {
            Some(slice) => format!("{root}/{slice}-besteffort.slice"),
            None => format!("{root}/besteffort"),
        })
    }

    /// Searches all cgroups, but only for new containers.
    fn search(&mut self, ids: &HashSet<&str>, now: Instant) {
        self.found.retain(|id, _| ids.contains(id.as_str()));
        self.missing.retain(|id| ids.contains(id.as_str()));
        let unknown: HashSet<&str> = ids.iter().copied().filter(|id| !self.found.contains_key(*id)).collect();
        let is_new = unknown.iter().any(|id| !self.missing.contains(*id));
        let is_time = self.searched.is_none_or(|at| now.saturating_duration_since(at) >= SEARCH_AGAIN);
        if unknown.is_empty() || !(is_new || is_time) {
            return;
        }
        self.searched = Some(now);
        let found = search::containers(&self.cgroups, &unknown);
        self.missing =
            unknown.iter().filter(|id| !found.contains_key(**id)).map(|id| (*id).to_owned()).collect();
        self.found.extend(found);
    }

    fn target(&self, entry: &PodEntry) -> Option<Target> {
        let pod = &entry.pod;
        let containers: Vec<(TargetContainer, &str)> = running(pod)
            .filter_map(|(id, container)| {
                let found = TargetContainer { name: container.name.clone(), id: id.to_owned() };
                Some((found, self.found.get(id)?.as_str()))
            })
            .collect();
        let (cgroup, class) = pod_of(containers.first()?.1)?;
        Some(Target {
            // The kubelet's limits and priorities are unknown here.
            is_limited: true,
            priority: 0,
            name: PodName::of(pod).to_string(),
            class,
            cgroup: cgroup.to_owned(),
            cpu_request: self.cpu_request(cgroup, class),
            memory_request: self.memory_request(cgroup, class),
            containers: containers.into_iter().map(|(container, _)| container).collect(),
        })
    }

    /// Returns millicores, at least the request.
    fn cpu_request(&self, cgroup: &str, class: QosClass) -> u64 {
        let value = |file: &str| held::owners_value(&self.cgroups, cgroup, file)?.parse::<u64>().ok();
        let millis = match (class, self.cgroups.paths.version()) {
            (QosClass::BestEffort, _) => return 0,
            (_, Version::V2) => value("cpu.weight").and_then(weight_to_millis),
            (_, _) => value("cpu.shares").and_then(shares_to_millis),
        };
        millis.unwrap_or(u64::MAX)
    }

    /// Returns bytes, if memory QoS shows them.
    fn memory_request(&self, cgroup: &str, class: QosClass) -> u64 {
        if class == QosClass::BestEffort {
            return 0;
        }
        let protected = ["memory.min", "memory.low"].into_iter().filter_map(|file| {
            held::owners_value(&self.cgroups, cgroup, file)?.parse::<u64>().ok().filter(|bytes| *bytes > 0)
        });
        protected.max().unwrap_or(u64::MAX)
    }
}

/// Returns the pod's cgroup and its class, from a container's cgroup, in the form of either driver.
fn pod_of(container: &str) -> Option<(&str, QosClass)> {
    let (mut end, mut is_below, mut class) = (0, false, QosClass::Guaranteed);
    for component in container.split('/').skip(1) {
        end += 1 + component.len();
        // A slice's name begins with the names of its parents.
        let name = component.strip_suffix(".slice").and_then(|slice| slice.rsplit('-').next());
        match name.unwrap_or(component) {
            "kubepods" => is_below = true,
            "burstable" if is_below => class = QosClass::Burstable,
            "besteffort" if is_below => class = QosClass::BestEffort,
            // The container's cgroup must be below the pod's, not the same one.
            name if is_below && name.starts_with("pod") => {
                return (end < container.len()).then(|| (&container[..end], class));
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs, path::Path};

    use serde_json::json;

    use super::*;
    use beelet_cgroups::{Hierarchy, Layout};

    #[test]
    fn a_containers_cgroup_shows_its_pod_and_class() {
        for (path, expected) in [
            ("/kubepods/poda-b/c", Some(("/kubepods/poda-b", QosClass::Guaranteed))),
            ("/x/kubepods/burstable/poda/c", Some(("/x/kubepods/burstable/poda", QosClass::Burstable))),
            (
                "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-poda_b.slice/cri-containerd-c.scope",
                Some((
                    "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-poda_b.slice",
                    QosClass::BestEffort,
                )),
            ),
            ("/kubepods/burstable/poda", None),
            ("/system.slice/podman/c", None),
            ("/besteffort/poda/c", None),
        ] {
            assert_eq!(pod_of(path), expected, "{path}");
        }
    }

    /// Creates version 2 as plain folders.
    fn cgroups(dir: &Path, files: &[(&str, &str)]) -> Arc<Cgroups> {
        for (file, text) in files {
            let path = dir.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        fs::write(dir.join("cgroup.controllers"), "cpu memory").unwrap();
        let hierarchy = Hierarchy { mount: dir.to_owned(), is_v2: true, controllers: BTreeSet::new() };
        let layout = Layout { version: Version::V2, hierarchies: vec![hierarchy] };
        Arc::new(Cgroups::over_folders(layout, "/").unwrap())
    }

    fn table(pods: &[(&str, &str)]) -> PodTable {
        let entry = |(name, id): &(&str, &str)| {
            let pod: k8s_openapi::api::core::v1::Pod = serde_json::from_value(json!({
                "metadata": {"name": name, "namespace": "shop"},
                "spec": {"containers": [{"name": "main"}]},
                "status": {"containerStatuses": [{
                    "name": "main", "containerID": format!("containerd://{id}"), "image": "", "imageID": "",
                    "ready": true, "restartCount": 0, "state": {"running": {}},
                }]},
            }))
            .unwrap();
            (PodName::of(&pod), Arc::new(PodEntry::of(pod)))
        };
        PodTable { pods: pods.iter().map(entry).collect(), ..PodTable::default() }
    }

    #[test]
    fn requests_are_read_from_the_pods_cgroups_and_unknown_ones_are_unlimited() {
        let dir = tempfile::tempdir().unwrap();
        let [a, b, c] = ["a", "b", "c"].map(|id| id.repeat(64));
        let cgroups = cgroups(
            dir.path(),
            &[
                ("kubepods/burstable/podw/cpu.weight", "4\n"),
                ("kubepods/burstable/podw/memory.low", "1048576\n"),
                (&format!("kubepods/burstable/podw/{a}/cpu.weight"), "17\n"),
                (&format!("kubepods/burstable/podx/{b}/cpu.weight"), "1\n"),
                (&format!("kubepods/besteffort/pody/{c}/cpu.weight"), "1\n"),
            ],
        );
        let mut foreign = Foreign::new(cgroups);
        assert_eq!(foreign.best_effort().as_deref(), Some("/kubepods/besteffort"));
        let table = table(&[("w", &a), ("x", &b), ("y", &c), ("z", &"d".repeat(64))]);
        let targets = foreign.targets(&table, Instant::now());
        let seen: Vec<_> =
            targets.iter().map(|one| (one.class, one.cpu_request, one.memory_request)).collect();
        let expected = [
            (QosClass::Burstable, 104, 1 << 20),
            (QosClass::Burstable, u64::MAX, u64::MAX),
            (QosClass::BestEffort, 0, 0),
        ];
        assert_eq!(seen, expected);
        assert_eq!((targets[0].name.as_str(), targets[0].containers[0].id.as_str()), ("shop/w", a.as_str()));
    }

    #[test]
    fn a_missing_container_is_searched_again_after_a_while() {
        let dir = tempfile::tempdir().unwrap();
        let id = "a".repeat(64);
        let mut foreign = Foreign::new(cgroups(dir.path(), &[]));
        let (table, start) = (table(&[("w", &id)]), Instant::now());
        assert!(foreign.targets(&table, start).is_empty());
        fs::create_dir_all(dir.path().join(format!("kubepods/podw/{id}"))).unwrap();
        assert!(foreign.targets(&table, start + Duration::from_secs(1)).is_empty());
        assert_eq!(foreign.targets(&table, start + SEARCH_AGAIN).len(), 1);
    }
}
