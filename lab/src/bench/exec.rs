//! Cost of exec probes on real pods: the CPU time of all processes (agent, helper, runtime, shims, commands),
//! with the runtime's `ExecSync` and with the helper `beelet-exec`, on the same pods in one run. The probes
//! change in place, so no container restarts in between.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use beelet_tests::agent::{Agent, Options};
use beelet_tests::containerd::Containerd;
use beelet_tests::guards::CgroupRoot;
use beelet_tests::helper::Helper;
use beelet_tests::manifests;
use beelet_tests::workdir::{self, PATIENCE, unique, wait_for};
use serde_json::{Value, json};
use xtask::progress::Step;

use super::Row;

/// Number of pods, and of containers of each.
const PODS: (usize, usize) = (10, 10);
/// Period of each probe, in seconds.
const PERIOD: u64 = 10;
/// Fraction of `ExecSync`'s CPU time that the helper may take.
const GOAL: f64 = 0.2;

/// Returns the row of 100 exec probes every 10 seconds.
pub(super) fn run(binary: &Path, quick: bool) -> Result<Row> {
    let periods = if quick { 2 } else { 6 };
    // The daemons have a cgroup of their own, whose counter includes processes that have ended.
    let daemons = CgroupRoot::new(&unique("bench-exec"))?;
    let containerd = Containerd::start(&workdir::target_dir().join("bench/exec"))?;
    let helper = Helper::beside(binary, containerd.dir())?;
    let mut options = Options::on(&containerd);
    options.binary = Some(binary.to_path_buf());
    let socket = helper.socket().to_str().context("the socket's path is not text")?;
    let agent = Agent::start(options.beelet("execSocket", socket).kubelet("maxPods", 2 * PODS.0))?;
    let step = Step::start("exec probes: pods start");
    apply(&agent, "runtime")?;
    wait(&agent, "exec")?;
    step.done("");
    let pids = [agent.pid(), containerd.pid(), Some(helper.pid())].into_iter().flatten();
    for pid in pids.chain(shims(containerd.dir())) {
        let file = counted(&daemons)?.join("cgroup.procs");
        std::fs::write(file, pid.to_string()).context("cannot move a daemon")?;
    }
    let measure = |name: &str| -> Result<Vec<f64>> {
        let step = Step::start(format!("exec probes: {name}"));
        let mut samples = Vec::new();
        for _ in 0..periods {
            let (at, before) = (Instant::now(), used(&daemons)? + used(containerd.cgroup())?);
            std::thread::sleep(Duration::from_secs(PERIOD));
            let used = used(&daemons)? + used(containerd.cgroup())? - before;
            samples.push(100.0 * used.as_secs_f64() / at.elapsed().as_secs_f64());
        }
        step.done("");
        Ok(samples)
    };
    let by_runtime = measure("ExecSync")?;
    apply(&agent, "direct")?;
    wait(&agent, "direct")?;
    let direct = measure("beelet-exec")?;
    apply(&agent, "none")?;
    std::thread::sleep(Duration::from_secs(2));
    let idle = measure("no probes")?;
    let goal = GOAL * median(&by_runtime);
    drop((agent, helper, containerd));
    Ok(Row::by_median("probes", "cpu_100_exec_all", "% core", direct, goal)
        .beside("ExecSync", by_runtime)
        .beside("no probes", idle))
}

fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}

/// Writes the manifests: with probes by the runtime or by the helper, or without.
fn apply(agent: &Agent, exec: &str) -> Result<()> {
    for pod in 0..PODS.0 {
        let name = format!("exec{pod}");
        let mut manifest = manifests::pod(&name, &["/bin/testapp", "pause"]);
        let container = |number| {
            let mut container = manifest["spec"]["containers"][0].clone();
            container["name"] = json!(format!("c{number}"));
            if exec != "none" {
                container["readinessProbe"] = json!({ "exec": { "command": ["/bin/sh", "-c", "exit 0"] }, "periodSeconds": PERIOD, "timeoutSeconds": 9 });
            }
            container
        };
        let containers: Vec<Value> = (0..PODS.1).map(container).collect();
        manifest["spec"]["containers"] = json!(containers);
        if exec != "none" {
            manifest["metadata"]["annotations"] = json!({ "beelet.dev/probes": format!("exec={exec}") });
        }
        agent.apply(&format!("{name}.yaml"), manifest.to_string())?;
    }
    Ok(())
}

/// Waits until all probes have this mode and have succeeded.
fn wait(agent: &Agent, mode: &str) -> Result<()> {
    wait_for(&format!("all probes to be of mode {mode}"), 3 * PATIENCE, || {
        let output = agent.cli(&["probe", "ls", "-o", "json"]).output()?;
        let all: Vec<Value> = serde_json::from_slice(&output.stdout).context("no list")?;
        let done = |probe: &&Value| probe["mode"] == mode && probe["last"]["outcome"] == "success";
        let count = all.iter().filter(done).count();
        if count == PODS.0 * PODS.1 { Ok(()) } else { bail!("{count} of {}", all.len()) }
    })
}

/// Returns the pids of the shims of the containerd in this folder.
fn shims(dir: &Path) -> Vec<u32> {
    let dir = dir.to_string_lossy().into_owned();
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_shim = |pid: &u32| {
        let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
        read("comm").starts_with("containerd-shim") && read("cmdline").contains(&dir)
    };
    pids.filter(is_shim).collect()
}

/// Returns the folder whose counter of CPU time is read.
fn counted(cgroup: &CgroupRoot) -> Result<PathBuf> {
    cgroup.dir("cpuacct").context("no hierarchy counts CPU time")
}

/// Returns the CPU time of all processes that are or were below a cgroup.
fn used(cgroup: &CgroupRoot) -> Result<Duration> {
    let dir = counted(cgroup)?;
    if let Ok(text) = std::fs::read_to_string(dir.join("cpuacct.usage")) {
        return Ok(Duration::from_nanos(text.trim().parse()?));
    }
    let text = workdir::read(&dir.join("cpu.stat"))?;
    let micros = text.lines().find_map(|line| line.strip_prefix("usage_usec "));
    Ok(Duration::from_micros(micros.context("no usage_usec")?.parse()?))
}
