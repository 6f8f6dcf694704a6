//! Probe settings in a pod's annotations that `v1.Probe` lacks: the mode of tcpSocket probes, durations in
//! milliseconds, the effect of an edge, the interval of canaries, how commands run and connections are made.
//!
//! `beelet.dev/probes` applies to the whole pod, `probes.beelet.dev/<container>` to one container and wins.
//! The value is a list of `key=value`, separated by spaces or commas. A key applies to all three kinds, or to
//! one with that kind before it: `mode=connect readiness.period=100ms readiness.timeout=50ms`. Invalid items
//! are reported and have no effect on the others.

use std::{collections::BTreeMap, time::Duration};

use beelet_units::duration;
use serde::{Deserialize, Serialize};

use super::{EdgePolicy, ProbeKind, listener::QueueRule};

/// The annotation for all containers of a pod.
pub const POD_ANNOTATION: &str = "beelet.dev/probes";
/// Prefix of the annotation for one container; the container's name follows.
pub(crate) const CONTAINER_ANNOTATION: &str = "probes.beelet.dev/";
/// Minimum timeout, and minimum period of a probe that the kernel answers: a check costs microseconds, but
/// the readers of the results must keep up.
pub const SHORTEST: Duration = Duration::from_millis(10);
/// Minimum period of a probe that needs a process, a connection or a request per check, and minimum time
/// between two canaries: the minimum of `periodSeconds`. An author of pods must not have the runtime start a
/// hundred processes per second.
pub const SHORTEST_ASKED: Duration = Duration::from_secs(1);

/// The method that answers a tcpSocket probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TcpMode {
    /// The kernel's own knowledge of listeners.
    Kernel,
    /// A connection, as under the kubelet.
    Connect,
}

/// The part of the node that runs the command of an exec probe.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExecMode {
    /// The container runtime, as under a kubelet.
    #[default]
    Runtime,
    /// The helper `beelet-exec`, where it can reproduce the container.
    Direct,
}

/// The connections of httpGet and grpc probes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Connections {
    /// A new connection per check, as under a kubelet.
    #[default]
    Fresh,
    /// A connection that the server keeps open serves several checks.
    Reuse,
}

/// The protocol of an httpGet or grpc probe, beyond the fields of `v1.Probe` in Kubernetes 1.36.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Protocols {
    /// An httpGet probe speaks HTTP/2 without TLS: `httpGet.protocol: HTTP2` (KEP-5999, `H2CContainerProbe`).
    pub http2: bool,
    /// A grpc probe speaks TLS and verifies no certificate: `grpc.mode: TLS` (KEP-4939,
    /// `GRPCContainerProbeTLS`).
    pub grpc_tls: bool,
}

/// The settings of one probe from annotations; `None` where no annotation sets them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProbeSettings {
    /// Method that answers a tcpSocket probe.
    pub mode: Option<TcpMode>,
    /// Period in place of `periodSeconds`.
    pub period: Option<Duration>,
    /// Timeout in place of `timeoutSeconds`.
    pub timeout: Option<Duration>,
    /// Effect of an edge on readiness.
    pub edge_policy: Option<EdgePolicy>,
    /// Interval at which a liveness probe in kernel mode opens a connection; zero for never.
    pub canary: Option<Duration>,
    /// The state of the accept queues that fails a probe in kernel mode.
    pub queue_rule: Option<QueueRule>,
    /// The part that runs a command.
    pub exec: Option<ExecMode>,
    /// Connections of httpGet and grpc probes.
    pub connections: Option<Connections>,
    /// Protocols of httpGet and grpc probes.
    pub protocols: Protocols,
}

/// Returns the rule by which a probe of `kind` judges accept queues. Readiness fails for a stalled listener,
/// unless an annotation says otherwise. Liveness and startup restart containers, so they fail only where a
/// connection would (as under a kubelet), unless an annotation, the node's setting or a `canary` of the probe
/// asks for more.
#[must_use]
pub fn queue_rule(kind: ProbeKind, own: &ProbeSettings, of_node: QueueRule, canary: Duration) -> QueueRule {
    let default = match kind {
        ProbeKind::Readiness => QueueRule::Accepted,
        ProbeKind::Liveness if !canary.is_zero() => QueueRule::Accepted,
        ProbeKind::Liveness | ProbeKind::Startup => of_node,
    };
    own.queue_rule.unwrap_or(default)
}

