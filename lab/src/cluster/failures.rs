//! Failures of nodes as controllers see them: `cargo xtask cluster test failures`.
//!
//! The pod of a StatefulSet writes its UID every 100 ms to a file that all machines share. Two pods of one
//! name that ran at the same time would have interleaved lines.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use beelet_tests::images::APP;
use beelet_tests::workdir;
use serde_json::{Value, json};

use super::kubeadm::{get, kubectl, ready, until_condition, until_ready};
use super::machine::{Machine, folder};
use super::network::{Slow, cut, slow};
use super::steps::{Life, PATIENCE, deployment, service};
use super::{clock, disk, images, power, programs};

/// Time for which a state must last.
const WHILE: Duration = Duration::from_secs(60);
/// Share of the disk in use, in percent, that the agent must not bear.
const FULL: u8 = 99;

/// Runs the steps.
pub(super) fn live(life: &mut Life) -> Result<()> {
    life.step("StatefulSet on w2: its network cut, NotReady, no second pod", cut_off)?;
    life.step("network of w2 healed: the old pod ends, then the new one starts", comes_back)?;
    life.step("power of w2 cut, out-of-service taint: the pod starts on w1", out_of_service)?;
    life.step("power of w2 on again: the old pod stays away", returns)?;
    life.step("network of w2 cut, pod deleted by force: a second pod starts on w1", by_force)?;
    life.step("network of w2 healed: the agent ends the forgotten pod", forgotten)?;
    life.step("disk of w1 filled: DiskPressure, evictions; emptied again", full_disk)?;
    life.step("clock of w1's agent two hours ahead", |life| wrong_clock(life, "+2h"))?;
    life.step("clock of w1's agent two days behind", |life| wrong_clock(life, "-2d"))?;
    life.step("packets to w2 delayed by 100 ms, 2 % lost", slow_link)
}

/// Returns the folder that all machines share.
fn shared() -> PathBuf {
    folder().join("shared")
}

