//! The kubelet's pages of numbers: `/metrics`, `/metrics/cadvisor`, `/metrics/resource`, `/metrics/probes`.
//!
//! They are split as the kubelet splits them, so that existing scrape jobs and dashboards (which tell the
//! pages by `metrics_path`) neither miss a metric nor count it twice.

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::{
    ApiState,
    exposition::{Format, to_text},
    summary::{Fs, Sizes},
};
use beelet_model::disk::Taken;
use beelet_stats::metrics::{CADVISOR, Kind, Page};
use beelet_stats::model::{ContainerStats, Net, NodeStats, PodStats, Reading};

/// The metrics that are on `/metrics/probes`, and there alone.
const PROBES: &str = "prober_";

/// The agent's own metrics, and what only its kernel programs know of containers.
pub(super) async fn metrics(State(state): State<ApiState>, headers: HeaderMap) -> Response {
    // The collector of containers' metrics shows the newest reading.
    state.pressure.now().await;
    registry(&state, Format::of(&headers), |family| !family.starts_with(PROBES))
}

/// `prober_*`.
pub(super) async fn probes(State(state): State<ApiState>, headers: HeaderMap) -> Response {
    registry(&state, Format::of(&headers), |family| family.starts_with(PROBES))
}

/// `container_*` and `machine_*`, as cAdvisor inside the kubelet names them.
pub(super) async fn cadvisor(State(state): State<ApiState>) -> Response {
    let pressure = state.pressure.now().await;
    page(
        tokio::task::spawn_blocking(move || cadvisor_page(&pressure, &Sizes::measure(&pressure.places)))
            .await,
    )
}

/// What metrics-server reads.
pub(super) async fn resource(State(state): State<ApiState>) -> Response {
    let pressure = state.pressure.now().await;
    page(tokio::task::spawn_blocking(move || resource_page(&pressure)).await)
}

fn page(made: Result<String, tokio::task::JoinError>) -> Response {
    match made {
        Ok(text) => ([(header::CONTENT_TYPE, Format::Text.content_type())], text).into_response(),
        Err(error) => failed(&error),
    }
}

fn registry(state: &ApiState, format: Format, wanted: impl Fn(&str) -> bool) -> Response {
    let mut text = String::new();
    if let Err(error) = prometheus_client::encoding::text::encode(&mut text, &state.registry) {
        return failed(&error);
    }
    let text = families(&text, wanted);
    let text = match format {
        Format::OpenMetrics => text,
        Format::Text => to_text(&text),
    };
    ([(header::CONTENT_TYPE, format.content_type())], text).into_response()
}

fn failed(error: &dyn std::fmt::Display) -> Response {
    (StatusCode::INTERNAL_SERVER_ERROR, format!("metrics: {error}\n")).into_response()
}

/// The metric families of an exposition that are wanted, by name, and its end.
fn families(text: &str, wanted: impl Fn(&str) -> bool) -> String {
    let mut keep = true;
    let kept = text.lines().filter(|line| {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            keep = wanted(rest.split(' ').next().unwrap_or_default());
        }
        keep || *line == "# EOF"
    });
    kept.fold(String::with_capacity(text.len()), |kept, line| kept + line + "\n")
}

/// A metric: name, kind, meaning.
type Metric = (&'static str, Kind, &'static str);
/// A metric, and where its value comes from.
type Of<T, V> = (Metric, fn(&T) -> V);

const NETWORK: [Of<Net, u64>; 8] = {
    use Kind::Counter;
    [
        (("container_network_receive_bytes_total", Counter, "Bytes received"), |net| net.rx_bytes),
        (("container_network_receive_errors_total", Counter, "Errors while receiving"), |net| net.rx_errors),
        (
            ("container_network_receive_packets_dropped_total", Counter, "Packets dropped while receiving"),
            |net| net.rx_dropped,
        ),
        (("container_network_receive_packets_total", Counter, "Packets received"), |net| net.rx_packets),
        (("container_network_transmit_bytes_total", Counter, "Bytes sent"), |net| net.tx_bytes),
        (("container_network_transmit_errors_total", Counter, "Errors while sending"), |net| net.tx_errors),
        (
            ("container_network_transmit_packets_dropped_total", Counter, "Packets dropped while sending"),
            |net| net.tx_dropped,
        ),
        (("container_network_transmit_packets_total", Counter, "Packets sent"), |net| net.tx_packets),
    ]
};
/// The same of what is on disk, and the file system that it is on.
type OfDisk = (Metric, fn(Taken, Option<&Fs>) -> Option<u64>);

