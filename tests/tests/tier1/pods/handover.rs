//! Tests of the adoption of a kubelet's pods: the sandboxes and containers have a kubelet's labels and
//! annotations, as `pkg/kubelet/kuberuntime/labels.go` writes them.

use std::collections::HashMap;
use std::sync::Arc;

use beelet_model::desired::Desired;
use beelet_model::labels::{
    ANNOTATION_HASH, ANNOTATION_SOURCE, CONTAINER_HASH, CONTAINER_NAME, MANAGED_BY, MANIFEST_HASH, POD_NAME,
    POD_NAMESPACE, POD_UID, RESTART_COUNT,
};
use beelet_policy::handover::container_hash_of;
use beelet_proto::cri;
use beelet_tests::cri::{Asked, CHANGES, Container, FakeCri, Op, Sandbox};
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::assigned::{UID, assigned, desired};
use super::node::{IMAGE, Node, Settings, pod};

/// UID of a static pod, as a kubelet derives it.
const STATIC_UID: &str = "0f1e2d3c4b5a69788796a5b4c3d2e1f0";

fn adopting() -> Settings {
    Settings { configure: |config| config.beelet.adopt_kubelet_pods = true, ..Settings::default() }
}

/// A pod as a kubelet has started it.
struct Kubelets<'a> {
    uid: &'a str,
    name: &'a str,
    source: &'a str,
    /// Age of the sandbox, in nanoseconds.
    age: i64,
}

impl Kubelets<'_> {
    fn labels(&self) -> HashMap<String, String> {
        let all = [(POD_UID, self.uid), (POD_NAME, self.name), (POD_NAMESPACE, "default")];
        all.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
    }

    /// Adds a ready sandbox.
    fn sandbox(&self, cri: &FakeCri) -> String {
        let annotations = [
            (ANNOTATION_SOURCE, self.source),
            (ANNOTATION_HASH, self.uid),
            ("kubernetes.io/config.seen", "2026-01-01T00:00:00Z"),
        ];
        let config = cri::PodSandboxConfig {
            metadata: Some(cri::PodSandboxMetadata {
                name: self.name.to_owned(),
                namespace: "default".to_owned(),
                uid: self.uid.to_owned(),
                attempt: 0,
            }),
            labels: self.labels(),
            annotations: annotations.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
            ..cri::PodSandboxConfig::default()
        };
        let id = format!("{}-sandbox", self.name);
        let sandbox = Sandbox {
            id: id.clone(),
            config,
            state: cri::PodSandboxState::SandboxReady,
            created_at: i64::try_from(Timestamp::now().as_nanosecond()).unwrap() - self.age,
            ip: "10.9.0.7".to_owned(),
            info: json!({}),
            runtime_handler: String::new(),
        };
        cri.change(|world| drop(world.sandboxes.insert(id.clone(), sandbox)));
        id
    }

    /// Adds a running container; with an exit code, an ended one.
    fn container(&self, cri: &FakeCri, name: &str, attempt: u32, exit: Option<i32>) -> String {
        let mut labels = self.labels();
        labels.insert(CONTAINER_NAME.to_owned(), name.to_owned());
        let annotations = [
            (CONTAINER_HASH, container_hash_of(name, IMAGE)),
            (RESTART_COUNT, attempt.to_string()),
            ("io.kubernetes.container.terminationMessagePath", "/dev/termination-log".to_owned()),
        ];
        let config = cri::ContainerConfig {
            metadata: Some(cri::ContainerMetadata { name: name.to_owned(), attempt }),
            labels,
            annotations: annotations.map(|(key, value)| (key.to_owned(), value)).into(),
            log_path: format!("{name}/{attempt}.log"),
            ..cri::ContainerConfig::default()
        };
        let id = format!("{}-{name}-{attempt}", self.name);
        let mut container = Container::running(id.clone(), format!("{}-sandbox", self.name), config);
        if let Some(code) = exit {
            container.state = cri::ContainerState::ContainerExited;
            (container.exit_code, container.finished_at) = (code, 2);
        }
        cri.change(|world| drop(world.containers.insert(id.clone(), container)));
        id
    }
}

/// The pod of the API server: an init container, a postStart hook, and a readiness probe that the fake
/// runtime's command fails.
fn of_api() -> Value {
    let mut pod = assigned(UID);
    let main = &mut pod["spec"]["containers"][0];
    main["readinessProbe"] = json!({"exec": {"command": ["unready"]}, "periodSeconds": 3600});
    main["lifecycle"] = json!({"postStart": {"exec": {"command": ["hook"]}}});
    pod["spec"]["initContainers"] = json!([{"name": "init", "image": IMAGE}]);
    let status = |name: &str, id: &str, count: i32, state: Value| {
        json!({"name": name, "image": IMAGE, "imageID": "", "ready": true, "started": true, "restartCount": count,
            "containerID": format!("containerd://{id}"), "state": state})
    };
    let started = json!({"running": {"startedAt": "2026-01-01T00:00:00Z"}});
    let done = json!({"terminated": {"exitCode": 0, "reason": "Completed"}});
    pod["status"] = json!({
        "phase": "Running", "startTime": "2026-01-01T00:00:00Z",
        "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:01Z"}],
        "initContainerStatuses": [status("init", "api-n1-init-0", 0, done)],
        "containerStatuses": [status("main", "api-n1-main-3", 3, started)],
    });
    pod
}

