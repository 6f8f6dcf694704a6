//! Targets of probes, resolved from the spec: named ports become numbers, a missing host the pod's own
//! address.

use std::{
    collections::BTreeMap,
    fmt,
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};

use beelet_policy::{
    pod::variables::{TooLong, expand_probe_command},
    probe::{
        ProbeKind,
        settings::{ProbeSettings, Protocols},
    },
};
use beelet_units::bounds;
use k8s_openapi::{api::core::v1 as core, apimachinery::pkg::util::intstr::IntOrString};

use super::http::Get;

/// Reason why a probe can't be run as specified.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum TargetError {
    #[error("a probe needs one of exec, httpGet, tcpSocket and grpc")]
    NoHandler,
    #[error("an exec probe needs a command")]
    NoCommand,
    #[error("an argument of an exec probe's command {0}")]
    LongCommand(#[from] TooLong),
    #[error("httpGet knows the schemes HTTP and HTTPS, not {0:?}")]
    Scheme(String),
    #[error("HTTP/2 without TLS goes with neither the scheme HTTPS nor a `host`")]
    Http2,
    #[error("container {container} has no port named {name:?}")]
    NoPort { container: String, name: String },
    #[error("port {0} is not between 1 and 65535")]
    PortRange(i32),
}

/// Target of a probe.
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
        /// The request.
        get: Get,
    },
    /// The health service of a gRPC server in the pod.
    Grpc {
        /// The port.
        port: u16,
        /// The gRPC service name; empty means the server as a whole.
        service: String,
        /// True for TLS, without verification of the certificate.
        tls: bool,
    },
    /// A command in the container.
    Exec {
        /// The command with its arguments, with references to the environment expanded.
        command: Vec<String>,
    },
}

/// Period and timeout of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Timing {
    /// Time between two checks.
    pub period: Duration,
    /// Timeout of an answer.
    pub timeout: Duration,
}

impl Timing {
    /// Returns the timing of a probe: from its annotations, else the spec, else the API's defaults.
    pub(super) fn of(probe: &core::Probe, settings: &ProbeSettings) -> Self {
        let seconds = |value: Option<i32>, default: i32| {
            bounds::seconds(value.filter(|v| *v > 0).unwrap_or(default).into())
        };
        Self {
            period: settings.period.unwrap_or_else(|| seconds(probe.period_seconds, 10)),
            timeout: settings.timeout.unwrap_or_else(|| seconds(probe.timeout_seconds, 1)),
        }
    }
}

impl Target {
    /// Resolves the target of a probe.
    pub(super) fn of(
        probe: &core::Probe,
        container: &core::Container,
        protocols: Protocols,
    ) -> Result<Self, TargetError> {
        let named = |host: &Option<String>| host.clone().filter(|h| !h.is_empty());
        if let Some(exec) = &probe.exec {
            let command = exec.command.as_deref().unwrap_or_default();
            if command.is_empty() {
                return Err(TargetError::NoCommand);
            }
            let env = container.env.as_deref().unwrap_or_default();
            return Ok(Self::Exec { command: expand_probe_command(command, env)? });
        }
        if let Some(tcp) = &probe.tcp_socket {
            return Ok(Self::Tcp { host: named(&tcp.host), port: port(&tcp.port, container)? });
        }
        if let Some(http) = &probe.http_get {
            let tls = match http.scheme.as_deref().unwrap_or_default() {
                "" | "HTTP" => false,
                "HTTPS" => true,
                other => return Err(TargetError::Scheme(other.to_owned())),
            };
            if protocols.http2 && (tls || named(&http.host).is_some()) {
                return Err(TargetError::Http2);
            }
            let headers = http.http_headers.iter().flatten().map(|h| (h.name.clone(), h.value.clone()));
            let path = http.path.clone().unwrap_or_default();
            let path = if path.starts_with('/') { path } else { format!("/{path}") };
            return Ok(Self::Http {
                host: named(&http.host),
                port: port(&http.port, container)?,
                get: Get { tls, http2: protocols.http2, path, headers: headers.collect() },
            });
        }
        if let Some(grpc) = &probe.grpc {
            let port = port(&IntOrString::Int(grpc.port), container)?;
            let service = grpc.service.clone().unwrap_or_default();
            return Ok(Self::Grpc { port, service, tls: protocols.grpc_tls });
        }
        Err(TargetError::NoHandler)
    }

