//! Rules for probes.

use beelet_policy::probe::ProbeKind;
use beelet_units::bounds::LONGEST_GRACE_SECONDS;
use k8s_openapi::api::core::v1::{Container, HTTPGetAction, Probe};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::super::names;
use super::Problems;

/// Checks the probes of a container; `plain_init` is true for an init container that is not a sidecar.
pub(super) fn all(path: &str, container: &Container, plain_init: bool, problems: &mut Problems) {
    let probes = [
        ("livenessProbe", ProbeKind::Liveness, &container.liveness_probe),
        ("readinessProbe", ProbeKind::Readiness, &container.readiness_probe),
        ("startupProbe", ProbeKind::Startup, &container.startup_probe),
    ];
    for (field, kind, probe) in probes {
        let Some(probe) = probe else { continue };
        let path = format!("{path}.{field}");
        if plain_init {
            problems.add(
                &path,
                "is only for containers and sidecars (restartPolicy: Always), not for init containers",
            );
        }
        numbers(&path, kind, probe, problems);
        handler(&path, container, probe, problems);
    }
}

fn numbers(path: &str, kind: ProbeKind, probe: &Probe, problems: &mut Problems) {
    let fields = [
        ("initialDelaySeconds", probe.initial_delay_seconds, 0),
        ("timeoutSeconds", probe.timeout_seconds, 1),
        ("periodSeconds", probe.period_seconds, 1),
        ("successThreshold", probe.success_threshold, 1),
        ("failureThreshold", probe.failure_threshold, 1),
    ];
    for (field, number, least) in fields {
        problems.within(&format!("{path}.{field}"), number.map(i64::from), least..=i32::MAX.into());
    }
    if kind != ProbeKind::Readiness && probe.success_threshold.is_some_and(|n| n > 1) {
        problems.add(format!("{path}.successThreshold"), "must be 1, except in a readiness probe");
    }
    let grace = format!("{path}.terminationGracePeriodSeconds");
    problems.within(&grace, probe.termination_grace_period_seconds, 1..=LONGEST_GRACE_SECONDS);
    if kind == ProbeKind::Readiness && probe.termination_grace_period_seconds.is_some() {
        problems.add(grace, "can't be set in a readiness probe, which stops no container");
    }
}

fn handler(path: &str, container: &Container, probe: &Probe, problems: &mut Problems) {
    let handlers =
        [probe.exec.is_some(), probe.grpc.is_some(), probe.http_get.is_some(), probe.tcp_socket.is_some()];
    match handlers.into_iter().filter(|there| *there).count() {
        1 => {}
        0 => problems.add(path, "must have one of exec, grpc, httpGet or tcpSocket"),
        _ => problems.add(path, "must have only one of exec, grpc, httpGet or tcpSocket"),
    }
    if let Some(tcp) = &probe.tcp_socket {
        port(&format!("{path}.tcpSocket.port"), container, &tcp.port, problems);
    }
    if let Some(http) = &probe.http_get {
        http_get(&format!("{path}.httpGet"), container, http, problems);
    }
}

/// Checks an httpGet at `path`, a probe's or a hook's.
pub(super) fn http_get(path: &str, container: &Container, http: &HTTPGetAction, problems: &mut Problems) {
    port(&format!("{path}.port"), container, &http.port, problems);
    problems.one_of(&format!("{path}.scheme"), http.scheme.as_deref(), &["HTTP", "HTTPS"]);
    for (i, header) in http.http_headers.iter().flatten().enumerate() {
        let allowed = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
        if header.name.is_empty() || !header.name.bytes().all(allowed) {
            let path = format!("{path}.httpHeaders[{i}].name");
            problems.add(path, format!("{} is not a header's name", names::quoted(&header.name)));
        }
        if header.value.contains(|c: char| c.is_control() && c != '\t') {
            problems.add(format!("{path}.httpHeaders[{i}].value"), "must not contain control characters");
        }
    }
}

fn port(path: &str, container: &Container, port: &IntOrString, problems: &mut Problems) {
    match port {
        // An unset port is 0 in the typed pod.
        IntOrString::Int(0) => {
            problems.add(path, "must be set to a number from 1 to 65535, or a port's name");
        }
        IntOrString::Int(number) => problems.within(path, Some((*number).into()), 1..=65535),
        IntOrString::String(name) => {
            let known = container.ports.iter().flatten().any(|port| port.name.as_ref() == Some(name));
            if !known {
                let message = format!("the container has no port {}", names::quoted(name));
                problems.add(path, message);
            }
        }
    }
}
