//! The text of `beelet describe pod`, laid out as `kubectl describe pod`.

use std::collections::BTreeMap;

use beelet_codec::ApiType as _;
use beelet_policy::pod::ephemeral_containers;
use beelet_proto::beelet as proto;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    Container, ContainerPort, ContainerState, ContainerStatus, EnvVar, Pod, PodSpec, PodStatus, Probe,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde_json::Value;

use super::text::Text;
use crate::events::last_seen;
use crate::get::columns::Columns;
use crate::waited;
use crate::why::Warnings;

/// Returns the full description.
pub(super) fn text(
    pod: &Pod,
    signals: &[proto::SignalContainer],
    events: &[proto::Event],
    now: Timestamp,
) -> String {
    let (no_spec, no_status) = (PodSpec::default(), PodStatus::default());
    let spec = pod.spec.as_ref().unwrap_or(&no_spec);
    let status = pod.status.as_ref().unwrap_or(&no_status);
    let mut text = Text::default();
    head(&mut text, pod, spec, status);
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let waits = |of: &proto::SignalContainer| Waits {
        cpu: waited::for_cpu(of, namespace, name),
        memory: waited::for_memory(of, namespace, name),
        pinned: waited::pinned(of),
    };
    let waited: BTreeMap<&str, Waits> = signals.iter().map(|of| (of.name.as_str(), waits(of))).collect();
    text.set(0, "Why", Warnings::of(events.iter().cloned()).why(pod, now).as_deref());
    let statuses = |all: &Option<Vec<ContainerStatus>>| -> BTreeMap<String, ContainerStatus> {
        all.iter().flatten().map(|status| (status.name.clone(), status.clone())).collect()
    };
    if let Some(init) = spec.init_containers.as_ref().filter(|init| !init.is_empty()) {
        text.0.push_str("Init Containers:\n");
        let statuses = statuses(&status.init_container_statuses);
        init.iter().for_each(|c| container(&mut text, c, statuses.get(&c.name), waited.get(&*c.name)));
    }
    text.0.push_str("Containers:\n");
    let of_name = statuses(&status.container_statuses);
    spec.containers.iter().for_each(|c| container(&mut text, c, of_name.get(&c.name), waited.get(&*c.name)));
    let ephemeral = ephemeral_containers(spec);
    if !ephemeral.is_empty() {
        text.0.push_str("Ephemeral Containers:\n");
        let statuses = statuses(&status.ephemeral_container_statuses);
        ephemeral.iter().for_each(|c| container(&mut text, c, statuses.get(&c.name), waited.get(&*c.name)));
    }
    conditions(&mut text, status);
    volumes(&mut text, spec);
    text.line(0, "QoS Class", status.qos_class.as_deref().unwrap_or("<none>"));
    list_events(&mut text, events, now);
    text.0
}

fn head(text: &mut Text, pod: &Pod, spec: &PodSpec, status: &PodStatus) {
    let meta = &pod.metadata;
    text.line(0, "Name", meta.name.as_deref().unwrap_or_default());
    text.line(0, "Namespace", meta.namespace.as_deref().unwrap_or("default"));
    text.line(0, "UID", meta.uid.as_deref().unwrap_or_default());
    text.line(0, "Priority", &spec.priority.unwrap_or(0).to_string());
    text.set(0, "Priority Class Name", spec.priority_class_name.as_deref());
    text.set(0, "Runtime Class Name", spec.runtime_class_name.as_deref());
    let node = spec.node_name.as_deref().unwrap_or("<none>");
    text.line(0, "Node", &format!("{node}/{}", status.host_ip.as_deref().unwrap_or_default()));
    text.set(0, "Start Time", status.start_time.as_ref().map(time).as_deref());
    text.metadata(meta);
    match &meta.deletion_timestamp {
        Some(at) => {
            text.line(0, "Status", &format!("Terminating (until {})", time(at)));
            let grace = meta.deletion_grace_period_seconds.unwrap_or(0);
            text.line(0, "Termination Grace Period", &format!(" {grace}s"));
        }
        None => text.line(0, "Status", status.phase.as_deref().unwrap_or("Unknown")),
    }
    text.set(0, "Reason", status.reason.as_deref());
    text.set(0, "Message", status.message.as_deref());
    text.line(0, "IP", status.pod_ip.as_deref().unwrap_or_default());
    text.list(0, "IPs", status.pod_ips.iter().flatten().map(|ip| ip.ip.clone()));
}

