//! Node of a cluster as seen by a client of the API server, with an own etcd, kube-apiserver and containerd.
//!
//! All times are those of a watcher of the pod: from the request (or the test app's system call) to the event
//! that reports the change. The pods have a TCP readiness probe with a period of one second. If `KUBELET`
//! names a kubelet, its medians are shown too, measured in the same run on its own node in its own cluster.
//!
//! - `post_to_running`, `post_to_ready`: from POST to the phase, and to the condition.
//! - `close_to_unready`: from close(2) in the pod to Ready=False.
//! - `delete_to_gone`: from DELETE with a grace period of one second to the removal of the pod from the API;
//!   the process exits at once.
//! - `idle_writes`: writes per minute of an idle node, by the audit log, some time after its last pod was
//!   removed; `idle_lists` likewise.
//! - `status_writes`: writes in the life of a pod: created, ready, deleted.
//! - The requests to the API server, by verb and resource, are printed as a table on standard error: per pod
//!   except the first, and per idle hour (measured for two minutes, or for `BEELET_IDLE_MINUTES`), with the
//!   refused requests. The table may miss requests made once per hour or less.
//! - `exec_round_trip`: `true` in a container, by the node's own HTTPS server: connection, TLS, upgrade, the
//!   command, its status. `exec_throughput`: output of a command over the same path.
//! - `lease_gap`: time between two renewals of the node's lease, while a thousand pods start at once next to
//!   one that forks endlessly, while the container runtime hangs, and while the agent's disk is full.
//!   Controllers consider a node lost when its lease is 40 s old.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use beelet_tests::agent::{self, Agent, Control, Options, monotonic_ns};
use beelet_tests::cluster::{Cluster, Watcher, condition};
use beelet_tests::containerd::Containerd;
use beelet_tests::exec::Server;
use beelet_tests::guards::Mount;
use beelet_tests::kubelet::{self, Kubelet, Member};
use beelet_tests::manifests::{self, CONTROL, PORT};
use beelet_tests::workdir;
use beelet_tests::{ports, requires};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::owner::pause;
use super::{Row, Statistic};
use xtask::progress::Step;
use xtask::setup::{self, Part};

/// Bounds of the medians, in milliseconds.
const RUNNING: f64 = 250.0;
const READY: f64 = 300.0;
/// Bound of the p99, in milliseconds.
const UNREADY: f64 = 50.0;
/// Bound of the median, in milliseconds.
const GONE: f64 = 500.0;
/// Writes per minute.
const IDLE_WRITES: f64 = 6.0;
/// Writes in the life of a pod.
const STATUS_WRITES: f64 = 4.0;
/// Idle time after which no more updates about the last removed pod are expected.
const REST: Duration = Duration::from_secs(15);
/// Listeners closed in a pod.
const CLOSED: usize = 10;
/// Bound of the p99, in milliseconds: the lease is renewed every 10 s.
const LEASE_GAP: f64 = 11_000.0;
/// Pods started at once, as many as a bridge has room for, and the number of endlessly forking processes in
/// one of them.
const STORM: usize = 1000;
const FORKING: usize = 200;
/// Size of the agent's disk, in bytes.
const DISK: u64 = 512 << 20;
/// Bytes of output of a command.
const PRINTED: u64 = 256 << 20;

/// Measurements of an agent.
#[derive(Default)]
struct Samples {
    running: Vec<f64>,
    ready: Vec<f64>,
    unready: Vec<f64>,
    gone: Vec<f64>,
    status_writes: Vec<f64>,
    idle_writes: f64,
    idle_lists: f64,
    exec: Vec<f64>,
    throughput: Vec<f64>,
    lease_gaps: Vec<f64>,
    requests: Requests,
}

/// Requests of a node to the API server, by verb and resource.
#[derive(Default)]
struct Requests {
    /// Requests in the lives of all pods.
    pods: BTreeMap<(String, String), usize>,
    lives: usize,
    /// Requests of the idle node.
    idle: BTreeMap<(String, String), usize>,
    hours: f64,
    /// Requests answered with 401 or 403.
    refused: usize,
}