/// Returns the names of the annotations with settings for a container's probes; the last wins.
#[must_use]
pub fn annotations_of(container: &str) -> [String; 2] {
    [POD_ANNOTATION.to_owned(), format!("{CONTAINER_ANNOTATION}{container}")]
}

/// Returns true if the annotation only has settings of probes.
#[must_use]
pub fn is_of_probes(annotation: &str) -> bool {
    annotation == POD_ANNOTATION || annotation.starts_with(CONTAINER_ANNOTATION)
}

/// Reads the settings in `annotations` for a container's probe of `kind`. The second value has one sentence
/// per invalid item.
#[must_use]
pub fn read(
    annotations: &BTreeMap<String, String>,
    container: &str,
    kind: ProbeKind,
) -> (ProbeSettings, Vec<String>) {
    let (mut settings, mut problems) = (ProbeSettings::default(), Vec::new());
    for annotation in annotations_of(container) {
        let Some(text) = annotations.get(&annotation) else { continue };
        // A setting for one kind wins over one for all, in any order.
        for of_kind in [false, true] {
            for item in text.split([' ', ',', '\n', '\t']).filter(|item| !item.is_empty()) {
                match apply(&mut settings, item, kind, of_kind) {
                    Ok(()) => {}
                    Err(why) => {
                        problems.push(format!("annotation {annotation}: {item:?} {why}; it is ignored"));
                    }
                }
            }
        }
    }
    problems.sort();
    problems.dedup();
    (settings, problems)
}

fn apply(settings: &mut ProbeSettings, item: &str, kind: ProbeKind, of_kind: bool) -> Result<(), String> {
    let (key, value) = item.split_once('=').ok_or("is not of the form key=value")?;
    let (of, key) = match key.split_once('.') {
        None | Some(("httpGet" | "grpc", _)) => (None, key),
        Some((of, key)) => (
            Some(parse_kind(of).ok_or("names an unknown kind of probe (liveness, readiness, startup)")?),
            key,
        ),
    };
    if of.is_some() != of_kind || of.is_some_and(|of| of != kind) {
        return Ok(());
    }
    match key {
        "mode" => settings.mode = Some(mode(value)?),
        "period" => settings.period = Some(time(value, SHORTEST)?),
        "timeout" => settings.timeout = Some(time(value, SHORTEST)?),
        "edgePolicy" => settings.edge_policy = Some(edge_policy(value)?),
        "stalled" => settings.queue_rule = Some(stalled(value)?),
        "canary" => {
            let never = duration::parse(value).is_ok_and(|every| every.is_zero());
            settings.canary = Some(if never { Duration::ZERO } else { time(value, SHORTEST_ASKED)? });
        }
        "exec" => settings.exec = Some(exec(value)?),
        "connections" => settings.connections = Some(connections(value)?),
        "httpGet.protocol" => settings.protocols.http2 = one_of(value, "HTTP1", "HTTP2")?,
        "grpc.mode" => settings.protocols.grpc_tls = one_of(value, "Plaintext", "TLS")?,
        _ => return Err(format!("has an unknown key (known: {KEYS})")),
    }
    Ok(())
}

/// All keys.
const KEYS: &str =
    "mode, period, timeout, edgePolicy, stalled, canary, exec, connections, httpGet.protocol, grpc.mode";

fn exec(text: &str) -> Result<ExecMode, String> {
    one_of(text, "runtime", "direct").map(|direct| if direct { ExecMode::Direct } else { ExecMode::Runtime })
}

fn connections(text: &str) -> Result<Connections, String> {
    one_of(text, "fresh", "reuse").map(|reuse| if reuse { Connections::Reuse } else { Connections::Fresh })
}

