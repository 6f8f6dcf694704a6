//! Whether a completed pod obeys the rules of the API (`pkg/apis/core/validation`), as far as its fields mean
//! anything to a node. Every broken rule is found, not just the first.
//!
//! Must never judge what the agent can do: that is [`super::support`]'s.

mod containers;
mod lifecycle;
mod probes;
mod volumes;

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, Toleration};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::error::Problem;
use super::names;
use super::priority;

/// Most bytes of all annotations together: the API's own limit.
const ANNOTATIONS_MAX: usize = 256 << 10;

/// Longest grace period that makes sense, in seconds: the limit of the runtime's int64 nanoseconds is far off,
/// but a year is certainly a mistake.
const GRACE_MAX: i64 = 366 * 24 * 3600;

/// The problems found so far.
#[derive(Debug, Default)]
struct Problems(Vec<Problem>);

impl Problems {
    fn add(&mut self, path: impl Into<String>, message: impl Into<String>) {
        self.0.push(Problem::new(path, message));
    }

    fn extend(&mut self, problems: impl IntoIterator<Item = Problem>) {
        self.0.extend(problems);
    }

    /// Checks that a text is one of a few.
    fn one_of(&mut self, path: &str, text: Option<&str>, allowed: &[&str]) {
        if let Some(text) = text.filter(|text| !allowed.contains(text)) {
            let list = match allowed.split_last() {
                Some((last, [])) => (*last).to_owned(),
                Some((last, others)) => format!("{} or {last}", others.join(", ")),
                None => String::new(),
            };
            self.add(path, format!("must be {list}, not {}", names::quoted(text)));
        }
    }

    /// Checks that a number lies in a range.
    fn within(&mut self, path: &str, number: Option<i64>, range: std::ops::RangeInclusive<i64>) {
        if let Some(number) = number.filter(|number| !range.contains(number)) {
            let (low, high) = (range.start(), range.end());
            let rule = if *high == i64::MAX || *high == i64::from(i32::MAX) {
                format!("must be at least {low}")
            } else {
                format!("must be from {low} to {high}")
            };
            self.add(path, format!("{rule}, not {number}"));
        }
    }
}

/// Every rule that a pod breaks.
pub(super) fn pod(pod: &Pod) -> Vec<Problem> {
    let mut problems = Problems::default();
    metadata(&pod.metadata, &mut problems);
    match &pod.spec {
        Some(spec) => pod_spec(spec, &mut problems),
        None => problems.add("spec", "must be there: what the pod runs"),
    }
    problems.0
}

fn metadata(metadata: &ObjectMeta, problems: &mut Problems) {
    problems.extend(names::subdomain("metadata.name", metadata.name.as_deref().unwrap_or_default()));
    problems.extend(names::label("metadata.namespace", metadata.namespace.as_deref().unwrap_or_default()));
    if let Some(uid) = &metadata.uid {
        problems.extend(names::uid("metadata.uid", uid));
    }
    for (key, value) in metadata.labels.iter().flatten() {
        problems.extend(names::qualified("metadata.labels", key));
        problems.extend(names::label_value("metadata.labels", key, value));
    }
    let annotations = || metadata.annotations.iter().flatten();
    for (key, _) in annotations() {
        problems.extend(names::qualified("metadata.annotations", &key.to_lowercase()));
    }
    let size: usize = annotations().map(|(key, value)| key.len() + value.len()).sum();
    if size > ANNOTATIONS_MAX {
        problems.add("metadata.annotations", format!("have {size} bytes; {ANNOTATIONS_MAX} are allowed"));
    }
}