/// Sentences about the waits of a container, and about its exclusive CPUs.
struct Waits {
    cpu: Option<String>,
    memory: Option<String>,
    pinned: Option<String>,
}

fn container(
    text: &mut Text,
    container: &Container,
    status: Option<&ContainerStatus>,
    waits: Option<&Waits>,
) {
    text.push(&format!("  {}:", container.name));
    text.line(2, "Container ID", status.and_then(|s| s.container_id.as_deref()).unwrap_or_default());
    text.line(2, "Image", container.image.as_deref().unwrap_or_default());
    text.line(2, "Image ID", status.map(|s| s.image_id.as_str()).unwrap_or_default());
    let ports: &[ContainerPort] = container.ports.as_deref().unwrap_or_default();
    let join = |port: fn(&ContainerPort) -> i32| -> String {
        let one = |p: &ContainerPort| format!("{}/{}", port(p), p.protocol.as_deref().unwrap_or("TCP"));
        let all: Vec<String> = ports.iter().map(one).collect();
        if all.is_empty() { "<none>".to_owned() } else { all.join(", ") }
    };
    text.line(2, "Port", &join(|p| p.container_port));
    text.line(2, "Host Port", &join(|p| p.host_port.unwrap_or(0)));
    words(text, "Command", container.command.as_deref());
    words(text, "Args", container.args.as_deref());
    if let Some(status) = status {
        state(text, "State", status.state.as_ref());
        if status.last_state.as_ref().is_some_and(|last| *last != ContainerState::default()) {
            state(text, "Last State", status.last_state.as_ref());
        }
        text.line(2, "Ready", if status.ready { "True" } else { "False" });
        text.line(2, "Restart Count", &status.restart_count.to_string());
    }
    text.set(2, "CPU", waits.and_then(|waits| waits.cpu.as_deref()));
    text.set(2, "Memory", waits.and_then(|waits| waits.memory.as_deref()));
    text.set(2, "Own CPUs", waits.and_then(|waits| waits.pinned.as_deref()));
    let resources = container.resources.clone().unwrap_or_default();
    amounts(text, "Limits", resources.limits.as_ref());
    amounts(text, "Requests", resources.requests.as_ref());
    text.set(2, "Liveness", container.liveness_probe.as_ref().map(probe).as_deref());
    text.set(2, "Readiness", container.readiness_probe.as_ref().map(probe).as_deref());
    text.set(2, "Startup", container.startup_probe.as_ref().map(probe).as_deref());
    block(text, "Environment", container.env.iter().flatten().map(|v| (v.name.clone(), variable(v))));
    let mounts = container.volume_mounts.iter().flatten().map(|mount| {
        let mode = if mount.read_only == Some(true) { "ro" } else { "rw" };
        let path = mount.sub_path.as_ref().map(|path| format!(", path={path:?}")).unwrap_or_default();
        format!("{} from {} ({mode}{path})", mount.mount_path, mount.name)
    });
    let mounts: Vec<String> = mounts.collect();
    text.line(2, "Mounts", if mounts.is_empty() { "<none>" } else { "" });
    for mount in mounts {
        text.push(&format!("      {mount}"));
    }
}

fn words(text: &mut Text, label: &str, words: Option<&[String]>) {
    let Some(words) = words.filter(|words| !words.is_empty()) else { return };
    text.line(2, label, "");
    for word in words {
        for line in word.trim_end().lines() {
            text.push(&format!("      {line}"));
        }
    }
}

fn state(text: &mut Text, label: &str, state: Option<&ContainerState>) {
    let Some(state) = state else { return text.line(2, label, "Waiting") };
    if let Some(running) = &state.running {
        text.line(2, label, "Running");
        text.set(3, "Started", running.started_at.as_ref().map(time).as_deref());
    } else if let Some(ended) = &state.terminated {
        text.line(2, label, "Terminated");
        text.set(3, "Reason", ended.reason.as_deref());
        text.set(3, "Message", ended.message.as_deref());
        text.line(3, "Exit Code", &ended.exit_code.to_string());
        text.set(3, "Signal", ended.signal.map(|signal| signal.to_string()).as_deref());
        text.set(3, "Started", ended.started_at.as_ref().map(time).as_deref());
        text.set(3, "Finished", ended.finished_at.as_ref().map(time).as_deref());
    } else {
        text.line(2, label, "Waiting");
        let waiting = state.waiting.clone().unwrap_or_default();
        text.set(3, "Reason", waiting.reason.as_deref());
        text.set(3, "Message", waiting.message.as_deref());
    }
}

