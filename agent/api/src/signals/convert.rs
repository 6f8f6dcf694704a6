//! Conversion of the agent's measurements to the wire format.

use beelet_pinning::{PinnedContainer, PinningReport};
use beelet_policy::pinning::signals::Cause;
use beelet_proto::beelet as proto;
use jiff::Timestamp;

use beelet_stats::model::{
    ContainerStats, Holder, Machine, NetRates, NodeStats, PodStats, Rates, Reading, Share, State, WaitedFor,
    Who,
};

/// Index of the window for a pod's traffic: ten seconds.
const TEN: usize = 1;

pub(super) fn snapshot(
    (pressure, pinned): (&NodeStats, &PinningReport),
    mode: &str,
    namespace: &str,
) -> proto::SignalSnapshot {
    let wanted = |pod: &&PodStats| namespace.is_empty() || pod.name.namespace == namespace;
    proto::SignalSnapshot {
        at_unix_ns: unix_ns(pressure.at),
        node: pressure.node.to_string(),
        by_kernel: pressure.by_kernel,
        mode: mode.to_owned(),
        machine: Some(machine(&pressure.machine)),
        pods: pressure.pods.iter().filter(wanted).map(|of| pod(of, pinned)).collect(),
        left_out: u32::try_from(pressure.left_out).unwrap_or(u32::MAX),
    }
}

fn unix_ns(at: Timestamp) -> i64 {
    i64::try_from(at.as_nanosecond()).unwrap_or(i64::MAX)
}

fn machine(machine: &Machine) -> proto::SignalMachine {
    let some = |share: Option<Share>| share.map(|share| share.some);
    let [cpu, memory, io] = machine.stalled;
    proto::SignalMachine {
        cpus: machine.cpus,
        cpu_1s: machine.cpu[0],
        cpu_10s: machine.cpu[TEN],
        load: machine.load.to_vec(),
        memory_total_bytes: machine.memory_total,
        memory_available_bytes: machine.memory_available,
        cpu_some: some(cpu),
        memory_some: some(memory),
        io_some: some(io),
    }
}

fn pod(pod: &PodStats, pinned: &PinningReport) -> proto::SignalPod {
    let net = pod.net_windows[TEN].or_else(|| sockets(pod));
    proto::SignalPod {
        namespace: pod.name.namespace.clone(),
        name: pod.name.name.clone(),
        uid: pod.uid.clone(),
        qos: pod.qos.clone(),
        phase: pod.phase.clone(),
        ready: pod.ready,
        not_ready: pod.not_ready.clone(),
        started_unix_ns: pod.started_at.map(unix_ns),
        containers: pod
            .containers
            .iter()
            .map(|of| container(of, pinned.pinned.get(&(pod.uid.clone(), of.name.clone()))))
            .collect(),
        rx_bytes: net.map(|net| net.rx_bytes),
        tx_bytes: net.map(|net| net.tx_bytes),
        retransmits: net.map(|net| net.retransmits),
    }
}

/// Returns the sum of the containers' sockets, where these are counted.
fn sockets(pod: &PodStats) -> Option<NetRates> {
    let all = pod.containers.iter().filter_map(|container| container.windows[TEN]?.net);
    all.reduce(|sum, net| NetRates {
        rx_bytes: sum.rx_bytes + net.rx_bytes,
        tx_bytes: sum.tx_bytes + net.tx_bytes,
        retransmits: sum.retransmits + net.retransmits,
    })
}

fn container(container: &ContainerStats, pinned: Option<&PinnedContainer>) -> proto::SignalContainer {
    let state = match &container.state {
        State::Running => "Running",
        State::Waiting(reason) | State::Ended(reason) => reason.as_str(),
        State::Unknown => "Unknown",
    };
    let [second, ten, minute] = container.windows.map(|rates| rates.map(|of| rates_message(&of)));
    proto::SignalContainer {
        name: container.name.clone(),
        id: container.id.clone(),
        image: container.image.clone(),
        state: if state.is_empty() { "Waiting" } else { state }.to_owned(),
        running: container.state == State::Running,
        init: container.init,
        restarts: container.restarts,
        ready: container.ready,
        started_unix_ns: container.started_at.map(unix_ns),
        cgroup: container.cgroup.clone().unwrap_or_default(),
        cgroup_id: container.cgroup_id,
        usage: container.reading.as_ref().map(usage),
        last_1s: second,
        last_10s: ten,
        last_60s: minute,
        waited_for: container.waited_for.as_ref().map(waited_for),
        waited_for_memory: container.waited_for_memory.as_ref().map(waited_for),
        pinned: pinned.map(of_pinned),
    }
}