impl Requests {
    /// Returns the requests of a kind per pod and per hour.
    fn of(&self, kind: &(String, String)) -> String {
        let mean = |all: &BTreeMap<(String, String), usize>, by: f64| {
            all.get(kind)
                .map_or_else(|| "-".to_owned(), |count| format!("{:.1}", *count as f64 / by.max(1e-9)))
        };
        format!("{:>9} {:>9}", mean(&self.pods, self.lives as f64), mean(&self.idle, self.hours))
    }
}

/// Prints the requests by verb and resource; not among the rows, which programs parse.
fn print_requests(ours: &Requests, beside: Option<&Requests>) {
    let all = [Some(ours), beside];
    let all: Vec<&Requests> = all.into_iter().flatten().collect();
    let kinds: BTreeSet<&(String, String)> =
        all.iter().flat_map(|one| one.pods.keys().chain(one.idle.keys())).collect();
    eprintln!(
        "{:<8} {:<40} {:>9} {:>9}  (then the same for a kubelet)",
        "VERB", "RESOURCE", "PER POD", "PER HOUR"
    );
    for kind in kinds {
        let counts: Vec<String> = all.iter().map(|one| one.of(kind)).collect();
        eprintln!("{:<8} {:<40} {}", kind.0, kind.1, counts.join("  "));
    }
    let refused: Vec<String> = all.iter().map(|one| one.refused.to_string()).collect();
    eprintln!("refused (401, 403): {}", refused.join("; a kubelet: "));
}

/// Counts the requests of each kind.
fn counted(asked: &[(String, String, u64)]) -> BTreeMap<(String, String), usize> {
    let mut counts = BTreeMap::new();
    for (verb, resource, _) in asked {
        // A path that is not a resource may have parameters.
        let resource = resource.split('?').next().unwrap_or_default();
        *counts.entry((verb.clone(), resource.to_owned())).or_default() += 1;
    }
    counts
}

/// Adds all rows.
pub(super) fn run(binary: &Path, quick: bool, rows: &mut Vec<Row>) -> Result<()> {
    if let Err(missing) = requires::apiserver() {
        eprintln!("cluster: not measured: {missing}");
        return Ok(());
    }
    setup::ensure(Part::Cluster)?;
    let ours = ours(binary, quick)?;
    // Results of beelet are reported even if measuring the kubelet fails.
    let not_beside = |why: &dyn std::fmt::Display| eprintln!("cluster: kubelet not measured: {why:#}");
    let beside = match kubelet::given() {
        Ok(kubelet) => peer(&kubelet, quick).inspect_err(|error| not_beside(error)).ok(),
        Err(missing) => {
            not_beside(&missing);
            None
        }
    };
    let mut add = |row: Row, of: fn(&Samples) -> Vec<f64>| {
        rows.push(match &beside {
            Some(beside) => row.beside("kubelet", of(beside)),
            None => row,
        });
    };
    let median =
        |name, samples: &[f64], bound| Row::by_median("cluster", name, "ms", samples.to_vec(), bound);
    add(median("post_to_running", &ours.running, RUNNING), |all| all.running.clone());
    add(median("post_to_ready", &ours.ready, READY), |all| all.ready.clone());
    add(Row::new("cluster", "close_to_unready", "ms", ours.unready, UNREADY), |all| all.unready.clone());
    add(median("delete_to_gone", &ours.gone, GONE), |all| all.gone.clone());
    let writes = Row::unbound("cluster", "status_writes", "requests", ours.status_writes);
    add(writes.within(Statistic::Median, STATUS_WRITES), |all| all.status_writes.clone());
    add(Row::one("cluster", "idle_writes", "per min", ours.idle_writes, IDLE_WRITES), |all| {
        vec![all.idle_writes]
    });
    add(Row::one("cluster", "idle_lists", "per min", ours.idle_lists, 0.0), |all| vec![all.idle_lists]);
    let unbound = |name, unit, samples| Row::unbound("cluster", name, unit, samples);
    add(unbound("exec_round_trip", "ms", ours.exec), |all| all.exec.clone());
    add(unbound("exec_throughput", "MiB/s", ours.throughput), |all| all.throughput.clone());
    add(Row::new("cluster", "lease_gap", "ms", ours.lease_gaps, LEASE_GAP), |all| all.lease_gaps.clone());
    print_requests(&ours.requests, beside.as_ref().map(|beside| &beside.requests));
    Ok(())
}

