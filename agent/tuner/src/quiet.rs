//! A cheap check whether any container can be suffering, from a few numbers: usually none is, and sampling
//! every container twice per second would then cost more than all other work of an agent on a node.
//!
//! A cgroup has waited at least as long as any below it (`Documentation/accounting/psi.rst`: a group is
//! stalled while some task of it is), so the wait of all pods together is the maximum for each of them. On a
//! node of many pods that soon exceeds a bound for one, though each waits for little: then each pod's own
//! stalls are read, one file where a sample takes fifteen. Single long waits are in the kernel programs'
//! histograms, read all at once. Neither includes throttling by a quota.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use beelet_ebpf_abi::Counters as KernelCounters;
use beelet_policy::tuner::Law;

use super::{
    sample::{LEAST_MICROS, Source, p99_us, permille},
    targets::Target,
};
use beelet_cgroups::{Cgroups, Pressure, stats};

/// Time for which all containers are sampled once one may have suffered.
pub(super) const ALERT: Duration = Duration::from_secs(10);
/// Interval of reading the histograms while all is quiet: hundreds of entries on a full node.
const WAITS_EVERY: Duration = Duration::from_secs(2);

/// The observations of earlier ticks.
#[derive(Debug, Default)]
pub(super) struct Quiet {
    stalls: [Stalls; 2],
    kernel: BTreeMap<u64, KernelCounters>,
    read_at: Option<Instant>,
    loud: Option<Instant>,
}

impl Quiet {
    /// Returns `None` if no container needs to be sampled: nothing is held (`at_rest`), and no container of
    /// `pods`, which lie below the cgroup `root`, has been near a bound for some time, except those that
    /// their own quota throttles. Otherwise, and if the kernel does not count stalls, returns the counters of
    /// each container's waits.
    pub(super) fn tick(
        &mut self,
        cgroups: &Cgroups,
        (root, pods, at_rest): (&str, &[Target], bool),
        source: Option<&Source>,
        law: &Law,
        now: Instant,
    ) -> Option<BTreeMap<u64, KernelCounters>> {
        let kinds = [(Pressure::Cpu, law.cpu_wait_permille), (Pressure::Memory, law.memory_stall_permille)];
        for (stalls, (pressure, bound)) in self.stalls.iter_mut().zip(kinds) {
            let reading = StallReading { cgroups, pressure, bound: near(bound.into(), law), now };
            if stalls.may_trouble_one(&reading, root, pods) {
                self.loud = Some(now);
            }
        }
        let fresh = self.read_at.is_some_and(|at| now.saturating_duration_since(at) < WAITS_EVERY);
        if at_rest && fresh && self.is_quiet(now) {
            return None;
        }
        let kernel = source.map(|source| source()).unwrap_or_default();
        let bound = near(law.cpu_wait_p99_us, law);
        let is_long = |(id, counters): (&u64, &KernelCounters)| {
            let before = self.kernel.get(id).map_or(&[][..], |before| &before.run_queue_waits);
            p99_us(before, &counters.run_queue_waits).is_some_and(|wait| wait >= bound)
        };
        // Waits before the first reading are not current.
        if self.read_at.is_some() && kernel.iter().any(is_long) {
            self.loud = Some(now);
        }
        (self.kernel, self.read_at) = (kernel, Some(now));
        (!at_rest || !self.is_quiet(now)).then(|| self.kernel.clone())
    }

    fn is_quiet(&self, now: Instant) -> bool {
        self.loud.is_none_or(|loud| now.saturating_duration_since(loud) >= ALERT)
    }
}

/// The inputs of one tick's check.
struct StallReading<'a> {
    cgroups: &'a Cgroups,
    pressure: Pressure,
    /// Permille of the time.
    bound: u64,
    now: Instant,
}

impl StallReading<'_> {
    fn at(&self, cgroup: &str) -> Option<StallCount> {
        Some(StallCount { at: self.now, us: stats::stalled(self.cgroups, cgroup, self.pressure)?.some_us })
    }
}

/// The microseconds that a cgroup had stalled at one time.
#[derive(Clone, Copy, Debug)]
struct StallCount {
    at: Instant,
    us: u64,
}

impl StallCount {
    /// Returns true if the stall grew by this many permille of the time since `before`, or if that time is
    /// too short to know.
    fn grew_by(self, before: Self, bound: u64) -> bool {
        let micros = self.at.saturating_duration_since(before.at).as_micros();
        let grown = || permille(self.us.saturating_sub(before.us), micros);
        micros < LEAST_MICROS || u64::from(grown()) >= bound
    }
}

/// The stalls for one resource at the last tick.
#[derive(Debug, Default)]
struct Stalls {
    /// Stall of all pods together.
    all: Option<StallCount>,
    /// Stall of each pod, by its cgroup, while all together are near the bound of one.
    each: BTreeMap<String, StallCount>,
}

impl Stalls {
    /// Returns true if a pod may have stalled near the bound since the last tick, or if the kernel counts no
    /// stalls. The first look at a cgroup has no result.
    fn may_trouble_one(&mut self, reading: &StallReading<'_>, root: &str, pods: &[Target]) -> bool {
        let Some(all) = reading.at(root) else { return true };
        let before = self.all.replace(all);
        if !before.is_some_and(|before| all.grew_by(before, reading.bound)) {
            self.each.clear();
            return false;
        }
        let each: BTreeMap<String, StallCount> =
            pods.iter().filter_map(|pod| Some((pod.cgroup.clone(), reading.at(&pod.cgroup)?))).collect();
        let before = std::mem::replace(&mut self.each, each);
        self.each
            .iter()
            .any(|(cgroup, count)| before.get(cgroup).is_some_and(|was| count.grew_by(*was, reading.bound)))
    }
}