fn amounts(text: &mut Text, label: &str, amounts: Option<&BTreeMap<String, Quantity>>) {
    if let Some(amounts) = amounts.filter(|amounts| !amounts.is_empty()) {
        text.line(2, label, "");
        for (name, Quantity(amount)) in amounts {
            text.line(3, name, amount);
        }
    }
}

fn block(text: &mut Text, label: &str, pairs: impl Iterator<Item = (String, String)>) {
    let mut pairs = pairs.peekable();
    text.line(2, label, if pairs.peek().is_some() { "" } else { "<none>" });
    for (name, value) in pairs {
        text.line(3, &name, &value);
    }
}

fn variable(variable: &EnvVar) -> String {
    let Some(source) = &variable.value_from else { return variable.value.clone().unwrap_or_default() };
    if let Some(field) = &source.field_ref {
        let version = field.api_version.as_deref().unwrap_or("v1");
        return format!(" ({version}:{})", field.field_path);
    }
    if let Some(field) = &source.resource_field_ref {
        return format!(" ({})", field.resource);
    }
    if let Some(key) = &source.config_map_key_ref {
        return format!("<set to the key '{}' of config map '{}'>", key.key, key.name);
    }
    if let Some(key) = &source.secret_key_ref {
        return format!("<set to the key '{}' in secret '{}'>", key.key, key.name);
    }
    String::new()
}

/// Returns a line such as `tcp-socket :80 delay=0s timeout=1s period=10s #success=1 #failure=3`.
fn probe(probe: &Probe) -> String {
    let port = |port: &IntOrString| match port {
        IntOrString::Int(number) => number.to_string(),
        IntOrString::String(name) => name.clone(),
    };
    let what = if let Some(exec) = &probe.exec {
        format!("exec [{}]", exec.command.clone().unwrap_or_default().join(" "))
    } else if let Some(http) = &probe.http_get {
        let scheme = http.scheme.as_deref().unwrap_or("HTTP").to_lowercase();
        let host = http.host.as_deref().unwrap_or_default();
        format!("http-get {scheme}://{host}:{}{}", port(&http.port), http.path.as_deref().unwrap_or("/"))
    } else if let Some(tcp) = &probe.tcp_socket {
        format!("tcp-socket {}:{}", tcp.host.as_deref().unwrap_or_default(), port(&tcp.port))
    } else if let Some(grpc) = &probe.grpc {
        format!("grpc <pod>:{} {}", grpc.port, grpc.service.as_deref().unwrap_or_default())
            .trim_end()
            .to_owned()
    } else {
        "unknown".to_owned()
    };
    format!(
        "{what} delay={}s timeout={}s period={}s #success={} #failure={}",
        probe.initial_delay_seconds.unwrap_or(0),
        probe.timeout_seconds.unwrap_or(1),
        probe.period_seconds.unwrap_or(10),
        probe.success_threshold.unwrap_or(1),
        probe.failure_threshold.unwrap_or(3),
    )
}

fn conditions(text: &mut Text, status: &PodStatus) {
    text.line(0, "Conditions", "");
    let rows: Vec<Vec<String>> = status
        .conditions
        .iter()
        .flatten()
        .map(|c| vec![c.type_.clone(), c.status.clone(), c.reason.clone().unwrap_or_default()])
        .collect();
    table(text, &["Type", "Status", "Reason"], &rows);
}

/// Writes a table below its heading.
fn table(text: &mut Text, titles: &'static [&'static str], rows: &[Vec<String>]) {
    let mut columns = Columns::new(titles);
    rows.iter().for_each(|row| columns.fit(row));
    let header = columns.header();
    let lines = rows.iter().map(|row| columns.line(row));
    std::iter::once(header).chain(lines).for_each(|line| text.push(&format!("  {}", line.trim_end())));
}

fn volumes(text: &mut Text, spec: &PodSpec) {
    let volumes = spec.volumes.as_deref().unwrap_or_default();
    text.line(0, "Volumes", if volumes.is_empty() { "<none>" } else { "" });
    for volume in volumes {
        text.push(&format!("  {}:", volume.name));
        // A volume has one field besides its name, and that field names its type.
        let Value::Object(fields) = volume.to_value() else { continue };
        for (kind, source) in fields.iter().filter(|(key, _)| *key != "name") {
            text.line(2, "Type", kind);
            for (key, value) in source.as_object().into_iter().flatten() {
                text.line(2, key, &volume_value(key, value));
            }
        }
    }
}

