//! The work of others on CPUs that a container has for itself, from the kernel's counters; and advice on
//! which containers gain from exclusive CPUs.
//!
//! Formats: proc(5) (`/proc/stat`, `/proc/interrupts`), `Documentation/scheduler/sched-stats.rst`
//! (`/proc/PID/schedstat`).

use std::{cmp::Reverse, collections::BTreeMap, time::Duration};

use super::CpuSet;

/// Maximum number of named interrupts and threads per container.
const NAMED: usize = 5;
/// Maximum length of a name, in characters.
const LONGEST: usize = 64;
/// Least number of events per minute that is worth a name.
const LEAST_EVENTS: u64 = 6;
/// Share of time without a CPU from which pinning is advised, in permille.
const WAITS: u32 = 50;
/// Share of time without work from which exclusive CPUs count as left idle, in permille.
const IDLE: u32 = 900;

/// The kernel's counters at one time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counters {
    /// Interrupts, by name and CPU.
    pub interrupts: BTreeMap<String, BTreeMap<u32, u64>>,
    /// Time without work and all time of each CPU, in ticks.
    pub times: BTreeMap<u32, (u64, u64)>,
    /// Kernel threads, by pid.
    pub threads: BTreeMap<i32, KernelThread>,
}

/// A kernel thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelThread {
    /// Its name.
    pub name: String,
    /// The CPU on which the thread ran last.
    pub cpu: u32,
    /// Time on a CPU, in nanoseconds.
    pub run_ns: u64,
    /// Number of times that the thread got a CPU.
    pub runs: u64,
}

/// Work of others on the exclusive CPUs of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Disturbance {
    /// Share of time in which the CPUs had no work, in permille.
    pub idle_permille: u32,
    /// Interrupts of devices, and runs of kernel threads, per minute.
    pub per_minute: u64,
    /// The most frequent causes, the most frequent first.
    pub causes: Vec<Cause>,
}

/// An interrupt or a kernel thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cause {
    /// `24 virtio0-input.0`, `LOC Local timer interrupts`, `kworker/1:1`.
    pub name: String,
    /// True for a kernel thread.
    pub is_thread: bool,
    /// Number per minute.
    pub per_minute: u64,
}

/// A running container of a Guaranteed pod that requests whole CPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// The pod's namespace and name.
    pub pod: String,
    /// The container's name.
    pub container: String,
    /// Requested CPUs.
    pub cpus: usize,
    /// Share of time in which some task waited for a CPU, without its own quota's; `None`: not measured.
    pub wait_permille: Option<u32>,
    /// Share of time in which its exclusive CPUs had no work; `None` if the container has none.
    pub idle_permille: Option<u32>,
}

/// Parses `/proc/interrupts`.
#[must_use]
pub fn interrupts(text: &str) -> BTreeMap<String, BTreeMap<u32, u64>> {
    let mut lines = text.lines();
    let head = lines.next().unwrap_or_default().split_whitespace();
    let cpus: Vec<u32> = head.filter_map(|word| word.strip_prefix("CPU")?.parse().ok()).collect();
    let mut found = BTreeMap::new();
    for line in lines {
        let Some((label, rest)) = line.trim_start().split_once(':') else { continue };
        let mut words = rest.split_whitespace();
        let counts: Option<Vec<u64>> =
            words.by_ref().take(cpus.len()).map(|word| word.parse().ok()).collect();
        // `ERR` and `MIS` have a single count.
        let Some(counts) = counts.filter(|counts| counts.len() == cpus.len()) else { continue };
        let words: Vec<&str> = words.collect();
        let last = words.last().copied().unwrap_or_default();
        let about = if is_device(label) { last.to_owned() } else { words.join(" ") };
        let name: String = format!("{label} {about}").trim_end().chars().take(LONGEST).collect();
        found.insert(name, cpus.iter().copied().zip(counts).collect());
    }
    found
}

/// Returns true for the label of a device's interrupt: a number. The others are the kernel's own.
fn is_device(name: &str) -> bool {
    name.starts_with(|first: char| first.is_ascii_digit())
}

/// Parses `/proc/stat`.
#[must_use]
pub fn times(text: &str) -> BTreeMap<u32, (u64, u64)> {
    let cpu = |line: &str| {
        let (name, rest) = line.split_once(' ')?;
        let number = name.strip_prefix("cpu")?.parse().ok()?;
        // user nice system idle iowait irq softirq steal; guest time is in user and nice.
        let ticks: Vec<u64> = rest.split_whitespace().take(8).map_while(|word| word.parse().ok()).collect();
        let idle = ticks.iter().skip(3).take(2).fold(0_u64, |sum, ticks| sum.saturating_add(*ticks));
        Some((number, (idle, ticks.iter().fold(0_u64, |sum, ticks| sum.saturating_add(*ticks)))))
    };
    text.lines().filter_map(cpu).collect()
}

