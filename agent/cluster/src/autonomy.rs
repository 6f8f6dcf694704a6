//! Cache of the API server's objects in the state folder: a node that starts without its API server runs its
//! pods from this cache (docs/decisions/0020-autonomy.md).
//!
//! The first record has the pods, the ConfigMaps and the services. The second record has the Secrets and the
//! tokens, sealed by a key of the configuration; without a key the second record is missing. An unreadable
//! record counts as absent. Must never write a Secret or a token in the clear.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use beelet_base::blocking::blocking;
use beelet_codec::data;
use beelet_model::{desired::Desired, table::PodName};
use beelet_policy::{node::fit::NodeView, pod::references};
use beelet_state::{
    Loaded, State,
    events::{Object, Recorder},
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use serde::{Serialize, de::DeserializeOwned};
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::{
    assigned::{self, Assignment, Wanted},
    held::Held,
    kept::{Kept, KeptSecrets},
    presence::Presence,
    seal::{Key, Sealed},
};

/// Name of the record of pods, ConfigMaps and services.
const PLAIN: &str = "assigned";
/// Name of the record of Secrets and tokens.
const SEALED: &str = "assigned-secrets";
/// Delay of a write after a change, to write changes in quick succession together.
const SETTLE: Duration = Duration::from_secs(1);
/// Minimum time between two writes while the agent runs: tokens are renewed all the time.
const BETWEEN: Duration = Duration::from_secs(10);

/// Settings of the cache.
#[derive(Debug)]
pub struct Settings {
    /// True if the cache is written and used; otherwise an existing cache is removed.
    pub enabled: bool,
    /// Time without an answer of the API server, from the start on, after which pods start from the cache.
    pub after: Duration,
    /// File with the key that seals Secrets and tokens.
    pub key_file: Option<PathBuf>,
    /// True if the pods of StatefulSets start, too, after a reboot.
    pub stateful_sets: bool,
}

/// The cache that an earlier run of the agent wrote.
#[derive(Clone, Debug)]
pub(crate) struct Remembered {
    pods: Wanted,
    held: Held,
    node: Option<NodeView>,
    at: Timestamp,
    /// Pods that must not start before the API server has answered.
    unsafe_alone: Vec<(PodName, Arc<core::Pod>)>,
}

impl Remembered {
    /// Returns the number of cached pods.
    pub(crate) fn count(&self) -> usize {
        self.pods.as_ref().map_or(0, |all| all.pods.len())
    }

    /// Returns the cached objects that the pods refer to. Tokens stay mandatory.
    pub(crate) fn held(&self) -> Held {
        Held { tokens_optional: false, ..self.held.clone() }
    }

    /// Returns the desired pods of the cache, marked as not read from the API server: other running pods are
    /// left alone.
    pub(crate) fn desired(&self, node: Option<NodeView>) -> Desired {
        Desired {
            objects: Arc::new(self.held.objects(&self.pods)),
            node: node.or_else(|| self.node.clone()).map(Arc::new),
            api_unread: true,
            ..assigned::desired(&self.pods)
        }
    }

    /// Sets the pods of StatefulSets apart. A cluster may have moved them to another node while this one was
    /// off (out-of-service taint, deletion by force), and each of them must run at most once.
    fn leave_stateful_sets(&mut self) {
        let Some(all) = &self.pods else { return };
        let (stateful, others): (BTreeMap<_, _>, BTreeMap<_, _>) =
            all.pods.clone().into_iter().partition(|(_, pod)| is_of_stateful_set(pod));
        self.unsafe_alone = stateful.into_iter().collect();
        self.pods = Some(Arc::new(Assignment { pods: others, ..Assignment::default() }));
    }

    /// Makes those objects optional that an absent API server can't deliver: tokens, which are of little use
    /// without the API server, and the Secrets that only image pulls need.
    fn make_do(&mut self) {
        self.held.tokens_optional = true;
        let pods: Vec<Arc<core::Pod>> = self.pods.iter().flat_map(|all| all.pods.values()).cloned().collect();
        let needed: BTreeSet<_> =
            pods.iter().flat_map(|pod| references::of(&without_pull_secrets(pod))).collect();
        for reference in pods.iter().flat_map(|pod| references::of(pod)) {
            if !needed.contains(&reference) {
                self.held.objects.entry(reference).or_insert(None);
            }
        }
        self.held.services.get_or_insert_with(|| beelet_model::objects::Services::new(Vec::new()));
    }

    /// Returns the pods that wait for the API server because they need objects that are not cached.
    fn waiting(&self) -> Vec<(PodName, Arc<core::Pod>)> {
        let objects = self.held.objects(&self.pods);
        let waiting =
            self.pods.iter().flat_map(|all| all.pods.iter()).filter(|(_, pod)| objects.is_unread(pod));
        waiting.map(|(name, pod)| (name.clone(), Arc::clone(pod))).collect()
    }
}

/// Returns true for a pod that a StatefulSet controls, of any API group.
fn is_of_stateful_set(pod: &core::Pod) -> bool {
    let mut owners = pod.metadata.owner_references.iter().flatten();
    owners.any(|owner| owner.kind == "StatefulSet" && owner.controller == Some(true))
}

fn without_pull_secrets(pod: &core::Pod) -> core::Pod {
    let mut pod = pod.clone();
    if let Some(spec) = &mut pod.spec {
        spec.image_pull_secrets = None;
    }
    pod
}

/// Reads and writes the records.
pub(crate) struct Memory {
    state: Arc<State>,
    settings: Settings,
    node: String,
    key: Option<Arc<Key>>,
}

impl Memory {
    /// Opens the cache. Logs a warning and goes on without a key if the key can't be read.
    pub(crate) async fn open(state: Arc<State>, settings: Settings, node: String) -> Self {
        let mut key = None;
        if let Some(path) = settings.key_file.clone().filter(|_| settings.enabled) {
            let (file, name) = (path.clone(), node.clone());
            match blocking("the key of the configuration", move || Key::read(&file, &name)).await {
                Ok(read) => key = Some(Arc::new(read)),
                Err(cause) => warn!(
                    file = %path.display(), %cause,
                    "cannot read the key for cached Secrets; not caching Secrets, pods that need them wait for the API server"
                ),
            }
        }
        Self { state, settings, node, key }
    }

    /// Reads the cache, if present. Removes the records that the settings don't allow.
    pub(crate) async fn load(&self) -> Option<Remembered> {
        if !self.settings.enabled {
            self.remove(PLAIN).await;
        }
        if self.key.is_none() {
            self.remove(SEALED).await;
        }
        if !self.settings.enabled {
            return None;
        }
        let (kept, same_boot): (Kept, bool) = self.read(PLAIN).await?;
        if kept.node != self.node {
            info!(
                before = kept.node,
                now = self.node,
                "the node's name changed; ignoring the cached objects of the API server"
            );
            return None;
        }
        let secrets = self.secrets().await.unwrap_or_default();
        let (pods, mut held, node) = kept.restored();
        secrets.restore(&mut held);
        let pods = Some(Arc::new(Assignment { pods, ..Assignment::default() }));
        let mut remembered = Remembered { pods, held, node, at: kept.at, unsafe_alone: Vec::new() };
        if !same_boot && !self.settings.stateful_sets {
            remembered.leave_stateful_sets();
        }
        remembered.make_do();
        debug!(pods = remembered.count(), kept_at = %kept.at, "read the cached objects of the API server");
        Some(remembered)
    }

    async fn secrets(&self) -> Option<KeptSecrets> {
        let key = Arc::clone(self.key.as_ref()?);
        let (sealed, _): (Sealed, bool) = self.read(SEALED).await?;
        let opened =
            key.open(&sealed).and_then(|text| data::from_json(&text).map_err(|problem| problem.to_string()));
        opened
            .inspect_err(|cause| {
                warn!(%cause, "cannot open cached Secrets (has the key changed?); reading them from the API server");
            })
            .ok()
    }

    /// Reads a record. Returns true, too, if the record was written since the machine's boot.
    async fn read<T: DeserializeOwned + Send + 'static>(&self, name: &'static str) -> Option<(T, bool)> {
        let state = Arc::clone(&self.state);
        match blocking("a record", move || state.load(name)).await {
            Ok(Loaded::Value { value, same_boot }) => Some((value, same_boot)),
            Ok(Loaded::Absent) => None,
            Ok(Loaded::Quarantined { moved_to, reason }) => {
                warn!(record = name, moved_to = %moved_to.display(), %reason,
                    "cannot read cached objects of the API server; moved the record aside");
                None
            }
            Err(error) => {
                warn!(record = name, %error, "cannot read cached objects of the API server");
                None
            }
        }
    }

    async fn remove(&self, name: &'static str) {
        let state = Arc::clone(&self.state);
        if let Err(error) = blocking("a record", move || state.remove(name)).await {
            warn!(record = name, %error, "cannot remove cached objects of the API server");
        }
    }

    async fn write<T: Serialize + Send + 'static>(&self, name: &'static str, value: T) -> bool {
        let state = Arc::clone(&self.state);
        match blocking("a record", move || state.store(name, &value)).await {
            Ok(()) => true,
            Err(error) => {
                warn!(record = name, %error, "cannot cache the API server's objects for a start without it");
                false
            }
        }
    }

    /// Publishes the cached pods, with an event, once the API server has been silent for too long. Returns
    /// after publishing, or when the API server has listed the node's pods.
    pub(crate) async fn release(
        &self,
        remembered: Remembered,
        presence: Presence,
        mut pods: watch::Receiver<Wanted>,
        out: watch::Sender<Option<Arc<Remembered>>>,
        events: Recorder,
    ) {
        let silent = async {
            sleep(self.settings.after).await;
            // A server that refuses this node counts as present.
            presence.missing().await;
        };
        tokio::select! {
            () = silent => {}
            _ = pods.wait_for(Option::is_some) => return,
        }
        let message = format!(
            "the API server has not answered for {} s: running {} pods from the cache of {} until it does",
            self.settings.after.as_secs(),
            remembered.count(),
            remembered.at
        );
        warn!(node = self.node, "{message}");
        events.warning(Object::node(&self.node), "RunningWithoutAPIServer", message);
        let lacking = "the pod waits for the API server: the node's cache lacks Secrets or other objects that the pod needs";
        let unsafe_alone = "the pod waits for the API server, which may have started another of its name elsewhere while the \
                            machine was off: autonomy.statefulSets permits its start";
        let waiting = remembered.waiting().into_iter().map(|pod| (pod, lacking));
        let apart = remembered.unsafe_alone.iter().cloned().map(|pod| (pod, unsafe_alone));
        for ((name, pod), message) in waiting.chain(apart) {
            warn!(pod = %name, "{message}");
            events.warning(Object::pod(&pod), "WaitingForAPIServer", message);
        }
        out.send_replace(Some(Arc::new(remembered)));
    }

    /// Writes the API server's objects to the cache at each change until `stop`, and a last time then.
    pub(crate) async fn keep(
        &self,
        mut before: Held,
        mut pods: watch::Receiver<Wanted>,
        mut held: watch::Receiver<Held>,
        mut node: watch::Receiver<Option<Arc<core::Node>>>,
        stop: CancellationToken,
    ) {
        let listed = stop.run_until_cancelled(pods.wait_for(Option::is_some));
        if !self.settings.enabled || listed.await.is_none_or(|listed| listed.is_err()) {
            return stop.cancelled().await;
        }
        let (mut plain, mut secret) = (None, None);
        loop {
            let began = Instant::now();
            let assigned = pods.borrow_and_update().clone();
            // Objects that are not read yet keep their cached value.
            before = held.borrow_and_update().clone().or(before, &assigned);
            let view = node.borrow_and_update().as_deref().map(assigned::view);
            let content = Kept::of(&self.node, &assigned, &before, view);
            if plain.as_ref() != Some(&content) {
                let dated = content.clone().dated(Timestamp::now());
                plain = self.write(PLAIN, dated).await.then_some(content);
            }
            let is_kept = self.keep_secrets(&mut secret, &before).await && plain.is_some();
            if stop.is_cancelled() {
                return;
            }
            let changed = async {
                tokio::select! {
                    changed = pods.changed() => changed,
                    changed = held.changed() => changed,
                    changed = node.changed() => changed,
                    // Retry a failed write.
                    () = sleep(BETWEEN), if !is_kept => Ok(()),
                }
            };
            tokio::select! {
                // All senders are dropped: the agent is stopping.
                changed = changed => if changed.is_err() { stop.cancelled().await },
                () = stop.cancelled() => continue,
            }
            tokio::select! {
                () = sleep_until((began + BETWEEN).max(Instant::now() + SETTLE)) => {}
                () = stop.cancelled() => {}
            }
        }
    }

    /// Returns false if Secrets should be cached and are not.
    async fn keep_secrets(&self, known: &mut Option<KeptSecrets>, held: &Held) -> bool {
        let Some(key) = &self.key else { return true };
        let content = KeptSecrets::of(held);
        if known.as_ref() == Some(&content) {
            return true;
        }
        let value = data::to_value(&content).map_err(|cause| cause.to_string());
        match value.and_then(|value| key.seal(value.to_string().into_bytes())) {
            Ok(sealed) => *known = self.write(SEALED, sealed).await.then_some(content),
            Err(cause) => {
                *known = None;
                warn!(cause, "cannot seal Secrets; not caching them");
            }
        }
        known.is_some()
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::JoinHandle;

    use super::*;

    /// A running keeper and its inputs.
    struct Keeper {
        memory: Arc<Memory>,
        node: watch::Sender<Option<Arc<core::Node>>>,
        _said: (watch::Sender<Wanted>, watch::Sender<Held>),
        stop: CancellationToken,
        task: JoinHandle<()>,
    }

    fn settings(stateful_sets: bool) -> Settings {
        Settings { enabled: true, after: Duration::from_secs(30), key_file: None, stateful_sets }
    }

    async fn start(dir: &tempfile::TempDir) -> Keeper {
        let state = Arc::new(State::open(dir.path()).unwrap());
        let memory = Arc::new(Memory::open(state, settings(false), "n1".to_owned()).await);
        let pods = watch::Sender::new(Some(Arc::new(Assignment::default())));
        let (held, node) = (watch::Sender::new(Held::default()), watch::Sender::new(None));
        let (stop, keeper) = (CancellationToken::new(), Arc::clone(&memory));
        let (wanted, objects, itself, end) =
            (pods.subscribe(), held.subscribe(), node.subscribe(), stop.clone());
        let task =
            tokio::spawn(async move { keeper.keep(Held::default(), wanted, objects, itself, end).await });
        Keeper { memory, node, _said: (pods, held), stop, task }
    }

    impl Keeper {
        /// Polls once per second of the test's clock for a record that satisfies `wanted`.
        async fn until_kept(&self, wanted: impl Fn(&Remembered) -> bool) -> Remembered {
            for _ in 0..120 {
                if let Some(kept) = self.memory.load().await.filter(&wanted) {
                    return kept;
                }
                sleep(Duration::from_secs(1)).await;
            }
            panic!("no matching record was written within two minutes");
        }

        async fn end(self) {
            self.stop.cancel();
            self.task.await.unwrap();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_could_not_be_written_is_tried_again_though_nothing_changes() {
        let dir = tempfile::tempdir().unwrap();
        // A record can't take the place of a folder.
        let in_the_way = dir.path().join(format!("{PLAIN}.json"));
        std::fs::create_dir_all(in_the_way.join("x")).unwrap();
        let keeper = start(&dir).await;
        sleep(BETWEEN * 2).await;
        assert!(in_the_way.is_dir());
        std::fs::remove_dir_all(&in_the_way).unwrap();
        assert_eq!(keeper.until_kept(|_| true).await.count(), 0);
        keeper.end().await;
    }

    #[tokio::test(start_paused = true)]
    async fn the_nodes_labels_are_kept_as_they_change() {
        let dir = tempfile::tempdir().unwrap();
        let keeper = start(&dir).await;
        for zone in ["a", "b"] {
            let mut node = core::Node::default();
            node.metadata.labels = Some([("zone".to_owned(), zone.to_owned())].into());
            keeper.node.send_replace(Some(Arc::new(node)));
            let has_zone =
                |kept: &Remembered| kept.node.as_ref().is_some_and(|node| node.labels["zone"] == zone);
            keeper.until_kept(has_zone).await;
        }
        keeper.end().await;
    }

    #[tokio::test]
    async fn after_a_reboot_the_pods_of_stateful_sets_wait_for_the_api_server() {
        let dir = tempfile::tempdir().unwrap();
        let pod = |name: &str, owner: &str| {
            serde_json::json!({
                "metadata": {
                    "name": name, "namespace": "default", "uid": name,
                    "ownerReferences": [
                        { "apiVersion": "apps/v1", "kind": owner, "name": "o", "uid": "o", "controller": true },
                    ],
                },
                "spec": { "containers": [{ "name": "main", "image": "i" }] },
            })
        };
        let record = serde_json::json!({
            "node": "n1", "at": "2026-01-01T00:00:00Z", "labels": null, "taints": [], "objects": [], "services": null,
            "pods": [pod("db-0", "StatefulSet"), pod("web-1", "ReplicaSet")],
        });
        State::open_in_boot(dir.path(), "first").unwrap().store(PLAIN, &record).unwrap();
        for (boot, stateful_sets, expected) in
            [("first", false, (2, 0)), ("second", false, (1, 1)), ("second", true, (2, 0))]
        {
            let state = Arc::new(State::open_in_boot(dir.path(), boot).unwrap());
            let memory = Memory::open(state, settings(stateful_sets), "n1".to_owned()).await;
            let found = memory.load().await.unwrap();
            assert_eq!((found.count(), found.unsafe_alone.len()), expected, "{boot}, {stateful_sets}");
        }
    }
}
