//! A container's end and its next start, and a pod's start, on a real containerd.
//!
//! `exited_to_restart`: the runtime's first EXITED for a container, to the agent's asking for the next one. Both are seen
//! from outside: this program asks the runtime itself, as fast as it can, and reads the agent's log line. Every sample is
//! a container's first restart, which has no back-off. `exit_to_exited` is the runtime's own part of it: from kill(2) to
//! its EXITED. `manifest_to_running` is a ratio: from the manifest in the folder to the container's start, over the sum of
//! the bare calls of CRI for the same pod, medians of rounds that take turns.

use super::Row;
use crate::progress::Step;
use anyhow::{Context as _, Result, bail};
use beelet_proto::cri;
use beelet_tests::agent::{Agent, Options};
use beelet_tests::containerd::{Containerd, Cri, block_on};
use beelet_tests::workdir::{self, PATIENCE, interrupted};
use beelet_tests::{images, manifests};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// p99, in milliseconds.
const TO_RESTART: f64 = 5.0;
/// p99, in milliseconds.
const TO_EXITED: f64 = 60.0;
/// The agent's way over the bare calls'.
const OVER_BARE: f64 = 1.15;
/// Containers of one pod, each ended once.
const CONTAINERS: usize = 10;

/// Measures all three rows.
pub(super) fn run(binary: &Path, quick: bool) -> Result<Vec<Row>> {
    let containerd = Containerd::start(&workdir::target_dir().join("bench/node"))?;
    let mut options = Options::on(&containerd);
    options.binary = Some(binary.to_path_buf());
    let agent = Agent::start(options)?;
    let mut rows = exits(&containerd, &agent, if quick { 3 } else { 21 })?;
    rows.push(starts(&containerd, &agent, if quick { 8 } else { 40 })?);
    Ok(rows)
}

/// Nanoseconds since the epoch: the clock of the runtime and of the agent's log.
fn now_ns() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

/// One pod's worth of containers at a time, each killed once, one after the other.
fn exits(containerd: &Containerd, agent: &Agent, pods: usize) -> Result<Vec<Row>> {
    let step = Step::start("lifecycle: containers ended and started again");
    let (mut to_exited, mut to_restart) = (Vec::new(), Vec::new());
    for round in 0..pods {
        let name = format!("ends{round}");
        let mut pod = manifests::pod(&name, &["/bin/testapp", "pause"]);
        let one = pod["spec"]["containers"][0].clone();
        let container = |n: usize| {
            let mut container = one.clone();
            container["name"] = json!(format!("c{n}"));
            container
        };
        pod["spec"]["containers"] = (0..CONTAINERS).map(container).collect();
        agent.apply(&format!("{name}.yaml"), pod.to_string())?;
        let view = agent
            .until(&format!("{name} to run"), |watch| watch.pod(&name).filter(|p| p.ready()).cloned())?;
        for n in 0..CONTAINERS {
            step.detail(&format!("{} of {} containers", round * CONTAINERS + n, pods * CONTAINERS));
            let status = view.container(&format!("c{n}")).context("a container is missing")?;
            let id = status.container_id.as_deref().and_then(|id| id.split("//").nth(1));
            let id = id.context("a container has no id")?.to_owned();
            let (killed, exited) = block_on(end(&containerd.socket(), &id))?;
            let asked = asked_for(agent, &name, &format!("c{n}"))?;
            to_exited.push((exited - killed) as f64 / 1e6);
            // The agent may know before we do: it asks as often.
            to_restart.push((asked - exited).max(0) as f64 / 1e6);
        }
        agent.remove(&format!("{name}.yaml"))?;
        agent.until(&format!("{name} to go"), |watch| watch.pod(&name).is_none().then_some(()))?;
    }
    step.done(&format!("{} restarts", to_restart.len()));
    Ok(vec![
        Row::new("lifecycle", "exited_to_restart", "ms", to_restart, TO_RESTART),
        Row::new("lifecycle", "exit_to_exited", "ms", to_exited, TO_EXITED),
    ])
}

/// Kills a container's first process; when, and when the runtime said so first.
async fn end(socket: &Path, id: &str) -> Result<(i64, i64)> {
    let mut cri = Cri::connect(socket).await?;
    let status = async |cri: &mut Cri, verbose| {
        let request = cri::ContainerStatusRequest { container_id: id.to_owned(), verbose };
        let answer = cri.runtime.container_status(request).await?;
        anyhow::Ok(answer.into_inner())
    };
    let verbose = status(&mut cri, true).await?;
    let info = verbose.info.get("info").context("the runtime names no process")?;
    let info: serde_json::Value = serde_json::from_str(info)?;
    let pid = info["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
    let killed = now_ns();
    kill_process(pid.context("the runtime names no process")?, Signal::KILL)?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let answer = status(&mut cri, false).await?;
        let exited = now_ns();
        let state = answer.status.map(|status| status.state());
        if state == Some(cri::ContainerState::ContainerExited) {
            return Ok((killed, exited));
        }
        if interrupted() || Instant::now() > deadline {
            bail!("the runtime does not see that a container was killed");
        }
        tokio::time::sleep(Duration::from_micros(500)).await;
    }
}

