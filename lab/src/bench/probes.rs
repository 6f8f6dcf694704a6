//! Cost and reaction time of probes.
//!
//! On real pods: from right before listen(2) or close(2) inside a pod, by the pod's own clock reading, to the
//! change of readiness at a client of the agent (receipt of the event on the WatchPods stream); and from
//! right before kill(2) of the listening process. That process is a child of the container's first process,
//! which keeps running: the container does not end, so the lost listener is the only sign. The probe has the
//! default settings (every 10 s, 3 failures), so that polling cannot explain the result.
//!
//! The other rows measure the agent's probes alone, in their own network namespace
//! (`bench/src/bin/probe_load.rs`), where every counted connection is theirs. Shares of a core are per second
//! and those of the agent's probes, without the servers.

use super::{Row, lifecycle};
use anyhow::{Context as _, Result, bail};
use beelet_tests::agent::{Agent, Control, Options, monotonic_ns};
use beelet_tests::containerd::{Containerd, Cri, block_on};
use beelet_tests::manifests::{self, CONTROL, PORT};
use beelet_tests::pods::PodView;
use beelet_tests::workdir::{self, PATIENCE, interrupted};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;
use xtask::progress::Step;
use xtask::shell;

/// Bound of the p99, in milliseconds.
const BOUND: f64 = 5.0;

/// Warm-up rounds, for caches and lazily created connections.
const WARM_UP: usize = 5;

/// Adds all rows, each as soon as it is measured.
pub(super) fn run(binary: &Path, quick: bool, rows: &mut Vec<Row>) -> Result<()> {
    let rounds = if quick { 100 } else { 2000 };
    let containerd = Containerd::start(&workdir::target_dir().join("bench/node"))?;
    let mut options = Options::on(&containerd);
    options.binary = Some(binary.to_path_buf());
    let agent = Agent::start(options)?;
    agent.apply("bench.yaml", manifests::serving("bench").to_string())?;
    let pod =
        agent.until("the pod to be ready", |watch| watch.pod("bench").filter(|pod| pod.ready()).cloned())?;
    let mut control = Control::connect(pod.ip().context("the pod has no address")?, CONTROL)?;

    let changes = watch_readiness(&agent, "bench")?;
    let step = Step::start("probes: listeners opened and closed");
    let (to_ready, to_not_ready) = listeners(&mut control, &changes, rounds, &step)?;
    step.done(&format!("{rounds} rounds"));
    let first = block_on(first_process_of(&containerd, &pod))?;
    let to_dead = kills(&mut control, &changes, first, if quick { 20 } else { 500 })?;
    drop((control, agent, containerd));
    let driver = Driver::build()?;
    let polled = driver.run(&["edges", "connect", if quick { "2" } else { "20" }])?;
    rows.extend([
        Row::new("probes", "listen_to_ready", "ms", to_ready, BOUND)
            .beside("connect, 1 s", field(&polled, "listen_ms")),
        Row::new("probes", "close_to_not_ready", "ms", to_not_ready, BOUND)
            .beside("connect, 1 s", field(&polled, "close_ms")),
        Row::new("probes", "kill9_to_not_ready", "ms", to_dead, BOUND)
            .beside("connect, 1 s", field(&polled, "kill_ms")),
    ]);
    rows.extend(latencies(&driver, quick)?);
    costs(&driver, quick, rows)?;
    rows.push(super::exec::run(binary, quick)?);
    Ok(())
}

/// Adds only the rows of exec probes on real pods, and of HTTP probes that reuse connections.
pub(super) fn connections(binary: &Path, quick: bool, rows: &mut Vec<Row>) -> Result<()> {
    rows.extend(http(&Driver::build()?, quick)?);
    rows.push(super::exec::run(binary, quick)?);
    Ok(())
}

/// Returns the rows of 1,000 HTTP probes per second, with connections that are used again.
fn http(driver: &Driver, quick: bool) -> Result<Vec<Row>> {
    let seconds = if quick { "3" } else { "30" };
    let reuse = driver.run(&["cost", "http-reuse", "1000", "1000", seconds])?;
    let fresh = driver.run(&["cost", "http", "1000", "1000", seconds])?;
    Ok(vec![
        Row::by_median("probes", "cpu_1000_http_1s", "% core", field(&reuse, "percent"), 5.0)
            .beside("fresh", field(&fresh, "percent")),
        left("time_wait_1000_http", ["time_wait_before", "time_wait_after"], &reuse, &fresh),
    ])
}