fn ours(binary: &Path, quick: bool) -> Result<Samples> {
    let containerd = Containerd::start(&workdir::target_dir().join("bench/node"))?;
    let disk = Mount::tmpfs(&containerd.dir().join("agent"), DISK)?;
    let cluster = Cluster::start(containerd.dir())?;
    let mut options = Options::on(&containerd).kubelet("maxPods", 1100);
    options.binary = Some(binary.to_path_buf());
    let kubeconfig = cluster.node_kubeconfig(agent::NODE)?;
    options.arguments.extend(["--kubeconfig".to_owned(), kubeconfig.display().to_string()]);
    let [port] = ports::free()?;
    let (certificate, key) = cluster.serving_files(agent::NODE)?;
    let options = options
        .kubelet("address", "127.0.0.1")
        .kubelet("port", port)
        .kubelet("tlsCertFile", certificate.display().to_string())
        .kubelet("tlsPrivateKeyFile", key.display().to_string())
        .kubelet("authentication", json!({ "anonymous": { "enabled": true } }))
        .kubelet("authorization", json!({ "mode": "AlwaysAllow" }));
    let _agent = Agent::start(options)?;
    let server = server(&cluster, port);
    measure("beelet", (&cluster, &containerd, disk.path()), (agent::NODE, &server), quick)
}

fn peer(binary: &Path, quick: bool) -> Result<Samples> {
    let containerd = Containerd::start(&workdir::target_dir().join("bench/peer"))?;
    let disk = Mount::tmpfs(&containerd.dir().join("kubelet"), DISK)?;
    let cluster = Cluster::start(containerd.dir())?;
    let kubeconfig = cluster.node_kubeconfig(kubelet::NODE)?;
    let [port] = ports::free()?;
    let member = Member { kubeconfig, port, keys: cluster.serving_files(kubelet::NODE)? };
    let kubelet = Kubelet::join(binary, &containerd, &member)?;
    let server = server(&cluster, port);
    let machine = (&cluster, &containerd, disk.path());
    measure("the kubelet", machine, (kubelet::NODE, &server), quick).with_context(|| {
        let log = kubelet.log();
        let last: Vec<&str> = log.lines().rev().take(20).collect();
        format!("last lines of the kubelet's log:\n{}", last.into_iter().rev().collect::<Vec<_>>().join("\n"))
    })
}

fn server(cluster: &Cluster, port: u16) -> Server {
    Server { address: (Ipv4Addr::LOCALHOST, port).into(), authority: cluster.authority_file() }
}

