//! The simulated API server, as far as the agent's source of pods shows it: objects, deletions, statuses.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use beelet_model::desired::Desired;
use beelet_model::objects::{Objects, Services};
use beelet_model::table::{PodName, PodTable};
use k8s_openapi::api::core::v1 as core;
use serde_json::json;
use tokio::sync::watch;

use crate::seam;
use crate::shapes::Pod;

/// Time from the last release of a deleted pod to the removal of its object.
const FINALIZED: Duration = Duration::from_millis(20);

/// The API server.
pub(crate) struct ApiServer {
    /// Pods by name.
    objects: BTreeMap<String, core::Pod>,
    source: watch::Sender<Arc<Desired>>,
    /// True once the agent has listed the pods.
    listed: bool,
    /// True if the pods show the statuses that the agent has written.
    echoes: bool,
}

impl ApiServer {
    /// Creates an API server without pods.
    pub(crate) fn new(echoes: bool) -> Self {
        let source = watch::Sender::new(Arc::new(Desired::default()));
        Self { objects: BTreeMap::new(), source, listed: false, echoes }
    }

    /// Hides all pods from a new agent, until it lists them.
    pub(crate) fn hide(&mut self) {
        self.listed = false;
        self.source.send_replace(Arc::new(Desired { api_unread: true, ..Desired::default() }));
    }

    /// Shows all pods.
    pub(crate) fn list(&mut self) {
        self.listed = true;
        self.publish();
    }

    /// Returns the pods as the agent sees them.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Arc<Desired>> {
        self.source.subscribe()
    }

    /// Creates a pod.
    pub(crate) fn create(&mut self, pod: &Pod) {
        if let Ok(object) = serde_json::from_value(pod.object()) {
            self.objects.insert(pod.name.clone(), object);
        }
        self.publish();
    }

    /// Replaces the spec of a pod.
    pub(crate) fn update(&mut self, pod: &Pod) {
        if let (Some(known), Ok(new)) =
            (self.objects.get_mut(&pod.name), serde_json::from_value::<core::Pod>(pod.object()))
        {
            known.spec = new.spec;
            known.metadata.generation = known.metadata.generation.map(|generation| generation + 1);
        }
        self.publish();
    }

    /// Begins the deletion of a pod.
    pub(crate) fn delete(&mut self, name: &str, grace: u64) {
        if let Some(object) = self.objects.get_mut(name) {
            let seconds = i64::try_from(seam::elapsed().as_secs()).unwrap_or(0);
            let value = json!(seconds_as_time(seconds));
            object.metadata.deletion_timestamp = serde_json::from_value(value).ok();
            object.metadata.deletion_grace_period_seconds = Some(i64::try_from(grace).unwrap_or(i64::MAX));
        }
        self.publish();
    }

    /// Removes a pod. Returns its UID.
    pub(crate) fn remove(&mut self, name: &str) -> Option<String> {
        let object = self.objects.remove(name)?;
        self.publish();
        object.metadata.uid
    }

    fn publish(&self) {
        if !self.listed {
            return;
        }
        let mut objects = Objects::default();
        objects.services = Some(Services::new(Vec::new()));
        let pods = self.objects.values().map(|pod| (PodName::of(pod), Arc::new(pod.clone()))).collect();
        self.source.send_replace(Arc::new(Desired {
            pods,
            objects: Arc::new(objects),
            ..Desired::default()
        }));
    }

    /// Writes the statuses of the agent's pods to their objects. Returns the names of deleted pods that have
    /// released everything, with the times of their removal.
    pub(crate) fn read_statuses(&mut self, table: &PodTable) -> Vec<(String, Duration)> {
        let mut released = Vec::new();
        let mut changed = false;
        for (name, entry) in &table.pods {
            let Some(object) = self.objects.get_mut(&name.name) else { continue };
            if object.metadata.uid != entry.pod.metadata.uid {
                continue;
            }
            changed |= object.status != entry.pod.status;
            object.status.clone_from(&entry.pod.status);
            if object.metadata.deletion_timestamp.is_some() && entry.cleared {
                released.push((name.name.clone(), seam::elapsed() + FINALIZED));
            }
        }
        if changed && self.echoes {
            self.publish();
        }
        released
    }
}

/// Returns the simulated wall-clock time as RFC 3339, within the first day's month.
fn seconds_as_time(seconds: i64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let (day, hour, minute, second) = (1 + days % 28, rest / 3600, rest / 60 % 60, rest % 60);
    format!("2027-01-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}
