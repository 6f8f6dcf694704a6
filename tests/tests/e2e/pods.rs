//! Static pods on a real containerd: from a manifest in the folder to a running pod in its cgroup, and
//! changes of manifests and containers.

#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use crate::node::{installed, on_every_containerd};
use beelet_tests::agent::{Agent, Control, Options};
use beelet_tests::cgroup_values::{self, Expected};
use beelet_tests::containerd::Containerd;
use beelet_tests::manifests::{self, CONTROL, PORT};
use beelet_tests::pods::PodView;
use beelet_tests::{guards, require, workdir};
use serde_json::json;

/// An agent on a containerd of its own. The agent is dropped first.
struct Node {
    agent: Agent,
    containerd: Containerd,
}

impl Node {
    fn start(change: impl FnOnce(Options) -> Options) -> Node {
        let containerd = Containerd::start_for_test().unwrap();
        Node::on(containerd, change)
    }

    fn on(containerd: Containerd, change: impl FnOnce(Options) -> Options) -> Node {
        let agent = Agent::start(change(installed(&containerd))).unwrap();
        Node { agent, containerd }
    }

    fn apply(&self, manifest: &serde_json::Value) {
        let name = manifest["metadata"]["name"].as_str().unwrap();
        self.agent.apply(&format!("{name}.yaml"), manifest.to_string()).unwrap();
    }

    /// Waits until `condition` is true for the pod.
    fn wait(&self, name: &str, what: &str, condition: impl Fn(&PodView) -> bool + Send + Sync) -> PodView {
        let what = format!("{name} {what}");
        self.agent.until(&what, |watch| watch.pod(name).filter(|pod| condition(pod)).cloned()).unwrap()
    }

    fn wait_ready(&self, name: &str) -> PodView {
        self.wait(name, "to be ready", PodView::ready)
    }

    fn wait_gone(&self, name: &str) {
        self.agent
            .until(&format!("{name} to be removed"), |watch| watch.pod(name).is_none().then_some(()))
            .unwrap();
    }

    fn control(&self, pod: &PodView) -> Control {
        Control::connect(pod.ip().unwrap(), CONTROL).unwrap()
    }
}

fn id_of(pod: &PodView) -> String {
    pod.container("main").unwrap().container_id.clone().unwrap()
}

#[test]
fn a_pod_of_each_qos_class_runs_in_its_cgroup_with_the_kubelets_values() {
    require!(containerd);
    on_every_containerd(|containerd| {
        let node = Node::on(containerd, |options| options);
        let mib = 1 << 20;
        let cases = [
            (
                "guaranteed",
                ("250m", "64Mi"),
                ("250m", "64Mi"),
                "Guaranteed",
                (256, Some(25_000), Some(64 * mib)),
            ),
            (
                "burstable",
                ("100m", "32Mi"),
                ("500m", "128Mi"),
                "Burstable",
                (102, Some(50_000), Some(128 * mib)),
            ),
            ("besteffort", ("", ""), ("", ""), "BestEffort", (2, None, None)),
        ];
        for (name, requests, limits, ..) in cases {
            node.apply(&manifests::with_resources(manifests::serving(name), requests, limits));
        }
        for (name, _, _, qos, (shares, quota, memory)) in cases {
            let pod = node.wait_ready(name);
            assert_eq!((pod.qos(), pod.phase()), (qos, "Running"), "{name}");
            let path = cgroup_values::pod_path(qos, pod.uid());
            let root = node.containerd.cgroup();
            let rows = cgroup_values::check(root, &path, Expected { shares, quota, memory }).unwrap();
            assert!(rows.iter().all(cgroup_values::Row::ok), "{name}: {rows:?}");
            for controller in ["cpu", "memory", "pids"] {
                let processes = guards::processes_below(&root.folder(controller, &path).unwrap());
                assert!(
                    processes.len() >= 2,
                    "{name}, {controller}: the sandbox's and the container's: {processes:?}"
                );
            }
        }
    });
}

#[test]
fn readiness_follows_the_listener_by_kernel_edges() {
    require!(containerd, bpf);
    let node = Node::start(|options| options);
    node.apply(&manifests::serving("web"));
    let pod = node.wait_ready("web");
    let mut control = node.control(&pod);
    let closed_at = control.send(&format!("close {PORT}")).unwrap();
    let pod = node.wait("web", "to be not ready", |pod| !pod.ready());
    let edge = pod.edge.clone().unwrap();
    assert!(!edge.ready && edge.container == "main", "{edge:?}");
    assert!(edge.kernel_ns >= closed_at && edge.published_ns >= edge.kernel_ns, "{edge:?} {closed_at}");
    let opened_at = control.send(&format!("open {PORT}")).unwrap();
    let pod = node.wait_ready("web");
    let edge = pod.edge.clone().unwrap();
    assert!(edge.ready && edge.kernel_ns >= opened_at, "{edge:?} {opened_at}");
    assert_eq!(pod.restarts(), 0);
}

