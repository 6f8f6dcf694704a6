//! Each call to the runtime in a pod's life, with each of its faults: the call fails, is slow, hangs, loses
//! its reply, breaks the connection, or fails again and again. The agent must not repeat completed work or
//! leave work undone.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use beelet_tests::cri::{Asked, CHANGES, Call, Held, Op};
use futures::stream::{self, StreamExt as _};
use serde_json::{Value, json};
use tonic::Code;

use super::node::{IMAGE, LOG_MAX, Node, Settings, View, hooked, of_everything, pod, until_file, until_seen};
use super::resize::{make_container_cgroup, sized};

/// Phase of a pod's life in which calls are made.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// The pod starts, with every request to the runtime that a start can have.
    Up,
    /// The pod starts, with a postStart hook.
    Hook,
    /// The pod is removed, with its preStop hooks.
    Down,
    /// A starting agent finds the pod running and its manifest removed.
    Orphan,
    /// The pod's resources change.
    Resize,
    /// The container's log is rotated.
    Rotate,
    /// The runtime publishes events of the pod's containers.
    Stream,
}
use Way::{Down, Hook, Orphan, Resize, Rotate, Stream, Up};

/// Calls, with the phases in which they are made.
const MADE: &[(Op, &[Way])] = &[
    (Op::Version, &[Up]),
    (Op::Status, &[Up]),
    (Op::RunPodSandbox, &[Up]),
    (Op::PodSandboxStatus, &[Up, Orphan]),
    (Op::ListPodSandbox, &[Up, Down, Orphan]),
    (Op::StopPodSandbox, &[Down, Orphan]),
    (Op::RemovePodSandbox, &[Down, Orphan]),
    (Op::ImageStatus, &[Up]),
    (Op::PullImage, &[Up]),
    (Op::CreateContainer, &[Up]),
    (Op::StartContainer, &[Up]),
    (Op::ListContainers, &[Up, Down, Orphan]),
    (Op::ContainerStatus, &[Up, Down, Orphan]),
    (Op::StopContainer, &[Down, Orphan]),
    (Op::RemoveContainer, &[Down, Orphan]),
    (Op::ExecSync, &[Hook, Down]),
    (Op::UpdateContainerResources, &[Resize]),
    (Op::ReopenContainerLog, &[Rotate]),
    (Op::GetContainerEvents, &[Stream]),
];

/// Calls that are not part of a pod's life, with the place of their test.
const ELSEWHERE: &[(Op, &str)] = &[
    (Op::RuntimeConfig, "asked once, before there are pods: an_agent_that_starts_asks_again"),
    (Op::Exec, "made by `beelet exec`, which prints the error"),
    (Op::ListContainerStats, "eviction's: it measures writable layers, and uses its earlier figures"),
    (Op::ListImages, "the image collector's: tests/image_gc.rs"),
    (Op::RemoveImage, "the image collector's: tests/image_gc.rs"),
    (Op::ImageFsInfo, "the image collector's: tests/image_gc.rs"),
];

/// Calls that the agent never makes.
const NEVER: &[(Op, &str)] = &[
    (Op::UpdateRuntimeConfig, "the node has no range of addresses from an API server"),
    (Op::Attach, ""),
    (Op::PortForward, ""),
    (Op::ContainerStats, ""),
    (Op::PodSandboxStats, ""),
    (Op::ListPodSandboxStats, ""),
    (Op::CheckpointContainer, ""),
    (Op::ListMetricDescriptors, ""),
    (Op::ListPodSandboxMetrics, ""),
];

/// Faults of a call.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// The next call fails.
    Fails,
    /// The next call is slow.
    Slow,
    /// The next call hangs until its deadline.
    Hangs,
    /// The next call is done, but its reply is lost.
    LosesReply,
    /// The next call is done, and then all connections break.
    Breaks,
    /// All calls fail, until the agent has retried.
    Persists,
}

const FAULTS: [Fault; 6] =
    [Fault::Fails, Fault::Slow, Fault::Hangs, Fault::LosesReply, Fault::Breaks, Fault::Persists];

/// Returns true for the cases that are not tested.
fn is_left_out(op: Op, way: Way, fault: Fault) -> bool {
    match (op, way, fault) {
        // The agent sets no deadline for pulls: the runtime itself cancels a pull without progress.
        (Op::PullImage, _, Fault::Hangs) => true,
        // A postStart hook has no time limit, as under the kubelet: a hook that hangs holds its pod.
        (Op::ExecSync, Hook, Fault::Hangs) => true,
        _ => false,
    }
}

