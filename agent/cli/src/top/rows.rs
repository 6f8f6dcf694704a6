//! Converts a snapshot to rows: pods with their containers, filtered and sorted. Pure functions.

use std::cmp::Ordering;
use std::collections::{HashMap, HashSet, VecDeque};

use beelet_proto::beelet::{SignalContainer, SignalPod, SignalRates, SignalSnapshot, SignalWaitedFor};

use super::columns::Column;
use super::row::{Numbers, Row};
use crate::{neighbours, plain, waited};

/// Number of trend values, which fills the widest column.
pub(super) const TREND: usize = 40;

/// Averaging window of the displayed rates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Window {
    /// The last second.
    #[value(name = "1s")]
    Second,
    /// The last ten seconds.
    #[value(name = "10s")]
    Ten,
    /// The last minute.
    #[value(name = "1m")]
    Minute,
}

impl Window {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Second => "1s",
            Self::Ten => "10s",
            Self::Minute => "1m",
        }
    }

    pub(super) fn next(self) -> Self {
        match self {
            Self::Second => Self::Ten,
            Self::Ten => Self::Minute,
            Self::Minute => Self::Second,
        }
    }

    /// Returns the CPUs in use on the machine over the window, or None if the window is not measured.
    pub(super) fn machine(self, snapshot: &SignalSnapshot) -> Option<f64> {
        let machine = snapshot.machine.as_ref()?;
        match self {
            Self::Second => machine.cpu_1s,
            Self::Ten => machine.cpu_10s,
            Self::Minute => None,
        }
    }

    pub(super) fn of(self, container: &SignalContainer) -> Option<&SignalRates> {
        match self {
            Self::Second => container.last_1s.as_ref(),
            Self::Ten => container.last_10s.as_ref(),
            Self::Minute => container.last_60s.as_ref(),
        }
    }
}

/// Content and order of the table.
#[derive(Debug, Clone)]
pub(super) struct View {
    pub(super) window: Window,
    pub(super) sort: Column,
    /// True to reverse the column's own order.
    pub(super) reversed: bool,
    /// Substring of the name or state, case-insensitive.
    pub(super) filter: String,
    /// UIDs of pods whose containers are shown.
    pub(super) expanded: HashSet<String>,
    /// True to show the containers of all pods.
    pub(super) all_expanded: bool,
    /// True if the snapshot covers all pods, so that the rest of the CPU use is outside pods.
    pub(super) whole: bool,
}

/// Trend values of the last seconds by row.
#[derive(Debug, Clone, Default)]
pub(super) struct Trends(HashMap<String, VecDeque<u64>>);

impl Trends {
    /// Adds this snapshot's values and removes rows that no longer exist.
    pub(super) fn add(&mut self, snapshot: &SignalSnapshot) {
        let view = View {
            window: Window::Second,
            sort: Column::Name,
            reversed: false,
            filter: String::new(),
            expanded: HashSet::new(),
            all_expanded: true,
            whole: false,
        };
        let rows = rows(snapshot, &view, &Trends::default());
        let mut next = HashMap::with_capacity(rows.len());
        for row in rows {
            let mut values = self.0.remove(&row.key).unwrap_or_default();
            values.push_back(value(&row.numbers, snapshot.by_kernel));
            if values.len() > TREND {
                values.pop_front();
            }
            next.insert(row.key, values);
        }
        self.0 = next;
    }

