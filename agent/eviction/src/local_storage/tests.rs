use beelet_model::disk::WritableFile;
use serde_json::{Value, json};

use super::*;

/// A node's folders and pods, without a runtime.
struct Node {
    storage: LocalStorage,
    table: watch::Sender<Arc<PodTable>>,
    requests: mpsc::Receiver<Request>,
    rounds: Rounds,
    dir: tempfile::TempDir,
}

impl Node {
    /// Creates a node on which each pod gets the minimum time per turn.
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let table = watch::Sender::new(Arc::new(PodTable::default()));
        let (sender, requests) = mpsc::channel(64);
        let storage = LocalStorage {
            table: table.subscribe(),
            runtime: Runtime::new("unix:///none.sock", Duration::from_secs(1)).unwrap(),
            pods_dir: dir.path().join("pods"),
            pod_logs_dir: dir.path().join("logs"),
            period: Duration::from_secs(60),
            enforce: true,
            usages: DiskUsages::default(),
            requests: sender,
            metrics: Metrics::default(),
        };
        let rounds = Rounds { turn: (Duration::ZERO, Duration::ZERO), ..Rounds::default() };
        Self { storage, table, requests, rounds, dir }
    }

    /// Adds a pod with an emptyDir of this limit; returns the folder.
    fn add(&self, name: &str, limit: Option<&str>, spec: &Value) -> PathBuf {
        let volume = json!({ "name": "v", "emptyDir": { "sizeLimit": limit } });
        let mut all = json!({ "containers": [], "volumes": [volume] });
        for (field, value) in spec.as_object().into_iter().flatten() {
            all[field] = value.clone();
        }
        let pod = json!({ "metadata": { "name": name, "uid": name }, "spec": all, "status": { "phase": "Running" } });
        self.change(PodEntry::of(serde_json::from_value(pod).unwrap()));
        let folder = self.dir.path().join("pods").join(name).join("volumes/v");
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    fn change(&self, entry: PodEntry) {
        self.table.send_modify(|table| {
            let mut pods = table.pods.clone();
            pods.insert(PodName::of(&entry.pod), Arc::new(entry));
            *table = Arc::new(PodTable { pods, rejected: Arc::clone(&table.rejected) });
        });
    }

    async fn round(&mut self) {
        self.storage.round(&mut self.rounds, &mut self.storage.usages.asked()).await;
    }

    /// Returns the pods that were evicted so far.
    fn asked_to_go(&mut self) -> Vec<String> {
        let mut told = Vec::new();
        while let Ok(Request::Fail { uid, .. }) = self.requests.try_recv() {
            told.push(uid);
        }
        told
    }
}