/// Creates a node on which a kubelet has started the API server's pod. The agent doesn't run yet.
fn node_after_kubelet(settings: Settings) -> (Node, watch::Sender<Arc<Desired>>) {
    let (source, receiver) = watch::channel(desired(&[of_api()]));
    let mut node = Node::new(settings);
    node.sources.push(receiver);
    node.cri.change(|world| {
        world.exec_codes.insert("unready".to_owned(), 1);
    });
    let pod = Kubelets { uid: UID, name: "api-n1", source: "api", age: 0 };
    pod.sandbox(&node.cri);
    pod.container(&node.cri, "init", 0, Some(0));
    pod.container(&node.cri, "main", 2, Some(1));
    pod.container(&node.cri, "main", 3, None);
    (node, source)
}

const RUNNING: &str = "init/0- main/2- main/3+";

#[tokio::test]
async fn a_kubelets_pod_runs_on_and_is_ready_from_the_first_status_on() {
    let (mut node, _source) = node_after_kubelet(adopting());
    node.start().await;
    let first = node.until_pod("api", "to be known", |_| true).await;
    assert!(first.ready(), "the pod's readiness flipped");
    node.until_relisted().await;
    let pod = node.until_ready("api").await;
    assert_eq!((pod.uid().as_str(), pod.restarts()["main"]), (UID, 3));
    let status = pod.0.pod.status.clone().unwrap();
    let ready = status.conditions.iter().flatten().find(|condition| condition.type_ == "Ready").unwrap();
    let since = ready.last_transition_time.as_ref().unwrap().0;
    assert_eq!(since, "2026-01-01T00:00:01Z".parse().unwrap(), "the condition was never false");
    assert_eq!(node.done(&CHANGES), 0, "{}", node.cri.transcript());
    let is_hook = |asked: &Asked| format!("{asked:?}").contains("\"hook\"");
    assert!(!node.cri.calls().iter().any(|call| is_hook(&call.asked)), "the hook ran again");
    assert_eq!(node.containers("api"), RUNNING);
    assert!(node.events().iter().any(|event| event.starts_with("PodsAdopted: Took over 1 pods")));
    // A container that ends is restarted in the kubelet's sandbox, with the agent's label and the next count.
    node.cri.exit("api-n1-main-3", 1);
    node.until_pod("api", "to run again", |pod| pod.restarts()["main"] == 4).await;
    let made = node.cri.container("api-n1", "main").unwrap();
    assert_eq!((made.attempt(), made.sandbox_id.as_str()), (4, "api-n1-sandbox"));
    assert!(made.config.labels.contains_key(MANAGED_BY));
    assert_eq!(made.config.annotations[CONTAINER_HASH], container_hash_of("main", IMAGE));
    assert_eq!(node.done(&[Op::RunPodSandbox]), 0);
}

#[tokio::test]
async fn adopted_pods_are_the_agents_after_a_kill_at_any_moment_and_without_a_new_request() {
    // The agent is killed at each of the first calls of the start that adopts.
    for calls in 0..12 {
        let (mut node, _source) = node_after_kubelet(adopting());
        let held = {
            let counter = Arc::new(std::sync::atomic::AtomicUsize::new(0));
            let next = node.cri.on_any().always();
            let counts = |asked: &Asked| asked.op() != Op::GetContainerEvents;
            next.when(move |asked| {
                counts(asked) && counter.fetch_add(1, std::sync::atomic::Ordering::SeqCst) >= calls
            })
            .hold()
        };
        node.launch();
        held.reached().await;
        node.kill().await;
        node.cri.until_idle().await;
        node.cri.heal();
        drop(held);
        node.start().await;
        node.until_ready("api").await;
        node.kill().await;
        // The pod stays adopted without the request.
        node.settings = Settings::default();
        node.start().await;
        node.until_ready("api").await;
        node.until_relisted().await;
        assert_eq!(node.containers("api"), RUNNING, "killed at call {calls}");
        assert_eq!(node.done(&CHANGES), 0, "killed at call {calls}: {}", node.cri.transcript());
    }
}

#[tokio::test]
async fn without_a_request_a_kubelets_pod_is_never_touched() {
    let (mut node, _source) = node_after_kubelet(Settings::default());
    node.search_kubelet = true;
    // The kubelet's static pod has another UID than the agent derives.
    let kubelets = Kubelets { uid: STATIC_UID, name: "web-n1", source: "file", age: 0 };
    kubelets.sandbox(&node.cri);
    kubelets.container(&node.cri, "main", 1, None);
    node.apply(&pod("web"));
    // Of the manifests, only this pod is new.
    node.apply(&pod("new"));
    node.start().await;
    node.until_ready("new").await;
    node.until_relisted().await;
    assert_eq!(node.done(&[Op::RunPodSandbox]), 1, "{}", node.cri.transcript());
    assert_eq!((node.containers("api"), node.containers("web").as_str()), (RUNNING.to_owned(), "main/1+"));
    let touched = |asked: &Asked| format!("{asked:?}").contains("api-n1-");
    assert!(!node.cri.calls().iter().any(|call| touched(&call.asked)), "{}", node.cri.transcript());
}

