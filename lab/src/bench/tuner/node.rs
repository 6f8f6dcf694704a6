//! Single run: an agent of its own, with the server and its neighbours as pods.

use super::HOG;
use super::scenarios::{Neighbour, Scenario, Work};
use crate::bench::owner::pause;
use anyhow::{Context as _, Result, bail};
use beelet_tests::agent::{Agent, Options};
use beelet_tests::cgroup_values::pod_path;
use beelet_tests::containerd::Containerd;
use beelet_tests::guards::{Process, remove_cgroups};
use beelet_tests::machine::{cpu_seconds_of, memory_kib, stolen_seconds};
use beelet_tests::workdir::{self, PATIENCE, interrupted, wait_for};
use beelet_tests::{images, manifests, ports};
use serde_json::{Value, json};
use std::fmt;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Requests per second, and microseconds of CPU per request: three tenths of a CPU, which the server
/// requests.
const LOAD: (&str, &str) = ("300", "1000");
const REQUESTS: (&str, &str) = ("300m", "64Mi");
/// The same of a server that may have a CPU for itself.
const WHOLE: (&str, &str) = ("1", "64Mi");
/// Memory of all pods in MiB in scenarios that are short of memory.
const SHORT_MIB: u64 = 512;
/// Size of the server's file there in MiB: less than its request. Each page is read about every two seconds.
const DATA_MIB: &str = "32";

/// Durations in seconds.
#[derive(Clone, Copy)]
pub(super) struct Lengths {
    pub(super) warm_up: u32,
    pub(super) measured: u32,
}

/// Mode of the tuner.
#[derive(Clone, Copy)]
pub(super) enum Mode {
    Off,
    Enforce,
    /// `Enforce` with caps on CPU use on any kernel.
    Capped,
    /// Without the tuner, with `cpuManagerPolicy: static`.
    Pinned,
}

/// Measurements of a run.
pub(super) struct Run {
    /// Latencies in milliseconds by percentile (0 to 100), in ascending order.
    latencies: Vec<(f64, f64)>,
    /// CPUs used by the server and by all others.
    pub(super) server: f64,
    pub(super) others: f64,
    /// Longest time in which all threads of a neighbour were stalled on memory, in percent.
    pub(super) stood_still: f64,
    /// CPUs that the hypervisor gave to others during the run.
    pub(super) stolen: f64,
    /// Milliseconds from the start of the interference to the tuner's first step.
    pub(super) reaction: Option<f64>,
}

impl Run {
    pub(super) fn at(&self, percentile: f64) -> f64 {
        let found = self.latencies.iter().find(|(at, _)| *at >= percentile - 1e-6);
        found.or(self.latencies.last()).map_or(f64::NAN, |(_, latency)| *latency)
    }

    /// Returns percentiles and milliseconds.
    pub(super) fn latencies(&self) -> &[(f64, f64)] {
        &self.latencies
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [p50, p99, p999] = [50.0, 99.0, 99.9].map(|percentile| self.at(percentile));
        let Run { server, others, stood_still, stolen, .. } = self;
        write!(
            f,
            "p50 {p50:.2} p99 {p99:.2} p99.9 {p999:.2} ms, server {server:.2} others {others:.2} stolen {stolen:.2} CPUs"
        )?;
        if *stood_still > 0.0 { write!(f, ", stalled {stood_still:.1} %") } else { Ok(()) }
    }
}

/// Environment of the runs.
pub(super) struct Node<'a> {
    pub(super) containerd: &'a Containerd,
    pub(super) binary: &'a Path,
    pub(super) lengths: Lengths,
}

/// Process outside of pods, in its own cgroups next to theirs.
struct Daemon {
    _process: Process,
    port: u16,
    cgroups: Vec<PathBuf>,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Err(error) = remove_cgroups(&self.cgroups) {
            eprintln!("cannot remove the daemon's cgroups: {error:#}");
        }
    }
}

