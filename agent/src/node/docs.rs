//! Generates docs/metrics.md from the registries of `beelet run` and `beelet observe` and from the tables of
//! the kubelet's pages. `BEELET_BLESS=1 cargo test -p beelet --lib metrics_page` writes the page.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use prometheus_client::registry::Registry;

use super::{metrics::Metrics, stats::Stats};
use beelet_api::http::{self, summary};
use beelet_cgroups::{Cgroups, Hierarchy, Layout, Version};

use beelet_cri::Runtime;
use beelet_stats::metrics::{CADVISOR, ContainerMetric, GREW, HELD, KERNEL, Kind, RUNQUEUE};

const HEAD: &str = "\
# Metrics

This page is generated from the code (`BEELET_BLESS=1 cargo test -p beelet --lib metrics_page`); a test fails if it is outdated.

The pages are split as in the kubelet, so a scrape job for a kubelet works with another port, and dashboards that distinguish the
pages by `metrics_path` count nothing twice. All pages are served on `healthzPort` (`--listen` of `beelet observe`), and to
authorized clients by the [HTTPS server](server.md). A sample with an unknown value (no BPF programs, no PSI, no limit) is omitted;
it is never 0 instead.

The number of measured containers (`maxMeasuredContainers`) bounds the number of series: some 60 of cAdvisor's per container and
per pod, and 12 and a histogram of 17 buckets of beelet's own per container. `pod_uid` is a label only with `metricsPodUID: true`
(`--pod-uid`), except for `prober_probe_total`, which always has it, as in the kubelet; its series end with the pod. A scrape reads
every container once, regardless of the number of pages scraped at the same moment.

`/metrics` and `/metrics/probes` are OpenMetrics text for a client whose `Accept` requests it, as Prometheus does; all pages are in
the text format for other clients.

A counter's name in a query ends with `_total`, a histogram's with `_bucket`, `_sum` or `_count`, even if the table omits that.

These families of a kubelet 1.36 have no meaning here, and are absent: `kubelet_pleg_discard_events` and `kubelet_evented_pleg_*` (the
relist drops no event, and the runtime's events are hints only), `kubelet_pleg_pod_relist_duration_seconds` (one list is for all
pods), `kubelet_imagemanager_inmemory_*_usage_percent` (the records of pulls have no cache), `kubelet_metrics_provider` (no cAdvisor),
`kubelet_podcertificate_states` (no Pod Certificates), `kubelet_started_host_process_containers_*` (Windows). The retries of
`kubelet_pod_deferred_accepted_resizes` have one trigger, `room_released`.
";

const SUMMARY: &str = "
## `/stats/summary`

The kubelet's summary (`k8s.io/kubelet/pkg/apis/stats/v1alpha1`), with the fields of a recorded kubelet except the following.
The only system container is `pods`.

| field | reason for its absence |
| --- | --- |
";

/// Kinds of gauge and histogram families that have no samples yet and so don't show their kind.
const KINDS: &[(&str, &str)] = &[
    ("beelet_device_allocatable", "gauge"),
    ("beelet_device_capacity", "gauge"),
    ("beelet_eviction_signal_available", "gauge"),
    ("beelet_eviction_signal_capacity", "gauge"),
    ("beelet_node_condition", "gauge"),
    ("beelet_pinned_disturbances_per_second", "gauge"),
    ("beelet_pinned_idle_ratio", "gauge"),
    ("beelet_tuner_held", "gauge"),
    ("beelet_tuner_scheduler_loaded", "gauge"),
    ("csi_operations_seconds", "histogram"),
    ("dra_grpc_operations_duration_seconds", "histogram"),
    ("dra_operations_duration_seconds", "histogram"),
    ("dra_resource_claims_in_use", "gauge"),
    ("kubelet_container_aligned_compute_resources_count", "unknown"),
    ("kubelet_container_aligned_compute_resources_failure_count", "unknown"),
    ("kubelet_cpu_manager_allocation_per_numa", "gauge"),
    ("kubelet_credential_provider_plugin_duration", "histogram"),
    ("kubelet_http_inflight_requests", "gauge"),
    ("kubelet_node_name", "gauge"),
    ("kubelet_node_startup_duration_seconds", "gauge"),
    ("kubelet_node_startup_post_registration_duration_seconds", "gauge"),
    ("kubelet_node_startup_pre_kubelet_duration_seconds", "gauge"),
    ("kubelet_node_startup_pre_registration_duration_seconds", "gauge"),
    ("kubelet_node_startup_registration_duration_seconds", "gauge"),
    ("kubelet_pod_resize_duration_milliseconds", "histogram"),
    ("kubelet_running_containers", "gauge"),
    ("kubelet_run_podsandbox_duration_seconds", "histogram"),
    ("kubelet_image_pull_duration_seconds", "histogram"),
    ("kubelet_certificate_manager_client_ttl_seconds", "gauge"),
    ("kubelet_evictions", "unknown"),
    ("kubelet_desired_pods", "gauge"),
    ("kubelet_active_pods", "gauge"),
    ("kubelet_working_pods", "gauge"),
    ("kubelet_volume_metric_collection_duration_seconds", "histogram"),
    ("kubelet_pod_resources_endpoint_errors_get", "unknown"),
    ("kubelet_pod_resources_endpoint_errors_get_allocatable", "unknown"),
    ("kubelet_pod_resources_endpoint_errors_list", "unknown"),
    ("kubelet_pod_resources_endpoint_requests_get", "unknown"),
    ("kubelet_pod_resources_endpoint_requests_get_allocatable", "unknown"),
    ("kubelet_pod_resources_endpoint_requests_list", "unknown"),
    ("kubelet_pod_resources_endpoint_requests_total", "unknown"),
];

