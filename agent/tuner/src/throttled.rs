//! Detection of pods that their own CPU quota may be throttling, by one counter per cgroup that has a quota:
//! on an otherwise quiet node only these are sampled.

use std::{collections::BTreeMap, time::Instant};

use beelet_cgroups::{Cgroups, search, stats};
use beelet_policy::{
    resources::qos::QosClass,
    tuner::{Knob, KnobKind, Law},
};

use super::{
    quiet::{ALERT, near},
    sample::{LEAST_MICROS, permille},
    targets::Target,
};

/// The state of one pod.
#[derive(Debug)]
struct Seen {
    at: Instant,
    /// Nanoseconds that each cgroup's quota had throttled it, the pod's own and its containers'.
    throttled_ns: BTreeMap<String, u64>,
    /// Last time near the bound.
    loud: Option<Instant>,
}

/// The state at the last tick, by the pods' cgroups.
#[derive(Debug, Default)]
pub(super) struct Throttled {
    seen: BTreeMap<String, Seen>,
}

impl Throttled {
    /// Returns the protected ones of `pods` that have been near the bound of throttling for some time, or
    /// have a burst because of it.
    pub(super) fn tick<'a>(
        &mut self,
        cgroups: &Cgroups,
        pods: &'a [Target],
        held: &BTreeMap<Knob, u64>,
        law: &Law,
        now: Instant,
    ) -> Vec<&'a Target> {
        let mut before = std::mem::take(&mut self.seen);
        let bound = near(law.throttled_permille.into(), law);
        let mut found = Vec::new();
        for pod in pods.iter().filter(|pod| pod.is_limited && pod.class != QosClass::BestEffort) {
            let paths = pod.containers.iter().filter_map(|c| search::container(cgroups, &pod.cgroup, &c.id));
            let throttled_ns: BTreeMap<String, u64> = paths
                .chain([pod.cgroup.clone()])
                .filter_map(|path| Some((path.clone(), stats::throttled_ns(cgroups, &path)?)))
                .collect();
            let before = before.remove(&pod.cgroup);
            let is_near = before.as_ref().is_some_and(|before| {
                let micros = now.saturating_duration_since(before.at).as_micros();
                micros >= LEAST_MICROS
                    && throttled_ns.iter().any(|(path, ns)| {
                        let grown = before.throttled_ns.get(path).map_or(0, |was| ns.saturating_sub(*was));
                        u64::from(permille(grown / 1000, micros)) >= bound
                    })
            });
            let loud = if is_near { Some(now) } else { before.and_then(|before| before.loud) };
            let is_lent = throttled_ns
                .keys()
                .any(|cgroup| held.contains_key(&Knob { cgroup: cgroup.clone(), kind: KnobKind::Burst }));
            if is_lent || loud.is_some_and(|loud| now.saturating_duration_since(loud) < ALERT) {
                found.push(pod);
            }
            self.seen.insert(pod.cgroup.clone(), Seen { at: now, throttled_ns, loud });
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs, time::Duration};

    use super::*;
    use crate::targets::TargetContainer;
    use beelet_cgroups::{Hierarchy, Layout, Version};

    struct Node {
        dir: tempfile::TempDir,
        cgroups: Cgroups,
        throttled: Throttled,
        now: Instant,
        held: BTreeMap<Knob, u64>,
    }

    impl Node {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let mount = dir.path().to_owned();
            fs::write(mount.join("cgroup.controllers"), "cpu memory").unwrap();
            let hierarchies = vec![Hierarchy { mount, is_v2: true, controllers: BTreeSet::new() }];
            let cgroups = Cgroups::over_folders(Layout { version: Version::V2, hierarchies }, "/").unwrap();
            let throttled = Throttled::default();
            let mut node = Self { dir, cgroups, throttled, now: Instant::now(), held: BTreeMap::new() };
            assert!(node.after("a", 0).is_empty());
            node
        }

        /// Advances a second, after which a quota has throttled the container of `pod` for this many
        /// microseconds in total. Returns the names of the pods to sample.
        fn after(&mut self, pod: &str, throttled_us: u64) -> Vec<String> {
            self.now += Duration::from_secs(1);
            let dir = self.dir.path().join(pod).join("1");
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.parent().unwrap().join("cpu.stat"), "usage_usec 1\nthrottled_usec 0\n").unwrap();
            fs::write(dir.join("cpu.stat"), format!("usage_usec 1\nthrottled_usec {throttled_us}\n"))
                .unwrap();
            let container = TargetContainer { name: "c".to_owned(), id: "1".to_owned() };
            let limited = |cgroup| Target {
                is_limited: true,
                containers: vec![container.clone()],
                ..Target::burstable(cgroup)
            };
            let pods = ["/a", "/b"].map(limited);
            let found = self.throttled.tick(&self.cgroups, &pods, &self.held, &Law::default(), self.now);
            found.into_iter().map(|pod| pod.name.clone()).collect()
        }
    }

    #[test]
    fn a_pod_near_the_bound_is_sampled_for_a_while_and_others_are_not() {
        let mut node = Node::new();
        // The bound is 5 %, and half of it is near.
        assert!(node.after("a", 24_000).is_empty());
        assert_eq!(node.after("a", 50_000), ["/a"]);
        for _ in 1..ALERT.as_secs() {
            assert_eq!(node.after("a", 50_000), ["/a"]);
        }
        assert!(node.after("a", 50_000).is_empty());
        assert!(node.after("b", 900_000).is_empty(), "the first look has no result");
        assert_eq!(node.after("b", 1_900_000), ["/b"]);
    }

    #[test]
    fn a_pod_with_a_burst_is_sampled_until_the_burst_ends() {
        let mut node = Node::new();
        let knob = Knob { cgroup: "/a/1".to_owned(), kind: KnobKind::Burst };
        node.held.insert(knob.clone(), 1);
        assert_eq!(node.after("a", 0), ["/a"]);
        node.held.remove(&knob);
        assert!(node.after("a", 0).is_empty());
    }
}
