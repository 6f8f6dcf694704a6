//! `cargo xtask demo --cluster`: etcd, a kube-apiserver, and beelet as the cluster's node.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use beelet_tests::agent::{Control, monotonic_ns};
use beelet_tests::cluster::{Cluster, condition};
use beelet_tests::containerd::Containerd;
use beelet_tests::manifests::{self, CONTROL, PORT};
use beelet_tests::pods::PodView;
use beelet_tests::{requires, workdir};
use serde_json::{Value, json};

use super::{Demo, heading};
use xtask::progress::Step;

/// Name of the node.
const NODE: &str = "demo";
/// Name of the pod.
const POD: &str = "orders";
/// Number of times that the listener is closed and opened again.
const ROUNDS: usize = 5;
/// Downtime of the API server.
const AWAY: Duration = Duration::from_secs(20);

/// Starts the control plane.
pub(super) fn start(containerd: &Containerd) -> Result<Cluster> {
    let step = Step::start("start etcd and an API server");
    let cluster = Cluster::start(containerd.dir())?;
    let version = cluster.get("/version")?;
    step.done(&format!("Kubernetes {}", version["gitVersion"].as_str().unwrap_or_default()));
    Ok(cluster)
}

/// Shows the cluster part of the demo.
pub(super) fn show(demo: &mut Demo) -> Result<()> {
    let mut cluster = demo.cluster.take().context("the cluster has not been started")?;
    let shown = show_all(demo, &mut cluster);
    demo.cluster = Some(cluster);
    shown
}

fn show_all(demo: &mut Demo, cluster: &mut Cluster) -> Result<()> {
    heading("beelet registers its Node, under the Node authorizer and NodeRestriction");
    let ready = |node: &Value| condition(node, "Ready").then(|| node.clone());
    let node = cluster.until("the Node to be ready", &format!("/api/v1/nodes/{NODE}"), ready)?;
    let info = &node["status"]["nodeInfo"];
    println!(
        "  {NODE} is Ready: kubelet {}, runtime {}",
        info["kubeletVersion"], info["containerRuntimeVersion"]
    );
    demo.check("the Node is registered and Ready", true);

    let pod = apply(demo, cluster)?;
    let mut control = Control::connect(pod["status"]["podIP"].as_str().unwrap_or_default(), CONTROL)?;
    listener(demo, cluster, &mut control)?;
    away(demo, cluster, &mut control)?;
    delete(demo, cluster)?;
    asked(demo, cluster)
}