/// Metrics of a kubelet and its cAdvisor in the panels and alerts of kubernetes-mixin, except `go_*`.
const MIXIN: &[&str] = &[
    "container_cpu_cfs_periods_total",
    "container_cpu_cfs_throttled_periods_total",
    "container_cpu_usage_seconds_total",
    "container_fs_reads_bytes_total",
    "container_fs_reads_total",
    "container_fs_writes_bytes_total",
    "container_fs_writes_total",
    "container_memory_cache",
    "container_memory_rss",
    "container_memory_swap",
    "container_memory_working_set_bytes",
    "container_network_receive_bytes_total",
    "container_network_receive_packets_dropped_total",
    "container_network_receive_packets_total",
    "container_network_transmit_bytes_total",
    "container_network_transmit_packets_dropped_total",
    "container_network_transmit_packets_total",
    "kubelet_certificate_manager_client_expiration_renew_errors",
    "kubelet_certificate_manager_client_ttl_seconds",
    "kubelet_certificate_manager_server_ttl_seconds",
    "kubelet_cgroup_manager_duration_seconds_bucket",
    "kubelet_cgroup_manager_duration_seconds_count",
    "kubelet_evictions",
    "kubelet_node_config_error",
    "kubelet_node_name",
    "kubelet_pleg_relist_duration_seconds_bucket",
    "kubelet_pleg_relist_duration_seconds_count",
    "kubelet_pleg_relist_interval_seconds_bucket",
    "kubelet_pod_start_duration_seconds_bucket",
    "kubelet_pod_start_duration_seconds_count",
    "kubelet_pod_worker_duration_seconds_bucket",
    "kubelet_pod_worker_duration_seconds_count",
    "kubelet_running_containers",
    "kubelet_running_pods",
    "kubelet_runtime_operations_duration_seconds_bucket",
    "kubelet_runtime_operations_errors_total",
    "kubelet_runtime_operations_total",
    "kubelet_server_expiration_renew_errors",
    "kubelet_volume_stats_available_bytes",
    "kubelet_volume_stats_capacity_bytes",
    "kubelet_volume_stats_inodes",
    "kubelet_volume_stats_inodes_free",
    "kubelet_volume_stats_inodes_used",
    "machine_cpu_cores",
    "machine_memory_bytes",
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    "rest_client_request_duration_seconds_bucket",
    "rest_client_requests_total",
    "storage_operation_duration_seconds_bucket",
    "storage_operation_duration_seconds_count",
    "storage_operation_errors_total",
    "volume_manager_total_volumes",
];