fn measure(
    who: &str,
    (cluster, containerd, disk): (&Cluster, &Containerd, &Path),
    (node, server): (&str, &Server),
    quick: bool,
) -> Result<Samples> {
    let step = Step::start(format!("cluster: pods of {who}"));
    let ready = |node: &Value| condition(node, "Ready").then_some(());
    cluster.until("the Node to be ready", &format!("/api/v1/nodes/{node}"), ready)?;
    let mut all = Samples::default();
    let pods = if quick { 3 } else { 20 };
    let mut asked = 0;
    for round in 0..pods {
        if round == 1 {
            // The first pod's listener was closed and opened, and the node registered before it.
            asked = cluster.asked_by(node)?.len();
        }
        step.detail(&format!("{round} of {pods}"));
        let before = writes(cluster, node, "pods/status")?;
        pod(cluster, node, &format!("web{round}"), round == 0, &mut all)?;
        if round > 0 {
            all.status_writes.push((writes(cluster, node, "pods/status")? - before) as f64);
        }
    }
    (all.requests.pods, all.requests.lives) = (counted(&cluster.asked_by(node)?[asked..]), pods - 1);
    let asked_for = std::env::var("BEELET_IDLE_MINUTES").ok().and_then(|minutes| minutes.parse::<u64>().ok());
    let time = Duration::from_secs(asked_for.map_or(if quick { 20 } else { 120 }, |minutes| minutes * 60));
    step.detail("idle");
    pause(REST)?;
    let asked = cluster.asked_by(node)?.len();
    let began = Instant::now();
    pause(time)?;
    let minutes = began.elapsed().as_secs_f64() / 60.0;
    let asked = cluster.asked_by(node)?.split_off(asked);
    let count = |verbs: &[&str]| asked.iter().filter(|(verb, ..)| verbs.contains(&&**verb)).count() as f64;
    all.idle_writes = count(&["create", "update", "patch", "delete"]) / minutes;
    all.idle_lists = count(&["list"]) / minutes;
    (all.requests.idle, all.requests.hours) = (counted(&asked), minutes / 60.0);
    step.detail("commands");
    exec(cluster, (node, server), quick, &mut all)?;
    step.detail("lease under stress");
    all.lease_gaps = lease_gaps((cluster, containerd, disk), node, quick, &step)?;
    let refused = |(_, _, code): &&(String, String, u64)| [401, 403].contains(code);
    all.requests.refused = cluster.asked_by(node)?.iter().filter(refused).count();
    step.done(&format!("{pods} pods"));
    Ok(all)
}

/// Measures commands in a pod of their own.
fn exec(cluster: &Cluster, (node, server): (&str, &Server), quick: bool, all: &mut Samples) -> Result<()> {
    cluster.run(node, &plain(manifests::pod("shell", &["sleep", "100000"])))?;
    cluster.until("the pod to run", &Cluster::pod("shell"), |pod| condition(pod, "Ready").then_some(()))?;
    let (trips, prints) = if quick { (5, 1) } else { (50, 5) };
    let timed = |command: &[&str], count: u32| -> Result<Vec<(u64, Duration)>> {
        let one = |_| {
            let began = Instant::now();
            Ok((server.run("shell", command)?, began.elapsed()))
        };
        (0..count).map(one).collect()
    };
    // The first command loads files into memory.
    timed(&["true"], 1)?;
    all.exec = timed(&["true"], trips)?.iter().map(|(_, took)| took.as_secs_f64() * 1e3).collect();
    let size = PRINTED.to_string();
    for (printed, took) in timed(&["head", "-c", &size, "/dev/zero"], prints)? {
        ensure!(printed == PRINTED, "the command printed {PRINTED} bytes, but {printed} arrived");
        all.throughput.push(printed as f64 / f64::from(1 << 20) / took.as_secs_f64());
    }
    Ok(())
}

/// Returns the times between two renewals of the node's lease under stress, in milliseconds.
fn lease_gaps(
    (cluster, containerd, disk): (&Cluster, &Containerd, &Path),
    node: &str,
    quick: bool,
    step: &Step,
) -> Result<Vec<f64>> {
    let (pods, time) = if quick { (10, 20) } else { (STORM, 60) };
    let time = Duration::from_secs(time);
    let before = cluster.renewals(node)?.len();
    let script = format!("for i in $(seq {FORKING}); do (while :; do (:); done) & done; wait");
    cluster.run(node, &plain(manifests::pod("forks", &["sh", "-c", &script])))?;
    cluster.until("the pod to fork", &Cluster::pod("forks"), |pod| condition(pod, "Ready").then_some(()))?;
    step.detail(&format!("lease while {pods} pods start"));
    for n in 0..pods {
        cluster.run(node, &plain(manifests::pod(&format!("storm{n}"), &["sleep", "100000"])))?;
    }
    pause(time)?;
    step.detail("lease while the runtime hangs");
    let hanging = containerd.hang()?;
    pause(time)?;
    drop(hanging);
    step.detail("lease while the disk is full");
    let filler = fill(disk)?;
    pause(time)?;
    std::fs::remove_file(filler)?;
    let mut renewals = cluster.renewals(node)?;
    // A renewal that is still outstanding counts as late already.
    renewals.push(Timestamp::now());
    let times = &renewals[before.saturating_sub(1)..];
    cluster.delete(&Cluster::pod("forks"), Some(0))?;
    let gap = |pair: &[Timestamp]| pair[0].duration_until(pair[1]).as_secs_f64() * 1e3;
    Ok(times.windows(2).map(gap).collect())
}

