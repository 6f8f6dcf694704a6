//! The kubelet's metrics pages `/metrics`, `/metrics/resource` and `/metrics/probes`, and the parts shared
//! with `/metrics/cadvisor`.
//!
//! The metrics are split into pages as in the kubelet, so that existing scrape jobs and dashboards (which
//! distinguish the pages by `metrics_path`) neither miss a metric nor count it twice.

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::{
    ApiState,
    exposition::{Format, to_text},
};
use beelet_stats::Scope;
use beelet_stats::metrics::{Kind, Page};
use beelet_stats::model::{ContainerStats, NodeStats, PodStats, Reading};

/// Prefix of the metrics that appear only on `/metrics/probes`.
const PROBES: &str = "prober_";

/// Serves the agent's own metrics and the container metrics of its BPF programs.
pub(super) async fn metrics(State(state): State<ApiState>, headers: HeaderMap) -> Response {
    // The collector of container metrics shows the newest reading.
    state.pressure.with_traffic().await;
    registry(&state, Format::of(&headers), |family| !family.starts_with(PROBES))
}

/// Serves `prober_*`.
pub(super) async fn probes(State(state): State<ApiState>, headers: HeaderMap) -> Response {
    registry(&state, Format::of(&headers), |family| family.starts_with(PROBES))
}

/// Serves the page for metrics-server.
pub(super) async fn resource(State(state): State<ApiState>) -> Response {
    let pressure = state.pressure.now(Scope::Usage).await;
    page(beelet_base::blocking::spawn_blocking(move || resource_page(&pressure)).await)
}

pub(super) fn page(made: Result<String, tokio::task::JoinError>) -> Response {
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

/// Returns the selected metric families of an exposition and its end.
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

/// Name, type and help of a metric.
pub(super) type Metric = (&'static str, Kind, &'static str);
/// A metric with its value function.
pub(super) type Of<T, V> = (Metric, fn(&T) -> V);

pub(super) const START_TIME: Metric =
    ("container_start_time_seconds", Kind::Gauge, "Start time of the container, in seconds since the epoch");

/// Returns all metrics of `/metrics/resource` and `/metrics/slis` with page and labels, for docs/metrics.md.
#[cfg(any(test, feature = "test-util"))]
pub(super) fn documented() -> Vec<(&'static str, Metric, &'static str)> {
    let container = "container, namespace, pod";
    let resource = RESOURCE_CONTAINER.iter().map(|(metric, _)| ("/metrics/resource", *metric, container));
    let pods = RESOURCE_POD.iter().map(|(metric, _)| ("/metrics/resource", *metric, "namespace, pod"));
    let node = RESOURCE_NODE.iter().map(|(metric, _)| ("/metrics/resource", *metric, ""));
    let start = [("/metrics/resource", START_TIME, container)];
    let error = [("/metrics/resource", RESOURCE_ERROR, "")];
    let checks = [
        ("/metrics/slis", super::slis::LAST, "name, type"),
        ("/metrics/slis", super::slis::TOTAL, "name, status, type"),
    ];
    resource.chain(pods).chain(node).chain(start).chain(error).chain(checks).collect()
}

const RESOURCE_CONTAINER: [Of<Reading, Option<f64>>; 4] = {
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
        (("container_swap_usage_bytes", Gauge, "Swapped-out memory in bytes"), |reading| {
            reading.gauges.swap.map(|bytes| bytes as f64)
        }),
        (
            (
                "container_swap_limit_bytes",
                Gauge,
                "Swap limit in bytes, on cgroup v1 including memory; absent without a limit",
            ),
            |reading| reading.gauges.swap_limit.map(|bytes| bytes as f64),
        ),
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
        (("pod_swap_usage_bytes", Gauge, "Swapped-out memory in bytes"), |reading| {
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
        // A machine without swap reports zero.
        (("node_swap_usage_bytes", Gauge, "Swapped-out memory in bytes"), |node| {
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

/// Returns the time of the reading in the text format's unit.
pub(super) fn at_ms(pressure: &NodeStats) -> Option<i64> {
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
        // Unknown values have no sample.
        assert!(!text.contains("container_swap") && !text.contains("pod_swap"), "{text}");
        assert!(resource_page(&NodeStats::nothing_yet()).ends_with("resource_scrape_error 1\n"));
    }

    #[test]
    fn families_are_split_by_name_and_both_parts_end() {
        let text = "# HELP prober_probe P.\n# TYPE prober_probe counter\nprober_probe_total 1\n# HELP x X.\nx 2\n# EOF\n";
        assert_eq!(families(text, |name| name.starts_with(PROBES)), text.replace("# HELP x X.\nx 2\n", ""));
        assert_eq!(families(text, |name| !name.starts_with(PROBES)), "# HELP x X.\nx 2\n# EOF\n");
    }
}
