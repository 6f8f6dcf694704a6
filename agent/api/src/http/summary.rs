//! `/stats/summary`: the kubelet's summary of the node, its pods and their containers
//! (k8s.io/kubelet/pkg/apis/stats/v1alpha1). Unmeasured values are omitted, as in the kubelet.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use jiff::Timestamp;
use serde::Serialize;

use super::ApiState;
use beelet_model::disk::{Places, PodDisk, Room, Taken};
use beelet_stats::Scope;
use beelet_stats::model::{ContainerStats, Counters, Net, NodeStats, PodStats, Reading, Stalls};

/// Index of the window of CPU use: ten seconds, about the kubelet's own.
const TEN: usize = 1;
/// Default path of `nodefs`.
const NODE_FS: &str = "/";

pub(super) async fn summary(State(state): State<ApiState>) -> Response {
    let pressure = state.pressure.now(Scope::Everything).await;
    if pressure.at_ns == 0 {
        let why = "no measurements yet: the agent is waiting for the container runtime\n";
        return (StatusCode::SERVICE_UNAVAILABLE, why).into_response();
    }
    // An unresponsive file system must not block an async thread.
    let made = beelet_base::blocking::spawn_blocking(move || {
        let sizes = Sizes::measure(&pressure.places);
        serde_json::to_vec(&of(&pressure, &sizes)).map_err(|error| error.to_string())
    });
    match made.await.map_err(|error| error.to_string()).flatten() {
        Ok(summary) => ([(header::CONTENT_TYPE, "application/json")], summary).into_response(),
        Err(error) => {
            (StatusCode::INTERNAL_SERVER_ERROR, format!("stats/summary: {error}\n")).into_response()
        }
    }
}

/// Fields of a kubelet's summary that this one lacks, with reasons, for docs/metrics.md.
#[cfg(any(test, feature = "test-util"))]
pub const LACKING: [(&str, &str); 1] = [("node.systemContainers[].startTime", "not recorded")];

/// Current sizes of the node's file systems.
#[derive(Debug, Default)]
pub(super) struct Sizes {
    pub(super) node: Option<Fs>,
    pub(super) images: Option<Fs>,
    pub(super) containers: Option<Fs>,
}

impl Sizes {
    /// Measures the file systems. Blocks while a file system is unresponsive.
    pub(super) fn measure(places: &Places) -> Self {
        let measure = |path: &Option<PathBuf>| fs(path.as_deref()?);
        Self {
            node: fs(places.node.as_deref().unwrap_or(Path::new(NODE_FS))),
            images: measure(&places.images),
            containers: measure(&places.containers).or_else(|| measure(&places.images)),
        }
    }
}