/// Fills the disk completely with a file; returns its path.
fn fill(disk: &Path) -> Result<PathBuf> {
    let path = disk.join("filler");
    let mut file = std::fs::File::create(&path)?;
    let block = vec![0; 1 << 16];
    loop {
        match file.write_all(&block) {
            Ok(()) => {}
            Err(full) if full.kind() == std::io::ErrorKind::StorageFull => return Ok(path),
            Err(error) => return Err(error).with_context(|| format!("cannot fill {}", disk.display())),
        }
    }
}

/// Returns the pod without the API server's additions for its service account and services.
fn plain(mut pod: Value) -> Value {
    pod["spec"]["automountServiceAccountToken"] = json!(false);
    pod["spec"]["enableServiceLinks"] = json!(false);
    pod
}

/// Returns the number of the node's writes of a resource.
fn writes(cluster: &Cluster, node: &str, resource: &str) -> Result<usize> {
    let asked = cluster.asked_by(node)?;
    Ok(asked.iter().filter(|(verb, of, _)| of == resource && ["update", "patch"].contains(&&**verb)).count())
}

/// Measures the life of a pod.
fn pod(cluster: &Cluster, node: &str, name: &str, close: bool, all: &mut Samples) -> Result<()> {
    let mut pod = plain(manifests::serving(name));
    pod["spec"]["containers"][0]["readinessProbe"]["periodSeconds"] = json!(1);
    pod["spec"]["containers"][0]["readinessProbe"]["failureThreshold"] = json!(1);
    pod["spec"]["terminationGracePeriodSeconds"] = json!(1);
    let watcher = cluster.watch(&Cluster::pod(name))?;
    watcher.until("nothing", Value::is_null)?;
    let began = monotonic_ns();
    cluster.run(node, &pod)?;
    let ms = |at: u64, since: u64| at.saturating_sub(since) as f64 / 1e6;
    // Both may arrive with the same event.
    let (mut running, mut ready) = (None, None);
    while ready.is_none() {
        let news = |pod: &Value| {
            (running.is_none() && pod["status"]["phase"] == "Running") || condition(pod, "Ready")
        };
        let (at, seen) = watcher.until("the pod to run and be ready", news)?;
        running = running.or(Some(ms(at, began)));
        ready = condition(&seen, "Ready").then_some((ms(at, began), seen));
    }
    let (took, seen) = ready.context("the pod is not ready")?;
    all.running.extend(running);
    all.ready.push(took);
    if close {
        let address = seen["status"]["podIP"].as_str().context("the pod has no address")?;
        let mut control = Control::connect(address, CONTROL)?;
        for _ in 0..CLOSED {
            all.unready.push(flip(&watcher, &mut control, "close", false)?);
            flip(&watcher, &mut control, "open", true)?;
        }
    }
    let began = monotonic_ns();
    cluster.delete(&Cluster::pod(name), None)?;
    let (at, _) = watcher.until("the pod to be gone", Value::is_null)?;
    all.gone.push(ms(at, began));
    Ok(())
}

/// Returns the time from the test app's system call to the API's condition.
fn flip(watcher: &Watcher, control: &mut Control, command: &str, ready: bool) -> Result<f64> {
    let called = control.send(&format!("{command} {PORT}"))?;
    let what = format!("Ready={ready}");
    let (at, _) = watcher.until(&what, |pod| pod.is_object() && condition(pod, "Ready") == ready)?;
    Ok(at.saturating_sub(called) as f64 / 1e6)
}
