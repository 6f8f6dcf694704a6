//! The line of one pod. Its words and their precedence are kubectl's (`printPod` in
//! pkg/printers/internalversion/printers.go, `HumanDuration` in apimachinery's util/duration).

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::why::Warnings;
use beelet_model::labels::ANNOTATION_SEEN;
use beelet_model::status::OBSERVED;
use beelet_model::table::{PodEntry, PodName, ReadinessEdge};

pub(super) const NARROW: &[&str] = &["NAMESPACE", "NAME", "READY", "STATUS", "RESTARTS", "AGE"];
pub(super) const WIDE: &[&str] = &[
    "NAMESPACE",
    "NAME",
    "READY",
    "STATUS",
    "RESTARTS",
    "AGE",
    "IP",
    "NODE",
    "QOS",
    "READINESS GATES",
    "READINESS EDGE",
    "WHY",
];

/// Returns the creation time of the pod: of its object, or for a manifest the earliest known time. A rejected
/// pod starts again with each try but keeps the age of its manifest, and a pod that outlived the agent is
/// older than the time when this agent first saw its manifest.
fn born(pod: &Pod) -> Option<Timestamp> {
    if let Some(created) = &pod.metadata.creation_timestamp {
        return Some(created.0);
    }
    let started = pod.status.as_ref().and_then(|status| status.start_time.as_ref()).map(|time| time.0);
    let seen = pod.metadata.annotations.as_ref().and_then(|all| all.get(ANNOTATION_SEEN)?.parse().ok());
    started.into_iter().chain(seen).min()
}

/// Returns the cells for [`NARROW`], or with warnings those for [`WIDE`].
pub(super) fn row(entry: &PodEntry, now: Timestamp, wide: Option<&Warnings>) -> Vec<String> {
    let pod = &entry.pod;
    let name = PodName::of(pod);
    let summary = summary(pod);
    let born = born(pod);
    let restarts = match summary.last_restart {
        Some(at) if summary.restarts > 0 => format!("{} ({} ago)", summary.restarts, age(at, now)),
        _ => summary.restarts.to_string(),
    };
    let mut cells = vec![
        name.namespace,
        name.name,
        match is_readiness_known(pod) {
            true => format!("{}/{}", summary.ready, summary.total),
            false => format!("?/{}", summary.total),
        },
        summary.reason,
        restarts,
        born.map_or_else(|| "<unknown>".to_owned(), |time| age(time, now)),
    ];
    if let Some(warnings) = wide {
        let or_none = |text: Option<&String>| {
            text.filter(|text| !text.is_empty()).cloned().unwrap_or_else(|| "<none>".to_owned())
        };
        let status = pod.status.as_ref();
        cells.push(or_none(status.and_then(|status| status.pod_ip.as_ref())));
        cells.push(or_none(pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref())));
        cells.push(or_none(status.and_then(|status| status.qos_class.as_ref())));
        cells.push(gates(pod).unwrap_or_else(|| "<none>".to_owned()));
        cells.push(entry.readiness_edge.as_ref().map_or_else(|| "<none>".to_owned(), edge));
        cells.push(warnings.why(pod, now).unwrap_or_default());
    }
    cells
}

/// Returns the labels as kubectl's `--show-labels` prints them.
pub(super) fn labels(pod: &Pod) -> String {
    let labels = pod.metadata.labels.iter().flatten().map(|(name, value)| format!("{name}={value}"));
    let labels: Vec<String> = labels.collect();
    if labels.is_empty() { "<none>".to_owned() } else { labels.join(",") }
}

/// Returns false for an observed pod, whose readiness only the kubelet knows.
fn is_readiness_known(pod: &Pod) -> bool {
    let mut conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    !conditions.any(|c| c.type_ == "Ready" && c.status == "Unknown" && c.reason.as_deref() == Some(OBSERVED))
}

/// Returns the number of true readiness gates and their total, as kubectl prints it, or None without gates.
fn gates(pod: &Pod) -> Option<String> {
    let gates = pod.spec.as_ref()?.readiness_gates.as_deref().filter(|gates| !gates.is_empty())?;
    let conditions: Vec<_> =
        pod.status.iter().flat_map(|status| status.conditions.iter().flatten()).collect();
    let is_open = |name: &str| conditions.iter().any(|c| c.type_ == name && c.status == "True");
    let open = gates.iter().filter(|gate| is_open(&gate.condition_type)).count();
    Some(format!("{open}/{}", gates.len()))
}