/// Parses `/proc/PID/stat` and `/proc/PID/schedstat` of a kernel thread.
#[must_use]
pub fn kernel_thread(stat: &str, schedstat: &str) -> Option<KernelThread> {
    let (head, tail) = stat.rsplit_once(')')?;
    let (_, name) = head.split_once('(')?;
    // The fields after the name begin with the third, the state; the 39th is the CPU.
    let cpu = tail.split_whitespace().nth(36)?.parse().ok()?;
    let mut counts = schedstat.split_whitespace().map(str::parse::<u64>);
    let (run_ns, _, runs) = (counts.next()?.ok()?, counts.next()?.ok()?, counts.next()?.ok()?);
    Some(KernelThread { name: name.chars().take(LONGEST).collect(), cpu, run_ns, runs })
}

/// Returns the work of others on these CPUs between two readings.
#[must_use]
pub fn disturbance(
    before: &Counters,
    now: &Counters,
    elapsed: Duration,
    cpus: &CpuSet,
) -> Option<Disturbance> {
    let per_minute = |count: u64| {
        let minutes = elapsed.as_millis().max(1);
        u64::try_from(u128::from(count).saturating_mul(60_000).checked_div(minutes)?).ok()
    };
    let (mut idle, mut all) = (0_u64, 0_u64);
    for cpu in cpus.iter() {
        let (Some(old), Some(new)) = (before.times.get(&cpu), now.times.get(&cpu)) else { continue };
        idle = idle.saturating_add(new.0.saturating_sub(old.0));
        all = all.saturating_add(new.1.saturating_sub(old.1));
    }
    let idle_permille = u32::try_from(idle.min(all).saturating_mul(1000).checked_div(all)?).ok()?;
    let of_interrupts = now.interrupts.iter().map(|(name, counts)| {
        let old = before.interrupts.get(name);
        let new = |cpu: u32| {
            let count =
                |counts: Option<&BTreeMap<u32, u64>>| counts.and_then(|counts| counts.get(&cpu)).copied();
            count(Some(counts)).unwrap_or(0).saturating_sub(count(old).unwrap_or(0))
        };
        (name.clone(), false, cpus.iter().map(new).fold(0_u64, u64::saturating_add))
    });
    let of_threads =
        now.threads.iter().filter(|(_, thread)| cpus.contains(thread.cpu)).map(|(pid, thread)| {
            let old = before.threads.get(pid).filter(|old| old.name == thread.name);
            (thread.name.clone(), true, thread.runs.saturating_sub(old.map_or(0, |old| old.runs)))
        });
    let cause = |(name, is_thread, count): (String, bool, u64)| {
        per_minute(count).map(|per_minute| Cause { name, is_thread, per_minute })
    };
    let mut causes: Vec<Cause> = of_interrupts.chain(of_threads).filter_map(cause).collect();
    let disturbs = |cause: &&Cause| cause.is_thread || is_device(&cause.name);
    let sum = causes.iter().filter(disturbs).fold(0_u64, |sum, cause| sum.saturating_add(cause.per_minute));
    causes.retain(|cause| cause.per_minute >= LEAST_EVENTS);
    causes.sort_by_key(|cause| Reverse(cause.per_minute));
    causes.truncate(NAMED);
    Some(Disturbance { idle_permille, per_minute: sum, causes })
}

/// Returns the containers that would gain from exclusive CPUs, and those that leave theirs idle, in words.
#[must_use]
pub fn advice(candidates: &[Candidate]) -> Vec<String> {
    let one = |candidate: &Candidate| {
        let Candidate { pod, container, cpus, wait_permille, idle_permille } = candidate;
        match (idle_permille, wait_permille) {
            (Some(idle), _) if *idle >= IDLE => Some(format!(
                "{pod}, container {container}: its {cpus} exclusive CPUs had no work for {} of the time; a request \
                 with a fraction of a CPU would leave them to other containers",
                percent(*idle)
            )),
            (None, Some(wait)) if *wait >= WAITS => Some(format!(
                "{pod}, container {container}: waited for a CPU for {} of the time; `cpuManagerPolicy: static` would \
                 give the container {cpus} CPUs for itself",
                percent(*wait)
            )),
            _ => None,
        }
    };
    candidates.iter().filter_map(one).collect()
}

