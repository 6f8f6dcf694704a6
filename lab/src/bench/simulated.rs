//! Nodes of 1,000, 2,500 and 5,000 pods on an in-memory runtime, so that only the agent is measured: more
//! pods than a bridge or this machine's processes have room for. Their records, cgroups, probes and the
//! kernel programs are real, and so are the listeners: each pod is on the host's network, with its own port,
//! on which this process listens, and a TCP readiness probe per second.
//!
//! The rows of each size are those of `density`: `cpu`, `rss`, `listen_to_ready`, `close_to_not_ready`,
//! `relaunch`, `flips`. Once: `cpu_growth`, `rss_growth`, the cost per additional pod between the larger two
//! sizes divided by that between the smaller two: 1 if the cost grows linearly.

use super::Row;
use super::density::{REST, killed_and_started, losses};
use super::owner::pause;
use super::probes::{next_change, watch_readiness};
use anyhow::{Context as _, Result, bail};
use beelet_tests::agent::{Agent, Options, monotonic_ns};
use beelet_tests::cri::FakeCri;
use beelet_tests::guards::CgroupRoot;
use beelet_tests::machine::{cpu_of, resident_kib};
use beelet_tests::pods::PodView;
use beelet_tests::workdir::{self, interrupted};
use beelet_tests::{images, manifests};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::time::{Duration, Instant};
use xtask::progress::Step;

/// Bound of the growth rows.
const LINEAR: f64 = 1.25;

/// Size of a node, with the names of its rows.
struct Size {
    pods: usize,
    cpu: &'static str,
    rss: &'static str,
    to_ready: &'static str,
    to_not_ready: &'static str,
    relaunch: &'static str,
    flips: &'static str,
}

macro_rules! size {
    ($pods:literal) => {
        Size {
            pods: $pods,
            cpu: concat!("cpu_", $pods),
            rss: concat!("rss_", $pods),
            to_ready: concat!("listen_to_ready_", $pods),
            to_not_ready: concat!("close_to_not_ready_", $pods),
            relaunch: concat!("relaunch_", $pods),
            flips: concat!("flips_", $pods),
        }
    };
}

const FULL: [Size; 3] = [size!(1000), size!(2500), size!(5000)];
const QUICK: [Size; 3] = [size!(50), size!(100), size!(200)];

/// Node and its dependencies, dropped in this order.
struct Node {
    agent: Agent,
    _runtime: FakeCri,
    _cgroup: CgroupRoot,
    _folder: tempfile::TempDir,
    listeners: Vec<TcpListener>,
}

/// Adds all rows, each size's as soon as it is measured.
pub(super) fn run(binary: &Path, quick: bool, rows: &mut Vec<Row>) -> Result<()> {
    let sizes = if quick { &QUICK } else { &FULL };
    let most = sizes.iter().map(|size| size.pods).max().unwrap_or_default();
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })
        .context("cannot raise the limit of open files to its maximum")?;
    let mut node = Node::start(binary, most)?;
    let mut costs = Vec::new();
    for size in sizes {
        node.fill(size.pods)?;
        let (cpu, mib) = node.settle(size, quick, rows)?;
        costs.push([size.pods as f64, cpu, mib]);
    }
    let [few, more, most] = costs[..] else { bail!("three sizes are needed") };
    let growth = |of: usize| {
        let per_pod = |from: [f64; 3], to: [f64; 3]| (to[of] - from[of]) / (to[0] - from[0]);
        per_pod(more, most) / per_pod(few, more)
    };
    // With few pods the noise exceeds their cost.
    let row = |name, growth| match quick {
        true => Row::unbound("simulated", name, "", vec![growth]),
        false => Row::one("simulated", name, "", growth, LINEAR),
    };
    rows.extend([row("cpu_growth", growth(1)), row("rss_growth", growth(2))]);
    Ok(())
}

impl Node {
    fn start(binary: &Path, pods: usize) -> Result<Node> {
        let folder = tempfile::tempdir().context("cannot create a folder for the node")?;
        let runtime = FakeCri::start();
        runtime.add_image(images::APP);
        runtime.change(|world| world.streams_events = true);
        let cgroup = CgroupRoot::new(&workdir::unique("sim"))?;
        let mut options = Options::at(folder.path(), "agent", &runtime.endpoint(), &cgroup)
            .kubelet("maxPods", pods + 100)
            .kubelet("podPidsLimit", -1);
        options.binary = Some(binary.to_path_buf());
        let agent = Agent::start(options)?;
        Ok(Node { agent, _runtime: runtime, _cgroup: cgroup, _folder: folder, listeners: Vec::new() })
    }

