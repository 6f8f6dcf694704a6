//! What the agent itself takes, on a node of 1, 20 and 110 idle pods whose TCP readiness probes look once a
//! second: processor time and resident memory, from /proc. The node's pods are on a real containerd. Where
//! `KUBELET` names one, the same is measured of a kubelet afterwards, and shown beside.

use super::Row;
use crate::progress::Step;
use anyhow::{Context as _, Result, bail};
use beelet_proto::cri;
use beelet_tests::agent::{Agent, Options};
use beelet_tests::containerd::{Containerd, Cri, block_on};
use beelet_tests::kubelet::{self, Kubelet};
use beelet_tests::machine::{cpu_of, resident_kib};
use beelet_tests::manifests::{self, PORT};
use beelet_tests::pods::PodView;
use beelet_tests::workdir::{self, interrupted};
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

/// CPU seconds per minute, and MiB, for each size of node: what the largest may take is the promise, and the
/// smaller ones must not take more.
const CPU: f64 = 0.6;
const RESIDENT: f64 = 40.0;
/// The sizes, with the names of their rows.
const NODES: [(usize, &str, &str); 3] = [
    (1, "cpu_1_pod", "rss_1_pod"),
    (20, "cpu_20_pods", "rss_20_pods"),
    (110, "cpu_110_pods", "rss_110_pods"),
];
/// How long the node rests before it is measured.
const REST: Duration = Duration::from_secs(15);

/// The agent that has the node.
enum Owner {
    Us(Box<Agent>),
    Kubelet(Kubelet),
}

impl Owner {
    fn apply(&self, name: &str, manifest: &Value) -> Result<()> {
        match self {
            Self::Us(agent) => agent.apply(&format!("{name}.yaml"), manifest.to_string()),
            Self::Kubelet(kubelet) => kubelet.apply(manifest),
        }
    }

    fn pid(&self) -> Result<u32> {
        match self {
            Self::Us(agent) => agent.pid().context("the agent has ended"),
            Self::Kubelet(kubelet) => Ok(kubelet.pid()),
        }
    }
}

/// Measures both rows of each size.
pub(super) fn run(binary: &Path, quick: bool) -> Result<Vec<Row>> {
    // All of the largest node's pods take minutes to start on a small machine.
    let nodes = if quick { &NODES[..2] } else { &NODES[..] };
    let ours = {
        let containerd = Containerd::start(&workdir::target_dir().join("bench/node"))?;
        let mut options = Options::on(&containerd);
        options.binary = Some(binary.to_path_buf());
        measure(&Owner::Us(Box::new(Agent::start(options)?)), &containerd, nodes, quick)?
    };
    let peer = match kubelet::given() {
        Ok(binary) => {
            let containerd = Containerd::start(&workdir::target_dir().join("bench/peer"))?;
            let kubelet = Kubelet::start(&binary, &containerd)?;
            Some(measure(&Owner::Kubelet(kubelet), &containerd, nodes, quick)?)
        }
        Err(missing) => {
            eprintln!("not measured beside: {missing}");
            None
        }
    };
    let mut rows = Vec::new();
    for (n, (_, cpu, resident)) in nodes.iter().enumerate() {
        let (used, mib) = ours[n];
        let both = [
            Row::one("footprint", cpu, "CPU s/min", used, CPU),
            Row::one("footprint", resident, "MiB", mib, RESIDENT),
        ];
        let peers = peer.as_ref().map(|peer| [peer[n].0, peer[n].1]);
        rows.extend(both.into_iter().enumerate().map(|(kind, row)| match peers {
            Some(peers) => row.beside("kubelet", vec![peers[kind]]),
            None => row,
        }));
    }
    Ok(rows)
}

/// CPU seconds per minute, and MiB, of each size of node.
fn measure(
    owner: &Owner,
    containerd: &Containerd,
    nodes: &[(usize, &str, &str)],
    quick: bool,
) -> Result<Vec<(f64, f64)>> {
    let window = Duration::from_secs(if quick { 10 } else { 60 });
    let name = if matches!(owner, Owner::Us(_)) { "beelet" } else { "the kubelet" };
    let (mut there, mut measured) = (0, Vec::new());
    for (pods, ..) in nodes {
        let step = Step::start(format!("footprint: a node of {pods} pods, {name}"));
        for n in there..*pods {
            let name = format!("idle{n}");
            let pod = manifests::serving(&name);
            let probe = json!({ "tcpSocket": { "port": PORT }, "periodSeconds": 1 });
            owner.apply(&name, &manifests::with(pod, "readinessProbe", probe))?;
        }
        there = *pods;
        // Longer than one wait: starting a hundred pods takes its time.
        let deadline = Instant::now() + Duration::from_secs(60 + 3 * (*pods as u64));
        loop {
            let ready = ready(owner, containerd)?;
            step.detail(&format!("{ready} ready"));
            if ready >= *pods {
                break;
            }
            if Instant::now() > deadline || interrupted() {
                bail!("only {ready} of {pods} pods became ready");
            }
            std::thread::sleep(Duration::from_millis(500));
        }
        pause(REST)?;
        let pid = owner.pid()?;
        let before = cpu_of(pid)?;
        pause(window)?;
        let used = (cpu_of(pid)? - before).as_secs_f64() * 60.0 / window.as_secs_f64();
        let mib = resident_kib(pid)? as f64 / 1024.0;
        step.done(&format!("{used:.2} CPU seconds per minute, {mib:.1} MiB"));
        measured.push((used, mib));
    }
    Ok(measured)
}

/// How many pods are ready; of a kubelet's, which is not asked so that it has only its own work, how many
/// run.
fn ready(owner: &Owner, containerd: &Containerd) -> Result<usize> {
    match owner {
        Owner::Us(agent) => agent.look(|watch| watch.pods.values().filter(|pod| PodView::ready(pod)).count()),
        Owner::Kubelet(_) => block_on(running(&containerd.socket())),
    }
}

/// How many containers run.
async fn running(socket: &Path) -> Result<usize> {
    let mut cri = Cri::connect(socket).await?;
    let listed = cri.runtime.list_containers(cri::ListContainersRequest { filter: None }).await?;
    let runs = |container: &&cri::Container| container.state() == cri::ContainerState::ContainerRunning;
    Ok(listed.into_inner().containers.iter().filter(runs).count())
}

fn pause(time: Duration) -> Result<()> {
    let until = Instant::now() + time;
    while Instant::now() < until {
        if interrupted() {
            bail!("interrupted");
        }
        std::thread::sleep(Duration::from_millis(200).min(until.saturating_duration_since(Instant::now())));
    }
    Ok(())
}
