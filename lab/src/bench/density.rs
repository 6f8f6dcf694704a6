//! Nodes of 100, 500 and 1,000 idle pods on a real containerd, with a TCP readiness probe per second and pod.
//! All pods are on one bridge, which has 1,023 ports. If `KUBELET` names a kubelet, its CPU and memory are
//! shown too, measured on its own node in the same run.
//!
//! For each size:
//! - `start`: pods that become ready per second, from the first manifest on; the next size's pods are applied
//!   at once.
//! - `cpu`: the agent's share of a core afterwards. `rss`, `pss`: its memory.
//! - `listen_to_ready`, `close_to_not_ready`: of one pod among all, as measured by `bench probes`.
//! - `pods_api_list`: a list of all pods by the pods API (KEP-4188), and `pods_api_get`: a single pod, which
//!   shows the machine's part of a list's tail. `pods_api_push`: from close(2) in one pod among all to the
//!   event of that API's watch, and from listen(2).
//! - `relaunch`: the agent is killed with SIGKILL; from its next start until its API shows every pod ready.
//! - `flips`: pods that lost readiness while the agent was measured and after its next start. `restarts`:
//!   restarted containers.
//!
//! Once:
//! - `start_over_bare`: time from the first manifest of 100 pods applied at once to the start of the last
//!   one's container, divided by the time of bare CRI calls for the same number of pods with the same
//!   containers, [`AT_ONCE`] at once. Both by the runtime's timestamps; agent and bare calls take turns.
//! - `half_ready`: from the first of these manifests until half of the pods are ready, polled once per
//!   second.
//! - `healthz`: response time of `/healthz` while pods are started.
//! - `per_pod`: memory of the agent per additional pod, between the smallest and the largest node.

use super::lifecycle::{bare_calls, last_start, now_ns};
use super::owner::{Owner, pause};
use super::probes::{listeners, watch_readiness};
use super::{Row, podsapi};
use anyhow::{Context as _, Result, bail};
use beelet_tests::agent::{Agent, Control, Options};
use beelet_tests::containerd::{Containerd, block_on};
use beelet_tests::kubelet::{self, Kubelet};
use beelet_tests::machine::{cpu_of, proportional_kib, resident_kib};
use beelet_tests::manifests::{self, CONTROL};
use beelet_tests::pods::PodView;
use beelet_tests::workdir::{self, interrupted};
use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use xtask::progress::Step;

/// Bound in percent of one core.
const CPU: f64 = 5.0;
/// Bound in MiB.
const RESIDENT: f64 = 128.0;
/// Bound of the p99, in milliseconds.
const EDGE: f64 = 20.0;
/// Bound of the p99 of a list and of a pushed change, in milliseconds.
const PODS_API: f64 = 5.0;
/// Bound in milliseconds.
const RELAUNCH: f64 = 2000.0;
/// Bound relative to the bare calls' time: 95 % of their rate.
const OVER_BARE: f64 = 1.0 / 0.95;
/// Bound of the p99, in milliseconds.
const HEALTHZ: f64 = 100.0;
/// Number of concurrent bare calls: a small machine with two cores is not faster with more.
const AT_ONCE: usize = 8;
/// Idle time before a measurement.
pub(super) const REST: Duration = Duration::from_secs(15);

/// Name of the row of half of the first pods.
const HALF: &str = "half_ready";

/// Size of a node, with the names of its rows.
struct Size {
    pods: usize,
    start: &'static str,
    cpu: &'static str,
    rss: &'static str,
    pss: &'static str,
    to_ready: &'static str,
    to_not_ready: &'static str,
    pods_list: &'static str,
    pods_get: &'static str,
    pods_push: &'static str,
    relaunch: &'static str,
    flips: &'static str,
    restarts: &'static str,
}

macro_rules! size {
    ($pods:literal) => {
        Size {
            pods: $pods,
            start: concat!("start_", $pods),
            cpu: concat!("cpu_", $pods),
            rss: concat!("rss_", $pods),
            pss: concat!("pss_", $pods),
            to_ready: concat!("listen_to_ready_", $pods),
            to_not_ready: concat!("close_to_not_ready_", $pods),
            pods_list: concat!("pods_api_list_", $pods),
            pods_get: concat!("pods_api_get_", $pods),
            pods_push: concat!("pods_api_push_", $pods),
            relaunch: concat!("relaunch_", $pods),
            flips: concat!("flips_", $pods),
            restarts: concat!("restarts_", $pods),
        }
    };
}