/// What a container has on disk: its writable layer and its logs, and the file system that they are on.
const DISK: [OfDisk; 5] = {
    use Kind::Gauge;
    [
        (
            ("container_fs_usage_bytes", Gauge, "Bytes that the writable layer and the logs take"),
            |taken, _| Some(taken.bytes),
        ),
        (
            ("container_fs_inodes_used", Gauge, "Inodes that the writable layer and the logs take"),
            |taken, _| Some(taken.inodes),
        ),
        (("container_fs_limit_bytes", Gauge, "Bytes of the file system of writable layers"), |_, fs| {
            fs.map(|fs| fs.capacity_bytes)
        }),
        (("container_fs_inodes_total", Gauge, "Inodes of the file system of writable layers"), |_, fs| {
            fs.map(|fs| fs.inodes)
        }),
        (("container_fs_inodes_free", Gauge, "Inodes that are free there"), |_, fs| {
            fs.map(|fs| fs.inodes_free)
        }),
    ]
};
const LAST_SEEN: Metric =
    ("container_last_seen", Kind::Gauge, "When the container was last read, in seconds since the epoch");
const MACHINE: [Metric; 2] = [
    ("machine_cpu_cores", Kind::Gauge, "CPUs of the machine"),
    ("machine_memory_bytes", Kind::Gauge, "Memory of the machine, in bytes"),
];
const START_TIME: Metric = (
    "container_start_time_seconds",
    Kind::Gauge,
    "When the container was started, in seconds since the epoch",
);

/// Every metric of `/metrics/cadvisor` and `/metrics/resource` that isn't in [`CADVISOR`], with its page and
/// labels: for docs/metrics.md.
#[cfg(any(test, feature = "test-util"))]
pub fn documented() -> Vec<(&'static str, Metric, &'static str)> {
    let container = "container, namespace, pod";
    let network =
        NETWORK.iter().map(|(metric, _)| ("/metrics/cadvisor", *metric, "interface, namespace, pod"));
    let machine = MACHINE.iter().map(|metric| ("/metrics/cadvisor", *metric, ""));
    let resource = RESOURCE_CONTAINER.iter().map(|(metric, _)| ("/metrics/resource", *metric, container));
    let disk =
        DISK.iter().map(|(metric, _)| ("/metrics/cadvisor", *metric, "container, device, namespace, pod"));
    let seen = [("/metrics/cadvisor", LAST_SEEN, container)];
    let pods = RESOURCE_POD.iter().map(|(metric, _)| ("/metrics/resource", *metric, "namespace, pod"));
    let node = RESOURCE_NODE.iter().map(|(metric, _)| ("/metrics/resource", *metric, ""));
    let start = ["/metrics/cadvisor", "/metrics/resource"].map(|page| (page, START_TIME, container));
    let error = [("/metrics/resource", RESOURCE_ERROR, "")];
    let checks = [
        ("/metrics/slis", super::slis::LAST, "name, type"),
        ("/metrics/slis", super::slis::TOTAL, "name, status, type"),
    ];
    disk.chain(seen)
        .chain(network)
        .chain(machine)
        .chain(resource)
        .chain(pods)
        .chain(node)
        .chain(start)
        .chain(error)
        .chain(checks)
        .collect()
}

fn cadvisor_page(pressure: &NodeStats, sizes: &Sizes) -> String {
    let mut page = Page::default();
    let at = at_ms(pressure);
    for metric in CADVISOR {
        for (pod, container, reading) in pressure.readings() {
            let Some(value) = (metric.value)(reading) else { continue };
            let labels = cadvisor_labels(pod, container);
            let labels: Vec<(&str, &str)> = labels.into_iter().chain(metric.label).collect();
            page.sample((metric.name, metric.kind, metric.help), &labels, value, at);
        }
    }
    for (pod, container, started) in started(pressure) {
        page.sample(START_TIME, &cadvisor_labels(pod, container), started, None);
    }
    for (pod, container, _) in pressure.readings() {
        page.sample(LAST_SEEN, &cadvisor_labels(pod, container), pressure.at.as_second() as f64, at);
    }
    for (metric, value) in DISK {
        for (pod, container, taken) in on_disk(pressure) {
            let Some(value) = value(taken, sizes.containers.as_ref()) else { continue };
            let labels = cadvisor_labels(pod, container).into_iter().chain([("device", "")]);
            page.sample(metric, &labels.collect::<Vec<_>>(), value as f64, at);
        }
    }
    for (metric, value) in NETWORK {
        for pod in &pressure.pods {
            let name = &pod.name;
            for (interface, net) in &pod.net {
                let labels = [
                    ("id", pod.cgroup.as_deref().unwrap_or_default()),
                    ("interface", interface.as_str()),
                    ("namespace", &name.namespace),
                    ("pod", &name.name),
                ];
                page.sample(metric, &labels, value(net) as f64, at);
            }
        }
    }
    let [cpus, memory] = MACHINE;
    page.sample(cpus, &[], f64::from(pressure.machine.cpus), None);
    page.sample(memory, &[], pressure.machine.memory_total as f64, None);
    page.finish()
}