/// Returns settings with a deadline of a few seconds for calls.
fn settings() -> Settings {
    Settings { request_timeout: Duration::from_secs(3), ..Settings::default() }
}

/// A fault that was injected into the next calls.
struct Trouble {
    op: Op,
    fault: Fault,
    /// Number of the first call that can meet the fault.
    first: usize,
    _held: Option<Held>,
}

impl Trouble {
    fn lay(node: &Node, op: Op, fault: Fault) -> Self {
        Self::lay_after(node, op, fault, 0)
    }

    /// Injects a fault after `well` calls that succeed.
    fn lay_after(node: &Node, op: Op, fault: Fault, well: usize) -> Self {
        let first = node.cri.calls().len();
        let left = AtomicUsize::new(well);
        let due = move |_: &Asked| left.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_err();
        let next = node.cri.on(op).when(due);
        let mut held = None;
        match fault {
            Fault::Fails => next.fail(Code::Unknown, "no space left on device"),
            Fault::Slow => next.after(Duration::from_millis(1500)).proceed(),
            Fault::Hangs => held = Some(next.hold()),
            Fault::LosesReply => next.lose_reply(),
            Fault::Breaks => next.break_connections(),
            Fault::Persists => next.always().fail(Code::Unknown, "no space left on device"),
        }
        Trouble { op, fault, first, _held: held }
    }

    /// Waits until a call has met the fault, and ends a fault that would persist.
    async fn meet(&self, node: &Node) {
        let met = |call: &Call| call.op() == self.op;
        let call = node.cri.wait_for_after("the call that goes wrong", self.first, met).await;
        if self.fault == Fault::Persists {
            // A change of resources that the runtime refuses is tried once: the agent then sets the values
            // itself.
            if self.op != Op::UpdateContainerResources {
                node.cri.wait_for_after("the call to be tried again", call.number + 1, met).await;
            }
            node.cri.heal();
        }
    }

    /// Describes the case, for failed tests.
    fn case(&self, node: &Node) -> String {
        format!("{:?} {:?}:\n{}", self.op, self.fault, node.cri.transcript())
    }
}

/// Returns a pod with every request to the runtime that a start can have.
fn demanding(name: &str) -> Value {
    let mut pod = of_everything(name);
    let volumes = pod["spec"]["volumes"].as_array_mut().unwrap();
    volumes.push(json!({ "name": "art", "image": { "reference": IMAGE } }));
    let [a, b] = [0, 1].map(|n| format!("/spec/containers/{n}"));
    let container = pod.pointer_mut(&a).unwrap();
    container["imagePullPolicy"] = "Always".into();
    container["volumeMounts"] = json!([{ "name": "art", "mountPath": "/art" }]);
    pod.pointer_mut(&b).unwrap()["volumeMounts"] = json!([{
        "name": "scratch", "mountPath": "/scratch", "readOnly": true, "recursiveReadOnly": "IfPossible",
    }]);
    pod
}

async fn up(op: Op, fault: Fault) -> Node {
    let mut node = Node::new(settings());
    node.cri.add_to_registry(IMAGE);
    // This version of the runtime mounts images.
    node.cri.change(|world| world.runtime = ("containerd".to_owned(), "2.1.9".to_owned()));
    node.start().await;
    let trouble = Trouble::lay(&node, op, fault);
    node.apply(&demanding("web"));
    trouble.meet(&node).await;
    let pod = node.until_ready("web").await;
    let case = trouble.case(&node);
    assert_eq!(node.containers("web"), "a/0+ b/0+ init/0- side/0+", "{case}");
    assert_eq!(node.cri.world().sandboxes.len(), 1, "{case}");
    assert!(pod.restarts().values().all(|count| *count == 0), "{case}");
    if fault == Fault::Slow {
        // The agent creates and starts one sandbox and four containers: slow calls are not repeated.
        assert_eq!(node.done(&CHANGES), 9, "{case}");
    }
    node
}