#[tokio::test]
async fn an_adopted_pod_that_is_deleted_ends_and_leaves_nothing_behind() {
    let (mut node, source) = node_after_kubelet(adopting());
    node.start().await;
    let pod = node.until_ready("api").await;
    let mut deleted = of_api();
    deleted["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    deleted["metadata"]["deletionGracePeriodSeconds"] = json!(3);
    source.send_replace(desired(&[deleted]));
    node.until_pod("api", "to have released everything", |pod| pod.0.cleared).await;
    source.send_replace(desired(&[]));
    node.until_nothing_is_left(&pod).await;
}

#[tokio::test]
async fn a_static_pod_keeps_the_kubelets_uid_and_hash_while_its_manifest_is_unchanged() {
    let mut node = Node::new(adopting());
    node.apply(&pod("web"));
    let kubelets = Kubelets { uid: STATIC_UID, name: "web-n1", source: "file", age: 0 };
    kubelets.sandbox(&node.cri);
    kubelets.container(&node.cri, "main", 1, None);
    node.start().await;
    let first = node.until_ready("web").await;
    let annotations = first.0.pod.metadata.annotations.clone().unwrap();
    assert_eq!((first.uid().as_str(), annotations[ANNOTATION_HASH].as_str()), (STATIC_UID, STATIC_UID));
    assert_eq!(first.restarts()["main"], 1);
    node.until_relisted().await;
    // After a restart the record identifies the pod, even if the file looks newer.
    node.kill().await;
    node.apply(&pod("web"));
    node.settings = Settings::default();
    node.start().await;
    let again = node.until_ready("web").await;
    assert_eq!(again.uid(), STATIC_UID);
    assert_eq!(again.0.pod.metadata.annotations.clone().unwrap()[MANIFEST_HASH], annotations[MANIFEST_HASH]);
    node.until_relisted().await;
    assert_eq!(node.done(&CHANGES), 0, "{}", node.cri.transcript());
    // Another manifest is another pod.
    let mut changed = pod("web");
    changed["metadata"]["labels"] = json!({"version": "2"});
    node.apply(&changed);
    node.until_pod("web", "to be another pod", |pod| pod.uid() != STATIC_UID && pod.ready()).await;
    assert_eq!(node.containers("web"), "main/0+");
}

#[tokio::test]
async fn a_static_pod_whose_manifest_changed_meanwhile_is_replaced() {
    let mut node = Node::new(adopting());
    let kubelets = Kubelets { uid: STATIC_UID, name: "web-n1", source: "file", age: 1_000_000_000 };
    kubelets.sandbox(&node.cri);
    kubelets.container(&node.cri, "main", 1, None);
    // The file is newer than the sandbox.
    node.apply(&pod("web"));
    node.start().await;
    node.until_pod("web", "to be another pod", |pod| pod.uid() != STATIC_UID && pod.ready()).await;
    assert_eq!(node.containers("web"), "main/0+");
}

#[tokio::test]
async fn a_static_pod_whose_manifest_becomes_valid_later_is_replaced() {
    let mut node = Node::new(adopting());
    // The file is older than the sandbox.
    node.apply_text("web", "{");
    let kubelets = Kubelets { uid: STATIC_UID, name: "web-n1", source: "file", age: 0 };
    kubelets.sandbox(&node.cri);
    kubelets.container(&node.cri, "main", 1, None);
    node.start().await;
    node.until_relisted().await;
    assert_eq!(node.containers("web"), "main/1+");
    node.apply(&pod("web"));
    node.until_pod("web", "to be another pod", |pod| pod.uid() != STATIC_UID && pod.ready()).await;
    assert_eq!(node.containers("web"), "main/0+");
}

#[tokio::test]
async fn an_adopted_pod_without_any_source_that_names_it_is_stopped_and_others_stay() {
    let (mut node, source) = node_after_kubelet(adopting());
    // The kubelet's pods of a URL are not the agent's, and those of an unreadable manifest are left alone.
    Kubelets { uid: "of-url", name: "url-n1", source: "http", age: 0 }.sandbox(&node.cri);
    let unread = Kubelets { uid: STATIC_UID, name: "web-n1", source: "file", age: 0 };
    unread.sandbox(&node.cri);
    node.apply_text("web", "{");
    source.send_replace(desired(&[]));
    node.start().await;
    node.cri.wait_until("the pod's removal", |world| !world.sandboxes.contains_key("api-n1-sandbox")).await;
    node.until_relisted().await;
    let world = node.cri.world();
    assert!(world.sandboxes.contains_key("url-n1-sandbox") && world.sandboxes.contains_key("web-n1-sandbox"));
    assert_eq!(node.done(&[Op::StopPodSandbox]), 1, "{}", node.cri.transcript());
}