/// Returns true for the second word, and false for the first.
fn one_of(text: &str, first: &str, second: &str) -> Result<bool, String> {
    match text {
        _ if text == first => Ok(false),
        _ if text == second => Ok(true),
        _ => Err(format!("is neither {first} nor {second}")),
    }
}

fn parse_kind(text: &str) -> Option<ProbeKind> {
    [ProbeKind::Liveness, ProbeKind::Readiness, ProbeKind::Startup]
        .into_iter()
        .find(|kind| kind.name() == text)
}

fn mode(text: &str) -> Result<TcpMode, String> {
    match text {
        "kernel" => Ok(TcpMode::Kernel),
        "connect" => Ok(TcpMode::Connect),
        _ => Err("is neither kernel nor connect".to_owned()),
    }
}

fn edge_policy(text: &str) -> Result<EdgePolicy, String> {
    match text {
        "immediate" => Ok(EdgePolicy::Immediate),
        "threshold" => Ok(EdgePolicy::Threshold),
        _ => Err("is neither immediate nor threshold".to_owned()),
    }
}

fn stalled(text: &str) -> Result<QueueRule, String> {
    match text {
        "fail" => Ok(QueueRule::Accepted),
        "pass" => Ok(QueueRule::Room),
        _ => Err("is neither fail nor pass".to_owned()),
    }
}

fn time(text: &str, shortest: Duration) -> Result<Duration, String> {
    let time = duration::parse(text).map_err(|error| format!("has an invalid duration: {error}"))?;
    if time < shortest {
        return Err(format!("is shorter than {} ms", shortest.as_millis()));
    }
    Ok(time)
}

