//! What a probe looks at, resolved from the spec: named ports become numbers, a missing host the pod's
//! own address.

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

use k8s_openapi::{api::core::v1 as core, apimachinery::pkg::util::intstr::IntOrString};

/// What is looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// A TCP port of the pod or of another host.
    Tcp {
        /// The host named in the probe, if it names one.
        host: Option<String>,
        /// The port.
        port: u16,
    },
    /// An HTTP path.
    Http {
        /// The host named in the probe, if it names one.
        host: Option<String>,
        /// The port.
        port: u16,
        /// Path and query.
        path: String,
        /// Headers, in order.
        headers: Vec<(String, String)>,
    },
}

/// How often a probe looks, and how long it waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Timing {
    /// The time between two looks.
    pub period: Duration,
    /// The longest wait for an answer.
    pub timeout: Duration,
}

impl Timing {
    /// The timing of a probe, with the API's defaults.
    pub(super) fn of(probe: &core::Probe) -> Self {
        let seconds = |value: Option<i32>, default: u64| {
            Duration::from_secs(
                value.and_then(|v| u64::try_from(v).ok()).filter(|v| *v > 0).unwrap_or(default),
            )
        };
        Self { period: seconds(probe.period_seconds, 10), timeout: seconds(probe.timeout_seconds, 1) }
    }
}

impl Target {
    /// The target of a probe, or why there is none.
    pub(super) fn of(probe: &core::Probe, container: &core::Container) -> Result<Self, String> {
        let named = |host: &Option<String>| host.clone().filter(|h| !h.is_empty());
        if let Some(tcp) = &probe.tcp_socket {
            return Ok(Self::Tcp { host: named(&tcp.host), port: port(&tcp.port, container)? });
        }
        if let Some(http) = &probe.http_get {
            if http.scheme.as_deref() == Some("HTTPS") {
                return Err("httpGet probes with scheme HTTPS are not supported yet".to_owned());
            }
            let headers = http.http_headers.iter().flatten().map(|h| (h.name.clone(), h.value.clone()));
            let path = http.path.clone().unwrap_or_default();
            return Ok(Self::Http {
                host: named(&http.host),
                port: port(&http.port, container)?,
                path: if path.starts_with('/') { path } else { format!("/{path}") },
                headers: headers.collect(),
            });
        }
        Err("only tcpSocket and httpGet probes are supported yet".to_owned())
    }
}

fn port(port: &IntOrString, container: &core::Container) -> Result<u16, String> {
    let number = match port {
        IntOrString::Int(number) => *number,
        IntOrString::String(name) => match name.parse() {
            Ok(number) => number,
            Err(_) => container
                .ports
                .iter()
                .flatten()
                .find(|p| p.name.as_deref() == Some(name))
                .map(|p| p.container_port)
                .ok_or_else(|| format!("container {} has no port named {name:?}", container.name))?,
        },
    };
    u16::try_from(number)
        .ok()
        .filter(|p| *p > 0)
        .ok_or_else(|| format!("port {number} is not between 1 and 65535"))
}

/// A container's probes by kind, in the words of `policy`.
pub(super) fn probes_of(
    container: &core::Container,
) -> BTreeMap<beelet_policy::probe::ProbeKind, &core::Probe> {
    use beelet_policy::probe::ProbeKind;
    [
        (ProbeKind::Liveness, &container.liveness_probe),
        (ProbeKind::Readiness, &container.readiness_probe),
        (ProbeKind::Startup, &container.startup_probe),
    ]
    .into_iter()
    .filter_map(|(kind, probe)| Some((kind, probe.as_ref()?)))
    .collect()
}

/// The addresses in a pod's status.
pub(super) fn pod_ips(pod: &core::Pod) -> Vec<IpAddr> {
    let ips = pod.status.iter().flat_map(|s| s.pod_ips.iter().flatten());
    ips.filter_map(|ip| ip.ip.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(probe: serde_json::Value, expect: Result<Target, &str>) {
        let probe: core::Probe = serde_json::from_value(probe).unwrap();
        let container: core::Container = serde_json::from_value(serde_json::json!({
            "name": "c", "ports": [{"name": "web", "containerPort": 8080}]
        }))
        .unwrap();
        assert_eq!(Target::of(&probe, &container), expect.map_err(str::to_owned));
    }

    #[test]
    fn ports_are_numbers_or_names_of_the_container() {
        let tcp = |port| Target::Tcp { host: None, port };
        check(serde_json::json!({"tcpSocket": {"port": 80}}), Ok(tcp(80)));
        check(serde_json::json!({"tcpSocket": {"port": "web"}}), Ok(tcp(8080)));
        check(serde_json::json!({"tcpSocket": {"port": "81"}}), Ok(tcp(81)));
        check(serde_json::json!({"tcpSocket": {"port": "db"}}), Err("container c has no port named \"db\""));
        check(serde_json::json!({"tcpSocket": {"port": 0}}), Err("port 0 is not between 1 and 65535"));
    }

    #[test]
    fn http_paths_start_at_the_root() {
        let http =
            |path: &str| Target::Http { host: None, port: 8080, path: path.to_owned(), headers: vec![] };
        check(serde_json::json!({"httpGet": {"port": "web"}}), Ok(http("/")));
        check(
            serde_json::json!({"httpGet": {"port": "web", "path": "healthz?full"}}),
            Ok(http("/healthz?full")),
        );
    }

    #[test]
    fn timings_have_the_apis_defaults() {
        let timing = |json| Timing::of(&serde_json::from_value(json).unwrap());
        let expect = |period, timeout| Timing {
            period: Duration::from_secs(period),
            timeout: Duration::from_secs(timeout),
        };
        assert_eq!(timing(serde_json::json!({})), expect(10, 1));
        assert_eq!(timing(serde_json::json!({"periodSeconds": 3, "timeoutSeconds": 2})), expect(3, 2));
        assert_eq!(timing(serde_json::json!({"periodSeconds": 0})), expect(10, 1));
    }
}
