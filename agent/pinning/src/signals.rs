//! Measures how containers use CPUs that they have for themselves, and who disturbs them there; advises whom
//! pinning would help. Without a Guaranteed pod that requests whole CPUs, nothing is read.

use std::{
    collections::{BTreeMap, VecDeque},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use beelet_base::{blocking::blocking, kernel_file::read_to_string_within};
use beelet_cgroups::{
    Cgroups, Pressure, search,
    stats::{stalled, throttled_ns},
};
use beelet_model::{pod::running, table::PodName, table::PodTable};
use beelet_policy::{
    pinning::{
        CpuSet, Gates, Needs,
        signals::{self, Candidate, Counters},
    },
    resources::cgroups::{CgroupConfig, pod_cgroup},
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{
    Metrics, Pinning,
    report::{PinnedContainer, PinningReport},
};

/// Time between two readings.
const PERIOD: Duration = Duration::from_secs(10);
/// Time over which rates are formed.
const WINDOW: Duration = Duration::from_secs(60);
/// Maximum size of a kernel file, in bytes: `/proc/interrupts` has a column per CPU.
const LARGEST: u64 = 16 << 20;
/// Maximum number of kernel threads that are read.
const MOST_THREADS: usize = 10_000;
/// The parent of all kernel threads.
const KTHREADD: &str = "2";

/// Dependencies of the measurement.
#[derive(Debug)]
pub struct Watcher {
    /// The pins.
    pub pinning: Pinning,
    /// All pods.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// The containers' cgroups.
    pub cgroups: Arc<Cgroups>,
    /// The names of cgroups.
    pub cgroup_config: CgroupConfig,
    /// Gates of the configuration.
    pub gates: Gates,
    /// Folder of the kernel's processes and counters: `/proc`.
    pub proc: PathBuf,
    /// Gauges.
    pub metrics: Metrics,
    /// Channel for the report.
    pub report: watch::Sender<Arc<PinningReport>>,
}

/// A running container that requests whole CPUs.
#[derive(Debug)]
struct Wanted {
    uid: String,
    pod: PodName,
    container: String,
    id: String,
    parent: String,
    cpus: usize,
    own: Option<CpuSet>,
}

/// A reading.
#[derive(Debug)]
struct Reading {
    at: Instant,
    counters: Counters,
    /// Time in which tasks waited for a CPU without their quota's fault, by the runtime's identifier, in
    /// microseconds.
    waited: BTreeMap<String, u64>,
}

impl Watcher {
    /// Runs until `shutdown`.
    pub async fn run(self, shutdown: CancellationToken) {
        let mut readings: VecDeque<Reading> = VecDeque::new();
        loop {
            let wanted = self.wanted();
            if wanted.is_empty() {
                readings.clear();
                self.publish(PinningReport::default());
            } else {
                let (cgroups, proc) = (Arc::clone(&self.cgroups), self.proc.clone());
                let read = move || (read(&cgroups, &proc, &wanted), wanted);
                let (reading, wanted) = blocking("reading the interrupts of CPUs", read).await;
                if let Some(first) = readings.front() {
                    self.publish(report(first, &reading, &wanted));
                }
                readings.push_back(reading);
                while readings.len() > 2
                    && readings.get(1).is_some_and(|second| second.at.elapsed() >= WINDOW)
                {
                    readings.pop_front();
                }
            }
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(PERIOD) => {}
            }
        }
    }

    fn publish(&self, report: PinningReport) {
        self.metrics.show_pinned(&report);
        self.report.send_if_modified(|last| {
            let is_new = **last != report;
            if is_new {
                *last = Arc::new(report);
            }
            is_new
        });
    }

    fn wanted(&self) -> Vec<Wanted> {
        let table = Arc::clone(&self.table.borrow());
        let mut wanted = Vec::new();
        for (name, entry) in table.pods.iter().filter(|(_, entry)| entry.ended().is_none()) {
            let Ok(needs) = Needs::read(&entry.pod, self.gates) else { continue };
            if needs.ignored || !needs.containers.iter().any(|container| container.cpus > 0) {
                continue;
            }
            let Ok(cgroup) = pod_cgroup(&entry.pod, &self.cgroup_config) else { continue };
            for (id, container) in running(&entry.pod) {
                let own = needs.containers.iter().find(|own| own.name == container.name && own.cpus > 0);
                let Some(own) = own else { continue };
                wanted.push(Wanted {
                    uid: needs.uid.clone(),
                    pod: name.clone(),
                    container: container.name.clone(),
                    id: id.to_owned(),
                    parent: cgroup.path.clone(),
                    cpus: own.cpus,
                    own: self.pinning.exclusive(&needs.uid, &container.name),
                });
            }
        }
        wanted
    }
}

/// Reads the counters. A file that can't be read counts as empty. Blocks.
fn read(cgroups: &Cgroups, proc: &Path, wanted: &[Wanted]) -> Reading {
    let waited = |one: &Wanted| {
        let path = search::container(cgroups, &one.parent, &one.id)?;
        let stalled = stalled(cgroups, &path, Pressure::Cpu)?.some_us;
        let throttled = throttled_ns(cgroups, &path)? / 1000;
        Some((one.id.clone(), stalled.saturating_sub(throttled)))
    };
    let waited = wanted.iter().filter(|one| one.own.is_none()).filter_map(waited).collect();
    let counters =
        if wanted.iter().any(|one| one.own.is_some()) { counters(proc) } else { Counters::default() };
    Reading { at: Instant::now(), counters, waited }
}

fn counters(proc: &Path) -> Counters {
    let text = |path: &str| read_to_string_within(proc.join(path), LARGEST).unwrap_or_default();
    let children = text(&format!("{KTHREADD}/task/{KTHREADD}/children"));
    let thread = |pid: &str| {
        let number = pid.parse().ok()?;
        let thread =
            signals::kernel_thread(&text(&format!("{pid}/stat")), &text(&format!("{pid}/schedstat")))?;
        Some((number, thread))
    };
    Counters {
        interrupts: signals::interrupts(&text("interrupts")),
        times: signals::times(&text("stat")),
        threads: children.split_whitespace().take(MOST_THREADS).filter_map(thread).collect(),
    }
}

/// Forms the report from two readings.
fn report(before: &Reading, now: &Reading, wanted: &[Wanted]) -> PinningReport {
    let elapsed = now.at.saturating_duration_since(before.at);
    let mut report = PinningReport::default();
    let mut candidates = Vec::new();
    for one in wanted {
        let disturbance = one
            .own
            .as_ref()
            .and_then(|cpus| signals::disturbance(&before.counters, &now.counters, elapsed, cpus));
        let waited = before.waited.get(&one.id).zip(now.waited.get(&one.id));
        let wait = waited.and_then(|(before, now)| {
            let share = now.saturating_sub(*before).saturating_mul(1000);
            u32::try_from(u128::from(share).checked_div(elapsed.as_micros())?).ok()
        });
        if one.own.is_none() || disturbance.is_some() {
            candidates.push(Candidate {
                pod: one.pod.to_string(),
                container: one.container.clone(),
                cpus: one.cpus,
                wait_permille: wait,
                idle_permille: disturbance.as_ref().map(|of| of.idle_permille),
            });
        }
        if let Some((cpus, disturbance)) = one.own.as_ref().zip(disturbance) {
            let (pod, cpus) = (one.pod.clone(), cpus.to_string());
            let key = (one.uid.clone(), one.container.clone());
            report.pinned.insert(key, PinnedContainer { pod, cpus, disturbance });
        }
    }
    report.advice = signals::advice(&candidates);
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counters_of_this_machine_are_read() {
        let counters = counters(Path::new("/proc"));
        assert!(!counters.times.is_empty() && !counters.interrupts.is_empty());
        assert!(counters.times.values().all(|(idle, all)| idle <= all));
        assert_eq!(super::counters(Path::new("/nowhere")), Counters::default());
    }

    #[test]
    fn a_report_has_the_pinned_containers_and_advice_for_those_that_wait() {
        let of = |container: &str, own: Option<&str>| Wanted {
            uid: "u".to_owned(),
            pod: PodName { namespace: "default".to_owned(), name: "web".to_owned() },
            container: container.to_owned(),
            id: container.to_owned(),
            parent: String::new(),
            cpus: 1,
            own: own.and_then(CpuSet::parse),
        };
        let wanted = [of("fast", Some("1")), of("slow", None)];
        let at = Instant::now();
        let reading = |seconds: u64, busy: u64, waited: u64| Reading {
            at: at + Duration::from_secs(seconds),
            counters: Counters {
                times: BTreeMap::from([(1, (0, busy))]),
                interrupts: BTreeMap::from([("24 disk".to_owned(), BTreeMap::from([(1, busy)]))]),
                threads: BTreeMap::new(),
            },
            waited: BTreeMap::from([("slow".to_owned(), waited)]),
        };
        let report = report(&reading(0, 100, 0), &reading(60, 160, 6_000_000), &wanted);
        let pinned = &report.pinned[&("u".to_owned(), "fast".to_owned())];
        assert_eq!((pinned.cpus.as_str(), pinned.disturbance.per_minute), ("1", 60));
        assert_eq!(report.advice.len(), 1);
        assert!(report.advice[0].starts_with("default/web, container slow: waited for a CPU for 10.0 %"));
    }
}