    fn of(&self, key: &str) -> Vec<u64> {
        self.0.get(key).map(|values| values.iter().copied().collect()).unwrap_or_default()
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // nanoseconds and shares: not negative, not large
fn value(numbers: &Numbers, by_kernel: bool) -> u64 {
    let pressure = || numbers.stalled[0].map(|(some, _)| some * 1e6);
    // With BPF programs, a missing percentile means that no task waited.
    let value = if by_kernel { numbers.p99 } else { pressure() };
    value.unwrap_or(0.0) as u64
}

/// Returns the rows of a snapshot.
pub(super) fn rows(snapshot: &SignalSnapshot, view: &View, trends: &Trends) -> Vec<Row> {
    let filter = view.filter.to_lowercase();
    let mut pods: Vec<(Row, Vec<Row>)> = Vec::new();
    for pod in &snapshot.pods {
        let mut containers: Vec<Row> = pod
            .containers
            .iter()
            // A finished init container has no current values.
            .filter(|container| container.running || !container.init)
            .map(|container| container_row(pod, container, snapshot.at_unix_ns, view.window))
            .collect();
        let mut row = pod_row(pod, &containers, snapshot.at_unix_ns);
        let has = |row: &Row| {
            let text = format!("{} {} {}", row.name, row.state, row.why).to_lowercase();
            text.contains(&filter)
        };
        if !filter.is_empty() && !has(&row) && !containers.iter().any(has) {
            continue;
        }
        row.expanded = view.all_expanded || view.expanded.contains(&pod.uid);
        for one in containers.iter_mut().chain([&mut row]) {
            one.trend = trends.of(&one.key);
        }
        containers.sort_by(|a, b| order(a, b, view));
        pods.push((row, containers));
    }
    let is_wanted = neighbours::OUTSIDE.contains(&filter);
    pods.extend(outside_row(snapshot, view).filter(|_| is_wanted).map(|row| (row, Vec::new())));
    pods.sort_by(|(a, _), (b, _)| order(a, b, view));
    let expand = |(row, containers): (Row, Vec<Row>)| {
        let shown = if row.expanded { containers } else { Vec::new() };
        std::iter::once(row).chain(shown)
    };
    pods.into_iter().flat_map(expand).collect()
}

/// Returns the row for CPU use outside pods.
fn outside_row(snapshot: &SignalSnapshot, view: &View) -> Option<Row> {
    let window = view.window;
    let cpu = neighbours::outside(snapshot, window.machine(snapshot), |container| window.of(container))
        .filter(|_| view.whole)?;
    Some(Row {
        key: neighbours::OUTSIDE.to_owned(),
        is_pod: true,
        expanded: false,
        name: neighbours::OUTSIDE.to_owned(),
        state: "-".to_owned(),
        why: String::new(),
        numbers: Numbers { cpu: Some(cpu), ..Numbers::default() },
        trend: Vec::new(),
        waited: Vec::new(),
    })
}

/// Orders two rows; names break ties, so that rows with equal numbers keep their position.
fn order(a: &Row, b: &Row, view: &View) -> Ordering {
    let by = view.sort.compare(a, b);
    (if view.reversed { by.reverse() } else { by }).then_with(|| a.name.cmp(&b.name))
}

fn age(started: Option<i64>, now: i64) -> Option<i64> {
    Some((now - started?).max(0) / 1_000_000_000)
}

fn container_row(pod: &SignalPod, container: &SignalContainer, now: i64, window: Window) -> Row {
    let usage = container.usage.as_ref();
    let rates = window.of(container);
    let share = |some: Option<f64>, full: Option<f64>| Some((some?, full.unwrap_or(0.0)));
    let numbers = Numbers {
        ready: container.ready,
        cpu: rates.map(|rates| rates.cpu),
        cpu_limit: usage.and_then(|usage| usage.cpu_limit),
        throttled: rates.and_then(|rates| rates.throttled),
        p50: rates.and_then(|rates| rates.runqueue_p50_ns),
        p99: rates.and_then(|rates| rates.runqueue_p99_ns),
        preempted: rates.and_then(|rates| Some(rates.preempted_by_other_pod? + rates.preempted_by_system?)),
        memory: usage.map(|usage| usage.working_set_bytes),
        memory_limit: usage.and_then(|usage| usage.memory_limit_bytes),
        stalled: [
            rates.and_then(|rates| share(rates.cpu_some, rates.cpu_full)),
            rates.and_then(|rates| share(rates.memory_some, rates.memory_full)),
            rates.and_then(|rates| share(rates.io_some, rates.io_full)),
        ],
        retransmits: rates.and_then(|rates| rates.retransmits),
        rx: rates.and_then(|rates| rates.rx_bytes),
        tx: rates.and_then(|rates| rates.tx_bytes),
        pids: usage.and_then(|usage| usage.pids),
        oom_kills: usage.map_or(0, |usage| usage.oom_kills),
        restarts: container.restarts,
        age_seconds: age(container.started_unix_ns, now),
    };
    let state = plain::line(&container.state).into_owned();
    let why = if container.running { String::new() } else { state.clone() };
    Row {
        key: format!("{}/{}", pod.uid, container.name),
        is_pod: false,
        expanded: false,
        name: plain::line(&container.name).into_owned(),
        state,
        why,
        waited: waits(pod, [container, container]).into_iter().chain(waited::pinned(container)).collect(),
        numbers,
        trend: Vec::new(),
    }
}

/// Returns the row of a pod: sums of its containers, and the maximum of values that cannot be added.
fn pod_row(pod: &SignalPod, containers: &[Row], now: i64) -> Row {
    let sum = |of: fn(&Numbers) -> Option<f64>| {
        containers.iter().filter_map(|row| of(&row.numbers)).reduce(|sum, value| sum + value)
    };
    let worst = |of: fn(&Numbers) -> Option<f64>| {
        containers.iter().filter_map(|row| of(&row.numbers)).reduce(f64::max)
    };
    let whole = |of: fn(&Numbers) -> Option<u64>| {
        containers.iter().filter_map(|row| of(&row.numbers)).reduce(|sum, value| sum + value)
    };
    // A pod has a memory limit only if all its containers have one.
    let limited = containers.iter().all(|row| row.numbers.memory_limit.is_some());
    let stalled = |kind: usize| {
        let all = containers.iter().filter_map(|row| row.numbers.stalled[kind]);
        all.reduce(|worst, one| (worst.0.max(one.0), worst.1.max(one.1)))
    };
    let numbers = Numbers {
        ready: pod.ready,
        cpu: sum(|n| n.cpu),
        cpu_limit: None,
        throttled: worst(|n| n.throttled),
        p50: worst(|n| n.p50),
        p99: worst(|n| n.p99),
        preempted: sum(|n| n.preempted),
        memory: whole(|n| n.memory),
        memory_limit: if limited { whole(|n| n.memory_limit) } else { None },
        stalled: [stalled(0), stalled(1), stalled(2)],
        retransmits: pod.retransmits,
        rx: pod.rx_bytes,
        tx: pod.tx_bytes,
        pids: whole(|n| n.pids),
        oom_kills: containers.iter().map(|row| row.numbers.oom_kills).sum(),
        restarts: containers.iter().map(|row| row.numbers.restarts).sum(),
        age_seconds: age(pod.started_unix_ns, now),
    };
    // A container's waiting reason is more specific than the pod's phase.
    let runs = pod.containers.iter().any(|c| c.running && !c.init);
    let is_well = |c: &SignalContainer| c.running || c.init || runs && c.state == "Completed";
    let trouble = pod.containers.iter().find(|c| !is_well(c)).map(|c| c.state.clone());
    let state = match (pod.phase.as_str(), trouble) {
        ("Running" | "Pending", Some(trouble)) => trouble,
        (phase, _) => phase.to_owned(),
    };
    Row {
        key: pod.uid.clone(),
        is_pod: true,
        expanded: false,
        name: plain::line(&format!("{}/{}", pod.namespace, pod.name)).into_owned(),
        state: plain::line(&state).into_owned(),
        why: if pod.ready == Some(false) { plain::line(&pod.not_ready).into_owned() } else { String::new() },
        waited: most_waiting(pod).map_or_else(Vec::new, |worst| waits(pod, worst)),
        numbers,
        trend: Vec::new(),
    }
}

/// Returns the causes of two containers' waits: the first for CPU, the second for memory.
fn waits(pod: &SignalPod, [cpu, memory]: [&SignalContainer; 2]) -> Vec<String> {
    let (namespace, name) = (&pod.namespace, &pod.name);
    let of = [waited::for_cpu(cpu, namespace, name), waited::for_memory(memory, namespace, name)];
    of.into_iter().flatten().collect()
}

/// Returns the containers with the longest waits: for CPU and for memory.
fn most_waiting(pod: &SignalPod) -> Option<[&SignalContainer; 2]> {
    let most = |of: fn(&SignalContainer) -> &Option<SignalWaitedFor>| {
        let some = |container: &SignalContainer| of(container).as_ref().map_or(0.0, |of| of.some);
        pod.containers.iter().max_by(|a, b| some(a).total_cmp(&some(b)))
    };
    Some([most(|container| &container.waited_for)?, most(|container| &container.waited_for_memory)?])
}

#[cfg(test)]
pub(super) mod tests {
    use beelet_proto::beelet::{SignalMachine, SignalUsage};

    use super::*;

    /// Returns a snapshot of pods with these namespaces, names, CPU use and run-queue p99 in microseconds.
    pub(in super::super) fn snapshot(pods: &[(&str, &str, f64, f64)]) -> SignalSnapshot {
        let pods = pods.iter().map(|(namespace, name, cpu, p99)| {
            let rates = SignalRates {
                over_seconds: 10.0,
                cpu: *cpu,
                throttled: Some(0.25),
                runqueue_p50_ns: Some(p99 * 100.0),
                runqueue_p99_ns: Some(p99 * 1000.0),
                cpu_some: Some(0.125),
                cpu_full: Some(0.0),
                memory_some: Some(0.0),
                io_some: Some(0.5),
                io_full: Some(0.25),
                rx_bytes: Some(2048.0),
                tx_bytes: Some(1_500_000.0),
                retransmits: Some(0.0),
                ..SignalRates::default()
            };
            let usage = SignalUsage {
                working_set_bytes: 50 << 20,
                memory_limit_bytes: Some(64 << 20),
                cpu_limit: Some(0.5),
                pids: Some(3),
                ..SignalUsage::default()
            };
            let container = |name: &str| SignalContainer {
                name: name.to_owned(),
                state: "Running".into(),
                running: true,
                ready: Some(true),
                restarts: 1,
                started_unix_ns: Some(1_000_000_000),
                usage: Some(usage),
                last_1s: Some(rates),
                last_10s: Some(rates),
                last_60s: None,
                ..SignalContainer::default()
            };
            SignalPod {
                namespace: (*namespace).into(),
                name: (*name).into(),
                uid: format!("uid-{name}"),
                phase: "Running".into(),
                ready: Some(true),
                started_unix_ns: Some(0),
                containers: vec![container("app"), container("sidecar")],
                rx_bytes: Some(2048.0),
                tx_bytes: Some(3_000_000.0),
                retransmits: Some(0.5),
                ..SignalPod::default()
            }
        });
        SignalSnapshot {
            at_unix_ns: 3_661_000_000_000,
            node: "node-1".into(),
            by_kernel: true,
            mode: "run".into(),
            machine: Some(SignalMachine {
                cpus: 4,
                cpu_1s: Some(1.5),
                cpu_10s: Some(1.5),
                load: vec![0.5, 1.0, 1.5],
                memory_total_bytes: 16 << 30,
                memory_available_bytes: 12 << 30,
                cpu_some: Some(0.1),
                memory_some: Some(0.0),
                io_some: Some(0.02),
            }),
            pods: pods.collect(),
            left_out: 0,
        }
    }

    pub(in super::super) fn view() -> View {
        View {
            window: Window::Ten,
            sort: Column::Cpu,
            reversed: false,
            filter: String::new(),
            expanded: HashSet::new(),
            all_expanded: false,
            whole: false,
        }
    }

    fn names(snapshot: &SignalSnapshot, view: &View) -> Vec<String> {
        rows(snapshot, view, &Trends::default()).into_iter().map(|row| row.name).collect()
    }

    #[test]
    fn what_is_outside_pods_is_a_row_where_all_pods_are_shown() {
        let mut snapshot = snapshot(&[("a", "busy", 0.5, 1.0)]);
        snapshot.machine = Some(SignalMachine { cpu_10s: Some(1.75), ..Default::default() });
        let whole = View { whole: true, ..view() };
        let rows = rows(&snapshot, &whole, &Trends::default());
        // Each of the two containers uses half a CPU.
        assert_eq!((rows[0].name.as_str(), rows[0].numbers.cpu), ("a/busy", Some(1.0)));
        assert_eq!((rows[1].name.as_str(), rows[1].numbers.cpu), (neighbours::OUTSIDE, Some(0.75)));
        assert_eq!(super::rows(&snapshot, &view(), &Trends::default()).len(), 1);
    }

    #[test]
    fn pods_are_sorted_filtered_and_expanded() {
        let snapshot = snapshot(&[("a", "slow", 0.1, 5.0), ("b", "busy", 0.9, 1.0), ("a", "calm", 0.1, 2.0)]);
        assert_eq!(names(&snapshot, &view()), ["b/busy", "a/calm", "a/slow"]);
        assert_eq!(names(&snapshot, &View { reversed: true, ..view() }), ["a/calm", "a/slow", "b/busy"]);
        assert_eq!(names(&snapshot, &View { sort: Column::P99, ..view() }), ["a/slow", "a/calm", "b/busy"]);
        assert_eq!(names(&snapshot, &View { sort: Column::Name, ..view() }), ["a/calm", "a/slow", "b/busy"]);
        assert_eq!(names(&snapshot, &View { filter: "BUS".into(), ..view() }), ["b/busy"]);
        assert_eq!(names(&snapshot, &View { filter: "sidecar".into(), ..view() }).len(), 3);
        let expanded = View { expanded: ["uid-calm".to_owned()].into(), ..view() };
        assert_eq!(names(&snapshot, &expanded), ["b/busy", "a/calm", "app", "sidecar", "a/slow"]);
    }

    #[test]
    fn a_pod_is_the_sum_of_its_containers_and_the_worst_of_what_cannot_be_added() {
        let mut snapshot = snapshot(&[("a", "p", 0.5, 5.0)]);
        snapshot.pods[0].containers[1].last_10s.as_mut().unwrap().runqueue_p99_ns = Some(9000.0);
        let row = &rows(&snapshot, &view(), &Trends::default())[0];
        assert_eq!((row.numbers.cpu, row.numbers.p99, row.numbers.restarts), (Some(1.0), Some(9000.0), 2));
        assert_eq!((row.numbers.memory, row.numbers.memory_limit), (Some(100 << 20), Some(128 << 20)));
        assert_eq!(row.numbers.memory_share(), Some(0.78125));
        snapshot.pods[0].containers[1].usage.as_mut().unwrap().memory_limit_bytes = None;
        assert_eq!(rows(&snapshot, &view(), &Trends::default())[0].numbers.memory_limit, None);
        // The one-minute window is not measured yet.
        let minute = View { window: Window::Minute, ..view() };
        assert_eq!(rows(&snapshot, &minute, &Trends::default())[0].numbers.cpu, None);
    }

    #[test]
    fn who_did_not_wait_has_no_percentile_and_a_flat_trend() {
        let mut snapshot = snapshot(&[("a", "p", 0.0, 5.0)]);
        for container in &mut snapshot.pods[0].containers {
            for rates in [&mut container.last_1s, &mut container.last_10s].into_iter().flatten() {
                (rates.runqueue_p50_ns, rates.runqueue_p99_ns) = (None, None);
            }
        }
        let mut trends = Trends::default();
        trends.add(&snapshot);
        let row = &rows(&snapshot, &view(), &trends)[0];
        assert_eq!((row.numbers.p50, row.numbers.p99), (None, None));
        assert_eq!(row.trend, [0], "pressure is another unit");
        snapshot.by_kernel = false;
        trends.add(&snapshot);
        assert_eq!(rows(&snapshot, &view(), &trends)[0].trend, [0, 125_000]);
    }

    #[test]
    fn what_a_runtime_says_cannot_leave_its_line() {
        let mut snapshot = snapshot(&[("a", "p", 0.5, 5.0)]);
        snapshot.pods[0].ready = Some(false);
        snapshot.pods[0].not_ready = "a\n\u{1b}[2J".into();
        assert_eq!(rows(&snapshot, &view(), &Trends::default())[0].why, "a\\n\\u{1b}[2J");
    }

    #[test]
    fn what_a_container_waits_for_is_the_pods_state() {
        let mut snapshot = snapshot(&[("a", "p", 0.5, 5.0)]);
        snapshot.pods[0].containers[0].running = false;
        snapshot.pods[0].containers[0].state = "CrashLoopBackOff".into();
        snapshot.pods[0].ready = Some(false);
        snapshot.pods[0].not_ready = "ContainersNotReady: [app]".into();
        let row = &rows(&snapshot, &view(), &Trends::default())[0];
        assert_eq!((row.state.as_str(), row.why.as_str()), ("CrashLoopBackOff", "ContainersNotReady: [app]"));
        // A completed container next to a running one is not a problem.
        snapshot.pods[0].containers[0].state = "Completed".into();
        assert_eq!(rows(&snapshot, &view(), &Trends::default())[0].state, "Running");
        snapshot.pods[0].containers[0].init = true;
        let row = &rows(&snapshot, &View { all_expanded: true, ..view() }, &Trends::default());
        assert_eq!(row.len(), 2, "a terminated init container is hidden");
    }

    #[test]
    fn trends_remember_some_and_forget_who_has_gone() {
        let mut trends = Trends::default();
        for second in 0..100 {
            trends.add(&snapshot(&[("a", "p", 0.5, f64::from(second))]));
        }
        let row = &rows(&snapshot(&[("a", "p", 0.5, 1.0)]), &view(), &trends)[0];
        assert_eq!((row.trend.len(), row.trend[TREND - 1]), (TREND, 99_000));
        trends.add(&snapshot(&[]));
        assert!(trends.0.is_empty());
    }
}
