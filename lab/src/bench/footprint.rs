//! CPU and resident memory of the agent, from /proc, on nodes of 1, 20 and 110 idle pods with a TCP readiness
//! probe per second and pod, on a real containerd. If `KUBELET` names a kubelet, the same is measured of it
//! afterwards and shown too.

use super::Row;
use super::owner::{Owner, pause};
use anyhow::Result;
use beelet_tests::agent::{Agent, Options};
use beelet_tests::containerd::Containerd;
use beelet_tests::kubelet::{self, Kubelet};
use beelet_tests::machine::{cpu_of, resident_kib};
use beelet_tests::workdir;
use std::path::Path;
use std::time::Duration;
use xtask::progress::Step;

/// Bounds in CPU seconds per minute and MiB for each size of node: the promise for the largest, which the
/// smaller ones must not exceed.
const CPU: f64 = 0.6;
const RESIDENT: f64 = 40.0;
/// Sizes, with the names of their rows.
const NODES: [(usize, &str, &str); 3] = [
    (1, "cpu_1_pod", "rss_1_pod"),
    (20, "cpu_20_pods", "rss_20_pods"),
    (110, "cpu_110_pods", "rss_110_pods"),
];
/// Idle time before a measurement.
const REST: Duration = Duration::from_secs(15);

/// Measures both rows of each size.
pub(super) fn run(binary: &Path, quick: bool) -> Result<Vec<Row>> {
    // Starting all pods of the largest node takes minutes on a small machine.
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
            eprintln!("kubelet not measured: {missing}");
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

/// Returns CPU seconds per minute and MiB for each size of node.
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
        owner.fill(containerd, there..*pods, &step)?;
        there = *pods;
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
