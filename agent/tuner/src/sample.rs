//! Conversion of growing counters to rates since the last tick.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Instant,
};

use beelet_ebpf_abi::Counters as KernelCounters;
use beelet_policy::tuner::{ContainerSample, Observed, PodSample, Supports, reclaim::is_at_limit};

use super::{
    knobs::quota,
    targets::{Target, TargetContainer},
};
use beelet_cgroups::{Cgroups, Pressure, Version, memory, search, stats};

/// Minimum time between two readings for a meaningful rate.
pub(super) const LEAST_MICROS: u128 = 10_000;

/// Source of the kernel programs' counters, by cgroup id, all at once.
pub type Source = Arc<dyn Fn() -> BTreeMap<u64, KernelCounters> + Send + Sync>;

/// Source of the users of the CPUs while these cgroups waited: by the waiting cgroups' ids, the ids of the
/// users and their shares of the wait in permille.
pub type Holders = Arc<dyn Fn(&BTreeSet<u64>) -> BTreeMap<u64, Vec<(u64, u32)>> + Send + Sync>;

/// Source of the pages that the threads of each cgroup freed recently, because they needed memory and none
/// was free.
pub type Freed = Arc<dyn Fn() -> BTreeMap<u64, u64> + Send + Sync>;

/// The measurements of the kernel programs.
#[derive(Clone)]
pub struct KernelHalf {
    /// Single waits.
    pub counters: Source,
    /// Source of the users of the CPUs while others waited.
    pub holders: Holders,
    /// Source of the cgroups that needed memory.
    pub freed: Freed,
}

/// The counters of one cgroup at one time.
#[derive(Clone, Debug)]
struct CgroupCounters {
    at: Instant,
    used_ns: u64,
    throttled_ns: u64,
    cpu_stall_us: Option<u64>,
    memory_stall_us: Option<u64>,
    memory_still_us: Option<u64>,
    kernel: Option<KernelCounters>,
}

/// Counters of the last tick.
#[derive(Debug, Default)]
pub(super) struct Sampler {
    before: BTreeMap<String, CgroupCounters>,
}

impl Sampler {
    /// Samples the node.
    pub(super) fn sample(
        &mut self,
        cgroups: &Cgroups,
        (counted, kernel): (BTreeMap<u64, KernelCounters>, Option<&KernelHalf>),
        best_effort: &str,
        supports: Supports,
        pods: &[&Target],
        now: Instant,
    ) -> Observed {
        let mut round = SampleRound {
            cgroups,
            kernel: counted,
            now,
            before: &self.before,
            seen: BTreeMap::new(),
            ids: BTreeMap::new(),
        };
        let best_effort_used = round.rates(best_effort).and_then(|rates| rates.used).unwrap_or(0);
        let mut samples: Vec<PodSample> = pods.iter().filter_map(|pod| round.pod(pod)).collect();
        if let Some(kernel) = kernel {
            round.name_holders(&mut samples, &kernel.holders);
            if supports.memory_high {
                round.name_growers(&mut samples, &kernel.freed);
            }
        }
        let cpus = beelet_base::cpus::count() as u64 * 1000;
        self.before = round.seen;
        Observed { cpus, best_effort: best_effort.to_owned(), best_effort_used, supports, pods: samples }
    }
}

/// A pass over everything.
struct SampleRound<'a> {
    cgroups: &'a Cgroups,
    kernel: BTreeMap<u64, KernelCounters>,
    now: Instant,
    before: &'a BTreeMap<String, CgroupCounters>,
    seen: BTreeMap<String, CgroupCounters>,
    /// Ids of containers' cgroups, if the kernel programs count.
    ids: BTreeMap<String, u64>,
}

