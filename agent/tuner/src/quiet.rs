//! Whether any container can be suffering at all, from a few numbers: most of the time none is, and then
//! sampling every container twice per second would cost more than all else that an agent does on a node.
//!
//! A cgroup has waited at least as long as any below it (`Documentation/accounting/psi.rst`: a group is
//! stalled while some task of it is), so what all pods together waited for is the most that one of them can
//! have. Single long waits are in the kernel half's histograms, which are read at once. What a quota holds
//! back is in neither.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use beelet_ebpf_abi::Counters as KernelCounters;
use beelet_policy::tuner::Law;

use super::sample::{LEAST_MICROS, Source, p99_us};
use beelet_cgroups::{Cgroups, Pressure};

/// How long all containers are sampled once one may have suffered.
const ALERT: Duration = Duration::from_secs(10);
/// How often the histograms are read while all is quiet: hundreds of entries on a full node.
const WAITS_EVERY: Duration = Duration::from_secs(2);

/// What was seen at the ticks before.
#[derive(Debug, Default)]
pub(super) struct Quiet {
    /// Microseconds that all pods stalled: for a CPU, and for memory.
    stalled: Option<(Instant, [u64; 2])>,
    kernel: BTreeMap<u64, KernelCounters>,
    read_at: Option<Instant>,
    loud: Option<Instant>,
}

impl Quiet {
    /// `None` if no container needs to be sampled: nothing is held (`at_rest`), and no container below the
    /// cgroup `pods` has been near a bound for some time, but for those that their own quota holds back.
    /// Else, and where the kernel counts no stalls, how long each has waited.
    pub(super) fn tick(
        &mut self,
        cgroups: &Cgroups,
        (pods, at_rest): (&str, bool),
        source: Option<&Source>,
        law: &Law,
        now: Instant,
    ) -> Option<BTreeMap<u64, KernelCounters>> {
        if !self.has_no_stalls(cgroups, pods, law, now) {
            self.loud = Some(now);
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
        if kernel.iter().any(is_long) {
            self.loud = Some(now);
        }
        (self.kernel, self.read_at) = (kernel, Some(now));
        (!at_rest || !self.is_quiet(now)).then(|| self.kernel.clone())
    }

    /// What all pods together stalled since the tick before is below what would trouble one.
    fn has_no_stalls(&mut self, cgroups: &Cgroups, pods: &str, law: &Law, now: Instant) -> bool {
        let stalled = cgroups.stalled_us(pods, Pressure::Cpu).zip(cgroups.stalled_us(pods, Pressure::Memory));
        let before = std::mem::replace(&mut self.stalled, stalled.map(|(cpu, memory)| (now, [cpu, memory])));
        let bounds = [law.cpu_wait_permille, law.memory_stall_permille].map(|bound| near(bound.into(), law));
        before.zip(self.stalled).is_some_and(|((then, before), (now, after))| {
            let micros = now.saturating_duration_since(then).as_micros();
            let mut shares = before.iter().zip(after).zip(bounds);
            micros >= LEAST_MICROS
                && shares.all(|((before, after), bound)| {
                    u128::from(after.saturating_sub(*before)) * 1000 / micros < u128::from(bound)
                })
        })
    }

    fn is_quiet(&self, now: Instant) -> bool {
        self.loud.is_none_or(|loud| now.saturating_duration_since(loud) >= ALERT)
    }
}

/// From where on a number counts as near its bound.
fn near(bound: u64, law: &Law) -> u64 {
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
        stalled: [u64; 2],
        at_rest: bool,
        waits: Arc<Mutex<BTreeMap<u64, KernelCounters>>>,
    }

    impl Node {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            fs::create_dir(dir.path().join("kubepods")).unwrap();
            fs::write(dir.path().join("cgroup.controllers"), "cpu memory").unwrap();
            let mount = dir.path().to_owned();
            let hierarchies = vec![Hierarchy { mount, is_v2: true, controllers: BTreeSet::new() }];
            let cgroups = Cgroups::over_folders(Layout { version: Version::V2, hierarchies }, "/").unwrap();
            let mut node = Self {
                dir,
                cgroups,
                quiet: Quiet::default(),
                now: Instant::now(),
                stalled: [0; 2],
                at_rest: true,
                waits: Arc::default(),
            };
            assert!(!node.after([0, 0]), "nothing is known before the second tick");
            node.now += ALERT;
            assert!(node.after([0, 0]));
            node
        }

        /// A second later, in which so many microseconds were stalled, for a CPU and for memory.
        fn after(&mut self, stalled: [u64; 2]) -> bool {
            self.now += Duration::from_secs(1);
            for (n, file) in ["cpu.pressure", "memory.pressure"].into_iter().enumerate() {
                self.stalled[n] += stalled[n];
                let text = format!("some avg10=0.00 avg60=0.00 avg300=0.00 total={}\n", self.stalled[n]);
                fs::write(self.dir.path().join("kubepods").join(file), text).unwrap();
            }
            self.tick()
        }

        fn tick(&mut self) -> bool {
            let waits = Arc::clone(&self.waits);
            let source: Source = Arc::new(move || waits.lock().unwrap().clone());
            let (pods, law) = (("/kubepods", self.at_rest), Law::default());
            self.quiet.tick(&self.cgroups, pods, Some(&source), &law, self.now).is_none()
        }

        /// So many waits in the first bucket, and in the 14th: 2^(9+13) to 2^(10+13) ns, or 4 to 8 ms.
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
        assert!(!node.after([26_000, 0]));
        for _ in 1..ALERT.as_secs() {
            assert!(!node.after([0, 0]));
        }
        assert!(node.after([0, 0]));
        assert!(!node.after([0, 11_000]));
    }

    #[test]
    fn long_waits_of_one_cgroup_are_not_quiet_however_short_all_together() {
        let mut node = Node::new();
        node.waited(1000, 0);
        assert!(node.after([0, 0]));
        node.waited(2000, 100);
        let looks = [node.after([0, 0]), node.after([0, 0])];
        assert!(looks.contains(&false), "nobody looked at the waits for two seconds");
    }

    #[test]
    fn while_something_is_held_everybody_is_looked_at() {
        let mut node = Node::new();
        node.at_rest = false;
        assert!(!node.after([0, 0]));
        node.at_rest = true;
        assert!(node.after([0, 0]));
    }

    #[test]
    fn where_the_kernel_counts_no_stalls_it_is_never_quiet() {
        let mut node = Node::new();
        fs::remove_file(node.dir.path().join("kubepods/cpu.pressure")).unwrap();
        node.now += 2 * ALERT;
        assert!(!node.tick());
    }
}