fn pod_spec(spec: &PodSpec, problems: &mut Problems) {
    let policies = ["Always", "OnFailure", "Never"];
    problems.one_of("spec.restartPolicy", spec.restart_policy.as_deref(), &policies);
    problems.within(
        "spec.terminationGracePeriodSeconds",
        spec.termination_grace_period_seconds,
        0..=GRACE_MAX,
    );
    problems.within("spec.activeDeadlineSeconds", spec.active_deadline_seconds, 1..=i32::MAX.into());
    problems.extend(priority::preemption_policy("spec.preemptionPolicy", spec.preemption_policy.as_deref()));
    if let Some(class) = spec.priority_class_name.as_deref().filter(|name| !name.is_empty()) {
        problems.extend(names::subdomain("spec.priorityClassName", class));
    }
    if let Some(hostname) = spec.hostname.as_deref().filter(|name| !name.is_empty()) {
        problems.extend(names::label("spec.hostname", hostname));
    }
    if let Some(os) = &spec.os {
        problems.one_of("spec.os.name", Some(&os.name), &["linux"]);
    }
    dns(spec, problems);
    namespaces(spec, problems);
    for (i, toleration) in spec.tolerations.iter().flatten().enumerate() {
        tolerations(&format!("spec.tolerations[{i}]"), toleration, problems);
    }
    let volumes = volumes::all(spec.volumes.as_deref().unwrap_or_default(), problems);
    all_containers(spec, &volumes, problems);
}

fn dns(spec: &PodSpec, problems: &mut Problems) {
    let policies = ["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"];
    problems.one_of("spec.dnsPolicy", spec.dns_policy.as_deref(), &policies);
    let servers = spec.dns_config.iter().flat_map(|config| config.nameservers.iter().flatten());
    for (i, server) in servers.clone().enumerate() {
        if server.parse::<std::net::IpAddr>().is_err() {
            let path = format!("spec.dnsConfig.nameservers[{i}]");
            problems.add(path, format!("{} is not an IP address", names::quoted(server)));
        }
    }
    if servers.count() == 0 && spec.dns_policy.as_deref() == Some("None") {
        problems.add("spec.dnsPolicy", "None needs at least one of spec.dnsConfig.nameservers");
    }
}

fn namespaces(spec: &PodSpec, problems: &mut Problems) {
    if spec.share_process_namespace == Some(true) && spec.host_pid == Some(true) {
        problems.add("spec.shareProcessNamespace", "can't be true together with spec.hostPID");
    }
    let context = spec.security_context.as_ref();
    for (i, sysctl) in context.and_then(|c| c.sysctls.as_ref()).into_iter().flatten().enumerate() {
        let allowed =
            |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'-' | b'_' | b'.' | b'/');
        if sysctl.name.is_empty() || sysctl.name.len() > 253 || !sysctl.name.bytes().all(allowed) {
            let path = format!("spec.securityContext.sysctls[{i}].name");
            problems.add(path, format!("{} is not a sysctl's name", names::quoted(&sysctl.name)));
        }
    }
    let ids = [
        ("runAsUser", context.and_then(|c| c.run_as_user)),
        ("runAsGroup", context.and_then(|c| c.run_as_group)),
    ];
    for (field, id) in ids {
        problems.within(&format!("spec.securityContext.{field}"), id, 0..=i32::MAX.into());
    }
}

fn tolerations(path: &str, toleration: &Toleration, problems: &mut Problems) {
    let operators = ["", "Exists", "Equal", "Lt", "Gt"];
    problems.one_of(&format!("{path}.operator"), toleration.operator.as_deref(), &operators);
    let effects = ["", "NoSchedule", "PreferNoSchedule", "NoExecute"];
    problems.one_of(&format!("{path}.effect"), toleration.effect.as_deref(), &effects);
}

fn all_containers(spec: &PodSpec, volumes: &BTreeSet<&str>, problems: &mut Problems) {
    if spec.containers.is_empty() {
        problems.add("spec.containers", "must have at least one container");
    }
    let listed = |list: &'static str, init: bool, containers: &'_ [Container]| {
        let place = move |i: usize| containers::Place { path: format!("spec.{list}[{i}]"), init };
        (0..containers.len()).map(place).collect::<Vec<_>>()
    };
    let init = spec.init_containers.as_deref().unwrap_or_default();
    let places =
        listed("initContainers", true, init).into_iter().chain(listed("containers", false, &spec.containers));
    let mut seen = containers::Seen::default();
    for (place, container) in places.zip(init.iter().chain(&spec.containers)) {
        containers::container(&place, container, spec, volumes, &mut seen, problems);
    }
}