impl SampleRound<'_> {
    /// Fills in the pods that used the CPUs while containers waited.
    fn name_holders(&self, pods: &mut [PodSample], holders: &Holders) {
        let owners: BTreeMap<u64, String> = pods
            .iter()
            .flat_map(|pod| pod.containers.iter().map(move |container| (pod, container)))
            .filter_map(|(pod, container)| Some((*self.ids.get(&container.cgroup)?, pod.cgroup.clone())))
            .collect();
        let waits = |container: &ContainerSample| container.cpu_wait_permille.is_some_and(|wait| wait > 0);
        let waiting = pods.iter().flat_map(|pod| &pod.containers).filter(|container| waits(container));
        let ids: BTreeSet<u64> =
            waiting.filter_map(|container| self.ids.get(&container.cgroup)).copied().collect();
        if ids.is_empty() {
            return;
        }
        let found = holders(&ids);
        for container in pods.iter_mut().flat_map(|pod| &mut pod.containers) {
            let Some(held) = self.ids.get(&container.cgroup).and_then(|id| found.get(id)) else { continue };
            let mut by_pod: BTreeMap<String, u32> = BTreeMap::new();
            for (id, permille) in held {
                if let Some(pod) = owners.get(id) {
                    let sum = by_pod.entry(pod.clone()).or_default();
                    *sum = sum.saturating_add(*permille);
                }
            }
            container.held_by = Some(by_pod);
        }
    }

    /// Fills in the pods whose growth made containers stall for memory, if any did. A container at its own
    /// limit affects no others.
    fn name_growers(&self, pods: &mut [PodSample], freed: &Freed) {
        let stalls =
            |container: &ContainerSample| container.memory_stall_permille.is_some_and(|stall| stall > 0);
        if !pods.iter().flat_map(|pod| &pod.containers).any(stalls) {
            return;
        }
        let mut freed = freed();
        let at_limit = pods.iter().flat_map(|pod| &pod.containers).filter(|one| one.at_memory_limit);
        for id in at_limit.filter_map(|container| self.ids.get(&container.cgroup)) {
            freed.remove(id);
        }
        let all = freed.values().fold(0_u64, |sum, pages| sum.saturating_add(*pages));
        for pod in pods {
            let ids = pod.containers.iter().filter_map(|container| self.ids.get(&container.cgroup));
            let own = ids.filter_map(|id| freed.get(id)).fold(0_u64, |sum, pages| sum.saturating_add(*pages));
            pod.memory_growth_permille = Some(permille(own, u128::from(all)));
        }
    }

    fn pod(&mut self, pod: &Target) -> Option<PodSample> {
        let memory = memory::of(self.cgroups, &pod.cgroup)?;
        let rates = self.rates(&pod.cgroup)?;
        let containers: Vec<ContainerSample> = pod
            .containers
            .iter()
            .filter_map(|container| self.container(pod, container, rates.throttled))
            .collect();
        // Version 1 refuses a quota below one of the containers'; on version 2 the tighter one applies.
        let can_cap = self.cgroups.paths.version() == Version::V2
            || containers.iter().all(|container| container.quota_us.is_none());
        Some(PodSample {
            name: pod.name.clone(),
            class: pod.class,
            cgroup: pod.cgroup.clone(),
            cpu_request: pod.cpu_request,
            cpu_used: rates.used,
            can_cap,
            quota_us: quota(self.cgroups, &pod.cgroup),
            memory_request: pod.memory_request,
            memory_used: memory.usage,
            working_set: memory.working_set,
            memory_still_permille: rates.memory_still,
            memory_growth_permille: None,
            containers,
        })
    }

    /// Returns a container's sample. Throttling by its pod's quota does not count as waiting for others
    /// either.
    fn container(
        &mut self,
        pod: &Target,
        container: &TargetContainer,
        pod_throttled: Option<u32>,
    ) -> Option<ContainerSample> {
        let cgroup = search::container(self.cgroups, &pod.cgroup, &container.id)?;
        let rates = self.rates(&cgroup)?;
        // A container that never waits for memory is not at its limit either. These files are the most
        // expensive ones.
        let waits = rates.memory_stall.is_some_and(|stall| stall > 0);
        let memory = if waits { memory::of(self.cgroups, &cgroup) } else { None };
        Some(ContainerSample {
            name: container.name.clone(),
            cpu_wait_permille: rates.cpu_wait,
            cpu_wait_p99_us: rates.cpu_wait_p99_us,
            throttled_permille: rates.throttled.max(pod_throttled),
            memory_stall_permille: rates.memory_stall,
            at_memory_limit: memory.is_some_and(|memory| is_at_limit(memory.usage, memory.limit)),
            quota_us: quota(self.cgroups, &cgroup),
            held_by: None,
            cgroup,
        })
    }

    /// Returns the rates of a cgroup; `None` if it no longer exists.
    fn rates(&mut self, cgroup: &str) -> Option<Rates> {
        let cpu = stats::cpu(self.cgroups, cgroup)?;
        let id = if self.kernel.is_empty() { None } else { self.cgroups.paths.cgroup_id(cgroup) };
        self.ids.extend(id.map(|id| (cgroup.to_owned(), id)));
        let kernel = id.and_then(|id| self.kernel.get(&id)).copied();
        let memory = stats::stalled(self.cgroups, cgroup, Pressure::Memory);
        let now = CgroupCounters {
            at: self.now,
            used_ns: cpu.used_ns,
            throttled_ns: cpu.throttled_ns,
            cpu_stall_us: stats::stalled(self.cgroups, cgroup, Pressure::Cpu).map(|stalled| stalled.some_us),
            memory_stall_us: memory.map(|stalled| stalled.some_us),
            memory_still_us: memory.and_then(|stalled| stalled.full_us),
            kernel,
        };
        let rates = self.before.get(cgroup).map(|before| Rates::between(before, &now)).unwrap_or_default();
        self.seen.insert(cgroup.to_owned(), now);
        Some(rates)
    }
}