/// Only the hook's container is retried.
async fn hook(op: Op, fault: Fault) -> Node {
    let node = Node::with_settings(settings(), &[]).await;
    let mut pod = hooked("web");
    pod["spec"]["containers"][0]["lifecycle"].as_object_mut().unwrap().remove("preStop");
    let trouble = Trouble::lay(&node, op, fault);
    node.apply(&pod);
    trouble.meet(&node).await;
    let (restarts, expected) = match fault {
        Fault::Slow => (0, "a/0+ b/0+ init/0- side/0+"),
        Fault::Persists => (2, "a/1- a/2+ b/0+ init/0- side/0+"),
        _ => (1, "a/0- a/1+ b/0+ init/0- side/0+"),
    };
    let again = |pod: &View| pod.ready() && pod.restarts()["a"] == restarts;
    node.until_pod("web", "to run with its hook done", again).await;
    let as_expected = |world: &beelet_tests::cri::World| super::node::containers(world, "web") == expected;
    node.cri.wait_until(&format!("{expected}, {op:?} {fault:?}"), as_expected).await;
    node
}

async fn down(op: Op, fault: Fault) -> Node {
    let node = Node::with_settings(settings(), &[hooked("web")]).await;
    let pod = node.until_ready("web").await;
    let trouble = Trouble::lay(&node, op, fault);
    node.remove("web");
    trouble.meet(&node).await;
    node.until_nothing_is_left(&pod).await;
    node
}

async fn orphan(op: Op, fault: Fault) -> Node {
    let mut node = Node::with_settings(settings(), &[of_everything("web")]).await;
    let pod = node.until_ready("web").await;
    node.kill().await;
    node.remove("web");
    // Before workers start, the device manager lists all containers once.
    let trouble = Trouble::lay_after(&node, op, fault, usize::from(op == Op::ListContainers));
    node.start().await;
    trouble.meet(&node).await;
    node.until_nothing_is_left(&pod).await;
    node
}

async fn resize(op: Op, fault: Fault) -> Node {
    let node = Node::with_settings(settings(), &[sized("100m", "128Mi")]).await;
    let pod = node.until_ready("web").await;
    let container = make_container_cgroup(&node, &pod);
    until_file(container.join("cpu.shares"), "102").await;
    let trouble = Trouble::lay(&node, op, fault);
    node.apply(&sized("500m", "256Mi"));
    trouble.meet(&node).await;
    until_file(container.join("cpu.shares"), "512").await;
    let memory = PathBuf::from(container.to_string_lossy().replace("cgroup/cpu", "cgroup/memory"));
    until_file(memory.join("memory.limit_in_bytes"), &(256 << 20).to_string()).await;
    let now = node.until_ready("web").await;
    assert_eq!(
        (now.uid(), node.containers("web").as_str()),
        (pod.uid(), "main/0+"),
        "{}",
        trouble.case(&node)
    );
    node
}

/// Returns the sizes of a log and of its rotated files.
fn sizes(log: &Path) -> (Option<u64>, Vec<u64>) {
    let size = |path: &Path| std::fs::metadata(path).ok().map(|metadata| metadata.len());
    let name = format!("{}.", log.file_name().unwrap().to_string_lossy());
    let beside = std::fs::read_dir(log.parent().unwrap()).unwrap().flatten();
    let rotated = beside.filter(|entry| entry.file_name().to_string_lossy().starts_with(&name));
    (size(log), rotated.filter_map(|entry| size(&entry.path())).collect())
}

/// Waits until a log and its rotated files have these sizes.
async fn until_log(log: &Path, what: &str, wanted: (Option<u64>, Vec<u64>)) {
    until_seen(&format!("{what}: {wanted:?}"), || {
        let found = sizes(log);
        if found == wanted { Ok(()) } else { Err(format!("{found:?}")) }
    })
    .await;
}

async fn rotate(op: Op, fault: Fault) -> Node {
    let node = Node::with_settings(settings(), &[pod("web")]).await;
    node.until_ready("web").await;
    let log = PathBuf::from(node.cri.container("web-n1", "main").unwrap().log_path);
    let trouble = Trouble::lay(&node, op, fault);
    std::fs::write(&log, vec![b'x'; LOG_MAX as usize + 1]).unwrap();
    trouble.meet(&node).await;
    // The runtime writes to a new log, and the container's earlier output is in the renamed one.
    until_log(&log, &format!("{op:?} {fault:?}"), (Some(0), vec![LOG_MAX + 1])).await;
    node
}