fn of_pinned(of: &PinnedContainer) -> proto::SignalPinned {
    let per_second = |per_minute: u64| per_minute as f64 / 60.0;
    let cause = |cause: &Cause| proto::SignalDisturber {
        name: cause.name.clone(),
        thread: cause.is_thread,
        per_second: per_second(cause.per_minute),
    };
    proto::SignalPinned {
        cpus: of.cpus.clone(),
        idle: f64::from(of.disturbance.idle_permille) / 1000.0,
        disturbances_per_second: per_second(of.disturbance.per_minute),
        disturbers: of.disturbance.causes.iter().map(cause).collect(),
    }
}

fn waited_for(of: &WaitedFor) -> proto::SignalWaitedFor {
    proto::SignalWaitedFor { some: of.some, holders: of.holders.iter().map(holder).collect() }
}

fn holder(holder: &Holder) -> proto::SignalHolder {
    let unnamed = proto::SignalHolder { share: holder.share, ..proto::SignalHolder::default() };
    match &holder.who {
        Who::Pod { pod, container } => proto::SignalHolder {
            namespace: pod.namespace.clone(),
            pod: pod.name.clone(),
            container: container.clone(),
            ..unnamed
        },
        Who::Machine(path) => proto::SignalHolder { cgroup: path.clone(), ..unnamed },
        Who::Nobody => proto::SignalHolder { own_quota: true, ..unnamed },
        Who::Gone => unnamed,
    }
}

fn usage(reading: &Reading) -> proto::SignalUsage {
    let gauges = &reading.gauges;
    proto::SignalUsage {
        cpu_seconds: reading.counters.cpu_ns as f64 / 1e9,
        cpu_limit: gauges.cpu_limit,
        memory_bytes: gauges.memory_usage,
        working_set_bytes: gauges.working_set,
        rss_bytes: gauges.rss,
        memory_limit_bytes: gauges.memory_limit,
        swap_bytes: gauges.swap,
        pids: gauges.pids,
        pids_limit: gauges.pids_limit,
        oom_kills: reading.counters.oom_kills,
    }
}

fn rates_message(rates: &Rates) -> proto::SignalRates {
    let some = |share: Option<Share>| share.map(|share| share.some);
    let full = |share: Option<Share>| share.map(|share| share.full);
    proto::SignalRates {
        over_seconds: rates.over_ns as f64 / 1e9,
        cpu: rates.cpu,
        throttled: rates.throttled,
        runqueue_p50_ns: rates.runq.and_then(|runq| runq.p50_ns),
        runqueue_p99_ns: rates.runq.and_then(|runq| runq.p99_ns),
        runqueue_wait: rates.runq.map(|runq| runq.waiting),
        preempted_by_same_pod: rates.preempted.map(|by| by[0]),
        preempted_by_other_pod: rates.preempted.map(|by| by[1]),
        preempted_by_system: rates.preempted.map(|by| by[2]),
        cpu_some: some(rates.cpu_stalled),
        cpu_full: full(rates.cpu_stalled),
        memory_some: some(rates.memory_stalled),
        memory_full: full(rates.memory_stalled),
        io_some: some(rates.io_stalled),
        io_full: full(rates.io_stalled),
        reclaim: rates.reclaim,
        major_faults: rates.major_faults,
        read_bytes: rates.read_bytes,
        written_bytes: rates.written_bytes,
        rx_bytes: rates.net.map(|net| net.rx_bytes),
        tx_bytes: rates.net.map(|net| net.tx_bytes),
        retransmits: rates.net.map(|net| net.retransmits),
        rtt_us: rates.rtt_us,
        oom_kills: rates.oom_kills,
    }
}