/// Returns the registered families by name with their help. The registry has no accessor, but its debug
/// output contains them; collectors emit theirs with the samples.
fn families(registry: &Registry) -> BTreeMap<String, String> {
    let printed = format!("{registry:?}");
    let string = |rest: &str, field: &str| -> Option<String> {
        let rest = rest.split_once(&format!("{field}: "))?.1;
        serde_json::Deserializer::from_str(rest).into_iter::<String>().next()?.ok()
    };
    // The name of a family with a unit ends with the unit.
    let name = |rest: &str| -> Option<String> {
        let name = string(rest, "name")?;
        let unit = rest.split_once("unit: ")?.1.strip_prefix("Some(").and_then(|rest| rest.split_once(')'));
        Some(unit.map_or(name.clone(), |(unit, _)| format!("{name}_{}", unit.to_lowercase())))
    };
    let descriptors = printed.split("Descriptor {").skip(1);
    let registered = descriptors.filter_map(|rest| Some((name(rest)?, string(rest, "help")?)));
    let text = encoded(registry);
    let sampled = text.lines().filter_map(|line| line.strip_prefix("# HELP ")?.split_once(' '));
    let sampled = sampled.map(|(name, help)| (name.to_owned(), help.to_owned()));
    sampled.chain(registered).map(|(name, help)| (name, help.trim_end_matches('.').to_owned())).collect()
}

fn encoded(registry: &Registry) -> String {
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, registry).unwrap();
    text
}

/// Returns the kinds of the families with samples.
fn kinds(registry: &Registry) -> BTreeMap<String, String> {
    let text = encoded(registry);
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    types.map(|(name, kind)| (name.to_owned(), kind.to_owned())).collect()
}

fn kind(name: &str, known: &BTreeMap<String, String>) -> String {
    let listed = KINDS.iter().find(|(one, _)| *one == name).map(|(_, kind)| (*kind).to_owned());
    let guessed = || if name.ends_with("_seconds") { "histogram" } else { "counter" }.to_owned();
    known.get(name).cloned().or(listed).unwrap_or_else(guessed)
}

fn table(text: &mut String, title: &str, registry: &Registry, wanted: impl Fn(&str) -> bool) {
    let known = kinds(registry);
    let _ = writeln!(text, "\n## {title}\n\n| name | kind | meaning |\n| --- | --- | --- |");
    for (name, help) in families(registry).into_iter().filter(|(name, _)| wanted(name)) {
        // `<` would begin a tag of HTML.
        let _ = writeln!(text, "| `{name}` | {} | {} |", kind(&name, &known), help.replace('<', "\\<"));
    }
}

fn containers(text: &mut String, title: &str, labels: &str, metrics: &[ContainerMetric]) {
    let _ =
        writeln!(text, "\n## {title}\n\nLabels: {labels}.\n\n| name | kind | meaning |\n| --- | --- | --- |");
    let mut last = "";
    for metric in metrics.iter().filter(|metric| std::mem::replace(&mut last, metric.name) != metric.name) {
        let mut own: Vec<String> = Vec::new();
        for (key, value) in metrics.iter().filter(|one| one.name == metric.name).flat_map(|one| one.labels) {
            let label = format!("`{key}=\"{value}\"`");
            if !own.contains(&label) {
                own.push(label);
            }
        }
        let own = if own.is_empty() { String::new() } else { format!(" ({})", own.join(", ")) };
        let _ = writeln!(text, "| `{}` | {} | {}{own} |", metric.name, metric.kind.name(), metric.help);
    }
}

fn page() -> String {
    let runtime = Runtime::new("unix:///run/none.sock", std::time::Duration::from_secs(1)).unwrap();
    let v2 = Hierarchy {
        mount: "/nowhere".into(),
        is_v2: false,
        controllers: ["cpu".into(), "memory".into()].into(),
    };
    let layout = Layout { version: Version::V1, hierarchies: vec![v2] };
    let cgroups = Cgroups::over_folders(layout, "/").unwrap();
    let (stats, _) = Stats::new();
    let mut run = Metrics::default().registry(&runtime, &cgroups);
    stats.register(&mut run, false);
    let mut observe = Registry::default();
    beelet_foreign::Metrics::default().register(&mut observe);

    let mut text = HEAD.to_owned();
    table(&mut text, "`/metrics`: the agent itself", &run, |name| !name.starts_with("prober_"));
    table(&mut text, "`/metrics`: `beelet observe` alone", &observe, |_| true);
    let labels = "`namespace`, `pod`, `container`, and `pod_uid` where configured";
    containers(&mut text, "`/metrics`: containers, by kernel programs", labels, KERNEL);
    for ((name, help), own) in [(HELD, "cpu-quota"), (GREW, "memory-limit")] {
        let by = ["shop/batch-7", "/system.slice/containerd.service", own].map(|by| format!("`by=\"{by}\"`"));
        let _ = writeln!(text, "| `{name}` | gauge | {help} ({}) |", by.join(", "));
    }
    let (name, help) = RUNQUEUE;
    let _ = writeln!(text, "| `{name}` | histogram | {help} |");
    table(&mut text, "`/metrics/probes`", &run, |name| name.starts_with("prober_"));
    let labels = "`container`, `id` (the cgroup), `image`, `name` (the container's id), `namespace`, `pod`";
    containers(&mut text, "`/metrics/cadvisor`", labels, CADVISOR);
    others(&mut text, "/metrics/cadvisor");
    let _ = writeln!(
        text,
        "\n## `/metrics/resource`\n\nThe page of metrics-server.\n\n| name | kind | meaning |\n| --- | --- | --- |"
    );
    others(&mut text, "/metrics/resource");
    text.push_str("\n## `/metrics/slis`\n\n| name | kind | meaning |\n| --- | --- | --- |\n");
    others(&mut text, "/metrics/slis");
    text.push_str(SUMMARY);
    for (field, why) in summary::LACKING {
        let _ = writeln!(text, "| `{field}` | {why} |");
    }
    text
}