/// When the agent asked for the container's second instance, by its log.
fn asked_for(agent: &Agent, pod: &str, container: &str) -> Result<i64> {
    let (pod, container) = (format!("pod=default/{pod}-"), format!("container=\"{container}\""));
    let find = || -> Result<i64> {
        let log = agent.log();
        let is_it = |line: &&str| {
            line.contains("container is asked for")
                && line.contains(&pod)
                && line.contains(&container)
                && line.contains("attempt=1")
        };
        let line = log.lines().rev().find(is_it).context("not asked for yet")?;
        let time = line.split_whitespace().next().unwrap_or_default();
        let time: jiff::Timestamp =
            time.parse().with_context(|| format!("no time is at the start of {line:?}"))?;
        Ok(i64::try_from(time.as_nanosecond())?)
    };
    workdir::wait_for("the agent to ask for a container", PATIENCE, find)
}

/// Pods started by the agent and by bare calls, in turns.
fn starts(containerd: &Containerd, agent: &Agent, rounds: usize) -> Result<Row> {
    let step = Step::start("lifecycle: pods started, by the agent and by bare calls");
    let (mut by_agent, mut bare) = (Vec::new(), Vec::new());
    for round in 0..=rounds {
        step.detail(&format!("{round} of {rounds} rounds"));
        let name = format!("starts{round}");
        let manifest = manifests::pod(&name, &["/bin/testapp", "pause"]).to_string();
        let began = now_ns();
        agent.apply(&format!("{name}.yaml"), manifest)?;
        let view = agent
            .until(&format!("{name} to run"), |watch| watch.pod(&name).filter(|p| p.ready()).cloned())?;
        let id = view.container("main").and_then(|c| c.container_id.as_deref()?.split("//").nth(1));
        let id = id.context("a container has no id")?.to_owned();
        let started = block_on(started_at(&containerd.socket(), &id))?;
        agent.remove(&format!("{name}.yaml"))?;
        agent.until(&format!("{name} to go"), |watch| watch.pod(&name).is_none().then_some(()))?;
        let alone = block_on(bare_calls(containerd, &format!("bare{round}")))?;
        // The first round warms caches.
        if round > 0 {
            by_agent.push((started - began) as f64 / 1e6);
            bare.push(alone.as_secs_f64() * 1e3);
        }
    }
    let (ours, theirs) = (super::median(&by_agent), super::median(&bare));
    step.done(&format!("{ours:.0} ms by the agent, {theirs:.0} ms by bare calls"));
    let ratio = ours / theirs;
    Ok(Row::of("lifecycle", "manifest_to_running", "of bare CRI calls", (rounds, (ratio, ratio)), OVER_BARE))
}

/// When the runtime had started a container.
async fn started_at(socket: &Path, id: &str) -> Result<i64> {
    let mut cri = Cri::connect(socket).await?;
    let request = cri::ContainerStatusRequest { container_id: id.to_owned(), verbose: false };
    let status = cri.runtime.container_status(request).await?.into_inner().status;
    Ok(status.context("the runtime has no status")?.started_at)
}

/// The same pod by three calls, one after the other; how long they took together.
async fn bare_calls(containerd: &Containerd, name: &str) -> Result<Duration> {
    let mut cri = Cri::connect(&containerd.socket()).await?;
    let logs = containerd.dir().join("bare-logs").join(name);
    std::fs::create_dir_all(logs.join("main"))?;
    let sandbox_config = cri::PodSandboxConfig {
        metadata: Some(cri::PodSandboxMetadata {
            name: name.to_owned(),
            uid: name.to_owned(),
            namespace: "default".to_owned(),
            attempt: 0,
        }),
        hostname: name.to_owned(),
        log_directory: logs.display().to_string(),
        linux: Some(cri::LinuxPodSandboxConfig {
            cgroup_parent: containerd.cgroup().path().to_owned(),
            security_context: Some(cri::LinuxSandboxSecurityContext {
                namespace_options: Some(namespaces()),
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    };
    let container_config = cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: "main".to_owned(), attempt: 0 }),
        image: Some(cri::ImageSpec { image: images::APP.to_owned(), ..Default::default() }),
        command: vec!["/bin/testapp".to_owned(), "pause".to_owned()],
        labels: HashMap::new(),
        log_path: "main/0.log".to_owned(),
        linux: Some(cri::LinuxContainerConfig {
            resources: Some(cri::LinuxContainerResources { cpu_shares: 2, ..Default::default() }),
            security_context: Some(cri::LinuxContainerSecurityContext {
                namespace_options: Some(namespaces()),
                ..Default::default()
            }),
        }),
        ..Default::default()
    };
    let began = Instant::now();
    let request =
        cri::RunPodSandboxRequest { config: Some(sandbox_config.clone()), runtime_handler: String::new() };
    let sandbox = cri.runtime.run_pod_sandbox(request).await?.into_inner().pod_sandbox_id;
    let request = cri::CreateContainerRequest {
        pod_sandbox_id: sandbox.clone(),
        config: Some(container_config),
        sandbox_config: Some(sandbox_config),
    };
    let container_id = cri.runtime.create_container(request).await?.into_inner().container_id;
    cri.runtime.start_container(cri::StartContainerRequest { container_id }).await?;
    let took = began.elapsed();
    cri.runtime.stop_pod_sandbox(cri::StopPodSandboxRequest { pod_sandbox_id: sandbox.clone() }).await?;
    cri.runtime.remove_pod_sandbox(cri::RemovePodSandboxRequest { pod_sandbox_id: sandbox }).await?;
    Ok(took)
}

fn namespaces() -> cri::NamespaceOption {
    cri::NamespaceOption {
        network: cri::NamespaceMode::Pod.into(),
        pid: cri::NamespaceMode::Container.into(),
        ipc: cri::NamespaceMode::Pod.into(),
        ..Default::default()
    }
}