fn percent(permille: u32) -> String {
    format!("{}.{} %", permille / 10, permille % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERRUPTS: &str = "           CPU0       CPU2       \n  24:        100          7   PCI-MSI-0000:00:01.0   0-edge      \
        virtio0-input.0\n LOC:       1000        900   Local timer interrupts\n ERR:          0\nbroken\n 9: x 1 y\n";

    #[test]
    fn interrupts_are_named_and_counted_by_cpu() {
        let found = interrupts(INTERRUPTS);
        let names: Vec<&str> = found.keys().map(String::as_str).collect();
        assert_eq!(names, ["24 virtio0-input.0", "LOC Local timer interrupts"]);
        assert_eq!(found["24 virtio0-input.0"], BTreeMap::from([(0, 100), (2, 7)]));
        assert!(interrupts("").is_empty());
    }

    #[test]
    fn cpu_times_and_kernel_threads_are_parsed() {
        let found = times("cpu  9 9 9 9\ncpu0 1 2 3 40 5 6 7 8 9 9\ncpu12 1 0 0 1\nintr 5\ncpux 1\n");
        assert_eq!(found, BTreeMap::from([(0, (45, 72)), (12, (1, 2))]));
        let stat =
            format!("17 (kworker/1:1 (x)) I {}", (4..=52).map(|n| n.to_string() + " ").collect::<String>());
        let thread = kernel_thread(&stat, "500 20 3\n").unwrap();
        let expected = KernelThread { name: "kworker/1:1 (x)".to_owned(), cpu: 39, run_ns: 500, runs: 3 };
        assert_eq!(thread, expected);
        assert_eq!((kernel_thread("17 (a) I 1", "1 2 3"), kernel_thread(&stat, "1")), (None, None));
    }

    #[test]
    fn disturbances_are_those_of_the_containers_cpus_between_two_readings() {
        let thread = |cpu, runs| KernelThread { name: "ksoftirqd/2".to_owned(), cpu, run_ns: 0, runs };
        let before = Counters {
            interrupts: interrupts(INTERRUPTS),
            times: BTreeMap::from([(0, (0, 0)), (2, (100, 200))]),
            threads: BTreeMap::from([(5, thread(2, 10)), (6, thread(0, 0))]),
        };
        let mut now = before.clone();
        now.interrupts.get_mut("24 virtio0-input.0").unwrap().insert(2, 37);
        now.interrupts.get_mut("LOC Local timer interrupts").unwrap().insert(2, 1000);
        now.times.insert(2, (190, 300));
        now.threads = BTreeMap::from([(5, thread(2, 20)), (6, thread(0, 99))]);
        let cpus = CpuSet::parse("2").unwrap();
        let found = disturbance(&before, &now, Duration::from_secs(30), &cpus).unwrap();
        assert_eq!((found.idle_permille, found.per_minute), (900, 80));
        let causes: Vec<(&str, u64)> = found.causes.iter().map(|c| (c.name.as_str(), c.per_minute)).collect();
        assert_eq!(
            causes,
            [("LOC Local timer interrupts", 200), ("24 virtio0-input.0", 60), ("ksoftirqd/2", 20)]
        );
        assert_eq!(disturbance(&before, &before, Duration::ZERO, &cpus), None, "no time has passed");
    }

    #[test]
    fn advice_names_who_waits_and_who_leaves_cpus_idle() {
        let candidate = |wait_permille, idle_permille| Candidate {
            pod: "default/web".to_owned(),
            container: "main".to_owned(),
            cpus: 2,
            wait_permille,
            idle_permille,
        };
        let all = [
            candidate(Some(123), None),
            candidate(Some(49), None),
            candidate(None, None),
            candidate(Some(123), Some(100)),
            candidate(None, Some(971)),
        ];
        let advice = advice(&all);
        assert_eq!(advice.len(), 2);
        assert!(advice[0].contains("waited for a CPU for 12.3 % of the time"), "{}", advice[0]);
        assert!(advice[1].contains("had no work for 97.1 % of the time"), "{}", advice[1]);
    }

    proptest::proptest! {
        #[test]
        fn any_text_of_the_kernel_is_read_without_harm(text in "[\\PC\n :0-9]{0,300}") {
            let _ = (interrupts(&text), times(&text), kernel_thread(&text, &text));
        }
    }
}