impl Node<'_> {
    /// Measures the server under this interference, or alone.
    pub(super) fn measure(&self, scenario: Option<&Scenario>, mode: Mode) -> Result<Run> {
        let times = scenario.map_or(1, |scenario| scenario.times);
        let seconds =
            if self.lengths.measured < 60 { self.lengths.measured } else { self.lengths.measured * times };
        let (mut agent, logs) = self.start(scenario, mode)?;
        let neighbours: &[Neighbour] = scenario.map_or(&[], |scenario| scenario.neighbours);
        let (mut quiet, mut others, mut daemons) = (Vec::new(), Vec::new(), Vec::new());
        for neighbour in neighbours {
            if let Work::Daemon(_) = neighbour.work {
                let daemon = self.daemon(neighbour)?;
                quiet.push(("127.0.0.1".to_owned(), daemon.port));
                daemons.push(daemon);
                continue;
            }
            agent.apply(&format!("{}.yaml", neighbour.name), neighbour.manifest()?.to_string())?;
            let (uid, ip) = running(&agent, neighbour.name)?;
            others.push(pod_path(neighbour.qos(), &uid));
            quiet.push((ip, HOG));
        }
        let server = self.server(seconds, scenario);
        agent.apply("server.yaml", server.to_string())?;
        let (uid, ip) = running(&agent, "server")?;
        quiet.push((ip, HOG));
        // From now on the server may have to wait.
        let noise = jiff::Timestamp::now();
        for (ip, port) in quiet {
            wait_for(&format!("{ip}:{port} to accept the start signal"), PATIENCE, || {
                TcpStream::connect((ip.as_str(), port))
            })?;
        }
        let log = Log { folder: logs, uid: uid.clone() };
        log.wait_for("measuring")?;
        let pins = scenario.is_some_and(|scenario| scenario.pins);
        let server = pod_path(if pins { "Guaranteed" } else { "Burstable" }, &uid);
        let (before, began) = (self.used(&server, &others)?, Instant::now());
        // The pod's cgroup is removed with the server, so the last reading is a moment earlier.
        pause(Duration::from_secs(seconds.into()).mul_f64(0.95).saturating_sub(began.elapsed()))?;
        let (after, took) = (self.used(&server, &others)?, began.elapsed().as_secs_f64());
        let latencies = parse(&log.wait_for("result ")?)?;
        let reaction = first_step(&agent, noise)?;
        agent.terminate()?;
        let [server, others, stolen, still] = std::array::from_fn(|i| (after[i] - before[i]) / took);
        Ok(Run { latencies, server, others, stood_still: 100.0 * still, stolen, reaction })
    }

    fn start(&self, scenario: Option<&Scenario>, mode: Mode) -> Result<(Agent, PathBuf)> {
        let name = scenario.map_or("alone", |scenario| scenario.name);
        let tuner = match mode {
            Mode::Off | Mode::Pinned => json!({ "mode": "off" }),
            Mode::Enforce => json!({ "mode": "enforce" }),
            Mode::Capped => json!({ "mode": "enforce", "cpuCaps": "always" }),
        };
        let mut options =
            Options::named(self.containerd, name).beelet("tuner", tuner).beelet("stopPodsOnExit", true);
        if scenario.is_some_and(|scenario| scenario.short_of_memory) {
            // No pod may be evicted, since that would end the measurement.
            let reserved = format!("{}Ki", memory_kib()? - SHORT_MIB * 1024);
            options = options.kubelet("systemReserved", json!({ "memory": reserved }));
            options = options.kubelet("evictionHard", json!({ "memory.available": "0%" }));
        }
        if let Mode::Pinned = mode {
            options = options.kubelet("cpuManagerPolicy", "static").kubelet("reservedSystemCPUs", "0");
        }
        options.binary = Some(self.binary.to_path_buf());
        let logs = PathBuf::from(options.kubelet["podLogsDir"].as_str().unwrap_or_default());
        Ok((Agent::start(options)?, logs))
    }

    fn server(&self, seconds: u32, scenario: Option<&Scenario>) -> Value {
        let (warm_up, seconds, port) =
            (self.lengths.warm_up.to_string(), seconds.to_string(), HOG.to_string());
        let mut command = vec![
            "/bin/testapp",
            "latency",
            "--on",
            &port,
            "--rate",
            LOAD.0,
            "--work",
            LOAD.1,
            "--warm-up",
            &warm_up,
            "--seconds",
            &seconds,
        ];
        if scenario.is_some_and(|scenario| scenario.short_of_memory) {
            command.extend(["--data", DATA_MIB]);
        }
        let limit = scenario.map_or("", |scenario| scenario.limit);
        let (requests, limits) = match scenario.is_some_and(|scenario| scenario.pins) {
            true => (WHOLE, WHOLE),
            false => (REQUESTS, (limit, "")),
        };
        let mut pod = manifests::with_resources(manifests::pod("server", &command), requests, limits);
        pod["spec"]["restartPolicy"] = json!("Never");
        pod
    }

    /// Starts the daemon, which is idle at first.
    fn daemon(&self, neighbour: &Neighbour) -> Result<Daemon> {
        let [kind, number] = neighbour.work.words()?;
        let [port] = ports::free()?;
        let child = Command::new(images::testapp()?)
            .args(["hog", "--on", &port.to_string(), &kind, &number])
            .stdin(Stdio::null())
            .spawn()
            .context("cannot start the daemon")?;
        let (pid, process) = (child.id().to_string(), Process(child));
        let cgroups = self.containerd.cgroup().make_child(neighbour.name)?;
        let daemon = Daemon { _process: process, port, cgroups };
        for dir in &daemon.cgroups {
            workdir::write(&dir.join("cgroup.procs"), &pid)?;
        }
        Ok(daemon)
    }

    /// Returns the seconds of CPU time used by the server and by the others, those stolen by the hypervisor,
    /// and the seconds in which one of the others was stalled on memory.
    fn used(&self, server: &str, others: &[String]) -> Result<[f64; 4]> {
        let root = self.containerd.cgroup();
        let mut used = [cpu_seconds_of(root, server)?, 0.0, stolen_seconds()?, 0.0];
        for other in others {
            used[1] += cpu_seconds_of(root, other)?;
            let pressure = root.folder("unified", other).map(|dir| dir.join("memory.pressure"));
            let text =
                pressure.map_or(String::new(), |file| std::fs::read_to_string(file).unwrap_or_default());
            let full = text
                .lines()
                .find_map(|line| line.strip_prefix("full ")?.rsplit_once("total=")?.1.parse::<f64>().ok());
            used[3] = used[3].max(full.unwrap_or(0.0) / 1e6);
        }
        Ok(used)
    }
}