/// Adds the rest of a page's metrics with their labels.
fn others(text: &mut String, page: &str) {
    for (_, (name, kind, help), labels) in http::documented().into_iter().filter(|(of, ..)| *of == page) {
        let labels: Vec<String> =
            labels.split(", ").filter(|label| !label.is_empty()).map(|label| format!("`{label}`")).collect();
        let labels =
            if labels.is_empty() { String::new() } else { format!(" (labels {})", labels.join(", ")) };
        let _ = writeln!(text, "| `{name}` | {} | {help}{labels} |", Kind::name(kind));
    }
}

#[test]
fn the_metrics_page_is_what_the_code_says() {
    beelet_testing::page::check("docs/metrics.md", &page(), "cargo test -p beelet --lib metrics_page");
}

/// Returns the names of metrics in a query: words with a known prefix.
fn names(query: &str) -> Vec<&str> {
    let words = query.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'));
    let is_name = |word: &&str| {
        ["container_", "beelet_", "kubelet_", "prober_", "machine_", "node_", "pod_"]
            .iter()
            .any(|prefix| word.starts_with(prefix))
    };
    words.filter(is_name).collect()
}

/// Collects all queries of a dashboard.
fn queries<'a>(value: &'a serde_json::Value, found: &mut Vec<&'a str>) {
    match value {
        serde_json::Value::Object(fields) => {
            for (key, value) in fields {
                match value.as_str() {
                    Some(text) if matches!(key.as_str(), "expr" | "query" | "definition") => found.push(text),
                    _ => queries(value, found),
                }
            }
        }
        serde_json::Value::Array(values) => values.iter().for_each(|value| queries(value, found)),
        _ => {}
    }
}

#[test]
fn every_metric_of_the_dashboard_and_of_the_alerts_is_one_that_there_is() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging");
    let served = samples();
    for file in ["grafana/beelet.json", "prometheus/beelet.rules.yaml"] {
        let text = std::fs::read_to_string(root.join(file)).unwrap();
        let document = beelet_codec::document::parse(&text).unwrap().remove(0).value;
        let mut found = Vec::new();
        queries(&document, &mut found);
        let used: std::collections::BTreeSet<&str> = found.iter().flat_map(|query| names(query)).collect();
        assert!(used.len() > 10, "{used:?}");
        let unknown: Vec<_> = used.iter().filter(|name| !served.contains(**name)).collect();
        assert!(unknown.is_empty(), "{file} uses unknown metrics: {unknown:?}");
    }
}

/// Returns the names of all possible samples of the page.
fn samples() -> std::collections::BTreeSet<String> {
    let page = page();
    let rows = page.lines().filter_map(|line| {
        let (name, rest) = line.strip_prefix("| `")?.split_once("` | ")?;
        Some((name.to_owned(), rest.split(' ').next()?.to_owned()))
    });
    let suffixes = |kind: &str| match kind {
        "counter" => &["_total"][..],
        "histogram" => &["_bucket", "_sum", "_count"],
        _ => &[""],
    };
    rows.flat_map(|(name, kind)| {
        let name = if kind == "counter" { name.trim_end_matches("_total").to_owned() } else { name };
        suffixes(&kind).iter().map(move |suffix| format!("{name}{suffix}"))
    })
    .collect()
}

#[test]
fn every_metric_that_the_mixin_asks_a_kubelet_for_is_served_under_its_name() {
    let served = samples();
    let missing: Vec<_> = MIXIN.iter().filter(|name| !served.contains(**name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
