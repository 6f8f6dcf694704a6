//! The simulated API server: the tests' server, reached by connections in memory. Users create, resize and
//! delete pods; the agent writes statuses, mirror pods, its Node and its lease, and releases deleted pods.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use beelet_tests::apiserver::FakeApi;
use fastrand::Rng;
use k8s_openapi::api::core::v1 as core;
use serde_json::json;
use tokio::sync::watch;

use crate::plan::{ApiFault, ApiFaultKind};
use crate::seam;
use crate::shapes::Pod;

/// The API server.
pub(crate) struct ApiServer {
    pub(crate) fake: Arc<FakeApi>,
    /// UIDs of the users' pods by name.
    pods: BTreeMap<String, String>,
    changes: watch::Receiver<u64>,
    /// Seed of the disturbances' choices, and the number of disturbances.
    seed: u64,
    faults: u64,
}

fn path(name: &str) -> String {
    format!("/api/v1/namespaces/default/pods/{name}")
}

impl ApiServer {
    /// Creates an API server without pods.
    pub(crate) fn new(seed: u64) -> Self {
        let fake = FakeApi::absent();
        let changes = fake.changes();
        Self { fake: Arc::new(fake), pods: BTreeMap::new(), changes, seed, faults: 0 }
    }

    /// Writes the agent's kubeconfig.
    pub(crate) fn write_kubeconfig(&self, file: &Path) -> std::io::Result<()> {
        std::fs::write(file, self.fake.kubeconfig())
    }

    /// Waits for a request or a changed object.
    pub(crate) async fn changed(&mut self) {
        if self.changes.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Creates a pod. Returns its UID.
    pub(crate) fn create(&mut self, pod: &Pod) -> String {
        let made = self.fake.put(&path(&pod.name), pod.object());
        let uid = made["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
        self.pods.insert(pod.name.clone(), uid.clone());
        uid
    }

    /// Replaces the spec of a pod.
    pub(crate) fn update(&self, pod: &Pod) {
        if self.exists(&pod.name) {
            self.fake.patch(&path(&pod.name), &json!({ "spec": pod.object()["spec"] }));
        }
    }

    /// Begins the deletion of a pod. Returns true if the object still exists.
    pub(crate) fn delete(&self, name: &str, grace: u64) -> bool {
        let grace = i64::try_from(grace).unwrap_or(i64::MAX);
        self.fake.try_delete_within(&path(name), grace).is_some() && self.exists(name)
    }

    fn exists(&self, name: &str) -> bool {
        let uid = self.fake.uid(&path(name));
        uid.is_some() && uid.as_ref() == self.pods.get(name)
    }

    /// Returns the UIDs of the pods whose objects are gone since the last call.
    pub(crate) fn gone(&mut self) -> Vec<String> {
        let names: Vec<String> = self.pods.keys().filter(|name| !self.exists(name)).cloned().collect();
        names.iter().filter_map(|name| self.pods.remove(name)).collect()
    }

    /// Returns the users' pods.
    pub(crate) fn objects(&self) -> impl Iterator<Item = core::Pod> {
        let objects = self.pods.keys().filter_map(|name| self.fake.get(&path(name)));
        objects.filter_map(|object| serde_json::from_value(object).ok())
    }

    /// Returns true if the Node is ready.
    pub(crate) fn node_is_ready(&self, name: &str) -> bool {
        let node = self.fake.get(&format!("/api/v1/nodes/{name}")).unwrap_or_default();
        let mut conditions = node["status"]["conditions"].as_array().into_iter().flatten();
        conditions.any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
    }

    /// Ends all watches.
    pub(crate) fn end_watches(&self, broken: bool, compacted: bool) {
        if compacted {
            self.fake.compact();
        }
        for watched in self.fake.watched() {
            if broken {
                self.fake.break_watches(&watched);
            } else {
                self.fake.end_watches(&watched);
            }
        }
    }

    /// Disturbs requests from now on.
    pub(crate) fn disturb(&mut self, fault: &ApiFault) {
        self.faults += 1;
        let until = seam::elapsed() + Duration::from_secs(fault.seconds);
        let (verb, percent, seed) = (fault.verb, fault.percent, self.seed ^ (self.faults << 32));
        let count = AtomicU64::new(0);
        let script = self.fake.on_any().always().when(move |asked| {
            let fits = seam::elapsed() < until && verb.is_none_or(|verb| verb == asked.verb);
            let chance = |count| Rng::with_seed(seed ^ count).u64(0..100);
            fits && chance(count.fetch_add(1, Ordering::Relaxed)) < percent
        });
        match fault.kind {
            ApiFaultKind::Slow(milliseconds) => script.after(Duration::from_millis(milliseconds)).proceed(),
            ApiFaultKind::Refuse(code) => script.refuse(code, "simulated refusal"),
            ApiFaultKind::Throttle(seconds) => script.throttle(seconds),
            ApiFaultKind::Drop => script.drop_connection(),
            ApiFaultKind::LoseReply => script.lose_reply(),
        }
    }
}