/// Returns the time from the kernel's event to the published status.
fn edge(edge: &ReadinessEdge) -> String {
    let to = if edge.ready { "ready" } else { "not ready" };
    format!("{to} in {}µs", edge.published_ns.saturating_sub(edge.kernel_ns) / 1_000)
}

/// Returns the text of the STATUS column.
pub(crate) fn state(pod: &Pod) -> String {
    summary(pod).reason
}

#[derive(Debug, PartialEq)]
struct Summary {
    ready: usize,
    total: usize,
    restarts: i32,
    last_restart: Option<Timestamp>,
    reason: String,
}

fn summary(pod: &Pod) -> Summary {
    let empty = PodStatus::default();
    let status = pod.status.as_ref().unwrap_or(&empty);
    let spec = pod.spec.as_ref();
    let init: &[Container] = spec.and_then(|spec| spec.init_containers.as_deref()).unwrap_or_default();
    let containers = spec.map_or(0, |spec| spec.containers.len());
    let sidecars: Counted = init_statuses(status).iter().filter(|s| is_sidecar(init, &s.name)).collect();
    let all_init: Counted = init_statuses(status).iter().collect();
    let main: Counted = status.container_statuses.as_deref().unwrap_or_default().iter().collect();

    let phase = status.phase.clone().unwrap_or_else(|| "Unknown".to_owned());
    let mut summary = Summary {
        ready: init_statuses(status)
            .iter()
            .filter(|s| is_sidecar(init, &s.name) && is_up(s) && s.ready)
            .count(),
        total: containers + init.iter().filter(|container| is_sidecar(init, &container.name)).count(),
        restarts: all_init.restarts,
        last_restart: all_init.last_restart,
        reason: status.reason.clone().filter(|reason| !reason.is_empty()).unwrap_or(phase.clone()),
    };
    match initializing(init, status) {
        Some(reason) if !condition(status, "Initialized") => summary.reason = reason,
        still => {
            summary.restarts = sidecars.restarts + main.restarts;
            summary.last_restart = sidecars.last_restart.max(main.last_restart);
            if let Some(reason) = still {
                summary.reason = reason;
            }
            main_containers(pod, status, &mut summary);
        }
    }
    if let Some(reason) = status.reason.clone().filter(|reason| phase == "Failed" && !reason.is_empty()) {
        // The reason of the pod's end says more than the states of its containers.
        summary.reason = reason;
    }
    if pod.metadata.deletion_timestamp.is_some() && !matches!(phase.as_str(), "Succeeded" | "Failed") {
        summary.reason =
            if status.reason.as_deref() == Some("NodeLost") { "Unknown" } else { "Terminating" }.to_owned();
    }
    summary
}

/// Returns the state of the first unfinished init container, or None if all have finished.
fn initializing(init: &[Container], status: &PodStatus) -> Option<String> {
    for (index, container) in init_statuses(status).iter().enumerate() {
        let state = container.state.as_ref();
        let terminated = state.and_then(|state| state.terminated.as_ref());
        let waiting = state.and_then(|state| state.waiting.as_ref()?.reason.as_deref());
        if terminated.is_some_and(|ended| ended.exit_code == 0)
            || is_sidecar(init, &container.name) && is_up(container)
        {
            continue;
        }
        return Some(match (terminated, waiting) {
            (Some(ended), _) => {
                format!("Init:{}", ending(ended.reason.as_deref(), ended.signal, ended.exit_code))
            }
            (None, Some(reason)) if !matches!(reason, "" | "PodInitializing") => format!("Init:{reason}"),
            _ => format!("Init:{index}/{}", init.len()),
        });
    }
    None
}

/// Sets the pod's reason from its first container with a waiting or terminated state.
fn main_containers(pod: &Pod, status: &PodStatus, summary: &mut Summary) {
    let mut any_running = false;
    for container in status.container_statuses.as_deref().unwrap_or_default().iter().rev() {
        let state = container.state.as_ref();
        let waiting =
            state.and_then(|state| state.waiting.as_ref()?.reason.as_deref()).filter(|r| !r.is_empty());
        if let Some(reason) = waiting {
            summary.reason = reason.to_owned();
        } else if let Some(ended) = state.and_then(|state| state.terminated.as_ref()) {
            summary.reason = ending(ended.reason.as_deref(), ended.signal, ended.exit_code);
        } else if container.ready && state.is_some_and(|state| state.running.is_some()) {
            any_running = true;
            summary.ready += 1;
        }
    }
    if summary.reason == "Completed" && any_running {
        // In an observed pod, a container that completed may come from `kubectl debug`.
        let is_well = condition(status, "Ready") || !is_readiness_known(pod);
        summary.reason = if is_well { "Running" } else { "NotReady" }.to_owned();
    }
}

