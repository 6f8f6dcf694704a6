//! Restart of a container, start of a pod, and start of an agent after kill -9, on a real containerd.
//!
//! Everything is observed from outside: this program reads the agent's log lines and API, and for
//! `running_to_restart` polls the runtime as fast as it can. These polls have their own rounds, since each
//! answer costs the runtime half a millisecond of the two CPUs that it needs to clean up the container. Every
//! sample of a restart is a container's first, which has no back-off.
//!
//! - `exit_known`: from kill(2) to the agent's log line that the container has ended, from any source.
//! - `exit_to_running`: from kill(2) to the next container's start, by the runtime's timestamp: includes
//!   detection and the runtime's own work, which is nearly all of it. If `KUBELET` names a kubelet, its value
//!   is shown too.
//! - `exited_to_restart`: from the runtime's EXITED event at the agent to its request for the next container.
//! - `running_to_restart`: the same from the runtime's last answer to this program that the container was
//!   running: an upper bound of the time since the runtime knew, including the runtime's time for its
//!   answers.
//! - `exit_to_exited`: from kill(2) to the EXITED event at the agent; nearly all of it is the runtime's.
//! - `manifest_to_running`, a ratio: from the manifest in the folder to the container's start, divided by the
//!   time from the first of the bare CRI calls for the same pod to its container's start, both by the
//!   runtime's timestamps, medians of rounds that take turns.
//! - `kill9_to_converged`: the agent is killed; while it is down, a container ends and a manifest changes.
//!   From the agent's next start until its API shows both pods ready, one with its container restarted and
//!   one replaced, all others unchanged, and the runtime has no surplus sandbox.

use super::{Row, Statistic};
use anyhow::{Context as _, Result, bail};
use beelet_proto::cri;
use beelet_spec::cri_config::{MASKED_PATHS, READONLY_PATHS};
use beelet_tests::agent::{Agent, Options};
use beelet_tests::containerd::{Containerd, Cri, block_on};
use beelet_tests::kubelet::{self, Kubelet};
use beelet_tests::pods::PodView;
use beelet_tests::workdir::{self, PATIENCE, interrupted};
use beelet_tests::{images, manifests};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use xtask::progress::Step;

/// Bound of the median, in milliseconds.
const KNOWN: f64 = 1.0;
/// Bound of the p99, in milliseconds.
const TO_RESTART: f64 = 5.0;
/// Bound of the p99, in milliseconds.
const TO_EXITED: f64 = 60.0;
/// Bound of the p99, in milliseconds.
const CONVERGED: f64 = 5000.0;
/// Pods that must not change while the agent is down.
const BYSTANDERS: usize = 3;
/// Bound of the agent's time relative to bare calls.
const OVER_BARE: f64 = 1.15;
/// Containers per pod, each ended once.
const CONTAINERS: usize = 10;

/// Adds all rows, each as soon as it is measured.
pub(super) fn run(binary: &Path, quick: bool, rows: &mut Vec<Row>) -> Result<()> {
    let containerd = Containerd::start(&workdir::target_dir().join("bench/node"))?;
    let mut options = Options::on(&containerd);
    options.binary = Some(binary.to_path_buf());
    let mut agent = Agent::start(options)?;
    rows.extend(exits(&containerd, &agent, if quick { 3 } else { 21 }, if quick { 1 } else { 5 })?);
    rows.push(starts(&containerd, &agent, if quick { 8 } else { 40 })?);
    rows.push(kills(&containerd, &mut agent, if quick { 3 } else { 20 })?);
    drop((agent, containerd));
    let Some(row) = rows.iter_mut().find(|row| row.row == "exit_to_running") else { return Ok(()) };
    match kubelet::given() {
        Ok(kubelet) => {
            let samples = peers(&kubelet, if quick { 2 } else { 20 })?;
            row.compare.insert("kubelet", super::median(&samples));
        }
        Err(missing) => eprintln!("kubelet not measured: {missing}"),
    }
    Ok(())
}

