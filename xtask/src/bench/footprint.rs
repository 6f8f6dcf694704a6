//! What the agent itself takes, on a node of 1, 20 and 110 idle pods whose TCP readiness probes look once a second:
//! processor time and resident memory, from /proc. The node's pods are on a real containerd.

use super::Row;
use crate::progress::Step;
use anyhow::{Context as _, Result, bail};
use beelet_tests::agent::{Agent, Options};
use beelet_tests::containerd::Containerd;
use beelet_tests::machine::{cpu_of, resident_kib};
use beelet_tests::manifests::{self, PORT};
use beelet_tests::pods::PodView;
use beelet_tests::workdir::{self, interrupted};
use serde_json::json;
use std::path::Path;
use std::time::{Duration, Instant};

/// CPU seconds a minute, and MiB, for each size of node: what the largest may take is the promise, and the smaller ones
/// must not take more.
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

/// Measures both rows of each size.
pub(super) fn run(binary: &Path, quick: bool) -> Result<Vec<Row>> {
    let containerd = Containerd::start(&workdir::target_dir().join("bench/node"))?;
    let mut options = Options::on(&containerd);
    options.binary = Some(binary.to_path_buf());
    let agent = Agent::start(options)?;
    let window = Duration::from_secs(if quick { 10 } else { 60 });
    // All of the largest node's pods take minutes to start on a small machine.
    let nodes = if quick { &NODES[..2] } else { &NODES[..] };
    let mut rows = Vec::new();
    let mut there = 0;
    for (pods, cpu, resident) in nodes {
        let step = Step::start(format!("footprint: a node of {pods} pods"));
        for n in there..*pods {
            let name = format!("idle{n}");
            let pod = manifests::serving(&name);
            let probe = json!({ "tcpSocket": { "port": PORT }, "periodSeconds": 1 });
            let pod = manifests::with(pod, "readinessProbe", probe);
            agent.apply(&format!("{name}.yaml"), pod.to_string())?;
        }
        there = *pods;
        // Longer than one wait: starting a hundred pods takes its time.
        let deadline = Instant::now() + Duration::from_secs(60 + 3 * (*pods as u64));
        loop {
            let ready = agent.look(|watch| watch.pods.values().filter(|pod| PodView::ready(pod)).count())?;
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
        let pid = agent.pid().context("the agent has ended")?;
        let before = cpu_of(pid)?;
        pause(window)?;
        let used = (cpu_of(pid)? - before).as_secs_f64() * 60.0 / window.as_secs_f64();
        let mib = resident_kib(pid)? as f64 / 1024.0;
        step.done(&format!("{used:.2} CPU seconds a minute, {mib:.1} MiB"));
        rows.push(Row::new("footprint", cpu, "CPU s/min", vec![used], CPU));
        rows.push(Row::new("footprint", resident, "MiB", vec![mib], RESIDENT));
    }
    Ok(rows)
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