/// The rates between two readings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Rates {
    /// Millicores.
    used: Option<u64>,
    throttled: Option<u32>,
    cpu_wait: Option<u32>,
    cpu_wait_p99_us: Option<u64>,
    memory_stall: Option<u32>,
    memory_still: Option<u32>,
}

impl Rates {
    fn between(before: &CgroupCounters, now: &CgroupCounters) -> Self {
        let micros = now.at.saturating_duration_since(before.at).as_micros();
        if micros < LEAST_MICROS {
            return Self::default();
        }
        let permille = |delta_us: u64| permille(delta_us, micros);
        let grown = |before: Option<u64>, now: Option<u64>| Some(permille(now?.checked_sub(before?)?));
        let waits = before.kernel.as_ref().zip(now.kernel.as_ref());
        let by_kernel = |of: fn(&KernelCounters) -> u64| {
            waits.and_then(|(before, now)| Some(permille(of(now).checked_sub(of(before))? / 1000)))
        };
        let used_us = now.used_ns.saturating_sub(before.used_ns) / 1000;
        Self {
            used: u64::try_from(u128::from(used_us) * 1000 / micros).ok(),
            throttled: Some(permille(now.throttled_ns.saturating_sub(before.throttled_ns) / 1000)),
            // The time in which any task waited says more than the sum of all waits, which grows with the
            // number of tasks.
            cpu_wait: grown(before.cpu_stall_us, now.cpu_stall_us)
                .or_else(|| by_kernel(|kernel| kernel.run_queue_wait_ns)),
            cpu_wait_p99_us: waits
                .and_then(|(before, now)| p99_us(&before.run_queue_waits, &now.run_queue_waits)),
            memory_stall: grown(before.memory_stall_us, now.memory_stall_us).or_else(|| {
                by_kernel(|kernel| kernel.memcg_reclaim_ns.wrapping_add(kernel.direct_reclaim_ns))
            }),
            memory_still: grown(before.memory_still_us, now.memory_still_us),
        }
    }
}

/// Returns the share that `part` is of `all`, both in the same unit.
pub(super) fn permille(part: u64, all: u128) -> u32 {
    u32::try_from(u128::from(part) * 1000 / all.max(1)).unwrap_or(u32::MAX)
}

/// Returns the 99th percentile of the waits between two states of a histogram of powers of two, evenly spread
/// within its bucket, in microseconds; `None` for fewer than 100 waits.
pub(super) fn p99_us(before: &[u64], now: &[u64]) -> Option<u64> {
    let counts: Vec<u64> = now
        .iter()
        .enumerate()
        .map(|(n, count)| count.saturating_sub(before.get(n).copied().unwrap_or(0)))
        .collect();
    let all: u64 = counts.iter().sum();
    if all < 100 {
        return None;
    }
    let rank = all - all / 100;
    let mut seen = 0;
    for (n, count) in counts.iter().enumerate() {
        if seen + count >= rank {
            let end_ns = 1024_u64.checked_shl(u32::try_from(n).ok()?)?;
            let begin_ns = if n == 0 { 0 } else { end_ns / 2 };
            let within = u128::from(end_ns - begin_ns) * u128::from(rank - seen) / u128::from(*count);
            return Some((begin_ns + u64::try_from(within).unwrap_or(0)) / 1000);
        }
        seen += count;
    }
    None
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn counters(at: Instant) -> CgroupCounters {
        CgroupCounters {
            at,
            used_ns: 0,
            throttled_ns: 0,
            cpu_stall_us: Some(0),
            memory_stall_us: None,
            memory_still_us: None,
            kernel: None,
        }
    }

    #[test]
    fn counters_become_shares_of_the_time_between() {
        let start = Instant::now();
        let before = counters(start);
        let mut now = counters(start + Duration::from_millis(500));
        now.used_ns = 750_000_000;
        now.throttled_ns = 50_000_000;
        now.cpu_stall_us = Some(25_000);
        let rates = Rates::between(&before, &now);
        let expected = Rates {
            used: Some(1500),
            throttled: Some(100),
            cpu_wait: Some(50),
            cpu_wait_p99_us: None,
            memory_stall: None,
            memory_still: None,
        };
        assert_eq!(rates, expected);
        // A restarted container has new counters, which may be smaller.
        now.cpu_stall_us = Some(10);
        assert_eq!(Rates::between(&now, &counters(start + Duration::from_secs(1))).cpu_wait, None);
        assert_eq!(Rates::between(&before, &counters(start)), Rates::default());
    }

    #[test]
    fn the_99th_percentile_is_of_new_waits() {
        assert_eq!(p99_us(&[], &[50, 49]), None);
        assert_eq!(p99_us(&[], &[990, 0, 0, 10]), Some(1));
        // Half of the bucket from 4096 to 8192 ns.
        assert_eq!(p99_us(&[], &[980, 0, 0, 20]), Some(6));
        assert_eq!(p99_us(&[1000, 0, 0, 0], &[1000, 0, 0, 200]), Some(8));
    }
}