#[test]
fn without_bpf_readiness_follows_too_by_the_probes_period() {
    require!(containerd);
    let node = Node::start(|options| options.beelet("bpf", "off"));
    let probe = json!({ "tcpSocket": { "port": PORT }, "periodSeconds": 1, "failureThreshold": 1 });
    node.apply(&manifests::with(manifests::serving("web"), "readinessProbe", probe));
    let pod = node.wait_ready("web");
    node.control(&pod).send(&format!("close {PORT}")).unwrap();
    let pod = node.wait("web", "to be not ready", |pod| !pod.ready());
    assert_eq!((pod.edge.clone(), pod.restarts()), (None, 0));
}

#[test]
fn a_container_that_ends_is_started_again() {
    require!(containerd);
    let node = Node::start(|options| options);
    node.apply(&manifests::serving("web"));
    let before = node.wait_ready("web");
    // The connection ends with the program, so the answer is missing.
    let _ = node.control(&before).send("exit 3");
    let after = node.wait("web", "to be restarted and ready", |pod| pod.restarts() == 1 && pod.ready());
    assert_ne!(id_of(&before), id_of(&after));
    let last = after.container("main").unwrap().last_state.clone().unwrap().terminated.unwrap();
    assert_eq!(last.exit_code, 3);
    assert_eq!(before.ip(), after.ip(), "the pod has another sandbox");
}

#[test]
fn restart_policy_never_lets_a_pod_succeed_or_fail() {
    require!(containerd);
    let node = Node::start(|options| options);
    for (name, code) in [("good", "0"), ("bad", "7")] {
        let mut pod = manifests::pod(name, &["/bin/sh", "-c", &format!("exit {code}")]);
        pod["spec"]["restartPolicy"] = json!("Never");
        node.apply(&pod);
    }
    let good = node.wait("good", "to succeed", |pod| pod.phase() == "Succeeded");
    let bad = node.wait("bad", "to fail", |pod| pod.phase() == "Failed");
    assert_eq!((good.restarts(), bad.restarts()), (0, 0));
}

#[test]
fn a_failing_liveness_probe_restarts_its_container() {
    require!(containerd);
    let node = Node::start(|options| options);
    node.apply(&manifests::answering("web"));
    let pod = node.wait_ready("web");
    node.control(&pod).send("health 500").unwrap();
    node.wait("web", "to be restarted", |pod| pod.restarts() == 1 && pod.ready());
}

#[test]
fn a_changed_manifest_replaces_its_pod_and_a_removed_one_stops_it() {
    require!(containerd);
    let node = Node::start(|options| options);
    node.apply(&manifests::serving("web"));
    node.apply(&manifests::serving("bystander"));
    let (before, bystander) = (node.wait_ready("web"), node.wait_ready("bystander"));
    let mut changed = manifests::serving("web");
    changed["metadata"]["labels"] = json!({ "version": "2" });
    node.apply(&changed);
    let after = node.wait("web", "to be replaced", |pod| pod.uid() != before.uid() && pod.ready());
    assert_ne!(id_of(&before), id_of(&after));

    node.agent.remove("web.yaml").unwrap();
    node.wait_gone("web");
    let path = cgroup_values::pod_path("BestEffort", after.uid());
    let dirs = node.containerd.cgroup().folders(&path);
    workdir::wait_for("the removed pod's cgroup to be removed", workdir::PATIENCE, || {
        let left: Vec<_> = dirs.iter().filter(|dir| dir.exists()).collect();
        if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
    })
    .unwrap();
    let untouched = node.wait_ready("bystander");
    assert_eq!((id_of(&untouched), untouched.restarts()), (id_of(&bystander), 0));
}