fn ending(reason: Option<&str>, signal: Option<i32>, exit_code: i32) -> String {
    match (reason.unwrap_or_default(), signal.unwrap_or(0)) {
        ("", 0) => format!("ExitCode:{exit_code}"),
        ("", signal) => format!("Signal:{signal}"),
        (reason, _) => reason.to_owned(),
    }
}

fn init_statuses(status: &PodStatus) -> &[ContainerStatus] {
    status.init_container_statuses.as_deref().unwrap_or_default()
}

/// Returns true for an init container that restarts like a main container (KEP-753).
fn is_sidecar(init: &[Container], name: &str) -> bool {
    init.iter()
        .any(|container| container.name == name && container.restart_policy.as_deref() == Some("Always"))
}

fn is_up(status: &ContainerStatus) -> bool {
    status.started == Some(true)
}

fn condition(status: &PodStatus, kind: &str) -> bool {
    let conditions = status.conditions.as_deref().unwrap_or_default();
    conditions.iter().any(|condition| condition.type_ == kind && condition.status == "True")
}

/// Total restarts of some containers and the end of the latest one.
#[derive(Default)]
struct Counted {
    restarts: i32,
    last_restart: Option<Timestamp>,
}

impl<'a> FromIterator<&'a ContainerStatus> for Counted {
    fn from_iter<I: IntoIterator<Item = &'a ContainerStatus>>(statuses: I) -> Self {
        statuses.into_iter().fold(Self::default(), |counted, status| {
            let ended: Option<&Time> =
                status.last_state.as_ref().and_then(|state| state.terminated.as_ref()?.finished_at.as_ref());
            Self {
                restarts: counted.restarts.saturating_add(status.restart_count),
                last_restart: counted.last_restart.max(ended.map(|time| time.0)),
            }
        })
    }
}

/// Returns the time since `then`, with as few digits as useful.
pub(crate) fn age(then: Timestamp, now: Timestamp) -> String {
    let seconds = now.as_second().saturating_sub(then.as_second()).max(0);
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    let two = |big: i64, big_unit: &str, small: i64, small_unit: &str| match small {
        0 => format!("{big}{big_unit}"),
        small => format!("{big}{big_unit}{small}{small_unit}"),
    };
    match seconds {
        0..120 => format!("{seconds}s"),
        120..600 => two(minutes, "m", seconds % 60, "s"),
        600..10_800 => format!("{minutes}m"),
        10_800..28_800 => two(hours, "h", minutes % 60, "m"),
        28_800..172_800 => format!("{hours}h"),
        172_800..691_200 => two(days, "d", hours % 24, "h"),
        691_200..63_072_000 => format!("{days}d"),
        63_072_000..252_288_000 => two(days / 365, "y", days % 365, "d"),
        _ => format!("{}y", days / 365),
    }
}