/// Closes and opens a pod's listener repeatedly. Returns the milliseconds from right before listen(2) until
/// the client sees the pod ready, and from right before close(2) until it sees the pod not ready.
pub(super) fn listeners(
    control: &mut Control,
    changes: &mpsc::Receiver<Change>,
    rounds: usize,
    step: &Step,
) -> Result<(Vec<f64>, Vec<f64>)> {
    let (mut to_ready, mut to_not_ready) = (Vec::new(), Vec::new());
    for round in 0..WARM_UP + rounds {
        step.detail(&format!("{round} of {} rounds", WARM_UP + rounds));
        for (command, ready, samples) in [("close", false, &mut to_not_ready), ("open", true, &mut to_ready)]
        {
            let called = control.send(&format!("{command} {PORT}"))?;
            let received = next_change(changes, ready)?;
            if round >= WARM_UP {
                samples.push(received.saturating_sub(called) as f64 / 1e6);
            }
        }
    }
    Ok((to_ready, to_not_ready))
}

/// Returns the first process of the pod's container, as numbered on this machine.
async fn first_process_of(containerd: &Containerd, pod: &PodView) -> Result<Pid> {
    let mut cri = Cri::connect(&containerd.socket()).await?;
    lifecycle::first_process(&mut cri, &lifecycle::id_of(pod, "main")?).await
}

/// Kills the listening process inside the pod repeatedly. Returns the milliseconds from right before kill(2)
/// until the client sees the pod not ready.
fn kills(
    control: &mut Control,
    changes: &mpsc::Receiver<Change>,
    first: Pid,
    rounds: usize,
) -> Result<Vec<f64>> {
    let step = Step::start("probes: listening processes killed");
    control.send(&format!("close {PORT}"))?;
    next_change(changes, false)?;
    let mut samples = Vec::new();
    for round in 0..WARM_UP + rounds {
        step.detail(&format!("{round} of {} rounds", WARM_UP + rounds));
        control.send(&format!("child {PORT}"))?;
        next_change(changes, true)?;
        let listener = child_of(first)?;
        let killed = monotonic_ns();
        kill_process(listener, Signal::KILL)?;
        let received = next_change(changes, false)?;
        if round >= WARM_UP {
            samples.push(received.saturating_sub(killed) as f64 / 1e6);
        }
    }
    step.done(&format!("{rounds} rounds"));
    Ok(samples)
}

/// Returns the only child of a process.
fn child_of(parent: Pid) -> Result<Pid> {
    let tasks = PathBuf::from(format!("/proc/{}/task", parent.as_raw_nonzero()));
    let mut children = String::new();
    for task in std::fs::read_dir(&tasks)? {
        children += &workdir::read(&task?.path().join("children"))?;
    }
    // A killed process may remain until its parent has reaped it.
    let newest = children.split_whitespace().filter_map(|pid| pid.parse().ok()).max();
    newest.and_then(Pid::from_raw).context("no process listens in the pod")
}

/// Returns the rows of the probes alone that are times.
fn latencies(driver: &Driver, quick: bool) -> Result<Vec<Row>> {
    let rounds = |many: usize, few: usize| if quick { few.to_string() } else { many.to_string() };
    let hang = driver.run(&["hang", "kernel", &rounds(20, 2)])?;
    let hang_connect = driver.run(&["hang", "connect", &rounds(10, 1)])?;
    let jitter = |mode: &str, others: &str, rounds: String| driver.run(&["jitter", mode, others, &rounds]);
    let (connect, kernel, beside) = (
        jitter("connect", "0", rounds(60, 5))?,
        jitter("kernel", "0", rounds(600, 15))?,
        jitter("kernel", "1000", rounds(600, 15))?,
    );
    let look = driver.run(&["lookup", "1000"])?;
    Ok(vec![
        // At most a period until the poll that finds the connection, plus the timeout until the verdict.
        // connect() sees nothing before the queue (128) is full; calls fill it there.
        Row::new("probes", "hang_to_not_ready", "ms", field(&hang, "ms"), 2250.0)
            .beside("connect, 100 calls/s", field(&hang_connect, "ms")),
        Row::new("probes", "jitter_100ms_connect", "ms", field(&connect, "ms"), 10.0),
        Row::new("probes", "jitter_100ms_kernel", "ms", field(&kernel, "ms"), 10.0),
        Row::new("probes", "jitter_100ms_of_1001", "ms", field(&beside, "ms"), 10.0),
        Row::new("probes", "look_at_1000_ports", "ns", field(&look, "program_ns"), 2000.0)
            .beside("sock_diag", field(&look, "sock_diag_ns")),
    ])
}

/// Numbers of probes, with the row of the kernel mode and its bound in percent of a core.
const COSTS: [(usize, &str, f64); 4] = [
    (10, "cpu_10_tcp", 0.2),
    (100, "cpu_100_tcp", 0.2),
    (1000, "cpu_1000_tcp", 0.2),
    (5000, "cpu_5000_tcp", 1.0),
];