const FULL: [Size; 3] = [size!(100), size!(500), size!(1000)];
const QUICK: [Size; 2] = [size!(20), size!(40)];

/// Resources used by the agent on a node of one size.
struct Taken {
    cpu_percent: f64,
    resident: f64,
    proportional: f64,
}

/// Adds all rows, each size's as soon as it is measured.
pub(super) fn run(binary: &Path, quick: bool, rows: &mut Vec<Row>) -> Result<()> {
    let sizes: &[Size] = if quick { &QUICK } else { &FULL };
    let first = rows.len();
    ours(binary, quick, sizes, rows)?;
    let Ok(kubelet) = kubelet::given() else {
        eprintln!("density: kubelet not measured: KUBELET is not set");
        return Ok(());
    };
    let containerd = Containerd::start(&workdir::target_dir().join("bench/peer"))?;
    let owner = Owner::Kubelet(Kubelet::start(&kubelet, &containerd)?);
    let mut there = 0;
    for size in sizes {
        let step = Step::start(format!("density: {} pods of the kubelet", size.pods));
        let began = Instant::now();
        let half = owner.fill(&containerd, there..size.pods, &step)?.as_secs_f64();
        let rate = (size.pods - there) as f64 / began.elapsed().as_secs_f64();
        let is_first = there == 0;
        there = size.pods;
        let taken = usage(&owner, quick)?;
        step.done(&taken.sentence());
        let beside = [
            (size.start, rate),
            (size.cpu, taken.cpu_percent),
            (size.rss, taken.resident),
            (size.pss, taken.proportional),
        ];
        for (name, value) in beside.into_iter().chain(is_first.then_some((HALF, half))) {
            if let Some(row) = rows[first..].iter_mut().find(|row| row.row == name) {
                row.compare.insert("kubelet", value);
            }
        }
    }
    Ok(())
}

fn ours(binary: &Path, quick: bool, sizes: &[Size], rows: &mut Vec<Row>) -> Result<()> {
    let containerd = Containerd::start(&workdir::target_dir().join("bench/node"))?;
    let mut options = Options::on(&containerd).kubelet("maxPods", 1100).http()?;
    options.binary = Some(binary.to_path_buf());
    let port = options.kubelet["healthzPort"].as_u64().and_then(|port| u16::try_from(port).ok());
    let health = Health::watch(port.context("the agent has no port")?);
    let mut owner = Owner::Us(Box::new(Agent::start(options)?));
    rows.extend(over_bare(&containerd, &mut owner, sizes[0].pods, if quick { 1 } else { 3 })?);
    let (mut there, mut per_pod) = (0, Vec::new());
    for size in sizes {
        let step = Step::start(format!("density: {} pods started", size.pods));
        let began = Instant::now();
        owner.fill(&containerd, there..size.pods, &step)?;
        let took = began.elapsed().as_secs_f64();
        step.done(&format!("{took:.1} s"));
        rows.push(Row::unbound("density", size.start, "pods/s", vec![(size.pods - there) as f64 / took]));
        there = size.pods;
        let taken = settle(&mut owner, size, quick, rows)?;
        per_pod.push((size.pods as f64, taken.resident));
    }
    rows.push(Row::new("density", "healthz", "ms", health.stop(), HEALTHZ));
    if let [(few, least), .., (many, most)] = per_pod[..] {
        rows.push(Row::unbound("density", "per_pod", "KiB", vec![(most - least) * 1024.0 / (many - few)]));
    }
    Ok(())
}