/// Returns the time between two checks of a probe with this wanted period: unchanged if the kernel answers,
/// and at least [`SHORTEST_ASKED`] otherwise.
#[must_use]
pub fn period(wanted: Duration, by_kernel: bool) -> Duration {
    if by_kernel { wanted } else { wanted.max(SHORTEST_ASKED) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(pairs: &[(&str, &str)], kind: ProbeKind, expect: ProbeSettings, problems: &[&str]) {
        let annotations = pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let (settings, found) = read(&annotations, "web", kind);
        assert_eq!(settings, expect, "{pairs:?}");
        assert_eq!(found, problems, "{pairs:?}");
    }

    #[test]
    fn a_container_wins_over_its_pod_and_a_kind_over_all() {
        let millis = |n| Some(Duration::from_millis(n));
        let none = ProbeSettings::default();
        check(&[], ProbeKind::Readiness, none, &[]);
        let pod = (POD_ANNOTATION, "mode=connect, period=1s");
        let expect = ProbeSettings { mode: Some(TcpMode::Connect), period: millis(1000), ..none };
        check(&[pod], ProbeKind::Liveness, expect, &[]);
        let web = ("probes.beelet.dev/web", "readiness.period=100ms mode=kernel\nperiod=200ms");
        let kernel = ProbeSettings { mode: Some(TcpMode::Kernel), ..none };
        check(&[pod, web], ProbeKind::Readiness, ProbeSettings { period: millis(100), ..kernel }, &[]);
        check(&[pod, web], ProbeKind::Startup, ProbeSettings { period: millis(200), ..kernel }, &[]);
        check(&[("probes.beelet.dev/other", "mode=kernel")], ProbeKind::Startup, none, &[]);
    }

    #[test]
    fn every_key_is_read() {
        let expect = ProbeSettings {
            mode: Some(TcpMode::Kernel),
            period: Some(Duration::from_millis(100)),
            timeout: Some(Duration::from_millis(50)),
            edge_policy: Some(EdgePolicy::Threshold),
            canary: Some(Duration::ZERO),
            queue_rule: Some(QueueRule::Accepted),
            exec: Some(ExecMode::Direct),
            connections: Some(Connections::Reuse),
            protocols: Protocols { http2: true, grpc_tls: true },
        };
        let text = "mode=kernel period=100ms timeout=50ms edgePolicy=threshold canary=0 stalled=fail exec=direct \
                    connections=reuse liveness.httpGet.protocol=HTTP2 grpc.mode=TLS";
        check(&[(POD_ANNOTATION, text)], ProbeKind::Liveness, expect, &[]);
    }

    #[test]
    fn only_kernel_probes_run_more_often_than_once_per_second() {
        let millis = Duration::from_millis;
        for (wanted, by_kernel, expected) in [
            (10, true, 10),
            (10, false, 1000),
            (999, false, 1000),
            (1000, false, 1000),
            (60_000, false, 60_000),
        ] {
            assert_eq!(period(millis(wanted), by_kernel), millis(expected), "{wanted} {by_kernel}");
        }
        let canary = |every| ProbeSettings { canary: every, ..ProbeSettings::default() };
        let check = |text: &str, expect, problems: &[&str]| {
            check(&[("probes.beelet.dev/web", text)], ProbeKind::Liveness, canary(expect), problems);
        };
        let short =
            "annotation probes.beelet.dev/web: \"canary=999ms\" is shorter than 1000 ms; it is ignored";
        check("canary=999ms", None, &[short]);
        check("canary=1s", Some(millis(1000)), &[]);
        check("canary=0s", Some(millis(0)), &[]);
    }

    #[test]
    fn invalid_items_are_reported_and_the_rest_applies() {
        let expect = ProbeSettings { timeout: Some(Duration::from_secs(1)), ..ProbeSettings::default() };
        let text = "mode=fast period=5ms wait=1s lively.mode=kernel connect timeout=1s stalled=no exec=me";
        check(
            &[(POD_ANNOTATION, text)],
            ProbeKind::Liveness,
            expect,
            &[
                "annotation beelet.dev/probes: \"connect\" is not of the form key=value; it is ignored",
                "annotation beelet.dev/probes: \"exec=me\" is neither runtime nor direct; it is ignored",
                "annotation beelet.dev/probes: \"lively.mode=kernel\" names an unknown kind of probe (liveness, readiness, startup); it is ignored",
                "annotation beelet.dev/probes: \"mode=fast\" is neither kernel nor connect; it is ignored",
                "annotation beelet.dev/probes: \"period=5ms\" is shorter than 10 ms; it is ignored",
                "annotation beelet.dev/probes: \"stalled=no\" is neither fail nor pass; it is ignored",
                "annotation beelet.dev/probes: \"wait=1s\" has an unknown key (known: mode, period, timeout, edgePolicy, stalled, canary, exec, connections, httpGet.protocol, grpc.mode); it is ignored",
            ],
        );
    }

    #[test]
    fn liveness_and_startup_fail_for_a_stalled_listener_only_where_that_is_asked_for() {
        use QueueRule::{Accepted, Room};
        let check = |kind, own: Option<QueueRule>, of_node, canary, expected| {
            let own = ProbeSettings { queue_rule: own, ..ProbeSettings::default() };
            assert_eq!(
                queue_rule(kind, &own, of_node, Duration::from_secs(canary)),
                expected,
                "{kind:?} {own:?}"
            );
        };
        check(ProbeKind::Readiness, None, Room, 0, Accepted);
        check(ProbeKind::Readiness, Some(Room), Accepted, 60, Room);
        for kind in [ProbeKind::Liveness, ProbeKind::Startup] {
            check(kind, None, Room, 0, Room);
            check(kind, None, Accepted, 0, Accepted);
            check(kind, Some(Accepted), Room, 0, Accepted);
            check(kind, Some(Room), Accepted, 60, Room);
        }
        // A canary that the application has not accepted stays in the queue, and the next checks find it
        // there.
        check(ProbeKind::Liveness, None, Room, 60, Accepted);
        check(ProbeKind::Startup, None, Room, 60, Room);
    }

    proptest! {
        #[test]
        fn any_text_can_be_read(text in ".*") {
            let annotations = BTreeMap::from([(POD_ANNOTATION.to_owned(), text)]);
            let _ = read(&annotations, "web", ProbeKind::Liveness);
        }
    }
}
