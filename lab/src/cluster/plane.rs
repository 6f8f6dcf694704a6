//! A control plane of three nodes, each with an etcd of its own: `cargo xtask cluster test plane`.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use beelet_tests::workdir;
use serde_json::Value;

use super::kubeadm::{self, get, kubectl, ready, until_ready};
use super::machine::Machine;
use super::power;
use super::steps::{Life, PATIENCE, deployment, service};

/// Time for which the cluster must work without one of its nodes.
const WITHOUT: Duration = Duration::from_secs(90);

/// Runs the steps.
pub(super) fn live(life: &mut Life) -> Result<()> {
    life.step("three etcd members; 20 replicas on the worker", |life| {
        members(life.first()?, 3)?;
        life.apply(&[deployment("1"), service()])?;
        life.rolled_out()?;
        life.reachable()
    })?;
    life.step("power of the first control plane's node cut: rolling update without it", lose_first)?;
    life.step("its power on again: three members, all nodes Ready", find_first)?;
    life.step("etcd of cp3 lost its data: the others go on", lose_data)?;
    life.step("kubeadm reset and join of cp3", rejoin)?;
    life.step("power of all four machines cut at once: everything is back", all_off)
}

/// Asks the etcd of a machine, over its HTTP gateway.
fn etcd(machine: &Machine, path: &str, body: &str) -> Result<Value> {
    let keys = "/etc/kubernetes/pki/etcd";
    let (ca, cert, key) = (
        format!("{keys}/ca.crt"),
        format!("{keys}/healthcheck-client.crt"),
        format!("{keys}/healthcheck-client.key"),
    );
    let address = format!("https://127.0.0.1:2379{path}");
    let mut words = vec!["curl", "-sS", "--fail", "-m", "5", "--cacert", &ca, "--cert", &cert, "--key", &key];
    if !body.is_empty() {
        words.extend(["-d", body]);
    }
    words.push(&address);
    serde_json::from_str(&machine.run(&words)?).context("etcd's answer")
}

/// Returns the ids and names of etcd's members; a member that has never run has no name.
fn listed(machine: &Machine) -> Result<Vec<(String, String)>> {
    let answer = etcd(machine, "/v3/cluster/member/list", "{}")?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let members = answer["members"].as_array().into_iter().flatten();
    Ok(members.map(|member| (text(&member["ID"]), text(&member["name"]))).collect())
}

/// Waits until etcd has `count` members, and the machine's own is healthy.
fn members(machine: &Machine, count: usize) -> Result<()> {
    workdir::wait_for(&format!("{count} etcd members"), PATIENCE, || {
        let shown = |error: anyhow::Error| format!("{error:#}");
        let health = etcd(machine, "/health", "").map_err(shown)?;
        let found = listed(machine).map_err(shown)?;
        if health["health"] == "true" && found.len() == count && found.iter().all(|one| !one.1.is_empty()) {
            return Ok(());
        }
        Err(format!("health {health}, members {found:?}"))
    })
}

fn lose_first(life: &mut Life) -> Result<()> {
    let (first, second) = (life.machine(0)?.clone(), life.machine(1)?.clone());
    power::off(&first)?;
    let answers = || kubectl(&second, &["get", "--raw", "/readyz"]);
    workdir::wait_for("an API server to answer", PATIENCE, answers)?;
    until_ready(&second, std::slice::from_ref(&first), "Unknown")?;
    // The workers' own connections were to the lost API server, too.
    let began = std::time::Instant::now();
    let worker = life.machine(3)?.clone();
    kubectl(&second, &["rollout", "restart", "deployment/web"])?;
    kubectl(&second, &["rollout", "status", "deployment/web", "--timeout=300s"])?;
    while began.elapsed() < WITHOUT {
        let found = ready(&second, &worker.name)?;
        ensure!(found == "True", "{} is Ready={found}", worker.name);
        std::thread::sleep(Duration::from_secs(5));
    }
    life.add_note(&format!("{} stayed Ready for {} s", worker.name, WITHOUT.as_secs()));
    Ok(())
}

fn find_first(life: &mut Life) -> Result<()> {
    power::on(life.first()?)?;
    back(life)
}

/// Waits until everything works.
fn back(life: &Life) -> Result<()> {
    life.answers()?;
    for machine in life.machines.iter().filter(|machine| machine.is_control()) {
        members(machine, 3)?;
    }
    life.recovered()
}

fn lose_data(life: &mut Life) -> Result<()> {
    let (first, third) = (life.first()?.clone(), life.machine(2)?.clone());
    power::off(&third)?;
    third.run(&["sh", "-c", "rm -rf /var/lib/etcd/*"])?;
    power::on(&third)?;
    // The others know the member, so etcd does not start without its data.
    let fails = || {
        let pod =
            get(&first, &["pod", "-n", "kube-system", "etcd-cp3"]).map_err(|error| error.to_string())?;
        let status = &pod["status"]["containerStatuses"][0];
        let restarts = status["restartCount"].as_u64().unwrap_or(0);
        let waits = status["state"]["waiting"]["reason"].as_str().unwrap_or_default().to_owned();
        if waits == "CrashLoopBackOff" { Ok(restarts) } else { Err(format!("{status}")) }
    };
    workdir::wait_for("the mirror of etcd to show the back-off", PATIENCE, fails)?;
    life.add_note("the mirror of etcd-cp3 is in CrashLoopBackOff");
    kubectl(&first, &["rollout", "restart", "deployment/web"])?;
    life.rolled_out()
}

fn rejoin(life: &mut Life) -> Result<()> {
    let (first, third) = (life.first()?.clone(), life.machine(2)?.clone());
    third.run(&["kubeadm", "reset", "--force"])?;
    kubectl(&first, &["delete", "node", &third.name])?;
    // kubeadm removes the member, unless its own etcd does not answer.
    if let Some((id, _)) = listed(&first)?.into_iter().find(|(_, name)| *name == third.name) {
        etcd(&first, "/v3/cluster/member/remove", &format!("{{\"ID\":\"{id}\"}}"))?;
        life.add_note("kubeadm reset left the etcd member; removed by etcd's API");
    }
    kubeadm::join(&third)?;
    back(life)
}

fn all_off(life: &mut Life) -> Result<()> {
    super::reboot(&life.machines)?;
    back(life)?;
    let nodes = get(life.first()?, &["nodes"])?;
    match nodes["items"].as_array().map_or(0, Vec::len) {
        4 => Ok(()),
        count => bail!("the cluster has {count} Nodes"),
    }
}