/// Containers whose writable layer or logs were measured.
fn on_disk(pressure: &NodeStats) -> impl Iterator<Item = (&PodStats, &ContainerStats, Taken)> {
    pressure.readings().filter_map(|(pod, container, _)| {
        let disk = pod.disk.as_ref()?;
        let (rootfs, logs) = (disk.rootfs.get(&container.name), disk.logs.get(&container.name));
        let both = rootfs.into_iter().chain(logs).copied().reduce(|a, b| Taken {
            bytes: a.bytes.saturating_add(b.bytes),
            inodes: a.inodes.saturating_add(b.inodes),
        });
        Some((pod, container, both?))
    })
}

/// cAdvisor's labels, in its order. `name` is the container's id there.
fn cadvisor_labels<'a>(pod: &'a PodStats, container: &'a ContainerStats) -> [(&'static str, &'a str); 6] {
    [
        ("container", &container.name),
        ("id", container.cgroup.as_deref().unwrap_or_default()),
        ("image", &container.image),
        ("name", &container.id),
        ("namespace", &pod.name.namespace),
        ("pod", &pod.name.name),
    ]
}

const RESOURCE_CONTAINER: [Of<Reading, Option<f64>>; 3] = {
    use Kind::{Counter, Gauge};
    [
        (
            ("container_cpu_usage_seconds_total", Counter, "CPU time used by the container, in seconds"),
            |reading| Some(reading.counters.cpu_ns as f64 / 1e9),
        ),
        (
            ("container_memory_working_set_bytes", Gauge, "Memory in use without inactive file pages"),
            |reading| Some(reading.gauges.working_set as f64),
        ),
        (("container_swap_usage_bytes", Gauge, "Memory that is swapped out, in bytes"), |reading| {
            reading.gauges.swap.map(|bytes| bytes as f64)
        }),
    ]
};
const RESOURCE_POD: [Of<Reading, Option<f64>>; 3] = {
    use Kind::{Counter, Gauge};
    [
        (("pod_cpu_usage_seconds_total", Counter, "CPU time used by the pod, in seconds"), |reading| {
            Some(reading.counters.cpu_ns as f64 / 1e9)
        }),
        (("pod_memory_working_set_bytes", Gauge, "Memory in use without inactive file pages"), |reading| {
            Some(reading.gauges.working_set as f64)
        }),
        (("pod_swap_usage_bytes", Gauge, "Memory that is swapped out, in bytes"), |reading| {
            reading.gauges.swap.map(|bytes| bytes as f64)
        }),
    ]
};
const RESOURCE_NODE: [Of<NodeStats, f64>; 3] = {
    use Kind::{Counter, Gauge};
    [
        (
            (
                "node_cpu_usage_seconds_total",
                Counter,
                "CPU time used on the machine since its start, in seconds",
            ),
            |node| node.machine.cpu_ns as f64 / 1e9,
        ),
        (("node_memory_working_set_bytes", Gauge, "Memory in use without inactive file pages"), |node| {
            node.machine.working_set as f64
        }),
        // A machine without swap uses none of it.
        (("node_swap_usage_bytes", Gauge, "Memory that is swapped out, in bytes"), |node| {
            node.machine.swap.map_or(0.0, |[total, free]| total.saturating_sub(free) as f64)
        }),
    ]
};
const RESOURCE_ERROR: Metric =
    ("resource_scrape_error", Kind::Gauge, "1 if there was an error while getting the numbers, else 0");