    /// Returns the name of the probe's mode if the kernel doesn't answer.
    pub(super) fn mode(&self) -> &'static str {
        match self {
            Self::Tcp { .. } => "connect",
            Self::Http { get, .. } if get.tls => "https",
            Self::Http { get, .. } if get.http2 => "h2c",
            Self::Http { .. } => "http",
            Self::Grpc { .. } => "grpc",
            Self::Exec { .. } => "exec",
        }
    }
}

/// Maximum number of a command's characters to show.
const SHOWN: usize = 1024;

/// Describes the target, with `pod` for the pod's own address.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = |host: &Option<String>| host.clone().unwrap_or_else(|| "pod".to_owned());
        match self {
            Self::Tcp { host: named, port } => write!(f, "tcp {}:{port}", host(named)),
            Self::Http { host: named, port, get } => {
                let scheme = if get.tls { "https" } else { "http" };
                write!(f, "GET {scheme}://{}:{port}{}", host(named), get.path)
            }
            Self::Grpc { port, service, .. } if service.is_empty() => write!(f, "grpc pod:{port}"),
            Self::Grpc { port, service, .. } => write!(f, "grpc pod:{port} {service}"),
            Self::Exec { command } => {
                let words = command.join(" ");
                match words.char_indices().nth(SHOWN) {
                    Some((end, _)) => write!(f, "exec {}…", &words[..end]),
                    None => write!(f, "exec {words}"),
                }
            }
        }
    }
}

fn port(port: &IntOrString, container: &core::Container) -> Result<u16, TargetError> {
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
                .ok_or_else(|| TargetError::NoPort {
                    container: container.name.clone(),
                    name: name.clone(),
                })?,
        },
    };
    u16::try_from(number).ok().filter(|p| *p > 0).ok_or(TargetError::PortRange(number))
}

/// Returns a container's probes by kind.
pub(super) fn probes_of(container: &core::Container) -> BTreeMap<ProbeKind, &core::Probe> {
    [
        (ProbeKind::Liveness, &container.liveness_probe),
        (ProbeKind::Readiness, &container.readiness_probe),
        (ProbeKind::Startup, &container.startup_probe),
    ]
    .into_iter()
    .filter_map(|(kind, probe)| Some((kind, probe.as_ref()?)))
    .collect()
}