/// Measures `exit_to_running` of a kubelet's pods with one container each.
fn peers(binary: &Path, pods: usize) -> Result<Vec<f64>> {
    let step = Step::start("lifecycle: containers ended and started again by the kubelet");
    let containerd = Containerd::start(&workdir::target_dir().join("bench/peer"))?;
    let kubelet = Kubelet::start(binary, &containerd)?;
    let socket = containerd.socket();
    let mut samples = Vec::new();
    for round in 0..pods {
        step.detail(&format!("{round} of {pods} pods"));
        let name = format!("ends{round}");
        kubelet.apply(&manifests::pod(&name, &["/bin/testapp", "pause"]))?;
        let other_than = |before: &str| {
            workdir::wait_for(&format!("a container of {name} to run"), PATIENCE, || {
                let runs = block_on(running(&socket, &name))?;
                runs.into_iter().find(|id| id != before).context("no container runs")
            })
        };
        let id = other_than("")?;
        let end = block_on(end(&socket, &id, false))?;
        let started = block_on(started_at(&socket, &other_than(&id)?))?;
        samples.push((started - end.killed) as f64 / 1e6);
        kubelet.remove(&name)?;
    }
    step.done(&format!("{} restarts", samples.len()));
    Ok(samples)
}

/// Returns the running containers of a static pod.
async fn running(socket: &Path, name: &str) -> Result<Vec<String>> {
    let mut cri = Cri::connect(socket).await?;
    let listed = cri.runtime.list_containers(cri::ListContainersRequest { filter: None }).await?;
    let of_pod = |container: &cri::Container| {
        let pod = container.labels.get("io.kubernetes.pod.name").map(String::as_str).unwrap_or_default();
        pod.strip_prefix(name).is_some_and(|rest| rest.starts_with('-'))
            && container.state() == cri::ContainerState::ContainerRunning
    };
    Ok(listed.into_inner().containers.into_iter().filter(of_pod).map(|container| container.id).collect())
}

/// Returns nanoseconds since the epoch: the clock of the runtime and of the agent's log.
pub(super) fn now_ns() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

/// Kills the containers of one pod after the other, each once; polls the runtime for the last `watched` pods.
fn exits(containerd: &Containerd, agent: &Agent, pods: usize, watched: usize) -> Result<Vec<Row>> {
    let step = Step::start("lifecycle: containers ended and started again");
    let (mut to_known, mut to_exited) = (Vec::new(), Vec::new());
    let (mut to_restart, mut at_most, mut to_running) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..pods + watched {
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
            let done = round * CONTAINERS + n;
            step.detail(&format!("{done} of {} containers", (pods + watched) * CONTAINERS));
            let id = id_of(&view, &format!("c{n}"))?;
            let watch = round >= pods;
            let end = block_on(end(&containerd.socket(), &id, watch))?;
            let asked = asked_for(agent, &name, &format!("c{n}"))?;
            let of_it = |words: &str| logged(agent, |line| line.contains(words) && line.contains(&id));
            if let Some(running) = end.running {
                at_most.push((asked - running) as f64 / 1e6);
            } else {
                let exited = of_it("the runtime confirmed")?;
                to_known.push((of_it("a container has ended")? - end.killed) as f64 / 1e6);
                to_exited.push((exited - end.killed) as f64 / 1e6);
                to_restart.push((asked - exited) as f64 / 1e6);
            }
            // The containers of a pod are started one after the other: one that ends in the meantime would
            // have to wait for that.
            let again = agent.until(&format!("c{n} of {name} to run again"), |watch| {
                let pod = watch.pod(&name)?;
                id_of(pod, &format!("c{n}")).ok().filter(|now| *now != id && pod.ready())
            })?;
            if !watch {
                let started = block_on(started_at(&containerd.socket(), &again))?;
                to_running.push((started - end.killed) as f64 / 1e6);
            }
        }
        agent.remove(&format!("{name}.yaml"))?;
        agent.until(&format!("{name} to be removed"), |watch| watch.pod(&name).is_none().then_some(()))?;
    }
    step.done(&format!("{} restarts", to_restart.len()));
    Ok(vec![
        Row::by_median("lifecycle", "exit_known", "ms", to_known, KNOWN),
        // The time in which the runtime starts a container or answers is not the agent's.
        Row::unbound("lifecycle", "exit_to_running", "ms", to_running),
        Row::new("lifecycle", "exited_to_restart", "ms", to_restart, TO_RESTART),
        Row::unbound("lifecycle", "running_to_restart", "ms", at_most),
        Row::new("lifecycle", "exit_to_exited", "ms", to_exited, TO_EXITED),
    ])
}