/// Measures a full node: idle, under load, and during a restart of the agent.
fn settle(owner: &mut Owner, size: &Size, quick: bool, rows: &mut Vec<Row>) -> Result<Taken> {
    let step = Step::start(format!("density: {} pods at rest", size.pods));
    let lost = losses(agent_of(owner)?)?;
    let taken = usage(owner, quick)?;
    let mut flips = lost.try_iter().count();
    step.done(&taken.sentence());
    rows.extend([
        Row::one("density", size.cpu, "% core", taken.cpu_percent, CPU),
        Row::one("density", size.rss, "MiB", taken.resident, RESIDENT),
        Row::unbound("density", size.pss, "MiB", vec![taken.proportional]),
    ]);
    let agent = agent_of(owner)?;
    let step = Step::start(format!("density: a listener among {} pods", size.pods));
    let pod = agent.until("a pod's address", |watch| watch.pod("idle0")?.ip().map(str::to_owned))?;
    let mut control = Control::connect(&pod, CONTROL)?;
    let changes = watch_readiness(agent, "idle0")?;
    let rounds = if quick { 20 } else { 200 };
    let (to_ready, to_not_ready) = listeners(&mut control, &changes, rounds, &step)?;
    drop(changes);
    let lists = podsapi::lists(agent, rounds, size.pods)?;
    let gets = podsapi::gets(agent, rounds, "idle0")?;
    let changes = podsapi::watch_readiness(agent, "idle0")?;
    let (mut pushes, closed) = listeners(&mut control, &changes, rounds, &step)?;
    pushes.extend(closed);
    step.done("");
    let step = Step::start(format!("density: the agent of {} pods killed and started again", size.pods));
    let (relaunch, lost) = killed_and_started(agent, size.pods, quick)?;
    flips += lost;
    let restarts = agent.inspect(|watch| watch.pods.values().map(PodView::restarts).sum::<i32>())?;
    step.done(&format!("{relaunch:.0} ms, {flips} flips, {restarts} restarts"));
    rows.extend([
        Row::new("density", size.to_ready, "ms", to_ready, EDGE),
        Row::new("density", size.to_not_ready, "ms", to_not_ready, EDGE),
        Row::new("density", size.pods_list, "ms", lists, PODS_API),
        Row::unbound("density", size.pods_get, "ms", gets),
        Row::new("density", size.pods_push, "ms", pushes, PODS_API),
        Row::one("density", size.relaunch, "ms", relaunch, RELAUNCH),
        Row::one("density", size.flips, "", flips as f64, 0.0),
        Row::one("density", size.restarts, "", f64::from(restarts), 0.0),
    ]);
    Ok(taken)
}

/// Kills the agent and starts it again. Returns the milliseconds until its API shows all `pods` ready, and
/// the number of pods that lost readiness afterwards.
pub(super) fn killed_and_started(agent: &mut Agent, pods: usize, quick: bool) -> Result<(f64, usize)> {
    agent.kill9();
    let began = Instant::now();
    agent.resume()?;
    let all = |watch: &beelet_tests::pods::Watch| {
        let ready = watch.pods.values().filter(|pod| PodView::ready(pod)).count();
        (ready >= pods).then_some(())
    };
    agent.until("every pod to be ready", all)?;
    let relaunch = began.elapsed().as_secs_f64() * 1e3;
    let lost = losses(agent)?;
    pause(Duration::from_secs(if quick { 5 } else { 20 }))?;
    Ok((relaunch, lost.try_iter().count()))
}

/// Returns a channel of the names of pods that lose readiness.
pub(super) fn losses(agent: &Agent) -> Result<mpsc::Receiver<String>> {
    let mut before = BTreeSet::new();
    super::watch_pods(agent, move |watch, _| {
        let is_ready = |(name, pod): (&String, &PodView)| pod.ready().then(|| name.clone());
        let now: BTreeSet<String> = watch.pods.iter().filter_map(is_ready).collect();
        let lost: Vec<String> = before.difference(&now).cloned().collect();
        before = now;
        lost
    })
}

fn usage(owner: &Owner, quick: bool) -> Result<Taken> {
    let window = Duration::from_secs(if quick { 10 } else { 60 });
    pause(REST)?;
    let pid = owner.pid()?;
    let before = cpu_of(pid)?;
    pause(window)?;
    let used = cpu_of(pid)? - before;
    let mib = |kib: u64| kib as f64 / 1024.0;
    Ok(Taken {
        cpu_percent: used.as_secs_f64() * 100.0 / window.as_secs_f64(),
        resident: mib(resident_kib(pid)?),
        proportional: mib(proportional_kib(pid)?),
    })
}

