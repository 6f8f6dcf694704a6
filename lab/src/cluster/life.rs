//! The whole life of a cluster: `cargo xtask cluster test life`.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use beelet_tests::workdir;
use serde_json::json;

use super::kubeadm::{self, get, kubectl, until_ready};
use super::network;
use super::steps::{Life, PATIENCE, deployment, service};

/// Link to a node's client certificate in use.
const CERTIFICATE: &str = "/var/lib/kubelet/pki/kubelet-client-current.pem";

/// Runs the steps.
pub(super) fn live(life: &mut Life) -> Result<()> {
    let certificates = certificates(life)?;
    life.step("20 replicas on two nodes, Service and NodePort from three", deploy)?;
    life.step("rolling update of 20 replicas", update)?;
    life.step("beelet drain on w1, uncordon", |life| drain(life, 1))?;
    life.step("beelet drain on w2 with a PodDisruptionBudget of 17 of 20", drain_with_budget)?;
    life.step("network of w2 cut: NotReady", lose)?;
    life.step("network of w2 healed: Ready, no pod restarted", find)?;
    life.step("kubeadm certs renew all", renew)?;
    life.step("static pod of the scheduler changed", change_static_pod)?;
    life.step("reboot of all machines at once", reboot)?;
    life.step("client certificates of the workers rotated", |life| rotated(life, &certificates))?;
    life.step("kubeadm upgrade apply --force", upgrade)?;
    life.step("kubeadm reset of w2", reset)?;
    life.step("kubeadm join of w2 again", rejoin)
}

/// Returns the certificate in use of each worker, which the cluster's signer issued for minutes. kubeadm
/// itself issues the one of the first node, for a year: it must lie where the node renews it.
fn certificates(life: &Life) -> Result<Vec<String>> {
    life.first()?.run(&["grep", "-q", CERTIFICATE, "/etc/kubernetes/kubelet.conf"])?;
    let workers = life.machines.iter().skip(1);
    workers.map(|machine| machine.run(&["readlink", "-f", CERTIFICATE])).collect()
}

fn deploy(life: &mut Life) -> Result<()> {
    life.apply(&[deployment("1"), service()])?;
    life.rolled_out()?;
    let nodes: std::collections::BTreeSet<String> =
        life.pods()?.iter().filter_map(|pod| pod["spec"]["nodeName"].as_str().map(str::to_owned)).collect();
    ensure!(nodes.len() == 2, "the replicas are on {nodes:?}");
    life.reachable()
}

fn update(life: &mut Life) -> Result<()> {
    life.apply(&[deployment("2")])?;
    life.rolled_out()?;
    life.reachable()
}

fn drain(life: &mut Life, index: usize) -> Result<()> {
    let worker = life.machine(index)?;
    eprintln!("{}", worker.run(&["beelet", "drain", "--timeout=5m"])?);
    let pods = life.pods()?;
    let left = pods.iter().filter(|pod| pod["spec"]["nodeName"] == worker.name.as_str()).count();
    ensure!(left == 0, "{left} replicas are still on the drained node");
    life.rolled_out()?;
    worker.run(&["beelet", "uncordon"]).map(drop)
}

fn drain_with_budget(life: &mut Life) -> Result<()> {
    let budget = json!({
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": { "name": "web" },
        "spec": { "minAvailable": 17, "selector": { "matchLabels": { "app": "web" } } },
    });
    life.apply(&[budget])?;
    drain(life, 2)?;
    kubectl(life.first()?, &["delete", "poddisruptionbudget", "web"])?;
    // The replicas are on one node now: spread them again.
    kubectl(life.first()?, &["rollout", "restart", "deployment/web"])?;
    life.rolled_out()
}

fn lose(life: &mut Life) -> Result<()> {
    let worker = life.machine(2)?;
    network::cut(worker, true)?;
    until_ready(life.first()?, std::slice::from_ref(worker), "Unknown")
}

fn find(life: &mut Life) -> Result<()> {
    let worker = life.machine(2)?;
    network::cut(worker, false)?;
    until_ready(life.first()?, std::slice::from_ref(worker), "True")?;
    life.rolled_out()?;
    for pod in life.pods()? {
        let restarts = pod["status"]["containerStatuses"][0]["restartCount"].as_u64();
        ensure!(restarts == Some(0), "{} has restarted {restarts:?} times", pod["metadata"]["name"]);
    }
    life.reachable()
}

fn renew(life: &mut Life) -> Result<()> {
    let first = life.first()?;
    first.run(&["kubeadm", "certs", "renew", "all"])?;
    first.run(&["kubeadm", "certs", "check-expiration"])?;
    until_ready(first, &life.machines, "True")
}

fn change_static_pod(life: &mut Life) -> Result<()> {
    let first = life.first()?;
    let file = first.path("/etc/kubernetes/manifests/kube-scheduler.yaml");
    let text = workdir::read(&file)?;
    let flag = "    - --v=1\n";
    let changed = text.replacen("    - kube-scheduler\n", &format!("    - kube-scheduler\n{flag}"), 1);
    ensure!(changed != text, "the manifest of the scheduler has another form: {text}");
    workdir::write(&file, changed)?;
    let name = format!("kube-scheduler-{}", first.name);
    let runs = || {
        let pod = get(first, &["pod", "-n", "kube-system", &name]).map_err(|error| error.to_string())?;
        let is_new = pod["spec"]["containers"][0]["command"]
            .as_array()
            .into_iter()
            .flatten()
            .any(|one| one == "--v=1");
        let status = &pod["status"]["containerStatuses"][0];
        if is_new && status["ready"] == true {
            Ok(())
        } else {
            Err(format!("new {is_new}, {}", status["state"]))
        }
    };
    workdir::wait_for("the mirror of the changed scheduler to run", PATIENCE, runs)
}

fn reboot(life: &mut Life) -> Result<()> {
    super::reboot(&life.machines)?;
    life.answers()?;
    life.recovered()
}

fn rotated(life: &mut Life, before: &[String]) -> Result<()> {
    let all_new = || {
        let now = certificates(life).map_err(|error| error.to_string())?;
        let old = now.iter().zip(before).filter(|(now, before)| now == before).count();
        if old == 0 { Ok(()) } else { Err(format!("{old} workers have their first certificate")) }
    };
    workdir::wait_for("new client certificates", Duration::from_secs(1200), all_new)?;
    until_ready(life.first()?, &life.machines, "True")
}

fn upgrade(life: &mut Life) -> Result<()> {
    let first = life.first()?;
    let version = first.run(&["kubeadm", "version", "-o", "short"])?;
    first.run(&["kubeadm", "upgrade", "apply", &version, "--force", "--yes", kubeadm::IGNORED_BY_UPGRADE])?;
    until_ready(first, &life.machines, "True")?;
    life.reachable()
}

fn rejoin(life: &mut Life) -> Result<()> {
    let (first, worker) = (life.first()?, life.machine(2)?);
    kubeadm::join(worker)?;
    kubeadm::connect(first, &life.machines)?;
    until_ready(first, &life.machines, "True")
}

fn reset(life: &mut Life) -> Result<()> {
    let (first, worker) = (life.first()?, life.machine(2)?);
    worker.run(&["kubeadm", "reset", "--force"])?;
    kubectl(first, &["delete", "node", &worker.name])?;
    let containers = worker.run(&["ctr", "--namespace", "k8s.io", "containers", "ls", "-q"])?;
    if containers.is_empty() { Ok(()) } else { bail!("containers are left on {}: {containers}", worker.name) }
}
