//! Pods as seen by a client of the agent's API.

use crate::workdir::{interrupted, stretched};
use anyhow::{Context as _, Result, bail};
use beelet_proto::beelet::node_client::NodeClient;
use beelet_proto::beelet::pod_event::Type;
use beelet_proto::beelet::{PodEvent, ReadinessEdge, RejectedManifest, WatchPodsRequest};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};
use tonic::Streaming;

/// Pod, as of the last event about it.
#[derive(Debug, Clone)]
pub struct PodView {
    /// Pod with its status.
    pub pod: Pod,
    /// Last readiness change that a kernel event caused.
    pub edge: Option<ReadinessEdge>,
}

impl PodView {
    /// Returns namespace and name.
    pub fn name(&self) -> String {
        let metadata = &self.pod.metadata;
        let namespace = metadata.namespace.as_deref().unwrap_or("default");
        format!("{namespace}/{}", metadata.name.as_deref().unwrap_or_default())
    }

    /// Returns `metadata.uid`, or an empty text.
    pub fn uid(&self) -> &str {
        self.pod.metadata.uid.as_deref().unwrap_or_default()
    }

    /// Returns `status.phase`, or an empty text.
    pub fn phase(&self) -> &str {
        self.pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
    }

    /// Returns `status.qosClass`, or an empty text.
    pub fn qos(&self) -> &str {
        self.pod.status.as_ref().and_then(|status| status.qos_class.as_deref()).unwrap_or_default()
    }

    /// Returns `status.podIP`, if it is set.
    pub fn ip(&self) -> Option<&str> {
        self.pod.status.as_ref()?.pod_ip.as_deref().filter(|ip| !ip.is_empty())
    }

    /// Returns true if the condition of this type is true.
    pub fn condition(&self, kind: &str) -> bool {
        let conditions = self.pod.status.as_ref().and_then(|status| status.conditions.as_ref());
        conditions.is_some_and(|all| {
            all.iter().any(|condition| condition.type_ == kind && condition.status == "True")
        })
    }

    /// Returns true if the pod's `Ready` condition is true.
    pub fn ready(&self) -> bool {
        self.condition("Ready")
    }

    /// Returns the statuses of the containers, without init containers.
    pub fn containers(&self) -> &[ContainerStatus] {
        let statuses = self.pod.status.as_ref().and_then(|status| status.container_statuses.as_deref());
        statuses.unwrap_or_default()
    }

    /// Returns the status of the container of this name.
    pub fn container(&self, name: &str) -> Option<&ContainerStatus> {
        self.containers().iter().find(|container| container.name == name)
    }

    /// Returns the sum of the containers' restarts.
    pub fn restarts(&self) -> i32 {
        self.containers().iter().map(|container| container.restart_count).sum()
    }
}

/// Pods since the first listing, kept up to date by events.
#[derive(Debug)]
pub struct Watch {
    events: Streaming<PodEvent>,
    /// Pods by `namespace/name`.
    pub pods: BTreeMap<String, PodView>,
    /// Rejected manifests.
    pub rejected: Vec<RejectedManifest>,
}

impl Watch {
    /// Connects to the agent's socket; on return, [`Watch::pods`] has all current pods.
    pub async fn start(socket: &Path) -> Result<Watch> {
        let mut client = NodeClient::new(crate::containerd::connect(socket).await?);
        let events =
            client.watch_pods(WatchPodsRequest {}).await.context("cannot watch the pods")?.into_inner();
        let mut watch = Watch { events, pods: BTreeMap::new(), rejected: Vec::new() };
        while watch.next().await? != Type::Synced {}
        Ok(watch)
    }

    /// Waits for the next event, applies it, and returns its type.
    pub async fn next(&mut self) -> Result<Type> {
        let event = self.events.message().await.context("the agent's event stream broke")?;
        let event = event.context("the agent ended its event stream")?;
        let kind = event.r#type();
        match kind {
            Type::Added | Type::Modified => {
                let view = decode(event.pod.context("the event has no pod")?)?;
                self.pods.insert(view.name(), view);
            }
            Type::Deleted => {
                let pod = event.pod.context("the event has no pod")?;
                self.pods.remove(&format!("{}/{}", pod.namespace, pod.name));
            }
            Type::Rejected => self.rejected = event.rejected,
            Type::Synced => self.rejected.extend(event.rejected),
            Type::Notice => {}
            Type::Unspecified => bail!("the agent sent an event without a type"),
        }
        Ok(kind)
    }

    /// Waits until `found` returns a value, at most for `patience`, [`stretched`]. The error contains `what`
    /// and the last state of the pods.
    pub async fn until<T>(
        &mut self,
        what: &str,
        patience: Duration,
        mut found: impl FnMut(&Watch) -> Option<T>,
    ) -> Result<T> {
        let patience = stretched(patience);
        let deadline = Instant::now() + patience;
        loop {
            if let Some(value) = found(self) {
                return Ok(value);
            }
            // Wakes up regularly to check for signals. A cancelled wait loses no event.
            let left = deadline.saturating_duration_since(Instant::now()).min(Duration::from_millis(200));
            match tokio::time::timeout(left, self.next()).await {
                Ok(event) => event.map(drop)?,
                Err(_) if interrupted() => bail!("interrupted"),
                Err(_) if Instant::now() < deadline => (),
                Err(_) => {
                    bail!("waited {} s for {what}; last state: {}", patience.as_secs(), self.describe())
                }
            }
        }
    }

    /// Returns the pod of this manifest: from a folder, where the agent appends the node's name, or from an
    /// API server.
    pub fn pod(&self, manifest: &str) -> Option<&PodView> {
        let prefix = format!("{manifest}-");
        let is_it = |name: &str| name == manifest || name.starts_with(&prefix);
        self.pods.values().find(|view| view.pod.metadata.name.as_deref().is_some_and(is_it))
    }

    /// Formats all pods, one per line, for error messages.
    pub fn describe(&self) -> String {
        let mut text = String::new();
        for (name, view) in &self.pods {
            let containers: Vec<String> = view
                .containers()
                .iter()
                .map(|container| {
                    let state = container.state.as_ref().map(|state| serde_json::json!(state).to_string());
                    format!(
                        "{} ready={} restarts={} {}",
                        container.name,
                        container.ready,
                        container.restart_count,
                        state.unwrap_or_default()
                    )
                })
                .collect();
            text.push_str(&format!(
                "\n  {name}: {} ready={} [{}]",
                view.phase(),
                view.ready(),
                containers.join("; ")
            ));
        }
        for rejected in &self.rejected {
            text.push_str(&format!("\n  rejected {}: {}", rejected.file, rejected.message));
        }
        if text.is_empty() { "no pods".to_owned() } else { text }
    }
}

/// Decodes a pod of the API.
pub fn decode(pod: beelet_proto::beelet::Pod) -> Result<PodView> {
    let parsed = serde_json::from_slice(&pod.json);
    let parsed =
        parsed.with_context(|| format!("the agent sent no valid pod for {}/{}", pod.namespace, pod.name))?;
    Ok(PodView { pod: parsed, edge: pod.readiness_edge })
}
