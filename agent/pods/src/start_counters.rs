//! The kubelet's metrics of started pods, sandboxes and containers, and of pulled images: number, failures,
//! durations.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::Registry,
};

use crate::error::StartError;
use beelet_proto::cri;

/// Upper bounds of the buckets for a sandbox's duration, in seconds: Prometheus' defaults, as in the kubelet.
const SANDBOX: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];
/// Upper bounds of the buckets for a pull's duration, in seconds: the kubelet's (`imagePullDurationBuckets`).
const PULL: [f64; 18] = [
    1.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0, 600.0, 900.0, 1200.0, 1800.0,
    2700.0, 3600.0,
];

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Size classes of images, each with its exclusive lower bound (`imageSizeBuckets`).
const SIZES: [(u64, &str); 12] = [
    (0, "0-10MB"),
    (10 * MIB, "10MB-100MB"),
    (100 * MIB, "100MB-500MB"),
    (500 * MIB, "500MB-1GB"),
    (GIB, "1GB-5GB"),
    (5 * GIB, "5GB-10GB"),
    (10 * GIB, "10GB-20GB"),
    (20 * GIB, "20GB-30GB"),
    (30 * GIB, "30GB-40GB"),
    (40 * GIB, "40GB-60GB"),
    (60 * GIB, "60GB-100GB"),
    (100 * GIB, "GT100GB"),
];