/// Returns the number from which a value counts as near its bound.
pub(super) fn near(bound: u64, law: &Law) -> u64 {
    bound * u64::from(law.release_percent) / 100
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeSet,
        fs,
        sync::{Arc, Mutex},
    };

    use super::*;
    use beelet_cgroups::{Hierarchy, Layout, Version};

    struct Node {
        dir: tempfile::TempDir,
        cgroups: Cgroups,
        quiet: Quiet,
        now: Instant,
        stalled: [[u64; 2]; 2],
        at_rest: bool,
        waits: Arc<Mutex<BTreeMap<u64, KernelCounters>>>,
    }

    impl Node {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            for pod in ["a", "b"] {
                fs::create_dir_all(dir.path().join("kubepods").join(pod)).unwrap();
            }
            fs::write(dir.path().join("cgroup.controllers"), "cpu memory").unwrap();
            let mount = dir.path().to_owned();
            let hierarchies = vec![Hierarchy { mount, is_v2: true, controllers: BTreeSet::new() }];
            let cgroups = Cgroups::over_folders(Layout { version: Version::V2, hierarchies }, "/").unwrap();
            let mut node = Self {
                dir,
                cgroups,
                quiet: Quiet::default(),
                now: Instant::now(),
                stalled: [[0; 2]; 2],
                at_rest: true,
                waits: Arc::default(),
            };
            // Two ticks: the first ones have no earlier measurement.
            assert!(node.after([0, 0]), "the first look has no result");
            assert!(node.after([0, 0]));
            node
        }

        /// Advances a second, in which one pod stalled for this many microseconds, for a CPU and for memory.
        fn after(&mut self, stalled: [u64; 2]) -> bool {
            self.after_each([stalled, [0, 0]])
        }

        /// Does the same for two pods.
        fn after_each(&mut self, stalled: [[u64; 2]; 2]) -> bool {
            self.now += Duration::from_secs(1);
            for (n, file) in ["cpu.pressure", "memory.pressure"].into_iter().enumerate() {
                let mut all = 0;
                for (pod, folder) in ["kubepods/a", "kubepods/b"].into_iter().enumerate() {
                    self.stalled[pod][n] += stalled[pod][n];
                    all += self.stalled[pod][n];
                    self.write(folder, file, self.stalled[pod][n]);
                }
                self.write("kubepods", file, all);
            }
            self.tick()
        }

        fn write(&self, folder: &str, file: &str, total: u64) {
            let text = format!("some avg10=0.00 avg60=0.00 avg300=0.00 total={total}\n");
            fs::write(self.dir.path().join(folder).join(file), text).unwrap();
        }

        fn tick(&mut self) -> bool {
            let waits = Arc::clone(&self.waits);
            let source: Source = Arc::new(move || waits.lock().unwrap().clone());
            let (targets, law) = (["/kubepods/a", "/kubepods/b"].map(Target::burstable), Law::default());
            let pods = ("/kubepods", &targets[..], self.at_rest);
            self.quiet.tick(&self.cgroups, pods, Some(&source), &law, self.now).is_none()
        }

        /// Adds this many waits to the first bucket, and to the 14th: 2^(9+13) to 2^(10+13) ns, or 4 to 8 ms.
        fn waited(&self, short: u64, long: u64) {
            let mut counters = KernelCounters::default();
            (counters.run_queue_waits[0], counters.run_queue_waits[13]) = (short, long);
            self.waits.lock().unwrap().insert(7, counters);
        }
    }

    #[test]
    fn stalls_below_all_bounds_are_quiet_and_one_above_is_not_for_a_while() {
        let mut node = Node::new();
        // The bounds are 5 % and 2 %, and half of them is near.
        assert!(node.after([24_000, 9_000]));
        assert!(node.after([26_000, 0]), "the pod is known a tick later");
        assert!(!node.after([26_000, 0]));
        for _ in 1..ALERT.as_secs() {
            assert!(!node.after([0, 0]));
        }
        assert!(node.after([0, 0]));
        assert!(node.after([0, 11_000]));
        assert!(!node.after([0, 11_000]));
    }

    #[test]
    fn many_pods_with_short_waits_are_quiet() {
        let mut node = Node::new();
        for _ in 0..3 {
            assert!(node.after_each([[20_000, 8_000]; 2]));
        }
        assert!(!node.after_each([[20_000, 8_000], [26_000, 0]]));
    }

    #[test]
    fn long_single_waits_are_not_quiet_even_with_a_short_total() {
        let mut node = Node::new();
        node.waited(1000, 0);
        assert!(node.after([0, 0]));
        node.waited(2000, 100);
        let looks = [node.after([0, 0]), node.after([0, 0])];
        assert!(looks.contains(&false), "the waits were not read for two seconds");
    }

    #[test]
    fn every_container_is_sampled_while_a_setting_is_held() {
        let mut node = Node::new();
        node.at_rest = false;
        assert!(!node.after([0, 0]));
        node.at_rest = true;
        assert!(node.after([0, 0]));
    }

    #[test]
    fn a_kernel_without_stall_counts_is_never_quiet() {
        let mut node = Node::new();
        fs::remove_file(node.dir.path().join("kubepods/cpu.pressure")).unwrap();
        node.now += 2 * ALERT;
        assert!(!node.tick());
    }
}