fn resource_page(pressure: &NodeStats) -> String {
    let mut page = Page::default();
    let at = at_ms(pressure);
    let nothing_yet = pressure.at_ns == 0;
    for (metric, value) in RESOURCE_CONTAINER {
        for (pod, container, reading) in pressure.readings() {
            let Some(value) = value(reading) else { continue };
            page.sample(metric, &resource_labels(pod, container), value, at);
        }
    }
    for (pod, container, started) in started(pressure) {
        page.sample(START_TIME, &resource_labels(pod, container), started, None);
    }
    for (metric, value) in RESOURCE_POD {
        for pod in &pressure.pods {
            let Some(value) = pod.reading.as_ref().and_then(value) else { continue };
            let labels = [("namespace", pod.name.namespace.as_str()), ("pod", pod.name.name.as_str())];
            page.sample(metric, &labels, value, at);
        }
    }
    for (metric, value) in RESOURCE_NODE.into_iter().filter(|_| !nothing_yet) {
        page.sample(metric, &[], value(pressure), at);
    }
    page.sample(RESOURCE_ERROR, &[], if nothing_yet { 1.0 } else { 0.0 }, None);
    page.finish()
}

fn resource_labels<'a>(pod: &'a PodStats, container: &'a ContainerStats) -> [(&'static str, &'a str); 3] {
    [("container", &container.name), ("namespace", &pod.name.namespace), ("pod", &pod.name.name)]
}

fn started(pressure: &NodeStats) -> impl Iterator<Item = (&PodStats, &ContainerStats, f64)> {
    pressure.readings().filter_map(|(pod, container, _)| {
        Some((pod, container, container.started_at?.as_nanosecond() as f64 / 1e9))
    })
}

/// The time of the reading, as the text format has it.
fn at_ms(pressure: &NodeStats) -> Option<i64> {
    Some(pressure.at.as_millisecond())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::fixtures;

    #[test]
    fn the_resource_page_is_what_metrics_server_reads() {
        let text = resource_page(&fixtures::pressure());
        for line in [
            "# TYPE container_cpu_usage_seconds_total counter",
            "container_cpu_usage_seconds_total{container=\"app\",namespace=\"shop\",pod=\"web\"} 2.5 1700000000000",
            "container_memory_working_set_bytes{container=\"app\",namespace=\"shop\",pod=\"web\"} 900 1700000000000",
            "container_start_time_seconds{container=\"app\",namespace=\"shop\",pod=\"web\"} 1600000000",
            "pod_cpu_usage_seconds_total{namespace=\"shop\",pod=\"web\"} 3 1700000000000",
            "node_cpu_usage_seconds_total 100 1700000000000",
            "node_swap_usage_bytes 6 1700000000000",
            "resource_scrape_error 0",
        ] {
            assert!(text.lines().any(|one| one == line), "no {line} in\n{text}");
        }
        // What is not known is not there.
        assert!(!text.contains("container_swap") && !text.contains("pod_swap"), "{text}");
        assert!(resource_page(&NodeStats::nothing_yet()).ends_with("resource_scrape_error 1\n"));
    }

    #[test]
    fn the_cadvisor_page_has_its_labels_and_each_family_once() {
        let text = cadvisor_page(&fixtures::pressure(), &Sizes::default());
        let labels = "container=\"app\",id=\"/kubepods/podu/aa\",image=\"img\",name=\"aa\",namespace=\"shop\",pod=\"web\"";
        for line in [
            format!("container_memory_failures_total{{{labels},failure_type=\"pgmajfault\"}} 3 1700000000000"),
            format!("container_pressure_cpu_waiting_seconds_total{{{labels}}} 0.25 1700000000000"),
            format!("container_spec_memory_limit_bytes{{{labels}}} 4096 1700000000000"),
            format!("container_last_seen{{{labels}}} 1700000000 1700000000000"),
            format!("container_fs_usage_bytes{{{labels},device=\"\"}} 12288 1700000000000"),
            "container_network_receive_bytes_total{id=\"/kubepods/podu\",interface=\"eth0\",namespace=\"shop\",pod=\"web\"} 10 1700000000000".to_owned(),
            "machine_cpu_cores 2".to_owned(),
        ] {
            assert!(text.lines().any(|one| one == line), "no {line} in\n{text}");
        }
        assert!(!text.contains("container_cpu_cfs_periods_total"), "there is no quota");
        let mut types: Vec<&str> = text.lines().filter(|line| line.starts_with("# TYPE ")).collect();
        let all = types.len();
        types.sort_unstable();
        types.dedup();
        assert_eq!(types.len(), all);
    }

    #[test]
    fn families_are_split_by_name_and_both_parts_end() {
        let text = "# HELP prober_probe P.\n# TYPE prober_probe counter\nprober_probe_total 1\n# HELP x X.\nx 2\n# EOF\n";
        assert_eq!(families(text, |name| name.starts_with(PROBES)), text.replace("# HELP x X.\nx 2\n", ""));
        assert_eq!(families(text, |name| !name.starts_with(PROBES)), "# HELP x X.\nx 2\n# EOF\n");
    }
}