/// Runs kubectl if it is installed.
fn kubectl(cluster: &Cluster, arguments: &[&str]) -> Option<Result<()>> {
    let program = requires::find_program("kubectl")?;
    println!("  $ kubectl {}", arguments.join(" "));
    let mut command = Command::new(program);
    command.arg("--kubeconfig").arg(cluster.kubeconfig()).args(arguments);
    // The caches in HOME belong to the user.
    command.env("HOME", cluster.kubeconfig().parent().unwrap_or(Path::new("/")));
    Some(command.output().context("cannot start kubectl").and_then(|output| {
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            println!("  {line}");
        }
        if !output.status.success() {
            bail!("kubectl failed: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(())
    }))
}

/// Applies a pod by the API, and waits until it is ready.
fn apply(demo: &mut Demo, cluster: &Cluster) -> Result<Value> {
    heading("A pod is applied (readiness probe: every 10 s)");
    let mut pod = manifests::serving(POD);
    // The cluster has neither a scheduler nor a controller for service accounts.
    pod["spec"]["nodeName"] = json!(NODE);
    pod["spec"]["automountServiceAccountToken"] = json!(false);
    let file = demo.agent.dir().join("orders.json");
    workdir::write(&file, pod.to_string())?;
    let watcher = cluster.watch(&Cluster::pod(POD))?;
    let began = monotonic_ns();
    match kubectl(cluster, &["apply", "--validate=false", "-f", &file.to_string_lossy()]) {
        Some(applied) => applied?,
        None => drop(cluster.run(NODE, &pod)?),
    }
    let phase = |pod: &Value, phase: &str| pod["status"]["phase"] == phase;
    let (running, _) = watcher.until("the pod to run", |pod| phase(pod, "Running"))?;
    println!("  Running {} ms after it was sent", (running - began) / 1_000_000);
    let ready = |pod: &Value| condition(pod, "Ready").then(|| pod.clone());
    let pod = cluster.until("the pod to be ready", &Cluster::pod(POD), ready)?;
    if let Some(shown) = kubectl(cluster, &["get", "pods,nodes", "-o", "wide"]) {
        shown?;
    }
    demo.check("a pod from the API runs and is Ready there", true);
    Ok(pod)
}

/// Closes and opens the listener; a watcher of the API sees it.
fn listener(demo: &mut Demo, cluster: &Cluster, control: &mut Control) -> Result<()> {
    heading("Its listener is closed and opened again; a watcher of the API server sees Ready follow");
    let watcher = cluster.watch(&Cluster::pod(POD))?;
    watcher.until("the pod to be seen", |pod| condition(pod, "Ready"))?;
    let mut slowest = 0;
    for _ in 0..ROUNDS {
        for (command, ready) in [("close", false), ("open", true)] {
            let called = control.send(&format!("{command} {PORT}"))?;
            let what = format!("Ready={ready}");
            let (seen, _) =
                watcher.until(&what, |pod| pod.is_object() && condition(pod, "Ready") == ready)?;
            let took = seen.saturating_sub(called) / 1000;
            slowest = slowest.max(took);
            println!("  {command:<6} {what:<12} seen {:>8.1} ms later", took as f64 / 1000.0);
        }
    }
    let what = format!("the API's Ready followed the listener {} times, each within 1 s", 2 * ROUNDS);
    demo.check(what, slowest < 1_000_000);
    Ok(())
}

/// Stops the API server for a while.
fn away(demo: &mut Demo, cluster: &mut Cluster, control: &mut Control) -> Result<()> {
    heading(
        "The API server is killed; the listener is closed, the container ends, and the server comes back",
    );
    let began = Instant::now();
    cluster.kill_server();
    control.send(&format!("close {PORT}"))?;
    demo.wait(POD, "to be not ready", |pod| !pod.ready())?;
    let _ = control.send("exit 3"); // the container exits before it can answer
    demo.wait(POD, "to run again", |pod| pod.restarts() == 1 && pod.ready())?;
    let mut looks = (0, 0);
    while began.elapsed() < AWAY {
        if workdir::interrupted() {
            bail!("interrupted");
        }
        let ready = demo.agent.inspect(|watch| watch.pod(POD).is_some_and(PodView::ready))?;
        looks = (looks.0 + 1, looks.1 + u32::from(ready));
        std::thread::park_timeout(Duration::from_secs(1));
    }
    println!(
        "  {} s without an API server: polled {} times, ready {} times",
        AWAY.as_secs(),
        looks.0,
        looks.1
    );
    demo.check("the pod runs on, and was restarted, without the API server", looks.0 == looks.1);
    cluster.start_server()?;
    let back = Instant::now();
    let told = |pod: &Value| {
        let restarts = &pod["status"]["containerStatuses"][0]["restartCount"];
        (*restarts == 1 && condition(pod, "Ready")).then_some(())
    };
    cluster.until("the status from the downtime", &Cluster::pod(POD), told)?;
    println!(
        "  its restart is in the API's status {} ms after the server was ready",
        back.elapsed().as_millis()
    );
    demo.check("changes during the downtime arrived afterwards", true);
    Ok(())
}

/// Deletes the pod by the API.
fn delete(demo: &mut Demo, cluster: &Cluster) -> Result<()> {
    heading("The pod is deleted");
    let watcher = cluster.watch(&Cluster::pod(POD))?;
    watcher.until("the pod to be seen", Value::is_object)?;
    let began = monotonic_ns();
    match kubectl(cluster, &["delete", "pod", POD, "--wait=false"]) {
        Some(deleted) => deleted?,
        None => drop(cluster.delete(&Cluster::pod(POD), None)?),
    }
    let (gone, _) = watcher.until("the pod to be gone", Value::is_null)?;
    println!("  removed {} ms after the request", gone.saturating_sub(began) / 1_000_000);
    demo.check("a deleted pod is removed from the API after all its parts", true);
    Ok(())
}

/// Shows the node's requests to the API server.
fn asked(demo: &mut Demo, cluster: &Cluster) -> Result<()> {
    heading("Requests of beelet to the API server, by the audit log");
    let mut counts: BTreeMap<(String, String), usize> = BTreeMap::new();
    let asked = cluster.asked_by(NODE)?;
    for (verb, resource, _) in &asked {
        *counts.entry((resource.clone(), verb.clone())).or_default() += 1;
    }
    for ((resource, verb), count) in &counts {
        println!("  {count:>4} {verb:<7} {resource}");
    }
    let forbidden = asked.iter().filter(|(.., code)| [401, 403].contains(code)).count();
    demo.check("no request was forbidden", !asked.is_empty() && forbidden == 0);
    Ok(())
}
