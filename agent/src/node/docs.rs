//! docs/metrics.md, made from the code: the registry that `beelet run` serves, that of `beelet observe`, and the tables of
//! the kubelet's pages. `BEELET_BLESS=1 cargo test -p beelet --lib metrics_page` writes it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use prometheus_client::registry::Registry;

use super::signals::Signals;
use crate::api::http::numbers;
use crate::cgroups::{Cgroups, Hierarchy, Layout, Version};
use crate::observe;
use crate::pressure::metrics::{CADVISOR, ContainerMetric, KERNEL, Kind, RUNQUEUE};
use crate::runtime::Runtime;

const HEAD: &str = "\
# Metrics

This page is made from the code (`BEELET_BLESS=1 cargo test -p beelet --lib metrics_page`); a test fails when it is old.

The pages are split as the kubelet splits them, so a scrape job for a kubelet works with another port, and dashboards that
tell the pages by `metrics_path` count nothing twice. All are served on `healthzPort` (`--listen` of `beelet observe`). A
sample whose value nothing on the machine knows (no kernel programs, no PSI, no limit) is left out; it is never 0 instead.

How many series there are is bounded by the containers that are measured (`maxMeasuredContainers`): 30 of cAdvisor's, 11 and
a histogram of 17 buckets of ours for each. `pod_uid` is a label only with `metricsPodUID: true` (`--pod-uid`). A scrape
reads every container once, whatever the number of pages scraped in the same moment.

A counter's name in a query ends with `_total`, a histogram's with `_bucket`, `_sum` or `_count`, also where the table
leaves that out.
";

/// What can't be told from a family that has no samples yet: those that count by gauge or histogram.
const KINDS: &[(&str, &str)] = &[("kubelet_running_containers", "gauge")];

/// Families by name with their meaning, as registered. The registry tells them to nobody, but it can be printed.
fn families(registry: &Registry) -> BTreeMap<String, String> {
    let printed = format!("{registry:?}");
    let string = |rest: &str, field: &str| -> Option<String> {
        let rest = rest.split_once(&format!("{field}: "))?.1;
        serde_json::Deserializer::from_str(rest).into_iter::<String>().next()?.ok()
    };
    // A family that is registered with a unit has it at the end of its name.
    let name = |rest: &str| -> Option<String> {
        let name = string(rest, "name")?;
        let unit = rest.split_once("unit: ")?.1.strip_prefix("Some(").and_then(|rest| rest.split_once(')'));
        Some(unit.map_or(name.clone(), |(unit, _)| format!("{name}_{}", unit.to_lowercase())))
    };
    let descriptors = printed.split("Descriptor {").skip(1);
    descriptors
        .filter_map(|rest| Some((name(rest)?, string(rest, "help")?.trim_end_matches('.').to_owned())))
        .collect()
}

/// The kinds of the families that have samples.
fn kinds(registry: &Registry) -> BTreeMap<String, String> {
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, registry).unwrap();
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
        let _ = writeln!(text, "| `{name}` | {} | {help} |", kind(&name, &known));
    }
}

fn containers(text: &mut String, title: &str, labels: &str, metrics: &[ContainerMetric]) {
    let _ =
        writeln!(text, "\n## {title}\n\nLabels: {labels}.\n\n| name | kind | meaning |\n| --- | --- | --- |");
    let mut last = "";
    for metric in metrics.iter().filter(|metric| std::mem::replace(&mut last, metric.name) != metric.name) {
        let own: Vec<String> = metrics
            .iter()
            .filter(|one| one.name == metric.name)
            .filter_map(|one| one.label)
            .map(|(key, value)| format!("`{key}=\"{value}\"`"))
            .collect();
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
    let (signals, _) = Signals::new();
    let mut run = super::Metrics::default().registry(&runtime, &cgroups);
    signals.register(&mut run, false);
    let mut observe = Registry::default();
    observe::Metrics::default().register(&mut observe);

    let mut text = HEAD.to_owned();
    table(&mut text, "`/metrics`: the agent itself", &run, |name| !name.starts_with("prober_"));
    table(&mut text, "`/metrics`: `beelet observe` alone", &observe, |_| true);
    let labels = "`namespace`, `pod`, `container`, and `pod_uid` where configured";
    containers(&mut text, "`/metrics`: containers, by kernel programs", labels, KERNEL);
    let (name, help) = RUNQUEUE;
    let _ = writeln!(text, "| `{name}` | histogram | {help} |");
    table(&mut text, "`/metrics/probes`", &run, |name| name.starts_with("prober_"));
    let labels = "`container`, `id` (the cgroup), `image`, `name` (the container's id), `namespace`, `pod`";
    containers(&mut text, "`/metrics/cadvisor`", labels, CADVISOR);
    others(&mut text, "/metrics/cadvisor");
    let _ = writeln!(
        text,
        "\n## `/metrics/resource`\n\nWhat metrics-server reads.\n\n| name | kind | meaning |\n| --- | --- | --- |"
    );
    others(&mut text, "/metrics/resource");
    text
}

/// The rest of a page, each with its labels.
fn others(text: &mut String, page: &str) {
    for (_, (name, kind, help), labels) in numbers::documented().into_iter().filter(|(of, ..)| *of == page) {
        let labels: Vec<String> =
            labels.split(", ").filter(|label| !label.is_empty()).map(|label| format!("`{label}`")).collect();
        let labels =
            if labels.is_empty() { String::new() } else { format!(" (labels {})", labels.join(", ")) };
        let _ = writeln!(text, "| `{name}` | {} | {help}{labels} |", Kind::name(kind));
    }
}

#[test]
fn the_metrics_page_is_what_the_code_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/metrics.md");
    let page = page();
    if std::env::var_os("BEELET_BLESS").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    let new: Vec<&str> = page.lines().filter(|line| !written.contains(line)).collect();
    let old: Vec<&str> = written.lines().filter(|line| !page.contains(line)).collect();
    assert!(
        page == written,
        "docs/metrics.md is old: `BEELET_BLESS=1 cargo test -p beelet --lib metrics_page` makes it anew\nmissing: {new:#?}\nold: {old:#?}"
    );
}