#[tokio::test]
async fn a_log_that_the_runtime_does_not_reopen_gets_its_name_back() {
    let node = Node::with_settings(settings(), &[pod("web")]).await;
    node.until_ready("web").await;
    let log = PathBuf::from(node.cri.container("web-n1", "main").unwrap().log_path);
    node.cri.on(Op::ReopenContainerLog).always().fail(Code::Unknown, "too many open files");
    std::fs::write(&log, vec![b'x'; LOG_MAX as usize + 1]).unwrap();
    node.cri.wait_for("the runtime to refuse", |call| call.op() == Op::ReopenContainerLog).await;
    until_log(&log, "restored to its name", (Some(LOG_MAX + 1), Vec::new())).await;
}

/// Events from the runtime are handled, also after their stream has broken.
async fn stream(op: Op, fault: Fault) -> Node {
    let mut node = Node::new(settings());
    node.cri.change(|world| world.streams_events = true);
    node.apply(&pod("web"));
    let trouble = Trouble::lay(&node, op, fault);
    node.start().await;
    trouble.meet(&node).await;
    node.until_ready("web").await;
    if !matches!(fault, Fault::Slow | Fault::Hangs) {
        let well = |call: &Call| call.op() == op && call.succeeded();
        node.cri.wait_for_after("another subscription", trouble.first + 1, well).await;
    }
    node.cri.exit(&node.cri.container("web-n1", "main").unwrap().id, 1);
    let again = |pod: &View| pod.ready() && pod.restarts()["main"] == 1;
    node.until_pod("web", "to run again", again).await;
    assert_eq!(node.containers("web"), "main/0- main/1+", "{}", trouble.case(&node));
    node
}

/// Runs one case, and checks that the agent made no call of [`NEVER`].
async fn check(op: Op, way: Way, fault: Fault) {
    let node = match way {
        Up => up(op, fault).await,
        Hook => hook(op, fault).await,
        Down => down(op, fault).await,
        Orphan => orphan(op, fault).await,
        Resize => resize(op, fault).await,
        Rotate => rotate(op, fault).await,
        Stream => stream(op, fault).await,
    };
    for call in node.cri.calls() {
        assert!(!NEVER.iter().any(|(op, _)| *op == call.op()), "{way:?} makes {:?}", call.op());
    }
}

async fn check_all(ways: &[Way]) {
    let cases = MADE.iter().flat_map(|(op, of_op)| of_op.iter().map(|way| (*op, *way)));
    let cases = cases.filter(|(_, way)| ways.contains(way));
    let cases = cases.flat_map(|(op, way)| FAULTS.map(|fault| (op, way, fault)));
    let cases = cases.filter(|(op, way, fault)| !is_left_out(*op, *way, *fault));
    stream::iter(cases)
        .map(|(op, way, fault)| check(op, way, fault))
        .buffer_unordered(16)
        .collect::<()>()
        .await;
}

#[test]
fn every_call_is_tested_here_or_elsewhere_or_never_made() {
    for op in Op::ALL {
        let made = MADE.iter().filter(|(made, ways)| made == op && !ways.is_empty()).count();
        let others = ELSEWHERE.iter().chain(NEVER).filter(|(other, _)| other == op).count();
        assert_eq!(made + others, 1, "{op:?}");
    }
}

#[tokio::test]
async fn an_agent_that_starts_asks_again() {
    let mut node = Node::new(settings());
    node.apply(&pod("web"));
    for op in [Op::Version, Op::RuntimeConfig] {
        let first = node.cri.calls().len();
        node.cri.on(op).fail(Code::Unavailable, "not ready");
        node.start().await;
        // The agent accepts that the runtime has no RuntimeConfig.
        let asked = node.cri.calls().into_iter().skip(first).filter(|call| call.op() == op);
        assert_eq!(asked.count(), 2, "{op:?}");
        node.until_ready("web").await;
        node.kill().await;
    }
}

#[tokio::test]
async fn a_pod_starts_despite_every_fault() {
    check_all(&[Up, Hook]).await;
}

#[tokio::test]
async fn a_pod_is_removed_despite_every_fault() {
    check_all(&[Down]).await;
}

#[tokio::test]
async fn a_pod_without_a_manifest_is_removed_despite_every_fault() {
    check_all(&[Orphan]).await;
}

#[tokio::test]
async fn a_running_pod_is_kept_despite_every_fault() {
    check_all(&[Resize, Rotate, Stream]).await;
}