impl Taken {
    fn sentence(&self) -> String {
        format!("{:.2} % of a core, {:.1} MiB", self.cpu_percent, self.resident)
    }
}

/// Starts pods at once, by bare calls and by the agent in turns; removes them afterwards.
fn over_bare(containerd: &Containerd, owner: &mut Owner, pods: usize, rounds: usize) -> Result<[Row; 2]> {
    // ext4 does not reuse an inode immediately after it is freed, and checks each of them when it needs one
    // (fs/ext4/ialloc.c, recently_deleted): the first pods of a new node are created faster than any later
    // ones.
    bare(containerd, pods)?;
    let (mut ratios, mut halves) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        agent_of(owner)?.terminate()?;
        let bare = bare(containerd, pods)?;
        agent_of(owner)?.resume()?;
        let step = Step::start(format!("density: {pods} pods by the agent"));
        let stamp = now_ns();
        halves.push(owner.fill(containerd, 0..pods, &step)?.as_secs_f64());
        let took = (block_on(last_start(&containerd.socket()))? - stamp) as f64 / 1e9;
        ratios.push(took / bare);
        let agent = agent_of(owner)?;
        (0..pods).try_for_each(|n| agent.remove(&format!("idle{n}.yaml")))?;
        agent.until("every pod to be gone", |watch| watch.pods.is_empty().then_some(()))?;
        step.done(&format!("{took:.1} s"));
    }
    Ok([
        Row::by_median("density", "start_over_bare", "of bare CRI calls", ratios, OVER_BARE),
        Row::unbound("density", HALF, "s", halves),
    ])
}

fn agent_of(owner: &mut Owner) -> Result<&mut Agent> {
    match owner {
        Owner::Us(agent) => Ok(agent),
        Owner::Kubelet(_) => bail!("the bench does not query a kubelet's pods"),
    }
}

/// Starts `pods` pods by bare calls, [`AT_ONCE`] at once, and removes them; returns the seconds.
fn bare(containerd: &Containerd, pods: usize) -> Result<f64> {
    let step = Step::start(format!("density: {pods} pods by bare calls"));
    let next = std::sync::atomic::AtomicUsize::new(0);
    let command = manifests::serving_command();
    let began = now_ns();
    let made: Vec<Result<Vec<super::lifecycle::Bare>>> = std::thread::scope(|scope| {
        let caller = || {
            let mut mine = Vec::new();
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= pods || interrupted() {
                    return Ok(mine);
                }
                mine.push(block_on(bare_calls(containerd, &format!("bare{n}"), &command))?);
            }
        };
        let callers: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(caller)).collect();
        let joined = callers.into_iter().map(std::thread::ScopedJoinHandle::join);
        joined.map(|joined| joined.unwrap_or_else(|_| bail!("a caller panicked"))).collect()
    });
    let took = (block_on(last_start(&containerd.socket()))? - began) as f64 / 1e9;
    for of_caller in made {
        for pod in of_caller? {
            block_on(pod.remove(containerd))?;
        }
    }
    step.done(&format!("{took:.1} s"));
    Ok(took)
}

/// Calls `/healthz` ten times per second and records the response times.
struct Health {
    stop: Arc<AtomicBool>,
    asks: std::thread::JoinHandle<Vec<f64>>,
}

impl Health {
    fn watch(port: u16) -> Health {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let asks = std::thread::spawn(move || {
            let mut samples = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                // A call fails while the agent is down.
                samples.extend(healthz(port).ok());
                std::thread::sleep(Duration::from_millis(100));
            }
            samples
        });
        Health { stop, asks }
    }

    /// Stops; returns the milliseconds of each response.
    fn stop(self) -> Vec<f64> {
        self.stop.store(true, Ordering::Relaxed);
        self.asks.join().unwrap_or_default()
    }
}

/// Returns the response time of one call, in milliseconds.
fn healthz(port: u16) -> Result<f64> {
    let began = Instant::now();
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    if !answer.starts_with("HTTP/1.1 200") {
        bail!("/healthz answered {}", answer.lines().next().unwrap_or_default());
    }
    Ok(began.elapsed().as_secs_f64() * 1e3)
}