fn size_label(bytes: u64) -> &'static str {
    SIZES.iter().rev().find(|(least, _)| bytes > *least).map_or("N/A", |(_, label)| label)
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HandlerLabel {
    runtime_handler: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabel {
    container_type: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FailedLabel {
    container_type: &'static str,
    code: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EndLabel {
    container_type: &'static str,
    exit_code: String,
    reason: &'static str,
}

/// Reasons of ends that have their own time series: a runtime must not be able to create any number of them.
const REASONS: [&str; 5] = ["Completed", "Error", "OOMKilled", "ContainerCannotRun", "StartError"];
/// Label of other reasons, and of exit codes that Linux does not have.
const OTHER: &str = "other";

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SizeLabel {
    image_size_in_bytes: &'static str,
}

/// Counters and histograms, shared by clones.
#[derive(Clone, Debug)]
pub(crate) struct StartCounters {
    pods: Counter,
    pod_errors: Counter,
    containers: Family<KindLabel, Counter>,
    container_errors: Family<FailedLabel, Counter>,
    ends: Family<EndLabel, Counter>,
    sandboxes: Family<HandlerLabel, Histogram, fn() -> Histogram>,
    sandbox_errors: Family<HandlerLabel, Counter>,
    pulls: Family<SizeLabel, Histogram, fn() -> Histogram>,
}

impl Default for StartCounters {
    fn default() -> Self {
        Self {
            pods: Counter::default(),
            pod_errors: Counter::default(),
            containers: Family::default(),
            container_errors: Family::default(),
            ends: Family::default(),
            sandboxes: Family::new_with_constructor((|| Histogram::new(SANDBOX)) as fn() -> Histogram),
            sandbox_errors: Family::default(),
            pulls: Family::new_with_constructor((|| Histogram::new(PULL)) as fn() -> Histogram),
        }
    }
}

impl StartCounters {
    pub(crate) fn register(&self, registry: &mut Registry) {
        registry.register(
            "kubelet_started_pods",
            "Attempts to create a pod's sandbox, for new pods and for pods that lost their sandbox",
            self.pods.clone(),
        );
        registry.register(
            "kubelet_started_pods_errors",
            "Failed attempts to create a pod's sandbox",
            self.pod_errors.clone(),
        );
        registry.register(
            "kubelet_started_containers",
            "Attempts to start a container, by container type (container, init_container, ephemeral_container)",
            self.containers.clone(),
        );
        registry.register(
            "kubelet_started_containers_errors",
            "Failed attempts to start a container, by the reason in the pod's status",
            self.container_errors.clone(),
        );
        registry.register(
            "kubelet_terminated_containers",
            "Terminated containers, by container type, exit code and reason",
            self.ends.clone(),
        );
        registry.register(
            "kubelet_run_podsandbox_duration_seconds",
            "Duration of the runtime's creation of a sandbox and its network in seconds, by the handler of the RuntimeClass",
            self.sandboxes.clone(),
        );
        registry.register(
            "kubelet_run_podsandbox_errors",
            "Sandboxes that the runtime failed to create, by the handler of the RuntimeClass",
            self.sandbox_errors.clone(),
        );
        registry.register(
            "kubelet_image_pull_duration_seconds",
            "Duration of image pulls in seconds, by the size of the image",
            self.pulls.clone(),
        );
    }

    /// Counts an attempt to create a pod's sandbox.
    pub(crate) fn pod(&self, failed: bool) {
        self.pods.inc();
        self.pod_errors.inc_by(failed.into());
    }

    /// Counts a runtime call that creates a sandbox, with its duration.
    pub(crate) fn sandbox(&self, handler: &str, took: Duration, failed: bool) {
        let label = HandlerLabel { runtime_handler: handler.to_owned() };
        self.sandboxes.get_or_create(&label).observe(took.as_secs_f64());
        self.sandbox_errors.get_or_create(&label).inc_by(failed.into());
    }

    /// Counts an attempt to start a container.
    pub(crate) fn container<T>(&self, pod: &Pod, name: &str, started: &Result<T, StartError>) {
        let container_type = kind(pod, name);
        self.containers.get_or_create(&KindLabel { container_type }).inc();
        if let Err(error) = started {
            self.container_errors.get_or_create(&FailedLabel { container_type, code: error.reason() }).inc();
        }
    }

    /// Counts a container that ran before, if it has ended.
    pub(crate) fn ended(&self, pod: &Pod, status: &cri::ContainerStatus) {
        if status.state() != cri::ContainerState::ContainerExited {
            return;
        }
        let name = status.metadata.as_ref().map_or("", |metadata| &metadata.name);
        let said = match status.reason.as_str() {
            "" if status.exit_code == 0 => "Completed",
            "" => "Error",
            said => said,
        };
        let reason = REASONS.into_iter().find(|known| *known == said).unwrap_or(OTHER);
        let code = u8::try_from(status.exit_code);
        let exit_code = code.map_or_else(|_| OTHER.to_owned(), |code| code.to_string());
        self.ends.get_or_create(&EndLabel { container_type: kind(pod, name), exit_code, reason }).inc();
    }

    /// Counts a pulled image of this size.
    pub(crate) fn pulled(&self, took: Duration, bytes: u64) {
        let label = SizeLabel { image_size_in_bytes: size_label(bytes) };
        self.pulls.get_or_create(&label).observe(took.as_secs_f64());
    }
}

/// Returns the kubelet's label for the container's kind.
fn kind(pod: &Pod, name: &str) -> &'static str {
    let Some(spec) = &pod.spec else { return "container" };
    if spec.init_containers.iter().flatten().any(|one| one.name == name) {
        "init_container"
    } else if spec.ephemeral_containers.iter().flatten().any(|one| one.name == name) {
        "ephemeral_container"
    } else {
        "container"
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;
    use serde_json::json;

    use super::*;
    use crate::error::Error;

    #[test]
    fn an_image_has_the_size_label_of_the_kubelet() {
        for (bytes, label) in [
            (0, "N/A"),
            (1, "0-10MB"),
            (10 << 20, "0-10MB"),
            ((10 << 20) + 1, "10MB-100MB"),
            (2 << 30, "1GB-5GB"),
            (u64::MAX, "GT100GB"),
        ] {
            assert_eq!(size_label(bytes), label, "{bytes}");
        }
    }

    #[test]
    fn starts_and_failures_are_counted_by_kind_and_reason() {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "web"},
            "spec": {"initContainers": [{"name": "init"}], "containers": [{"name": "main"}]},
        }))
        .unwrap();
        let counters = StartCounters::default();
        counters.pod(false);
        counters.pod(true);
        counters.sandbox("", Duration::from_millis(30), true);
        counters.container(&pod, "init", &Ok(()));
        counters.container::<()>(&pod, "main", &Err(StartError::Config(Error::Spec("no".to_owned()))));
        counters.pulled(Duration::from_secs(2), 3 << 20);
        let ended = |name: &str, exit_code: i32, reason: &str| cri::ContainerStatus {
            metadata: Some(cri::ContainerMetadata { name: name.to_owned(), attempt: 0 }),
            state: cri::ContainerState::ContainerExited.into(),
            exit_code,
            reason: reason.to_owned(),
            ..Default::default()
        };
        counters.ended(&pod, &ended("init", 0, ""));
        counters.ended(&pod, &ended("main", 137, "OOMKilled"));
        counters.ended(&pod, &ended("main", i32::MIN, "made up"));
        let mut registry = Registry::default();
        counters.register(&mut registry);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        for line in [
            "kubelet_started_pods_total 2",
            "kubelet_started_pods_errors_total 1",
            r#"kubelet_started_containers_total{container_type="init_container"} 1"#,
            r#"kubelet_started_containers_errors_total{container_type="container",code="CreateContainerConfigError"} 1"#,
            r#"kubelet_terminated_containers_total{container_type="init_container",exit_code="0",reason="Completed"} 1"#,
            r#"kubelet_terminated_containers_total{container_type="container",exit_code="137",reason="OOMKilled"} 1"#,
            r#"kubelet_terminated_containers_total{container_type="container",exit_code="other",reason="other"} 1"#,
            r#"kubelet_run_podsandbox_duration_seconds_count{runtime_handler=""} 1"#,
            r#"kubelet_run_podsandbox_errors_total{runtime_handler=""} 1"#,
            r#"kubelet_image_pull_duration_seconds_bucket{le="5.0",image_size_in_bytes="0-10MB"} 1"#,
        ] {
            assert!(text.lines().any(|one| one == line), "no {line} in\n{text}");
        }
    }
}