/// Waits until the pod runs; returns its UID and address.
fn running(agent: &Agent, name: &str) -> Result<(String, String)> {
    agent.until(&format!("{name} to run"), |watch| {
        let pod = watch.pod(name)?;
        let ip = pod.ip()?;
        (pod.phase() == "Running").then(|| (pod.uid().to_owned(), ip.to_owned()))
    })
}

/// Log of the server in the runtime's format: lines of `TIME STREAM TAG TEXT`.
struct Log {
    folder: PathBuf,
    uid: String,
}

impl Log {
    fn wait_for(&self, start: &str) -> Result<String> {
        let mut waited = Duration::ZERO;
        loop {
            let text = self.read().unwrap_or_default();
            let found = text.lines().filter_map(|line| line.splitn(4, ' ').nth(3));
            if let Some(line) = found.into_iter().find(|line| line.starts_with(start)) {
                return Ok(line.to_owned());
            }
            if interrupted() || waited > PATIENCE {
                bail!("the server's log has no line starting with {start:?}; its log:\n{text}");
            }
            // A log file cannot be watched simply, so poll.
            std::thread::sleep(Duration::from_millis(20));
            waited += Duration::from_millis(20);
        }
    }

    fn read(&self) -> Result<String> {
        let folders = std::fs::read_dir(&self.folder)?.flatten();
        let mine = folders.map(|entry| entry.path()).find(|path| path.to_string_lossy().ends_with(&self.uid));
        workdir::read(&mine.context("no log yet")?.join("main/0.log"))
    }
}

/// Parses `result N PERCENTILE:MICROSECONDS …`.
fn parse(result: &str) -> Result<Vec<(f64, f64)>> {
    let latency = |word: &str| {
        let (percentile, micros) =
            word.split_once(':').with_context(|| format!("invalid percentile {word:?}"))?;
        Ok((percentile.parse()?, micros.parse::<f64>()? / 1000.0))
    };
    result.split(' ').skip(2).map(latency).collect()
}

/// Returns the time of the tuner's first step, in milliseconds after `since`, or None if it made none. The
/// history also has the steps of earlier runs.
fn first_step(agent: &Agent, since: jiff::Timestamp) -> Result<Option<f64>> {
    let output = agent.cli(&["tune", "history", "-o", "json"]).output().context("cannot query the tuner")?;
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let step: Value = serde_json::from_str(line)?;
        let at: jiff::Timestamp = step["at"].as_str().context("a step without a time")?.parse()?;
        if at >= since {
            return Ok(Some(at.duration_since(since).as_secs_f64() * 1000.0));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_read_back() {
        let latencies = parse("result 3 0.0000:1000 50.0000:2500 99.0000:4000").unwrap();
        assert_eq!(latencies.len(), 3);
        let run = Run { latencies, server: 0.0, others: 0.0, stood_still: 0.0, stolen: 0.0, reaction: None };
        assert_eq!((run.at(50.0), run.at(99.0), run.at(99.9)), (2.5, 4.0, 4.0));
        assert!(parse("result 3 50").is_err());
    }
}