#[test]
fn a_broken_manifest_is_reported_and_touches_nothing_else() {
    require!(containerd);
    let node = Node::start(|options| options);
    node.apply(&manifests::serving("web"));
    let before = node.wait_ready("web");
    let cases = [
        ("syntax.yaml", "apiVersion: v1\nkind: Pod\nmetadata: [unclosed\n".to_owned()),
        (
            "quantity.yaml",
            manifests::with_resources(manifests::pod("q", &["/bin/true"]), ("abc", ""), ("", "")).to_string(),
        ),
        ("zz-clash.yaml", manifests::serving("web").to_string()),
    ];
    for (file, text) in &cases {
        node.agent.apply(file, text).unwrap();
    }
    for (file, _) in &cases {
        let message = node
            .agent
            .until(&format!("{file} to be rejected"), |watch| {
                watch.rejected.iter().find(|one| one.file.ends_with(file)).map(|one| one.message.clone())
            })
            .unwrap();
        assert!(message.contains(file), "the message lacks the file: {message}");
    }
    // A hidden file and one that is still being written are ignored.
    node.agent.apply(".hidden.yaml", "nonsense: [").unwrap();
    for (file, _) in &cases {
        node.agent.remove(file).unwrap();
    }
    node.agent
        .until("all manifests to be accepted", |watch| watch.rejected.is_empty().then_some(()))
        .unwrap();
    let after = node.wait_ready("web");
    assert_eq!((after.uid(), id_of(&after), after.restarts()), (before.uid(), id_of(&before), 0));
}

#[test]
fn a_missing_image_is_reported_and_its_neighbours_run() {
    require!(containerd);
    let node = Node::start(|options| options);
    let missing =
        manifests::with(manifests::pod("missing", &["/x"]), "image", json!("localhost/beelet/none:1"));
    node.apply(&manifests::with(missing, "imagePullPolicy", json!("Never")));
    node.apply(&manifests::serving("web"));
    node.wait_ready("web");
    let pod = node.wait("missing", "to wait for its image", |pod| {
        let state = pod.container("main").and_then(|container| container.state.clone());
        state.and_then(|state| state.waiting).and_then(|waiting| waiting.reason).as_deref()
            == Some("ErrImageNeverPull")
    });
    assert_eq!(pod.phase(), "Pending");
}

/// Waits until the cgroup holds these values; other tests cover version 2, where the runtime has a formula of
/// its own.
fn wait_values(node: &Node, path: &str, expected: Expected) {
    workdir::wait_for(&format!("the values of {path}"), workdir::PATIENCE, || {
        let mut rows = cgroup_values::check(node.containerd.cgroup(), path, expected)
            .map_err(|error| format!("{error:#}"))?;
        let is_container = path.rsplit('/').next().is_some_and(|name| name.len() == 64);
        rows.retain(|row| row.file != "cpu.weight" || !is_container);
        if rows.iter().all(cgroup_values::Row::ok) { Ok(()) } else { Err(format!("{rows:?}")) }
    })
    .unwrap();
}

#[test]
fn a_pod_is_resized_in_place_at_every_level_of_its_cgroups() {
    require!(containerd);
    on_every_containerd(|containerd| {
        let node = Node::on(containerd, |options| options);
        let sized = |request: &str, limit: (&str, &str)| {
            let pod = manifests::pod("web", &["/bin/testapp", "pause"]);
            manifests::with_resources(pod, (request, "32Mi"), limit)
        };
        node.apply(&sized("100m", ("500m", "64Mi")));
        let old = node.wait("web", "to run", |pod| pod.phase() == "Running");
        let pod = cgroup_values::pod_path("Burstable", old.uid());
        let container = format!("{pod}/{}", id_of(&old).split_once("://").unwrap().1);
        let kubepods = node.containerd.cgroup().folder("memory", "/kubepods").unwrap();
        let limit = ["memory.limit_in_bytes", "memory.max"].map(|file| kubepods.join(file));
        let limit = || limit.iter().find_map(|file| std::fs::read_to_string(file).ok()).unwrap();
        let of_node = limit();
        let mib = 1 << 20;
        let cases = [
            (("100m", ("500m", "64Mi")), (102, 50_000, 64 * mib)),
            (("500m", ("1", "128Mi")), (512, 100_000, 128 * mib)),
            (("200m", ("500m", "48Mi")), (204, 50_000, 48 * mib)),
        ];
        for ((request, limits), (shares, quota, memory)) in cases {
            node.apply(&sized(request, limits));
            let limited = Expected { shares, quota: Some(quota), memory: Some(memory) };
            wait_values(&node, &container, limited);
            wait_values(&node, &pod, limited);
            wait_values(&node, "/kubepods/burstable", Expected { shares, quota: None, memory: None });
            // The limits that all pods share are the node's, independent of the pods' requests.
            assert_eq!(limit(), of_node);
            let now = node.wait("web", "to report the new resources", |pod| {
                let resizing = pod.condition("PodResizeInProgress") || pod.condition("PodResizePending");
                let resources = pod.container("main").and_then(|status| status.resources.clone());
                let cpu = resources.and_then(|resources| Some(resources.requests?.remove("cpu")?.0));
                cpu.as_deref() == Some(request) && !resizing
            });
            assert_eq!(id_of(&now), id_of(&old), "the container was replaced");
            assert_eq!(now.container("main").unwrap().restart_count, 0);
        }
    });
}