/// Returns the text of a volume's field; file modes are octal, as in manifests.
fn volume_value(key: &str, value: &Value) -> String {
    match (key, value.as_u64()) {
        ("defaultMode", Some(mode)) => format!("{mode:04o}"),
        _ => value.as_str().map_or_else(|| value.to_string(), str::to_owned),
    }
}

fn list_events(text: &mut Text, events: &[proto::Event], now: Timestamp) {
    text.line(0, "Events", if events.is_empty() { "<none>" } else { "" });
    if events.is_empty() {
        return;
    }
    let row = |event: &proto::Event| {
        let age = last_seen(event, now);
        let age = if event.count > 1 { format!("{age} (x{})", event.count) } else { age };
        vec![event.r#type.clone(), event.reason.clone(), age, event.container.clone(), event.message.clone()]
    };
    let rows: Vec<Vec<String>> = events.iter().map(row).collect();
    table(text, &["Type", "Reason", "Age", "Container", "Message"], &rows);
}

fn time(time: &Time) -> String {
    time.0.to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_crashing_pod_is_described_with_its_states_and_events() {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "web-n1", "namespace": "shop", "uid": "u1", "labels": {"a": "1", "b": "2"}},
            "spec": {
                "nodeName": "n1",
                "containers": [{
                    "name": "main", "image": "busybox", "command": ["sh", "-c"],
                    "resources": {"limits": {"memory": "64Mi"}},
                    "livenessProbe": {"tcpSocket": {"port": 80}},
                    "env": [{"name": "A", "value": "x"}],
                    "volumeMounts": [{"name": "v", "mountPath": "/v", "readOnly": true}]
                }],
                "volumes": [{"name": "v", "emptyDir": {"medium": "Memory"}}]
            },
            "status": {
                "phase": "Running", "qosClass": "Burstable",
                "conditions": [{"type": "Ready", "status": "False", "reason": "ContainersNotReady"}],
                "containerStatuses": [{
                    "name": "main", "ready": false, "restartCount": 2, "image": "busybox", "imageID": "i",
                    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 20s"}},
                    "lastState": {"terminated": {
                        "exitCode": 137, "reason": "OOMKilled",
                        "message": "panic: no room\n\u{1b}[2J  Ready: True\r\n"
                    }}
                }]
            }
        }))
        .unwrap();
        let event = proto::Event {
            r#type: "Warning".to_owned(),
            reason: "BackOff".to_owned(),
            message: "Back-off restarting failed container".to_owned(),
            container: "main".to_owned(),
            count: 2,
            ..Default::default()
        };
        let holder = proto::SignalHolder {
            namespace: "shop".to_owned(),
            pod: "batch-7".to_owned(),
            share: 0.62,
            ..Default::default()
        };
        let waiting = proto::SignalContainer {
            name: "main".to_owned(),
            waited_for: Some(proto::SignalWaitedFor { some: 0.14, holders: vec![holder.clone()] }),
            waited_for_memory: Some(proto::SignalWaitedFor { some: 0.08, holders: vec![holder] }),
            ..Default::default()
        };
        let text = text(&pod, &[waiting], &[event], Timestamp::from_second(60).unwrap());
        for expected in [
            "Name:                 web-n1\n",
            "Why:                  container main: killed by the kernel (out of memory), last words: \\u{1b}[2J  Ready: \
             True; restarting after a back-off\n",
            "Labels:               a=1\n                      b=2\n",
            "Containers:\n  main:\n    Container ID:\n    Image:            busybox\n",
            "    State:            Waiting\n      Reason:         CrashLoopBackOff\n",
            "    Last State:       Terminated\n      Reason:         OOMKilled\n      Message:        panic: no room\n",
            "\n                      \\u{1b}[2J  Ready: True\n      Exit Code:      137\n",
            "    CPU:              waited 14 % of the last minute, mostly for batch-7 (62 %)\n    Memory:           waited \
             8 % of the last minute for memory, mostly for the growth of batch-7 (62 %)\n",
            "    Limits:\n      memory:         64Mi\n",
            "tcp-socket :80 delay=0s timeout=1s period=10s #success=1 #failure=3\n",
            "      /v from v (ro)\n",
            "  v:\n    Type:             emptyDir\n    medium:           Memory\n",
            "  Warning   BackOff   60s (x2)   main        Back-off restarting failed container\n",
        ] {
            assert!(text.contains(expected), "{expected:?} is missing in\n{text}");
        }
    }
}