    /// Adds pods up to `pods`, and waits until all are ready.
    fn fill(&mut self, pods: usize) -> Result<()> {
        let step = Step::start(format!("simulated: {pods} pods started"));
        let began = Instant::now();
        for n in self.listeners.len()..pods {
            let listener =
                TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).context("no port is free for a pod")?;
            let port = listener.local_addr()?.port();
            let name = name(n);
            let mut pod = manifests::pod(&name, &["/bin/testapp"]);
            pod["spec"]["hostNetwork"] = true.into();
            let probe = json!({ "tcpSocket": { "port": port }, "periodSeconds": 1, "failureThreshold": 1 });
            let pod = manifests::with(pod, "readinessProbe", probe);
            self.agent.apply(&format!("{name}.yaml"), pod.to_string())?;
            self.listeners.push(listener);
        }
        self.until_ready(pods, &step)?;
        let took = began.elapsed().as_secs_f64();
        step.done(&format!("{took:.1} s"));
        Ok(())
    }

    fn until_ready(&self, pods: usize, step: &Step) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(120 + pods as u64 / 5);
        loop {
            let asked = Instant::now();
            let ready =
                self.agent.inspect(|watch| watch.pods.values().filter(|pod| PodView::ready(pod)).count())?;
            step.detail(&format!("{ready} ready"));
            if ready >= pods {
                return Ok(());
            }
            if Instant::now() > deadline || interrupted() {
                bail!("only {ready} of {pods} pods became ready");
            }
            // Reading this many pods takes this process longer than the agent needs to start some more.
            std::thread::sleep(Duration::from_millis(500).max(asked.elapsed() * 5));
        }
    }

    /// Measures a full node: idle, under load, and during a restart of the agent. Returns its CPU in percent
    /// of a core and its memory in MiB.
    fn settle(&mut self, size: &Size, quick: bool, rows: &mut Vec<Row>) -> Result<(f64, f64)> {
        let step = Step::start(format!("simulated: {} pods at rest", size.pods));
        let lost = losses(&self.agent)?;
        let window = Duration::from_secs(if quick { 5 } else { 60 });
        pause(REST)?;
        let pid = self.agent.pid().context("the agent has ended")?;
        let before = cpu_of(pid)?;
        pause(window)?;
        let cpu = (cpu_of(pid)? - before).as_secs_f64() * 100.0 / window.as_secs_f64();
        let mib = resident_kib(pid)? as f64 / 1024.0;
        let mut flips = lost.try_iter().count();
        step.done(&format!("{cpu:.2} % of a core, {mib:.1} MiB"));

        let step = Step::start(format!("simulated: a listener among {} pods", size.pods));
        let (to_ready, to_not_ready) = self.edges(if quick { 20 } else { 200 })?;
        step.done("");

        let step =
            Step::start(format!("simulated: the agent of {} pods killed and started again", size.pods));
        let (relaunch, lost) = killed_and_started(&mut self.agent, size.pods, quick)?;
        flips += lost;
        step.done(&format!("{relaunch:.0} ms, {flips} flips"));
        rows.extend([
            Row::unbound("simulated", size.cpu, "% core", vec![cpu]),
            Row::unbound("simulated", size.rss, "MiB", vec![mib]),
            Row::unbound("simulated", size.to_ready, "ms", to_ready),
            Row::unbound("simulated", size.to_not_ready, "ms", to_not_ready),
            Row::unbound("simulated", size.relaunch, "ms", vec![relaunch]),
            Row::one("simulated", size.flips, "", flips as f64, 0.0),
        ]);
        Ok((cpu, mib))
    }

    /// Returns the milliseconds from the start of the first pod's listener to readiness, and from the
    /// listener's end to unreadiness.
    fn edges(&mut self, rounds: usize) -> Result<(Vec<f64>, Vec<f64>)> {
        let changes = watch_readiness(&self.agent, &name(0))?;
        let ms = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e6;
        let (mut to_ready, mut to_not_ready) = (Vec::new(), Vec::new());
        let address: SocketAddr = self.listeners.first().context("the node has no pods")?.local_addr()?;
        for _ in 0..rounds {
            let began = monotonic_ns();
            drop(self.listeners.swap_remove(0));
            let lost = next_change(&changes, false);
            let closed = lost.map(|at| ms(began, at));
            let began = monotonic_ns();
            let again = TcpListener::bind(address).context("cannot listen on the pod's port again")?;
            self.listeners.push(again);
            let last = self.listeners.len() - 1;
            self.listeners.swap(0, last);
            to_not_ready.push(closed?);
            to_ready.push(ms(began, next_change(&changes, true)?));
        }
        Ok((to_ready, to_not_ready))
    }
}

fn name(n: usize) -> String {
    format!("sim{n}")
}