/// Returns the address for probes: the pod's first, as in the kubelet. On a machine without an address, pods
/// on the host's network are probed by loopback, as with an empty host in Go.
pub(super) fn pod_ip(pod: &core::Pod) -> Option<IpAddr> {
    let status = pod.status.as_ref()?;
    let first = status.pod_ips.iter().flatten().next().map(|ip| ip.ip.as_str());
    match first.or(status.pod_ip.as_deref()) {
        Some(ip) => ip.parse().ok(),
        None => (pod.spec.as_ref()?.host_network == Some(true)).then_some(IpAddr::V4(Ipv4Addr::LOCALHOST)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_on_the_network_of_a_machine_without_an_address_is_probed_by_loopback() {
        let check = |host_network: bool, ips: serde_json::Value, expected: Option<&str>| {
            let pod = serde_json::json!({
                "spec": {"containers": [], "hostNetwork": host_network}, "status": {"podIPs": ips},
            });
            let pod: core::Pod = serde_json::from_value(pod).unwrap();
            assert_eq!(pod_ip(&pod), expected.map(|ip| ip.parse().unwrap()), "{pod:?}");
        };
        check(true, serde_json::json!([{"ip": "10.0.0.1"}, {"ip": "fd00::1"}]), Some("10.0.0.1"));
        check(true, serde_json::json!([]), Some("127.0.0.1"));
        check(false, serde_json::json!([]), None);
    }

    fn check(probe: serde_json::Value, expect: Result<Target, &str>) {
        let probe: core::Probe = serde_json::from_value(probe).unwrap();
        let container: core::Container = serde_json::from_value(serde_json::json!({
            "name": "c", "ports": [{"name": "web", "containerPort": 8080}],
            "env": [{"name": "FILE", "value": "/ready"}]
        }))
        .unwrap();
        let found = Target::of(&probe, &container, Protocols::default()).map_err(|error| error.to_string());
        assert_eq!(found, expect.map_err(str::to_owned));
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
        let http = |path: &str, tls| Target::Http {
            host: None,
            port: 8080,
            get: Get { tls, http2: false, path: path.to_owned(), headers: vec![] },
        };
        check(serde_json::json!({"httpGet": {"port": "web"}}), Ok(http("/", false)));
        check(
            serde_json::json!({"httpGet": {"port": "web", "path": "healthz?full", "scheme": "HTTPS"}}),
            Ok(http("/healthz?full", true)),
        );
        check(
            serde_json::json!({"httpGet": {"port": "web", "scheme": "SPDY"}}),
            Err("httpGet knows the schemes HTTP and HTTPS, not \"SPDY\""),
        );
    }

    #[test]
    fn commands_and_grpc_services() {
        let command = serde_json::json!({"exec": {"command": ["cat", "$(FILE)", "$(NONE)"]}});
        let words = ["cat", "/ready", "$(NONE)"].map(str::to_owned).to_vec();
        check(command, Ok(Target::Exec { command: words }));
        check(serde_json::json!({"exec": {}}), Err("an exec probe needs a command"));
        check(
            serde_json::json!({"exec": {"command": ["cat", "$(FILE)".repeat(200_000)]}}),
            Err("an argument of an exec probe's command makes the total longer than 1048576 bytes"),
        );
        let grpc = |service: &str| Target::Grpc { port: 9, service: service.to_owned(), tls: false };
        check(serde_json::json!({"grpc": {"port": 9}}), Ok(grpc("")));
        check(serde_json::json!({"grpc": {"port": 9, "service": "db"}}), Ok(grpc("db")));
        check(serde_json::json!({}), Err("a probe needs one of exec, httpGet, tcpSocket and grpc"));
    }

    #[test]
    fn http2_without_tls_needs_the_pods_own_address_and_the_scheme_http() {
        let check = |get: serde_json::Value, expected: Result<&str, TargetError>| {
            let probe: core::Probe = serde_json::from_value(serde_json::json!({ "httpGet": get })).unwrap();
            let protocols = Protocols { http2: true, grpc_tls: false };
            let found = Target::of(&probe, &core::Container::default(), protocols);
            assert_eq!(found.map(|target| target.mode()), expected, "{probe:?}");
        };
        check(serde_json::json!({"port": 80}), Ok("h2c"));
        check(serde_json::json!({"port": 80, "scheme": "HTTPS"}), Err(TargetError::Http2));
        check(serde_json::json!({"port": 80, "host": "db"}), Err(TargetError::Http2));
    }

    #[test]
    fn timings_have_the_apis_defaults_and_annotations_win() {
        let timing =
            |json, settings: &ProbeSettings| Timing::of(&serde_json::from_value(json).unwrap(), settings);
        let expect = |period, timeout| Timing {
            period: Duration::from_millis(period),
            timeout: Duration::from_millis(timeout),
        };
        let none = ProbeSettings::default();
        assert_eq!(timing(serde_json::json!({}), &none), expect(10_000, 1000));
        let seconds = serde_json::json!({"periodSeconds": 3, "timeoutSeconds": 2});
        assert_eq!(timing(seconds.clone(), &none), expect(3000, 2000));
        assert_eq!(timing(serde_json::json!({"periodSeconds": 0}), &none), expect(10_000, 1000));
        let fast = ProbeSettings { period: Some(Duration::from_millis(100)), ..none };
        assert_eq!(timing(seconds, &fast), expect(100, 2000));
    }

    #[test]
    fn a_target_is_described() {
        let described = |json: serde_json::Value| {
            let container = core::Container::default();
            Target::of(&serde_json::from_value(json).unwrap(), &container, Protocols::default())
                .unwrap()
                .to_string()
        };
        assert_eq!(described(serde_json::json!({"tcpSocket": {"port": 80}})), "tcp pod:80");
        let get = serde_json::json!({"httpGet": {"port": 80, "host": "db", "path": "/x", "scheme": "HTTPS"}});
        assert_eq!(described(get), "GET https://db:80/x");
        assert_eq!(described(serde_json::json!({"grpc": {"port": 9, "service": "db"}})), "grpc pod:9 db");
        assert_eq!(described(serde_json::json!({"exec": {"command": ["a", "b"]}})), "exec a b");
        let long = described(serde_json::json!({"exec": {"command": ["é".repeat(500_000)]}}));
        assert_eq!(long, format!("exec {}…", "é".repeat(SHOWN)));
    }
}