#[cfg(test)]
#[allow(clippy::needless_pass_by_value)] // cases read better without ampersands
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const NOW: &str = "2026-11-21T12:00:00Z";

    fn cells(pod: Value) -> Vec<String> {
        let entry = PodEntry::of(serde_json::from_value(pod).unwrap());
        row(&entry, NOW.parse().unwrap(), Some(&Warnings::default()))
    }

    /// READY, STATUS and RESTARTS of a pod with this spec and status.
    #[track_caller]
    fn check(spec: Value, status: Value, expected: &str) {
        let cells = cells(json!({"metadata": {"name": "p"}, "spec": spec, "status": status}));
        assert_eq!(cells[2..5].join(" "), expected);
    }

    fn two_containers() -> Value {
        json!({"containers": [{"name": "a"}, {"name": "b"}]})
    }

    fn container(name: &str, state: Value) -> Value {
        json!({"name": name, "image": "", "imageID": "", "ready": state["running"].is_object(), "restartCount": 0, "state": state})
    }

    fn running() -> Value {
        json!({"running": {}})
    }

    fn statuses(a: Value, b: Value) -> Value {
        json!({"phase": "Running", "containerStatuses": [container("a", a), container("b", b)]})
    }

    #[test]
    fn the_status_is_the_one_kubectl_prints() {
        check(two_containers(), json!({"phase": "Pending"}), "0/2 Pending 0");
        check(two_containers(), json!({"phase": "Failed", "reason": "Evicted"}), "0/2 Evicted 0");
        check(two_containers(), json!({}), "0/2 Unknown 0");
        check(two_containers(), statuses(running(), running()), "2/2 Running 0");
        let mut observed = statuses(running(), running());
        observed["conditions"] = json!([{"type": "Ready", "status": "Unknown", "reason": "Observed"}]);
        check(two_containers(), observed, "?/2 Running 0");
        let waiting = |reason: &str| json!({"waiting": {"reason": reason}});
        check(two_containers(), statuses(running(), waiting("CrashLoopBackOff")), "1/2 CrashLoopBackOff 0");
        check(
            two_containers(),
            statuses(waiting("ContainerCreating"), waiting("ErrImagePull")),
            "0/2 ContainerCreating 0",
        );
        let ended = |code: i32, reason: &str| json!({"terminated": {"exitCode": code, "reason": reason}});
        check(two_containers(), statuses(ended(0, "Completed"), ended(1, "Error")), "0/2 Completed 0");
        check(two_containers(), statuses(ended(1, "Error"), running()), "1/2 Error 0");
        let mut evicted = statuses(ended(137, "Error"), ended(0, "Completed"));
        (evicted["phase"], evicted["reason"]) = (json!("Failed"), json!("Evicted"));
        check(two_containers(), evicted, "0/2 Evicted 0");
        check(two_containers(), statuses(ended(137, ""), running()), "1/2 ExitCode:137 0");
        check(
            two_containers(),
            statuses(json!({"terminated": {"exitCode": 0, "signal": 9}}), running()),
            "1/2 Signal:9 0",
        );
        check(two_containers(), statuses(ended(0, "Completed"), running()), "1/2 NotReady 0");
        let mut observed = statuses(ended(0, "Completed"), running());
        observed["conditions"] = json!([{"type": "Ready", "status": "Unknown", "reason": OBSERVED}]);
        check(two_containers(), observed, "?/2 Running 0");
        let mut status = statuses(ended(0, "Completed"), running());
        status["conditions"] = json!([{"type": "Ready", "status": "True"}]);
        check(two_containers(), status, "1/2 Running 0");
    }

    #[test]
    fn readiness_gates_are_counted() {
        let gates = |spec: Value, conditions: Value| {
            let pod = json!({"metadata": {"name": "p"}, "spec": spec, "status": {"conditions": conditions}});
            gates(&serde_json::from_value(pod).unwrap())
        };
        let spec =
            json!({"containers": [], "readinessGates": [{"conditionType": "a/b"}, {"conditionType": "c"}]});
        let open = json!([{"type": "a/b", "status": "True"}, {"type": "c", "status": "False"}]);
        assert_eq!(gates(spec, open).as_deref(), Some("1/2"));
        assert_eq!(gates(json!({"containers": []}), json!([])), None);
    }

    #[test]
    fn init_containers_show_how_far_they_are() {
        let spec = json!({"initContainers": [{"name": "i"}, {"name": "j"}], "containers": [{"name": "a"}]});
        let status = |i: Value, j: Value| {
            json!({"phase": "Pending", "initContainerStatuses": [container("i", i), container("j", j)],
                "containerStatuses": [container("a", json!({"waiting": {"reason": "PodInitializing"}}))]})
        };
        let done = json!({"terminated": {"exitCode": 0, "reason": "Completed"}});
        let initializing = json!({"waiting": {"reason": "PodInitializing"}});
        check(spec.clone(), status(running(), initializing.clone()), "0/1 Init:0/2 0");
        check(spec.clone(), status(done.clone(), running()), "0/1 Init:1/2 0");
        check(
            spec.clone(),
            status(done.clone(), json!({"waiting": {"reason": "CrashLoopBackOff"}})),
            "0/1 Init:CrashLoopBackOff 0",
        );
        check(
            spec.clone(),
            status(json!({"terminated": {"exitCode": 3, "reason": "Error"}}), initializing),
            "0/1 Init:Error 0",
        );
        check(
            spec.clone(),
            status(json!({"terminated": {"exitCode": 3}}), done.clone()),
            "0/1 Init:ExitCode:3 0",
        );
        check(spec, status(done.clone(), done), "0/1 PodInitializing 0");
    }

    #[test]
    fn a_sidecar_counts_among_the_containers() {
        let spec = json!({"initContainers": [{"name": "s", "restartPolicy": "Always"}], "containers": [{"name": "a"}]});
        let mut sidecar = container("s", running());
        sidecar["started"] = json!(true);
        let status = json!({"phase": "Running", "initContainerStatuses": [sidecar], "containerStatuses": [container("a", running())]});
        check(spec, status, "2/2 Running 0");
    }

    #[test]
    fn restarts_say_when_the_last_was() {
        let mut status = statuses(running(), running());
        status["containerStatuses"][0]["restartCount"] = json!(3);
        status["containerStatuses"][0]["lastState"] =
            json!({"terminated": {"exitCode": 1, "finishedAt": "2026-11-21T11:55:00Z"}});
        check(two_containers(), status, "2/2 Running 3 (5m ago)");
    }

    #[test]
    fn a_pod_on_its_way_out_is_terminating() {
        let mut pod = json!({"metadata": {"name": "p", "deletionTimestamp": NOW}, "spec": two_containers(),
            "status": statuses(running(), running())});
        assert_eq!(cells(pod.clone())[3], "Terminating");
        pod["status"]["phase"] = json!("Succeeded");
        assert_eq!(cells(pod)[3], "Succeeded");
    }

    #[test]
    fn wide_has_the_address_the_node_the_class_and_the_edge() {
        let pod = json!({"metadata": {"name": "p", "namespace": "n", "creationTimestamp": "2026-11-21T11:00:00Z"},
            "spec": {"containers": [], "nodeName": "edge-1"}, "status": {"podIP": "10.1.0.5", "qosClass": "Burstable"}});
        assert_eq!(
            cells(pod.clone())[5..],
            ["60m", "10.1.0.5", "edge-1", "Burstable", "<none>", "<none>", ""]
        );
        let edge = ReadinessEdge {
            container: "a".into(),
            ready: false,
            kernel_ns: 1_000_000,
            published_ns: 1_312_999,
        };
        let entry =
            PodEntry { readiness_edge: Some(edge), ..PodEntry::of(serde_json::from_value(pod).unwrap()) };
        assert_eq!(row(&entry, NOW.parse().unwrap(), Some(&Warnings::default()))[10], "not ready in 312µs");
        assert_eq!(row(&entry, NOW.parse().unwrap(), None).len(), NARROW.len());
    }

    #[test]
    fn a_pod_is_as_old_as_the_first_that_is_known_of_it() {
        let check = |created: Value, seen: Value, started: Value, expected: &str| {
            let annotations = json!({"kubernetes.io/config.seen": seen});
            let metadata = json!({"name": "p", "creationTimestamp": created, "annotations": annotations});
            let pod =
                json!({"metadata": metadata, "spec": two_containers(), "status": {"startTime": started}});
            assert_eq!(cells(pod)[5], expected);
        };
        let (early, late) = ("2026-11-21T11:00:00Z", "2026-11-21T11:59:00Z");
        // Rejected an hour ago and again just now.
        check(Value::Null, json!("2026-11-21T11:00:00.123456789Z"), json!(late), "60m");
        // The pod is older than this agent.
        check(Value::Null, json!(late), json!(early), "60m");
        check(Value::Null, json!("no time"), json!(late), "60s");
        check(Value::Null, json!(late), Value::Null, "60s");
        check(json!(late), json!(early), json!(early), "60s");
        check(Value::Null, json!("no time"), Value::Null, "<unknown>");
    }

    #[test]
    fn ages_are_short() {
        let check = |seconds: i64, expected: &str| {
            let now: Timestamp = NOW.parse().unwrap();
            assert_eq!(age(Timestamp::from_second(now.as_second() - seconds).unwrap(), now), expected);
        };
        check(-5, "0s");
        check(0, "0s");
        check(119, "119s");
        check(120, "2m");
        check(125, "2m5s");
        check(600, "10m");
        check(10_799, "179m");
        check(10_800, "3h");
        check(10_860, "3h1m");
        check(28_800, "8h");
        check(172_800, "2d");
        check(176_400, "2d1h");
        check(691_200, "8d");
        check(63_072_000, "2y");
        check(63_158_400, "2y1d");
        check(252_288_000, "8y");
    }
}