/// Returns the runtime's id of a pod's container.
pub(super) fn id_of(pod: &PodView, container: &str) -> Result<String> {
    let id = pod.container(container).and_then(|c| c.container_id.as_deref()?.split("//").nth(1));
    Ok(id.context("a container has no id")?.to_owned())
}

/// End of a container as observed from outside, in nanoseconds since the epoch.
struct End {
    /// Time at which its first process was killed.
    killed: i64,
    /// Last time at which the runtime reported it running, if polled.
    running: Option<i64>,
}

/// Returns the runtime's status of a container.
async fn status(cri: &mut Cri, id: &str, verbose: bool) -> Result<cri::ContainerStatusResponse> {
    let request = cri::ContainerStatusRequest { container_id: id.to_owned(), verbose };
    Ok(cri.runtime.container_status(request).await?.into_inner())
}

/// Returns the state in the runtime's list: the same state, at a lower cost for a runtime that is to be
/// timed.
async fn state(cri: &mut Cri, id: &str) -> Result<Option<cri::ContainerState>> {
    let filter = cri::ContainerFilter { id: id.to_owned(), ..Default::default() };
    let request = cri::ListContainersRequest { filter: Some(filter) };
    let listed = cri.runtime.list_containers(request).await?.into_inner().containers;
    Ok(listed.first().map(cri::Container::state))
}