#[derive(Debug, Serialize)]
struct Summary {
    node: Node,
    pods: Vec<Pod>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Node {
    node_name: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    system_containers: Vec<Container>,
    #[serde(skip_serializing_if = "Option::is_none")]
    start_time: Option<String>,
    cpu: Cpu,
    memory: Memory,
    #[serde(skip_serializing_if = "Option::is_none")]
    network: Option<Network>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fs: Option<Fs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    runtime: Option<Runtime>,
    rlimit: Rlimit,
    #[serde(skip_serializing_if = "Option::is_none")]
    swap: Option<Swap>,
    #[serde(skip_serializing_if = "Option::is_none")]
    io: Option<Io>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Runtime {
    #[serde(skip_serializing_if = "Option::is_none")]
    image_fs: Option<Fs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    container_fs: Option<Fs>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Pod {
    pod_ref: PodRef,
    #[serde(skip_serializing_if = "Option::is_none")]
    start_time: Option<String>,
    containers: Vec<Container>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu: Option<Cpu>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<Memory>,
    #[serde(skip_serializing_if = "Option::is_none")]
    network: Option<Network>,
    /// The API has this field in snake case.
    #[serde(rename = "process_stats", skip_serializing_if = "Option::is_none")]
    process_stats: Option<Processes>,
    #[serde(skip_serializing_if = "Option::is_none")]
    swap: Option<Swap>,
    #[serde(skip_serializing_if = "Option::is_none")]
    io: Option<Io>,
    #[serde(rename = "volume", skip_serializing_if = "Vec::is_empty")]
    volumes: Vec<Volume>,
    #[serde(rename = "ephemeral-storage", skip_serializing_if = "Option::is_none")]
    ephemeral_storage: Option<Fs>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Volume {
    name: String,
    #[serde(flatten)]
    fs: Fs,
    #[serde(skip_serializing_if = "Option::is_none")]
    pvc_ref: Option<PvcRef>,
    #[serde(skip_serializing_if = "Option::is_none")]
    volume_health_stats: Option<VolumeHealth>,
}

#[derive(Debug, Serialize)]
struct PvcRef {
    name: String,
    namespace: String,
}

#[derive(Debug, Serialize)]
struct VolumeHealth {
    abnormal: bool,
}

#[derive(Debug, Serialize)]
struct PodRef {
    name: String,
    namespace: String,
    uid: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Container {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    start_time: Option<String>,
    cpu: Cpu,
    memory: Memory,
    #[serde(skip_serializing_if = "Option::is_none")]
    swap: Option<Swap>,
    #[serde(skip_serializing_if = "Option::is_none")]
    io: Option<Io>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rootfs: Option<Fs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logs: Option<Fs>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Cpu {
    time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage_nano_cores: Option<u64>,
    usage_core_nano_seconds: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    psi: Option<Psi>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Memory {
    time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    available_bytes: Option<u64>,
    usage_bytes: u64,
    working_set_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    rss_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    page_faults: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    major_page_faults: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    psi: Option<Psi>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Io {
    time: String,
    psi: Psi,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Swap {
    time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    swap_available_bytes: Option<u64>,
    swap_usage_bytes: u64,
}

/// Pressure (KEP-4205): averages in percent, totals in nanoseconds.
#[derive(Debug, Serialize)]
struct Psi {
    full: PsiLine,
    some: PsiLine,
}

#[derive(Debug, Serialize)]
struct PsiLine {
    total: u64,
    avg10: f64,
    avg60: f64,
    avg300: f64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Network {
    time: String,
    #[serde(flatten)]
    default: Interface,
    interfaces: Vec<Interface>,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
struct Interface {
    name: String,
    rx_bytes: u64,
    rx_errors: u64,
    tx_bytes: u64,
    tx_errors: u64,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Fs {
    time: String,
    available_bytes: u64,
    pub(super) capacity_bytes: u64,
    pub(super) used_bytes: u64,
    pub(super) inodes_free: u64,
    pub(super) inodes: u64,
    inodes_used: u64,
}

impl Fs {
    /// Returns the usage of part of this file system.
    fn of(&self, taken: Taken) -> Self {
        Self { used_bytes: taken.bytes, inodes_used: taken.inodes, ..self.clone() }
    }

    /// Returns the capacity of a volume.
    fn with(room: &Room, time: String) -> Self {
        Self {
            time,
            available_bytes: room.available_bytes,
            capacity_bytes: room.capacity_bytes,
            used_bytes: room.used_bytes,
            inodes_free: room.inodes_free,
            inodes: room.inodes,
            inodes_used: room.inodes_used,
        }
    }
}

#[derive(Debug, Serialize)]
struct Rlimit {
    time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    maxpid: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    curproc: Option<u64>,
}

#[derive(Debug, Serialize)]
struct Processes {
    process_count: u64,
}

fn of(pressure: &NodeStats, sizes: &Sizes) -> Summary {
    let machine = &pressure.machine;
    let at = time(pressure.at);
    let [cpu_psi, memory_psi, io_psi] = machine.stalls.map(|stalls| stalls.map(psi));
    let node = Node {
        node_name: pressure.node.to_string(),
        system_containers: all_pods(pressure, &at).into_iter().collect(),
        start_time: machine.booted_at.map(time),
        network: network(&machine.net, &at),
        cpu: Cpu {
            time: at.clone(),
            usage_nano_cores: machine.cpu[TEN].map(nano_cores),
            usage_core_nano_seconds: machine.cpu_ns,
            psi: cpu_psi,
        },
        memory: Memory {
            time: at.clone(),
            // The kubelet's definition: capacity minus working set, not the kernel's MemAvailable.
            available_bytes: Some(machine.memory_total.saturating_sub(machine.working_set)),
            usage_bytes: machine.memory_usage,
            working_set_bytes: machine.working_set,
            rss_bytes: machine.rss,
            page_faults: machine.faults.map(|[all, _]| all),
            major_page_faults: machine.faults.map(|[_, major]| major),
            psi: memory_psi,
        },
        fs: sizes.node.clone(),
        runtime: runtime(&pressure.places, sizes),
        rlimit: Rlimit { time: at.clone(), maxpid: number("/proc/sys/kernel/pid_max"), curproc: processes() },
        swap: machine.swap.map(|[total, free]| Swap {
            time: at.clone(),
            swap_available_bytes: Some(free),
            swap_usage_bytes: total.saturating_sub(free),
        }),
        io: io_psi.map(|psi| Io { time: at.clone(), psi }),
    };
    // As in the kubelet, a pod without running containers is omitted.
    let running = pressure.pods.iter().filter(|one| !one.containers.is_empty() || one.reading.is_some());
    Summary { node, pods: running.map(|one| pod(one, sizes, &at)).collect() }
}

/// Returns the runtime's file systems once their paths are known.
fn runtime(places: &Places, sizes: &Sizes) -> Option<Runtime> {
    let images = sizes.images.as_ref()?;
    let image_fs = places.all_images.map(|taken| images.of(taken));
    Some(Runtime {
        image_fs: image_fs.or_else(|| Some(images.clone())),
        container_fs: sizes.containers.clone(),
    })
}

/// Returns the cgroup of all pods, which the kubelet calls the system container `pods`.
fn all_pods(pressure: &NodeStats, at: &str) -> Option<Container> {
    let (_, reading) = pressure.machine.all_pods.as_ref()?;
    let nano_cores =
        pressure.containers().filter_map(|(_, container)| Some(nano_cores(container.windows[TEN]?.cpu)));
    let stalls = |of: Option<Stalls>| of.map(psi);
    let Counters { cpu_stalls, memory_stalls, io_stalls, .. } = reading.counters;
    Some(Container {
        name: "pods".to_owned(),
        start_time: None,
        cpu: cpu(reading, Some(nano_cores.sum()), stalls(cpu_stalls), at),
        memory: memory(reading, stalls(memory_stalls), at),
        swap: swap(reading, at),
        io: stalls(io_stalls).map(|psi| Io { time: at.to_owned(), psi }),
        rootfs: None,
        logs: None,
    })
}

fn pod(pod: &PodStats, sizes: &Sizes, at: &str) -> Pod {
    let disk = pod.disk.as_ref();
    let containers: Vec<Container> =
        pod.containers.iter().filter_map(|one| container(one, disk, sizes, at)).collect();
    let stalls = |of: fn(&Counters) -> Option<Stalls>| of(&pod.reading.as_ref()?.counters).map(psi);
    let nano_cores = containers.iter().map(|container| container.cpu.usage_nano_cores).sum();
    Pod {
        pod_ref: PodRef {
            name: pod.name.name.clone(),
            namespace: pod.name.namespace.clone(),
            uid: pod.uid.clone(),
        },
        start_time: pod.started_at.map(time),
        containers,
        cpu: pod.reading.as_ref().map(|reading| cpu(reading, nano_cores, stalls(|c| c.cpu_stalls), at)),
        memory: pod.reading.as_ref().map(|reading| memory(reading, stalls(|c| c.memory_stalls), at)),
        network: network(&pod.net, at),
        process_stats: pod
            .reading
            .as_ref()
            .and_then(|reading| Some(Processes { process_count: reading.gauges.pids? })),
        swap: pod.reading.as_ref().and_then(|reading| swap(reading, at)),
        io: stalls(|c| c.io_stalls).map(|psi| Io { time: at.to_owned(), psi }),
        volumes: volumes(pod, sizes),
        ephemeral_storage: disk.zip(sizes.node.as_ref()).map(|(disk, fs)| fs.of(disk.whole())),
    }
}

/// Returns the volumes on the node's own file system and those with a capacity of their own.
fn volumes(pod: &PodStats, sizes: &Sizes) -> Vec<Volume> {
    let own = pod.disk.iter().zip(sizes.node.as_ref()).flat_map(|(disk, fs)| {
        let volume = |(name, taken): (&String, &Taken)| Volume {
            name: name.clone(),
            fs: fs.of(*taken),
            pvc_ref: None,
            volume_health_stats: None,
        };
        disk.volumes.iter().map(volume)
    });
    let others = pod.volumes.iter().map(|found| Volume {
        name: found.volume.clone(),
        fs: Fs::with(&found.room, time(found.at)),
        pvc_ref: found
            .claim
            .as_ref()
            .map(|(namespace, name)| PvcRef { name: name.clone(), namespace: namespace.clone() }),
        volume_health_stats: found.abnormal.map(|abnormal| VolumeHealth { abnormal }),
    });
    own.chain(others).collect()
}

fn swap(reading: &Reading, at: &str) -> Option<Swap> {
    let used = reading.gauges.swap?;
    let available = reading.gauges.swap_limit.map(|limit| limit.saturating_sub(used));
    Some(Swap { time: at.to_owned(), swap_available_bytes: available, swap_usage_bytes: used })
}

fn container(
    container: &ContainerStats,
    disk: Option<&PodDisk>,
    sizes: &Sizes,
    at: &str,
) -> Option<Container> {
    let taken = |of: fn(&PodDisk) -> &BTreeMap<String, Taken>, fs: &Option<Fs>| {
        Some(fs.as_ref()?.of(*of(disk?).get(&container.name)?))
    };
    let reading = container.reading.as_ref()?;
    let ten = container.windows[TEN];
    let counters = &reading.counters;
    let io = counters.io_stalls.map(psi);
    Some(Container {
        name: container.name.clone(),
        start_time: container.started_at.map(time),
        cpu: cpu(reading, ten.map(|rates| nano_cores(rates.cpu)), counters.cpu_stalls.map(psi), at),
        memory: memory(reading, counters.memory_stalls.map(psi), at),
        swap: swap(reading, at),
        io: io.map(|psi| Io { time: at.to_owned(), psi }),
        rootfs: taken(|disk| &disk.rootfs, &sizes.containers),
        logs: taken(|disk| &disk.logs, &sizes.node),
    })
}

fn cpu(reading: &Reading, usage_nano_cores: Option<u64>, psi: Option<Psi>, at: &str) -> Cpu {
    let usage_core_nano_seconds = reading.counters.cpu_ns;
    Cpu { time: at.to_owned(), usage_nano_cores, usage_core_nano_seconds, psi }
}

fn memory(reading: &Reading, psi: Option<Psi>, at: &str) -> Memory {
    let gauges = &reading.gauges;
    Memory {
        time: at.to_owned(),
        available_bytes: gauges.memory_limit.map(|limit| limit.saturating_sub(gauges.working_set)),
        usage_bytes: gauges.memory_usage,
        working_set_bytes: gauges.working_set,
        rss_bytes: Some(gauges.rss),
        page_faults: Some(reading.counters.page_faults),
        major_page_faults: Some(reading.counters.major_faults),
        psi,
    }
}

fn psi(stalls: Stalls) -> Psi {
    let line = |total_us: u64, averages: [u16; 3]| {
        let [avg10, avg60, avg300] = averages.map(|hundredths| f64::from(hundredths) / 100.0);
        PsiLine { total: total_us.saturating_mul(1000), avg10, avg60, avg300 }
    };
    let [some, full] = stalls.averages;
    Psi { full: line(stalls.full_us, full), some: line(stalls.some_us, some) }
}

fn network(interfaces: &[(String, Net)], at: &str) -> Option<Network> {
    let interfaces: Vec<Interface> = interfaces
        .iter()
        .map(|(name, net)| Interface {
            name: name.clone(),
            rx_bytes: net.rx_bytes,
            rx_errors: net.rx_errors,
            tx_bytes: net.tx_bytes,
            tx_errors: net.tx_errors,
        })
        .collect();
    // The kubelet takes eth0 as the default interface.
    let default = interfaces.iter().find(|one| one.name == "eth0").or(interfaces.first())?.clone();
    Some(Network { time: at.to_owned(), default, interfaces })
}

/// Returns the size of the file system at this path. Blocking.
pub(super) fn fs(path: &Path) -> Option<Fs> {
    let stat = rustix::fs::statvfs(path).ok()?;
    let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
    Some(Fs {
        time: time(Timestamp::now()),
        available_bytes: bytes(stat.f_bavail),
        capacity_bytes: bytes(stat.f_blocks),
        used_bytes: bytes(stat.f_blocks.saturating_sub(stat.f_bfree)),
        inodes_free: stat.f_ffree,
        inodes: stat.f_files,
        inodes_used: stat.f_files.saturating_sub(stat.f_ffree),
    })
}

/// Returns the number of threads on the machine: the second number of the fourth field of /proc/loadavg.
fn processes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/loadavg").ok()?;
    text.split(' ').nth(3)?.split_once('/')?.1.parse().ok()
}

fn number(file: &str) -> Option<u64> {
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // CPUs in use are few and never below 0
fn nano_cores(cores: f64) -> u64 {
    (cores * 1e9).round() as u64
}

/// Formats a metav1.Time: whole seconds, UTC.
fn time(at: Timestamp) -> String {
    at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

#[cfg(test)]
mod tests;