/// Adds the rows of the probes alone that are shares of a core or numbers of sockets.
fn costs(driver: &Driver, quick: bool, rows: &mut Vec<Row>) -> Result<()> {
    let seconds = if quick { "2" } else { "20" };
    for (number, name, bound) in COSTS {
        let probes = number.to_string();
        let kernel = driver.run(&["cost", "kernel", &probes, "1000", seconds])?;
        // Samples are per second. Polls that coincide once per second fall into one sample or into the next.
        let row = Row::by_median("probes", name, "% core", field(&kernel, "percent"), bound);
        if quick && number < 1000 {
            rows.push(row);
            continue;
        }
        let connect = driver.run(&["cost", "connect", &probes, "1000", seconds])?;
        rows.push(row.beside("connect", field(&connect, "percent")));
        if number == 1000 {
            rows.push(
                Row::new("probes", "opened_1000_tcp", "", field(&kernel, "opened"), 0.0)
                    .beside("connect", field(&connect, "opened")),
            );
            // In addition: the probed listeners are sockets too.
            rows.push(left("sockets_1000_tcp", ["sockets_before", "sockets_after"], &kernel, &connect));
            rows.push(left("time_wait_1000_tcp", ["time_wait_before", "time_wait_after"], &kernel, &connect));
        }
    }
    let seconds = if quick { "3" } else { "30" };
    let http = driver.run(&["cost", "http", "1000", "10000", seconds])?;
    rows.push(Row::new("probes", "cpu_1000_http_10s", "% core", field(&http, "percent"), 10.0));
    rows.extend(self::http(driver, quick)?);
    let exec = driver.run(&["cost", "exec", "100", "10000", seconds])?;
    rows.push(Row::new("probes", "cpu_100_exec_10s", "% core", field(&exec, "percent"), 10.0));
    Ok(())
}

/// Returns by how much the number of sockets of a kind, as counted by `ss -s`, is higher after the polls of
/// the first way than before; and the same of the second way, by connecting.
fn left(row: &'static str, names: [&str; 2], first: &[Value], connect: &[Value]) -> Row {
    let [before, after] = names.map(|name| field(first, name));
    let more = before.iter().zip(&after).map(|(before, after)| after - before).collect();
    Row::new("probes", row, "", more, 0.0)
        .beside("before", before)
        .beside("after", after)
        .beside("connect, before", field(connect, names[0]))
        .beside("connect, after", field(connect, names[1]))
}

/// Driver that runs the probes alone.
struct Driver {
    binary: PathBuf,
}

impl Driver {
    fn build() -> Result<Driver> {
        let step = Step::start("build the driver of the probes, optimised");
        step.run(shell::cargo().args([
            "build",
            "--release",
            "--package",
            "beelet",
            "--package",
            "bench",
            "--bin",
            "probe_load",
        ]))?;
        step.done("");
        Ok(Driver { binary: workdir::target_dir().join("release/probe_load") })
    }

    /// Runs the driver; returns its output, one object per line.
    fn run(&self, arguments: &[&str]) -> Result<Vec<Value>> {
        let step = Step::start(format!("probes: {}", arguments.join(" ")));
        let output =
            Command::new(&self.binary).args(arguments).output().context("cannot start the driver")?;
        if !output.status.success() {
            bail!("probe_load {} failed: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr));
        }
        let text = String::from_utf8_lossy(&output.stdout);
        let values = text.lines().map(serde_json::from_str).collect::<Result<_, _>>();
        step.done("");
        values.with_context(|| format!("the driver printed invalid JSON: {text}"))
    }
}

/// Returns a field of every object.
fn field(values: &[Value], name: &str) -> Vec<f64> {
    values.iter().filter_map(|value| value.get(name)?.as_f64()).collect()
}

/// Change of the pod's readiness, with the time at which it was received.
pub(super) struct Change {
    pub(super) ready: bool,
    pub(super) at: u64,
}

/// Watches a pod on a separate thread, which timestamps every change on arrival.
pub(super) fn watch_readiness(agent: &Agent, pod: &str) -> Result<mpsc::Receiver<Change>> {
    let (mut last, pod) = (false, pod.to_owned());
    super::watch_pods(agent, move |watch, at| {
        let ready = watch.pod(&pod).is_some_and(PodView::ready);
        (std::mem::replace(&mut last, ready) != ready).then_some(Change { ready, at })
    })
}

pub(super) fn next_change(changes: &mpsc::Receiver<Change>, expected: bool) -> Result<u64> {
    let mut waited = Duration::ZERO;
    loop {
        let slice = Duration::from_millis(200);
        match changes.recv_timeout(slice) {
            Ok(Change { ready, at }) if ready == expected => return Ok(at),
            Ok(Change { ready, .. }) => {
                bail!("the pod became ready={ready} unexpectedly")
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => bail!("the agent's event stream broke"),
            Err(mpsc::RecvTimeoutError::Timeout) if interrupted() => bail!("interrupted"),
            Err(mpsc::RecvTimeoutError::Timeout) => waited += slice,
        }
        if waited > PATIENCE {
            bail!("waited {} s for the pod to become ready={expected}", PATIENCE.as_secs());
        }
    }
}