/// Returns a container's first process.
pub(super) async fn first_process(cri: &mut Cri, id: &str) -> Result<Pid> {
    let verbose = status(cri, id, true).await?;
    let info = verbose.info.get("info").context("the runtime names no process")?;
    let info: serde_json::Value = serde_json::from_str(info)?;
    let pid = info["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
    pid.context("the runtime names no process")
}

/// Kills a container's first process. If `watch`, polls the runtime until it reports the end.
async fn end(socket: &Path, id: &str, watch: bool) -> Result<End> {
    let mut cri = Cri::connect(socket).await?;
    // The process is queried beforehand, so that only the kill lies between the two times.
    let pid = first_process(&mut cri, id).await?;
    let killed = now_ns();
    kill_process(pid, Signal::KILL)?;
    if !watch {
        return Ok(End { killed, running: None });
    }
    let mut running = killed;
    let deadline = Instant::now() + PATIENCE;
    loop {
        if state(&mut cri, id).await? == Some(cri::ContainerState::ContainerExited) {
            return Ok(End { killed, running: Some(running) });
        }
        running = now_ns();
        if interrupted() || Instant::now() > deadline {
            bail!("the runtime did not report that a container was killed");
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Returns the time of the first line in the agent's log that matches `is_it`.
fn logged(agent: &Agent, is_it: impl Fn(&str) -> bool) -> Result<i64> {
    let find = || -> Result<i64> {
        let log = agent.log();
        let line = log.lines().find(|line| is_it(line)).context("no such line yet")?;
        let time = line.split_whitespace().next().unwrap_or_default();
        let time: jiff::Timestamp =
            time.parse().with_context(|| format!("no timestamp at the start of {line:?}"))?;
        Ok(i64::try_from(time.as_nanosecond())?)
    };
    workdir::wait_for("a line in the agent's log", PATIENCE, find)
}

/// Returns the time at which the agent requested the container's second instance.
fn asked_for(agent: &Agent, pod: &str, container: &str) -> Result<i64> {
    let (pod, container) = (format!("pod=default/{pod}-"), format!("container=\"{container}\""));
    logged(agent, |line| {
        line.contains("starting container")
            && line.contains(&pod)
            && line.contains(&container)
            && line.contains("attempt=1")
    })
}

/// Kills the agent with SIGKILL and leaves work for the next one.
fn kills(containerd: &Containerd, agent: &mut Agent, rounds: usize) -> Result<Row> {
    let step = Step::start("lifecycle: the agent killed and started again");
    let manifest = |name: &str| manifests::pod(name, &["/bin/testapp", "pause"]);
    let bystanders: Vec<String> = (0..BYSTANDERS).map(|n| format!("stays{n}")).collect();
    for name in &bystanders {
        agent.apply(&format!("{name}.yaml"), manifest(name).to_string())?;
    }
    let mut samples = Vec::new();
    for round in 0..rounds {
        step.detail(&format!("{round} of {rounds} rounds"));
        let (ends, changes) = (format!("crashes{round}"), format!("changes{round}"));
        for name in [&ends, &changes] {
            agent.apply(&format!("{name}.yaml"), manifest(name).to_string())?;
        }
        let all = || bystanders.iter().chain([&ends, &changes]);
        let before = agent.until("all pods to run", |watch| {
            all().map(|name| watch.pod(name).filter(|pod| pod.ready()).cloned()).collect::<Option<Vec<_>>>()
        })?;
        agent.kill9();
        let id = id_of(&before[BYSTANDERS], "main")?;
        block_on(end(&containerd.socket(), &id, true))?;
        let mut changed = manifest(&changes);
        changed["metadata"]["labels"] = json!({ "version": "2" });
        agent.apply(&format!("{changes}.yaml"), changed.to_string())?;
        let began = Instant::now();
        agent.resume()?;
        agent.until("the pods to converge", |watch| {
            let now = all().map(|name| watch.pod(name)).collect::<Option<Vec<_>>>()?;
            let same = |n: usize| id_of(now[n], "main").ok() == id_of(&before[n], "main").ok();
            let (restarted, replaced) = (now[BYSTANDERS], now[BYSTANDERS + 1]);
            let right = now.iter().all(|pod| pod.ready())
                && (0..BYSTANDERS).all(|n| same(n) && now[n].restarts() == 0)
                && restarted.restarts() == 1
                && restarted.uid() == before[BYSTANDERS].uid()
                && replaced.uid() != before[BYSTANDERS + 1].uid();
            right.then_some(())
        })?;
        workdir::wait_for("the old pod's sandbox to be removed", PATIENCE, || {
            let there = block_on(sandboxes(&containerd.socket()))?;
            let right = there == BYSTANDERS + 2;
            if right { Ok(()) } else { bail!("{there} sandboxes") }
        })?;
        samples.push(began.elapsed().as_secs_f64() * 1e3);
        for name in [&ends, &changes] {
            agent.remove(&format!("{name}.yaml"))?;
            agent.until(&format!("{name} to be removed"), |watch| watch.pod(name).is_none().then_some(()))?;
        }
    }
    step.done(&format!("{} times", samples.len()));
    Ok(Row::new("lifecycle", "kill9_to_converged", "ms", samples, CONVERGED))
}

/// Returns the number of sandboxes in the runtime.
async fn sandboxes(socket: &Path) -> Result<usize> {
    let mut cri = Cri::connect(socket).await?;
    let listed = cri.runtime.list_pod_sandbox(cri::ListPodSandboxRequest { filter: None }).await?;
    Ok(listed.into_inner().items.len())
}

/// Measures pods started by the agent and by bare calls, in turns.
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
        let id = id_of(&view, "main")?;
        let started = block_on(started_at(&containerd.socket(), &id))?;
        agent.remove(&format!("{name}.yaml"))?;
        agent.until(&format!("{name} to be removed"), |watch| watch.pod(&name).is_none().then_some(()))?;
        let alone = block_on(async {
            let command = ["/bin/testapp", "pause"].map(str::to_owned);
            let pod = bare_calls(containerd, &format!("bare{round}"), &command).await?;
            pod.remove(containerd).await?;
            Ok(pod.took)
        })?;
        // The first round warms caches.
        if round > 0 {
            by_agent.push((started - began) as f64 / 1e6);
            bare.push(alone as f64 / 1e6);
        }
    }
    let (ours, theirs) = (super::median(&by_agent), super::median(&bare));
    step.done(&format!("{ours:.0} ms by the agent, {theirs:.0} ms by bare calls"));
    let ratio = ours / theirs;
    let row = Row::of("lifecycle", "manifest_to_running", "of bare CRI calls", rounds, (ratio, ratio));
    Ok(row.within(Statistic::Median, OVER_BARE))
}

/// Returns the time at which the runtime started a container.
async fn started_at(socket: &Path, id: &str) -> Result<i64> {
    let mut cri = Cri::connect(socket).await?;
    let status = status(&mut cri, id, false).await?.status;
    Ok(status.context("the runtime has no status")?.started_at)
}

/// Pod created by bare calls.
pub(super) struct Bare {
    sandbox: String,
    /// Nanoseconds from the first call to the container's start.
    took: i64,
}

impl Bare {
    /// Removes the pod.
    pub(super) async fn remove(&self, containerd: &Containerd) -> Result<()> {
        let mut cri = Cri::connect(&containerd.socket()).await?;
        let pod_sandbox_id = self.sandbox.clone();
        cri.runtime.stop_pod_sandbox(cri::StopPodSandboxRequest { pod_sandbox_id }).await?;
        let pod_sandbox_id = self.sandbox.clone();
        cri.runtime.remove_pod_sandbox(cri::RemovePodSandboxRequest { pod_sandbox_id }).await?;
        Ok(())
    }
}

/// Returns the time of the most recent container start, by the runtime's timestamp.
pub(super) async fn last_start(socket: &Path) -> Result<i64> {
    let mut cri = Cri::connect(socket).await?;
    let listed = cri.runtime.list_containers(cri::ListContainersRequest { filter: None }).await?;
    let mut last = 0;
    for container in listed.into_inner().containers {
        let status = status(&mut cri, &container.id, false).await?.status;
        last = last.max(status.context("the runtime has no status")?.started_at);
    }
    Ok(last)
}

/// Creates the same pod by three consecutive calls, timed by the same timestamp as the agent's pod. The
/// request equals the agent's: an own cgroup in the place of the agent's pods, the mounted files, and the
/// hidden paths.
pub(super) async fn bare_calls(containerd: &Containerd, name: &str, command: &[String]) -> Result<Bare> {
    let mut cri = Cri::connect(&containerd.socket()).await?;
    let logs = containerd.dir().join("bare-logs").join(name);
    std::fs::create_dir_all(logs.join("main"))?;
    let mount = |file: &str, container_path: &str| -> Result<cri::Mount> {
        let host_path = logs.join(file);
        std::fs::write(&host_path, "")?;
        let host_path = host_path.display().to_string();
        Ok(cri::Mount { host_path, container_path: container_path.to_owned(), ..Default::default() })
    };
    let mounts = vec![mount("hosts", "/etc/hosts")?, mount("words", "/dev/termination-log")?];
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
            cgroup_parent: format!("{}/kubepods/besteffort/pod{name}", containerd.cgroup().path()),
            security_context: Some(cri::LinuxSandboxSecurityContext {
                namespace_options: Some(namespaces()),
                seccomp: Some(cri::SecurityProfile {
                    profile_type: cri::security_profile::ProfileType::RuntimeDefault.into(),
                    localhost_ref: String::new(),
                }),
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    };
    let paths = |list: &[&str]| list.iter().map(|path| (*path).to_owned()).collect();
    let container_config = cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: "main".to_owned(), attempt: 0 }),
        image: Some(cri::ImageSpec { image: images::APP.to_owned(), ..Default::default() }),
        command: command.to_vec(),
        labels: HashMap::new(),
        mounts,
        log_path: "main/0.log".to_owned(),
        linux: Some(cri::LinuxContainerConfig {
            resources: Some(cri::LinuxContainerResources {
                cpu_shares: 2,
                oom_score_adj: 1000,
                ..Default::default()
            }),
            security_context: Some(cri::LinuxContainerSecurityContext {
                namespace_options: Some(namespaces()),
                masked_paths: paths(MASKED_PATHS),
                readonly_paths: paths(READONLY_PATHS),
                ..Default::default()
            }),
        }),
        ..Default::default()
    };
    let began = now_ns();
    let request =
        cri::RunPodSandboxRequest { config: Some(sandbox_config.clone()), runtime_handler: String::new() };
    let sandbox = cri.runtime.run_pod_sandbox(request).await?.into_inner().pod_sandbox_id;
    let request = cri::CreateContainerRequest {
        pod_sandbox_id: sandbox.clone(),
        config: Some(container_config),
        sandbox_config: Some(sandbox_config),
    };
    let container_id = cri.runtime.create_container(request).await?.into_inner().container_id;
    cri.runtime.start_container(cri::StartContainerRequest { container_id: container_id.clone() }).await?;
    let status = status(&mut cri, &container_id, false).await?.status;
    let took = status.context("the runtime has no status")?.started_at - began;
    Ok(Bare { sandbox, took })
}

fn namespaces() -> cri::NamespaceOption {
    cri::NamespaceOption {
        network: cri::NamespaceMode::Pod.into(),
        pid: cri::NamespaceMode::Container.into(),
        ipc: cri::NamespaceMode::Pod.into(),
        ..Default::default()
    }
}