fn write(folder: &Path, files: usize, kib: usize) {
    for i in 0..files {
        std::fs::create_dir(folder.join(i.to_string())).unwrap();
        std::fs::write(folder.join(i.to_string()).join("file"), vec![1; kib << 10]).unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_pod_with_many_files_does_not_delay_the_enforcement_of_other_limits() {
    let mut node = Node::new();
    write(&node.add("a-many", None, &json!({})), 500, 0);
    write(&node.add("b-limited", Some("64Ki"), &json!({})), 1, 100);
    for _ in 0..5 {
        node.round().await;
    }
    assert_eq!(node.asked_to_go(), ["b-limited"]);
    assert!(node.rounds.under_way.contains_key("a-many"), "the measurement has ended");
    while !node.rounds.under_way.is_empty() {
        node.round().await;
    }
    let since = node.rounds.measured["a-many"].0;
    assert!(node.storage.usages.is_measured("a-many", since));
    assert_eq!(node.storage.usages.of("a-many", None).inodes, 1001);
}

#[tokio::test(start_paused = true)]
async fn a_pod_above_its_limit_is_evicted_once_and_before_its_measurement_ends() {
    let mut node = Node::new();
    write(&node.add("a", Some("64Ki"), &json!({})), 100, 8);
    while node.rounds.above.is_empty() {
        node.round().await;
    }
    assert!(node.rounds.under_way.contains_key("a"), "the measurement has ended");
    while !node.rounds.under_way.is_empty() {
        node.round().await;
    }
    assert_eq!(node.asked_to_go(), ["a"]);
}

#[tokio::test(start_paused = true)]
async fn a_pod_with_files_below_too_many_folders_counts_as_above_its_limit() {
    let mut node = Node::new();
    let tops = [("a-limited", Some("1Gi")), ("b-free", None)].map(|(name, limit)| {
        let top = node.add(name, limit, &json!({}));
        drop(beelet_testing::folders::make_deep(&top, 20_000));
        top
    });
    node.rounds.turn = (Duration::from_mins(1), Duration::from_mins(1));
    while node.rounds.measured.len() < 2 {
        node.round().await;
    }
    let mut ended = Vec::new();
    while let Ok(Request::Fail { uid, message, .. }) = node.requests.try_recv() {
        ended.push((uid, message));
    }
    let [(uid, message)] = ended.as_slice() else { panic!("{ended:?}") };
    assert!(uid == "a-limited" && message.contains("folders too deep to be measured"), "{message}");
    assert!(node.storage.usages.of("b-free", None).hides_disk, "the pod is evicted first if the disk is low");
    assert_eq!(node.rounds.deep.len(), 2);
    for top in tops {
        beelet_base::walk::remove_folder(&top).unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn files_that_are_mounted_into_containers_count_for_the_pod() {
    let container =
        |name: &str| json!({"name": name, "resources": {"limits": {"ephemeral-storage": "64Ki"}}});
    for kind in WritableFile::ALL {
        let mut node = Node::new();
        let (limited, free) =
            (json!({"containers": [container("c")]}), json!({"containers": [{"name": "c"}]}));
        for (name, spec) in [("limited", limited), ("free", free)] {
            let volumes = node.add(name, None, &spec);
            let place = volumes.parent().unwrap().parent().unwrap().join(kind.place("c"));
            let file = if kind == WritableFile::Hosts { place } else { place.join("3") };
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, vec![1; 100 << 10]).unwrap();
        }
        while node.rounds.measured.len() < 2 {
            node.round().await;
        }
        assert_eq!(node.asked_to_go(), ["limited"], "{kind:?}");
        let used = node.storage.usages.of("free", None);
        assert!(used.files_bytes >= 100 << 10 && used.inodes >= 2, "{used:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_writable_layer_counts_once_the_runtime_has_measured_it_again() {
    let known = |stamps: [(&str, i64); 2]| {
        let layer = |stamp| Layer { taken: Taken { bytes: 1, inodes: 1 }, stamp };
        stamps.map(|(id, stamp)| (id.to_owned(), layer(stamp))).into()
    };
    let (mut layers, since) = (Layers::default(), Some(Instant::now()));
    assert!(layers.is_due(None, false));
    layers.update(Instant::now(), None, known([("a", 70), ("b", 0)]));
    assert!(layers.is_new("a", None) && !layers.is_due(None, false), "no request waits for it");
    tokio::time::sleep(LAYERS_AGAIN).await;
    let asked = Some(Instant::now());
    assert!(layers.is_due(asked, false) && !layers.is_new("a", asked));
    let are_new = |layers: &Layers| ["a", "b", "none"].map(|id| layers.is_new(id, asked));
    layers.update(Instant::now(), asked, known([("a", 70), ("b", 0)]));
    assert_eq!(are_new(&layers), [false, false, true], "an unlisted container has no layer");
    assert!(!layers.is_due(asked, true));
    tokio::time::sleep(LAYERS_AGAIN).await;
    assert!(layers.is_due(asked, true) && !layers.is_due(asked, false));
    // A clock that was set back has no effect.
    layers.update(Instant::now(), asked, known([("a", 60), ("b", 0)]));
    assert_eq!(are_new(&layers), [true, false, true], "b was never measured");
    layers.update(Instant::now(), asked, known([("a", 60), ("b", 61)]));
    assert_eq!(are_new(&layers), [true, true, true]);
    assert!(!layers.is_new("a", since), "the stamps belong to another request");
}

#[tokio::test(start_paused = true)]
async fn terminating_and_critical_pods_are_not_evicted() {
    let mut node = Node::new();
    write(&node.add("ending", Some("64Ki"), &json!({})), 1, 100);
    let critical = node.add("critical", Some("64Ki"), &json!({ "priority": 2_000_000_000 }));
    write(&critical, 1, 100);
    let name = PodName { namespace: "default".to_owned(), name: "ending".to_owned() };
    let entry = Arc::clone(&node.table.borrow().pods[&name]);
    node.change(PodEntry { ending: true, ..(*entry).clone() });
    for _ in 0..10 {
        node.round().await;
        tokio::time::sleep(LIMITED_PERIOD / 2).await;
    }
    assert_eq!(node.asked_to_go(), Vec::<String>::new());
    assert!(
        node.storage.usages.of("ending", None).volumes_bytes >= 100 << 10,
        "the pod's usage will become free"
    );
    // The pod is reported once, until its usage has been below the limit.
    assert_eq!(node.rounds.above.iter().collect::<Vec<_>>(), ["critical"]);
    std::fs::remove_file(critical.join("0/file")).unwrap();
    for _ in 0..10 {
        tokio::time::sleep(LIMITED_PERIOD).await;
        node.round().await;
    }
    assert!(node.rounds.above.is_empty());
}

#[tokio::test(start_paused = true)]
async fn requested_measurements_start_again_at_once() {
    let mut node = Node::new();
    let folder = node.add("a", None, &json!({}));
    let usages = node.storage.usages.clone();
    let has_ended = async |node: &mut Node, since| {
        for _ in 0..100 {
            node.round().await;
        }
        usages.is_measured("a", since)
    };
    assert!(has_ended(&mut node, Instant::now()).await);
    write(&folder, 1, 100);
    tokio::time::sleep(Duration::from_millis(1)).await;
    let since = Instant::now();
    assert!(!has_ended(&mut node, since).await, "the measurement is not due");
    node.storage.usages.ask(since);
    assert!(has_ended(&mut node, since).await);
    assert!(node.storage.usages.of("a", Some(since)).volumes_bytes >= 100 << 10);
}