/// Returns the UIDs that pods have written so far, one per beat.
fn beats() -> Vec<String> {
    let text = workdir::read(&shared().join("db-0")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

/// Returns the pods that ran, in order, or an error if two of them ran at the same time.
fn in_turn(beats: &[String]) -> Result<Vec<String>> {
    let mut turns: Vec<String> = Vec::new();
    for beat in beats {
        if turns.last() == Some(beat) {
            continue;
        }
        ensure!(!turns.contains(beat), "the pod {beat} ran at the same time as another of its name");
        turns.push(beat.clone());
    }
    Ok(turns)
}

/// Waits until the pod runs on this machine, and returns its UID.
fn runs_on(first: &Machine, machine: &Machine) -> Result<String> {
    workdir::wait_for(&format!("db-0 to run on {}", machine.name), PATIENCE, || {
        let pod = get(first, &["pod", "db-0"]).map_err(|error| error.to_string())?;
        let uid = pod["metadata"]["uid"].as_str().unwrap_or_default();
        let runs = pod["status"]["containerStatuses"][0]["state"]["running"].is_object();
        if pod["spec"]["nodeName"] == machine.name.as_str() && runs && beats().iter().any(|one| one == uid) {
            return Ok(uid.to_owned());
        }
        Err(format!("node {}, {}", pod["spec"]["nodeName"], pod["status"]["phase"]))
    })
}

fn cut_off(life: &mut Life) -> Result<()> {
    let (first, second) = (life.first()?.clone(), life.machine(2)?.clone());
    // A new cluster's folder has no beats of an earlier one.
    let _ = std::fs::remove_dir_all(shared());
    std::fs::create_dir_all(shared()).context("the machines' shared folder")?;
    life.apply(&[stateful_set()])?;
    let uid = runs_on(&first, &second)?;
    cut(&second, true)?;
    until_ready(&first, std::slice::from_ref(&second), "Unknown")?;
    workdir::wait_for("the taint to evict db-0", PATIENCE, || {
        let pod = get(&first, &["pod", "db-0"]).map_err(|error| error.to_string())?;
        if pod["metadata"]["deletionTimestamp"].is_string() { Ok(()) } else { Err("not deleted".to_owned()) }
    })?;
    let began = Instant::now();
    while began.elapsed() < WHILE {
        let pod = get(&first, &["pod", "db-0"])?;
        ensure!(pod["metadata"]["uid"] == uid.as_str(), "the controller replaced a pod that still runs");
        std::thread::sleep(Duration::from_secs(2));
    }
    let turns = in_turn(&beats())?;
    ensure!(turns == [uid], "pods that ran: {turns:?}");
    life.add_note("the pod runs on, Terminating in the API");
    Ok(())
}

fn comes_back(life: &mut Life) -> Result<()> {
    let (first, second) = (life.first()?.clone(), life.machine(2)?.clone());
    cut(&second, false)?;
    until_ready(&first, std::slice::from_ref(&second), "True")?;
    workdir::wait_for("the next pod", PATIENCE, || {
        let turns = in_turn(&beats()).map_err(|error| error.to_string())?;
        if turns.len() == 2 { Ok(()) } else { Err(format!("{turns:?}")) }
    })?;
    life.rolled_out_of("statefulset/db")?;
    ensure!(in_turn(&beats())?.len() == 2, "more than one pod followed");
    life.add_note("the two did not run at the same time");
    Ok(())
}

/// Moves the pod to w2 if it is elsewhere; returns its UID.
fn onto_second(life: &Life) -> Result<String> {
    let (first, second) = (life.first()?, life.machine(2)?);
    if get(first, &["pod", "db-0"])?["spec"]["nodeName"] != second.name.as_str() {
        kubectl(first, &["cordon", "w1"])?;
        kubectl(first, &["delete", "pod", "db-0"])?;
    }
    let uid = runs_on(first, second);
    kubectl(first, &["uncordon", "w1"])?;
    uid
}

fn out_of_service(life: &mut Life) -> Result<()> {
    let uid = onto_second(life)?;
    let (first, second) = (life.first()?.clone(), life.machine(2)?.clone());
    power::off(&second)?;
    until_ready(&first, std::slice::from_ref(&second), "Unknown")?;
    let began = Instant::now();
    kubectl(&first, &["taint", "node", "w2", "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"])?;
    let next = runs_on(&first, life.machine(1)?)?;
    ensure!(next != uid, "the pod is the same");
    life.add_note(&format!("{:.1} s after the taint", began.elapsed().as_secs_f64()));
    in_turn(&beats()).map(drop)
}

fn returns(life: &mut Life) -> Result<()> {
    let (first, second) = (life.first()?.clone(), life.machine(2)?.clone());
    let uid = get(&first, &["pod", "db-0"])?["metadata"]["uid"].clone();
    power::on(&second)?;
    super::kubeadm::connect(&first, &life.machines)?;
    until_ready(&first, std::slice::from_ref(&second), "True")?;
    kubectl(&first, &["taint", "node", "w2", "node.kubernetes.io/out-of-service-"])?;
    std::thread::sleep(WHILE / 2);
    let turns = in_turn(&beats())?;
    ensure!(turns.last().map(String::as_str) == uid.as_str(), "{turns:?} ran, and {uid} should run");
    Ok(())
}

fn by_force(life: &mut Life) -> Result<()> {
    let uid = onto_second(life)?;
    let (first, second) = (life.first()?.clone(), life.machine(2)?.clone());
    cut(&second, true)?;
    until_ready(&first, std::slice::from_ref(&second), "Unknown")?;
    kubectl(&first, &["delete", "pod", "db-0", "--force", "--grace-period=0"])?;
    let next = runs_on(&first, life.machine(1)?)?;
    ensure!(next != uid, "the pod is the same");
    ensure!(in_turn(&beats()).is_err(), "the cut-off pod should still run, as force deletion warns");
    life.add_note("both run, as with any kubelet");
    Ok(())
}

fn forgotten(life: &mut Life) -> Result<()> {
    let (first, second) = (life.first()?.clone(), life.machine(2)?.clone());
    let uid = get(&first, &["pod", "db-0"])?["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
    let began = Instant::now();
    cut(&second, false)?;
    workdir::wait_for("the forgotten pod to end", PATIENCE, || {
        let all = beats();
        let last = all.get(all.len().saturating_sub(20)..).unwrap_or_default();
        let is_alone = last.len() == 20 && last.iter().all(|one| *one == uid);
        if is_alone { Ok(()) } else { Err("both pods write".to_owned()) }
    })?;
    life.add_note(&format!("{:.1} s after the network was there", began.elapsed().as_secs_f64()));
    until_ready(&first, std::slice::from_ref(&second), "True")?;
    kubectl(&first, &["delete", "statefulset", "db"]).map(drop)
}

fn full_disk(life: &mut Life) -> Result<()> {
    let (first, worker) = (life.first()?.clone(), life.machine(1)?.clone());
    life.apply(&[deployment("1"), service()])?;
    life.rolled_out()?;
    let began = Instant::now();
    disk::fill(worker.dir(), FULL)?;
    until_condition(&first, "w1", ("DiskPressure", "True"), PATIENCE)?;
    life.add_note(&format!("DiskPressure after {:.0} s", began.elapsed().as_secs_f64()));
    // The pods of this test use little room, so the agent evicts one after the other until there is some.
    workdir::wait_for("a replica to be evicted and replaced", PATIENCE, || {
        let pods = life.pods().map_err(|error| error.to_string())?;
        let is_evicted = |pod: &&Value| pod["status"]["reason"] == "Evicted";
        let is_ready = |pod: &&Value| pod["status"]["containerStatuses"][0]["ready"] == true;
        let (evicted, ready) = (pods.iter().filter(is_evicted).count(), pods.iter().filter(is_ready).count());
        if evicted > 0 && ready >= 20 { Ok(()) } else { Err(format!("{evicted} evicted, {ready} ready")) }
    })?;
    ensure!(ready(&first, "w1")? == "True", "the node is not Ready for want of room");
    disk::free(worker.dir())?;
    // Images that the agent removed for room are in no registry here.
    let (programs, began) = (programs::Programs::find()?, Instant::now());
    images::import(&worker, &images::build(&programs, &programs.version()?)?.every)?;
    until_condition(&first, "w1", ("DiskPressure", "False"), PATIENCE)?;
    life.add_note(&format!("ended {:.0} s after there was room", began.elapsed().as_secs_f64()));
    kubectl(&first, &["delete", "pods", "-l", "app=web", "--field-selector", "status.phase=Failed"])?;
    life.rolled_out()
}

/// Sets the agent's clock, and records what becomes of the Node.
fn wrong_clock(life: &mut Life, offset: &str) -> Result<()> {
    let (first, worker) = (life.first()?.clone(), life.machine(1)?.clone());
    let requests = || Ok::<_, anyhow::Error>(get(&first, &["csr"])?["items"].as_array().map_or(0, Vec::len));
    let before = requests()?;
    worker.run(&["sh", "-c", ": > /var/log/kubelet.log"])?;
    clock::set(&worker, Some(offset))?;
    std::thread::sleep(WHILE);
    let status = ready(&first, "w1")?;
    let asked = requests()?.saturating_sub(before);
    ensure!(asked <= 5, "the agent has asked for {asked} certificates within a minute");
    life.add_note(&format!("Ready={status} after 60 s, {asked} CSRs"));
    let log = worker.run(&[
        "sh",
        "-c",
        "grep -iE 'clock|expired|not valid|NotValidYet' /var/log/kubelet.log | tail -1",
    ]);
    if let Ok(line) = log
        && !line.is_empty()
    {
        life.add_note(line.split_once(' ').map_or(line.as_str(), |(_, rest)| rest).trim());
    }
    clock::set(&worker, None)?;
    until_ready(&first, std::slice::from_ref(&worker), "True")?;
    life.reachable()
}

fn slow_link(life: &mut Life) -> Result<()> {
    let (first, second) = (life.first()?.clone(), life.machine(2)?.clone());
    slow(&second, Some(Slow { delay: Duration::from_millis(100), loss: 2.0 }))?;
    let began = Instant::now();
    while began.elapsed() < WHILE {
        let found = ready(&first, "w2")?;
        ensure!(found == "True", "w2 is Ready={found}");
        std::thread::sleep(Duration::from_secs(5));
    }
    let place = format!("https://{}:10250/healthz", second.address);
    let words = ["curl", "-sk", "-m", "20", "-o", "/dev/null", "-w", "%{time_connect}", &place];
    let took = first.run(&words)?;
    ensure!(took.parse().is_ok_and(|took: f64| took >= 0.1), "a connection to w2 took {took} s");
    life.add_note(&format!("a connection takes {took} s"));
    kubectl(&first, &["rollout", "restart", "deployment/web"])?;
    life.rolled_out()?;
    life.reachable()?;
    let pods = life.pods()?;
    let pod = pods.iter().find(|pod| pod["spec"]["nodeName"] == "w2").context("no replica on w2")?;
    let name = pod["metadata"]["name"].as_str().unwrap_or_default();
    kubectl(&first, &["exec", name, "--", "true"])?;
    slow(&second, None)
}

/// Returns a StatefulSet whose pod prefers w2 and leaves an unreachable node at once.
fn stateful_set() -> Value {
    let script = "trap exit TERM; while :; do echo $UID_ >> /shared/db-0; sleep 0.1; done";
    let tolerate = |key: &str| json!({ "key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 2 });
    json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": { "name": "db" },
        "spec": {
            "replicas": 1, "serviceName": "db", "selector": { "matchLabels": { "app": "db" } },
            "template": {
                "metadata": { "labels": { "app": "db" } },
                "spec": {
                    "terminationGracePeriodSeconds": 5,
                    "tolerations": [
                        tolerate("node.kubernetes.io/unreachable"), tolerate("node.kubernetes.io/not-ready"),
                    ],
                    "affinity": { "nodeAffinity": { "preferredDuringSchedulingIgnoredDuringExecution": [{
                        "weight": 100,
                        "preference": { "matchExpressions": [
                            { "key": "kubernetes.io/hostname", "operator": "In", "values": ["w2"] },
                        ] },
                    }] } },
                    "containers": [{
                        "name": "db", "image": APP, "imagePullPolicy": "IfNotPresent",
                        "command": ["/bin/sh", "-c", script],
                        "env": [{ "name": "UID_", "valueFrom": { "fieldRef": { "fieldPath": "metadata.uid" } } }],
                        "volumeMounts": [{ "name": "shared", "mountPath": "/shared" }],
                    }],
                    "volumes": [{ "name": "shared", "hostPath": { "path": shared() } }],
                },
            },
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_ran_in_turn_unless_their_beats_interleave() {
        let all = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(in_turn(&all("a a b b b")).unwrap(), ["a", "b"]);
        assert!(in_turn(&all("a b a")).is_err());
    }
}
